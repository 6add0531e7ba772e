//! The trait [`Store`], an in-memory reference ([`Memory`]), the embedded store on disk ([`Embedded`]) and a store on
//! PostgreSQL that several processes share ([`Postgres`]).
//!
//! A store persists transitions atomically and decides nothing about runs. Every backend must pass the suite in
//! [`conformance`].

mod claim;
mod clock;
mod commit;
mod conditions;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod copy;
mod document;
mod embedded;
mod error;
mod handling;
mod hints;
mod holds;
mod ids;
mod memory;
mod postgres;
mod presence;
mod query;
mod task_queues;
mod timer_columns;

use std::fmt::Debug;

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};

pub use claim::*;
pub use clock::{Clock, ManualClock, SystemClock};
pub use commit::*;
pub use document::*;
pub use embedded::{Embedded, EmbeddedSource, EmbeddedTarget, Hook, Options, Stats, StoreFailure};
pub use error::*;
pub use handling::Handling;
pub use hints::{Heard, Hints};
pub use holds::HOLD_MS;
pub use ids::{Map, Namespace};
pub use memory::Memory;
pub use memory::test_clock::Activity;
pub use postgres::{Migrated, Postgres, PostgresOptions, PostgresSource, PostgresTarget};
pub use presence::*;
pub use query::*;
pub use task_queues::{AGE_MS, UNWATCHED_MS};

/// A backend. Every method is atomic, and a write is durable before it returns.
#[async_trait]
pub trait Store: Debug + Send + Sync + 'static {
    /// The store's clock, the source of every time that it stores or compares. It never goes back.
    async fn now(&self) -> Result<Millis>;

    /// Whether commits and reads work, as far as the store knows. An error shows here no later than in the next of
    /// them.
    async fn health(&self) -> Result<()> {
        Ok(())
    }

    /// Until when retention must not delete anything, because the clock jumped: ages may have been computed from a
    /// wrong clock. Deletion on request is not affected.
    async fn deletion_waits(&self) -> Result<Option<Millis>> {
        Ok(None)
    }

    /// The whole run at one version, [`Found::Same`] if it is still at `since`, or, if the store can tell, what has
    /// changed since. A caller that passes `since` must have had the run at exactly that version from this store.
    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found>;

    /// The header of a run, trimmed or not.
    async fn summary(&self, run: RunId) -> Result<Option<Summary>>;

    /// Waits for its turn among the processes that change one run at the same time. Commits need no turn: they are
    /// checked as ever, but a process that keeps losing against others is sure to get through with one. None if the store
    /// has no turns, or none could be had in time.
    async fn turn(&self, _run: RunId) -> Option<Turn> {
        None
    }

    /// Payloads of a run. Missing ones are left out.
    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>>;

    /// A consistent snapshot of a run's tasks, timers and gates, and of the oldest messages to it (at most
    /// [`MAX_INBOX`] and [`MAX_INBOX_BYTES`]). Its cost grows with their number, so it must not be on a hot path.
    async fn pending(&self, run: RunId) -> Result<PendingWork>;

    /// Applies or refuses each command as a whole and independently of the others, then grants the claims, from tasks
    /// just added too. All of it becomes durable together, before this returns. A command that was applied before
    /// returns its first result; a claim with a known `request` gets the same tasks again, as far as they are still
    /// claimed.
    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written>;

    /// Extends leases of a worker from now on, each by the `lease_ms` of its claim. A lease that the worker does not
    /// hold is [`Extended::Lost`]. Without `worker` any holder is accepted.
    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>>;

    /// The state of leases; extends none. A store must find it by run and fence without reading runs, so that the cost
    /// depends only on the number of `leases`.
    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>>;

    /// Due items. Each is reserved for one caller until a commit consumes it or [`HOLD_MS`] have passed. Items of the
    /// namespaces in `skip` stay due, are not returned, and do not count for `next_in`.
    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch>;

    /// Records with numbers above `after`, in order and without gaps. A record never changes.
    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>>;

    /// The log records of one activation with numbers above `after`, in order. The cost depends on their number, not on
    /// the length of the timeline.
    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>>;

    /// Runs by creation, newest first. Paging to the end misses no run that existed when the first page was read.
    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>>;

    /// The number of runs that match.
    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64>;

    /// The number of runs that have not ended, by namespace, flow and status. The cost grows with their number.
    async fn going(&self) -> Result<Vec<GoingRuns>>;

    /// Gates by token, or open gates in the order of arrival; of one namespace or of all.
    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>>;

    /// Documents of a kind, ordered by id, then namespace; of one namespace or of all.
    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>>;

    /// A number that changes with each change of documents, before the commit returns. Only a store that belongs to
    /// this process alone has one.
    fn documents_changed(&self) -> Option<u64> {
        None
    }

    /// A number that changes with each change of documents: of this process before the commit returns, of others no
    /// later than with the next [`Store::check_in`]. None if the store does not know.
    fn documents_seen(&self) -> Option<u64> {
        self.documents_changed()
    }

    /// Whether [`Store::watch`] now tells what other processes change. None if no other process can use the store.
    fn hears_others(&self) -> Option<bool> {
        None
    }

    /// Says that a process serves, about once a second, and returns all that do. A process that disappears without
    /// [`Store::check_out`] may not have told the others of its last commits.
    async fn check_in(&self, id: InstanceId, info: &InstanceInfo, started_at: Millis) -> Result<Present> {
        let now = self.now().await?;
        let this = InstanceState { id, info: info.clone(), started_at, seen_at: now };
        Ok(Present { now, instances: vec![this], unwatched: false })
    }

    /// The process no longer serves.
    async fn check_out(&self, _id: InstanceId) -> Result<()> {
        Ok(())
    }

    /// Items after a position, oldest first. Never skips an item that commits late.
    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>>;

    /// A stored event by its id, with the number of gates it opened.
    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>>;

    /// Queues that have had tasks since the store was opened.
    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>>;

    /// The limits that are closed now because a worker asked to slow down (`defer`), by name. A change of the limit's
    /// document opens it again.
    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>>;

    /// The number of tasks that a worker holds.
    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize>;

    /// The number of tasks in a namespace that a worker offering everything could claim.
    async fn backlog(&self, ns: &Namespace) -> Result<usize>;

    /// Deletes permanently, a bounded part per call; returns true while there is more. Everything being deleted is
    /// hidden from the first call on. Runs that have not ended are never deleted.
    async fn trim(&self, what: &Trim) -> Result<bool>;

    /// Replaces the note of the runs that this process is deciding on. The note survives a crash of the process, though
    /// not a power cut, so the next process can tell which run may have caused the crash. It is written with every
    /// batch of decisions: it must take microseconds, and it never fails. A store that several processes share keeps
    /// one note per process; a store that cannot write it this cheaply notes only `Handling::apart`, or nothing.
    fn note_handling(&self, _handling: &Handling) {}

    /// The note that the previous process left behind. Empty if that process shut down cleanly.
    fn handled_before(&self) -> Handling {
        Handling::default()
    }

    /// Subscribes to hints, from now on.
    fn watch(&self) -> Hints;
}

/// A turn at a run ([`Store::turn`]); it ends when dropped.
pub struct Turn {
    _held: Box<dyn Send + Sync>,
}

impl Turn {
    /// Dropping `held` must end the turn without blocking.
    pub fn new(held: impl Send + Sync + 'static) -> Turn {
        Turn { _held: Box::new(held) }
    }
}

impl Debug for Turn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turn").finish_non_exhaustive()
    }
}

/// The results of [`Store::commit`], in the order of its commands and claims.
#[derive(Debug, Clone, Default)]
pub struct Written {
    pub commands: Vec<std::result::Result<Committed, Refused>>,
    pub claims: Vec<Claims>,
}
