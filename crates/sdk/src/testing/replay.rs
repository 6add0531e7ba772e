//! Runs a function against a recorded memo, without an engine.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{Failure, Op, Task, TaskKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::sync::mpsc;

use super::json;
use crate::code::driver::{MemoPage, MemoPages, Patience, Port, drive};
use crate::code::{CodeFlow, FlowError, RunCtx, erase};
use crate::error::Error;
use crate::worker::{HandlerMessage, TaskState};

/// What a replayed function came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Replayed {
    /// It has returned a result.
    Completed(Value),
    Failed(Failure),
    /// It asks for things that the memo does not have: the reports that it would send.
    Asks(Vec<Value>),
    /// It waits for pending entries of the memo, or for the body of a step.
    Waits,
}

/// Runs the function of a code flow from its start, with the entries of a memo as a server sends them
/// (`{name: {kind, n, status, output}}`), until it asks for something new.
pub async fn replay<F, Fut, In, Out, E>(flow: F, input: impl Serialize, memo: Map<String, Value>) -> Replayed
where
    F: Fn(RunCtx, In) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Out, E>> + Send + 'static,
    In: DeserializeOwned + Send + 'static,
    Out: Serialize + 'static,
    E: Into<FlowError> + 'static,
{
    let (voice, mut heard) = mpsc::channel(1);
    let (_driver, inbox) = mpsc::unbounded_channel();
    let port = Port { voice: voice.clone(), inbox, pages: Arc::new(NoPages) };
    let task = Arc::new(TaskState::new(task(json(input), memo), voice));
    let patience = Patience { hold: Duration::ZERO, cancel_grace: Duration::ZERO };
    let driving = tokio::spawn(drive(CodeFlow { run: erase(flow), retry: None }, task, port, patience));
    let replayed = loop {
        match heard.recv().await {
            Some(HandlerMessage::Frame { ops, .. }) => break read(ops),
            Some(HandlerMessage::Gone { .. }) | None => break Replayed::Waits,
            Some(_) => {}
        }
    };
    driving.abort();
    replayed
}

fn read(mut ops: Vec<Op>) -> Replayed {
    match ops.pop() {
        Some(Op::Complete { output, .. }) => Replayed::Completed(output),
        Some(Op::Fail { error, .. } | Op::Unwind { error: Some(error) }) => Replayed::Failed(error),
        Some(Op::Suspend | Op::Release) | None => Replayed::Waits,
        Some(last) => {
            ops.push(last);
            Replayed::Asks(ops.into_iter().map(json).collect())
        }
    }
}

struct NoPages;

#[async_trait]
impl MemoPages for NoPages {
    async fn page(&self, _: &str, _: u64) -> Result<MemoPage, Error> {
        Ok(MemoPage::default())
    }
}

fn task(input: Value, memo: Map<String, Value>) -> Task {
    let text = |text: &str| text.to_owned();
    Task {
        task_id: text("run.1"),
        token: text("token"),
        run_id: text("run"),
        flow: text("flow"),
        version: text("version"),
        step: text("@run"),
        activation: text("@run"),
        handler: text("flow"),
        attempt: 1,
        kind: TaskKind::Run,
        run_input: Value::Null,
        input,
        gate: Value::Null,
        key: text("run/@run"),
        intent: text("run"),
        lease_ms: 30_000,
        deadline: None,
        started_at: Some(text("2026-01-01T00:00:00.000Z")),
        attempts: None,
        memo: Some(memo),
        memo_next: None,
        unwind: None,
        traceparent: None,
        undo: false,
    }
}
