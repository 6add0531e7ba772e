//! Queues and limits: their rules, and how they are.

use std::collections::BTreeMap;

use eddyline_store::{Document, Expect, LimitRules, Namespace, QueueRules, QueueState, kind};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// A queue with its rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueInfo {
    pub state: QueueState,
    pub rules: QueueRules,
}

impl Engine {
    /// Queues that have rules, or have or had tasks, by name.
    pub async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueInfo>> {
        let mut queues: BTreeMap<String, QueueInfo> = BTreeMap::new();
        for state in self.instance.store.queues(ns).await? {
            let (name, rules) = (state.name.clone(), QueueRules::default());
            queues.insert(name, QueueInfo { state, rules });
        }
        for document in self.instance.all_documents(ns, kind::QUEUE).await? {
            let queue = queues.entry(document.key.id.clone()).or_default();
            queue.state.name.clone_from(&document.key.id);
            queue.rules = rules(&document)?;
        }
        Ok(queues.into_values().collect())
    }

    pub async fn queue(&self, ns: &Namespace, name: &str) -> Result<QueueInfo> {
        let states = self.instance.store.queues(ns).await?;
        let state = states.into_iter().find(|state| state.name == name);
        let document = self.instance.document(Some(ns), kind::QUEUE, name).await?;
        Ok(QueueInfo {
            state: state.unwrap_or_else(|| QueueState { name: name.to_owned(), ..QueueState::default() }),
            rules: document.as_ref().map(rules).transpose()?.unwrap_or_default(),
        })
    }

    /// Changes the rules of a queue, whatever others change at the same time.
    pub async fn set_queue(&self, ns: &Namespace, name: &str, change: impl Fn(&mut QueueRules)) -> Result<()> {
        self.set_rules(ns, kind::QUEUE, name, change).await
    }

    /// Limits that have rules, by name.
    pub async fn limits(&self, ns: &Namespace) -> Result<Vec<(String, LimitRules)>> {
        let documents = self.instance.all_documents(ns, kind::LIMIT).await?;
        documents.iter().map(|document| Ok((document.key.id.clone(), rules(document)?))).collect()
    }

    pub async fn set_limit(&self, ns: &Namespace, name: &str, new: LimitRules) -> Result<()> {
        self.set_rules(ns, kind::LIMIT, name, |rules| *rules = new.clone()).await
    }

    /// Takes the rules of a limit away: what names it passes.
    pub async fn delete_limit(&self, ns: &Namespace, name: &str) -> Result<()> {
        if self.instance.document(Some(ns), kind::LIMIT, name).await?.is_none() {
            return Err(EngineError::NotFound { what: "limit", id: name.to_owned() });
        }
        self.instance.put(ns, kind::LIMIT, name, Expect::Any, None).await?;
        Ok(())
    }

    async fn set_rules<R: Default + Serialize + DeserializeOwned>(
        &self,
        ns: &Namespace,
        kind: &str,
        name: &str,
        change: impl Fn(&mut R),
    ) -> Result<()> {
        loop {
            let document = self.instance.document(Some(ns), kind, name).await?;
            let (expect, mut rules) = match &document {
                Some(document) => (Expect::Revision(document.revision), rules(document)?),
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

fn rules<R: DeserializeOwned>(document: &Document) -> Result<R> {
    serde_json::from_value(document.body.clone())
        .map_err(|error| EngineError::Bug(format!("the rules of {} are damaged: {error}", document.key.id)))
}
