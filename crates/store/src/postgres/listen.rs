//! Hints from one process to the others, by LISTEN and NOTIFY on a connection of their own.
//!
//! They are sent apart from the commits that they are about, gathered for a moment: a NOTIFY inside a transaction would
//! make commits wait for each other. They may come late or be lost with their connection; then everybody is told that
//! something was missed. Behind a proxy that pools transactions there are none, and whoever waits polls.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use eddyline_machine::RunId;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;
use uuid::Uuid;

use super::database::pause;
use super::settings::Settings;
use crate::hints::Teller;
use crate::ids::Namespace;
use crate::query::Change;

/// How long hints are gathered before they are sent.
const GATHERED: Duration = Duration::from_millis(10);
/// A message of PostgreSQL has at most 8,000 bytes.
const MOST_BYTES: usize = 7_500;
/// So many hints are sent at once; beyond that others are told that they missed some.
const MOST: usize = 2_000;

/// Where the changes of this process are told, here and elsewhere.
#[derive(Debug, Default)]
pub(super) struct Hub {
    pub teller: Teller,
    unsent: Mutex<VecDeque<Change>>,
    waiting: Notify,
    /// The connection for hints is there.
    listening: AtomicBool,
    /// Changes with each change of documents that this process knows of.
    documents: AtomicU64,
    /// How many commits of documents there were when the database last said it.
    documents_counted: AtomicI64,
}

/// The connection for hints, for as long as the store is open.
#[derive(Debug)]
pub(super) struct Listener(JoinHandle<()>);

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Hub {
    pub fn is_listening(&self) -> bool {
        self.listening.load(Ordering::Acquire)
    }

    pub fn documents_seen(&self) -> u64 {
        self.documents.load(Ordering::Acquire)
    }

    /// The database has counted so many commits of documents.
    pub fn saw_documents(&self, counted: i64) {
        if self.documents_counted.swap(counted, Ordering::AcqRel) != counted {
            self.documents.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Counts changes of documents before anybody is told of them.
    fn note_documents(&self, changes: &[Change]) {
        if changes.iter().any(|change| matches!(change, Change::Documents { .. })) {
            self.documents.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn missed(&self) {
        self.documents.fetch_add(1, Ordering::AcqRel);
        self.teller.tell_missed();
    }

    /// What this process has changed.
    pub fn tell(&self, changes: Vec<Change>) {
        self.note_documents(&changes);
        let mut unsent = self.unsent.lock().unwrap_or_else(PoisonError::into_inner);
        if unsent.len() <= MOST {
            unsent.extend(changes.iter().cloned());
        }
        drop(unsent);
        self.waiting.notify_one();
        self.teller.tell(changes);
    }

    fn take_unsent(&self) -> VecDeque<Change> {
        std::mem::take(&mut *self.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn hear(&self, own: Uuid, payload: &str) {
        match serde_json::from_str(payload) {
            Ok(Value::Array(said)) => match said.split_first() {
                Some((from, _)) if *from == json!(own) => {}
                Some((_, [])) => self.missed(),
                Some((_, changes)) => {
                    let changes: Vec<Change> = changes.iter().filter_map(read).collect();
                    self.note_documents(&changes);
                    self.teller.tell(changes);
                }
                None => {}
            },
            _ => self.missed(),
        }
    }
}

/// Listens from now on, and sends what the hub is told.
pub(super) async fn start(settings: &Settings, tls: Option<MakeRustlsConnect>, hub: &Arc<Hub>) -> Listener {
    let (settings, hub, own) = (settings.clone(), Arc::downgrade(hub), Uuid::new_v4());
    let ready = Arc::new(Notify::new());
    let listens = ready.clone();
    let task = tokio::spawn(async move {
        let mut tries = 0;
        while hub.strong_count() > 0 {
            tries = if serve(&settings, tls.clone(), &hub, own, &listens).await { 0 } else { tries + 1 };
            // What was told while nobody listened is lost.
            if let Some(hub) = hub.upgrade() {
                hub.listening.store(false, Ordering::Release);
                hub.missed();
            }
            pause(tries.min(9)).await;
        }
    });
    // What happens after the store was opened is heard; if nothing listens by then, it is polled for.
    _ = tokio::time::timeout(Duration::from_secs(5), ready.notified()).await;
    Listener(task)
}

/// One connection, until it ends. Whether it was made.
async fn serve(
    settings: &Settings,
    tls: Option<MakeRustlsConnect>,
    hub: &Weak<Hub>,
    own: Uuid,
    ready: &Notify,
) -> bool {
    match tls {
        Some(tls) => match settings.config.connect(tls).await {
            Ok((client, connection)) => exchange(settings, client, connection, hub, own, ready).await,
            Err(_) => return false,
        },
        None => match settings.config.connect(NoTls).await {
            Ok((client, connection)) => exchange(settings, client, connection, hub, own, ready).await,
            Err(_) => return false,
        },
    }
    true
}

async fn exchange<S, T>(
    settings: &Settings,
    client: tokio_postgres::Client,
    mut connection: tokio_postgres::Connection<S, T>,
    hub: &Weak<Hub>,
    own: Uuid,
    ready: &Notify,
) where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let channel = format!("{}_hints", settings.schema);
    let hearing = async {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let (AsyncMessage::Notification(said), Some(hub)) = (message, hub.upgrade()) {
                hub.hear(own, said.payload());
            }
        }
    };
    let saying = async {
        if client.batch_execute(&format!("LISTEN {channel}")).await.is_err() {
            return;
        }
        if let Some(hub) = hub.upgrade() {
            hub.listening.store(true, Ordering::Release);
            // What others changed before was not heard.
            hub.missed();
        }
        ready.notify_one();
        loop {
            let Some(hub) = hub.upgrade() else { return };
            let unsent = hub.take_unsent();
            for payload in payloads(own, unsent) {
                if client.execute("SELECT pg_notify($1, $2)", &[&channel, &payload]).await.is_err() {
                    return;
                }
            }
            let gathered = hub.waiting.notified();
            // Looks now and then whether the store is still open.
            if tokio::time::timeout(Duration::from_secs(1), gathered).await.is_ok() {
                tokio::time::sleep(GATHERED).await;
            }
        }
    };
    tokio::select! {
        () = hearing => {}
        () = saying => {}
    }
}

/// Messages that are small enough. One without changes says that there were too many.
fn payloads(own: Uuid, mut changes: VecDeque<Change>) -> Vec<String> {
    if changes.len() > MOST {
        return vec![json!([own]).to_string()];
    }
    let mut payloads = Vec::new();
    let mut said: Vec<Value> = Vec::new();
    let mut bytes = 0;
    changes.make_contiguous().sort_by_key(|change| format!("{change:?}"));
    let mut last = None;
    for change in changes {
        if last.as_ref() == Some(&change) {
            continue;
        }
        let value = written(&change);
        last = Some(change);
        let size = value.to_string().len() + 1;
        if size > MOST_BYTES {
            return vec![json!([own]).to_string()];
        }
        if bytes + size > MOST_BYTES {
            payloads.push(message(own, std::mem::take(&mut said)));
            bytes = 0;
        }
        bytes += size;
        said.push(value);
    }
    if !said.is_empty() {
        payloads.push(message(own, said));
    }
    payloads
}

fn message(own: Uuid, mut said: Vec<Value>) -> String {
    said.insert(0, json!(own));
    Value::Array(said).to_string()
}

fn written(change: &Change) -> Value {
    match change {
        Change::Run { run, ended } => json!(["run", run.0, ended]),
        Change::Tasks { ns, queue } => json!(["tasks", ns, queue]),
        Change::Timers => json!(["timers"]),
        Change::Messages => json!(["messages"]),
        Change::Leases => json!(["leases"]),
        Change::Documents { ns, kind } => json!(["documents", ns, kind]),
        Change::Events { ns } => json!(["events", ns]),
    }
}

/// A newer process may say what this one does not know.
fn read(value: &Value) -> Option<Change> {
    let text = |at: usize| value.get(at).and_then(Value::as_str);
    let ns = || text(1).map(Namespace::new);
    Some(match text(0)? {
        "run" => Change::Run { run: RunId(text(1)?.parse().ok()?), ended: value.get(2)?.as_bool()? },
        "tasks" => Change::Tasks { ns: ns()?, queue: text(2)?.to_owned() },
        "timers" => Change::Timers,
        "messages" => Change::Messages,
        "leases" => Change::Leases,
        "documents" => Change::Documents { ns: ns()?, kind: text(2)?.to_owned() },
        "events" => Change::Events { ns: ns()? },
        _ => return None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::hints::Heard;
    use std::task::{Context, Poll, Waker};

    fn all() -> Vec<Change> {
        let ns = Namespace::new("other\0");
        vec![
            Change::Run { run: RunId(Uuid::from_u128(7)), ended: true },
            Change::Tasks { ns: ns.clone(), queue: "bulk".to_owned() },
            Change::Timers,
            Change::Messages,
            Change::Leases,
            Change::Documents { ns: ns.clone(), kind: "thing".to_owned() },
            Change::Events { ns },
        ]
    }

    #[test]
    fn what_one_says_others_hear_once_and_itself_does_not() {
        let (hub, own) = (Hub::default(), Uuid::from_u128(1));
        let mut hints = hub.teller.listen();
        let said = payloads(own, all().into_iter().chain(all()).collect());
        assert_eq!(said.len(), 1);
        hub.hear(own, &said[0]);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(hints.poll_next(&mut cx).is_pending());
        hub.hear(Uuid::from_u128(2), &said[0]);
        let Poll::Ready(Some(Heard::Changes(heard))) = hints.poll_next(&mut cx) else { panic!("changes") };
        assert_eq!(heard.len(), all().len());
        assert!(all().iter().all(|change| heard.contains(change)));
    }

    #[test]
    fn messages_stay_small_and_too_many_are_said_to_be_missed() {
        let runs = |count: u128| {
            (0..count).map(|n| Change::Run { run: RunId(Uuid::from_u128(n)), ended: false }).collect::<VecDeque<_>>()
        };
        let said = payloads(Uuid::nil(), runs(1_000));
        assert!(said.len() > 1 && said.iter().all(|said| said.len() < 8_000));
        let said = payloads(Uuid::nil(), runs(MOST as u128 + 1));
        let (hub, mut cx) = (Hub::default(), Context::from_waker(Waker::noop()));
        let mut hints = hub.teller.listen();
        hub.hear(Uuid::from_u128(2), &said[0]);
        assert_eq!(hints.poll_next(&mut cx), Poll::Ready(Some(Heard::Missed)));
    }
}
