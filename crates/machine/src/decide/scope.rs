//! A scope: its steps become activations, and it ends when all of them have ended.

use super::{Decider, Done, Work};
use crate::failure::Failure;
use crate::ids::{ActId, ScopeId, StepId};
use crate::run::{Activations, Driver, End, GateState, Inside, Phase, Place, ScopeBody, State, Token, What};
use crate::transition::{GateChange, TaskChange};
use eddyline_language::data::Data;
use eddyline_language::expr::Cost;
use eddyline_language::flow::{Source, Waits, When};

impl Decider<'_> {
    pub(super) fn open_scope(&mut self, of: ActId, scope: ScopeId) -> Done {
        if !self.at(of).is_open() {
            return Ok(());
        }
        let graph = self.graph()?;
        let first = ActId(self.next_activation);
        for step_id in &graph.scope(scope).steps {
            let step = graph.step(*step_id);
            let id = self.create(Place::Step { step: *step_id, scope: of });
            if matches!(&step.gate, Some(gate) if matches!(gate.waits, Waits::Webhook | Waits::Manual)) {
                let token = self.chance.token();
                self.gates.push(GateChange::Add { id: self.gate_id(id), token: token.clone() });
                let activation = self.edit(id);
                activation.gate_token = Some(token);
                activation.gate = GateState::Ahead { early: None };
            }
            let activation = self.edit(id);
            activation.arms = vec![Token::Open; step.arms.len()];
            if step.arms.is_empty() {
                activation.state = State::Certain { ready: true };
                self.agenda.push_back(Work::Decide(id));
            }
        }
        let open = graph.scope(scope).steps.len() as u32;
        let owner = self.edit(of);
        owner.body = Some(ScopeBody { scope, first });
        owner.state = State::Open(Inside { open, closing: None, what: What::Scope });
        if open == 0 {
            self.agenda.push_back(Work::Close(of));
        }
        Ok(())
    }

    /// Ends a container if none of its parts is open.
    pub(super) fn close(&mut self, id: ActId) -> Done {
        let Some(inside) = self.at(id).inside() else { return Ok(()) };
        if inside.open > 0 {
            return self.fail_fast(id);
        }
        if let Some(end) = inside.closing.clone() {
            return match &inside.what {
                // The sweep in progress cancels its function first, and then calls this again.
                What::Code(driver) if *driver != Driver::Done => Ok(()),
                _ => self.end(id, end),
            };
        }
        match &inside.what {
            What::Scope => {
                let end = match self.unhandled(id)? {
                    Some(failure) => End::Failed(failure),
                    None => self.scope_output(id)?,
                };
                self.end(id, end)
            }
            What::Spread { next, items, .. } if next == items => self.end_spread(id),
            What::Spread { .. } => {
                self.agenda.push_back(Work::Fill(id));
                Ok(())
            }
            // The end of a round, or the function, decides what comes next.
            What::Repeat { .. } | What::Code(_) => Ok(()),
        }
    }

    /// Ends a container with `end` once its open parts are cancelled. The first call wins.
    pub(super) fn close_early(&mut self, id: ActId, end: End) -> Done {
        let inside = self.inside_mut(id)?;
        if inside.closing.is_none() {
            inside.closing = Some(end);
            self.agenda.push_back(Work::Sweep { of: id, from: 0 });
        }
        Ok(())
    }

    /// Cancels the open parts of a container.
    pub(super) fn sweep(&mut self, of: ActId, from: u32) -> Done {
        let Some(inside) = self.at(of).inside() else { return Ok(()) };
        let parts = match &inside.what {
            What::Scope => self.steps_in(of)?.len() as u32,
            What::Spread { next, .. } => *next,
            What::Repeat { round, .. } => *round + 1,
            What::Code(_) => self.next_activation,
        };
        let what = inside.what.clone();
        if matches!(what, What::Code(_)) && from == 0 {
            self.dismiss_driver(of)?;
        }
        for index in from..parts {
            let part = match what {
                What::Scope => self.at(of).body.map(|body| ActId(body.first.0 + index)),
                What::Spread { .. } | What::Repeat { .. } => self.part(of, index),
                What::Code(_) => Some(ActId(index)).filter(|id| *id != of),
            };
            let Some(part) = part.filter(|part| self.at(*part).is_open()) else { continue };
            if !self.room(2) {
                self.agenda.push_back(Work::Sweep { of, from: index });
                return Ok(());
            }
            self.cancel(part)?;
        }
        self.agenda.push_back(Work::Close(of));
        Ok(())
    }

    /// Cancels one activation. If its effect may have to be undone, a task that a worker may have is left to finish.
    pub(super) fn cancel(&mut self, id: ActId) -> Done {
        match &self.at(id).state {
            State::Ended(_) | State::Draining(_) => Ok(()),
            State::Open(_) => self.close_early(id, End::Cancelled),
            State::Queued(fence) if self.drains() => {
                let fence = *fence;
                self.edit(id).state = State::Draining(fence);
                self.tasks.push(TaskChange::Close(fence));
                self.drain = true;
                Ok(())
            }
            _ => self.end(id, End::Cancelled),
        }
    }

    fn drains(&self) -> bool {
        let completing = self.at(ActId(0)).inside().is_some_and(|root| matches!(root.closing, Some(End::Completed(_))));
        self.header.phase == Phase::Going && self.graph.is_some_and(|graph| graph.has_undo) && !completing
    }

    /// The first unhandled failure in the scope, with the others added.
    fn unhandled(&self, of: ActId) -> Done<Option<Failure>> {
        let mut failed = Vec::new();
        for step in self.steps_in(of)? {
            let activation = self.at(self.in_scope(of, *step)?);
            if let Some(End::Failed(failure)) = activation.end()
                && self.handling(of, *step)? != Handling::Done
            {
                failed.push((activation.ended, activation.id, failure));
            }
        }
        failed.sort_by_key(|(order, ..)| *order);
        let mut failures = failed.into_iter().map(|(_, id, failure)| failure.clone().within(&self.name_of(id)));
        let Some(mut failure) = failures.next() else { return Ok(None) };
        failures.for_each(|other| failure.add(other));
        Ok(Some(failure))
    }

    fn scope_output(&mut self, id: ActId) -> Done<End> {
        let output = match self.scope_of(id) {
            Some(scope) => &self.graph()?.scope(scope).output,
            None => &None,
        };
        let Some(template) = output else { return Ok(End::Completed(Data::null())) };
        Ok(match self.fill_in_inside(id, template)? {
            Ok(output) => End::Completed(self.keep(output)),
            Err(failure) => End::Failed(Failure { message: format!("in `output`: {}", failure.message), ..failure }),
        })
    }

    /// With `fail_fast`, ends a scope once a failure in it can no longer be handled.
    fn fail_fast(&mut self, id: ActId) -> Done {
        if !self.graph.is_some_and(|graph| graph.fail_fast) {
            return Ok(());
        }
        let Some(Inside { closing: None, what: What::Scope, .. }) = self.at(id).inside() else { return Ok(()) };
        let steps = self.steps_in(id)?;
        self.meter.add(Cost { steps: steps.len() as u64, ..Cost::default() });
        for step in steps {
            let has_failed = matches!(self.at(self.in_scope(id, *step)?).end(), Some(End::Failed(_)));
            if has_failed
                && self.handling(id, *step)? == Handling::Impossible
                && let Some(failure) = self.unhandled(id)?
            {
                if self.is_skipping() {
                    // Steps that can never run because of the failure end skipped, not cancelled, however far
                    // downstream they are.
                    self.agenda.push_back(Work::Close(id));
                    return Ok(());
                }
                return self.close_early(id, End::Failed(failure));
            }
        }
        Ok(())
    }

    /// Whether the agenda still contains skips.
    fn is_skipping(&self) -> bool {
        self.agenda.iter().any(|work| match work {
            Work::Decide(id) => matches!(self.at(*id).state, State::Certain { ready: false }),
            Work::Settle(id) => matches!(self.at(*id).end(), Some(End::Skipped(_))),
            _ => false,
        })
    }

    /// Whether the failure of a step is handled, or can still be.
    fn handling(&self, scope: ActId, step: StepId) -> Done<Handling> {
        if self.at(self.in_scope(scope, step)?).handled {
            return Ok(Handling::Done);
        }
        let graph = self.graph()?;
        let mut found = Handling::Impossible;
        for watcher in &graph.step(step).watchers {
            let source = graph.step(watcher.step).arms[watcher.arm].source;
            if !matches!(source, Source::Step(_, When::Failed | When::Ended)) {
                continue;
            }
            let handler = self.at(self.in_scope(scope, watcher.step)?);
            match (handler.end(), handler.arms[watcher.arm]) {
                // It ended in this decision and has not been settled yet.
                (Some(End::Completed(_)), Token::Live) => return Ok(Handling::Done),
                (None, Token::Open | Token::Live) => found = Handling::Possible,
                _ => {}
            }
        }
        Ok(found)
    }
}

/// Whether a failure is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Handling {
    Done,
    /// A step that would handle it may still complete.
    Possible,
    Impossible,
}
