//! Loads runs and their values from the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use eddyline_machine::{Data, Run, RunId, ValueId, ValueRef, Version};
use eddyline_store::{Found, Loaded, Namespace, Store, StoreError, Turn};
use tokio::task::spawn_blocking;

use super::{Committer, Ticket};
use crate::error::{EngineError, Result};
use crate::flows::Flows;
use crate::run_cache::CachedRun;

/// A run with more activations is indexed on another thread: indexing takes about a microsecond per activation.
const INDEXED_INLINE: usize = 500;

/// The longest delay after the second conflict in a row, if the store has no turns. It doubles with each further one, up
/// to a limit.
const FIRST_BACK_OFF_MS: u64 = 4;
const MAX_BACK_OFF_MS: u64 = 64;
/// For how long after a conflict that took a turn every commit of the run takes one.
const CONTENDED: Duration = Duration::from_millis(100);
/// The most contended runs that are remembered.
const MAX_CONTENDED: usize = 1_000;

/// What to load of a run.
#[derive(Debug)]
pub(super) enum Wanted {
    Whole,
    IfChanged(Version),
    Values(Vec<ValueRef>),
}

/// A finished load.
pub(super) struct FinishedLoad {
    run: RunId,
    /// Submissions with lower tickets arrived before the load began, so its result may answer them.
    began: Ticket,
    found: Result<Load>,
    /// The run was loaded in turn.
    turn: Option<InTurn>,
}

/// The turn under which a contended run was loaded; `None` if none was available in time or the store has no turns.
#[derive(Debug)]
pub(super) struct InTurn(Option<Turn>);

#[derive(Debug)]
enum Load {
    Whole(Box<CachedRun>),
    /// The rows of the run that were written since a version.
    Changed(Version, Box<Loaded>),
    /// The cached run is at the stored version.
    Same,
    Values(Vec<(ValueId, Data)>),
    /// The run refers to values that are not stored or that are damaged.
    BadValues(String),
    Missing,
    Trimmed(Namespace),
}

impl Committer {
    pub(super) fn load(&mut self, run: RunId, what: Wanted) {
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.busy = true;
        }
        let (store, flows, began) = (self.store.clone(), self.flows.clone(), self.tickets);
        let loading =
            async move { FinishedLoad { run, began, found: load(store, &flows, run, what).await, turn: None } };
        self.loads.push(Box::pin(loading));
    }

    /// Whether other instances changed the run recently, so that its next commit needs a turn.
    pub(super) fn needs_turn(&self, run: RunId) -> bool {
        let contended = self.contended.get(&run).is_some_and(|until| Instant::now() < *until);
        contended && self.lanes.get(&run).is_some_and(|lane| lane.turn.is_none())
    }

    fn note_contended(&mut self, run: RunId) {
        let now = Instant::now();
        if self.contended.len() >= MAX_CONTENDED {
            self.contended.retain(|_, until| now < *until);
        }
        if self.contended.len() < MAX_CONTENDED {
            self.contended.insert(run, now + CONTENDED);
        }
    }

    /// What to load of a run that may be cached.
    fn unknown_of(&self, run: RunId) -> Wanted {
        match self.cache.get(run).map(|cached| cached.run.header.version) {
            None | Some(Version(0)) => Wanted::Whole,
            Some(version) => Wanted::IfChanged(version),
        }
    }

    /// Another instance changed the run. Loads what changed: at once after a first conflict, in turn after a second one.
    pub(super) fn load_after_conflict(&mut self, run: RunId) {
        match self.lanes.get(&run) {
            Some(lane) if lane.turn.is_none() && lane.conflicts > 1 => self.load_in_turn(run),
            _ => self.load(run, self.unknown_of(run)),
        }
    }

    /// Waits until no other instance has its turn, then loads what has changed; what was read before would be outdated.
    /// Inputs that arrive meanwhile are decided together. Without turns, a random delay lets one of the others through.
    pub(super) fn load_in_turn(&mut self, run: RunId) {
        let what = self.unknown_of(run);
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = true;
        let longest = match lane.conflicts {
            0 | 1 => 0,
            conflicts => FIRST_BACK_OFF_MS.saturating_mul(1 << (conflicts - 2).min(8)).min(MAX_BACK_OFF_MS),
        };
        let [low, high, ..] = (self.config.chance)();
        let delay = Duration::from_millis(u64::from(u16::from_le_bytes([low, high])) % (longest + 1));
        let (store, flows) = (self.store.clone(), self.flows.clone());
        // Submissions that arrive meanwhile are not answered by this load.
        let began = self.tickets;
        let loading = async move {
            let turn = store.turn(run).await;
            if turn.is_none() {
                tokio::time::sleep(delay).await;
            }
            let found = load(store, &flows, run, what).await;
            FinishedLoad { run, began, found, turn: Some(InTurn(turn)) }
        };
        self.loads.push(Box::pin(loading));
    }

    pub(super) fn loaded(&mut self, loaded: FinishedLoad) {
        let FinishedLoad { run, began, found, turn } = loaded;
        if let Some(InTurn(Some(_))) = &turn {
            self.note_contended(run);
        }
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.turn = turn.or(lane.turn.take());
        match found {
            Ok(Load::Whole(cached)) => {
                lane.fresh = began;
                self.cache.put(*cached);
            }
            Ok(Load::Same) => lane.fresh = began,
            Ok(Load::Changed(since, loaded)) => {
                let mut caught_up = false;
                self.cache.change(run, |cached| caught_up = cached.catch_up(since, loaded.rows));
                if !caught_up {
                    // It was evicted meanwhile.
                    self.cache.remove(run);
                    return self.load(run, Wanted::Whole);
                }
                if let Some(lane) = self.lanes.get_mut(&run) {
                    lane.fresh = began;
                }
            }
            Ok(Load::Values(found)) => self.cache.change(run, |cached| cached.add_values(found)),
            Ok(Load::BadValues(bug)) => return self.undecidable(run, bug),
            Ok(Load::Missing) => {
                self.cache.remove(run);
                self.start_or_refuse(run, began);
            }
            Ok(Load::Trimmed(ns)) => {
                self.cache.remove(run);
                for pending in lane.waiting.drain(..) {
                    let foreign = pending.is_foreign(&ns);
                    pending.fail(if foreign { EngineError::no_run(run) } else { EngineError::Trimmed(run) });
                }
            }
            Err(error) => self.refuse(run, &error),
        }
        self.release(run);
    }

    /// The run does not exist: a start creates it, and submissions before the first start fail. Submissions that
    /// arrived after the load began are not answered by it: the run may have been created since.
    fn start_or_refuse(&mut self, run: RunId, began: Ticket) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        while lane.waiting.front().is_some_and(|pending| pending.start.is_none() && pending.ticket < began) {
            if let Some(pending) = lane.waiting.pop_front() {
                pending.fail(EngineError::no_run(run));
            }
        }
        if let Some(front) = lane.waiting.front()
            && front.ticket < began
            && let Some(new) = &front.start
        {
            lane.fresh = began;
            self.cache.put(CachedRun::new(new.ns.clone(), new.flow.clone(), Run::new(run)));
        }
    }

    pub(super) fn refuse(&mut self, run: RunId, error: &EngineError) {
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.waiting.drain(..).for_each(|pending| pending.fail(error.clone()));
        }
    }
}

async fn load(store: Arc<dyn Store>, flows: &Flows, run: RunId, what: Wanted) -> Result<Load> {
    let since = match what {
        Wanted::Values(stored) => return load_values(&*store, run, &stored).await,
        Wanted::Whole => None,
        Wanted::IfChanged(version) => Some(version),
    };
    match store.load(run, since).await? {
        Found::Nothing => Ok(Load::Missing),
        Found::Same => Ok(Load::Same),
        Found::Trimmed(summary) => Ok(Load::Trimmed(summary.ns.clone())),
        Found::Changed(loaded) => Ok(Load::Changed(since.unwrap_or_default(), loaded)),
        Found::Run(loaded) => {
            let header = &loaded.rows.header;
            let ns = loaded.summary.ns.clone();
            let flow = flows.find(&*store, &ns, &header.flow, Some(&header.flow_version)).await?;
            let flow = flow.ok_or_else(|| {
                EngineError::Bug(format!(
                    "run {run} uses {}@{}, which is not in the store",
                    header.flow, header.flow_version
                ))
            })?;
            let large = loaded.rows.activations.len() > INDEXED_INLINE;
            let index = move || {
                let run = Run::load(loaded.rows, &flow.flow);
                Ok(Load::Whole(Box::new(CachedRun::new(ns, flow, run))))
            };
            match large {
                false => index(),
                true => spawn_blocking(index).await.unwrap_or(Err(EngineError::Stopped)),
            }
        }
    }
}

async fn load_values(store: &dyn Store, run: RunId, stored: &[ValueRef]) -> Result<Load> {
    let ids: Vec<ValueId> = stored.iter().map(|stored| stored.id).collect();
    match store.values(run, &ids).await {
        Ok(values) if values.len() < ids.len() => {
            Ok(Load::BadValues(format!("run {run} refers to values that are not in the store: {ids:?}")))
        }
        Ok(found) => Ok(Load::Values(found)),
        Err(StoreError::Corrupt(damage)) => Ok(Load::BadValues(damage)),
        Err(error) => Err(error.into()),
    }
}
