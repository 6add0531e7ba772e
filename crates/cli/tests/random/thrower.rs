//! The tenant that throws: it registers, starts, works off tasks, publishes, cancels, and looks at what came of it.

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
/// Instead of a status.
const NO_ANSWER: u16 = 0;
/// Within this time another heavy decision is made, if any are left.
const NEXT_DECISION: Duration = Duration::from_secs(5);
/// Of the runs of a round so many are looked at in the end.
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

    /// What it is for: most of what is made up must be taken, or nothing is tested.
    pub fn check_generator(&self) {
        let count = |status| self.answers.get(&("register", status)).copied().unwrap_or(0);
        // A few may be refused by chance; when others are slow, few are made.
        assert!(count(422) <= 4 * count(200) + 4, "hardly anything can be registered: {self}");
    }

    pub fn into_runs(self) -> Vec<String> {
        let mut runs = self.runs;
        runs.truncate(KEPT);
        runs
    }

    /// Every answer is one that the contract knows; 500 is not. This tenant's own requests may wait for its own heavy
    /// decisions for longer than its patience lasts, and a body that is too large is refused before all of it is sent.
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
        // Few at a time: together they may be larger than a body may be.
        for reports in reports.chunks(REPORTS_AT_ONCE) {
            let reply = self.tenant.post("/v1/tasks/report", &json!({"worker_id": WORKER, "reports": reports})).await;
            self.note("report", reply);
        }
    }

    /// What is said of a task; of some nothing is.
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

/// Until every run has ended or says what it waits for, or, after a while, heavy decisions are still being made one after
/// the other.
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
