//! A run that ends every process that handles it is quarantined, and everything else goes on.
//!
//! The processes are this test binary itself, started with the name of the test `child`. What happens in them when the
//! run is decided on is the hook [`Config::on_decision`].

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{Config, Decision, EngineError};
use eddyline_machine::{RunId, Status};
use eddyline_store::{DocumentFilter, Embedded, Options};
use rig::{LONG, Rig, done};
use serde_json::json;

const FLOW: &str = "name: f\nsteps: {nap: {await: {time: 300ms}}, a: {after: [nap]}}";
const HUNG: i32 = 71;

fn open(dir: &Path, config: Config) -> Rig {
    Rig::on(Arc::new(Embedded::open(&dir.join("store"), Options::default()).unwrap()), config)
}

/// Two runs whose timers are soon due, of which the first is poisoned.
async fn prepare(dir: &Path) -> (RunId, RunId) {
    let rig = open(dir, Config::default());
    rig.register(FLOW).await;
    let (poisoned, fine) = (rig.start("f", json!(1)).await, rig.start("f", json!(2)).await);
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
            on_hang: Some(Arc::new(|_| std::process::exit(HUNG))),
            ..Config::default()
        },
    );
    rig.work(2, |task| done(json!(task.activation)));
    // This process ends here, unless the run is left alone.
    rig.output(fine).await;
    while rig.engine.quarantine(&rig.ns, poisoned).await.unwrap().is_none() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let refused = rig.engine.pause(&rig.ns, poisoned, "somebody").await;
    assert!(matches!(&refused, Err(EngineError::Quarantined(why)) if why.contains("2 processes ended")), "{refused:?}");
    rig.start("f", json!(3)).await;
    let another = rig.start("f", json!(3)).await;
    rig.output(another).await;
    rig.stop().await;
}

/// A process that dies, or hangs and is ended, as often as it handles the poisoned run; and one that goes on.
async fn twice_and_no_more(dir: &Path, effect: &str, ended: impl Fn(ExitStatus) -> bool) -> RunId {
    let (poisoned, _) = prepare(dir).await;
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
    // Somebody releases it, and this time nothing happens.
    let mut rig = open(dir.path(), Config::default());
    let listed = rig.engine.quarantined(&rig.ns).await.unwrap();
    assert_eq!(listed.iter().map(|(summary, suspicion)| (summary.run, suspicion.deaths)).collect::<Vec<_>>(), [(poisoned, 2)]);
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
async fn a_run_that_was_handled_when_the_process_died_is_cleared_once_it_was_handled_again() {
    let dir = tempfile::tempdir().unwrap();
    let (poisoned, _) = prepare(dir.path()).await;
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
