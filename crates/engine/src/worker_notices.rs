//! Notices that a worker was drained, removed or registered anew, for the instances that cache it.
//!
//! A notice is a document of its own kind. The worker's document changes with every heartbeat and notices are rare, so
//! every instance reads all of them after a hint that one has changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use eddyline_machine::Millis;
use eddyline_store::{Change, DocumentChange, DocumentFilter, DocumentKey, Expect, MAX_PAGE, Namespace};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::watch;

use crate::chore::Chore;
use crate::committer::Order;
use crate::error::Result;
use crate::instance::Instance;
use crate::workers::Workers;

/// The kind of documents that hold notices, by the id of the worker.
pub(crate) const NOTICE: &str = "worker-notice";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Notice {
    Registered,
    Drained,
    Removed,
}

impl Notice {
    /// The change that stores it.
    pub fn about(self, worker: &str) -> DocumentChange {
        let body = Some(json!(self));
        DocumentChange { key: DocumentKey::new(NOTICE, worker), expect: Expect::Any, body, due: None }
    }

    /// The change that deletes the notice about a worker.
    pub fn forget(worker: &str) -> DocumentChange {
        DocumentChange { key: DocumentKey::new(NOTICE, worker), expect: Expect::Any, body: None, due: None }
    }
}

/// The loop that acts on notices of other instances.
pub(crate) struct WorkerNotices {
    instance: Instance,
    workers: Arc<Workers>,
    drained: watch::Sender<()>,
    /// The revisions of the notices that were read; none before the first round.
    known: Option<BTreeMap<(Namespace, String), u64>>,
}

impl WorkerNotices {
    pub fn new(instance: Instance, workers: Arc<Workers>, drained: watch::Sender<()>) -> WorkerNotices {
        WorkerNotices { instance, workers, drained, known: None }
    }
}

impl Chore for WorkerNotices {
    const NAME: &'static str = "worker_notices";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let store = &self.instance.store;
        if store.documents_changed().is_some() {
            // No other process can change a worker.
            return Ok(None);
        }
        let mut filter = DocumentFilter { kind: NOTICE.to_owned(), ..DocumentFilter::default() };
        let mut found = BTreeMap::new();
        loop {
            let page = store.documents(None, &filter, MAX_PAGE).await?;
            let Some(last) = page.last() else { break };
            (filter.after, filter.after_ns) = (Some(last.key.id.clone()), Some(last.ns.clone()));
            for document in page {
                let worker = (document.ns, document.key.id);
                // Before the first round nothing was cached.
                let is_new = self.known.as_ref().is_some_and(|known| known.get(&worker) != Some(&document.revision));
                if is_new {
                    let (ns, id) = &worker;
                    self.workers.forget(ns, id);
                    if document.body != json!(Notice::Registered) {
                        self.instance.committing.send(Order::Dismiss(ns.clone(), id.clone())).await?;
                        self.drained.send_replace(());
                    }
                }
                found.insert(worker, document.revision);
            }
        }
        self.known = Some(found);
        Ok(None)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Documents { kind, .. } if kind == NOTICE)
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.poll_ms()
    }
}
