//! Raw bytes over TCP, without an HTTP client.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The server responds and closes long before this.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sends `bytes`, and returns everything the server sends until it closes.
pub async fn say(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let (mut from, mut to) = stream.split();
    let sending = to.write_all(bytes);
    let mut said = Vec::new();
    let receiving = async {
        let mut piece = [0; 4096];
        // A reset after the response counts as the end.
        while let Ok(read @ 1..) = from.read(&mut piece).await {
            said.extend_from_slice(&piece[..read]);
        }
    };
    let both = async { tokio::join!(sending, receiving) };
    // The server may close before it has read everything.
    let _ = tokio::time::timeout(PATIENCE, both).await.expect("the server neither answers nor closes");
    String::from_utf8_lossy(&said).into_owned()
}

/// The status of a response; `None` if there was no response.
pub fn status(said: &str) -> Option<u16> {
    said.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}

/// A request with a JSON body.
pub fn request(addr: SocketAddr, method: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}
