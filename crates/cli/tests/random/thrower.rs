//! The tenant that sends random requests: registers, starts, works off tasks, publishes, cancels and reads.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::chance::Chance;
use crate::definitions::{FLOWS, definition, name};
use crate::rig::Rig;
use crate::tenant::{Reply, Tenant};

const WORKER: &str = "random-worker";
const TASKS_AT_ONCE: usize = 20;
const REPORTS_AT_ONCE: usize = 4;
const HEAVY_DECISIONS: &str = "eddyline_heavy_decisions_total";
/// Stands for "no response" in place of a status.
const NO_ANSWER: u16 = 0;
/// If any heavy decisions are left, the next one is made within this time.
const NEXT_DECISION: Duration = Duration::from_secs(5);
/// How many runs of a round are checked at the end.
const KEPT: usize = 40;

pub struct Thrower {
    tenant: Tenant,
    chance: Chance,
    runs: Vec<String>,
    answers: BTreeMap<(&'static str, u16), u64>,
}

impl Thrower {
    pub fn new(tenant: Tenant, chance: Chance) -> Thrower {
        Thrower { tenant, chance, runs: Vec::new(), answers: BTreeMap::new() }
    }

    pub async fn throw(&mut self, time: Duration) {
        let over = Instant::now() + time;
        while Instant::now() < over {
            match self.chance.below(12) {
                0 | 1 => self.register().await,
                2..=5 => self.start().await,
                6..=9 => self.work().await,
                10 => self.publish().await,
                _ => self.look_or_act().await,
            }
        }
    }

    /// Most generated definitions must be accepted, or nothing is tested.
    pub fn check_generator(&self) {
        let count = |status| self.answers.get(&("register", status)).copied().unwrap_or(0);
        // A few may be refused by chance; on a slow machine only few are sent.
        assert!(count(422) <= 4 * count(200) + 4, "hardly anything can be registered: {self}");
    }

    pub fn into_runs(self) -> Vec<String> {
        let mut runs = self.runs;
        runs.truncate(KEPT);
        runs
    }

    /// Counts a response, which must not be a 5xx. Two failures are expected: a request that times out behind heavy
    /// decisions of its own tenant, and a large body that is refused before it is sent completely.
    fn note(&mut self, kind: &'static str, reply: Result<Reply, String>) -> Reply {
        let reply = reply.unwrap_or_else(|error| {
            let expected = ["no answer within", "error writing a body"].iter().any(|known| error.contains(known));
            assert!(expected, "{error}: {self}");
            Reply { status: NO_ANSWER, body: Value::Null }
        });
        assert!(reply.status < 500, "{kind}: {reply:?}");
        *self.answers.entry((kind, reply.status)).or_default() += 1;
        reply
    }

    async fn register(&mut self) {
        let (flow, definition) = (name(self.chance.below(FLOWS)), definition(&mut self.chance));
        let reply = self.tenant.put(&format!("/v1/flows/{flow}"), &definition).await;
        let reply = self.note("register", reply);
        if reply.status == 422 && std::env::var_os("EDDYLINE_RANDOM_SHOW").is_some() {
            println!("{}", reply.body);
        }
    }

    async fn start(&mut self) {
        let (flow, input) = (name(self.chance.below(FLOWS)), self.chance.input());
        let reply = self.tenant.post(&format!("/v1/flows/{flow}/runs"), &json!({ "input": input })).await;
        let reply = self.note("start", reply);
        if reply.status == 201 {
            self.runs.push(reply.text("run_id").to_owned());
        }
    }

    async fn work(&mut self) {
        let claim = json!({"worker_id": WORKER, "max": TASKS_AT_ONCE, "wait_ms": 20});
        let reply = self.tenant.post("/v1/tasks/claim", &claim).await;
        let reply = self.note("claim", reply);
        let tasks = reply.body["tasks"].as_array().cloned().unwrap_or_default();
        let reports: Vec<Value> = tasks.iter().filter_map(|task| self.report(task)).collect();
        // Few at a time: more could exceed the limit of a body.
        for reports in reports.chunks(REPORTS_AT_ONCE) {
            let reply = self.tenant.post("/v1/tasks/report", &json!({"worker_id": WORKER, "reports": reports})).await;
            self.note("report", reply);
        }
    }

    /// A random report of a task; `None` for some tasks, whose lease then expires.
    fn report(&mut self, task: &Value) -> Option<Value> {
        let mut report = match self.chance.below(20) {
            0 => return None,
            1 => json!({"op": "fail", "error": {"kind": "Random", "message": "as it happens"}, "retryable": true}),
            2 => json!({"op": "fail", "error": {"kind": "Random", "message": "for good"}, "retryable": false}),
            3 => json!({"op": "defer", "after": "50ms"}),
            4..=6 => {
                let payload = self.chance.value(4);
                json!({"op": "complete", "output": 1, "emits": [{"event": "happened", "payload": payload}]})
            }
            _ => json!({"op": "complete", "output": self.chance.value(4)}),
        };
        report["task_id"] = task["task_id"].clone();
        report["token"] = task["token"].clone();
        Some(report)
    }

    async fn publish(&mut self) {
        let event = json!({"name": "random.event", "key": self.chance.below(20), "payload": self.chance.value(3)});
        let reply = self.tenant.post("/v1/events", &event).await;
        self.note("publish", reply);
    }

    async fn look_or_act(&mut self) {
        if self.runs.is_empty() {
            return;
        }
        let run = self.chance.pick(&self.runs).clone();
        let path = format!("/v1/runs/{run}");
        let (kind, reply) = match self.chance.below(7) {
            0 => ("cancel", self.tenant.post(&format!("{path}/cancel"), &json!({})).await),
            1 => ("retry", self.tenant.post(&format!("{path}/retry"), &json!({})).await),
            2 => ("steps", self.tenant.get(&format!("{path}/steps?limit=1000")).await),
            3 => ("timeline", self.tenant.get(&format!("/v1/streams/nq:flow:{run}?limit=1000")).await),
            4 => ("projection", self.tenant.get(&format!("/v1/streams/nq:proj:flow-steps:{run}?limit=1000")).await),
            5 => ("gates", self.tenant.get(&format!("/v1/gates?run={run}")).await),
            _ => ("run", self.tenant.get(&path).await),
        };
        self.note(kind, reply);
    }
}

impl std::fmt::Display for Thrower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for ((kind, status), count) in &self.answers {
            write!(f, "{kind} {status} ×{count}, ")?;
        }
        Ok(())
    }
}

/// Waits until every run has ended or says what it waits for. After `patience` it is enough that heavy decisions are
/// still being made.
pub async fn all_end_or_wait(rig: &Rig, runs: &[String], patience: Duration) {
    let (tenant, since) = (&rig.attacker, Instant::now());
    for run in runs {
        loop {
            let Ok(reply) = tenant.get(&format!("/v1/runs/{run}")).await else { panic!("run {run} cannot be read") };
            assert_eq!(reply.status, 200, "{reply:?}");
            let status = reply.text("status");
            let has_ended = matches!(status, "completed" | "failed" | "cancelled");
            let says_why = reply.body["waiting_for"].as_array().is_some_and(|waits| !waits.is_empty());
            if has_ended || says_why {
                break;
            }
            if since.elapsed() > patience {
                let before = rig.metric(HEAVY_DECISIONS).await;
                tokio::time::sleep(NEXT_DECISION).await;
                let made = rig.metric(HEAVY_DECISIONS).await - before;
                assert!(made > 0.0, "a run neither ends nor says why, and nothing is being decided: {}", reply.body);
                return println!("heavy decisions are still being made, {made} in {NEXT_DECISION:?}");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}
