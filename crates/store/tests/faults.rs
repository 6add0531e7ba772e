//! Failing writes, to SQLite's log and in the whole store: committed data stays, refused data leaves no trace, and
//! everything recovers by itself once writes succeed again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod shim;
mod story;

use std::collections::BTreeMap;
use std::path::Path;

use eddyline_machine::{Fence, Input, RunId};
use eddyline_store::*;
use rusqlite::{Connection, ErrorCode, OpenFlags, params};
use serde_json::json;
use shim::{EDQUOT, EIO, ENOSPC, Faults};
use story::*;

type Model = BTreeMap<i64, (usize, u8)>;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

#[test]
fn a_write_to_the_log_that_fails_spoils_one_transaction_and_nothing_else() {
    let root = tempfile::tempdir().unwrap();
    shim::succeeds("writes_to_the_log_fail", root.path());
}

#[test]
fn a_quota_that_is_used_up_refuses_writes_until_there_is_space() {
    let root = tempfile::tempdir().unwrap();
    shim::succeeds("the_quota_is_used_up", root.path());
}

#[test]
fn a_refused_commit_leaves_no_trace_in_memory() {
    let root = tempfile::tempdir().unwrap();
    shim::succeeds("every_commit_is_refused_once", root.path());
}

#[test]
fn a_full_disk_is_not_written_to_all_the_time_to_note_who_serves() {
    let root = tempfile::tempdir().unwrap();
    shim::succeeds("a_note_finds_the_disk_full", root.path());
}

/// A transaction of more pages than the cache holds.
fn transaction(conn: &Connection, before: &Model, random: &mut Random) -> rusqlite::Result<Model> {
    let mut after = before.clone();
    conn.execute_batch("BEGIN IMMEDIATE")?;
    for _ in 0..=random.below(12) {
        let (key, length, letter) = (random.below(40) as i64, random.below(9_000) as usize + 1, random.below(26) as u8);
        conn.execute("INSERT OR REPLACE INTO t VALUES (?1, ?2)", params![key, vec![letter; length]])?;
        after.insert(key, (length, letter));
    }
    conn.execute_batch("COMMIT")?;
    Ok(after)
}

fn rows(conn: &Connection) -> Model {
    let mut statement = conn.prepare("SELECT k, v FROM t").unwrap();
    let row = |row: &rusqlite::Row<'_>| {
        let (key, body): (i64, Vec<u8>) = (row.get(0)?, row.get(1)?);
        assert!(body.iter().all(|byte| *byte == body[0]), "row {key} is mixed");
        Ok((key, (body.len(), body[0])))
    };
    statement.query_map([], row).unwrap().collect::<rusqlite::Result<_>>().unwrap()
}

/// The rows found when the files are opened as they are now.
fn after_a_crash(dir: &Path) -> Model {
    let copy = tempfile::tempdir().unwrap();
    for name in ["a.db", "a.db-wal"] {
        std::fs::copy(dir.join(name), copy.path().join(name)).unwrap();
    }
    let conn = Connection::open(copy.path().join("a.db")).unwrap();
    let sound: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(sound, "ok");
    rows(&conn)
}

#[test]
#[ignore = "a process for the other tests"]
fn writes_to_the_log_fail() {
    let Some(root) = shim::root() else { return };
    let (faults, mut failures) = (Faults::of_child(), 0);
    for seed in 0..16 {
        let mut random = Random(seed);
        let dir = tempfile::tempdir_in(&root).unwrap();
        let path = dir.path().join("a.db");
        let conn = Connection::open_with_flags_and_vfs(&path, OpenFlags::default(), "eddyline-gather").unwrap();
        conn.pragma_update(None, "journal_mode", "WAL").unwrap();
        conn.pragma_update(None, "synchronous", "FULL").unwrap();
        conn.pragma_update(None, "wal_autocheckpoint", 0).unwrap();
        // So small that pages are written to the log long before the commit.
        conn.pragma_update(None, "cache_size", 3 + random.below(20) as i64).unwrap();
        conn.execute_batch("CREATE TABLE t (k INTEGER PRIMARY KEY, v BLOB)").unwrap();
        let other = Connection::open(&path).unwrap();
        let mut committed = transaction(&conn, &Model::new(), &mut random).unwrap();
        for _ in 0..12 {
            let error = [ENOSPC, EDQUOT, EIO][random.below(3) as usize];
            faults.set(random.below(8) as i32, 1 + random.below(3) as i32, error, random.below(2) == 0);
            match transaction(&conn, &committed, &mut random) {
                Ok(after) => committed = after,
                Err(failed) => {
                    failures += 1;
                    let expected = if error == EIO { ErrorCode::SystemIoFailure } else { ErrorCode::DiskFull };
                    assert_eq!(failed.sqlite_error_code(), Some(expected), "seed {seed}: {failed}");
                    if !conn.is_autocommit() {
                        conn.execute_batch("ROLLBACK").unwrap();
                    }
                }
            }
            faults.clear();
            assert_eq!(rows(&conn), committed, "seed {seed}: exactly the committed rows");
            assert_eq!(rows(&other), committed, "seed {seed}: on another connection");
            assert_eq!(after_a_crash(dir.path()), committed, "seed {seed}: after a crash");
            committed = transaction(&conn, &committed, &mut random).expect("it recovers by itself");
            assert_eq!(rows(&other), committed, "seed {seed}: rows committed afterwards");
            if random.below(4) == 0 {
                let on = if random.below(2) == 0 { &conn } else { &other };
                on.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).unwrap();
            }
        }
    }
    assert!(failures > 60, "only {failures} transactions failed");
}

#[tokio::test]
#[ignore = "a process for the other tests"]
async fn the_quota_is_used_up() {
    let Some(root) = shim::root() else { return };
    let faults = Faults::of_child();
    // The log is checkpointed all the time, so that checkpoints hit the quota too.
    let options = Options { clock: ManualClock::at(START), checkpoint_bytes: 1, ..Options::default() };
    let store = Embedded::open(&root.join("store"), options).unwrap();
    let mut decider = Decider::new();
    let (mut stored, mut held) = (0, 0);
    for round in 0..20 {
        faults.set(round, i32::MAX, EDQUOT, round % 2 == 0);
        let mut refused = 0;
        while refused < 3 {
            let commit = decider.start(&store, stored + 1, "line", big()).await;
            match store.commit(vec![Command::Run(commit)], vec![claim(stored + 1, "w", 1)]).await {
                Ok(written) => (stored, held) = (stored + 1, held + written.claims[0].tasks.len()),
                Err(StoreError::Full(_)) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        // Reads still work, and memory and disk agree.
        assert_eq!(store.count_runs(&ns(), &RunFilter::default()).await.unwrap(), stored as u64);
        let queue = store.queues(&ns()).await.unwrap().into_iter().next().unwrap_or_default();
        assert_eq!((queue.ready, queue.claimed), (stored as usize - held, held));
        assert!(matches!(store.health().await, Err(StoreError::Full(_))), "health reports that writes fail");
        faults.clear();
        assert_eq!(store.health().await, Ok(()), "health recovers, although nothing was written meanwhile");
        let commit = decider.start(&store, stored + 1, "line", big()).await;
        let written = store.commit(vec![Command::Run(commit)], vec![claim(stored + 1, "w", 1)]).await.unwrap();
        (stored, held) = (stored + 1, held + written.claims[0].tasks.len());
    }
    assert_eq!(held, stored as usize);
    let leases: Vec<Lease> = (1..=stored).map(|n| Lease { run: run_id(n), fence: Fence(1) }).collect();
    let extended = store.extend(&ns(), Some("w"), &leases).await.unwrap();
    assert!(extended.iter().all(|extended| matches!(extended, Extended::Until { .. })));
    store.close().unwrap();
    let raw = Connection::open(root.join("store/eddyline.db")).unwrap();
    assert_eq!(raw.query_row("PRAGMA integrity_check", [], |row| row.get(0)), Ok("ok".to_owned()));
    assert_eq!(
        raw.query_row("SELECT count(*) FROM tasks WHERE worker IS NOT NULL", [], |row| row.get(0)),
        Ok(held as i64)
    );
}

#[tokio::test]
#[ignore = "a process for the other tests"]
async fn a_note_finds_the_disk_full() {
    let Some(root) = shim::root() else { return };
    let (faults, clock) = (Faults::of_child(), ManualClock::at(START));
    let store = Embedded::open(&root.join("store"), Options { clock: clock.clone(), ..Options::default() }).unwrap();
    let commit = Decider::new().start(&store, 1, "line", big()).await;
    let written = store.commit(vec![Command::Run(commit)], vec![claim(1, "w", 1)]).await.unwrap();
    assert_eq!(written.claims[0].tasks.len(), 1);
    faults.set(0, 1_000_000, ENOSPC, false);
    clock.advance(600_000);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let refused = store.stats().rollbacks;
    assert!((1..=2).contains(&refused), "{refused} notes were tried in two seconds");
    faults.clear();
}

/// Random histories in which each commit is first refused and then applied: a refused one must leave nothing in memory,
/// so the store behaves exactly like a memory store that never saw it.
#[tokio::test]
#[ignore = "a process for the other tests"]
async fn every_commit_is_refused_once() {
    let Some(root) = shim::root() else { return };
    let (faults, mut refused) = (Faults::of_child(), 0);
    for seed in 1..=8 {
        let (mut dice, clock) = (Dice(seed), ManualClock::at(START));
        let dir = tempfile::tempdir_in(&root).unwrap();
        let store = Embedded::open(dir.path(), Options { clock: clock.clone(), ..Options::default() }).unwrap();
        let reference = Memory::with_clock(clock.clone());
        let (mut decider, mut held, mut runs) = (Decider::new(), Vec::new(), Vec::new());
        let rules = vec![
            put("queue", "default", json!({"concurrency": 3, "rate": rate()}), None),
            put("limit", "api", json!({"concurrency": 2, "rate": rate()}), None),
        ];
        for one in [&store as &dyn Store, &reference] {
            one.commit(vec![documents(500, rules.clone())], vec![]).await.unwrap();
        }
        for step in 1..=50_u128 {
            clock.advance(dice.below(3) as i64 * 500);
            let (commands, claims) = next_step(&mut dice, &mut decider, &store, step, &mut held, &mut runs).await;
            faults.set(dice.below(4) as i32, 1, [ENOSPC, EDQUOT][dice.below(2)], dice.below(2) == 0);
            let first = store.commit(commands.clone(), claims.clone()).await;
            faults.clear();
            let written = match first {
                Ok(written) => written,
                Err(StoreError::Full(_)) => {
                    refused += 1;
                    let when = format!("seed {seed}: step {step} was refused");
                    assert_same(&everything(&reference, &runs).await, &everything(&store, &runs).await, &when);
                    store.commit(commands.clone(), claims.clone()).await.expect("it recovers by itself")
                }
                Err(error) => panic!("seed {seed}: {error}"),
            };
            let expected = reference.commit(commands, claims).await.unwrap();
            assert_eq!(
                format!("{:?}", expected.commands),
                format!("{:?}", written.commands),
                "seed {seed}, step {step}"
            );
            assert_eq!(format!("{:?}", expected.claims), format!("{:?}", written.claims), "seed {seed}, step {step}");
            held.extend(written.claims.into_iter().flat_map(|claims| claims.tasks));
            let when = format!("seed {seed}: after step {step}");
            assert_same(&everything(&reference, &runs).await, &everything(&store, &runs).await, &when);
        }
    }
    assert!(refused > 60, "only {refused} commits were refused");
}

/// Always the same: the effect of changing a rate while part of it is spent is not specified.
fn rate() -> serde_json::Value {
    json!({"count": 2, "per_ms": 1_000, "burst": 2})
}

/// A start, a claim, a completion, a cancel or new rules.
async fn next_step(
    dice: &mut Dice,
    decider: &mut Decider,
    store: &Embedded,
    step: u128,
    held: &mut Vec<Claimed>,
    runs: &mut Vec<RunId>,
) -> (Vec<Command>, Vec<ClaimRequest>) {
    let claims = vec![claim(step, ["v", "w"][dice.below(2)], dice.below(3))];
    let ended = |op: usize| op < 6;
    let command = match dice.below(10) {
        op if ended(op) && !held.is_empty() => {
            let claimed = held.swap_remove(dice.below(held.len()));
            match store.pending(claimed.run).await.unwrap().tasks.iter().any(|row| row.task.fence == claimed.task.fence)
            {
                true => Command::Run(decider.complete(store, &claimed, big()).await),
                false => documents(1_000 + step, vec![]),
            }
        }
        6 => {
            let rules = [put("queue", "default", json!({"concurrency": 1 + dice.below(4), "rate": rate()}), None)];
            documents(1_000 + step, rules.to_vec())
        }
        7 => documents(
            1_000 + step,
            vec![put("limit", "api", json!({"concurrency": 1 + dice.below(2), "rate": rate()}), None)],
        ),
        8 if !runs.is_empty() => {
            let cancel = Input::Cancel { by: "me".to_owned(), reason: None };
            let run = runs[dice.below(runs.len())];
            Command::Run(decider.decide(store, run, None, &[cancel]).await)
        }
        _ => {
            let flow = ["line", "wide", "shaky", "gated"][dice.below(4)];
            runs.push(run_id(step));
            let input = json!({"items": [1, 2, 3, 4, 5], "text": "x".repeat(dice.below(3) * 5_000)});
            Command::Run(decider.start(store, step, flow, input).await)
        }
    };
    (vec![command], claims)
}
