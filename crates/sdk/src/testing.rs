//! The test kit: your flows and handlers on a real engine in the test's process, with a clock that jumps, so that fourteen
//! days take a millisecond.
//!
//! ```
//! use eddyline::testing::TestEngine;
//! use eddyline::{FlowError, RunCtx, StepError, Worker};
//! use serde_json::json;
//! use std::time::Duration;
//!
//! async fn trial(ctx: RunCtx, user: String) -> Result<String, FlowError> {
//!     ctx.step("welcome", || async { Ok::<_, StepError>(()) }).await?;
//!     ctx.sleep("trial", Duration::from_secs(14 * 24 * 3_600)).await?;
//!     let plan: String = ctx.wait_event("chosen", &user).await?;
//!     Ok(plan)
//! }
//!
//! // The same function staffs the worker in production.
//! fn staff(worker: Worker) -> Worker {
//!     worker.flow("trial", trial)
//! }
//!
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
//! let t = TestEngine::start(staff).await;
//! let run = t.run("trial", "ada").await;
//! run.waits_at("chosen").await;
//! t.publish("chosen", "ada", json!("yearly")).await;
//! assert_eq!(run.result::<String>().await.unwrap(), "yearly");
//! t.stop().await;
//! # });
//! ```
//!
//! Time stands still, unless the test waits ([`TestRun::result`], [`TestRun::waits_at`]) or moves it
//! ([`TestEngine::advance`]): then it jumps to the next moment at which something is due, whenever nothing can run. So a
//! timeout never fires behind the test's back. A body of a step that takes real time takes real time.
//!
//! The kit panics where a test has gone wrong, with what the run waits for.

#![allow(clippy::panic, reason = "a test kit reports failures by panicking")]

mod clock;
mod faults;
mod replay;
mod run;
mod shake;

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use eddyline_engine::{Config, Engine, PublishRequest, Retention, StartRequest};
use eddyline_machine::Millis;
use eddyline_store::{Clock, LimitRules, ManualClock, Memory, Namespace, Rate};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

use self::faults::Faults;
use crate::Worker;
use crate::code::time::from_ms;
use crate::worker::StepError;

pub use replay::{Replayed, replay};
pub use run::{Entry, TestRun};

/// The time at which every test begins: 2026-01-01T00:00:00Z.
const BEGINS_MS: Millis = 1_767_225_600_000;
/// Longer than anything in the engine takes; only reached if a body of a step takes that long.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the kit looks whether anything can run.
const LOOK: Duration = Duration::from_millis(1);
/// The engine's loops look for due items this often, since nothing tells them that the clock has jumped.
const POLL_MS: Millis = 1;
/// Nothing is deleted in a test, however far the clock jumps.
const KEPT_MS: Millis = 3_000 * 24 * 60 * 60 * 1_000;
/// The most jumps that one wait makes, so that a flow that never ends fails the test.
const MAX_JUMPS: usize = 100_000;

type Staff = Arc<dyn Fn(Worker) -> Worker + Send + Sync>;

/// An engine with one worker, for one test.
pub struct TestEngine {
    engine: Engine,
    ns: Namespace,
    store: Arc<Memory>,
    clock: Arc<ManualClock>,
    faults: Arc<Faults>,
    stop: oneshot::Sender<()>,
    workers: JoinHandle<()>,
}

impl TestEngine {
    /// Starts an engine with a memory store, and a worker with these flows and handlers. The function is called again
    /// when a worker is to be lost.
    pub async fn start(staff: impl Fn(Worker) -> Worker + Send + Sync + 'static) -> TestEngine {
        TestEngine::begin(Arc::new(staff), false).await
    }

    /// The same, but every function of a code flow is thrown away and replayed after each result that it gets. What it
    /// asks for must be the same each time; if it is not, the test fails and shows both.
    pub async fn shaking(staff: impl Fn(Worker) -> Worker + Send + Sync + 'static) -> TestEngine {
        TestEngine::begin(Arc::new(staff), true).await
    }

    async fn begin(staff: Staff, shakes: bool) -> TestEngine {
        let clock = ManualClock::at(BEGINS_MS);
        let config = Config {
            poll_ms: POLL_MS,
            retention: Retention { every_ms: KEPT_MS, timelines_ms: KEPT_MS, runs_ms: KEPT_MS, events_ms: KEPT_MS },
            ..Config::default()
        };
        let store = Arc::new(Memory::with_clock(clock.clone()));
        let engine = Engine::start(store.clone(), config);
        let faults = Arc::new(Faults::new(shakes));
        let (stop, stopped) = oneshot::channel();
        let workers = tokio::spawn(work(engine.clone(), staff, faults.clone(), stopped));
        let ns = Namespace::default();
        let kit = TestEngine { engine, ns, store, clock, faults, stop, workers };
        kit.until_staffed().await;
        kit
    }

    /// Registers a graph flow, in YAML or JSON.
    pub async fn apply(&self, definition: &str) {
        if let Err(error) = self.engine.register(&self.ns, None, definition).await {
            panic!("the definition was refused: {error}");
        }
    }

    /// Starts a run.
    pub async fn run(&self, flow: &str, input: impl Serialize) -> TestRun<'_> {
        self.until_staffed().await;
        let input = json(input);
        let request = StartRequest { flow: flow.to_owned(), input, ..StartRequest::default() };
        match self.engine.start_run(&self.ns, request).await {
            Ok(started) => TestRun::new(self, started.run),
            Err(error) => panic!("a run of {flow} cannot be started: {error}"),
        }
    }

    /// Publishes an event.
    pub async fn publish(&self, event: &str, key: impl Serialize, payload: impl Serialize) {
        let key = Some(json(key)).filter(|key| !key.is_null());
        let request = PublishRequest { name: event.to_owned(), key, payload: json(payload), id: None };
        if let Err(error) = self.engine.publish(&self.ns, vec![request]).await {
            panic!("the event {event} cannot be published: {error}");
        }
    }

    /// Runs this instead of the handler, or the body of the step, of that name: `pay`, or `price[a-1]` for one key. The
    /// stub of a handler gets its input, that of a step `null`.
    pub fn stub<F, Fut, T>(&self, name: &str, stub: F)
    where
        F: Fn(Value) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, StepError>> + Send + 'static,
        T: Serialize + 'static,
    {
        self.faults.stub(name, stub);
    }

    /// Lets these attempts of the handler or step fail, before anything of it runs.
    pub fn fail(
        &self,
        name: &str,
        attempts: impl IntoIterator<Item = u32>,
        error: impl Fn() -> StepError + Send + Sync + 'static,
    ) {
        self.faults.fail(name, attempts, error);
    }

    /// The worker dies when this handler or step has done its work and its result is not yet reported; once. Another
    /// worker takes over when the lease of the task ends.
    pub fn lose_worker_after(&self, name: &str) {
        self.faults.die_after(name);
    }

    /// The worker dies instead of sending the `n`-th message of its functions, counted from 1; once.
    pub fn lose_worker_before_message(&self, n: usize) {
        self.faults.die_at(n, true);
    }

    /// The worker dies when the `n`-th message of its functions is answered, before a function sees the answer; once.
    pub fn lose_worker_after_message(&self, n: usize) {
        self.faults.die_at(n, false);
    }

    /// How many workers have died.
    pub fn lost_workers(&self) -> usize {
        self.faults.lost()
    }

    /// Allows so many tasks with this limit in a time, for each of its keys.
    pub async fn limit_rate(&self, limit: &str, count: u32, per: Duration) {
        let per_ms = Millis::try_from(per.as_millis()).unwrap_or(Millis::MAX);
        let rules = LimitRules { concurrency: None, rate: Some(Rate { count, per_ms, burst: count }) };
        if let Err(error) = self.engine.set_limit(&self.ns, limit, rules).await {
            panic!("the limit {limit} cannot be set: {error}");
        }
    }

    /// The time of the test.
    pub fn now(&self) -> SystemTime {
        from_ms(u64::try_from(self.now_ms()).unwrap_or(0))
    }

    /// Moves the clock by this long. Everything that becomes due on the way happens, in order.
    pub async fn advance(&self, by: Duration) {
        let until = self.now_ms().saturating_add(Millis::try_from(by.as_millis()).unwrap_or(Millis::MAX));
        for _ in 0..MAX_JUMPS {
            match self.settle().await.filter(|at| *at <= until) {
                Some(at) => self.jump_to(at),
                None => {
                    self.jump_to(until);
                    self.settle().await;
                    return;
                }
            }
        }
        panic!("more than {MAX_JUMPS} things became due while the clock was advanced by {by:?}");
    }

    /// Ends the worker and the engine.
    pub async fn stop(self) {
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(PATIENCE, self.workers).await;
        self.engine.shutdown().await;
        self.faults.check_shaken();
    }

    /// The engine, for whatever the kit has no method for.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    fn now_ms(&self) -> Millis {
        self.clock.wall()
    }

    /// Waits until the worker has registered its flows.
    async fn until_staffed(&self) {
        let staffed = async {
            while !self.faults.is_staffed() {
                tokio::time::sleep(LOOK).await;
            }
        };
        if tokio::time::timeout(PATIENCE, staffed).await.is_err() || self.faults.refused().is_some() {
            let why = self.faults.refused().unwrap_or_else(|| "it does not begin".to_owned());
            panic!("the worker cannot work: {why}");
        }
    }

    /// Lets everything run that can, then jumps to the next due moment. False if nothing will ever be due.
    async fn pass(&self) -> bool {
        let next = self.settle().await;
        if let Some(at) = next {
            self.jump_to(at);
        }
        next.is_some()
    }

    fn jump_to(&self, at: Millis) {
        self.store.advance(&self.clock, at - self.now_ms());
    }
}

impl fmt::Debug for TestEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestEngine").field("now", &self.now()).finish_non_exhaustive()
    }
}

/// One worker after another: when one dies, the next begins.
async fn work(engine: Engine, staff: Staff, faults: Arc<Faults>, stop: oneshot::Receiver<()>) {
    let stopping = Arc::new(Notify::new());
    let mut stop = stop;
    loop {
        let stop_worker = stopping.clone();
        let worker = faults.probe(staff(Worker::in_process(engine.clone()).hold(Duration::ZERO)));
        let working = worker.run_until(async move { stop_worker.notified().await });
        tokio::pin!(working);
        tokio::select! {
            ended = &mut working => {
                if let Err(error) = ended {
                    faults.refuse(error.to_string());
                }
                return;
            }
            // Dropping it drops its tasks.
            () = faults.died() => {}
            () = faults.restaffed() => {}
            _ = &mut stop => {
                stopping.notify_one();
                let _ = working.await;
                return;
            }
        }
    }
}

fn json(value: impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_else(|error| panic!("a value cannot be serialised as JSON: {error}"))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
