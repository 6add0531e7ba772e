//! Parses a text into a tree whose nodes carry their positions.

use std::collections::BTreeSet;

use serde_json::{Number, Value};

use super::problem::{Place, Problem};
use super::yaml::{self, TreeError};
use super::{MAX_DEPTH, MAX_EXPRESSIONS, MAX_NODES, MAX_TEXT_BYTES};

#[derive(Debug, Clone, PartialEq)]
pub(super) struct SourceNode {
    pub value: NodeValue,
    pub at: Place,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum NodeValue {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    List(Vec<SourceNode>),
    Map(Vec<(Key, SourceNode)>),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Key {
    pub text: String,
    pub at: Place,
}

/// Parses a text. Stops at the first syntax error.
pub(super) fn read(text: &str) -> Result<SourceNode, Problem> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("the definition has {} bytes, the limit is {MAX_TEXT_BYTES}", text.len());
        return Err(Problem::new("", Place::START, message));
    }
    let root = yaml::read(text).or_else(|fault| match fault {
        TreeError::Syntax(problem) => json(text, problem),
        TreeError::Content(problem) => Err(problem),
    })?;
    let expressions = root.expressions();
    if expressions > MAX_EXPRESSIONS {
        let message =
            format!("the definition has {expressions} expressions in `${{…}}`, the limit is {MAX_EXPRESSIONS}");
        return Err(Problem::new("", Place::START, message));
    }
    if root.value == NodeValue::Null {
        let help = "a flow begins with `name: …` and `steps:`, in YAML or JSON";
        return Err(Problem::new("", Place::START, "the definition is empty").help(help));
    }
    Ok(root)
}

/// JSON that the YAML parser rejects: indented with tabs, with very long keys or control characters. It loses its
/// positions. If it is not JSON either, the author gets the error of the language that the text seems to be in.
fn json(text: &str, problem: Problem) -> Result<SourceNode, Problem> {
    match serde_json::from_str(text) {
        Ok(value) => {
            let root = SourceNode::from_json(value);
            let (size, depth) = yaml::measure(&root);
            if size > MAX_NODES || depth > MAX_DEPTH { Err(problem) } else { Ok(root) }
        }
        Err(error) if is_quoted(text) && !error.to_string().starts_with("recursion limit") => {
            let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).max(1);
            let at = Place { line: count(error.line()), column: count(error.column()) };
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            Err(Problem::new("", at, message))
        }
        Err(_) => Err(problem),
    }
}

/// Whether a text begins as JSON does and YAML hardly ever: with a brace and a quote.
fn is_quoted(text: &str) -> bool {
    let rest = text.trim_start().strip_prefix(['{', '[']);
    rest.is_some_and(|rest| rest.trim_start().starts_with('"'))
}

impl SourceNode {
    fn from_json(value: Value) -> SourceNode {
        let value = match value {
            Value::Null => NodeValue::Null,
            Value::Bool(value) => NodeValue::Bool(value),
            Value::Number(value) => NodeValue::Number(value),
            Value::String(text) => NodeValue::String(text),
            Value::Array(items) => NodeValue::List(items.into_iter().map(SourceNode::from_json).collect()),
            Value::Object(fields) => {
                let field = |(text, value)| (Key { text, at: Place::START }, SourceNode::from_json(value));
                NodeValue::Map(fields.into_iter().map(field).collect())
            }
        };
        SourceNode { value, at: Place::START }
    }

    pub fn json(&self) -> Value {
        match &self.value {
            NodeValue::Null => Value::Null,
            NodeValue::Bool(value) => Value::Bool(*value),
            NodeValue::Number(number) => Value::Number(number.clone()),
            NodeValue::String(text) => Value::String(text.clone()),
            NodeValue::List(items) => items.iter().map(SourceNode::json).collect(),
            NodeValue::Map(entries) => {
                // Of a duplicate key the first wins; the duplicate is reported as a problem.
                entries.iter().rev().map(|(key, node)| (key.text.clone(), node.json())).collect()
            }
        }
    }

    /// Approximate number of expressions in its strings.
    fn expressions(&self) -> usize {
        match &self.value {
            NodeValue::String(text) => text.matches("${").count(),
            NodeValue::List(items) => items.iter().map(SourceNode::expressions).sum(),
            NodeValue::Map(entries) => entries.iter().map(|(_, node)| node.expressions()).sum(),
            NodeValue::Null | NodeValue::Bool(_) | NodeValue::Number(_) => 0,
        }
    }

    /// Describes the node, to follow "found".
    pub fn found(&self) -> String {
        match &self.value {
            NodeValue::Null => "nothing (null)".into(),
            NodeValue::Bool(value) => format!("`{value}`"),
            NodeValue::Number(number) => format!("the number {number}"),
            NodeValue::String(text) => format!("the string \"{}\"", shorten(text)),
            NodeValue::List(_) => "a list".into(),
            NodeValue::Map(_) => "a map".into(),
        }
    }

    /// The value of a map key, or the list item at that index.
    pub fn get(&self, key: &str) -> Option<&SourceNode> {
        match &self.value {
            NodeValue::List(items) => key.parse().ok().and_then(|at: usize| items.get(at)),
            NodeValue::Map(entries) => entries.iter().find(|(name, _)| name.text == key).map(|(_, node)| node),
            _ => None,
        }
    }

    /// Reports every duplicate key, with its path.
    pub fn doubled(&self, path: &str, tell: &mut impl FnMut(Problem)) {
        match &self.value {
            NodeValue::List(items) => {
                for (at, item) in items.iter().enumerate() {
                    item.doubled(&format!("{path}[{at}]"), tell);
                }
            }
            NodeValue::Map(entries) => {
                let mut seen = BTreeSet::new();
                for (key, node) in entries {
                    let path = join(path, &key.text);
                    if !seen.insert(&key.text) {
                        tell(Problem::new(&path, key.at, format!("duplicate key `{}`", shorten(&key.text))));
                    }
                    node.doubled(&path, tell);
                }
            }
            _ => {}
        }
    }
}

/// `steps` and `pay` to `steps.pay`.
pub(super) fn join(path: &str, key: &str) -> String {
    let key = shorten(key);
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// User text in a message: long enough to recognise, on one line.
pub(super) fn shorten(text: &str) -> String {
    const LONGEST: usize = 60;
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = text.chars().take(LONGEST).map(clean).collect();
    if text.chars().nth(LONGEST).is_some() {
        short.push('…');
    }
    short
}

/// Parses a decimal number of JSON or YAML. Not through serde_json, whose fast float parsing may be off in the last
/// digit, so that a definition would not equal its own canonical form.
pub(super) fn number(text: &str) -> Result<Number, String> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let text = text.strip_prefix('+').unwrap_or(text);
    if unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        let whole = text.parse::<i64>().map(Number::from).or_else(|_| text.parse::<u64>().map(Number::from));
        return whole.map_err(|_| too_long(text));
    }
    text.parse::<f64>().ok().and_then(Number::from_f64).ok_or_else(|| too_long(text))
}

fn too_long(text: &str) -> String {
    format!("the number {} is too large to be represented exactly; write it as a string, in quotes", shorten(text))
}
