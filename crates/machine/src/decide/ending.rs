//! The end of a run: undo, then `finally`, then the terminal record, which is the last.

use std::sync::Arc;

use super::child::child_id;
use super::{Decider, Done, Work};
use crate::failure::{Failure, MAX_ALSO};
use crate::ids::ActId;
use crate::record::{Entry, Scheduled};
use crate::run::{Activations, End, Phase, Place, RunOutcome, undo_order};
use crate::transition::{ChildEnd, Due, Input, MessageBody, TimerKind};
use eddyline_language::data::Data;

impl Decider<'_> {
    /// The root has ended: the outcome is known.
    pub(super) fn begin_ending(&mut self) -> Done {
        let root = ActId(0);
        if std::mem::take(&mut self.header.deadline) {
            self.clear_timer(root, TimerKind::Deadline);
        }
        if self.header.phase == Phase::Delayed {
            self.clear_timer(root, TimerKind::Delay);
        }
        self.header.outcome = Some(match self.at(root).end() {
            Some(End::Completed(output)) => RunOutcome::Completed(output.clone()),
            Some(End::Failed(failure)) => RunOutcome::Failed(failure.clone()),
            Some(End::Skipped(_) | End::Cancelled) | None => RunOutcome::Cancelled(Vec::new()),
        });
        for failure in self.not_undone() {
            self.add_to_outcome(failure);
        }
        let undoes = self.graph.is_some_and(|graph| graph.has_undo)
            && !matches!(self.header.outcome, Some(RunOutcome::Completed(_)));
        if undoes {
            self.header.phase = Phase::Undoing;
            self.undo_next()
        } else {
            self.begin_finally()
        }
    }

    /// Undoes the step that completed last among those not undone.
    fn undo_next(&mut self) -> Done {
        let Some(of) = self.last_undoable() else { return self.begin_finally() };
        self.header.undo_below = self.at(of).ended;
        let (input, output) = match (&self.at(of).input, self.at(of).end()) {
            (input, Some(End::Completed(output))) => (input.clone().unwrap_or_else(Data::null), output.clone()),
            _ => (Data::null(), Data::null()),
        };
        let input = Data::Map(Arc::new(vec![(Arc::from("input"), input), (Arc::from("output"), output)]));
        let undo = self.create(Place::Undo { of });
        let input = self.keep(input);
        let activation = self.edit(undo);
        activation.input = Some(input);
        activation.attempt = 1;
        self.enqueue(undo, None)
    }

    pub(super) fn undo_ended(&mut self, undo: ActId, of: ActId) -> Done {
        match self.at(undo).end() {
            Some(End::Completed(_)) => self.edit(of).undone = true,
            Some(End::Failed(failure)) => {
                let failure = failure.clone().within(&self.name_of(undo));
                self.add_to_outcome(failure);
            }
            _ => {}
        }
        self.undo_next()
    }

    fn begin_finally(&mut self) -> Done {
        let Some(finally) = self.graph.and_then(|graph| graph.finally.as_ref()) else { return self.end_run() };
        if self.at(ActId(0)).body.is_none() {
            // It ended before it began, so there is nothing to clean up.
            return self.end_run();
        }
        self.header.phase = Phase::Finally;
        let id = self.create(Place::Finally);
        self.scheduled(id, Scheduled::Group {});
        if let Some(timeout) = finally.timeout_ms {
            self.set_timer(id, TimerKind::Finally, Due::After(timeout));
        }
        self.agenda.push_back(Work::Open { of: id, scope: finally.scope });
        Ok(())
    }

    pub(super) fn finally_ended(&mut self, id: ActId) -> Done {
        if self.graph()?.finally.as_ref().is_some_and(|finally| finally.timeout_ms.is_some()) {
            self.clear_timer(id, TimerKind::Finally);
        }
        if let Some(End::Failed(failure)) = self.at(id).end() {
            let failure = failure.clone().within("finally");
            match &mut self.header.outcome {
                Some(outcome @ RunOutcome::Completed(_)) => *outcome = RunOutcome::Failed(failure),
                _ => self.add_to_outcome(failure),
            }
        }
        self.end_run()
    }

    fn add_to_outcome(&mut self, failure: Failure) {
        match &mut self.header.outcome {
            Some(RunOutcome::Failed(first)) => first.add(failure),
            Some(RunOutcome::Cancelled(also)) => {
                also.push(failure);
                also.truncate(MAX_ALSO);
            }
            Some(RunOutcome::Completed(_)) | None => {}
        }
    }

    /// Writes the terminal record and notifies the parent.
    fn end_run(&mut self) -> Done {
        self.header.phase = Phase::Ended;
        let outcome = self.header.outcome.clone().unwrap_or(RunOutcome::Cancelled(Vec::new()));
        if let Some(parent) = self.header.parent.filter(|_| self.header.continued_as.is_none()) {
            let end = match &outcome {
                RunOutcome::Completed(output) => ChildEnd::Completed(output.clone()),
                RunOutcome::Failed(failure) => ChildEnd::Failed(failure.clone()),
                RunOutcome::Cancelled(_) => ChildEnd::Cancelled,
            };
            // A continued run is still the child that its parent started.
            let child = child_id(parent.run, parent.activation);
            let input = Input::ChildEnded { activation: parent.activation, child, end };
            let id = format!("ended:{}", self.header.run);
            self.send(parent.run, id, MessageBody::Input(Box::new(input)));
        }
        self.record(match outcome {
            RunOutcome::Completed(output) => Entry::FlowCompleted {
                output,
                step_count: Some(self.header.step_count),
                continued_as: self.header.continued_as,
            },
            RunOutcome::Failed(error) => Entry::FlowFailed { error },
            RunOutcome::Cancelled(also) => Entry::FlowCancelled { reason: self.header.cancel_reason.clone(), also },
        });
        Ok(())
    }

    fn last_undoable(&self) -> Option<ActId> {
        let graph = self.graph?;
        let below = self.header.undo_below.unwrap_or(u32::MAX);
        let fresh = self.changed.keys().filter_map(|id| undo_order(self, graph, *id).map(|order| (order, *id)));
        let stored = self.run.index.undoable.range(..below).next_back().map(|(order, id)| (*order, *id));
        fresh.filter(|(order, _)| *order < below).chain(stored).max().map(|(_, id)| id)
    }

    /// The undo of an activation, if it exists yet.
    pub(super) fn undo_of(&self, of: ActId) -> Option<ActId> {
        (0..self.next_activation).map(ActId).rev().find(|id| self.at(*id).place == Place::Undo { of })
    }

    pub(super) fn finally_activation(&self) -> Option<ActId> {
        (0..self.next_activation).map(ActId).rev().find(|id| self.at(*id).place == Place::Finally)
    }
}
