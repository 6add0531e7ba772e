//! Copies that are refused, interrupted, repeated or damaged.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod copied;
#[path = "postgres/server.rs"]
mod server;
mod story;

use std::sync::Arc;

use async_trait::async_trait;
use copied::{Place, moved};
use eddyline_machine::Millis;
use eddyline_store::copy::{CopySource, CopyTarget, Origin, Row, Table, copy};
use eddyline_store::*;
use serde_json::json;
use story::{Decider, START, claim, command_id, documents, put, run_id};
use uuid::Uuid;

/// Deletes the schemas of a test at its end.
struct Schemas(Vec<String>);

impl Drop for Schemas {
    fn drop(&mut self) {
        server::drop_schemas_now(std::mem::take(&mut self.0));
    }
}

fn postgres(schemas: &mut Schemas) -> Place {
    let place = Place::postgres();
    if let Place::Postgres(url) = &place {
        schemas.0.push(url.clone());
    }
    place
}

/// A store with runs, documents and events in two namespaces.
async fn filled(place: &Place, clock: &Arc<ManualClock>, runs: u128) {
    let store = place.open(clock.clone()).await;
    let mut decider = Decider::new();
    for n in 0..runs {
        let flow = ["line", "gated", "shaky", "parent"][n as usize % 4];
        let input = json!({"items": [1, 2], "big": "x".repeat(300)});
        let mut commit = decider.start(&*store, n + 1, flow, input).await;
        if n % 3 == 2 {
            commit.ns = Namespace::new("other");
        }
        store.commit(vec![Command::Run(commit)], Vec::new()).await.unwrap().commands.remove(0).unwrap();
        clock.advance(10);
    }
    let rate = json!({"rate": {"count": 2, "per_ms": 1_000, "burst": 9}});
    let changes =
        vec![put(kind::LIMIT, "api", rate, None), put("thing", "a", json!({"n": 1}), Some(9_000_000_000_000))];
    store.commit(vec![documents(9_001, changes)], Vec::new()).await.unwrap().commands.remove(0).unwrap();
    for (n, ns) in ["default", "other", "default"].into_iter().enumerate() {
        let event =
            NewEvent { id: format!("e{n}"), name: "ping".to_owned(), key: None, payload: json!({"n": n}).into() };
        let mut commit = documents(9_100 + n as u128, Vec::new());
        if let Command::Documents(commit) = &mut commit {
            (commit.ns, commit.events) = (Namespace::new(ns), vec![event]);
        }
        store.commit(vec![commit], Vec::new()).await.unwrap().commands.remove(0).unwrap();
    }
    let claimed = store.commit(Vec::new(), vec![claim(9_200, "ann", 2)]).await.unwrap().claims.remove(0).tasks;
    assert!(!claimed.is_empty());
    drop(store);
}

async fn refused(from: &Place, to: &Place, restart: bool, clock: &Arc<ManualClock>) -> String {
    let source = from.source(clock.clone()).await.unwrap();
    let mut target = to.target(clock.clone()).await.unwrap();
    copy(&*source, &mut *target, restart, &mut |_| {}).await.unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_says_what_it_copied_and_repeats_itself() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let (first, second, third) = (Place::directory(), postgres(&mut schemas), Place::directory());
    filled(&first, &clock, 9).await;
    let there = moved(&first, &second, &clock).await;
    for (table, rows) in [(Table::Runs, 9), (Table::Events, 3), (Table::Documents, 2), (Table::Rates, 0)] {
        assert_eq!(there.source.of(table).rows, rows, "{table}");
    }
    assert!(there.source.of(Table::Tasks).rows > 2 && there.source.of(Table::Gates).rows > 2);
    // A copy of a copy is the same, whatever stores it went through.
    let back = moved(&second, &third, &clock).await;
    assert_eq!(there.source, back.target);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_is_not_empty_is_refused_with_what_it_has() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let (from, directory, schema) = (Place::directory(), Place::directory(), postgres(&mut schemas));
    filled(&from, &clock, 3).await;
    filled(&directory, &clock, 4).await;
    filled(&schema, &clock, 5).await;
    let why = refused(&from, &directory, true, &clock).await;
    assert!(why.contains("already has a store (with 4 runs and 2 documents)"), "{why}");
    let why = refused(&from, &schema, true, &clock).await;
    assert!(why.contains("is not empty: it has 5 runs, 2 documents, 3 events and 2 messages"), "{why}");
    assert_eq!(schema.open(clock.clone()).await.going().await.unwrap().iter().map(|going| going.count).sum::<u64>(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unfinished_copy_is_not_opened_and_can_begin_anew() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let from = Place::directory();
    filled(&from, &clock, 8).await;
    for to in [Place::directory(), postgres(&mut schemas)] {
        {
            // What a copy that is killed leaves: some of the rows.
            let source = from.source(clock.clone()).await.unwrap();
            let mut target = to.target(clock.clone()).await.unwrap();
            target.begin(false).await.unwrap();
            let rows = source.rows().next().await.unwrap().unwrap();
            target.write(rows).await.unwrap();
        }
        let opened = match &to {
            Place::Directory(dir) => Embedded::open(dir.path(), Options::default()).err(),
            Place::Postgres(url) => Postgres::open(url, PostgresOptions::default()).await.err(),
            Place::Memory(_) => None,
        };
        let why = opened.expect("it is not opened").to_string();
        assert!(why.contains("unfinished copy") && why.contains("--restart"), "{why}");
        let why = to.source(clock.clone()).await.err().expect("it is not copied either").to_string();
        assert!(why.contains("unfinished copy"), "{why}");
        let why = refused(&from, &to, false, &clock).await;
        assert!(why.contains("unfinished copy: use --restart"), "{why}");
        let source = from.source(clock.clone()).await.unwrap();
        let mut target = to.target(clock.clone()).await.unwrap();
        let report = copy(&*source, &mut *target, true, &mut |_| {}).await.unwrap();
        assert!(report.is_equal(), "{report:#?}");
        drop(target);
        assert_eq!(
            to.open(clock.clone()).await.runs(None, &RunFilter::default(), Page::default()).await.unwrap().len(),
            8
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_open_is_neither_copied_nor_filled() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let (directory, schema) = (Place::directory(), postgres(&mut schemas));
    filled(&directory, &clock, 2).await;
    filled(&schema, &clock, 2).await;
    let open = directory.open(clock.clone()).await;
    let why = directory.source(clock.clone()).await.err().unwrap().to_string();
    assert!(why.contains("is locked by process"), "{why}");
    drop(open);
    let open = schema.open(clock.clone()).await;
    let info = InstanceInfo { name: "eddy-7".to_owned(), host: Some("db1".to_owned()), ..InstanceInfo::default() };
    let id = InstanceId(Uuid::from_u128(7));
    open.check_in(id, &info, START).await.unwrap();
    let why = schema.source(clock.clone()).await.err().unwrap().to_string();
    assert!(why.contains("is served by eddy-7 on db1, which checked in 0 s ago: stop all instances first"), "{why}");
    // One that was killed does not count for long.
    clock.advance(61_000);
    schema.source(clock.clone()).await.unwrap();
    open.check_in(id, &info, START).await.unwrap();
    // As an instance does when it starts.
    open.due(Due::Leases, &[], 1).await.unwrap();
    open.check_out(id).await.unwrap();
    let source = schema.source(clock.clone()).await.unwrap();
    let target = Place::directory();
    let mut target = target.target(clock.clone()).await.unwrap();
    // It comes and goes while the copy is made.
    clock.advance(1_000);
    open.check_in(id, &info, START).await.unwrap();
    open.check_out(id).await.unwrap();
    let why = copy(&*source, &mut *target, false, &mut |_| {}).await.unwrap_err().to_string();
    assert!(why.contains("served the source while it was copied"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_whose_clock_is_behind_is_refused_and_a_directory_goes_on_from_the_sources_time() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let (from, schema, directory) = (Place::directory(), postgres(&mut schemas), Place::directory());
    filled(&from, &clock, 2).await;
    clock.jump(-3_600_000);
    let why = refused(&from, &schema, false, &clock).await;
    assert!(why.contains("clock is 36") && why.contains("s behind the latest time in the source"), "{why}");
    // Nothing was marked: a later copy needs no restart.
    moved(&from, &directory, &clock).await;
    let now = directory.open(clock.clone()).await.now().await.unwrap();
    assert!(now >= START, "{now}");
    clock.jump(3_600_000);
    moved(&from, &schema, &clock).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_bit_is_noticed_and_named() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    // The id of the first run ends with 1.
    let run = run_id(1);
    for (table, sql, name) in [
        (
            "activations",
            "UPDATE activations SET body = replace(body, 'a', 'b') WHERE id = 0",
            "activations: activation 0 of run",
        ),
        ("values", "UPDATE \"values\" SET body = replace(body, 'xx', 'xy') WHERE id = 0", "values: value 0 of run"),
        ("records", "UPDATE records SET body = replace(body, 'a', 'b') WHERE first = 1", "records: records 1 to"),
        (
            "documents",
            "UPDATE documents SET body = replace(body, '1', '3') WHERE kind = 'thing'",
            "documents: thing a of default",
        ),
    ] {
        let (from, to) = (Place::directory(), Place::directory());
        filled(&from, &clock, 1).await;
        let Place::Directory(dir) = &from else { panic!("a directory") };
        let conn = rusqlite::Connection::open(dir.path().join("eddyline.db")).unwrap();
        assert!(conn.execute(sql, []).unwrap() > 0, "{table}");
        drop(conn);
        let why = refused(&from, &to, false, &clock).await;
        assert!(why.contains(name) && why.contains("does not match its checksum"), "{why}");
        assert!(table == "documents" || why.contains(&run.to_string()), "{why}");
        let opened = match &to {
            Place::Directory(dir) => Embedded::open(dir.path(), Options::default()).err(),
            _ => None,
        };
        assert!(opened.unwrap().to_string().contains("unfinished copy"), "the copy cannot be served");
    }
    let (from, to) = (postgres(&mut schemas), Place::directory());
    filled(&from, &clock, 1).await;
    let Place::Postgres(url) = &from else { panic!("a schema") };
    assert!(server::execute(url, "UPDATE SCHEMA.runs SET header = replace(header, 'line', 'lime')").await);
    let why = refused(&from, &to, false, &clock).await;
    assert!(why.contains(&format!("runs: the header of run {run} does not match its checksum")), "{why}");
}

/// Loses a row on the way.
struct Losing(Box<dyn CopyTarget>);

#[async_trait]
impl CopySource for Losing {
    async fn origin(&self) -> Result<Origin> {
        self.0.origin().await
    }

    fn rows(&self) -> eddyline_store::copy::Rows {
        self.0.rows()
    }

    async fn check_unserved(&self) -> Result<()> {
        self.0.check_unserved().await
    }
}

#[async_trait]
impl CopyTarget for Losing {
    async fn begin(&mut self, restart: bool) -> Result<()> {
        self.0.begin(restart).await
    }

    async fn time(&self) -> Result<Option<Millis>> {
        self.0.time().await
    }

    async fn write(&mut self, mut rows: Vec<Row>) -> Result<()> {
        if let Some(at) = rows.iter().position(|row| row.table() == Table::Timers) {
            rows.remove(at);
        }
        self.0.write(rows).await
    }

    async fn finish(&mut self, origin: &Origin) -> Result<()> {
        self.0.finish(origin).await
    }

    async fn release(&mut self, _: &Origin) -> Result<()> {
        panic!("a copy that differs is not released");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_differs_is_not_released() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let from = Place::directory();
    filled(&from, &clock, 4).await;
    for to in [Place::directory(), postgres(&mut schemas)] {
        let source = from.source(clock.clone()).await.unwrap();
        let mut target = Losing(to.target(clock.clone()).await.unwrap());
        let report = copy(&*source, &mut target, false, &mut |_| {}).await.unwrap();
        assert!(!report.is_equal());
        let differ: Vec<Table> =
            Table::ALL.into_iter().filter(|table| report.source.of(*table) != report.target.of(*table)).collect();
        assert_eq!(differ, [Table::Timers]);
        drop(target);
        let why = to.source(clock.clone()).await.err().unwrap().to_string();
        assert!(why.contains("unfinished copy"), "{why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeats_are_known_and_numbers_are_not_given_twice() {
    let (clock, mut schemas) = (ManualClock::at(START), Schemas(Vec::new()));
    let mut place = Place::directory();
    let mut decider = Decider::new();
    let store = place.open(clock.clone()).await;
    let mut start = decider.start(&*store, 1, "line", json!(null)).await;
    start.key = Some(StartKey { flow: "line".to_owned(), key: "k".to_owned(), fingerprint: [7; 32] });
    let thing = documents(2, vec![put("thing", "a", json!(1), None)]);
    let first = store.commit(vec![Command::Run(start.clone()), thing.clone()], Vec::new()).await.unwrap();
    let mut publish = documents(3, Vec::new());
    if let Command::Documents(commit) = &mut publish {
        let event = NewEvent { id: "e".to_owned(), name: "ping".to_owned(), key: None, payload: json!(1).into() };
        commit.events = vec![event];
    }
    store.commit(vec![publish.clone()], Vec::new()).await.unwrap();
    let ns = Namespace::default();
    let position = store.event(&ns, "e").await.unwrap().unwrap().position;
    while store.trim(&Trim::Event { ns: ns.clone(), id: "e".to_owned() }).await.unwrap() {}
    drop(store);
    for next in [postgres(&mut schemas), Place::directory(), postgres(&mut schemas)] {
        moved(&place, &next, &clock).await;
        place = next;
        let store = place.open(clock.clone()).await;
        let again = store.commit(vec![Command::Run(start.clone()), thing.clone()], Vec::new()).await.unwrap();
        for (first, again) in first.commands.iter().zip(&again.commands) {
            let (first, again) = (first.as_ref().unwrap(), again.as_ref().unwrap());
            assert_eq!((again.at, again.first, again.before), (first.at, first.first, true));
        }
        let mut other = decider.start(&*store, 9, "line", json!(null)).await;
        other.key = start.key.clone();
        let taken = store.commit(vec![Command::Run(other)], Vec::new()).await.unwrap().commands.remove(0);
        assert_eq!(taken, Err(Refused::KeyTaken { run: run_id(1), fingerprint: [7; 32] }));
        assert_eq!(store.documents(Some(&ns), &filter("thing"), 9).await.unwrap()[0].revision, 1);
    }
    let store = place.open(clock.clone()).await;
    if let Command::Documents(commit) = &mut publish {
        commit.command = command_id(4);
    }
    store.commit(vec![publish], Vec::new()).await.unwrap();
    let after = store.event(&ns, "e").await.unwrap().unwrap().position;
    assert!(after > position, "{after} was given before {position}");
    let changed = documents(5, vec![put("thing", "a", json!(2), None)]);
    store.commit(vec![changed], Vec::new()).await.unwrap().commands.remove(0).unwrap();
    assert_eq!(store.documents(Some(&ns), &filter("thing"), 9).await.unwrap()[0].revision, 2);
}

fn filter(kind: &str) -> DocumentFilter {
    DocumentFilter { kind: kind.to_owned(), ..DocumentFilter::default() }
}
