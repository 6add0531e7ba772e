//! Flows that start themselves.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::{Rig, withstands, withstands_within};

/// How long the tree grows before its root is cancelled.
const GROWING: Duration = Duration::from_secs(3);
/// How long thousands of runs have to end after the cancel of their root.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(500);

const NOT_ENDED: [&str; 4] = ["pending", "running", "waiting", "paused"];

async fn count(rig: &Rig, flow: &str, status: &str) -> u64 {
    let path = format!("/v1/runs?flow={flow}&limit=1&count=true&status={status}");
    let runs = rig.attacker.get(&path).await.unwrap();
    runs.body["total"].as_u64().unwrap_or_else(|| panic!("{runs:?}"))
}

/// Waits until all runs of the flow have ended. Requires two looks in a row without open runs: one look may miss a run
/// that is being started.
async fn until_still(rig: &Rig, flow: &str) {
    let since = Instant::now();
    let mut looks_at_none = 0;
    while looks_at_none < 2 {
        tokio::time::sleep(LOOK).await;
        let mut going = 0;
        for status in NOT_ENDED {
            going += count(rig, flow, status).await;
        }
        assert!(since.elapsed() < ENDS_WITHIN, "{going} runs are open after the cancel of their root");
        looks_at_none = if going == 0 { looks_at_none + 1 } else { 0 };
    }
}

async fn explode(rig: &Rig, flow: &str, steps: Value) {
    assert!(rig.attacker.register(flow, &json!({ "steps": steps })).await);
    let root = rig.attacker.start(flow, &json!(null)).await;
    tokio::time::sleep(GROWING).await;
    let reply = rig.attacker.post(&format!("/v1/runs/{root}/cancel"), &json!({})).await.unwrap();
    assert!(matches!(reply.status, 200 | 409), "{reply:?}");
    until_still(rig, flow).await;
}

/// A payload of the maximum size, whose elements take about 80 times as much memory as their text.
fn small_objects() -> Value {
    Value::Array(vec![json!({"a": 1}); 200_000])
}

/// Children, each with an input of 150 MB when parsed. They took 8.8 GB when all messages were read at once.
/// A development build takes several times as long for each.
const CHILDREN: usize = if cfg!(debug_assertions) { 20 } else { 40 };
/// They took 1.05 GB when each message had its own copy, and 0.4 GB since they share one.
const MAX_MEMORY_MB: u64 = 700;
/// It takes long where the system is slow to give memory to a process: 15 to 70 s in a development build.
const CHILDREN_END_WITHIN: u32 = 150;

#[tokio::test]
async fn large_inputs_and_results_of_children_fill_no_memory() {
    withstands_within(MAX_MEMORY_MB, &[], async |rig| {
        let child = json!({"steps": {"a": {"set": 1}}, "output": "${input}"});
        assert!(rig.attacker.register("child", &child).await);
        for (parent, input) in [("parent", json!("${input}")), ("inside", json!({"x": ["${input}"]}))] {
            let each = json!({"spread": format!("range({CHILDREN})"), "flow": "child", "input": input});
            assert!(rig.attacker.register(parent, &json!({"steps": {"each": each}})).await);
            let run = rig.attacker.start(parent, &small_objects()).await;
            assert!(rig.attacker.result(&run, CHILDREN_END_WITHIN).await.is_some(), "the children do not end");
        }
    })
    .await;
}

#[tokio::test]
async fn a_flow_that_starts_itself_twice_is_stopped_by_its_cancel() {
    withstands(&[], async |rig| {
        explode(rig, "bomb", json!({"a": {"flow": "bomb"}, "b": {"flow": "bomb"}})).await;
    })
    .await;
}
