//! Tasks: claims and reports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{
    Assignment, ClaimTasks, Engine, MAX_CLAIM_BYTES, PendingClaim, Reported, TaskId, TaskToken, WorkerRecord,
    request_named,
};
use eddyline_protocol as wire;
use eddyline_protocol::{ClaimedTasks, News, NewsNext, ReportTasks, ReportedTasks};
use eddyline_store::{Namespace, Offer};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::body::check_labels;
use super::call::{ApiResult, Call, MAX_WAIT, ok};
use super::failure::Failure;
use super::item_errors::{ItemErrors, List};
use super::memory_budget::Reservation;
use super::reports::{CodeTaskReports, ReadReports};
use super::{stopped, to_wire};

/// The queue of a worker that names none.
pub(super) const DEFAULT_QUEUE: &str = "default";
/// The maximum number of queues that a worker claims from. A waiting claim is registered with each of them.
pub(super) const MAX_QUEUES: usize = 100;
/// The maximum number of reports in one request.
pub(super) const MAX_REPORTS: usize = 10_000;
/// The list whose items are parsed separately.
pub(super) const REPORTS: List = List { field: "reports", bare: false, most: MAX_REPORTS };
/// The maximum length of a claim's `request_id`.
const MAX_REQUEST_CHARS: usize = 200;
/// The maximum size of a memo page.
const MEMO_PAGE_BYTES: usize = 1 << 20;

/// `POST /v1/tasks/claim`
pub(crate) async fn claim(mut call: Call) -> ApiResult {
    let asked: wire::ClaimTasks = call.json_or_default().await?;
    let wait = waits(asked.wait_ms);
    check_labels([&asked.worker_id])?;
    let claimant = Claimant::find(&call, &asked.worker_id).await?;
    let claim = claimant.claim(call.ns(), asked.queues, asked.max, asked.request_id)?;
    let _room = if wait.is_zero() { None } else { Some(call.api.long_poll(call.ns())?) };
    if asked.max == Some(0) {
        return ok(&ClaimedTasks::default());
    }
    if claimant.draining {
        // A draining worker gets no new tasks. But a repeated claim gets the tasks of the original one, which the
        // worker may not have received.
        let repeated = ClaimTasks { queues: Vec::new(), ..claim };
        let tasks = alive(&call, &claimant.id, call.engine().claim(call.ns(), repeated, Duration::ZERO)).await?;
        if !tasks.is_empty() {
            return handed_over(&call, &claimant.id, tasks, |tasks| ClaimedTasks { tasks }).await;
        }
        let mut stopping = call.api.stopping();
        let waits = alive(&call, &claimant.id, tokio::time::timeout(wait, stopped(&mut stopping)));
        let _ = call.while_admitted(waits).await?;
        return ok(&ClaimedTasks::default());
    }
    let waiting = call.engine().ask(call.ns(), claim, wait.is_zero()).await?;
    let wait = claimant.still_waits(&call, wait).await;
    let (tasks, _room) = call.while_admitted(alive(&call, &claimant.id, assembled(&call, waiting, wait))).await??;
    handed_over(&call, &claimant.id, tasks, |tasks| ClaimedTasks { tasks }).await
}

/// Responds with these tasks. If the response budget has no room, the tasks return to the queue immediately, because
/// the worker does not know of them.
async fn handed_over<T: Serialize>(
    call: &Call,
    worker: &str,
    tasks: Vec<Assignment>,
    answer: impl FnOnce(Vec<wire::Task>) -> T,
) -> ApiResult {
    let ids: Vec<TaskId> = tasks.iter().map(|task| TaskId { run: task.token.run, fence: task.token.fence }).collect();
    let response = ok(&answer(tasks.into_iter().map(to_wire::task).collect()))?;
    let held = call.api.unsent().try_hold(call.ns(), response).await;
    if held.is_err()
        && let Err(error) = call.engine().release(call.ns(), worker, &ids).await
    {
        tracing::warn!(worker, "cannot release undelivered tasks before their leases expire: {error}");
    }
    held
}

/// The tasks of a claim, with their part of the memory budget until the response is written. Tasks that do not fit into
/// the response return to the queue.
async fn assembled(
    call: &Call,
    mut waiting: PendingClaim,
    wait: Duration,
) -> eddyline_engine::Result<(Vec<Assignment>, Reservation)> {
    let bytes = waiting.claimed(wait, MAX_CLAIM_BYTES).await?;
    let mut room = call.api.task_memory().reservation(call.ns());
    room.grow_to(bytes.saturating_mul(2)).await;
    Ok((waiting.part(MAX_CLAIM_BYTES).await?.0, room))
}

/// `POST /v1/tasks/report`
pub(crate) async fn report(mut call: Call) -> ApiResult {
    let (asked, unread): (ReportTasks<Value>, ItemErrors) = call.json_apart(REPORTS).await?;
    if asked.reports.len() > MAX_REPORTS {
        return Err(Failure::bad(format!("more than {MAX_REPORTS} reports in one request")));
    }
    check_labels([&asked.worker_id])?;
    let claimant = Claimant::find(&call, &asked.worker_id).await?;
    let more = asked.claim.filter(|more| !claimant.draining && more.max != Some(0));
    let wait = waits(more.as_ref().and_then(|more| more.wait_ms));
    let claim = more.map(|more| claimant.claim(call.ns(), more.queues, more.max, more.request_id)).transpose()?;
    let _room = if claim.is_none() || wait.is_zero() { None } else { Some(call.api.long_poll(call.ns())?) };
    let mut reading = ReadReports::new(asked.reports, unread);
    let code = std::mem::take(&mut reading.code);
    let reports = std::mem::take(&mut reading.reports);
    let (reported, waiting) = call.engine().report_and_ask(call.ns(), reports, claim).await?;
    // The reports are committed, whatever becomes of the claim.
    call.body_done();
    let (tasks, _room) = match waiting {
        Some(waiting) => {
            let wait = claimant.still_waits(&call, wait).await;
            match call.while_admitted(alive(&call, &claimant.id, assembled(&call, waiting, wait))).await {
                Ok(Ok((tasks, room))) => (tasks, Some(room)),
                Ok(Err(error)) => {
                    tracing::debug!("the claim sent with reports failed: {error}");
                    (Vec::new(), None)
                }
                // Still return the outcomes of the reports; the next request is refused.
                Err(_) => (Vec::new(), None),
            }
        }
        None => (Vec::new(), None),
    };
    let MemoNews { news, news_next, .. } = news_of(call.engine(), call.ns(), &code, &reported).await?;
    let outcomes = reading.outcomes(call.ns(), reported, &call.engine().config().hooks);
    let next = news_next.clone();
    let answer = |tasks| ReportedTasks { outcomes: outcomes.clone(), tasks, news: news.clone(), news_next: next };
    match handed_over(&call, &claimant.id, tasks, answer).await {
        // The outcomes are small and are returned without the tasks.
        Err(_) => ok(&ReportedTasks { outcomes, tasks: Vec::new(), news, news_next }),
        held => held,
    }
}

/// `GET /v1/tasks/{id}/memo`
pub(crate) async fn memo(call: Call) -> ApiResult {
    let unknown = || Failure::not_found("task", call.param("id"));
    let task = TaskId::parse(call.param("id")).ok_or_else(unknown)?;
    let after = call.number("after")?.unwrap_or(0);
    let memo = call.engine().memo_of(call.ns(), task, after).await?.ok_or_else(unknown)?;
    let (memo, next) = to_wire::memo_page(memo, MEMO_PAGE_BYTES);
    ok(&json!({"memo": memo, "next": next.map(|next| next.to_string())}))
}

/// New memo entries that are sent with the response to reports.
#[derive(Default)]
pub(super) struct MemoNews {
    pub news: News,
    pub news_next: NewsNext,
    /// The highest number of each memo that the worker then has.
    pub up_to: Vec<(TaskId, u64)>,
}

/// New memo entries of held code runs, beyond those that the workers have seen or reported themselves.
pub(super) async fn news_of(
    engine: &Engine,
    ns: &Namespace,
    tasks: &BTreeMap<TaskToken, CodeTaskReports>,
    reported: &[Reported],
) -> Result<MemoNews, Failure> {
    let mut memo_news = MemoNews::default();
    for (token, of_task) in tasks.iter().filter(|(_, of_task)| of_task.is_held(reported)) {
        let task = TaskId { run: token.run, fence: token.fence };
        let known = of_task.known(reported);
        let Some(found) = engine.news_of(ns, task, of_task.seen, &known).await? else { continue };
        memo_news.up_to.extend(found.newest().max(of_task.seen).map(|n| (task, n)));
        memo_news.news_next.extend(found.next.map(|next| (token.task_id(), next)));
        if !found.entries.is_empty() {
            memo_news.news.insert(token.task_id(), found.entries);
        }
    }
    Ok(memo_news)
}

/// Records heartbeats while a worker waits for tasks.
async fn alive<T>(call: &Call, worker: &str, waits: impl Future<Output = T>) -> T {
    let period = Duration::from_millis(u64::try_from(call.engine().config().heartbeat_ms()).unwrap_or(1).max(1));
    let mut signs = tokio::time::interval_at(Instant::now() + period, period);
    tokio::pin!(waits);
    loop {
        tokio::select! {
            biased;
            done = &mut waits => return done,
            _ = signs.tick() => {
                if let Err(error) = call.engine().seen(call.ns(), worker, None).await {
                    tracing::debug!("cannot record a heartbeat: {error}");
                }
            }
        }
    }
}

fn waits(wait_ms: Option<u64>) -> Duration {
    Duration::from_millis(wait_ms.unwrap_or(0).min(MAX_WAIT.ms))
}

/// A claiming worker: registered, or unregistered and known only by the name it sent.
struct Claimant {
    id: String,
    queues: Vec<String>,
    offer: Arc<Offer>,
    /// The maximum number of tasks it can hold, including those it already has.
    max_concurrent: Option<u32>,
    registered: bool,
    draining: bool,
}

impl Claimant {
    /// A claim or a report counts as a heartbeat.
    async fn find(call: &Call, id: &str) -> Result<Claimant, Failure> {
        let known = if id.is_empty() { None } else { call.engine().seen(call.ns(), id, None).await? };
        Ok(match known {
            Some(worker) => Claimant {
                id: worker.id,
                queues: worker.spec.queues.clone(),
                offer: Arc::new(worker.spec.offer.clone()),
                max_concurrent: worker.spec.max_concurrent,
                registered: true,
                draining: worker.draining,
            },
            None => Claimant {
                id: if id.is_empty() { "anonymous".to_owned() } else { id.to_owned() },
                queues: vec![DEFAULT_QUEUE.to_owned()],
                offer: Arc::default(),
                max_concurrent: None,
                registered: false,
                draining: false,
            },
        })
    }

    /// How long a claim in progress should wait: zero if the worker started to drain after it was looked up and before
    /// its claim could be cancelled.
    async fn still_waits(&self, call: &Call, wait: Duration) -> Duration {
        let drains = |worker: Option<WorkerRecord>| worker.is_some_and(|worker| worker.draining);
        if self.registered && call.engine().worker(call.ns(), &self.id).await.is_ok_and(drains) {
            return Duration::ZERO;
        }
        wait
    }

    fn claim(
        &self,
        ns: &Namespace,
        queues: Option<Vec<String>>,
        max: Option<u32>,
        request_id: Option<String>,
    ) -> Result<ClaimTasks, Failure> {
        let request = request_id.map(|text| match text.chars().take(MAX_REQUEST_CHARS + 1).count() {
            1..=MAX_REQUEST_CHARS => Ok(request_named(ns, &self.id, &text)),
            _ => Err(Failure::bad(format!("`request_id` must have 1 to {MAX_REQUEST_CHARS} characters"))),
        });
        let queues = queues.filter(|queues| !queues.is_empty()).unwrap_or_else(|| self.queues.clone());
        if queues.len() > MAX_QUEUES {
            return Err(Failure::bad(format!("more than {MAX_QUEUES} queues")));
        }
        let max = max.unwrap_or(1).min(self.max_concurrent.unwrap_or(u32::MAX));
        Ok(ClaimTasks {
            worker: self.id.clone(),
            queues,
            offer: self.offer.clone(),
            max: usize::try_from(max).unwrap_or(usize::MAX),
            most_held: self.max_concurrent.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            request: request.transpose()?,
            lease_ms: None,
        })
    }
}
