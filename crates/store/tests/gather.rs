//! The VFS that gathers writes to SQLite's log: other connections see, and a crash leaves, exactly the committed rows.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use eddyline_store as _;
use rusqlite::{Connection, OpenFlags, params};
use tempfile::TempDir;

const GATHER: &str = "eddyline-gather";

/// The expected rows: the length of each body and the letter it consists of.
type Model = BTreeMap<i64, (usize, u8)>;

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn writer(dir: &Path) -> Connection {
    let conn = Connection::open_with_flags_and_vfs(dir.join("a.db"), OpenFlags::default(), GATHER).unwrap();
    conn.pragma_update(None, "journal_mode", "WAL").unwrap();
    conn.pragma_update(None, "wal_autocheckpoint", 0).unwrap();
    conn.execute_batch("CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v BLOB)").unwrap();
    conn
}

fn usual(dir: &Path) -> Connection {
    Connection::open(dir.join("a.db")).unwrap()
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

/// The rows found when the files are opened as they are now, as after a crash of the process.
fn after_a_crash(dir: &Path) -> Model {
    let copy = TempDir::new().unwrap();
    for name in ["a.db", "a.db-wal"] {
        if dir.join(name).exists() {
            std::fs::copy(dir.join(name), copy.path().join(name)).unwrap();
        }
    }
    let conn = usual(copy.path());
    let sound: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(sound, "ok");
    rows(&conn)
}

fn change(conn: &Connection, model: &mut Model, random: &mut Random) {
    for _ in 0..=random.below(12) {
        let (key, length, letter) = (random.below(40) as i64, random.below(9_000) as usize + 1, random.below(26) as u8);
        if random.below(5) == 0 {
            conn.execute("DELETE FROM t WHERE k = ?1", [key]).unwrap();
            model.remove(&key);
        } else {
            conn.execute("INSERT OR REPLACE INTO t VALUES (?1, ?2)", params![key, vec![letter; length]]).unwrap();
            model.insert(key, (length, letter));
        }
    }
}

/// A random history: commits, rollbacks, changes larger than the cache, restarts of the log.
fn history(seed: u64) {
    let mut random = Random(seed);
    let dir = TempDir::new().unwrap();
    let (mut conn, other) = (writer(dir.path()), usual(dir.path()));
    // So small that pages are written to the log, and read back from it, long before the commit.
    conn.pragma_update(None, "cache_size", 3 + random.below(8) as i64).unwrap();
    conn.pragma_update(None, "synchronous", ["OFF", "NORMAL", "FULL"][random.below(3) as usize]).unwrap();
    let mut committed = Model::new();
    for _ in 0..40 {
        match random.below(10) {
            0 => {
                let mode = ["PASSIVE", "RESTART", "TRUNCATE"][random.below(3) as usize];
                let on = if random.below(2) == 0 { &conn } else { &other };
                on.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |_| Ok(())).unwrap();
            }
            1 => {
                conn.close().unwrap();
                conn = writer(dir.path());
            }
            2 | 3 => {
                conn.execute_batch("BEGIN IMMEDIATE").unwrap();
                change(&conn, &mut committed.clone(), &mut random);
                conn.execute_batch("ROLLBACK").unwrap();
                if random.below(2) == 0 {
                    // Another connection overwrites the place of the rolled back pages.
                    change(&other, &mut committed, &mut random);
                }
            }
            4 => {
                conn.execute_batch("BEGIN IMMEDIATE; SAVEPOINT a").unwrap();
                change(&conn, &mut committed.clone(), &mut random);
                conn.execute_batch("ROLLBACK TO a").unwrap();
                change(&conn, &mut committed, &mut random);
                conn.execute_batch("COMMIT").unwrap();
            }
            _ => {
                let before = committed.clone();
                conn.execute_batch("BEGIN IMMEDIATE").unwrap();
                change(&conn, &mut committed, &mut random);
                assert_eq!(rows(&conn), committed, "seed {seed}: its own rows");
                assert_eq!(rows(&other), before, "seed {seed}: uncommitted rows are invisible to others");
                assert_eq!(after_a_crash(dir.path()), before, "seed {seed}: uncommitted rows are lost in a crash");
                conn.execute_batch("COMMIT").unwrap();
            }
        }
        assert_eq!(rows(&conn), committed, "seed {seed}");
        assert_eq!(rows(&other), committed, "seed {seed}: committed rows are visible to others");
        assert_eq!(after_a_crash(dir.path()), committed, "seed {seed}: committed rows are found after a crash");
    }
}

#[test]
fn what_is_committed_and_nothing_else_is_seen_and_found() {
    for seed in 0..60 {
        history(seed);
    }
}

/// Commits, only in the child process that the next test traces.
#[test]
fn commits_of_a_child() {
    let Some(dir) = std::env::var_os("EDDYLINE_GATHER_IN") else { return };
    let conn = writer(Path::new(&dir));
    conn.pragma_update(None, "synchronous", "FULL").unwrap();
    let mut random = Random(1);
    for _ in 0..50 {
        conn.execute_batch("BEGIN IMMEDIATE").unwrap();
        change(&conn, &mut Model::new(), &mut random);
        conn.execute_batch("COMMIT").unwrap();
    }
}

#[test]
fn a_commit_is_written_in_few_pieces_and_then_synced() {
    let works = Command::new("strace").args(["-o", "/dev/null", "true"]).stderr(Stdio::null()).status();
    if !works.is_ok_and(|status| status.success()) {
        let skips = std::env::var_os("EDDY_SKIP_UNTESTABLE").is_some_and(|value| value == "1");
        assert!(skips, "strace is not installed or not permitted. Set EDDY_SKIP_UNTESTABLE=1 to skip this test");
        return;
    }
    let dir = TempDir::new().unwrap();
    let log = dir.path().join("trace");
    let status = Command::new("strace")
        .args(["-f", "-y", "-e", "trace=pwrite64,fdatasync", "-o"])
        .arg(&log)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "commits_of_a_child"])
        .env("EDDYLINE_GATHER_IN", dir.path())
        .status();
    assert!(status.unwrap().success());
    let trace = std::fs::read_to_string(log).unwrap();
    let calls: Vec<&str> = trace.lines().filter(|line| line.contains("a.db-wal")).collect();
    let syncs = calls.iter().filter(|line| line.contains("fdatasync")).count();
    let writes = calls.len() - syncs;
    assert!(syncs >= 50, "{trace}");
    // A change has about ten pages, which would be twenty writes.
    assert!(writes <= 3 * syncs, "{writes} writes for {syncs} syncs");
    assert!(calls.last().is_some_and(|last| last.contains("fdatasync")), "{trace}");
}
