//! Workers in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use eddyline_engine::{Assignment, ClaimTasks, Engine, TaskReport};
use eddyline_machine::{Data, Op};
use eddyline_store::{Namespace, Offer};
use tokio::task::JoinHandle;

const WAIT: Duration = Duration::from_secs(3_600);

/// The times measured by one slot or by all.
#[derive(Debug, Default)]
pub struct Seen {
    /// How long each report took to be durable.
    pub reports: Vec<Duration>,
    /// From one step of a run to the next; only with one run at a time.
    pub steps: Vec<Duration>,
}

/// Slots of a worker, each with one task at a time.
pub fn spawn(engine: &Engine, slots: usize, batch: usize) -> Vec<JoinHandle<Seen>> {
    let offer = Arc::new(Offer::default());
    // Of its own process: two processes on one store have different workers.
    let name = |slot: usize| format!("w{}-{slot}", std::process::id());
    (0..slots).map(|slot| tokio::spawn(work(engine.clone(), name(slot), offer.clone(), batch))).collect()
}

pub async fn seen(slots: Vec<JoinHandle<Seen>>) -> Seen {
    let mut all = Seen::default();
    for slot in slots {
        let seen = slot.await.unwrap_or_default();
        all.reports.extend(seen.reports);
        all.steps.extend(seen.steps);
    }
    all
}

async fn work(engine: Engine, worker: String, offer: Arc<Offer>, batch: usize) -> Seen {
    let ns = Namespace::default();
    let claim = || ClaimTasks {
        worker: worker.clone(),
        queues: vec!["default".to_owned()],
        offer: offer.clone(),
        max: batch,
        most_held: None,
        request: None,
        lease_ms: None,
    };
    let (mut seen, mut last) = (Seen::default(), None);
    let Ok(mut waiting) = engine.ask(&ns, claim(), false).await else { return seen };
    while let Ok(tasks) = waiting.tasks(WAIT).await {
        let Some(first) = tasks.first() else { break };
        let now = Instant::now();
        if let Some((run, before)) = last.replace((first.token.run, now))
            && run == first.token.run
        {
            seen.steps.push(now - before);
        }
        let reports: Vec<TaskReport> =
            tasks.into_iter().map(|task| TaskReport { token: task.token, seq: Some(1), op: handle(task) }).collect();
        let (since, count) = (Instant::now(), reports.len());
        match engine.report_and_ask(&ns, reports, Some(claim())).await {
            Ok((_, Some(next))) => waiting = next,
            _ => break,
        }
        seen.reports.extend(std::iter::repeat_n(since.elapsed(), count));
    }
    seen
}

/// A trivial handler.
fn handle(task: Assignment) -> Op {
    let output = match &*task.input {
        serde_json::Value::Object(_) => serde_json::json!({"ok": true, "step": task.activation}),
        plain => plain.clone(),
    };
    Op::Complete { output: Data::from(output), emits: Vec::new(), logs: Vec::new() }
}
