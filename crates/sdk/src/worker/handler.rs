//! Type-erased handlers.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use eddyline_protocol::{Failure, Op};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ctx::{BAD_REPORT, StepCtx, bad_input, json};
use super::failure::StepError;
use super::outbox::{MAX_REPORT_BYTES, weigh_op};
use super::task::{HandlerMessage, TaskState};

/// The kind of failure when a handler panics.
pub(crate) const PANIC: &str = "Panic";

pub(crate) type Handler = Arc<dyn Fn(StepCtx) -> BoxFuture<'static, Result<Value, StepError>> + Send + Sync>;

pub(crate) fn erase<F, Fut, In, Out, E>(handler: F) -> Handler
where
    F: Fn(StepCtx, In) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Out, E>> + Send + 'static,
    In: DeserializeOwned + Send + 'static,
    Out: Serialize + 'static,
    E: Into<StepError> + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |ctx: StepCtx| {
        let handler = handler.clone();
        async move {
            let input = In::deserialize(&ctx.task().input).map_err(|error| bad_input("the input", &error))?;
            let output = handler(ctx, input).await.map_err(Into::into)?;
            json("the output", output)
        }
        .boxed()
    })
}

/// Runs the handler and reports its result.
pub(crate) async fn carry_out(handler: Handler, shared: Arc<TaskState>) {
    let ctx = StepCtx::new(shared.clone());
    // Called inside the future, because a handler may also panic before its first await.
    let work = AssertUnwindSafe(async move { handler(ctx).await });
    let op = match work.catch_unwind().await {
        Ok(Ok(output)) => Op::Complete { output, emits: Vec::new(), logs: Vec::new() },
        Ok(Err(error)) => error.into_op(),
        Err(panic) => StepError::failed(Failure::new(PANIC, panic_message(&*panic)), true).into_op(),
    };
    let (before, mut op) = shared.conclude(op);
    if weigh_op(&op) > MAX_REPORT_BYTES {
        let message = format!("the output and its events have more than {MAX_REPORT_BYTES} bytes");
        op = StepError::permanent(message).kind(BAD_REPORT).into_op();
    }
    // If nobody receives it, the worker has dropped its tasks.
    let _ = shared.voice.send(HandlerMessage::Ended { task: shared.id.clone(), before, op }).await;
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "the handler panicked".to_owned())
}
