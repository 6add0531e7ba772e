//! Cancel, pause and webhooks take effect on running handlers and waiting steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use eddyline::protocol::Code;
use eddyline::{Client, Method, StepCtx, StepError, Worker};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::eddy::{Eddy, LONG};
use crate::timeline::check;
use crate::working::{TRANSPORTS, Transport, work};

/// A socket is notified at once; over plain HTTP a worker learns of it by its next heartbeat, at most a third of a lease
/// later.
const LEASE: &str = "3s";
const PROMPTLY: Duration = Duration::from_secs(3);

#[tokio::test]
async fn cancel_reaches_a_handler_at_work() {
    let eddy = Eddy::start(&["--lease", LEASE]);
    let client = eddy.client();
    client.register_flow("f", "{steps: {a: {run: wait}}}").await.unwrap();
    for transport in TRANSPORTS {
        let (events_tx, mut events_rx) = mpsc::unbounded_channel();
        let handler = move |ctx: StepCtx, (): ()| {
            let events_tx = events_tx.clone();
            async move {
                events_tx.send("begun").unwrap();
                ctx.cancelled().await;
                events_tx.send("cancelled").unwrap();
                Ok::<_, StepError>("too late")
            }
        };
        let worker = work(Worker::connect(eddy.url()).handler("wait", handler), transport);
        let run = client.start("f", &json!(null)).await.unwrap();
        assert_eq!(events_rx.recv().await, Some("begun"));
        let asked = Instant::now();
        assert_eq!(run.cancel(Some("enough")).await.unwrap().status, "cancelled");
        assert_eq!(events_rx.recv().await, Some("cancelled"));
        let took = asked.elapsed();
        assert!(took < PROMPTLY, "{transport:?}: {took:?}");
        check(&client, run.id()).await;
        worker.stop().await;
        assert_eq!(run.info().await.unwrap().status, "cancelled");
    }
}

#[tokio::test]
async fn a_paused_run_offers_nothing_until_it_is_resumed() {
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("f", "{steps: {a: {run: work}, b: {after: [a], run: work}}}").await.unwrap();
    let run = client.start("f", &json!(null)).await.unwrap();
    assert_eq!(run.pause().await.unwrap().status, "paused");
    let worker = work(
        Worker::connect(eddy.url()).handler("work", async |_: StepCtx, _: Value| Ok::<_, StepError>(1)),
        Transport::Socket,
    );
    // Another run completes, so the worker is online and would have claimed the paused one.
    let other = client.start("f", &json!(null)).await.unwrap();
    other.result::<Value>().await.unwrap();
    assert_eq!(run.info().await.unwrap().status, "paused");
    assert!(
        crate::timeline::records(&client, run.id()).await.iter().all(|record| record.kind != "step.attempt.started")
    );
    run.resume().await.unwrap();
    run.result::<Value>().await.unwrap();
    check(&client, run.id()).await;
    worker.stop().await;
}

#[tokio::test]
async fn a_webhook_opens_a_gate_once() {
    let mut eddy = Eddy::start(&[]);
    let client = eddy.client();
    let flow = r#"
steps:
  ask: {run: ask, input: {link: "${gates.approve.url}"}}
  approve: {after: [ask], await: {webhook: true, timeout: 1h, on_timeout: fail}}
output: "${steps.approve.output}"
"#;
    client.register_flow("f", flow).await.unwrap();
    let (events_tx, mut events_rx) = mpsc::unbounded_channel();
    let events_tx = Arc::new(events_tx);
    let ask = move |_: StepCtx, input: Value| {
        let events_tx = events_tx.clone();
        async move {
            events_tx.send(input["link"].as_str().unwrap().to_owned()).unwrap();
            Ok::<_, StepError>(json!(null))
        }
    };
    let worker = work(Worker::connect(eddy.url()).handler("ask", ask), Transport::Http);
    let run = client.start("f", &json!(null)).await.unwrap();
    let link = tokio::time::timeout(LONG, events_rx.recv()).await.unwrap().unwrap();
    let path = link.strip_prefix(&eddy.url()).unwrap().to_owned();
    // The link is still valid after a restart.
    eddy.kill();
    eddy.restart();
    let client = eddy.client();
    let hook =
        async |client: &Client, body: &str| client.send_text::<Value>(Method::POST, &path, "text/plain", body).await;
    let looked = client.call::<Value>(Method::GET, &path, &[], None::<&()>).await.unwrap_err();
    assert_eq!(looked.code(), Some(Code::MethodNotAllowed), "a GET opened the gate");
    hook(&client, "{\"ok\": true}").await.unwrap();
    assert_eq!(run.result::<Value>().await.unwrap(), json!({"ok": true}));
    assert!(hook(&client, "{\"ok\": false}").await.unwrap_err().is_conflict());
    check(&client, run.id()).await;
    worker.stop().await;
}
