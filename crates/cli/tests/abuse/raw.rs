//! Bytes, without a client that would keep them in order.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The server closes, or has said all there is to say, long before.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the server answers to `bytes`, until it closes.
pub async fn say(addr: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let (mut from, mut to) = stream.split();
    let saying = to.write_all(bytes);
    let mut said = Vec::new();
    let hearing = async {
        let mut piece = [0; 4096];
        // A reset after the answer is an end like any other.
        while let Ok(read @ 1..) = from.read(&mut piece).await {
            said.extend_from_slice(&piece[..read]);
        }
    };
    let both = async { tokio::join!(saying, hearing) };
    // It need not take all of it before it has had enough.
    let _ = tokio::time::timeout(PATIENCE, both).await.expect("the server neither answers nor closes");
    String::from_utf8_lossy(&said).into_owned()
}

/// The status of an answer; none if there was no answer.
pub fn status(said: &str) -> Option<u16> {
    said.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
}

/// A request with a body of JSON.
pub fn request(addr: SocketAddr, method: &str, path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}
