//! The runs behind the examples of docs/timeline.md: the page contains their flows, this file their inputs. Together
//! they produce every kind of record, with every field it can have.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use eddyline_machine::project::Projector;
use eddyline_machine::wire::{WireContext, projection_to_wire, to_wire};
use eddyline_machine::*;
use serde_json::{Value, json};

use crate::model::{Kept, Model, Trial};
use crate::page::TIMELINE;

/// All wire records of every run of every story: the timelines and their projections.
pub fn told() -> Vec<Value> {
    let models = [order(), hold(), audit(), job(), later()];
    models.iter().flat_map(|model| model.runs.values().flat_map(|kept| on_the_wire(model, kept))).collect()
}

fn on_the_wire(model: &Model, kept: &Kept) -> Vec<Value> {
    let run = kept.run.header.run;
    let queue = match &kept.flow.body {
        Body::Code(code) => Some(code.queue.as_str()),
        Body::Graph(_) => None,
    };
    let started_at = kept.records.first().map_or(0, |first| first.ts);
    let ctx = WireContext { run, flow_name: &kept.flow.name, queue, tags: &kept.run.header.tags, started_at };
    let mut projector = Projector::new(run);
    let mut told = Vec::new();
    for record in &kept.records {
        let wire = to_wire(&ctx, record, &|data| Some(model.json(run, data)));
        assert_eq!(wire["kind"], kind(&record.record.entry));
        told.push(wire);
        let projections = projector.apply(record);
        told.extend(projections.iter().map(|projection| projection_to_wire(&ctx, record, projection)));
    }
    told
}

/// Every kind of record, so that adding one is a reminder to update the page.
fn kind(entry: &Entry) -> &'static str {
    match entry {
        Entry::FlowStart { .. } => "flow.start",
        Entry::FlowCompleted { .. } => "flow.completed",
        Entry::FlowFailed { .. } => "flow.failed",
        Entry::FlowCancelled { .. } => "flow.cancelled",
        Entry::FlowPaused {} => "flow.paused",
        Entry::FlowResumed {} => "flow.resumed",
        Entry::StepScheduled { .. } => "step.scheduled",
        Entry::StepCompleted { .. } => "step.completed",
        Entry::StepFailed { .. } => "step.failed",
        Entry::StepSkipped { .. } => "step.skipped",
        Entry::StepCancelled { .. } => "step.cancelled",
        Entry::StepProgress { .. } => "step.progress",
        Entry::AttemptStarted { .. } => "step.attempt.started",
        Entry::AttemptCompleted { .. } => "step.attempt.completed",
        Entry::AttemptFailed { .. } => "step.attempt.failed",
        Entry::RetryScheduled { .. } => "step.retry.scheduled",
        Entry::AwaitScheduled { .. } => "step.await.scheduled",
        Entry::AwaitTriggered { .. } => "step.await.triggered",
        Entry::AwaitTimeout { .. } => "step.await.timeout",
        Entry::AwaitCancelled { .. } => "step.await.cancelled",
        Entry::Emit { .. } => "emit",
        Entry::Log { .. } => "runner.log",
        Entry::Act { .. } => "act",
    }
}

/// The flows of these names, from the page.
fn flows(names: &[&str]) -> Vec<String> {
    let blocks = TIMELINE.blocks();
    let find = |name: &&str| {
        let first = format!("name: {name}\n");
        blocks.iter().find(|block| block.text.starts_with(&first)).unwrap_or_else(|| panic!("no flow {name}"))
    };
    names.iter().map(|name| find(name).text.clone()).collect()
}

fn begin(names: &[&str], start: Start) -> Trial {
    let flows = flows(names);
    let flows: Vec<&str> = flows.iter().map(String::as_str).collect();
    Trial::starting(&flows, start)
}

fn input(input: Value) -> Start {
    Start { input: Some(input.into()), ..Start::default() }
}

fn done(output: Value) -> Op {
    Op::Complete { output: output.into(), emits: Vec::new(), logs: Vec::new() }
}

/// A successful order: a retry, an event, a branch not taken, a gate, a child.
fn order() -> Model {
    let tags = vec!["web".to_owned()];
    let mut t = begin(&["order", "shipping"], Start { tags, ..input(json!({"order": 7, "express": false})) });
    let (run, task) = t.claim("reserve");
    let meta = Some(json!({"shelf": 12}).into());
    t.say(run, &task, Op::Log(Log { level: "info".into(), msg: "looking for it".into(), meta }));
    t.say(run, &task, Op::Progress { done: Some(1.into()), total: Some(3.into()), msg: Some("first shelf".into()) });
    t.model.now += 250;
    let mut error = Failure::new("Busy", "the warehouse did not answer");
    error.stack = Some("at reserve (warehouse.ts:12)".into());
    t.say(run, &task, Op::Fail { error, retryable: true, retry_after_ms: None });
    t.tick();
    let (run, task) = t.claim("reserve");
    t.say(run, &task, Op::Emit { event: "reserved".into(), payload: json!({"shelf": 12}).into() });
    let emits = vec![("reserved".to_owned(), json!({"shelf": 13}).into())];
    t.say(run, &task, Op::Complete { output: json!({"items": 2}).into(), emits, logs: Vec::new() });
    t.send(Input::Pause { by: "ann".into() });
    t.send(Input::Resume { by: "ann".into() });
    t.open_gate("confirm", json!({"by": "bob"}));
    t.complete("pack", json!("box 4"));
    t.complete("label", json!("DE-1234"));
    assert_eq!(t.status(), "completed");
    t.model
}

/// A run that is cancelled while it waits, and undone.
fn hold() -> Model {
    let mut t = begin(&["hold"], input(json!({"room": 3})));
    t.complete("book", json!({"booking": 41}));
    t.send(Input::Cancel { by: "ann".into(), reason: Some("the guest called".into()) });
    t.fail("undo:book", "the hotel does not know booking 41");
    assert_eq!(t.status(), "cancelled");
    t.model
}

/// A run with items and rounds that fails at a gate, and is rerun.
fn audit() -> Model {
    let mut t = begin(&["audit"], input(json!({"files": ["a", "b"], "deep": false})));
    t.complete("scan[1]", json!("clean"));
    t.complete("scan[0]", json!("clean"));
    t.fail("print.page", "out of paper");
    t.complete("settle[0].check", json!(true));
    t.tick();
    assert_eq!(t.status(), "failed");
    let start = t.model.again(t.run, decide::rerun(&t.kept().flow, &t.kept().run, "print").unwrap());
    let again = Some(Again::Rerun { by: "ann".into(), from: Some("print".into()) });
    t.run = t.model.start("audit", Start { input: input(json!({"files": ["a", "b"]})).input, again, ..start });
    t.model.deliver_all();
    t.complete("print.page", json!("page 1"));
    t.act("signed", StepAct::Skip);
    assert_eq!(t.status(), "completed");
    t.model
}

/// A code run: a step, a sleep, and a run that continues it.
fn job() -> Model {
    let mut t = begin(&["job"], input(json!({"page": 1})));
    let (run, driver) = t.claim("@run");
    let step = CodeOp::Done { output: json!("paid").into(), undo: false };
    t.say(run, &driver, Op::Code { name: "pay".into(), op: step });
    t.say(run, &driver, Op::Code { name: "nap".into(), op: CodeOp::Sleep { due: Due::After(5_000) } });
    t.say(run, &driver, Op::Suspend { seen: None });
    t.tick();
    let (run, driver) = t.claim("@run");
    t.say(run, &driver, Op::ContinueAs { input: json!({"page": 2}).into() });
    let (run, driver) = t.claim("@run");
    t.say(run, &driver, done(json!("all pages")));
    t.model
}

/// A run that has not begun.
fn later() -> Model {
    let unique = Some(Unique { key: "order 8".into(), on_conflict: OnConflict::Queue });
    let start = Start { delay_ms: Some(60_000), unique, in_line: true, ..input(json!({"order": 8})) };
    begin(&["shipping"], start).model
}
