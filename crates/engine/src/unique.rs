//! Starts with a unique key: of the runs of a flow with the same key, one runs at a time. The store decides which one
//! when it commits; see [`eddyline_store::LINE_LIMIT`].

use eddyline_machine::{Input, OnConflict, RunId, Start};

use crate::committer::NewRun;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::start::{StartOutcome, Started, Starting, order_new};

/// What is needed to submit a start again if another run holds its key.
pub(crate) struct Contender {
    start: Start,
    new: NewRun,
    by: String,
}

impl Contender {
    /// None for a start without a unique key.
    pub fn of(start: &Start, new: &NewRun, by: String) -> Option<Contender> {
        start.unique.as_ref()?;
        Some(Contender { start: start.clone(), new: new.clone(), by })
    }
}

impl Engine {
    /// Waits for the result of a start. If its key is taken, handles that by its `on_conflict`: with `queue` and
    /// `replace`, the start is submitted again as a run that waits in line, and the store gives it its turn.
    pub(crate) async fn started(&self, mut starting: Starting) -> Result<Started> {
        let (run, large_input, contender) = (starting.run, starting.large_input, starting.contender.take());
        match (starting.started().await?, contender) {
            (StartOutcome::Started(started), _) => Ok(started),
            (StartOutcome::UniqueTaken(other), Some(contender)) => {
                self.contend(run, other, large_input, *contender).await
            }
            (StartOutcome::UniqueTaken(other), None) => {
                Err(EngineError::Bug(format!("run {run} waits for a unique key and was refused for run {other}")))
            }
        }
    }

    async fn contend(
        &self,
        run: RunId,
        other: RunId,
        large_input: Option<usize>,
        contender: Contender,
    ) -> Result<Started> {
        let Contender { mut start, mut new, by } = contender;
        let Some(unique) = &start.unique else { return Err(EngineError::Bug(format!("run {run} has no unique key"))) };
        match unique.on_conflict {
            OnConflict::Return => return Ok(Started { run: other, existing: true, large_input }),
            OnConflict::Reject => return Err(taken(&unique.key, other)),
            OnConflict::Queue => {}
            OnConflict::Replace => {
                let reason = Some(format!("replaced by run {run}, which has the same unique key"));
                new.tells_line = Some(Box::new(Input::Cancel { by, reason }));
            }
        }
        start.in_line = true;
        let (order, starting) = order_new(run, start, new);
        self.committing().ask(order).await?;
        match starting.started().await? {
            StartOutcome::Started(started) => Ok(Started { large_input, ..started }),
            StartOutcome::UniqueTaken(other) => {
                Err(EngineError::Bug(format!("run {run} waits in line and was refused for run {other}")))
            }
        }
    }
}

pub(crate) fn taken(key: &str, by: RunId) -> EngineError {
    EngineError::Conflict(format!("run {by} holds the unique key `{key}` and has not ended"))
}
