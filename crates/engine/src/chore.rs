//! The shape of every loop: it works off what there is, then sleeps until there may be more, a hint comes or it is time
//! to stop. Tests wait for its rounds instead of sleeping.
//!
//! A loop that panics is made anew, a bounded number of times; then the engine has failed.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::Change;
use futures_util::FutureExt;
use tokio::sync::{Notify, watch};

use crate::committer::said;
use crate::error::Result;
use crate::health::Reports;
use crate::shutdown::Shutdown;

/// After an error a loop waits this long.
const AFTER_ERROR_MS: Millis = 500;
/// So many rounds in a row may panic before the engine gives up. What is due stays due, so a loop that panics on one item
/// still gets to the others as long as some rounds end well.
const MAX_PANICS: u32 = 5;

/// One loop of the engine.
pub(crate) trait Chore: Send {
    const NAME: &'static str;

    /// Works off some of what there is; how long until there is more, as far as it is known. Zero: there is more.
    fn round(&mut self) -> impl Future<Output = Result<Option<Millis>>> + Send;

    /// Whether a change may have made work for it.
    fn wakes(change: &Change) -> bool;

    /// It looks again after this long at the latest.
    fn at_latest_ms(&self) -> Millis;

    /// What goes on while it waits for its next round; when it is done, there is a round. It may be dropped and called
    /// again at any time.
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
        // A chore whose round panicked is thrown away, so nothing that was left half done is used again.
        let next = match AssertUnwindSafe(chore.round()).catch_unwind().await {
            Ok(Ok(next)) => {
                panics = 0;
                next.unwrap_or(Millis::MAX).min(chore.at_latest_ms())
            }
            Ok(Err(error)) => {
                metrics::counter!("eddyline_loop_errors_total", "loop" => C::NAME).increment(1);
                tracing::warn!(loop_ = C::NAME, "will try again: {error}");
                AFTER_ERROR_MS
            }
            Err(panic) => {
                panics += 1;
                metrics::counter!("eddyline_loop_panics_total", "loop" => C::NAME).increment(1);
                let said = said(&*panic);
                tracing::error!(loop_ = C::NAME, panics, "the loop panicked and is started again: {said}");
                if panics >= MAX_PANICS {
                    return health.failed(&format!("the loop {} panicked {panics} times in a row: {said}", C::NAME));
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
