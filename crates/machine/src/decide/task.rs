//! Tasks: an attempt is enqueued for workers, fails, is retried.

use super::report::applied;
use super::{Decider, Done, Halt};
use crate::failure::Failure;
use crate::ids::{ActId, Fence, Millis};
use crate::record::{ActName, Entry, Reason, Scheduled};
use crate::run::{
    Activations, Driver, End, GateState, Inside, Phase, Place, REMEMBERED_TASKS, State, TaskLog, What, queue_of,
};
use crate::transition::{Answer, Due, Task, TaskChange, TaskKind, TimerKind};
use eddyline_language::data::Data;
use eddyline_language::expr::Template;
use eddyline_language::flow::{Action, Body, Builds, LimitUse, Retry, Worker};

/// A limit by its name, with its key as canonical JSON.
type LimitKey = (String, Option<String>);

impl<'a> Decider<'a> {
    /// Enqueues a task for the activation's current attempt.
    pub(super) fn enqueue(&mut self, id: ActId, reason: Option<Reason>) -> Done {
        let mut task = match self.task_for(id)? {
            Ok(task) => task,
            Err(failure) => return self.give_up(id, failure),
        };
        self.header.next_fence += 1;
        self.header.begun = true;
        self.header.open_tasks += 1;
        if self.at(id).place == Place::Root
            && let Some(code) = &mut self.header.code
        {
            code.offered_at = code.n;
            if reason == Some(Reason::Retry) {
                code.forgets = code.n;
            }
        }
        task.fence = Fence(self.header.next_fence);
        let work = Scheduled::Task { handler: task.handler.clone(), queue: task.queue.clone() };
        let (fence, attempt, queue) = (task.fence, task.attempt, task.queue.clone());
        let step_key = task.name.clone();
        self.tasks.push(TaskChange::Add(Box::new(task)));
        let activation = self.edit(id);
        activation.state = match std::mem::replace(&mut activation.state, State::Ready) {
            State::Open(inside) => State::Open(Inside { what: What::Code(Driver::Queued(fence)), ..inside }),
            _ => State::Queued(fence),
        };
        // Carry the number of releases in a row over.
        let last = activation.tasks.last().filter(|_| reason == Some(Reason::Released));
        let undelivered = last.map_or(0, |log| log.undelivered);
        if activation.tasks.len() == REMEMBERED_TASKS {
            activation.tasks.remove(0);
        }
        activation.tasks.push(TaskLog { undelivered, ..TaskLog::new(fence, attempt) });
        self.record_attempt(id, queue, Entry::StepScheduled { step_key, work, reason });
        Ok(())
    }

    /// An attempt failed: schedules another if the policy allows, else fails the activation.
    pub(super) fn attempt_failed(
        &mut self,
        id: ActId,
        failure: Failure,
        retryable: bool,
        after: Option<Millis>,
    ) -> Done {
        if self.at(id).place == Place::Root && self.leaving().is_some() {
            return self.failed_leaving(failure);
        }
        let draining = matches!(self.at(id).state, State::Draining(_));
        self.drop_task(id, Entry::AttemptFailed { step_key: self.name_of(id), error: failure.clone() })?;
        if draining {
            return self.end(id, End::Cancelled);
        }
        let retry = self.retry_policy(id)?;
        match self.next_delay(&retry, self.at(id).attempt, &failure, retryable, after) {
            Some(delay) => self.back_off(id, delay, Reason::Retry),
            None => self.give_up(id, failure),
        }
    }

    fn give_up(&mut self, id: ActId, failure: Failure) -> Done {
        match self.at(id).place {
            Place::Root if self.leaving().is_some() => self.end_leaving(),
            Place::Root => self.close_early(id, End::Failed(failure)),
            _ => self.fail(id, failure),
        }
    }

    /// Removes the current task; `entry` records why.
    pub(super) fn drop_task(&mut self, id: ActId, entry: Entry) -> Done {
        let Some(fence) = self.at(id).fence() else {
            return Err(Halt::Bug(format!("{} has no task", self.name_of(id))));
        };
        let queue = self.queue_of(id)?;
        self.record_attempt(id, queue, entry);
        self.remove_task(fence);
        let activation = self.edit(id);
        activation.state = match std::mem::replace(&mut activation.state, State::Ready) {
            State::Open(inside) => State::Open(Inside { what: What::Code(Driver::Done), ..inside }),
            _ => State::Ready,
        };
        Ok(())
    }

    /// Enqueues the task again after `delay`. A retry is a new attempt, any other reason keeps the attempt.
    pub(super) fn back_off(&mut self, id: ActId, delay: Millis, reason: Reason) -> Done {
        let step_key = self.name_of(id);
        let queue = self.queue_of(id)?;
        self.record_attempt(id, queue, Entry::RetryScheduled { step_key, reason, backoff_ms: delay });
        let activation = self.edit(id);
        if reason == Reason::Retry {
            activation.attempt += 1;
        }
        if delay <= 0 {
            return self.enqueue(id, Some(reason));
        }
        let after = activation.tasks.last().map_or(Fence(0), |task| task.fence);
        activation.state = match std::mem::replace(&mut activation.state, State::Ready) {
            State::Open(inside) => {
                State::Open(Inside { what: What::Code(Driver::BackOff { after, reason }), ..inside })
            }
            _ => State::BackOff { after, reason },
        };
        self.set_timer(id, TimerKind::BackOff(after), Due::After(delay));
        Ok(())
    }

    /// The back-off before the next attempt; none if there is no next attempt.
    pub(super) fn next_delay(
        &mut self,
        retry: &Retry,
        attempt: u32,
        failure: &Failure,
        retryable: bool,
        after: Option<Millis>,
    ) -> Option<Millis> {
        if is_last(retry, attempt, failure) || !retryable {
            return None;
        }
        Some(after.unwrap_or_else(|| {
            let exponent = i32::try_from(attempt.saturating_sub(1)).unwrap_or(i32::MAX);
            // Kept finite: 0 ms times infinity would be NaN, and so the longest delay.
            let growth = retry.factor.powi(exponent).min(f64::MAX);
            let full = (retry.initial_ms as f64 * growth).min(retry.max_ms as f64);
            let kept = if retry.jitter > 0.0 { 1.0 - retry.jitter * self.chance.fraction() } else { 1.0 };
            (full * kept).max(0.0) as Millis
        }))
    }

    /// Whether the policy allows no attempt after the current one, if that fails in this way.
    pub(super) fn is_last_attempt(&self, id: ActId, failure: &Failure) -> Done<bool> {
        Ok(is_last(&self.retry_policy(id)?, self.at(id).attempt, failure))
    }

    /// Whether the flow gives the tasks of a run only to the build that began it.
    pub(super) fn pins_builds(&self) -> bool {
        self.code().is_some_and(|code| code.builds == Builds::Pinned)
            && self.header.code.as_ref().is_some_and(|header| !header.unpinned)
    }

    /// Lets workers of any build have the function: at once if no worker has its task, else from its next task on.
    pub(super) fn unpin(&mut self, by: &str, unclaimed: Option<Fence>) -> Done<Answer> {
        let root = ActId(0);
        let Some(code) = &mut self.header.code else {
            return Ok(Answer::Conflict("only runs of code flows are pinned to a build".to_owned()));
        };
        if self.header.phase == Phase::Ended {
            return Ok(Answer::Conflict(format!("the run has ended: {}", self.header.status().as_str())));
        }
        if std::mem::replace(&mut code.unpinned, true) {
            return Ok(Answer::Nothing);
        }
        self.record(Entry::Act { act: ActName::Unpin, by: by.to_owned(), step_key: None, from: None, reason: None });
        if let Some(fence) = self.at(root).fence().filter(|fence| Some(*fence) == unclaimed) {
            self.remove_task(fence);
            self.back_off(root, 0, Reason::Released)?;
        }
        applied()
    }

    fn retry_policy(&self, id: ActId) -> Done<Retry> {
        Ok(match (&self.flow.body, &self.at(id).place) {
            (Body::Code(code), Place::Root) => {
                let given = self.header.code.as_ref().and_then(|header| header.retry.as_ref());
                given.unwrap_or(&code.retry).clone()
            }
            (Body::Code(code), Place::Memo(memo)) => {
                let given = memo.options.as_ref().and_then(|options| options.retry.as_ref());
                given.unwrap_or(&code.step_retry).clone()
            }
            (Body::Code(code), _) => code.step_retry.clone(),
            (Body::Graph(_), _) => self.worker(id)?.retry.clone(),
        })
    }

    pub(super) fn queue_of(&self, id: ActId) -> Done<String> {
        match queue_of(self, self.flow, &self.header, id) {
            Some(queue) => Ok(queue.to_owned()),
            None => Err(Halt::Bug(format!("{} has no queue", self.name_of(id)))),
        }
    }

    fn worker(&self, id: ActId) -> Done<&'a Worker> {
        match &self.step(id)?.action {
            Action::Worker(worker) => Ok(worker),
            _ => Err(Halt::Bug(format!("{} is not a worker step", self.name_of(id)))),
        }
    }

    /// The task of the current attempt, without its fence; or the failure that prevents it.
    fn task_for(&mut self, id: ActId) -> Done<Result<Task, Failure>> {
        let activation = self.at(id);
        let name = self.name_of(id);
        let blank = Task {
            fence: Fence(0),
            activation: id,
            step: name.clone(),
            name,
            handler: String::new(),
            queue: self.queue_of(id)?,
            kind: TaskKind::Step,
            attempt: activation.attempt,
            input: activation.input.clone().unwrap_or_else(Data::null),
            gate: None,
            priority: self.header.priority,
            limits: Vec::new(),
            requires: Vec::new(),
            key: None,
            timeout_ms: None,
            start_timeout_ms: None,
            build: None,
            attempts: self.retry_policy(id)?.attempts,
        };
        match (&self.flow.body, &self.at(id).place) {
            (Body::Code(code), Place::Root) => {
                let build = self.header.code.as_ref().and_then(|header| header.build.clone());
                let limits = match self.limit_keys(&code.limits, |decider, key| decider.fill_in_inside(id, key))? {
                    Ok(limits) => limits,
                    Err(failure) => return Ok(Err(failure)),
                };
                Ok(Ok(Task {
                    step: self.flow.name.clone(),
                    handler: self.flow.name.clone(),
                    kind: TaskKind::Run,
                    input: self.header.input.clone().unwrap_or_else(Data::null),
                    priority: self.header.priority.saturating_add(code.priority),
                    limits,
                    requires: code.requires.clone(),
                    timeout_ms: code.timeout_ms,
                    build: build.filter(|_| self.pins_builds()),
                    ..blank
                }))
            }
            (Body::Code(_), Place::Memo(memo)) => {
                let (handler, _) = memo.call.clone().unwrap_or_default();
                let options = memo.options.as_deref().cloned().unwrap_or_default();
                Ok(Ok(Task {
                    step: memo.name.to_string(),
                    handler,
                    priority: self.header.priority.saturating_add(options.priority),
                    limits: options.limits,
                    requires: options.requires,
                    key: options.key,
                    timeout_ms: options.timeout_ms,
                    start_timeout_ms: options.start_timeout_ms,
                    ..blank
                }))
            }
            _ => self.step_task(id, blank),
        }
    }

    fn step_task(&mut self, id: ActId, blank: Task) -> Done<Result<Task, Failure>> {
        let step = self.step(id)?;
        let worker = self.worker(id)?;
        let undoes = match &self.at(id).place {
            Place::Undo { of } => Some(*of),
            _ => None,
        };
        // Expressions of an undo are evaluated in the scope of the undone step.
        let at = undoes.unwrap_or(id);
        let limits = match self.limit_keys(&worker.limits, |decider, key| decider.fill_in(at, key))? {
            Ok(limits) => limits,
            Err(failure) => return Ok(Err(failure)),
        };
        let key = match &worker.key {
            None => None,
            Some(key) => match self.canonical(at, key)? {
                Ok(key) => Some(key),
                Err(failure) => return Ok(Err(failure)),
            },
        };
        let handler = match undoes {
            Some(_) => step.undo.clone().unwrap_or_default(),
            None => worker.handler.clone(),
        };
        Ok(Ok(Task {
            step: step.name.clone(),
            handler,
            gate: self.gate_payload(at),
            priority: self.header.priority.saturating_add(worker.priority),
            limits,
            requires: worker.requires.clone(),
            key,
            timeout_ms: worker.timeout_ms,
            start_timeout_ms: worker.start_timeout_ms.filter(|_| undoes.is_none()),
            ..blank
        }))
    }

    /// The limits of a task, with their keys.
    fn limit_keys(
        &mut self,
        limits: &[LimitUse],
        fill_in: impl Fn(&mut Decider<'a>, &Template) -> Done<Result<Data, Failure>>,
    ) -> Done<Result<Vec<LimitKey>, Failure>> {
        let mut found = Vec::with_capacity(limits.len());
        for LimitUse { name, key } in limits {
            let key = match key.as_ref().map(|key| fill_in(self, key)).transpose()?.transpose() {
                Ok(key) => key,
                Err(failure) => return Ok(Err(failure)),
            };
            match key.map(|key| self.canonical_data(&key)).transpose()?.transpose() {
                Ok(key) => found.push((name.clone(), key)),
                Err(failure) => return Ok(Err(failure)),
            }
        }
        Ok(Ok(found))
    }

    /// The payload that opened the gate of an activation or of its spread.
    pub(super) fn gate_payload(&self, id: ActId) -> Option<Data> {
        let activation = self.at(id);
        match &activation.gate {
            GateState::Opened(payload) => Some(payload.clone()),
            GateState::TimedOut => Some(Data::null()),
            _ => match activation.place {
                Place::Item { of, .. } => self.gate_payload(of),
                _ => None,
            },
        }
    }
}

/// Whether the policy allows no attempt after this one, which failed in this way.
fn is_last(retry: &Retry, attempt: u32, failure: &Failure) -> bool {
    retry.attempts.is_some_and(|attempts| attempt >= attempts) || retry.non_retryable.contains(&failure.kind)
}
