//! Gates are found: by run, by reason, by token, by id.

use eddyline_machine::record::GateId;
use eddyline_machine::{ActId, RunId};
use eddyline_store::{GateFilter, GateRow, MAX_PAGE, Namespace, Page};
use uuid::Uuid;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

impl Engine {
    /// Open gates, oldest first; the position of the last one is where the next page begins.
    pub async fn gates(&self, ns: &Namespace, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>> {
        Ok(self.instance.store.gates(Some(ns), filter, page).await?)
    }

    /// How many open gates there are.
    pub async fn count_gates(&self, ns: &Namespace, filter: &GateFilter) -> Result<u64> {
        let (mut count, mut after) = (0, None);
        loop {
            let found = self.gates(ns, filter, Page { after, limit: MAX_PAGE }).await?;
            count += found.len() as u64;
            after = found.last().map(|last| last.position);
            if found.len() < MAX_PAGE {
                return Ok(count);
            }
        }
    }

    /// The gate of a token, whatever its namespace: a webhook has nothing but its token.
    pub async fn gate_anywhere(&self, token: &str) -> Result<Option<GateRow>> {
        let filter = GateFilter { token: Some(token.to_owned()), ..GateFilter::default() };
        Ok(self.instance.store.gates(None, &filter, Page { after: None, limit: 1 }).await?.pop())
    }

    /// Cancels a gate by its id, as timelines show it: `<run>.<activation>`.
    pub async fn cancel_gate_of(&self, ns: &Namespace, id: &str, by: &str) -> Result<()> {
        let unknown = || EngineError::NotFound { what: "gate", id: id.chars().take(120).collect() };
        let GateId { run, activation } = parse(id).ok_or_else(unknown)?;
        match self.cancel_gate(ns, run, activation, by).await {
            Err(EngineError::Invalid { .. } | EngineError::NotFound { .. }) => Err(unknown()),
            other => other,
        }
    }
}

fn parse(id: &str) -> Option<GateId> {
    let (run, activation) = id.split_once('.')?;
    Some(GateId { run: RunId(Uuid::try_parse(run).ok()?), activation: ActId(activation.parse().ok()?) })
}
