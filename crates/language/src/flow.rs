//! A flow as the machine runs it: names resolved to indexes, arms to their sources, expressions parsed. Built from a
//! definition's text by [`crate::definition`] and immutable afterwards.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::expr::{Expr, Template};
use crate::ids::{Millis, ScopeId, StepId};

/// A named, versioned definition.
#[derive(Debug, Clone)]
pub struct Flow {
    pub name: String,
    /// A hash of the canonical definition: two texts with the same content have the same version.
    pub version: String,
    pub input_schema: Option<Value>,
    /// Describes the output, for readers and generated types; outputs are not checked against it.
    pub output_schema: Option<Value>,
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
    /// Ends a scope at its first failure, as soon as no step that handles the failure can still run.
    pub fail_fast: bool,
    /// Whether some step has an `undo`: the run then lets attempts in flight finish before it ends failed or cancelled.
    pub has_undo: bool,
}

/// A flow written as a function on a worker.
#[derive(Debug, Clone)]
pub struct CodeFlow {
    pub queue: String,
    pub limits: Vec<LimitUse>,
    /// Added to the run's priority.
    pub priority: i32,
    /// Labels that a worker must have.
    pub requires: Vec<String>,
    pub retry: Retry,
    pub step_retry: Retry,
    pub timeout_ms: Option<Millis>,
    /// How long its function may take to undo its steps after a cancel; 0 ends the run at once.
    pub cancel_grace_ms: Option<Millis>,
    pub builds: Builds,
}

/// Which worker builds get the tasks of a code flow's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builds {
    Latest,
    Pinned,
}

/// A set of steps that can wait for each other and see each other's events.
#[derive(Debug, Clone)]
pub struct Scope {
    /// The group step whose body this is; none for the flow itself and for `finally`.
    pub owner: Option<StepId>,
    /// Sorted by name; a step's index here is its [`Step::slot`].
    pub steps: Vec<StepId>,
    pub events: Vec<Event>,
    pub output: Option<Template>,
}

/// An event that steps of a scope declare.
#[derive(Debug, Clone)]
pub struct Event {
    pub name: String,
    /// The steps that declare it, with the JSON Schema each gave, if any.
    pub producers: Vec<(StepId, Option<Value>)>,
    pub subscribers: Vec<Watcher>,
}

/// An arm, as listed by the step or event it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watcher {
    pub step: StepId,
    pub arm: usize,
}

#[derive(Debug, Clone)]
pub struct Step {
    pub name: String,
    pub scope: ScopeId,
    /// Its index in [`Scope::steps`].
    pub slot: u32,
    /// 0 for entry steps, else one more than the highest level among the steps it waits for.
    pub level: u32,
    pub arms: Vec<Arm>,
    pub join: Join,
    pub condition: Option<Expr>,
    pub gate: Option<Gate>,
    pub spread: Option<Spread>,
    pub repeat: Option<Repeat>,
    pub action: Action,
    pub input: Option<Template>,
    /// Indexes into its scope's events: what it declares to emit.
    pub emits: Vec<usize>,
    /// The handler that undoes it.
    pub undo: Option<String>,
    /// Arms in its scope that wait for it.
    pub watchers: Vec<Watcher>,
    /// Steps in its scope that it, or a step inside it, reads.
    pub reads: BTreeSet<StepId>,
}

impl Step {
    /// Whether it runs only if all its arms are live.
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
    /// An index into the scope's events.
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
    /// A gate without another kind: its payload is the step's output.
    Gate,
}

/// The queue for tasks when neither the definition nor the start request names one.
pub const DEFAULT_QUEUE: &str = "default";

#[derive(Debug, Clone)]
pub struct Worker {
    pub handler: String,
    /// None if the definition names no queue; see [`Worker::queue_or`].
    pub queue: Option<String>,
    pub limits: Vec<LimitUse>,
    pub retry: Retry,
    pub timeout_ms: Option<Millis>,
    pub start_timeout_ms: Option<Millis>,
    pub priority: i32,
    /// Labels a worker must have.
    pub requires: Vec<String>,
    /// Tasks in a queue are served round-robin by this key.
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
    /// Total number of attempts; none means unlimited.
    pub attempts: Option<u32>,
    pub initial_ms: Millis,
    pub factor: f64,
    pub max_ms: Millis,
    /// The fraction of a back-off that is random, 0.0 to 1.0.
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
    /// With `collect`, failed items become elements of the output, up to `max_failures`.
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
    /// The step's queue, else `given` (the queue its run was started with), else the default.
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

    pub fn find(&self, scope: ScopeId, name: &str) -> Option<StepId> {
        let steps = &self.scope(scope).steps;
        let at = steps.binary_search_by(|id| self.step(*id).name.as_str().cmp(name)).ok()?;
        Some(steps[at])
    }
}
