//! The threads of a store.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::shared::Shared;
use crate::error::{Result, StoreError};

pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|error| StoreError::Unavailable(format!("cannot start a thread: {error}")))
}

/// Starts a thread without which the store cannot work: if it panics, the store fails.
pub(super) fn spawn_essential(
    name: &str,
    shared: &Arc<Shared>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    let (shared, of) = (shared.clone(), name.to_owned());
    spawn(name, move || {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            shared.fail(&format!("its thread {of} panicked: {}", panic_message(&*panic)));
        }
    })
}

/// The message of a panic.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
