//! Failures of a store on disk: files, locks, damage, a full disk, and a process that dies.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use eddyline_machine::*;
use eddyline_store::Due;
use eddyline_store::*;
use rusqlite::Connection;
use serde_json::json;
use story::*;

fn open(dir: &Path) -> Embedded {
    open_at(dir, &ManualClock::at(START))
}

fn open_at(dir: &Path, clock: &Arc<ManualClock>) -> Embedded {
    Embedded::open(dir, Options { clock: clock.clone(), ..Options::default() }).unwrap()
}

async fn commit(store: &Embedded, commit: RunCommit) -> std::result::Result<Committed, Refused> {
    store.commit(vec![Command::Run(commit)], vec![]).await.unwrap().commands.remove(0)
}

/// Starts a run of `line` with a large input and claims its first task.
async fn start(store: &Embedded, n: u128) -> Claimed {
    let commit = Decider::new().start(store, n, "line", big()).await;
    let written = store.commit(vec![Command::Run(commit)], vec![claim(n, "w", 1)]).await.unwrap();
    written.claims[0].tasks[0].clone()
}

/// The database file, opened like any external tool would.
fn raw(dir: &Path) -> Connection {
    Connection::open(dir.join("eddyline.db")).unwrap()
}

#[tokio::test]
async fn a_directory_has_one_owner_and_says_who() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let error = Embedded::open(dir.path(), Options::default()).unwrap_err();
    let pid = std::process::id();
    let expected = format!(
        "the store is unavailable: {} is locked by process {pid} since 2026-01-02T03:04:05.678Z; stop that process or \
         use another directory",
        dir.path().display()
    );
    assert_eq!(error.to_string(), expected);
    store.close().unwrap();
    open(dir.path());
}

#[tokio::test]
async fn a_closed_store_is_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    assert!(store.stats().log_bytes > 0);
    store.close().unwrap();
    assert!(!dir.path().join("eddyline.db-wal").exists());
    assert_eq!(raw(dir.path()).query_row("SELECT count(*) FROM runs", [], |row| row.get(0)), Ok(1));
}

#[tokio::test]
async fn a_file_that_is_cut_short_or_something_else_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    store.close().unwrap();
    let path = dir.path().join("eddyline.db");
    let whole = fs::read(&path).unwrap();
    for (content, expected) in [
        (&whole[..whole.len() - 4096], "is truncated: it has"),
        (&whole[..5000], "is truncated: it has 5000 bytes"),
        (&whole[..50], "is truncated: it has 50 bytes"),
        (&[b'x'; 8192][..], "is not a database"),
    ] {
        fs::write(&path, content).unwrap();
        let error = Embedded::open(dir.path(), Options::default()).unwrap_err();
        assert!(matches!(&error, StoreError::Corrupt(text) if text.contains(expected)), "{error}");
        assert!(error.to_string().contains("eddyline.db"), "{error}");
    }
    fs::write(&path, &whole).unwrap();
    open(dir.path());
}

#[tokio::test]
async fn a_newer_store_and_another_programs_database_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).close().unwrap();
    raw(dir.path()).pragma_update(None, "user_version", 99).unwrap();
    let error = Embedded::open(dir.path(), Options::default()).unwrap_err().to_string();
    assert!(error.contains("has schema version 99, but this Eddyline supports versions up to 7"), "{error}");

    let dir = tempfile::tempdir().unwrap();
    raw(dir.path()).execute_batch("CREATE TABLE t (a)").unwrap();
    let error = Embedded::open(dir.path(), Options::default()).unwrap_err().to_string();
    assert!(error.contains("is the database of another program"), "{error}");
}

/// Downgrades a database from version 7 to version 4.
const BACK_TO_4: &str = "
    DROP TABLE fed_runs;
    DROP TABLE lines;
    DROP INDEX runs_by_retry_of; ALTER TABLE runs DROP COLUMN retry_of; ALTER TABLE events DROP COLUMN gates_opened;
    DROP INDEX runs_by_end; DROP INDEX runs_trimmed;
    CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL AND trimmed = 0;
    CREATE INDEX runs_trimmed ON runs (ended_at) WHERE ended_at IS NOT NULL AND trimmed = 1;
    PRAGMA user_version = 4;
";

#[tokio::test]
async fn retries_written_before_they_were_indexed_are_found_when_the_store_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    let mut retry = Decider::new().start(&store, 2, "line", big()).await;
    Arc::make_mut(&mut retry.transition).header.retry_of = Some(run_id(1));
    store.commit(vec![Command::Run(retry)], Vec::new()).await.unwrap().commands.remove(0).unwrap();
    store.close().unwrap();
    raw(dir.path()).execute_batch(BACK_TO_4).unwrap();

    let store = open(dir.path());
    let filter = RunFilter { retry_of: Some(run_id(1)), ..RunFilter::default() };
    let found = store.runs(Some(&Namespace::default()), &filter, Page::default()).await.unwrap();
    assert_eq!(found.iter().map(|summary| summary.run).collect::<Vec<_>>(), [run_id(2)]);
    store.close().unwrap();
}

#[tokio::test]
async fn a_store_of_the_first_version_is_brought_up_to_date_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    store.close().unwrap();
    let file = raw(dir.path());
    file.execute_batch(BACK_TO_4).unwrap();
    let undo = "DROP TABLE logs; DROP INDEX events_by_time; DROP INDEX runs_by_root; ALTER TABLE runs DROP COLUMN root; \
                DROP INDEX runs_going; DROP INDEX runs_trimmed; PRAGMA user_version = 1";
    file.execute_batch(undo).unwrap();
    drop(file);

    let store = open(dir.path());
    let filter = RunFilter { status: vec![Status::Running], ..RunFilter::default() };
    let going = store.runs(None, &filter, Page::default()).await.unwrap();
    assert_eq!(going.iter().map(|summary| summary.run).collect::<Vec<_>>(), [run_id(1)]);
    start(&store, 2).await;
    assert_eq!(store.runs(None, &filter, Page::default()).await.unwrap().len(), 2);
    store.close().unwrap();
    let file = raw(dir.path());
    let version = file.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0)).unwrap();
    let indexes = "SELECT count(*) FROM sqlite_schema WHERE name IN ('runs_going', 'runs_trimmed')";
    assert_eq!((version, file.query_row(indexes, [], |row| row.get(0))), (7, Ok(2)));
}

#[tokio::test]
async fn logs_written_before_they_were_indexed_are_indexed_when_the_store_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    store.close().unwrap();
    let file = raw(dir.path());
    let log = |step: &str| format!(r#"{{"kind":"runner.log","data":{{"stepKey":"{step}","level":"info","msg":"m"}}}}"#);
    let body = format!(r#"[{},{},{},{{"kind":"flow.paused","data":{{}}}}]"#, log("a"), log("b[0]"), log("a"));
    let insert = "INSERT INTO records (run, first, count, version, ts, crc, body) VALUES (1, ?1, 4, 1, 0, 0, ?2)";
    for (first, body) in [(100, body.as_str()), (104, "not JSON, \"runner.log\""), (108, "[]")] {
        file.execute(insert, rusqlite::params![first, body]).unwrap();
    }
    file.execute_batch(BACK_TO_4).unwrap();
    file.execute_batch("DROP TABLE logs; PRAGMA user_version = 3").unwrap();
    drop(file);

    open(dir.path()).close().unwrap();
    let file = raw(dir.path());
    let mut found = file.prepare("SELECT activation, first FROM logs ORDER BY 1, 2").unwrap();
    let found: Vec<(String, i64)> =
        found.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(|row| row.unwrap()).collect();
    assert_eq!(found, [("a".to_owned(), 100), ("b[0]".to_owned(), 100)]);
}

/// Changes a row like a bad disk would, and returns the error of reading it.
async fn damaged(sql: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    store.close().unwrap();
    assert_eq!(raw(dir.path()).execute(sql, []), Ok(1), "{sql}");
    let store = match Embedded::open(dir.path(), Options::default()) {
        Ok(store) => store,
        Err(error) => return error.to_string(),
    };
    let mut errors = vec![];
    errors.extend(store.load(run_id(1), None).await.err());
    errors.extend(store.values(run_id(1), &[ValueId(0), ValueId(1)]).await.err());
    errors.extend(store.records(run_id(1), 0, 100).await.err());
    assert_eq!(errors.len(), 1, "{errors:?}");
    errors.remove(0).to_string()
}

#[tokio::test]
async fn a_flipped_byte_is_found_and_named() {
    let run = run_id(1);
    let flip = |body: &str| format!("{body} = replace({body}, 'a', 'b')");
    for (sql, expected) in [
        (format!("UPDATE records SET {} WHERE first = 1", flip("body")), "records: records 1 to 2 of run"),
        ("UPDATE records SET ts = ts + 1 WHERE count = 1".to_owned(), "records: records 3 to 3 of run"),
        ("DELETE FROM records WHERE first = 1".to_owned(), "records: record 1 of run"),
        (format!("UPDATE runs SET {}", flip("header")), "runs: the header of run"),
        (format!("UPDATE activations SET {} WHERE id = 1", flip("body")), "activations: activation 1 of run"),
        ("DELETE FROM activations WHERE id = 1".to_owned(), "activations: activation 1 of run"),
        ("UPDATE \"values\" SET body = replace(body, 'xxx', 'yyy')".to_owned(), "values: value 0 of run"),
        (format!("UPDATE tasks SET {}", flip("body")), "tasks: task 1 of run"),
    ] {
        let found = damaged(&sql).await;
        assert!(found.starts_with("the store is damaged: "), "{sql}: {found}");
        assert!(found.contains(&format!("{expected} {run} ")), "{sql}: {found}");
    }
}

#[tokio::test]
async fn a_refused_command_does_not_sink_its_group() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(dir.path()));
    let mut decider = Decider::new();
    let first = decider.start(&*store, 1, "line", json!(1)).await;
    let mut conflict = decider.start(&*store, 1, "line", json!(2)).await;
    conflict.command = command_id(77);
    let mut gone = decider.start(&*store, 2, "line", json!(3)).await;
    gone.takes.push(Consumed::Message("nobody sent it".to_owned()));
    let last = decider.start(&*store, 3, "line", json!(4)).await;
    let commands = [&first, &conflict, &gone, &last, &first].map(|commit| Command::Run(commit.clone()));
    let written = store.commit(commands.to_vec(), vec![claim(1, "w", 9)]).await.unwrap();
    let said: Vec<String> = written.commands.iter().map(|said| format!("{said:?}")).collect();
    assert_eq!(said[0], format!("Ok(Committed {{ at: {START}, first: 1, before: false, repeats: 0 }})"));
    assert_eq!(said[1], "Err(Conflict { current: Some(Version(1)) })");
    assert_eq!(said[2], r#"Err(Gone([Message("nobody sent it")]))"#);
    assert_eq!(said[3], format!("Ok(Committed {{ at: {START}, first: 1, before: false, repeats: 0 }})"));
    assert_eq!(said[4], format!("Ok(Committed {{ at: {START}, first: 1, before: true, repeats: 0 }})"));
    assert_eq!(written.claims[0].tasks.len(), 2);
    assert_eq!(store.stats().commits, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_commit_is_written_where_it_is_made() {
    assert_eq!(writes_then_panics().await, "tokio-rt-worker");
}

#[tokio::test]
async fn a_runtime_of_one_thread_is_not_kept_waiting_for_the_disk() {
    assert_eq!(writes_then_panics().await, "eddyline-write");
}

#[test]
fn a_disk_that_hangs_deafens_no_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let (hang, hung) = std::sync::mpsc::channel();
    let (resume, opened) = std::sync::mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    let before_commit: Hook = Arc::new(move || {
        hang.send(std::thread::current().name().unwrap().to_owned()).unwrap();
        // With a timeout: a runtime waits for its threads when a test has failed.
        let _ = opened.lock().unwrap().recv_timeout(std::time::Duration::from_secs(30));
    });
    let options = Options { before_commit: Some(before_commit), ..Options::default() };
    let store = Arc::new(Embedded::open(dir.path(), options).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut decider = Decider::new();
    let commits: Vec<RunCommit> = runtime.block_on(async {
        vec![decider.start(&*store, 1, "line", big()).await, decider.start(&*store, 2, "line", big()).await]
    });
    let listen = async || tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let (writer, listener) = runtime.block_on(async { (listen().await, listen().await) });
    let (to_writer, to_listener) = (writer.local_addr().unwrap(), listener.local_addr().unwrap());
    let writing = runtime.spawn(async move {
        for commit in commits {
            writer.recv(&mut [0]).await.unwrap();
            store.commit(vec![Command::Run(commit)], vec![]).await.unwrap();
        }
    });
    runtime.spawn(async move {
        loop {
            let (_, whom) = listener.recv_from(&mut [0]).await.unwrap();
            listener.send_to(&[1], whom).await.unwrap();
        }
    });
    let me = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    me.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    // One thread drives IO, the other sleeps until it is woken.
    let asleep = || (0..2).all(|worker| runtime.metrics().worker_park_unpark_count(worker) % 2 == 1);
    for _ in 0..2 {
        let since = std::time::Instant::now();
        while !asleep() {
            assert!(since.elapsed().as_secs() < 20, "the runtime threads do not go to sleep");
            std::thread::yield_now();
        }
        me.send_to(&[1], to_writer).unwrap();
        let where_made = hung.recv().unwrap();
        assert!(!where_made.starts_with("eddyline"), "{where_made}: expected a runtime thread to wait for the disk");
        for _ in 0..3 {
            me.send_to(&[1], to_listener).unwrap();
            me.recv(&mut [0]).expect("a thread drives IO");
        }
        resume.send(()).unwrap();
    }
    runtime.block_on(writing).unwrap();
}

/// Returns which thread wrote. It panics at its second commit, after which the store reports to all callers that it is
/// closed.
async fn writes_then_panics() -> String {
    let dir = tempfile::tempdir().unwrap();
    let (name, told) = (Arc::new(Mutex::new(String::new())), Arc::new(AtomicUsize::new(0)));
    let (seen, tell) = (name.clone(), told.clone());
    let before_commit: Hook = Arc::new(move || {
        let mut seen = seen.lock().unwrap();
        let again = !seen.is_empty();
        *seen = std::thread::current().name().unwrap_or_default().to_owned();
        drop(seen);
        assert!(!again, "on purpose");
    });
    let on_failure = Arc::new(move |_: &StoreFailure| _ = tell.fetch_add(1, Ordering::Relaxed));
    let options = Options { before_commit: Some(before_commit), on_failure, ..Options::default() };
    let store = Arc::new(Embedded::open(dir.path(), options).unwrap());
    // In a task: `block_on` itself does not run on a worker thread of the runtime.
    let caller = store.clone();
    let second = tokio::spawn(async move {
        let mut decider = Decider::new();
        let first = decider.start(&*caller, 1, "line", json!(1)).await;
        commit(&caller, first).await.unwrap();
        let second = decider.start(&*caller, 2, "line", json!(2)).await;
        caller.commit(vec![Command::Run(second)], vec![]).await
    });
    let error = second.await.unwrap().unwrap_err();
    assert!(matches!(&error, StoreError::Closed(why) if why.contains("panicked")), "{error}");
    assert_eq!(store.now().await.unwrap_err(), error);
    assert_eq!(told.load(Ordering::Relaxed), 1);
    name.lock().unwrap().clone()
}

#[tokio::test]
async fn callers_at_the_same_time_share_a_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (gate, opened) = std::sync::mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    // The first group waits until all the other requests are queued.
    let before_commit: Hook = Arc::new(move || _ = opened.lock().unwrap().recv());
    let options = Options { before_commit: Some(before_commit), ..Options::default() };
    let store = Arc::new(Embedded::open(dir.path(), options).unwrap());
    let mut decider = Decider::new();
    let mut callers = vec![];
    for n in 1..=20 {
        let (caller, commit) = (store.clone(), decider.start(&*store, n, "line", json!(n as u64)).await);
        callers.push(tokio::spawn(async move { caller.commit(vec![Command::Run(commit)], vec![]).await.unwrap() }));
        if n == 1 {
            while store.stats().groups == 0 {
                tokio::task::yield_now().await;
            }
        }
    }
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    drop(gate);
    for caller in callers {
        assert!(caller.await.unwrap().commands[0].is_ok());
    }
    let stats = store.stats();
    assert_eq!((stats.requests, stats.commits), (20, 2), "{stats:?}");
}

#[tokio::test]
async fn what_writes_nothing_costs_no_sync() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let claimed = start(&store, 1).await;
    let before = store.stats();
    let again = claim(1, "w", 1);
    let mut stale = Decider::new().start(&store, 2, "line", json!(1)).await;
    stale.takes.push(Consumed::Message("nobody sent it".to_owned()));
    let written = store.commit(vec![Command::Run(stale)], vec![claim(2, "w", 5), again]).await.unwrap();
    assert!(written.commands[0].is_err());
    assert_eq!((written.claims[0].tasks.len(), &written.claims[1].tasks[0]), (0, &claimed));
    let after = store.stats();
    assert_eq!((after.requests, after.commits), (before.requests + 1, before.commits));
}

#[tokio::test]
async fn leases_start_over_and_attempts_go_on_when_a_store_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let store = open_at(dir.path(), &clock);
    let commit = Decider::new().start(&store, 1, "shaky", json!(1)).await;
    store.commit(vec![Command::Run(commit)], vec![claim(1, "w", 1)]).await.unwrap();
    let held = |pending: PendingWork| pending.tasks[0].held.clone().unwrap();
    let first = held(store.pending(run_id(1)).await.unwrap());
    assert_eq!((first.lease_until, first.deadline), (START + 30_000, Some(START + 30_000)));
    clock.advance(20_000);
    store.close().unwrap();
    // No service for an hour: the attempt keeps its remaining ten seconds, and the lease starts over in full.
    clock.advance(3_600_000);
    let store = open_at(dir.path(), &clock);
    let now = START + 3_620_000;
    let second = held(store.pending(run_id(1)).await.unwrap());
    assert_eq!((second.lease_until, second.deadline), (now + 30_000, Some(now + 10_000)));
    assert!(store.due(Due::Leases, &[], 10).await.unwrap().items.is_empty());
    let lease = Lease { run: run_id(1), fence: Fence(1) };
    let extended = store.extend(&ns(), Some("w"), &[lease]).await.unwrap();
    let lease_until = now + 30_000;
    assert_eq!(extended, [Extended::Until { lease_until, deadline: second.deadline, closed: false, memo: None }]);
    assert_eq!(store.extend(&ns(), Some("v"), &[lease]).await.unwrap(), [Extended::Lost]);
    // From now on expired leases are asked for all along.
    for ms in [4_000, 4_000] {
        clock.advance(ms);
        assert!(store.due(Due::Leases, &[], 10).await.unwrap().items.is_empty());
    }
    clock.advance(2_000);
    let due = store.due(Due::Leases, &[], 10).await.unwrap();
    assert!(matches!(due.items[..], [DueItem::Lease { why: Expiry::Timeout, .. }]), "{due:?}");
}

#[tokio::test]
async fn the_stores_time_never_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let store = open_at(dir.path(), &clock);
    start(&store, 1).await;
    clock.advance(700);
    let put = documents(1, vec![put("schedule", "a", json!(1), None)]);
    let at = store.commit(vec![put], vec![]).await.unwrap().commands[0].clone().unwrap().at;
    assert_eq!(at, START + 700);
    drop(store);
    let store = open_at(dir.path(), &ManualClock::at(START - 1_000_000));
    assert_eq!(store.now().await, Ok(START + 700));
}

#[tokio::test]
async fn a_backup_can_be_opened_and_is_the_same() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = Arc::new(open(dir.path()));
    start(&store, 1).await;
    start(&store, 2).await;
    let runs = [run_id(1), run_id(2)];
    let to = other.path().join("copy");
    let before = everything(&*store, &runs).await;
    store.backup(&to).await.unwrap();
    start(&store, 3).await;
    let copy = open(&to);
    assert_same(&before, &everything(&copy, &runs).await, "in the copy");
    assert_eq!(start(&copy, 4).await.run, run_id(4));
    drop(copy);
    let error = store.backup(&to).await.unwrap_err().to_string();
    assert!(error.ends_with("is not empty: a backup needs a new directory"), "{error}");
}

#[tokio::test]
async fn a_full_disk_stops_writing_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { max_bytes: Some(400 << 10), ..Options::default() };
    let store = Embedded::open(dir.path(), options).unwrap();
    full_disk(&store).await;
    let stored = store.count_runs(&ns(), &RunFilter::default()).await.unwrap();
    let runs: Vec<RunId> = (1..=stored.into()).map(run_id).collect();
    let before = everything(&store, &runs).await;
    drop(store);
    let store = open(dir.path());
    let next = u128::from(stored) + 1;
    // Leases started over; nothing else changed.
    let lines = |text: &str| text.lines().filter(|line| !line.starts_with("pending")).collect::<Vec<_>>().join("\n");
    assert_same(&lines(&before), &lines(&everything(&store, &runs).await), "opened again");
    start(&store, next).await;
    assert_eq!(store.count_runs(&ns(), &RunFilter::default()).await.unwrap(), stored + 1);
}

async fn full_disk(store: &Embedded) {
    let mut decider = Decider::new();
    let (mut n, mut claimed) = (0, 0);
    let error = loop {
        n += 1;
        let commit = decider.start(store, n, "line", big()).await;
        match store.commit(vec![Command::Run(commit)], vec![claim(n, "w", (n % 2) as usize)]).await {
            Ok(written) => claimed += written.claims[0].tasks.len(),
            Err(error) => break error,
        }
        assert!(n < 100_000);
    };
    assert!(matches!(error, StoreError::Full(_)), "{error}");
    assert!(n > 20, "{n}");
    // Memory and disk agree.
    let stored = (n - 1) as usize;
    assert_eq!(store.count_runs(&ns(), &RunFilter::default()).await.unwrap(), stored as u64);
    let queue = store.queues(&ns()).await.unwrap().remove(0);
    assert_eq!((queue.ready + queue.claimed, queue.claimed), (stored, claimed));
    assert!(store.stats().rollbacks > 0);
    let leases = [Lease { run: run_id(1), fence: Fence(1) }];
    assert!(matches!(store.extend(&ns(), Some("w"), &leases).await.unwrap()[..], [Extended::Until { .. }]));
}

#[tokio::test]
async fn a_store_that_cannot_trust_its_disk_gives_up() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    start(&store, 1).await;
    store.close().unwrap();
    let root: i64 = raw(dir.path())
        .query_row("SELECT rootpage FROM sqlite_schema WHERE name = 'runs_by_id'", [], |row| row.get(0))
        .unwrap();
    let path = dir.path().join("eddyline.db");
    let mut content = fs::read(&path).unwrap();
    content[(root as usize - 1) * 4096..root as usize * 4096].fill(0xa5);
    fs::write(&path, content).unwrap();

    let told = Arc::new(Mutex::new(vec![]));
    let tell = told.clone();
    let on_failure =
        Arc::new(move |failure: &eddyline_store::StoreFailure| tell.lock().unwrap().push(failure.to_string()));
    let store = Embedded::open(dir.path(), Options { on_failure, ..Options::default() }).unwrap();
    let other = tempfile::tempdir().unwrap();
    let commit = Decider::new().start(&open(other.path()), 2, "line", json!(1)).await;
    let error = store.commit(vec![Command::Run(commit)], vec![]).await.unwrap_err();
    assert!(matches!(&error, StoreError::Closed(reason) if reason.contains("malformed")), "{error}");
    assert_eq!(store.load(run_id(1), None).await.unwrap_err(), error);
    assert_eq!(store.now().await.unwrap_err(), error);
    let told = told.lock().unwrap();
    assert_eq!(told.len(), 1);
    assert!(told[0].contains("failed") && told[0].contains(&dir.path().display().to_string()), "{told:?}");
    assert_eq!(store.close().unwrap_err(), error);
}

#[tokio::test]
async fn a_long_run_is_trimmed_in_slices_and_hidden_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for n in [1, 2] {
        let mut decider = Decider::new();
        let mut made = decider.start(&store, n, "line", big()).await;
        made.command = command_id(n);
        commit(&store, made).await.unwrap();
        let cancel = Input::Cancel { by: "me".to_owned(), reason: None };
        let mut ended = decider.decide(&store, run_id(n), None, &[cancel]).await;
        let mut transition = Transition::clone(&ended.transition);
        let value = (ValueId(0), Data::from(json!("v")));
        transition.values = (10..12_000).map(|id| (ValueId(id), value.1.clone())).collect();
        ended.transition = Arc::new(transition);
        commit(&store, ended).await.unwrap();
        while let [DueItem::Messages { messages, .. }] = &store.due(Due::Messages, &[], 10).await.unwrap().items[..] {
            for message in messages {
                let MessageBody::Input(input) = &message.body else { panic!("{message:?}") };
                let mut next = decider.decide(&store, run_id(n), None, std::slice::from_ref(&**input)).await;
                next.takes.push(Consumed::Message(message.id.clone()));
                commit(&store, next).await.unwrap();
            }
        }
    }
    assert!(store.trim(&Trim::Timeline(run_id(1))).await.unwrap());
    let Found::Trimmed(summary) = store.load(run_id(1), None).await.unwrap() else { panic!("the run is not hidden") };
    assert_eq!((summary.records, summary.trimmed), (0, true));
    assert!(store.values(run_id(1), &[ValueId(11_999)]).await.unwrap().is_empty());
    assert!(store.records(run_id(1), 0, 10).await.unwrap().is_empty());
    assert!(store.trim(&Trim::Run(run_id(2))).await.unwrap());
    assert!(matches!(store.load(run_id(2), None).await.unwrap(), Found::Nothing));
    assert_eq!(store.count_runs(&ns(), &RunFilter::default()).await.unwrap(), 1);
    while store.trim(&Trim::Timeline(run_id(1))).await.unwrap() {}
    while store.trim(&Trim::Run(run_id(2))).await.unwrap() {}
    drop(store);
    let left = |table: &str| raw(dir.path()).query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0));
    for table in ["\"values\"", "records", "activations", "leaving", "tasks"] {
        assert_eq!(left(table), Ok(0), "{table}");
    }
    assert_eq!(left("runs"), Ok(1));
}

#[tokio::test]
async fn the_log_is_copied_back_and_starts_over() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { checkpoint_bytes: 64 << 10, restart_bytes: 512 << 10, ..Options::default() };
    let store = Embedded::open(dir.path(), options).unwrap();
    let mut n = 0;
    while store.stats().restarts < 2 {
        n += 1;
        start(&store, n).await;
        assert!(n < 50_000, "{:?}", store.stats());
    }
    assert!(store.stats().checkpoints > 0);
    assert!(store.stats().log_bytes < 64 << 20, "{:?}", store.stats());
    drop(store);
    assert_eq!(open(dir.path()).count_runs(&ns(), &RunFilter::default()).await.unwrap(), n as u64);
}

/// A process that dies right before or right after a commit loses nothing that it acknowledged, and a group is stored
/// as a whole or not at all.
#[tokio::test]
async fn what_was_acknowledged_survives_the_end_of_the_process() {
    const ROLE: &str = "EDDYLINE_DIES_AT";
    if let Ok(role) = std::env::var(ROLE) {
        return die(&role).await;
    }
    for (when, at) in [("before", 1), ("before", 7), ("after", 1), ("after", 7)] {
        let dir = tempfile::tempdir().unwrap();
        let role = format!("{when} {at} {}", dir.path().display());
        let ended = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "what_was_acknowledged_survives_the_end_of_the_process", "--nocapture"])
            .env(ROLE, role)
            .output()
            .unwrap();
        assert!(!ended.status.success());
        let told = fs::read_to_string(dir.path().join("acknowledged")).unwrap_or_default();
        let acknowledged = told.lines().count() as u64;
        assert_eq!(acknowledged, at - 1);
        let store = open(dir.path());
        let stored = store.count_runs(&ns(), &RunFilter::default()).await.unwrap();
        assert_eq!(stored, 2 * if when == "after" { at } else { at - 1 }, "{when} {at}");
        for n in 1..=u128::from(stored) {
            assert_eq!(store.records(run_id(n), 0, 100).await.unwrap().len(), 2);
        }
        // The outcome of the last commit is unknown. Submitted again, it is applied once.
        let again = pair(&open(tempfile::tempdir().unwrap().path()), at.into()).await;
        let said = store.commit(again, vec![]).await.unwrap().commands;
        assert!(said.iter().all(|said| said.as_ref().is_ok_and(|done| done.before == (when == "after"))), "{said:?}");
    }
}

async fn die(role: &str) {
    let mut role = role.splitn(3, ' ');
    let (when, at) = (role.next().unwrap(), role.next().unwrap().parse::<usize>().unwrap());
    let dir = Path::new(role.next().unwrap());
    let count = AtomicUsize::new(0);
    let hook: Hook = Arc::new(move || {
        if count.fetch_add(1, Ordering::SeqCst) + 1 == at {
            std::process::abort();
        }
    });
    let (before_commit, after_commit) = if when == "before" { (Some(hook), None) } else { (None, Some(hook)) };
    let clock = ManualClock::at(START);
    let store = Embedded::open(dir, Options { clock, before_commit, after_commit, ..Options::default() }).unwrap();
    let mut told = fs::File::create(dir.join("acknowledged")).unwrap();
    for n in 1..100 {
        let commands = pair(&store, n).await;
        store.commit(commands, vec![]).await.unwrap();
        writeln!(told, "{n}").unwrap();
    }
}

/// Commands that start two runs together.
async fn pair(store: &Embedded, n: u128) -> Vec<Command> {
    let mut commands = vec![];
    for run in [2 * n - 1, 2 * n] {
        let mut made = Decider::new().start(store, run, "line", json!(1)).await;
        made.command = command_id(run);
        commands.push(Command::Run(made));
    }
    commands
}

/// A write fails in the middle of a group, caused by one of its requests.
#[tokio::test]
async fn what_a_refused_claim_spent_of_several_rates_is_all_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let rate = json!({"rate": {"count": 1, "per_ms": 60_000, "burst": 1}});
    let rules = vec![put("queue", "default", rate.clone(), None), put("limit", "api", rate, None)];
    store.commit(vec![documents(100, rules)], vec![]).await.unwrap();
    let run = Decider::new().start(&store, 1, "shaky", json!(1)).await;
    commit(&store, run).await.unwrap();
    let outside = raw(dir.path());
    outside
        .execute_batch("CREATE TRIGGER no BEFORE INSERT ON buckets BEGIN SELECT RAISE(ABORT, 'not now'); END")
        .unwrap();
    assert!(store.commit(vec![], vec![claim(1, "w", 1)]).await.is_err());
    outside.execute_batch("DROP TRIGGER no").unwrap();
    let claimed = store.commit(vec![], vec![claim(2, "w", 1)]).await.unwrap().claims.remove(0);
    assert_eq!((claimed.tasks.len(), claimed.retry_at), (1, None), "neither rate was spent");
}

/// Each try waits for the lock for seconds, so requests that wait together are refused together.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_lock_from_outside_refuses_a_group_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(dir.path()));
    start(&store, 1).await;
    let outside = raw(dir.path());
    outside.execute_batch("BEGIN IMMEDIATE").unwrap();
    let began = std::time::Instant::now();
    let starts: Vec<_> = (2..10)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move {
                let commit = Decider::new().start(&*store, n, "line", big()).await;
                let commit = RunCommit { command: command_id(100 + n), ..commit };
                store.commit(vec![Command::Run(commit)], vec![]).await
            })
        })
        .collect();
    for refused in starts {
        assert!(matches!(refused.await.unwrap(), Err(StoreError::Unavailable(_))));
    }
    assert!(began.elapsed().as_secs() < 22, "the requests waited one after the other: {:?}", began.elapsed());
    outside.execute_batch("ROLLBACK").unwrap();
    start(&store, 20).await;
}

#[tokio::test]
async fn a_run_with_very_many_messages_does_not_hide_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let message = |to: u128, n: usize| Message {
        to: run_id(to),
        id: format!("m{n}"),
        body: MessageBody::Input(Box::new(Input::Continue)),
    };
    let many = (0..12_000).map(|n| message(5, n));
    let messages: Vec<Message> = many.chain([message(9, 1), message(2, 1), message(9, 2), message(7, 1)]).collect();
    let (documents, events, drops) = Default::default();
    let sent = DocumentCommit { ns: ns(), command: command_id(1), documents, messages, events, drops };
    store.commit(vec![Command::Documents(sent)], vec![]).await.unwrap();
    let due = |limit: usize| {
        let store = &store;
        async move {
            let items = store.due(Due::Messages, &[], limit).await.unwrap().items.into_iter();
            let of = |item: DueItem| match item {
                DueItem::Messages { to, messages, .. } => (to.0.as_u128(), messages.len()),
                other => panic!("{other:?}"),
            };
            items.map(of).collect::<Vec<_>>()
        }
    };
    assert_eq!(due(2).await, [(5, MAX_INBOX), (9, 2)], "the oldest first");
    assert_eq!(due(1).await, [(2, 1)]);
    assert_eq!(due(10).await, [(7, 1)]);
    assert_eq!(due(10).await, []);
}
