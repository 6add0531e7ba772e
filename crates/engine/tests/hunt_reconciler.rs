//! The reconciler logs and resumes stuck runs, and leaves healthy ones alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use eddyline_engine::{Config, Engine, TaskReport};
use eddyline_machine::{Answer, CodeOp, Env, Input, Op, Run, RunId, TaskChange, TimerChange, Transition, decide};
use eddyline_store::{Command, CommandId, Found, ManualClock, Memory, RunCommit};
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done, failed};
use serde_json::json;
use uuid::Uuid;

fn config() -> Config {
    Config { reconcile_ms: 10, ..Config::default() }
}

/// The errors that this thread logged.
#[derive(Clone, Default)]
struct Said(Arc<Mutex<String>>);

impl tracing::Subscriber for Said {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut said = self.0.lock().unwrap();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            said.push_str(&format!("{field}={value:?} "));
        });
        said.push('\n');
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

impl Said {
    fn of(&self, run: RunId) -> bool {
        let said = self.0.lock().unwrap();
        said.lines().any(|line| line.contains(&run.to_string()) && line.contains("the run is stuck; resuming it"))
    }
}

/// Deletes a run's pending work without the run noticing.
async fn lose(engine: &Engine, run: RunId, take: impl FnOnce(&mut Transition)) {
    let Found::Run(loaded) = engine.store().load(run, None).await.unwrap() else { panic!("no run") };
    let flow = engine.flow(&loaded.summary.ns, &loaded.rows.header.flow, None).await.unwrap();
    let rows = Run::load(loaded.rows, &flow.flow);
    let env = Env::new(engine.store().now().await.unwrap(), [1; 32], "");
    let mut transition = decide(&flow.flow, &rows, &env, &[Input::Continue]).unwrap();
    transition.header.version.0 += 1;
    take(&mut transition);
    let commit = RunCommit {
        ns: loaded.summary.ns.clone(),
        command: CommandId(Uuid::from_u128(1)),
        transition: Arc::new(transition),
        messages: Vec::new(),
        events: Vec::new(),
        takes: Vec::new(),
        key: None,
        tells_line: None,
    };
    engine.store().commit(vec![Command::Run(commit)], Vec::new()).await.unwrap().commands.remove(0).unwrap();
}

#[tokio::test]
async fn a_task_that_is_gone_is_made_again_and_that_is_said() {
    let said = Said::default();
    let _listening = tracing::subscriber::set_default(said.clone());
    let rig = Rig::on(Arc::new(Memory::new()), config());
    rig.register("name: f\nsteps: {a: {}}").await;
    let (run, healthy) = (rig.start("f", json!(null)).await, rig.start("f", json!(null)).await);
    let fence = rig.engine.store().pending(run).await.unwrap().tasks[0].task.fence;
    lose(&rig.engine, run, |transition| transition.tasks.push(TaskChange::Remove(fence))).await;
    let tasks = [rig.claim("w").await.unwrap(), rig.claim("w").await.unwrap()];
    let again = tasks.iter().find(|task| task.run == run).expect("its task is queued again");
    assert!(again.token.fence > fence && again.attempt == 1, "it cost no attempt: {:?}", again.token);
    for task in &tasks {
        assert!(matches!(rig.report(task, done(json!(1))).await, Answer::Applied(_)));
    }
    rig.output(run).await;
    assert!(said.of(run), "the run was not logged as stuck: {said:?}", said = said.0.lock().unwrap());
    assert!(!said.of(healthy));
    rig.stop().await;
}

/// A manual clock, and loops that poll often.
fn on_manual_clock() -> (Rig, Arc<ManualClock>) {
    let clock = ManualClock::at(1_767_323_045_678);
    let config = Config { poll_ms: 5, ..config() };
    (Rig::on(Arc::new(Memory::with_clock(clock.clone())), config), clock)
}

/// A timer is lost, detected as lost, and set again for its original time.
async fn lost_and_set_again(rig: &Rig, run: RunId, said: &Said) {
    let before = rig.engine.store().pending(run).await.unwrap().timers;
    let timer = before[0];
    lose(&rig.engine, run, |transition| transition.timers.push(TimerChange::Clear(timer.key))).await;
    let mut rounds = rig.engine.rounds("reconciler").unwrap();
    tokio::time::timeout(LONG, rounds.wait_for(|_| said.of(run))).await.expect("the run is not logged").unwrap();
    let set_again = async {
        loop {
            let timers = rig.engine.store().pending(run).await.unwrap().timers;
            if !timers.is_empty() {
                return timers;
            }
            rounds.changed().await.unwrap();
        }
    };
    let timers = tokio::time::timeout(LONG, set_again).await.expect("it is not set again");
    assert_eq!(timers, before);
}

#[tokio::test]
async fn a_back_off_whose_timer_is_gone_ends_at_its_own_time_and_that_is_said() {
    let said = Said::default();
    let _listening = tracing::subscriber::set_default(said.clone());
    let (rig, clock) = on_manual_clock();
    rig.register("name: f\nsteps: {a: {retry: {attempts: 3, initial: 1h, max: 1h}}}").await;
    let run = rig.start("f", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    assert!(matches!(rig.report(&task, failed("once")).await, Answer::Applied(_)));
    clock.advance(60_000);
    lost_and_set_again(&rig, run, &said).await;
    clock.advance(3_600_000);
    let task = rig.claim("w").await.expect("the back-off never ends");
    assert_eq!(task.attempt, 2);
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(run).await;
    rig.stop().await;
}

#[tokio::test]
async fn a_gate_whose_timer_is_gone_opens_at_its_own_time_and_that_is_said() {
    let said = Said::default();
    let _listening = tracing::subscriber::set_default(said.clone());
    for gate in
        ["{time: 1h}", "{until: '\"2026-01-02T04:04:05Z\"'}", "{manual: true, timeout: 1h, on_timeout: continue}"]
    {
        let (rig, clock) = on_manual_clock();
        rig.register(&format!("name: f\nsteps: {{g: {{await: {gate}}}}}")).await;
        let run = rig.start("f", json!(null)).await;
        clock.advance(60_000);
        lost_and_set_again(&rig, run, &said).await;
        clock.advance(3_600_000);
        rig.output(run).await;
        rig.stop().await;
    }
}

#[tokio::test]
async fn a_code_step_whose_timer_is_gone_is_tried_again_at_its_own_time_and_that_is_said() {
    let said = Said::default();
    let _listening = tracing::subscriber::set_default(said.clone());
    let (rig, clock) = on_manual_clock();
    rig.register("name: f\ncode: true\nstep_retry: {attempts: 3, initial: 1h, max: 1h}").await;
    let run = rig.start("f", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let error = eddyline_machine::Failure::new("Boom", "once");
    let op = CodeOp::Failed { error, retryable: true, retry_after_ms: None, retry: None };
    assert!(matches!(rig.report(&task, Op::Code { name: "pay".to_owned(), op }).await, Answer::Applied(_)));
    assert!(matches!(rig.report(&task, Op::Suspend { seen: None }).await, Answer::Applied(_)));
    clock.advance(60_000);
    lost_and_set_again(&rig, run, &said).await;
    clock.advance(3_600_000);
    let task = rig.claim("w").await.expect("the back-off never ends");
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(run).await;
    rig.stop().await;
}

/// A step completes and the next one is queued between the two reads of the reconciler.
#[tokio::test]
async fn a_run_that_moves_while_it_is_looked_at_is_left_alone() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let said = Said::default();
    let _listening = tracing::subscriber::set_default(said.clone());
    let rig = Rig::on(store.clone(), config());
    rig.register("name: f\nsteps: {a: {}, b: {after: [a]}}").await;
    let run = rig.start("f", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let (moved, mut has_moved) = tokio::sync::watch::channel(false);
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    *store.after_pending.lock().unwrap() = Some(Box::pin(async move {
        let report = TaskReport { token: task.token, seq: None, op: done(json!(1)) };
        engine.report(&ns, vec![report]).await.unwrap();
        moved.send_replace(true);
    }));
    tokio::time::timeout(LONG, has_moved.wait_for(|moved| *moved)).await.unwrap().unwrap();
    let next = rig.engine.claim(&rig.ns, claim("w"), LONG).await.unwrap().pop().unwrap();
    let mut rounds = rig.engine.rounds("reconciler").unwrap();
    let now = *rounds.borrow();
    rounds.wait_for(|rounds| *rounds >= now + 8).await.unwrap();
    assert!(matches!(rig.report(&next, done(json!(2))).await, Answer::Applied(_)), "its task was released");
    rig.output(run).await;
    assert!(!said.of(run));
    assert!(rig.engine.result(&rig.ns, run, Duration::ZERO).await.unwrap().is_some());
    rig.stop().await;
}
