//! Runs that ended the process. Before anything is decided, the store notes on which runs ([`Handling`]). A process that
//! dies leaves the note, and the next one suspects these runs: each is handled alone. One that was being handled alone
//! when the process died again is quarantined: it is not decided on until an operator releases it. A run that is started by
//! a message is suspected in the same way before it is stored; if it is quarantined, it does not start, and the step that
//! waits for it fails.

use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::{MessageBody, Millis, RunId};
use eddyline_store::{
    Change, Command, CommandId, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, Expect, Handling,
    MAX_PAGE, Map, Namespace, Store, Summary,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::chore::Chore;
use crate::committer::Order;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::shutdown::Shutdown;

/// The kind of the documents that keep suspicions, each under its run's id.
const SUSPECT: &str = "suspect";
/// So many deaths, the last of them while the run was handled alone, put it into quarantine.
const DEATHS: u32 = 2;

/// What is known of a run that was being handled when the process died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspicion {
    /// How many processes died while they handled it.
    pub deaths: u32,
    /// It was handled alone when the last one died, and not for the first time: nothing is decided on it any more.
    pub quarantined: bool,
    /// When the last of these deaths was noticed.
    pub at: Millis,
}

/// What whoever sends something to a run in quarantine is told.
pub(crate) fn refusal(run: RunId, deaths: u32) -> EngineError {
    EngineError::Quarantined(format!(
        "run {run} is quarantined: {deaths} processes ended while they handled it. Resume it to try again, or cancel it"
    ))
}

/// The same of a run that is not there yet.
pub(crate) fn refusal_to_start(run: RunId, deaths: u32) -> EngineError {
    EngineError::Quarantined(format!("run {run} is not started: {deaths} processes ended while they started it"))
}

/// The kind of failure of a child that is not started for that reason.
pub(crate) const NOT_STARTED: &str = "Quarantined";

/// How long to wait before the store is asked again.
const AFTER_ERROR: Duration = Duration::from_millis(200);

/// The runs that are suspected, after what the last process noted is added to what was known.
async fn suspects(instance: &Instance) -> Result<Map<RunId, Suspicion>> {
    let noted = instance.store.handled_before();
    let mut known = Map::default();
    for (ns, run, suspicion) in read(&*instance.store, None).await? {
        match namespace_of(&*instance.store, run).await? {
            Some(_) => {
                known.insert(run, suspicion);
            }
            // It has ended since: there is nothing to suspect any more.
            None => {
                instance.put(&ns, SUSPECT, &run.to_string(), Expect::Any, None).await?;
            }
        }
    }
    // Suspects are decided on one at a time. So if one of them was, it is to blame, and not the others that were decided
    // on beside it for the first time.
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
            true => tracing::error!(%run, deaths, "quarantined: the process ended while it handled this run alone"),
            false => tracing::warn!(%run, deaths, "the last process ended while it handled this run"),
        }
        instance.put(&ns, SUSPECT, &run.to_string(), Expect::Any, Some(json!(suspicion))).await?;
        known.insert(run, suspicion);
    }
    // Noted for good: a process that dies before it handles anything adds nothing.
    instance.store.note_handling(&Handling::default());
    Ok(known)
}

/// The namespace of a run that something can still be decided on: it has not ended, or its start waits to be delivered.
async fn namespace_of(store: &dyn Store, run: RunId) -> Result<Option<Namespace>> {
    if let Some(summary) = store.summary(run).await? {
        return Ok(summary.ended_at.is_none().then(|| summary.ns.clone()));
    }
    let beside = store.beside(run).await?;
    let starts = beside.messages.iter().any(|message| matches!(message.body, MessageBody::Start { .. }));
    Ok(beside.unstored_in.filter(|_| starts))
}

/// The same, tried until the store answers. The instance is let go of before anything is decided: who has one can send
/// orders, and the committer goes on for as long as somebody can.
pub(crate) async fn suspects_in_time(instance: Instance, mut shutdown: Shutdown) -> Map<RunId, Suspicion> {
    loop {
        match suspects(&instance).await {
            Ok(suspects) => return suspects,
            Err(error) => tracing::warn!("it is not known yet which runs are suspected: {error}"),
        }
        tokio::select! {
            () = tokio::time::sleep(AFTER_ERROR) => {}
            () = shutdown.wait() => return Map::default(),
        }
    }
}

/// The runs of a store that are quarantined, of one namespace or of all, by their ids.
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

/// Tells the committer which runs other processes suspect or have released: a suspicion is a document of the store, and
/// the process that wrote it need not be this one. Where no other process can change the store, there is nothing to do.
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
        // What this process itself changes while the documents are read is newer than they are.
        let as_of = self.instance.committing.suspicions_changed();
        let known =
            read(&*self.instance.store, None).await?.into_iter().map(|(_, run, suspicion)| (run, suspicion)).collect();
        self.instance.committing.send(Order::Suspects { known, as_of }).await?;
        Ok(None)
    }

    fn wakes(_: &Change) -> bool {
        false
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.config.poll_ms
    }
}

/// There is nothing to suspect any more.
pub(crate) fn forget(run: RunId) -> DocumentChange {
    let key = DocumentKey::new(SUSPECT, run.to_string());
    DocumentChange { key, expect: Expect::Any, body: None, due: None }
}

/// The run was handled, and the process is still there.
pub(crate) async fn absolve(store: Arc<dyn Store>, command: CommandId, ns: Namespace, run: RunId) {
    let commit = DocumentCommit {
        ns,
        command,
        documents: vec![forget(run)],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    if let Err(error) = store.commit(vec![Command::Documents(commit)], Vec::new()).await {
        tracing::warn!(%run, "the run is still suspected: {error}");
    }
}

impl Engine {
    /// Why nothing is decided on a run, if it is quarantined.
    pub async fn quarantine(&self, ns: &Namespace, run: RunId) -> Result<Option<Suspicion>> {
        let document = self.instance.document(Some(ns), SUSPECT, &run.to_string()).await?;
        let suspicion = document.and_then(|document| serde_json::from_value::<Suspicion>(document.body).ok());
        Ok(suspicion.filter(|suspicion| suspicion.quarantined))
    }

    /// The runs of a namespace that are quarantined, by their ids.
    pub async fn quarantined(&self, ns: &Namespace) -> Result<Vec<(Summary, Suspicion)>> {
        quarantined_in(&*self.instance.store, Some(ns)).await
    }

    /// Lets a run out of quarantine, if it is in it. It is still handled alone, and goes back there if another process
    /// ends because of it.
    pub(crate) async fn release_from_quarantine(&self, ns: &Namespace, run: RunId) -> Result<bool> {
        let Some(suspicion) = self.quarantine(ns, run).await? else { return Ok(false) };
        let released = Suspicion { quarantined: false, ..suspicion };
        self.instance.put(ns, SUSPECT, &run.to_string(), Expect::Any, Some(json!(released))).await?;
        self.committing().send(Order::Suspect(run, released)).await?;
        Ok(true)
    }
}
