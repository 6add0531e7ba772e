//! Whether a child may still start: those above it want it, and its tree is not too large.
//!
//! A flow that starts itself grows without end, and a cancel that only follows the messages from parent to child would
//! never catch up with it. So every start looks at the runs above it: if one of them has ended or is being cancelled, the
//! child does not start. And the runs that descend from one root are counted.
//!
//! A detached child is on its own as soon as it has started; until then it is a child like any other.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use eddyline_machine::{Failure, RunId, Start};
use eddyline_store::{Namespace, RunFilter, Store, Summary};
use tokio::time::Instant;

use crate::error::Result;

/// The kinds of failure of a child that is not started.
const TOO_MANY: &str = "TooManyDescendants";
const NOT_WANTED: &str = "ParentCancelled";

/// What is known of a run above is used for so long. A parent is always looked at.
const KNOWN_FOR: Duration = Duration::from_millis(100);
/// Descendants are counted this often; in between, those that are started here are added.
const COUNTED_EVERY: Duration = Duration::from_secs(1);
/// The first starts in a tree are not counted in the store: most trees never have more.
const UNCOUNTED: u64 = 64;
/// Runs of which something is remembered.
const REMEMBERED: usize = 10_000;

/// A cache: what is true is in the store.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    runs: Mutex<HashMap<RunId, Seen>>,
    trees: Mutex<HashMap<RunId, Tree>>,
}

/// The runs that descend from one.
#[derive(Debug, Clone, Copy, Default)]
struct Tree {
    counted: Option<Instant>,
    /// As many as were counted, and those that were started here since.
    runs: u64,
}

/// A run as it was when it was last looked at.
#[derive(Debug, Clone, Copy)]
struct Seen {
    at: Instant,
    takes_children: bool,
    parent: Option<RunId>,
}

/// What stands in the way of a start.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Obstacle {
    /// Its parent has ended, or its step was cancelled: nobody waits for it.
    Orphan,
    Refused(Failure),
}

impl Lineage {
    /// What stands in the way of starting a run in its tree.
    pub async fn obstacle(
        &self,
        store: &dyn Store,
        ns: &Namespace,
        start: &Start,
        most: u64,
    ) -> Result<Option<Obstacle>> {
        if let Some(parent) = start.asked_by() {
            let (seen, summary) = self.look_at(store, parent.run).await?;
            let Some(Summary { header, .. }) = summary.filter(|summary| summary.header.wants(start)) else {
                return Ok(Some(Obstacle::Orphan));
            };
            // What becomes of the runs above one that has completed is nothing to its detached children.
            if !header.has_completed() && !self.is_wanted(store, seen.parent, start.depth).await? {
                let message = "a run above it has ended or is being cancelled";
                return Ok(Some(Obstacle::Refused(Failure::new(NOT_WANTED, message))));
            }
        }
        let Some(root) = start.root else { return Ok(None) };
        if self.count(store, ns, root).await? <= most {
            return Ok(None);
        }
        let message = format!("{most} runs descend from run {root} already, and that is the limit");
        Ok(Some(Obstacle::Refused(Failure::new(TOO_MANY, message))))
    }

    /// Whether all runs from one upwards take children. There are as many of them as the child is deep.
    async fn is_wanted(&self, store: &dyn Store, from: Option<RunId>, depth: u32) -> Result<bool> {
        let mut above = from;
        for _ in 0..depth {
            let Some(run) = above else { break };
            let known = self.runs().get(&run).copied().filter(|seen| seen.at.elapsed() < KNOWN_FOR);
            let seen = match known {
                Some(seen) => seen,
                None => self.look_at(store, run).await?.0,
            };
            if !seen.takes_children {
                return Ok(false);
            }
            above = seen.parent;
        }
        Ok(true)
    }

    async fn look_at(&self, store: &dyn Store, run: RunId) -> Result<(Seen, Option<Summary>)> {
        let summary = store.summary(run).await?;
        let header = summary.as_ref().map(|summary| &summary.header);
        let seen = Seen {
            at: Instant::now(),
            takes_children: header.is_some_and(|header| header.takes_children()),
            parent: header.and_then(|header| header.parent).map(|parent| parent.run),
        };
        let mut runs = self.runs();
        if runs.len() >= REMEMBERED {
            runs.clear();
        }
        runs.insert(run, seen);
        Ok((seen, summary))
    }

    /// How many runs descend from a root, with this one.
    async fn count(&self, store: &dyn Store, ns: &Namespace, root: RunId) -> Result<u64> {
        if let Some(runs) = self.one_more(root) {
            return Ok(runs);
        }
        let filter = RunFilter { root: Some(root), ..RunFilter::default() };
        let runs = store.count_runs(ns, &filter).await? + 1;
        self.trees().insert(root, Tree { counted: Some(Instant::now()), runs });
        Ok(runs)
    }

    /// How many there are with one more, unless they are to be counted.
    fn one_more(&self, root: RunId) -> Option<u64> {
        let mut trees = self.trees();
        if trees.len() >= REMEMBERED {
            trees.clear();
        }
        let tree = trees.entry(root).or_default();
        tree.runs += 1;
        let known = match tree.counted {
            Some(at) => at.elapsed() < COUNTED_EVERY,
            None => tree.runs <= UNCOUNTED,
        };
        if known {
            return Some(tree.runs);
        }
        // Others go on with the old number until this count is there: one count at a time is enough.
        tree.counted = Some(Instant::now());
        None
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<RunId, Seen>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trees(&self) -> MutexGuard<'_, HashMap<RunId, Tree>> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
