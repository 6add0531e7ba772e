//! Flows that start themselves.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::{Rig, withstands};

/// How long it may grow before its root is cancelled.
const GROWING: Duration = Duration::from_secs(3);
/// After a cancel nothing new may start once this is over.
const STOPS_WITHIN: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_secs(1);

async fn count(rig: &Rig, flow: &str) -> u64 {
    let runs = rig.attacker.get(&format!("/v1/runs?flow={flow}&limit=1&count=true")).await.unwrap();
    runs.body["total"].as_u64().unwrap_or_else(|| panic!("{runs:?}"))
}

/// Until no run of the flow is left that has not ended.
async fn until_still(rig: &Rig, flow: &str) {
    let since = Instant::now();
    let mut before = count(rig, flow).await;
    loop {
        tokio::time::sleep(LOOK).await;
        let now = count(rig, flow).await;
        if now == before {
            return;
        }
        assert!(since.elapsed() < STOPS_WITHIN, "it grows on after the cancel of its root: {now} runs");
        before = now;
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

#[tokio::test]
async fn a_flow_that_starts_itself_twice_is_stopped_by_its_cancel() {
    withstands(&[], async |rig| {
        explode(rig, "bomb", json!({"a": {"flow": "bomb"}, "b": {"flow": "bomb"}})).await;
    })
    .await;
}
