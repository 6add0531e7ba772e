//! A text to a tree in which everything knows its place.

use std::collections::BTreeSet;

use serde_json::{Number, Value};

use super::problem::{Place, Problem};
use super::{MAX_EXPRESSIONS, MAX_TEXT_BYTES, json, yaml};

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node {
    pub value: NodeValue,
    pub at: Place,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum NodeValue {
    Null,
    Bool(bool),
    Number(Number),
    String(String),
    List(Vec<Node>),
    Map(Vec<(Key, Node)>),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Key {
    pub text: String,
    pub at: Place,
}

/// The tree of a text; the one thing that is wrong with its syntax otherwise.
pub(super) fn read(text: &str) -> Result<Node, Problem> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.len() > MAX_TEXT_BYTES {
        let message = format!("the definition has {} bytes, the limit is {MAX_TEXT_BYTES}", text.len());
        return Err(Problem::new("", Place::START, message));
    }
    let root = match text.trim_start().as_bytes() {
        [b'{' | b'[', rest @ ..] => json::read(text).or_else(|wrong| {
            // `{name: order}` is YAML too. When it is neither, the author hears about the language they wrote in.
            let quoted = rest.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'"');
            yaml::read(text).map_err(|other| if quoted { wrong } else { other })
        })?,
        _ => yaml::read(text)?,
    };
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

impl Node {
    pub fn json(&self) -> Value {
        match &self.value {
            NodeValue::Null => Value::Null,
            NodeValue::Bool(value) => Value::Bool(*value),
            NodeValue::Number(number) => Value::Number(number.clone()),
            NodeValue::String(text) => Value::String(text.clone()),
            NodeValue::List(items) => items.iter().map(Node::json).collect(),
            NodeValue::Map(entries) => {
                // The first of a doubled key; the second is a problem that is told.
                entries.iter().rev().map(|(key, node)| (key.text.clone(), node.json())).collect()
            }
        }
    }

    /// How many expressions stand in its texts, about.
    fn expressions(&self) -> usize {
        match &self.value {
            NodeValue::String(text) => text.matches("${").count(),
            NodeValue::List(items) => items.iter().map(Node::expressions).sum(),
            NodeValue::Map(entries) => entries.iter().map(|(_, node)| node.expressions()).sum(),
            NodeValue::Null | NodeValue::Bool(_) | NodeValue::Number(_) => 0,
        }
    }

    /// What it is, for a sentence with "found".
    pub fn found(&self) -> String {
        match &self.value {
            NodeValue::Null => "nothing (null)".into(),
            NodeValue::Bool(value) => format!("`{value}`"),
            NodeValue::Number(number) => format!("the number {number}"),
            NodeValue::String(text) => format!("the text \"{}\"", shorten(text)),
            NodeValue::List(_) => "a list".into(),
            NodeValue::Map(_) => "a map".into(),
        }
    }

    /// The value of a key, or the item of a list at that place.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            NodeValue::List(items) => key.parse().ok().and_then(|at: usize| items.get(at)),
            NodeValue::Map(entries) => entries.iter().find(|(name, _)| name.text == key).map(|(_, node)| node),
            _ => None,
        }
    }

    /// Every key that a map has twice, with its path.
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
                        tell(Problem::new(&path, key.at, format!("the key `{}` is here twice", shorten(&key.text))));
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

/// Outside text in a message: long enough to recognise, on one line.
pub(super) fn shorten(text: &str) -> String {
    const LONGEST: usize = 60;
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = text.chars().take(LONGEST).map(clean).collect();
    if text.chars().nth(LONGEST).is_some() {
        short.push('…');
    }
    short
}

/// A number as both languages write it in decimal. Not by way of serde_json, whose quick reading of floats may be off
/// in the last digit, so that a definition would not be its own canonical form.
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
    format!("the number {} is too large to be kept exactly; write it as text, in quotes", shorten(text))
}
