//! The worker's loop on a thread of its own, with a runtime of its own: however many threads of the caller's handlers block,
//! the network and the clock are listened to, and heartbeats go.

use std::future::Future;
use std::io;

use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::error::Error;

/// Has the work done on another thread. When this is dropped, the work is, and its thread ends.
pub(crate) async fn work<Fut>(work: impl FnOnce() -> Fut + Send + 'static) -> Result<(), Error>
where
    Fut: Future<Output = Result<(), Error>>,
{
    let (ending, ended) = oneshot::channel();
    let (_here, gone) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("eddyline-worker".to_owned()).spawn(move || {
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
                _ = gone => None,
                result = work() => Some(result),
            }
        });
        // A name that is still being looked up is not waited for.
        runtime.shutdown_background();
        if let Some(result) = result {
            let _ = ending.send(result);
        }
    });
    let thread = thread.map_err(|error| no_thread(&error))?;
    match ended.await {
        Ok(result) => result,
        // Ended without a word: it panicked, and so does whoever waits for it.
        Err(_) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => Err(Error::Config("the worker ended without saying why".to_owned())),
        },
    }
}

fn no_thread(error: &io::Error) -> Error {
    Error::Config(format!("a worker needs a thread of its own: {error}"))
}
