//! The start of a run.

use super::{Decider, Done, Work};
use crate::ids::{ActId, Millis, ValueId};
use crate::record::{ActName, Entry};
use crate::run::{CodeHeader, Driver, Inside, Phase, Place, State, What};
use crate::transition::{Again, Answer, Due, Input, MessageBody, ReportResult, Start, TimerKind};
use eddyline_language::data::Data;
use eddyline_language::flow::{Body, Graph};

/// How long a retry or a rerun waits for the next values that it takes over, in case the sender died.
const TAKE_OVER_MS: Millis = 60_000;

impl Decider<'_> {
    pub(super) fn start(&mut self, start: &Start) -> Done<Answer> {
        let root = self.create(Place::Root);
        self.header.next_value = start.next_value;
        let input = self.keep(start.input.clone().unwrap_or_else(Data::null));
        let header = &mut self.header;
        header.flow = self.flow.name.clone();
        header.flow_version = self.flow.version.clone();
        header.input = Some(input);
        header.external_id = start.external_id.clone();
        header.idempotency_key = start.idempotency_key.clone();
        header.metadata = start.metadata.clone();
        header.queue = start.queue.clone();
        header.unique = start.unique.clone();
        header.delay_ms = start.delay_ms;
        header.deadline_ms = start.deadline_ms;
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
            Body::Graph(_) => start.queue.clone(),
            Body::Code(code) => {
                header.code = Some(CodeHeader { retry: start.retry.clone(), ..CodeHeader::default() });
                Some(start.queue.as_ref().unwrap_or(&code.queue).clone())
            }
        };
        self.cursors.extend(start.cursors.clone());
        self.reuse.extend(start.reuse.iter().map(|reused| (reused.activation.clone(), reused.clone())));
        self.add_values(&start.values);
        self.record(Entry::FlowStart {
            flow_name: self.flow.name.clone(),
            version: self.flow.version.clone(),
            step_count: self.header.step_count,
            queue,
            delay_ms: start.delay_ms,
            in_line: start.in_line,
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
            _ if start.more_values => {
                self.header.phase = Phase::Delayed;
                self.header.taking_over = true;
                self.set_timer(root, TimerKind::Delay, Due::After(TAKE_OVER_MS));
            }
            delay => {
                let delay = delay.filter(|delay| *delay > 0);
                if let Some(delay) = delay {
                    self.set_timer(root, TimerKind::Delay, Due::After(delay));
                }
                self.header.phase = Phase::Delayed;
                self.header.in_line = start.in_line;
                self.header.awaits_delay = delay.is_some();
                self.begin_if_due();
            }
        }
        Ok(Answer::Applied(ReportResult::default()))
    }

    /// The run is now the first in line for its unique key.
    pub(super) fn turn(&mut self) -> Done<Answer> {
        if self.header.phase != Phase::Delayed || !self.header.in_line {
            return Ok(Answer::Nothing);
        }
        self.header.in_line = false;
        self.begin_if_due();
        Ok(Answer::Applied(ReportResult::default()))
    }

    pub(super) fn delay_over(&mut self) {
        self.header.awaits_delay = false;
        self.begin_if_due();
    }

    /// Begins the run if it waits neither for its delay nor for its turn.
    fn begin_if_due(&mut self) {
        if !self.header.awaits_delay && !self.header.in_line {
            self.set_going(ActId(0));
        }
    }

    /// More of the values that a retry or a rerun takes over.
    pub(super) fn take_over_values(&mut self, values: &[(ValueId, Data)], more: bool) -> Done<Answer> {
        if self.header.phase != Phase::Delayed || !self.header.taking_over {
            return Ok(Answer::Closed);
        }
        self.add_values(values);
        let root = ActId(0);
        if more {
            self.set_timer(root, TimerKind::Delay, Due::After(TAKE_OVER_MS));
        } else {
            self.header.taking_over = false;
            self.clear_timer(root, TimerKind::Delay);
            self.set_going(root);
        }
        Ok(Answer::Applied(ReportResult::default()))
    }

    fn add_values(&mut self, values: &[(ValueId, Data)]) {
        self.values.extend(values.iter().cloned());
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
                if let Some(code) = &mut self.header.code {
                    (code.began_at, code.at) = (self.env.now, self.env.now);
                }
                self.agenda.push_back(Work::Remember);
            }
        }
    }
}
