//! A link to an engine in the same process: the same messages without a network.

mod functions;
mod ops;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use eddyline_engine::{
    Assignment, BroughtFlow, ClaimTasks, Engine, EngineError, PendingClaim, Reported, TaskId, TaskReport, TaskToken,
};
use eddyline_language::time;
use eddyline_protocol as wire;
use eddyline_protocol::{
    ApiError, Beat, BringsFlow, BringsFlows, Code, FromServer, Heartbeat, News, NewsNext, Report, ReportOutcome, Task,
    Verdict, WorkerRegistered,
};
use eddyline_store::{Namespace, Offer};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;

use self::functions::{FunctionReports, Functions, look, news_of};
use super::link::{Cut, Hello, Link, Opened, ToServer, Transport};
use crate::code::driver::{MemoPage, MemoPages};
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
        let flows = listed(&worker.flows);
        let builds = flows.iter().map(|(flow, build)| (flow.name.clone(), build.clone())).collect();
        let flows = flows.into_iter().map(|(flow, _)| flow).collect();
        self.engine.bring_flows(&self.ns, &queues, flows).await.map_err(refused)?;
        let offer = Offer {
            handlers: worker.handlers.iter().cloned().collect(),
            flows: builds,
            labels: worker.labels.iter().cloned().collect(),
            build: worker.version.clone(),
        };
        let lease_ms = u64::try_from(self.engine.config().lease_ms).unwrap_or(1);
        let link = EngineLink {
            engine: self.engine.clone(),
            ns: self.ns.clone(),
            worker: name.clone(),
            queues,
            offer: Arc::new(offer),
            credit: 0,
            functions: Functions::new(self.engine.attention()),
            claiming: None,
            asking: false,
            others: FuturesUnordered::new(),
            heard: VecDeque::new(),
            draining: false,
        };
        let heartbeat_ms = u64::try_from(self.engine.config().heartbeat_ms()).unwrap_or(1).min(LONGEST_BEAT_MS);
        Ok((Box::new(link), WorkerRegistered { worker_id: name, lease_ms, heartbeat_ms }))
    }

    fn pages(&self) -> Arc<dyn MemoPages> {
        Arc::new(Pages { engine: self.engine.clone(), ns: self.ns.clone() })
    }

    async fn leave(&mut self, _worker_id: &str) -> Result<(), Error> {
        Ok(())
    }
}

struct Pages {
    engine: Engine,
    ns: Namespace,
}

#[async_trait]
impl MemoPages for Pages {
    async fn page(&self, task_id: &str, after: u64) -> Result<MemoPage, Error> {
        let gone = || {
            let message = format!("there is no task {task_id}");
            Error::Api { status: 404, error: ApiError { code: Code::NotFound, message, details: Vec::new() } }
        };
        let task = TaskId::parse(task_id).ok_or_else(gone)?;
        let page = self.engine.memo_of(&self.ns, task, after).await;
        let memo = page.map_err(|error| Error::Config(error.to_string()))?.ok_or_else(gone)?;
        // A page ends at a size; the next one says whether there is more.
        let next = memo.values().filter_map(|entry| entry["n"].as_u64()).max();
        Ok(MemoPage { memo, next })
    }
}

/// The code flows that a worker brings, each with its build.
fn listed(flows: &BringsFlows) -> Vec<(BroughtFlow, Option<String>)> {
    let named = |name: &String| BroughtFlow { name: name.clone(), ..BroughtFlow::default() };
    match flows {
        BringsFlows::Builds(builds) => builds.iter().map(|(name, build)| (named(name), build.clone())).collect(),
        BringsFlows::List(flows) => flows
            .iter()
            .map(|flow| match flow {
                BringsFlow::Name(name) => (named(name), None),
                BringsFlow::Whole { name, build, definition } => {
                    (BroughtFlow { name: name.clone(), definition: definition.clone() }, build.clone())
                }
            })
            .collect(),
    }
}

/// A definition that the engine does not accept, or an engine that cannot be used now.
fn refused(error: EngineError) -> Cut {
    let mut message = error.to_string();
    match error {
        EngineError::Definition(problems) => {
            let lines = problems.0.iter().map(|problem| format!("\n  {}: {}", problem.path, problem.message));
            message.extend(lines);
            Cut::Refused(Error::Config(message))
        }
        EngineError::Conflict(_) => Cut::Refused(Error::Config(message)),
        other => cut(other),
    }
}

struct EngineLink {
    engine: Engine,
    ns: Namespace,
    worker: String,
    queues: Vec<String>,
    offer: Arc<Offer>,
    functions: Functions,
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
type ReportsAnswered = Result<Answered, EngineError>;

struct Answered {
    outcomes: Vec<ReportOutcome>,
    /// Functions whose tasks have ended.
    ended: Vec<TaskId>,
    news: News,
    news_next: NewsNext,
    waiting: Option<PendingClaim>,
}

enum Done {
    Reported { id: u64, max: u32, result: Box<ReportsAnswered> },
    Beat { beat: Result<Beat, EngineError>, asked: bool },
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
            let claiming = &mut self.claiming;
            let claimed = async move {
                match claiming {
                    Some(claiming) => claiming.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                claimed = claimed => {
                    self.claiming = None;
                    self.claimed(claimed)?;
                }
                Some(done) = self.others.next() => self.take(done)?,
                changed = self.functions.changed() => self.look(changed),
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
        for task in tasks.iter().filter(|task| task.memo.is_some()) {
            let seen = task.memo.iter().flat_map(|memo| memo.values()).filter_map(|entry| entry["n"].as_u64()).max();
            let id = TaskId { run: task.token.run, fence: task.token.fence };
            self.functions.add(id, seen.unwrap_or(0));
            // It may have changed between its claim and now.
            self.look(vec![(id, seen.unwrap_or(0))]);
        }
        if !tasks.is_empty() {
            self.heard.push_back(FromServer::Tasks { tasks: tasks.into_iter().map(task).collect() });
        }
        Ok(())
    }

    /// Reads what is new in the memos of these tasks.
    fn look(&mut self, tasks: Vec<(TaskId, u64)>) {
        if tasks.is_empty() {
            return;
        }
        let (engine, ns, worker) = (self.engine.clone(), self.ns.clone(), self.worker.clone());
        self.others.push(Box::pin(async move {
            let ids: Vec<TaskId> = tasks.iter().map(|(task, _)| *task).collect();
            let found = async move {
                let standing = engine.standing(&ns, &worker, &ids).await?;
                let seen = tasks.into_iter().map(|(task, seen)| (task, Some(seen))).collect();
                look(&engine, &ns, seen, standing).await
            };
            Done::Beat { beat: found.await, asked: false }
        }));
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
        let held: Vec<(TaskId, Option<u64>)> = beat
            .tasks
            .iter()
            .filter_map(|id| {
                let task = TaskId::parse(id)?;
                Some((task, beat.seen.get(id).copied().max(self.functions.seen(task))))
            })
            .collect();
        let (engine, ns, worker) = (self.engine.clone(), self.ns.clone(), self.worker.clone());
        self.others.push(Box::pin(async move {
            let tasks: Vec<TaskId> = held.iter().map(|(task, _)| *task).collect();
            let found = async move {
                let standing = engine.beat(&ns, &worker, &tasks).await?;
                look(&engine, &ns, held, standing).await
            };
            Done::Beat { beat: found.await, asked: true }
        }));
    }

    fn take(&mut self, done: Done) -> Result<(), Cut> {
        match done {
            Done::Reported { id, max, result } => {
                let Answered { outcomes, ended, news, news_next, waiting } = (*result).map_err(cut)?;
                ended.into_iter().for_each(|task| self.functions.remove(task));
                self.note(&news);
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
            Done::Beat { beat, asked } => {
                let beat = beat.map_err(cut)?;
                self.note(&beat.news);
                let ended = beat.cancel.iter().filter(|task| !beat.unwind.contains(task));
                for task in beat.lost.iter().chain(ended).filter_map(|task| TaskId::parse(task)) {
                    self.functions.remove(task);
                }
                if asked || beat != Beat::default() {
                    self.heard.push_back(FromServer::Beat { beat });
                }
            }
        }
        Ok(())
    }

    /// The worker knows these entries now.
    fn note(&mut self, news: &News) {
        for (id, entries) in news {
            let newest = entries.values().filter_map(|entry| entry["n"].as_u64()).max();
            if let (Some(task), Some(newest)) = (TaskId::parse(id), newest) {
                self.functions.mark_seen(task, newest);
            }
        }
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
    let mut functions: BTreeMap<TaskToken, FunctionReports> = BTreeMap::new();
    let mut refused: Vec<&str> = Vec::new();
    for (at, report) in reports.iter().enumerate() {
        if refused.contains(&report.task_id.as_str()) {
            continue;
        }
        let token = report.token.parse::<TaskToken>().map_err(|error| format!("{error}"));
        let read =
            token.and_then(|token| Ok(TaskReport { token, seq: report.seq, op: ops::op(&report.op, report.seen)? }));
        match read {
            Ok(read) => {
                if read.token.activation.0 == 0 {
                    functions.entry(read.token).or_default().add(taken.len(), report);
                }
                places.push(at);
                taken.push(read);
            }
            Err(message) => {
                refused.push(&report.task_id);
                outcomes[at] =
                    ReportOutcome { message: Some(message), ..ReportOutcome::new(&report.task_id, Verdict::Invalid) };
            }
        }
    }
    let (answers, waiting) = engine.report_and_ask(ns, taken, claim).await?;
    let (news, news_next) = news_of(engine, ns, &functions, &answers).await?;
    let ended = functions.iter().filter(|(_, of_task)| !of_task.is_held(&answers));
    let ended = ended.map(|(token, _)| TaskId { run: token.run, fence: token.fence }).collect();
    for (at, answer) in places.into_iter().zip(answers) {
        if let Reported::Answer { answer, warning } = answer {
            outcomes[at] = ops::outcome(&reports[at].task_id, answer, warning, &engine.config().hooks);
        }
    }
    Ok(Answered { outcomes, ended, news, news_next, waiting })
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
        unwind: of.unwind.map(|run| wire::Unwinding {
            error: run.error.map(ops::wire_failure),
            reason: run.reason,
            until: run.until.map(time::iso),
        }),
        traceparent: of.traceparent,
        undo: of.undo,
    }
}
