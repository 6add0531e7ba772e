//! The worker's loop runs on a thread of its own: heartbeats are sent even while handlers block every thread of their
//! runtime.

use std::future::Future;
use std::io;

use tokio::runtime::Builder;
use tokio::sync::oneshot;

use super::shift::Shift;
use super::signals::Signals;
use super::until_signalled;
use crate::error::Error;

/// Runs the shift until it ends. If the future is dropped, so is the shift, and its thread ends. With `stop`, the signals
/// that end a process (SIGTERM, SIGINT) drain the shift.
pub(crate) async fn work(mut shift: Shift, stop: Option<oneshot::Sender<()>>) -> Result<(), Error> {
    let (_alive, dropped) = oneshot::channel::<()>();
    let (ending, ended) = oneshot::channel();
    let thread = spawn(ending, dropped, async move {
        match stop {
            Some(stop) => until_signalled(Signals::new()?, shift.work(), stop).await,
            None => shift.work().await,
        }
    });
    let thread = thread.map_err(|error| no_thread(&error))?;
    match ended.await {
        Ok(result) => result,
        // The thread panicked: the panic is the caller's too.
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => Err(Error::Config("the worker's thread ended without a result".to_owned())),
        },
    }
}

/// A thread with a runtime of its own, which ends with the work, or when the sender of `dropped` is gone.
fn spawn(
    ending: oneshot::Sender<Result<(), Error>>,
    dropped: oneshot::Receiver<()>,
    work: impl Future<Output = Result<(), Error>> + Send + 'static,
) -> io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("eddyline-worker".to_owned()).spawn(move || {
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = ending.send(Err(no_thread(&error)));
                return;
            }
        };
        let result = runtime.block_on(async {
            tokio::select! {
                biased;
                _ = dropped => None,
                result = work => Some(result),
            }
        });
        // Do not wait for a DNS lookup that is still running.
        runtime.shutdown_background();
        if let Some(result) = result {
            let _ = ending.send(result);
        }
    })
}

fn no_thread(error: &io::Error) -> Error {
    Error::Config(format!("the worker's thread cannot be started: {error}"))
}
