//! The process that is killed: an engine with workers and clients.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use eddyline_engine::{Assignment, ClaimTasks, Config, Engine, Reported, StartRequest, TaskReport};
use eddyline_machine::{Answer, CodeOp, Data, Due, Failure, Op, OpenedBy, Status, TaskKind};
use eddyline_store::{
    Embedded, GateFilter, Namespace, Offer, Options, Page, Postgres, PostgresOptions, RunFilter, Store,
};
use serde_json::json;

use crate::ledger::{Ledger, Line};
use crate::load::{FLOWS, STARTS};

const WORKERS: usize = 12;
const CLIENTS: usize = 4;
const LONG: Duration = Duration::from_secs(3_600);

/// What a child does.
#[derive(Debug, Clone, PartialEq)]
pub struct Orders {
    dir: PathBuf,
    /// Distinguishes its runs from those of other children.
    number: u64,
    /// Start runs endlessly, one of each flow, or none.
    starts: String,
    /// Die before or after this commit.
    die: Option<(String, u64)>,
    /// The URL of a PostgreSQL store; the embedded store in `dir` if not set.
    store: Option<String>,
}

impl Orders {
    pub fn load(number: u64) -> Orders {
        Orders { dir: PathBuf::new(), number, starts: "endless".to_owned(), die: None, store: None }
    }

    pub fn die(when: &str, at: u64, number: u64) -> Orders {
        let die = Some((when.to_owned(), at));
        Orders { dir: PathBuf::new(), number, starts: "each".to_owned(), die, store: None }
    }

    pub fn finish() -> Orders {
        Orders { dir: PathBuf::new(), number: 0, starts: "none".to_owned(), die: None, store: None }
    }

    pub fn on(self, store: Option<&str>) -> Orders {
        Orders { store: store.map(str::to_owned), ..self }
    }

    pub fn to_env(&self, command: &mut Command, dir: &Path) {
        command.env("CRASH_DIR", dir).env("CRASH_NUMBER", self.number.to_string()).env("CRASH_STARTS", &self.starts);
        if let Some((when, at)) = &self.die {
            command.env("CRASH_WHEN", when).env("CRASH_AT", at.to_string());
        }
        if let Some(store) = &self.store {
            command.env("CRASH_STORE", store);
        }
    }

    pub fn from_env() -> Option<Orders> {
        let number = |name| std::env::var(name).ok().and_then(|n| n.parse().ok());
        Some(Orders {
            dir: std::env::var_os("CRASH_DIR")?.into(),
            number: number("CRASH_NUMBER")?,
            starts: std::env::var("CRASH_STARTS").ok()?,
            die: std::env::var("CRASH_WHEN").ok().zip(number("CRASH_AT")),
            store: std::env::var("CRASH_STORE").ok(),
        })
    }
}

pub fn run(orders: Orders) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(live(orders));
}

async fn live(orders: Orders) {
    let store: Arc<dyn Store> = match &orders.store {
        Some(url) => Arc::new(Postgres::open(url, PostgresOptions::default()).await.unwrap()),
        None => Arc::new(Embedded::open(&orders.dir.join("store"), options(&orders)).unwrap()),
    };
    let ledger = Arc::new(Ledger::open(&orders.dir));
    let config = Config { lease_ms: 300, ..Config::default() };
    let engine = Engine::start(store, config);
    let ns = Namespace::default();
    for flow in FLOWS {
        engine.register(&ns, None, flow).await.unwrap();
    }
    for worker in 0..WORKERS {
        let name = format!("w{}-{worker}", std::process::id());
        tokio::spawn(work(engine.clone(), name, ledger.clone()));
    }
    tokio::spawn(open_gates(engine.clone(), ledger.clone()));
    match orders.starts.as_str() {
        "endless" => {
            let clients = (0..CLIENTS as u64).map(|client| {
                let (engine, ledger, number) = (engine.clone(), ledger.clone(), orders.number);
                tokio::spawn(async move {
                    for at in 0.. {
                        let flow = STARTS[(at + client * 3) as usize % STARTS.len()];
                        start(&engine, &ledger, flow, &format!("{number}-{client}-{at}")).await;
                    }
                })
            });
            futures_util::future::join_all(clients).await;
        }
        "each" => {
            for flow in STARTS {
                start(&engine, &ledger, flow, &format!("{}-{flow}", orders.number)).await;
            }
        }
        _ => {}
    }
    until_all_ended(&engine).await;
    engine.shutdown().await;
}

fn options(orders: &Orders) -> Options {
    let mut options = Options::default();
    if let Some((when, at)) = orders.die.clone() {
        let commits = AtomicU64::new(0);
        let die = Arc::new(move || {
            if commits.fetch_add(1, Ordering::SeqCst) + 1 == at {
                std::process::abort();
            }
        });
        match when.as_str() {
            "before" => options.before_commit = Some(die),
            _ => options.after_commit = Some(die),
        }
    }
    options
}

async fn start(engine: &Engine, ledger: &Ledger, flow: &str, key: &str) {
    let request = StartRequest {
        flow: flow.to_owned(),
        input: json!({"items": (0..12).collect::<Vec<_>>(), "text": "x".repeat(400)}),
        idempotency_key: Some(key.to_owned()),
        external_id: Some(key.to_owned()),
        ..StartRequest::default()
    };
    let started = engine.start_run(&Namespace::default(), request).await.unwrap();
    ledger.write(&Line::Started { run: started.run, key: key.to_owned() });
}

async fn work(engine: Engine, worker: String, ledger: Arc<Ledger>) {
    let ns = Namespace::default();
    let claim = || ClaimTasks {
        worker: worker.clone(),
        queues: vec!["default".to_owned()],
        offer: Arc::new(Offer::default()),
        max: 1,
        most_held: None,
        request: None,
        lease_ms: None,
    };
    let Ok(mut waiting) = engine.ask(&ns, claim(), false).await else { return };
    while let Ok(tasks) = waiting.tasks(LONG).await {
        let mut next = None;
        for task in &tasks {
            let ops = handle(task);
            let last = ops.len();
            let reports =
                ops.into_iter().zip(1..).map(|(op, seq)| TaskReport { token: task.token, seq: Some(seq), op });
            let completes = |report: &TaskReport| matches!(report.op, Op::Complete { .. });
            let reports: Vec<TaskReport> = reports.collect();
            let completed = reports.last().is_some_and(completes);
            let Ok((reported, waiting)) = engine.report_and_ask(&ns, reports, Some(claim())).await else { return };
            next = waiting;
            if completed && matches!(reported.get(last - 1), Some(Reported::Answer { answer: Answer::Applied(_), .. }))
            {
                ledger.write(&Line::Completed { token: task.token.to_string(), activation: task.activation.clone() });
            }
        }
        match next {
            Some(next) => waiting = next,
            None => match engine.ask(&ns, claim(), false).await {
                Ok(next) => waiting = next,
                Err(_) => return,
            },
        }
    }
}

/// A worker's reports on a task, in order.
fn handle(task: &Assignment) -> Vec<Op> {
    let done = |output: serde_json::Value, emits: Vec<(String, Data)>| Op::Complete {
        output: Data::from(output),
        emits,
        logs: Vec::new(),
    };
    if task.kind == TaskKind::Run {
        let memo = task.memo.as_ref().unwrap();
        let code = |name: &str, op| Op::Code { name: name.to_owned(), op };
        return match memo.get("nap").map(|nap| nap["status"] == "completed") {
            None => vec![
                code("pay", CodeOp::Done { output: Data::from(json!("paid")), undo: false }),
                code("nap", CodeOp::Sleep { due: Due::After(10) }),
                Op::Suspend { seen: None },
            ],
            Some(false) => vec![Op::Suspend { seen: None }],
            Some(true) => vec![done(memo["pay"]["output"].clone(), Vec::new())],
        };
    }
    if task.handler == "fails_twice" && task.attempt <= 2 {
        let error = Failure::new("Boom", "not yet");
        return vec![Op::Fail { error, retryable: true, retry_after_ms: None }];
    }
    let emits = match task.handler.as_str() {
        "top" => vec![("seen".to_owned(), Data::from(json!({"x": 1})))],
        _ => Vec::new(),
    };
    let progress = Op::Progress { done: Some(1.into()), total: Some(1.into()), msg: None };
    vec![progress, done(json!({"of": task.activation, "text": "y".repeat(300)}), emits)]
}

async fn open_gates(engine: Engine, ledger: Arc<Ledger>) {
    let ns = Namespace::default();
    loop {
        let gates = engine.store().gates(Some(&ns), &GateFilter::default(), Page::default()).await.unwrap();
        for gate in gates {
            let Some(token) = gate.token else { continue };
            if engine.open_gate(&ns, &token, OpenedBy::Webhook, json!({"by": "somebody"})).await.is_ok() {
                ledger.write(&Line::Opened { run: gate.id.run, activation: gate.id.activation.0 });
            }
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn until_all_ended(engine: &Engine) {
    let ns = Namespace::default();
    loop {
        let mut open = 0;
        for status in [Status::Pending, Status::Running, Status::Waiting, Status::Paused] {
            let filter = RunFilter { status: vec![status], ..RunFilter::default() };
            open += engine.store().count_runs(&ns, &filter).await.unwrap();
        }
        if open == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
