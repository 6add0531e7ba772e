//! The engine uses the store's clock. When the wall clock jumps, no lease expires, nothing is lost, nothing fires
//! twice.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;

use eddyline_engine::{ClaimTasks, Config, Engine, Holding, Reported, TaskId, TaskReport};
use eddyline_machine::{Answer, Op};
use eddyline_store::{Embedded, ManualClock, Memory, Options, Store};
use rig::{LONG, Rig, claim, done};
use serde_json::json;

const HOUR: i64 = 3_600_000;

fn rig(clock: &Arc<ManualClock>) -> Rig {
    on(Arc::new(Memory::with_clock(clock.clone())))
}

fn on(store: Arc<dyn Store>) -> Rig {
    Rig::on(store, Config { poll_ms: 5, ..Config::default() })
}

/// Waits for two rounds of a loop, since the first may have begun before the call.
async fn looked(engine: &Engine, of: &str) {
    let mut rounds = engine.rounds(of).unwrap();
    let now = *rounds.borrow();
    rounds.wait_for(|rounds| *rounds >= now + 2).await.unwrap();
}

#[tokio::test]
async fn an_hour_either_way_ends_no_lease_and_fires_nothing() {
    let clock = ManualClock::at(1_767_323_045_678);
    jumps(rig(&clock), clock).await;
}

#[tokio::test]
async fn on_disk_an_hour_either_way_ends_no_lease_and_fires_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(1_767_323_045_678);
    let options = Options { clock: clock.clone(), ..Options::default() };
    jumps(on(Arc::new(Embedded::open(dir.path(), options).unwrap())), clock).await;
}

async fn jumps(rig: Rig, clock: Arc<ManualClock>) {
    rig.register("name: f\nsteps: {a: {timeout: 10m}, nap: {await: {time: 5m}}, b: {after: [nap]}}").await;
    let run = rig.start("f", json!(null)).await;
    let lease = ClaimTasks { lease_ms: Some(60_000), ..claim("w") };
    let task = rig.engine.claim(&rig.ns, lease, LONG).await.unwrap().pop().unwrap();
    let before = rig.kinds(run).await;
    for jump in [HOUR, -2 * HOUR, HOUR] {
        clock.jump(jump);
        looked(&rig.engine, "timers").await;
        looked(&rig.engine, "lease_reaper").await;
        assert_eq!(rig.kinds(run).await, before, "after a jump by {jump} ms");
    }
    let held = TaskId { run, fence: task.token.fence };
    assert_eq!(rig.engine.beat(&rig.ns, "w", &[held]).await.unwrap(), [Holding::Held { memo: None }]);
    // Elapsed time fires the timer once, whatever the wall clock says.
    clock.jump(-HOUR);
    clock.advance(5 * 60_000);
    let next = rig.claim("w").await.unwrap();
    assert_eq!(next.activation, "b");
    clock.jump(2 * HOUR);
    looked(&rig.engine, "timers").await;
    let triggered = |kinds: Vec<String>| kinds.iter().filter(|kind| kind.starts_with("step.await.triggered")).count();
    assert_eq!(triggered(rig.kinds(run).await), 1);
    rig.report(&next, done(json!(1))).await;
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(run).await;
    rig.stop().await;
}

#[tokio::test]
async fn a_moment_that_was_named_follows_the_wall() {
    let clock = ManualClock::at(1_767_323_045_678);
    let rig = rig(&clock);
    rig.register("name: f\nsteps: {wait: {await: {until: '\"2026-01-02T04:04:05Z\"'}}}").await;
    let run = rig.start("f", json!(null)).await;
    looked(&rig.engine, "timers").await;
    assert!(rig.engine.result(&rig.ns, run, std::time::Duration::ZERO).await.unwrap().is_none());
    clock.jump(HOUR);
    rig.output(run).await;
    rig.stop().await;
}

#[tokio::test]
async fn time_in_which_nobody_served_is_not_held_against_a_worker() {
    let clock = ManualClock::at(1_767_323_045_678);
    let rig = rig(&clock);
    rig.register("name: f\nsteps: {a: {}}").await;
    rig.start("f", json!(null)).await;
    let lease = ClaimTasks { lease_ms: Some(30_000), ..claim("w") };
    let task = rig.engine.claim(&rig.ns, lease, LONG).await.unwrap().pop().unwrap();
    looked(&rig.engine, "lease_reaper").await;
    // As if the process had been suspended for a minute between two checks of its leases.
    clock.advance(60_000);
    looked(&rig.engine, "lease_reaper").await;
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.stop().await;
}

#[tokio::test]
async fn a_report_keeps_the_lease_of_its_task_for_as_long_as_it_was_claimed_for() {
    let clock = ManualClock::at(1_767_323_045_678);
    let rig = rig(&clock);
    rig.register("name: f\nsteps: {a: {}}").await;
    let run = rig.start("f", json!(null)).await;
    let lease = ClaimTasks { lease_ms: Some(60_000), ..claim("w") };
    let task = rig.engine.claim(&rig.ns, lease, LONG).await.unwrap().pop().unwrap();
    let report = async |seq: u32, op: Op| {
        let report = TaskReport { token: task.token, seq: Some(seq), op };
        match rig.engine.report(&rig.ns, vec![report]).await.unwrap().pop() {
            Some(Reported::Answer { answer, .. }) => answer,
            other => panic!("{other:?}"),
        }
    };
    // The remaining time of the lease.
    let left = async || {
        let held = rig.engine.store().pending(run).await.unwrap().tasks.remove(0).held.unwrap();
        held.lease_until - rig.engine.now().await.unwrap()
    };
    let progress = || Op::Progress { done: Some(1.into()), total: None, msg: None };
    clock.advance(1_000);
    assert_eq!(left().await, 59_000);
    assert!(matches!(report(1, progress()).await, Answer::Applied(_)));
    assert_eq!(left().await, 60_000);
    clock.advance(1_000);
    assert!(matches!(report(1, progress()).await, Answer::Duplicate(_)));
    assert_eq!(left().await, 60_000, "a repeated report extends the lease too");
    clock.advance(1_000);
    assert!(matches!(
        report(2, Op::Emit { event: "x".to_owned(), payload: json!(1).into() }).await,
        Answer::Invalid(_)
    ));
    assert_eq!(left().await, 59_000, "a rejected report does not extend the lease");
    let held = TaskId { run, fence: task.token.fence };
    assert_eq!(rig.engine.beat(&rig.ns, "w", &[held]).await.unwrap(), [Holding::Held { memo: None }]);
    assert_eq!(left().await, 60_000, "a heartbeat also renews the claimed lease time");
    assert!(matches!(report(2, done(json!(1))).await, Answer::Applied(_)));
    rig.stop().await;
}
