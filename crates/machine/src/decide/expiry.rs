//! Time is up: a lease, an attempt's timeout, a back-off, a delay, a deadline.

use super::report::applied;
use super::{Decider, Done};
use crate::failure::{Failure, kind};
use crate::ids::ActId;
use crate::record::{Entry, Reason};
use crate::run::{Activations, Driver, End, Inside, Phase, Place, State, What};
use crate::transition::{Answer, Claim, Expiry, TaskRef, TimerKey, TimerKind};

impl Decider<'_> {
    /// A task's time is up by the store's clock.
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
            Expiry::LeaseLost if self.has_progressed(id, claim) => {
                let error = lost();
                self.drop_task(id, Entry::AttemptFailed { step_key: self.name_of(id), error })?;
                self.enqueue(id, Some(Reason::Resumed))?;
            }
            Expiry::LeaseLost => self.attempt_failed(id, lost(), true, None)?,
            Expiry::Timeout => {
                let failure = Failure::new(kind::TIMEOUT, "the attempt took longer than its `timeout`");
                self.attempt_failed(id, failure, true, None)?;
            }
            Expiry::StartTimeout if matches!(self.at(id).state, State::Draining(_)) => self.end(id, End::Cancelled)?,
            Expiry::StartTimeout => {
                let failure = Failure::new(kind::START_TIMEOUT, "no worker took it within its `start_timeout`");
                self.fail(id, failure)?;
            }
            Expiry::Released if matches!(self.at(id).state, State::Draining(_)) => self.end(id, End::Cancelled)?,
            Expiry::Released => {
                self.remove_task(fence);
                self.back_off(id, 0, Reason::Released)?;
            }
        }
        applied()
    }

    /// A timer is due. One that nobody waits for any more is without effect.
    pub(super) fn due(&mut self, timer: TimerKey) -> Done<Answer> {
        let id = timer.activation;
        if !self.exists(id) {
            return Ok(Answer::Nothing);
        }
        match timer.kind {
            TimerKind::Delay if self.header.phase == Phase::Delayed => {
                self.set_going(id);
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
                let end = End::Failed(Failure::new(kind::TIMEOUT, "`finally` took longer than its `timeout`"));
                match self.at(id).inside() {
                    Some(_) => self.close_early(id, end)?,
                    None => self.end(id, end)?,
                }
                applied()
            }
            TimerKind::Delay | TimerKind::Finally => Ok(Answer::Nothing),
        }
    }

    fn deadline(&mut self) -> Done<Answer> {
        let failure = Failure::new(kind::DEADLINE, "the run did not end before its deadline");
        if self.fail_run(failure)? { applied() } else { Ok(Answer::Nothing) }
    }

    /// Fails the run as a whole: what is open in it ends cancelled. False, if it is ending already.
    pub(super) fn fail_run(&mut self, failure: Failure) -> Done<bool> {
        let root = ActId(0);
        match (&self.at(root).state, self.header.phase) {
            (State::Open(Inside { closing: None, .. }), Phase::Going) => {
                self.close_early(root, End::Failed(failure))?
            }
            (State::Ready, Phase::Delayed | Phase::Going) => self.end(root, End::Failed(failure))?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A function that remembered something new since it was offered has not used up its attempt.
    fn has_progressed(&self, id: ActId, claim: &Claim) -> bool {
        let code = self.header.code.as_ref().filter(|_| self.at(id).place == Place::Root);
        code.is_some_and(|code| code.n > code.offered_at.max(claim.memo))
    }
}

fn lost() -> Failure {
    Failure::new(kind::LEASE_LOST, "the worker fell silent until its lease ended")
}
