//! What leaves a run takes its payloads along: messages and events refer to values of their sender, which nobody else
//! can read.

use eddyline_machine::{
    ChildEnd, Data, Failure, Input, Message, MessageBody, Run, Start, Transition, ValueId, canonical_json,
};
use eddyline_store::NewEvent;
use serde_json::Value;

use crate::config::MAX_PAYLOAD_BYTES;

/// The kind of failure when what one run says to another is too large.
const TOO_LARGE: &str = "PayloadTooLarge";

/// The messages and events of a transition with their payloads; or the values that must be loaded first.
pub(crate) fn outgoing(run: &Run, transition: &Transition) -> Result<(Vec<Message>, Vec<NewEvent>), Vec<ValueId>> {
    if transition.messages.is_empty() && transition.publishes.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut missing = Vec::new();
    let mut json = |data: &Data| {
        plain(run, transition, data).unwrap_or_else(|needed| {
            missing.extend(needed);
            Value::Null
        })
    };
    let messages = transition.messages.iter().filter_map(|message| carried(message, &mut json)).collect();
    let events = transition.publishes.iter().map(|publish| NewEvent {
        id: publish.id.clone(),
        name: publish.name.clone(),
        key: publish.key.as_ref().map(|key| canonical_json(json(key))),
        payload: Data::from(json(&publish.payload)),
    });
    let events = events.collect();
    if missing.is_empty() { Ok((messages, events)) } else { Err(missing) }
}

fn carried(message: &Message, json: &mut impl FnMut(&Data) -> Value) -> Option<Message> {
    let body = match &message.body {
        MessageBody::Start { flow, start } => match &start.input {
            Some(input) if is_too_large(input) => {
                // It never starts, and whoever waits for it is told at once.
                let failure = too_large("the input of the child", input);
                tracing::warn!(child = %message.to, flow, "not started: {}", failure.message);
                return start.refused(message.to, failure);
            }
            input => {
                let input = input.as_ref().map(|input| Data::from(json(input)));
                MessageBody::Start { flow: flow.clone(), start: Box::new(Start { input, ..(**start).clone() }) }
            }
        },
        MessageBody::Input(input) => MessageBody::Input(Box::new(match &**input {
            Input::ChildEnded { activation, child, end: ChildEnd::Completed(output) } => {
                let end = match is_too_large(output) {
                    true => ChildEnd::Failed(too_large("the output of the child", output)),
                    false => ChildEnd::Completed(Data::from(json(output))),
                };
                Input::ChildEnded { activation: *activation, child: *child, end }
            }
            other => other.clone(),
        })),
    };
    Some(Message { to: message.to, id: message.id.clone(), body })
}

/// A payload of a run as JSON; or the values that are not at hand.
pub(crate) fn plain(run: &Run, transition: &Transition, data: &Data) -> Result<Value, Vec<ValueId>> {
    let find = |id: ValueId| {
        let new = transition.values.iter().find(|(have, _)| *have == id).map(|(_, value)| value);
        new.or_else(|| run.values.get(&id))
    };
    data.materialise(&find)
}

// Aggregates by reference can be far larger than what was ever written, so the size is counted before they are built.
fn is_too_large(data: &Data) -> bool {
    data.bytes(MAX_PAYLOAD_BYTES + 1) > MAX_PAYLOAD_BYTES
}

fn too_large(what: &str, data: &Data) -> Failure {
    let bytes = data.bytes(MAX_PAYLOAD_BYTES + 1);
    Failure::new(TOO_LARGE, format!("{what} has {bytes} bytes or more, and the limit is {MAX_PAYLOAD_BYTES}"))
}
