//! Random histories: the same things happen to the store under test and to a [`Memory`], which must say the same.
//!
//! A history is a list of happenings of a few bytes each, so that a failing one shrinks to the few that matter. What is
//! compared is what the trait promises: the order of claims where it is said, else the set; positions and revisions only
//! by their order, since each store has its own.

mod both;
mod happenings;
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
use happenings::Happening;
use world::World;

/// How many histories there are, unless `EDDYLINE_CASES` says otherwise.
const CASES: u32 = 60;
/// Which ones, unless `EDDYLINE_SEED` says otherwise: the same every time, so that a test fails for a reason.
const SEED: u64 = 20_261_115;
/// How long they are, at most; half as long on average.
const LENGTH: usize = 300;
/// With so many histories everything in [`EVERYTHING`] happens.
const ENOUGH: u32 = 60;

/// What the histories must reach to be worth something.
const EVERYTHING: [&str; 24] = [
    "before",
    "cancelled",
    "claim of several queues",
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
    "until",
    "waiting",
];

/// Both stores said the same, or what was different.
type Same<T = ()> = Result<T, String>;

/// What was reached so far, by the names of [`EVERYTHING`].
type Reached = Arc<Mutex<BTreeSet<String>>>;

/// Fails with the seed, and with the shortest history that was found.
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
            panic!("with EDDYLINE_SEED={seed}: {why}\n\nwhat happened:\n{}", story.join("\n"));
        }
    }
    let reached = reached.lock().unwrap();
    let missing: Vec<&&str> = EVERYTHING.iter().filter(|what| !reached.contains(**what)).collect();
    assert!(cases < ENOUGH || missing.is_empty(), "with EDDYLINE_SEED={seed} never reached: {missing:?}");
}

/// One history; on failure what happened and what was wrong.
fn happen(
    backend: &dyn Backend,
    durable: bool,
    history: &[[u8; 8]],
    reached: &Reached,
) -> Result<(), (Vec<String>, String)> {
    runtime().block_on(async {
        // A store that is opened again starts its turns anew, so a history either has that or several keys.
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
