//! JSON Schemas in a definition. The caller passes in the function that checks them.

use serde_json::Value;

use super::draft::Draft;
use super::fields::Out;
use super::source::{NodeValue, SourceNode};

/// Returns all errors of a JSON Schema.
pub type CheckSchema<'c> = &'c dyn Fn(&Value) -> Vec<SchemaFault>;

/// An error in a JSON Schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaFault {
    /// The path to it: map keys and list indexes.
    pub path: Vec<String>,
    pub message: String,
}

/// Reads a JSON Schema and checks it with [`Draft::schemas`].
pub(super) fn schema(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Value> {
    if !matches!(node.value, NodeValue::Map(_)) {
        draft.expected(path, node, "a JSON Schema such as {type: object}");
        return None;
    }
    let schema = node.json();
    for fault in (draft.schemas)(&schema) {
        let (path, at) = draft.locate(path, node, &fault.path, 0);
        draft.problem(&path, at, format!("this is not a JSON Schema: {}", fault.message));
    }
    Some((schema.clone(), schema))
}
