//! Runs with very many activations; `EDDYLINE_ACTIVATIONS` sets how many.

use std::time::{Duration, Instant};

use eddyline_machine::decide::MAX_ACTIVATIONS;
use futures_util::future::join_all;
use serde_json::json;

use crate::rig::{Rig, withstands};

const ACTIVATIONS: &str = "EDDYLINE_ACTIVATIONS";
const DEFAULT_ACTIVATIONS: usize = 40_000;
/// How many activations per second must be created or cancelled, during other load.
const LEAST_PER_SECOND: usize = 1_000;
/// Activations per item of the spread: the item and its two steps.
const PER_ITEM: usize = 3;

fn activations() -> usize {
    std::env::var(ACTIVATIONS).ok().and_then(|count| count.parse().ok()).unwrap_or(DEFAULT_ACTIVATIONS)
}

fn patience() -> Duration {
    Duration::from_secs((activations() / LEAST_PER_SECOND) as u64).max(Duration::from_secs(10))
}

async fn start(rig: &Rig) -> String {
    let spread = format!("range({})", activations() / PER_ITEM);
    let each = json!({"spread": spread, "steps": {"a": {"set": "${index}"}, "b": {"after": ["a"], "set": 1}}});
    assert!(rig.attacker.register("huge", &json!({"steps": {"each": each}})).await);
    rig.attacker.start("huge", &json!(null)).await
}

/// Waits for the end of a run within `patience()`, and returns how long it took.
async fn until_ended(rig: &Rig, run: &str) -> Duration {
    let since = Instant::now();
    loop {
        if let Some(result) = rig.attacker.result(run, 5).await {
            assert_eq!(result["status"], "completed", "{result}");
            return since.elapsed();
        }
        assert!(since.elapsed() < patience(), "{} activations take longer than {:?}", activations(), patience());
    }
}

#[tokio::test]
async fn a_very_large_run_ends_and_cancels_beside_other_load() {
    withstands(&[], async |rig| {
        let run = start(rig).await;
        println!("{} activations took {:?}", activations(), until_ended(rig, &run).await);

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

/// Polls the memory of the cached runs for ever, and keeps the maximum in `bytes`.
async fn most_cached(rig: &Rig, bytes: &mut f64) {
    loop {
        *bytes = bytes.max(rig.metric("eddyline_cached_runs_bytes").await);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The share of the cache for large runs.
const CACHE_BYTES: f64 = 0.75 * (256 << 20) as f64;
/// How many runs of the maximum size must fit into the cache.
const SIDE_BY_SIDE: u32 = 2;

#[tokio::test]
async fn two_very_large_runs_side_by_side_keep_their_pace() {
    withstands(&[], async |rig| {
        let mut cached = 0.0;
        let runs = [start(rig).await, start(rig).await];
        let ended = join_all(runs.iter().map(|run| until_ended(rig, run)));
        tokio::select! {
            took = ended => println!("two runs of {} activations took {took:?}", activations()),
            () = most_cached(rig, &mut cached) => {}
        }
        // Runs that evict each other are loaded completely for each commit, so they slow down as they grow.
        let each = cached / (2 * activations()) as f64;
        let largest = each * f64::from(SIDE_BY_SIDE * MAX_ACTIVATIONS);
        println!("{each:.0} bytes per activation, {largest:.0} for {SIDE_BY_SIDE} runs of the largest size");
        assert!(each > 100.0 && largest < CACHE_BYTES, "they do not fit into {CACHE_BYTES}");
    })
    .await;
}
