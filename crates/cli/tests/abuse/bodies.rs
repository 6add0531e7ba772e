//! Large, many and unfinished bodies.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bystander::{memory, undisturbed};
use crate::eddy::{Eddy, LONG};
use crate::raw::status;

/// How many requests are sent at once.
const MANY: usize = 120;
/// How much the memory of the server may grow.
const FLAT_KB: u64 = 60 << 10;

/// Sends the head of a request and up to `sent` bytes of its body, keeps the connection open, and returns the status of
/// the response.
async fn send(eddy: &Eddy, path: &str, declared: usize, sent: usize) -> Option<u16> {
    let stream = TcpStream::connect(eddy.addr).await.unwrap();
    let (mut from, mut to) = stream.into_split();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: text/plain\r\ncontent-length: {declared}\r\n\r\n",
        eddy.addr
    );
    let sending = async {
        let piece = vec![b'x'; 64 << 10];
        to.write_all(head.as_bytes()).await?;
        for _ in 0..sent / piece.len() {
            to.write_all(&piece).await?;
        }
        Ok::<_, std::io::Error>(())
    };
    let receiving = async {
        let mut first = [0; 12];
        from.read_exact(&mut first).await.ok().and_then(|_| status(&String::from_utf8_lossy(&first)))
    };
    let both = async { tokio::join!(sending, receiving).1 };
    tokio::time::timeout(LONG, both).await.expect("the server neither answers nor closes")
}

#[tokio::test]
async fn webhooks_nobody_waits_for_with_bodies_of_16_mib() {
    undisturbed(&[], async |eddy| {
        let before = memory(eddy, "VmHWM");
        let unknown = format!("/hooks/{}", "0".repeat(64));
        let path = unknown.as_str();
        // All but the last piece: a server that reads bodies first would have all of them in memory now.
        let sent = (16 << 20) - (64 << 10);
        let answers = join_all((0..MANY).map(|_| send(eddy, path, 16 << 20, sent))).await;
        assert!(answers.iter().all(|status| *status == Some(404)), "{answers:?}");
        let grown = memory(eddy, "VmHWM") - before;
        assert!(grown < FLAT_KB, "{MANY} bodies took {} MiB", grown >> 10);
    })
    .await;
}

#[tokio::test]
async fn a_webhook_takes_no_more_than_a_payload() {
    undisturbed(&[], async |eddy| {
        let client = eddy.client();
        client.register_flow("hooked", "{steps: {ask: {await: {webhook: true}}}}").await.unwrap();
        let run = client.start("hooked", &json!(null)).await.unwrap();
        let gates: Value = client
            .call(eddyline::Method::GET, "/v1/gates", &[("run", run.id().to_owned())], None::<&()>)
            .await
            .unwrap();
        let token = gates["items"][0]["token"].as_str().unwrap();
        for path in [format!("/hooks/{token}"), format!("/v1/gates/{token}")] {
            assert_eq!(send(eddy, &path, 3 << 20, 0).await, Some(413), "not refused before the body");
        }
        assert_eq!(send(eddy, &format!("/hooks/{token}"), 1 << 20, 1 << 20).await, Some(200));
    })
    .await;
}

/// The budget is 16 MiB, of which a namespace may use a quarter: two bodies of 2 MiB.
#[tokio::test]
async fn bodies_beyond_the_budget_wait_and_are_refused_and_small_ones_go_through() {
    undisturbed(&["--body-memory", "16MiB"], async |eddy| {
        // The bodies never end, and are cut off after a timeout.
        let unfinished = join_all((0..MANY).map(|_| send(eddy, "/v1/events", 2 << 20, 1 << 20)));
        let answers = unfinished.await;
        let count = |wanted: u16| answers.iter().filter(|status| **status == Some(wanted)).count();
        assert!(count(503) > MANY / 2, "{answers:?}");
        assert_eq!(count(503) + count(408), MANY, "{answers:?}");
    })
    .await;
}

#[tokio::test]
async fn a_body_that_comes_fast_at_first_and_then_trickles_is_cut_off() {
    undisturbed(&[], async |eddy| {
        let mut stream = TcpStream::connect(eddy.addr).await.unwrap();
        let head = format!(
            "POST /v1/events HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: 10000000\r\n\r\n",
            eddy.addr
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&vec![b' '; 1_000_000]).await.unwrap();
        let mut answer = Vec::new();
        for _ in 0..20 {
            let sent = stream.write_all(b" ").await;
            let second = tokio::time::timeout(Duration::from_secs(1), stream.read_to_end(&mut answer)).await;
            if sent.is_err() || second.is_ok() {
                assert!(answer.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&answer));
                return;
            }
        }
        panic!("the server waited for 20 seconds");
    })
    .await;
}
