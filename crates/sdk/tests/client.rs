//! The client against scripted responses: what it sends, how it interprets responses, and when it retries.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake;

use std::time::Duration;

use eddyline::protocol::{Code, PublishEvent};
use eddyline::{Client, Error, RunFilter};
use fake::{Fake, Scripted};
use http::Method;
use serde_json::{Value, json};

async fn served() -> (Fake, Client) {
    let fake = Fake::new().await;
    let client = Client::new(&fake.url).unwrap();
    (fake, client)
}

fn script(fake: &Fake, status: u16, retry_after: Option<u64>, body: &str) {
    let body = body.to_owned();
    fake.set(|state| state.scripted.push_back(Scripted::Answer { status, retry_after, body }));
}

fn cut(fake: &Fake) {
    fake.set(|state| state.scripted.push_back(Scripted::Cut));
}

fn asked(fake: &Fake) -> Vec<String> {
    fake.set(|state| state.seen.iter().map(|seen| format!("{} {}", seen.method, seen.path)).collect())
}

#[tokio::test]
async fn a_refusal_says_what_is_wrong_to_people_and_to_programs() {
    let (fake, client) = served().await;
    let problem = json!({"path": "steps.pay.after", "message": "there is no step `lod`", "line": 3, "column": 9});
    fake.script(
        422,
        json!({"error": {"code": "invalid", "message": "the definition has 1 problem", "details": [problem]}}),
    );
    let error = client.register_flow("order", "steps: {}").await.unwrap_err();
    assert_eq!(error.to_string(), "the definition has 1 problem\n  steps.pay.after: there is no step `lod`");
    assert_eq!((error.code(), error.is_retryable()), (Some(Code::Invalid), false));
    let seen = fake.set(|state| state.seen.remove(0));
    assert_eq!(
        (seen.path.as_str(), seen.headers["content-type"].to_str().unwrap()),
        ("/v1/flows/order", "application/yaml")
    );

    fake.script(404, json!({"error": {"code": "not_found", "message": "there is no run x"}}));
    assert!(client.run("x").info().await.unwrap_err().is_not_found());
    script(&fake, 400, None, "<html>Bad Request</html>");
    let error = client.run("x").cancel(None).await.unwrap_err();
    assert!(matches!(&error, Error::Api { status: 400, error } if error.message.contains("<html>")), "{error}");
    fake.script(418, json!({"error": {"code": "teapot", "message": "a code of tomorrow"}}));
    assert_eq!(client.flow("x").await.unwrap_err().code(), Some(Code::Unknown));
    script(&fake, 200, None, "{\"no\": 1}");
    assert!(
        matches!(client.flow("x").await, Err(Error::Decode { what, .. }) if what == "the response to GET /v1/flows/…")
    );
}

#[tokio::test]
async fn what_can_be_repeated_is_and_what_cannot_is_not() {
    let (fake, client) = served().await;
    cut(&fake);
    script(&fake, 503, Some(0), "{}");
    fake.script(200, json!({"run_id": "r", "status": "completed", "output": 7}));
    assert_eq!(client.run("r").result::<u64>().await.unwrap(), 7);
    assert_eq!(fake.set(|state| std::mem::take(&mut state.seen)).len(), 3, "a GET is retried");

    cut(&fake);
    let error = client.start("order", &json!({})).await.unwrap_err();
    assert!(matches!(error, Error::Interrupted { .. }) && error.is_retryable(), "{error}");
    assert_eq!(fake.set(|state| std::mem::take(&mut state.seen)).len(), 1, "the start may have taken effect");

    cut(&fake);
    fake.script(200, json!({"run_id": "r7", "existing": true}));
    let run = client.start("order", &json!({"id": 7})).idempotency_key("7").priority(3).tags(["a"]).await.unwrap();
    assert_eq!((run.id(), run.existing()), ("r7", true));
    let seen = fake.set(|state| std::mem::take(&mut state.seen));
    assert_eq!(seen[0].body, json!({"input": {"id": 7}, "idempotency_key": "7", "priority": 3, "tags": ["a"]}));
    assert_eq!(seen[0].body, seen[1].body, "with a key the same request is sent again");

    cut(&fake);
    fake.script(200, json!({}));
    client.publish([PublishEvent { name: "paid".to_owned(), ..PublishEvent::default() }]).await.unwrap();
    let seen = fake.set(|state| std::mem::take(&mut state.seen));
    assert!(seen[0].body[0]["id"].is_string() && seen[0].body == seen[1].body, "an event is published once");

    (0..10).for_each(|_| script(&fake, 429, Some(0), "{}"));
    assert!(matches!(client.info().await, Err(Error::Api { status: 429, .. })));
    assert_eq!(fake.set(|state| std::mem::take(&mut state.seen)).len(), 5, "the number of attempts is bounded");

    fake.set(|state| state.scripted.clear());
    script(&fake, 503, Some(3_600), "{}");
    assert!(matches!(client.info().await, Err(Error::Api { status: 503, .. })), "a long `Retry-After` is an error");
}

#[tokio::test]
async fn where_no_server_is_the_error_says_so() {
    let client = Client::new("http://127.0.0.1:1").unwrap();
    let error = client.info().await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    assert!(error.to_string().starts_with("cannot reach Eddyline at http://127.0.0.1:1: "), "{error}");
}

#[tokio::test]
async fn a_key_and_a_namespace_go_with_every_request_and_the_key_into_no_message() {
    let (fake, client) = served().await;
    let client = client.with_key("eddy_secret").with_namespace("shop");
    fake.script(200, json!(null));
    client.call::<Value>(Method::GET, "/v1/anything", &[("a", "b c".to_owned())], None::<&()>).await.unwrap();
    let seen = fake.set(|state| state.seen.remove(0));
    assert_eq!(seen.path, "/v1/anything?a=b%20c");
    assert_eq!(seen.headers["authorization"], "Bearer eddy_secret");
    assert_eq!(seen.headers["eddyline-namespace"], "shop");
    assert!(!format!("{client:?}").contains("secret"));
    for strange in ["naïve", "tab\u{7f}"] {
        let error = client.clone().with_key(strange).info().await.unwrap_err();
        assert!(matches!(&error, Error::Config(why) if why.contains("the key is invalid")), "{error}");
    }
    let error = client.with_key("line\nbreak").info().await.unwrap_err();
    assert!(matches!(error, Error::Config(_)), "{error}");
}

#[tokio::test]
async fn a_run_is_waited_for_and_its_end_is_typed() {
    let (fake, client) = served().await;
    let run = client.run("r");
    fake.script(202, json!({"run_id": "r", "status": "running"}));
    assert_eq!(run.wait(Duration::ZERO).await.unwrap(), None);
    fake.script(202, json!({"run_id": "r", "status": "waiting"}));
    fake.script(200, json!({"run_id": "r2", "status": "failed", "error": {"kind": "Declined", "message": "no"}}));
    let error = run.result::<Value>().await.unwrap_err();
    assert_eq!(error.to_string(), "run r2 failed: Declined: no");
    assert!(matches!(error, Error::RunFailed { run_id, failure } if run_id == "r2" && failure.kind == "Declined"));
    fake.script(200, json!({"run_id": "r", "status": "cancelled"}));
    assert!(matches!(run.result::<Value>().await, Err(Error::RunCancelled { .. })));
    fake.script(200, json!({"run_id": "r", "status": "completed", "output": "text"}));
    assert!(matches!(run.result::<u64>().await, Err(Error::Decode { what, .. }) if what == "the output of run r"));
    assert_eq!(asked(&fake)[..2], ["GET /v1/runs/r/result?wait=0ms", "GET /v1/runs/r/result?wait=30000ms"]);
}

#[tokio::test]
async fn a_timeline_is_followed_without_gaps_to_its_end() {
    let (fake, client) = served().await;
    let record = |id: u64, kind: &str| json!({"id": id.to_string(), "stream": "nq:flow:r", "ts": "", "kind": kind});
    fake.script(200, json!({"items": [record(1, "flow.start"), record(2, "step.scheduled")], "next": "2"}));
    cut(&fake);
    fake.script(200, json!({"items": [], "next": null}));
    fake.script(200, json!({"items": [record(3, "flow.completed")], "next": "3"}));
    let mut follow = client.run("r").follow();
    let mut kinds = Vec::new();
    while let Some(record) = follow.next().await {
        kinds.push(record.unwrap().kind);
    }
    assert_eq!(kinds, ["flow.start", "step.scheduled", "flow.completed"]);
    let asked = asked(&fake);
    assert_eq!(asked[0], "GET /v1/streams/nq%3Aflow%3Ar?after=0&wait=30000ms");
    assert!(asked[1..].iter().all(|path| path.contains("after=2")), "{asked:?}");

    fake.script(200, json!({"items": [record(1, "flow.start"), record(3, "emit")], "next": "3"}));
    fake.script(200, json!({"items": [record(2, "step.completed")], "next": "2"}));
    let mut follow = client.run("r").follow();
    assert_eq!(follow.next().await.unwrap().unwrap().id, "1");
    assert!(follow.next().await.unwrap().is_err(), "a gap is never passed over");
    assert_eq!(follow.next().await.unwrap().unwrap().id, "2");
}

#[tokio::test]
async fn lists_are_read_page_by_page() {
    let (fake, client) = served().await;
    let run = |id: &str| {
        json!({"run_id": id, "flow": "f", "version": "1", "status": "failed", "created_at": "", "started_at": null,
               "completed_at": null, "step_count": 1, "completed_steps": 0, "tags": [], "external_id": null,
               "error": null, "parent": null, "retry_of": null})
    };
    fake.script(200, json!({"items": [run("b")], "next": "p2"}));
    fake.script(200, json!({"items": [run("a")], "next": null}));
    let tags = vec!["x".to_owned(), "y".to_owned()];
    let filter = RunFilter { status: Some("failed".to_owned()), tags, ..RunFilter::default() };
    let mut list = client.list_all(filter);
    let mut ids = Vec::new();
    while let Some(run) = list.next().await {
        ids.push(run.unwrap().run_id);
    }
    assert_eq!(ids, ["b", "a"]);
    assert_eq!(
        asked(&fake),
        ["GET /v1/runs?status=failed&tag=x&tag=y", "GET /v1/runs?status=failed&cursor=p2&tag=x&tag=y"]
    );
}

#[tokio::test]
async fn a_batch_tells_what_came_of_each_and_goes_in_parts() {
    let (fake, client) = served().await;
    let started: Vec<Value> = (0..1_000).map(|n| json!({"run_id": format!("r{n}"), "existing": false})).collect();
    fake.script(200, json!({"items": started}));
    fake.script(200, json!({"items": [{"error": {"code": "not_found", "message": "there is no flow order"}}]}));
    let items = (0..1_001).map(|n| client.start("order", &n).external_id(n.to_string()).into_item().unwrap());
    let runs = client.start_batch(items).await.unwrap();
    assert_eq!(runs.len(), 1_001);
    assert_eq!(runs[999].as_ref().unwrap().id(), "r999");
    assert_eq!(runs[1_000].as_ref().unwrap_err().code, Code::NotFound);
    let seen = fake.set(|state| state.seen.remove(1));
    assert_eq!(seen.body, json!({"runs": [{"flow": "order", "input": 1_000, "external_id": "1000"}]}));
}

#[tokio::test]
async fn acts_go_where_they_belong() {
    let (fake, client) = served().await;
    let (run, acted) = (client.run("r"), json!({"run_id": "r", "status": "running"}));
    (0..4).for_each(|_| fake.script(200, acted.clone()));
    run.cancel(Some("no need")).await.unwrap();
    run.pause().await.unwrap();
    run.complete_step("each[3].price", &7).await.unwrap();
    run.skip_step("a").await.unwrap();
    fake.script(201, json!({"run_id": "again"}));
    assert_eq!(run.rerun(Some("pay"), Some(json!(null))).await.unwrap().id(), "again");
    script(&fake, 204, None, "");
    run.delete().await.unwrap();
    fake.script(200, json!({}));
    client.open_gate("t/1", &json!({"ok": true})).await.unwrap();
    assert_eq!(
        asked(&fake),
        [
            "POST /v1/runs/r/cancel",
            "POST /v1/runs/r/pause",
            "POST /v1/runs/r/steps/each%5B3%5D.price/complete",
            "POST /v1/runs/r/steps/a/skip",
            "POST /v1/runs/r/rerun",
            "DELETE /v1/runs/r",
            "POST /v1/gates/t%2F1"
        ]
    );
    let seen = fake.set(|state| state.seen.clone());
    assert_eq!((&seen[0].body, &seen[2].body), (&json!({"reason": "no need"}), &json!({"output": 7})));
    assert_eq!(seen[4].body, json!({"from": "pay", "input": null}));
}
