//! Claims: a worker asks for tasks, waits for them, and gets them with their inputs. Claimed tasks that never reach the
//! worker go back to their queues.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use eddyline_machine::{Claim, Expiry, Failure, Fence, Input, Millis, Op, Report, RunId, TaskKind, TaskRef};
use eddyline_store::{ClaimRequest, Consumed, Lease, LeaseState, Namespace, Offer, RequestId, Store, StoreError};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use crate::assignment::{Assignment, Handed};
use crate::committer::Order;
use crate::config::{MAX_CLAIM, MAX_CLAIM_BYTES, MAX_WAIT_MS};
use crate::dispatcher::Parked;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::task_status::TaskId;
use crate::workers::derived;

/// The kind of failure when a task's input is too large to be delivered.
const TOO_LARGE: &str = "PayloadTooLarge";
/// How often a claim of a full worker is retried.
const LOOK_FOR_ROOM: Duration = Duration::from_millis(100);
/// The longest time that a claim waits.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// The most entries of [`ClaimFacts`] and [`ClaimTimes`].
const MAX_CACHED_CLAIMS: usize = 100_000;

/// What a worker asks for.
#[derive(Debug, Clone)]
pub struct ClaimTasks {
    pub worker: String,
    pub queues: Vec<String>,
    pub offer: Arc<Offer>,
    pub max: usize,
    /// How many tasks the worker may hold in total. A full worker's claim waits until it holds fewer.
    pub most_held: Option<usize>,
    /// A repeated id returns the same tasks.
    pub request: Option<RequestId>,
    pub lease_ms: Option<Millis>,
}

/// A claim that waits for its tasks.
#[derive(Debug)]
pub struct PendingClaim {
    engine: Engine,
    request: RequestId,
    worker: String,
    /// The request to repeat while the worker is full; set if it has a `most_held`.
    bounded: Option<Box<ClaimRequest>>,
    answer: oneshot::Receiver<Result<Vec<Handed>>>,
    answered: bool,
    /// Claimed tasks that the caller does not have yet.
    undelivered: Vec<Handed>,
    repeated_elsewhere: bool,
}

/// Derives the id of a claim from a text that the worker chose. The same text from another worker or namespace gives
/// another id.
pub fn request_named(ns: &Namespace, worker: &str, text: &str) -> RequestId {
    RequestId(derived(&json!(["claim", ns.as_str(), worker, text])))
}

impl Engine {
    /// Claims tasks, waiting up to `wait` for the first.
    pub async fn claim(&self, ns: &Namespace, claim: ClaimTasks, wait: Duration) -> Result<Vec<Assignment>> {
        self.ask(ns, claim, wait.is_zero()).await?.tasks(wait).await
    }

    /// Asks for tasks and returns at once; the result waits for them.
    pub async fn ask(&self, ns: &Namespace, claim: ClaimTasks, once: bool) -> Result<PendingClaim> {
        if self.stopping.is_now() {
            return Err(EngineError::Stopped);
        }
        // Without the secret, claimed tasks could not be given a token.
        self.tokens.key(&self.instance).await?;
        let (order, waiting) = self.park(ns, claim, once);
        self.committing().ask(order).await?;
        Ok(waiting)
    }

    pub(crate) fn park(&self, ns: &Namespace, claim: ClaimTasks, once: bool) -> (Order, PendingClaim) {
        // A worker that has lost its connection repeats the claim, here or at another instance. The one that gets the
        // repetition cannot know whether this one notices before or after it: if this one released the tasks, it could
        // take them from under the worker.
        let repeated_elsewhere = claim.request.is_some() && self.instance.store.hears_others().is_some();
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
        let waiting = PendingClaim {
            engine: self.clone(),
            request: id,
            worker: claim.worker,
            bounded,
            answer,
            answered: false,
            undelivered: Vec::new(),
            repeated_elsewhere,
        };
        (Order::Park(Parked::new(request, reply, once).repeated_elsewhere(repeated_elsewhere)), waiting)
    }

    fn lease_ms(&self, asked: Option<Millis>) -> Millis {
        asked.unwrap_or(self.instance.config.lease_ms).clamp(1, MAX_WAIT_MS)
    }
}

impl PendingClaim {
    /// Waits up to `wait` for tasks. Tasks that do not fit into one response go back to their queues.
    pub async fn tasks(mut self, wait: Duration) -> Result<Vec<Assignment>> {
        self.claimed(wait, MAX_CLAIM_BYTES).await?;
        Ok(self.part(MAX_CLAIM_BYTES).await?.0)
    }

    /// Waits up to `wait` until tasks are claimed. Returns roughly how many bytes the inputs of the next part have;
    /// nothing is assembled yet, so the caller can reserve memory first.
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
                // It may wait long for its part; its payloads are read again then.
                false => handed.forget_values(),
            }
        }
        Ok(bytes)
    }

    async fn answered_by(&mut self, until: Instant) -> Result<Vec<Handed>> {
        let handed = match tokio::time::timeout_at(until, &mut self.answer).await {
            Ok(handed) => handed,
            Err(_) => {
                // Unpark instead of dropping the receiver: a task that is being claimed right now still arrives.
                self.engine.committing().send(Order::Unpark(self.request)).await?;
                (&mut self.answer).await
            }
        };
        handed.map_err(|_| EngineError::Stopped)?
    }

    /// Whether the claim returned because its worker is full. Such a claim does not stay parked: it would be tried in
    /// the place of others that have room.
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
        let parked = Parked::new(request, reply, false).repeated_elsewhere(self.repeated_elsewhere);
        self.engine.committing().ask(Order::Park(parked)).await
    }

    /// Assembles tasks until their inputs have `most_bytes`, at least one. Also returns the claim if it has more tasks.
    pub async fn part(mut self, most_bytes: usize) -> Result<(Vec<Assignment>, Option<PendingClaim>)> {
        let (mut tasks, mut taken, mut bytes) = (Vec::new(), 0, 0);
        while taken < self.undelivered.len() && bytes < most_bytes {
            // The task stays in `undelivered` until the whole part is returned, so that a dropped future releases it.
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

/// If the caller went away, its claimed tasks are released at once, without using up an attempt. If it may have repeated
/// the claim at another instance, they are left to the worker that may have them, or to the end of their leases.
impl Drop for PendingClaim {
    fn drop(&mut self) {
        let committing = self.engine.committing();
        if !self.answered {
            self.answer.close();
            match self.answer.try_recv() {
                Ok(handed) => {
                    self.undelivered.extend(handed.into_iter().flatten());
                }
                // A parked claim must not be tried in the place of one whose caller still waits.
                Err(_) => {
                    committing.try_send(Order::Unpark(self.request));
                }
            }
        }
        if !self.undelivered.is_empty() && !self.repeated_elsewhere {
            // If the channel is full, the leases expire instead.
            let undelivered = std::mem::take(&mut self.undelivered).into_iter().map(|handed| handed.claimed);
            committing.try_send(Order::Release(undelivered.collect()));
        }
    }
}

impl Engine {
    /// Assembles a claimed task for its worker. If that fails, the task is failed or released with the reason.
    async fn hand_over(&self, worker: &str, handed: Handed) -> Result<Option<Assignment>> {
        let claimed = handed.claimed.clone();
        if claimed.task.kind == TaskKind::Run {
            self.facts.keep(claimed.run, claimed.task.fence, claimed.held.claim.clone());
        }
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let token = self.tokens.key(&self.instance).await?.token(&claimed.ns, claimed.run, &claimed.task);
        let (input, taken) = match handed
            .assemble(&*self.instance.store, &self.instance.flows, &self.instance.config.hooks, token)
            .await
        {
            Ok(assignment) => {
                self.measures().claim_times.begin(claimed.run, claimed.task.fence);
                return Ok(Some(assignment));
            }
            Err(EngineError::TooLarge { bytes, limit, .. }) => {
                let message = format!("the input is {bytes} bytes or more; the limit is {limit}");
                let op = Op::Fail { error: Failure::new(TOO_LARGE, message), retryable: false, retry_after_ms: None };
                (Input::Report(Report { task, seq: None, op, claim: claimed.held.claim }), None)
            }
            Err(error) => {
                tracing::warn!(worker, run = %claimed.run, "released a task that could not be delivered: {error}");
                let (claim, why) = (claimed.held.claim, Expiry::Released);
                let input = match error {
                    // The store will recover: the task is not at fault.
                    EngineError::Store(StoreError::Unavailable(_) | StoreError::Full(_) | StoreError::Closed(_)) => {
                        Input::Expired { task, why, claim }
                    }
                    error => Input::Undelivered { task, claim, why: error.to_string() },
                };
                (input, Some(Consumed::Expiry(task.fence, why)))
            }
        };
        self.committing().submit(claimed.run, vec![input], taken, None).await?;
        Ok(None)
    }
}

/// When this instance delivered each task, to measure the time until its final report.
#[derive(Debug, Default)]
pub(crate) struct ClaimTimes(Mutex<HashMap<(RunId, Fence), Instant>>);

impl ClaimTimes {
    fn begin(&self, run: RunId, fence: Fence) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() >= MAX_CACHED_CLAIMS {
            times.clear();
        }
        times.insert((run, fence), Instant::now());
    }

    /// The final report on a task was applied.
    pub fn end(&self, run: RunId, fence: Fence) {
        let since = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(run, fence));
        if let Some(since) = since {
            metrics::histogram!("eddyline_claim_to_report_seconds").record(since.elapsed().as_secs_f64());
        }
    }
}

/// Caches the claims of code runs, so that a report needs no read.
#[derive(Debug, Default)]
pub(crate) struct ClaimFacts(Mutex<HashMap<(RunId, Fence), Claim>>);

impl ClaimFacts {
    fn keep(&self, run: RunId, fence: Fence, claim: Claim) {
        let mut facts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if facts.len() >= MAX_CACHED_CLAIMS {
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
