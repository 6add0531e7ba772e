//! Lists and deletes flows, and counts their runs.

use eddyline_machine::{Millis, Status};
use eddyline_store::{Expect, Namespace, RunFilter};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::flows::{FLOW, VERSION, versioned};

/// A flow in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowName {
    pub name: String,
    /// The current version.
    pub version: String,
    /// Since when that is the current version.
    pub since: Millis,
}

impl Engine {
    /// Flows by name, after the given one.
    pub async fn flows(&self, ns: &Namespace, after: Option<String>, limit: usize) -> Result<Vec<FlowName>> {
        let documents = self.instance.documents(ns, FLOW, after, limit).await?;
        let named = documents.into_iter().map(|document| FlowName {
            version: document.body["version"].as_str().unwrap_or_default().to_owned(),
            name: document.key.id,
            since: document.changed_at,
        });
        Ok(named.collect())
    }

    pub async fn count_flows(&self, ns: &Namespace) -> Result<u64> {
        self.instance.count_documents(ns, FLOW).await
    }

    /// Deletes a flow that has no unfinished runs, so that it can no longer be started by name. Its versions are kept
    /// for ended runs. A run that is started concurrently keeps running with its version.
    pub async fn delete_flow(&self, ns: &Namespace, name: &str) -> Result<()> {
        let unknown = || EngineError::NotFound { what: "flow", id: name.chars().take(120).collect() };
        let document = self.instance.document(Some(ns), FLOW, name).await?.ok_or_else(unknown)?;
        let going = Status::ALL.into_iter().filter(|status| !status.is_end()).collect();
        let filter = RunFilter { flow: Some(name.to_owned()), status: going, ..RunFilter::default() };
        let open = self.instance.store.count_runs(ns, &filter).await?;
        if open > 0 {
            let runs = if open == 1 { "1 run that has" } else { &format!("{open} runs that have") };
            let message = format!("the flow {name} has {runs} not ended; cancel them or wait until they end");
            return Err(EngineError::Conflict(message));
        }
        if !self.instance.put(ns, FLOW, name, Expect::Revision(document.revision), None).await? {
            return Err(EngineError::Conflict(format!("the flow {name} was registered again meanwhile; try again")));
        }
        Ok(())
    }

    /// When a version was registered.
    pub async fn registered_at(&self, ns: &Namespace, name: &str, version: &str) -> Result<Option<Millis>> {
        Ok(self
            .instance
            .document(Some(ns), VERSION, &versioned(name, version))
            .await?
            .map(|document| document.changed_at))
    }

    /// How many runs of a flow there are, by status in the order of [`Status::ALL`].
    pub async fn count_by_status(&self, ns: &Namespace, flow: &str) -> Result<[u64; Status::ALL.len()]> {
        let mut counts = [0; Status::ALL.len()];
        for (count, status) in counts.iter_mut().zip(Status::ALL) {
            let filter = RunFilter { flow: Some(flow.to_owned()), status: vec![status], ..RunFilter::default() };
            *count = self.instance.store.count_runs(ns, &filter).await?;
        }
        Ok(counts)
    }

    pub async fn count(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
        Ok(self.instance.store.count_runs(ns, filter).await?)
    }
}
