//! New memo entries of a code run since its task was delivered, for the worker that holds the task.

use eddyline_machine::memo::MemoEntry;
use eddyline_store::{LeaseState, Namespace};
use serde_json::{Map, Value};

use crate::assignment::{MemoPart, memo};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::task_status::TaskId;

/// What the worker that holds a code run's function does not know yet.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CodeNews {
    pub entries: Map<String, Value>,
    /// Set if not everything fitted: the number after which the memo goes on.
    pub next: Option<u64>,
    /// The run was cancelled since the task was delivered, and the function may undo what it did.
    pub told_to_leave: bool,
}

impl CodeNews {
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && !self.told_to_leave
    }

    /// The highest number that the worker knows once it has these entries.
    pub fn newest(&self) -> Option<u64> {
        self.entries.values().filter_map(|entry| entry["n"].as_u64()).max()
    }
}

impl Engine {
    /// The memo entries after change number `after` of the task's code run. None if no worker holds such a task.
    pub async fn memo_of(&self, ns: &Namespace, task: TaskId, after: u64) -> Result<Option<Map<String, Value>>> {
        match self.leases(ns, None, &[task]).await?.as_slice() {
            [LeaseState::Held { .. }] => {
                Ok(self.remembered(ns, task, |entry| entry.n > after).await?.map(|part| part.entries))
            }
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
    ) -> Result<Option<CodeNews>> {
        let handed_over = self.facts.of(&*self.instance.store, ns, task).await?.memo;
        let seen = seen.unwrap_or(handed_over);
        // The header has the newest change that the worker did not report itself, so most calls need not load the run.
        let summary = self.instance.store.summary(task.run).await?.filter(|summary| summary.ns == *ns);
        let Some(summary) = summary else { return Ok(None) };
        let code = summary.header.code.as_ref();
        let news = code.map_or(0, |code| code.news);
        let leaving = code.and_then(|code| code.leaving.as_ref());
        let told_to_leave = leaving.is_some_and(|leaving| !leaving.unwinding && leaving.n > handed_over);
        if names.is_empty() && news.max(handed_over) <= seen {
            return Ok(Some(CodeNews { told_to_leave, ..CodeNews::default() }));
        }
        let is_others = |entry: &MemoEntry<'_>| entry.news || entry.n <= handed_over;
        let wanted = |entry: &MemoEntry<'_>| entry.n > seen && (is_others(entry) || names.contains(&entry.name));
        let part = self.remembered(ns, task, wanted).await?;
        Ok(part.map(|MemoPart { entries, next }| CodeNews { entries, next, told_to_leave }))
    }

    async fn remembered(
        &self,
        ns: &Namespace,
        task: TaskId,
        wanted: impl Fn(&MemoEntry<'_>) -> bool,
    ) -> Result<Option<MemoPart>> {
        let (store, config) = (&*self.instance.store, &self.instance.config);
        match memo(store, &self.instance.flows, &config.hooks, ns, task.run, wanted).await {
            Ok((part, _)) => Ok(Some(part)),
            Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
