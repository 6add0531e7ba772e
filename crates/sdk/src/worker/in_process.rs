//! A link to an engine in the same process: the same messages without a network.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use eddyline_engine::{
    Assignment, ClaimTasks, Engine, EngineError, Holding, PendingClaim, Reported, TaskId, TaskReport,
};
use eddyline_language::time;
use eddyline_machine::{Answer, Data, Failure, Log};
use eddyline_protocol as wire;
use eddyline_protocol::{
    Beat, FromServer, Heartbeat, News, NewsNext, Op, Report, ReportOutcome, Task, Verdict, WorkerRegistered,
};
use eddyline_store::{Namespace, Offer};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;

use super::link::{Cut, Hello, Link, Opened, ToServer, Transport};
use crate::error::Error;

/// How long a claim waits before it is renewed.
const CLAIM_WAIT: Duration = Duration::from_secs(60);
/// Heartbeats are cheap here, so a handler learns soon that its task was cancelled.
const LONGEST_BEAT_MS: u64 = 1_000;

#[derive(Debug)]
pub(crate) struct InProcess {
    engine: Engine,
    ns: Namespace,
}

impl InProcess {
    pub fn new(engine: Engine, namespace: Option<&str>) -> InProcess {
        InProcess { engine, ns: namespace.map_or_else(Namespace::default, Namespace::new) }
    }
}

#[async_trait]
impl Transport for InProcess {
    async fn open(&mut self, hello: &Hello) -> Result<Opened, Cut> {
        let worker = &hello.worker;
        let name = format!(
            "{}:{}:{}",
            worker.host.as_deref().unwrap_or_default(),
            worker.pid.unwrap_or_default(),
            worker.instance.as_deref().unwrap_or_default()
        );
        let queues = if worker.queues.is_empty() { vec!["default".to_owned()] } else { worker.queues.clone() };
        let offer = Offer {
            handlers: worker.handlers.iter().cloned().collect(),
            labels: worker.labels.iter().cloned().collect(),
            build: worker.version.clone(),
            ..Offer::default()
        };
        let lease_ms = u64::try_from(self.engine.config().lease_ms).unwrap_or(1);
        let link = EngineLink {
            engine: self.engine.clone(),
            ns: self.ns.clone(),
            worker: name.clone(),
            queues,
            offer: Arc::new(offer),
            credit: 0,
            claiming: None,
            asking: false,
            others: FuturesUnordered::new(),
            heard: VecDeque::new(),
            draining: false,
        };
        let heartbeat_ms = u64::try_from(self.engine.config().heartbeat_ms()).unwrap_or(1).min(LONGEST_BEAT_MS);
        Ok((Box::new(link), WorkerRegistered { worker_id: name, lease_ms, heartbeat_ms }))
    }

    async fn leave(&mut self, _worker_id: &str) -> Result<(), Error> {
        Ok(())
    }
}

struct EngineLink {
    engine: Engine,
    ns: Namespace,
    worker: String,
    queues: Vec<String>,
    offer: Arc<Offer>,
    /// Credits that no claim uses.
    credit: u32,
    /// One claim at a time. Dropping it releases the tasks it may have claimed.
    claiming: Option<BoxFuture<'static, Claimed>>,
    /// A claim was sent with a report that is in progress.
    asking: bool,
    others: FuturesUnordered<BoxFuture<'static, Done>>,
    heard: VecDeque<FromServer>,
    draining: bool,
}

struct Claimed {
    max: u32,
    result: Result<Vec<Assignment>, EngineError>,
}

/// The outcomes of reports, and the claim that was made with them.
type ReportsAnswered = Result<(Vec<ReportOutcome>, Option<PendingClaim>), EngineError>;

enum Done {
    Reported { id: u64, max: u32, result: Box<ReportsAnswered> },
    Beat(Result<Beat, EngineError>),
}

#[async_trait]
impl Link for EngineLink {
    fn say(&mut self, message: ToServer) {
        match message {
            ToServer::Hello { .. } => {}
            ToServer::Credit { n } => self.credit += n,
            ToServer::Report { id, reports, credit } => {
                self.credit += credit;
                self.report(id, reports);
            }
            ToServer::Heartbeat { beat } => self.beat(beat),
            ToServer::Drain => {
                self.draining = true;
                self.claiming = None;
            }
        }
    }

    async fn hear(&mut self) -> Result<FromServer, Cut> {
        loop {
            if let Some(message) = self.heard.pop_front() {
                return Ok(message);
            }
            self.claim();
            match &mut self.claiming {
                Some(claiming) => tokio::select! {
                    claimed = claiming => {
                        self.claiming = None;
                        self.claimed(claimed)?;
                    }
                    Some(done) = self.others.next() => self.take(done)?,
                },
                None => match self.others.next().await {
                    Some(done) => self.take(done)?,
                    // Nothing to wait for: the caller must send something first.
                    None => std::future::pending().await,
                },
            }
        }
    }

    async fn close(&mut self) {}
}

impl EngineLink {
    fn claim(&mut self) {
        if self.claiming.is_some() || self.asking || self.draining || self.credit == 0 {
            return;
        }
        let (engine, ns, max) = (self.engine.clone(), self.ns.clone(), std::mem::take(&mut self.credit));
        let request = self.request(max);
        self.claiming = Some(Box::pin(async move {
            let result = engine.claim(&ns, request, CLAIM_WAIT).await;
            Claimed { max, result }
        }));
    }

    fn request(&self, max: u32) -> ClaimTasks {
        let (worker, queues, offer) = (self.worker.clone(), self.queues.clone(), self.offer.clone());
        ClaimTasks { worker, queues, offer, max: max as usize, most_held: None, request: None, lease_ms: None }
    }

    fn claimed(&mut self, claimed: Claimed) -> Result<(), Cut> {
        let tasks = claimed.result.map_err(cut)?;
        self.credit += claimed.max.saturating_sub(u32::try_from(tasks.len()).unwrap_or(u32::MAX));
        if !tasks.is_empty() {
            self.heard.push_back(FromServer::Tasks { tasks: tasks.into_iter().map(task).collect() });
        }
        Ok(())
    }

    fn report(&mut self, id: u64, reports: Vec<Arc<Report>>) {
        let free = self.claiming.is_none() && !self.asking && !self.draining;
        let max = if free { std::mem::take(&mut self.credit) } else { 0 };
        self.asking |= max > 0;
        let (engine, ns) = (self.engine.clone(), self.ns.clone());
        let claim = (max > 0).then(|| self.request(max));
        self.others.push(Box::pin(async move {
            let result = Box::new(reported(&engine, &ns, &reports, claim).await);
            Done::Reported { id, max, result }
        }));
    }

    fn beat(&mut self, beat: Heartbeat) {
        let ids = beat.tasks.into_iter();
        let held: Vec<(TaskId, String)> = ids.filter_map(|id| Some((TaskId::parse(&id)?, id))).collect();
        let (engine, ns, worker) = (self.engine.clone(), self.ns.clone(), self.worker.clone());
        self.others.push(Box::pin(async move {
            let tasks: Vec<TaskId> = held.iter().map(|(task, _)| *task).collect();
            Done::Beat(engine.beat(&ns, &worker, &tasks).await.map(|standing| {
                let mut beat = Beat::default();
                for ((_, id), holding) in held.into_iter().zip(standing) {
                    match holding {
                        Holding::Held { .. } => {}
                        Holding::Cancelled => beat.cancel.push(id),
                        Holding::Lost => beat.lost.push(id),
                    }
                }
                beat
            }))
        }));
    }

    fn take(&mut self, done: Done) -> Result<(), Cut> {
        match done {
            Done::Reported { id, max, result } => {
                let (outcomes, waiting) = (*result).map_err(cut)?;
                let (news, news_next) = (News::new(), NewsNext::new());
                self.heard.push_back(FromServer::Reported { id, outcomes, news, news_next });
                if max > 0 {
                    self.asking = false;
                    match waiting {
                        Some(waiting) if !self.draining => {
                            self.claiming = Some(Box::pin(async move {
                                let result = waiting.tasks(CLAIM_WAIT).await;
                                Claimed { max, result }
                            }));
                        }
                        _ => self.credit += max,
                    }
                }
            }
            Done::Beat(beat) => self.heard.push_back(FromServer::Beat { beat: beat.map_err(cut)? }),
        }
        Ok(())
    }
}

fn cut(error: EngineError) -> Cut {
    match error {
        EngineError::Stopped => Cut::Over,
        other => Cut::lost(other.to_string()),
    }
}

async fn reported(
    engine: &Engine,
    ns: &Namespace,
    reports: &[Arc<Report>],
    claim: Option<ClaimTasks>,
) -> ReportsAnswered {
    let mut outcomes: Vec<ReportOutcome> =
        reports.iter().map(|report| ReportOutcome::new(&report.task_id, Verdict::NotTried)).collect();
    let (mut places, mut taken) = (Vec::with_capacity(reports.len()), Vec::with_capacity(reports.len()));
    for (at, report) in reports.iter().enumerate() {
        let token = report.token.parse().map_err(|error| format!("{error}"));
        match token.and_then(|token| Ok(TaskReport { token, seq: report.seq, op: op(&report.op)? })) {
            Ok(report) => {
                places.push(at);
                taken.push(report);
            }
            Err(message) => {
                outcomes[at] =
                    ReportOutcome { message: Some(message), ..ReportOutcome::new(&report.task_id, Verdict::Invalid) };
            }
        }
    }
    let (answers, waiting) = engine.report_and_ask(ns, taken, claim).await?;
    for (at, answer) in places.into_iter().zip(answers) {
        let Reported::Answer { answer, warning } = answer else { continue };
        let of = &mut outcomes[at];
        of.warning = warning;
        of.duplicate = matches!(answer, Answer::Duplicate(_));
        of.outcome = match answer {
            Answer::Applied(_) | Answer::Duplicate(_) | Answer::Nothing => Verdict::Applied,
            Answer::Stale => Verdict::Stale,
            Answer::Closed => Verdict::Closed,
            Answer::Invalid(message) | Answer::Conflict(message) => {
                of.message = Some(message);
                Verdict::Invalid
            }
        };
    }
    Ok((outcomes, waiting))
}

fn task(of: Assignment) -> Task {
    let owned = |json: Arc<serde_json::Value>| Arc::try_unwrap(json).unwrap_or_else(|shared| (*shared).clone());
    Task {
        task_id: of.task_id(),
        token: of.token.to_string(),
        run_id: of.run.to_string(),
        flow: of.flow,
        version: of.version,
        step: of.step,
        activation: of.activation,
        handler: of.handler,
        attempt: of.attempt,
        kind: match of.kind {
            eddyline_machine::TaskKind::Step => wire::TaskKind::Step,
            eddyline_machine::TaskKind::Run => wire::TaskKind::Run,
        },
        input: owned(of.input),
        run_input: owned(of.run_input),
        gate: of.gate.map_or(serde_json::Value::Null, owned),
        key: of.key,
        intent: of.intent.to_string(),
        lease_ms: u64::try_from(of.lease_ms).unwrap_or(0),
        deadline: of.deadline.map(time::iso),
        started_at: of.started_at.map(time::iso),
        attempts: of.attempts,
        memo: of.memo,
        memo_next: of.memo_next,
        unwind: None,
        traceparent: of.traceparent,
        undo: of.undo,
    }
}

/// Converts an operation to the engine's type.
fn op(of: &Op) -> Result<eddyline_machine::Op, String> {
    let data = |value: &serde_json::Value| Data::from(value.clone());
    let ms = |span: wire::Span| i64::try_from(span.ms).unwrap_or(i64::MAX);
    let log =
        |log: &wire::Log| Log { level: log.level.clone(), msg: log.msg.clone(), meta: log.meta.as_ref().map(data) };
    Ok(match of {
        Op::Complete { output, emits, logs } => eddyline_machine::Op::Complete {
            output: data(output),
            emits: emits.iter().map(|emit| (emit.event.clone(), data(&emit.payload))).collect(),
            logs: logs.iter().map(log).collect(),
        },
        Op::Fail { error, retryable, retry_after } => eddyline_machine::Op::Fail {
            error: failure(error),
            retryable: *retryable,
            retry_after_ms: retry_after.map(ms),
        },
        Op::Defer { after, limit } => eddyline_machine::Op::Defer { after_ms: ms(*after), limit: limit.clone() },
        Op::Emit(emit) => eddyline_machine::Op::Emit { event: emit.event.clone(), payload: data(&emit.payload) },
        Op::Release => eddyline_machine::Op::Release,
        Op::Publish { name, as_name, key, payload } => eddyline_machine::Op::Publish {
            name: name.clone(),
            as_name: as_name.clone(),
            key: key.as_ref().map(data),
            payload: data(payload),
        },
        Op::Log(line) => eddyline_machine::Op::Log(log(line)),
        Op::Progress { done, total, msg } => {
            eddyline_machine::Op::Progress { done: done.clone(), total: total.clone(), msg: msg.clone() }
        }
        Op::Step { .. }
        | Op::Call { .. }
        | Op::Sleep { .. }
        | Op::Wait { .. }
        | Op::Child { .. }
        | Op::LetGo { .. }
        | Op::Unwind { .. }
        | Op::Suspend
        | Op::Continue { .. } => {
            return Err("this operation is only for code runs, which this worker does not support".to_owned());
        }
    })
}

fn failure(of: &wire::Failure) -> Failure {
    let stack = of.stack.clone();
    Failure { stack, ..Failure::new(of.kind.clone(), of.message.clone()) }
}
