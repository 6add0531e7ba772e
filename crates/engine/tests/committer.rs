//! The committer answers each request on its own: other inputs, an outdated cache or a slow run do not affect the
//! answer. Failures inside the engine are reported.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use eddyline_engine::{Assignment, ClaimTasks, Config, EngineError, Health, Reported, StartRequest, TaskReport};
use eddyline_machine::run::Place;
use eddyline_machine::{ActId, Answer, Input, Message, MessageBody, Op, Report, RunId, TaskRef};
use eddyline_store::{Command, CommandId, DocumentCommit, Due, Found, ManualClock, Memory, Namespace, Store};
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done};
use serde_json::json;
use uuid::Uuid;

fn report(task: &Assignment, op: Op) -> TaskReport {
    TaskReport { token: task.token, seq: None, op }
}

fn answers(reported: Vec<Reported>) -> Vec<Answer> {
    let answer = |reported| match reported {
        Reported::Answer { answer, .. } => answer,
        other => panic!("{other:?}"),
    };
    reported.into_iter().map(answer).collect()
}

/// A store that damages activation 2 of every loaded run: its parent does not exist, so it cannot be decided.
fn damaged(inner: Arc<dyn Store>) -> Hooked {
    let tampering = |found: &mut Found| {
        if let Found::Run(loaded) = found
            && let Some(activation) = loaded.rows.activations.get_mut(2)
        {
            activation.place = Place::Item { of: ActId(999), index: 0 };
        }
    };
    Hooked { tampering: Some(Box::new(tampering)), ..Hooked::new(inner) }
}

/// A run of three claimed steps in a store without an engine. The second step cannot be decided.
async fn three_claimed(store: &Arc<dyn Store>) -> (RunId, Vec<Assignment>) {
    let rig = Rig::on(store.clone(), Config::default());
    rig.register("name: f\nsteps: {a: {}, b: {}, c: {}}").await;
    let run = rig.start("f", json!(null)).await;
    let mut tasks = Vec::new();
    for _ in 0..3 {
        tasks.push(rig.claim("w").await.unwrap());
    }
    rig.stop().await;
    assert_eq!((tasks[1].activation.as_str(), tasks[1].token.activation), ("b", ActId(2)));
    (run, tasks)
}

#[tokio::test]
async fn reports_beside_one_that_cannot_be_decided_on_are_applied() {
    let memory: Arc<dyn Store> = Arc::new(Memory::new());
    let (_, tasks) = three_claimed(&memory).await;
    let rig = Rig::on(Arc::new(damaged(memory)), Config::default());
    // The culprit comes first, in the middle and last.
    for order in [[1, 0], [1, 2]] {
        let reports = order.map(|at| report(&tasks[at], done(json!(at)))).to_vec();
        let answers = answers(rig.engine.report(&rig.ns, reports).await.unwrap());
        assert!(matches!(&answers[0], Answer::Invalid(why) if why.contains("panicked")), "{answers:?}");
        assert!(matches!(answers[1], Answer::Applied(_)), "{answers:?}");
    }
    assert_eq!(rig.engine.health(), Health::Working, "it affects one run only");
    rig.stop().await;
}

#[tokio::test]
async fn what_a_task_said_before_a_report_that_cannot_be_decided_on_stands() {
    let memory: Arc<dyn Store> = Arc::new(Memory::new());
    let (_, tasks) = three_claimed(&memory).await;
    let rig = Rig::on(Arc::new(damaged(memory)), Config::default());
    let many = (0..9).map(|at| report(&tasks[at % 3], Op::Progress { done: Some(at.into()), total: None, msg: None }));
    let reported = rig.engine.report(&rig.ns, many.collect()).await.unwrap();
    let applied = |at: usize| matches!(&reported[at], Reported::Answer { answer: Answer::Applied(_), .. });
    for at in [0, 2, 3, 5, 6, 8] {
        assert!(applied(at), "{at}: {reported:?}");
    }
    assert!(matches!(&reported[1], Reported::Answer { answer: Answer::Invalid(_), .. }), "{reported:?}");
    assert_eq!([&reported[4], &reported[7]], [&Reported::NotTried; 2]);
    rig.stop().await;
}

#[tokio::test]
async fn messages_beside_one_that_cannot_be_decided_on_keep_their_order() {
    let memory: Arc<dyn Store> = Arc::new(Memory::new());
    let (run, tasks) = three_claimed(&memory).await;
    let by = || "somebody".to_owned();
    let task = TaskRef { activation: ActId(2), fence: tasks[1].token.fence };
    let bad = Input::Report(Report { task, seq: None, op: done(json!(1)), claim: Default::default() });
    let inputs = [Input::Pause { by: by() }, bad, Input::Resume { by: by() }, Input::Pause { by: by() }];
    let message = |(n, input): (usize, Input)| {
        let body = MessageBody::Input(Box::new(input));
        Message { to: run, id: format!("m{n}"), body }
    };
    let commit = DocumentCommit {
        ns: Namespace::default(),
        command: CommandId(Uuid::from_u128(1)),
        documents: Vec::new(),
        messages: inputs.into_iter().enumerate().map(message).collect(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    memory.commit(vec![Command::Documents(commit)], Vec::new()).await.unwrap();
    let rig = Rig::on(Arc::new(damaged(memory.clone())), Config::default());
    let mut left = Vec::new();
    let only_one_is_left = async {
        while left.len() != 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            left = memory.pending(run).await.unwrap().messages;
        }
    };
    let waited = tokio::time::timeout(LONG / 10, only_one_is_left).await;
    assert!(waited.is_ok(), "{left:?}\n{}", rig.timeline_text(run).await);
    assert_eq!(left[0].id, "m1", "only the failing message is left, to be retried");
    let kinds = rig.kinds(run).await;
    let told: Vec<_> = kinds.iter().filter(|kind| kind.starts_with("flow.") && *kind != "flow.start").collect();
    assert_eq!(told, ["flow.paused", "flow.resumed", "flow.paused"]);
    rig.stop().await;
}

#[tokio::test]
async fn a_request_is_not_answered_from_a_load_that_began_before_it_came() {
    let memory: Arc<dyn Store> = Arc::new(Memory::new());
    let other = Rig::on(memory.clone(), Config::default());
    other.register("name: f\nsteps: {a: {}, b: {after: [a]}}").await;
    other.start("f", json!(null)).await;
    let a = other.claim("w").await.unwrap();
    let store = Arc::new(Hooked::new(memory));
    let rig = Rig::on(store.clone(), Config::default());
    // The first round of the reconciler, which loads runs too, is over.
    rig.engine.rounds("reconciler").unwrap().wait_for(|rounds| *rounds > 0).await.unwrap();
    let (other, engine) = (Arc::new(other), rig.engine.clone());
    let (send, late) = tokio::sync::oneshot::channel();
    let (elsewhere, first) = (other.clone(), report(&a, done(json!(1))));
    // After the load has read the run, another instance changes it, and a report on its new state arrives.
    *store.after_load.lock().unwrap() = Some(Box::pin(async move {
        elsewhere.engine.report(&elsewhere.ns, vec![first]).await.unwrap();
        let b = elsewhere.claim("w").await.unwrap();
        assert_eq!(b.activation, "b");
        let reporting = tokio::spawn(async move {
            answers(engine.report(&Namespace::default(), vec![report(&b, done(json!(2)))]).await.unwrap())
        });
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(!reporting.is_finished());
        let _ = send.send(reporting);
    }));
    // The first request has no effect, so no commit reveals that the run has changed.
    let early = rig.engine.resume(&rig.ns, a.run, "somebody").await;
    assert!(early.is_ok(), "{early:?}");
    let late = late.await.unwrap().await.unwrap();
    assert!(matches!(late[0], Answer::Applied(_)), "{late:?}");
    rig.stop().await;
    other.engine.shutdown().await;
}

/// An instance where one run can't be loaded, although its timer and its lease are due.
async fn one_is_stuck(memory: Arc<dyn Store>) -> (Rig, Arc<Hooked>, RunId) {
    let config = || Config { poll_ms: 5, ..Config::default() };
    let before = Rig::on(memory.clone(), config());
    before.register("name: f\nsteps: {nap: {await: {time: 1m}}, a: {}}").await;
    let stuck = before.start("f", json!(null)).await;
    assert_eq!(claim_briefly(&before).await, stuck);
    before.stop().await;
    let store = Arc::new(Hooked::new(memory));
    store.stuck.send_replace(Some(stuck));
    (Rig::on(store.clone(), config()), store, stuck)
}

/// A worker claims a task and goes silent.
async fn claim_briefly(rig: &Rig) -> RunId {
    let claim = ClaimTasks { lease_ms: Some(50), ..claim("gone") };
    rig.engine.claim(&rig.ns, claim, LONG).await.unwrap().remove(0).run
}

async fn until_recorded(rig: &Rig, run: RunId, kind: &str) {
    while !rig.kinds(run).await.iter().any(|recorded| recorded == kind) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn no_timer_waits_for_a_run_that_takes_long() {
    let clock = ManualClock::at(1_767_323_045_678);
    let (rig, store, stuck) = one_is_stuck(Arc::new(Memory::with_clock(clock.clone()))).await;
    clock.advance(60_000);
    for _ in 0..3 {
        let quick = rig.start("f", json!(null)).await;
        let mut rounds = rig.engine.rounds("timers").unwrap();
        let now = *rounds.borrow();
        rounds.wait_for(|rounds| *rounds >= now + 2).await.unwrap();
        clock.advance(60_000);
        tokio::time::timeout(LONG, until_recorded(&rig, quick, "step.completed nap")).await.unwrap();
    }
    assert!(!rig.kinds(stuck).await.contains(&"step.completed nap".to_owned()));
    store.stuck.send_replace(None);
    tokio::time::timeout(LONG, until_recorded(&rig, stuck, "step.completed nap")).await.unwrap();
    rig.stop().await;
}

#[tokio::test]
async fn no_lease_waits_for_a_run_that_takes_long() {
    let (rig, store, stuck) = one_is_stuck(Arc::new(Memory::new())).await;
    for _ in 0..3 {
        let quick = rig.start("f", json!(null)).await;
        assert_eq!(claim_briefly(&rig).await, quick);
        tokio::time::timeout(LONG, until_recorded(&rig, quick, "step.attempt.failed a")).await.unwrap();
    }
    assert!(!rig.kinds(stuck).await.contains(&"step.attempt.failed a".to_owned()));
    store.stuck.send_replace(None);
    tokio::time::timeout(LONG, until_recorded(&rig, stuck, "step.attempt.failed a")).await.unwrap();
    rig.stop().await;
}

#[tokio::test]
async fn a_loop_that_panics_now_and_then_is_started_again() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let on_due = move |what| {
        let first = what == Due::Timers && count.fetch_add(1, Ordering::SeqCst) < 2;
        assert!(!first, "a panic in a loop, on purpose");
    };
    let store = Hooked { on_due: Box::new(on_due), ..Hooked::new(Arc::new(Memory::new())) };
    let rig = Rig::on(Arc::new(store), Config::default());
    rig.register("name: f\nsteps: {nap: {await: {time: 1ms}}}").await;
    let run = rig.start("f", json!(null)).await;
    rig.output(run).await;
    assert!(asked.load(Ordering::SeqCst) > 2);
    assert_eq!(rig.engine.health(), Health::Working);
    rig.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_whose_loop_panics_again_and_again_says_that_it_has_failed() {
    let on_due = |what| assert_ne!(what, Due::Timers, "a panic in a loop, on purpose");
    let store = Hooked { on_due: Box::new(on_due), ..Hooked::new(Arc::new(Memory::new())) };
    let rig = Rig::on(Arc::new(store), Config::default());
    let why = tokio::time::timeout(LONG, rig.engine.failed()).await.unwrap();
    assert!(why.contains("the loop timers panicked 5 times in a row"), "{why}");
    assert_eq!(rig.engine.health(), Health::Failed(why));
    rig.stop().await;
}

#[tokio::test]
async fn an_engine_whose_committer_panics_says_that_it_has_failed() {
    // The first commit creates the secret for task tokens.
    let fate = |n| if n == 0 { None } else { panic!("commit {n}, on purpose") };
    let store = Hooked { fate: Box::new(fate), ..Hooked::new(Arc::new(Memory::new())) };
    let rig = Rig::on(Arc::new(store), Config::default());
    let plain = Rig::memory();
    plain.register("name: f\nsteps: {a: {}}").await;
    let claimed = rig.engine.claim(&rig.ns, claim("w"), LONG).await;
    assert!(matches!(claimed, Err(EngineError::Stopped)), "{claimed:?}");
    let why = tokio::time::timeout(LONG, rig.engine.failed()).await.unwrap();
    assert!(why.contains("committer") && why.contains("on purpose"), "{why}");
    let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
    assert!(rig.engine.start_run(&rig.ns, request).await.is_err());
    rig.stop().await;
    plain.stop().await;
}

#[tokio::test]
async fn while_commits_fail_the_engine_says_so_until_one_succeeds() {
    let failing = Arc::new(AtomicUsize::new(0));
    let fails = failing.clone();
    let fate = move |_| (fails.load(Ordering::SeqCst) > 0).then_some(rig::hooked::Fault::Unavailable);
    let store = Hooked { fate: Box::new(fate), ..Hooked::new(Arc::new(Memory::new())) };
    let rig = Rig::on(Arc::new(store), Config { poll_ms: 5, ..Config::default() });
    rig.register("name: f\nsteps: {a: {}}").await;
    assert_eq!(rig.engine.health(), Health::Working);
    failing.store(1, Ordering::SeqCst);
    let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
    assert!(rig.engine.start_run(&rig.ns, request).await.is_err());
    assert!(matches!(rig.engine.health(), Health::NotCommitting(why) if why.contains("injected fault")));
    failing.store(0, Ordering::SeqCst);
    // The engine recovers without a request for a commit.
    while rig.engine.health() != Health::Working {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    rig.stop().await;
}
