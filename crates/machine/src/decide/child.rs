//! Child runs: started by a message, and ended by a message back.
//!
//! The step of a detached child completes as soon as the child has started; the child sends this in the commit that
//! starts it. A child that cannot be started fails its step, attached or detached.

use std::sync::Arc;

use serde_json::json;

use super::report::applied;
use super::{COUNTED_BYTES, Decider, Done, MAX_DEPTH};
use crate::failure::{Failure, kind};
use crate::ids::{ActId, RunId};
use crate::record::Scheduled;
use crate::run::{Activations, End, Parent, Place, State};
use crate::transition::{Answer, ChildEnd, ChildOptions, MessageBody, Start};
use eddyline_language::data::Data;
use eddyline_language::expr::Cost;

impl Decider<'_> {
    pub(super) fn start_child(
        &mut self,
        id: ActId,
        flow: &str,
        detached: bool,
        options: Option<&ChildOptions>,
    ) -> Done {
        if self.header.depth >= MAX_DEPTH {
            let message = format!("child runs cannot be nested more than {MAX_DEPTH} deep");
            return self.fail(id, Failure::new(kind::TOO_DEEP, message));
        }
        // The message carries the whole input, not a reference to it.
        let bytes = self.at(id).input.as_ref().map_or(0, |input| input.bytes(COUNTED_BYTES)) as u64;
        self.meter.add(Cost { steps: bytes / 64, bytes: 2 * bytes, read: 0 });
        let child = child_id(self.header.run, id);
        let parent = Parent { run: self.header.run, activation: id };
        let options = options.cloned().unwrap_or_default();
        // By name, because activation numbers may differ when the run is retried, or when a later attempt of a function
        // asks for the same child again.
        let name = match &self.at(id).place {
            Place::Memo(memo) => memo.name.to_string(),
            _ => self.name_of(id),
        };
        let start = Start {
            input: self.at(id).input.clone(),
            parent: Some(parent).filter(|_| !detached),
            started_by: Some(parent).filter(|_| detached),
            asked_in: self.header.phase,
            root: Some(self.header.root.unwrap_or(self.header.run)),
            depth: self.header.depth + 1,
            external_id: options.external_id,
            tags: options.tags,
            metadata: options.metadata,
            queue: options.queue,
            delay_ms: options.delay_ms,
            deadline_ms: options.deadline_ms,
            retry: options.retry,
            unique: options.unique,
            priority: options.priority.unwrap_or(self.header.priority),
            traceparent: self.header.traceparent.clone(),
            key_run: Some(self.header.key_run().derive(&format!("keys:{name}"))),
            ..Start::default()
        };
        let body = MessageBody::Start { flow: flow.to_owned(), start: Box::new(start) };
        self.send(child, "start".to_owned(), body);
        self.scheduled(id, Scheduled::Child { flow: flow.to_owned(), run_id: child });
        self.edit(id).state = if detached { State::Starting(child) } else { State::Child(child) };
        Ok(())
    }

    /// A detached child has started: its step completes.
    pub(super) fn child_started(&mut self, id: ActId, child: RunId) -> Done<Answer> {
        if !self.exists(id) || self.at(id).state != State::Starting(child) {
            return Ok(Answer::Nothing);
        }
        self.edit(id).state = State::Ready;
        let output = Data::Map(Arc::new(vec![(Arc::from("run_id"), Data::from(json!(child)))]));
        self.end(id, End::Completed(output))?;
        applied()
    }

    pub(super) fn child_ended(&mut self, id: ActId, child: RunId, end: &ChildEnd) -> Done<Answer> {
        let waits =
            self.exists(id) && matches!(self.at(id).state, State::Child(of) | State::Starting(of) if of == child);
        if !waits {
            return Ok(Answer::Nothing);
        }
        // The child has ended, so there is nothing to cancel.
        self.edit(id).state = State::Ready;
        let end = match end {
            ChildEnd::Completed(output) => End::Completed(output.clone()),
            ChildEnd::Failed(failure) => {
                let message = format!("the child run {child} failed: {}", failure.message);
                let mut own = Failure::new(kind::CHILD_FAILED, message);
                own.add(failure.clone());
                End::Failed(own)
            }
            ChildEnd::Refused(failure) => {
                let message = format!("the child run was not started: {}", failure.message);
                End::Failed(Failure::new(failure.kind.clone(), message))
            }
            ChildEnd::Cancelled => {
                End::Failed(Failure::new(kind::CHILD_CANCELLED, format!("the child run {child} was cancelled")))
            }
        };
        self.end(id, end)?;
        applied()
    }
}

/// The id of the run that an activation starts.
pub(crate) fn child_id(parent: RunId, activation: ActId) -> RunId {
    parent.derive(&format!("child:{activation}"))
}
