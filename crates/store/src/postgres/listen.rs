//! Hints between processes, by LISTEN and NOTIFY on a connection of their own.
//!
//! They are sent separately from the commits that they are about, gathered for a moment: a NOTIFY inside a transaction
//! would make commits wait for each other. Hints may be late, or lost with their connection; then all waiters are told
//! that hints were missed. Behind a proxy that pools transactions no hints arrive: LISTEN is accepted there, but for a
//! session that other clients use next. So a process relies on hints only after its own have come back, and waiters
//! poll until then.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use deadpool::managed::Pool;
use eddyline_machine::RunId;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_postgres::types::Type;
use tokio_postgres::{AsyncMessage, Client};
use uuid::Uuid;

use super::connect::{Connector, Session};
use super::database::pause;
use crate::hints::Teller;
use crate::ids::Namespace;
use crate::query::Change;

/// How long hints are gathered before they are sent.
const GATHERED: Duration = Duration::from_millis(10);
/// The payload of a notification has at most 8,000 bytes.
const MOST_BYTES: usize = 7_500;
/// The most hints that are sent together; if there are more, other processes are told that they missed some.
const MOST: usize = 2_000;
/// How long a hint may take to come back to its sender. If it takes longer, hints do not arrive.
const ECHO_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a statement on the connection for hints may take, or the wait for a connection of the pool.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a process checks that hints still arrive.
const CHECK_EVERY: Duration = Duration::from_secs(10);
/// How often a process checks whether hints arrive again: the first interval, doubled after each failure up to the
/// second.
const RECHECK_FIRST: Duration = Duration::from_secs(2);
const RECHECK_MAX: Duration = Duration::from_secs(60);
/// The longest name of a channel.
const MOST_NAME: usize = 63;

/// Receives the changes of this process and of others, and passes them on.
#[derive(Debug, Default)]
pub(super) struct Hub {
    pub teller: Teller,
    unsent: Mutex<VecDeque<Change>>,
    waiting: Notify,
    /// No other process serves from the database, so no hints are sent.
    alone: AtomicBool,
    /// A change was not sent because of that.
    untold: AtomicBool,
    /// Hints of other processes arrive.
    listening: AtomicBool,
    /// Signals that a hint of this process has come back.
    echo: Notify,
    /// Increases with each change of documents that this process knows of.
    documents: AtomicU64,
    /// The database's count of commits of documents, when last read.
    documents_counted: AtomicI64,
}

/// Runs the connection for hints while the store is open.
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

    /// Compares the database's count of commits of documents with the last one.
    pub fn saw_documents(&self, counted: i64) {
        if self.documents_counted.swap(counted, Ordering::AcqRel) != counted {
            self.documents.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Counts changes of documents, before they are passed on.
    fn note_documents(&self, changes: &[Change]) {
        if changes.iter().any(|change| matches!(change, Change::Documents { .. })) {
            self.documents.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn missed(&self) {
        self.documents.fetch_add(1, Ordering::AcqRel);
        self.teller.tell_missed();
    }

    /// Passes on changes that this process has made.
    pub fn tell(&self, changes: Vec<Change>) {
        self.note_documents(&changes);
        if self.alone.load(Ordering::Acquire) {
            self.untold.store(true, Ordering::Release);
        } else {
            let mut unsent = self.unsent.lock().unwrap_or_else(PoisonError::into_inner);
            if unsent.len() <= MOST {
                unsent.extend(changes.iter().cloned());
            }
            drop(unsent);
            self.waiting.notify_one();
        }
        self.teller.tell(changes);
    }

    /// Whether other processes serve from the database, as of a check-in. One that has come since the last check-in is told
    /// that it missed something, and looks at everything.
    pub fn is_alone(&self, alone: bool) {
        if self.alone.swap(alone, Ordering::AcqRel) && !alone {
            self.waiting.notify_one();
        }
    }

    /// Whether others have to look at everything, because hints were not sent.
    fn owes_hints(&self) -> bool {
        !self.alone.load(Ordering::Acquire) && self.untold.swap(false, Ordering::AcqRel)
    }

    fn take_unsent(&self) -> VecDeque<Change> {
        std::mem::take(&mut *self.unsent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn hear(&self, own: Uuid, payload: &str) {
        match serde_json::from_str(payload) {
            Ok(Value::Array(said)) => match said.split_first() {
                Some((from, _)) if *from == json!(own) => self.echo.notify_one(),
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

/// Starts to receive hints, and to send those of the hub.
pub(super) async fn start(connector: &Connector, pool: &Pool<Connector>, schema: &str, hub: &Arc<Hub>) -> Listener {
    let ready = Arc::new(Notify::new());
    let exchange = Exchange {
        connector: connector.clone(),
        pool: pool.clone(),
        channel: channel(schema),
        hub: Arc::downgrade(hub),
        own: Uuid::new_v4(),
        ready: ready.clone(),
    };
    let task = tokio::spawn(exchange.run());
    // Changes after the store is opened are not missed: they are received, or polled for if hints do not arrive.
    _ = timeout(ANSWER_TIMEOUT, ready.notified()).await;
    Listener(task)
}

/// Each schema has its own channel; channel names are shared by the whole database, and short.
fn channel(schema: &str) -> String {
    let name = format!("{schema}_hints");
    if name.len() <= MOST_NAME {
        return name;
    }
    let digest = Sha256::digest(schema.as_bytes());
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}_hints")
}

#[derive(Debug)]
struct Exchange {
    connector: Connector,
    pool: Pool<Connector>,
    channel: String,
    hub: Weak<Hub>,
    own: Uuid,
    /// Signals that the first check has completed.
    ready: Arc<Notify>,
}

/// The connection for hints is lost.
struct Lost;

impl Exchange {
    async fn run(self) {
        let mut tries = 0;
        while self.hub.strong_count() > 0 {
            tries = match self.connector.connect().await {
                Ok((client, session)) => {
                    tokio::select! {
                        () = self.receive(session) => {}
                        Lost = self.exchange_hints(&client) => {}
                    }
                    0
                }
                Err(_) => tries + 1,
            };
            self.on_hints_lost();
            pause(tries.min(9)).await;
        }
    }

    async fn receive(&self, mut session: Session) {
        while let Some(Ok(message)) = poll_fn(|cx| session.poll_message(cx)).await {
            if let (AsyncMessage::Notification(said), Some(hub)) = (message, self.hub.upgrade()) {
                hub.hear(self.own, said.payload());
            }
        }
    }

    /// Checks whether hints arrive, and sends those of this process, until the connection is lost.
    async fn exchange_hints(&self, client: &Client) -> Lost {
        let mut wait = RECHECK_FIRST;
        loop {
            // The check uses another connection: behind a proxy, this one could happen to receive its own.
            if let Err(Lost) = self.listen(client).await {
                return Lost;
            }
            match self.echo_returns(None).await {
                Err(Lost) => return Lost,
                Ok(true) => {
                    wait = RECHECK_FIRST;
                    self.on_hints_arriving();
                    self.ready.notify_one();
                    if let Err(Lost) = self.send_while_received(client).await {
                        return Lost;
                    }
                    self.on_hints_lost();
                }
                Ok(false) => {
                    self.on_hints_lost();
                    self.ready.notify_one();
                    if let Err(Lost) = self.send_for(client, wait).await {
                        return Lost;
                    }
                    wait = (wait * 2).min(RECHECK_MAX);
                }
            }
        }
    }

    fn on_hints_lost(&self) {
        if let Some(hub) = self.hub.upgrade()
            && hub.listening.swap(false, Ordering::AcqRel)
        {
            // Hints that are sent while no process listens are lost.
            hub.missed();
        }
    }

    fn on_hints_arriving(&self) {
        if let Some(hub) = self.hub.upgrade() {
            hub.listening.store(true, Ordering::Release);
            // Earlier changes of other processes were missed.
            hub.missed();
        }
    }

    async fn listen(&self, client: &Client) -> Result<(), Lost> {
        let listen = format!("LISTEN \"{}\"", self.channel);
        match timeout(ANSWER_TIMEOUT, client.batch_execute(&listen)).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Lost),
        }
    }

    /// Whether a hint of this process comes back to it, sent by `client` or by a connection of the pool.
    async fn echo_returns(&self, client: Option<&Client>) -> Result<bool, Lost> {
        let Some(hub) = self.hub.upgrade() else { return Err(Lost) };
        // Discard the signal of an earlier one.
        _ = timeout(Duration::ZERO, hub.echo.notified()).await;
        match client {
            Some(client) => self.notify(client, &self.echo()).await?,
            None => match timeout(ANSWER_TIMEOUT, self.pool.get()).await {
                Ok(Ok(other)) if self.notify(&other, &self.echo()).await.is_ok() => {}
                _ => return Ok(false),
            },
        }
        Ok(timeout(ECHO_TIMEOUT, hub.echo.notified()).await.is_ok())
    }

    /// A message that contains no change.
    fn echo(&self) -> String {
        message(self.own, vec![json!(["echo"])])
    }

    async fn notify(&self, client: &Client, payload: &str) -> Result<(), Lost> {
        let notify = "SELECT pg_notify($1, $2)";
        let params = [(&self.channel as _, Type::TEXT), (&payload as _, Type::TEXT)];
        match timeout(ANSWER_TIMEOUT, client.query_typed(notify, &params)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Lost),
        }
    }

    /// Sends hints as long as they come back.
    async fn send_while_received(&self, client: &Client) -> Result<(), Lost> {
        loop {
            self.send_for(client, CHECK_EVERY).await?;
            if !self.echo_returns(Some(client)).await? {
                return Ok(());
            }
        }
    }

    /// Sends hints for a while.
    async fn send_for(&self, client: &Client, how_long: Duration) -> Result<(), Lost> {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            let Some(hub) = self.hub.upgrade() else { return Err(Lost) };
            if hub.owes_hints() {
                self.notify(client, &missed(self.own)).await?;
            }
            let unsent = hub.take_unsent();
            for payload in payloads(self.own, unsent) {
                self.notify(client, &payload).await?;
            }
            let gathered = hub.waiting.notified();
            // Wakes regularly to check whether the store is still open.
            if timeout(Duration::from_secs(1), gathered).await.is_ok() {
                sleep(GATHERED).await;
            }
        }
        Ok(())
    }
}

/// A message without changes: processes that receive it check everything.
fn missed(own: Uuid) -> String {
    json!([own]).to_string()
}

/// Splits changes into messages within the size limit.
fn payloads(own: Uuid, mut changes: VecDeque<Change>) -> Vec<String> {
    if changes.len() > MOST {
        return vec![missed(own)];
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

/// Ignores changes that only a newer Eddyline knows.
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
    fn others_receive_each_hint_once_and_the_sender_does_not() {
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
    fn channel_names_are_short_and_differ_by_schema() {
        let (long, other) = ("s".repeat(63), format!("{}t", "s".repeat(62)));
        assert_eq!(channel("Eddy-2"), "Eddy-2_hints");
        assert!(channel(&long).len() <= MOST_NAME);
        assert_ne!(channel(&long), channel(&other));
    }

    #[test]
    fn messages_stay_small_and_too_many_hints_count_as_missed() {
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
