//! Workers: who they are, and that they are alive.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::tasks::News;
use crate::{Timestamp, nullable};

/// `POST /v1/workers`. The same `instance` again is the same worker; without one, every registration is a new worker.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RegisterWorker {
    /// `["default"]` where it is left out.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub queues: Vec<String>,
    /// With neither handlers nor flows the worker is offered everything on its queues.
    #[serde(deserialize_with = "nullable")]
    pub handlers: Vec<String>,
    /// Those that are not there are registered.
    #[serde(deserialize_with = "nullable")]
    pub flows: BringsFlows,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u32>,
    #[serde(deserialize_with = "nullable")]
    pub labels: Vec<String>,
    /// The build of the worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// A random text of 1 to 200 characters that the process makes once and keeps to itself: whoever knows it can connect
    /// as this worker. It is not shown to anybody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// For people who look at the list of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// Code flows that a worker brings along: a list, or their names each with the build of its function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "expected the code flows: a list of names or of objects with a `name`, or an object from name to build"
)]
pub enum BringsFlows {
    List(Vec<BringsFlow>),
    Builds(BTreeMap<String, Option<String>>),
}

impl Default for BringsFlows {
    fn default() -> BringsFlows {
        BringsFlows::List(Vec::new())
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BringsFlow {
    Name(String),
    Whole {
        name: String,
        /// The build of its function.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        build: Option<String>,
        /// The definition, as far as it is not left to what is there: `queue`, `retry`, `step_retry`, `timeout`, …
        #[serde(flatten)]
        definition: Map<String, Value>,
    },
}

/// Code flows that a worker has: their names, or their names each with the build of its function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Flows {
    Names(Vec<String>),
    Builds(BTreeMap<String, Option<String>>),
}

impl Default for Flows {
    fn default() -> Flows {
        Flows::Names(Vec::new())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRegistered {
    pub worker_id: String,
    pub lease_ms: u64,
    pub heartbeat_ms: u64,
}

/// `POST /v1/workers/{id}/heartbeat`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Heartbeat {
    /// The ids of the tasks that the worker has.
    #[serde(deserialize_with = "nullable")]
    pub tasks: Vec<String>,
    /// Since it started; as it was, where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<u64>,
    /// Of code runs: the highest `n` of the memo that the worker has, by task. Without it, that of the claim.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "nullable")]
    pub seen: BTreeMap<String, u64>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Beat {
    /// Tasks that the worker no longer has: their lease was lost, their time is up, or it has reported the last of them.
    pub lost: Vec<String>,
    /// Tasks whose result nobody wants any more: their run, or their step, was cancelled or ended without them.
    pub cancel: Vec<String>,
    /// The worker is to finish what it has and leave.
    pub drain: bool,
    pub news: News,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerInfo {
    pub worker_id: String,
    /// `online`, `draining` or `offline`.
    pub status: String,
    pub queues: Vec<String>,
    pub handlers: Vec<String>,
    pub flows: Flows,
    pub max_concurrent: Option<u32>,
    pub labels: Vec<String>,
    pub version: Option<String>,
    pub host: Option<String>,
    pub pid: Option<u32>,
    pub started_at: Timestamp,
    pub seen_at: Timestamp,
    /// Tasks that it said it has, with its last sign of life.
    pub tasks: u32,
    pub completed: u64,
    pub failed: u64,
}
