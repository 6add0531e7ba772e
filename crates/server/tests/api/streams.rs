//! Timelines, projections and the run index.

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
    // A run that has ended gets no more records.
    let all = all(&rig, &format!("nq:flow:{run}"), "").await.len();
    let end = rig.get(&format!("/v1/streams/nq:flow:{run}?after={all}&wait=20s")).await;
    assert!(end.items().is_empty());
    rig.server.stop().await;
}

/// Runs a spread with some logs in each item, to its end.
async fn logging_run(rig: &Rig, items: usize, logs: usize) -> String {
    rig.flow("logging", "steps: {each: {spread: input, run: a}}").await;
    let run = rig.run("logging", (0..items).collect::<serde_json::Value>()).await;
    for _ in 0..items {
        let task = rig.claim("w").await;
        let logs: Vec<_> = (0..logs).map(|n| json!({"level": "info", "msg": format!("line {n}")})).collect();
        rig.report(&task, json!({"op": "complete", "output": 1, "logs": logs})).await;
    }
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "completed");
    run
}

#[tokio::test]
async fn the_logs_of_one_step_are_those_that_the_timeline_has_of_it() {
    let rig = Rig::start().await;
    let run = logging_run(&rig, 5, 3).await;
    let all = rig.get(&format!("/v1/streams/nq:flow:{run}?kind=runner.log&limit=1000")).await;
    for item in 0..5 {
        let step = format!("each%5B{item}%5D");
        let of_step = |record: &&serde_json::Value| record["meta"]["stepKey"] == format!("each[{item}]");
        let expected: Vec<_> = all.items().iter().filter(of_step).cloned().collect();
        assert_eq!(expected.len(), 3);
        let logs = format!("/v1/streams/nq:flow:{run}?kind=runner.log&step={step}");
        assert_eq!(rig.get(&logs).await.items(), &expected);
        let second = format!("{logs}&limit=1&after={}", expected[0]["id"].as_str().unwrap());
        assert_eq!(rig.get(&second).await.items(), &expected[1..2]);
        let pointers = rig.get(&format!("/v1/streams/nq:proj:flow-step-index:{run}?step={step}")).await;
        let ids = |records: &[serde_json::Value]| records.iter().map(|it| it["id"].clone()).collect::<Vec<_>>();
        assert_eq!(ids(pointers.items()), ids(&expected));
    }
    assert!(rig.get(&format!("/v1/streams/nq:flow:{run}?kind=runner.log&step=none")).await.items().is_empty());
    rig.server.stop().await;
}

#[tokio::test]
async fn pages_of_projections_are_the_same_in_any_order_and_of_any_size() {
    let rig = Rig::start().await;
    let run = logging_run(&rig, 8, 2).await;
    for stream in [format!("nq:proj:flow:logging:{run}"), format!("nq:proj:flow-steps:{run}")] {
        let path = |after: &str, limit: usize| format!("/v1/streams/{stream}?after={after}&limit={limit}");
        let whole = rig.get(&path("0", 1_000)).await.items().clone();
        for limit in [1, 3, 7] {
            let (mut paged, mut after) = (Vec::new(), "0".to_owned());
            loop {
                let page = rig.get(&path(&after, limit)).await;
                paged.extend(page.items().iter().cloned());
                match page.body["next"].as_str() {
                    Some(next) => after = next.to_owned(),
                    None => break,
                }
            }
            assert_eq!(paged, whole, "{stream} in pages of {limit}");
        }
        // Backwards, and each page again.
        for (at, record) in whole.iter().enumerate().rev() {
            for _ in 0..2 {
                let rest = rig.get(&path(record["id"].as_str().unwrap(), 2)).await;
                assert_eq!(rest.items()[..], whole[at + 1..whole.len().min(at + 3)], "{stream} after {}", record["id"]);
            }
        }
    }
    rig.server.stop().await;
}

/// The number of records read so far for projections, counts and steps.
async fn folded(client: &Client) -> u64 {
    let metrics = client.get("/metrics").await.body;
    let lines = metrics.as_str().unwrap().lines();
    let found = lines.filter_map(|line| line.strip_prefix("eddyline_records_folded_total ")).next();
    found.map_or(0, |number| number.parse().unwrap())
}

#[tokio::test]
async fn pages_counts_and_steps_of_a_long_run_do_not_begin_with_its_first_record() {
    let rig = Rig::start().await;
    let run = logging_run(&rig, 20, 500).await;
    let read = async |path: &str| {
        let before = folded(&rig).await;
        let page = rig.get(path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.body);
        (page.body, folded(&rig).await - before)
    };
    let records =
        rig.get(&format!("/v1/streams/nq:flow:{run}?limit=1&count=true")).await.body["total"].as_u64().unwrap();
    assert!(records > 10_000, "{records}");
    for stream in [format!("nq:proj:flow:logging:{run}"), format!("nq:proj:flow-steps:{run}")] {
        let page = |after: u64| format!("/v1/streams/{stream}?after={after}&limit=1");
        // The first read of a late page takes the whole timeline once; later reads start near their position.
        read(&page(records - 2)).await;
        for after in [9_100, 2_300, 7_700, 400, 5_000, 6_900, 3_800, 8_600] {
            let (_, cost) = read(&page(after)).await;
            assert!(cost <= 3_000, "{stream} after {after}: {cost} records were read");
        }
        let counted = format!("{}&count=true", page(records));
        let (first, _) = read(&counted).await;
        let (again, cost) = read(&counted).await;
        assert_eq!((&again["total"], cost), (&first["total"], 0), "{stream}");
        let all = rig.get(&format!("/v1/streams/{stream}?limit=1&count=true&kind=none")).await.body;
        assert_eq!(all["total"], 0, "another filter is another count");
    }
    let counted = format!("/v1/streams/nq:flow:{run}?kind=runner.log&limit=1&count=true");
    assert_eq!(read(&counted).await.0["total"], 10_000);
    assert_eq!(read(&counted).await, (read(&counted).await.0, 0));
    let steps = format!("/v1/runs/{run}/steps?limit=5");
    let (first, cost) = read(&steps).await;
    assert_eq!(cost, records);
    assert_eq!(read(&steps).await, (first, 0));
    rig.server.stop().await;
}

#[tokio::test]
async fn steps_and_counts_that_were_read_before_go_on_with_the_run() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {after: [a], run: b}}").await;
    let run = rig.run("f", json!(1)).await;
    let (steps, counted) =
        (format!("/v1/runs/{run}/steps"), format!("/v1/streams/nq:proj:flow-steps:{run}?limit=1&count=true"));
    let mut totals = Vec::new();
    for (a, b) in [("running", "pending"), ("completed", "running"), ("completed", "completed")] {
        let shown = rig.get(&steps).await;
        let status = |at: usize| shown.items()[at]["status"].clone();
        assert_eq!((status(0), status(1)), (json!(a), json!(b)), "{}", shown.body);
        totals.push(rig.get(&counted).await.body["total"].as_u64().unwrap());
        if b != "completed" {
            let task = rig.claim("w").await;
            rig.report(&task, json!({"op": "complete", "output": 1})).await;
        }
    }
    assert!(totals.is_sorted_by(|a, b| a < b), "{totals:?}");
    let all = all(&rig, &format!("nq:proj:flow-steps:{run}"), "").await;
    assert_eq!(totals[2], all.len() as u64);
    rig.server.stop().await;
}
