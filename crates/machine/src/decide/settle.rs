//! An activation ends, once, and the arms that wait for it get their tokens.

use super::{Decider, Done, Halt, Work};
use crate::ids::{ActId, Fence, RunId};
use crate::record::Entry;
use crate::run::{Activations, End, GateState, Place, State, Token};
use crate::transition::{GateChange, Input, MessageBody, TaskChange, TimerKind};
use eddyline_language::flow::{Source, When};

impl Decider<'_> {
    /// Ends an activation: releases its task, gate, timer or child, and records the end.
    pub(super) fn end(&mut self, id: ActId, end: End) -> Done {
        self.end_as(id, end, None)
    }

    /// Like [`Decider::end`], for an end taken over from another run.
    pub(super) fn end_as(&mut self, id: ActId, end: End, reused_from: Option<RunId>) -> Done {
        if !self.at(id).is_open() {
            return Err(Halt::Bug(format!("{} ended twice", self.name_of(id))));
        }
        self.release_resources(id)?;
        let end = match end {
            End::Completed(output) => End::Completed(self.keep(output)),
            other => other,
        };
        self.record_end(id, &end, reused_from);
        let order = self.header.next_end;
        self.header.next_end += 1;
        let is_counted = match &self.at(id).place {
            Place::Step { scope, .. } => self.at(*scope).place == Place::Root,
            Place::Memo(_) => true,
            _ => false,
        };
        if is_counted && matches!(end, End::Completed(_)) {
            self.header.completed_steps += 1;
        }
        let activation = self.edit(id);
        activation.ended = Some(order);
        activation.state = State::Ended(end);
        self.agenda.push_back(Work::Settle(id));
        Ok(())
    }

    /// Notifies the arms that wait for it, and its container.
    pub(super) fn settle(&mut self, id: ActId) -> Done {
        match self.at(id).place.clone() {
            Place::Root => self.begin_ending(),
            Place::Finally => self.finally_ended(id),
            Place::Undo { of } => self.undo_ended(id, of),
            Place::Step { scope, .. } => {
                self.notify_watchers(id, scope)?;
                self.count_end(scope)
            }
            Place::Item { of, .. } => self.item_ended(id, of),
            Place::Round { of, index } => self.round_ended(id, of, index),
            Place::Memo(_) => {
                self.count_end(ActId(0))?;
                self.resume_driver()
            }
        }
    }

    /// A part of a container has ended.
    pub(super) fn count_end(&mut self, of: ActId) -> Done {
        let inside = self.inside_mut(of)?;
        inside.open = inside
            .open
            .checked_sub(1)
            .ok_or_else(|| Halt::Bug(format!("activation {of} has more ended parts than it had open")))?;
        self.agenda.push_back(Work::Close(of));
        Ok(())
    }

    fn notify_watchers(&mut self, id: ActId, scope: ActId) -> Done {
        let step = self.step(id)?;
        let (completed, failed) = match self.at(id).end() {
            Some(End::Completed(_)) => (true, false),
            Some(End::Failed(_)) => (false, true),
            _ => (false, false),
        };
        if completed {
            self.handle_failures(id, scope)?;
        }
        for watcher in &step.watchers {
            let target = self.in_scope(scope, watcher.step)?;
            let live = match self.graph()?.step(watcher.step).arms[watcher.arm].source {
                Source::Step(_, When::Completed) => completed,
                Source::Step(_, When::Failed) => failed,
                Source::Step(_, When::Ended) => true,
                Source::Event(_) => return Err(Halt::Bug("an event arm watches a step".to_owned())),
            };
            self.set_token(target, watcher.arm, live)?;
        }
        for event in &step.emits {
            if self.emitted_at(scope, *event as u32).is_none() && self.is_silent(scope, *event)? {
                self.notify_subscribers(scope, *event, false)?;
            }
        }
        Ok(())
    }

    /// A completed activation handles the failures on its live `failed:` and `ended:` arms.
    fn handle_failures(&mut self, id: ActId, scope: ActId) -> Done {
        for (arm, token) in self.step(id)?.arms.iter().zip(self.at(id).arms.clone()) {
            if let (Source::Step(step, When::Failed | When::Ended), Token::Live) = (arm.source, token) {
                let source = self.in_scope(scope, step)?;
                if matches!(self.at(source).end(), Some(End::Failed(_))) && !self.at(source).handled {
                    self.edit(source).handled = true;
                }
            }
        }
        Ok(())
    }

    /// Whether every step that declares the event has ended, and its subscribers have no token yet.
    fn is_silent(&self, scope: ActId, event: usize) -> Done<bool> {
        let Some(definition) = self.scope_of(scope) else { return Ok(false) };
        let event = &self.graph()?.scope(definition).events[event];
        for (producer, _) in &event.producers {
            if self.at(self.in_scope(scope, *producer)?).is_open() {
                return Ok(false);
            }
        }
        match event.subscribers.first() {
            Some(watcher) => Ok(self.at(self.in_scope(scope, watcher.step)?).arms[watcher.arm] == Token::Open),
            None => Ok(false),
        }
    }

    fn release_resources(&mut self, id: ActId) -> Done {
        let name = self.name_of(id);
        let gate_id = self.gate_id(id);
        if self.is_pending_entry(id) {
            self.entry_brings_news(id);
        }
        match &self.at(id).state {
            State::Queued(fence) | State::Draining(fence) => {
                let fence = *fence;
                self.call_off(id, fence);
            }
            State::BackOff { after, .. } => {
                let after = *after;
                self.clear_timer(id, TimerKind::BackOff(after));
            }
            State::Retrying { due: false, .. } => {
                let fence = self.last_fence(id);
                self.clear_timer(id, TimerKind::BackOff(fence));
            }
            State::Child(child) => {
                let child = *child;
                let reason = Some(format!("its parent run no longer waits for it: {name} ended"));
                let cancel = Input::Cancel { by: format!("run:{}", self.header.run), reason };
                let body = MessageBody::Input(Box::new(cancel));
                self.send(child, format!("cancel:{}:{id}", self.header.run), body);
            }
            _ => {}
        }
        match &self.at(id).gate {
            GateState::Waiting { timed, .. } => {
                if *timed {
                    self.clear_timer(id, TimerKind::Gate);
                }
                self.gates.push(GateChange::Close { id: gate_id });
                self.record(Entry::AwaitCancelled { step_key: name, token: gate_id });
                self.edit(id).gate = GateState::Cancelled;
            }
            GateState::Ahead { .. } => {
                self.gates.push(GateChange::Close { id: gate_id });
                self.edit(id).gate = GateState::Cancelled;
            }
            _ => {}
        }
        Ok(())
    }

    /// Removes a task that is no longer wanted, even if a worker has it.
    pub(super) fn call_off(&mut self, id: ActId, fence: Fence) {
        self.remove_task(fence);
        let called_off = self.edit(id).tasks.iter_mut().filter(|task| task.fence == fence);
        called_off.for_each(|task| task.called_off = true);
    }

    pub(super) fn remove_task(&mut self, fence: Fence) {
        self.tasks.push(TaskChange::Remove(fence));
        self.header.open_tasks -= 1;
    }

    fn record_end(&mut self, id: ActId, end: &End, reused_from: Option<RunId>) {
        if self.at(id).place == Place::Root {
            return;
        }
        // It may be ended by hand before any step of the run was decided.
        self.header.begun = true;
        let step_key = self.name_of(id);
        match end {
            End::Completed(output) => {
                let result = output.clone();
                self.record(Entry::StepCompleted { step_key, result, reused_from })
            }
            End::Failed(error) => {
                let error = error.clone();
                self.record(Entry::StepFailed { step_key, error })
            }
            End::Cancelled => self.record(Entry::StepCancelled { step_key }),
            End::Skipped(reason) => self.record(Entry::StepSkipped { step_key, reason: *reason, reused_from }),
        }
    }
}
