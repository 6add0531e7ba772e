//! Reads the fields of a map: each yields its value and its canonical form, or a problem.

use serde_json::{Map, Value};

use super::MAX_NAME_CHARS;
use super::draft::{Draft, ReadContext, Site};
use super::duration::{MAX_DURATION_MS, TOO_LONG, duration as parse_duration};
use super::problem::{Place, Problem};
use super::source::{Key, NodeValue, SourceNode, join, shorten};
use crate::expr::{Expr, ExprError, Template};
use crate::ids::Millis;
use crate::nearest::did_you_mean;

/// The value and its canonical form; none if a problem was reported.
pub(super) type Out<T> = Option<(T, Value)>;

/// A map with a fixed set of fields.
pub(super) struct Fields<'n> {
    pub path: String,
    pub at: Place,
    entries: &'n [(Key, SourceNode)],
    canonical: Map<String, Value>,
}

impl<'n> Fields<'n> {
    /// Opens a map and reports unknown fields.
    pub fn open(
        draft: &mut Draft<'_>,
        path: &str,
        node: &'n SourceNode,
        what: &str,
        known: &[&str],
    ) -> Option<Fields<'n>> {
        let NodeValue::Map(entries) = &node.value else {
            draft.expected(path, node, what);
            return None;
        };
        for (key, _) in entries.iter().filter(|(key, _)| !known.contains(&key.text.as_str())) {
            unknown(draft, &join(path, &key.text), key, known);
        }
        Some(Fields { path: path.to_owned(), at: node.at, entries, canonical: Map::new() })
    }

    /// An omitted map.
    pub fn none(path: &str, at: Place) -> Fields<'n> {
        Fields { path: path.to_owned(), at, entries: &[], canonical: Map::new() }
    }

    pub fn key(&self, name: &str) -> Option<&'n Key> {
        self.entries.iter().find(|(key, _)| key.text == name).map(|(key, _)| key)
    }

    pub fn get(&self, name: &str) -> Option<&'n SourceNode> {
        self.entries.iter().find(|(key, _)| key.text == name).map(|(_, node)| node)
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub fn path_of(&self, name: &str) -> String {
        join(&self.path, name)
    }

    /// The value of a field, if present and valid.
    pub fn take<T>(
        &mut self,
        draft: &mut Draft<'_>,
        name: &str,
        read: impl FnOnce(&mut Draft<'_>, &str, &'n SourceNode) -> Out<T>,
    ) -> Option<T> {
        let node = self.get(name)?;
        let (value, canonical) = read(draft, &self.path_of(name), node)?;
        self.canonical.insert(name.to_owned(), canonical);
        Some(value)
    }

    /// Reports a missing field.
    pub fn require(&self, draft: &mut Draft<'_>, name: &str, why: &str) {
        if !self.has(name) {
            draft.problem(&self.path_of(name), self.at, format!("`{name}` is missing: {why}"));
        }
    }

    /// Reports a field that is not allowed.
    pub fn refuse(&self, draft: &mut Draft<'_>, name: &str, why: &str, help: &str) {
        if let Some(key) = self.key(name) {
            draft.problem_with(&self.path_of(name), key.at, why, help);
        }
    }

    pub fn canonical(self) -> Value {
        Value::Object(self.canonical)
    }

    /// The canonical form so far, for corrections.
    pub fn canonical_mut(&mut self) -> &mut Map<String, Value> {
        &mut self.canonical
    }
}

fn unknown(draft: &mut Draft<'_>, path: &str, key: &Key, known: &[&str]) {
    let word = key.text.as_str();
    let problem = Problem::new(path, key.at, format!("unknown field `{}`", shorten(word)));
    let near = || synonym(word, known).or_else(|| did_you_mean(word, known.iter().copied()));
    let help =
        if draft.is_full() { None } else { near().or_else(|| Some(format!("known here: {}", known.join(", ")))) };
    draft.problems.push(Problem { help, ..problem });
}

/// Field names of other systems.
fn synonym(word: &str, known: &[&str]) -> Option<String> {
    let (ours, written) = match word {
        "depends_on" | "dependsOn" | "needs" | "dependencies" => ("after", "`after: [step]`"),
        "handler" | "uses" | "task" | "call" | "workerId" => ("run", "`run: handler`"),
        "when" | "condition" | "cond" => ("if", "`if: expression`"),
        "foreach" | "for_each" | "forEach" | "map" | "loop" => ("spread", "`spread: expression`"),
        "retries" | "retires" | "max_attempts" | "max_retries" => ("retry", "`retry: {attempts: n}`"),
        "sleep" | "delay" | "wait" => ("await", "`await: {time: 30s}`"),
        "compensate" | "rollback" => ("undo", "`undo: {run: handler}`"),
        "workflow" | "subflow" | "child" => ("flow", "`flow: name`"),
        "concurrency" => ("max_parallel", "`max_parallel: n`"),
        _ => return None,
    };
    known.contains(&ours).then(|| format!("use {written} instead"))
}

pub(super) fn text(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<String> {
    match &node.value {
        NodeValue::String(text) => Some((text.clone(), Value::String(text.clone()))),
        _ => {
            draft.expected(path, node, "a string");
            None
        }
    }
}

pub(super) fn boolean(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<bool> {
    match node.value {
        NodeValue::Bool(value) => Some((value, Value::Bool(value))),
        _ => {
            draft.expected(path, node, "`true` or `false`");
            None
        }
    }
}

pub(super) fn name(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<String> {
    let (name, canonical) = text(draft, path, node)?;
    check_name(draft, path, node.at, &name).then_some((name, canonical))
}

/// Whether it is a valid name; reports a problem if not.
pub(super) fn check_name(draft: &mut Draft<'_>, path: &str, at: Place, name: &str) -> bool {
    let wrong = wrong_name(name);
    let fits = wrong.is_none();
    if let Some(message) = wrong {
        draft.problem(path, at, message);
    }
    fits
}

/// Why it is not a valid name of a flow, queue, event or limit.
pub fn wrong_name(name: &str) -> Option<String> {
    match name.chars().find(|c| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '_' | '-')) {
        _ if name.is_empty() => Some("the name is empty".into()),
        Some(c) => {
            let shown = shorten(name);
            Some(format!(
                "`{shown}` is not a valid name: `{}` is not allowed; use letters (a-z, A-Z), digits, `.`, `_` and `-`",
                shorten(&c.to_string())
            ))
        }
        None if name.len() > MAX_NAME_CHARS => {
            Some(format!("the name has {} characters, at most {MAX_NAME_CHARS} are allowed", name.len()))
        }
        None => None,
    }
}

/// A handler, a label or a kind of error: chosen by workers, so almost any text is allowed.
pub(super) fn word(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<String> {
    let (word, canonical) = text(draft, path, node)?;
    if let Some(message) = wrong_word(&word) {
        draft.problem(path, node.at, message);
        return None;
    }
    Some((word, canonical))
}

/// Why it is not a valid handler, label or kind of error.
pub fn wrong_word(word: &str) -> Option<String> {
    let wrong = word.trim().is_empty() || word.chars().count() > MAX_NAME_CHARS || word.chars().any(char::is_control);
    wrong.then(|| format!("expected one line of 1 to {MAX_NAME_CHARS} characters"))
}

pub(super) fn whole(min: i64, max: i64) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<i64> {
    move |draft, path, node| {
        let found = if let NodeValue::Number(number) = &node.value { number.as_i64() } else { None };
        match found {
            Some(number) if (min..=max).contains(&number) => Some((number, number.into())),
            _ => {
                draft.expected(path, node, &format!("a whole number from {min} to {max}"));
                None
            }
        }
    }
}

pub(super) fn real(min: f64, max: f64) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<f64> {
    move |draft, path, node| {
        let found = if let NodeValue::Number(number) = &node.value { number.as_f64() } else { None };
        match found {
            Some(number) if (min..=max).contains(&number) => Some((number, number.into())),
            _ => {
                draft.expected(path, node, &format!("a number from {min} to {max}"));
                None
            }
        }
    }
}

/// A duration other than 0.
pub(super) fn timeout(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Millis> {
    let (ms, canonical) = duration(draft, path, node)?;
    if ms == 0 {
        draft.problem(path, node.at, "a timeout of 0 is not allowed; omit it for no timeout".to_owned());
    }
    Some((ms, canonical))
}

pub(super) fn duration(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Millis> {
    const EXPECTED: &str = "a duration such as \"30s\" or a number of milliseconds";
    let read = match &node.value {
        NodeValue::String(text) => {
            parse_duration(text).map_err(|wrong| format!("\"{}\" is not a duration: {wrong}", shorten(text)))
        }
        NodeValue::Number(number) => match number.as_i64() {
            Some(ms @ 0..=MAX_DURATION_MS) => {
                warn_of_bare_number(draft, path, node, ms);
                Ok(ms)
            }
            Some(1..) => Err(format!("the number {number} is not a duration: {TOO_LONG}")),
            _ => Err(format!("expected {EXPECTED}, found the number {number}")),
        },
        _ => Err(format!("expected {EXPECTED}, found {}", node.found())),
    };
    match read {
        Ok(ms) => Some((ms, ms.into())),
        Err(message) => {
            draft.problem(path, node.at, message);
            None
        }
    }
}

/// Authors who write a bare number usually mean seconds.
fn warn_of_bare_number(draft: &mut Draft<'_>, path: &str, node: &SourceNode, ms: Millis) {
    if ms != 0 {
        let field = path.rsplit('.').next().unwrap_or(path);
        let message = format!("`{field}: {ms}` means {ms} ms; write `{ms}ms` or `{ms}s`");
        draft.warnings.push(Problem::new(path, node.at, message));
    }
}

pub(super) fn choice<T: Copy>(choices: &[(&str, T)]) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<T> {
    move |draft, path, node| {
        let found = if let NodeValue::String(text) = &node.value { Some(text.as_str()) } else { None };
        if let Some((word, value)) = choices.iter().find(|(word, _)| Some(*word) == found) {
            return Some((*value, Value::from(*word)));
        }
        let words: Vec<_> = choices.iter().map(|(word, _)| format!("`{word}`")).collect();
        draft.expected(path, node, &format!("one of {}", words.join(", ")));
        None
    }
}

/// A list whose items are all read with `read`.
pub(super) fn list<T>(
    what: &str,
    read: impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<T>,
) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<Vec<T>> {
    move |draft, path, node| {
        let NodeValue::List(items) = &node.value else {
            draft.expected(path, node, what);
            return None;
        };
        let each = items.iter().enumerate().filter_map(|(at, item)| read(draft, &format!("{path}[{at}]"), item));
        let (values, canonical): (Vec<T>, Vec<Value>) = each.unzip();
        Some((values, Value::Array(canonical)))
    }
}

pub(super) fn expr(view: ReadContext) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<Expr> {
    move |draft, path, node| {
        let text = match &node.value {
            NodeValue::String(text) => text.clone(),
            // `if: false` turns a step off, without quotes.
            NodeValue::Bool(value) => value.to_string(),
            _ => {
                draft.expected(path, node, "an expression as a string");
                return None;
            }
        };
        match Expr::parse(&text) {
            Ok(expr) => {
                let reads = expr.reads().iter().map(|read| (Vec::new(), read.clone())).collect();
                draft.sites.push(Site { view, path: path.to_owned(), node: node.clone(), reads });
                Some((expr, Value::String(text)))
            }
            Err(error) => {
                bad_expr(draft, path, node, &error, &text);
                None
            }
        }
    }
}

fn bad_expr(draft: &mut Draft<'_>, path: &str, node: &SourceNode, error: &ExprError, text: &str) {
    let (path, at) = &draft.locate(path, node, &[], error.offset);
    if text.trim_start().starts_with("${") {
        let help = "this field is an expression already; `${…}` belongs in templates";
        draft.problem_with(path, *at, "expected an expression without `${…}` around it", help);
    } else {
        draft.problem(path, *at, format!("this expression does not parse: {}", error.message));
    }
}

pub(super) fn template(view: ReadContext) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<Template> {
    move |draft, path, node| {
        let json = node.json();
        match Template::parse(&json) {
            Ok(template) => {
                let reads = template.reads();
                draft.sites.push(Site { view, path: path.to_owned(), node: node.clone(), reads });
                Some((template, json))
            }
            Err(errors) => {
                for error in errors {
                    let (path, at) = draft.locate(path, node, &error.path, error.error.offset);
                    draft.problem(&path, at, format!("this expression does not parse: {}", error.error.message));
                }
                None
            }
        }
    }
}
