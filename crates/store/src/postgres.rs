//! The store on PostgreSQL, which several processes share.
//!
//! The database is the only authority: a commit is one call of a function that takes the rows of a whole batch as
//! arrays (`sql/commit.sql`), claims and due items are rows that are locked in place, and every time that is stored or
//! compared is the database's. A process caches nothing that correctness depends on.

mod body;
mod claim_new;
mod claims;
mod clock;
mod columns;
mod commit;
mod connect;
mod copy;
mod database;
mod due;
mod encode;
mod hinted;
mod instances;
mod list;
mod listen;
mod load;
mod low_marks;
mod passfile;
mod pending;
mod pg_error;
mod proxy;
mod schema;
mod settings;
mod tls;
mod trim;
mod turns;
mod waves;

use std::sync::Arc;

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};

use crate::claim::{ClaimRequest, Extended, Lease, LeaseState};
use crate::clock::Clock;
use crate::commit::Command;
use crate::document::Document;
use crate::error::Result;
use crate::hints::Hints;
use crate::ids::Namespace;
use crate::presence::{InstanceId, InstanceInfo, Present};
use crate::query::*;
use crate::{Store, Turn, Written};
pub use copy::{PostgresSource, PostgresTarget};
use database::Database;

/// How to open a store.
#[derive(Debug, Clone)]
pub struct PostgresOptions {
    /// Create or update the tables. If this is false and they are missing or outdated, the store does not open.
    pub migrate: bool,
    /// Replaces the database's clock, for tests. No other process may use the store at the same time.
    pub clock: Option<Arc<dyn Clock>>,
}

impl Default for PostgresOptions {
    fn default() -> PostgresOptions {
        PostgresOptions { migrate: true, clock: None }
    }
}

/// The result of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Migrated {
    pub schema: String,
    /// Their version before; 0 if there were none.
    pub from: usize,
    pub to: usize,
}

/// A store in a PostgreSQL database.
#[derive(Debug)]
pub struct Postgres {
    database: Arc<Database>,
}

impl Postgres {
    /// Opens the store at a URL such as `postgres://user@host/database?schema=eddyline&pool_size=8`.
    pub async fn open(url: &str, options: PostgresOptions) -> Result<Postgres> {
        Ok(Postgres { database: Arc::new(Database::open(url, options).await?) })
    }

    /// Creates or updates the tables of a store.
    pub async fn migrate(url: &str) -> Result<Migrated> {
        Database::migrate(url, None).await
    }

    /// Creates the tables of an earlier version, for tests of later migrations.
    #[cfg(feature = "conformance")]
    #[doc(hidden)]
    pub async fn migrate_to(url: &str, version: usize) -> Result<Migrated> {
        Database::migrate(url, Some(version)).await
    }
}

#[async_trait]
impl Store for Postgres {
    async fn now(&self) -> Result<Millis> {
        self.database.now().await
    }

    async fn health(&self) -> Result<()> {
        self.database.health().await
    }

    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found> {
        load::load(&self.database, run, since).await
    }

    async fn summary(&self, run: RunId) -> Result<Option<Summary>> {
        load::summary_of(&self.database, run).await
    }

    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>> {
        load::values(&self.database, run, ids).await
    }

    async fn pending(&self, run: RunId) -> Result<PendingWork> {
        pending::pending(&self.database, run).await
    }

    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written> {
        commit::commit(&self.database, commands, claims).await
    }

    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>> {
        claims::extend(&self.database, ns, worker, leases).await
    }

    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>> {
        claims::leases(&self.database, ns, worker, leases).await
    }

    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch> {
        due::due(&self.database, what, skip, limit).await
    }

    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        load::records(&self.database, run, after, limit).await
    }

    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        load::logs(&self.database, run, activation, after, limit).await
    }

    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>> {
        list::runs(&self.database, ns, filter, page).await
    }

    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
        list::count_runs(&self.database, ns, filter).await
    }

    async fn going(&self) -> Result<Vec<GoingRuns>> {
        list::going(&self.database).await
    }

    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>> {
        list::gates(&self.database, ns, filter, page).await
    }

    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>> {
        list::documents(&self.database, ns, filter, limit).await
    }

    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
        list::feed(&self.database, ns, feed, page).await
    }

    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>> {
        list::event(&self.database, ns, id).await
    }

    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>> {
        claims::queues(&self.database, ns).await
    }

    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>> {
        claims::limits(&self.database, ns).await
    }

    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize> {
        claims::held_by(&self.database, ns, worker).await
    }

    async fn backlog(&self, ns: &Namespace) -> Result<usize> {
        claims::backlog(&self.database, ns).await
    }

    async fn trim(&self, what: &Trim) -> Result<bool> {
        trim::trim(&self.database, what).await
    }

    async fn deletion_waits(&self) -> Result<Option<Millis>> {
        instances::deletion_waits(&self.database).await
    }

    async fn turn(&self, run: RunId) -> Option<Turn> {
        turns::take(&self.database, run).await
    }

    fn documents_seen(&self) -> Option<u64> {
        Some(self.database.hub.documents_seen())
    }

    fn hears_others(&self) -> Option<bool> {
        Some(self.database.hub.is_listening())
    }

    async fn check_in(&self, id: InstanceId, info: &InstanceInfo, started_at: Millis) -> Result<Present> {
        instances::check_in(&self.database, id, info, started_at).await
    }

    async fn check_out(&self, id: InstanceId) -> Result<()> {
        instances::check_out(&self.database, id).await
    }

    fn watch(&self) -> Hints {
        self.database.hub.teller.listen()
    }
}
