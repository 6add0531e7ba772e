//! A server in a few lines, for tests of the driver: it numbers entries and answers reports.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{Failure, Op, ReportOutcome, Task, TaskKind, Unwinding, Verdict};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use super::{MemoPage, MemoPages, Patience, Port, ToDriver, drive};
use crate::code::{CodeFlow, FlowError, RunCtx, erase};
use crate::error::Error;
use crate::worker::{HandlerMessage, TaskState};

/// Longer than anything here takes; only reached if something hangs.
const LONG: Duration = Duration::from_secs(3_600);

#[derive(Clone, Default)]
pub struct FakeServer(Arc<Mutex<Rows>>);

#[derive(Default)]
struct Rows {
    n: u64,
    memo: BTreeMap<String, Value>,
    frames: Vec<Vec<String>>,
    driver: Option<mpsc::UnboundedSender<ToDriver>>,
    unwinding: Option<Unwinding>,
    lines: Vec<String>,
    seqs: u32,
}

/// How a server behaves in one execution.
#[derive(Clone)]
pub struct Behaviour {
    pub hold: Duration,
    /// How late replies to reports are.
    pub late: Duration,
    /// The worker dies instead of sending this frame.
    pub dies_at: Option<usize>,
    /// The worker dies after this frame was applied, before its reply.
    pub dies_after: Option<usize>,
    pub attempt: u32,
    /// The most entries in a page of the memo.
    pub page: usize,
    pub invalid: Option<&'static str>,
}

impl Default for Behaviour {
    fn default() -> Behaviour {
        let (hold, late) = (Duration::from_millis(10), Duration::ZERO);
        Behaviour { hold, late, dies_at: None, dies_after: None, attempt: 1, page: usize::MAX, invalid: None }
    }
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Ending {
    Completed(Value),
    Failed { error: Failure, retryable: bool },
    Suspended,
    Released,
    Continued(Value),
    Died,
}

impl FakeServer {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the function once, from its start.
    pub async fn run<F, Fut, In, Out, E>(&self, flow: F, input: Value, how: Behaviour) -> Ending
    where
        F: Fn(RunCtx, In) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Out, E>> + Send + 'static,
        In: DeserializeOwned + Send + 'static,
        Out: Serialize + 'static,
        E: Into<FlowError> + 'static,
    {
        let (voice, mut heard) = mpsc::channel(1_024);
        let (driver, inbox) = mpsc::unbounded_channel();
        let task = {
            let mut rows = self.rows();
            rows.driver = Some(driver.clone());
            task(&rows, input, &how)
        };
        let port = Port { voice: voice.clone(), inbox, pages: Arc::new(self.clone()) };
        let patience = Patience { hold: how.hold, cancel_grace: Duration::from_secs(1) };
        let flow = CodeFlow { run: erase(flow), retry: None };
        let driving = tokio::spawn(drive(flow, Arc::new(TaskState::new(task, voice)), port, patience));
        let (mut frames, mut ending) = (0, None);
        let serving = async {
            while let Some(message) = heard.recv().await {
                let HandlerMessage::Frame { seen, ops, .. } = message else {
                    if matches!(message, HandlerMessage::Gone { .. }) {
                        return;
                    }
                    continue;
                };
                frames += 1;
                if how.dies_at == Some(frames) {
                    ending = Some(Ending::Died);
                    return;
                }
                let (answer, end) = self.take(ops, seen, &how);
                if how.dies_after == Some(frames) {
                    ending = Some(Ending::Died);
                    return;
                }
                ending = ending.take().or(end);
                let driver = driver.clone();
                if how.late.is_zero() {
                    let _ = driver.send(answer);
                } else {
                    tokio::time::sleep(how.late).await;
                    let _ = driver.send(answer);
                }
                if ending.is_some() {
                    return;
                }
            }
        };
        tokio::time::timeout(LONG, serving).await.expect("the driver ends");
        if ending == Some(Ending::Died) {
            driving.abort();
            let _ = driving.await;
        } else {
            tokio::time::timeout(LONG, driving).await.expect("the driver ends").expect("the driver does not panic");
        }
        self.rows().driver = None;
        ending.unwrap_or(Ending::Died)
    }

    /// Ends a pending entry.
    pub fn end(&self, name: &str, end: Result<Value, Failure>) {
        let mut rows = self.rows();
        let mut entry = rows.memo.get(name).cloned().unwrap_or_else(|| json!({"kind": "call", "attempt": 1}));
        match end {
            Ok(output) => (entry["status"], entry["output"]) = (json!("completed"), output),
            Err(error) => (entry["status"], entry["error"]) = (json!("failed"), json!(error)),
        }
        rows.put(name, entry);
        rows.push_news(name);
    }

    /// The back-off of a step is over.
    pub fn due(&self, name: &str) {
        let mut rows = self.rows();
        let Some(mut entry) = rows.memo.get(name).cloned() else { return };
        entry["due"] = json!(true);
        rows.put(name, entry);
        rows.push_news(name);
    }

    /// Loses an entry, as no server should.
    pub fn forget(&self, name: &str) {
        self.rows().memo.remove(name);
    }

    pub fn say(&self, message: ToDriver) {
        if let Some(driver) = &self.rows().driver {
            let _ = driver.send(message);
        }
    }

    pub fn unwind(&self, error: Option<Failure>) {
        self.rows().unwinding = Some(Unwinding { error, reason: None, until: None });
    }

    pub fn is_unwinding(&self) -> bool {
        self.rows().unwinding.is_some()
    }

    /// The reports so far, frame by frame, as `op name`.
    pub fn frames(&self) -> Vec<Vec<String>> {
        self.rows().frames.clone()
    }

    pub fn reports(&self) -> Vec<String> {
        self.frames().into_iter().flatten().collect()
    }

    pub fn lines(&self) -> Vec<String> {
        self.rows().lines.clone()
    }

    pub fn entry(&self, name: &str) -> Option<Value> {
        self.rows().memo.get(name).cloned()
    }

    fn take(&self, ops: Vec<Op>, seen: u64, how: &Behaviour) -> (ToDriver, Option<Ending>) {
        let mut rows = self.rows();
        let (mut outcomes, mut news, mut end) = (Vec::new(), Map::new(), None);
        rows.frames.push(ops.iter().map(said).collect());
        for op in ops {
            let (outcome, known) = rows.apply(&op, seen, how);
            news.extend(known);
            if outcome.outcome == Verdict::Applied {
                end = end.or(ending(&op));
            }
            outcomes.push(outcome);
        }
        (ToDriver::Answered { outcomes, news, next: None }, end)
    }
}

#[async_trait]
impl MemoPages for FakeServer {
    async fn page(&self, _: &str, after: u64) -> Result<MemoPage, Error> {
        let rows = self.rows();
        let (memo, next) = rows.page(after, 7);
        Ok(MemoPage { memo, next })
    }
}

impl Rows {
    fn put(&mut self, name: &str, mut entry: Value) -> u64 {
        self.n += 1;
        entry["n"] = json!(self.n);
        entry["at"] = json!(format!("2026-01-02T03:04:{:02}.000Z", self.n % 60));
        self.memo.insert(name.to_owned(), entry);
        self.n
    }

    fn push_news(&mut self, name: &str) {
        let entries = Map::from_iter([(name.to_owned(), self.memo[name].clone())]);
        if let Some(driver) = &self.driver {
            let _ = driver.send(ToDriver::News { entries, next: None });
        }
    }

    fn page(&self, after: u64, most: usize) -> (Map<String, Value>, Option<u64>) {
        let n = |entry: &Value| entry["n"].as_u64().unwrap_or(0);
        let mut entries: Vec<_> = self.memo.iter().filter(|(_, entry)| n(entry) > after).collect();
        entries.sort_by_key(|(_, entry)| n(entry));
        let more = entries.len() > most;
        entries.truncate(most);
        let last = entries.last().map(|(_, entry)| n(entry));
        let page = entries.into_iter().map(|(name, entry)| (name.clone(), entry.clone())).collect();
        (page, last.filter(|_| more))
    }

    fn apply(&mut self, op: &Op, seen: u64, how: &Behaviour) -> (ReportOutcome, Map<String, Value>) {
        let applied = ReportOutcome::new("t", Verdict::Applied);
        let invalid = |message: &str| {
            (
                ReportOutcome { message: Some(message.to_owned()), ..ReportOutcome::new("t", Verdict::Invalid) },
                Map::new(),
            )
        };
        let (name, entry) = match op {
            Op::Step { error: None, name, .. } | Op::Call { name, .. } if how.invalid == Some(name.as_str()) => {
                return invalid("too large");
            }
            Op::Step { name, output, error: None, undo, .. } => {
                (name, json!({"kind": "step", "status": "completed", "output": output, "undo": undo}))
            }
            Op::Step { name, error, retryable: true, retry: Some(_), .. } => {
                (name, json!({"kind": "step", "status": "retry", "due": false, "error": error}))
            }
            Op::Step { name, error, .. } => (name, json!({"kind": "step", "status": "failed", "error": error})),
            Op::Call { name, .. } => (name, json!({"kind": "call", "status": "pending"})),
            Op::Sleep { name, .. } => (name, json!({"kind": "sleep", "status": "pending"})),
            Op::Child { name, .. } => (name, json!({"kind": "child", "status": "pending"})),
            Op::Wait { name, webhook, .. } => {
                let token = webhook.then_some("secret");
                (name, json!({"kind": "wait", "status": "pending", "token": token, "url": token}))
            }
            Op::Publish { as_name: Some(name), .. } => (name, json!({"kind": "publish", "status": "completed"})),
            Op::LetGo { name } => {
                if let Some(mut entry) = self.memo.get(name).cloned().filter(|entry| entry["status"] == "pending") {
                    entry["status"] = json!("cancelled");
                    self.put(name, entry);
                }
                return (applied, Map::new());
            }
            Op::Unwind { error } => {
                self.unwinding = Some(Unwinding { error: error.clone(), reason: None, until: None });
                return (applied, Map::new());
            }
            Op::Log(line) => {
                self.lines.push(line.msg.clone());
                return (applied, Map::new());
            }
            Op::Suspend => {
                let pending = |entry: &Value| entry["status"] == "pending" || entry["due"] == json!(false);
                let hopeless = self.n <= seen && !self.memo.values().any(pending);
                return if hopeless { invalid("nothing to wait for") } else { (applied, Map::new()) };
            }
            _ => return (applied, Map::new()),
        };
        self.seqs += 1;
        let attempt = self.memo.get(name).and_then(|entry| entry["attempt"].as_u64()).unwrap_or(0) + 1;
        let known = self.memo.get(name).filter(|entry| entry["status"] != "retry").cloned();
        let (duplicate, news) = (known.is_some(), known.map(|entry| (name.clone(), entry)));
        if !duplicate {
            let mut entry = entry;
            entry["attempt"] = json!(attempt);
            self.put(name, entry);
        }
        let now = &self.memo[name];
        let decision = match now["status"].as_str() {
            Some("retry") => Some("retry".to_owned()),
            Some("failed") => Some("failed".to_owned()),
            _ => Some("recorded".to_owned()),
        };
        let outcome = ReportOutcome {
            duplicate,
            decision,
            n: now["n"].as_u64(),
            at: now["at"].as_str().map(str::to_owned),
            token: now["token"].as_str().map(str::to_owned),
            url: now["url"].as_str().map(str::to_owned),
            ..applied
        };
        (outcome, news.into_iter().filter(|(_, entry)| entry["status"] != "pending").collect())
    }
}

fn said(op: &Op) -> String {
    let written = json!(op);
    let name = written["as"].as_str().or(written["name"].as_str()).or(written["msg"].as_str()).unwrap_or_default();
    format!("{} {name}", written["op"].as_str().unwrap_or_default()).trim().to_owned()
}

fn ending(op: &Op) -> Option<Ending> {
    Some(match op {
        Op::Complete { output, .. } => Ending::Completed(output.clone()),
        Op::Fail { error, retryable, .. } => Ending::Failed { error: error.clone(), retryable: *retryable },
        Op::Suspend => Ending::Suspended,
        Op::Release => Ending::Released,
        Op::Continue { input } => Ending::Continued(input.clone()),
        _ => return None,
    })
}

fn task(rows: &Rows, input: Value, how: &Behaviour) -> Task {
    let (memo, memo_next) = rows.page(0, how.page);
    Task {
        task_id: "run.1".to_owned(),
        token: "token".to_owned(),
        run_id: "run".to_owned(),
        flow: "flow".to_owned(),
        version: "v".to_owned(),
        step: "@run".to_owned(),
        activation: "@run".to_owned(),
        handler: "flow".to_owned(),
        attempt: how.attempt,
        kind: TaskKind::Run,
        input: input.clone(),
        run_input: input,
        gate: Value::Null,
        key: "run/@run".to_owned(),
        intent: "intent".to_owned(),
        lease_ms: 30_000,
        deadline: None,
        started_at: Some("2026-01-02T03:04:00.000Z".to_owned()),
        attempts: Some(3),
        memo: Some(memo),
        memo_next,
        unwind: rows.unwinding.clone(),
        traceparent: None,
        undo: false,
    }
}
