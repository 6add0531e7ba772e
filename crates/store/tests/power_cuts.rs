//! Power cuts. A process works on a store while a shim records every write, truncation, sync and change of a directory
//! (`shim/disk.c`). From the record the files are rebuilt as a power cut at any point could have left them: synced data
//! is complete; each later write is complete, lost, or torn at sectors, in any combination; and of the changes of file
//! names a prefix is applied. Everything acknowledged before that point must be found.
//!
//! `EDDYLINE_CUTS=200` cuts two hundred times instead of twenty, `SEED=n` repeats a run that printed that seed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "power_cuts/recorded.rs"]
mod recorded;
mod shim;
mod story;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Arc, Mutex};

use eddyline_machine::{RunId, Version};
use eddyline_store::*;
use recorded::{Disk, Recorded, Trust};
use story::*;

/// Directories that the store creates itself.
const STORE: &str = "made/by/store";
const SESSIONS: u128 = 4;
const CALLERS: u128 = 3;
const PAIRS: u128 = 16;

#[test]
fn what_was_acknowledged_survives_power_cuts() {
    let (seed, cuts) = (seed(), number("EDDYLINE_CUTS").unwrap_or(20) as usize);
    println!("SEED={seed} EDDYLINE_CUTS={cuts}");
    let recorded = record();
    let found = cut(&recorded, Trust::Syncs, seed, cuts);
    println!("{} operations recorded, {cuts} cuts: {found:?}", recorded.len());
    assert_eq!((found.lost, found.split), (0, 0), "SEED={seed}");
    assert!(found.acknowledged > cuts && found.unsynced > 0, "too little was acknowledged or unsynced: {found:?}");
}

/// Checks the test above: on a disk that ignores syncs, it finds losses.
#[test]
fn a_disk_that_lies_about_syncs_is_found_out() {
    let found = cut(&record(), Trust::Nothing, 7, 20);
    assert!(found.lost > 0, "{found:?}");
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

fn seed() -> u64 {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
    number("SEED").unwrap_or_else(now) | 1
}

fn record() -> Recorded {
    let dir = tempfile::tempdir().unwrap();
    let (root, log) = (dir.path().join("disk"), dir.path().join("record"));
    std::fs::create_dir(&root).unwrap();
    let worked = shim::run("a_store_at_work", &root, Some(&log), &[]);
    assert!(worked.status.success(), "{}", String::from_utf8_lossy(&worked.stderr));
    Recorded::read(&root, &log)
}

#[derive(Debug, Default)]
struct Seen {
    /// Acknowledged commits that were checked, and those that were lost.
    acknowledged: usize,
    lost: usize,
    /// Commits of which only a part is stored.
    split: usize,
    /// Writes that were not synced at a cut.
    unsynced: usize,
    /// Cuts after which there was no store at all, before anything was acknowledged.
    nothing: usize,
}

fn cut(recorded: &Recorded, trust: Trust, seed: u64, cuts: usize) -> Seen {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut dice, mut found) = (Dice(seed), Seen::default());
    let mut moments: Vec<usize> = (0..cuts).map(|_| 1 + dice.below(recorded.len())).collect();
    moments.sort_unstable();
    let (mut disk, mut done) = (Disk::new(trust), 0);
    for moment in moments {
        recorded.replay(&mut disk, done..moment);
        done = moment;
        found.unsynced += disk.unsynced();
        let told = acknowledged(&disk.now("ledger"));
        let dir = tempfile::tempdir().unwrap();
        disk.rebuild(dir.path(), &mut dice);
        let opened = Embedded::open(&dir.path().join(STORE), Options::default());
        match (opened, trust) {
            (Ok(store), _) => runtime.block_on(look(store, &told, &mut found)),
            // A lying disk may leave anything.
            (Err(_), Trust::Nothing) => found.lost += told.len(),
            (Err(error), Trust::Syncs) => panic!("SEED={seed}, after {moment} operations: {error}"),
        }
        if trust == Trust::Syncs {
            let raw = rusqlite::Connection::open(dir.path().join(STORE).join("eddyline.db")).unwrap();
            let sound: String = raw.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
            assert_eq!(sound, "ok", "SEED={seed}, after {moment} operations");
            assert_eq!(found.lost, 0, "SEED={seed}, after {moment} operations");
        }
    }
    found
}

/// The last acknowledged version of each run.
fn acknowledged(ledger: &[u8]) -> BTreeMap<u128, u64> {
    let text = String::from_utf8_lossy(ledger);
    let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
    text.lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((u128::from(number(words.next())?), number(words.next())?))
        })
        .collect()
}

async fn look(store: Embedded, told: &BTreeMap<u128, u64>, found: &mut Seen) {
    let listed = store.runs(Some(&ns()), &RunFilter::default(), Page { after: None, limit: 10_000 }).await.unwrap();
    let mut versions = BTreeMap::new();
    found.nothing += usize::from(listed.is_empty());
    for summary in &listed {
        let Ok(eddyline_store::Found::Run(loaded)) = store.load(summary.run, None).await else { continue };
        let records = store.records(summary.run, 0, 1_000).await.unwrap();
        assert!(records.iter().map(|record| record.n).eq(1..=records.len() as u64), "{} is not dense", summary.run);
        versions.insert(summary.run, loaded.rows.header.version);
    }
    for (run, version) in told {
        found.acknowledged += 1;
        let is_there = versions.get(&run_id(*run)).is_some_and(|found| found.0 >= *version);
        found.lost += usize::from(!is_there);
    }
    // Runs are started in pairs, each pair by one call.
    let alone = |run: &RunId| !versions.contains_key(&run_id(run.0.as_u128() ^ 1));
    found.split += versions.keys().filter(|run| alone(run)).count();
    // The store still works.
    let next = Decider::new().start(&store, 900_000, "line", big()).await;
    let written = store.commit(vec![Command::Run(next)], vec![]).await.unwrap();
    assert!(written.commands[0].is_ok());
    store.close().unwrap();
}

/// The process that is cut off: concurrent callers start runs, claim and complete tasks; sometimes the store is closed
/// and reopened. Callers write acknowledged commits to a ledger.
#[test]
#[ignore = "a process for the other tests"]
fn a_store_at_work() {
    let Some(root) = shim::root() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let ledger = OpenOptions::new().create(true).append(true).open(root.join("ledger")).unwrap();
    let ledger = Arc::new(Mutex::new(ledger));
    for session in 0..SESSIONS {
        // The log is checkpointed and restarted often.
        let options = Options { checkpoint_bytes: 48 << 10, restart_bytes: 200 << 10, ..Options::default() };
        let store = Arc::new(Embedded::open(&root.join(STORE), options).unwrap());
        runtime.block_on(async {
            let callers = (0..CALLERS).map(|caller| {
                let first = 2 * PAIRS * (session * CALLERS + caller);
                tokio::spawn(call(store.clone(), first, ledger.clone()))
            });
            for caller in callers.collect::<Vec<_>>() {
                caller.await.unwrap();
            }
        });
        Arc::into_inner(store).unwrap().close().unwrap();
    }
}

async fn call(store: Arc<Embedded>, first: u128, ledger: Arc<Mutex<File>>) {
    let mut decider = Decider::new();
    let tell = |lines: String| ledger.lock().unwrap().write_all(lines.as_bytes()).unwrap();
    for pair in 0..PAIRS {
        let runs = [first + 2 * pair, first + 2 * pair + 1];
        let mut commands = Vec::new();
        for run in runs {
            let commit = decider.start(&*store, run, "line", big()).await;
            commands.push(Command::Run(RunCommit { command: command_id(10_000 + run), ..commit }));
        }
        let written = store.commit(commands, vec![claim(first + pair, "w", 2)]).await.unwrap();
        assert!(written.commands.iter().all(|done| done.is_ok()));
        tell(format!("{} 1\n{} 1\n", runs[0], runs[1]));
        for claimed in &written.claims[0].tasks {
            let commit = decider.complete(&*store, claimed, big()).await;
            let (Version(version), n) = (commit.transition.header.version, claimed.run.0.as_u128());
            let commit = RunCommit { command: command_id((version as u128 + 2) * 100_000 + n), ..commit };
            // Another caller may have changed the task's run: callers claim tasks of any run.
            if store.commit(vec![Command::Run(commit)], vec![]).await.unwrap().commands[0].is_ok() {
                tell(format!("{n} {version}\n"));
            }
        }
    }
}
