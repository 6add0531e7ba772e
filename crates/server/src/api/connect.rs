//! `GET /v1/workers/connect`: a worker over a WebSocket. One tokio task serves each connection: it reads the worker's
//! messages, pushes tasks while the worker has credits, and promptly reports tasks that the worker can stop.
//!
//! Claims are combined with reports: a report that frees credits claims the next tasks in the commit that applies it.
//! The server writes one message at a time and disconnects a worker that does not read it, so nothing piles up.

mod held_tasks;
mod session;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::FromRequestParts;
use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use bytes::Bytes;
use eddyline_engine::TaskId;
use eddyline_protocol::{ApiError, CLOSE_UNAUTHORIZED, Code, FromServer, FromWorker, SUBPROTOCOL};
use eddyline_store::Namespace;
use futures_util::SinkExt;
use serde_json::Value;

use super::body::parsed_bytes;
use super::call::{ApiResult, Call};
use super::failure::Failure;
use super::item_errors::{self, ItemErrors};
use super::memory_budget::Reservation;
use super::read_meter::BUDGET_WAIT;
use super::tasks::REPORTS;
use super::{GaugeGuard, ReadMeter};
use session::Session;

/// How long a worker may take to read a message before it is disconnected.
const SLOWEST: Duration = Duration::from_secs(10);
/// How long a connection may take to send its hello.
const HELLO: Duration = Duration::from_secs(10);
/// How long closing the connection may take.
const FAREWELL: Duration = Duration::from_secs(1);
/// How much a socket reads at a time. The whole buffer is zeroed before each read, however little there is to read.
const READ_BUFFER_BYTES: usize = 8 << 10;
/// How much a socket buffers before it writes, and the maximum that may wait to be written.
const WRITE_BUFFER_BYTES: usize = 128 << 10;
const MAX_WRITE_BUFFER_BYTES: usize = 64 << 20;
/// How many workers' tasks are remembered after their connection has ended.
const MAX_LEFT: usize = 10_000;

/// `GET /v1/workers/connect`
pub(crate) async fn connect(call: Call) -> ApiResult {
    let (slot, open) = call.api.socket(call.ns())?;
    let (api, caller) = (call.api.clone(), call.caller.clone());
    let limit = api.about().settings.max_body;
    let meter = call.extension::<Arc<ReadMeter>>().unwrap_or_default();
    let upgrade = WebSocketUpgrade::from_request_parts(&mut call.into_head(), &()).await;
    let upgrade = upgrade.map_err(|rejection| Failure::bad(format!("this path requires a WebSocket: {rejection}")))?;
    let upgrade = upgrade
        .protocols([SUBPROTOCOL])
        .max_message_size(limit)
        .max_frame_size(limit)
        .read_buffer_size(READ_BUFFER_BYTES)
        .write_buffer_size(WRITE_BUFFER_BYTES)
        .max_write_buffer_size(MAX_WRITE_BUFFER_BYTES);
    Ok(upgrade.on_upgrade(async move |socket| {
        let _counted = GaugeGuard::new("eddyline_sockets");
        meter.begin(api.bodies().reservation(&caller.ns));
        let mut wire = Wire { socket, meter, complete: None };
        let error = match Session::serve(&api, &caller, &mut wire).await {
            Err(Cut::Error(error)) => Some(error),
            Ok(()) | Err(Cut::Gone) => None,
        };
        let _ = tokio::time::timeout(FAREWELL, wire.close(error)).await;
        drop((slot, open));
    }))
}

/// Why a connection ends.
enum Cut {
    /// The worker disconnected or was too slow.
    Gone,
    /// The worker gets this error before the connection is closed.
    Error(ApiError),
}

impl From<Failure> for Cut {
    fn from(failure: Failure) -> Cut {
        Cut::Error(failure.bounded().0)
    }
}

impl From<eddyline_engine::EngineError> for Cut {
    fn from(error: eddyline_engine::EngineError) -> Cut {
        Cut::Error(Failure::from(error).bounded().0)
    }
}

/// The socket as a stream of messages.
struct Wire {
    socket: WebSocket,
    meter: Arc<ReadMeter>,
    /// A message waiting for the memory budget.
    complete: Option<Complete>,
}

/// A message that was read but not parsed yet.
struct Complete {
    bytes: Bytes,
    /// The memory it needs while it is handled.
    wanted: usize,
    reserved: Option<Reservation>,
    since: tokio::time::Instant,
}

/// A worker's message, with the errors of reports that failed to parse.
struct ReceivedMessage {
    message: FromWorker<Value>,
    unread: ItemErrors,
    /// The message's part of the memory budget, until it is handled.
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

    /// Buffers a message until the next one is sent.
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

    /// The next message, or `None` for a ping or pong. Cancel-safe: no message is lost.
    async fn receive(&mut self) -> Result<Option<ReceivedMessage>, Cut> {
        if self.complete.is_none() {
            match self.socket.recv().await {
                Some(Ok(message @ (Message::Text(_) | Message::Binary(_)))) => {
                    let (reserved, since) = (self.meter.complete(), tokio::time::Instant::now());
                    let bytes = message.into_data();
                    self.complete = Some(Complete { wanted: parsed_bytes(&bytes), bytes, reserved, since });
                }
                // It may arrive between two fragments of a message.
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
            let message = "too many large messages are being handled; reconnect in a second";
            return Err(Failure::new(Code::Unavailable, message).into());
        }
        self.complete.take().map(read).transpose()
    }

    /// Sends the error and a close frame, and waits until the peer has closed too.
    async fn close(&mut self, reason: Option<ApiError>) {
        let unauthorized = reason.as_ref().is_some_and(|error| error.code == Code::Unauthorized);
        if let Some(error) = reason {
            let _ = self.send(&FromServer::Error { error }).await;
        }
        let frame = unauthorized.then(|| CloseFrame { code: CLOSE_UNAUTHORIZED, reason: "unauthorized".into() });
        let _ = self.socket.send(Message::Close(frame)).await;
        while let Some(Ok(_)) = self.socket.recv().await {}
    }

    fn text(&self, message: &FromServer) -> Result<String, Cut> {
        serde_json::to_string(message).map_err(|error| {
            tracing::error!("cannot serialise a message: {error}");
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

fn read(Complete { bytes, reserved, .. }: Complete) -> Result<ReceivedMessage, Cut> {
    let (message, unread) = item_errors::read(&bytes, REPORTS, |bytes| {
        super::body::check_shape(bytes)?;
        serde_json::from_slice(bytes).map_err(|error| Failure::bad(format!("invalid message: {error}")))
    })?;
    Ok(ReceivedMessage { message, unread, reserved })
}

/// The unfinished tasks pushed to each worker, by connection. A worker that reconnects lists the tasks that it has; the
/// others never arrived. It may reconnect before the server notices the end of its last connection.
#[derive(Debug, Default)]
pub(crate) struct PushedTasks(Mutex<Workers>);

#[derive(Debug, Default)]
struct Workers {
    /// The number of the newest connection.
    last: u64,
    by_name: HashMap<(Namespace, String), Connections>,
}

/// The connections of one worker.
#[derive(Debug, Default)]
struct Connections {
    newest: u64,
    /// While the newest connection is open: the tasks that the worker listed in its hello.
    has: Option<HashSet<TaskId>>,
    /// Tasks pushed over connections that have ended, until their leases expire.
    pushed: Vec<TaskId>,
    until: Option<Instant>,
}

impl PushedTasks {
    /// Called when a worker connects: returns the number of the connection, and the tasks that never arrived over
    /// earlier ones.
    fn connected(&self, ns: &Namespace, worker: &str, has: HashSet<TaskId>) -> (u64, Vec<TaskId>) {
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

    /// Whether a worker is connected.
    fn is_connected(&self, ns: &Namespace, worker: &str) -> bool {
        let workers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        workers.by_name.get(&(ns.clone(), worker.to_owned())).is_some_and(|known| known.has.is_some())
    }

    /// Called when a connection has ended, with its unfinished tasks: returns those that never arrived, if that is
    /// known.
    fn disconnected(
        &self,
        ns: &Namespace,
        worker: &str,
        number: u64,
        held: Vec<TaskId>,
        lease: Duration,
    ) -> Vec<TaskId> {
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
        // Expired leases need no release.
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
        let (pushed, ns) = (PushedTasks::default(), Namespace::default());
        let (first, lost) = pushed.connected(&ns, "w", HashSet::new());
        assert_eq!(lost, []);
        assert_eq!(pushed.disconnected(&ns, "w", first, vec![task(1), task(2)], LEASE), []);
        assert_eq!(pushed.connected(&ns, "other", HashSet::new()).1, []);
        assert_eq!(pushed.connected(&ns, "w", HashSet::from([task(2)])).1, [task(1)]);
    }

    #[test]
    fn a_worker_may_be_back_before_it_is_noticed_that_it_went() {
        let (pushed, ns) = (PushedTasks::default(), Namespace::default());
        let (first, _) = pushed.connected(&ns, "w", HashSet::new());
        let (second, lost) = pushed.connected(&ns, "w", HashSet::from([task(2)]));
        assert_eq!(lost, []);
        assert_eq!(pushed.disconnected(&ns, "w", first, vec![task(1), task(2)], LEASE), [task(1)]);
        // It may even have disconnected again: then the tasks are returned at its next connect.
        let (third, _) = pushed.connected(&ns, "w", HashSet::new());
        assert_eq!(pushed.disconnected(&ns, "w", third, vec![], LEASE), []);
        assert_eq!(pushed.disconnected(&ns, "w", second, vec![task(3)], LEASE), []);
        assert_eq!(pushed.connected(&ns, "w", HashSet::new()).1, [task(3)]);
    }

    #[test]
    fn nothing_is_kept_of_workers_that_left_nothing() {
        let (pushed, ns) = (PushedTasks::default(), Namespace::default());
        let (number, _) = pushed.connected(&ns, "w", HashSet::from([task(1)]));
        assert_eq!(pushed.disconnected(&ns, "w", number, vec![], LEASE), []);
        let (number, _) = pushed.connected(&ns, "x", HashSet::new());
        assert_eq!(pushed.disconnected(&ns, "x", number, vec![task(1)], Duration::ZERO), []);
        assert!(pushed.0.lock().unwrap_or_else(PoisonError::into_inner).by_name.is_empty());
    }
}
