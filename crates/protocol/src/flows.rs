//! Definitions.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Timestamp;

/// The answer to `PUT /v1/flows/{name}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlowRegistered {
    pub name: String,
    pub version: String,
    /// It was not the current version before.
    pub changed: bool,
    pub warnings: Vec<Problem>,
}

/// Something in a definition, with its place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Where in the definition: `steps.pay.retry.attempts`.
    pub path: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// Where in the text, both from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<u32>,
}

/// A flow, at its current version or the one asked for.
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

/// The graph as it was understood; of a code flow it is empty.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Analysis {
    /// Steps by how far they are from the start.
    pub levels: Vec<Vec<String>>,
    pub edges: Vec<Edge>,
    /// Steps that wait for nothing.
    pub entry: Vec<String>,
    pub steps: Vec<AnalysedStep>,
    /// The same of each group, by the name of the step that is the group.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, Analysis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finally: Option<Box<Analysis>>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Edge {
    pub from: String,
    pub to: String,
    /// The arm as it is written: `load`, `failed:ship`, `step.a.done`.
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
    /// How many times it happens: `spread`, `repeat`, or nothing for once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub iterates: Vec<String>,
}

/// How many runs of a flow there are, by status.
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
