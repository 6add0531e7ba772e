//! Checks whether a child may still start: its ancestors still accept children, and its tree is not too large.
//!
//! A flow that starts itself grows without end, and a cancel that only follows the messages from parent to child would
//! never catch up with it. So every start checks its ancestors: if one of them has ended or is being cancelled, the
//! child does not start. The runs that descend from one root are also counted.
//!
//! A detached child is independent once it has started; until then it is a child like any other.

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

/// How long a cached ancestor is valid. The parent itself is always read.
const KNOWN_FOR: Duration = Duration::from_millis(100);
/// How often descendants are counted; in between, runs that this process starts are added.
const COUNTED_EVERY: Duration = Duration::from_secs(1);
/// The first starts in a tree are only counted in memory: most trees never have more.
const UNCOUNTED: u64 = 64;
/// The most cached ancestors, and the most cached trees.
const REMEMBERED: usize = 10_000;

/// Caches what the store says about ancestors and trees.
#[derive(Debug, Default)]
pub(crate) struct Lineage {
    runs: Mutex<HashMap<RunId, CheckedAncestor>>,
    trees: Mutex<HashMap<RunId, Tree>>,
}

/// The descendants of one root.
#[derive(Debug, Clone, Copy, Default)]
struct Tree {
    counted: Option<Instant>,
    /// The last count, plus the runs that this process started since.
    runs: u64,
}

/// A run as of its last read.
#[derive(Debug, Clone, Copy)]
struct CheckedAncestor {
    at: Instant,
    takes_children: bool,
    parent: Option<RunId>,
}

/// Why a child does not start.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum StartRefusal {
    /// Its parent has ended, or its step was cancelled: nobody waits for it.
    Orphan,
    Refused(Failure),
}

impl Lineage {
    /// Why a run may not start in its tree, if so.
    pub async fn obstacle(
        &self,
        store: &dyn Store,
        ns: &Namespace,
        start: &Start,
        most: u64,
    ) -> Result<Option<StartRefusal>> {
        if let Some(parent) = start.asked_by() {
            let (seen, summary) = self.look_at(store, parent.run).await?;
            let Some(Summary { header, .. }) = summary.filter(|summary| summary.header.wants(start)) else {
                return Ok(Some(StartRefusal::Orphan));
            };
            // The detached children of a completed run do not depend on the runs above it.
            if !header.has_completed() && !self.is_wanted(store, seen.parent, start.depth).await? {
                let message = "an ancestor run has ended or is being cancelled";
                return Ok(Some(StartRefusal::Refused(Failure::new(NOT_WANTED, message))));
            }
        }
        let Some(root) = start.root else { return Ok(None) };
        if self.count(store, ns, root).await? <= most {
            return Ok(None);
        }
        let message = format!("run {root} already has {most} descendants, which is the limit");
        Ok(Some(StartRefusal::Refused(Failure::new(TOO_MANY, message))))
    }

    /// Whether a run and all its ancestors, at most `depth` of them, accept children.
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

    async fn look_at(&self, store: &dyn Store, run: RunId) -> Result<(CheckedAncestor, Option<Summary>)> {
        let summary = store.summary(run).await?;
        let header = summary.as_ref().map(|summary| &summary.header);
        let seen = CheckedAncestor {
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

    /// How many runs descend from a root, including the one to be started.
    async fn count(&self, store: &dyn Store, ns: &Namespace, root: RunId) -> Result<u64> {
        if let Some(runs) = self.one_more(root) {
            return Ok(runs);
        }
        let filter = RunFilter { root: Some(root), ..RunFilter::default() };
        let runs = store.count_runs(ns, &filter).await? + 1;
        self.trees().insert(root, Tree { counted: Some(Instant::now()), runs });
        Ok(runs)
    }

    /// Adds one run and returns the number; None if they have to be counted in the store.
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
        // Other starts use the old number until this count is done: one count at a time is enough.
        tree.counted = Some(Instant::now());
        None
    }

    fn runs(&self) -> MutexGuard<'_, HashMap<RunId, CheckedAncestor>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trees(&self) -> MutexGuard<'_, HashMap<RunId, Tree>> {
        self.trees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
