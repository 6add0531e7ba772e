//! New memo entries of a code run since its task was delivered, for the worker that holds the task.

use eddyline_machine::memo::MemoEntry;
use eddyline_store::{LeaseState, Namespace};
use serde_json::{Map, Value};

use crate::assignment::memo;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::task_status::TaskId;

impl Engine {
    /// The memo entries after change number `after` of the task's code run. None if no worker holds such a task.
    pub async fn memo_of(&self, ns: &Namespace, task: TaskId, after: u64) -> Result<Option<Map<String, Value>>> {
        match self.leases(ns, None, &[task]).await?.as_slice() {
            [LeaseState::Held { .. }] => self.remembered(ns, task, |entry| entry.n > after).await,
            _ => Ok(None),
        }
    }

    /// The memo entries after change number `seen`, or since the task was claimed, of the task's code run. Entries that
    /// its own worker reported since the claim are left out, except for those in `names`. None if there is no such run.
    pub async fn news_of(
        &self,
        ns: &Namespace,
        task: TaskId,
        seen: Option<u64>,
        names: &[&str],
    ) -> Result<Option<Map<String, Value>>> {
        let handed_over = self.facts.of(&*self.instance.store, ns, task).await?.memo;
        let seen = seen.unwrap_or(handed_over);
        // The header has the newest change that the worker did not report itself, so most calls need not load the run.
        let summary = self.instance.store.summary(task.run).await?.filter(|summary| summary.ns == *ns);
        let Some(summary) = summary else { return Ok(None) };
        let news = summary.header.code.as_ref().map_or(0, |code| code.news);
        if names.is_empty() && news.max(handed_over) <= seen {
            return Ok(Some(Map::new()));
        }
        let is_others = |entry: &MemoEntry<'_>| entry.news || entry.n <= handed_over;
        self.remembered(ns, task, |entry| entry.n > seen && (is_others(entry) || names.contains(&entry.name))).await
    }

    async fn remembered(
        &self,
        ns: &Namespace,
        task: TaskId,
        wanted: impl Fn(&MemoEntry<'_>) -> bool,
    ) -> Result<Option<Map<String, Value>>> {
        match memo(&*self.instance.store, &self.instance.flows, ns, task.run, wanted).await {
            Ok(entries) => Ok(Some(entries)),
            Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
