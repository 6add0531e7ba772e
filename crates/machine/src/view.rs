//! A run as shown by its timeline: a fold over its records. It decides nothing, knows no definition, and accepts any
//! sequence of records, because it must show what was recorded even if that is unexpected.

mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;

use crate::failure::Failure;
use crate::ids::{Millis, RunId};
use crate::record::{ActName, Entry, Numbered, Scheduled};
use eddyline_language::data::Data;

pub use step::{AttemptState, AttemptView, Gate, Logs, Progress, StepOutcome, StepPhase, StepView};

/// The step key of a code run's function. It has a task and attempts, but it is neither counted nor listed as a step.
pub const DRIVER: &str = "@run";

/// The public state of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunView {
    pub flow: String,
    pub version: String,
    pub queue: Option<String>,
    pub parent: Option<RunId>,
    pub retry_of: Option<RunId>,
    pub created_at: Option<Millis>,
    /// When its delay ended, or when it was created if it had none.
    pub started_at: Option<Millis>,
    pub completed_at: Option<Millis>,
    pub last_event_at: Option<Millis>,
    pub logs: Logs,
    /// Who cancelled it; the run may still be undoing its steps.
    pub cancel: Option<Cancel>,
    end: Option<RunEnd>,
    begun: bool,
    paused: bool,
    declared_steps: u32,
    steps: BTreeMap<String, StepView>,
    driver: Option<StepView>,
    emitted: Vec<Arc<str>>,
    emitted_names: BTreeSet<Arc<str>>,
    // Counters and an index over the steps' phases, updated only in `enter`, so that a record costs O(log n).
    tasks_open: usize,
    completed: u32,
    completed_top: u32,
    gates: BTreeMap<u64, String>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum RunEnd {
    Completed { output: Data, continued_as: Option<RunId> },
    Failed(Failure),
    Cancelled { reason: Option<String>, also: Vec<Failure> },
}

#[derive(Debug, Clone, PartialEq)]
pub struct Cancel {
    pub by: String,
    pub reason: Option<String>,
    pub at: Millis,
}

impl RunView {
    pub fn status(&self) -> &'static str {
        match &self.end {
            Some(RunEnd::Completed { .. }) => "completed",
            Some(RunEnd::Failed(_)) => "failed",
            Some(RunEnd::Cancelled { .. }) => "cancelled",
            None if self.paused => "paused",
            None if !self.begun => "pending",
            None if self.tasks_open == 0 => "waiting",
            None => "running",
        }
    }

    pub fn end(&self) -> Option<&RunEnd> {
        self.end.as_ref()
    }

    pub fn output(&self) -> Option<&Data> {
        match &self.end {
            Some(RunEnd::Completed { output, .. }) => Some(output),
            _ => None,
        }
    }

    pub fn error(&self) -> Option<&Failure> {
        match &self.end {
            Some(RunEnd::Failed(error)) => Some(error),
            _ => None,
        }
    }

    /// The steps seen so far, by activation.
    pub fn steps(&self) -> &BTreeMap<String, StepView> {
        &self.steps
    }

    /// The function of a code run.
    pub fn driver(&self) -> Option<&StepView> {
        self.driver.as_ref()
    }

    /// The number of steps that the flow declares; for a code run, which declares none, the number seen.
    pub fn step_count(&self) -> u32 {
        if self.is_code() { self.steps.len() as u32 } else { self.declared_steps }
    }

    /// How many of [`Self::step_count`] have completed.
    pub fn completed_steps(&self) -> u32 {
        if self.is_code() { self.completed } else { self.completed_top }
    }

    /// The names of emitted events, each once, in order of first emit.
    pub fn emitted_events(&self) -> impl Iterator<Item = &str> {
        self.emitted.iter().map(|name| &**name)
    }

    /// The number of tasks queued or claimed.
    pub fn tasks_open(&self) -> usize {
        self.tasks_open
    }

    /// The open gates with their steps, oldest first.
    pub fn open_gates(&self) -> impl Iterator<Item = (&str, &Gate)> {
        self.gates.values().filter_map(|key| Some((key.as_str(), self.get(key)?.gate()?)))
    }

    pub fn apply(&mut self, numbered: &Numbered) {
        use Entry::*;
        let Numbered { n, ts, record } = numbered;
        let (ts, number) = (*ts, record.attempt.as_ref().map(|attempt| attempt.number));
        self.last_event_at = Some(ts);
        if let Some(key) = record.entry.step_key() {
            self.step(key).last_event_at = Some(ts);
            if !matches!(record.entry, Emit { .. } | Log { .. } | Act { .. }) {
                self.begun = true;
                self.started_at.get_or_insert(ts);
            }
        }
        match &record.entry {
            FlowStart { flow_name, version, step_count, queue, delay_ms, in_line, parent, retry_of } => {
                self.flow.clone_from(flow_name);
                self.version.clone_from(version);
                self.queue.clone_from(queue);
                (self.parent, self.retry_of, self.declared_steps) = (*parent, *retry_of, *step_count);
                self.created_at = Some(ts);
                let waits = *in_line || delay_ms.is_some_and(|delay| delay > 0);
                self.started_at = (!waits).then_some(ts);
            }
            FlowCompleted { output, continued_as, .. } => {
                self.finish(ts, RunEnd::Completed { output: output.clone(), continued_as: *continued_as });
            }
            FlowFailed { error } => self.finish(ts, RunEnd::Failed(error.clone())),
            FlowCancelled { reason, also } => {
                self.finish(ts, RunEnd::Cancelled { reason: reason.clone(), also: also.clone() });
            }
            FlowPaused {} => self.paused = true,
            FlowResumed {} => self.paused = false,
            StepScheduled { step_key, work, reason } => match work {
                Scheduled::Task { .. } => {
                    self.step(step_key).give_back_attempt(*reason, ts);
                    self.enter(step_key, ts, StepPhase::Queued);
                }
                Scheduled::Child { run_id, .. } => {
                    self.step(step_key).child = Some(*run_id);
                    self.enter(step_key, ts, StepPhase::Child(*run_id));
                }
                Scheduled::Group {} | Scheduled::Spread { .. } | Scheduled::Repeat {} | Scheduled::Round {} => {
                    self.enter(step_key, ts, StepPhase::Container);
                }
            },
            StepCompleted { step_key, result, .. } => {
                self.end_step(step_key, ts, StepOutcome::Completed(result.clone()));
            }
            StepFailed { step_key, error } => self.end_step(step_key, ts, StepOutcome::Failed(error.clone())),
            StepSkipped { step_key, reason, .. } => self.end_step(step_key, ts, StepOutcome::Skipped(*reason)),
            StepCancelled { step_key } => self.end_step(step_key, ts, StepOutcome::Cancelled),
            StepProgress { step_key, done, total, msg } => {
                self.step(step_key).progress =
                    Some(Progress { done: done.clone(), total: total.clone(), msg: msg.clone() });
            }
            AttemptStarted { step_key, worker } => {
                let attempt = self.step(step_key).attempt(number);
                // A resumed function continues the attempt it suspended; any other start is a new one.
                if attempt.state != AttemptState::Suspended || attempt.started_at.is_none() {
                    attempt.started_at = Some(ts);
                }
                attempt.ended_at = None;
                attempt.state = AttemptState::Running;
                attempt.worker.clone_from(worker);
                self.enter(step_key, ts, StepPhase::Claimed);
            }
            AttemptCompleted { step_key, suspended, .. } => {
                let attempt = self.step(step_key).attempt(number);
                attempt.state = if *suspended { AttemptState::Suspended } else { AttemptState::Completed };
                attempt.ended_at = (!suspended).then_some(ts);
                self.enter(step_key, ts, StepPhase::Between);
            }
            AttemptFailed { step_key, error } => {
                let attempt = self.step(step_key).attempt(number);
                attempt.state = AttemptState::Failed(error.clone());
                attempt.ended_at = Some(ts);
                self.enter(step_key, ts, StepPhase::Between);
            }
            RetryScheduled { step_key, reason, .. } => {
                self.step(step_key).give_back_attempt(Some(*reason), ts);
                self.enter(step_key, ts, StepPhase::BackOff);
            }
            AwaitScheduled { step_key, reason, token, for_ms, until_ms, channel, key } => {
                let gate = Gate {
                    id: *token,
                    reason: *reason,
                    until: due(ts, *for_ms, *until_ms),
                    channel: channel.clone(),
                    key: key.clone(),
                    placed: *n,
                };
                self.enter(step_key, ts, StepPhase::Gate(gate));
            }
            AwaitTriggered { step_key, token, .. }
            | AwaitTimeout { step_key, token }
            | AwaitCancelled { step_key, token } => {
                if self.step(step_key).gate().is_some_and(|gate| gate.id == *token) {
                    self.enter(step_key, ts, StepPhase::Between);
                }
            }
            Emit { event, .. } => {
                if !self.emitted_names.contains(event.as_str()) {
                    let name: Arc<str> = event.as_str().into();
                    self.emitted.push(name.clone());
                    self.emitted_names.insert(name);
                }
            }
            Log { step_key, level, .. } => {
                self.logs.add(level);
                self.step(step_key).logs.add(level);
            }
            Act { act: ActName::Cancel, by, step_key: None, reason, .. } => {
                self.cancel = Some(Cancel { by: by.clone(), reason: reason.clone(), at: ts });
            }
            Act { .. } => {}
        }
    }

    /// Adds a step without history.
    pub(crate) fn add_step(&mut self, key: &str) {
        self.step(key);
    }

    /// Removes a step that waits for nothing; the counters keep their values.
    pub(crate) fn remove_step(&mut self, key: &str) {
        self.steps.remove(key);
    }

    fn is_code(&self) -> bool {
        self.declared_steps == 0 && (self.queue.is_some() || self.driver.is_some())
    }

    fn get(&self, key: &str) -> Option<&StepView> {
        if key == DRIVER { self.driver.as_ref() } else { self.steps.get(key) }
    }

    fn step(&mut self, key: &str) -> &mut StepView {
        if key == DRIVER { self.driver.get_or_insert_default() } else { self.steps.entry(key.to_owned()).or_default() }
    }

    /// The only place that changes a phase.
    fn enter(&mut self, key: &str, ts: Millis, phase: StepPhase) {
        let (has_task, is_completed) = (phase.has_task(), phase.is_completed());
        let placed = phase.gate().map(|gate| gate.placed);
        let step = self.step(key);
        if !matches!(phase, StepPhase::Ended { outcome: StepOutcome::Skipped(_) | StepOutcome::Cancelled, .. }) {
            step.started_at.get_or_insert(ts);
        }
        let left = mem::replace(&mut step.phase, phase);

        self.tasks_open = self.tasks_open + usize::from(has_task) - usize::from(left.has_task());
        if let Some(gate) = left.gate() {
            self.gates.remove(&gate.placed);
        }
        if let Some(placed) = placed {
            self.gates.insert(placed, key.to_owned());
        }
        if key != DRIVER {
            // Only a failed entry of a code run is retried, but no sequence of records may take a count below zero.
            self.completed = self.completed + u32::from(is_completed) - u32::from(left.is_completed());
            if is_top_level(key) {
                self.completed_top = self.completed_top + u32::from(is_completed) - u32::from(left.is_completed());
            }
        }
    }

    fn end_step(&mut self, key: &str, ts: Millis, outcome: StepOutcome) {
        self.step(key).cancel_attempt(ts);
        self.enter(key, ts, StepPhase::Ended { at: ts, outcome });
    }

    fn finish(&mut self, ts: Millis, end: RunEnd) {
        self.end = Some(end);
        self.completed_at = Some(ts);
        // Steps end by their own records; the function has none and ends with the run.
        if let Some(driver) = &mut self.driver {
            driver.cancel_attempt(ts);
            self.enter(DRIVER, ts, StepPhase::Between);
        }
    }
}

/// When a wait recorded at `ts` ends.
pub(crate) fn due(ts: Millis, for_ms: Option<Millis>, until_ms: Option<Millis>) -> Option<Millis> {
    until_ms.or(for_ms.map(|span| ts.saturating_add(span)))
}

fn is_top_level(key: &str) -> bool {
    key != "finally" && !key.starts_with("undo:") && !key.contains(['.', '['])
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::ids::{ActId, Fence};
    use crate::record::{Attempt, Record};

    pub(crate) const STEPS: [&str; 7] = ["pay", "each", "each[0]", "each[1].price", "undo:pay", "finally", "@run"];

    /// A record from a line such as `started pay 2`: what happened, to which step, in which attempt.
    pub(crate) fn record(line: &str) -> Record {
        let mut words = line.split_whitespace();
        let (what, key) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let number = words.next().and_then(|word| word.parse().ok());
        let token = json!({"run": RunId::default(), "activation": ActId(key.bytes().map(u32::from).sum())});
        let error = json!({"kind": "Oops", "message": "it broke"});
        let null = json!({"j": null});
        let (kind, mut data) = match what {
            "start" => {
                let count: u32 = key.parse().unwrap();
                let delay = line.ends_with("delayed").then_some(50);
                let data = json!({"flowName": "order", "version": "1", "stepCount": count, "delayMs": delay});
                ("flow.start", data)
            }
            "end-completed" => ("flow.completed", json!({"output": null})),
            "end-failed" => ("flow.failed", json!({"error": error})),
            "end-cancelled" => ("flow.cancelled", json!({"reason": "enough"})),
            "pause" => ("flow.paused", json!({})),
            "resume" => ("flow.resumed", json!({})),
            "task" => ("step.scheduled", json!({"as": "task", "handler": key, "queue": "default"})),
            "group" => ("step.scheduled", json!({"as": "group"})),
            "child" => ("step.scheduled", json!({"as": "child", "flow": "sub", "runId": RunId::default()})),
            "started" => ("step.attempt.started", json!({"worker": "w1"})),
            "succeeded" => ("step.attempt.completed", json!({"result": null})),
            "suspended" => ("step.attempt.completed", json!({"result": null, "suspended": true})),
            "erred" => ("step.attempt.failed", json!({"error": error})),
            "retry" => ("step.retry.scheduled", json!({"reason": "retry", "backoffMs": 10})),
            "defer" => ("step.retry.scheduled", json!({"reason": "deferred", "backoffMs": 10})),
            "webhook" => ("step.await.scheduled", json!({"reason": "webhook", "token": token})),
            "sleep" => ("step.await.scheduled", json!({"reason": "time", "token": token, "forMs": 1000})),
            "sleep-forever" => ("step.await.scheduled", json!({"reason": "time", "token": token, "forMs": i64::MAX})),
            "opened" => ("step.await.triggered", json!({"by": "webhook", "token": token})),
            "late" => ("step.await.timeout", json!({"token": token})),
            "shut" => ("step.await.cancelled", json!({"token": token})),
            "completed" => ("step.completed", json!({"result": null})),
            "failed" => ("step.failed", json!({"error": error})),
            "skipped" => ("step.skipped", json!({"reason": "if"})),
            "cancelled" => ("step.cancelled", json!({})),
            "progress" => ("step.progress", json!({"done": 1.0, "total": 2.0})),
            "emit" => ("emit", json!({"event": format!("{key}.done"), "payload": null})),
            "log" => ("runner.log", json!({"level": "info", "msg": "hello"})),
            "act" => ("act", json!({"act": "retry", "by": "ann"})),
            other => panic!("no such record: {other}"),
        };
        if !kind.starts_with("flow.") {
            data["stepKey"] = json!(key);
        }
        for field in ["output", "result", "payload"] {
            if data.get(field).is_some() {
                data[field] = null.clone();
            }
        }
        let entry = serde_json::from_value(json!({"kind": kind, "data": data})).unwrap();
        let attempt = number.map(|number| Attempt { number, fence: Fence(7), queue: "default".into() });
        Record { entry, attempt }
    }

    /// A timeline from lines, one record every 10 ms.
    pub(crate) fn timeline<S: AsRef<str>>(lines: &[S]) -> Vec<Numbered> {
        let stamped = |(i, line): (usize, &S)| Numbered {
            n: i as u64 + 1,
            ts: 1_767_323_045_000 + 10 * i as i64,
            record: record(line.as_ref()),
        };
        lines.iter().enumerate().map(stamped).collect()
    }

    pub(crate) fn view(records: &[Numbered]) -> RunView {
        let mut view = RunView::default();
        records.iter().for_each(|record| view.apply(record));
        view
    }

    /// Any records in any order.
    pub(crate) fn anything() -> impl Strategy<Value = Vec<String>> {
        let what = prop::sample::select(vec![
            "start 3",
            "start 0",
            "start 0 delayed",
            "end-completed",
            "end-failed",
            "end-cancelled",
            "pause",
            "resume",
            "task",
            "group",
            "child",
            "started",
            "succeeded",
            "suspended",
            "erred",
            "retry",
            "defer",
            "webhook",
            "sleep",
            "sleep-forever",
            "opened",
            "late",
            "shut",
            "completed",
            "failed",
            "skipped",
            "cancelled",
            "progress",
            "emit",
            "log",
            "act",
        ]);
        let line =
            (what, prop::sample::select(&STEPS[..]), prop::option::of(0u32..4)).prop_map(|(what, key, number)| {
                let number = number.map(|number| number.to_string()).unwrap_or_default();
                if what.contains(' ') { what.to_owned() } else { format!("{what} {key} {number}") }
            });
        prop::collection::vec(line, 0..60)
    }

    /// Timelines as the machine writes them: each step advances one record at a time, and all end before the run.
    pub(crate) fn plausible() -> impl Strategy<Value = Vec<String>> {
        prop::collection::vec((0..STEPS.len(), 0u8..6), 0..80).prop_map(|choices| {
            let code = choices.len() % 3 == 0;
            let mut lines = vec![format!("start {}", if code { 0 } else { 3 })];
            let mut at = ["new"; STEPS.len()];
            let mut tries = [1; STEPS.len()];
            for (step, choice) in choices {
                let (key, driver) = (STEPS[step], STEPS[step] == DRIVER);
                if driver && !code {
                    continue;
                }
                let (line, next) = match (at[step], choice) {
                    ("new", 0) if !driver => ("completed", "over"),
                    ("new", 1) if !driver => ("skipped", "over"),
                    ("new", 2) if !driver && step == 0 => ("sleep-forever", "gate"),
                    ("new", 2) if !driver => ("sleep", "gate"),
                    ("new", 3) if !driver => ("group", "open"),
                    ("new", 4) if !driver => ("child", "open"),
                    ("new" | "backoff" | "opened" | "suspended", _) => ("task", "queued"),
                    ("gate", 0) => ("late", "opened"),
                    ("gate", _) => ("opened", "opened"),
                    ("open", 0) => ("failed", "over"),
                    ("open", _) => ("completed", "over"),
                    ("queued", 0) if !driver => ("cancelled", "over"),
                    ("queued", _) => ("started", "claimed"),
                    ("claimed", 0) => ("erred", "erred"),
                    ("claimed", 1) => ("defer", "backoff"),
                    ("claimed", 2) => ("task", "queued"),
                    ("claimed", 3) => ("log", "claimed"),
                    ("claimed", _) if driver => ("suspended", "suspended"),
                    ("claimed", 4) => ("emit", "claimed"),
                    ("claimed", _) => ("succeeded", "succeeded"),
                    ("erred", 0) if !driver => ("failed", "over"),
                    ("erred", _) => ("retry", "backoff"),
                    ("succeeded", _) => ("completed", "over"),
                    _ => continue,
                };
                let in_attempt = matches!(at[step], "claimed") || line == "started";
                let number = if in_attempt { tries[step].to_string() } else { String::new() };
                tries[step] += u32::from(line == "erred");
                at[step] = next;
                lines.push(format!("{line} {key} {number}"));
            }
            let open = STEPS.iter().zip(at).filter(|(key, at)| **key != DRIVER && !["new", "over"].contains(at));
            lines.extend(open.map(|(key, _)| format!("cancelled {key}")));
            lines.push("end-cancelled".into());
            lines
        })
    }

    /// Each line of a case is a record and, after `|`, the expected status of the run and of its steps.
    #[track_caller]
    fn check(case: &str) -> RunView {
        let lines: Vec<_> = case.lines().filter(|line| !line.trim().is_empty()).collect();
        let (told, expected): (Vec<_>, Vec<_>) = lines.iter().filter_map(|line| line.split_once('|')).unzip();
        let records = timeline(&told);
        let mut seen = RunView::default();
        for (record, (told, expected)) in records.iter().zip(told.iter().zip(expected)) {
            seen.apply(record);
            let steps = seen.steps.iter().map(|(key, step)| format!(" {key}:{}", step.status()));
            let found: String = [seen.status().to_owned()].into_iter().chain(steps).collect();
            assert_eq!(found, expected.trim(), "after {}", told.trim());
        }
        seen
    }

    fn attempts(view: &RunView, key: &str) -> String {
        let attempts = view.get(key).into_iter().flat_map(|step| &step.attempts);
        attempts.map(|attempt| format!("{} {}", attempt.number, attempt.status())).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn a_step_is_tried_again_until_it_completes() {
        let view = check(
            "start 1          | pending
             task pay         | running pay:running
             started pay 1    | running pay:running
             erred pay 1      | waiting pay:running
             retry pay        | waiting pay:waiting
             task pay         | running pay:running
             started pay 2    | running pay:running
             log pay 2        | running pay:running
             emit pay 2       | running pay:running
             emit pay 2       | running pay:running
             succeeded pay 2  | waiting pay:running
             completed pay    | waiting pay:completed
             end-completed    | completed pay:completed",
        );
        assert_eq!(attempts(&view, "pay"), "1 failed, 2 completed");
        assert_eq!((view.step_count(), view.completed_steps()), (1, 1));
        assert_eq!(view.emitted_events().collect::<Vec<_>>(), ["pay.done"]);
        assert_eq!(view.steps["pay"].logs.count, 1);
        assert!(view.output().is_some() && view.completed_at == view.last_event_at);
    }

    #[test]
    fn a_run_with_a_delay_is_pending_and_not_started() {
        let mut lines = vec!["start 1 delayed", "log pay"];
        assert_eq!((view(&timeline(&lines)).status(), view(&timeline(&lines)).started_at), ("pending", None));
        lines.push("pause");
        assert_eq!(view(&timeline(&lines)).status(), "paused");
        lines.push("task pay");
        assert_eq!(view(&timeline(&lines)).status(), "paused");
        assert_eq!(view(&timeline(&lines)).started_at, Some(1_767_323_045_030));
    }

    #[test]
    fn gates_children_and_back_offs_wait_while_containers_run() {
        let view = check(
            "start 3            | pending
             sleep a            | waiting a:waiting
             webhook b          | waiting a:waiting b:waiting
             opened a           | waiting a:running b:waiting
             completed a        | waiting a:completed b:waiting
             group g            | waiting a:completed b:waiting g:running
             child g.c          | waiting a:completed b:waiting g:running g.c:waiting
             failed g.c         | waiting a:completed b:waiting g:running g.c:failed
             completed g        | waiting a:completed b:waiting g:completed g.c:failed",
        );
        let open: Vec<_> = view.open_gates().map(|(key, gate)| (key, gate.reason)).collect();
        assert_eq!(open, [("b", crate::record::GateReason::Webhook)]);
        assert_eq!(view.completed_steps(), 2);
    }

    #[test]
    fn only_top_level_steps_of_a_graph_are_counted() {
        let lines: Vec<_> = STEPS.iter().filter(|key| **key != DRIVER).map(|key| format!("completed {key}")).collect();
        let view = view(&timeline(&[vec!["start 2".to_owned()], lines].concat()));
        assert_eq!((view.step_count(), view.completed_steps()), (2, 2));
    }

    #[test]
    fn the_function_of_a_code_run_is_no_step_and_keeps_its_attempt_when_it_resumes() {
        let view = check(
            "start 0           | pending
             task @run         | running
             started @run 1    | running
             succeeded a 1     | running a:running
             completed a       | running a:completed
             erred b 1         | running a:completed b:running
             retry b           | running a:completed b:waiting
             erred b 2         | running a:completed b:running
             failed b          | running a:completed b:failed
             suspended @run 1  | waiting a:completed b:failed
             task @run         | running a:completed b:failed
             started @run 1    | running a:completed b:failed
             erred @run 1      | waiting a:completed b:failed
             retry @run        | waiting a:completed b:failed
             task @run         | running a:completed b:failed
             started @run 2    | running a:completed b:failed
             succeeded b 1     | running a:completed b:running
             completed b       | running a:completed b:completed
             end-cancelled     | cancelled a:completed b:completed",
        );
        assert_eq!(attempts(&view, DRIVER), "1 failed, 2 cancelled");
        assert_eq!(attempts(&view, "b"), "1 failed, 2 failed, 1 completed");
        assert_eq!((view.step_count(), view.completed_steps(), view.tasks_open()), (2, 2, 0));
    }

    #[test]
    fn what_is_given_back_costs_no_attempt() {
        let mut lines = vec!["start 1", "task pay", "started pay 1", "defer pay 1"];
        assert_eq!(attempts(&view(&timeline(&lines)), "pay"), "1 deferred");
        lines.extend(["task pay", "started pay 1", "task pay"]);
        assert_eq!(attempts(&view(&timeline(&lines)), "pay"), "1 released");
        assert_eq!(view(&timeline(&lines)).tasks_open(), 1);
        lines.extend(["erred pay 1"]);
        assert_eq!(attempts(&view(&timeline(&lines)), "pay"), "1 failed");
    }

    /// The keys whose last relevant record satisfies `holds`, found by scanning all records.
    fn keys(records: &[Numbered], holds: impl Fn(&Entry) -> Option<bool>) -> BTreeSet<&str> {
        let mut keys = BTreeSet::new();
        for entry in records.iter().map(|numbered| &numbered.record.entry) {
            match (entry.step_key(), holds(entry)) {
                (Some(key), Some(true)) => _ = keys.insert(key),
                (Some(key), Some(false)) => _ = keys.remove(key),
                (None, _) if entry.is_terminal() => _ = keys.remove(DRIVER),
                _ => {}
            }
        }
        keys
    }

    fn has_task(entry: &Entry) -> Option<bool> {
        use Entry::*;
        match entry {
            StepScheduled { work, .. } => matches!(work, Scheduled::Task { .. }).then_some(true),
            AttemptStarted { .. } => Some(true),
            AttemptCompleted { .. } | AttemptFailed { .. } | RetryScheduled { .. } => Some(false),
            StepCompleted { .. } | StepFailed { .. } | StepSkipped { .. } | StepCancelled { .. } => Some(false),
            _ => None,
        }
    }

    fn has_gate(entry: &Entry) -> Option<bool> {
        use Entry::*;
        match entry {
            AwaitScheduled { .. } => Some(true),
            AwaitTriggered { .. } | AwaitTimeout { .. } | AwaitCancelled { .. } => Some(false),
            StepCompleted { .. } | StepFailed { .. } | StepSkipped { .. } | StepCancelled { .. } => Some(false),
            _ => None,
        }
    }

    proptest! {
        #[test]
        fn what_is_open_is_what_a_look_at_the_whole_timeline_finds(lines in plausible()) {
            let records = timeline(&lines);
            for end in 1..=records.len() {
                let (seen, told) = (view(&records[..end]), &records[..end]);
                prop_assert_eq!(seen.tasks_open(), keys(told, has_task).len());
                let gates: BTreeSet<_> = seen.open_gates().map(|(key, _)| key).collect();
                prop_assert_eq!(gates, keys(told, has_gate));
            }
            let end = view(&records);
            prop_assert_eq!((end.tasks_open(), end.open_gates().count(), end.status()), (0, 0, "cancelled"));
        }

        #[test]
        fn counters_agree_with_the_steps_whatever_the_records(lines in anything()) {
            let seen = view(&timeline(&lines));
            let all = || seen.steps.iter().chain(seen.driver.iter().map(|driver| (&seen.flow, driver)));
            prop_assert_eq!(seen.tasks_open, all().filter(|(_, step)| step.phase.has_task()).count());
            prop_assert_eq!(seen.open_gates().count(), all().filter(|(_, step)| step.gate().is_some()).count());
            let completed = seen.steps.iter().filter(|(_, step)| step.phase.is_completed());
            let top = completed.clone().filter(|(key, _)| ["pay", "each"].contains(&key.as_str()));
            prop_assert_eq!((seen.completed, seen.completed_top), (completed.count() as u32, top.count() as u32));
        }
    }
}
