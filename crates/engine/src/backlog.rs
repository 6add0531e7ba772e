//! Starts are refused while more tasks wait than workers will get through any time soon.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::{Namespace, Store};
use tokio::time::Instant;

use crate::error::{EngineError, Result};
use crate::labels::namespace_label;

/// What waits is counted this often; in between starts are added to it as if each brought one task.
const LOOK: Duration = Duration::from_secs(1);
/// When to come back.
const RETRY_AFTER_MS: Millis = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Backlogs(Mutex<HashMap<Namespace, (Instant, usize)>>);

impl Backlogs {
    /// Room for one more start, or the refusal.
    pub async fn admit(&self, store: &dyn Store, ns: &Namespace, most: usize) -> Result<()> {
        let waiting = match self.known(ns) {
            Some(waiting) => waiting,
            None => self.keep(ns, store.backlog(ns).await?),
        };
        if waiting <= most {
            return Ok(());
        }
        metrics::counter!("eddyline_starts_refused_total", "namespace" => namespace_label(ns)).increment(1);
        let message = format!("{most} tasks or more wait for workers in {ns}; no runs are started until some are done");
        Err(EngineError::TooMany { message, retry_after_ms: RETRY_AFTER_MS })
    }

    /// How many there are with this one, if that was counted a short while ago.
    fn known(&self, ns: &Namespace) -> Option<usize> {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, waiting) = counted.get_mut(ns).filter(|(at, _)| at.elapsed() < LOOK)?;
        *waiting += 1;
        Some(*waiting)
    }

    fn keep(&self, ns: &Namespace, waiting: usize) -> usize {
        let mut counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counted.insert(ns.clone(), (Instant::now(), waiting + 1));
        waiting + 1
    }
}
