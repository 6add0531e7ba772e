//! The test rig: an engine with in-process workers. A handler is a function from a task to its report.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod hooked;
mod stores;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use eddyline_engine::{Assignment, ClaimTasks, Config, Engine, Reported, StartRequest, TaskReport};
use eddyline_machine::{Answer, Data, Failure, Numbered, Op, RunId};
use eddyline_store::{Memory, Namespace, Offer, Store};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// A timeout that is reached only when something hangs.
pub const LONG: Duration = Duration::from_secs(60);

pub type Handler = Arc<dyn Fn(&Assignment) -> Op + Send + Sync>;

pub struct Rig {
    pub engine: Engine,
    /// With the first one, on the same data.
    others: Vec<Engine>,
    /// How often an engine was picked.
    picked: AtomicUsize,
    pub ns: Namespace,
    workers: Vec<JoinHandle<()>>,
}

impl Rig {
    pub fn memory() -> Rig {
        Rig::on(Arc::new(Memory::new()), Config::default())
    }

    /// On a store in memory, or on the one that the environment names, with several engines if it says so. What the rig
    /// does goes to each of them in turn.
    pub fn new() -> Rig {
        Rig::with(Config::default())
    }

    pub fn with(config: Config) -> Rig {
        let mut stores = stores::open();
        let mut rig = Rig::on(stores.remove(0), config.clone());
        rig.others = stores.into_iter().map(|store| Engine::start(store, config.clone())).collect();
        rig
    }

    pub fn on(store: Arc<dyn Store>, config: Config) -> Rig {
        let engine = Engine::start(store, config);
        let (others, picked, workers) = (Vec::new(), AtomicUsize::new(0), Vec::new());
        Rig { engine, others, picked, ns: Namespace::default(), workers }
    }

    /// Each engine in turn.
    fn any(&self) -> &Engine {
        match self.picked.fetch_add(1, Ordering::Relaxed) % (self.others.len() + 1) {
            0 => &self.engine,
            n => &self.others[n - 1],
        }
    }

    pub async fn register(&self, text: &str) -> &Rig {
        self.any().register(&self.ns, None, text).await.unwrap_or_else(|error| panic!("{error}\n{text}"));
        self
    }

    /// Starts workers that take one task at a time each.
    pub fn work(&mut self, slots: usize, handler: impl Fn(&Assignment) -> Op + Send + Sync + 'static) {
        let handler: Handler = Arc::new(handler);
        for slot in 0..slots {
            let (engine, ns) = (self.any().clone(), self.ns.clone());
            self.workers.push(tokio::spawn(work(engine, ns, format!("worker-{slot}"), handler.clone())));
        }
    }

    pub async fn start(&self, flow: &str, input: Value) -> RunId {
        let request = StartRequest { flow: flow.to_owned(), input, ..StartRequest::default() };
        self.any().start_run(&self.ns, request).await.unwrap().run
    }

    /// The output of a run that completes.
    pub async fn output(&self, run: RunId) -> Value {
        let result = self.any().result(&self.ns, run, LONG).await.unwrap();
        let Some(result) = result else { panic!("the run did not end\n{}", self.timeline_text(run).await) };
        match (result.output, result.error) {
            (Some(output), None) => output,
            (_, error) => panic!("{} {error:?}\n{}", result.status.as_str(), self.timeline_text(run).await),
        }
    }

    pub async fn records(&self, run: RunId) -> Vec<Numbered> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let page = self.any().records(&self.ns, run, after, 1_000).await.unwrap();
            let Some(last) = page.last() else { return all };
            after = last.n;
            all.extend(page);
        }
    }

    /// The kinds of a run's records, each with its activation.
    pub async fn kinds(&self, run: RunId) -> Vec<String> {
        let line = |record: &Numbered| {
            let kind = json!(record.record.entry)["kind"].as_str().unwrap().to_owned();
            record.record.entry.step_key().map_or_else(|| kind.clone(), |step| format!("{kind} {step}"))
        };
        self.records(run).await.iter().map(line).collect()
    }

    pub async fn timeline_text(&self, run: RunId) -> String {
        let lines: Vec<String> = self.records(run).await.iter().map(|record| json!(record).to_string()).collect();
        lines.join("\n")
    }

    /// Claims one task.
    pub async fn claim(&self, worker: &str) -> Option<Assignment> {
        self.any().claim(&self.ns, claim(worker), LONG).await.unwrap().pop()
    }

    pub async fn report(&self, task: &Assignment, op: Op) -> Answer {
        let report = TaskReport { token: task.token, seq: None, op };
        match self.any().report(&self.ns, vec![report]).await.unwrap().pop() {
            Some(Reported::Answer { answer, .. }) => answer,
            other => panic!("{other:?}"),
        }
    }

    pub async fn stop(self) {
        for engine in [&self.engine].into_iter().chain(&self.others) {
            engine.shutdown().await;
        }
        for worker in self.workers {
            worker.await.unwrap();
        }
    }
}

pub fn claim(worker: &str) -> ClaimTasks {
    ClaimTasks {
        worker: worker.to_owned(),
        queues: vec!["default".to_owned()],
        offer: Arc::new(Offer::default()),
        max: 1,
        most_held: None,
        request: None,
        lease_ms: None,
    }
}

async fn work(engine: Engine, ns: Namespace, name: String, handler: Handler) {
    let Ok(mut waiting) = engine.ask(&ns, claim(&name), false).await else { return };
    loop {
        let Ok(tasks) = waiting.tasks(LONG).await else { return };
        let report = |task: &Assignment| TaskReport { token: task.token, seq: Some(1), op: handler(task) };
        let reports = tasks.iter().map(report).collect();
        match engine.report_and_ask(&ns, reports, Some(claim(&name))).await {
            Ok((_, Some(next))) => waiting = next,
            _ => return,
        }
    }
}

pub fn done(output: Value) -> Op {
    Op::Complete { output: Data::from(output), emits: Vec::new(), logs: Vec::new() }
}

pub fn failed(message: &str) -> Op {
    Op::Fail { error: Failure::new("Boom", message), retryable: true, retry_after_ms: None }
}
