//! A definition while it is being read: the flow as far as it is known, with the places of what was written.

use std::collections::{BTreeMap, BTreeSet};

use super::MAX_PROBLEMS;
use super::problem::{Place, Problem};
use super::schema::CheckSchema;
use super::source::{Node, NodeValue, join};
use crate::expr::{Read, Template};
use crate::flow::{Action, Event, Join, Step, When};
use crate::ids::{ScopeId, StepId};

pub(super) struct Draft<'t> {
    lines: Vec<&'t str>,
    pub schemas: CheckSchema<'t>,
    pub problems: Vec<Problem>,
    pub warnings: Vec<Problem>,
    pub steps: Vec<DraftStep>,
    pub scopes: Vec<DraftScope>,
    pub sites: Vec<Site>,
    /// Steps beyond the limit were left out, and it is said.
    pub overflowed: bool,
}

pub(super) struct DraftStep {
    pub step: Step,
    pub at: Place,
    pub path: String,
    pub arms: Vec<DraftArm>,
    pub emits: Vec<DraftEmit>,
    // What it was written to have. The step itself lacks it if it could not be read, and a broken `spread` should not
    // make a problem of every `item`.
    pub item: Option<String>,
    pub gate: Option<GateKind>,
    pub repeats: bool,
    /// An arm of it is not known, so what it can read is not either.
    pub blind: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GateKind {
    /// Opened through a URL, which may be read.
    Url,
    Other,
}

pub(super) struct DraftArm {
    pub written: String,
    pub wants: Wants,
    pub at: Place,
    pub path: String,
}

pub(super) enum Wants {
    Step(String, When),
    Event(String),
}

pub(super) struct DraftEmit {
    pub name: String,
    pub schema: Option<serde_json::Value>,
    pub at: Place,
    pub path: String,
}

pub(super) struct DraftScope {
    pub owner: Option<StepId>,
    /// Of `finally`: the flow's, whose steps have all ended.
    pub outer: Option<ScopeId>,
    pub depth: usize,
    pub steps: BTreeMap<String, StepId>,
    pub events: Vec<Event>,
    pub output: Option<Template>,
}

/// An expression or template, with what it reads: each with the way to its text inside the node.
pub(super) struct Site {
    pub view: View,
    pub path: String,
    pub node: Node,
    pub reads: Vec<(Vec<String>, Read)>,
}

/// From where an expression looks around.
#[derive(Clone, Copy)]
pub(super) struct View {
    /// The step it belongs to; none for the flow's output.
    pub step: Option<StepId>,
    /// The scope that has ended (or whose round has) when it is evaluated.
    pub inside: Option<ScopeId>,
    /// Which of the step's own things exist by then: its gate's payload, its item, its rounds.
    pub gate: bool,
    pub item: bool,
    pub rounds: bool,
}

impl View {
    /// Before anything has run: the fields of a code flow.
    pub fn start() -> View {
        View { step: None, inside: None, gate: false, item: false, rounds: false }
    }

    /// As the step is being decided: `if`, and what its gate waits for.
    pub fn deciding(step: StepId) -> View {
        View { step: Some(step), inside: None, gate: false, item: false, rounds: false }
    }

    /// Past its gate: `spread`.
    pub fn opened(step: StepId) -> View {
        View { gate: true, ..View::deciding(step) }
    }

    /// What it does, for each item: `input`, `set`, `state` and so on.
    pub fn doing(step: StepId) -> View {
        View { item: true, ..View::opened(step) }
    }

    /// Before a round: `while`.
    pub fn round(step: StepId) -> View {
        View { rounds: true, ..View::doing(step) }
    }

    /// After a round, or after all: `until`, `next`, `output`.
    pub fn ended(step: Option<StepId>, inside: ScopeId) -> View {
        View { step, inside: Some(inside), gate: true, item: true, rounds: true }
    }
}

impl<'t> Draft<'t> {
    pub fn new(text: &'t str, schemas: CheckSchema<'t>) -> Draft<'t> {
        Draft {
            lines: text.lines().collect(),
            schemas,
            problems: Vec::new(),
            warnings: Vec::new(),
            steps: Vec::new(),
            scopes: Vec::new(),
            sites: Vec::new(),
            overflowed: false,
        }
    }

    pub fn problem(&mut self, path: &str, at: Place, message: impl Into<String>) {
        self.problems.push(Problem::new(path, at, message));
    }

    pub fn problem_with(&mut self, path: &str, at: Place, message: impl Into<String>, help: impl Into<String>) {
        self.problems.push(Problem::new(path, at, message).help(help));
    }

    /// "expected …, found …"
    pub fn expected(&mut self, path: &str, node: &Node, expected: &str) {
        self.problem(path, node.at, format!("expected {expected}, found {}", node.found()));
    }

    /// Whether there are as many problems as are told. Explaining more of them would take time for nothing.
    pub fn is_full(&self) -> bool {
        self.problems.len() >= MAX_PROBLEMS
    }

    /// The path and place of a byte of a text inside a node.
    pub fn locate(&self, path: &str, node: &Node, inner: &[String], offset: usize) -> (String, Place) {
        let (mut path, mut node) = (path.to_owned(), node);
        for key in inner {
            let item = matches!(node.value, NodeValue::List(_));
            path = if item { format!("{path}[{key}]") } else { join(&path, key) };
            node = node.get(key).unwrap_or(node);
        }
        (path, if self.is_full() { node.at } else { self.inside(node, offset) })
    }

    /// The place of the text itself if it is not written as it reads, over several lines or with escapes.
    fn inside(&self, node: &Node, offset: usize) -> Place {
        let NodeValue::String(text) = &node.value else { return node.at };
        let before = text.get(..offset).unwrap_or(text);
        let found = || {
            let line = self.lines.get((node.at.line as usize).checked_sub(1)?)?;
            let start = (node.at.column as usize).checked_sub(1)?;
            let mut written = line.char_indices().nth(start).and_then(|(at, _)| line.get(at..))?;
            let quoted = written.starts_with(['"', '\'']);
            if quoted {
                written = &written[1..];
            }
            written.starts_with(before).then(|| usize::from(quoted) + before.chars().count())
        };
        let columns = found().and_then(|columns| u32::try_from(columns).ok()).unwrap_or(0);
        Place { column: node.at.column.saturating_add(columns), ..node.at }
    }

    pub fn step(&self, id: StepId) -> &Step {
        &self.steps[id.0 as usize].step
    }

    pub fn scope(&self, id: ScopeId) -> &DraftScope {
        &self.scopes[id.0 as usize]
    }

    /// A step of which nothing is known but its name and place.
    pub fn add_step(&mut self, name: &str, scope: ScopeId, at: Place, path: &str) -> StepId {
        let id = StepId(self.steps.len() as u32);
        let step = Step {
            name: name.to_owned(),
            scope,
            slot: 0,
            level: 0,
            arms: Vec::new(),
            join: Join::All,
            condition: None,
            gate: None,
            spread: None,
            repeat: None,
            action: Action::Gate,
            input: None,
            emits: Vec::new(),
            undo: None,
            watchers: Vec::new(),
            reads: BTreeSet::new(),
        };
        self.steps.push(DraftStep {
            step,
            at,
            path: path.to_owned(),
            arms: Vec::new(),
            emits: Vec::new(),
            item: None,
            gate: None,
            repeats: false,
            blind: false,
        });
        id
    }
}
