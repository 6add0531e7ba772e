//! Flows that start themselves.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::{Rig, withstands, withstands_within};

/// How long it may grow before its root is cancelled.
const GROWING: Duration = Duration::from_secs(3);
/// After a cancel all runs below have ended once this is over, thousands of them.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(500);

const NOT_ENDED: [&str; 4] = ["pending", "running", "waiting", "paused"];

async fn count(rig: &Rig, flow: &str, status: &str) -> u64 {
    let path = format!("/v1/runs?flow={flow}&limit=1&count=true&status={status}");
    let runs = rig.attacker.get(&path).await.unwrap();
    runs.body["total"].as_u64().unwrap_or_else(|| panic!("{runs:?}"))
}

/// Until no run of the flow is left that has not ended. One that was being started when it was looked may be missed, so
/// there are none twice.
async fn until_still(rig: &Rig, flow: &str) {
    let since = Instant::now();
    let mut looks_at_none = 0;
    while looks_at_none < 2 {
        tokio::time::sleep(LOOK).await;
        let mut going = 0;
        for status in NOT_ENDED {
            going += count(rig, flow, status).await;
        }
        assert!(since.elapsed() < ENDS_WITHIN, "{going} runs go on after the cancel of their root");
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

/// As much as a payload may be, of elements that take about 80 times as much memory as text.
fn small_objects() -> Value {
    Value::Array(vec![json!({"a": 1}); 200_000])
}

/// Children, each with an input that takes 150 MB when it is read. They took 8.8 GB when all messages were read at once.
const CHILDREN: usize = 40;
/// They took 1.05 GB while each message had a copy of its own; 0.4 GB since they share one.
const MAX_MEMORY_MB: u64 = 700;
const CHILDREN_END_WITHIN: u32 = 50;

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
