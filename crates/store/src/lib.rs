//! Where runs are kept: one trait, an in-memory reference ([`Memory`]) and the embedded store on disk ([`Embedded`]).
//!
//! A store persists what was decided, atomically, and decides nothing about runs. What must hold of every backend is the
//! suite in [`conformance`].

mod claim;
mod clock;
mod commit;
#[cfg(feature = "conformance")]
pub mod conformance;
mod document;
mod embedded;
mod error;
mod handling;
mod hints;
mod holds;
mod ids;
mod lines;
mod memory;
mod query;

use std::fmt::Debug;

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};

pub use claim::*;
pub use clock::{Clock, ManualClock, SystemClock};
pub use commit::*;
pub use document::*;
pub use embedded::{Embedded, Hook, Options, Stats, StoreFailure};
pub use error::*;
pub use handling::Handling;
pub use hints::{Heard, Hints};
pub use holds::HOLD_MS;
pub use ids::{Map, Namespace};
pub use lines::{AGE_MS, UNWATCHED_MS};
pub use memory::Memory;
pub use query::*;

/// What a backend can do. Every method is atomic, and what it has answered is durable.
#[async_trait]
pub trait Store: Debug + Send + Sync + 'static {
    /// The store's clock, from which every time that it stores or compares is taken. It never goes back.
    async fn now(&self) -> Result<Millis>;

    /// Whether commits and reads can be made, as far as the store can tell: at the latest when the next one would fail.
    async fn health(&self) -> Result<()> {
        Ok(())
    }

    /// Until when nothing may be deleted for its age, because time has jumped: the clock that it was taken from may have
    /// been wrong. What somebody asks to be deleted is deleted.
    async fn deletion_waits(&self) -> Result<Option<Millis>> {
        Ok(None)
    }

    /// The run at one version, all of it; or that it is still at `since`.
    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found>;

    /// The header of a run, trimmed or not.
    async fn summary(&self, run: RunId) -> Result<Option<Summary>>;

    /// Payloads of a run. Those that are not there are left out.
    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>>;

    /// What hangs on a run, at one moment: all its tasks, timers and gates, and of the messages to it the oldest
    /// [`MAX_INBOX`], or [`MAX_INBOX_BYTES`]. It costs as much as there is, so nothing that happens often may ask for it.
    async fn beside(&self, run: RunId) -> Result<Beside>;

    /// Carries out each command as a whole or refuses it, without a bearing on the others, then gives out tasks, among
    /// them those just added. All of it is durable together, before it is answered. A command that was carried out
    /// before is answered so, and a claim with a known `request` gets what it got, as far as that is still held.
    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written>;

    /// Leases that the worker of that namespace has run from now on, each for as long as it was claimed for; those it has
    /// not are lost. Without a worker it does not matter who has them.
    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>>;

    /// How it stands with leases, none of which is extended by it. It costs what the leases cost that are asked for: a store
    /// keeps what is told here where it finds it by run and fence, and reads no run for it.
    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>>;

    /// What is due, each item handed out to one caller until it is used up by a commit or [`HOLD_MS`] have passed. Items
    /// of the namespaces in `skip` stay due and are handed out to nobody, and `next_in` takes no account of them.
    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch>;

    /// Records with numbers above `after`, in order and without gaps; each the same for every reader, for ever.
    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>>;

    /// The log records of one activation with numbers above `after`, in order. What it costs depends on how many there are
    /// of them, not on the length of the timeline.
    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>>;

    /// Runs, newest first, in the order of creation. Following a page to its end misses no run that existed at its start.
    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>>;

    /// How many runs there are.
    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64>;

    /// How many runs go on, by namespace, flow and status. It costs as much as there are: ask for it seldom.
    async fn going(&self) -> Result<Vec<GoingRuns>>;

    /// Gates by token, or those that are open, in the order in which they were arrived at; of one namespace or of all.
    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>>;

    /// Documents of a kind in the order of their ids, then of their namespaces; of one namespace or of all.
    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>>;

    /// A number that is another one after each change of documents, before that is answered. Only a store that nobody but
    /// this process changes knows it.
    fn documents_changed(&self) -> Option<u64> {
        None
    }

    /// What came after a position, oldest first, never skipping what commits late.
    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>>;

    /// An event that is kept, by its id, and what became of it.
    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>>;

    /// Queues that have or had tasks since the store was opened.
    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>>;

    /// The limits of a namespace that workers asked to slow down and that nothing passes now, by name. A change of the
    /// limit's document lifts it.
    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>>;

    /// How many tasks a worker has.
    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize>;

    /// How many tasks of a namespace could be claimed by a worker that takes everything.
    async fn backlog(&self, ns: &Namespace) -> Result<usize>;

    /// Deletes for good, a bounded part at a time; true while there is more to delete. What is going is hidden from the
    /// first call on. A run that has not ended is left alone.
    async fn trim(&self, what: &Trim) -> Result<bool>;

    /// Notes which runs this process is deciding on, in place of what it noted before. The note outlives the process,
    /// though not a power cut, so that the next one learns what this one may have died of. It is written with every batch
    /// of decisions: it must take microseconds, and it never fails. A store that several processes share keeps a note for
    /// each of them; one that cannot keep it so cheaply notes only what is decided apart, or nothing.
    fn note_handling(&self, _handling: &Handling) {}

    /// What the process before this one had noted when it ended. Empty, if it ended in peace.
    fn handled_before(&self) -> Handling {
        Handling::default()
    }

    /// Hints from now on.
    fn watch(&self) -> Hints;
}

/// What came of [`Store::commit`], in the order of the commands and of the claims.
#[derive(Debug, Clone, Default)]
pub struct Written {
    pub commands: Vec<std::result::Result<Committed, Refused>>,
    pub claims: Vec<Claims>,
}
