//! Workers over plain HTTP calls, each of which goes to any instance: one for steps, one for the function of a code flow,
//! and one that claims tasks and never reports them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use eddyline::Method;
use eddyline::protocol::{ClaimedTasks, ReportOutcome, ReportedTasks, Task, Verdict, WorkerRegistered};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::api::Api;
use crate::workload::World;

const CLAIM_WAIT_MS: u64 = 1_000;
/// The function of the code flow.
pub const CODE: &str = "code";
const NAP: &str = "150ms";
/// How often the vanishing worker takes a task.
const VANISH_EVERY: Duration = Duration::from_millis(1_500);

struct Hand {
    world: Arc<World>,
    worker: String,
}

impl Hand {
    async fn register(world: &Arc<World>, what: &Value) -> Hand {
        let mut body = json!({"instance": Uuid::new_v4().to_string()});
        body.as_object_mut().unwrap().extend(what.as_object().cloned().unwrap());
        let registered: WorkerRegistered = world.api.post("/v1/workers", &body).await;
        Hand { world: world.clone(), worker: registered.worker_id }
    }

    fn api(&self) -> &Api {
        &self.world.api
    }

    fn is_done(&self) -> bool {
        self.world.stopped.load(Ordering::Relaxed)
    }

    /// If the response is lost, the same claim goes to another instance.
    async fn claim(&self, max: u32) -> Vec<Task> {
        let request = Uuid::new_v4().to_string();
        let body = json!({"worker_id": self.worker, "max": max, "wait_ms": CLAIM_WAIT_MS, "request_id": request});
        let claimed = self.api().ask::<ClaimedTasks>(Method::POST, "/v1/tasks/claim", &[], Some(&body)).await;
        match claimed.result {
            Ok(claimed) => claimed.tasks,
            Err(error) => {
                self.world.ledger.problem(format!("a claim was refused: {error}"));
                Vec::new()
            }
        }
    }

    /// If the response is lost, the same report goes to another instance. An applied report is also repeated at another
    /// one, which must return the same outcome.
    async fn report(&self, task: &Task, seq: u32, mut report: Value) -> Option<ReportOutcome> {
        let fields = json!({"task_id": task.task_id, "token": task.token, "seq": seq});
        report.as_object_mut().unwrap().extend(fields.as_object().cloned().unwrap());
        let body = json!({"worker_id": self.worker, "reports": [report]});
        let outcome = self.send(&body).await?;
        if outcome.outcome == Verdict::Applied && self.api().chance().is_multiple_of(3) {
            let again = self.send(&body).await?;
            if again.outcome != Verdict::Applied || !again.duplicate {
                self.world.ledger.problem(format!("{body} was applied, and when it was repeated {again:?}"));
            }
        }
        if outcome.outcome == Verdict::Invalid {
            self.world.ledger.problem(format!("{body} is invalid: {outcome:?}"));
        }
        (outcome.outcome == Verdict::Applied).then_some(outcome)
    }

    async fn send(&self, body: &Value) -> Option<ReportOutcome> {
        let reported = self.api().ask::<ReportedTasks>(Method::POST, "/v1/tasks/report", &[], Some(body)).await;
        match reported.result {
            Ok(mut reported) => reported.outcomes.pop(),
            Err(error) => {
                self.world.ledger.problem(format!("a report was refused: {error}"));
                None
            }
        }
    }

    async fn complete(&self, task: &Task, seq: u32, output: Value) {
        if self.report(task, seq, json!({"op": "complete", "output": output})).await.is_some() {
            self.world.ledger.completed(task, &output);
        }
    }
}

/// Steps: a log, then the result.
pub async fn by_hand(world: Arc<World>) {
    let hand = Hand::register(&world, &json!({"handlers": ["hand"], "max_concurrent": 4})).await;
    while !hand.is_done() {
        for task in hand.claim(4).await {
            world.ledger.begun(&task);
            let message = Uuid::new_v4().to_string();
            if hand.report(&task, 1, json!({"op": "log", "level": "info", "msg": message})).await.is_none() {
                continue;
            }
            world.ledger.book().logs.insert(message, task.run_id.clone());
            let sum = task.input["n"].as_u64().unwrap() + task.input["by"].as_u64().unwrap();
            hand.complete(&task, 2, json!(sum)).await;
        }
    }
}

/// The function: a step, a sleep, another step.
pub async fn code(world: Arc<World>) {
    let hand = Hand::register(&world, &json!({"flows": [CODE], "max_concurrent": 4})).await;
    while !hand.is_done() {
        for task in hand.claim(4).await {
            function(&hand, &task).await;
        }
    }
}

async fn function(hand: &Hand, task: &Task) -> Option<()> {
    hand.world.ledger.begun(task);
    let memo = task.memo.clone().unwrap_or_default();
    let n = task.run_input["n"].as_u64().unwrap();
    let mut seq = 0;
    let mut next = || {
        seq += 1;
        seq
    };
    if ended(&memo, "first").is_none() {
        hand.report(task, next(), json!({"op": "step", "name": "first", "output": n + 1})).await?;
    }
    if ended(&memo, "nap").is_none() {
        if !memo.contains_key("nap") {
            hand.report(task, next(), json!({"op": "sleep", "name": "nap", "for": NAP})).await?;
        }
        let seen = memo.values().filter_map(|entry| entry["n"].as_u64()).max().unwrap_or(0);
        hand.report(task, next(), json!({"op": "suspend", "seen": seen})).await?;
        return Some(());
    }
    let first = ended(&memo, "first").and_then(Value::as_u64);
    if first != Some(n + 1) {
        hand.world.ledger.problem(format!("{} has forgotten its first step: {memo:?}", task.run_id));
    }
    if ended(&memo, "second").is_none() {
        hand.report(task, next(), json!({"op": "step", "name": "second", "output": (n + 1) * 2})).await?;
    }
    hand.complete(task, next(), json!((n + 1) * 2)).await;
    Some(())
}

/// The output of an entry that has completed.
fn ended<'a>(memo: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    memo.get(name).filter(|entry| entry["status"] == "completed").map(|entry| &entry["output"])
}

/// Claims tasks and abandons them: they are queued again when their lease ends.
pub async fn vanish(world: Arc<World>) {
    while !world.stopped.load(Ordering::Relaxed) {
        let hand = Hand::register(&world, &json!({"handlers": ["doomed"], "max_concurrent": 1})).await;
        for task in hand.claim(1).await {
            world.ledger.begun(&task);
        }
        tokio::time::sleep(VANISH_EVERY).await;
    }
}
