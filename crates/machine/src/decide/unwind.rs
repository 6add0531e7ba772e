//! The last phase of a code run that will not complete: its function undoes what it did, through any number of crashes.
//!
//! It begins with the report `unwind`, with a cancel or a deadline that grants a grace, or when the last attempt of the
//! function is lost. After a cancel, the worker that has the function's task learns of it with its next heartbeat; until
//! it reports `unwind` or loses the task, it may still report the steps that it is executing.

use super::report::applied;
use super::{Decider, Done, Work};
use crate::failure::{Failure, MAX_ALSO, kind};
use crate::ids::{ActId, Millis};
use crate::record::{ActName, Entry, Reason};
use crate::run::{Activations, Driver, End, Inside, Leaving, MemoKind, Phase, Place, What};
use crate::transition::{Answer, Due, ReportResult, TimerKind};
use eddyline_language::data::Data;

/// The grace of a run with steps to undo, if its definition does not set one.
pub const DEFAULT_CANCEL_GRACE_MS: Millis = 60_000;
/// While unwinding, this many tasks in a row may be lost without a change of the memo: a function that kills its workers
/// must not do so forever.
pub const MAX_LOST_UNWINDING: u32 = 20;
/// The prefix of undo steps.
pub const UNDO_PREFIX: &str = "undo:";

const ROOT: ActId = ActId(0);

impl Decider<'_> {
    pub(super) fn is_unwinding(&self) -> bool {
        self.leaving().is_some_and(|leaving| leaving.unwinding)
    }

    /// Whether it was cancelled, and the worker that has its function may not know yet.
    pub(super) fn was_told_to_leave(&self) -> bool {
        self.leaving().is_some_and(|leaving| !leaving.unwinding)
    }

    pub(super) fn leaving(&self) -> Option<&Leaving> {
        self.header.code.as_ref()?.leaving.as_ref()
    }

    /// How long the function may undo after a cancel; none if the run ends at once.
    pub(super) fn cancel_grace(&self) -> Option<Millis> {
        let (definition, header) = (self.code()?, self.header.code.as_ref()?);
        let default = (header.undoable > 0).then_some(DEFAULT_CANCEL_GRACE_MS);
        let begun =
            matches!(self.driver(), Some(Driver::Queued(_) | Driver::BackOff { .. } | Driver::Suspended { .. }));
        let is_going = self.header.phase == Phase::Going && begun;
        definition.cancel_grace_ms.or(default).filter(|grace| *grace > 0 && is_going)
    }

    /// The function, while it may still run.
    fn driver(&self) -> Option<&Driver> {
        match self.at(ROOT).inside() {
            Some(Inside { closing: None, what: What::Code(driver), .. }) => Some(driver),
            _ => None,
        }
    }

    /// Cancels the run, but lets its function undo first.
    pub(super) fn cancel_with_grace(&mut self, by: &str, reason: Option<&str>, grace: Millis) -> Done<Answer> {
        let reason = reason.map(str::to_owned);
        let (act, by, step_key, from) = (ActName::Cancel, by.to_owned(), None, None);
        self.record(Entry::Act { act, by, step_key, from, reason: reason.clone() });
        self.header.cancel_reason = reason;
        self.header.cancelling = true;
        if std::mem::take(&mut self.header.paused) {
            // Else no worker would get the task, and nothing would be undone.
            self.record(Entry::FlowResumed {});
        }
        self.leave(None, Some(grace))?;
        applied()
    }

    /// The run will end with this error, or cancelled, once its function has undone what it did.
    pub(super) fn leave(&mut self, error: Option<Failure>, grace: Option<Millis>) -> Done {
        let (n, _) = self.next_n();
        let until = grace.map(|grace| self.env.now.saturating_add(grace));
        if let Some(code) = &mut self.header.code {
            code.leaving = Some(Leaving { error, n, unwinding: false, until, lost: 0 });
        }
        match grace {
            // It takes the place of the deadline.
            Some(grace) => {
                self.header.deadline = true;
                self.set_timer(ROOT, TimerKind::Deadline, Due::After(grace));
            }
            None if std::mem::take(&mut self.header.deadline) => self.clear_timer(ROOT, TimerKind::Deadline),
            None => {}
        }
        match self.driver() {
            Some(Driver::Queued(_)) => Ok(()),
            Some(Driver::BackOff { after, .. }) => {
                let after = *after;
                self.clear_timer(ROOT, TimerKind::BackOff(after));
                self.unwind_in_a_new_task()
            }
            Some(Driver::Suspended { .. } | Driver::Done) => self.unwind_in_a_new_task(),
            None => Ok(()),
        }
    }

    fn unwind_in_a_new_task(&mut self) -> Done {
        self.begin_unwinding();
        self.enqueue(ROOT, Some(Reason::Resumed))
    }

    /// From here, only undo steps and one ending are accepted. Pending entries end cancelled.
    pub(super) fn begin_unwinding(&mut self) {
        let begins = match self.header.code.as_mut().and_then(|code| code.leaving.as_mut()) {
            Some(leaving) => !std::mem::replace(&mut leaving.unwinding, true),
            None => false,
        };
        if begins {
            self.next_n();
            self.agenda.push_back(Work::Unwind { from: 1 });
        }
    }

    /// The same when the worker gives the function's task back.
    pub(super) fn begin_unwinding_at(&mut self, id: ActId) {
        if id == ROOT {
            self.begin_unwinding();
        }
    }

    /// Ends the pending entries, whose results are no longer needed.
    pub(super) fn cancel_entries(&mut self, from: u32) -> Done {
        if self.driver().is_none() {
            // The run ends, which cancels them too.
            return Ok(());
        }
        for id in (from..self.next_activation).map(ActId) {
            let is_undo = matches!(&self.at(id).place, Place::Memo(memo) if is_undo(&memo.name));
            if is_undo || !self.at(id).is_open() {
                continue;
            }
            if !self.room(2) {
                self.agenda.push_back(Work::Unwind { from: id.0 });
                return Ok(());
            }
            self.end_quietly(id)?;
        }
        Ok(())
    }

    /// The report `unwind`.
    pub(super) fn unwind(&mut self, error: &Failure) -> Done<Answer> {
        match self.leaving() {
            None => {
                self.leave(Some(error.clone().bounded()), None)?;
                self.begin_unwinding();
                applied()
            }
            Some(_) => {
                self.begin_unwinding();
                Ok(Answer::Duplicate(ReportResult::default()))
            }
        }
    }

    /// Why an entry of this name is not accepted in this phase of the run.
    pub(super) fn refused_by_phase(&mut self, name: &str, kind: MemoKind) -> Done<Option<String>> {
        let Some(of) = name.strip_prefix(UNDO_PREFIX) else {
            return Ok(self.is_unwinding().then(|| {
                format!("the run unwinds: `{name}` is not an undo step; undo steps are named `{UNDO_PREFIX}…`")
            }));
        };
        if self.leaving().is_none() {
            return Ok(Some(format!("`{name}`: names that start with `{UNDO_PREFIX}` are for runs that unwind")));
        }
        if kind != MemoKind::Step {
            return Ok(Some(format!("`{name}` is a {}; only steps can undo", kind.as_str())));
        }
        if !matches!(self.known(of), Some((id, _)) if matches!(self.at(id).end(), Some(End::Completed(_)))) {
            return Ok(Some(format!("`{name}`: no completed step `{of}` is recorded")));
        }
        self.begin_unwinding();
        Ok(None)
    }

    /// A worker that was to leave gave the task back instead: the next one begins with undoing.
    pub(super) fn give_up_task(&mut self) -> Done<Answer> {
        let entry = Entry::AttemptCompleted { step_key: self.name_of(ROOT), result: Data::null(), suspended: true };
        self.drop_task(ROOT, entry)?;
        self.unwind_in_a_new_task()?;
        applied()
    }

    /// The function failed while the run was leaving: at the end of the last phase this ends the run.
    pub(super) fn failed_leaving(&mut self, error: Failure) -> Done {
        let has_finished = self.is_unwinding();
        self.drop_task(ROOT, Entry::AttemptFailed { step_key: self.name_of(ROOT), error })?;
        if has_finished { self.end_leaving() } else { self.unwind_in_a_new_task() }
    }

    /// A task of the function was lost while the run was leaving. This costs no attempt.
    pub(super) fn lost_leaving(&mut self, error: Failure, progressed: bool) -> Done {
        let Some(leaving) = self.header.code.as_mut().and_then(|code| code.leaving.as_mut()) else { return Ok(()) };
        leaving.lost = if progressed || !leaving.unwinding { 0 } else { leaving.lost + 1 };
        let is_hopeless = leaving.lost >= MAX_LOST_UNWINDING;
        self.drop_task(ROOT, Entry::AttemptFailed { step_key: self.name_of(ROOT), error })?;
        if is_hopeless { self.end_leaving() } else { self.unwind_in_a_new_task() }
    }

    /// An attempt was lost. If it was the function's last one, and it did something that can be undone, the function gets
    /// tasks to undo it.
    pub(super) fn attempt_lost(&mut self, id: ActId, failure: Failure) -> Done {
        let can_undo = id == ROOT && self.header.code.as_ref().is_some_and(|code| code.undoable > 0);
        if !can_undo || self.driver().is_none() || !self.is_last_attempt(id, &failure)? {
            return self.attempt_failed(id, failure, true, None);
        }
        self.drop_task(ROOT, Entry::AttemptFailed { step_key: self.name_of(ROOT), error: failure.clone() })?;
        self.leave(Some(failure), None)
    }

    /// Ends a leaving run, whether or not everything was undone.
    pub(super) fn end_leaving(&mut self) -> Done {
        let end = match self.leaving().and_then(|leaving| leaving.error.clone()) {
            Some(error) => End::Failed(error),
            None => End::Cancelled,
        };
        self.close_early(ROOT, end)
    }

    /// Notes that a step can be undone by its function.
    pub(super) fn can_be_undone(&mut self, id: ActId) {
        if let Place::Memo(memo) = &mut self.edit(id).place {
            memo.undo = true;
        }
        if let Some(code) = &mut self.header.code {
            code.undoable += 1;
        }
    }

    /// If this is an undo step that completes, notes that its step is undone.
    pub(super) fn note_undone(&mut self, undo: ActId) {
        let Place::Memo(memo) = &self.at(undo).place else { return };
        let Some((of, step)) = memo.name.strip_prefix(UNDO_PREFIX).and_then(|of| self.known(of)) else { return };
        let counted = step.undo && !self.at(of).undone;
        self.edit(of).undone = true;
        if let Some(code) = self.header.code.as_mut().filter(|_| counted) {
            code.undoable = code.undoable.saturating_sub(1);
        }
    }

    /// What a code run did and could not undo: undo steps that failed, and steps whose undo was not reached. The latest
    /// first.
    pub(super) fn not_undone(&self) -> Vec<Failure> {
        let mut failures = Vec::new();
        if self.header.code.as_ref().is_none_or(|code| code.undoable == 0 && code.leaving.is_none()) {
            return failures;
        }
        for id in (1..self.next_activation).rev().map(ActId) {
            if failures.len() == MAX_ALSO {
                break;
            }
            let Place::Memo(memo) = &self.at(id).place else { continue };
            match self.at(id).end() {
                Some(End::Failed(failure)) if is_undo(&memo.name) => {
                    failures.push(failure.clone().within(&self.name_of(id)));
                }
                Some(End::Completed(_)) if memo.undo && !self.at(id).undone => {
                    let undo = self.known(&format!("{UNDO_PREFIX}{}", memo.name)).map(|(undo, _)| self.at(undo).end());
                    if !matches!(undo, Some(Some(End::Failed(_)))) {
                        let message = format!("`{}` was not undone before the run ended", memo.name);
                        failures.push(Failure::new(kind::NOT_UNDONE, message).within(&self.name_of(id)));
                    }
                }
                _ => {}
            }
        }
        failures
    }
}

/// Whether a memo entry of this name undoes another.
pub(super) fn is_undo(name: &str) -> bool {
    name.starts_with(UNDO_PREFIX)
}
