//! Limits hold, and a client that hits one does not block others.

use eddyline_protocol::Span;
use eddyline_server::{KeysMode, ServeArgs};
use hyper::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{ADMIN_KEY, Client, Rig, args};

/// The server's response to raw bytes, until it closes.
async fn raw(client: &Client, text: &str) -> String {
    let mut stream = TcpStream::connect(client.addr).await.unwrap();
    let _ = stream.write_all(text.as_bytes()).await;
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said).await;
    String::from_utf8_lossy(&said).into_owned()
}

#[tokio::test]
async fn bodies_have_a_limit_declared_or_not() {
    let rig = Rig::with(ServeArgs { max_body: Some(1_000), ..args() }).await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let large = rig.post("/v1/flows/f/runs", json!({"input": "x".repeat(2_000)})).await;
    assert_eq!(large.code(), (413, "too_large"));
    let host = rig.addr;
    let declared = format!("POST /v1/flows/f/runs HTTP/1.1\r\nhost: {host}\r\ncontent-length: 999999\r\n\r\n");
    assert!(raw(&rig, &declared).await.starts_with("HTTP/1.1 413"), "before a byte of it was sent");
    let chunk = format!("7d0\r\n{}\r\n0\r\n\r\n", "x".repeat(2_000));
    let chunked =
        format!("POST /v1/flows/f/runs HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: chunked\r\n\r\n{chunk}");
    assert!(raw(&rig, &chunked).await.starts_with("HTTP/1.1 413"));
    rig.server.stop().await;
}

/// The response to a client that sends its whole body before it reads, as many do.
async fn sent_whole(client: &Client, bytes: usize) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(client.addr).await?;
    let head = format!("POST /v1/events HTTP/1.1\r\nhost: {}\r\ncontent-length: {bytes}\r\n\r\n", client.addr);
    stream.write_all(head.as_bytes()).await?;
    let chunk = vec![b'x'; 64 << 10];
    for _ in 0..bytes / chunk.len() {
        stream.write_all(&chunk).await?;
    }
    let mut said = Vec::new();
    stream.read_to_end(&mut said).await?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

#[tokio::test]
async fn whoever_sends_too_much_before_listening_hears_that_it_was_too_much() {
    let rig = Rig::start().await;
    for megabytes in [17, 40] {
        let said = sent_whole(&rig, megabytes << 20).await.unwrap();
        assert!(said.starts_with("HTTP/1.1 413") && said.contains("too_large"), "{megabytes} MiB: {said}");
    }
    // Far beyond the limit nothing is read, and a client that sends `Expect` is refused immediately.
    let since = std::time::Instant::now();
    assert!(sent_whole(&rig, 200 << 20).await.is_err());
    let asked = format!(
        "POST /v1/events HTTP/1.1\r\nhost: {}\r\nexpect: 100-continue\r\ncontent-length: 20000000\r\n\r\n",
        rig.addr
    );
    assert!(raw(&rig, &asked).await.starts_with("HTTP/1.1 413"));
    assert!(since.elapsed() < std::time::Duration::from_secs(4), "{:?}", since.elapsed());
    rig.server.stop().await;
}

#[tokio::test]
async fn json_is_checked_before_it_is_parsed() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let post =
        async |content_type, body: String| rig.send(Method::POST, "/v1/flows/f/runs", content_type, body.into()).await;
    let json = Some("application/json");
    let deep = post(json, format!("{{\"input\": {}{}}}", "[".repeat(50_000), "]".repeat(50_000))).await;
    assert_eq!(deep.code(), (400, "bad_request"));
    let deeper_than_a_payload = post(json, format!("{{\"input\": {}{}}}", "[".repeat(68), "]".repeat(68))).await;
    assert_eq!(deeper_than_a_payload.code(), (422, "invalid"));
    let broken = post(json, "{\n\"input\": nope}".to_owned()).await;
    assert_eq!(broken.code(), (400, "bad_request"));
    assert_eq!((&broken.body["error"]["details"][0]["line"]), &json!(2));
    assert_eq!(post(json, "{\"tags\": 5}".to_owned()).await.code(), (400, "bad_request"));
    assert_eq!(post(json, "[null, 5]".to_owned()).await.code(), (400, "bad_request"), "no fields by their order");
    for (path, body) in
        [("/v1/events", json!([["e"]])), ("/v1/events", json!(["e"])), ("/v1/tasks/report", json!({"claim": [1]}))]
    {
        assert_eq!(rig.post(path, body).await.code(), (400, "bad_request"), "{path}");
    }
    let form = post(Some("application/x-www-form-urlencoded"), "{}".to_owned()).await;
    assert_eq!(form.code(), (415, "unsupported_media_type"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_slow_client_is_dropped_while_others_go_on() {
    let header_timeout = Some(Span::from_ms(300));
    let rig = Rig::with(ServeArgs { header_timeout, max_connections: Some(2), ..args() }).await;
    let mut slow = TcpStream::connect(rig.addr).await.unwrap();
    slow.write_all(b"GET /healthz HTTP/1.1\r\nhost: ").await.unwrap();
    assert_eq!(rig.get("/healthz").await.status, 200);
    let mut said = Vec::new();
    // The server must end it, or this would wait for ever.
    slow.read_to_end(&mut said).await.unwrap();
    assert!(!String::from_utf8_lossy(&said).contains("200 OK"));
    assert_eq!(rig.get("/healthz").await.status, 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_at_once() {
    let rig = Rig::with(ServeArgs { max_connections: Some(2), ..args() }).await;
    // A request on each connection ensures that it was accepted before the next one.
    let request = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n\r\n", rig.addr);
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(rig.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut some = [0; 12];
        stream.read_exact(&mut some).await.unwrap();
        assert_eq!(&some, b"HTTP/1.1 200");
        open.push(stream);
    }
    assert_eq!(raw(&rig, &request).await, "");
    drop(open);
    rig.server.stop().await;
}

#[tokio::test]
async fn heads_and_long_polls_have_limits() {
    let rig = Rig::with(ServeArgs { max_long_polls: Some(0), ..args() }).await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let many = rig.get(&format!("/v1/runs/{run}/result?wait=1s")).await;
    assert_eq!(many.code(), (429, "too_many"));
    assert!(many.headers.contains_key("retry-after"));
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result")).await.status, 202);
    assert_eq!(rig.post("/v1/tasks/claim", json!({"worker_id": "w", "wait_ms": 5})).await.status, 429);
    let head = format!("GET /healthz HTTP/1.1\r\nhost: {}\r\nx: {}\r\n\r\n", rig.addr, "y".repeat(40 << 10));
    assert!(raw(&rig, &head).await.starts_with("HTTP/1.1 431"));
    rig.server.stop().await;
}

#[tokio::test]
async fn one_namespace_gets_half_of_the_waiting_requests() {
    let admin_key = Some(ADMIN_KEY.to_owned());
    let settings = ServeArgs { max_long_polls: Some(4), keys: Some(KeysMode::On), admin_key, ..args() };
    let mut rig = Rig::with(settings).await;
    rig.client.key = Some(ADMIN_KEY.to_owned());
    let of = async |namespace: &str| {
        let made = rig.post("/v1/keys", json!({"name": "t", "scopes": ["admin"], "namespace": namespace})).await;
        rig.with_key(&made.text("key"))
    };
    let (one, two) = (of("one").await, of("two").await);
    let waits = |client: &Client, ms: u64| {
        let client = client.clone();
        async move { client.post("/v1/tasks/claim", json!({"worker_id": "w", "wait_ms": ms})).await }
    };
    let open = [tokio::spawn(waits(&one, 60_000)), tokio::spawn(waits(&one, 60_000))];
    rig.until_waiting(2).await;
    let refused = waits(&one, 10).await;
    assert_eq!(refused.code(), (429, "too_many"));
    assert!(refused.headers.contains_key("retry-after"));
    assert!(refused.body.to_string().contains("the namespace has used its whole share"), "{}", refused.body);
    assert_eq!(waits(&two, 10).await.status, 200);
    assert_eq!(one.post("/v1/tasks/claim", json!({"worker_id": "w"})).await.status, 200, "it does not wait");
    open.iter().for_each(|waits| waits.abort());
    rig.until_waiting(0).await;
    assert_eq!(waits(&one, 10).await.status, 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_claims_from_a_hundred_queues_at_most() {
    let rig = Rig::start().await;
    let queues = |count: usize| (0..count).map(|at| format!("q{at}")).collect::<Vec<_>>();
    for (count, status) in [(100, 200), (101, 400)] {
        let claim = json!({"worker_id": "w", "queues": queues(count)});
        assert_eq!(rig.post("/v1/tasks/claim", claim).await.status, status, "{count}");
        let registered = rig.post("/v1/workers", json!({"queues": queues(count)})).await;
        assert_eq!(registered.status >= 400, status == 400, "{count}: {}", registered.body);
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn names_and_labels_are_not_for_keeping_data() {
    let rig = Rig::start().await;
    let long = "x".repeat(513);
    for (path, body) in [
        ("/v1/workers", json!({"host": long, "pid": 1})),
        ("/v1/workers", json!({"instance": long})),
        ("/v1/workers", json!({"labels": [long]})),
        ("/v1/workers", json!({"flows": {"f": long}})),
        ("/v1/tasks/claim", json!({"worker_id": long})),
        ("/v1/tasks/report", json!({"worker_id": long, "reports": []})),
        ("/v1/events", json!([{"name": "e", "id": long}])),
        ("/v1/keys", json!({"name": long, "scopes": ["read"]})),
    ] {
        assert_eq!(rig.post(path, body).await.code(), (422, "invalid"), "{path}");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn pages_are_shorter_where_there_is_much_on_them() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {each: {spread: input, run: a}}").await;
    let run = rig.run("f", json!([0, 1, 2, 3, 4, 5])).await;
    for _ in 0..6 {
        let task = rig.claim("w").await;
        let logs: Vec<_> = (0..20).map(|_| json!({"msg": "y".repeat(60_000)})).collect();
        let done = json!({"op": "complete", "output": "x".repeat(1_500_000), "logs": logs});
        assert_eq!(rig.report(&task, done).await["outcome"], "applied");
    }
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "completed");
    let steps = pages(&rig, &format!("/v1/runs/{run}/steps?limit=1000"), "cursor").await;
    assert!(steps.len() > 1 && steps.concat().len() == 7, "{:?}", steps.iter().map(Vec::len).collect::<Vec<_>>());
    let records = pages(&rig, &format!("/v1/streams/nq:flow:{run}?limit=1000"), "after").await;
    let ids: Vec<u64> = records.concat().iter().map(|record| record["id"].as_str().unwrap().parse().unwrap()).collect();
    assert!(records.len() > 1 && ids == (1..=ids.len() as u64).collect::<Vec<_>>(), "{ids:?}");
    assert_eq!(records.concat().last().unwrap()["kind"], "flow.completed");
    rig.server.stop().await;
}

/// All pages from the first on.
async fn pages(client: &Client, path: &str, from: &str) -> Vec<Vec<serde_json::Value>> {
    let mut pages = Vec::new();
    let mut next = path.to_owned();
    loop {
        let page = client.get(&next).await;
        pages.push(page.items().clone());
        // The combined output of all items is one value of nine megabytes.
        assert!(page.body.to_string().len() < 12 << 20, "a page of {} bytes", page.body.to_string().len());
        match page.body["next"].as_str() {
            Some(after) => next = format!("{path}&{from}={after}"),
            None => return pages,
        }
    }
}

#[tokio::test]
async fn a_connection_stays_open_after_bodies_that_nobody_reads() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let mut stream = tokio::net::TcpStream::connect(rig.addr).await.unwrap();
    let unread = " ".repeat(100_000);
    let calls = [
        ("POST", format!("/v1/runs/{run}/pause"), "200"),
        ("POST", format!("/v1/runs/{run}/resume"), "200"),
        ("POST", "/nowhere".to_owned(), "404"),
        ("PATCH", "/v1/runs".to_owned(), "405"),
        ("DELETE", format!("/v1/runs/{run}"), "409"),
        ("POST", "/v1/queues/default/pause".to_owned(), "200"),
    ];
    for (method, path, status) in calls.iter().cycle().take(60) {
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\n\r\n", rig.addr, unread.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        // The response may arrive before the body is sent.
        tokio::task::yield_now().await;
        stream.write_all(unread.as_bytes()).await.unwrap();
        let answer = one_answer(&mut stream).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{method} {path}: {answer}");
    }
    rig.server.stop().await;
}

/// A head with a length, and that many bytes.
async fn one_answer(stream: &mut tokio::net::TcpStream) -> String {
    let mut answer = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&answer).to_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            if body.len() >= length.parse().unwrap() {
                return String::from_utf8(answer).unwrap();
            }
        }
        let byte = stream.read_u8().await.expect("the connection was closed");
        answer.push(byte);
    }
}

#[tokio::test]
async fn what_is_refused_is_quoted_in_part() {
    let rig = Rig::start().await;
    rig.flow("f", "input_schema: {type: object, additionalProperties: {type: integer}}\nsteps: {a: {set: 1}}").await;
    let fields: serde_json::Map<_, _> = (0..50).map(|n| (format!("f{n}"), json!("x".repeat(30_000)))).collect();
    let refused = rig.post("/v1/flows/f/runs", json!({ "input": fields })).await;
    assert_eq!(refused.code(), (422, "invalid"));
    assert!(refused.body.to_string().len() < 100_000, "{} bytes", refused.body.to_string().len());
    let starts: Vec<_> = (0..20).map(|_| json!({"flow": "f", "input": {"a": "x".repeat(500_000)}})).collect();
    let batch = rig.post("/v1/runs/batch", json!(starts)).await;
    assert_eq!(batch.body["items"][19]["error"]["code"], "invalid");
    assert!(batch.body.to_string().len() < 20 * 4_000, "{} bytes", batch.body.to_string().len());
    rig.server.stop().await;
}
