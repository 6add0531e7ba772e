//! A definition's text, in JSON or YAML, to a [`Flow`].
//!
//! ```text
//! text ──source──▶ nodes with positions ──parse, step──▶ draft ──analyse──▶ graph
//!                                             │            └──reads──▶ problems
//!                                             └──canonical──▶ version
//! ```
//!
//! Reading never stops at a problem: an author gets all of them at once, each with its path and position, and a flow
//! only if there are none. The canonical form is built by the same code that reads a field, so the two cannot disagree
//! about what a definition says.

mod analyse;
mod analysis;
mod canonical;
mod draft;
mod duration;
mod fields;
mod json;
mod parse;
mod policy;
mod problem;
mod reads;
mod schema;
mod source;
mod step;
#[cfg(test)]
mod tests;
mod warnings;
mod yaml;

pub use analysis::{Analysis, Edge, analysis};
pub use duration::{MAX_DURATION_MS, duration};
pub use fields::{wrong_name, wrong_word};
pub use problem::{Problem, Problems};
pub use schema::{CheckSchema, SchemaFault};

use crate::flow::Flow;

pub const MAX_TEXT_BYTES: usize = 1 << 20;
/// Lists and maps inside each other, in the text.
pub const MAX_DEPTH: usize = 64;
/// Values in the text, with every alias counted as what it stands for.
pub const MAX_NODES: usize = 100_000;
/// Expressions in the texts of a definition: reading one takes longer than reading the text around it.
pub const MAX_EXPRESSIONS: usize = 10_000;
/// Problems that are told at once.
pub const MAX_PROBLEMS: usize = 200;
/// Steps of a flow, those in groups and in `finally` included.
pub const MAX_STEPS: usize = 500;
/// Groups inside each other.
pub const MAX_GROUP_DEPTH: usize = 16;
pub const MAX_ARMS: usize = 500;
pub const MAX_EVENTS: usize = 1_000;
/// Of which steps of one scope wait for which.
pub const MAX_EDGES: usize = 100_000;
pub const MAX_ROUNDS: u32 = 1_000_000;
pub const MAX_PARALLEL: u32 = 100_000;
pub const DEFAULT_PARALLEL: u32 = 1_000;
pub const MAX_NAME_CHARS: usize = 128;

/// A definition that has no problems.
#[derive(Debug, Clone)]
pub struct Parsed {
    pub flow: Flow,
    /// What is legal but hardly meant.
    pub warnings: Vec<Problem>,
    /// Whether the text has a name of its own.
    pub names_itself: bool,
}

/// A text in JSON or YAML to a flow: every problem at once, nothing unless there are none.
pub fn parse(text: &str) -> Result<Parsed, Problems> {
    parse_named(None, text)
}

/// The same for a flow whose name is known from elsewhere: the text may leave it out, or must agree.
pub fn parse_named(name: Option<&str>, text: &str) -> Result<Parsed, Problems> {
    parse_checked(name, text, &|_| Vec::new())
}

/// The same by somebody who knows what a JSON Schema is: what is wrong with one is told with everything else.
pub fn parse_checked(name: Option<&str>, text: &str, schemas: CheckSchema<'_>) -> Result<Parsed, Problems> {
    let root = source::read(text).map_err(|problem| Problems(vec![problem]))?;
    parse::flow(name, text, schemas, &root)
}
