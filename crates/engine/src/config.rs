//! Settings with their defaults, and the named limits.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_machine::{Millis, RunId};
use eddyline_store::InstanceInfo;

/// The default limit of a payload, in bytes of JSON; see [`Config::max_payload_bytes`].
pub const MAX_PAYLOAD_BYTES: usize = 2 << 20;
/// The valid values of [`Config::max_payload_bytes`]: an assembled input contains several payloads, and a request body
/// at least one.
pub const PAYLOAD_BYTES_RANGE: RangeInclusive<usize> = 1 << 10..=8 << 20;
/// The limit, in bytes, of an input assembled from many payloads, such as that of a step after a spread.
pub const MAX_INPUT_BYTES: usize = 12 << 20;
/// The memo of a code run is read in parts; a part ends when it exceeds this many bytes.
pub const MAX_MEMO_BYTES: usize = 4 << 20;
/// How deep a payload may nest, so that aggregates of payloads can still be parsed.
pub const MAX_PAYLOAD_DEPTH: u16 = 64;
/// The longest wait, ten years: a longer one is a mistake, and sums of a few such waits do not overflow.
pub const MAX_WAIT_MS: Millis = 3_650 * DAY_MS;
/// The size of the cache of parsed definitions; the least recently used are evicted.
pub const FLOW_CACHE_BYTES: usize = 64 << 20;
/// The budget, in steps, for the schema checks of all events of one report together: about a second.
pub const MAX_REPORT_CHECK_STEPS: u64 = 40_000_000;
/// The same for the inputs of all runs that one call starts: about ten seconds. Others get their turn in between.
pub const MAX_START_CHECK_STEPS: u64 = 400_000_000;
/// The most runs that one call starts.
pub const MAX_STARTS: usize = 10_000;
/// The limit of a run's metadata, which is part of the header that every commit writes.
pub const MAX_METADATA_BYTES: usize = 16 << 10;
/// The most tasks that one claim gets.
pub const MAX_CLAIM: usize = 1_000;
/// When the inputs of claimed tasks have this many bytes, the remaining tasks go into another response.
pub const MAX_CLAIM_BYTES: usize = 16 << 20;

/// How many calls of [`Config::chance`] one read of the system's randomness serves.
const CHANCES: usize = 128;
const DAY_MS: Millis = 24 * 60 * 60 * 1_000;

#[derive(Clone)]
pub struct Config {
    /// The name of this instance, in logs and metrics.
    pub instance: String,
    /// What other instances and people are told about this one.
    pub info: InstanceInfo,
    /// The base URL of webhooks.
    pub hooks: String,
    /// How long a worker holds a task without a heartbeat.
    pub lease_ms: Millis,
    /// The most transitions in one commit.
    pub batch: usize,
    /// How many commits are sent to the store at a time: one is being written while the next one waits.
    pub in_flight: usize,
    /// The capacity of the committer's channel; when it is full, callers wait.
    pub queue: usize,
    /// The size of the cache of runs, in bytes. A single larger run is still cached while it is in use.
    pub cache_bytes: usize,
    /// How many due items a loop takes at a time.
    pub due_batch: usize,
    /// How often loops poll the store, even without a hint. Less often if the store tells what other instances change.
    pub poll_ms: Millis,
    pub reconcile_ms: Millis,
    /// How many runs the reconciler checks per round.
    pub reconcile_batch: usize,
    /// The default retention; a namespace may override it.
    pub retention: Retention,
    /// How long a silent worker counts as online; one lease if not set.
    pub offline_after_ms: Option<Millis>,
    /// The limit of a payload, in bytes of JSON.
    pub max_payload_bytes: usize,
    /// Payloads of at least this many bytes cause a warning. Defaults to half of the payload limit.
    pub large_payload_bytes: Option<usize>,
    /// Starts are refused while this many tasks of the namespace wait to be claimed. Children and retries are not
    /// refused.
    pub backlog: usize,
    /// The most descendants of one run: its children, their children and so on, ended or not, while they are kept.
    /// Beyond that, steps that start a child fail.
    pub max_descendants: u64,
    /// The source of randomness: 32 fresh bytes per call.
    pub chance: Chance,
    /// A decision that takes longer than this many seconds counts as hanging.
    pub hang_s: u32,
    /// Called when a decision hangs; if not set, the engine fails. It is called on its own thread, since all others may
    /// hang too.
    pub on_hang: Option<OnHang>,
    /// Called before each decision, on the thread that makes it. For tests.
    pub on_decision: Option<OnDecision>,
}

/// A decision that is about to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    pub run: RunId,
    /// It is made on another thread than the committer's.
    pub apart: bool,
}

pub type OnHang = Arc<dyn Fn(&str) + Send + Sync>;
pub type OnDecision = Arc<dyn Fn(Decision) + Send + Sync>;
pub type Chance = Arc<dyn Fn() -> [u8; 32] + Send + Sync>;

/// How long data is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// How often data is checked for deletion.
    pub every_ms: Millis,
    /// Timelines, steps and values, counted from the end of the run. At most `runs_ms`.
    pub timelines_ms: Millis,
    /// Headers and the run index, counted from the end of the run.
    pub runs_ms: Millis,
    /// Events, counted from their publication; longer if a flow looks back further.
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

    /// How often a worker sends a heartbeat: two may be lost before its lease expires or it counts as offline.
    pub fn heartbeat_ms(&self) -> Millis {
        (self.lease_ms.min(self.offline_after_ms()) / 3).max(1)
    }

    pub fn large_payload_bytes(&self) -> usize {
        self.large_payload_bytes.unwrap_or(self.max_payload_bytes / 2)
    }

    /// Larger payloads are shown as references everywhere. A payload of up to this size may be stored in one piece; a
    /// larger one is an aggregate. An expression may write [`MAX_PAYLOAD_BYTES`] whatever is configured.
    pub fn max_shown_bytes(&self) -> usize {
        self.max_payload_bytes.max(MAX_PAYLOAD_BYTES)
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            instance: "eddy".to_owned(),
            info: InstanceInfo { name: "eddy".to_owned(), ..InstanceInfo::default() },
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

/// The operating system's randomness, read for many calls at once: a step takes three. If it fails, the process aborts:
/// secrets could not be generated.
fn system_chance() -> Chance {
    let pool = Mutex::new((Box::new([[0; 32]; CHANCES]), 0));
    Arc::new(move || {
        let mut pool = pool.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, left) = &mut *pool;
        if *left == 0 {
            if let Err(error) = getrandom::fill(bytes.as_flattened_mut()) {
                tracing::error!("could not read the system's randomness: {error}");
                std::process::abort();
            }
            *left = CHANCES;
        }
        *left -= 1;
        // Clears the bytes that are given out.
        std::mem::take(&mut bytes[*left])
    })
}
