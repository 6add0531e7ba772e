//! The run state machine: `decide(flow, run, inputs) -> Transition`. Pure: everything variable comes in with the
//! inputs, and all effects go out as one atomic commit.
//!
//! An input itself changes at most a few activations. What follows from it is put on an agenda, which is worked off in
//! order, without recursion, until it is empty or the transition has touched [`MAX_TOUCHED`] activations.

mod act;
mod begin;
mod cancel;
pub(crate) mod child;
mod code;
mod ending;
mod env;
mod evaluate;
mod expiry;
pub(crate) mod gate;
mod meter;
mod pause;
mod ready;
mod repeat;
mod report;
mod reuse;
mod scope;
mod settle;
mod spread;
mod start;
mod task;
mod unwind;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::failure::{Failure, kind};
use crate::ids::{ActId, Chance, Fence, Millis, RunId, ScopeId, StepId, ValueId, Version};
use crate::record::{Attempt, Entry, GateId, Record, Skipped};
use crate::run::{Activation, Activations, Emitted, End, Header, Inside, Phase, Place, Reused, Run, State};
use crate::transition::{
    Answer, GateChange, Input, Message, MessageBody, Publish, TaskChange, TimerChange, TimerKey, TimerKind, Transition,
};
use eddyline_language::data::{Data, RoughSize, ValueRef};
use eddyline_language::expr::Cost;
use eddyline_language::flow::{Flow, Graph, Step};

use meter::Meter;

pub use env::{Env, Halt};
pub use evaluate::{Canonical, canonical_json};
pub use expiry::{MAX_RELEASE_DELAY_MS, MAX_UNDELIVERED, RELEASE_DELAY_MS};
pub use report::MAX_SLOW_MS;
pub use reuse::{rerun, retry};
pub use unwind::{DEFAULT_CANCEL_GRACE_MS, MAX_LOST_UNWINDING, UNDO_PREFIX};

/// The most activations one transition touches; the rest follows by a message of the run to itself.
pub const MAX_TOUCHED: usize = 1_000;
/// What one transition may use before the rest is deferred in the same way. The current unit of work is finished, which
/// uses at most [`eddyline_language::expr::EVALUATION`], so a transition uses at most the sum of both.
pub const BUDGET: Cost = Cost { steps: 500_000, bytes: 16 << 20, read: 16 << 20 };
/// A run with more activations fails. Each takes about half a kilobyte of memory while its run is decided, and a run is
/// decided as a whole: two such runs fit into the engine's cache. Runs that do not fit are loaded in full for each
/// commit.
pub const MAX_ACTIVATIONS: u32 = 120_000;
/// `finally` may always have a tenth of that, so that a run that grew too large can clean up.
const FINALLY_SHARE: u32 = 10;
/// The most activations an input itself touches.
const TOUCHED_BY_AN_INPUT: usize = 4;
/// The most items of a spread: when it ends, its outputs are assembled at once.
pub const MAX_ITEMS: usize = 100_000;
/// Nesting depth of child runs.
pub const MAX_DEPTH: u32 = 64;
/// Cost of a unit of work without its evaluations: about 1 µs, and a changed activation.
const WORK: Cost = Cost { steps: 20, bytes: 1 << 10, read: 0 };
/// Counting of a payload's size stops here.
const COUNTED_BYTES: usize = 64 << 20;

type Done<T = ()> = Result<T, Halt>;

/// A unit of work that follows from an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Create the activations of a scope's steps.
    Open {
        of: ActId,
        scope: ScopeId,
    },
    /// Its arms have determined whether it is ready.
    Decide(ActId),
    /// The first emit of an event in a scope.
    Emitted {
        scope: ActId,
        event: u32,
    },
    /// It has ended: notify the arms that wait for it.
    Settle(ActId),
    /// Create activations of a spread's items, up to its `max_parallel`.
    Fill(ActId),
    /// Check whether a container is done.
    Close(ActId),
    /// Cancel the open parts of a container, starting at `from`.
    Sweep {
        of: ActId,
        from: u32,
    },
    Cancel(ActId),
    /// Take over the memo of another run, then enqueue the function.
    Remember,
    /// Cancel the pending entries of a code run that unwinds, starting at `from`.
    Unwind {
        from: u32,
    },
}

/// Decides on the inputs in order, as many as fit into one transition.
pub fn decide(flow: &Flow, run: &Run, env: &Env<'_>, inputs: &[Input]) -> Result<Transition, Halt> {
    let mut decider = Decider::new(flow, run, env);
    decider.work_off()?;
    for input in inputs {
        if !decider.answers.is_empty() && !decider.room(TOUCHED_BY_AN_INPUT) {
            break;
        }
        decider.meter.next();
        let answer = decider.take(input)?;
        decider.answers.push(answer);
        decider.work_off()?;
    }
    Ok(decider.into_transition())
}

/// A run, and the transition being built on top of it.
struct Decider<'a> {
    flow: &'a Flow,
    graph: Option<&'a Graph>,
    run: &'a Run,
    env: &'a Env<'a>,
    meter: Meter,
    chance: Chance,
    header: Header,
    agenda: VecDeque<Work>,
    /// Changed and new activations.
    changed: BTreeMap<ActId, Activation>,
    next_activation: u32,
    parts: BTreeMap<(ActId, u32), ActId>,
    memo: BTreeMap<Arc<str>, ActId>,
    emitted: BTreeMap<(ActId, u32), Emitted>,
    values: BTreeMap<ValueId, Data>,
    reuse: BTreeMap<String, Reused>,
    reuse_done: BTreeSet<String>,
    cursors: BTreeMap<String, u64>,
    events_taken: Vec<u64>,
    tasks: Vec<TaskChange>,
    gates: Vec<GateChange>,
    timers: Vec<TimerChange>,
    messages: Vec<Message>,
    publishes: Vec<Publish>,
    slow_limits: Vec<(String, Millis)>,
    records: Vec<Record>,
    answers: Vec<Answer>,
    /// Tasks were closed; the engine must find out which of them a worker has.
    drain: bool,
    /// The activation of `finally`, cached once found.
    finally: Option<ActId>,
}

impl Activations for Decider<'_> {
    fn at(&self, id: ActId) -> &Activation {
        self.changed.get(&id).unwrap_or_else(|| self.run.at(id))
    }
}

impl<'a> Decider<'a> {
    fn new(flow: &'a Flow, run: &'a Run, env: &'a Env<'a>) -> Decider<'a> {
        let mut header = run.header.clone();
        Decider {
            flow,
            graph: flow.graph(),
            run,
            env,
            meter: Meter::new(env),
            chance: Chance::new(env.seed),
            agenda: std::mem::take(&mut header.agenda).into(),
            header,
            changed: BTreeMap::new(),
            next_activation: run.activations.len() as u32,
            parts: BTreeMap::new(),
            memo: BTreeMap::new(),
            emitted: BTreeMap::new(),
            values: BTreeMap::new(),
            reuse: BTreeMap::new(),
            reuse_done: BTreeSet::new(),
            cursors: BTreeMap::new(),
            events_taken: Vec::new(),
            tasks: Vec::new(),
            gates: Vec::new(),
            timers: Vec::new(),
            messages: Vec::new(),
            publishes: Vec::new(),
            slow_limits: Vec::new(),
            records: Vec::new(),
            answers: Vec::new(),
            drain: false,
            finally: None,
        }
    }

    fn take(&mut self, input: &Input) -> Done<Answer> {
        if let (Input::Start(start), Phase::New) = (input, self.header.phase) {
            return self.start(start);
        }
        if let Some(id) = target(input) {
            self.cancel_if_doomed(id)?;
        }
        match input {
            Input::Start(_) => Ok(Answer::Nothing),
            Input::TakeOver { values, more } => self.take_over_values(values, *more),
            _ if self.header.phase == Phase::New => Ok(Answer::Invalid("the run has not started".to_owned())),
            Input::Report(report) => self.report(report),
            Input::Expired { task, why, claim } => self.expired(*task, *why, claim),
            Input::Undelivered { task, claim, why } => self.undelivered(*task, claim, why),
            Input::Due(timer) => self.due(*timer),
            Input::Rearm { timer, due } => self.rearm(*timer, *due),
            Input::OpenGate { activation, by, payload } => self.open_gate(*activation, by, payload),
            Input::CancelGate { activation, by } => self.cancel_gate(*activation, by),
            Input::ChildEnded { activation, child, end } => self.child_ended(*activation, *child, end),
            Input::ChildStarted { activation, child } => self.child_started(*activation, *child),
            Input::Cancel { by, reason } => self.cancel_run(by, reason.as_deref()),
            Input::Pause { by } => self.pause(by),
            Input::Resume { by } => self.resume(by),
            Input::Unpin { by, unclaimed } => self.unpin(by, *unclaimed),
            Input::Act { activation, by, act } => self.act(activation, by, act),
            Input::Continue => Ok(Answer::Nothing),
            Input::Turn => self.turn(),
            Input::Drain { unclaimed } => self.drained(unclaimed),
        }
    }

    /// Works off the agenda within the limits of the transition.
    fn work_off(&mut self) -> Done {
        // An input may create activations without adding to the agenda.
        self.check_size()?;
        while let Some(work) = self.agenda.pop_front() {
            if !self.room(self.cost(&work)) {
                self.agenda.push_front(work);
                break;
            }
            self.meter.next();
            self.meter.add(Cost { steps: WORK.steps + self.cost(&work) as u64, ..WORK });
            self.perform(work)?;
            self.check_size()?;
            if self.meter.is_heavy() {
                break;
            }
        }
        if self.meter.is_heavy() { Err(Halt::Heavy) } else { Ok(()) }
    }

    /// Fails the run, or its `finally`, if it has too many activations.
    fn check_size(&mut self) -> Done {
        let most = self.env.max_activations;
        // A code run that unwinds may always undo: it creates at most one more activation for each it has.
        if self.next_activation <= most || (self.leaving().is_some() && self.next_activation / 2 <= most) {
            return Ok(());
        }
        let failure = |whose: &str, most: u32| {
            Failure::new(kind::TOO_MANY_ACTIVATIONS, format!("{whose} has more than {most} activations"))
        };
        if self.header.phase != Phase::Finally {
            self.fail_run(failure("the run", most))?;
            return Ok(());
        }
        self.finally = self.finally.or_else(|| self.finally_activation());
        let Some(finally) = self.finally else { return Ok(()) };
        // An undo creates activations too, and is always finished.
        let of_finally = (most / FINALLY_SHARE).max(most.saturating_sub(finally.0));
        if self.next_activation - finally.0 > of_finally {
            self.fail_finally(finally, failure("`finally`", of_finally))?;
        }
        Ok(())
    }

    fn perform(&mut self, work: Work) -> Done {
        match work {
            Work::Open { of, scope } => self.open_scope(of, scope),
            Work::Decide(id) => self.decided(id),
            Work::Emitted { scope, event } => self.notify_subscribers(scope, event as usize, true),
            Work::Settle(id) => self.settle(id),
            Work::Fill(id) => self.fill(id),
            Work::Close(id) => self.close(id),
            Work::Sweep { of, from } => self.sweep(of, from),
            Work::Cancel(id) => self.cancel(id),
            Work::Remember => self.remember(),
            Work::Unwind { from } => self.cancel_entries(from),
        }
    }

    /// The most activations a unit of work may touch. Fill and sweep limit themselves.
    fn cost(&self, work: &Work) -> usize {
        let siblings = |id: ActId| match (self.graph, &self.at(id).place) {
            (Some(graph), Place::Step { step, .. }) => graph.scope(graph.step(*step).scope).steps.len(),
            _ => 0,
        };
        match work {
            Work::Open { scope, .. } => self.graph.map_or(0, |graph| graph.scope(*scope).steps.len()) + 1,
            Work::Emitted { scope, .. } => match (self.graph, self.scope_of(*scope)) {
                (Some(graph), Some(scope)) => graph.scope(scope).steps.len(),
                _ => 0,
            },
            Work::Settle(id) => siblings(*id) + TOUCHED_BY_AN_INPUT,
            Work::Decide(_)
            | Work::Fill(_)
            | Work::Close(_)
            | Work::Sweep { .. }
            | Work::Cancel(_)
            | Work::Remember
            | Work::Unwind { .. } => TOUCHED_BY_AN_INPUT,
        }
    }

    /// Whether the transition may touch `more` activations and has budget left. Left-over work leaves room for the
    /// first input, which is always taken.
    fn room(&self, more: usize) -> bool {
        let kept_free = if self.answers.is_empty() { TOUCHED_BY_AN_INPUT } else { 0 };
        let fits = self.changed.len() + more + kept_free <= self.env.max_touched && !self.meter.is_spent();
        self.changed.is_empty() || fits
    }

    fn into_transition(mut self) -> Transition {
        let base = self.run.header.version;
        let ended = self.header.phase == Phase::Ended;
        if !ended {
            self.header.agenda = self.agenda.into();
        }
        let changed = self.header != self.run.header
            || !self.changed.is_empty()
            || !self.records.is_empty()
            || !self.messages.is_empty()
            || !self.publishes.is_empty()
            // Setting a lost timer again changes nothing else.
            || self.timers.iter().any(|change| matches!(change, TimerChange::Set { .. }));
        if changed {
            self.header.version = Version(base.0 + 1);
        }
        let version = self.header.version;
        let mut to_itself = |wanted: bool, id: &str, input: Input| {
            if wanted {
                let body = MessageBody::Input(Box::new(input));
                self.messages.push(Message { to: self.header.run, id: format!("{id}:{version}"), body });
            }
        };
        to_itself(changed && !self.header.agenda.is_empty(), "continue", Input::Continue);
        to_itself(self.drain && !ended, "drain", Input::Drain { unclaimed: Vec::new() });
        Transition {
            base,
            header: self.header,
            activations: self.changed.into_values().collect(),
            emitted: self.emitted.into_iter().collect(),
            values: self.values.into_iter().collect(),
            reuse: self.reuse.into_values().filter(|reused| !self.reuse_done.contains(&reused.activation)).collect(),
            reuse_done: self.reuse_done.into_iter().filter(|name| self.run.reuse.contains_key(name)).collect(),
            cursors: self.cursors.into_iter().collect(),
            events_taken: self.events_taken,
            tasks: self.tasks,
            gates: self.gates,
            timers: self.timers,
            messages: self.messages,
            publishes: self.publishes,
            slow_limits: self.slow_limits,
            records: self.records,
            answers: self.answers,
        }
    }
}

/// The activation that an input refers to by number.
fn target(input: &Input) -> Option<ActId> {
    match input {
        Input::Report(report) => Some(report.task.activation),
        Input::Expired { task, .. } | Input::Undelivered { task, .. } => Some(task.activation),
        Input::Due(timer) | Input::Rearm { timer, .. } => Some(timer.activation),
        Input::OpenGate { activation, .. }
        | Input::CancelGate { activation, .. }
        | Input::ChildStarted { activation, .. }
        | Input::ChildEnded { activation, .. } => Some(*activation),
        Input::Start(_)
        | Input::TakeOver { .. }
        | Input::Cancel { .. }
        | Input::Pause { .. }
        | Input::Resume { .. }
        | Input::Unpin { .. }
        | Input::Act { .. }
        | Input::Continue
        | Input::Turn
        | Input::Drain { .. } => None,
    }
}

/// Helpers.
impl<'a> Decider<'a> {
    fn edit(&mut self, id: ActId) -> &mut Activation {
        let run = self.run;
        self.changed.entry(id).or_insert_with(|| run.at(id).clone())
    }

    fn inside_mut(&mut self, id: ActId) -> Done<&mut Inside> {
        match &mut self.edit(id).state {
            State::Open(inside) => Ok(inside),
            other => Err(Halt::Bug(format!("activation {id} should have parts inside, but is {other:?}"))),
        }
    }

    fn exists(&self, id: ActId) -> bool {
        id.0 < self.next_activation
    }

    fn create(&mut self, place: Place) -> ActId {
        let id = ActId(self.next_activation);
        self.next_activation += 1;
        match &place {
            Place::Item { of, index } | Place::Round { of, index } => {
                self.parts.insert((*of, *index), id);
            }
            Place::Memo(memo) => {
                self.memo.insert(memo.name.clone(), id);
            }
            _ => {}
        }
        self.changed.insert(id, Activation::new(id, place));
        id
    }

    fn part(&self, of: ActId, index: u32) -> Option<ActId> {
        self.parts.get(&(of, index)).or_else(|| self.run.index.parts.get(&(of, index))).copied()
    }

    fn graph(&self) -> Done<&'a Graph> {
        self.graph.ok_or_else(|| Halt::Bug("a code run has no graph".to_owned()))
    }

    /// The activation's step in the definition.
    fn step(&self, id: ActId) -> Done<&'a Step> {
        let step = self.step_of(id).ok_or_else(|| Halt::Bug(format!("activation {id} belongs to no step")))?;
        Ok(self.graph()?.step(step))
    }

    /// The scope whose steps were created inside an activation.
    fn scope_of(&self, id: ActId) -> Option<ScopeId> {
        self.at(id).body.map(|body| body.scope)
    }

    fn steps_in(&self, id: ActId) -> Done<&'a [StepId]> {
        match self.scope_of(id) {
            Some(scope) => Ok(&self.graph()?.scope(scope).steps),
            None => Err(Halt::Bug(format!("activation {id} has no steps inside"))),
        }
    }

    /// The activation of a step in a scope.
    fn in_scope(&self, scope: ActId, step: StepId) -> Done<ActId> {
        match self.at(scope).body {
            Some(body) => Ok(ActId(body.first.0 + self.graph()?.step(step).slot)),
            None => Err(Halt::Bug(format!("activation {scope} has no steps inside"))),
        }
    }

    /// Whether a container is ending.
    fn is_closing(&self, id: ActId) -> bool {
        self.at(id).inside().is_none_or(|inside| inside.closing.is_some())
    }

    /// Cancels an activation that is due to be cancelled but was left over by an earlier transition, before anything
    /// else happens to it.
    fn cancel_if_doomed(&mut self, id: ActId) -> Done {
        if self.exists(id) && self.is_doomed(id) { self.cancel(id) } else { Ok(()) }
    }

    fn is_doomed(&self, id: ActId) -> bool {
        let above = std::iter::successors(self.at(id).parent(), |of| self.at(*of).parent());
        let mut around = above.filter_map(|of| self.at(of).inside());
        self.at(id).is_open() && !self.agenda.is_empty() && around.any(|inside| inside.closing.is_some())
    }

    fn name_of(&self, id: ActId) -> String {
        self.name(self.graph, id)
    }

    fn gate_id(&self, id: ActId) -> GateId {
        GateId { run: self.header.run, activation: id }
    }

    fn emitted_at(&self, scope: ActId, event: u32) -> Option<&Emitted> {
        self.emitted.get(&(scope, event)).or_else(|| self.run.emitted.get(&(scope, event)))
    }

    fn record(&mut self, entry: Entry) {
        self.records.push(Record { entry, attempt: None });
    }

    /// The fence of its latest attempt.
    fn last_fence(&self, id: ActId) -> Fence {
        self.at(id).tasks.last().map_or(Fence(0), |task| task.fence)
    }

    /// Adds a record of the activation's current attempt.
    fn record_attempt(&mut self, id: ActId, queue: String, entry: Entry) {
        let attempt = Some(Attempt { number: self.at(id).attempt, fence: self.last_fence(id), queue });
        self.records.push(Record { entry, attempt });
    }

    /// The payload as stored: inline if it is small, else a reference to a value that this transition writes.
    fn keep(&mut self, data: Data) -> Data {
        if matches!(data, Data::Ref(_)) || data.is_inline() {
            return data;
        }
        let id = ValueId(self.header.next_value);
        self.header.next_value += 1;
        let own = data.own_bytes(COUNTED_BYTES) as u64;
        self.meter.add(Cost { steps: own / 16, bytes: own, read: 0 });
        let bytes = u32::try_from(data.bytes(COUNTED_BYTES)).unwrap_or(u32::MAX);
        let read_size = RoughSize::of(data.read_bytes(COUNTED_BYTES));
        let stored = ValueRef { id, bytes, depth: data.depth(), read_size };
        self.values.insert(id, data);
        Data::Ref(stored)
    }

    fn set_timer(&mut self, activation: ActId, kind: TimerKind, due: crate::transition::Due) {
        self.timers.push(TimerChange::Set { key: TimerKey { activation, kind }, due });
    }

    fn clear_timer(&mut self, activation: ActId, kind: TimerKind) {
        self.timers.push(TimerChange::Clear(TimerKey { activation, kind }));
    }

    fn send(&mut self, to: RunId, id: String, body: MessageBody) {
        self.messages.push(Message { to, id, body });
    }

    fn fail(&mut self, id: ActId, failure: Failure) -> Done {
        self.end(id, End::Failed(failure))
    }

    fn skip(&mut self, id: ActId, reason: Skipped) -> Done {
        self.end(id, End::Skipped(reason))
    }
}
