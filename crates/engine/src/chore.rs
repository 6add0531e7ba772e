//! The shape of every loop: it processes what is due, then sleeps until more may be due, a hint arrives or the engine
//! stops. Tests wait for its rounds instead of sleeping.
//!
//! A loop that panics is recreated; after a bounded number of panics in a row the engine fails.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::Change;
use futures_util::FutureExt;
use tokio::sync::{Notify, watch};

use crate::committer::panic_message;
use crate::error::Result;
use crate::health::Reports;
use crate::shutdown::Shutdown;

/// How long a loop waits after an error.
const AFTER_ERROR_MS: Millis = 500;
/// After this many panics in a row the engine fails. Due items stay due, so a loop that panics on one item still gets
/// to the others as long as some rounds succeed.
const MAX_PANICS: u32 = 5;

/// One loop of the engine.
pub(crate) trait Chore: Send {
    const NAME: &'static str;

    /// Processes some of what is due. Returns the time until more is due, if known; zero if more is due now.
    fn round(&mut self) -> impl Future<Output = Result<Option<Millis>>> + Send;

    /// Whether a change may create work for this loop.
    fn wakes(change: &Change) -> bool;

    /// The longest time between two rounds.
    fn at_latest_ms(&self) -> Millis;

    /// Runs between rounds; when it completes, the next round begins. May be dropped and called again at any time.
    fn work_between_rounds(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }
}

/// Counts the rounds of a loop.
pub(crate) type Rounds = watch::Sender<u64>;

pub(crate) async fn drive<C: Chore>(
    make: impl Fn() -> C,
    wake: Arc<Notify>,
    rounds: Rounds,
    mut shutdown: Shutdown,
    health: Reports,
) {
    let (mut chore, mut panics) = (make(), 0);
    while !shutdown.is_now() {
        // Unwind safe: a chore whose round panicked is dropped and recreated.
        let next = match AssertUnwindSafe(chore.round()).catch_unwind().await {
            Ok(Ok(next)) => {
                panics = 0;
                next.unwrap_or(Millis::MAX).min(chore.at_latest_ms())
            }
            Ok(Err(error)) => {
                metrics::counter!("eddyline_loop_errors_total", "loop" => C::NAME).increment(1);
                tracing::warn!(loop_ = C::NAME, "the round failed and will be retried: {error}");
                AFTER_ERROR_MS
            }
            Err(panic) => {
                panics += 1;
                metrics::counter!("eddyline_loop_panics_total", "loop" => C::NAME).increment(1);
                let message = panic_message(&*panic);
                tracing::error!(loop_ = C::NAME, panics, "the loop panicked and will be restarted: {message}");
                if panics >= MAX_PANICS {
                    return health.failed(&format!("the loop {} panicked {panics} times in a row: {message}", C::NAME));
                }
                chore = make();
                AFTER_ERROR_MS
            }
        };
        rounds.send_modify(|rounds| *rounds += 1);
        if next == 0 {
            tokio::task::yield_now().await;
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(next as u64)) => {}
            () = wake.notified() => {}
            () = chore.work_between_rounds() => {}
            () = shutdown.wait() => {}
        }
    }
}
