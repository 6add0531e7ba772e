//! Workers in this process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use eddyline_engine::{Assignment, ClaimTasks, Engine, TaskReport};
use eddyline_machine::{Data, Op};
use eddyline_store::{Namespace, Offer};
use tokio::task::JoinHandle;

const WAIT: Duration = Duration::from_secs(3_600);

/// Slots of a worker, each with one task at a time; how long each report took to be durable.
pub fn spawn(engine: &Engine, slots: usize, batch: usize) -> Vec<JoinHandle<Vec<Duration>>> {
    let offer = Arc::new(Offer::default());
    (0..slots).map(|slot| tokio::spawn(work(engine.clone(), format!("w{slot}"), offer.clone(), batch))).collect()
}

pub async fn latencies(slots: Vec<JoinHandle<Vec<Duration>>>) -> Vec<Duration> {
    let mut all = Vec::new();
    for slot in slots {
        all.extend(slot.await.unwrap_or_default());
    }
    all
}

async fn work(engine: Engine, worker: String, offer: Arc<Offer>, batch: usize) -> Vec<Duration> {
    let ns = Namespace::default();
    let claim = || ClaimTasks {
        worker: worker.clone(),
        queues: vec!["default".to_owned()],
        offer: offer.clone(),
        max: batch,
        request: None,
        lease_ms: None,
    };
    let mut latencies = Vec::new();
    let Ok(mut waiting) = engine.ask(&ns, claim(), false).await else { return latencies };
    while let Ok(tasks) = waiting.tasks(WAIT).await {
        if tasks.is_empty() {
            break;
        }
        let reports: Vec<TaskReport> =
            tasks.into_iter().map(|task| TaskReport { token: task.token, seq: Some(1), op: handle(task) }).collect();
        let (since, count) = (Instant::now(), reports.len());
        match engine.report_and_ask(&ns, reports, Some(claim())).await {
            Ok((_, Some(next))) => waiting = next,
            _ => break,
        }
        latencies.extend(std::iter::repeat_n(since.elapsed(), count));
    }
    latencies
}

/// A handler that gives back what it got.
fn handle(task: Assignment) -> Op {
    let output = match &*task.input {
        serde_json::Value::Object(_) => serde_json::json!({"ok": true, "step": task.activation}),
        plain => plain.clone(),
    };
    Op::Complete { output: Data::from(output), emits: Vec::new(), logs: Vec::new() }
}
