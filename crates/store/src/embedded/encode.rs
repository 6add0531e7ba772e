//! Commands encoded as rows, on the caller's thread, so that the single writer does little more than write.

use std::sync::Arc;

use eddyline_machine::{GateChange, MessageBody, Status, Task, TaskChange};

use super::body::Body;
use super::schema::MOST_NUMBERS;
use crate::commit::{Command, DocumentCommit, NewEvent, RunCommit};
use crate::error::{Result, StoreError};

#[derive(Debug)]
pub(super) enum Encoded {
    Run(Box<EncodedRun>),
    Documents(Box<EncodedDocuments>),
}

/// A transition with the JSON of its rows; the lists are parallel to those of the transition.
#[derive(Debug)]
pub(super) struct EncodedRun {
    pub commit: RunCommit,
    pub status: Status,
    /// The newest change in a code run's memo.
    pub memo: u64,
    pub header: Body,
    pub activations: Vec<Body>,
    pub emitted: Vec<Body>,
    pub values: Vec<Body>,
    pub reuse: Vec<Body>,
    pub tasks: Vec<Option<EncodedTask>>,
    pub gates: Vec<Option<Body>>,
    pub records: Body,
    pub messages: Vec<Body>,
    pub events: Vec<Body>,
}

/// A task to add.
#[derive(Debug, Clone)]
pub(super) struct EncodedTask {
    pub task: Arc<Task>,
    pub body: Arc<Body>,
}

#[derive(Debug)]
pub(super) struct EncodedDocuments {
    pub commit: DocumentCommit,
    /// None deletes the document.
    pub documents: Vec<Option<Body>>,
    pub messages: Vec<Body>,
    pub events: Vec<Body>,
}

pub(super) fn encode(command: Command) -> Result<Encoded> {
    Ok(match command {
        Command::Run(commit) => Encoded::Run(Box::new(encode_run(commit)?)),
        Command::Documents(commit) => Encoded::Documents(Box::new(encode_documents(commit)?)),
    })
}

impl Encoded {
    /// Roughly how many bytes it adds to its group.
    pub fn bytes(&self) -> usize {
        let all = |bodies: &[Body]| bodies.iter().map(|body| body.text.len()).sum::<usize>();
        match self {
            Encoded::Run(run) => {
                let tasks: usize = run.tasks.iter().flatten().map(|task| task.body.text.len()).sum();
                let bodies = [&run.activations, &run.emitted, &run.values, &run.reuse, &run.messages, &run.events];
                let bodies: usize = bodies.into_iter().map(|bodies| all(bodies)).sum();
                run.header.text.len() + run.records.text.len() + tasks + bodies
            }
            Encoded::Documents(commit) => {
                let documents: usize = commit.documents.iter().flatten().map(|body| body.text.len()).sum();
                documents + all(&commit.messages) + all(&commit.events)
            }
        }
    }
}

fn encode_run(commit: RunCommit) -> Result<EncodedRun> {
    let transition = &*commit.transition;
    check_numbers(&commit)?;
    let task = |change: &TaskChange| match change {
        TaskChange::Add(task) => {
            let (task, body) = (Arc::new(Task::clone(task)), Arc::new(Body::of(task)?));
            Ok(Some(EncodedTask { task, body }))
        }
        TaskChange::Close(_) | TaskChange::Remove(_) => Ok(None),
    };
    let gate = |change: &GateChange| match change {
        GateChange::Arrive(arrival) => Body::of(arrival).map(Some),
        GateChange::Add { .. } | GateChange::Close { .. } => Ok(None),
    };
    Ok(EncodedRun {
        status: transition.header.status(),
        memo: transition.header.code.as_ref().map_or(0, |code| code.n),
        header: Body::of(&transition.header)?,
        activations: transition.activations.iter().map(Body::of).collect::<Result<_>>()?,
        emitted: transition.emitted.iter().map(|(_, emitted)| Body::of(emitted)).collect::<Result<_>>()?,
        values: transition.values.iter().map(|(_, value)| Body::of(value)).collect::<Result<_>>()?,
        reuse: transition.reuse.iter().map(Body::of).collect::<Result<_>>()?,
        tasks: transition.tasks.iter().map(task).collect::<Result<_>>()?,
        gates: transition.gates.iter().map(gate).collect::<Result<_>>()?,
        records: Body::of(&transition.records)?,
        messages: messages(commit.messages.iter().map(|message| &message.body))?,
        events: events(&commit.events)?,
        commit,
    })
}

fn encode_documents(commit: DocumentCommit) -> Result<EncodedDocuments> {
    let document = |body: &Option<serde_json::Value>| body.as_ref().map(Body::of).transpose();
    Ok(EncodedDocuments {
        documents: commit.documents.iter().map(|change| document(&change.body)).collect::<Result<_>>()?,
        messages: messages(commit.messages.iter().map(|message| &message.body))?,
        events: events(&commit.events)?,
        commit,
    })
}

fn messages<'a>(bodies: impl Iterator<Item = &'a MessageBody>) -> Result<Vec<Body>> {
    bodies.map(Body::of).collect()
}

fn events(events: &[NewEvent]) -> Result<Vec<Body>> {
    events.iter().map(|event| Body::of(&event.payload)).collect()
}

/// Row keys have room for [`MOST_NUMBERS`] numbers per run; a larger number would be the key of another run.
fn check_numbers(commit: &RunCommit) -> Result<()> {
    let transition = &*commit.transition;
    let fence = |change: &TaskChange| match change {
        TaskChange::Add(task) => task.fence.0,
        TaskChange::Close(fence) | TaskChange::Remove(fence) => fence.0,
    };
    let activations = transition.activations.iter().map(|activation| u64::from(activation.id.0));
    let values = transition.values.iter().map(|(id, _)| u64::from(id.0));
    let most = activations.chain(values).chain(transition.tasks.iter().map(fence)).max();
    match most {
        Some(most) if most >= MOST_NUMBERS => Err(StoreError::Unavailable(format!(
            "run {} is too large: it may have at most {MOST_NUMBERS} activations, values and tasks",
            transition.header.run
        ))),
        _ => Ok(()),
    }
}
