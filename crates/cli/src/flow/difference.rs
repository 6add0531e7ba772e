//! Compares two versions of a flow.

use std::collections::BTreeSet;

use eddyline_machine::Flow;
use eddyline_protocol::Span;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::screen::{Ink, Line};

/// Paths of durations, which the canonical form stores as milliseconds. Full paths, because fields of an `input` may
/// have the same names.
const DURATIONS: [&str; 9] = [
    "timeout",
    "start_timeout",
    "retry.initial",
    "retry.max",
    "step_retry.initial",
    "step_retry.max",
    "await.time",
    "await.since",
    "await.timeout",
];

#[derive(Debug, Serialize)]
pub struct Difference {
    pub flow: String,
    /// The old version; it may belong to a flow of another name.
    pub from: String,
    pub from_flow: String,
    /// `None` if it is the registered flow.
    pub from_file: Option<String>,
    pub to: String,
    pub to_file: Option<String>,
    pub changes: Vec<DefinitionChange>,
}

/// A flow and its file; without a file it is the registered flow.
#[derive(Debug)]
pub struct Side {
    pub flow: Flow,
    pub file: Option<String>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct DefinitionChange {
    /// `added`, `removed` or `changed`.
    pub how: &'static str,
    /// `step pay`, `step poll.check`, or `the flow`.
    pub what: String,
    pub details: Vec<String>,
}

pub fn difference(old: &Side, new: &Side) -> Difference {
    Difference {
        flow: new.flow.name.clone(),
        from: old.flow.version.clone(),
        from_flow: old.flow.name.clone(),
        from_file: old.file.clone(),
        to: new.flow.version.clone(),
        to_file: new.file.clone(),
        changes: changes(&old.flow, &new.flow),
    }
}

fn changes(old: &Flow, new: &Flow) -> Vec<DefinitionChange> {
    let mut changes = Vec::new();
    let (before, after) = (object(&old.canonical), object(&new.canonical));
    let details = fields(&before, &after, &["name", "steps", "finally"]);
    if !details.is_empty() {
        changes.push(DefinitionChange { how: "changed", what: "the flow".to_owned(), details });
    }
    steps("", &object(&old.canonical["steps"]), &object(&new.canonical["steps"]), &mut changes);
    let (before, after) = (object(&old.canonical["finally"]), object(&new.canonical["finally"]));
    let details = fields(&before, &after, &["steps"]);
    if !details.is_empty() {
        changes.push(DefinitionChange { how: "changed", what: "finally".to_owned(), details });
    }
    let inner = |finally: &Map<String, Value>| finally.get("steps").map(object).unwrap_or_default();
    steps("finally.", &inner(&before), &inner(&after), &mut changes);
    changes
}

impl Difference {
    pub fn lines(&self) -> Vec<Line> {
        let (old, new) = (place(self.from_file.as_deref()), place(self.to_file.as_deref()));
        if self.from == self.to {
            let same = format!("{} is {} in both ({old}, {new}): nothing changes", self.flow, self.to);
            return vec![Line::plain(same)];
        }
        let (from, to) = (format!("  {} ({old}) → ", self.from), format!("  {} ({new})", self.to));
        let title = Line::default().with(Ink::Strong, &self.from_flow).with(Ink::Faint, from);
        let mut lines = vec![match self.from_flow == self.flow {
            true => title.with(Ink::Faint, to.trim_start()),
            false => title.with(Ink::Strong, &self.flow).with(Ink::Faint, to),
        }];
        if self.changes.is_empty() {
            lines.extend([Line::default(), Line::plain("only the name differs")]);
        }
        for change in &self.changes {
            let (ink, sign) = match change.how {
                "added" => (Ink::Good, "+"),
                "removed" => (Ink::Bad, "-"),
                _ => (Ink::Note, "~"),
            };
            lines.push(Line::default());
            lines.push(Line::default().with(ink, format!("{sign} {}", change.what)));
            lines.extend(change.details.iter().map(|detail| Line::plain(format!("    {detail}"))));
        }
        lines
    }
}

fn place(file: Option<&str>) -> String {
    file.map_or_else(|| "registered".to_owned(), |file| format!("file {file}"))
}

fn steps(path: &str, old: &Map<String, Value>, new: &Map<String, Value>, changes: &mut Vec<DefinitionChange>) {
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    for name in names {
        let what = format!("step {path}{name}");
        let within = format!("{path}{name}.");
        match (old.get(name).map(object), new.get(name).map(object)) {
            (None, Some(new)) => {
                changes.push(DefinitionChange { how: "added", what, details: fields(&Map::new(), &new, &["steps"]) });
                steps(&within, &Map::new(), &inside(&new), changes);
            }
            (Some(_), None) => changes.push(DefinitionChange { how: "removed", what, details: Vec::new() }),
            (Some(old), Some(new)) => {
                let details = fields(&old, &new, &["steps"]);
                if !details.is_empty() {
                    changes.push(DefinitionChange { how: "changed", what, details });
                }
                steps(&within, &inside(&old), &inside(&new), changes);
            }
            (None, None) => {}
        }
    }
}

fn inside(step: &Map<String, Value>) -> Map<String, Value> {
    step.get("steps").map(object).unwrap_or_default()
}

/// Describes changed arms, and every other changed field by its innermost path.
fn fields(old: &Map<String, Value>, new: &Map<String, Value>, but: &[&str]) -> Vec<String> {
    let mut details = Vec::new();
    let (before, after) = (arms(old), arms(new));
    for gained in after.difference(&before) {
        details.push(format!("now waits for {gained}"));
    }
    for lost in before.difference(&after) {
        details.push(format!("no longer waits for {lost}"));
    }
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    for name in names {
        if !but.contains(&name.as_str()) && name != "after" && name != "subscribes" {
            compare(name, old.get(name), new.get(name), &mut details);
        }
    }
    details
}

fn arms(step: &Map<String, Value>) -> BTreeSet<String> {
    let list = |field: &str| step.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
    let arm = |bare: &str, written: &str| match written.split_once(':') {
        Some(("failed", name)) => format!("{name} to fail"),
        Some(("ended", name)) => format!("{name} to end in any way"),
        Some(("step", name)) => format!("{name} to complete"),
        _ if bare == "subscribes" => format!("event {written}"),
        _ => format!("{written} to complete"),
    };
    let of = |field: &'static str| {
        let written = list(field).into_iter();
        written.filter_map(|written| written.as_str().map(|written| arm(field, written))).collect::<Vec<_>>()
    };
    of("after").into_iter().chain(of("subscribes")).collect()
}

fn compare(path: &str, old: Option<&Value>, new: Option<&Value>, details: &mut Vec<String>) {
    match (old, new) {
        _ if old == new => {}
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for name in names {
                compare(&format!("{path}.{name}"), old.get(name), new.get(name), details);
            }
        }
        (None, Some(new)) => details.push(format!("{path}: {}", shown(path, new))),
        (Some(old), None) => details.push(format!("{path}: {} removed", shown(path, old))),
        (Some(old), Some(new)) => details.push(format!("{path}: {} → {}", shown(path, old), shown(path, new))),
        (None, None) => {}
    }
}

fn shown(path: &str, value: &Value) -> String {
    match readable(path, value) {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

/// Converts durations to the form that authors write.
fn readable(path: &str, value: &Value) -> Value {
    match value {
        Value::Number(ms) if DURATIONS.contains(&path) => {
            ms.as_u64().map_or_else(|| value.clone(), |ms| Span::from_ms(ms).to_string().into())
        }
        Value::Object(fields) => {
            let field = |(name, value): (&String, &Value)| (name.clone(), readable(&format!("{path}.{name}"), value));
            fields.iter().map(field).collect()
        }
        _ => value.clone(),
    }
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}
