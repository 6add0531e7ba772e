//! Turns at a run that several processes change: the advisory lock of a transaction that does nothing else.
//!
//! The lock only makes processes wait for each other; every commit is still checked against the run's version. So no
//! harm is done if the database ends a transaction that is held too long, for example by a process that hangs.

use std::sync::Arc;

use eddyline_machine::RunId;
use tokio::sync::OwnedSemaphorePermit;

use super::connect::Object;
use super::database::Database;
use crate::Turn;

/// How long a process waits for its turn, and how long it may hold it. Many commits fit into either.
const WAIT_MS: u32 = 1_000;
const MOST_MS: u32 = 2_000;

struct Held {
    client: Option<Object>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let (Some(client), Ok(runtime)) = (self.client.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(end(client, "COMMIT"));
        }
    }
}

pub(super) async fn take(database: &Arc<Database>, run: RunId) -> Option<Turn> {
    // Commits and reads need connections too.
    let permit = database.turns.clone().try_acquire_owned().ok()?;
    let client = database.client().await.ok()?;
    let begin = format!(
        "BEGIN; SET LOCAL lock_timeout = {WAIT_MS}; SET LOCAL idle_in_transaction_session_timeout = {MOST_MS}; \
         SELECT pg_advisory_xact_lock(hashtextextended('{}.{run}', 13))",
        database.schema()
    );
    let mut held = Held { client: Some(client), _permit: permit };
    let locked = match &held.client {
        Some(client) => client.batch_execute(&begin).await,
        None => return None,
    };
    if locked.is_err() {
        if let Some(client) = held.client.take() {
            end(client, "ROLLBACK").await;
        }
        return None;
    }
    Some(Turn::new(held))
}

/// Ends the transaction, or closes the connection if it can't be ended.
async fn end(client: Object, how: &str) {
    if client.batch_execute(how).await.is_err() {
        drop(Object::take(client));
    }
}
