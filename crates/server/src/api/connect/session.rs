//! One connection, from hello to its end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{
    Assignment, ClaimTasks, Engine, EngineError, Holding, PendingClaim, Reported, Result as EngineResult, TaskId,
};
use eddyline_protocol::{Beat, Code, FromServer, FromWorker, Heartbeat, RegisterWorker, Task, WorkerRegistered};
use eddyline_store::{Namespace, Offer};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, pending};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::held_tasks::HeldTasks;
use super::{Cut, HELLO, ReceivedMessage, Wire};
use crate::api::failure::Failure;
use crate::api::guard::Caller;
use crate::api::item_errors::ItemErrors;
use crate::api::memory_budget::Reservation;
use crate::api::reports::ReadReports;
use crate::api::tasks::{MAX_REPORTS, MemoNews, news_of};
use crate::api::workers::{MAX_TASKS, add_news, beat, enrol, says, welcome};
use crate::api::{Api, stopped, to_wire};

/// The maximum number of credits of a worker.
const MAX_CREDITS: u32 = 10_000;
/// A claim is renewed after this long.
const CLAIM_FOR: Duration = Duration::from_secs(60);
/// How long changes of held runs are collected before they are checked; the end of a run is sent immediately.
const LOOK_AFTER: Duration = Duration::from_millis(200);
/// The maximum size of the inputs sent at a time (or one task). The next tasks are assembled when the worker has read
/// these.
const MAX_PART_BYTES: usize = 4 << 20;
/// The maximum size of a frame with several tasks.
const MAX_FRAME_BYTES: usize = 4 << 20;
/// The maximum number of runs checked at a time.
const RUNS_A_LOOK: usize = 64;

pub(super) struct Session<'a> {
    api: &'a Api,
    ns: Namespace,
    worker: String,
    queues: Vec<String>,
    offer: Arc<Offer>,
    held: HeldTasks,
    /// How many tasks the worker can hold at the same time.
    max_concurrent: Option<usize>,
    credits: u32,
    draining: bool,
    received_at: Instant,
    /// The worker answers neither pings nor anything else, but is not disconnected yet.
    quiet: bool,
    /// At most one claim and one frame of reports are in progress.
    claim: Option<BoxFuture<'static, EngineResult<Part>>>,
    reporting: Option<BoxFuture<'static, EngineResult<Done>>>,
}

/// Tasks to send to the worker next.
struct Part {
    tasks: Vec<Assignment>,
    /// The claim that has more tasks.
    more: Option<PendingClaim>,
    /// Their part of the memory budget, until they are written.
    room: Reservation,
}

/// The next tasks of a claim, once the budget has room for them. A worker that does not read is disconnected after a
/// while and releases its part.
async fn next_part(api: Api, ns: Namespace, mut waiting: PendingClaim) -> EngineResult<Part> {
    let bytes = waiting.claimed(CLAIM_FOR, MAX_PART_BYTES).await?;
    let mut room = api.task_memory().reservation(&ns);
    // Once as JSON in memory, once as text.
    room.grow_to(2 * bytes).await;
    let (tasks, more) = waiting.part(MAX_PART_BYTES).await?;
    Ok(Part { tasks, more, room })
}

/// A frame of reports that has been committed.
struct Done {
    id: u64,
    reading: ReadReports,
    reported: Vec<Reported>,
    /// The final reports on a task.
    last: Vec<(usize, TaskId)>,
    waiting: Option<PendingClaim>,
    news: Result<MemoNews, Failure>,
}

impl Session<'_> {
    pub async fn serve(api: &Api, caller: &Caller, wire: &mut Wire) -> Result<(), Cut> {
        let (hello, tasks, reserved) = tokio::select! {
            message = tokio::time::timeout(HELLO, hello(wire)) => match message {
                Ok(message) => message?,
                Err(_) => return Err(Failure::new(Code::Timeout, "expected `hello` as the first message").into()),
            },
            failure = caller.shut_out(api) => return Err(failure.into()),
        };
        let (engine, ns) = (api.engine(), caller.ns.clone());
        let drains = engine.drains();
        let record = enrol(engine, &ns, hello).await?;
        drop(reserved);
        let mut session = Session {
            api,
            worker: record.id.clone(),
            queues: record.spec.queues.clone(),
            offer: Arc::new(record.spec.offer.clone()),
            ns,
            held: HeldTasks::new(engine.attention()),
            max_concurrent: record.spec.max_concurrent.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            credits: 0,
            draining: record.draining,
            received_at: Instant::now(),
            quiet: false,
            claim: None,
            reporting: None,
        };
        let has: HashSet<TaskId> = tasks.iter().filter_map(|task| TaskId::parse(task)).collect();
        has.iter().for_each(|task| session.held.add_again(*task));
        let (number, lost) = api.pushed_tasks().connected(&session.ns, &session.worker, has);
        // Also while the session waits for a worker that does not read.
        let ended = tokio::select! {
            biased;
            ended = session.begin(wire, welcome(engine, record.id), lost, drains) => ended,
            failure = caller.shut_out(api) => Err(failure.into()),
        };
        let lease = Duration::from_millis(u64::try_from(engine.config().lease_ms).unwrap_or(0));
        let lost = api.pushed_tasks().disconnected(&session.ns, &session.worker, number, session.held.all(), lease);
        if let Err(error) = engine.release(&session.ns, &session.worker, &lost).await {
            tracing::warn!(
                worker = session.worker,
                "cannot release undelivered tasks before their leases expire: {error}"
            );
        }
        note_gone(api, &session.ns, &session.worker).await;
        ended
    }

    /// Releases tasks that earlier connections pushed and that never arrived, then welcomes the worker.
    async fn begin(
        &mut self,
        wire: &mut Wire,
        welcome: WorkerRegistered,
        lost: Vec<TaskId>,
        drains: watch::Receiver<()>,
    ) -> Result<(), Cut> {
        self.engine().release(&self.ns, &self.worker, &lost).await?;
        wire.send(&FromServer::Welcome { worker: welcome }).await?;
        self.run(wire, drains).await
    }

    async fn run(&mut self, wire: &mut Wire, mut drains: watch::Receiver<()>) -> Result<(), Cut> {
        let lease = Duration::from_millis(u64::try_from(self.engine().config().lease_ms).unwrap_or(1).max(3));
        let mut pings = tokio::time::interval(lease / 3);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut look_at: Option<Instant> = None;
        let mut stopping = self.api.stopping();
        loop {
            self.ask();
            if self.held.has_changed() {
                look_at.get_or_insert_with(|| Instant::now() + LOOK_AFTER);
            }
            tokio::select! {
                // Reports first: their commit runs on this thread if the committer is idle. If this task listened to
                // anything before, its own commit would wake it, and another thread with it. Messages of the worker
                // come last, so that a worker that never pauses does not starve everything else.
                biased;
                done = ready(&mut self.reporting) => {
                    self.reporting = None;
                    self.reported(wire, done?).await?;
                }
                () = stopped(&mut stopping) => {
                    return Err(Failure::new(Code::Unavailable, "the server is stopping").into());
                }
                changed = drains.changed() => {
                    if changed.is_ok() && !self.draining && self.engine().worker(&self.ns, &self.worker).await?.is_none_or(|worker| worker.draining) {
                        self.drain();
                        wire.send(&FromServer::Beat { beat: Beat { drain: true, ..Beat::default() } }).await?;
                    }
                }
                _ = pings.tick() => {
                    self.quiet = self.received_at.elapsed() >= lease * 2 / 3 && !self.has_spoken(wire).await?;
                    if self.quiet {
                        // New tasks would be lost with those it has: other workers get them until it responds again.
                        self.claim = None;
                    }
                    if self.quiet && self.received_at.elapsed() > 2 * lease {
                        return Err(Failure::new(Code::Timeout, "no message was received for two leases").into());
                    }
                    if self.received_at.elapsed() <= lease
                        && let Err(error) = self.engine().seen(&self.ns, &self.worker, None).await
                    {
                        tracing::debug!("cannot record a heartbeat: {error}");
                    }
                    wire.ping().await?;
                }
                () = self.held.notice() => {
                    if self.reporting.is_none() {
                        self.tell_ended(wire).await?;
                    }
                }
                () = tokio::time::sleep_until(look_at.unwrap_or_else(Instant::now)), if look_at.is_some() && self.reporting.is_none() => {
                    self.look(wire).await?;
                    look_at = None;
                }
                part = ready(&mut self.claim) => {
                    self.claim = None;
                    self.push(wire, part?).await?;
                }
                received = wire.receive(), if self.reporting.is_none() => {
                    (self.received_at, self.quiet) = (Instant::now(), false);
                    if let Some(message) = received? {
                        self.take(wire, message).await?;
                    }
                }
            }
        }
    }

    /// Whether a message arrived while this task was busy elsewhere; if so, handles it.
    async fn has_spoken(&mut self, wire: &mut Wire) -> Result<bool, Cut> {
        if self.reporting.is_some() {
            return Ok(false);
        }
        let Some(received) = wire.receive().now_or_never() else { return Ok(false) };
        self.received_at = Instant::now();
        if let Some(message) = received? {
            self.take(wire, message).await?;
        }
        Ok(true)
    }

    /// Claims tasks for the available credits, unless a claim is in progress or will be sent with reports.
    fn ask(&mut self) {
        if self.claim.is_none() && self.reporting.is_none() && self.credits > 0 && !self.draining && !self.quiet {
            let (api, ns, claim) = (self.api.clone(), self.ns.clone(), self.wanted());
            let claim = async move {
                let waiting = api.engine().ask(&ns, claim, false).await?;
                next_part(api, ns, waiting).await
            };
            self.claim = Some(claim.boxed());
        }
    }

    async fn take(&mut self, wire: &mut Wire, message: ReceivedMessage) -> Result<(), Cut> {
        let ReceivedMessage { message, unread, reserved } = message;
        match message {
            FromWorker::Hello { .. } => Err(Failure::bad("the worker has already sent `hello`").into()),
            FromWorker::Credit { n } => {
                self.credit(n);
                Ok(())
            }
            FromWorker::Report { id, reports, credit } => {
                self.credit(credit);
                self.report(id, reports, unread, reserved)
            }
            FromWorker::Heartbeat { beat } => self.beat(wire, beat).await,
            FromWorker::Drain => {
                self.drain();
                match self.engine().drain_worker(&self.ns, &self.worker).await {
                    // It has left or was deleted, and no longer appears in the list of workers.
                    Ok(_) | Err(EngineError::NotFound { .. }) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    fn credit(&mut self, n: u32) {
        self.credits = self.credits.saturating_add(n).min(MAX_CREDITS);
    }

    /// Dropping the claim releases tasks that were claimed and not yet pushed.
    fn drain(&mut self) {
        self.draining = true;
        self.claim = None;
    }

    fn report(
        &mut self,
        id: u64,
        reports: Vec<Value>,
        unread: ItemErrors,
        reserved: Option<Reservation>,
    ) -> Result<(), Cut> {
        if reports.len() > MAX_REPORTS {
            return Err(Failure::bad(format!("more than {MAX_REPORTS} reports in one message")).into());
        }
        let mut reading = ReadReports::new(reports, unread);
        let mut code = std::mem::take(&mut reading.code);
        for (token, of_task) in &mut code {
            of_task.seen = of_task.seen.or(self.held.seen(TaskId { run: token.run, fence: token.fence }));
        }
        let reports = std::mem::take(&mut reading.reports);
        let ends = reports.iter().enumerate().filter(|(_, report)| report.is_last());
        let last = ends.map(|(at, report)| (at, TaskId { run: report.token.run, fence: report.token.fence })).collect();
        let rides = self.claim.is_none() && self.credits > 0 && !self.draining;
        let claim = rides.then(|| self.wanted());
        let (engine, ns, worker) = (self.engine().clone(), self.ns.clone(), self.worker.clone());
        let reporting = async move {
            let (reported, waiting) = engine.report_and_ask(&ns, reports, claim).await?;
            drop(reserved);
            engine.seen(&ns, &worker, None).await?;
            let news = news_of(&engine, &ns, &code, &reported).await;
            Ok(Done { id, reading, reported, last, waiting, news })
        };
        self.reporting = Some(reporting.boxed());
        Ok(())
    }

    async fn reported(&mut self, wire: &mut Wire, done: Done) -> Result<(), Cut> {
        for (at, task) in done.last {
            if !matches!(
                done.reported.get(at),
                Some(Reported::Answer { answer: eddyline_machine::Answer::Invalid(_), .. })
            ) {
                self.held.remove(task);
            }
        }
        let outcomes = done.reading.outcomes(&self.ns, done.reported, &self.engine().config().hooks);
        let MemoNews { news, news_next, up_to } = done.news?;
        up_to.into_iter().for_each(|(task, n)| self.held.mark_seen(task, n));
        wire.feed(&FromServer::Reported { id: done.id, outcomes, news, news_next }).await?;
        if let Some(waiting) = done.waiting {
            let mut claim = next_part(self.api.clone(), self.ns.clone(), waiting).boxed();
            // Tasks claimed in the same commit are ready by now and are sent in the same write.
            match (&mut claim).now_or_never() {
                Some(part) => return self.push(wire, part?).await,
                None => self.claim = Some(claim),
            }
        }
        wire.flush().await?;
        self.tell_ended(wire).await
    }

    /// Pushes tasks in frames of limited size. Tasks that cannot be written are released immediately.
    async fn push(&mut self, wire: &mut Wire, Part { tasks, more, room: _room }: Part) -> Result<(), Cut> {
        self.claim = more.map(|more| next_part(self.api.clone(), self.ns.clone(), more).boxed());
        if tasks.is_empty() {
            return wire.flush().await;
        }
        self.credits = self.credits.saturating_sub(u32::try_from(tasks.len()).unwrap_or(u32::MAX));
        tasks.iter().for_each(|task| self.held.add(task));
        let mut frames: Vec<Vec<Task>> = vec![tasks.into_iter().map(to_wire::task).collect()];
        while let Some(tasks) = frames.pop() {
            let message = FromServer::Tasks { tasks };
            let text = wire.text(&message)?;
            let FromServer::Tasks { mut tasks } = message else { return Err(Cut::Gone) };
            if text.len() > MAX_FRAME_BYTES && tasks.len() > 1 {
                let rest = tasks.split_off(tasks.len() / 2);
                frames.extend([rest, tasks]);
                continue;
            }
            if let Err(cut) = wire.send_text(text).await {
                let unsent = frames.iter().flatten().chain(&tasks);
                let unsent: Vec<TaskId> = unsent.filter_map(|task| TaskId::parse(&task.task_id)).collect();
                unsent.iter().for_each(|task| self.held.remove(*task));
                self.engine().release(&self.ns, &self.worker, &unsent).await?;
                return Err(cut);
            }
        }
        Ok(())
    }

    async fn beat(&mut self, wire: &mut Wire, mut asked: Heartbeat) -> Result<(), Cut> {
        let known = self.engine().seen(&self.ns, &self.worker, Some(says(&asked))).await?;
        for id in &asked.tasks {
            if let Some(seen) = TaskId::parse(id).and_then(|task| self.held.seen(task)) {
                asked.seen.entry(id.clone()).or_insert(seen);
            }
        }
        let beat = beat(self.engine(), &self.ns, &self.worker, &asked, known.as_ref()).await?;
        self.note(&beat);
        if beat.drain && !self.draining {
            self.drain();
        }
        wire.send(&FromServer::Beat { beat }).await
    }

    /// Tells the worker that tasks of ended runs are no longer its own.
    async fn tell_ended(&mut self, wire: &mut Wire) -> Result<(), Cut> {
        let tasks = self.held.take_ended();
        if tasks.is_empty() {
            return Ok(());
        }
        let mut beat = Beat::default();
        for (task, holding) in tasks.iter().zip(self.engine().standing(&self.ns, &self.worker, &tasks).await?) {
            match holding {
                Holding::Lost => beat.lost.push(task.to_string()),
                Holding::Cancelled | Holding::Held { .. } => beat.cancel.push(task.to_string()),
            }
        }
        wire.send(&FromServer::Beat { beat }).await
    }

    /// Checks tasks whose runs have changed, and sends lost and cancelled tasks and new memo entries.
    async fn look(&mut self, wire: &mut Wire) -> Result<(), Cut> {
        let tasks = self.held.take_changed(RUNS_A_LOOK);
        let mut beat = Beat::default();
        for (task, holding) in tasks.iter().zip(self.engine().standing(&self.ns, &self.worker, &tasks).await?) {
            match holding {
                Holding::Lost => beat.lost.push(task.to_string()),
                Holding::Cancelled => beat.cancel.push(task.to_string()),
                Holding::Held { memo: None } => {}
                Holding::Held { memo: Some(memo) } => {
                    if !self.held.look(*task, memo.newest) {
                        continue;
                    }
                    let seen = self.held.seen(*task).unwrap_or(memo.handed_over);
                    let news = self.engine().news_of(&self.ns, *task, Some(seen), &[]).await?;
                    add_news(&mut beat, task.to_string(), news);
                }
            }
        }
        self.note(&beat);
        if beat == Beat::default() {
            return Ok(());
        }
        wire.send(&FromServer::Beat { beat }).await
    }

    /// Records what the worker knows after this beat.
    fn note(&mut self, beat: &Beat) {
        for (id, entries) in &beat.news {
            let newest = entries.values().filter_map(|entry| entry["n"].as_u64()).max();
            if let (Some(task), Some(newest)) = (TaskId::parse(id), newest) {
                self.held.mark_seen(task, newest);
            }
        }
        // The worker keeps the tasks in `unwind`.
        let ended = beat.cancel.iter().filter(|task| !beat.unwind.contains(task));
        for task in beat.lost.iter().chain(ended).filter_map(|task| TaskId::parse(task)) {
            self.held.remove(task);
        }
    }

    fn wanted(&self) -> ClaimTasks {
        ClaimTasks {
            worker: self.worker.clone(),
            queues: self.queues.clone(),
            offer: self.offer.clone(),
            max: self.credits as usize,
            most_held: self.max_concurrent,
            request: None,
            lease_ms: None,
        }
    }

    fn engine(&self) -> &Engine {
        self.api.engine()
    }
}

/// A worker without another connection is offline. When the server stops, its workers connect to another one.
async fn note_gone(api: &Api, ns: &Namespace, worker: &str) {
    if *api.stopping().borrow() || api.pushed_tasks().is_connected(ns, worker) {
        return;
    }
    let noted = async {
        api.engine().worker_gone(ns, worker).await?;
        if api.pushed_tasks().is_connected(ns, worker) {
            api.engine().seen(ns, worker, None).await?;
        }
        Ok::<_, EngineError>(())
    };
    if let Err(error) = noted.await {
        tracing::debug!(worker, "cannot mark the worker offline before its lease expires: {error}");
    }
}

async fn hello(wire: &mut Wire) -> Result<(RegisterWorker, Vec<String>, Option<Reservation>), Cut> {
    loop {
        match wire.receive().await? {
            Some(ReceivedMessage { message: FromWorker::Hello { tasks, .. }, .. }) if tasks.len() > MAX_TASKS => {
                return Err(Failure::bad(format!("more than {MAX_TASKS} tasks")).into());
            }
            Some(ReceivedMessage { message: FromWorker::Hello { worker, tasks }, reserved, .. }) => {
                return Ok((worker, tasks, reserved));
            }
            Some(_) => return Err(Failure::bad("expected `hello` as the first message").into()),
            None => {}
        }
    }
}

/// Awaits the future if there is one, otherwise for ever.
async fn ready<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}
