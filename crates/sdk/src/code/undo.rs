//! Undoes completed steps.

use futures_util::future::BoxFuture;
use serde_json::Value;

use super::core::Core;
use super::ctx::RunCtx;
use super::error::CtxError;
use super::memo::EntryName;
use super::name::{UNDO, UNDONE};
use super::step::{Bare, Step};
use crate::worker::StepError;

/// Undoes the completed steps that have an `undo`, one at a time, the latest first. Returns what failed for good. With
/// `up_to_now`, only steps up to the last delivery: that is the same set in every execution.
pub(crate) async fn undo_all(ctx: &RunCtx, up_to_now: bool) -> Vec<CtxError> {
    let core = ctx.core();
    let steps = core.state().to_undo(up_to_now);
    let prefix = if up_to_now { UNDONE } else { UNDO };
    let mut failed = Vec::new();
    for (name, output) in steps {
        let is_undone = core.state().is_undone(&name);
        let body = Bare(|| -> BoxFuture<'static, Result<(), StepError>> {
            match is_undone {
                // The server is told of each step that it is undone, also of those that the function undid itself.
                true => Box::pin(std::future::ready(Ok(()))),
                false => undoing(core, &name, output.clone()),
            }
        });
        let undone: Result<(), CtxError> = Step::undoing(core.clone(), format!("{prefix}{name}"), body).await;
        match undone {
            Ok(()) => core.state().mark_undone(name),
            Err(error) => failed.push(error),
        }
    }
    failed
}

/// Calls the `undo` of a step. It is not called under the lock, since it may use the context.
fn undoing(core: &Core, name: &EntryName, output: Value) -> BoxFuture<'static, Result<(), StepError>> {
    let Some(mut undo) = core.state().take_undo(name) else { return Box::pin(std::future::ready(Ok(()))) };
    let undoing = undo(output);
    core.state().put_undo(name.clone(), undo);
    undoing
}
