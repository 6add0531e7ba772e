//! A link over plain HTTP: tasks are claimed by long polls and together with reports.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{
    Beat, ClaimMore, ClaimTasks, ClaimedTasks, FromServer, Heartbeat, Report, ReportTasks, ReportedTasks, Task,
    WorkerRegistered,
};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;
use uuid::Uuid;

use super::link::{Cut, Hello, Link, Opened, ToServer};
use crate::client::{Client, segment};
use crate::error::{Error, Refusal};

/// How long a claim waits for its first task.
const CLAIM_WAIT: Duration = Duration::from_secs(20);

/// The minimum timeout of a heartbeat.
const PATIENCE: Duration = Duration::from_secs(1);

/// A claim that was sent. Until it is answered, the worker may hold its tasks without knowing, so the claim is repeated
/// with the same id, also on the next connection.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Claim {
    request_id: String,
    max: u32,
}

/// Unanswered claims, across connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unanswered(Arc<Mutex<Vec<Claim>>>);

pub(crate) async fn open(client: &Client, unanswered: &Unanswered, hello: &Hello) -> Result<Opened, Cut> {
    let registered: WorkerRegistered = client.post_once("/v1/workers", &hello.worker, Duration::ZERO).await?;
    let link = HttpLink {
        client: client.clone(),
        worker_id: registered.worker_id.clone(),
        patience: (Duration::from_millis(registered.heartbeat_ms) * 3 / 2).max(PATIENCE),
        credit: 0,
        to_repeat: unanswered.all(),
        unanswered: unanswered.clone(),
        claiming: None,
        repeating: false,
        others: FuturesUnordered::new(),
        piggy_backed: false,
        beating: false,
        draining: false,
        heard: VecDeque::new(),
    };
    Ok((Box::new(link), registered))
}

struct HttpLink {
    client: Client,
    worker_id: String,
    /// The timeout of a heartbeat. Other responses on this link extend no lease, so a heartbeat must fail in time for
    /// another one.
    patience: Duration,
    /// Credits that no claim uses.
    credit: u32,
    to_repeat: Vec<Claim>,
    unanswered: Unanswered,
    /// The long poll. Only one claim is in progress at a time, here or with a report.
    claiming: Option<BoxFuture<'static, HttpReply>>,
    /// The claim in progress is a repetition of an unanswered one.
    repeating: bool,
    others: FuturesUnordered<BoxFuture<'static, HttpReply>>,
    piggy_backed: bool,
    beating: bool,
    draining: bool,
    heard: VecDeque<FromServer>,
}

enum HttpReply {
    /// `room` is how much of the credit it uses.
    Claimed {
        claim: Claim,
        room: u32,
        result: Result<ClaimedTasks, Refusal>,
    },
    Reported {
        id: u64,
        claim: Option<Claim>,
        result: Result<ReportedTasks, Refusal>,
    },
    Beat(Result<Beat, Refusal>),
    Drained,
}

#[async_trait]
impl Link for HttpLink {
    fn say(&mut self, message: ToServer) {
        match message {
            ToServer::Hello { .. } => {}
            ToServer::Credit { n } => self.credit += n,
            ToServer::Report { id, reports, credit } => {
                self.credit += credit;
                self.report(id, reports);
            }
            ToServer::Heartbeat { beat } => self.beat(beat),
            ToServer::Drain => self.drain(),
        }
    }

    async fn hear(&mut self) -> Result<FromServer, Cut> {
        loop {
            if let Some(message) = self.heard.pop_front() {
                return Ok(message);
            }
            self.claim();
            let answer = match &mut self.claiming {
                Some(claiming) => tokio::select! {
                    answer = claiming => {
                        self.claiming = None;
                        answer
                    }
                    Some(answer) = self.others.next() => answer,
                },
                None => match self.others.next().await {
                    Some(answer) => answer,
                    // Nothing to wait for: the caller must send something first.
                    None => std::future::pending().await,
                },
            };
            self.take(answer)?;
        }
    }

    fn is_settled(&self) -> bool {
        self.to_repeat.is_empty() && !(self.repeating && self.claiming.is_some())
    }

    async fn close(&mut self) {}
}

impl HttpLink {
    fn take(&mut self, answer: HttpReply) -> Result<(), Cut> {
        match answer {
            HttpReply::Claimed { claim, room, result } => {
                let tasks = result.map_err(lost)?.tasks;
                self.claimed(&claim, room, tasks);
            }
            HttpReply::Reported { id, claim, result } => {
                let ReportedTasks { outcomes, tasks, news, news_next } = result.map_err(not_taken)?;
                self.heard.push_back(FromServer::Reported { id, outcomes, news, news_next });
                if let Some(claim) = claim {
                    self.piggy_backed = false;
                    self.claimed(&claim, claim.max, tasks);
                }
            }
            HttpReply::Beat(result) => {
                self.beating = false;
                self.heard.push_back(FromServer::Beat { beat: result.map_err(lost)? });
            }
            HttpReply::Drained => {}
        }
        Ok(())
    }

    /// Returns unused credits.
    fn claimed(&mut self, claim: &Claim, room: u32, tasks: Vec<Task>) {
        self.unanswered.settle(claim);
        self.credit += room.saturating_sub(u32::try_from(tasks.len()).unwrap_or(u32::MAX));
        if !tasks.is_empty() {
            self.heard.push_back(FromServer::Tasks { tasks });
        }
    }

    /// Starts a long poll, if there are credits and no claim is in progress.
    fn claim(&mut self) {
        if self.claiming.is_some() || self.piggy_backed {
            return;
        }
        // A repeated claim only fetches tasks that were already claimed; it does not wait for more, and is also sent
        // while draining.
        let again = self.to_repeat.pop();
        self.repeating = again.is_some();
        let (claim, wait) = match again {
            Some(claim) => (claim, Duration::ZERO),
            None if self.credit > 0 && !self.draining => (self.unanswered.begin(self.credit), CLAIM_WAIT),
            None => return,
        };
        // There may be fewer credits than when the claim was first sent.
        let room = self.credit.min(claim.max);
        self.credit -= room;
        let body = ClaimTasks {
            worker_id: self.worker_id.clone(),
            queues: None,
            max: Some(claim.max),
            wait_ms: Some(wait.as_millis() as u64),
            request_id: Some(claim.request_id.clone()),
        };
        let client = self.client.clone();
        self.claiming = Some(Box::pin(async move {
            let result = client.post_once("/v1/tasks/claim", &body, wait).await;
            HttpReply::Claimed { claim, room, result }
        }));
    }

    fn report(&mut self, id: u64, reports: Vec<Arc<Report>>) {
        let free = self.claiming.is_none() && !self.piggy_backed && self.to_repeat.is_empty() && !self.draining;
        let claim = (free && self.credit > 0).then(|| self.unanswered.begin(self.credit));
        if let Some(claim) = &claim {
            self.credit -= claim.max;
            self.piggy_backed = true;
        }
        let more = claim.as_ref().map(|claim| ClaimMore {
            max: Some(claim.max),
            request_id: Some(claim.request_id.clone()),
            ..ClaimMore::default()
        });
        let body = ReportTasks { worker_id: self.worker_id.clone(), reports, claim: more };
        let client = self.client.clone();
        self.others.push(Box::pin(async move {
            let result = client.post_once("/v1/tasks/report", &body, Duration::ZERO).await;
            HttpReply::Reported { id, claim, result }
        }));
    }

    fn beat(&mut self, beat: Heartbeat) {
        if std::mem::replace(&mut self.beating, true) {
            return;
        }
        let (client, path) = (self.client.clone(), self.path("heartbeat"));
        let patience = self.patience;
        self.others.push(Box::pin(async move {
            let beating = tokio::time::timeout(patience, client.post_once(&path, &beat, Duration::ZERO));
            let timed_out = || Refusal { error: Error::Timeout, retry_after: None };
            HttpReply::Beat(beating.await.unwrap_or_else(|_| Err(timed_out())))
        }));
    }

    /// Cancels the long poll: the server gives tasks that were claimed for it and not delivered to other workers.
    fn drain(&mut self) {
        if std::mem::replace(&mut self.draining, true) {
            return;
        }
        if !self.repeating {
            self.claiming = None;
        }
        let (client, path) = (self.client.clone(), self.path("drain"));
        self.others.push(Box::pin(async move {
            let drained: Result<Value, Refusal> = client.post_once(&path, &serde_json::json!({}), Duration::ZERO).await;
            if let Err(refusal) = drained {
                tracing::debug!("cannot tell the server to drain: {}", refusal.error);
            }
            HttpReply::Drained
        }));
    }

    fn path(&self, call: &str) -> String {
        format!("/v1/workers/{}/{call}", segment(&self.worker_id))
    }
}

/// Reports that the server rejects would be rejected again.
fn not_taken(refusal: Refusal) -> Cut {
    match refusal.error {
        error @ Error::Api { status: 400 | 413 | 422, .. } => Cut::Refused(error),
        error => lost(Refusal { error, ..refusal }),
    }
}

/// After the first connection even a refusal leads to a reconnect: a server that has forgotten the worker registers it
/// again.
fn lost(refusal: Refusal) -> Cut {
    Cut::Lost { why: refusal.error.to_string(), after: refusal.retry_after }
}

impl Unanswered {
    /// Drops all claims without repeating them.
    pub fn forget(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn begin(&self, max: u32) -> Claim {
        let claim = Claim { request_id: Uuid::new_v4().to_string(), max };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(claim.clone());
        claim
    }

    fn settle(&self, claim: &Claim) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|open| open != claim);
    }

    fn all(&self) -> Vec<Claim> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
