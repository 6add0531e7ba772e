//! Workers: registration and heartbeats.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::tasks::{News, NewsNext};
use crate::{Timestamp, nullable};

/// `POST /v1/workers`. Registering the same `instance` again gives the same worker; without one, each registration is a
/// new worker.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RegisterWorker {
    /// Defaults to `["default"]`.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub queues: Vec<String>,
    /// A worker with neither handlers nor flows is offered every task on its queues.
    #[serde(deserialize_with = "nullable")]
    pub handlers: Vec<String>,
    /// What handlers take and return, by name: for forms and generated types. Inputs are not checked against it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "nullable")]
    pub handler_schemas: BTreeMap<String, HandlerSchemas>,
    /// Unknown flows are registered.
    #[serde(deserialize_with = "nullable")]
    pub flows: BringsFlows,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<u32>,
    #[serde(deserialize_with = "nullable")]
    pub labels: Vec<String>,
    /// The worker's build.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// A random text of 1 to 200 characters that the process generates once and keeps secret: whoever knows it can
    /// connect as this worker. It is never shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// For people reading the list of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// JSON Schemas of a handler's input and output.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HandlerSchemas {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
}

/// An item of `GET /v1/handlers`: a handler whose workers registered schemas.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HandlerInfo {
    pub handler: String,
    pub input_schema: Option<Value>,
    pub output_schema: Option<Value>,
}

/// Code flows that a worker registers: a list, or an object from name to build.
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
        /// The rest of the definition: `queue`, `retry`, `step_retry`, `timeout`, … Fields left out keep their
        /// registered value.
        #[serde(flatten)]
        definition: Map<String, Value>,
    },
}

/// The code flows of a worker: their names, or an object from name to build.
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
    /// The ids of the tasks that the worker holds.
    #[serde(deserialize_with = "nullable")]
    pub tasks: Vec<String>,
    /// Counted since the worker started; unchanged if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<u64>,
    /// For code runs: the highest memo `n` that the worker has, by task. Defaults to that of the claim.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "nullable")]
    pub seen: BTreeMap<String, u64>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Beat {
    /// Tasks that the worker no longer holds: the lease expired, the attempt timed out, or it has sent the final
    /// report.
    pub lost: Vec<String>,
    /// Tasks whose result is no longer needed: their run or step was cancelled or ended without them.
    pub cancel: Vec<String>,
    /// Those of `cancel` that are functions of code runs and may still undo: the worker keeps the task, reports `unwind`,
    /// undoes, and reports `fail`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unwind: Vec<String>,
    /// The worker should finish its tasks and leave.
    pub drain: bool,
    pub news: News,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub news_next: NewsNext,
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
    /// The number of tasks in its last heartbeat.
    pub tasks: u32,
    pub completed: u64,
    pub failed: u64,
}
