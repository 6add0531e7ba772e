//! Due items that a loop has submitted to the committer and that are not decided yet. The loop does not wait for them,
//! so no item waits for the slowest run of its batch.

use std::collections::BTreeSet;
use std::fmt::Debug;

use eddyline_machine::{Input, RunId};
use eddyline_store::{Consumed, Due, DueBatch, Namespace};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::shares::Shares;

/// How many batches of due items one loop has in flight at most, and how many of them one namespace may use up, so that
/// others still get through.
const BATCHES: usize = 20;
const BATCHES_A_NAMESPACE: usize = 5;

/// The items of one loop, each identified by its run and `K`.
#[derive(Debug)]
pub(crate) struct InFlight<K> {
    known: BTreeSet<(RunId, K)>,
    shares: Shares,
    answers: FuturesUnordered<BoxFuture<'static, Finished<K>>>,
}

type Finished<K> = (Namespace, (RunId, K), Result<()>);

impl<K: Ord + Copy + Debug + Send + 'static> InFlight<K> {
    pub fn new(instance: &Instance) -> InFlight<K> {
        let shares = Shares::of(BATCHES_A_NAMESPACE * instance.config.due_batch);
        InFlight { known: BTreeSet::new(), shares, answers: FuturesUnordered::new() }
    }

    /// Due items, as many as there is room for. Removes decided items, and waits until there is room for at least one.
    pub async fn due(&mut self, instance: &Instance, what: Due) -> Result<DueBatch> {
        let room = self.room(instance).await;
        Ok(instance.store.due(what, self.shares.skip(), room).await?)
    }

    async fn room(&mut self, instance: &Instance) -> usize {
        while let Some(Some(answer)) = self.answers.next().now_or_never() {
            self.decided(answer, instance);
        }
        let most = BATCHES * instance.config.due_batch.max(1);
        if self.known.len() >= most
            && let Some(answer) = self.answers.next().await
        {
            self.decided(answer, instance);
        }
        instance.config.due_batch.max(1).min(most - self.known.len())
    }

    /// Returns when the store may have more items of a skipped namespace.
    pub async fn until_more(&mut self, instance: &Instance) {
        while let Some(answer) = self.answers.next().await {
            if self.decided(answer, instance) {
                return;
            }
        }
        std::future::pending().await
    }

    /// Submits an item unless it is in flight already: the store returns an item again when its hold expires.
    pub async fn hand_in(
        &mut self,
        instance: &Instance,
        ns: Namespace,
        (run, key): (RunId, K),
        input: Input,
        taken: Consumed,
    ) -> Result<()> {
        if !self.known.insert((run, key)) {
            return Ok(());
        }
        match instance.committing.hand_in(run, vec![input], Some(taken), None).await {
            Ok(answer) => {
                let decided = async move { answer.await.unwrap_or(Err(EngineError::Stopped)).map(drop) };
                self.shares.begin(&ns, 1);
                self.answers.push(decided.map(move |decided| (ns, (run, key), decided)).boxed());
                Ok(())
            }
            Err(error) => {
                self.known.remove(&(run, key));
                Err(error)
            }
        }
    }

    /// Removes an item; a failed one becomes due again later. True if the store may have more items of a skipped
    /// namespace.
    fn decided(&mut self, (ns, item, decided): Finished<K>, instance: &Instance) -> bool {
        self.known.remove(&item);
        let more = self.shares.end(&ns, 1);
        match decided {
            Ok(()) | Err(EngineError::Stopped) => {}
            Err(error @ (EngineError::NotFound { .. } | EngineError::Trimmed(_) | EngineError::Quarantined(_))) => {
                tracing::debug!("skipped a due item of a deleted or quarantined run: {error}");
            }
            Err(error) => {
                tracing::warn!(instance = instance.config.instance, "a due item failed and will be retried: {error}");
            }
        }
        more
    }
}
