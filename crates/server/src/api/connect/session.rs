//! One connection, from hello to its end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{
    Assignment, ClaimTasks, Engine, EngineError, Holding, Reported, Result as EngineResult, TaskId, Waiting,
};
use eddyline_protocol::{Beat, Code, FromServer, FromWorker, Heartbeat, RegisterWorker, Task, WorkerRegistered};
use eddyline_store::{Namespace, Offer};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, pending};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::held::Held;
use super::{Cut, HELLO, Said, Wire};
use crate::api::apart::Unread;
use crate::api::failure::Failure;
use crate::api::guard::Caller;
use crate::api::memory_budget::Reservation;
use crate::api::reports::Reading;
use crate::api::tasks::{MAX_REPORTS, Told, news_of};
use crate::api::workers::{MAX_TASKS, beat, enrol, says, welcome};
use crate::api::{Api, stopped, words};

/// Room that a worker can have at a time.
const MAX_CREDITS: u32 = 10_000;
/// A claim is asked anew after this long.
const CLAIM_FOR: Duration = Duration::from_secs(60);
/// How long changes of held runs gather before it is looked what they mean; ends are told at once.
const LOOK_AFTER: Duration = Duration::from_millis(200);
/// A socket is sent so many bytes of inputs at a time, or one task: the next tasks are assembled when it has taken these.
const MAX_PART_BYTES: usize = 4 << 20;
/// A frame of several tasks is at most this large.
const MAX_FRAME_BYTES: usize = 4 << 20;
/// Runs that are looked at in one go.
const RUNS_A_LOOK: usize = 64;

pub(super) struct Session<'a> {
    api: &'a Api,
    ns: Namespace,
    worker: String,
    queues: Vec<String>,
    offer: Arc<Offer>,
    held: Held,
    /// How many tasks it may have at once.
    max_concurrent: Option<usize>,
    credits: u32,
    draining: bool,
    heard_at: Instant,
    /// It answers neither pings nor anything else, though it is not given up yet.
    quiet: bool,
    /// At most one claim and one frame of reports are on their way.
    claim: Option<BoxFuture<'static, EngineResult<Part>>>,
    reporting: Option<BoxFuture<'static, EngineResult<Done>>>,
}

/// Tasks that go to the worker next.
struct Part {
    tasks: Vec<Assignment>,
    /// The claim that has more of them.
    more: Option<Waiting>,
    /// What they have of the memory budget, until they are written.
    room: Reservation,
}

/// The next tasks of a claim, once there is room for them: whoever does not read what it is sent is cut off after a while
/// and gives its room back.
async fn next_part(api: Api, ns: Namespace, mut waiting: Waiting) -> EngineResult<Part> {
    let bytes = waiting.claimed(CLAIM_FOR, MAX_PART_BYTES).await?;
    let mut room = api.task_memory().reservation(&ns);
    // As JSON in memory, and as text.
    room.grow_to(2 * bytes).await;
    let (tasks, more) = waiting.part(MAX_PART_BYTES).await?;
    Ok(Part { tasks, more, room })
}

/// A frame of reports that is done.
struct Done {
    id: u64,
    reading: Reading,
    reported: Vec<Reported>,
    /// Those that were the last on their task.
    last: Vec<(usize, TaskId)>,
    waiting: Option<Waiting>,
    told: Result<Told, Failure>,
}

impl Session<'_> {
    pub async fn serve(api: &Api, caller: &Caller, wire: &mut Wire) -> Result<(), Cut> {
        let (hello, tasks, reserved) = tokio::select! {
            said = tokio::time::timeout(HELLO, hello(wire)) => match said {
                Ok(said) => said?,
                Err(_) => return Err(Failure::new(Code::Timeout, "a worker says hello first").into()),
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
            held: Held::new(engine.attention()),
            max_concurrent: record.spec.max_concurrent.map(|most| usize::try_from(most).unwrap_or(usize::MAX)),
            credits: 0,
            draining: record.draining,
            heard_at: Instant::now(),
            quiet: false,
            claim: None,
            reporting: None,
        };
        let has: HashSet<TaskId> = tasks.iter().filter_map(|task| TaskId::parse(task)).collect();
        has.iter().for_each(|task| session.held.add_again(*task));
        let (number, lost) = api.left().arrive(&session.ns, &session.worker, has);
        // Whatever it is doing, also while it waits for a worker that does not read.
        let ended = tokio::select! {
            biased;
            ended = session.begin(wire, welcome(engine, record.id), lost, drains) => ended,
            failure = caller.shut_out(api) => Err(failure.into()),
        };
        let lease = Duration::from_millis(u64::try_from(engine.config().lease_ms).unwrap_or(0));
        let lost = api.left().part(&session.ns, &session.worker, number, session.held.all(), lease);
        if let Err(error) = engine.release(&session.ns, &session.worker, &lost).await {
            tracing::warn!(worker = session.worker, "tasks that never arrived wait for their leases: {error}");
        }
        note_gone(api, &session.ns, &session.worker).await;
        ended
    }

    /// What earlier connections pushed and never arrived is offered again; then the worker is welcome.
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
                // What is reported is committed right here, if nobody else is at it: before this task listens to anything,
                // or its own commit would wake it, and with it another thread. The worker is heard last, so that one that
                // never falls silent keeps nothing else from being looked after.
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
                    self.quiet = self.heard_at.elapsed() >= lease * 2 / 3 && !self.has_spoken(wire).await?;
                    if self.quiet {
                        // What it is given now would be lost with what it has: others get it, until it is heard again.
                        self.claim = None;
                    }
                    if self.quiet && self.heard_at.elapsed() > 2 * lease {
                        return Err(Failure::new(Code::Timeout, "nothing was heard for two leases").into());
                    }
                    if self.heard_at.elapsed() <= lease
                        && let Err(error) = self.engine().seen(&self.ns, &self.worker, None).await
                    {
                        tracing::debug!("a sign of life was not noted: {error}");
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
                heard = wire.hear(), if self.reporting.is_none() => {
                    (self.heard_at, self.quiet) = (Instant::now(), false);
                    if let Some(said) = heard? {
                        self.take(wire, said).await?;
                    }
                }
            }
        }
    }

    /// Whether something came while nobody listened, since this took long itself. It is taken.
    async fn has_spoken(&mut self, wire: &mut Wire) -> Result<bool, Cut> {
        if self.reporting.is_some() {
            return Ok(false);
        }
        let Some(heard) = wire.hear().now_or_never() else { return Ok(false) };
        self.heard_at = Instant::now();
        if let Some(said) = heard? {
            self.take(wire, said).await?;
        }
        Ok(true)
    }

    /// A claim for the room there is, unless one is on its way or rides on reports.
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

    async fn take(&mut self, wire: &mut Wire, said: Said) -> Result<(), Cut> {
        let Said { message, unread, reserved } = said;
        match message {
            FromWorker::Hello { .. } => Err(Failure::bad("the worker has said hello already").into()),
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
                    // It has left, or was told to: nothing shows it any more.
                    Ok(_) | Err(EngineError::NotFound { .. }) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    fn credit(&mut self, n: u32) {
        self.credits = self.credits.saturating_add(n).min(MAX_CREDITS);
    }

    /// What was claimed and not yet pushed comes back by itself when the claim is dropped.
    fn drain(&mut self) {
        self.draining = true;
        self.claim = None;
    }

    fn report(
        &mut self,
        id: u64,
        reports: Vec<Value>,
        unread: Unread,
        reserved: Option<Reservation>,
    ) -> Result<(), Cut> {
        if reports.len() > MAX_REPORTS {
            return Err(Failure::bad(format!("more than {MAX_REPORTS} reports in one message")).into());
        }
        let mut reading = Reading::new(reports, unread);
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
            let told = news_of(&engine, &ns, &code, &reported).await;
            Ok(Done { id, reading, reported, last, waiting, told })
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
        let Told { news, up_to } = done.told?;
        up_to.into_iter().for_each(|(task, n)| self.held.told(task, n));
        wire.feed(&FromServer::Reported { id: done.id, outcomes, news }).await?;
        if let Some(waiting) = done.waiting {
            let mut claim = next_part(self.api.clone(), self.ns.clone(), waiting).boxed();
            // What the same commit gave out is here by now, and goes with the same write.
            match (&mut claim).now_or_never() {
                Some(part) => return self.push(wire, part?).await,
                None => self.claim = Some(claim),
            }
        }
        wire.flush().await?;
        self.tell_ended(wire).await
    }

    /// Pushes tasks, in frames that are not too large. What could not be written comes back at once.
    async fn push(&mut self, wire: &mut Wire, Part { tasks, more, room: _room }: Part) -> Result<(), Cut> {
        self.claim = more.map(|more| next_part(self.api.clone(), self.ns.clone(), more).boxed());
        if tasks.is_empty() {
            return wire.flush().await;
        }
        self.credits = self.credits.saturating_sub(u32::try_from(tasks.len()).unwrap_or(u32::MAX));
        tasks.iter().for_each(|task| self.held.add(task));
        let mut frames: Vec<Vec<Task>> = vec![tasks.into_iter().map(words::task).collect()];
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

    /// Tasks of runs that have ended are no longer the worker's.
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

    /// Looks what became of tasks whose runs have changed, and what code runs have come to remember.
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
                    let news = self.engine().news_of(&self.ns, *task, Some(seen), &[]).await?.unwrap_or_default();
                    if !news.is_empty() {
                        beat.news.insert(task.to_string(), news);
                    }
                }
            }
        }
        self.note(&beat);
        if beat == Beat::default() {
            return Ok(());
        }
        wire.send(&FromServer::Beat { beat }).await
    }

    /// What the worker knows once it has heard this.
    fn note(&mut self, beat: &Beat) {
        for (id, entries) in &beat.news {
            let newest = entries.values().filter_map(|entry| entry["n"].as_u64()).max();
            if let (Some(task), Some(newest)) = (TaskId::parse(id), newest) {
                self.held.told(task, newest);
            }
        }
        for task in beat.lost.iter().chain(&beat.cancel).filter_map(|task| TaskId::parse(task)) {
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

/// Without another connection the worker is offline. When the server stops, its workers find another one.
async fn note_gone(api: &Api, ns: &Namespace, worker: &str) {
    if *api.stopping().borrow() || api.left().is_connected(ns, worker) {
        return;
    }
    let noted = async {
        api.engine().worker_gone(ns, worker).await?;
        if api.left().is_connected(ns, worker) {
            api.engine().seen(ns, worker, None).await?;
        }
        Ok::<_, EngineError>(())
    };
    if let Err(error) = noted.await {
        tracing::debug!(worker, "it is shown as online until its last lease ends: {error}");
    }
}

async fn hello(wire: &mut Wire) -> Result<(RegisterWorker, Vec<String>, Option<Reservation>), Cut> {
    loop {
        match wire.hear().await? {
            Some(Said { message: FromWorker::Hello { tasks, .. }, .. }) if tasks.len() > MAX_TASKS => {
                return Err(Failure::bad(format!("more than {MAX_TASKS} tasks")).into());
            }
            Some(Said { message: FromWorker::Hello { worker, tasks }, reserved, .. }) => {
                return Ok((worker, tasks, reserved));
            }
            Some(_) => return Err(Failure::bad("a worker says hello first").into()),
            None => {}
        }
    }
}

/// What the future comes to, if there is one.
async fn ready<T>(future: &mut Option<BoxFuture<'static, T>>) -> T {
    match future {
        Some(future) => future.await,
        None => pending().await,
    }
}
