//! Slow clients.

use std::time::Duration;

use eddyline::Client;
use eddyline::protocol::Reference;
use futures_util::future::join_all;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::bystander::undisturbed;
use crate::eddy::{Eddy, LONG, metric};

/// How many slow clients of each kind there are.
const SLOW: usize = 100;
/// The responses of this many readers, 2 MB each, exceed the response memory of the server.
const READERS: usize = 200;
/// A list of many elements, each small enough to be stored inline, with about as many bytes in total.
const ELEMENTS: usize = 10_000;
const ELEMENT_BYTES: usize = 240;

/// Sends one byte per second until the server responds or closes the connection.
async fn drip(eddy: &Eddy, bytes: &[u8]) {
    let mut stream = TcpStream::connect(eddy.addr).await.unwrap();
    let mut answer = Vec::new();
    for byte in bytes {
        if stream.write_all(&[*byte]).await.is_err() {
            return;
        }
        // Waits a second for a response or the end of the connection.
        let second = tokio::time::timeout(Duration::from_secs(1), stream.read_to_end(&mut answer)).await;
        if second.is_ok() {
            assert!(!String::from_utf8_lossy(&answer).starts_with("HTTP/1.1 2"));
            return;
        }
    }
    panic!("the server waited for {} seconds", bytes.len());
}

#[tokio::test]
async fn a_byte_a_second() {
    undisturbed(&["--header-timeout", "2s"], async |eddy| {
        let head = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n", eddy.addr);
        let body = format!(
            "POST /v1/flows/calm/runs HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: 1000\r\n\r\n",
            eddy.addr
        );
        let heads = join_all((0..SLOW).map(|_| drip(eddy, head.as_bytes())));
        let bodies = join_all((0..SLOW).map(|_| async {
            let mut stream = TcpStream::connect(eddy.addr).await.unwrap();
            stream.write_all(body.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            for _ in 0..LONG.as_secs() {
                if stream.write_all(b" ").await.is_err() {
                    return;
                }
                if tokio::time::timeout(Duration::from_secs(1), stream.read_to_end(&mut answer)).await.is_ok() {
                    assert!(String::from_utf8_lossy(&answer).starts_with("HTTP/1.1 408"));
                    return;
                }
            }
            panic!("the server waited for a whole minute");
        }));
        tokio::join!(heads, bodies);
    })
    .await;
}

/// A run with an input of nearly two megabytes.
async fn large_run(client: &Client) -> String {
    client.register_flow("large", "{steps: {a: {set: 1}}}").await.unwrap();
    let run = client.start("large", &json!("x".repeat(2_000_000))).await.unwrap();
    run.result::<u64>().await.ok();
    run.id().to_owned()
}

#[tokio::test]
async fn readers_that_do_not_read_what_they_asked_for() {
    undisturbed(&[], async |eddy| {
        let run = large_run(&eddy.client()).await;
        crowd_until_refused(eddy, &format!("/v1/runs/{run}")).await;
    })
    .await;
}

/// The path of the output of a run: a list of many inline elements.
async fn list_of_many(client: &Client) -> String {
    let steps = json!({"a": {"set": "x".repeat(ELEMENT_BYTES)}});
    let each = json!({"spread": format!("range({ELEMENTS})"), "steps": steps, "output": "${steps.a.output}"});
    let flow = json!({"steps": {"each": each}, "output": "${steps.each.output}"});
    client.register_flow("many", &flow.to_string()).await.unwrap();
    let run = client.start("many", &json!(null)).await.unwrap();
    let output = run.wait(LONG).await.unwrap().expect("the run ends").output;
    let reference = Reference::read(&output).unwrap_or_else(|| panic!("{output} is not a reference"));
    let (run, key) = reference.parts().unwrap();
    format!("/v1/runs/{run}/values/{key}")
}

#[tokio::test]
async fn readers_of_a_list_of_many_elements_that_do_not_read_it() {
    undisturbed(&[], async |eddy| {
        let path = list_of_many(&eddy.client()).await;
        crowd_until_refused(eddy, &path).await;
    })
    .await;
}

/// Adds readers that read only the beginning of their response, until the server refuses one because its response
/// memory is used up.
async fn crowd_until_refused(eddy: &Eddy, path: &str) {
    // The first responses may fit into the socket buffers; then the server is blocked on the next one.
    let request = format!("GET {path} HTTP/1.1\r\nhost: {}\r\n\r\n", eddy.addr).repeat(3);
    let mut slow = Vec::new();
    while metric(eddy, "eddyline_answers_refused_total").await == 0.0 {
        assert!(slow.len() < READERS, "the server buffers without a limit");
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4 << 10).unwrap();
        let mut stream = socket.connect(eddy.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.unwrap();
        assert!(matches!(&first, b"HTTP/1.1 200" | b"HTTP/1.1 429"), "{}", String::from_utf8_lossy(&first));
        slow.push(stream);
    }
    drop(slow);
}
