//! What workers ask and say: claims, reports, signs of life.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use eddyline_language::definition::wrong_name;
use eddyline_machine::{
    Answer, Claim, CodeOp, CodeWait, Data, Due, Expiry, Failure, Fence, Input, Millis, Op, Report, RunId, TaskKind,
    TaskRef,
};
use eddyline_store::{ClaimRequest, Lease, LeaseState, Namespace, Offer, RequestId, Store, StoreError, Taken};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use crate::assignment::{Assignment, Handed};
use crate::beat::TaskId;
use crate::committer::{Order, Outcome};
use crate::config::{Config, MAX_CLAIM, MAX_CLAIM_BYTES, MAX_PAYLOAD_DEPTH, MAX_WAIT_MS};
use crate::dispatcher::Parked;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::start::bad_wait;
use crate::token::TaskToken;
use crate::workers::derived;

/// The kind of failure when a task's input cannot be handed over.
const TOO_LARGE: &str = "PayloadTooLarge";
/// What is said of a token that no claim gave out.
const UNKNOWN_TASK: &str = "there is no such task";
/// The end of the year 9999, about.
const MAX_MOMENT_MS: Millis = 253_402_300_799_999;
/// A claim of a worker that has as many tasks as it may have is tried again after this long.
const LOOK_FOR_ROOM: Duration = Duration::from_millis(100);
/// No claim waits longer.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// Claims of code runs whose facts are kept at hand.
const FACTS_AT_HAND: usize = 100_000;

/// What a worker asks for.
#[derive(Debug, Clone)]
pub struct ClaimTasks {
    pub worker: String,
    pub queues: Vec<String>,
    pub offer: Arc<Offer>,
    pub max: usize,
    /// How many tasks the worker may have in all. One that has as many waits until it has fewer.
    pub most_held: Option<usize>,
    /// The same id again gets the same tasks again.
    pub request: Option<RequestId>,
    pub lease_ms: Option<Millis>,
}

/// A claim that waits for its tasks.
#[derive(Debug)]
pub struct Waiting {
    engine: Engine,
    request: RequestId,
    worker: String,
    /// What is asked again, if the worker may have no more than so many tasks.
    bounded: Option<Box<ClaimRequest>>,
    answer: oneshot::Receiver<Result<Vec<Handed>>>,
    answered: bool,
    /// Claimed, and not yet in the caller's hands.
    undelivered: Vec<Handed>,
}

/// What a worker says of one of its tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskReport {
    pub token: TaskToken,
    /// Counts per task from 1; a repeat gets its first outcome.
    pub seq: Option<u32>,
    pub op: Op,
}

impl TaskReport {
    /// Whether it is the last one on its task.
    pub fn is_last(&self) -> bool {
        matches!(
            self.op,
            Op::Complete { .. } | Op::Fail { .. } | Op::Defer { .. } | Op::Suspend { .. } | Op::ContinueAs { .. }
        )
    }
}

/// What came of a report.
#[derive(Debug, Clone, PartialEq)]
pub enum Reported {
    Answer {
        answer: Answer,
        /// It was taken, and something about it is better done otherwise.
        warning: Option<String>,
    },
    /// A report on the same task before it was not applied.
    NotTried,
}

/// The id of a claim that a worker calls by a text of its own: the same text of another worker, or in another namespace,
/// is another id.
pub fn request_named(ns: &Namespace, worker: &str, text: &str) -> RequestId {
    RequestId(derived(&json!(["claim", ns.as_str(), worker, text])))
}

impl Engine {
    /// Claims tasks, waiting up to `wait` for the first.
    pub async fn claim(&self, ns: &Namespace, claim: ClaimTasks, wait: Duration) -> Result<Vec<Assignment>> {
        self.ask(ns, claim, wait.is_zero()).await?.tasks(wait).await
    }

    /// Asks for tasks and returns at once, so that a claim can be on its way together with a report.
    pub async fn ask(&self, ns: &Namespace, claim: ClaimTasks, once: bool) -> Result<Waiting> {
        if self.stopping.is_now() {
            return Err(EngineError::Stopped);
        }
        // Without the secret nothing that is claimed could be handed over.
        self.tokens.key(&self.instance).await?;
        let (order, waiting) = self.park(ns, claim, once);
        self.committing().ask(order).await?;
        Ok(waiting)
    }

    fn park(&self, ns: &Namespace, claim: ClaimTasks, once: bool) -> (Order, Waiting) {
        let id = claim.request.unwrap_or_else(|| RequestId(Uuid::from_bytes(self.instance.command().0.into_bytes())));
        let request = ClaimRequest {
            ns: ns.clone(),
            request: id,
            worker: claim.worker.clone(),
            queues: claim.queues,
            offer: claim.offer,
            max: claim.max.clamp(1, MAX_CLAIM),
            most_held: claim.most_held,
            lease_ms: self.lease_ms(claim.lease_ms),
        };
        let (reply, answer) = oneshot::channel();
        let bounded = request.most_held.map(|_| Box::new(request.clone()));
        let (engine, worker, undelivered) = (self.clone(), claim.worker, Vec::new());
        let waiting = Waiting { engine, request: id, worker, bounded, answer, answered: false, undelivered };
        (Order::Park(Parked::new(request, reply, once)), waiting)
    }

    /// Takes reports, each for itself, in the order of each task. Answered when everything that was applied is durable.
    pub async fn report(&self, ns: &Namespace, reports: Vec<TaskReport>) -> Result<Vec<Reported>> {
        let (reported, _) = self.report_and_ask(ns, reports, None).await?;
        Ok(reported)
    }

    /// The same, with a claim on its way beside it: what follows from the reports can be claimed by the commit that takes
    /// them.
    pub async fn report_and_ask(
        &self,
        ns: &Namespace,
        reports: Vec<TaskReport>,
        claim: Option<ClaimTasks>,
    ) -> Result<(Vec<Reported>, Option<Waiting>)> {
        let mut by_task: BTreeMap<TaskToken, Vec<(usize, TaskReport)>> = BTreeMap::new();
        let count = reports.len();
        for (at, report) in reports.into_iter().enumerate() {
            by_task.entry(report.token).or_default().push((at, report));
        }
        let mut reported = vec![Reported::NotTried; count];
        let key = self.tokens.key(&self.instance).await?;
        let mut on_their_way = Vec::with_capacity(by_task.len());
        let mut orders = Vec::with_capacity(by_task.len() + 1);
        for (token, reports) in by_task {
            if !key.verifies(ns, &token) {
                for (at, _) in reports.into_iter().take(1) {
                    reported[at] = Reported::Answer { answer: Answer::Invalid(UNKNOWN_TASK.to_owned()), warning: None };
                }
                continue;
            }
            let claim = self.claim_of(ns, token, &reports).await?;
            let task = TaskRef { activation: token.activation, fence: token.fence };
            let (mut places, mut inputs) = (Vec::new(), Vec::new());
            for (at, report) in reports {
                let last = report.is_last();
                let warning = match check(&self.instance.config, &report.op) {
                    Ok(warning) => warning,
                    Err(problem) => {
                        reported[at] = Reported::Answer { answer: Answer::Invalid(problem), warning: None };
                        break;
                    }
                };
                places.push((at, last, warning));
                inputs.push(Input::Report(Report { task, seq: report.seq, op: report.op, claim: claim.clone() }));
            }
            if !inputs.is_empty() {
                let (order, answer) = Order::submit_in(ns, token.run, inputs);
                orders.push(order);
                on_their_way.push((token, places, answer));
            }
        }
        let waiting = claim.filter(|_| !self.stopping.is_now()).map(|claim| {
            let (order, waiting) = self.park(ns, claim, false);
            orders.push(order);
            waiting
        });
        self.committing().ask(Order::All(orders)).await?;
        let mut alive = Vec::new();
        for (token, places, answer) in on_their_way {
            let outcomes = match answer.await.map_err(|_| EngineError::Stopped)? {
                Ok(outcomes) => outcomes,
                Err(EngineError::NotFound { .. }) => refused(UNKNOWN_TASK.to_owned(), places.len()),
                // Something is wrong with this run; that must not keep the reports on others from their answers.
                Err(
                    EngineError::Bug(why)
                    | EngineError::Quarantined(why)
                    | EngineError::Store(StoreError::Corrupt(why)),
                ) => refused(why, places.len()),
                Err(EngineError::Trimmed(_)) => {
                    vec![Outcome::Answered { answer: Answer::Closed, at: 0 }; places.len()]
                }
                Err(error) => return Err(error),
            };
            let mut goes_on = false;
            for ((at, last, warning), outcome) in places.into_iter().zip(outcomes) {
                let answer = match outcome {
                    Outcome::Answered { answer, .. } => answer,
                    Outcome::NotTried => continue,
                    Outcome::Gone | Outcome::KeyTaken { .. } | Outcome::UniqueTaken { .. } | Outcome::LineFull => {
                        Answer::Stale
                    }
                };
                let taken = matches!(answer, Answer::Applied(_) | Answer::Duplicate(_) | Answer::Nothing);
                let warning = warning.filter(|_| taken);
                if taken {
                    goes_on = !last;
                }
                if last && matches!(answer, Answer::Applied(_)) {
                    self.measures().claim_times.end(token.run, token.fence);
                }
                if let Some(warning) = &warning {
                    tracing::warn!(task = token.task_id(), "{warning}");
                }
                reported[at] = Reported::Answer { answer, warning };
            }
            if goes_on {
                alive.push(Lease { run: token.run, fence: token.fence });
            }
        }
        self.keep(ns, &alive).await;
        Ok((reported, waiting))
    }

    /// A report is a sign of life of its task. The token shows whose it is, whatever name the worker goes by.
    async fn keep(&self, ns: &Namespace, tasks: &[Lease]) {
        if !tasks.is_empty()
            && let Err(error) = self.instance.store.extend(ns, None, tasks).await
        {
            // What was reported is durable, and that is the answer.
            tracing::warn!("leases were not extended by the reports on their tasks: {error}");
        }
    }

    fn lease_ms(&self, asked: Option<Millis>) -> Millis {
        asked.unwrap_or(self.instance.config.lease_ms).clamp(1, MAX_WAIT_MS)
    }

    /// What is known of the claim of a code run's task.
    async fn claim_of(&self, ns: &Namespace, token: TaskToken, reports: &[(usize, TaskReport)]) -> Result<Claim> {
        let matters = |op: &Op| matches!(op, Op::Code { .. } | Op::Suspend { .. } | Op::ContinueAs { .. });
        if token.activation.0 != 0 || !reports.iter().any(|(_, report)| matters(&report.op)) {
            return Ok(Claim::default());
        }
        self.facts.of(&*self.instance.store, ns, TaskId { run: token.run, fence: token.fence }).await
    }
}

impl Waiting {
    /// The tasks, as soon as there are any; none after `wait`. Those that would make too much for one answer come back to
    /// the queue.
    pub async fn tasks(mut self, wait: Duration) -> Result<Vec<Assignment>> {
        self.claimed(wait, MAX_CLAIM_BYTES).await?;
        Ok(self.part(MAX_CLAIM_BYTES).await?.0)
    }

    /// Waits until tasks are claimed, or until `wait` is over. About how many bytes the inputs of the next part have, of
    /// which none is assembled yet: whoever has no room for them need not.
    pub async fn claimed(&mut self, wait: Duration, most_bytes: usize) -> Result<usize> {
        if !self.answered {
            let until = Instant::now() + wait.min(LONGEST_WAIT);
            let mut handed = self.answered_by(until).await?;
            while handed.is_empty() && Instant::now() < until && self.is_full().await? {
                tokio::time::sleep_until(until.min(Instant::now() + LOOK_FOR_ROOM)).await;
                self.ask_again().await?;
                handed = self.answered_by(until).await?;
            }
            self.answered = true;
            self.undelivered = handed;
        }
        let mut bytes = 0;
        for handed in &mut self.undelivered {
            match bytes < most_bytes {
                true => bytes += handed.bytes(),
                // It may wait for long, and is read again when its turn comes.
                false => handed.forget_values(),
            }
        }
        Ok(bytes)
    }

    async fn answered_by(&mut self, until: Instant) -> Result<Vec<Handed>> {
        let handed = match tokio::time::timeout_at(until, &mut self.answer).await {
            Ok(handed) => handed,
            Err(_) => {
                // Called off rather than dropped: a task that is being claimed right now still gets here.
                self.engine.committing().send(Order::Unpark(self.request)).await?;
                (&mut self.answer).await
            }
        };
        handed.map_err(|_| EngineError::Stopped)?
    }

    /// Whether the claim came back because its worker has as many tasks as it may have. It did not stay parked for that: it
    /// would be tried in the place of others that have room.
    async fn is_full(&self) -> Result<bool> {
        let Some(ClaimRequest { ns, worker, most_held: Some(most), .. }) = self.bounded.as_deref() else {
            return Ok(false);
        };
        let works = self.engine.worker(ns, worker).await?.is_some_and(|worker| !worker.draining);
        Ok(works && self.engine.instance.store.held_by(ns, worker).await? >= *most)
    }

    async fn ask_again(&mut self) -> Result<()> {
        let Some(request) = self.bounded.as_deref().cloned() else { return Ok(()) };
        let (reply, answer) = oneshot::channel();
        self.answer = answer;
        self.engine.committing().ask(Order::Park(Parked::new(request, reply, false))).await
    }

    /// Assembles tasks until their inputs have `most_bytes`, at least one; and the claim, if it has more.
    pub async fn part(mut self, most_bytes: usize) -> Result<(Vec<Assignment>, Option<Waiting>)> {
        let (mut tasks, mut taken, mut bytes) = (Vec::new(), 0, 0);
        while taken < self.undelivered.len() && bytes < most_bytes {
            // The claim stays among the undelivered until all of this part is in the caller's hands.
            let handed = self.undelivered[taken].take_up();
            taken += 1;
            if let Some(task) = self.engine.hand_over(&self.worker, handed).await? {
                bytes += task.bytes;
                tasks.push(task);
            }
        }
        self.undelivered.drain(..taken);
        let more = !self.undelivered.is_empty();
        Ok((tasks, more.then_some(self)))
    }
}

/// Whoever asked went away: what was claimed for it comes back at once, without costing an attempt.
impl Drop for Waiting {
    fn drop(&mut self) {
        let committing = self.engine.committing();
        if !self.answered {
            self.answer.close();
            match self.answer.try_recv() {
                Ok(handed) => {
                    self.undelivered.extend(handed.into_iter().flatten());
                }
                // It must not be tried in the place of somebody who is still there.
                Err(_) => {
                    committing.try_send(Order::Unpark(self.request));
                }
            }
        }
        if !self.undelivered.is_empty() {
            // If the committer has no room for it now, the leases end by themselves.
            let undelivered = std::mem::take(&mut self.undelivered).into_iter().map(|handed| handed.claimed);
            committing.try_send(Order::Release(undelivered.collect()));
        }
    }
}

impl Engine {
    /// Completes a claimed task for its worker. One that cannot be completed ends here, with the reason.
    async fn hand_over(&self, worker: &str, handed: Handed) -> Result<Option<Assignment>> {
        let claimed = handed.claimed.clone();
        if claimed.task.kind == TaskKind::Run {
            self.facts.keep(claimed.run, claimed.task.fence, claimed.held.claim.clone());
        }
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let token = self.tokens.key(&self.instance).await?.token(&claimed.ns, claimed.run, &claimed.task);
        let (input, taken) = match handed.assemble(&*self.instance.store, &self.instance.flows, token).await {
            Ok(assignment) => {
                self.measures().claim_times.begin(claimed.run, claimed.task.fence);
                return Ok(Some(assignment));
            }
            Err(EngineError::TooLarge { bytes, limit, .. }) => {
                let message = format!("the input has {bytes} bytes or more, and the limit is {limit}");
                let op = Op::Fail { error: Failure::new(TOO_LARGE, message), retryable: false, retry_after_ms: None };
                (Input::Report(Report { task, seq: None, op, claim: claimed.held.claim }), None)
            }
            Err(error) => {
                tracing::warn!(worker, run = %claimed.run, "released, because it could not be handed over: {error}");
                let (claim, why) = (claimed.held.claim, Expiry::Released);
                let input = match error {
                    // The store comes back: that is no fault of the task.
                    EngineError::Store(StoreError::Unavailable(_) | StoreError::Full(_) | StoreError::Closed(_)) => {
                        Input::Expired { task, why, claim }
                    }
                    error => Input::Undelivered { task, claim, why: error.to_string() },
                };
                (input, Some(Taken::Expiry(task.fence, why)))
            }
        };
        self.committing().submit(claimed.run, vec![input], taken, None).await?;
        Ok(None)
    }
}

/// The first is invalid, the others are not tried.
fn refused(why: String, count: usize) -> Vec<Outcome> {
    let invalid = Outcome::Answered { answer: Answer::Invalid(why), at: 0 };
    std::iter::once(invalid).chain(std::iter::repeat_n(Outcome::NotTried, count.saturating_sub(1))).collect()
}

/// What is wrong with a report before anything is looked up; if nothing is, what is better done otherwise.
fn check(config: &Config, op: &Op) -> std::result::Result<Option<String>, String> {
    let problem = match op {
        Op::Complete { output, emits, .. } => {
            let mut warning = weigh(config, "the output", output)?;
            for (event, payload) in emits {
                let of_event = weigh(config, &format!("the payload of {event}"), payload)?;
                warning = warning.or(of_event);
            }
            return Ok(warning);
        }
        Op::Publish { name, payload, .. } => match wrong_name(name) {
            Some(problem) => Some(problem),
            None => return weigh(config, "the payload", payload),
        },
        Op::Emit { payload, .. } => return weigh(config, "the payload", payload),
        Op::ContinueAs { input } => return weigh(config, "the input", input),
        Op::Fail { retry_after_ms: Some(ms), .. } => bad_wait("the back-off", *ms),
        Op::Defer { after_ms, .. } => bad_wait("the delay", *after_ms),
        Op::Code { op, .. } => match op {
            CodeOp::Done { output } => return weigh(config, "the output", output),
            CodeOp::Call { handler, input, queue } => {
                match wrong_name(handler).or_else(|| wrong_name(queue.as_deref()?)) {
                    Some(problem) => Some(problem),
                    None => return weigh(config, "the input", input),
                }
            }
            CodeOp::Child { flow, input, .. } => match wrong_name(flow) {
                Some(problem) => Some(problem),
                None => return weigh(config, "the input", input),
            },
            CodeOp::Failed { retry_after_ms: Some(ms), .. } => bad_wait("the back-off", *ms),
            CodeOp::Sleep { due: Due::After(ms) } => bad_wait("the sleep", *ms),
            CodeOp::Sleep { due: Due::At(at) } => (!(0..=MAX_MOMENT_MS).contains(at))
                .then(|| format!("the moment {at} is beyond the years that can be written")),
            CodeOp::Wait { wait, timeout_ms } => {
                let name = match wait {
                    CodeWait::Event { name, .. } => wrong_name(name),
                    CodeWait::Webhook | CodeWait::Manual => None,
                };
                name.or_else(|| bad_wait("the timeout", (*timeout_ms)?))
            }
            _ => None,
        },
        _ => None,
    };
    problem.map_or(Ok(None), Err)
}

/// Whether a payload is within its bounds; a warning if it is near them.
fn weigh(config: &Config, what: &str, data: &Data) -> std::result::Result<Option<String>, String> {
    let limit = config.max_payload_bytes;
    let bytes = data.bytes(limit + 1);
    if bytes > limit {
        return Err(format!("{what} is larger than {limit} bytes"));
    }
    if data.depth() > MAX_PAYLOAD_DEPTH {
        return Err(format!("{what} is nested more than {MAX_PAYLOAD_DEPTH} deep"));
    }
    Ok((bytes >= config.large_payload_bytes())
        .then(|| format!("{what} has {bytes} bytes, and more than {limit} are not taken: keep large data elsewhere")))
}

/// When tasks were handed over by this instance, to measure how long it takes until their last report.
#[derive(Debug, Default)]
pub(crate) struct ClaimTimes(Mutex<HashMap<(RunId, Fence), Instant>>);

impl ClaimTimes {
    fn begin(&self, run: RunId, fence: Fence) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() >= FACTS_AT_HAND {
            times.clear();
        }
        times.insert((run, fence), Instant::now());
    }

    /// The last report on a task was applied.
    fn end(&self, run: RunId, fence: Fence) {
        let since = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(run, fence));
        if let Some(since) = since {
            metrics::histogram!("eddyline_claim_to_report_seconds").record(since.elapsed().as_secs_f64());
        }
    }
}

/// What is known of claims of code runs, so that a report needs no read.
#[derive(Debug, Default)]
pub(crate) struct ClaimFacts(Mutex<HashMap<(RunId, Fence), Claim>>);

impl ClaimFacts {
    fn keep(&self, run: RunId, fence: Fence, claim: Claim) {
        let mut facts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if facts.len() >= FACTS_AT_HAND {
            facts.clear();
        }
        facts.insert((run, fence), claim);
    }

    pub async fn of(&self, store: &dyn Store, ns: &Namespace, task: TaskId) -> Result<Claim> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&(task.run, task.fence)).cloned();
        if let Some(claim) = known {
            return Ok(claim);
        }
        let held = store.leases(ns, None, &[Lease::from(task)]).await?.pop();
        Ok(match held {
            Some(LeaseState::Held { claim, .. }) => claim,
            _ => Claim::default(),
        })
    }
}
