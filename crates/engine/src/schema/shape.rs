//! Bounds the cost of a schema before anything is checked against it.
//!
//! The validator descends into subschemas that apply to the same value (`anyOf`, `$ref` and so on) and into those that
//! apply to nested values. A value is finite, so only the first kind has to be bounded here: the longest chain of such
//! steps, which takes stack, and their total number, which takes time.

use std::collections::HashMap;

use eddyline_language::definition::SchemaFault;
use serde_json::{Map, Value};

/// The longest chain of subschemas that apply to one value.
pub(super) const MAX_CHAIN: usize = 64;
/// The most subschemas that apply to one value, each counted as often as it is reached.
const MAX_WAYS: u64 = 4_000;
/// The most patterns of one schema. Each takes up to [`super::PATTERN_BYTES`] of memory when compiled.
const MAX_PATTERNS: usize = 64;

/// The measures of a schema that is within the limits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// The longest chain of subschemas that apply to one value.
    pub chain: usize,
    pub patterns: usize,
    /// The most patterns in one `patternProperties`.
    pub name_patterns: usize,
    /// The first reference that could not be resolved here. The validator decides whether it is valid.
    pub unfollowed: Option<SchemaFault>,
}

pub(super) fn shape_of(schema: &Value) -> Result<Shape, SchemaFault> {
    let mut graph = Graph::default();
    graph.add(schema, &[], 0);
    graph.gather();
    graph.follow();
    if graph.shape.patterns > MAX_PATTERNS {
        return Err(fault(&[], format!("it has {} patterns; the limit is {MAX_PATTERNS}", graph.shape.patterns)));
    }
    let mut known = vec![Reached::Not; graph.nodes.len()];
    for at in 0..graph.nodes.len() {
        let (chain, _) = graph.reach(at, 1, &mut known)?;
        graph.shape.chain = graph.shape.chain.max(chain);
    }
    Ok(graph.shape)
}

fn fault(path: &[String], message: impl Into<String>) -> SchemaFault {
    SchemaFault { path: path.to_vec(), message: message.into() }
}

/// The subschemas as nodes, with edges between those that apply to the same value.
#[derive(Default)]
struct Graph<'a> {
    nodes: Vec<Subschema<'a>>,
    /// Nodes by the address of their JSON.
    by_place: HashMap<usize, usize>,
    /// Nodes by the anchor names that a reference may have after its `#`.
    anchors: HashMap<&'a str, Vec<usize>>,
    /// Subschemas with an `$id`, which is the base of the references in them.
    resources: HashMap<&'a str, usize>,
    /// References to resolve: from which node, to which URI.
    references: Vec<(usize, &'a str)>,
    gathered: usize,
    shape: Shape,
}

struct Subschema<'a> {
    value: &'a Value,
    path: Vec<String>,
    /// The subschema that its references are relative to.
    resource: usize,
    same_value: Vec<usize>,
}

#[derive(Clone, Copy)]
enum Reached {
    Not,
    Now,
    Before { chain: usize, ways: u64 },
}

impl<'a> Graph<'a> {
    fn add(&mut self, value: &'a Value, path: &[String], resource: usize) -> usize {
        let place = std::ptr::from_ref(value) as usize;
        if let Some(at) = self.by_place.get(&place) {
            return *at;
        }
        let at = self.nodes.len();
        self.by_place.insert(place, at);
        self.nodes.push(Subschema { value, path: path.to_vec(), resource, same_value: Vec::new() });
        at
    }

    /// Adds the subschemas of all nodes.
    fn gather(&mut self) {
        while self.gathered < self.nodes.len() {
            let at = self.gathered;
            self.gathered += 1;
            let Some(keywords) = self.nodes[at].value.as_object() else { continue };
            self.name(at, keywords);
            for (keyword, value) in keywords {
                self.inside(at, keyword, value);
            }
        }
    }

    fn name(&mut self, at: usize, keywords: &'a Map<String, Value>) {
        let text = |keyword: &str| keywords.get(keyword).and_then(Value::as_str);
        for id in ["$id", "id"].into_iter().filter_map(text) {
            match id.strip_prefix('#') {
                Some(anchor) => self.anchors.entry(anchor).or_default().push(at),
                None => {
                    self.nodes[at].resource = at;
                    self.resources.insert(id.trim_end_matches('#'), at);
                }
            }
        }
        for anchor in ["$anchor", "$dynamicAnchor"].into_iter().filter_map(text) {
            self.anchors.entry(anchor).or_default().push(at);
        }
    }

    fn inside(&mut self, at: usize, keyword: &str, value: &'a Value) {
        match (keyword, value) {
            ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(to)) => self.references.push((at, to)),
            ("pattern", Value::String(_)) => self.shape.patterns += 1,
            ("allOf" | "anyOf" | "oneOf", Value::Array(all)) => self.enter_list(at, keyword, all, true),
            ("not" | "if" | "then" | "else" | "contentSchema", one) => self.enter(at, &[keyword.to_owned()], one, true),
            ("dependentSchemas" | "dependencies", Value::Object(all)) => self.enter_map(at, keyword, all, true),
            ("properties" | "$defs" | "definitions", Value::Object(all)) => self.enter_map(at, keyword, all, false),
            ("patternProperties", Value::Object(all)) => {
                self.shape.patterns += all.len();
                self.shape.name_patterns = self.shape.name_patterns.max(all.len());
                self.enter_map(at, keyword, all, false);
            }
            ("items" | "prefixItems", Value::Array(all)) => self.enter_list(at, keyword, all, false),
            (
                "items"
                | "additionalItems"
                | "unevaluatedItems"
                | "contains"
                | "additionalProperties"
                | "unevaluatedProperties"
                | "propertyNames",
                one,
            ) => self.enter(at, &[keyword.to_owned()], one, false),
            _ => {}
        }
    }

    fn enter_list(&mut self, at: usize, keyword: &str, all: &'a [Value], same_value: bool) {
        for (index, one) in all.iter().enumerate() {
            self.enter(at, &[keyword.to_owned(), index.to_string()], one, same_value);
        }
    }

    fn enter_map(&mut self, at: usize, keyword: &str, all: &'a Map<String, Value>, same_value: bool) {
        for (name, one) in all {
            self.enter(at, &[keyword.to_owned(), name.clone()], one, same_value);
        }
    }

    fn enter(&mut self, from: usize, by: &[String], value: &'a Value, same_value: bool) {
        if !value.is_object() {
            return;
        }
        let path = [&self.nodes[from].path, by].concat();
        let resource = self.nodes[from].resource;
        let at = self.add(value, &path, resource);
        if same_value {
            self.nodes[from].same_value.push(at);
        }
    }

    /// Resolves the references, including those to parts of the schema that are not subschemas by their position.
    fn follow(&mut self) {
        let mut followed = 0;
        // References to anchors come last, when all anchors are known.
        let mut named = Vec::new();
        while let Some((from, to)) = self.references.get(followed).copied() {
            followed += 1;
            let (uri, fragment) = to.split_once('#').unwrap_or((to, ""));
            let base = if uri.is_empty() { Some(self.nodes[from].resource) } else { self.resources.get(uri).copied() };
            match base {
                Some(_) if !fragment.is_empty() && !fragment.starts_with('/') => named.push((from, to, fragment)),
                Some(base) => match self.nodes[base].value.pointer(&decoded(fragment)) {
                    Some(target) => {
                        let path = self.nodes[base].path.clone();
                        let target = self.add(target, &path, base);
                        self.nodes[from].same_value.push(target);
                        self.gather();
                    }
                    None => self.not_followed(from, to),
                },
                None => self.not_followed(from, to),
            }
        }
        for (from, to, name) in named {
            match self.anchors.get(name) {
                Some(targets) => self.nodes[from].same_value.extend(targets),
                None => self.not_followed(from, to),
            }
        }
    }

    fn not_followed(&mut self, from: usize, to: &str) {
        let message = format!("it refers to {to}; refer to a part of the same schema, such as #/$defs/name");
        let path = &self.nodes[from].path;
        self.shape.unfollowed.get_or_insert_with(|| fault(path, message));
    }

    /// The longest chain of subschemas from this node on, and how many subschemas it reaches.
    fn reach(&self, at: usize, depth: usize, known: &mut [Reached]) -> Result<(usize, u64), SchemaFault> {
        let path = &self.nodes[at].path;
        match known[at] {
            Reached::Before { chain, ways } => return Ok((chain, ways)),
            Reached::Now => {
                let message = "it applies itself to the same value without end; a schema may refer to itself only for \
                               nested values";
                return Err(fault(path, message));
            }
            Reached::Not => {}
        }
        if depth > MAX_CHAIN {
            return Err(too_long(path));
        }
        known[at] = Reached::Now;
        let (mut chain, mut ways) = (1, 1_u64);
        for next in &self.nodes[at].same_value {
            let (longest, more) = self.reach(*next, depth + 1, known)?;
            chain = chain.max(longest + 1);
            ways = ways.saturating_add(more);
        }
        if chain > MAX_CHAIN {
            return Err(too_long(path));
        }
        if ways > MAX_WAYS {
            let message = format!(
                "checking one value takes {ways} subschemas, counted as often as they are referred to; the limit is \
                 {MAX_WAYS}"
            );
            return Err(fault(path, message));
        }
        known[at] = Reached::Before { chain, ways };
        Ok((chain, ways))
    }
}

fn too_long(path: &[String]) -> SchemaFault {
    fault(path, format!("more than {MAX_CHAIN} subschemas apply to one value in a chain"))
}

/// Percent-decodes a JSON Pointer from a URI fragment.
fn decoded(fragment: &str) -> String {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
