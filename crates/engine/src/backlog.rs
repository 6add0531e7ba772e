//! Starts are refused while more tasks wait than workers will get through any time soon.

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

/// What waits is counted this often; in between starts are added to it as if each brought one task.
const LOOK: Duration = Duration::from_secs(1);
/// When to come back.
const RETRY_AFTER_MS: Millis = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Backlogs(Mutex<HashMap<Namespace, Counted>>);

#[derive(Debug, Clone, Copy)]
struct Counted {
    at: Instant,
    waiting: usize,
    /// So many may wait.
    most: usize,
}

impl Backlogs {
    /// Room for one more start, or the refusal.
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
        let message = format!("{most} tasks or more wait for workers in {ns}; no runs are started until some are done");
        Err(EngineError::TooMany { message, retry_after_ms: RETRY_AFTER_MS })
    }

    /// The settings of the namespace have changed: they are read with the next start.
    pub fn forget(&self, ns: &Namespace) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(ns);
    }

    /// How many there are with this one, if that was counted a short while ago.
    fn known(&self, ns: &Namespace) -> Option<Counted> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = all.get_mut(ns).filter(|counted| counted.at.elapsed() < LOOK)?;
        counted.waiting += 1;
        Some(*counted)
    }

    fn keep(&self, ns: &Namespace, waiting: usize, most: usize) -> Counted {
        let counted = Counted { at: Instant::now(), waiting: waiting + 1, most };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(ns.clone(), counted);
        counted
    }
}
