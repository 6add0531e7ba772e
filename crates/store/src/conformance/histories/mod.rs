//! Random histories: the same operations on the store under test and on a [`Memory`] must give the same results.
//!
//! A history is a list of operations of a few bytes each, so that a failing one shrinks to the few that matter.
//! Compared is what the trait promises: the order of claimed tasks where it is specified, otherwise the set; positions
//! and revisions only by their order, since each store has its own.

mod both;
mod operations;
mod reports;
mod world;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use tokio::runtime::{Builder, Runtime};

use super::{BEGINNING, Backend};
use crate::ManualClock;
use operations::Happening;
use world::World;

/// The default number of histories (`EDDYLINE_CASES`).
const CASES: u32 = 60;
/// The default seed (`EDDYLINE_SEED`): fixed, so that failures are reproducible.
const SEED: u64 = 20_261_115;
/// The maximum length of a history; half of it on average.
const LENGTH: usize = 300;
/// With this many histories everything in [`EVERYTHING`] happens.
const ENOUGH: u32 = 60;

/// What the histories must cover.
const EVERYTHING: [&str; 27] = [
    "before",
    "cancelled",
    "claim of several queues",
    "several claims beside a commit",
    "claim repeated",
    "claimed",
    "closed",
    "completed",
    "conflict",
    "done",
    "due document",
    "due lease",
    "due message",
    "due timer",
    "failed",
    "gate",
    "gone",
    "held back",
    "key",
    "lost",
    "paused",
    "revision",
    "trimmed",
    "turn",
    "unique",
    "until",
    "waiting",
];

/// Whether both stores gave the same result, or the difference.
type Same<T = ()> = Result<T, String>;

/// What was covered so far, by the names of [`EVERYTHING`].
type Reached = Arc<Mutex<BTreeSet<String>>>;

/// Panics with the seed and the shortest failing history.
pub fn random_histories(backend: &dyn Backend) {
    let seed = number("EDDYLINE_SEED").unwrap_or(SEED);
    let cases = number("EDDYLINE_CASES").map_or(CASES, |cases| cases as u32);
    let config = Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        max_shrink_iters: 600,
        max_shrink_time: 20_000,
        failure_persistence: None,
        ..Config::default()
    };
    let (durable, reached) = (is_durable(backend), Reached::default());
    let happenings = vec(any::<[u8; 8]>(), 1..LENGTH);
    let outcome = TestRunner::new(config).run(&happenings, |history| {
        happen(backend, durable, &history, &reached).map_err(|(_, why)| TestCaseError::fail(why))
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Abort(why)) => panic!("with EDDYLINE_SEED={seed}: {why}"),
        Err(TestError::Fail(why, history)) => {
            let again = happen(backend, durable, &history, &Reached::default());
            let story = again.err().map_or_else(Vec::new, |(story, _)| story);
            panic!("with EDDYLINE_SEED={seed}: {why}\n\noperations:\n{}", story.join("\n"));
        }
    }
    let reached = reached.lock().unwrap();
    let missing: Vec<&&str> = EVERYTHING.iter().filter(|what| !reached.contains(**what)).collect();
    assert!(cases < ENOUGH || missing.is_empty(), "with EDDYLINE_SEED={seed} never covered: {missing:?}");
}

/// Runs one history; on failure returns its operations and the difference.
fn happen(
    backend: &dyn Backend,
    durable: bool,
    history: &[[u8; 8]],
    reached: &Reached,
) -> Result<(), (Vec<String>, String)> {
    runtime().block_on(async {
        // Turns start anew when a store is opened again, so a history has either reopenings or several keys.
        let reopens = durable && history.first().is_none_or(|bytes| bytes[7] % 2 == 0);
        let mut world = World::open(backend, reopens, reached.clone()).await;
        for bytes in history {
            let happening = Happening::new(bytes);
            if let Err(why) = world.happen(happening).await {
                return Err((world.story, why));
            }
        }
        world.compare().await.map_err(|why| (world.story, why))
    })
}

fn is_durable(backend: &dyn Backend) -> bool {
    runtime().block_on(async {
        let clock = ManualClock::at(BEGINNING);
        let store = backend.open(clock.clone()).await;
        backend.reopen(store, clock).await.is_some()
    })
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|number| number.parse().ok())
}
