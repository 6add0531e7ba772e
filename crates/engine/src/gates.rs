//! Lists gates, and opens or cancels them by token or id.

use eddyline_machine::record::GateId;
use eddyline_machine::{ActId, OpenedBy, RunId};
use eddyline_store::{GateFilter, GateRow, MAX_PAGE, Namespace, Page};
use serde_json::Value;
use uuid::Uuid;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

impl Engine {
    /// Open gates, oldest first. The next page begins after the position of the last one.
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

    /// The gate with a token, in any namespace: a webhook has nothing but its token.
    pub async fn gate_anywhere(&self, token: &str) -> Result<Option<GateRow>> {
        let filter = GateFilter { token: Some(token.to_owned()), ..GateFilter::default() };
        Ok(self.instance.store.gates(None, &filter, Page { after: None, limit: 1 }).await?.pop())
    }

    /// Opens a gate by its token or its id. This reveals nothing: a caller who may open gates may also see their
    /// tokens.
    pub async fn open_gate_named(&self, ns: &Namespace, named: &str, by: OpenedBy, body: Value) -> Result<()> {
        let Some(id) = parse(named) else {
            return self.open_gate(ns, named, by, body).await.map_err(|error| match error {
                EngineError::NotFound { what: "gate", .. } => unknown("with this token or id"),
                error => error,
            });
        };
        let gates = self.instance.store.pending(id.run).await?.gates;
        let gate = gates.into_iter().find(|gate| gate.id == id && gate.ns == *ns).ok_or_else(|| unknown(named))?;
        match gate.token {
            Some(token) => self.open_gate(ns, &token, by, body).await,
            None => Err(EngineError::Conflict(format!(
                "the gate {named} opens by an event or at a time; it cannot be opened by hand"
            ))),
        }
    }

    /// Cancels a gate by its id, as timelines show it: `<run>.<activation>`.
    pub async fn cancel_gate_of(&self, ns: &Namespace, id: &str, by: &str) -> Result<()> {
        let GateId { run, activation } = parse(id).ok_or_else(|| unknown(id))?;
        match self.cancel_gate(ns, run, activation, by).await {
            Err(EngineError::Invalid { .. } | EngineError::NotFound { .. }) => Err(unknown(id)),
            other => other,
        }
    }
}

fn unknown(id: &str) -> EngineError {
    EngineError::NotFound { what: "gate", id: id.chars().take(120).collect() }
}

fn parse(id: &str) -> Option<GateId> {
    let (run, activation) = id.split_once('.')?;
    Some(GateId { run: RunId(Uuid::try_parse(run).ok()?), activation: ActId(activation.parse().ok()?) })
}
