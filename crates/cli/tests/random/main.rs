//! Sends random definitions, schemas, expressions, inputs and reports, all well-formed and most of them expensive, to a
//! server that is killed and restarted now and then, while another tenant works. No request of that tenant may take
//! longer than a second, the server must stay alive and within its memory, no decision may be refused as a bug, and
//! every run that has not ended must be able to say what it waits for.
//!
//! Takes two minutes, or `EDDYLINE_RANDOM_SECONDS`; run 1800 before a release:
//!
//! ```text
//! EDDYLINE_RANDOM_SECONDS=1800 EDDYLINE_RANDOM_SEED=$RANDOM \
//!     cargo nextest run -p eddy --test random --no-capture
//! ```
//!
//! A failure prints the seed of its round; `EDDYLINE_RANDOM_SEED` begins with that round. The same seed generates the
//! same requests, but their order of arrival may differ.

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
/// How long a round of requests lasts.
const ROUND: Duration = Duration::from_secs(12);
/// How many rounds there are between two kills of the server.
const ROUNDS_A_LIFE: u64 = 3;
/// The longest that a request of the other tenant may take.
const SLOWEST: Duration = Duration::from_secs(1);
/// How long the remaining runs have to end, or to reach something they wait for.
const ENDING: Duration = Duration::from_secs(20);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Sends the requests of one round.
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
            // Another process may have disturbed the measurement: repeat the round.
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
