//! Timelines, projections and the index of runs.

use eddyline_machine::project::{Snapshot, SnapshotPatch};
use serde_json::{Value, json};

use crate::client::{Client, Rig};

/// All records of a stream, read in small pages.
async fn all(client: &Client, stream: &str, query: &str) -> Vec<Value> {
    let (mut records, mut after) = (Vec::new(), String::new());
    loop {
        let page = client.get(&format!("/v1/streams/{stream}?limit=2&after={after}{query}")).await;
        assert_eq!(page.status, 200, "{}", page.body);
        records.extend(page.items().iter().cloned());
        match page.body["next"].as_str() {
            Some(next) => after = next.to_owned(),
            None => return records,
        }
    }
}

#[tokio::test]
async fn every_stream_is_read_in_pages_without_gaps() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {after: [a], run: b}}").await;
    let run = rig.run("f", json!(1)).await;
    for _ in 0..2 {
        let task = rig.claim("w").await;
        rig.report(&task, json!({"op": "log", "seq": 1, "msg": "hello"})).await;
        rig.report(&task, json!({"op": "complete", "seq": 2, "output": {"big": "x".repeat(1_000)}})).await;
    }
    let timeline = all(&rig, &format!("nq:flow:{run}"), "").await;
    let ids: Vec<String> = timeline.iter().map(|record| record["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(ids, (1..=timeline.len()).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(timeline[0]["kind"], "flow.start");
    assert_eq!(timeline.last().unwrap()["kind"], "flow.completed");
    let done = timeline.iter().find(|record| record["kind"] == "step.attempt.completed").unwrap();
    assert_eq!(done["data"]["result"]["big"].as_str().unwrap().len(), 1_000, "payloads are resolved");
    let logs = all(&rig, &format!("nq:flow:{run}"), "&kind=runner.log&step=b").await;
    assert_eq!((logs.len(), &logs[0]["meta"]["stepKey"]), (1, &json!("b")));

    let mut snapshot = Snapshot::default();
    for patch in all(&rig, &format!("nq:proj:flow:f:{run}"), "").await {
        snapshot.apply(&serde_json::from_value::<SnapshotPatch>(patch["data"].clone()).unwrap());
    }
    assert_eq!((snapshot.status.as_ref(), snapshot.steps.len()), ("completed", 2));
    let steps = all(&rig, &format!("nq:proj:flow-steps:{run}"), "").await;
    assert!(steps.iter().all(|record| record["kind"] == "flow.step.patch"));
    let index = all(&rig, &format!("nq:proj:flow-step-index:{run}"), "").await;
    assert_eq!((index.len(), &index[0]["data"]["stepKey"]), (2, &json!("a")));
    let runs = all(&rig, "nq:proj:flow-runs:f", "").await;
    assert_eq!((runs.len(), &runs[0]["data"]["id"]), (1, &json!(run)));
    rig.flow("job", "code: true\nqueue: slow").await;
    rig.run("job", json!(null)).await;
    let of_code = &all(&rig, "nq:proj:flow-runs:job", "").await[0];
    let queues = [&of_code["data"]["queue"], &of_code["meta"]["queue"], &of_code["subject"]];
    assert_eq!(queues, [&json!("slow"); 3], "the queue that its function is offered on");

    for unknown in [format!("nq:proj:flow:g:{run}"), "nq:flow:x".into(), "x".into(), "nq:proj:flow-runs:none".into()] {
        assert_eq!(rig.get(&format!("/v1/streams/{unknown}")).await.status, 404, "{unknown}");
    }
    assert_eq!(rig.get(&format!("/v1/streams/nq:flow:{run}?after=x")).await.status, 400);
    let other = rig.header("eddyline-namespace", "other");
    assert_eq!(other.get(&format!("/v1/streams/nq:flow:{run}")).await.status, 404);
    rig.server.stop().await;
}

#[tokio::test]
async fn whoever_waits_gets_what_comes() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let read = all(&rig, &format!("nq:flow:{run}"), "").await.len();
    for stream in [format!("nq:flow:{run}"), format!("nq:proj:flow-steps:{run}")] {
        let client = rig.client.clone();
        let path = format!("/v1/streams/{stream}?after={read}&wait=20s");
        let waiting = tokio::spawn(async move { client.get(&path).await });
        if stream.contains("proj") {
            rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
        } else {
            rig.claim("w").await;
        }
        assert!(!waiting.await.unwrap().items().is_empty());
    }
    // A run that has ended has nothing more to come.
    let all = all(&rig, &format!("nq:flow:{run}"), "").await.len();
    let end = rig.get(&format!("/v1/streams/nq:flow:{run}?after={all}&wait=20s")).await;
    assert!(end.items().is_empty());
    rig.server.stop().await;
}
