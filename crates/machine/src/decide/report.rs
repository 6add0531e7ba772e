//! Reports of workers. A report counts only if it carries the fence of the current task.

use super::{Decider, Done, Work};
use crate::ids::{ActId, Fence, Millis};
use crate::record::{Entry, Reason};
use crate::run::{Activations, Emitted, End, Phase, Place, REMEMBERED_GAPS, State};
use crate::transition::{Answer, Claim, Log, Op, Publish, Report, ReportResult, TaskRef};
use crate::wire::{AROUND_LOG_BYTES, MAX_RECORD_BYTES};
use eddyline_language::data::Data;
use serde_json::{Value, json};

/// The longest time that a `defer` closes its limit, because that blocks other tasks too. The task itself waits as long
/// as it requests.
pub const MAX_SLOW_MS: Millis = 3_600_000;

/// A log message of this size always fits into a record, however it is escaped.
const SHORT_LOG_BYTES: usize = 4 << 10;

impl Decider<'_> {
    pub(super) fn report(&mut self, report: &Report) -> Done<Answer> {
        let TaskRef { activation: id, fence } = report.task;
        if !self.exists(id) {
            return Ok(Answer::Invalid("there is no such task".to_owned()));
        }
        if report.seq == Some(0) {
            return Ok(Answer::Invalid("`seq` starts at 1".to_owned()));
        }
        if let Some(seq) = report.seq
            && self.was_applied(id, fence, seq)
        {
            return Ok(Answer::Duplicate(self.result_of_op(&report.op)));
        }
        if let Some(refusal) = self.refuse(id, fence) {
            return Ok(refusal);
        }
        self.note_claim(id, &report.claim);
        let answer = self.operate(id, report)?;
        if let (Answer::Applied(_), Some(seq)) = (&answer, report.seq) {
            self.note_seq(id, fence, seq);
        }
        Ok(answer)
    }

    fn operate(&mut self, id: ActId, report: &Report) -> Done<Answer> {
        let is_driver = self.at(id).place == Place::Root;
        match &report.op {
            Op::Complete { .. } | Op::ContinueAs { .. } if is_driver && self.is_unwinding() => {
                let message = "the run unwinds: only `fail` ends it, after the undo steps";
                Ok(Answer::Invalid(message.to_owned()))
            }
            Op::ContinueAs { .. } if is_driver && self.leaving().is_some() => {
                Ok(Answer::Invalid("the run was cancelled and cannot continue: report `unwind`".to_owned()))
            }
            Op::Complete { output, emits, logs } => self.complete(id, output, emits, logs),
            Op::Fail { error, retryable, retry_after_ms } => {
                self.attempt_failed(id, error.clone().bounded(), *retryable, *retry_after_ms)?;
                applied()
            }
            Op::Defer { after_ms, limit } => self.defer(id, *after_ms, limit.as_deref()),
            Op::Release => {
                self.give_back(id)?;
                applied()
            }
            Op::Emit { event, payload } => match self.undeclared(id, event)? {
                Some(problem) => Ok(Answer::Invalid(problem)),
                None => {
                    self.emit(id, event, payload.clone())?;
                    applied()
                }
            },
            Op::Publish { as_name: Some(_), .. } if !is_driver => {
                Ok(Answer::Invalid("`as` is for the functions of code runs; this is a step".to_owned()))
            }
            Op::Publish { name, as_name: Some(as_name), key, payload } => {
                self.publish_as(as_name, |decider| decider.publish(name, key.as_ref(), payload))
            }
            Op::Publish { name, as_name: None, key, payload } => {
                self.publish(name, key.as_ref(), payload);
                applied()
            }
            Op::Log(log) => {
                self.log(id, log)?;
                applied()
            }
            Op::Progress { done, total, msg } => {
                let entry = Entry::StepProgress {
                    step_key: self.name_of(id),
                    done: done.clone(),
                    total: total.clone(),
                    msg: msg.clone(),
                };
                let queue = self.queue_of(id)?;
                self.record_attempt(id, queue, entry);
                applied()
            }
            Op::Code { .. } | Op::LetGo { .. } | Op::Unwind { .. } | Op::Suspend { .. } | Op::ContinueAs { .. }
                if !is_driver || self.graph.is_some() =>
            {
                Ok(Answer::Invalid(format!(
                    "{} is a step; only the function of a code run can report this",
                    self.name_of(id)
                )))
            }
            Op::Code { name, op } => self.code_op(name, op),
            Op::LetGo { name } => self.let_go(name),
            Op::Unwind { error } => self.unwind(error),
            Op::Suspend { seen } => self.suspend(seen.unwrap_or(report.claim.memo)),
            Op::ContinueAs { input } => self.continue_as(input),
        }
    }

    fn complete(&mut self, id: ActId, output: &Data, emits: &[(String, Data)], logs: &[Log]) -> Done<Answer> {
        for (event, _) in emits {
            if let Some(problem) = self.undeclared(id, event)? {
                return Ok(Answer::Invalid(problem));
            }
        }
        for log in logs {
            self.log(id, log)?;
        }
        for (event, payload) in emits {
            self.emit(id, event, payload.clone())?;
        }
        if self.at(id).place == Place::Root && self.leaving().is_some() {
            // The function completed before it learned of the cancel.
            self.header.cancelling = false;
            self.header.cancel_reason = None;
        }
        let result = self.keep(output.clone());
        let step_key = self.name_of(id);
        self.drop_task(id, Entry::AttemptCompleted { step_key, result: result.clone(), suspended: false })?;
        match self.at(id).place {
            Place::Root => self.close_early(id, End::Completed(result))?,
            _ => self.end(id, End::Completed(result))?,
        }
        applied()
    }

    fn publish(&mut self, name: &str, key: Option<&Data>, payload: &Data) {
        self.header.next_publish += 1;
        let id = format!("{}.{}", self.header.run, self.header.next_publish);
        self.publishes.push(Publish { id, name: name.to_owned(), key: key.cloned(), payload: payload.clone() });
    }

    fn defer(&mut self, id: ActId, after: Millis, limit: Option<&str>) -> Done<Answer> {
        if let Some(limit) = limit {
            self.slow_limits.push((limit.to_owned(), after.min(MAX_SLOW_MS)));
        }
        let Some(fence) = self.at(id).fence() else { return Ok(Answer::Stale) };
        if matches!(self.at(id).state, State::Draining(_)) {
            self.end(id, End::Cancelled)?;
            return applied();
        }
        self.begin_unwinding_at(id);
        self.remove_task(fence);
        self.back_off(id, after, Reason::Deferred)?;
        applied()
    }

    /// Why an activation must not emit the event, or none if it may.
    fn undeclared(&self, id: ActId, event: &str) -> Done<Option<String>> {
        let name = self.name_of(id);
        let Place::Step { step, .. } = self.at(id).place else {
            return Ok(Some(format!(
                "{name} can't emit `{event}`: only steps of a graph can, except items of a spread"
            )));
        };
        let graph = self.graph()?;
        let step = graph.step(step);
        let events = &graph.scope(step.scope).events;
        let declared: Vec<&str> = step.emits.iter().map(|event| events[*event].name.as_str()).collect();
        if declared.contains(&event) {
            return Ok(None);
        }
        let known = if declared.is_empty() { "nothing".to_owned() } else { format!("`{}`", declared.join("`, `")) };
        Ok(Some(format!("`{event}` is not among the `emits` of {name}, which declares {known}")))
    }

    /// Emits a declared event. The first of its name in its scope counts; a repeat is recorded without effect.
    pub(super) fn emit(&mut self, id: ActId, event: &str, payload: Data) -> Done {
        let Place::Step { step, scope } = self.at(id).place else { return Ok(()) };
        let graph = self.graph()?;
        let events = &graph.scope(graph.step(step).scope).events;
        let Some(index) = events.iter().position(|declared| declared.name == event) else { return Ok(()) };
        let payload = self.keep(payload);
        let repeat = self.emitted_at(scope, index as u32).is_some();
        let step_key = self.name_of(id);
        let queue = self.queue_of(id)?;
        let entry = Entry::Emit { event: event.to_owned(), payload: payload.clone(), step_key, repeat };
        self.record_attempt(id, queue, entry);
        if !repeat {
            let order = (self.run.emitted.len() + self.emitted.len()) as u32;
            self.emitted.insert((scope, index as u32), Emitted { payload, by: id, order });
            if !self.header.emitted_events.iter().any(|known| known == event) {
                self.header.emitted_events.push(event.to_owned());
            }
            self.agenda.push_back(Work::Emitted { scope, event: index as u32 });
        }
        Ok(())
    }

    fn log(&mut self, id: ActId, log: &Log) -> Done {
        let meta = log.meta.clone().map(|meta| self.keep(meta));
        let step_key = self.name_of(id);
        let (msg, long) = self.message(&step_key, &log.msg);
        let queue = self.queue_of(id)?;
        self.record_attempt(id, queue, Entry::Log { step_key, level: log.level.clone(), msg, long, meta });
        Ok(())
    }

    /// A log message as stored: in its record, or as a value if the record would be too large.
    fn message(&mut self, step_key: &str, msg: &str) -> (String, Option<Data>) {
        if msg.len() > SHORT_LOG_BYTES {
            let tags = Data::from(json!(self.header.tags)).own_bytes(MAX_RECORD_BYTES);
            // The step's name occurs twice.
            let room = MAX_RECORD_BYTES.saturating_sub(AROUND_LOG_BYTES + tags + 2 * step_key.len());
            let data = Data::from(Value::from(msg));
            if data.own_bytes(MAX_RECORD_BYTES) > room {
                return (String::new(), Some(self.keep(data)));
            }
        }
        (msg.to_owned(), None)
    }

    /// Why a report with that fence is refused, or none if the fence is current.
    pub(super) fn refuse(&self, id: ActId, fence: Fence) -> Option<Answer> {
        if self.at(id).fence() == Some(fence) {
            return None;
        }
        let over = match self.header.phase {
            Phase::Ended | Phase::Undoing | Phase::Finally => true,
            Phase::New | Phase::Delayed | Phase::Going => self.is_closing(ActId(0)),
        };
        Some(if over { Answer::Closed } else { Answer::Stale })
    }

    fn was_applied(&self, id: ActId, fence: Fence, seq: u32) -> bool {
        let log = self.at(id).tasks.iter().find(|task| task.fence == fence);
        log.is_some_and(|task| seq <= task.seq && !task.gaps.contains(&seq))
    }

    fn note_seq(&mut self, id: ActId, fence: Fence, seq: u32) {
        let Some(task) = self.edit(id).tasks.iter_mut().find(|task| task.fence == fence) else { return };
        task.gaps.retain(|gap| *gap != seq);
        if seq > task.seq {
            let skipped = (task.seq + 1..seq).rev().take(REMEMBERED_GAPS);
            task.gaps.extend(skipped);
            let surplus = task.gaps.len().saturating_sub(REMEMBERED_GAPS);
            task.gaps.drain(..surplus);
            task.seq = seq;
        }
    }

    /// Remembers the build that runs the function: the first one if its flow pins runs, else the latest.
    pub(super) fn note_claim(&mut self, id: ActId, claim: &Claim) {
        let pins = self.pins_builds();
        if self.at(id).place == Place::Root
            && let Some(code) = &mut self.header.code
            && (code.build.is_none() || !pins)
            && claim.build.is_some()
            && code.build != claim.build
        {
            code.build = claim.build.clone();
        }
    }
}

pub(super) fn applied() -> Done<Answer> {
    Ok(Answer::Applied(ReportResult::default()))
}
