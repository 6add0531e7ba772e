//! Expired leases, timeouts, back-offs, delays and deadlines.

use super::report::applied;
use super::{Decider, Done, Halt};
use crate::failure::{Failure, kind};
use crate::ids::{ActId, Millis};
use crate::record::{Entry, Reason};
use crate::run::{Activations, Driver, End, GateState, Inside, Phase, Place, State, What};
use crate::transition::{Answer, Claim, Due, Expiry, TaskRef, TimerKey, TimerKind};

/// After this many failed deliveries of a task in a row, its attempt fails.
pub const MAX_UNDELIVERED: u32 = 10;
/// The delay after the second release in a row; it doubles with each. The first release has no delay: a worker may just
/// have disconnected.
pub const RELEASE_DELAY_MS: Millis = 200;
/// The longest of these delays.
pub const MAX_RELEASE_DELAY_MS: Millis = 60_000;

impl Decider<'_> {
    /// A task expired, by the store's clock.
    pub(super) fn expired(&mut self, task: TaskRef, why: Expiry, claim: &Claim) -> Done<Answer> {
        let TaskRef { activation: id, fence } = task;
        if !self.exists(id) {
            return Ok(Answer::Nothing);
        }
        if let Some(refusal) = self.refuse(id, fence) {
            return Ok(refusal);
        }
        self.note_claim(id, claim);
        match why {
            Expiry::LeaseLost | Expiry::Timeout if self.at(id).place == Place::Root && self.leaving().is_some() => {
                let error = if why == Expiry::LeaseLost { lost() } else { timed_out() };
                let progressed = self.has_progressed(id, claim);
                self.lost_leaving(error, progressed)?;
            }
            Expiry::LeaseLost if self.has_progressed(id, claim) => {
                let error = lost();
                self.drop_task(id, Entry::AttemptFailed { step_key: self.name_of(id), error })?;
                self.enqueue(id, Some(Reason::Resumed))?;
            }
            Expiry::LeaseLost => self.attempt_lost(id, lost())?,
            Expiry::Timeout => self.attempt_lost(id, timed_out())?,
            Expiry::StartTimeout if matches!(self.at(id).state, State::Draining(_)) => self.end(id, End::Cancelled)?,
            Expiry::StartTimeout => {
                let failure = Failure::new(kind::START_TIMEOUT, "no worker claimed it within its `start_timeout`");
                self.fail(id, failure)?;
            }
            Expiry::Released => self.release(id, None)?,
        }
        applied()
    }

    /// A claimed task could not be delivered to its worker.
    pub(super) fn undelivered(&mut self, task: TaskRef, claim: &Claim, why: &str) -> Done<Answer> {
        let TaskRef { activation: id, fence } = task;
        if !self.exists(id) {
            return Ok(Answer::Nothing);
        }
        if let Some(refusal) = self.refuse(id, fence) {
            return Ok(refusal);
        }
        self.note_claim(id, claim);
        self.release(id, Some(why))?;
        applied()
    }

    /// Enqueues a task again that did not reach its worker, without using an attempt: at once the first time, then
    /// after a growing delay. With a persistent reason (`why`), the attempt fails after [`MAX_UNDELIVERED`] times.
    fn release(&mut self, id: ActId, why: Option<&str>) -> Done {
        if matches!(self.at(id).state, State::Draining(_)) {
            return self.end(id, End::Cancelled);
        }
        let Some(fence) = self.at(id).fence() else {
            return Err(Halt::Bug(format!("{} has no task", self.name_of(id))));
        };
        let last = self.at(id).tasks.last();
        // A worker that reported on a task has received it.
        let before = last.filter(|log| log.seq == 0).map_or(0, |log| log.undelivered);
        let times = before.saturating_add(1);
        if let Some(why) = why.filter(|_| times >= MAX_UNDELIVERED) {
            let message = format!("the task could not be delivered to a worker {times} times in a row: {why}");
            return self.attempt_failed(id, Failure::new(kind::UNDELIVERABLE, message), false, None);
        }
        self.begin_unwinding_at(id);
        self.remove_task(fence);
        if let Some(log) = self.edit(id).tasks.last_mut() {
            log.undelivered = times;
        }
        self.back_off(id, release_delay(times), Reason::Released)
    }

    /// A worker gives a task back that it did receive: it stops, or is replaced.
    pub(super) fn give_back(&mut self, id: ActId) -> Done {
        if matches!(self.at(id).state, State::Draining(_)) {
            return self.end(id, End::Cancelled);
        }
        let Some(fence) = self.at(id).fence() else {
            return Err(Halt::Bug(format!("{} has no task", self.name_of(id))));
        };
        self.begin_unwinding_at(id);
        self.remove_task(fence);
        if let Some(log) = self.edit(id).tasks.last_mut() {
            log.undelivered = 0;
        }
        self.back_off(id, 0, Reason::Released)
    }

    /// A timer fired. One that nothing waits for any more has no effect.
    pub(super) fn due(&mut self, timer: TimerKey) -> Done<Answer> {
        let id = timer.activation;
        if !self.exists(id) {
            return Ok(Answer::Nothing);
        }
        match timer.kind {
            TimerKind::Delay if self.header.phase == Phase::Delayed && self.header.taking_over => {
                let message = "not all values taken over from the earlier run arrived; try again";
                self.fail_run(Failure::new(kind::INTERRUPTED, message))?;
                applied()
            }
            TimerKind::Delay if self.header.phase == Phase::Delayed => {
                self.delay_over();
                applied()
            }
            TimerKind::Deadline => self.deadline(),
            TimerKind::Gate => self.gate_due(id),
            TimerKind::BackOff(fence) => match &self.at(id).state {
                State::BackOff { after, reason }
                | State::Open(Inside { closing: None, what: What::Code(Driver::BackOff { after, reason }), .. })
                    if *after == fence =>
                {
                    let reason = *reason;
                    self.enqueue(id, Some(reason))?;
                    applied()
                }
                State::Retrying { due: false, .. } if self.last_fence(id) == fence => self.retry_due(id),
                _ => Ok(Answer::Nothing),
            },
            TimerKind::Finally if self.at(id).is_open() => {
                self.fail_finally(id, Failure::new(kind::TIMEOUT, "`finally` took longer than its `timeout`"))?;
                applied()
            }
            TimerKind::Delay | TimerKind::Finally => Ok(Answer::Nothing),
        }
    }

    /// Sets a lost timer again, if the run still waits for it.
    pub(super) fn rearm(&mut self, timer: TimerKey, due: Due) -> Done<Answer> {
        let id = timer.activation;
        if !self.exists(id) {
            return Ok(Answer::Nothing);
        }
        let waits = match (timer.kind, &self.at(id).state) {
            (TimerKind::Gate, State::Gated) => matches!(self.at(id).gate, GateState::Waiting { timed: true, .. }),
            (
                TimerKind::BackOff(fence),
                State::BackOff { after, .. }
                | State::Open(Inside { closing: None, what: What::Code(Driver::BackOff { after, .. }), .. }),
            ) => *after == fence,
            (TimerKind::BackOff(fence), State::Retrying { due: false, .. }) => self.last_fence(id) == fence,
            _ => false,
        };
        if !waits {
            return Ok(Answer::Nothing);
        }
        self.set_timer(id, timer.kind, due);
        applied()
    }

    fn deadline(&mut self) -> Done<Answer> {
        let failure = Failure::new(kind::DEADLINE, "the run did not end before its deadline");
        if self.fail_run(failure)? { applied() } else { Ok(Answer::Nothing) }
    }

    /// Fails the run: its open activations end cancelled. False if it is already ending.
    pub(super) fn fail_run(&mut self, failure: Failure) -> Done<bool> {
        let root = ActId(0);
        match (&self.at(root).state, self.header.phase) {
            (State::Open(Inside { closing: None, .. }), Phase::Going) => match self.cancel_grace() {
                _ if self.leaving().is_some() => self.end_leaving()?,
                Some(grace) => self.leave(Some(failure), Some(grace))?,
                None => self.close_early(root, End::Failed(failure))?,
            },
            (State::Ready, Phase::Delayed | Phase::Going) => self.end(root, End::Failed(failure))?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Fails `finally`, unless it is already ending.
    pub(super) fn fail_finally(&mut self, id: ActId, failure: Failure) -> Done {
        match self.at(id).inside() {
            Some(_) => self.close_early(id, End::Failed(failure)),
            None if self.at(id).is_open() => self.end(id, End::Failed(failure)),
            None => Ok(()),
        }
    }

    /// Whether the function recorded something since it was enqueued; then the lost lease does not use its attempt.
    fn has_progressed(&self, id: ActId, claim: &Claim) -> bool {
        let code = self.header.code.as_ref().filter(|_| self.at(id).place == Place::Root);
        code.is_some_and(|code| code.n > code.offered_at.max(claim.memo))
    }
}

/// The delay before a task is enqueued again after that many failed deliveries in a row.
fn release_delay(times: u32) -> Millis {
    match times {
        0 | 1 => 0,
        _ => RELEASE_DELAY_MS.saturating_mul(1 << (times - 2).min(20)).min(MAX_RELEASE_DELAY_MS),
    }
}

fn timed_out() -> Failure {
    Failure::new(kind::TIMEOUT, "the attempt took longer than its `timeout`")
}

fn lost() -> Failure {
    Failure::new(kind::LEASE_LOST, "the worker sent no heartbeat before its lease expired")
}
