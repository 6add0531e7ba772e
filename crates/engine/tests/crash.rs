//! Kills processes under load repeatedly, on one store on disk or in PostgreSQL. Whatever was acknowledged before a kill is
//! stored exactly once afterwards, every run ends, and every timeline matches the state of its run.
//!
//! The process is this test binary itself, started with the name of the test `child` and a directory. Acknowledgements
//! to clients and workers are written to a ledger next to the store, which is synced before anything else happens.
//!
//! `EDDYLINE_CRASHES=100` kills a hundred times instead of a few; `SEED=n` repeats the kill times of an earlier run.
//! `EDDYLINE_TEST_STORE`, a PostgreSQL URL without parameters of ours, and `EDDYLINE_TEST_ENGINES`: so many processes work on
//! a new schema of that database, and one at a time is killed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "crash/child.rs"]
mod child_process;
#[path = "crash/ledger.rs"]
mod ledger;
#[path = "crash/load.rs"]
mod load;
#[path = "crash/verify.rs"]
mod verify;

use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use child_process::Orders;

/// A child ends by itself well before this.
const HANGS: Duration = Duration::from_secs(120);

#[test]
fn killed_at_random_it_loses_nothing_and_repeats_nothing() {
    let crashes: u64 = std::env::var("EDDYLINE_CRASHES").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    let dir = tempfile::tempdir().unwrap();
    let (store, processes) = database();
    let store = store.as_deref();
    // A connection to a database takes longer than opening a file.
    let longest = if store.is_some() { 2_000 } else { 500 };
    let mut chance = seed();
    println!("SEED={chance}");
    let start = |number| spawn(dir.path(), &Orders::load(number).on(store));
    let mut children: Vec<Child> = (0..processes).map(&start).collect();
    for crash in 0..crashes {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        // Early kills hit opening and recovery.
        std::thread::sleep(Duration::from_millis(20 + chance % longest));
        let child = &mut children[(chance >> 32) as usize % processes as usize];
        kill(child);
        *child = start(processes + crash);
    }
    children.iter_mut().for_each(kill);
    finish(dir.path(), store);
    let told = verify::all(dir.path(), store);
    println!("after {crashes} kills: {told}");
    assert!(told.runs > crashes as usize, "hardly any load: {told}");
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// The URL of a new schema, and how many processes work on it; none on disk.
fn database() -> (Option<String>, u64) {
    let Ok(url) = std::env::var("EDDYLINE_TEST_STORE") else { return (None, 1) };
    let since = std::time::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let between = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{between}schema=crash_{since}_{}", std::process::id());
    (Some(url), std::env::var("EDDYLINE_TEST_ENGINES").map_or(1, |engines| engines.parse().unwrap()))
}

/// From the environment, or else from the clock: it must vary and be printed.
fn seed() -> u64 {
    let given = std::env::var("SEED").ok().map(|seed| seed.parse().expect("SEED is a number"));
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    given.unwrap_or_else(now) | 1
}

#[test]
fn dying_before_or_after_any_commit_loses_nothing_and_repeats_nothing() {
    let every: u64 = std::env::var("EDDYLINE_CRASHES").map_or(3, |_| 1);
    for when in ["before", "after"] {
        let dir = tempfile::tempdir().unwrap();
        let (mut at, mut died) = (1, 0);
        // One round of all flows takes between 30 commits (on a slow disk, where many inputs share one) and 100. Each
        // child dies one or a few commits later than the one before, until one finishes without dying.
        while at < 120 {
            let status = wait(spawn(dir.path(), &Orders::die(when, at, died)));
            if status.success() {
                break;
            }
            died += 1;
            at += every;
        }
        assert!(died > 5, "died only {died} times {when} a commit");
        finish(dir.path(), None);
        println!("{when} a commit: {}", verify::all(dir.path(), None));
    }
}

/// The process that the other tests start.
#[test]
#[ignore = "a process for the other tests"]
fn child() {
    if let Some(orders) = Orders::from_env() {
        child_process::run(orders);
    }
}

/// Lets all runs end.
fn finish(dir: &Path, store: Option<&str>) {
    let status = wait(spawn(dir, &Orders::finish().on(store)));
    assert!(status.success(), "the last process did not finish all runs: {status}");
}

fn spawn(dir: &Path, orders: &Orders) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]).stdout(Stdio::null());
    orders.to_env(&mut command, dir);
    command.spawn().unwrap()
}

fn wait(mut child: Child) -> ExitStatus {
    let since = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if since.elapsed() > HANGS {
            child.kill().unwrap();
            panic!("the process hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
