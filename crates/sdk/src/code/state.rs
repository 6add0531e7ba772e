//! The state that a function shares with its driver: what it has asked for, what is known, and what was delivered. It is
//! plain data: no clock, no IO, no tasks. The driver applies the rule of idle points with [`State::deliver`] and
//! [`State::collect`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::task::Waker;

use eddyline_protocol::{EntryKind, Failure, Log, Op};
use futures_util::future::BoxFuture;
use serde_json::Value;

use super::error::{ChildFailed, CtxError, StepFailed};
use super::memo::{Ended, EntryName, Known, Opener, Status, kind_name};
use super::name::{UNDONE, numbered, problem};
use super::retry::Retry;
use crate::worker::StepError;

/// The kind of failure of a wait whose timeout is over.
const GATE_TIMEOUT: &str = "GateTimeout";
/// The kind of failure of a run whose code uses a recorded name for something else.
const KIND_CHANGED: &str = "KindChanged";
/// The most log lines that wait to be sent; more are dropped.
const MAX_LINES: usize = 1_024;

/// Undoes a step, given its recorded output.
pub(crate) type Undo = Box<dyn FnMut(Value) -> BoxFuture<'static, Result<(), StepError>> + Send>;

/// What a function asks for under a name.
#[derive(Debug)]
pub(crate) enum Ask {
    /// A step that the function runs itself.
    Step { retry: Option<Retry>, undo: bool },
    /// A report that the server turns into an entry.
    Op(Box<Op>),
    /// The same, of a wait whose token the function needs before the wait ends.
    Opening(Box<Op>),
}

impl Ask {
    fn kind(&self) -> EntryKind {
        match self {
            Ask::Step { .. } => EntryKind::Step,
            Ask::Op(op) | Ask::Opening(op) => match **op {
                Op::Sleep { .. } => EntryKind::Sleep,
                Op::Wait { .. } => EntryKind::Wait,
                Op::Child { .. } => EntryKind::Child,
                Op::Publish { .. } => EntryKind::Publish,
                _ => EntryKind::Call,
            },
        }
    }
}

#[derive(Debug)]
struct Slot {
    kind: EntryKind,
    ask: Option<Ask>,
    phase: Phase,
    /// The waker of the combinator that polls it: only that gets this future polled.
    waker: Option<Waker>,
    retry: Option<Retry>,
    undo: bool,
    /// The number of the attempt at a step.
    attempt: u32,
}

#[derive(Debug, PartialEq)]
enum Phase {
    /// Asked for, and not looked at since.
    Asked,
    /// The server knows of it, and it has not ended.
    Waiting,
    /// Its body may begin.
    Go,
    /// Its body has begun.
    AtWork,
    /// Its body has ended; the report is not answered.
    Reported,
    /// The token of a wait is to be handed to the function.
    Opened(Opener),
    Delivered(Result<Value, CtxError>),
}

impl Phase {
    fn is_at_work(&self) -> bool {
        matches!(self, Phase::Go | Phase::AtWork | Phase::Reported)
    }
}

/// What a future learns when it is polled.
#[derive(Debug, PartialEq)]
pub(crate) enum Polled {
    Pending,
    /// Begin the body of the step, for the given attempt.
    Begin(u32),
    Opened(Opener),
    Ended(Result<Value, CtxError>),
}

/// A report that was sent, in the order of the answers.
#[derive(Debug)]
pub(crate) enum Sent {
    Step {
        name: EntryName,
        result: Result<Value, Failure>,
    },
    /// With `opening`, the function waits for the token in the outcome.
    Ask {
        name: EntryName,
        kind: EntryKind,
        opening: bool,
    },
    /// A report without an entry of its own.
    Other,
    Unwind,
    /// The last report of the task.
    Last,
}

/// What an idle point starts: reports for one frame, and futures to poll.
#[derive(Debug, Default)]
pub(crate) struct Started {
    pub ops: Vec<(Op, Sent)>,
    pub wake: Vec<Waker>,
}

/// A delivery, with the future to wake.
#[derive(Debug)]
pub(crate) struct Delivered {
    pub n: u64,
    pub name: EntryName,
    pub waker: Option<Waker>,
}

/// A finished attempt at a step.
#[derive(Debug)]
struct Finished {
    name: EntryName,
    result: Result<Value, StepError>,
}

#[derive(Default)]
pub(crate) struct State {
    slots: HashMap<EntryName, Slot>,
    /// How often each name was used in this execution.
    counts: HashMap<String, u32>,
    fresh: VecDeque<EntryName>,
    opening: VecDeque<EntryName>,
    known: HashMap<EntryName, Known>,
    /// What was asked for, has ended and was not delivered, by the number of its end.
    ready: BTreeMap<u64, EntryName>,
    /// What the server refused, which has no number.
    refused: VecDeque<(EntryName, CtxError)>,
    let_go: Vec<EntryName>,
    finished: Vec<Finished>,
    /// Steps whose bodies can go on.
    woken: Vec<EntryName>,
    /// Log lines since the last ask, and those that go with the next frame.
    lines: Vec<Log>,
    lines_to_send: Vec<Log>,
    undos: HashMap<EntryName, Undo>,
    /// Outputs of completed steps that were delivered and have an `undo`.
    undoable: BTreeMap<u64, (EntryName, Value)>,
    undone: BTreeSet<EntryName>,
    seen: u64,
    last_delivered: u64,
    now_ms: u64,
    at_work: usize,
    waiting: usize,
    openings: usize,
    kind_changed: Option<Failure>,
    over: bool,
}

impl State {
    pub fn new(started_at_ms: u64) -> State {
        State { now_ms: started_at_ms, ..State::default() }
    }

    /// The time of the last delivered entry.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// The highest number of an entry that is known here.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Whether bodies of steps are in progress, or their reports are.
    pub fn is_at_work(&self) -> bool {
        self.at_work > 0
    }

    /// Whether the function waits for something that the server knows of.
    pub fn is_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Whether something was asked for that nobody has started.
    pub fn has_unstarted(&self) -> bool {
        let not_ended = |name: &EntryName| {
            self.slots.contains_key(name) && self.known.get(name).is_none_or(|known| !known.is_ended())
        };
        self.fresh.iter().chain(&self.opening).any(not_ended)
    }

    /// Whether bodies of steps are in progress.
    pub fn is_in_progress(&self) -> bool {
        self.slots.values().any(|slot| matches!(slot.phase, Phase::Go | Phase::AtWork)) || !self.finished.is_empty()
    }

    /// Whether an entry after this number can be delivered.
    pub fn has_ready_after(&self, n: u64) -> bool {
        self.ready.last_key_value().is_some_and(|(last, _)| *last > n)
    }

    pub fn take_kind_changed(&mut self) -> Option<Failure> {
        self.kind_changed.take()
    }

    /// The name that the next use of this name gets.
    pub fn next_name(&self, full: &str) -> String {
        numbered(full, self.counts.get(full).copied().unwrap_or(0) + 1)
    }

    /// Asks for an entry.
    pub fn ask(&mut self, full: &str, ask: Ask, undo: Option<Undo>) -> Result<(EntryName, EntryKind), CtxError> {
        self.ask_unchecked(full, ask, undo, problem(full))
    }

    /// Asks for a step that undoes another.
    pub fn ask_undo(&mut self, full: &str) -> Result<(EntryName, EntryKind), CtxError> {
        let too_long = full.len() > super::name::MAX_NAME_BYTES;
        let problem = too_long.then(|| "with `undo:` before it, it is too long".to_owned());
        self.ask_unchecked(full, Ask::Step { retry: None, undo: false }, None, problem)
    }

    fn ask_unchecked(
        &mut self,
        full: &str,
        ask: Ask,
        undo: Option<Undo>,
        problem: Option<String>,
    ) -> Result<(EntryName, EntryKind), CtxError> {
        let owned = || full.to_owned();
        if let Some(problem) = problem {
            return Err(CtxError::BadName { name: owned(), problem });
        }
        if self.over {
            return Err(CtxError::Over { name: owned() });
        }
        let count = self.counts.entry(owned()).or_insert(0);
        if *count > 0 && self.slots.contains_key(numbered(full, *count).as_str()) {
            return Err(CtxError::NameInFlight { name: owned() });
        }
        *count += 1;
        let name = EntryName::from(numbered(full, *count));
        let kind = ask.kind();
        match self.known.get(&name) {
            Some(known) if known.kind != kind => {
                let (was, is) = (kind_name(known.kind), kind_name(kind));
                let message = format!(
                    "`{name}` is recorded as a {was}, but the function now uses the name for a {is}; choose another name"
                );
                self.kind_changed = Some(Failure::new(KIND_CHANGED, message));
            }
            // The lines before it were sent with it the first time.
            Some(_) => self.lines.clear(),
            None => self.lines_to_send.append(&mut self.lines),
        }
        match &ask {
            Ask::Opening(_) => self.opening.push_back(name.clone()),
            _ => self.fresh.push_back(name.clone()),
        }
        let (retry, undoes) = match &ask {
            Ask::Step { retry, undo } => (retry.clone(), *undo),
            _ => (None, false),
        };
        self.undos.extend(undo.map(|undo| (name.clone(), undo)));
        let slot = Slot { kind, ask: Some(ask), phase: Phase::Asked, waker: None, retry, undo: undoes, attempt: 1 };
        self.slots.insert(name.clone(), slot);
        self.make_ready(&name);
        Ok((name, kind))
    }

    /// Polls the future of an entry.
    pub fn poll(&mut self, name: &EntryName, waker: &Waker) -> Polled {
        let Some(slot) = self.slots.get_mut(name) else {
            return Polled::Ended(Err(CtxError::Over { name: name.to_string() }));
        };
        match &mut slot.phase {
            Phase::Delivered(_) => match self.slots.remove(name) {
                Some(Slot { phase: Phase::Delivered(end), .. }) => return Polled::Ended(end),
                _ => return Polled::Pending,
            },
            Phase::Opened(opener) => {
                let opener = std::mem::take(opener);
                self.set_phase(name, Phase::Waiting);
                self.make_ready(name);
                return Polled::Opened(opener);
            }
            _ => {}
        }
        match &mut slot.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        if slot.phase == Phase::Go {
            let attempt = slot.attempt;
            self.set_phase(name, Phase::AtWork);
            return Polled::Begin(attempt);
        }
        Polled::Pending
    }

    /// An attempt at a step has ended.
    pub fn finish(&mut self, name: &EntryName, result: Result<Value, StepError>) {
        if self.slots.contains_key(name) {
            self.set_phase(name, Phase::Reported);
            self.finished.push(Finished { name: name.clone(), result });
        }
    }

    /// The body of a step can go on.
    pub fn body_woken(&mut self, name: &EntryName) {
        self.woken.push(name.clone());
    }

    /// The future of an entry was dropped. Nobody wants it any more, so what the server knows of it ends.
    pub fn abandon(&mut self, name: &EntryName) {
        if self.over {
            return;
        }
        let delivered = self.slots.get(name).is_some_and(|slot| matches!(slot.phase, Phase::Delivered(_)));
        self.set_phase(name, Phase::Asked);
        let Some(slot) = self.slots.remove(name) else { return };
        let known = self.known.get(name);
        if let Some(known) = known
            && self.ready.get(&known.n) == Some(name)
        {
            self.ready.remove(&known.n);
        }
        let sent = !delivered && slot.ask.is_none() && slot.kind != EntryKind::Step;
        if known.map_or(sent, |known| !known.is_ended()) {
            self.let_go.push(name.clone());
        }
    }

    /// The function has ended or is given up: what is dropped from now on is not let go.
    pub fn end(&mut self) {
        self.over = true;
    }

    /// Forgets what the function had asked for, so that its undoing can ask; what is known stays.
    pub fn begin_anew(&mut self) {
        let known = std::mem::take(&mut self.known);
        let (undos, undoable) = (std::mem::take(&mut self.undos), std::mem::take(&mut self.undoable));
        let (undone, now_ms, seen) = (std::mem::take(&mut self.undone), self.now_ms, self.seen);
        let last_delivered = self.last_delivered;
        *self = State { known, undos, undoable, undone, now_ms, seen, last_delivered, ..State::default() };
    }

    /// Takes everything that may hold a context, so that the caller can drop it without the lock.
    pub fn take_undos(&mut self) -> HashMap<EntryName, Undo> {
        std::mem::take(&mut self.undos)
    }

    /// A line for the timeline. It is sent with the next thing that the function asks for; in a replay, that is known,
    /// and the line was sent before.
    pub fn log(&mut self, line: Log) {
        if self.lines.len() < MAX_LINES {
            self.lines.push(line);
        }
    }

    /// The lines that were not sent yet.
    pub fn take_lines(&mut self) -> Vec<Log> {
        let mut lines = std::mem::take(&mut self.lines_to_send);
        lines.append(&mut self.lines);
        lines
    }

    /// Adds what a memo page, news or an outcome says about an entry.
    pub fn learn(&mut self, name: EntryName, entry: Known) {
        self.seen = self.seen.max(entry.n);
        if self.known.get(&name).is_some_and(|known| known.n >= entry.n) {
            return;
        }
        self.known.insert(name.clone(), entry);
        self.make_ready(&name);
        self.go_on_if_due(&name);
    }

    pub fn known(&self, name: &EntryName) -> Option<&Known> {
        self.known.get(name)
    }

    /// Marks a delivery as possible if the entry was asked for and has ended.
    fn make_ready(&mut self, name: &EntryName) {
        if let Some(known) = self.known.get(name)
            && known.is_ended()
            && let Some(slot) = self.slots.get(name)
            && slot.kind == known.kind
            && !matches!(slot.phase, Phase::Opened(_) | Phase::Delivered(_))
            && !matches!(slot.ask, Some(Ask::Opening(_)))
        {
            self.ready.insert(known.n, name.clone());
        }
    }

    /// The waits whose token the function needs next. Nothing else is delivered before they are open, live or replayed.
    /// Returns futures to wake.
    pub fn open(&mut self, start: bool) -> Started {
        let mut started = Started::default();
        for name in std::mem::take(&mut self.opening) {
            let Some(slot) = self.slots.get_mut(&name) else { continue };
            match self.known.get(&name) {
                Some(known) => {
                    slot.ask = None;
                    slot.phase = Phase::Opened(known.opener.clone().unwrap_or_default());
                    started.wake.extend(slot.waker.take());
                }
                None if !start => self.opening.push_back(name),
                None => {
                    if let Some(Ask::Opening(op)) = slot.ask.take() {
                        self.openings += 1;
                        let kind = slot.kind;
                        // Not waiting: the function continues as soon as the outcome is there.
                        started.ops.push((named(*op, &name), Sent::Ask { name, kind, opening: true }));
                    }
                }
            }
        }
        started
    }

    /// The server has answered the request for a wait. Returns the future to wake.
    pub fn opened(&mut self, name: &EntryName, opener: Option<Opener>) -> Option<Waker> {
        self.openings = self.openings.saturating_sub(1);
        let slot = self.slots.get_mut(name)?;
        slot.phase = Phase::Opened(opener.unwrap_or_default());
        slot.waker.take()
    }

    pub fn is_opening(&self) -> bool {
        self.openings > 0
    }

    /// Delivers the entry with the lowest number, if that is at most `horizon`. Returns the future to wake.
    pub fn deliver(&mut self, horizon: u64) -> Option<Delivered> {
        if let Some((name, error)) = self.refused.pop_front() {
            return Some(Delivered { waker: self.hand_over(&name, Err(error)), n: 0, name });
        }
        let (&n, _) = self.ready.first_key_value()?;
        if n > horizon {
            return None;
        }
        let name = self.ready.remove(&n)?;
        let Known { kind, at_ms, status, .. } = self.known.remove(&name)?;
        self.now_ms = self.now_ms.max(at_ms.unwrap_or(0));
        self.last_delivered = self.last_delivered.max(n);
        let Status::Ended(end) = status else { return Some(Delivered { waker: None, n, name }) };
        if let Ended::Completed(output) = &end
            && self.undos.contains_key(&name)
        {
            self.undoable.insert(n, (name.clone(), output.clone()));
        }
        let end = match end {
            Ended::Completed(output) => Ok(output),
            Ended::Failed(failure) => Err(failed(kind, &name, failure)),
            Ended::Cancelled => Err(CtxError::Cancelled { name: name.to_string() }),
        };
        Some(Delivered { waker: self.hand_over(&name, end), n, name })
    }

    fn hand_over(&mut self, name: &EntryName, end: Result<Value, CtxError>) -> Option<Waker> {
        self.set_phase(name, Phase::Delivered(end));
        self.slots.get_mut(name)?.waker.take()
    }

    /// The server refused it.
    pub fn refuse(&mut self, name: &EntryName, message: String, opening: bool) {
        self.openings -= usize::from(opening);
        let name = name.clone();
        let error = CtxError::Refused { name: name.to_string(), message };
        self.refused.push_back((name, error));
    }

    /// What was asked for and finished since the last idle point. Without `start`, nothing new begins.
    pub fn collect(&mut self, start: bool) -> Started {
        let mut started = Started::default();
        if start {
            let lines = std::mem::take(&mut self.lines_to_send);
            started.ops.extend(lines.into_iter().map(|line| (Op::Log(line), Sent::Other)));
        }
        started.ops.append(&mut self.finished().ops);
        for name in std::mem::take(&mut self.fresh) {
            // What has begun is only waited for.
            if start || self.known.get(&name).is_some_and(Known::is_under_way) {
                self.start(name, &mut started);
            } else {
                self.fresh.push_back(name);
            }
        }
        for name in std::mem::take(&mut self.let_go) {
            started.ops.push((Op::LetGo { name: name.to_string() }, Sent::Other));
        }
        for name in std::mem::take(&mut self.woken) {
            started.wake.extend(self.slots.get_mut(&name).and_then(|slot| slot.waker.take()));
        }
        started
    }

    /// Reports on the bodies that have ended.
    pub fn finished(&mut self) -> Started {
        let finished = std::mem::take(&mut self.finished);
        let reports = finished.into_iter().map(|Finished { name, result }| self.step_report(name, result));
        Started { ops: reports.collect(), wake: Vec::new() }
    }

    fn start(&mut self, name: EntryName, started: &mut Started) {
        let Some(slot) = self.slots.get_mut(&name).filter(|slot| slot.phase == Phase::Asked) else { return };
        let known = self.known.get(&name);
        if known.is_some_and(|known| known.is_ended() || known.kind != slot.kind) {
            return;
        }
        let under_way = known.is_some_and(Known::is_under_way);
        match slot.ask.take() {
            _ if under_way => self.set_phase(&name, Phase::Waiting),
            Some(Ask::Op(op)) => {
                let sent = Sent::Ask { name: name.clone(), kind: slot.kind, opening: false };
                started.ops.push((named(*op, &name), sent));
                self.set_phase(&name, Phase::Waiting);
            }
            _ => {
                slot.attempt = known.map_or(1, |known| known.attempt.saturating_add(1));
                started.wake.extend(slot.waker.take());
                self.set_phase(&name, Phase::Go);
            }
        }
    }

    fn step_report(&mut self, name: EntryName, result: Result<Value, StepError>) -> (Op, Sent) {
        let slot = self.slots.get(&name);
        let retry = slot.and_then(|slot| slot.retry.as_ref()).map(Retry::to_json);
        let undo = slot.is_some_and(|slot| slot.undo) || self.undos.contains_key(&name);
        let text = name.to_string();
        match result {
            Ok(output) => {
                let result = Ok(output.clone());
                let (error, retryable, retry_after) = (None, true, None);
                (
                    Op::Step { name: text, output, error, retryable, retry_after, retry, undo },
                    Sent::Step { name, result },
                )
            }
            Err(error) => {
                let (failure, retryable, retry_after) = error.into_parts();
                let result = Err(failure.clone());
                let (output, error, retry_after) = (Value::Null, Some(failure), retry_after.map(super::retry::span));
                (
                    Op::Step { name: text, output, error, retryable, retry_after, retry, undo },
                    Sent::Step { name, result },
                )
            }
        }
    }

    /// The report on a step was answered with a retry: wait for the end of its back-off.
    pub fn backs_off(&mut self, name: &EntryName) {
        self.set_phase(name, Phase::Waiting);
        self.go_on_if_due(name);
    }

    fn go_on_if_due(&mut self, name: &EntryName) {
        let due = self.known.get(name).is_some_and(|known| known.status == Status::BackOff { due: true });
        if due && self.slots.get(name).is_some_and(|slot| slot.phase == Phase::Waiting) {
            self.set_phase(name, Phase::Asked);
            self.fresh.push_back(name.clone());
        }
    }

    /// Completed steps with an `undo`, whether the function saw their results or not, latest first. With `up_to_now`,
    /// only those up to the last delivery.
    pub fn to_undo(&self, up_to_now: bool) -> Vec<(EntryName, Value)> {
        let mut all: Vec<(u64, EntryName, Value)> = Vec::new();
        for (n, (name, output)) in &self.undoable {
            all.push((*n, name.clone(), output.clone()));
        }
        // News may bring what was delivered once more.
        let delivered: HashSet<&EntryName> = self.undoable.values().map(|(name, _)| name).collect();
        for (name, known) in &self.known {
            if let Status::Ended(Ended::Completed(output)) = &known.status
                && known.kind == EntryKind::Step
                && self.undos.contains_key(name)
                && !delivered.contains(name)
            {
                all.push((known.n, name.clone(), output.clone()));
            }
        }
        all.retain(|(n, name, _)| !up_to_now || (*n <= self.last_delivered && !self.undone.contains(name)));
        all.sort_by_key(|(n, ..)| std::cmp::Reverse(*n));
        all.into_iter().map(|(_, name, output)| (name, output)).collect()
    }

    /// Whether a completed step was recorded with `undo`, by this or another version of the code.
    pub fn has_undoable(&self) -> bool {
        !self.undoable.is_empty()
            || self.known.iter().any(|(name, known)| {
                let undo = known.undo || self.undos.contains_key(name);
                undo && matches!(known.status, Status::Ended(Ended::Completed(_)))
            })
    }

    pub fn take_undo(&mut self, name: &EntryName) -> Option<Undo> {
        self.undos.remove(name)
    }

    pub fn put_undo(&mut self, name: EntryName, undo: Undo) {
        self.undos.insert(name, undo);
    }

    /// Whether the function has undone the step while the run went on.
    pub fn is_undone(&self, name: &EntryName) -> bool {
        let by_function = format!("{UNDONE}{name}");
        let recorded = self.known.get(by_function.as_str()).map(|known| &known.status);
        self.undone.contains(name) || matches!(recorded, Some(Status::Ended(Ended::Completed(_))))
    }

    pub fn mark_undone(&mut self, name: EntryName) {
        self.undone.insert(name);
    }

    fn set_phase(&mut self, name: &EntryName, phase: Phase) {
        let Some(slot) = self.slots.get_mut(name) else { return };
        self.at_work -= usize::from(slot.phase.is_at_work());
        self.at_work += usize::from(phase.is_at_work());
        self.waiting -= usize::from(slot.phase == Phase::Waiting);
        self.waiting += usize::from(phase == Phase::Waiting);
        slot.phase = phase;
    }
}

fn failed(kind: EntryKind, name: &str, failure: Failure) -> CtxError {
    let name = name.to_owned();
    match kind {
        EntryKind::Wait if failure.kind == GATE_TIMEOUT => CtxError::WaitTimeout { name },
        EntryKind::Child => CtxError::Child(ChildFailed { name, failure: Box::new(failure) }),
        _ => CtxError::Step(StepFailed { name, failure: Box::new(failure) }),
    }
}

/// The report under its full name, which is known only when it is asked for.
fn named(mut op: Op, full: &str) -> Op {
    match &mut op {
        Op::Call { name, .. } | Op::Sleep { name, .. } | Op::Wait { name, .. } | Op::Child { name, .. } => {
            full.clone_into(name);
        }
        Op::Publish { as_name, .. } => *as_name = Some(full.to_owned()),
        _ => {}
    }
    op
}
