//! How long the replay of a long run takes: `cargo bench -p eddyline --features test --bench replay`.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use eddyline::testing::{Replayed, replay};
use eddyline::{FlowError, RunCtx, StepError};
use futures_util::stream::{FuturesUnordered, StreamExt};
use serde_json::{Map, Value, json};

const ENTRIES: u32 = 10_000;
const ROUNDS: usize = 20;

async fn in_sequence(ctx: RunCtx, n: u32) -> Result<u64, FlowError> {
    let mut sum = 0;
    for i in 0..n {
        sum += u64::from(ctx.step("add", || async { Ok::<_, StepError>(i) }).await?);
    }
    Ok(sum)
}

async fn at_once(ctx: RunCtx, n: u32) -> Result<u64, FlowError> {
    let ctx = &ctx;
    let mut steps: FuturesUnordered<_> =
        (0..n).map(|i| ctx.step(("add", i), move || async move { Ok::<_, StepError>(i) })).collect();
    let mut sum = 0;
    while let Some(output) = steps.next().await {
        sum += u64::from(output?);
    }
    Ok(sum)
}

fn memo(name: impl Fn(u32) -> String) -> Map<String, Value> {
    let entry = |i: u32| json!({"kind": "step", "n": i + 1, "status": "completed", "output": i});
    (0..ENTRIES).map(|i| (name(i), entry(i))).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let numbered = memo(|i| if i == 0 { "add".to_owned() } else { format!("add#{}", i + 1) });
    let keyed = memo(|i| format!("add[{i}]"));
    let expected = Replayed::Completed(json!((0..u64::from(ENTRIES)).sum::<u64>()));
    let mut best = [Duration::MAX; 2];
    for _ in 0..ROUNDS {
        let began = Instant::now();
        assert_eq!(replay(in_sequence, ENTRIES, numbered.clone()).await, expected);
        best[0] = best[0].min(began.elapsed());
        let began = Instant::now();
        assert_eq!(replay(at_once, ENTRIES, keyed.clone()).await, expected);
        best[1] = best[1].min(began.elapsed());
    }
    println!("replay of {ENTRIES} entries, best of {ROUNDS}: in sequence {:?}, at once {:?}", best[0], best[1]);
}
