//! Starts with a unique key: of the runs of a flow that have the same key, one goes on at a time. Which one that is, the
//! store decides in its commits; see [`eddyline_store::LINE_LIMIT`].

use eddyline_machine::{Input, OnConflict, RunId, Start};

use crate::committer::NewRun;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::start::{Came, Started, Starting, order_new};

/// What a start needs to be made again where another run has its key.
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
    /// What a start has come to. One whose key is taken is dealt with as it asked for: a run that waits or replaces others
    /// is decided again, as one that waits in line, and the store gives it its turn.
    pub(crate) async fn started(&self, mut starting: Starting) -> Result<Started> {
        let (run, large_input, contender) = (starting.run, starting.large_input, starting.contender.take());
        match (starting.started().await?, contender) {
            (Came::Started(started), _) => Ok(started),
            (Came::UniqueTaken(other), Some(contender)) => self.contend(run, other, large_input, *contender).await,
            (Came::UniqueTaken(other), None) => {
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
            Came::Started(started) => Ok(Started { large_input, ..started }),
            Came::UniqueTaken(other) => {
                Err(EngineError::Bug(format!("run {run} waits in line and was refused for run {other}")))
            }
        }
    }
}

pub(crate) fn taken(key: &str, by: RunId) -> EngineError {
    EngineError::Conflict(format!("run {by} has the unique key `{key}` and has not ended"))
}
