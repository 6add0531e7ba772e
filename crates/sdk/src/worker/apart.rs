//! Where the worker's loop runs: among the handlers, where a task that comes is begun and its result sent without waking
//! another thread; and from when their runtime is found not to answer, because handlers block its threads, on a thread
//! of its own, so that heartbeats go however many handlers block.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::task::AtomicWaker;
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinError, JoinHandle};

use super::shift::Shift;
use super::signals::Signals;
use super::until_signalled;
use crate::error::Error;

/// How often the loop is asked for a sign of life, and how long it may take to give it, where heartbeats are far apart.
const LOOK: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_millis(250);

/// How far apart heartbeats are, once that is known: by this the watch over them goes.
#[derive(Debug, Clone)]
pub(crate) struct Pace(Arc<watch::Sender<Option<Duration>>>);

impl Default for Pace {
    fn default() -> Pace {
        Pace(Arc::new(watch::Sender::new(None)))
    }
}

impl Pace {
    pub fn set(&self, heartbeat: Duration) {
        self.0.send_replace(Some(heartbeat));
    }

    /// A part of the time between two heartbeats, unless that is longer than is good for anything else.
    fn part(&self, parts: u32, longest: Duration) -> Duration {
        self.0.borrow().map_or(longest, |heartbeat| (heartbeat / parts).min(longest))
    }
}

type Work = BoxFuture<'static, Result<(), Error>>;

/// The loop where the handlers are, for as long as it is there.
#[derive(Default)]
struct Here {
    /// Taken out when it is to go on elsewhere, or nowhere.
    work: Mutex<Option<Work>>,
    /// It has run since it was last asked to.
    ran: AtomicBool,
    waker: AtomicWaker,
}

impl Here {
    /// Runs it. Nothing if it was taken out.
    async fn run(&self) -> Option<Result<(), Error>> {
        std::future::poll_fn(|cx| {
            self.waker.register(cx.waker());
            self.ran.store(true, Ordering::Release);
            let mut slot = self.work();
            let Some(work) = slot.as_mut() else { return Poll::Ready(None) };
            let polled = work.as_mut().poll(cx);
            if polled.is_ready() {
                *slot = None;
            }
            polled.map(Some)
        })
        .await
    }

    /// Comes back when the loop does not run although it is asked to.
    async fn until_stuck(&self, pace: &Pace) {
        let mut changes = pace.0.subscribe();
        loop {
            let look = pace.part(4, LOOK);
            tokio::select! {
                () = tokio::time::sleep(look) => {}
                // Not in a second, if that is a whole lease.
                Ok(()) = changes.changed() => continue,
            }
            self.ran.store(false, Ordering::Release);
            self.waker.wake();
            tokio::time::sleep(pace.part(8, ANSWER)).await;
            if !self.ran.load(Ordering::Acquire) {
                return;
            }
        }
    }

    /// Calls it off between two things that it does, never in the midst of one. False if it is over: it ended, or panicked.
    fn take(&self) -> bool {
        if self.work.is_poisoned() {
            return false;
        }
        let work = self.work().take();
        self.waker.wake();
        work.is_some()
    }

    fn work(&self) -> MutexGuard<'_, Option<Work>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets go of the loop, wherever it is.
struct LetGo {
    here: Arc<Here>,
    running: JoinHandle<Option<Result<(), Error>>>,
}

impl Drop for LetGo {
    fn drop(&mut self) {
        // At once, unless it is doing something just now: then with the last who knows of it. Whatever it does may wait for
        // whoever is dropping this.
        let work = self.here.work.try_lock().ok().and_then(|mut slot| slot.take());
        drop(work);
        self.running.abort();
    }
}

/// Has the shift work. When this is dropped the shift is, and its thread ends. With `stop`, it is told by the signals that
/// end a process, which are heard on the thread.
pub(crate) async fn work(shift: Shift, stop: Option<oneshot::Sender<()>>) -> Result<(), Error> {
    let (pace, shift) = (shift.pace.clone(), Arc::new(tokio::sync::Mutex::new(shift)));
    let here = Arc::new(Here::default());
    let working = shift.clone().lock_owned();
    *here.work() = Some(Box::pin(async move { working.await.work().await }));

    let (_alive, gone) = oneshot::channel::<()>();
    let (listens, listening) = oneshot::channel();
    let (ending, ended) = oneshot::channel();
    let watched = here.clone();
    let watch = async move {
        watched.until_stuck(&pace).await;
        if !watched.take() {
            // It has ended, and whoever waits for that has not heard yet.
            std::future::pending::<()>().await;
        }
        tracing::info!("handlers block the threads of their runtime: the worker goes on on a thread of its own");
        let mut shift = shift.lock_owned().await;
        shift.moved().await;
        shift.work().await
    };
    let thread = on_a_thread(ending, gone, async move {
        let signals = stop.map(|stop| Signals::new().map(|signals| (signals, stop))).transpose()?;
        let _ = listens.send(());
        match signals {
            Some((signals, stop)) => until_signalled(signals, watch, stop).await,
            None => watch.await,
        }
    });
    let thread = thread.map_err(|error| no_thread(&error))?;
    // A signal that comes once something is at work drains it. Without an answer the thread has ended, and says why below.
    let _ = listening.await;

    let runs = here.clone();
    let mut going = LetGo { here, running: tokio::spawn(async move { runs.run().await }) };
    let ended = async {
        match ended.await {
            Ok(result) => result,
            // Ended without a word: it panicked, and so does whoever waits for it.
            Err(_) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => Err(Error::Config("the worker ended without saying why".to_owned())),
            },
        }
    };
    tokio::pin!(ended);
    tokio::select! {
        result = &mut ended => result,
        result = &mut going.running => match result {
            Ok(Some(result)) => result,
            Ok(None) => ended.await,
            Err(error) => Err(gone_wrong(error)),
        },
    }
}

/// A thread with a runtime of its own, which ends with the work, or when `gone`.
fn on_a_thread(
    ending: oneshot::Sender<Result<(), Error>>,
    gone: oneshot::Receiver<()>,
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
                _ = gone => None,
                result = work => Some(result),
            }
        });
        // A name that is still being looked up is not waited for.
        runtime.shutdown_background();
        if let Some(result) = result {
            let _ = ending.send(result);
        }
    })
}

fn gone_wrong(error: JoinError) -> Error {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_) => Error::Config("the runtime of the handlers has ended".to_owned()),
    }
}

fn no_thread(error: &io::Error) -> Error {
    Error::Config(format!("a worker needs a thread of its own: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(300);

    fn at_work() -> Arc<Here> {
        let here = Arc::new(Here::default());
        *here.work() = Some(Box::pin(std::future::pending()));
        here
    }

    #[tokio::test(start_paused = true)]
    async fn what_runs_when_it_is_asked_to_is_not_stuck_and_what_nobody_runs_is() {
        for heartbeat in [None, Some(Duration::from_millis(100)), Some(LONG)] {
            let pace = Pace::default();
            heartbeat.into_iter().for_each(|heartbeat| pace.set(heartbeat));
            let here = at_work();
            let runs = here.clone();
            let running = tokio::spawn(async move { runs.run().await });
            tokio::time::timeout(LONG, here.until_stuck(&pace)).await.unwrap_err();
            running.abort();
            let _ = running.await;
            let since = tokio::time::Instant::now();
            tokio::time::timeout(LONG, here.until_stuck(&pace)).await.unwrap();
            let soon = heartbeat.unwrap_or(LONG).min(LOOK + ANSWER);
            assert!(since.elapsed() <= soon, "{:?} for heartbeats {heartbeat:?} apart", since.elapsed());
        }
    }

    #[tokio::test]
    async fn what_is_taken_ends_where_it_was() {
        let here = at_work();
        let runs = here.clone();
        let running = tokio::spawn(async move { runs.run().await });
        tokio::task::yield_now().await;
        assert!(here.take());
        assert!(running.await.unwrap().is_none());
        assert!(!here.take(), "once");
    }

    #[tokio::test]
    async fn what_has_ended_or_panicked_goes_on_nowhere() {
        let here = Here::default();
        *here.work() = Some(Box::pin(async { Ok(()) }));
        here.run().await.unwrap().unwrap();
        assert!(!here.take());
        let here = Arc::new(Here::default());
        *here.work() = Some(Box::pin(async { std::panic::resume_unwind(Box::new(())) }));
        let runs = here.clone();
        assert!(tokio::spawn(async move { runs.run().await }).await.unwrap_err().is_panic());
        assert!(!here.take());
    }
}
