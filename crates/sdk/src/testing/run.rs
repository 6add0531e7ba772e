//! A run of a test.

use std::fmt;
use std::time::Duration;

use eddyline_engine::{RunResult, StepInfo};
use eddyline_machine::record::Entry as Recorded;
use eddyline_machine::{OpenedBy, RunId, Status};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json as written};

use super::{MAX_JUMPS, TestEngine, json};
use crate::Error;

/// How many records of a timeline are read at a time.
const PAGE: usize = 1_000;

/// A run, started by [`TestEngine::run`].
pub struct TestRun<'a> {
    kit: &'a TestEngine,
    run: RunId,
}

/// A step, call, sleep, wait or child of a run, or a step of a graph flow.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Entry {
    pub name: String,
    /// `step`, `call`, `sleep`, `wait`, `child` or `publish`; for a graph flow the kind of its step.
    pub kind: String,
    pub status: String,
    pub attempts: usize,
    pub output: Option<Value>,
}

impl<'a> TestRun<'a> {
    pub(super) fn new(kit: &'a TestEngine, run: RunId) -> TestRun<'a> {
        TestRun { kit, run }
    }

    pub fn id(&self) -> String {
        self.run.to_string()
    }

    /// The output, when the run has ended. The clock jumps whenever nothing can run. Panics if the run waits for
    /// something that will never come.
    pub async fn result<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let RunResult { run, status, output, error } = self.ended().await;
        let run_id = run.to_string();
        match (status, error) {
            (Status::Completed, _) => serde_json::from_value(output.unwrap_or_default())
                .map_err(|source| Error::Decode { what: "the output of the run".to_owned(), source }),
            (Status::Cancelled, _) => Err(Error::RunCancelled { run_id }),
            (_, error) => {
                let failure = error.map(|error| written!(error)).unwrap_or_default();
                let failure = serde_json::from_value(failure).unwrap_or_default();
                Err(Error::RunFailed { run_id, failure: Box::new(failure) })
            }
        }
    }

    async fn ended(&self) -> RunResult {
        for _ in 0..MAX_JUMPS {
            if let Some(result) = self.ended_now().await {
                self.kit.faults.check_shaken();
                return result;
            }
            let passed = self.kit.pass().await;
            if !passed && self.ended_now().await.is_none() {
                panic!(
                    "run {} does not end: nothing is due, and it waits for {}\nopen a gate, publish an event, or give \
                     the worker the handler",
                    self.run,
                    self.explained().await
                );
            }
        }
        panic!("run {} does not end after {MAX_JUMPS} jumps of the clock: {}", self.run, self.explained().await);
    }

    async fn ended_now(&self) -> Option<RunResult> {
        match self.kit.engine.result(&self.kit.ns, self.run, Duration::ZERO).await {
            Ok(result) => result,
            Err(error) => panic!("run {} cannot be read: {error}", self.run),
        }
    }

    async fn explained(&self) -> String {
        match self.kit.engine.run(&self.kit.ns, self.run).await {
            Ok(info) if !info.waiting_for.is_empty() => {
                let waiting = info.waiting_for.iter().map(|(name, why)| format!("\n  `{name}`: {}", written!(why)));
                waiting.collect()
            }
            Ok(info) => format!("nothing (it is {})", info.status.as_str()),
            Err(error) => error.to_string(),
        }
    }

    /// Returns when this entry waits: an event, a webhook, a person, a sleep, a call or a child. The clock jumps until
    /// then, and not further.
    pub async fn waits_at(&self, name: &str) {
        for _ in 0..MAX_JUMPS {
            self.kit.settle().await;
            let steps = self.steps().await;
            // Nothing can run now, so a call or a child that has begun waits for a worker.
            let waits = |entry: &Entry| entry.name == name && matches!(entry.status.as_str(), "waiting" | "running");
            if steps.iter().any(waits) {
                return;
            }
            let ended = self.ended_now().await;
            if ended.is_some() || !self.kit.pass().await {
                let names: Vec<String> =
                    steps.iter().map(|entry| format!("{} ({})", entry.name, entry.status)).collect();
                panic!("run {} never waits at `{name}`; it has {}: {ended:?}", self.run, names.join(", "));
            }
        }
        panic!("run {} does not wait at `{name}` after {MAX_JUMPS} jumps of the clock", self.run);
    }

    /// Opens the webhook or manual gate of this entry.
    pub async fn open(&self, name: &str, payload: impl Serialize) {
        self.waits_at(name).await;
        let gate = self.records().await.into_iter().rev().find_map(|record| match record {
            Recorded::AwaitScheduled { step_key, token, .. } if step_key == name => {
                Some(format!("{}.{}", token.run, token.activation.0))
            }
            _ => None,
        });
        let Some(gate) = gate else { panic!("`{name}` of run {} is not a gate", self.run) };
        let opened = self.kit.engine.open_gate_named(&self.kit.ns, &gate, OpenedBy::Manual, json(payload)).await;
        if let Err(error) = opened {
            panic!("the gate `{name}` cannot be opened: {error}");
        }
    }

    pub async fn cancel(&self) {
        if let Err(error) = self.kit.engine.cancel(&self.kit.ns, self.run, "test", None).await {
            panic!("run {} cannot be cancelled: {error}", self.run);
        }
    }

    /// The entries so far, in the order in which they were made.
    pub async fn steps(&self) -> Vec<Entry> {
        match self.kit.engine.steps(&self.kit.ns, self.run).await {
            Ok(steps) => steps.into_iter().map(entry).collect(),
            Err(error) => panic!("run {} cannot be read: {error}", self.run),
        }
    }

    /// The names of the entries so far.
    pub async fn names(&self) -> Vec<String> {
        self.steps().await.into_iter().map(|entry| entry.name).collect()
    }

    /// The kinds of the records of the timeline so far, with the entry that each is about: `step.completed pay`.
    pub async fn timeline(&self) -> Vec<String> {
        let shown = self.records().await.into_iter().map(|record| {
            let written = written!(record);
            let kind = written["kind"].as_str().unwrap_or_default();
            match record.step_key() {
                Some(name) => format!("{kind} {name}"),
                None => kind.to_owned(),
            }
        });
        shown.collect()
    }

    async fn records(&self) -> Vec<Recorded> {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let page = match self.kit.engine.records(&self.kit.ns, self.run, after, PAGE).await {
                Ok(page) => page,
                Err(error) => panic!("run {} cannot be read: {error}", self.run),
            };
            let Some(last) = page.last() else { return all };
            after = last.n;
            all.extend(page.into_iter().map(|record| record.record.entry));
        }
    }
}

fn entry(step: StepInfo) -> Entry {
    Entry {
        name: step.activation,
        kind: step.kind.to_owned(),
        status: step.status.to_owned(),
        attempts: step.attempts.len(),
        output: step.output,
    }
}

impl fmt::Debug for TestRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestRun").field("run", &self.run).finish_non_exhaustive()
    }
}
