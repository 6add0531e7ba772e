//! The worker's loop on a thread of its own, with a runtime of its own: however many threads of the caller's handlers block,
//! the network and the clock are listened to, and heartbeats go.

use std::future::Future;
use std::io;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use super::link::Transport;
use super::shift::Shift;
use crate::error::Error;

/// Works until `stop`, as [`Shift::work`] does. When this is dropped, the thread lets go of everything and ends.
pub(crate) async fn work(
    shift: Shift,
    transport: Box<dyn Transport>,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let (stopping, told) = oneshot::channel();
    let (ending, ended) = oneshot::channel();
    let (_here, gone) = oneshot::channel::<()>();
    let loud = tracing::dispatcher::get_default(Clone::clone);
    let thread = start(move |runtime| {
        let _heard = tracing::dispatcher::set_default(&loud);
        let stop = async {
            if told.await.is_err() {
                // Nobody is left who could say so.
                std::future::pending().await
            }
        };
        runtime.block_on(async {
            tokio::select! {
                result = shift.work(transport, stop) => {
                    let _ = ending.send(result);
                }
                _ = gone => {}
            }
        });
    });
    let thread = thread.map_err(|error| Error::Config(format!("a worker needs a thread of its own: {error}")))?;
    tokio::pin!(stop, ended);
    let result = tokio::select! {
        result = &mut ended => result,
        () = &mut stop => {
            let _ = stopping.send(());
            ended.await
        }
    };
    match (result, thread) {
        (Ok(result), _) => result,
        // Ended without a word: it panicked, and so does whoever waits for it.
        (Err(_), thread) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => Err(Error::Config("the worker ended without saying why".to_owned())),
        },
    }
}

fn start(work: impl FnOnce(&Runtime) + Send + 'static) -> io::Result<std::thread::JoinHandle<()>> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("eddyline-worker".to_owned()).spawn(move || {
        work(&runtime);
        // A name that is still being looked up is not waited for.
        runtime.shutdown_background();
    })
}
