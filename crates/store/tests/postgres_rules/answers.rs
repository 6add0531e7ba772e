//! Answers are true: stored times, sealed rows, servers that may be used.

use eddyline_machine::{Input, ValueId};
use eddyline_store::*;
use serde_json::json;

use crate::private::{Private, TRUST};
use crate::story::{everything, ns, put};
use crate::{Two, claims, one};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_times_are_the_databases_and_never_before_what_the_run_has() {
    let mut t = Two::in_real_time().await;
    let run = t.start("line", json!(1)).await;
    let clock = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let before = t.number_of(clock).await;
    let pause = t.decide(run, Input::Pause { by: "ann".to_owned() }).await;
    let at = one(&t.b, Command::Run(pause)).await.unwrap().at;
    assert!((before..=t.number_of(clock).await).contains(&at), "{at}");
    // The database's clock went back by an hour since.
    let ahead = at + 3_600_000;
    t.execute(&format!("UPDATE SCHEMA.runs SET changed_at = {ahead}")).await;
    let resume = t.decide(run, Input::Resume { by: "ann".to_owned() }).await;
    assert_eq!(one(&t.b, Command::Run(resume)).await.unwrap().at, ahead);
    let request = t.ask("ann", 1);
    assert_eq!(claims(&t.a, request).await.tasks.len(), 1);
    let times: Vec<i64> = t.a.records(run, 0, 100).await.unwrap().iter().map(|record| record.ts).collect();
    assert!(times.is_sorted(), "{times:?}");
    assert_eq!(times.last(), Some(&ahead));
}

/// Tables with sealed rows, and the columns by which the rows of a run (or of the namespace) are told apart.
const SEALED: [(&str, &str); 9] = [
    ("runs", "id"),
    ("activations", "run, id"),
    ("\"values\"", "run, id"),
    ("records", "run, first"),
    ("tasks", "run, fence"),
    ("gates", "run, activation"),
    ("messages", "target, id"),
    ("events", "id"),
    ("documents", "id"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_with_the_body_of_another_is_found() {
    let mut t = Two::new().await;
    let big = "x".repeat(2_000);
    let mut runs = Vec::new();
    for n in 0..2 {
        runs.push(t.start("gated", json!({"n": n, "big": big})).await);
        runs.push(t.start("parent", json!({"n": n, "big": big})).await);
        runs.push(t.start("line", json!({"n": n, "big": big})).await);
    }
    let mut commit = t.documents(vec![put("schedule", "a", json!(1), None), put("schedule", "b", json!(2), None)]);
    commit.events = ["a", "b"]
        .map(|id| NewEvent {
            id: id.to_owned(),
            name: "paid".to_owned(),
            key: None,
            payload: eddyline_machine::Data::from(json!(id)),
        })
        .to_vec();
    one(&t.a, Command::Documents(commit)).await.unwrap();
    everything(&*t.b, &runs).await;
    for (table, key) in SEALED {
        let body = if table == "runs" { "header" } else { "body" };
        // Its checksum moves with it.
        let columns = key.replace(", ", ", x.");
        let swap = format!(
            "UPDATE SCHEMA.{table} x SET crc = o.crc, {body} = o.{body} \
             FROM (SELECT ROW({key})::text AS key, crc, {body} FROM SCHEMA.{table}) o, \
                 (SELECT min(ROW({key})::text) AS one, max(ROW({key})::text) AS two FROM SCHEMA.{table} \
                 WHERE crc IS NOT NULL) p \
             WHERE (ROW(x.{columns})::text = p.one AND o.key = p.two) OR (ROW(x.{columns})::text = p.two AND o.key = p.one)"
        );
        t.execute(&swap).await;
        let why =
            damage(&t, &runs).await.unwrap_or_else(|| panic!("two rows of {table} were exchanged, and nobody noticed"));
        assert!(why.contains(&table.replace('"', "")), "{table}: {why}");
        t.execute(&swap).await;
        assert_eq!(damage(&t, &runs).await, None, "{table} is as it was");
    }
}

/// The first damage that some read finds.
async fn damage(t: &Two, runs: &[eddyline_machine::RunId]) -> Option<String> {
    let mut found = Vec::new();
    for run in runs {
        let values: Vec<ValueId> = (0..8).map(ValueId).collect();
        found.push(t.b.load(*run, None).await.map(|_| ()));
        found.push(t.b.pending(*run).await.map(|_| ()));
        found.push(t.b.records(*run, 0, 100).await.map(|_| ()));
        found.push(t.b.values(*run, &values).await.map(|_| ()));
    }
    found.push(t.b.gates(Some(&ns()), &GateFilter::default(), Page::default()).await.map(|_| ()));
    let schedules = DocumentFilter { kind: "schedule".to_owned(), ..DocumentFilter::default() };
    found.push(t.b.documents(Some(&ns()), &schedules, 10).await.map(|_| ()));
    let events = Feed::Events { name: None, key: None, since: None };
    found.push(t.b.feed(&ns(), &events, Page::default()).await.map(|_| ()));
    // Held items are not handed out again.
    t.execute("UPDATE SCHEMA.messages SET held_until = 0").await;
    found.push(t.b.due(Due::Messages, &[], 100).await.map(|_| ()));
    found.into_iter().find_map(|read| match read {
        Err(StoreError::Corrupt(why)) => Some(why),
        Ok(()) => None,
        Err(other) => panic!("{other}"),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_is_refused() {
    let server = Private::start(TRUST, "", None);
    let url = server.url("eddy", "127.0.0.1", "");
    drop(Postgres::open(&url, PostgresOptions::default()).await.unwrap());
    server.end("fast");
    server.put_file("data/standby.signal", "");
    server.begin();
    let refused = Postgres::open(&url, PostgresOptions::default()).await.unwrap_err().to_string();
    assert!(refused.contains("standby"), "{refused}");
}
