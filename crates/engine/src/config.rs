//! What can be set, with the values that suit most. Everything has a named limit.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_machine::{Millis, RunId};

/// A payload takes at most this many bytes as JSON.
pub const MAX_PAYLOAD_BYTES: usize = 2 << 20;
/// From this many on whoever sends it is warned.
pub const LARGE_PAYLOAD_BYTES: usize = 1 << 20;
/// What is put together from many payloads, such as the input of a step after a spread, takes at most this many.
pub const MAX_INPUT_BYTES: usize = 12 << 20;
/// What a code run remembers is read in parts: one that has more than this many bytes is closed.
pub const MAX_MEMO_BYTES: usize = 4 << 20;
/// A payload nests at most this deep, so that aggregates of payloads stay readable.
pub const MAX_PAYLOAD_DEPTH: u16 = 64;
/// Nothing waits longer than ten years: more is a mistake, and sums of a few of them are far from overflowing.
pub const MAX_WAIT_MS: Millis = 3_650 * DAY_MS;
/// Parsed definitions are cached up to this many bytes; those that were not used for the longest time are evicted.
pub const FLOW_CACHE_BYTES: usize = 64 << 20;
/// What the JSON Schemas of all events of one report may cost together, in steps: about a second.
pub const MAX_REPORT_CHECK_STEPS: u64 = 40_000_000;
/// The same of the inputs of all runs that one call starts: about ten seconds. Others get their turn in between.
pub const MAX_START_CHECK_STEPS: u64 = 400_000_000;
/// How many runs one call starts.
pub const MAX_STARTS: usize = 10_000;
/// How large the metadata of a run may be: it is part of the header, which every commit writes.
pub const MAX_METADATA_BYTES: usize = 16 << 10;
/// How many tasks one claim gets.
pub const MAX_CLAIM: usize = 1_000;
/// When they have this many bytes of inputs, the rest of them goes into another answer.
pub const MAX_CLAIM_BYTES: usize = 16 << 20;

/// Calls that one portion of the system's randomness is enough for.
const CHANCES: usize = 128;
const DAY_MS: Millis = 24 * 60 * 60 * 1_000;

#[derive(Clone)]
pub struct Config {
    /// The name of this instance, in logs and metrics.
    pub instance: String,
    /// Where webhooks come in.
    pub hooks: String,
    /// How long a worker has a task without a sign of life.
    pub lease_ms: Millis,
    /// Transitions in one commit.
    pub batch: usize,
    /// Commits on their way to the store: one is being written while the next gathers.
    pub in_flight: usize,
    /// Inputs that wait for the committer before callers have to.
    pub queue: usize,
    /// What cached runs may take, in bytes. One run that is larger is cached all the same while it is in use.
    pub cache_bytes: usize,
    /// Due items taken at a time.
    pub due_batch: usize,
    /// A loop looks again after this long, even without a hint.
    pub poll_ms: Millis,
    pub reconcile_ms: Millis,
    /// Runs that the reconciler looks at in one go.
    pub reconcile_batch: usize,
    pub retention: Retention,
    /// So many tasks of a namespace wait to be claimed before starts are refused. Children and retries are not.
    pub backlog: usize,
    /// So many runs may descend from one: its children, their children and so on, ended or not, as long as they are kept.
    /// Beyond that a step that starts a child fails.
    pub max_descendants: u64,
    /// Where randomness comes from: 32 fresh bytes a call.
    pub chance: Chance,
    /// A decision that takes longer than so many seconds hangs.
    pub hang_s: u32,
    /// What happens then; without anything the engine fails. It is called on a thread of its own, since all others may
    /// hang as well.
    pub on_hang: Option<OnHang>,
    /// Called before each decision, on the thread that makes it. For tests that let something happen there.
    pub on_decision: Option<OnDecision>,
}

/// A decision that is about to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    pub run: RunId,
    /// On a thread of its own, apart from the committer's.
    pub apart: bool,
}

pub type OnHang = Arc<dyn Fn(&str) + Send + Sync>;
pub type OnDecision = Arc<dyn Fn(Decision) + Send + Sync>;
pub type Chance = Arc<dyn Fn() -> [u8; 32] + Send + Sync>;

/// How long things are kept after a run's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    pub every_ms: Millis,
    pub timelines_ms: Millis,
    pub headers_ms: Millis,
    pub events_ms: Millis,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention { every_ms: 60_000, timelines_ms: 7 * DAY_MS, headers_ms: 30 * DAY_MS, events_ms: 7 * DAY_MS }
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            instance: "eddy".to_owned(),
            hooks: "http://127.0.0.1:7070/hooks/".to_owned(),
            lease_ms: 30_000,
            batch: 256,
            in_flight: 2,
            queue: 8_192,
            cache_bytes: 256 << 20,
            due_batch: 500,
            poll_ms: 2_000,
            reconcile_ms: 60_000,
            reconcile_batch: 25,
            retention: Retention::default(),
            backlog: 1_000_000,
            max_descendants: 100_000,
            chance: system_chance(),
            hang_s: 60,
            on_hang: None,
            on_decision: None,
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("instance", &self.instance)
            .field("lease_ms", &self.lease_ms)
            .finish_non_exhaustive()
    }
}

/// The operating system's randomness, fetched for many calls at once: a step takes three. Without it no secret could be
/// made, so there is no going on.
fn system_chance() -> Chance {
    let pool = Mutex::new((Box::new([[0; 32]; CHANCES]), 0));
    Arc::new(move || {
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, left) = &mut *pool;
        if *left == 0 {
            if let Err(error) = getrandom::fill(bytes.as_flattened_mut()) {
                tracing::error!("the system has no randomness: {error}");
                std::process::abort();
            }
            *left = CHANCES;
        }
        *left -= 1;
        // Nothing that was given out stays here.
        std::mem::take(&mut bytes[*left])
    })
}
