//! Parses YAML 1.2 (core schema) with positions, from the events of `granit-parser`.

use std::collections::BTreeMap;

use granit_parser::{ErrorKind, Event, Marker, Parser, ScalarStyle, ScanError};
use serde_json::Number;

use super::problem::{Place, Problem};
use super::source::{Key, NodeValue, SourceNode, number, shorten};
use super::{MAX_DEPTH, MAX_NODES};

/// Parses a YAML text; null if it is empty.
pub(super) fn read(text: &str) -> Result<SourceNode, TreeError> {
    let options = granit_parser::options! {
        emit_comments: false,
        // The scanner runs ahead of the events, so it needs a larger limit for ours below to apply first.
        flow_nesting_limit: 2 * MAX_DEPTH,
        block_nesting_limit: 2 * MAX_DEPTH,
    };
    let mut tree = Tree { open: Vec::new(), root: None, anchors: BTreeMap::new(), size: 0 };
    for next in Parser::new_from_str_with_options(text, options) {
        let (event, span) = next.map_err(|error| unreadable(&error))?;
        tree.event(event, place(&span.tag_start().unwrap_or(span.start))).map_err(TreeError::Content)?;
    }
    Ok(tree.root.unwrap_or(SourceNode { value: NodeValue::Null, at: Place::START }))
}

/// Why a text has no tree.
pub(super) enum TreeError {
    /// It is not YAML; it may still be JSON.
    Syntax(Problem),
    /// It is YAML that a definition cannot contain.
    Content(Problem),
}

fn unreadable(error: &ScanError) -> TreeError {
    match error.kind() {
        ErrorKind::RecursionLimitExceeded => TreeError::Content(too_deep(place(error.marker()))),
        _ => TreeError::Syntax(Problem::new("", place(error.marker()), error.info())),
    }
}

fn too_deep(at: Place) -> Problem {
    Problem::new("", at, format!("lists and maps are nested more than {MAX_DEPTH} deep"))
}

/// The tree built so far.
struct Tree {
    open: Vec<Open>,
    root: Option<SourceNode>,
    /// Finished nodes by the parser's anchor number, for aliases.
    anchors: BTreeMap<usize, SourceNode>,
    /// Number of values, with aliases expanded.
    size: usize,
}

/// An unfinished list or map.
struct Open {
    node: SourceNode,
    key: Option<Key>,
    anchor: usize,
}

impl Tree {
    fn event(&mut self, event: Event<'_>, at: Place) -> Result<(), Problem> {
        if let Some(tag) = event.tag() {
            return Err(Problem::new("", at, format!("the tag `{tag}` is not supported in a definition; remove it")));
        }
        match event {
            Event::DocumentStart(..) if self.root.is_some() => {
                Err(Problem::new("", at, "a second document starts here; write one definition per text"))
            }
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                if self.awaits_key() {
                    return self.key(&text, plain, at);
                }
                let value = if plain { plain_scalar(&text, at)? } else { NodeValue::String(text.into_owned()) };
                self.finish(SourceNode { value, at }, anchor)
            }
            Event::SequenceStart(_, anchor, _) => self.begin(NodeValue::List(Vec::new()), at, anchor),
            Event::MappingStart(_, anchor, _) => self.begin(NodeValue::Map(Vec::new()), at, anchor),
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(open) => self.finish(open.node, open.anchor),
                None => Ok(()),
            },
            Event::Alias(anchor) => self.alias(anchor, at),
            _ => Ok(()),
        }
    }

    fn awaits_key(&self) -> bool {
        matches!(self.open.last(), Some(Open { node: SourceNode { value: NodeValue::Map(_), .. }, key: None, .. }))
    }

    fn key(&mut self, text: &str, plain: bool, at: Place) -> Result<(), Problem> {
        if plain && text == "<<" {
            let message = "merge keys (`<<`) are not supported; write the fields out";
            return Err(Problem::new("", at, message));
        }
        if plain && matches!(text, "" | "~") {
            return Err(Problem::new("", at, "a key is missing before `:`"));
        }
        self.grow(1 + text.len() / 16, at)?;
        if let Some(open) = self.open.last_mut() {
            open.key = Some(Key { text: text.to_owned(), at });
        }
        Ok(())
    }

    fn begin(&mut self, value: NodeValue, at: Place, anchor: usize) -> Result<(), Problem> {
        if self.awaits_key() {
            return Err(Problem::new("", at, "a key must be a string, found a list or map"));
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep(at));
        }
        self.open.push(Open { node: SourceNode { value, at }, key: None, anchor });
        Ok(())
    }

    fn alias(&mut self, anchor: usize, at: Place) -> Result<(), Problem> {
        if self.awaits_key() {
            return Err(Problem::new("", at, "a key must be a string, found an alias"));
        }
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(Problem::new("", at, "this alias refers to a key, or to a value that contains it"));
        };
        let (size, depth) = measure(node);
        let node = if self.size + size <= MAX_NODES { node.clone() } else { SourceNode { value: NodeValue::Null, at } };
        self.grow(size, at)?;
        if self.open.len() + depth > MAX_DEPTH {
            return Err(too_deep(at));
        }
        self.put(node);
        Ok(())
    }

    fn finish(&mut self, node: SourceNode, anchor: usize) -> Result<(), Problem> {
        let text = if let NodeValue::String(text) = &node.value { text.len() } else { 0 };
        self.grow(1 + text / 16, node.at)?;
        if anchor > 0 {
            self.grow(measure(&node).0, node.at)?;
            self.anchors.insert(anchor, node.clone());
        }
        self.put(node);
        Ok(())
    }

    fn put(&mut self, node: SourceNode) {
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(open) => match (&mut open.node.value, open.key.take()) {
                (NodeValue::Map(entries), Some(key)) => entries.push((key, node)),
                (NodeValue::List(items), _) => items.push(node),
                _ => {}
            },
        }
    }

    /// A long string counts as more than one value, because an alias copies it.
    fn grow(&mut self, by: usize, at: Place) -> Result<(), Problem> {
        self.size += by;
        if self.size > MAX_NODES {
            return Err(Problem::new("", at, format!("more than {MAX_NODES} values, counting expanded aliases")));
        }
        Ok(())
    }
}

/// The size and depth of a finished node.
pub(super) fn measure(node: &SourceNode) -> (usize, usize) {
    let inner = |parts: &mut dyn Iterator<Item = (usize, &SourceNode)>| {
        parts.fold((1, 0), |(size, depth), (extra, node)| {
            let (more, deep) = measure(node);
            (size + extra + more, depth.max(deep))
        })
    };
    match &node.value {
        NodeValue::List(items) => {
            let (size, depth) = inner(&mut items.iter().map(|item| (0, item)));
            (size, depth + 1)
        }
        NodeValue::Map(entries) => {
            let (size, depth) = inner(&mut entries.iter().map(|(key, item)| (1 + key.text.len() / 16, item)));
            (size, depth + 1)
        }
        NodeValue::String(text) => (1 + text.len() / 16, 0),
        _ => (1, 0),
    }
}

/// An unquoted scalar, by the core schema.
fn plain_scalar(text: &str, at: Place) -> Result<NodeValue, Problem> {
    let wrong = |message: String| Problem::new("", at, message);
    Ok(match text {
        "" | "~" | "null" | "Null" | "NULL" => NodeValue::Null,
        "true" | "True" | "TRUE" => NodeValue::Bool(true),
        "false" | "False" | "FALSE" => NodeValue::Bool(false),
        _ if is_decimal(text) => NodeValue::Number(number(text).map_err(wrong)?),
        _ => match based(text) {
            Some(digits) => NodeValue::Number(digits.map_err(wrong)?),
            None if is_endless(text) => {
                return Err(wrong(format!("`{text}` is not a number in JSON; put it in quotes if it is a string")));
            }
            None => NodeValue::String(text.to_owned()),
        },
    })
}

/// `[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?`
fn is_decimal(text: &str) -> bool {
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (mantissa, exponent) = text.split_once(['e', 'E']).map_or((text, None), |(m, e)| (m, Some(e)));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent_fits = exponent.is_none_or(|exponent| {
        let exponent = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        !exponent.is_empty() && digits(exponent)
    });
    digits(whole) && digits(fraction) && !(whole.is_empty() && fraction.is_empty()) && exponent_fits
}

/// `0x1f`, `0o17`
fn based(text: &str) -> Option<Result<Number, String>> {
    let (digits, base) = match text.as_bytes() {
        [b'0', b'x', ..] => (&text[2..], 16),
        [b'0', b'o', ..] => (&text[2..], 8),
        _ => return None,
    };
    let all = !digits.is_empty() && digits.chars().all(|c| c.is_digit(base));
    let large = || format!("the number {} is too large", shorten(text));
    all.then(|| u64::from_str_radix(digits, base).map(Number::from).map_err(|_| large()))
}

fn is_endless(text: &str) -> bool {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    matches!(unsigned, ".inf" | ".Inf" | ".INF") || matches!(text, ".nan" | ".NaN" | ".NAN")
}

fn place(mark: &Marker) -> Place {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Place { line: count(mark.line()).max(1), column: count(mark.col()).saturating_add(1) }
}
