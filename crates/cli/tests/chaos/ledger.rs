//! Records what was acknowledged and what handlers did, to compare with the timelines.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use eddyline::protocol::Task;
use serde_json::Value;

/// What the test knows of its runs, by id, idempotency key or tag.
#[derive(Debug, Default)]
pub struct Book {
    /// Acknowledged starts: the flow of each run.
    pub runs: BTreeMap<String, &'static str>,
    pub keys: BTreeMap<String, String>,
    /// Tags of starts without a key, with how many runs may have it.
    pub tags: BTreeMap<String, Tagged>,
    pub tenants: BTreeMap<String, String>,
    /// How often a handler began, by task and by attempt.
    pub tasks: BTreeMap<String, (String, u32)>,
    pub attempts: BTreeMap<(String, String, u32), u32>,
    /// Results whose report was acknowledged: the run, and the output.
    pub results: BTreeMap<String, (String, Value)>,
    /// Messages whose report was acknowledged, with their run.
    pub logs: BTreeMap<String, String>,
    /// Gates that were opened by an acknowledged call: the payload by run.
    pub gates: BTreeMap<String, Value>,
    /// Acknowledged events and the runs that wait for them.
    pub events: BTreeMap<String, String>,
    pub problems: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub struct Tagged {
    pub acknowledged: Option<String>,
    /// Another attempt may also have started a run.
    pub uncertain: bool,
}

#[derive(Debug, Default)]
pub struct Ledger(Mutex<Book>);

impl Ledger {
    pub fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap()
    }

    /// A handler begins.
    pub fn begun(&self, task: &Task) {
        let mut book = self.book();
        book.tasks.entry(task.task_id.clone()).or_insert_with(|| (task.run_id.clone(), 0)).1 += 1;
        *book.attempts.entry((task.run_id.clone(), task.activation.clone(), task.attempt)).or_default() += 1;
    }

    /// A result was acknowledged.
    pub fn completed(&self, task: &Task, output: &Value) {
        let before = self.book().results.insert(task.task_id.clone(), (task.run_id.clone(), output.clone()));
        if let Some((_, before)) = before
            && before != *output
        {
            self.problem(format!("two results of {} were acknowledged: {before} and {output}", task.task_id));
        }
    }

    pub fn problem(&self, what: String) {
        eprintln!("PROBLEM: {what}");
        self.book().problems.insert(what);
    }
}
