//! The hot transition: completes a step, queues and claims the next one. Sixty-four callers, each with its own run,
//! directly on a store: no loops, no workers, only decisions and commits.

use std::sync::Arc;
use std::time::Duration;

use eddyline_language::definition;
use eddyline_machine::{Claim, Data, Env, Flow, Input, Op, Report, Run, RunId, Start, TaskRef, decide};
use eddyline_store::{ClaimRequest, Claimed, Command, CommandId, Namespace, Offer, RequestId, RunCommit, Store};
use futures_util::future::join_all;
use serde_json::json;
use uuid::Uuid;

use crate::measure::{Measure, Row, reset_peak};
use crate::stores::Opened;

pub const CALLERS: usize = 64;

/// Measures `steps` transitions of each caller. Each turn on a store uses new runs.
pub async fn transitions(opened: &Opened, turn: usize, steps: usize) -> Row {
    let mut callers = Vec::new();
    for number in 0..CALLERS {
        // One queue per caller, so that every caller gets the task of its own run.
        let flow = Arc::new(flow(steps, &format!("q{number}")));
        let mut caller = Caller::new(opened.store.clone(), flow, turn * CALLERS + number, number);
        caller.start().await;
        callers.push(caller);
    }
    reset_peak();
    let (measure, before) = (Measure::start(), opened.counts());
    let going = callers.into_iter().map(|caller| tokio::spawn(caller.go()));
    let latencies: Vec<Duration> = join_all(going).await.into_iter().flatten().flatten().collect();
    let count = latencies.len() as u64;
    let mut row = measure.row(format!("hot transition, {CALLERS} callers"), opened.name, count, latencies);
    let (commits, bytes) = opened.counts();
    row.commits = commits - before.0;
    row.bytes_per_step = (bytes - before.1) as f64 / count.max(1) as f64;
    row
}

/// A long chain, to make the cost of the start negligible.
fn flow(steps: usize, queue: &str) -> Flow {
    let step = |at: usize| format!("s{at:04}: {{queue: {queue}, after: [s{:04}]}}", at - 1);
    let chain: Vec<String> = (1..steps).map(step).collect();
    let text = format!("name: hot\nsteps: {{s0000: {{queue: {queue}}}, {}}}", chain.join(", "));
    match definition::parse(&text) {
        Ok(parsed) => parsed.flow,
        Err(problems) => {
            eprintln!("{}", problems.render(&text));
            std::process::exit(2)
        }
    }
}

struct Caller {
    store: Arc<dyn Store>,
    flow: Arc<Flow>,
    run: Run,
    task: Option<Claimed>,
    number: usize,
    queue: usize,
    drawn: u64,
}

impl Caller {
    fn new(store: Arc<dyn Store>, flow: Arc<Flow>, number: usize, queue: usize) -> Caller {
        let run = Run::new(RunId(Uuid::from_u128(0x0198_0000_0000_7000_8000_0000_0000_0000 + number as u128)));
        Caller { store, flow, run, task: None, number, queue, drawn: 0 }
    }

    async fn start(&mut self) {
        let input = Some(Data::from(json!({"order": self.number})));
        self.submit(Input::Start(Box::new(Start { input, ..Start::default() }))).await;
    }

    async fn go(mut self) -> Vec<Duration> {
        let mut latencies = Vec::new();
        while let Some(claimed) = self.task.take() {
            let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
            let output = Data::from(json!({"ok": true, "step": claimed.task.name}));
            let op = Op::Complete { output, emits: Vec::new(), logs: Vec::new() };
            let since = std::time::Instant::now();
            self.submit(Input::Report(Report { task, seq: Some(1), op, claim: Claim::default() })).await;
            latencies.push(since.elapsed());
        }
        latencies
    }

    async fn submit(&mut self, input: Input) {
        self.drawn += 1;
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.drawn.to_le_bytes());
        seed[8..16].copy_from_slice(&(self.number as u64).to_le_bytes());
        let now = self.store.now().await.unwrap_or(0);
        let env = Env::new(now, seed, "http://127.0.0.1/hooks/");
        let transition = match decide(&self.flow, &self.run, &env, &[input]) {
            Ok(transition) => Arc::new(transition),
            Err(halt) => return eprintln!("{halt}"),
        };
        let mut id = [0; 16];
        id.copy_from_slice(&seed[..16]);
        let commit = RunCommit {
            ns: Namespace::default(),
            command: CommandId(Uuid::from_bytes(id)),
            transition: transition.clone(),
            messages: Vec::new(),
            events: Vec::new(),
            takes: Vec::new(),
            key: None,
            tells_line: None,
        };
        let claim = ClaimRequest {
            ns: Namespace::default(),
            request: RequestId(Uuid::from_bytes(id)),
            worker: format!("w{}", self.number),
            queues: vec![format!("q{}", self.queue)],
            offer: Arc::new(Offer::default()),
            max: 1,
            most_held: None,
            lease_ms: 60_000,
        };
        match self.store.commit(vec![Command::Run(commit)], vec![claim]).await {
            Ok(written) => {
                self.run.apply(&transition, &self.flow);
                self.task = written.claims.into_iter().flat_map(|claims| claims.tasks).next();
            }
            Err(error) => eprintln!("{error}"),
        }
    }
}
