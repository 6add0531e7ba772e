//! Inlines payloads into outgoing messages and events: they refer to values of the sending run, which the receiver
//! cannot read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::{
    ChildEnd, Data, Failure, Input, Message, MessageBody, Run, Start, Transition, Unbuilt, ValueId, ValueRef,
    canonical_json,
};
use eddyline_store::NewEvent;
use serde_json::Value;

/// The kind of failure when the payload of a message is too large.
const TOO_LARGE: &str = "PayloadTooLarge";

/// The messages and events of a transition with inlined payloads of at most `limit` bytes each; or the values that must
/// be loaded first.
pub(crate) fn outgoing(
    run: &Run,
    transition: &Transition,
    limit: usize,
) -> Result<(Vec<Message>, Vec<NewEvent>), Vec<ValueRef>> {
    if transition.messages.is_empty() && transition.publishes.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let new: BTreeMap<ValueId, &Data> = transition.values.iter().map(|(id, value)| (*id, value)).collect();
    let find = |id: ValueId| new.get(&id).copied().or_else(|| run.values.get(&id));
    // A set, since many messages may carry the same value.
    let mut missing = BTreeSet::new();
    let mut resolve = |data: &Data| match data.resolve(&|id| find(id)) {
        Ok(data) => data,
        Err(Unbuilt::Missing(needed)) => {
            missing.extend(needed);
            Data::null()
        }
        // Sizes are checked before, so no payload that a user can write gets here.
        Err(too_large @ Unbuilt::TooLarge) => {
            tracing::error!(run = %run.header.run, "sent without its payload: {too_large}");
            Data::null()
        }
    };
    let messages = transition.messages.iter().filter_map(|message| carried(message, limit, &mut resolve)).collect();
    let events = transition.publishes.iter().map(|publish| NewEvent {
        id: publish.id.clone(),
        name: publish.name.clone(),
        key: publish.key.as_ref().map(|key| canonical_json(Value::clone(&json(resolve(key))))),
        payload: Data::Json(json(resolve(&publish.payload))),
    });
    let events = events.collect();
    if missing.is_empty() { Ok((messages, events)) } else { Err(missing.into_iter().collect()) }
}

fn carried(message: &Message, limit: usize, resolve: &mut impl FnMut(&Data) -> Data) -> Option<Message> {
    let body = match &message.body {
        MessageBody::Start { flow, start } => match &start.input {
            Some(input) if is_too_large(input, limit) => {
                // The child never starts, and the step that waits for it fails at once.
                let failure = too_large("the input of the child", input, limit);
                tracing::warn!(child = %message.to, flow, "not started: {}", failure.message);
                return start.refused(message.to, failure);
            }
            input => {
                let input = input.as_ref().map(&mut *resolve);
                MessageBody::Start { flow: flow.clone(), start: Box::new(Start { input, ..(**start).clone() }) }
            }
        },
        MessageBody::Input(input) => MessageBody::Input(Box::new(match &**input {
            Input::ChildEnded { activation, child, end: ChildEnd::Completed(output) } => {
                let end = match is_too_large(output, limit) {
                    true => ChildEnd::Failed(too_large("the output of the child", output, limit)),
                    false => ChildEnd::Completed(resolve(output)),
                };
                Input::ChildEnded { activation: *activation, child: *child, end }
            }
            other => other.clone(),
        })),
    };
    Some(Message { to: message.to, id: message.id.clone(), body })
}

/// The JSON of a payload without references.
fn json(data: Data) -> Arc<Value> {
    match data {
        Data::Json(json) => json,
        aggregate => Arc::new(aggregate.materialise(&|_| None).unwrap_or_default()),
    }
}

// Aggregates of references can be far larger than anything that was written, so the size is counted before building
// them.
fn is_too_large(data: &Data, limit: usize) -> bool {
    data.bytes(limit + 1) > limit
}

fn too_large(what: &str, data: &Data, limit: usize) -> Failure {
    let bytes = data.bytes(limit + 1);
    Failure::new(TOO_LARGE, format!("{what} is {bytes} bytes or more; the limit is {limit}"))
}
