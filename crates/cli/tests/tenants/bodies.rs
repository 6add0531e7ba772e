//! Large bodies of clients without a key.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rig::{Rig, withstands};

const CONNECTIONS: usize = 120;
const BODY: usize = 16 << 20;
/// The pause between two pieces: this tests memory, not the network.
const PACE: Duration = Duration::from_millis(20);
/// How long the connections are held open with unfinished bodies.
const HELD: Duration = Duration::from_secs(3);

/// Sends a body except for its end, until the server responds or closes.
async fn almost_send(rig: &Rig, path: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(rig.eddy.addr).await.ok()?;
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {BODY}\r\n\r\n\"",
        rig.eddy.addr
    );
    stream.write_all(head.as_bytes()).await.ok()?;
    let piece = vec![b'x'; 64 << 10];
    let (from, mut to) = stream.split();
    for _ in 0..BODY / piece.len() - 1 {
        tokio::select! {
            sent = to.write_all(&piece) => sent.ok()?,
            // A response, or the end of the connection.
            _ = from.readable() => break,
        }
        tokio::time::sleep(PACE).await;
    }
    Some(stream)
}

#[tokio::test]
async fn bodies_without_a_key_fill_no_memory() {
    withstands(&[], async |rig| {
        let unknown = format!("/hooks/{}", "0".repeat(64));
        let paths = [unknown.as_str(), "/v1/flows/calm/runs", "/v1/tasks/report", "/v1/events"];
        let sending = (0..CONNECTIONS).map(|at| almost_send(rig, paths[if at % 4 == 0 { at / 4 % 4 } else { 0 }]));
        let held = tokio::time::timeout(Duration::from_secs(20), join_all(sending)).await;
        tokio::time::sleep(HELD).await;
        for mut stream in held.unwrap_or_default().into_iter().flatten() {
            let mut answer = [0; 12];
            let read = tokio::time::timeout(Duration::from_millis(10), stream.read_exact(&mut answer)).await;
            if matches!(read, Ok(Ok(_))) {
                let answer = String::from_utf8_lossy(&answer);
                assert!(!answer.starts_with("HTTP/1.1 2"), "it was accepted: {answer}");
            }
        }
    })
    .await;
}
