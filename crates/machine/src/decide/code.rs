//! Code runs: the function drives the run, and its steps are recorded in the memo by name.

use std::sync::Arc;

use super::gate::Arrival;
use super::report::applied;
use super::{Decider, Done, Work};
use crate::failure::{Failure, kind};
use crate::ids::{ActId, Fence, Millis};
use crate::record::{Entry, GateReason, Reason};
use crate::run::{Activations, Driver, End, GateState, Inside, Memo, MemoKind, Place, State, TakenOver, TaskLog, What};
use crate::transition::{
    Answer, CodeOp, CodeWait, Decision, Due, GateChange, MessageBody, Op, ReportResult, Start, TimerKind,
};
use eddyline_language::data::Data;
use eddyline_language::flow::{Body, CodeFlow, Retry};

/// The longest name of a step of a code run.
pub const MAX_NAME_BYTES: usize = 512;

const ROOT: ActId = ActId(0);

impl Decider<'_> {
    /// Takes over the memo of another run, within the limits of the transition, then enqueues the function.
    pub(super) fn remember(&mut self) -> Done {
        if self.is_closing(ROOT) {
            // It was cancelled before the whole memo was taken over: do not start the function.
            return Ok(());
        }
        for name in self.still_to_reuse() {
            if !self.room(2) {
                self.agenda.push_back(Work::Remember);
                return Ok(());
            }
            let Some(reused) = self.reusable(&name).cloned() else { continue };
            let TakenOver::Whole(end) = reused.how else { continue };
            self.reuse_done.insert(name.clone());
            self.header.begun = true;
            let id = self.new_entry(&name, reused.memo.unwrap_or(MemoKind::Step))?;
            self.edit(id).input = reused.input;
            if reused.undo {
                self.can_be_undone(id);
            }
            let from = self.header.retry_of;
            self.end_as(id, end, from)?;
        }
        self.enqueue(ROOT, None)
    }

    pub(super) fn code_op(&mut self, name: &str, op: &CodeOp) -> Done<Answer> {
        if let Some(problem) = bad_name(name) {
            return Ok(Answer::Invalid(problem));
        }
        if let Some(problem) = self.refused_by_phase(name, op.kind())? {
            return Ok(Answer::Invalid(problem));
        }
        let id = match self.known(name) {
            Some((id, memo)) if memo.kind != op.kind() => return self.kind_changed(id, name, memo.kind, op.kind()),
            Some((id, _)) if !matches!(self.at(id).state, State::Retrying { .. }) => {
                return Ok(Answer::Duplicate(ReportResult { known: true, ..self.result_of(id) }));
            }
            Some((id, _)) => {
                self.stop_waiting_to_retry(id);
                id
            }
            None => self.new_entry(name, op.kind())?,
        };
        match op {
            CodeOp::Done { output, undo } => self.step_done(id, output, *undo)?,
            CodeOp::Failed { error, retryable, retry_after_ms, retry } => {
                self.step_failed(id, error, *retryable, *retry_after_ms, retry.as_ref())?;
            }
            CodeOp::Call { handler, input, queue, options } => {
                let queue = match queue {
                    Some(queue) => queue.clone(),
                    None => self.queue_of(ROOT)?,
                };
                let input = self.keep(input.clone());
                let activation = self.edit(id);
                activation.input = Some(input);
                activation.attempt = 1;
                if let Place::Memo(memo) = &mut activation.place {
                    memo.call = Some((handler.clone(), queue));
                    memo.options = options.clone();
                }
                self.set_pending(id, true);
                self.enqueue(id, None)?;
            }
            CodeOp::Sleep { due } => {
                self.set_pending(id, true);
                self.wait_at_gate(id, Arrival { reason: GateReason::Time, event: None, due: Some(*due) });
            }
            CodeOp::Wait { wait, timeout_ms } => self.wait(id, wait, timeout_ms.map(Due::After))?,
            CodeOp::Child { flow, input, detached, options } => {
                let input = self.keep(input.clone());
                self.edit(id).input = Some(input);
                self.start_child(id, flow, *detached, options.as_deref())?;
                if matches!(self.at(id).state, State::Child(_) | State::Starting(_)) {
                    self.set_pending(id, true);
                }
            }
        }
        if op.kind() != MemoKind::Step && self.at(id).end().is_some() {
            // It ended at once, such as a child that is nested too deep; the function does not know the result yet.
            self.entry_brings_news(id);
        }
        Ok(Answer::Applied(self.result_of(id)))
    }

    /// Publishes an event, once for each name in the memo.
    pub(super) fn publish_as(&mut self, name: &str, publish: impl FnOnce(&mut Self)) -> Done<Answer> {
        if let Some(problem) = bad_name(name) {
            return Ok(Answer::Invalid(problem));
        }
        if let Some(problem) = self.refused_by_phase(name, MemoKind::Publish)? {
            return Ok(Answer::Invalid(problem));
        }
        match self.known(name) {
            Some((id, memo)) if memo.kind != MemoKind::Publish => {
                self.kind_changed(id, name, memo.kind, MemoKind::Publish)
            }
            Some((id, _)) => Ok(Answer::Duplicate(ReportResult { known: true, ..self.result_of(id) })),
            None => {
                let id = self.new_entry(name, MemoKind::Publish)?;
                publish(self);
                self.end(id, End::Completed(Data::null()))?;
                Ok(Answer::Applied(self.result_of(id)))
            }
        }
    }

    /// Ends an entry whose result is no longer needed. The function asked for it, so it gets no news.
    pub(super) fn let_go(&mut self, name: &str) -> Done<Answer> {
        let Some((id, _)) = self.known(name) else {
            return Ok(Answer::Invalid(format!("there is no entry `{name}` to let go")));
        };
        if self.at(id).end().is_some() {
            return Ok(Answer::Duplicate(self.result_of(id)));
        }
        if self.is_unwinding() {
            return Ok(Answer::Invalid(format!("`{name}` is an undo step, which cannot be let go")));
        }
        self.end_quietly(id)?;
        Ok(Answer::Applied(self.result_of(id)))
    }

    /// Cancels an entry without news for its function.
    pub(super) fn end_quietly(&mut self, id: ActId) -> Done {
        self.set_pending(id, false);
        self.note_change(id, false);
        self.end(id, End::Cancelled)
    }

    fn step_done(&mut self, id: ActId, output: &Data, undo: bool) -> Done {
        let result = self.keep(output.clone());
        let step_key = self.name_of(id);
        self.begin_own_attempt(id);
        self.record_own(id, Entry::AttemptCompleted { step_key, result: result.clone(), suspended: false })?;
        if undo {
            self.can_be_undone(id);
        }
        self.note_undone(id);
        self.end(id, End::Completed(result))
    }

    fn step_failed(
        &mut self,
        id: ActId,
        error: &Failure,
        retryable: bool,
        after: Option<i64>,
        retry: Option<&Retry>,
    ) -> Done {
        let error = &error.clone().bounded();
        let step_key = self.name_of(id);
        self.begin_own_attempt(id);
        self.record_own(id, Entry::AttemptFailed { step_key: step_key.clone(), error: error.clone() })?;
        let Some(code) = self.code() else { return Ok(()) };
        let retry = retry.unwrap_or(&code.step_retry).clone();
        let attempt = self.at(id).attempt;
        let Some(after_ms) = self.next_delay(&retry, attempt, error, retryable, after) else {
            return self.fail(id, error.clone());
        };
        self.record_own(id, Entry::RetryScheduled { step_key, reason: Reason::Retry, backoff_ms: after_ms })?;
        self.edit(id).state = State::Retrying { due: false, after_ms };
        let fence = self.last_fence(id);
        self.set_timer(id, TimerKind::BackOff(fence), Due::After(after_ms));
        self.set_pending(id, true);
        Ok(())
    }

    /// Begins an attempt of a step that the function runs itself.
    fn begin_own_attempt(&mut self, id: ActId) {
        // Its own fence, so that the timers of two attempts are not confused.
        self.header.next_fence += 1;
        let fence = Fence(self.header.next_fence);
        let activation = self.edit(id);
        activation.attempt += 1;
        activation.tasks = vec![TaskLog::new(fence, activation.attempt)];
    }

    fn record_own(&mut self, id: ActId, entry: Entry) -> Done {
        let queue = self.queue_of(ROOT)?;
        self.record_attempt(id, queue, entry);
        Ok(())
    }

    fn wait(&mut self, id: ActId, wait: &CodeWait, due: Option<Due>) -> Done {
        let (reason, event) = match wait {
            CodeWait::Webhook => (GateReason::Webhook, None),
            CodeWait::Manual => (GateReason::Manual, None),
            CodeWait::Event { name, key, since } => {
                let key = match key.as_ref().map(|key| self.canonical_data(key)).transpose()?.transpose() {
                    Ok(key) => key,
                    Err(failure) => return self.fail(id, failure),
                };
                (GateReason::Event, Some((name.clone(), key, *since)))
            }
        };
        if event.is_none() {
            let token = self.chance.token();
            self.gates.push(GateChange::Add { id: self.gate_id(id), token: token.clone() });
            let activation = self.edit(id);
            activation.gate = GateState::Ahead { early: None };
            activation.gate_token = Some(token);
        }
        self.set_pending(id, true);
        self.wait_at_gate(id, Arrival { reason, event, due });
        Ok(())
    }

    /// Suspends the function until a change beyond what it has seen.
    pub(super) fn suspend(&mut self, seen: u64) -> Done<Answer> {
        if self.was_told_to_leave() {
            return self.give_up_task();
        }
        let Some(code) = &self.header.code else { return Ok(Answer::Stale) };
        // Clamp to the latest change: a number too high must not make the function miss changes.
        let seen = seen.min(code.n);
        let unseen = code.news > seen;
        if !unseen && code.pending == 0 {
            let message =
                "nothing to wait for: no call, sleep, wait, child or retry is pending, and all changes were seen";
            return Ok(Answer::Invalid(message.to_owned()));
        }
        let entry = Entry::AttemptCompleted { step_key: self.name_of(ROOT), result: Data::null(), suspended: true };
        self.drop_task(ROOT, entry)?;
        self.set_driver(Driver::Suspended { seen })?;
        self.resume_driver()?;
        applied()
    }

    /// Enqueues the function if it is suspended and there is a change it has not seen.
    pub(super) fn resume_driver(&mut self) -> Done {
        let Some(Inside { closing: None, what: What::Code(Driver::Suspended { seen }), .. }) = self.at(ROOT).inside()
        else {
            return Ok(());
        };
        let seen = *seen;
        match &self.header.code {
            Some(code) if code.news > seen => self.enqueue(ROOT, Some(Reason::Resumed)),
            _ => Ok(()),
        }
    }

    /// Ends the run; a new run continues it.
    pub(super) fn continue_as(&mut self, input: &Data) -> Done<Answer> {
        let next = self.header.run.derive("continue");
        let input = self.keep(input.clone());
        let header = &self.header;
        let start = Start {
            input: Some(input),
            external_id: header.external_id.clone(),
            metadata: header.metadata.clone(),
            queue: header.queue.clone(),
            unique: header.unique.clone(),
            tags: header.tags.clone(),
            priority: header.priority,
            parent: header.parent,
            // A continued run without a parent is the root of its own tree.
            root: header.root,
            key_run: header.key_run.map(|of| of.derive("continue")),
            depth: header.depth,
            traceparent: header.traceparent.clone(),
            events_since: Some(header.events_since),
            retry: header.code.as_ref().and_then(|code| code.retry.clone()),
            cursors: self.run.cursors.iter().chain(&self.cursors).map(|(key, at)| (key.clone(), *at)).collect(),
            ..Start::default()
        };
        let flow = header.flow.clone();
        self.send(next, "start".to_owned(), MessageBody::Start { flow, start: Box::new(start) });
        self.header.continued_as = Some(next);
        let entry = Entry::AttemptCompleted { step_key: self.name_of(ROOT), result: Data::null(), suspended: false };
        self.drop_task(ROOT, entry)?;
        self.close_early(ROOT, End::Completed(Data::null()))?;
        applied()
    }

    /// The back-off of a step that its function retries is over.
    pub(super) fn retry_due(&mut self, id: ActId) -> Done<Answer> {
        let State::Retrying { due: false, after_ms } = self.at(id).state else { return Ok(Answer::Nothing) };
        self.entry_brings_news(id);
        self.edit(id).state = State::Retrying { due: true, after_ms };
        self.resume_driver()?;
        applied()
    }

    /// Cancels the function.
    pub(super) fn dismiss_driver(&mut self, root: ActId) -> Done {
        let Some(Inside { what: What::Code(driver), .. }) = self.at(root).inside() else { return Ok(()) };
        match driver {
            Driver::Done => return Ok(()),
            Driver::Queued(fence) => {
                let fence = *fence;
                self.call_off(root, fence);
            }
            Driver::BackOff { after, .. } => {
                let after = *after;
                self.clear_timer(root, TimerKind::BackOff(after));
            }
            Driver::Suspended { .. } => {}
        }
        let step_key = self.name_of(root);
        self.record(Entry::StepCancelled { step_key });
        self.set_driver(Driver::Done)
    }

    /// Whether an entry will change without the function; once it has changed, it is no longer pending.
    pub(super) fn is_pending_entry(&self, id: ActId) -> bool {
        matches!(&self.at(id).place, Place::Memo(memo) if memo.pending)
    }

    /// Records that an entry changed without its function.
    pub(super) fn entry_brings_news(&mut self, id: ActId) {
        self.set_pending(id, false);
        let n = self.note_change(id, true);
        if let Some(code) = &mut self.header.code {
            code.news = n;
        }
    }

    fn note_change(&mut self, id: ActId, news: bool) -> u64 {
        let (n, at) = self.next_n();
        if let Place::Memo(memo) = &mut self.edit(id).place {
            (memo.n, memo.at, memo.news) = (n, at, news);
        }
        n
    }

    fn set_pending(&mut self, id: ActId, pending: bool) {
        let Place::Memo(memo) = &mut self.edit(id).place else { return };
        let change = i32::from(pending) - i32::from(memo.pending);
        memo.pending = pending;
        if let Some(code) = &mut self.header.code {
            code.pending = code.pending.saturating_add_signed(change);
        }
    }

    pub(super) fn is_sleep(&self, id: ActId) -> bool {
        matches!(&self.at(id).place, Place::Memo(memo) if memo.kind == MemoKind::Sleep)
    }

    /// The result that a report on a step of a code run got, or would get.
    pub(super) fn result_of_op(&self, op: &Op) -> ReportResult {
        match op {
            Op::Code { name, .. } | Op::LetGo { name } | Op::Publish { as_name: Some(name), .. } => {
                self.known(name).map_or_else(ReportResult::default, |(id, _)| self.result_of(id))
            }
            _ => ReportResult::default(),
        }
    }

    /// Finds an entry by its activation name.
    pub(super) fn find_entry(&self, name: &str) -> Option<ActId> {
        (1..self.next_activation).map(ActId).find(|id| self.name_of(*id) == name)
    }

    fn result_of(&self, id: ActId) -> ReportResult {
        let activation = self.at(id);
        let Place::Memo(memo) = &activation.place else { return ReportResult::default() };
        let decision = match (&memo.kind, &activation.state) {
            (MemoKind::Step, State::Ended(End::Completed(_))) => Some(Decision::Recorded),
            (MemoKind::Step, State::Ended(_)) => Some(Decision::Failed),
            (MemoKind::Step, State::Retrying { after_ms, .. }) => Some(Decision::Retry { after_ms: *after_ms }),
            _ => None,
        };
        let token = activation.gate_token.clone();
        ReportResult { decision, token, known: false, n: Some(memo.n), at: Some(memo.at) }
    }

    /// The entry of that name, unless the current attempt of the function forgets it.
    pub(super) fn known(&self, name: &str) -> Option<(ActId, &Memo)> {
        let id = *self.memo.get(name).or_else(|| self.run.index.memo.get(name))?;
        let Place::Memo(memo) = &self.at(id).place else { return None };
        let forgotten = self.header.code.as_ref().is_some_and(|code| code.has_forgotten(memo, self.at(id).end()));
        (!forgotten).then_some((id, memo))
    }

    fn new_entry(&mut self, name: &str, kind: MemoKind) -> Done<ActId> {
        let again = self.memo.contains_key(name) || self.run.index.memo.contains_key(name);
        let (n, at) = self.next_n();
        let made_by = self.at(ROOT).attempt;
        self.inside_mut(ROOT)?.open += 1;
        self.header.step_count += 1;
        let (name, pending, news, call, options, undo) = (Arc::from(name), false, false, None, None, false);
        let memo = Memo { name, kind, made_by, again, n, at, pending, news, call, options, undo };
        Ok(self.create(Place::Memo(memo)))
    }

    fn kind_changed(&mut self, id: ActId, name: &str, was: MemoKind, is: MemoKind) -> Done<Answer> {
        let message = format!(
            "`{name}` is recorded as a {}, but the function now uses the name for a {}; choose another name",
            was.as_str(),
            is.as_str()
        );
        let failure = Failure::new(kind::KIND_CHANGED, message).within(&self.name_of(id));
        let entry = Entry::AttemptFailed { step_key: self.name_of(ROOT), error: failure.clone() };
        self.drop_task(ROOT, entry)?;
        self.close_early(ROOT, End::Failed(failure))?;
        Ok(Answer::Applied(ReportResult { decision: Some(Decision::Failed), ..ReportResult::default() }))
    }

    /// Ends the back-off of a step, because the function reports on it.
    fn stop_waiting_to_retry(&mut self, id: ActId) {
        if let State::Retrying { due: false, .. } = self.at(id).state {
            let fence = self.last_fence(id);
            self.clear_timer(id, TimerKind::BackOff(fence));
        }
        self.set_pending(id, false);
        self.note_change(id, false);
        self.edit(id).state = State::Ready;
    }

    pub(super) fn set_driver(&mut self, driver: Driver) -> Done {
        self.inside_mut(ROOT)?.what = What::Code(driver);
        Ok(())
    }

    /// The number of the next change of the memo, and its time.
    pub(super) fn next_n(&mut self) -> (u64, Millis) {
        match &mut self.header.code {
            Some(code) => {
                code.n += 1;
                code.at = code.at.max(self.env.now);
                (code.n, code.at)
            }
            None => (0, self.env.now),
        }
    }

    pub(super) fn code(&self) -> Option<&CodeFlow> {
        match &self.flow.body {
            Body::Code(code) => Some(code),
            Body::Graph(_) => None,
        }
    }
}

fn bad_name(name: &str) -> Option<String> {
    let reserved =
        name.rsplit_once('~').is_some_and(|(_, tail)| !tail.is_empty() && tail.chars().all(|c| c.is_ascii_digit()));
    let problem = match name {
        "" => "a step needs a name".to_owned(),
        _ if name.len() > MAX_NAME_BYTES => format!("the name of a step has at most {MAX_NAME_BYTES} bytes"),
        _ if name.starts_with('@') => format!("`{name}`: names that start with `@` are reserved"),
        _ if name.chars().any(char::is_control) => "the name of a step must not contain control characters".to_owned(),
        _ if reserved => format!("`{name}`: names that end in `~` and a number are reserved"),
        _ => return None,
    };
    Some(problem)
}
