//! Quarantine for runs whose decisions kill the process. Before runs are decided, the store notes their ids
//! ([`Handling`]). A process that dies leaves the note behind, and the next process suspects these runs: each is
//! decided alone. A suspect that was being decided alone when the process died again is quarantined: nothing is decided
//! on it until an operator releases it. A run that a message starts is suspected in the same way before it is stored;
//! if it is quarantined, it does not start, and the step that waits for it fails.

use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::{MessageBody, Millis, RunId};
use eddyline_store::{
    Change, Command, CommandId, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, Expect, Handling,
    MAX_PAGE, Map, Namespace, Store, Summary,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::certain;
use crate::chore::Chore;
use crate::committer::Order;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::shutdown::Shutdown;

/// The kind of documents that hold suspicions, by run id.
const SUSPECT: &str = "suspect";
/// A run is quarantined after this many deaths, the last of them while it was decided alone.
const DEATHS: u32 = 2;

/// The record of a run that was being decided when a process died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspicion {
    /// How many processes died while deciding on it.
    pub deaths: u32,
    /// The last process died while deciding it alone, and not for the first time: nothing is decided on it any more.
    pub quarantined: bool,
    /// When the last of these deaths was noticed.
    pub at: Millis,
}

/// The error for inputs of a quarantined run.
pub(crate) fn refusal(run: RunId, deaths: u32) -> EngineError {
    EngineError::Quarantined(format!(
        "run {run} is quarantined: {deaths} processes died while handling it; resume it to try again, or cancel it"
    ))
}

/// The same for a run that is not stored yet.
pub(crate) fn refusal_to_start(run: RunId, deaths: u32) -> EngineError {
    EngineError::Quarantined(format!("run {run} is not started: {deaths} processes died while starting it"))
}

/// The kind of failure of a child that is quarantined before it starts.
pub(crate) const NOT_STARTED: &str = "Quarantined";

/// How long to wait before asking the store again.
const AFTER_ERROR: Duration = Duration::from_millis(200);

/// The suspected runs: those in the store, plus those in the note of the last process.
async fn suspects(instance: &Instance) -> Result<Map<RunId, Suspicion>> {
    let noted = instance.store.handled_before();
    let mut known = Map::default();
    for (ns, run, suspicion) in read(&*instance.store, None).await? {
        match namespace_of(&*instance.store, run).await? {
            Some(_) => {
                known.insert(run, suspicion);
            }
            // It has ended since, so the suspicion is deleted.
            None => {
                instance.put(&ns, SUSPECT, &run.to_string(), Expect::Any, None).await?;
            }
        }
    }
    // Suspects are decided one at a time. So if the note contains one suspect, it is to blame, and not the runs that
    // were decided next to it for the first time.
    let mut blamed: Vec<RunId> = noted.runs().collect();
    if blamed.iter().filter(|run| known.contains_key(*run)).count() == 1 {
        blamed.retain(|run| known.contains_key(run));
    }
    let alone = blamed.len() == 1;
    let now = instance.store.now().await?;
    for run in blamed {
        // Without a waiting start message, a client was starting it; the client may retry.
        let Some(ns) = namespace_of(&*instance.store, run).await? else { continue };
        let deaths = known.get(&run).map_or(0, |suspicion| suspicion.deaths) + 1;
        let suspicion = Suspicion { deaths, quarantined: alone && deaths >= DEATHS, at: now };
        match suspicion.quarantined {
            true => tracing::error!(%run, deaths, "quarantined: the last process died while handling this run alone"),
            false => tracing::warn!(%run, deaths, "the last process died while handling this run"),
        }
        instance.put(&ns, SUSPECT, &run.to_string(), Expect::Any, Some(json!(suspicion))).await?;
        known.insert(run, suspicion);
    }
    // The suspicions are stored, so clear the note: if this process dies before deciding anything, it adds no deaths.
    instance.store.note_handling(&Handling::default());
    Ok(known)
}

/// The namespace of a run that can still be decided: it has not ended, or its start message waits to be delivered.
async fn namespace_of(store: &dyn Store, run: RunId) -> Result<Option<Namespace>> {
    if let Some(summary) = store.summary(run).await? {
        return Ok(summary.ended_at.is_none().then(|| summary.ns.clone()));
    }
    let pending = store.pending(run).await?;
    let starts = pending.messages.iter().any(|message| matches!(message.body, MessageBody::Start { .. }));
    Ok(pending.unstored_in.filter(|_| starts))
}

/// The same, retried until the store answers. Takes the instance by value, so that it is dropped before the committer
/// runs: the committer runs as long as somebody holds a sender of orders.
pub(crate) async fn suspects_in_time(instance: Instance, mut shutdown: Shutdown) -> Map<RunId, Suspicion> {
    loop {
        match suspects(&instance).await {
            Ok(suspects) => return suspects,
            Err(error) => tracing::warn!("could not read the suspected runs; will retry: {error}"),
        }
        tokio::select! {
            () = tokio::time::sleep(AFTER_ERROR) => {}
            () = shutdown.wait() => return Map::default(),
        }
    }
}

/// The quarantined runs of a store, of one namespace or of all, by id.
pub async fn quarantined_in(store: &dyn Store, ns: Option<&Namespace>) -> Result<Vec<(Summary, Suspicion)>> {
    let mut found = Vec::new();
    for (_, run, suspicion) in read(store, ns).await? {
        if suspicion.quarantined
            && let Some(summary) = store.summary(run).await?
            && summary.ended_at.is_none()
        {
            found.push((summary, suspicion));
        }
    }
    Ok(found)
}

async fn read(store: &dyn Store, ns: Option<&Namespace>) -> Result<Vec<(Namespace, RunId, Suspicion)>> {
    let (mut known, mut after) = (Vec::new(), None);
    loop {
        let filter = DocumentFilter { kind: SUSPECT.to_owned(), after, ..DocumentFilter::default() };
        let page = store.documents(ns, &filter, MAX_PAGE).await?;
        let full = page.len() == MAX_PAGE;
        for document in &page {
            let suspicion = serde_json::from_value(document.body.clone());
            if let (Ok(id), Ok(suspicion)) = (document.key.id.parse(), suspicion) {
                known.push((document.ns.clone(), RunId(id), suspicion));
            }
        }
        match page.into_iter().next_back() {
            Some(last) if full => after = Some(last.key.id),
            _ => return Ok(known),
        }
    }
}

/// The loop that tells the committer which runs other processes suspect or have released. It does nothing if no other
/// process can change the store.
pub(crate) struct Suspects {
    instance: Instance,
}

impl Suspects {
    pub fn new(instance: Instance) -> Suspects {
        Suspects { instance }
    }
}

impl Chore for Suspects {
    const NAME: &'static str = "suspects";

    async fn round(&mut self) -> Result<Option<Millis>> {
        if self.instance.store.documents_changed().is_some() {
            return Ok(None);
        }
        // Changes that this process makes while the documents are read are newer than what is read.
        let as_of = self.instance.committing.suspicions_changed();
        let known =
            read(&*self.instance.store, None).await?.into_iter().map(|(_, run, suspicion)| (run, suspicion)).collect();
        self.instance.committing.send(Order::Suspects { known, as_of }).await?;
        Ok(None)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Documents { kind, .. } if kind == SUSPECT)
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.poll_ms()
    }
}

/// Deletes the suspicion of a run.
pub(crate) fn forget(run: RunId) -> DocumentChange {
    let key = DocumentKey::new(SUSPECT, run.to_string());
    DocumentChange { key, expect: Expect::Any, body: None, due: None }
}

/// Clears a suspect: the run was decided, and the process survived.
pub(crate) async fn absolve(store: Arc<dyn Store>, command: CommandId, ns: Namespace, run: RunId) {
    let commit = DocumentCommit {
        ns,
        command,
        documents: vec![forget(run)],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    if let Err(error) = certain::commit_one(&*store, Command::Documents(commit)).await {
        tracing::warn!(%run, "could not delete the suspicion of this run: {error}");
    }
}

impl Engine {
    /// The suspicion of a run, if it is quarantined.
    pub async fn quarantine(&self, ns: &Namespace, run: RunId) -> Result<Option<Suspicion>> {
        let document = self.instance.document(Some(ns), SUSPECT, &run.to_string()).await?;
        let suspicion = document.and_then(|document| serde_json::from_value::<Suspicion>(document.body).ok());
        Ok(suspicion.filter(|suspicion| suspicion.quarantined))
    }

    /// The quarantined runs of a namespace, by id.
    pub async fn quarantined(&self, ns: &Namespace) -> Result<Vec<(Summary, Suspicion)>> {
        quarantined_in(&*self.instance.store, Some(ns)).await
    }

    /// Releases a run from quarantine; false if it is not quarantined. It is still decided alone, and quarantined again
    /// if another process dies while deciding it.
    pub(crate) async fn release_from_quarantine(&self, ns: &Namespace, run: RunId) -> Result<bool> {
        let Some(suspicion) = self.quarantine(ns, run).await? else { return Ok(false) };
        let released = Suspicion { quarantined: false, ..suspicion };
        self.instance.put(ns, SUSPECT, &run.to_string(), Expect::Any, Some(json!(released))).await?;
        self.committing().send(Order::Suspect(run, released)).await?;
        Ok(true)
    }
}
