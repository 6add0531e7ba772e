//! Runs a step once it is ready and its gate is open: its input, then its action.

use std::sync::Arc;

use serde_json::json;

use super::{Decider, Done, Work};
use crate::failure::{Failure, kind};
use crate::ids::ActId;
use crate::record::{Entry, Scheduled};
use crate::run::{Activations, End, GateState, Place, Token};
use eddyline_language::data::Data;
use eddyline_language::flow::{Action, Source, When};

impl Decider<'_> {
    /// After the gate: a spread creates items, any other step runs.
    pub(super) fn begin(&mut self, id: ActId) -> Done {
        match &self.step(id)?.spread {
            Some(spread) => self.begin_spread(id, spread),
            None => self.enter(id),
        }
    }

    /// Runs a step without `spread`, or one item of a spread.
    pub(super) fn enter(&mut self, id: ActId) -> Done {
        let step = self.step(id)?;
        let input = match &step.input {
            Some(template) => match self.fill_in(id, template)? {
                Ok(input) => input,
                Err(failure) => return self.fail(id, failure),
            },
            None => self.default_input(id)?,
        };
        let input = self.keep(input);
        self.edit(id).input = Some(input);
        if let Some(repeat) = &step.repeat {
            return self.begin_repeat(id, repeat);
        }
        match &step.action {
            Action::Worker(_) => {
                self.edit(id).attempt = 1;
                self.enqueue(id, None)
            }
            Action::Set(template) => self.inline(id, template, |_, _, output| Ok(End::Completed(output))),
            Action::Return(template) => self.inline(id, template, |decider, id, output| {
                if let Some(scope) = decider.at(id).parent() {
                    decider.close_early(scope, End::Completed(output.clone()))?;
                }
                Ok(End::Completed(output))
            }),
            Action::Fail(template) => {
                let message = match self.text(id, template)? {
                    Ok(message) => message,
                    Err(failure) => return self.fail(id, failure),
                };
                self.fail(id, Failure::new(kind::FAIL_STEP, message))
            }
            Action::Group(scope) => {
                self.scheduled(id, Scheduled::Group {});
                self.agenda.push_back(Work::Open { of: id, scope: *scope });
                Ok(())
            }
            Action::Child { flow, detached } => self.start_child(id, flow, *detached, None),
            Action::Gate => {
                let payload = match &self.at(id).gate {
                    GateState::Opened(payload) => payload.clone(),
                    _ => Data::null(),
                };
                self.end(id, End::Completed(payload))
            }
        }
    }

    fn inline(
        &mut self,
        id: ActId,
        template: &eddyline_language::expr::Template,
        then: impl Fn(&mut Self, ActId, Data) -> Done<End>,
    ) -> Done {
        let end = match self.fill_in(id, template)? {
            Ok(output) => {
                let output = self.keep(output);
                then(self, id, output)?
            }
            Err(failure) => End::Failed(failure),
        };
        self.end(id, end)
    }

    pub(super) fn scheduled(&mut self, id: ActId, work: Scheduled) {
        let step_key = self.name_of(id);
        self.record(Entry::StepScheduled { step_key, work, reason: None });
    }

    /// For an item, the item; for an entry step, its scope's input; else an object keyed by its live arms as written.
    fn default_input(&self, id: ActId) -> Done<Data> {
        let activation = self.at(id);
        let Place::Step { scope, .. } = activation.place else {
            return Ok(activation.item.clone().unwrap_or_else(Data::null));
        };
        let step = self.step(id)?;
        if step.arms.is_empty() {
            return Ok(self.input_of(scope));
        }
        let mut fields = Vec::with_capacity(step.arms.len());
        for (arm, token) in step.arms.iter().zip(&activation.arms) {
            if *token == Token::Live {
                fields.push((Arc::from(arm.written.as_str()), self.arm_value(scope, arm.source)?));
            }
        }
        Ok(Data::Map(Arc::new(fields)))
    }

    /// The input that a scope's entry steps get.
    pub(super) fn input_of(&self, scope: ActId) -> Data {
        let activation = self.at(scope);
        let input = match activation.place {
            Place::Root | Place::Finally => &self.header.input,
            Place::Round { of, .. } => &self.at(of).input,
            _ => &activation.input,
        };
        input.clone().unwrap_or_else(Data::null)
    }

    fn arm_value(&self, scope: ActId, source: Source) -> Done<Data> {
        let (step, when) = match source {
            Source::Event(event) => {
                let emitted = self.emitted_at(scope, event as u32);
                return Ok(emitted.map_or_else(Data::null, |emitted| emitted.payload.clone()));
            }
            Source::Step(step, when) => (step, when),
        };
        let end = self.at(self.in_scope(scope, step)?).end();
        Ok(match (when, end) {
            (When::Completed, Some(End::Completed(output))) => output.clone(),
            (When::Failed, Some(End::Failed(failure))) => Data::from(json!(failure)),
            (When::Ended, Some(end)) => {
                let status = Data::from(json!(end.status()));
                let mut fields = vec![(Arc::from("status"), status)];
                match end {
                    End::Completed(output) => fields.push((Arc::from("output"), output.clone())),
                    End::Failed(failure) => fields.push((Arc::from("error"), Data::from(json!(failure)))),
                    End::Skipped(_) | End::Cancelled => fields.push((Arc::from("output"), Data::null())),
                }
                Data::Map(Arc::new(fields))
            }
            _ => Data::null(),
        })
    }
}
