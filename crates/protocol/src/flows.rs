//! Flow definitions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Timestamp;

/// The response to `PUT /v1/flows/{name}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlowRegistered {
    pub name: String,
    pub version: String,
    /// Whether the current version changed.
    pub changed: bool,
    pub warnings: Vec<Problem>,
}

/// A problem in a definition, with its location.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// The path in the definition: `steps.pay.retry.attempts`.
    pub path: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// The position in the text; line and column start at 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<u32>,
}

/// A flow in its current version or the requested one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlowInfo {
    pub name: String,
    pub version: String,
    /// `graph` or `code`.
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registered_at: Option<Timestamp>,
    pub definition: Value,
    pub analysis: Analysis,
    pub stats: FlowStats,
}

/// The analysed graph; empty for a code flow.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Analysis {
    /// Steps by distance from the start.
    pub levels: Vec<Vec<String>>,
    pub edges: Vec<Edge>,
    /// Steps without dependencies.
    pub entry: Vec<String>,
    pub steps: Vec<AnalysedStep>,
    /// The analysis of each group, by the name of the group step.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, Analysis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finally: Option<Box<Analysis>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Edge {
    pub from: String,
    pub to: String,
    /// The arm as written: `load`, `failed:ship`, `step.a.done`.
    pub arm: String,
    /// `step`, `failed`, `ended` or `event`.
    pub kind: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AnalysedStep {
    pub name: String,
    /// `worker`, `set`, `fail`, `return`, `group`, `child` or `gate`.
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// `spread`, `repeat`, both, or empty for a step that runs once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub iterates: Vec<String>,
}

/// The number of runs of a flow, by status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowStats {
    pub pending: u64,
    pub running: u64,
    pub waiting: u64,
    pub paused: u64,
    pub completed: u64,
    pub failed: u64,
    pub cancelled: u64,
}

/// `GET /v1/flows/{name}/builds`: how many runs of a code flow have not ended, by the build that runs them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowBuilds {
    pub flow: String,
    /// `latest`: any worker gets the tasks of a run; `pinned`: only workers of the build that began it.
    pub policy: String,
    pub items: Vec<FlowBuild>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowBuild {
    /// None for runs that no worker has begun, and for workers that name no build.
    pub build: Option<String>,
    /// Runs that have not ended.
    pub runs: u64,
    /// Workers online that have the flow in this build.
    pub workers: u64,
}
