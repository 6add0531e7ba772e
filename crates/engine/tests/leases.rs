//! The cost of heartbeats and news depends on the worker's tasks, not on the size of their runs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use eddyline_engine::{ClaimTasks, Config, Holding, MemoAt, TaskId};
use eddyline_machine::{Answer, CodeOp, Data, Fence, Op};
use eddyline_store::{Memory, Store};
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done};
use serde_json::json;

fn hooked() -> (Arc<Hooked>, Rig) {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    (store.clone(), Rig::on(store, Config::default()))
}

/// How often a run was read, including its summary.
fn reads(store: &Hooked) -> usize {
    store.reads.load(Ordering::SeqCst) + store.summaries.load(Ordering::SeqCst)
}

#[tokio::test]
async fn a_heartbeat_and_a_look_at_leases_read_no_run() {
    let (store, rig) = hooked();
    rig.register("name: f\nsteps: {each: {spread: input, run: a}}").await;
    rig.start("f", json!((0..100).collect::<Vec<_>>())).await;
    let mut held = Vec::new();
    while held.len() < 100 {
        let ask = ClaimTasks { max: 100, ..claim("w") };
        let tasks = rig.engine.claim(&rig.ns, ask, LONG).await.unwrap();
        held.extend(tasks.iter().map(|task| TaskId { run: task.run, fence: task.token.fence }));
    }
    let before = reads(&store);
    let all_held = vec![Holding::Held { memo: None }; 100];
    assert_eq!(rig.engine.beat(&rig.ns, "w", &held).await.unwrap(), all_held);
    assert_eq!(rig.engine.standing(&rig.ns, "w", &held).await.unwrap(), all_held);
    assert_eq!(reads(&store), before);
    assert_eq!(rig.engine.standing(&rig.ns, "thief", &held[..1]).await.unwrap(), [Holding::Lost]);
    rig.stop().await;
}

#[tokio::test]
async fn a_memo_is_looked_through_only_if_there_is_news() {
    let (store, rig) = hooked();
    rig.register(r#"{"name": "job", "code": true, "step_retry": {"attempts": 3, "initial": "1h"}}"#).await;
    rig.start("job", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let id = TaskId { run: task.run, fence: task.token.fence };
    let step = |n: u64, op| Op::Code { name: format!("s{n}"), op };
    for n in 1..=20 {
        let answer = rig.report(&task, step(n, CodeOp::Done { output: Data::from(json!(n)), undo: false })).await;
        assert!(matches!(answer, Answer::Applied(_)), "{answer:?}");
    }
    let held = Holding::Held { memo: Some(MemoAt { handed_over: 0, newest: 20 }) };
    assert_eq!(rig.engine.standing(&rig.ns, "w", &[id]).await.unwrap(), [held]);
    let before = store.reads.load(Ordering::SeqCst);
    let news = rig.engine.news_of(&rig.ns, id, None, &[]).await.unwrap().unwrap();
    assert_eq!(
        (news.entries.len(), store.reads.load(Ordering::SeqCst)),
        (0, before),
        "all changes are the worker's own"
    );
    let asked = rig.engine.news_of(&rig.ns, id, None, &["s7"]).await.unwrap().unwrap();
    assert_eq!(asked.entries["s7"]["output"], 7, "an entry that it asks for by name is returned");

    let call = CodeOp::Call { handler: "h".to_owned(), input: Data::null(), queue: None, options: None };
    rig.report(&task, step(21, call)).await;
    let called = rig.claim("v").await.unwrap();
    assert!(matches!(rig.report(&called, done(json!("news"))).await, Answer::Applied(_)));
    let news = rig.engine.news_of(&rig.ns, id, None, &[]).await.unwrap().unwrap();
    assert_eq!((news.entries.len(), &news.entries["s21"]["output"]), (1, &json!("news")), "{news:?}");
    rig.stop().await;
}

#[tokio::test]
async fn of_many_tasks_that_are_gone_only_so_many_runs_are_looked_into() {
    let (store, rig) = hooked();
    rig.register("name: f\nsteps: {a: {}}").await;
    let mut gone = Vec::new();
    for n in 0..150 {
        rig.start("f", json!(n)).await;
        let task = rig.claim("w").await.unwrap();
        gone.push(TaskId { run: task.run, fence: task.token.fence });
        rig.report(&task, done(json!(n))).await;
    }
    let loads = || store.reads.load(Ordering::SeqCst);
    let before = loads();
    let standing = rig.engine.beat(&rig.ns, "w", &gone).await.unwrap();
    assert_eq!(standing, vec![Holding::Lost; 150]);
    assert_eq!(loads() - before, 100);
    rig.stop().await;
}

#[tokio::test]
async fn a_run_of_very_many_tasks_is_not_loaded_for_a_heartbeat() {
    let (store, rig) = hooked();
    rig.register("name: f\nsteps: {a: {spread: 'range(21000)', run: h, max_parallel: 21000}}").await;
    let run = rig.start("f", json!(null)).await;
    let offered = async || store.summary(run).await.unwrap().unwrap().header.next_fence;
    for _ in 0..1_000 {
        if offered().await >= 21_000 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(offered().await >= 21_000);
    let before = store.reads.load(Ordering::SeqCst);
    let never_given = TaskId { run, fence: Fence(99_999) };
    assert_eq!(rig.engine.beat(&rig.ns, "w", &[never_given]).await.unwrap(), [Holding::Lost]);
    assert_eq!(store.reads.load(Ordering::SeqCst), before);
    rig.stop().await;
}
