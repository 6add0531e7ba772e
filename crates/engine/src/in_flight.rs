//! Due items that were handed to the committer and are not decided yet. A loop hands in and goes on, so no item waits for
//! the slowest run among those that came with it.

use std::collections::BTreeSet;
use std::fmt::Debug;

use eddyline_machine::{Input, RunId};
use eddyline_store::{Due, DueBatch, Namespace, Taken};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::shares::Shares;

/// Batches of due items that one loop has under way at most, and that one namespace may have of them: those of others are
/// handed in beside them.
const BATCHES: usize = 20;
const BATCHES_A_NAMESPACE: usize = 5;

/// The items of one loop, each known by its run and `K`.
#[derive(Debug)]
pub(crate) struct InFlight<K> {
    known: BTreeSet<(RunId, K)>,
    shares: Shares,
    answers: FuturesUnordered<BoxFuture<'static, Answer<K>>>,
}

type Answer<K> = (Namespace, (RunId, K), Result<()>);

impl<K: Ord + Copy + Debug + Send + 'static> InFlight<K> {
    pub fn new(instance: &Instance) -> InFlight<K> {
        let shares = Shares::of(BATCHES_A_NAMESPACE * instance.config.due_batch);
        InFlight { known: BTreeSet::new(), shares, answers: FuturesUnordered::new() }
    }

    /// What is due, as far as there is room for it: waits until there is room for at least one item, and forgets those
    /// that are decided.
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

    /// Waits until the store may have more items of a namespace that was skipped.
    pub async fn until_more(&mut self, instance: &Instance) {
        while let Some(answer) = self.answers.next().await {
            if self.decided(answer, instance) {
                return;
            }
        }
        std::future::pending().await
    }

    /// Hands an item in, unless it is under way already: the store hands out again what took longer than its hold.
    pub async fn hand_in(
        &mut self,
        instance: &Instance,
        ns: Namespace,
        (run, key): (RunId, K),
        input: Input,
        taken: Taken,
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

    /// What failed is due again later. True if the store may have more items of a namespace that was skipped.
    fn decided(&mut self, (ns, item, decided): Answer<K>, instance: &Instance) -> bool {
        self.known.remove(&item);
        let more = self.shares.end(&ns, 1);
        match decided {
            Ok(()) | Err(EngineError::Stopped) => {}
            Err(error @ (EngineError::NotFound { .. } | EngineError::Trimmed(_) | EngineError::Quarantined(_))) => {
                tracing::debug!("due for a run that is gone or quarantined: {error}");
            }
            Err(error) => tracing::warn!(instance = instance.config.instance, "due again later: {error}"),
        }
        more
    }
}
