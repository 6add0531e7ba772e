//! JSON Schemas in a definition. What one means is known to whoever hands in the check, not here.

use serde_json::Value;

use super::draft::Draft;
use super::fields::Out;
use super::source::{Node, NodeValue};

/// Everything that is wrong with a JSON Schema.
pub type CheckSchema<'c> = &'c dyn Fn(&Value) -> Vec<SchemaFault>;

/// Something that is wrong with a JSON Schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaFault {
    /// The way to it: keys of maps, places in lists.
    pub path: Vec<String>,
    pub message: String,
}

/// A JSON Schema, checked by the one who asked for the definition to be read.
pub(super) fn schema(draft: &mut Draft<'_>, path: &str, node: &Node) -> Out<Value> {
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
