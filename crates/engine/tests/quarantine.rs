//! A run that kills every process that decides it is quarantined, and all other runs continue.
//!
//! The processes are this test binary itself, started with the name of the test `child`. The hook
//! [`Config::on_decision`] kills or hangs them when the run is decided.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use eddyline_engine::{Config, Decision, EngineError};
use eddyline_machine::{RunId, Status};
use eddyline_store::{DocumentFilter, Embedded, Handling, Memory, Namespace, Options, Store};
use rig::hooked::Hooked;
use rig::{LONG, Rig, done};
use serde_json::json;

const FLOW: &str = "name: f\nsteps: {nap: {await: {time: 300ms}}, a: {after: [nap]}}";
const HUNG: i32 = 71;

fn open(dir: &Path, config: Config) -> Rig {
    Rig::on(Arc::new(Embedded::open(&dir.join("store"), Options::default()).unwrap()), config)
}

/// Two runs whose timers are due soon; the first is poisoned.
async fn prepare(dir: &Path, flow: &str) -> (RunId, RunId) {
    let rig = open(dir, Config::default());
    rig.register(FLOW).await;
    rig.register("name: kid\nsteps: {a: {set: 1}}").await;
    rig.register("name: parent\nsteps: {nap: {await: {time: 300ms}}, kid: {after: [nap], flow: kid}}").await;
    let (poisoned, fine) = (rig.start(flow, json!(1)).await, rig.start("f", json!(2)).await);
    std::fs::write(dir.join("poisoned"), poisoned.to_string()).unwrap();
    std::fs::write(dir.join("fine"), fine.to_string()).unwrap();
    rig.stop().await;
    (poisoned, fine)
}

fn process(dir: &Path, effect: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--ignored", "--nocapture"]);
    command.env("QUARANTINE_DIR", dir).env("QUARANTINE_EFFECT", effect);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.status().unwrap()
}

#[test]
#[ignore = "a process for the other tests"]
fn child() {
    let (Ok(dir), Ok(effect)) = (std::env::var("QUARANTINE_DIR"), std::env::var("QUARANTINE_EFFECT")) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(live(Path::new(&dir), &effect));
}

async fn live(dir: &Path, effect: &str) {
    if let Some(effect) = effect.strip_prefix("start ") {
        return live_beside_start(dir, effect).await;
    }
    let read = |name: &str| RunId(std::fs::read_to_string(dir.join(name)).unwrap().parse().unwrap());
    let (poisoned, fine, hangs) = (read("poisoned"), read("fine"), effect == "hang");
    let on_decision = move |decision: Decision| match hangs {
        _ if decision.run != poisoned => {}
        true => std::thread::sleep(10 * LONG),
        false => std::process::abort(),
    };
    let mut rig = open(
        dir,
        Config {
            on_decision: Some(Arc::new(on_decision)),
            hang_s: 1,
            // Tasks that were claimed when the process died are queued again soon.
            lease_ms: 1_000,
            on_hang: Some(Arc::new(|_| std::process::exit(HUNG))),
            ..Config::default()
        },
    );
    rig.work(2, |task| done(json!(task.activation)));
    // This process dies here, unless the run is quarantined.
    rig.output(fine).await;
    while rig.engine.quarantine(&rig.ns, poisoned).await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let refused = rig.engine.pause(&rig.ns, poisoned, "somebody").await;
    assert!(matches!(&refused, Err(EngineError::Quarantined(why)) if why.contains("2 processes died")), "{refused:?}");
    rig.start("f", json!(3)).await;
    let another = rig.start("f", json!(3)).await;
    rig.output(another).await;
    rig.stop().await;
}

/// The same with a poisoned start of a child, whose parent is the run named `poisoned`.
async fn live_beside_start(dir: &Path, effect: &str) {
    let read = |name: &str| RunId(std::fs::read_to_string(dir.join(name)).unwrap().parse().unwrap());
    let (parent, fine, hangs) = (read("poisoned"), read("fine"), effect == "hang");
    let harmless = Arc::new(AtomicBool::new(false));
    let is_harmless = harmless.clone();
    let on_decision = move |decision: Decision| match hangs {
        _ if [parent, fine].contains(&decision.run) || is_harmless.load(Ordering::SeqCst) => {}
        true => std::thread::sleep(10 * LONG),
        false => std::process::abort(),
    };
    let mut rig = open(
        dir,
        Config {
            on_decision: Some(Arc::new(on_decision)),
            hang_s: 1,
            lease_ms: 1_000,
            on_hang: Some(Arc::new(|_| std::process::exit(HUNG))),
            ..Config::default()
        },
    );
    rig.work(2, |task| done(json!(task.activation)));
    // This process dies here, unless the child is not started.
    let ended = rig.engine.result(&rig.ns, parent, LONG).await.unwrap().unwrap();
    let error = ended.error.unwrap();
    assert_eq!(error.kind, "Quarantined", "{error:?}");
    assert!(error.message.contains("is not started: 2 processes died while starting it"), "{error:?}");
    rig.output(fine).await;
    let suspects = DocumentFilter { kind: "suspect".to_owned(), ..DocumentFilter::default() };
    assert_eq!(rig.engine.store().documents(None, &suspects, 10).await.unwrap(), []);
    harmless.store(true, Ordering::SeqCst);
    let another = rig.start("parent", json!(3)).await;
    rig.output(another).await;
    rig.stop().await;
}

/// Processes that die, or hang and are killed, when they decide the poisoned run; then one that survives.
async fn twice_and_no_more(dir: &Path, effect: &str, ended: impl Fn(ExitStatus) -> bool) -> RunId {
    let (poisoned, _) = prepare(dir, if effect.starts_with("start") { "parent" } else { "f" }).await;
    for _ in 0..2 {
        let status = process(dir, effect);
        assert!(ended(status), "{status}");
    }
    let status = process(dir, effect);
    assert!(status.success(), "{status}");
    poisoned
}

#[tokio::test]
async fn a_run_that_ends_the_process_twice_is_quarantined_and_the_others_go_on() {
    use std::os::unix::process::ExitStatusExt;
    let dir = tempfile::tempdir().unwrap();
    let poisoned = twice_and_no_more(dir.path(), "abort", |status| status.signal() == Some(6)).await;
    // An operator releases it, and this time the decision succeeds.
    let mut rig = open(dir.path(), Config::default());
    let listed = rig.engine.quarantined(&rig.ns).await.unwrap();
    assert_eq!(
        listed.iter().map(|(summary, suspicion)| (summary.run, suspicion.deaths)).collect::<Vec<_>>(),
        [(poisoned, 2)]
    );
    rig.work(1, |task| done(json!(task.activation)));
    rig.engine.resume(&rig.ns, poisoned, "somebody").await.unwrap();
    rig.output(poisoned).await;
    assert!(rig.engine.quarantined(&rig.ns).await.unwrap().is_empty());
    rig.stop().await;
}

#[tokio::test]
async fn a_run_that_hangs_the_process_twice_is_quarantined_and_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let poisoned = twice_and_no_more(dir.path(), "hang", |status| status.code() == Some(HUNG)).await;
    let rig = open(dir.path(), Config::default());
    rig.engine.cancel(&rig.ns, poisoned, "somebody", None).await.unwrap();
    let ended = rig.engine.result(&rig.ns, poisoned, LONG).await.unwrap().unwrap();
    assert_eq!(ended.status, Status::Cancelled);
    rig.stop().await;
}

#[tokio::test]
async fn a_child_whose_start_ends_the_process_twice_is_not_started_and_its_parent_is_told() {
    use std::os::unix::process::ExitStatusExt;
    let dir = tempfile::tempdir().unwrap();
    twice_and_no_more(dir.path(), "start abort", |status| status.signal() == Some(6)).await;
}

#[tokio::test]
async fn a_child_whose_start_hangs_the_process_twice_is_not_started_and_its_parent_is_told() {
    let dir = tempfile::tempdir().unwrap();
    twice_and_no_more(dir.path(), "start hang", |status| status.code() == Some(HUNG)).await;
}

#[tokio::test]
async fn a_run_that_was_handled_when_the_process_died_is_cleared_once_it_was_handled_again() {
    let dir = tempfile::tempdir().unwrap();
    let (poisoned, _) = prepare(dir.path(), "f").await;
    assert!(!process(dir.path(), "abort").success());
    let mut rig = open(dir.path(), Config::default());
    rig.work(1, |task| done(json!(task.activation)));
    rig.output(poisoned).await;
    let suspects = DocumentFilter { kind: "suspect".to_owned(), ..DocumentFilter::default() };
    let cleared = async {
        while !rig.engine.store().documents(None, &suspects, 10).await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, cleared).await.unwrap();
    rig.stop().await;
}

/// Waits until this engine has read the suspicions again, in a round that began after the call.
async fn looks_again(rig: &Rig) {
    let mut rounds = rig.engine.rounds("suspects").unwrap();
    let seen = *rounds.borrow();
    // The current round may have read them before.
    tokio::time::timeout(LONG, rounds.wait_for(|round| *round >= seen + 2)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_run_that_another_process_has_quarantined_or_released_is_so_for_every_process_on_the_store() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let config = || Config { poll_ms: 10, ..Config::default() };
    let rig = Rig::on(store.clone(), config());
    rig.register("name: f\nsteps: {a: {}}").await;
    let (poisoned, fine) = (rig.start("f", json!(1)).await, rig.start("f", json!(2)).await);
    for deaths in 1..=2 {
        // A process that starts after another one died while deciding the run.
        let before = Some(Handling { apart: vec![poisoned], ..Handling::default() });
        let other = Rig::on(Arc::new(Hooked { before, ..Hooked::new(store.clone()) }), config());
        other.start("f", json!(3)).await;
        assert_eq!(other.engine.quarantine(&other.ns, poisoned).await.unwrap().is_some(), deaths == 2);
        other.stop().await;
    }
    looks_again(&rig).await;
    let refused = rig.engine.pause(&rig.ns, poisoned, "somebody").await;
    assert!(matches!(&refused, Err(EngineError::Quarantined(_))), "{refused:?}");
    rig.engine.pause(&rig.ns, fine, "somebody").await.unwrap();

    let other = Rig::on(store.clone(), config());
    other.engine.resume(&other.ns, poisoned, "somebody").await.unwrap();
    looks_again(&rig).await;
    rig.engine.pause(&rig.ns, poisoned, "somebody").await.unwrap();
    other.stop().await;
    rig.stop().await;
}

#[tokio::test]
async fn a_run_that_this_process_does_not_know_to_be_quarantined_is_released_all_the_same() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    // It never polls.
    let rig = Rig::on(store.clone(), Config { poll_ms: 1_000_000, ..Config::default() });
    rig.register("name: f\nsteps: {a: {}}").await;
    let poisoned = rig.start("f", json!(1)).await;
    for _ in 0..2 {
        let before = Some(Handling { apart: vec![poisoned], ..Handling::default() });
        let other = Rig::on(Arc::new(Hooked { before, ..Hooked::new(store.clone()) }), Config::default());
        other.start("f", json!(2)).await;
        other.stop().await;
    }
    assert_eq!(rig.engine.quarantined(&rig.ns).await.unwrap().len(), 1);
    rig.engine.resume(&rig.ns, poisoned, "somebody").await.unwrap();
    assert!(rig.engine.quarantined(&rig.ns).await.unwrap().is_empty());
    rig.stop().await;
}

#[tokio::test]
async fn a_suspect_is_blamed_for_a_death_and_not_those_that_were_decided_beside_it() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let rig = Rig::on(store.clone(), Config::default());
    rig.register("name: f\nsteps: {a: {}}").await;
    let (poisoned, fine) = (rig.start("f", json!(1)).await, rig.start("f", json!(2)).await);
    let deaths = [
        Handling { batch: vec![fine, poisoned], ..Handling::default() },
        // It was decided on another thread, while the committer decided a batch of others.
        Handling { apart: vec![poisoned], batch: vec![RunId(uuid::Uuid::from_u128(7))] },
    ];
    for (at, noted) in deaths.into_iter().enumerate() {
        let other = Rig::on(Arc::new(Hooked { before: Some(noted), ..Hooked::new(store.clone()) }), Config::default());
        if at == 0 {
            // The decision succeeds.
            other.engine.pause(&other.ns, fine, "somebody").await.unwrap();
        }
        other.start("f", json!(3)).await;
        other.stop().await;
    }
    let listed = rig.engine.quarantined(&rig.ns).await.unwrap();
    assert_eq!(listed.iter().map(|(summary, _)| summary.run).collect::<Vec<_>>(), [poisoned]);
    rig.stop().await;
}

#[tokio::test]
async fn a_quarantined_run_is_not_there_for_another_namespace() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let rig = Rig::on(store.clone(), Config::default());
    rig.register("name: f\nsteps: {a: {}}").await;
    let poisoned = rig.start("f", json!(1)).await;
    for _ in 0..2 {
        let before = Some(Handling { apart: vec![poisoned], ..Handling::default() });
        let other = Rig::on(Arc::new(Hooked { before, ..Hooked::new(store.clone()) }), Config::default());
        let known = other.engine.quarantine(&other.ns, poisoned).await.unwrap().is_some();
        let refused = other.engine.pause(&Namespace::new("other"), poisoned, "them").await;
        assert!(matches!(refused, Err(EngineError::NotFound { .. })), "{known}: {refused:?}");
        other.stop().await;
    }
    assert_eq!(rig.engine.quarantined(&rig.ns).await.unwrap().len(), 1);
    rig.stop().await;
}
