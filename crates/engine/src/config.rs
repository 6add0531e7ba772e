//! What can be set, with the values that suit most. Everything has a named limit.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_machine::{Millis, RunId};

/// A payload takes at most this many bytes as JSON, unless [`Config::max_payload_bytes`] says otherwise.
pub const MAX_PAYLOAD_BYTES: usize = 2 << 20;
/// What [`Config::max_payload_bytes`] may be: an input is put together from several payloads, and a body has one at least.
pub const PAYLOAD_BYTES_RANGE: RangeInclusive<usize> = 1 << 10..=8 << 20;
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
    /// How long things are kept, unless a namespace has a setting of its own.
    pub retention: Retention,
    /// How long a silent worker counts as online; three leases where it is not set.
    pub offline_after_ms: Option<Millis>,
    /// A payload takes at most this many bytes as JSON.
    pub max_payload_bytes: usize,
    /// Payloads of at least this many bytes get a warning. Defaults to half of the payload limit.
    pub large_payload_bytes: Option<usize>,
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

/// How long things are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// What is due is deleted within this time.
    pub every_ms: Millis,
    /// Timelines, steps and values, from the end of their run on. Not longer than `runs_ms`.
    pub timelines_ms: Millis,
    /// Headers and the run index, from the end of the run on.
    pub runs_ms: Millis,
    /// Events, from when they were published; longer where a flow looks back further.
    pub events_ms: Millis,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention { every_ms: 30_000, timelines_ms: 7 * DAY_MS, runs_ms: 30 * DAY_MS, events_ms: 7 * DAY_MS }
    }
}

impl Config {
    pub fn offline_after_ms(&self) -> Millis {
        self.offline_after_ms.unwrap_or(self.lease_ms)
    }

    /// How often a worker is to show that it is alive: two heartbeats may be lost before its lease is, or before it counts
    /// as offline.
    pub fn heartbeat_ms(&self) -> Millis {
        (self.lease_ms.min(self.offline_after_ms()) / 3).max(1)
    }

    pub fn large_payload_bytes(&self) -> usize {
        self.large_payload_bytes.unwrap_or(self.max_payload_bytes / 2)
    }

    /// A payload of more bytes is shown by reference, wherever payloads are shown: one of that size can be stored in one
    /// piece, a larger one is an aggregate of several. An expression may write [`MAX_PAYLOAD_BYTES`] whatever is set.
    pub fn max_shown_bytes(&self) -> usize {
        self.max_payload_bytes.max(MAX_PAYLOAD_BYTES)
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
            offline_after_ms: None,
            max_payload_bytes: MAX_PAYLOAD_BYTES,
            large_payload_bytes: None,
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
