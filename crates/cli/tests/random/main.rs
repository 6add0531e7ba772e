//! Random definitions, schemas, expressions, inputs and reports, all of them well-formed and most of them a burden, are
//! thrown at a server, which is killed and started again now and then. Another tenant works beside that. None of its
//! requests takes longer than a second, the server stays alive and within its memory, it makes no decision that it
//! refuses itself, and every run that has not ended in the end can say what it waits for.
//!
//! Two minutes, unless `EDDYLINE_RANDOM_SECONDS` says otherwise; 1800 is what to run before a release:
//!
//! ```text
//! EDDYLINE_RANDOM_SECONDS=1800 EDDYLINE_RANDOM_SEED=$RANDOM \
//!     cargo nextest run -p eddy --test random --no-capture
//! ```
//!
//! A failure prints the seed of its round. `EDDYLINE_RANDOM_SEED` begins with that round. What the generator makes is
//! the same for the same seed; how the requests overtake each other is not.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod chance;
mod definitions;
#[path = "../e2e/eddy.rs"]
#[allow(dead_code, reason = "shared with the tests that kill and restart it")]
mod eddy;
mod expressions;
#[path = "../tenants/rig.rs"]
#[allow(dead_code, reason = "shared with the attacks")]
mod rig;
mod schemas;
#[path = "../tenants/tenant.rs"]
#[allow(dead_code, reason = "shared with the attacks")]
mod tenant;
mod thrower;
#[path = "../tenants/watch.rs"]
#[allow(dead_code, reason = "shared with the attacks")]
mod watch;

use std::time::{Duration, Instant};

use chance::Chance;
use rig::Rig;
use thrower::Thrower;
use watch::Seen;

const SECONDS: &str = "EDDYLINE_RANDOM_SECONDS";
const DEFAULT_SECONDS: u64 = 120;
const SEED: &str = "EDDYLINE_RANDOM_SEED";
const DEFAULT_SEED: u64 = 1;
/// A round is thrown for so long, and judged.
const ROUND: Duration = Duration::from_secs(12);
/// The server is killed after every so many rounds.
const ROUNDS_A_LIFE: u64 = 3;
/// What no request of the other tenant may take longer than.
const SLOWEST: Duration = Duration::from_secs(1);
/// How long the runs that are left get to come to an end, or to something they wait for.
const ENDING: Duration = Duration::from_secs(20);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Throws what the seed makes for one round.
async fn throw(rig: &Rig, seed: u64) -> (Thrower, Seen) {
    let mut thrower = Thrower::new(rig.attacker.clone(), Chance::new(seed));
    let seen = rig.watch_during(thrower.throw(ROUND)).await;
    println!("round {seed}: {thrower}; {seen}{} MB", rig.memory_kb("VmRSS") >> 10);
    (thrower, seen)
}

#[tokio::test]
async fn whatever_can_be_registered_is_nobody_elses_loss() {
    let (seconds, first) = (setting(SECONDS, DEFAULT_SECONDS), setting(SEED, DEFAULT_SEED));
    let over = Instant::now() + Duration::from_secs(seconds).saturating_sub(ENDING);
    let mut rig = Rig::start(&["--lease", "2s"]).await;
    let mut round = first;
    let mut started = Vec::new();
    while Instant::now() < over {
        let (mut thrower, mut seen) = throw(&rig, round).await;
        if seen.failed.is_none() && seen.slowest() >= SLOWEST {
            // Something else on the machine may have spoilt the measurement. The same once more tells.
            println!("round {round} once more");
            started.extend(thrower.into_runs());
            (thrower, seen) = throw(&rig, round).await;
        }
        let slowest = seen.slowest();
        assert!(seen.failed.is_none() && slowest < SLOWEST, "round {round}: {:?}, {slowest:?}: {seen}", seen.failed);
        rig.check_memory();
        assert_eq!(rig.metric("eddyline_bugs_total").await, 0.0, "round {round}: a decision was refused as impossible");
        thrower.check_generator();
        started.extend(thrower.into_runs());
        round += 1;
        if (round - first).is_multiple_of(ROUNDS_A_LIFE) {
            rig.eddy.kill();
            rig.eddy.restart();
        }
    }
    thrower::all_end_or_wait(&rig, &started, ENDING).await;
}
