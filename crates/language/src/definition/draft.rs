//! A definition while it is being parsed: the flow as far as it is known, with source positions.

use std::collections::{BTreeMap, BTreeSet};

use super::MAX_PROBLEMS;
use super::problem::{Place, Problem};
use super::schema::CheckSchema;
use super::source::{NodeValue, SourceNode, join};
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
    /// Steps beyond the limit were dropped and this was reported.
    pub overflowed: bool,
}

pub(super) struct DraftStep {
    pub step: Step,
    pub at: Place,
    pub path: String,
    pub arms: Vec<DraftArm>,
    pub emits: Vec<DraftEmit>,
    // What the text declares. The step itself lacks it if it failed to parse, and a broken `spread` should not turn
    // every `item` into a problem.
    pub item: Option<String>,
    pub gate: Option<GateKind>,
    pub repeats: bool,
    /// One of its arms did not resolve, so what it can read is unknown.
    pub blind: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum GateKind {
    /// Opened through a URL, which expressions may read.
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
    /// For `finally`: the flow's scope, whose steps have all ended.
    pub outer: Option<ScopeId>,
    pub depth: usize,
    pub steps: BTreeMap<String, StepId>,
    pub events: Vec<Event>,
    pub output: Option<Template>,
}

/// An expression or template, with its reads, each with the path to its string inside the node.
pub(super) struct Site {
    pub view: ReadContext,
    pub path: String,
    pub node: SourceNode,
    pub reads: Vec<(Vec<String>, Read)>,
}

/// The place an expression is evaluated in, which decides what it can read.
#[derive(Clone, Copy)]
pub(super) struct ReadContext {
    /// The step it belongs to; none for the flow's output.
    pub step: Option<StepId>,
    /// The scope that has ended, or whose round has ended, when it is evaluated.
    pub inside: Option<ScopeId>,
    /// Whether the step's gate payload, item and rounds are available by then.
    pub gate: bool,
    pub item: bool,
    pub rounds: bool,
}

impl ReadContext {
    /// Before anything runs: the fields of a code flow.
    pub fn start() -> ReadContext {
        ReadContext { step: None, inside: None, gate: false, item: false, rounds: false }
    }

    /// While the step is being decided: `if`, and its gate.
    pub fn deciding(step: StepId) -> ReadContext {
        ReadContext { step: Some(step), inside: None, gate: false, item: false, rounds: false }
    }

    /// After its gate: `spread`.
    pub fn opened(step: StepId) -> ReadContext {
        ReadContext { gate: true, ..ReadContext::deciding(step) }
    }

    /// Per item: `input`, `set`, `state` and so on.
    pub fn doing(step: StepId) -> ReadContext {
        ReadContext { item: true, ..ReadContext::opened(step) }
    }

    /// Before a round: `while`.
    pub fn round(step: StepId) -> ReadContext {
        ReadContext { rounds: true, ..ReadContext::doing(step) }
    }

    /// After a round or after all rounds: `until`, `next`, `output`.
    pub fn ended(step: Option<StepId>, inside: ScopeId) -> ReadContext {
        ReadContext { step, inside: Some(inside), gate: true, item: true, rounds: true }
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
    pub fn expected(&mut self, path: &str, node: &SourceNode, expected: &str) {
        self.problem(path, node.at, format!("expected {expected}, found {}", node.found()));
    }

    /// Whether the problem limit is reached, so that explaining more of them would be wasted work.
    pub fn is_full(&self) -> bool {
        self.problems.len() >= MAX_PROBLEMS
    }

    /// The path and position of a byte of a string inside a node.
    pub fn locate(&self, path: &str, node: &SourceNode, inner: &[String], offset: usize) -> (String, Place) {
        let (mut path, mut node) = (path.to_owned(), node);
        for key in inner {
            let item = matches!(node.value, NodeValue::List(_));
            path = if item { format!("{path}[{key}]") } else { join(&path, key) };
            node = node.get(key).unwrap_or(node);
        }
        (path, if self.is_full() { node.at } else { self.inside(node, offset) })
    }

    /// The position of `offset` in the string. Falls back to the string's start if the source differs from its value
    /// (several lines, escapes).
    fn inside(&self, node: &SourceNode, offset: usize) -> Place {
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

    /// Adds a step with only its name and position.
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
