//! Refuses starts while the backlog of claimable tasks in a namespace exceeds its limit.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::{Namespace, Store};
use tokio::time::Instant;

use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::labels::namespace_label;
use crate::namespaces::backlog_limit;

/// How often waiting tasks are counted; in between, each start counts as one more.
const LOOK: Duration = Duration::from_secs(1);
/// When a refused caller may retry.
const RETRY_AFTER_MS: Millis = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Backlogs(Mutex<HashMap<Namespace, Counted>>);

#[derive(Debug, Clone, Copy)]
struct Counted {
    at: Instant,
    waiting: usize,
    /// The limit.
    most: usize,
}

impl Backlogs {
    /// Admits one more start, or refuses it.
    pub async fn admit(&self, store: &dyn Store, config: &Config, ns: &Namespace) -> Result<()> {
        let Counted { waiting, most, .. } = match self.known(ns) {
            Some(counted) => counted,
            None => {
                let most = backlog_limit(store, config, ns).await?;
                self.keep(ns, store.backlog(ns).await?, most)
            }
        };
        if waiting <= most {
            return Ok(());
        }
        metrics::counter!("eddyline_starts_refused_total", "namespace" => namespace_label(ns)).increment(1);
        let message = format!("the backlog of {ns} is full: {most} or more tasks wait for workers; try again later");
        Err(EngineError::TooMany { message, retry_after_ms: RETRY_AFTER_MS })
    }

    /// The settings of the namespace have changed: the next start reads them again.
    pub fn forget(&self, ns: &Namespace) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(ns);
    }

    /// Adds one start to the last count. If that is old, the first to ask counts again, and the others use it meanwhile.
    fn known(&self, ns: &Namespace) -> Option<Counted> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = all.get_mut(ns)?;
        if counted.at.elapsed() >= LOOK {
            counted.at = Instant::now();
            return None;
        }
        counted.waiting += 1;
        Some(*counted)
    }

    fn keep(&self, ns: &Namespace, waiting: usize, most: usize) -> Counted {
        let counted = Counted { at: Instant::now(), waiting: waiting + 1, most };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(ns.clone(), counted);
        counted
    }
}
