//! A flow as the machine runs it: names resolved to indexes, arms to their sources, expressions parsed. Made from a
//! definition's text by [`crate::definition`]; never changed afterwards.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::expr::{Expr, Template};
use crate::ids::{Millis, ScopeId, StepId};

/// A named, versioned definition.
#[derive(Debug, Clone)]
pub struct Flow {
    pub name: String,
    /// By content: the same canonical definition is the same version, however it was written.
    pub version: String,
    pub input_schema: Option<Value>,
    pub body: Body,
    /// The definition in its canonical form, which parses to this flow again.
    pub canonical: Value,
}

#[derive(Debug, Clone)]
pub enum Body {
    Graph(Graph),
    Code(CodeFlow),
}

/// A flow declared as steps that wait for each other.
#[derive(Debug, Clone)]
pub struct Graph {
    pub steps: Vec<Step>,
    /// Scope 0 is the flow itself.
    pub scopes: Vec<Scope>,
    pub finally: Option<Finally>,
    /// Ends a scope as soon as no handler of a failure in it can still run.
    pub fail_fast: bool,
    /// Some step has an `undo`: attempts in flight are let finish before the run ends failed or cancelled.
    pub has_undo: bool,
}

/// A flow written as a function on a worker.
#[derive(Debug, Clone)]
pub struct CodeFlow {
    pub queue: String,
    pub limits: Vec<LimitUse>,
    /// Added to that of the run.
    pub priority: i32,
    /// Labels that a worker must have.
    pub requires: Vec<String>,
    pub retry: Retry,
    pub step_retry: Retry,
    pub timeout_ms: Option<Millis>,
    pub builds: Builds,
}

/// Which builds of a worker a run of a code flow is offered to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builds {
    Latest,
    Pinned,
}

/// Steps whose arms and events see each other.
#[derive(Debug, Clone)]
pub struct Scope {
    /// The group it is the body of; none for the flow itself and for `finally`.
    pub owner: Option<StepId>,
    /// In the order of their names; a step's place here is its [`Step::slot`].
    pub steps: Vec<StepId>,
    pub events: Vec<Event>,
    pub output: Option<Template>,
}

/// An event that steps of a scope declare.
#[derive(Debug, Clone)]
pub struct Event {
    pub name: String,
    /// The steps that declare it, each with the JSON Schema it gave, if any.
    pub producers: Vec<(StepId, Option<Value>)>,
    pub subscribers: Vec<Watcher>,
}

/// An arm of a step, from the point of view of what it looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watcher {
    pub step: StepId,
    pub arm: usize,
}

#[derive(Debug, Clone)]
pub struct Step {
    pub name: String,
    pub scope: ScopeId,
    /// Its place among the steps of its scope.
    pub slot: u32,
    /// 0 for entry steps, else one more than the highest step it waits for.
    pub level: u32,
    pub arms: Vec<Arm>,
    pub join: Join,
    pub condition: Option<Expr>,
    pub gate: Option<Gate>,
    pub spread: Option<Spread>,
    pub repeat: Option<Repeat>,
    pub action: Action,
    pub input: Option<Template>,
    /// Places in its scope's events of what it declares to emit.
    pub emits: Vec<usize>,
    /// The handler that undoes it.
    pub undo: Option<String>,
    /// Arms of steps in its scope that look at it.
    pub watchers: Vec<Watcher>,
    /// Steps in its scope that it reads, or something inside it.
    pub reads: BTreeSet<StepId>,
}

impl Step {
    /// Whether it is decided to run only when all its arms are live, so that all they stand for has happened.
    pub fn needs_all(&self) -> bool {
        self.join == Join::All || self.arms.len() == 1
    }
}

#[derive(Debug, Clone)]
pub struct Arm {
    /// As the author wrote it: the key of its value in the step's input.
    pub written: String,
    pub source: Source,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A place in the scope's events.
    Event(usize),
    Step(StepId, When),
}

/// Which end of a step makes an arm live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Completed,
    Failed,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Join {
    All,
    Any,
    Some,
    AtLeast { n: u32, cancel_rest: bool },
}

#[derive(Debug, Clone)]
pub enum Action {
    Worker(Worker),
    Set(Template),
    Fail(Template),
    Return(Template),
    Group(ScopeId),
    Child {
        flow: String,
        detached: bool,
    },
    /// A gate alone: the payload is the output.
    Gate,
}

/// The queue of tasks for which neither the definition nor the start of their run names one.
pub const DEFAULT_QUEUE: &str = "default";

#[derive(Debug, Clone)]
pub struct Worker {
    pub handler: String,
    /// None if the step names none; see [`Worker::queue_or`].
    pub queue: Option<String>,
    pub limits: Vec<LimitUse>,
    pub retry: Retry,
    pub timeout_ms: Option<Millis>,
    pub start_timeout_ms: Option<Millis>,
    pub priority: i32,
    /// Labels a worker must have.
    pub requires: Vec<String>,
    /// Tasks of one queue take turns by this.
    pub key: Option<Expr>,
}

/// `limits: [stripe, {tenant: "${input.tenant}"}]`
#[derive(Debug, Clone)]
pub struct LimitUse {
    pub name: String,
    pub key: Option<Template>,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Retry {
    /// How many attempts there are in all; none is without end.
    pub attempts: Option<u32>,
    pub initial_ms: Millis,
    pub factor: f64,
    pub max_ms: Millis,
    /// The part of a back-off that is left to chance, 0.0 to 1.0.
    pub jitter: f64,
    pub non_retryable: Vec<String>,
}

impl Default for Retry {
    fn default() -> Retry {
        Retry {
            attempts: Some(5),
            initial_ms: 1_000,
            factor: 2.0,
            max_ms: 60_000,
            jitter: 0.0,
            non_retryable: Vec::new(),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Gate {
    pub waits: Waits,
    pub timeout_ms: Option<Millis>,
    pub on_timeout: OnTimeout,
}

#[derive(Debug, Clone)]
pub enum Waits {
    Time { ms: Millis },
    Until(Expr),
    Webhook,
    Manual,
    Event { name: String, key: Option<Expr>, since: Since },
}

/// How far back an event gate looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Since {
    Run,
    Ago { ms: Millis },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnTimeout {
    Fail,
    Continue,
    Skip,
}

#[derive(Debug, Clone)]
pub struct Spread {
    pub list: Expr,
    /// The name of the item in expressions.
    pub item: String,
    pub max_parallel: u32,
    /// With `collect` a failed item is an element of the output, up to this many.
    pub collect: bool,
    pub max_failures: Option<u32>,
}

#[derive(Debug, Clone)]
pub struct Repeat {
    pub test: Test,
    pub max: u32,
    pub state: Option<Template>,
    pub next: Option<Template>,
}

#[derive(Debug, Clone)]
pub enum Test {
    /// Tested before a round.
    While(Expr),
    /// Tested after a round.
    Until(Expr),
}

#[derive(Debug, Clone)]
pub struct Finally {
    pub scope: ScopeId,
    pub timeout_ms: Option<Millis>,
}

impl Action {
    pub fn kind(&self) -> &'static str {
        match self {
            Action::Worker(_) => "worker",
            Action::Set(_) => "set",
            Action::Fail(_) => "fail",
            Action::Return(_) => "return",
            Action::Group(_) => "group",
            Action::Child { .. } => "child",
            Action::Gate => "gate",
        }
    }
}

impl Worker {
    /// The queue that the step names, else the one that its run was started with, else the default.
    pub fn queue_or<'a>(&'a self, given: Option<&'a str>) -> &'a str {
        self.queue.as_deref().or(given).unwrap_or(DEFAULT_QUEUE)
    }
}

impl Flow {
    pub fn graph(&self) -> Option<&Graph> {
        match &self.body {
            Body::Graph(graph) => Some(graph),
            Body::Code(_) => None,
        }
    }
}

impl Graph {
    pub const ROOT: ScopeId = ScopeId(0);

    pub fn step(&self, id: StepId) -> &Step {
        &self.steps[id.0 as usize]
    }

    pub fn scope(&self, id: ScopeId) -> &Scope {
        &self.scopes[id.0 as usize]
    }

    /// The step of that name in that scope.
    pub fn find(&self, scope: ScopeId, name: &str) -> Option<StepId> {
        let steps = &self.scope(scope).steps;
        let at = steps.binary_search_by(|id| self.step(*id).name.as_str().cmp(name)).ok()?;
        Some(steps[at])
    }
}
