//! Runs of very many activations. `EDDYLINE_ACTIVATIONS` says of how many.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::rig::{Rig, withstands};

const ACTIVATIONS: &str = "EDDYLINE_ACTIVATIONS";
const DEFAULT_ACTIVATIONS: usize = 40_000;
/// How many a second must be made, or cancelled, beside other load.
const LEAST_PER_SECOND: usize = 1_000;
/// What an item of the spread has: itself, and two steps.
const PER_ITEM: usize = 3;

fn activations() -> usize {
    std::env::var(ACTIVATIONS).ok().and_then(|count| count.parse().ok()).unwrap_or(DEFAULT_ACTIVATIONS)
}

fn patience() -> Duration {
    Duration::from_secs((activations() / LEAST_PER_SECOND) as u64).max(Duration::from_secs(10))
}

async fn start(rig: &Rig) -> String {
    // A spread takes at most 100,000 items, so larger runs have several of them.
    let items = activations() / PER_ITEM;
    let spreads = items.div_ceil(100_000);
    let steps = (0..spreads).map(|at| {
        let spread = format!("range({})", items / spreads);
        let each = json!({"spread": spread, "steps": {"a": {"set": "${index}"}, "b": {"after": ["a"], "set": 1}}});
        (format!("each{at}"), each)
    });
    let steps: serde_json::Value = steps.collect();
    assert!(rig.attacker.register("huge", &json!({ "steps": steps })).await);
    rig.attacker.start("huge", &json!(null)).await
}

#[tokio::test]
async fn a_very_large_run_ends_and_cancels_beside_other_load() {
    withstands(&[], async |rig| {
        let (since, run) = (Instant::now(), start(rig).await);
        let mut ended = None;
        while ended.is_none() {
            assert!(since.elapsed() < patience(), "{} activations take longer than {:?}", activations(), patience());
            ended = rig.attacker.result(&run, 5).await;
        }
        println!("{} activations took {:?}: {}", activations(), since.elapsed(), ended.unwrap()["status"]);

        let run = start(rig).await;
        rig.attacker.result(&run, 2).await;
        let since = Instant::now();
        let reply = rig.attacker.post(&format!("/v1/runs/{run}/cancel"), &json!({})).await.unwrap();
        assert!(matches!(reply.status, 200 | 409), "{reply:?}");
        while rig.attacker.result(&run, 5).await.is_none() {
            assert!(since.elapsed() < patience(), "the cancel takes longer than {:?}", patience());
        }
        println!("its cancel took {:?}", since.elapsed());
    })
    .await;
}
