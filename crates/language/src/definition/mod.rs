//! Parses the text of a definition, JSON or YAML, into a [`Flow`].
//!
//! ```text
//! text ──source──▶ nodes with positions ──parse, step──▶ draft ──resolve──▶ graph
//!                                             │            └──reads──▶ problems
//!                                             └──canonical──▶ version
//! ```
//!
//! Parsing does not stop at the first problem: the author gets all of them at once, each with its path and position,
//! and a flow only if there are none. The code that reads a field also builds its canonical form, so the two cannot
//! disagree.

mod canonical;
mod draft;
mod duration;
mod fields;
mod parse;
mod policy;
mod problem;
mod reads;
mod resolve;
mod schema;
mod shape;
mod source;
mod step;
#[cfg(test)]
mod tests;
mod warnings;
mod yaml;

pub use duration::{MAX_DURATION_MS, duration};
pub use fields::{wrong_name, wrong_word};
pub use problem::{Problem, Problems};
pub use schema::{CheckSchema, SchemaFault};
pub use shape::{Analysis, Edge, analysis};

use serde_json::{Value, json};

use crate::flow::{Body, Flow, Retry};

pub const MAX_TEXT_BYTES: usize = 1 << 20;
/// Nesting depth of lists and maps in the text.
pub const MAX_DEPTH: usize = 64;
/// Values in the text, with every alias expanded.
pub const MAX_NODES: usize = 100_000;
/// Expressions in a definition: parsing one takes longer than parsing the text around it.
pub const MAX_EXPRESSIONS: usize = 10_000;
/// Problems reported at once.
pub const MAX_PROBLEMS: usize = 200;
/// Steps of a flow, including those in groups and in `finally`.
pub const MAX_STEPS: usize = 500;
/// Nesting depth of groups.
pub const MAX_GROUP_DEPTH: usize = 16;
pub const MAX_ARMS: usize = 500;
pub const MAX_EVENTS: usize = 1_000;
/// Dependencies between the steps of one scope.
pub const MAX_EDGES: usize = 100_000;
pub const MAX_ROUNDS: u32 = 1_000_000;
pub const MAX_PARALLEL: u32 = 100_000;
pub const DEFAULT_PARALLEL: u32 = 1_000;
pub const MAX_NAME_CHARS: usize = 128;

/// A definition that has no problems.
#[derive(Debug, Clone)]
pub struct Parsed {
    pub flow: Flow,
    /// Legal, but probably a mistake.
    pub warnings: Vec<Problem>,
    /// Whether the text contains the flow's name.
    pub names_itself: bool,
}

/// Parses JSON or YAML. Reports every problem at once.
pub fn parse(text: &str) -> Result<Parsed, Problems> {
    parse_named(None, text)
}

/// Like [`parse()`], for a flow whose name is given: the text may omit it, or must agree.
pub fn parse_named(name: Option<&str>, text: &str) -> Result<Parsed, Problems> {
    parse_checked(name, text, &|_| Vec::new())
}

/// Parses a retry policy on its own, as a start, a step or a call of a code run gives it.
pub fn parse_retry(written: &Value) -> Result<Retry, Problems> {
    let definition = json!({"name": "policy", "code": true, "retry": written});
    match parse(&definition.to_string())?.flow.body {
        Body::Code(code) => Ok(code.retry),
        Body::Graph(_) => Ok(Retry::default()),
    }
}

/// Like [`parse_named`], also checking JSON Schemas with `schemas`.
pub fn parse_checked(name: Option<&str>, text: &str, schemas: CheckSchema<'_>) -> Result<Parsed, Problems> {
    let root = source::read(text).map_err(|problem| Problems(vec![problem]))?;
    parse::flow(name, text, schemas, &root)
}
