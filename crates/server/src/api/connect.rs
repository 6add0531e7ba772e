//! `GET /v1/workers/connect`: a worker over a WebSocket. One task serves it: it reads what the worker says, pushes tasks
//! for as long as there are credits, and tells it promptly what it need not go on with.
//!
//! Claims ride on reports: a report that frees room takes the next tasks in the commit that applies it. One message is
//! written at a time, and a reader that does not take it is cut off, so nothing piles up.

mod held;
mod session;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::FromRequestParts;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use bytes::Bytes;
use eddyline_engine::TaskId;
use eddyline_protocol::{ApiError, CLOSE_UNAUTHORIZED, Code, FromServer, FromWorker};
use eddyline_store::Namespace;
use futures_util::SinkExt;
use serde_json::Value;

use super::apart::{self, Unread};
use super::body::parsed_bytes;
use super::call::{Answer, Call};
use super::failure::Failure;
use super::memory_budget::Reservation;
use super::read_meter::BUDGET_WAIT;
use super::tasks::REPORTS;
use super::{Counted, ReadMeter};
use session::Session;

/// A worker that does not take a message for so long is cut off.
const SLOWEST: Duration = Duration::from_secs(10);
/// How long a connection may take to say who it is.
const HELLO: Duration = Duration::from_secs(10);
/// How long both sides may take to close.
const FAREWELL: Duration = Duration::from_secs(1);
/// What a socket reads at a time. All of it is set to zero before each read, however little there is to read then.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// What a socket gathers before it writes, and the most that waits to be written.
const WRITE_BUFFER_BYTES: usize = 128 << 10;
const MAX_WRITE_BUFFER_BYTES: usize = 64 << 20;
/// Workers whose tasks are remembered after their connection ended.
const MAX_LEFT: usize = 10_000;

/// `GET /v1/workers/connect`
pub(crate) async fn connect(call: Call) -> Answer {
    let (slot, open) = call.api.socket(call.ns())?;
    let (api, caller) = (call.api.clone(), call.caller.clone());
    let limit = api.about().settings.max_body;
    let meter = call.extension::<Arc<ReadMeter>>().unwrap_or_default();
    let upgrade = WebSocketUpgrade::from_request_parts(&mut call.into_head(), &()).await;
    let upgrade = upgrade.map_err(|rejection| Failure::bad(format!("this path speaks WebSocket: {rejection}")))?;
    let upgrade = upgrade
        .max_message_size(limit)
        .max_frame_size(limit)
        .read_buffer_size(READ_BUFFER_BYTES)
        .write_buffer_size(WRITE_BUFFER_BYTES)
        .max_write_buffer_size(MAX_WRITE_BUFFER_BYTES);
    Ok(upgrade.on_upgrade(async move |socket| {
        let _counted = Counted::new("eddyline_sockets");
        meter.begin(api.bodies().reservation(&caller.ns));
        let mut wire = Wire { socket, meter, complete: None };
        let told = match Session::serve(&api, &caller, &mut wire).await {
            Err(Cut::Told(error)) => Some(error),
            Ok(()) | Err(Cut::Gone) => None,
        };
        let _ = tokio::time::timeout(FAREWELL, wire.close(told)).await;
        drop((slot, open));
    }))
}

/// Why a connection ends.
enum Cut {
    /// It went, or was too slow.
    Gone,
    /// It is told why.
    Told(ApiError),
}

impl From<Failure> for Cut {
    fn from(failure: Failure) -> Cut {
        Cut::Told(failure.bounded().0)
    }
}

impl From<eddyline_engine::EngineError> for Cut {
    fn from(error: eddyline_engine::EngineError) -> Cut {
        Cut::Told(Failure::from(error).bounded().0)
    }
}

/// The socket, as messages.
struct Wire {
    socket: WebSocket,
    meter: Arc<ReadMeter>,
    /// A message that waits for its part of the memory budget.
    complete: Option<Complete>,
}

/// A message that has been read and is not parsed yet.
struct Complete {
    bytes: Bytes,
    /// What it takes while it is handled.
    wanted: usize,
    reserved: Option<Reservation>,
    since: tokio::time::Instant,
}

/// A message of the worker, and which of its reports could not be read.
struct Said {
    message: FromWorker<Value>,
    unread: Unread,
    /// What the message has of the memory budget, until it is handled.
    reserved: Option<Reservation>,
}

impl Wire {
    async fn send(&mut self, message: &FromServer) -> Result<(), Cut> {
        let text = self.text(message)?;
        self.send_text(text).await
    }

    async fn send_text(&mut self, text: String) -> Result<(), Cut> {
        self.write(self::Write::Now, Message::Text(text.into())).await
    }

    /// Written with the next message that is sent.
    async fn feed(&mut self, message: &FromServer) -> Result<(), Cut> {
        let text = self.text(message)?;
        self.write(self::Write::Later, Message::Text(text.into())).await
    }

    async fn ping(&mut self) -> Result<(), Cut> {
        self.write(self::Write::Now, Message::Ping(Default::default())).await
    }

    async fn flush(&mut self) -> Result<(), Cut> {
        match tokio::time::timeout(SLOWEST, self.socket.flush()).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Cut::Gone),
        }
    }

    /// What is said, or nothing but a sign of life. Can be left and taken up again without losing a message.
    async fn hear(&mut self) -> Result<Option<Said>, Cut> {
        if self.complete.is_none() {
            match self.socket.recv().await {
                Some(Ok(message @ (Message::Text(_) | Message::Binary(_)))) => {
                    let (reserved, since) = (self.meter.complete(), tokio::time::Instant::now());
                    let bytes = message.into_data();
                    self.complete = Some(Complete { wanted: parsed_bytes(&bytes), bytes, reserved, since });
                }
                // It may stand between two parts of a message.
                Some(Ok(Message::Ping(payload) | Message::Pong(payload))) => {
                    self.meter.control(payload.len());
                    return Ok(None);
                }
                Some(Ok(Message::Close(_)) | Err(_)) | None => return Err(Cut::Gone),
            }
        }
        if let Some(Complete { wanted, reserved: Some(reserved), since, .. }) = &mut self.complete
            && reserved.try_grow_to(*wanted).is_err()
            && reserved.grow_within(*wanted, BUDGET_WAIT.saturating_sub(since.elapsed())).await.is_err()
        {
            metrics::counter!("eddyline_bodies_refused_total").increment(1);
            let message = "too many large messages are being handled; connect again in a second";
            return Err(Failure::new(Code::Unavailable, message).into());
        }
        self.complete.take().map(read).transpose()
    }

    /// Says that it is over, and why, and listens until the other side has said so too.
    async fn close(&mut self, told: Option<ApiError>) {
        let unauthorized = told.as_ref().is_some_and(|error| error.code == Code::Unauthorized);
        if let Some(error) = told {
            let _ = self.send(&FromServer::Error { error }).await;
        }
        let frame = unauthorized.then(|| CloseFrame { code: CLOSE_UNAUTHORIZED, reason: "unauthorized".into() });
        let _ = self.socket.send(Message::Close(frame)).await;
        while let Some(Ok(_)) = self.socket.recv().await {}
    }

    fn text(&self, message: &FromServer) -> Result<String, Cut> {
        serde_json::to_string(message).map_err(|error| {
            tracing::error!("a message could not be written: {error}");
            Cut::Gone
        })
    }

    async fn write(&mut self, when: Write, message: Message) -> Result<(), Cut> {
        let written = async {
            match when {
                Write::Now => self.socket.send(message).await,
                Write::Later => self.socket.feed(message).await,
            }
        };
        match tokio::time::timeout(SLOWEST, written).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Cut::Gone),
        }
    }
}

enum Write {
    Now,
    Later,
}

fn read(Complete { bytes, reserved, .. }: Complete) -> Result<Said, Cut> {
    let (message, unread) = apart::read(&bytes, REPORTS, |bytes| {
        super::body::check_shape(bytes)?;
        serde_json::from_slice(bytes).map_err(|error| {
            Failure::bad(format!("the message is not what it should be: {}", super::wording::in_words(&error)))
        })
    })?;
    Ok(Said { message, unread, reserved })
}

/// What was pushed to workers and is not done, by their connections. A worker that comes back says what it has of it; the
/// rest never arrived. It may come back before the end of its last connection is noticed here.
#[derive(Debug, Default)]
pub(crate) struct Left(Mutex<Workers>);

#[derive(Debug, Default)]
struct Workers {
    /// Connections are numbered.
    last: u64,
    by_name: HashMap<(Namespace, String), Connections>,
}

/// The connections of one worker.
#[derive(Debug, Default)]
struct Connections {
    newest: u64,
    /// Of the newest, while it is open: what the worker said that it has.
    has: Option<HashSet<TaskId>>,
    /// What was pushed over those that have ended, until its leases end too.
    pushed: Vec<TaskId>,
    until: Option<Instant>,
}

impl Left {
    /// A worker connects: the number of the connection, and what never arrived over those before.
    fn arrive(&self, ns: &Namespace, worker: &str, has: HashSet<TaskId>) -> (u64, Vec<TaskId>) {
        let mut workers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        workers.last += 1;
        let number = workers.last;
        let connections = workers.by_name.entry((ns.clone(), worker.to_owned())).or_default();
        connections.newest = number;
        let mut lost = std::mem::take(&mut connections.pushed);
        lost.retain(|task| !has.contains(task));
        connections.has = Some(has);
        (number, lost)
    }

    /// Whether a worker has a connection.
    fn is_connected(&self, ns: &Namespace, worker: &str) -> bool {
        let workers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        workers.by_name.get(&(ns.clone(), worker.to_owned())).is_some_and(|known| known.has.is_some())
    }

    /// A connection has ended, with what was pushed over it and is not done: what of it never arrived, if that is known.
    fn part(&self, ns: &Namespace, worker: &str, number: u64, held: Vec<TaskId>, lease: Duration) -> Vec<TaskId> {
        let (mut workers, now) = (self.0.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
        let by_name = &mut workers.by_name;
        let key = (ns.clone(), worker.to_owned());
        let connections = by_name.entry(key.clone()).or_default();
        if let Some(has) = connections.has.as_ref().filter(|_| number < connections.newest) {
            return held.into_iter().filter(|task| !has.contains(task)).collect();
        }
        connections.has = None;
        connections.pushed.extend(held);
        connections.until = Some(now + lease);
        // Leases that have ended by themselves leave nothing to be told.
        let lives = |known: &Connections| !known.pushed.is_empty() && known.until.is_some_and(|until| now < until);
        by_name.retain(|_, known| known.has.is_some() || lives(known));
        if by_name.len() > MAX_LEFT {
            by_name.remove(&key);
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use eddyline_machine::{Fence, RunId};
    use uuid::Uuid;

    use super::*;

    fn task(number: u64) -> TaskId {
        TaskId { run: RunId(Uuid::from_u128(1)), fence: Fence(number) }
    }

    const LEASE: Duration = Duration::from_secs(60);

    #[test]
    fn what_a_worker_does_not_have_when_it_comes_back_never_arrived() {
        let (left, ns) = (Left::default(), Namespace::default());
        let (first, lost) = left.arrive(&ns, "w", HashSet::new());
        assert_eq!(lost, []);
        assert_eq!(left.part(&ns, "w", first, vec![task(1), task(2)], LEASE), []);
        assert_eq!(left.arrive(&ns, "other", HashSet::new()).1, []);
        assert_eq!(left.arrive(&ns, "w", HashSet::from([task(2)])).1, [task(1)]);
    }

    #[test]
    fn a_worker_may_be_back_before_it_is_noticed_that_it_went() {
        let (left, ns) = (Left::default(), Namespace::default());
        let (first, _) = left.arrive(&ns, "w", HashSet::new());
        let (second, lost) = left.arrive(&ns, "w", HashSet::from([task(2)]));
        assert_eq!(lost, []);
        assert_eq!(left.part(&ns, "w", first, vec![task(1), task(2)], LEASE), [task(1)]);
        // Or even be gone again: then it is told when it comes back once more.
        let (third, _) = left.arrive(&ns, "w", HashSet::new());
        assert_eq!(left.part(&ns, "w", third, vec![], LEASE), []);
        assert_eq!(left.part(&ns, "w", second, vec![task(3)], LEASE), []);
        assert_eq!(left.arrive(&ns, "w", HashSet::new()).1, [task(3)]);
    }

    #[test]
    fn nothing_is_kept_of_workers_that_left_nothing() {
        let (left, ns) = (Left::default(), Namespace::default());
        let (number, _) = left.arrive(&ns, "w", HashSet::from([task(1)]));
        assert_eq!(left.part(&ns, "w", number, vec![], LEASE), []);
        let (number, _) = left.arrive(&ns, "x", HashSet::new());
        assert_eq!(left.part(&ns, "x", number, vec![task(1)], Duration::ZERO), []);
        assert!(left.0.lock().unwrap_or_else(PoisonError::into_inner).by_name.is_empty());
    }
}
