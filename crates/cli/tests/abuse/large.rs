//! Large bodies, deep nesting and large heads.

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::bystander::undisturbed;
use crate::eddy::Eddy;
use crate::raw::{request, say, status};

const HUNDRED_MB: usize = 100 << 20;
const DEEP: usize = 10_000;

/// Sends a body in chunks until the server responds, and returns the status.
async fn send_chunks(eddy: &Eddy) -> Option<u16> {
    let stream = TcpStream::connect(eddy.addr).await.unwrap();
    let (mut from, mut to) = stream.into_split();
    let head = format!(
        "POST /v1/flows/calm/runs HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
         transfer-encoding: chunked\r\n\r\n",
        eddy.addr
    );
    let sending = async {
        let chunk = format!("10000\r\n{}\r\n", "x".repeat(64 << 10));
        to.write_all(head.as_bytes()).await?;
        for _ in 0..HUNDRED_MB / (64 << 10) {
            to.write_all(chunk.as_bytes()).await?;
        }
        to.write_all(b"0\r\n\r\n").await
    };
    let receiving = async {
        let mut first = [0; 12];
        from.read_exact(&mut first).await.ok().and_then(|_| status(&String::from_utf8_lossy(&first)))
    };
    tokio::join!(sending, receiving).1
}

#[tokio::test]
async fn bodies_of_a_hundred_megabytes() {
    undisturbed(&[], async |eddy| {
        let declared = format!(
            "POST /v1/flows/calm/runs HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: {HUNDRED_MB}\r\n\r\n",
            eddy.addr
        );
        for said in join_all((0..50).map(|_| say(eddy.addr, declared.as_bytes()))).await {
            assert_eq!(status(&said), Some(413), "{said}");
        }
        // `None`: the connection was reset before the response arrived. 503: the body waited for memory in vain.
        let stopped = join_all((0..8).map(|_| send_chunks(eddy))).await;
        assert!(stopped.iter().all(|status| matches!(status, Some(413 | 503) | None)), "{stopped:?}");
    })
    .await;
}

#[tokio::test]
async fn bodies_just_below_the_limit_all_at_once() {
    undisturbed(&[], async |eddy| {
        let body = format!("{{\"input\": \"{}\"}}", "x".repeat(15 << 20));
        let sent = request(eddy.addr, "POST", "/v1/flows/calm/runs", &body);
        for said in join_all((0..4).map(|_| say(eddy.addr, &sent))).await {
            assert_eq!(status(&said), Some(413), "over the limit of a payload: {said}");
        }
    })
    .await;
}

#[tokio::test]
async fn bodies_nested_ten_thousand_deep() {
    undisturbed(&[], async |eddy| {
        let client = eddy.client();
        let flow = "{steps: {ask: {await: {webhook: true}}, by: {await: {manual: true}}}}";
        client.register_flow("gated", flow).await.unwrap();
        let run = client.start("gated", &json!(null)).await.unwrap();
        let gates: Value = client
            .call(eddyline::Method::GET, "/v1/gates", &[("run", run.id().to_owned())], None::<&()>)
            .await
            .unwrap();
        let token = |reason: &str| {
            let gates = gates["items"].as_array().unwrap();
            let gate = gates.iter().find(|gate| gate["reason"] == reason).unwrap();
            gate["token"].as_str().unwrap().to_owned()
        };
        let lists = format!("{}{}", "[".repeat(DEEP), "]".repeat(DEEP));
        let maps = format!("{}1{}", "{\"a\":".repeat(DEEP), "}".repeat(DEEP));
        let (webhook, manual) = (format!("/hooks/{}", token("webhook")), format!("/v1/gates/{}", token("manual")));
        let run = run.id();
        let places: [(&str, String, &str); 16] = [
            ("PUT", "/v1/flows/deep".to_owned(), "DEEP"),
            ("PUT", "/v1/flows/deep".to_owned(), "{\"steps\": {\"a\": {\"set\": DEEP}}}"),
            ("PUT", "/v1/flows/deep".to_owned(), "{\"steps\": {\"a\": {\"set\": 1}}, \"input_schema\": DEEP}"),
            ("POST", "/v1/flows/calm/runs".to_owned(), "{\"input\": DEEP}"),
            ("POST", "/v1/runs/batch".to_owned(), "[{\"flow\": \"calm\", \"input\": DEEP}]"),
            ("POST", "/v1/tasks/report".to_owned(), "{\"reports\": [{\"op\": \"complete\", \"output\": DEEP}]}"),
            ("POST", "/v1/tasks/claim".to_owned(), "{\"queues\": DEEP}"),
            ("POST", "/v1/events".to_owned(), "{\"name\": \"e\", \"payload\": DEEP}"),
            ("POST", "/v1/events".to_owned(), "[{\"name\": \"e\", \"key\": DEEP}]"),
            ("POST", manual, "DEEP"),
            ("POST", webhook, "DEEP"),
            ("POST", "/v1/workers".to_owned(), "{\"labels\": DEEP}"),
            ("PUT", "/v1/queues/q".to_owned(), "DEEP"),
            ("POST", format!("/v1/runs/{run}/cancel"), "DEEP"),
            ("POST", format!("/v1/runs/{run}/steps/ask/complete"), "{\"output\": DEEP}"),
            ("POST", format!("/v1/runs/{run}/rerun"), "{\"input\": DEEP}"),
        ];
        for (method, path, body) in places {
            for deep in [&lists, &maps] {
                let said = say(eddy.addr, &request(eddy.addr, method, &path, &body.replace("DEEP", deep))).await;
                assert!(matches!(status(&said), Some(400 | 413 | 422)), "{method} {path}: {said}");
            }
        }
        // Nesting without brackets: YAML by indentation, and expressions.
        let indented: String = (0..2_000).map(|depth| format!("{}- \n", " ".repeat(depth))).collect();
        let expression = json!({"steps": {"a": {"set": format!("${{{}1{}}}", "(".repeat(DEEP), ")".repeat(DEEP))}}});
        for body in [indented, expression.to_string()] {
            let text = String::from_utf8(request(eddy.addr, "PUT", "/v1/flows/deep", &body)).unwrap();
            let said = say(eddy.addr, text.replace("application/json", "application/yaml").as_bytes()).await;
            assert!(matches!(status(&said), Some(400 | 422)), "{said}");
        }
    })
    .await;
}

#[tokio::test]
async fn heads_of_a_megabyte_and_of_a_thousand_lines() {
    undisturbed(&[], async |eddy| {
        let head = |line: &str| format!("GET /healthz HTTP/1.1\r\nhost: {}\r\n{line}\r\n", eddy.addr).into_bytes();
        let heads = [
            head(&format!("x: {}\r\n", "y".repeat(1 << 20))),
            head(&"x: y\r\n".repeat(1_000)),
            head(&format!("{}: y\r\n", "x".repeat(100_000))),
            format!("GET /{} HTTP/1.1\r\nhost: {}\r\n\r\n", "x".repeat(1 << 20), eddy.addr).into_bytes(),
        ];
        for head in heads {
            let said = say(eddy.addr, &head).await;
            assert!(matches!(status(&said), Some(400 | 414 | 431) | None), "{said}");
        }
    })
    .await;
}
