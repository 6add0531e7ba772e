//! Namespaces and their settings: documents of `default`, so that every instance sees them.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_language::time::span;
use eddyline_machine::Millis;
use eddyline_store::{Command, DocumentChange, DocumentCommit, DocumentKey, Expect, Namespace, Refused, Store};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::certain;
use crate::config::{Config, MAX_WAIT_MS, Retention};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::events::kept_events;
use crate::instance::Instance;

/// The kind of documents that hold a namespace's settings, by its name. A created namespace has one even without
/// settings.
pub(crate) const NAMESPACE: &str = "namespace";
/// The kind of documents that disable the namespace of the same name. There are few, so the server reads all of them to
/// admit requests.
pub(crate) const DISABLED: &str = "disabled-namespace";
/// How often a change is retried while others change the same namespace.
const TRIES: usize = 100;
/// The shortest retention: otherwise a run could be deleted before a caller that waits for it has read its result.
const SHORTEST_RETENTION_MS: Millis = 1_000;

/// The settings of a namespace. The server's settings apply where it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NamespaceSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_at: Option<Millis>,
    pub retention: RetentionSettings,
    /// Starts are refused while this many tasks wait to be claimed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backlog: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RetentionSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timelines_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runs_ms: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events_ms: Option<Millis>,
}

/// A namespace with its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceState {
    pub settings: NamespaceSettings,
    /// Its keys are rejected.
    pub disabled: bool,
}

/// A change of a namespace's settings. `None` leaves a setting as it is, `Some(None)` resets it to the server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceChange {
    pub timelines_ms: Option<Option<Millis>>,
    pub runs_ms: Option<Option<Millis>>,
    pub events_ms: Option<Option<Millis>>,
    pub backlog: Option<Option<usize>>,
    pub disabled: Option<bool>,
}

impl RetentionSettings {
    /// The effective retention: the server's settings where the namespace has none.
    pub fn over(&self, server: Retention) -> Retention {
        Retention {
            every_ms: server.every_ms,
            timelines_ms: self.timelines_ms.unwrap_or(server.timelines_ms),
            runs_ms: self.runs_ms.unwrap_or(server.runs_ms),
            events_ms: self.events_ms.unwrap_or(server.events_ms),
        }
    }
}

impl Retention {
    /// Why this retention is invalid, if it is.
    pub fn problem(&self) -> Option<String> {
        let Retention { timelines_ms, runs_ms, events_ms, .. } = *self;
        for (what, ms) in [("timelines", timelines_ms), ("runs", runs_ms), ("events", events_ms)] {
            if !(SHORTEST_RETENTION_MS..=MAX_WAIT_MS).contains(&ms) {
                let least = span(SHORTEST_RETENTION_MS);
                return Some(format!(
                    "{what} cannot be kept for {}: use at least {least}, at most ten years",
                    span(ms)
                ));
            }
        }
        (timelines_ms > runs_ms).then(|| {
            format!(
                "timelines would be kept for {} and their runs for {}: a timeline is deleted with its run, so keep \
                 runs at least as long as timelines",
                span(timelines_ms),
                span(runs_ms)
            )
        })
    }
}

impl NamespaceChange {
    fn apply(&self, settings: &mut NamespaceSettings) {
        let kept = &mut settings.retention;
        for (change, setting) in [
            (self.timelines_ms, &mut kept.timelines_ms),
            (self.runs_ms, &mut kept.runs_ms),
            (self.events_ms, &mut kept.events_ms),
        ] {
            *setting = change.unwrap_or(*setting);
        }
        settings.backlog = self.backlog.unwrap_or(settings.backlog);
    }
}

impl Engine {
    /// Namespaces that were created, or in which something was registered or published, by name.
    pub async fn namespaces(&self) -> Result<BTreeMap<Namespace, NamespaceState>> {
        let mut found = BTreeMap::from([(Namespace::default(), NamespaceState::default())]);
        for (ns, _) in kept_events(&*self.instance.store).await? {
            found.insert(ns, NamespaceState::default());
        }
        for (ns, settings) in namespace_settings(&self.instance).await? {
            found.entry(ns).or_default().settings = settings;
        }
        for ns in self.disabled_namespaces().await? {
            found.entry(ns).or_default().disabled = true;
        }
        Ok(found)
    }

    /// A namespace, if it was created or something was registered or published there.
    pub async fn namespace(&self, ns: &Namespace) -> Result<Option<NamespaceState>> {
        let document = self.instance.document(Some(&Namespace::default()), NAMESPACE, ns.as_str()).await?;
        let settings = document.map(|document| read(&document.body)).transpose()?;
        let known =
            settings.is_some() || *ns == Namespace::default() || crate::events::has_cursor(&self.instance, ns).await?;
        if !known {
            return Ok(None);
        }
        let disabled = self.instance.document(Some(&Namespace::default()), DISABLED, ns.as_str()).await?.is_some();
        Ok(Some(NamespaceState { settings: settings.unwrap_or_default(), disabled }))
    }

    /// Creates a namespace; false if it exists.
    pub async fn add_namespace(&self, ns: &Namespace, at: Millis) -> Result<bool> {
        let body = json!(NamespaceSettings { created_at: Some(at), ..NamespaceSettings::default() });
        self.instance.put(&Namespace::default(), NAMESPACE, ns.as_str(), Expect::Absent, Some(body)).await
    }

    /// Changes the settings of a namespace, and returns the new ones.
    pub async fn change_namespace(&self, ns: &Namespace, change: NamespaceChange) -> Result<NamespaceState> {
        if *ns == Namespace::default() && change.disabled == Some(true) {
            let message = "the namespace default cannot be disabled: nobody could enable it again";
            return Err(EngineError::invalid(message.to_owned()));
        }
        for _ in 0..TRIES {
            let Some(state) = self.namespace(ns).await? else {
                return Err(EngineError::NotFound { what: "namespace", id: ns.to_string() });
            };
            let document = self.instance.document(Some(&Namespace::default()), NAMESPACE, ns.as_str()).await?;
            let mut settings = document.as_ref().map(|document| read(&document.body)).transpose()?.unwrap_or_default();
            change.apply(&mut settings);
            if let Some(problem) = settings.retention.over(self.config().retention).problem() {
                return Err(EngineError::invalid(problem));
            }
            let expect = document.map_or(Expect::Absent, |document| Expect::Revision(document.revision));
            let mut documents = vec![DocumentChange {
                key: DocumentKey::new(NAMESPACE, ns.as_str()),
                expect,
                body: Some(json!(settings)),
                due: None,
            }];
            let disabled = change.disabled.unwrap_or(state.disabled);
            if disabled != state.disabled {
                let (key, body) = (DocumentKey::new(DISABLED, ns.as_str()), disabled.then(|| json!({})));
                documents.push(DocumentChange { key, expect: Expect::Any, body, due: None });
            }
            if self.write_settings(documents).await? {
                self.backlogs.forget(ns);
                return Ok(NamespaceState { settings, disabled });
            }
        }
        Err(EngineError::Conflict(format!("the settings of {ns} are being changed by others; try again")))
    }

    async fn write_settings(&self, documents: Vec<DocumentChange>) -> Result<bool> {
        let commit = DocumentCommit {
            ns: Namespace::default(),
            command: self.instance.command(),
            documents,
            messages: Vec::new(),
            events: Vec::new(),
            drops: Vec::new(),
        };
        let written = certain::commit_one(&*self.instance.store, Command::Documents(commit)).await?;
        match written.commands.into_iter().next() {
            Some(Err(Refused::Revision { .. })) => Ok(false),
            Some(Err(refused)) => Err(EngineError::Conflict(refused.to_string())),
            _ => Ok(true),
        }
    }

    /// The namespaces whose keys are rejected.
    pub async fn disabled_namespaces(&self) -> Result<BTreeSet<Namespace>> {
        let documents = self.instance.all_documents(&Namespace::default(), DISABLED).await?;
        Ok(documents.into_iter().map(|document| Namespace::new(&document.key.id)).collect())
    }
}

/// The settings of all namespaces that have any.
pub(crate) async fn namespace_settings(instance: &Instance) -> Result<BTreeMap<Namespace, NamespaceSettings>> {
    let documents = instance.all_documents(&Namespace::default(), NAMESPACE).await?;
    documents.into_iter().map(|document| Ok((Namespace::new(&document.key.id), read(&document.body)?))).collect()
}

/// How many tasks of a namespace may wait before starts are refused.
pub(crate) async fn backlog_limit(store: &dyn Store, config: &Config, ns: &Namespace) -> Result<usize> {
    let filter = eddyline_store::DocumentFilter {
        kind: NAMESPACE.to_owned(),
        id: Some(ns.as_str().to_owned()),
        ..eddyline_store::DocumentFilter::default()
    };
    let document = store.documents(Some(&Namespace::default()), &filter, 1).await?.pop();
    let settings = document.map(|document| read(&document.body)).transpose()?.unwrap_or_default();
    Ok(settings.backlog.unwrap_or(config.backlog))
}

fn read(body: &serde_json::Value) -> Result<NamespaceSettings> {
    let damaged = |error| EngineError::Bug(format!("the settings of a namespace are damaged: {error}"));
    NamespaceSettings::deserialize(body).map_err(damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_MS: Millis = 24 * 60 * 60 * 1_000;

    #[test]
    fn a_timeline_is_not_kept_longer_than_its_run() {
        let server = Retention::default();
        assert_eq!(server.problem(), None);
        let set = |timelines_ms, runs_ms| RetentionSettings { timelines_ms, runs_ms, events_ms: None }.over(server);
        assert_eq!(set(Some(DAY_MS), Some(DAY_MS)).problem(), None);
        assert!(set(Some(31 * DAY_MS), None).problem().is_some_and(|why| why.contains("kept for 31d and their runs")));
        assert!(set(None, Some(DAY_MS)).problem().is_some_and(|problem| problem.contains("7d")));
        assert!(set(Some(999), None).problem().is_some_and(|problem| problem.contains("at least 1s")));
    }

    #[test]
    fn settings_of_older_builds_are_read() {
        let old = json!({"created_at": 5});
        let read = NamespaceSettings::deserialize(&old).ok();
        assert_eq!(read, Some(NamespaceSettings { created_at: Some(5), ..NamespaceSettings::default() }));
    }
}
