//! Queues and limits: their rules and their state.

use std::collections::BTreeMap;

use eddyline_machine::Millis;
use eddyline_store::{Expect, LimitRules, Namespace, QueueRules, QueueState, kind};
use serde::Serialize;
use serde_json::Value;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// A queue with its rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueInfo {
    pub state: QueueState,
    pub rules: QueueRules,
    /// Why its rules can't be read, in which case it is paused.
    pub fault: Option<String>,
}

/// A limit with its rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LimitInfo {
    pub name: String,
    pub rules: LimitRules,
    /// A worker closed the limit until this time: nothing passes before, unless its rules are set again or deleted.
    pub closed_until: Option<Millis>,
    /// Why its rules can't be read, in which case nothing passes it.
    pub fault: Option<String>,
}

impl Engine {
    /// Queues that have rules, or have or had tasks, by name.
    pub async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueInfo>> {
        let mut queues: BTreeMap<String, QueueInfo> = BTreeMap::new();
        for state in self.instance.store.queues(ns).await? {
            queues.insert(state.name.clone(), QueueInfo { state, ..QueueInfo::default() });
        }
        for document in self.instance.all_documents(ns, kind::QUEUE).await? {
            let queue = queues.entry(document.key.id.clone()).or_default();
            queue.state.name.clone_from(&document.key.id);
            queue.rules = QueueRules::read(&document.body);
            queue.fault = QueueRules::fault(&document.body);
        }
        Ok(queues.into_values().collect())
    }

    pub async fn queue(&self, ns: &Namespace, name: &str) -> Result<QueueInfo> {
        let states = self.instance.store.queues(ns).await?;
        let state = states.into_iter().find(|state| state.name == name);
        let document = self.instance.document(Some(ns), kind::QUEUE, name).await?;
        Ok(QueueInfo {
            state: state.unwrap_or_else(|| QueueState { name: name.to_owned(), ..QueueState::default() }),
            rules: document.as_ref().map(|document| QueueRules::read(&document.body)).unwrap_or_default(),
            fault: document.as_ref().and_then(|document| QueueRules::fault(&document.body)),
        })
    }

    /// Changes the rules of a queue, retrying if others change them concurrently.
    pub async fn set_queue(&self, ns: &Namespace, name: &str, change: impl Fn(&mut QueueRules)) -> Result<()> {
        self.set_rules(ns, kind::QUEUE, name, QueueRules::read, change).await
    }

    /// Limits that have rules or that workers closed, by name.
    pub async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitInfo>> {
        let mut limits: BTreeMap<String, LimitInfo> = BTreeMap::new();
        for document in self.instance.all_documents(ns, kind::LIMIT).await? {
            let (rules, fault) = (LimitRules::read(&document.body), LimitRules::fault(&document.body));
            let name = document.key.id.clone();
            limits.insert(name.clone(), LimitInfo { name, rules, closed_until: None, fault });
        }
        for state in self.instance.store.limits(ns).await? {
            let limit = limits.entry(state.name.clone()).or_default();
            (limit.name, limit.closed_until) = (state.name, Some(state.closed_until));
        }
        Ok(limits.into_values().collect())
    }

    /// Sets the rules of a limit, and reopens it if a worker closed it.
    pub async fn set_limit(&self, ns: &Namespace, name: &str, new: LimitRules) -> Result<()> {
        self.set_rules(ns, kind::LIMIT, name, LimitRules::read, |rules| *rules = new.clone()).await
    }

    /// Deletes the rules of a limit and reopens it: tasks that name it pass freely.
    pub async fn delete_limit(&self, ns: &Namespace, name: &str) -> Result<()> {
        let ruled = self.instance.document(Some(ns), kind::LIMIT, name).await?.is_some();
        if !ruled && !self.instance.store.limits(ns).await?.iter().any(|limit| limit.name == name) {
            return Err(EngineError::NotFound { what: "limit", id: name.to_owned() });
        }
        self.instance.put(ns, kind::LIMIT, name, Expect::Any, None).await?;
        Ok(())
    }

    async fn set_rules<R: Default + Serialize>(
        &self,
        ns: &Namespace,
        kind: &str,
        name: &str,
        read: impl Fn(&Value) -> R,
        change: impl Fn(&mut R),
    ) -> Result<()> {
        loop {
            let document = self.instance.document(Some(ns), kind, name).await?;
            let (expect, mut rules) = match &document {
                Some(document) => (Expect::Revision(document.revision), read(&document.body)),
                None => (Expect::Absent, R::default()),
            };
            change(&mut rules);
            let body = serde_json::to_value(&rules).map_err(|error| EngineError::Bug(error.to_string()))?;
            if self.instance.put(ns, kind, name, expect, Some(body)).await? {
                return Ok(());
            }
        }
    }
}
