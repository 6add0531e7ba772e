//! The way out: undo, then `finally`, then the terminal record, which is the last.

use std::sync::Arc;

use super::child::child_id;
use super::{Decider, Done, Work};
use crate::failure::{Failure, MAX_ALSO};
use crate::ids::ActId;
use crate::record::{Entry, Scheduled};
use crate::run::{Activations, End, Outcome, Phase, Place, undo_order};
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
            Some(End::Completed(output)) => Outcome::Completed(output.clone()),
            Some(End::Failed(failure)) => Outcome::Failed(failure.clone()),
            Some(End::Skipped(_) | End::Cancelled) | None => Outcome::Cancelled(Vec::new()),
        });
        let undoes = self.graph.is_some_and(|graph| graph.has_undo)
            && !matches!(self.header.outcome, Some(Outcome::Completed(_)));
        if undoes {
            self.header.phase = Phase::Undoing;
            self.undo_next()
        } else {
            self.begin_finally()
        }
    }

    /// Undoes the last that completed and was not undone.
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
            // It ended before it began: there is nothing to clean up after.
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
                Some(outcome @ Outcome::Completed(_)) => *outcome = Outcome::Failed(failure),
                _ => self.add_to_outcome(failure),
            }
        }
        self.end_run()
    }

    fn add_to_outcome(&mut self, failure: Failure) {
        match &mut self.header.outcome {
            Some(Outcome::Failed(first)) => first.add(failure),
            Some(Outcome::Cancelled(also)) => {
                also.push(failure);
                also.truncate(MAX_ALSO);
            }
            Some(Outcome::Completed(_)) | None => {}
        }
    }

    /// The terminal record, and word to the parent.
    fn end_run(&mut self) -> Done {
        self.header.phase = Phase::Ended;
        let outcome = self.header.outcome.clone().unwrap_or(Outcome::Cancelled(Vec::new()));
        if let Some(parent) = self.header.parent.filter(|_| self.header.continued_as.is_none()) {
            let end = match &outcome {
                Outcome::Completed(output) => ChildEnd::Completed(output.clone()),
                Outcome::Failed(failure) => ChildEnd::Failed(failure.clone()),
                Outcome::Cancelled(_) => ChildEnd::Cancelled,
            };
            // A run that was continued is still the child that its parent started.
            let child = child_id(parent.run, parent.activation);
            let input = Input::ChildEnded { activation: parent.activation, child, end };
            let id = format!("ended:{}", self.header.run);
            self.send(parent.run, id, MessageBody::Input(Box::new(input)));
        }
        self.record(match outcome {
            Outcome::Completed(output) => Entry::FlowCompleted {
                output,
                step_count: Some(self.header.step_count),
                continued_as: self.header.continued_as,
            },
            Outcome::Failed(error) => Entry::FlowFailed { error },
            Outcome::Cancelled(also) => Entry::FlowCancelled { reason: self.header.cancel_reason.clone(), also },
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

    /// The undo of an activation, if it has got to that.
    pub(super) fn undo_of(&self, of: ActId) -> Option<ActId> {
        (0..self.next_activation).map(ActId).rev().find(|id| self.at(*id).place == Place::Undo { of })
    }

    pub(super) fn finally_activation(&self) -> Option<ActId> {
        (0..self.next_activation).map(ActId).rev().find(|id| self.at(*id).place == Place::Finally)
    }
}
