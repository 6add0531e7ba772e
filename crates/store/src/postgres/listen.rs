//! Hints from one process to the others, by LISTEN and NOTIFY on a connection of their own.
//!
//! They are sent apart from the commits that they are about, gathered for a moment: a NOTIFY inside a transaction would
//! make commits wait for each other. They may come late or be lost with their connection; then everybody is told that
//! something was missed. Behind a proxy that pools transactions nothing arrives: LISTEN is accepted there, but it is of a
//! session that others use next. So a process listens once it has heard itself, and whoever waits polls until then.

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
/// A message of PostgreSQL has at most 8,000 bytes.
const MOST_BYTES: usize = 7_500;
/// So many hints are sent at once; beyond that others are told that they missed some.
const MOST: usize = 2_000;
/// How long a hint to oneself may take. If it takes longer, nothing is heard.
const ECHO_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a statement on the connection for hints, or a free connection of the pool, may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How often it is tried whether hints still arrive.
const HEARING: Duration = Duration::from_secs(10);
/// How often it is tried whether hints arrive by now; longer after each failure, up to the second.
const DEAF: Duration = Duration::from_secs(2);
const DEAF_AT_MOST: Duration = Duration::from_secs(60);
/// The longest name of a channel.
const MOST_NAME: usize = 63;

/// Where the changes of this process are told, here and elsewhere.
#[derive(Debug, Default)]
pub(super) struct Hub {
    pub teller: Teller,
    unsent: Mutex<VecDeque<Change>>,
    waiting: Notify,
    /// No other process serves from the database, so nothing is sent.
    alone: AtomicBool,
    /// Something was not sent because of that.
    untold: AtomicBool,
    /// Hints arrive.
    listening: AtomicBool,
    /// A hint of this process has come back to it.
    echo: Notify,
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

/// Listens from now on, and sends what the hub is told.
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
    // What happens after the store was opened is heard; if nothing listens by then, it is polled for.
    _ = timeout(ANSWER_TIMEOUT, ready.notified()).await;
    Listener(task)
}

/// Each schema has a channel of its own; channels are of the whole database, and their names are short.
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
    /// It is known whether hints arrive.
    ready: Arc<Notify>,
}

/// The connection for hints is of no use any more.
struct Lost;

impl Exchange {
    async fn run(self) {
        let mut tries = 0;
        while self.hub.strong_count() > 0 {
            tries = match self.connector.connect().await {
                Ok((client, session)) => {
                    tokio::select! {
                        () = self.hear(session) => {}
                        Lost = self.talk(&client) => {}
                    }
                    0
                }
                Err(_) => tries + 1,
            };
            self.is_deaf();
            pause(tries.min(9)).await;
        }
    }

    async fn hear(&self, mut session: Session) {
        while let Some(Ok(message)) = poll_fn(|cx| session.poll_message(cx)).await {
            if let (AsyncMessage::Notification(said), Some(hub)) = (message, self.hub.upgrade()) {
                hub.hear(self.own, said.payload());
            }
        }
    }

    /// Finds out whether hints arrive, and sends those of this process, until the connection is lost.
    async fn talk(&self, client: &Client) -> Lost {
        let mut wait = DEAF;
        loop {
            // Through another connection: behind a proxy, this one could happen to get back what it said itself.
            if let Err(Lost) = self.listen(client).await {
                return Lost;
            }
            match self.hears(None).await {
                Err(Lost) => return Lost,
                Ok(true) => {
                    wait = DEAF;
                    self.hears_again();
                    self.ready.notify_one();
                    if let Err(Lost) = self.say_until_deaf(client).await {
                        return Lost;
                    }
                    self.is_deaf();
                }
                Ok(false) => {
                    self.is_deaf();
                    self.ready.notify_one();
                    if let Err(Lost) = self.say_for(client, wait).await {
                        return Lost;
                    }
                    wait = (wait * 2).min(DEAF_AT_MOST);
                }
            }
        }
    }

    fn is_deaf(&self) {
        if let Some(hub) = self.hub.upgrade()
            && hub.listening.swap(false, Ordering::AcqRel)
        {
            // What is told while nobody listens is lost.
            hub.missed();
        }
    }

    fn hears_again(&self) {
        if let Some(hub) = self.hub.upgrade() {
            hub.listening.store(true, Ordering::Release);
            // What others changed before was not heard.
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

    /// Whether a hint of this process comes back to it; sent by this connection, or by another of the pool.
    async fn hears(&self, client: Option<&Client>) -> Result<bool, Lost> {
        let Some(hub) = self.hub.upgrade() else { return Err(Lost) };
        // An earlier one does not count.
        _ = timeout(Duration::ZERO, hub.echo.notified()).await;
        match client {
            Some(client) => self.say(client, &self.echo()).await?,
            None => match timeout(ANSWER_TIMEOUT, self.pool.get()).await {
                Ok(Ok(other)) if self.say(&other, &self.echo()).await.is_ok() => {}
                _ => return Ok(false),
            },
        }
        Ok(timeout(ECHO_TIMEOUT, hub.echo.notified()).await.is_ok())
    }

    /// Something that others don't take for a change.
    fn echo(&self) -> String {
        message(self.own, vec![json!(["echo"])])
    }

    async fn say(&self, client: &Client, payload: &str) -> Result<(), Lost> {
        let notify = "SELECT pg_notify($1, $2)";
        let params = [(&self.channel as _, Type::TEXT), (&payload as _, Type::TEXT)];
        match timeout(ANSWER_TIMEOUT, client.query_typed(notify, &params)).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Lost),
        }
    }

    /// Sends what is told, for as long as hints come back.
    async fn say_until_deaf(&self, client: &Client) -> Result<(), Lost> {
        loop {
            self.say_for(client, HEARING).await?;
            if !self.hears(Some(client)).await? {
                return Ok(());
            }
        }
    }

    /// Sends what is told, for a while.
    async fn say_for(&self, client: &Client, how_long: Duration) -> Result<(), Lost> {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            let Some(hub) = self.hub.upgrade() else { return Err(Lost) };
            if hub.owes_hints() {
                self.say(client, &missed(self.own)).await?;
            }
            let unsent = hub.take_unsent();
            for payload in payloads(self.own, unsent) {
                self.say(client, &payload).await?;
            }
            let gathered = hub.waiting.notified();
            // Looks now and then whether the store is still open.
            if timeout(Duration::from_secs(1), gathered).await.is_ok() {
                sleep(GATHERED).await;
            }
        }
        Ok(())
    }
}

/// A message without changes: whoever gets it looks at everything.
fn missed(own: Uuid) -> String {
    json!([own]).to_string()
}

/// Messages that are small enough.
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
    fn channels_are_short_and_of_one_schema() {
        let (long, other) = ("s".repeat(63), format!("{}t", "s".repeat(62)));
        assert_eq!(channel("Eddy-2"), "Eddy-2_hints");
        assert!(channel(&long).len() <= MOST_NAME);
        assert_ne!(channel(&long), channel(&other));
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
