//! The shape of every loop: it works off what there is, then sleeps until there may be more, a hint comes or it is time
//! to stop. Tests wait for its rounds instead of sleeping.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::Change;
use tokio::sync::{Notify, watch};

use crate::error::Result;
use crate::shutdown::Shutdown;

/// After an error a loop waits this long.
const AFTER_ERROR_MS: Millis = 500;

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

pub(crate) async fn drive(mut chore: impl Chore, wake: Arc<Notify>, rounds: Rounds, mut shutdown: Shutdown) {
    while !shutdown.is_now() {
        let next = match chore.round().await {
            Ok(next) => next.unwrap_or(Millis::MAX).min(chore.at_latest_ms()),
            Err(error) => {
                metrics::counter!("eddyline_loop_errors_total", "loop" => chore_name(&chore)).increment(1);
                tracing::warn!(loop_ = chore_name(&chore), "will try again: {error}");
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

fn chore_name<C: Chore>(_: &C) -> &'static str {
    C::NAME
}
