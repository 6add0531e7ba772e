//! Disk failures: a full disk, a failing sync, a directory in use by another process. And durability order: nothing is
//! acknowledged before it is synced, which a trace of system calls shows and a kill cannot.
//!
//! The tested process is this test binary itself, started with the name of the test `child`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use eddyline_engine::{Config, EngineError, StartRequest};
use eddyline_store::{Embedded, Hook, Namespace, Options, Page, RunFilter, Store, StoreError};
use rig::{Rig, done};
use serde_json::json;

const FLOW: &str = "name: f\nsteps: {a: {}, b: {after: [a]}}";
const DIR: &str = "DISK_DIR";
/// The prefix of the line that announces an acknowledged run.
const ACK: &str = "acknowledged ";
/// The same for a delivered task, and for an applied report.
const CLAIMED: &str = "handed over ";
const REPORTED: &str = "taken ";
const ABORTED: i32 = 6;

#[test]
fn nothing_is_acknowledged_before_it_is_synced() {
    if !strace_works() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace");
    let traced = Command::new("strace")
        .args(["-f", "-s", "200", "-e", "trace=write,fdatasync,fsync", "-o"])
        .arg(&trace)
        .args(child_command())
        .env(DIR, dir.path().join("store"))
        .output()
        .unwrap();
    let acknowledged = acknowledged(&traced);
    assert!(acknowledged.len() >= 20, "{traced:?}");
    let (mut synced, mut acks) = (false, 0);
    for line in std::fs::read_to_string(&trace).unwrap().lines() {
        let is_sync = line.contains("fdatasync(") || line.contains("fsync(") || line.contains("fdatasync resumed");
        if is_sync && line.ends_with("= 0") {
            synced = true;
        }
        if line.contains("write(1") && [ACK, CLAIMED, REPORTED].iter().any(|said| line.contains(said)) {
            assert!(synced, "acknowledged without a sync since the last: {line}");
            synced = false;
            acks += 1;
        }
    }
    assert_eq!(acks, 3 * acknowledged.len(), "every start, claim and report is in the trace");
}

#[test]
fn a_sync_that_fails_stops_the_process() {
    if !strace_works() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let traced = Command::new("strace")
        .args(["-f", "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when=12", "-o", "/dev/null"])
        .args(child_command())
        .env(DIR, &store)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&traced.stderr);
    assert_eq!(traced.status.signal(), Some(ABORTED), "{:?} {said}", traced.status);
    assert!(said.contains("eddyline") && said.contains("store"), "the message does not name the store: {said}");
    let acknowledged = acknowledged(&traced);
    assert!(!acknowledged.is_empty() && acknowledged.len() < 20, "{} acknowledged", acknowledged.len());
    // The store opens, and everything acknowledged before is stored.
    let runs = runs_in(&store);
    for run in &acknowledged {
        assert!(runs.contains(run), "{run} was acknowledged and is lost");
    }
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_known_to_be_silent() {
    let dir = tempfile::tempdir().unwrap();
    let (hang, mut hung) = tokio::sync::mpsc::unbounded_channel();
    let (go_on, opened) = std::sync::mpsc::channel::<()>();
    let (hangs, opened) = (Arc::new(AtomicBool::new(false)), std::sync::Mutex::new(opened));
    let hanging = hangs.clone();
    let before_commit: Hook = Arc::new(move || {
        if hanging.load(Ordering::SeqCst) {
            hang.send(()).unwrap();
            let _ = opened.lock().unwrap().recv_timeout(Duration::from_secs(30));
        }
    });
    let options = Options { before_commit: Some(before_commit), ..Options::default() };
    let rig = Rig::on(Arc::new(Embedded::open(dir.path(), options).unwrap()), Config::default());
    rig.register(FLOW).await;
    hangs.store(true, Ordering::SeqCst);
    let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    let starting = tokio::spawn(async move { engine.start_run(&ns, request).await });
    hung.recv().await.unwrap();
    let before = rig.engine.silence_of_store();
    assert!(before > Duration::ZERO);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let silence = rig.engine.silence_of_store();
    assert!(silence >= before + Duration::from_millis(20));
    hangs.store(false, Ordering::SeqCst);
    go_on.send(()).unwrap();
    starting.await.unwrap().unwrap();
    assert!(rig.engine.silence_of_store() < silence);
    rig.engine.shutdown().await;
}

#[test]
fn a_second_process_is_told_who_has_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path(), Options::default()).unwrap();
    let second = Command::new(std::env::current_exe().unwrap()).args(CHILD).env(DIR, dir.path()).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success());
    let pid = std::process::id().to_string();
    for word in [&dir.path().display().to_string(), &pid] {
        assert!(said.contains(word), "no {word} in: {said}");
    }
    drop(store);
}

#[tokio::test]
async fn a_full_disk_refuses_keeps_reading_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=6m", "tmpfs"]).arg(dir.path()).status();
    if !mounted.is_ok_and(|status| status.success()) {
        return untestable("a small disk can be mounted only by root");
    }
    let _unmount = Unmount(dir.path());
    let ballast = dir.path().join("ballast");
    std::fs::write(&ballast, vec![1; 3 << 20]).unwrap();
    let store = Arc::new(Embedded::open(&dir.path().join("store"), Options::default()).unwrap());
    let mut rig = Rig::on(store.clone(), Config::default());
    rig.register(FLOW).await;
    let start = || {
        let input = json!({"text": "x".repeat(20_000)});
        rig.engine.start_run(&rig.ns, StartRequest { flow: "f".to_owned(), input, ..StartRequest::default() })
    };
    let mut acknowledged = Vec::new();
    let refused = loop {
        match start().await {
            Ok(started) => acknowledged.push(started.run),
            Err(error) => break error,
        }
        assert!(acknowledged.len() < 1_000, "the disk never gets full");
    };
    assert!(matches!(refused, EngineError::Store(StoreError::Full(_))), "{refused}");
    // Reads still work, and exactly the acknowledged runs are stored.
    let listed = rig.engine.list(&rig.ns, &RunFilter::default(), Page::default()).await.unwrap();
    assert_eq!(listed.len(), acknowledged.len());
    assert!(matches!(start().await, Err(EngineError::Store(StoreError::Full(_)))));
    // With free space again, the engine recovers by itself.
    std::fs::remove_file(&ballast).unwrap();
    acknowledged.push(start().await.unwrap().run);
    rig.work(4, |task| done(json!({"of": task.activation})));
    for run in acknowledged {
        rig.output(run).await;
    }
    rig.stop().await;
    drop(store);
}

/// The process that the other tests start: starts runs one after the other, claims and reports a task after each, and
/// announces everything once it is acknowledged.
#[test]
#[ignore = "a process for the other tests"]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = match Embedded::open(Path::new(&dir), Options::default()) {
            Ok(store) => Arc::new(store),
            Err(error) => {
                eprintln!("{error}");
                std::process::exit(1);
            }
        };
        let rig = Rig::on(store, Config::default());
        rig.register(FLOW).await;
        for n in 0..25 {
            let run = rig.start("f", json!({"n": n})).await;
            announce(ACK, &run.to_string());
            let task = rig.claim("w").await.unwrap();
            announce(CLAIMED, &task.task_id());
            rig.report(&task, done(json!(n))).await;
            announce(REPORTED, &task.task_id());
        }
        rig.stop().await;
    });
}

fn announce(what: &str, of: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{what}{of}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

const CHILD: [&str; 4] = ["--exact", "child", "--ignored", "--nocapture"];

fn child_command() -> Vec<String> {
    let exe = std::env::current_exe().unwrap().display().to_string();
    std::iter::once(exe).chain(CHILD.map(str::to_owned)).collect()
}

fn acknowledged(output: &Output) -> Vec<String> {
    let lines = BufReader::new(&output.stdout[..]).lines().map_while(Result::ok);
    lines.filter_map(|line| line.rsplit_once(ACK).map(|(_, run)| run.trim().to_owned())).collect()
}

fn runs_in(store: &Path) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let store = Embedded::open(store, Options::default()).unwrap();
        let runs = store.runs(Some(&Namespace::default()), &RunFilter::default(), Page::default()).await.unwrap();
        runs.into_iter().map(|summary| summary.run.to_string()).collect()
    })
}

/// Fails a test that can't run in this environment, unless `EDDY_SKIP_UNTESTABLE=1` is set.
fn untestable(why: &str) {
    let skips = std::env::var_os("EDDY_SKIP_UNTESTABLE").is_some_and(|value| value == "1");
    assert!(skips, "this test can't run here: {why}; set EDDY_SKIP_UNTESTABLE=1 to skip it");
    println!("skipped: {why}");
}

/// Whether system calls can be traced.
fn strace_works() -> bool {
    let works = Command::new("strace").args(["-o", "/dev/null", "true"]).stderr(Stdio::null()).status();
    let works = works.is_ok_and(|status| status.success());
    if !works {
        untestable("strace is not installed or not permitted");
    }
    works
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}
