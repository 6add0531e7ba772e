//! The cost of a claim while many tasks wait: the same work with 10, 1,000 and 10,000 keys, which take turns or are
//! each at their limit.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use eddyline_language::definition;
use eddyline_machine::{Claim, Data, Env, Flow, Input, Op, Report, Run, RunId, Start, TaskRef, decide};
use eddyline_store::{
    ClaimRequest, Claimed, Command, CommandId, DocumentChange, DocumentCommit, DocumentKey, Expect, Namespace, Offer,
    RequestId, Result, RunCommit, Store, kind,
};
use serde_json::json;
use uuid::Uuid;

use crate::measure::{Measure, Row, reset_peak};
use crate::stores::Opened;

/// The number of tasks that one commit completes, and claims.
pub const AT_ONCE: usize = 8;

/// What the keys of tasks are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Keys take turns.
    Turns,
    /// Each key has a concurrency of 1 that is used up: all waiting tasks are blocked.
    Limited,
}

/// Makes `commits` commits, each completing a few tasks and claiming as many, while `tasks` tasks of `keys` keys wait.
pub async fn claims(opened: &Opened, shape: Shape, keys: usize, tasks: usize, commits: usize) -> Result<Row> {
    let text = match shape {
        Shape::Turns => "name: one\nsteps: {work: {key: input.k}}",
        Shape::Limited => "name: one\nsteps: {work: {limits: [{tenant: '${input.k}'}]}}",
    };
    let mut driver = Driver::new(opened.store.clone(), text);
    driver.limit().await?;
    let mut waiting: Vec<usize> = (0..tasks).collect();
    for part in waiting.chunks_mut(500) {
        let starts: Vec<Command> = part.iter().map(|at| driver.start(*at, at % keys)).collect();
        driver.store.commit(starts, Vec::new()).await?;
    }
    let first = if shape == Shape::Limited { keys } else { AT_ONCE };
    let mut held: VecDeque<Claimed> = driver.commit(Vec::new(), first).await?.into();
    reset_peak();
    let (measure, before) = (Measure::start(), opened.counts());
    let (mut latencies, mut count) = (Vec::new(), 0);
    for _ in 0..commits {
        let done: Vec<Command> =
            (0..AT_ONCE).filter_map(|_| held.pop_front()).map(|claimed| driver.complete(&claimed)).collect();
        let since = Instant::now();
        let claimed = driver.commit(done, AT_ONCE).await?;
        latencies.push(since.elapsed());
        count += claimed.len() as u64;
        held.extend(claimed);
    }
    let limited = if shape == Shape::Limited { ", each at its limit" } else { "" };
    let mut row = measure.row(format!("claims, {keys} keys{limited}"), opened.name, count, latencies);
    let after = opened.counts();
    row.commits = after.0 - before.0;
    row.bytes_per_step = (after.1 - before.1) as f64 / count.max(1) as f64;
    Ok(row)
}

pub struct Driver {
    store: Arc<dyn Store>,
    flow: Flow,
    runs: HashMap<RunId, Run>,
    drawn: u128,
}

impl Driver {
    pub fn new(store: Arc<dyn Store>, text: &str) -> Driver {
        let flow = match definition::parse(text) {
            Ok(parsed) => parsed.flow,
            Err(problems) => {
                eprintln!("{}", problems.render(text));
                std::process::exit(2)
            }
        };
        Driver { store, flow, runs: HashMap::new(), drawn: 0 }
    }

    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Forgets the runs so far: they will not be completed.
    pub fn forget(&mut self) {
        self.runs.clear();
    }

    pub fn drop_run(&mut self, run: RunId) {
        self.runs.remove(&run);
    }

    async fn limit(&mut self) -> Result<()> {
        let change = DocumentChange {
            key: DocumentKey::new(kind::LIMIT, "tenant"),
            expect: Expect::Any,
            body: Some(json!({"concurrency": 1})),
            due: None,
        };
        let commit = DocumentCommit {
            ns: Namespace::default(),
            command: CommandId(self.draw()),
            documents: vec![change],
            messages: Vec::new(),
            events: Vec::new(),
            drops: Vec::new(),
        };
        self.store.commit(vec![Command::Documents(commit)], Vec::new()).await?;
        Ok(())
    }

    pub fn start(&mut self, at: usize, key: usize) -> Command {
        let run = Run::new(RunId(Uuid::from_u128(0x0198_0000_0000_7000_8000_0000_0000_0000 + at as u128)));
        let input = Some(Data::from(json!({"k": key})));
        self.decide(run, Input::Start(Box::new(Start { input, ..Start::default() })))
    }

    pub fn complete(&mut self, claimed: &Claimed) -> Command {
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let op = Op::Complete { output: Data::null(), emits: Vec::new(), logs: Vec::new() };
        let run = self.runs.remove(&claimed.run).unwrap_or_else(|| Run::new(claimed.run));
        self.decide(run, Input::Report(Report { task, seq: Some(1), op, claim: Claim::default() }))
    }

    fn decide(&mut self, mut run: Run, input: Input) -> Command {
        let env = Env::new(0, [7; 32], "");
        let transition = match decide(&self.flow, &run, &env, &[input]) {
            Ok(transition) => Arc::new(transition),
            Err(halt) => {
                eprintln!("{halt}");
                std::process::exit(2)
            }
        };
        run.apply(&transition, &self.flow);
        self.runs.insert(run.header.run, run);
        Command::Run(RunCommit {
            ns: Namespace::default(),
            command: CommandId(self.draw()),
            transition,
            messages: Vec::new(),
            events: Vec::new(),
            takes: Vec::new(),
            key: None,
            tells_line: None,
        })
    }

    pub async fn commit(&mut self, commands: Vec<Command>, max: usize) -> Result<Vec<Claimed>> {
        let claim = ClaimRequest {
            ns: Namespace::default(),
            request: RequestId(self.draw()),
            worker: "w".to_owned(),
            queues: vec!["default".to_owned()],
            offer: Arc::new(Offer::default()),
            max,
            most_held: None,
            lease_ms: 600_000,
        };
        let written = self.store.commit(commands, vec![claim]).await?;
        Ok(written.claims.into_iter().flat_map(|claims| claims.tasks).collect())
    }

    fn draw(&mut self) -> Uuid {
        self.drawn += 1;
        Uuid::from_u128(self.drawn)
    }
}
