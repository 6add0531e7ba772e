//! Unique keys: at most one run of a flow is active under a key.

use eddyline_server::ServeArgs;
use serde_json::{Value, json};

use crate::client::{Client, Reply, Rig, args};

async fn start(client: &Client, key: &str, on_conflict: &str) -> Reply {
    let unique = json!({"key": key, "on_conflict": on_conflict});
    client.post("/v1/flows/f/runs", json!({ "unique": unique })).await
}

async fn started(client: &Client, key: &str, on_conflict: &str) -> String {
    let reply = start(client, key, on_conflict).await;
    assert_eq!((reply.status, &reply.body["existing"]), (201, &json!(false)), "{}", reply.body);
    reply.text("run_id")
}

async fn status(client: &Client, run: &str) -> String {
    client.get(&format!("/v1/runs/{run}")).await.text("status")
}

async fn ended(client: &Client, run: &str) -> String {
    client.get(&format!("/v1/runs/{run}/result?wait=20s")).await.text("status")
}

async fn complete(client: &Client) -> Value {
    let task = client.claim("w").await;
    client.report(&task, json!({"op": "complete", "seq": 1})).await;
    task["run_id"].clone()
}

const ONE: &str = "steps: {a: {run: a}}";

#[tokio::test]
async fn the_run_that_has_the_key_is_given_back_or_the_start_is_refused() {
    let rig = Rig::start().await;
    rig.flow("f", ONE).await;
    let first = started(&rig, "k", "return").await;
    for _ in 0..2 {
        let again = start(&rig, "k", "return").await;
        assert_eq!((again.status, &again.body["existing"]), (200, &json!(true)));
        assert_eq!(again.text("run_id"), first);
    }
    let plain = rig.post("/v1/flows/f/runs", json!({"unique": {"key": "k"}})).await;
    assert_eq!((plain.status, plain.text("run_id")), (200, first.clone()), "by default the existing run is returned");
    let refused = start(&rig, "k", "reject").await;
    assert_eq!(refused.code(), (409, "conflict"));
    assert!(refused.body["error"]["message"].as_str().unwrap().contains(&first), "{}", refused.body);
    started(&rig, "another", "reject").await;
    let batch = json!([{"flow": "f", "unique": {"key": "k"}}, {"flow": "f", "unique": {"key": "k", "on_conflict": "reject"}},
        {"flow": "f", "unique": {"key": "b"}}, {"flow": "f", "unique": {"key": "b"}}]);
    let items = rig.post("/v1/runs/batch", batch).await.items().clone();
    assert_eq!((&items[0]["run_id"], &items[0]["existing"]), (&json!(first), &json!(true)));
    assert_eq!(items[1]["error"]["code"], "conflict");
    assert_eq!((&items[2]["existing"], &items[3]["existing"]), (&json!(false), &json!(true)));
    assert_eq!(items[2]["run_id"], items[3]["run_id"]);

    let shown = rig.get(&format!("/v1/runs/{first}")).await.body["unique"].clone();
    assert_eq!(shown, json!({"key": "k", "on_conflict": "return"}));
    assert_eq!(complete(&rig).await, first.as_str());
    let second = started(&rig, "k", "reject").await;
    assert_ne!(second, first);
    for bad in [
        json!({"key": ""}),
        json!({}),
        json!({"key": "k", "on_conflict": "wait"}),
        json!({"key": "k", "x": 1}),
        json!("k"),
    ] {
        let reply = rig.post("/v1/flows/f/runs", json!({ "unique": bad })).await;
        assert_eq!(reply.code(), (400, "bad_request"), "{bad}");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn of_many_starts_at_once_one_goes_on_and_all_are_told_which() {
    let dir = tempfile::tempdir().unwrap();
    let on_disk = Some(dir.path().join("store").display().to_string());
    for store in [Some("memory:".to_owned()), on_disk] {
        let rig = Rig::with(ServeArgs { store, ..args() }).await;
        rig.flow("f", ONE).await;
        let mut racing = tokio::task::JoinSet::new();
        for _ in 0..16 {
            let client = rig.client.clone();
            racing.spawn(async move { start(&client, "k", "return").await });
        }
        let replies = racing.join_all().await;
        assert_eq!(replies.iter().filter(|reply| reply.status == 201).count(), 1);
        let runs: std::collections::BTreeSet<String> = replies.iter().map(|reply| reply.text("run_id")).collect();
        assert_eq!(runs.len(), 1);
        assert_eq!(rig.get("/v1/runs?count=true").await.body["total"], 1);
        rig.server.stop().await;
    }
}

#[tokio::test]
async fn queued_runs_go_on_one_after_the_other_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let args = || ServeArgs { store: Some(dir.path().join("store").display().to_string()), ..args() };
    let rig = Rig::with(args()).await;
    rig.flow("f", ONE).await;
    let mut line = Vec::new();
    for _ in 0..4 {
        line.push(started(&rig, "k", "queue").await);
    }
    for waiting in &line[1..] {
        let run = rig.get(&format!("/v1/runs/{waiting}")).await.body;
        assert_eq!((&run["status"], &run["started_at"]), (&json!("pending"), &json!(null)));
        assert_eq!(run["waiting_for"], json!([{"activation": "@run", "waits_for": {"what": "unique", "key": "k"}}]));
    }
    assert_eq!(start(&rig, "k", "return").await.text("run_id"), line[0]);
    let records = rig.get(&format!("/v1/streams/nq:flow:{}", line[1])).await;
    assert_eq!(records.items()[0]["data"]["inLine"], true);
    // A run that is cancelled while it waits is skipped.
    assert_eq!(rig.post(&format!("/v1/runs/{}/cancel", line[2]), json!({})).await.status, 200);
    assert_eq!(complete(&rig).await, line[0].as_str());
    let task = rig.claim("w").await;
    assert_eq!(task["run_id"], line[1].as_str());
    rig.server.stop().await;

    let rig = Rig::with(args()).await;
    assert_eq!(start(&rig, "k", "reject").await.code(), (409, "conflict"));
    assert_eq!(status(&rig, &line[3]).await, "pending");
    rig.report(&task, json!({"op": "complete", "seq": 1})).await;
    assert_eq!(complete(&rig).await, line[3].as_str());
    assert_eq!(ended(&rig, &line[3]).await, "completed");
    let run = rig.get(&format!("/v1/runs/{}", line[3])).await.body;
    assert!(run["started_at"].as_str() > run["created_at"].as_str(), "{run}");
    started(&rig, "k", "reject").await;
    rig.server.stop().await;
}

#[tokio::test]
async fn a_run_that_replaces_others_begins_when_they_have_ended() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}\nfinally: {steps: {clean: {run: clean}}}").await;
    let first = started(&rig, "k", "replace").await;
    let queued = started(&rig, "k", "queue").await;
    let task = rig.claim("w").await;
    assert_eq!(task["run_id"], first.as_str());
    let last = started(&rig, "k", "replace").await;
    // The cleanup after the first run ends before the last one begins.
    let clean = rig.claim("w").await;
    assert_eq!((&clean["run_id"], &clean["step"]), (&json!(first), &json!("clean")));
    assert_eq!(status(&rig, &last).await, "pending");
    rig.report(&clean, json!({"op": "complete", "seq": 1})).await;
    assert_eq!((ended(&rig, &first).await, ended(&rig, &queued).await), ("cancelled".into(), "cancelled".into()));
    let reason = rig.get(&format!("/v1/runs/{first}")).await.text("reason");
    assert!(reason.contains(&last), "{reason}");
    for step in ["a", "clean"] {
        let task = rig.claim("w").await;
        assert_eq!((&task["run_id"], &task["step"]), (&json!(last), &json!(step)));
        rig.report(&task, json!({"op": "complete", "seq": 1})).await;
    }
    assert_eq!(ended(&rig, &last).await, "completed");
    rig.server.stop().await;
}

#[tokio::test]
async fn many_replacements_at_once_leave_one_run() {
    let rig = Rig::start().await;
    rig.flow("f", ONE).await;
    let mut racing = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let client = rig.client.clone();
        racing.spawn(async move { start(&client, "k", "replace").await });
    }
    let runs: Vec<String> = racing.join_all().await.iter().map(|reply| reply.text("run_id")).collect();
    let task = loop {
        let task = rig.claim("w").await;
        let outcome = rig.report(&task, json!({"op": "complete", "seq": 1})).await;
        // A run that has begun may be replaced at any moment.
        if outcome["outcome"] == "applied" {
            break task;
        }
    };
    let (mut completed, mut cancelled) = (Vec::new(), 0);
    for run in &runs {
        match ended(&rig, run).await.as_str() {
            "completed" => completed.push(run.clone()),
            "cancelled" => cancelled += 1,
            other => panic!("{run} is {other}"),
        }
    }
    assert_eq!((completed, cancelled), (vec![task["run_id"].as_str().unwrap().to_owned()], 15));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_queued_run_waits_for_its_delay_and_its_turn_and_has_its_deadline_meanwhile() {
    let rig = Rig::start().await;
    rig.flow("f", ONE).await;
    let first = started(&rig, "k", "queue").await;
    let unique = json!({"key": "k", "on_conflict": "queue"});
    let late = rig.post("/v1/flows/f/runs", json!({"unique": unique, "deadline": 50})).await.text("run_id");
    assert_eq!(ended(&rig, &late).await, "failed", "no run waits beyond its deadline");
    let delayed = rig.post("/v1/flows/f/runs", json!({"unique": unique, "delay": "1h"})).await.text("run_id");
    assert_eq!(complete(&rig).await, first.as_str());
    let waits_for = async || rig.get(&format!("/v1/runs/{delayed}")).await.body["waiting_for"][0]["waits_for"].clone();
    while waits_for().await["what"] != "delay" {
        tokio::task::yield_now().await;
    }
    assert_eq!(start(&rig, "k", "return").await.text("run_id"), delayed, "it holds the key during its delay");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_retry_and_a_continued_run_have_the_key_of_the_run_before() {
    let rig = Rig::start().await;
    rig.flow("f", "code: true\nretry: {attempts: 1}").await;
    let first = started(&rig, "k", "queue").await;
    let function = rig.claim("w").await;
    let queued = started(&rig, "k", "queue").await;
    rig.report(&function, json!({"op": "continue", "seq": 1, "input": 2})).await;
    let next = rig.claim("w").await;
    assert_eq!(next["input"], 2, "the continued run comes before those in line");
    let has_key = start(&rig, "k", "return").await.text("run_id");
    assert_eq!(next["run_id"], has_key.as_str());
    let failed = json!({"op": "fail", "seq": 1, "error": {"kind": "Bad", "message": "no"}, "retryable": false});
    rig.report(&next, failed.clone()).await;
    let task = rig.claim("w").await;
    assert_eq!(task["run_id"], queued.as_str());
    assert_eq!(ended(&rig, &first).await, "failed");
    assert_eq!(rig.post(&format!("/v1/runs/{has_key}/retry"), json!({})).await.code(), (409, "conflict"));
    rig.report(&task, json!({"op": "complete", "seq": 1, "output": 1})).await;
    ended(&rig, &queued).await;
    let retried = rig.post(&format!("/v1/runs/{has_key}/retry"), json!({})).await.text("run_id");
    assert_eq!(start(&rig, "k", "return").await.text("run_id"), retried);
    rig.server.stop().await;
}
