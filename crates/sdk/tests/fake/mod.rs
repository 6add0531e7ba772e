//! A server of a few hundred lines that follows the worker protocol exactly, and can be told to break it: connections
//! that are cut after a request was handled, responses that are delayed or scripted.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use eddyline::protocol::*;
use futures_util::{SinkExt, StreamExt};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::Message;

/// Longer than anything here takes; only reached if something hangs.
pub const LONG: Duration = Duration::from_secs(20);

pub struct Fake {
    pub url: String,
    pub addr: SocketAddr,
    state: Arc<Inner>,
    _serving: JoinSet<()>,
}

struct Inner {
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

/// A request that is not part of the worker protocol, as received.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub headers: http::HeaderMap,
    pub body: Value,
}

pub enum Scripted {
    Answer {
        status: u16,
        retry_after: Option<u64>,
        body: String,
    },
    /// The connection is closed instead of a response.
    Cut,
}

#[derive(Default)]
pub struct State {
    pub queue: VecDeque<Task>,
    /// Names of messages after which the connection is cut, once each: `report`, `claim`, `beat`.
    pub cuts: VecDeque<&'static str>,
    pub no_socket: bool,
    pub refuse: Option<u16>,
    /// Reports are accepted, but not answered while this is set.
    pub hold_reports: bool,
    pub silent: bool,
    /// Heartbeats over HTTP are not answered while this is set.
    pub hold_beats: bool,
    pub lease_ms: u64,
    pub cancel: Vec<String>,
    pub lost: Vec<String>,
    pub drain: bool,
    /// All reports including repeats, and each only the first time.
    pub reports: Vec<Report>,
    pub effects: Vec<Report>,
    /// The number of reports in each frame.
    pub frames: Vec<usize>,
    pub hellos: Vec<(RegisterWorker, Vec<String>)>,
    pub registered: usize,
    pub claims: Vec<String>,
    pub beats: Vec<Heartbeat>,
    pub drained: bool,
    pub left: bool,
    /// The largest number of tasks that the worker held or had requested at any moment.
    pub most_promised: u32,
    pub scripted: VecDeque<Scripted>,
    pub seen: Vec<Seen>,
    /// Open connections.
    pub open: usize,
    out: u32,
    outcomes: HashMap<(String, u32), ReportOutcome>,
    given: HashMap<String, Vec<Task>>,
}

impl Fake {
    pub async fn new() -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = State { lease_ms: 10_000, ..State::default() };
        let inner = Arc::new(Inner { state: Mutex::new(state), changed: watch::Sender::new(()) });
        let mut serving = JoinSet::new();
        serving.spawn(accept(listener, inner.clone()));
        Fake { url: format!("http://{addr}"), addr, state: inner, _serving: serving }
    }

    pub fn set<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        self.state.set(change)
    }

    /// Offers tasks of a handler; their ids are the handler's name and a number.
    pub fn offer(&self, handler: &str, inputs: impl IntoIterator<Item = Value>) {
        self.set(|state| {
            for input in inputs {
                let id = format!("{handler}-{}", state.queue.len() + state.given.values().flatten().count());
                state.queue.push_back(task(&id, handler, input));
            }
        });
    }

    /// Waits until a condition holds.
    pub async fn until<T>(&self, what: &str, mut found: impl FnMut(&State) -> Option<T>) -> T {
        let mut changes = self.state.changed.subscribe();
        let waiting = async {
            loop {
                changes.mark_unchanged();
                if let Some(found) = found(&self.state.state.lock().unwrap()) {
                    return found;
                }
                changes.changed().await.unwrap();
            }
        };
        tokio::time::timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("waited too long for {what}"))
    }

    pub fn script(&self, status: u16, body: Value) {
        let body = body.to_string();
        self.set(|state| state.scripted.push_back(Scripted::Answer { status, retry_after: None, body }));
    }
}

pub fn task(id: &str, handler: &str, input: Value) -> Task {
    Task {
        task_id: id.to_owned(),
        token: format!("token of {id}"),
        run_id: "run".to_owned(),
        flow: "flow".to_owned(),
        version: "1".to_owned(),
        step: handler.to_owned(),
        activation: handler.to_owned(),
        handler: handler.to_owned(),
        attempt: 1,
        kind: TaskKind::Step,
        input,
        run_input: Value::Null,
        gate: Value::Null,
        key: format!("run/{handler}"),
        intent: "run".to_owned(),
        lease_ms: 10_000,
        deadline: None,
        started_at: None,
        attempts: None,
        memo: None,
        memo_next: None,
        unwind: None,
        traceparent: None,
        undo: false,
    }
}

impl Inner {
    fn set<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state.lock().unwrap());
        self.changed.send_replace(());
        result
    }

    fn cut_after(&self, name: &str) -> bool {
        self.set(|state| state.cuts.pop_front_if(|next| *next == name).is_some())
    }

    async fn while_held(&self, held: impl Fn(&State) -> bool) {
        let mut changes = self.changed.subscribe();
        while held(&self.state.lock().unwrap()) {
            changes.changed().await.unwrap();
        }
    }
}

impl State {
    fn take(&mut self, max: u32) -> Vec<Task> {
        let count = self.queue.len().min(max as usize);
        self.out += count as u32;
        self.queue.drain(..count).collect()
    }

    fn report(&mut self, reports: Vec<Report>) -> Vec<ReportOutcome> {
        self.frames.push(reports.len());
        let outcomes = reports.into_iter().map(|report| {
            let seq = report.seq.expect("every report has a seq");
            let key = (report.task_id.clone(), seq);
            self.reports.push(report.clone());
            if let Some(first) = self.outcomes.get(&key) {
                return ReportOutcome { duplicate: true, ..first.clone() };
            }
            let outcome: ReportOutcome =
                serde_json::from_value(json!({"task_id": report.task_id, "outcome": "applied"})).unwrap();
            self.outcomes.insert(key, outcome.clone());
            if matches!(report.op, Op::Complete { .. } | Op::Fail { .. } | Op::Defer { .. }) {
                self.out -= 1;
            }
            self.effects.push(report);
            outcome
        });
        outcomes.collect()
    }

    fn beat(&mut self, beat: Heartbeat) -> Beat {
        self.beats.push(beat);
        Beat { lost: self.lost.clone(), cancel: self.cancel.clone(), drain: self.drain, ..Beat::default() }
    }

    fn promise(&mut self, more: u32) {
        self.most_promised = self.most_promised.max(self.out + more);
    }

    fn welcome(&self) -> WorkerRegistered {
        let lease_ms = self.lease_ms;
        WorkerRegistered { worker_id: "w1".to_owned(), lease_ms, heartbeat_ms: lease_ms / 3 }
    }
}

async fn accept(listener: TcpListener, inner: Arc<Inner>) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let inner = inner.clone();
        connections.spawn(async move {
            inner.set(|state| state.open += 1);
            serve(stream, inner.clone()).await;
            inner.set(|state| state.open -= 1);
        });
    }
}

async fn serve(stream: TcpStream, inner: Arc<Inner>) {
    let mut head = [0; 256];
    let Ok(n) = stream.peek(&mut head).await else { return };
    let wants_socket = String::from_utf8_lossy(&head[..n]).starts_with("GET /v1/workers/connect");
    let refuse = inner.state.lock().unwrap().refuse.is_some();
    if wants_socket && !refuse && !inner.state.lock().unwrap().no_socket {
        socket(stream, &inner).await;
        return;
    }
    let service = hyper::service::service_fn(|request| answer(request, inner.clone()));
    // An error of the service cuts the connection.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

#[derive(Debug, thiserror::Error)]
#[error("cut")]
struct CutHere;

type Answer = Result<Response<Full<Bytes>>, CutHere>;

async fn answer(request: Request<Incoming>, inner: Arc<Inner>) -> Answer {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| CutHere)?.to_bytes();
    let json: Value = serde_json::from_slice(&body).unwrap_or_else(|_| json!(String::from_utf8_lossy(&body)));
    if let Some(status) = inner.state.lock().unwrap().refuse {
        return Ok(reply(status, json!({"error": {"code": "unauthorized", "message": "no such key"}})));
    }
    let path = head.uri.path().to_owned();
    match (head.method.as_str(), path.as_str()) {
        ("POST", "/v1/workers") => {
            let worker = serde_json::from_value(json).unwrap();
            let welcome = inner.set(|state| {
                state.registered += 1;
                state.hellos.push((worker, Vec::new()));
                state.welcome()
            });
            Ok(reply(200, json!(welcome)))
        }
        ("POST", "/v1/workers/w1/heartbeat") => {
            inner.while_held(|state| state.hold_beats).await;
            let beat = inner.set(|state| state.beat(serde_json::from_value(json).unwrap()));
            if inner.cut_after("beat") { Err(CutHere) } else { Ok(reply(200, json!(beat))) }
        }
        ("POST", "/v1/workers/w1/drain") => {
            inner.set(|state| state.drained = true);
            Ok(reply(200, json!({})))
        }
        ("DELETE", "/v1/workers/w1") => {
            inner.set(|state| state.left = true);
            Ok(reply(204, json!(null)))
        }
        ("POST", "/v1/tasks/claim") => claim(json, &inner).await,
        ("POST", "/v1/tasks/report") => report(json, &inner).await,
        ("GET", "/v1/workers/connect") => Ok(reply(404, json!("no sockets here"))),
        _ => scripted(head, json, &inner),
    }
}

async fn claim(body: Value, inner: &Inner) -> Answer {
    let claim: ClaimTasks = serde_json::from_value(body).unwrap();
    let id = claim.request_id.expect("a claim has an id");
    inner.set(|state| state.claims.push(id.clone()));
    let known = inner.state.lock().unwrap().given.get(&id).cloned();
    let tasks = match known {
        Some(tasks) => tasks,
        None => {
            let drained = inner.set(|state| {
                state.promise(claim.max.unwrap());
                state.drained
            });
            let mut changes = inner.changed.subscribe();
            let waiting = async {
                loop {
                    // A drain ends waiting claims, whether or not their connection has ended yet; a claim after it
                    // would be a mistake of the worker.
                    let take = |state: &mut State| match state.drained == drained {
                        true => (state.take(claim.max.unwrap()), false),
                        false => (Vec::new(), true),
                    };
                    let (tasks, over) = take(&mut inner.state.lock().unwrap());
                    if over || !tasks.is_empty() {
                        return tasks;
                    }
                    changes.changed().await.unwrap();
                }
            };
            let wait = Duration::from_millis(claim.wait_ms.unwrap_or(0));
            let tasks = tokio::time::timeout(wait, waiting).await.unwrap_or_default();
            inner.set(|state| state.given.insert(id, tasks.clone()));
            tasks
        }
    };
    if inner.cut_after("claim") { Err(CutHere) } else { Ok(reply(200, json!({"tasks": tasks}))) }
}

async fn report(body: Value, inner: &Inner) -> Answer {
    let request: ReportTasks = serde_json::from_value(body).unwrap();
    let outcomes = inner.set(|state| state.report(request.reports));
    inner.while_held(|state| state.hold_reports).await;
    let tasks = inner.set(|state| match request.claim {
        Some(claim) => {
            let id = claim.request_id.expect("a claim has an id");
            match state.given.get(&id) {
                Some(tasks) => tasks.clone(),
                None => {
                    state.promise(claim.max.unwrap());
                    let tasks = state.take(claim.max.unwrap());
                    state.given.insert(id, tasks.clone());
                    tasks
                }
            }
        }
        None => Vec::new(),
    });
    if inner.cut_after("report") {
        return Err(CutHere);
    }
    Ok(reply(200, json!({"outcomes": outcomes, "tasks": tasks, "news": {}})))
}

fn scripted(head: http::request::Parts, body: Value, inner: &Inner) -> Answer {
    let path = head.uri.path_and_query().unwrap().to_string();
    let seen = Seen { method: head.method, path, headers: head.headers, body };
    let next = inner.set(|state| {
        state.seen.push(seen);
        state.scripted.pop_front()
    });
    match next {
        Some(Scripted::Answer { status, retry_after, body }) => {
            let mut response = Response::new(Full::new(Bytes::from(body)));
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            if let Some(after) = retry_after {
                response.headers_mut().insert("retry-after", after.into());
            }
            Ok(response)
        }
        Some(Scripted::Cut) => Err(CutHere),
        None => Ok(reply(500, json!({"error": {"code": "internal", "message": "nothing is scripted for this"}}))),
    }
}

fn reply(status: u16, body: Value) -> Response<Full<Bytes>> {
    let body = if status == 204 { Bytes::new() } else { Bytes::from(body.to_string()) };
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response
}

/// Serves a connection of a worker, until it ends.
async fn socket(stream: TcpStream, inner: &Inner) -> Option<Infallible> {
    let mut socket = tokio_tungstenite::accept_async(stream).await.ok()?;
    let (mut credit, mut changes) = (0, inner.changed.subscribe());
    let mut told: Option<Beat> = None;
    loop {
        let unasked = {
            let state = inner.state.lock().unwrap();
            let (lost, cancel, drain) = (state.lost.clone(), state.cancel.clone(), state.drain);
            Beat { lost, cancel, drain, ..Beat::default() }
        };
        let something = unasked.drain || !unasked.lost.is_empty() || !unasked.cancel.is_empty();
        if something && told.as_ref() != Some(&unasked) {
            told = Some(unasked.clone());
            socket.send(text(&FromServer::Beat { beat: unasked })).await.ok()?;
        }
        let tasks = inner.state.lock().unwrap().take(credit);
        credit -= tasks.len() as u32;
        if !tasks.is_empty() {
            inner.set(|state| state.given.entry("socket".to_owned()).or_default().extend(tasks.clone()));
            socket.send(text(&FromServer::Tasks { tasks })).await.ok()?;
        }
        tokio::select! {
            _ = changes.changed() => {}
            message = socket.next() => {
                let Message::Text(message) = message?.ok()? else { continue };
                let said: FromWorker = serde_json::from_str(&message).unwrap();
                let answer = hear(said, inner, &mut credit).await?;
                if let Some(answer) = answer {
                    socket.send(text(&answer)).await.ok()?;
                }
            }
        }
    }
}

/// An outer `None` cuts the connection.
async fn hear(said: FromWorker, inner: &Inner, credit: &mut u32) -> Option<Option<FromServer>> {
    match said {
        FromWorker::Hello { worker, tasks } => {
            let worker = inner.set(|state| {
                state.hellos.push((worker, tasks));
                state.welcome()
            });
            Some(Some(FromServer::Welcome { worker }))
        }
        FromWorker::Credit { n } => {
            *credit += n;
            inner.set(|state| state.promise(*credit));
            Some(None)
        }
        FromWorker::Report { id, reports, credit: more } => {
            let outcomes = inner.set(|state| state.report(reports));
            inner.while_held(|state| state.hold_reports).await;
            *credit += more;
            inner.set(|state| state.promise(*credit));
            if inner.cut_after("report") {
                return None;
            }
            Some(Some(FromServer::Reported { id, outcomes, news: BTreeMap::new(), news_next: BTreeMap::new() }))
        }
        FromWorker::Heartbeat { beat } => {
            let beat = inner.set(|state| state.beat(beat));
            if inner.cut_after("beat") {
                return None;
            }
            let silent = inner.state.lock().unwrap().silent;
            Some((!silent).then_some(FromServer::Beat { beat }))
        }
        FromWorker::Drain => {
            *credit = 0;
            inner.set(|state| state.drained = true);
            Some(None)
        }
    }
}

fn text(message: &FromServer) -> Message {
    Message::text(serde_json::to_string(message).unwrap())
}
