//! A step as shown by the timeline: its phase, attempts, gate, logs and progress.

use serde_json::Number;

use crate::failure::Failure;
use crate::ids::{Millis, RunId};
use crate::record::{GateId, GateReason, Reason, Skipped};
use eddyline_language::data::Data;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logs {
    pub count: u64,
    pub last_level: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepView {
    pub phase: StepPhase,
    /// Attempts that started or ended, by number. A deferred or released attempt is replaced by the next one of its
    /// number.
    pub attempts: Vec<AttemptView>,
    pub started_at: Option<Millis>,
    pub last_event_at: Option<Millis>,
    pub logs: Logs,
    pub progress: Option<Progress>,
    /// The run that it started.
    pub child: Option<RunId>,
}

/// The phase of an activation.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum StepPhase {
    #[default]
    Pending,
    Gate(Gate),
    BackOff,
    Child(RunId),
    /// A group, spread, repeat or round with open parts.
    Container,
    Queued,
    Claimed,
    /// Its task or gate is done; one of the next records says what follows.
    Between,
    Ended {
        at: Millis,
        outcome: StepOutcome,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub enum StepOutcome {
    Completed(Data),
    Failed(Failure),
    Skipped(Skipped),
    Cancelled,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Gate {
    pub id: GateId,
    pub reason: GateReason,
    pub until: Option<Millis>,
    pub channel: Option<String>,
    pub key: Option<String>,
    /// The number of the record that placed it; gates are ordered by it.
    pub placed: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AttemptView {
    pub number: u32,
    pub state: AttemptState,
    /// Absent if no worker claimed it, or if it ran inside the function of a code run.
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub worker: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum AttemptState {
    Running,
    /// The function of a code run suspended.
    Suspended,
    /// Deferred by the worker; uses no attempt.
    Deferred,
    Released,
    Completed,
    Failed(Failure),
    /// Its step ended without waiting for it.
    Cancelled,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    pub done: Option<Number>,
    pub total: Option<Number>,
    pub msg: Option<String>,
}

impl StepView {
    pub fn status(&self) -> &'static str {
        match &self.phase {
            StepPhase::Pending => "pending",
            StepPhase::Gate(_) | StepPhase::BackOff | StepPhase::Child(_) => "waiting",
            StepPhase::Container | StepPhase::Queued | StepPhase::Claimed | StepPhase::Between => "running",
            StepPhase::Ended { outcome: StepOutcome::Completed(_), .. } => "completed",
            StepPhase::Ended { outcome: StepOutcome::Failed(_), .. } => "failed",
            StepPhase::Ended { outcome: StepOutcome::Skipped(_), .. } => "skipped",
            StepPhase::Ended { outcome: StepOutcome::Cancelled, .. } => "cancelled",
        }
    }

    pub fn output(&self) -> Option<&Data> {
        match &self.phase {
            StepPhase::Ended { outcome: StepOutcome::Completed(output), .. } => Some(output),
            _ => None,
        }
    }

    pub fn error(&self) -> Option<&Failure> {
        match &self.phase {
            StepPhase::Ended { outcome: StepOutcome::Failed(error), .. } => Some(error),
            _ => None,
        }
    }

    /// Whether it has ended and will not be retried: a failed step of a code run may be.
    pub(crate) fn has_ended_for_good(&self) -> bool {
        matches!(&self.phase, StepPhase::Ended { outcome, .. } if !matches!(outcome, StepOutcome::Failed(_)))
    }

    pub fn ended_at(&self) -> Option<Millis> {
        match &self.phase {
            StepPhase::Ended { at, .. } => Some(*at),
            _ => None,
        }
    }

    /// The gate it waits for.
    pub fn gate(&self) -> Option<&Gate> {
        self.phase.gate()
    }

    /// The attempt that a record belongs to: the last one if it has this number and may continue, else a new one.
    pub(super) fn attempt(&mut self, number: Option<u32>) -> &mut AttemptView {
        let last = self.attempts.last();
        let open = last.filter(|last| last.may_continue() && number.is_none_or(|number| number == last.number));
        if open.is_none() {
            let number = number.unwrap_or_else(|| last.map_or(1, |last| last.number.saturating_add(1)));
            let state = AttemptState::Running;
            self.attempts.push(AttemptView { number, state, started_at: None, ended_at: None, worker: None });
        }
        let last = self.attempts.len() - 1;
        &mut self.attempts[last]
    }

    pub(super) fn give_back_attempt(&mut self, reason: Option<Reason>, ts: Millis) {
        if let Some(last) = self.attempts.last_mut().filter(|last| last.state == AttemptState::Running) {
            let deferred = reason == Some(Reason::Deferred);
            last.state = if deferred { AttemptState::Deferred } else { AttemptState::Released };
            last.ended_at = Some(ts);
        }
    }

    pub(super) fn cancel_attempt(&mut self, ts: Millis) {
        let open = |last: &&mut AttemptView| matches!(last.state, AttemptState::Running | AttemptState::Suspended);
        if let Some(last) = self.attempts.last_mut().filter(open) {
            last.state = AttemptState::Cancelled;
            last.ended_at = Some(ts);
        }
    }
}

impl StepPhase {
    pub fn gate(&self) -> Option<&Gate> {
        match self {
            StepPhase::Gate(gate) => Some(gate),
            _ => None,
        }
    }

    pub(super) fn has_task(&self) -> bool {
        matches!(self, StepPhase::Queued | StepPhase::Claimed)
    }

    pub(super) fn is_completed(&self) -> bool {
        matches!(self, StepPhase::Ended { outcome: StepOutcome::Completed(_), .. })
    }
}

impl AttemptView {
    pub fn status(&self) -> &'static str {
        match self.state {
            AttemptState::Running => "running",
            AttemptState::Suspended => "suspended",
            AttemptState::Deferred => "deferred",
            AttemptState::Released => "released",
            AttemptState::Completed => "completed",
            AttemptState::Failed(_) => "failed",
            AttemptState::Cancelled => "cancelled",
        }
    }

    pub fn error(&self) -> Option<&Failure> {
        match &self.state {
            AttemptState::Failed(error) => Some(error),
            _ => None,
        }
    }

    fn may_continue(&self) -> bool {
        use AttemptState::*;
        matches!(self.state, Running | Suspended | Deferred | Released)
    }
}

impl Logs {
    pub(super) fn add(&mut self, level: &str) {
        self.count += 1;
        self.last_level = Some(level.to_owned());
    }
}
