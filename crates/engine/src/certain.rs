//! Commits that are repeated until their outcome is known when the connection to the store breaks.

use std::time::{Duration, Instant};

use eddyline_store::{ClaimRequest, Command, Store, StoreError, Written};

/// How long the same commands are submitted again while their outcome is unknown, and the pause in between.
const UNKNOWN_FOR: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Commits commands and claims. If the outcome is unknown, the same ones are submitted again: their ids tell the store
/// whether they were written. Returns [`StoreError::Unknown`] only if the store does not respond for long.
pub(crate) async fn commit(
    store: &dyn Store,
    commands: impl Fn() -> Vec<Command>,
    claims: impl Fn() -> Vec<ClaimRequest>,
) -> Result<Written, StoreError> {
    let (since, mut unknown) = (Instant::now(), false);
    loop {
        let result = store.commit(commands(), claims()).await;
        unknown |= matches!(result, Err(StoreError::Unknown));
        // `Unavailable` does not tell whether the first attempt was written.
        let open = unknown && matches!(result, Err(StoreError::Unknown | StoreError::Unavailable(_)));
        if !open {
            return result;
        }
        if since.elapsed() > UNKNOWN_FOR {
            return Err(StoreError::Unknown);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Commits one command.
pub(crate) async fn commit_one(store: &dyn Store, command: Command) -> Result<Written, StoreError> {
    commit(store, || vec![command.clone()], Vec::new).await
}
