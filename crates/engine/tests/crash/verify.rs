//! Checks a store after all kills.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use eddyline_engine::Engine;
use eddyline_machine::view::RunView;
use eddyline_machine::{Entry, Numbered, RunId};
use eddyline_store::{Embedded, Options, Page, Postgres, PostgresOptions, RunFilter, Store, Summary};

use crate::ledger::{self, Line};

/// Counts of what was checked.
#[derive(Debug, Default)]
pub struct Told {
    pub runs: usize,
    records: usize,
    acknowledged: usize,
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Told { runs, records, acknowledged } = self;
        write!(f, "{runs} runs with {records} records, {acknowledged} acknowledgements, nothing lost")
    }
}

pub fn all(dir: &Path, store: Option<&str>) -> Told {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(look(dir, store))
}

async fn look(dir: &Path, url: Option<&str>) -> Told {
    let store: Arc<dyn Store> = match url {
        Some(url) => Arc::new(Postgres::open(url, PostgresOptions::default()).await.unwrap()),
        None => Arc::new(Embedded::open(&dir.join("store"), Options::default()).unwrap()),
    };
    let lines = ledger::read(dir);
    let completed = ledger::completed(&lines);
    let mut told = Told { acknowledged: lines.len(), ..Told::default() };
    let engine = Engine::start(store.clone(), eddyline_engine::Config::default());
    let mut runs: BTreeMap<RunId, Summary> = BTreeMap::new();
    let mut after = None;
    loop {
        let page = store.runs(None, &RunFilter::default(), Page { after, limit: 500 }).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some(last.position);
        runs.extend(page.into_iter().map(|summary| (summary.run, summary)));
    }
    let mut by_key: BTreeMap<String, RunId> = BTreeMap::new();
    for summary in runs.values() {
        assert!(summary.ended_at.is_some(), "{} has not ended", summary.run);
        if let Some(key) = &summary.header.external_id {
            let other = by_key.insert(key.clone(), summary.run);
            assert_eq!(other, None, "two runs for the key {key}");
        }
        if let Some(parent) = summary.header.parent {
            assert!(runs.contains_key(&parent.run), "{} has no parent", summary.run);
        }
        let records = records(&*store, summary.run).await;
        timeline(&engine, summary, &records).await;
        acknowledged(summary.run, &records, completed.get(&summary.run).map_or(&[], Vec::as_slice));
        told.runs += 1;
        told.records += records.len();
    }
    for line in &lines {
        match line {
            Line::Started { run, key } => {
                assert_eq!(by_key.get(key), Some(run), "the run of {key} is not the acknowledged one")
            }
            Line::Completed { token, .. } => {
                let token: eddyline_engine::TaskToken = token.parse().unwrap();
                assert!(runs.contains_key(&token.run), "no run for {token}");
            }
            Line::Opened { run, activation } => {
                let opened =
                    records(&*store, *run).await.iter().filter(|record| is_opening(record, *activation)).count();
                assert_eq!(opened, 1, "gate {activation} of {run} was opened {opened} times");
            }
        }
    }
    engine.shutdown().await;
    told
}

fn is_opening(record: &Numbered, activation: u32) -> bool {
    matches!(&record.record.entry, Entry::AwaitTriggered { token, .. } if token.activation.0 == activation)
}

async fn records(store: &dyn Store, run: RunId) -> Vec<Numbered> {
    let (mut all, mut after) = (Vec::new(), 0);
    loop {
        let page = store.records(run, after, 1_000).await.unwrap();
        let Some(last) = page.last() else { return all };
        after = last.n;
        all.extend(page);
    }
}

/// A timeline is dense, has one terminal record at its end, records nothing twice, and matches the state of the run.
async fn timeline(engine: &Engine, summary: &Summary, records: &[Numbered]) {
    let run = summary.run;
    let numbers: Vec<u64> = records.iter().map(|record| record.n).collect();
    assert_eq!(numbers, (1..=records.len() as u64).collect::<Vec<_>>(), "{run} is not dense");
    let terminal: Vec<usize> = (0..records.len()).filter(|at| records[*at].record.entry.is_terminal()).collect();
    assert_eq!(terminal, [records.len() - 1], "{run} does not end once");
    let (mut said, mut offered) = (BTreeSet::new(), BTreeSet::new());
    for record in records {
        let fence = record.record.attempt.as_ref().map(|attempt| attempt.fence);
        if matches!(&record.record.entry, Entry::StepScheduled { .. }) {
            offered.insert(fence);
        }
        let once = match &record.record.entry {
            Entry::StepCompleted { step_key, .. }
            | Entry::StepFailed { step_key, .. }
            | Entry::StepSkipped { step_key, .. }
            | Entry::StepCancelled { step_key } => format!("the end of {step_key}"),
            Entry::AttemptStarted { step_key, .. } => format!("the start of {step_key} {fence:?}"),
            Entry::AttemptCompleted { step_key, .. } | Entry::AttemptFailed { step_key, .. } => {
                format!("the end of {step_key} {fence:?}")
            }
            Entry::StepProgress { step_key, .. } => format!("the progress of {step_key} {fence:?}"),
            Entry::AwaitScheduled { step_key, .. } => format!("the gate of {step_key}"),
            Entry::AwaitTriggered { step_key, .. } => format!("the opening of {step_key}"),
            _ => continue,
        };
        // A step that the function of a code run executed itself is never queued or claimed.
        if let Entry::AttemptCompleted { step_key, .. } | Entry::AttemptFailed { step_key, .. } = &record.record.entry
            && offered.contains(&fence)
        {
            let start = format!("the start of {step_key} {fence:?}");
            assert!(said.contains(&start), "{run} records {once} without {start}");
        }
        assert!(said.insert(once.clone()), "{run} records {once} twice");
    }
    let mut view = RunView::default();
    records.iter().for_each(|record| view.apply(record));
    assert_eq!(view.status(), summary.header.status().as_str(), "{run}");
    assert_eq!(view.completed_steps(), summary.header.completed_steps, "{run}");
    let steps = engine.steps(&summary.ns, run).await.unwrap();
    for step in &steps {
        let told = view.steps().get(&step.activation);
        assert_eq!(told.map(|step| step.status()), Some(step.status), "{} of {run}", step.activation);
    }
    let info = engine.run(&summary.ns, run).await.unwrap();
    if let Some(output) = view.output() {
        assert_eq!(Some(engine.payload(run, output).await.unwrap()), info.output, "{run}");
    }
}

/// Every acknowledged completion is in the timeline, with its fence.
fn acknowledged(run: RunId, records: &[Numbered], completed: &[(String, u64)]) {
    let have: BTreeSet<(String, u64)> = records
        .iter()
        .filter_map(|record| match (&record.record.entry, &record.record.attempt) {
            (Entry::AttemptCompleted { step_key, .. }, Some(attempt)) => Some((step_key.clone(), attempt.fence.0)),
            _ => None,
        })
        .collect();
    for completion in completed {
        assert!(have.contains(completion), "{run} has lost the completion of {completion:?}");
    }
}
