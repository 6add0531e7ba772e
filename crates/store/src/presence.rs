//! The processes that serve from a store.

use eddyline_machine::Millis;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A process that serves from a store. New with each start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct InstanceId(pub Uuid);

/// What a process says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct InstanceInfo {
    pub name: String,
    /// The version of Eddyline.
    pub version: String,
    pub host: Option<String>,
    pub pid: Option<u32>,
    /// Where its API is, if it serves one.
    pub url: Option<String>,
}

/// A process that checked in ([`crate::Store::check_in`]) and did not check out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceState {
    pub id: InstanceId,
    pub info: InstanceInfo,
    pub started_at: Millis,
    /// When it last checked in.
    pub seen_at: Millis,
}

/// The result of [`crate::Store::check_in`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Present {
    pub now: Millis,
    /// All processes, the one that checks in included, by the time of their start.
    pub instances: Vec<InstanceState>,
    /// No process had checked in or asked for expired leases for more than [`crate::UNWATCHED_MS`]: the next call of
    /// [`crate::Store::due`] for leases adds that time to all of them.
    pub unwatched: bool,
}

/// How long a process that stopped checking in is still listed.
pub const LISTED_MS: Millis = 10 * 60 * 1_000;
