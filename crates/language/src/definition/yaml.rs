//! YAML 1.2 (core schema) with positions, from the events of `granit-parser`.

use std::collections::BTreeMap;

use granit_parser::{ErrorKind, Event, Marker, Parser, ScalarStyle, ScanError};
use serde_json::Number;

use super::problem::{Place, Problem};
use super::source::{Key, Node, NodeValue, number, shorten};
use super::{MAX_DEPTH, MAX_NODES};

/// The tree of a text in YAML; null if there is nothing in it.
pub(super) fn read(text: &str) -> Result<Node, Problem> {
    let options = granit_parser::options! {
        emit_comments: false,
        // The scanner is ahead of the events; the limit below speaks first.
        flow_nesting_limit: 2 * MAX_DEPTH,
        block_nesting_limit: 2 * MAX_DEPTH,
    };
    let mut tree = Tree { open: Vec::new(), root: None, anchors: BTreeMap::new(), size: 0 };
    for next in Parser::new_from_str_with_options(text, options) {
        let (event, span) = next.map_err(|error| unreadable(&error))?;
        tree.event(event, place(&span.tag_start().unwrap_or(span.start)))?;
    }
    Ok(tree.root.unwrap_or(Node { value: NodeValue::Null, at: Place::START }))
}

fn unreadable(error: &ScanError) -> Problem {
    match error.kind() {
        ErrorKind::RecursionLimitExceeded => too_deep(place(error.marker())),
        _ => Problem::new("", place(error.marker()), error.info()),
    }
}

fn too_deep(at: Place) -> Problem {
    Problem::new("", at, format!("more than {MAX_DEPTH} lists and maps inside each other"))
}

/// What is read so far.
struct Tree {
    open: Vec<Open>,
    root: Option<Node>,
    /// Finished nodes that aliases may stand for, by the parser's number of the anchor.
    anchors: BTreeMap<usize, Node>,
    /// How much there is, with aliases counted as what they stand for.
    size: usize,
}

/// A list or map whose end is not read yet.
struct Open {
    node: Node,
    key: Option<Key>,
    anchor: usize,
}

impl Tree {
    fn event(&mut self, event: Event<'_>, at: Place) -> Result<(), Problem> {
        if let Some(tag) = event.tag() {
            return Err(Problem::new("", at, format!("the tag `{tag}` has no meaning in a definition; leave it out")));
        }
        match event {
            Event::DocumentStart(..) if self.root.is_some() => {
                Err(Problem::new("", at, "a second document begins here; a text holds one definition"))
            }
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                if self.awaits_key() {
                    return self.key(&text, plain, at);
                }
                let value = if plain { plain_scalar(&text, at)? } else { NodeValue::String(text.into_owned()) };
                self.finish(Node { value, at }, anchor)
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
        matches!(self.open.last(), Some(Open { node: Node { value: NodeValue::Map(_), .. }, key: None, .. }))
    }

    fn key(&mut self, text: &str, plain: bool, at: Place) -> Result<(), Problem> {
        if plain && text == "<<" {
            let message = "merge keys (`<<`) are not read; write the fields out";
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
            return Err(Problem::new("", at, "a key is a text, found a list or map"));
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep(at));
        }
        self.open.push(Open { node: Node { value, at }, key: None, anchor });
        Ok(())
    }

    fn alias(&mut self, anchor: usize, at: Place) -> Result<(), Problem> {
        if self.awaits_key() {
            return Err(Problem::new("", at, "a key is a text, found an alias"));
        }
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(Problem::new("", at, "this alias stands for a key, or for something that contains it"));
        };
        let (size, depth) = measure(node);
        let node = if self.size + size <= MAX_NODES { node.clone() } else { Node { value: NodeValue::Null, at } };
        self.grow(size, at)?;
        if self.open.len() + depth > MAX_DEPTH {
            return Err(too_deep(at));
        }
        self.put(node);
        Ok(())
    }

    fn finish(&mut self, node: Node, anchor: usize) -> Result<(), Problem> {
        let text = if let NodeValue::String(text) = &node.value { text.len() } else { 0 };
        self.grow(1 + text / 16, node.at)?;
        if anchor > 0 {
            self.grow(measure(&node).0, node.at)?;
            self.anchors.insert(anchor, node.clone());
        }
        self.put(node);
        Ok(())
    }

    fn put(&mut self, node: Node) {
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(open) => match (&mut open.node.value, open.key.take()) {
                (NodeValue::Map(entries), Some(key)) => entries.push((key, node)),
                (NodeValue::List(items), _) => items.push(node),
                _ => {}
            },
        }
    }

    /// Counts long texts as more than one value: an alias copies them.
    fn grow(&mut self, by: usize, at: Place) -> Result<(), Problem> {
        self.size += by;
        if self.size > MAX_NODES {
            return Err(Problem::new(
                "",
                at,
                format!("more than {MAX_NODES} values, those that aliases stand for included"),
            ));
        }
        Ok(())
    }
}

/// The size and depth of a finished node.
fn measure(node: &Node) -> (usize, usize) {
    let inner = |parts: &mut dyn Iterator<Item = (usize, &Node)>| {
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

/// A scalar without quotes, by the core schema.
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
                return Err(wrong(format!("`{text}` is not a number in JSON; put it in quotes if it is text")));
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
