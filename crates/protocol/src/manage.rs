//! Queues, limits, keys, namespaces, and what a server says of itself.

use serde::{Deserialize, Serialize};

use crate::{Span, Timestamp};

/// So many in so much time: `{"count": 10, "per": "1s", "burst": 20}`. `per` is a second and `burst` is `count` where they
/// are left out; a bare number is so many in a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WrittenRate")]
pub struct Rate {
    pub count: u32,
    pub per: Span,
    pub burst: u32,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a rate: a number of tasks a second, or {count, per, burst}")]
enum WrittenRate {
    PerSecond(u32),
    Whole { count: u32, per: Option<Span>, burst: Option<u32> },
}

impl From<WrittenRate> for Rate {
    fn from(written: WrittenRate) -> Rate {
        let (count, per, burst) = match written {
            WrittenRate::PerSecond(count) => (count, None, None),
            WrittenRate::Whole { count, per, burst } => (count, per, burst),
        };
        Rate { count, per: per.unwrap_or(Span::from_ms(1_000)), burst: burst.unwrap_or(count) }
    }
}

/// `PUT /v1/queues/{name}`: the rules as a whole; what is left out is without bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueRules {
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    /// How many tasks of one flow are claimed at once.
    pub flow_concurrency: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueInfo {
    pub name: String,
    pub paused: bool,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    pub flow_concurrency: Option<u32>,
    /// Tasks that wait for a worker.
    pub ready: u64,
    /// Tasks that a worker has.
    pub claimed: u64,
    /// Since when the task has waited that has waited longest.
    pub oldest: Option<Timestamp>,
}

/// `PUT /v1/limits/{name}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitRules {
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitInfo {
    pub name: String,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
}

/// What a key may be used for. `admin` is all of them, and keys, namespaces, queues and workers besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Look at everything but secrets.
    Read,
    /// Register flows, start runs and act on them.
    Start,
    /// Publish events, open gates.
    Signal,
    /// Claim tasks and report on them.
    Worker,
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 5] = [Scope::Read, Scope::Start, Scope::Signal, Scope::Worker, Scope::Admin];
}

/// `POST /v1/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CreateKey {
    /// What it is for, in a person's words.
    pub name: String,
    pub scopes: Vec<Scope>,
    /// The namespace it is bound to; the caller's own where it is left out. Another one takes a key of `default`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in: Option<Span>,
}

/// The only time that the key itself is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyCreated {
    pub key: String,
    #[serde(flatten)]
    pub info: KeyInfo,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    pub key_id: String,
    pub name: String,
    pub namespace: String,
    pub scopes: Vec<Scope>,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}

/// `POST /v1/namespaces`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateNamespace {
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceInfo {
    pub name: String,
    pub created_at: Option<Timestamp>,
}

/// `GET /v1/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    pub name: String,
    pub version: String,
    pub protocol: u32,
    /// `memory`, `embedded`, `postgres` or `redis`.
    pub store: String,
    pub instance: String,
    pub namespace: String,
    pub keys: bool,
    pub lease_ms: u64,
    pub heartbeat_ms: u64,
    pub started_at: Timestamp,
    pub now: Timestamp,
}
