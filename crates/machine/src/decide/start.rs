//! A run begins.

use super::{Decider, Done, Work};
use crate::data::Data;
use crate::flow::{Body, Graph};
use crate::ids::ActId;
use crate::record::{ActName, Entry};
use crate::run::{CodeHeader, Driver, Inside, Phase, Place, State, What};
use crate::transition::{Again, Answer, Due, Input, MessageBody, Said, Start, TimerKind};

impl Decider<'_> {
    pub(super) fn start(&mut self, start: &Start) -> Done<Answer> {
        let root = self.create(Place::Root);
        let input = self.keep(start.input.clone().unwrap_or_else(Data::null));
        let header = &mut self.header;
        header.flow = self.flow.name.clone();
        header.flow_version = self.flow.version.clone();
        header.input = Some(input);
        header.external_id = start.external_id.clone();
        header.tags = start.tags.clone();
        header.priority = start.priority;
        header.parent = start.parent;
        header.depth = start.depth;
        header.root = start.root;
        header.retry_of = start.retry_of;
        header.key_run = start.key_run.filter(|of| *of != header.run);
        header.traceparent = start.traceparent.clone();
        header.events_since = start.events_since.unwrap_or(self.env.now);
        header.step_count = self.graph.map_or(0, |graph| graph.scope(Graph::ROOT).steps.len() as u32);
        let queue = match &self.flow.body {
            Body::Graph(_) => None,
            Body::Code(code) => {
                header.code = Some(CodeHeader { retry: start.retry.clone(), ..CodeHeader::default() });
                Some(code.queue.clone())
            }
        };
        self.cursors.extend(start.cursors.clone());
        for reused in &start.reuse {
            let reused = self.kept(reused);
            self.reuse.insert(reused.activation.clone(), reused);
        }
        self.record(Entry::FlowStart {
            flow_name: self.flow.name.clone(),
            version: self.flow.version.clone(),
            step_count: self.header.step_count,
            queue,
            delay_ms: start.delay_ms,
            parent: start.parent.map(|parent| parent.run),
            retry_of: start.retry_of,
        });
        if let Some(starter) = start.started_by {
            let started = Input::ChildStarted { activation: starter.activation, child: self.header.run };
            self.send(starter.run, format!("started:{}", self.header.run), MessageBody::Input(Box::new(started)));
        }
        if let Some(again) = &start.again {
            let (act, by, from) = match again.clone() {
                Again::Retry { by } => (ActName::Retry, by, None),
                Again::Rerun { by, from } => (ActName::Rerun, by, from),
            };
            self.record(Entry::Act { act, by, step_key: None, from, reason: None });
        }
        if let Some(deadline) = start.deadline_ms {
            self.header.deadline = true;
            self.set_timer(root, TimerKind::Deadline, Due::After(deadline));
        }
        match start.delay_ms {
            Some(delay) if delay > 0 => {
                self.header.phase = Phase::Delayed;
                self.set_timer(root, TimerKind::Delay, Due::After(delay));
            }
            _ => self.set_going(root),
        }
        Ok(Answer::Applied(Said::default()))
    }

    pub(super) fn set_going(&mut self, root: ActId) {
        self.header.phase = Phase::Going;
        match self.graph {
            Some(_) => self.agenda.push_back(Work::Open { of: root, scope: Graph::ROOT }),
            None => {
                let what = What::Code(Driver::Done);
                let activation = self.edit(root);
                activation.attempt = 1;
                activation.state = State::Open(Inside { open: 0, closing: None, what });
                self.agenda.push_back(Work::Remember);
            }
        }
    }
}
