//! Retention deletes old timelines, headers, events and traces of commands, and nothing else.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;

use eddyline_engine::{Config, EngineError, NamespaceChange, PublishRequest, Retention, StartRequest};
use eddyline_store::{
    Command, CommandId, DocumentChange, DocumentCommit, DocumentKey, Embedded, Expect, Feed, ManualClock, Memory,
    Namespace, Options, Page, Store,
};
use rig::{Rig, done};
use serde_json::json;
use uuid::Uuid;

const DAY: i64 = 24 * 60 * 60 * 1_000;

/// Waits for two rounds, since the first may have begun before the call.
async fn looked(rig: &Rig) {
    let mut rounds = rig.engine.rounds("retention").unwrap();
    let now = *rounds.borrow();
    rounds.wait_for(|rounds| *rounds >= now + 2).await.unwrap();
}

async fn events(rig: &Rig, ns: &Namespace) -> usize {
    let feed = Feed::Events { name: None, key: None, since: None };
    rig.engine.store().feed(ns, &feed, Page::default()).await.unwrap().len()
}

async fn goes_by_age(store: Arc<dyn Store>, clock: Arc<ManualClock>) {
    let retention = Retention { every_ms: 5, ..Retention::default() };
    let rig = Rig::on(store.clone(), Config { retention, poll_ms: 20, ..Config::default() });
    let (other, far) = (Namespace::new("other"), Namespace::new("far"));
    rig.register("name: f\nsteps: {a: {}}").await;
    let looks = "name: g\nsteps: {w: {await: {event: ping, since: 10d}}}";
    rig.engine.register(&far, None, looks).await.unwrap();
    for ns in [&rig.ns, &other, &far] {
        let request = PublishRequest { name: "ping".to_owned(), ..PublishRequest::default() };
        rig.engine.publish(ns, vec![request]).await.unwrap();
    }
    let change =
        DocumentChange { key: DocumentKey::new("thing", "a"), expect: Expect::Absent, body: Some(json!(1)), due: None };
    let command = Command::Documents(DocumentCommit {
        ns: rig.ns.clone(),
        command: CommandId(Uuid::from_u128(5)),
        documents: vec![change],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    });
    let submit = async || store.commit(vec![command.clone()], Vec::new()).await.unwrap().commands.remove(0);
    assert!(submit().await.is_ok_and(|done| !done.before));
    let (ended, going) = (rig.start("f", json!(1)).await, rig.start("f", json!(2)).await);
    let task = rig.claim("w").await.unwrap();
    assert_eq!(task.run, ended);
    rig.report(&task, done(json!({"big": "x".repeat(1_000)}))).await;
    rig.output(ended).await;

    clock.advance(DAY / 2);
    looked(&rig).await;
    assert!(submit().await.is_ok_and(|done| done.before), "a repeat is recognised for a day");
    clock.advance(DAY);
    looked(&rig).await;
    assert!(submit().await.is_err(), "but not forever");
    assert!(!rig.records(ended).await.is_empty());
    assert_eq!((events(&rig, &rig.ns).await, events(&rig, &other).await, events(&rig, &far).await), (1, 1, 1));

    clock.advance(6 * DAY);
    looked(&rig).await;
    let records = rig.engine.records(&rig.ns, ended, 0, 10).await;
    assert!(matches!(records, Err(EngineError::Trimmed(_))), "{records:?}");
    let header = rig.engine.run(&rig.ns, ended).await.unwrap();
    assert!(header.summary.trimmed && header.input.is_none());
    assert!(!rig.records(going).await.is_empty(), "an unfinished run was deleted");
    assert_eq!((events(&rig, &rig.ns).await, events(&rig, &other).await), (0, 0));
    assert_eq!(events(&rig, &far).await, 1, "a gate there looks back over ten days");

    clock.advance(24 * DAY);
    looked(&rig).await;
    let header = rig.engine.run(&rig.ns, ended).await;
    assert!(matches!(header, Err(EngineError::NotFound { .. })), "{header:?}");
    assert_eq!(events(&rig, &far).await, 0);
    assert!(rig.engine.run(&rig.ns, going).await.is_ok());
    rig.stop().await;
}

#[tokio::test]
async fn in_memory_what_is_old_goes() {
    let clock = ManualClock::at(1_767_323_045_678);
    goes_by_age(Arc::new(Memory::with_clock(clock.clone())), clock).await;
}

#[tokio::test]
async fn on_disk_what_is_old_goes() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(1_767_323_045_678);
    let options = Options { clock: clock.clone(), ..Options::default() };
    goes_by_age(Arc::new(Embedded::open(dir.path(), options).unwrap()), clock).await;
}

/// Three namespaces: one with a shorter retention than the server's, one with a longer one, and one without settings.
async fn goes_by_the_settings_of_its_namespace(store: Arc<dyn Store>, clock: Arc<ManualClock>) {
    let retention = Retention { every_ms: 5, ..Retention::default() };
    let rig = Rig::on(store, Config { retention, poll_ms: 20, ..Config::default() });
    let [short, long] = ["short", "long"].map(Namespace::new);
    let mut runs = Vec::new();
    for ns in [&rig.ns, &short, &long] {
        rig.engine.register(ns, None, "name: f\nsteps: {a: {set: 1}}").await.unwrap();
        rig.engine.publish(ns, vec![PublishRequest { name: "p".to_owned(), ..Default::default() }]).await.unwrap();
        let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
        runs.push((ns.clone(), rig.engine.start_run(ns, request).await.unwrap().run));
    }
    let keep = |timelines, runs, events| NamespaceChange {
        timelines_ms: Some(Some(timelines)),
        runs_ms: Some(Some(runs)),
        events_ms: Some(Some(events)),
        ..NamespaceChange::default()
    };
    rig.engine.change_namespace(&short, keep(DAY, 2 * DAY, DAY)).await.unwrap();
    rig.engine.change_namespace(&long, keep(40 * DAY, 50 * DAY, 60 * DAY)).await.unwrap();
    // What is left of the run in each namespace, and how many events.
    let left = async || {
        looked(&rig).await;
        let mut left = Vec::new();
        for (ns, run) in &runs {
            let what = match rig.engine.run(ns, *run).await {
                Ok(run) if run.summary.trimmed => "header",
                Ok(_) => "all",
                Err(EngineError::NotFound { .. }) => "nothing",
                Err(error) => panic!("{error}"),
            };
            left.push((what, events(&rig, ns).await));
        }
        left
    };
    assert_eq!(left().await, [("all", 1), ("all", 1), ("all", 1)]);
    clock.advance(DAY + 1);
    assert_eq!(left().await, [("all", 1), ("header", 0), ("all", 1)]);
    clock.advance(DAY);
    assert_eq!(left().await, [("all", 1), ("nothing", 0), ("all", 1)]);
    clock.advance(29 * DAY);
    assert_eq!(left().await, [("nothing", 0), ("nothing", 0), ("all", 1)]);
    clock.advance(10 * DAY);
    assert_eq!(left().await, [("nothing", 0), ("nothing", 0), ("header", 1)]);
    // Back to the server's retention, which is shorter.
    let reset = NamespaceChange { runs_ms: Some(None), timelines_ms: Some(None), ..NamespaceChange::default() };
    rig.engine.change_namespace(&long, reset).await.unwrap();
    assert_eq!(left().await, [("nothing", 0), ("nothing", 0), ("nothing", 1)]);
    rig.stop().await;
}

#[tokio::test]
async fn in_memory_a_namespace_keeps_things_as_long_as_it_is_set() {
    let clock = ManualClock::at(1_767_323_045_678);
    goes_by_the_settings_of_its_namespace(Arc::new(Memory::with_clock(clock.clone())), clock).await;
}

#[tokio::test]
async fn on_disk_a_namespace_keeps_things_as_long_as_it_is_set() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(1_767_323_045_678);
    let options = Options { clock: clock.clone(), ..Options::default() };
    goes_by_the_settings_of_its_namespace(Arc::new(Embedded::open(dir.path(), options).unwrap()), clock).await;
}

/// A store is opened with a clock that is forty days ahead. Operators have an hour before anything is deleted.
#[tokio::test]
async fn nothing_is_deleted_in_the_hour_after_time_has_jumped() {
    let dir = tempfile::tempdir().unwrap();
    let start = 1_767_323_045_678;
    let retention = Retention { every_ms: 5, ..Retention::default() };
    let open = async |wall| {
        let clock = ManualClock::at(wall);
        let options = Options { clock: clock.clone(), ..Options::default() };
        // The previous owner may still be closing the store.
        let opening = async || loop {
            match Embedded::open(dir.path(), options.clone()) {
                Ok(store) => break store,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
            }
        };
        let store = tokio::time::timeout(std::time::Duration::from_secs(20), opening()).await.expect("it never opens");
        (clock, Rig::on(Arc::new(store), Config { retention, poll_ms: 20, ..Config::default() }))
    };
    let (_, rig) = open(start).await;
    rig.register("name: f\nsteps: {a: {}}").await;
    rig.engine
        .publish(&rig.ns, vec![PublishRequest { name: "ping".to_owned(), ..PublishRequest::default() }])
        .await
        .unwrap();
    let run = rig.start("f", json!(1)).await;
    let task = rig.claim("w").await.unwrap();
    rig.report(&task, done(json!(1))).await;
    rig.output(run).await;
    rig.stop().await;

    let (clock, rig) = open(start + 40 * DAY).await;
    looked(&rig).await;
    clock.advance(59 * 60 * 1_000);
    looked(&rig).await;
    assert!(!rig.records(run).await.is_empty(), "the timeline was deleted");
    assert_eq!(events(&rig, &rig.ns).await, 1, "events were deleted");
    clock.advance(60 * 1_000);
    looked(&rig).await;
    assert_eq!(events(&rig, &rig.ns).await, 0);
    let header = rig.engine.run(&rig.ns, run).await;
    assert!(matches!(header, Err(EngineError::NotFound { .. })), "{header:?}");
    rig.stop().await;
}
