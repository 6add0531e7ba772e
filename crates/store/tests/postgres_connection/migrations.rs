//! Tables: who makes them, from every version on, in schemas of any name, with roles that may do little.
//!
//! Rows of an earlier version are in `tests/postgres/rows_vN.sql`, written by that version. Before a step is added to the
//! schema, run `EDDY_WRITE_ROWS=1 cargo test -p eddyline-store --test postgres_connection rows_of` with the code of the
//! newest version; it writes the file.

use std::path::PathBuf;
use std::process::Command as Process;
use std::task::{Context, Poll, Waker};

use eddyline_machine::{RunId, run::Status};
use eddyline_store::*;
use serde_json::json;

use crate::private::{Private, TRUST};
use crate::story::{Decider, claim, documents, ns, put, run_id};
use crate::*;

/// The runs of the rows of every version: one that has ended, one that has just begun and waits for a worker.
const ENDED: u128 = 1;
const BEGUN: u128 = 2;

fn with(url: &str, schema: &str) -> String {
    url.replace(schema_of(url), schema)
}

async fn newest() -> usize {
    let url = server::fresh_url();
    let made = Postgres::migrate(&url).await.unwrap();
    server::drop_schemas(vec![url]).await;
    made.to
}

async fn write_rows(store: &Postgres) {
    let mut decider = Decider::new();
    whole_run(store, &mut decider, ENDED).await;
    until_known(store, &decider.start(store, BEGUN, "line", json!({"n": BEGUN as u64})).await).await;
    let change = documents(70, vec![put("queue", "bulk", json!({"concurrency": 3}), None)]);
    store.commit(vec![change], Vec::new()).await.unwrap().commands.remove(0).unwrap();
}

/// Everything goes on from such rows.
async fn go_on(store: &Postgres) {
    assert_whole(store, run_id(ENDED)).await;
    let mut decider = Decider::new();
    // Ids of commands are not used twice.
    for _ in 0..1_000 {
        decider.skip();
    }
    finish(store, store, &mut decider, BEGUN).await;
    assert_whole(store, run_id(BEGUN)).await;
    whole_run(store, &mut decider, 3).await;
    let found = store.documents(None, &DocumentFilter { kind: "queue".to_owned(), ..Default::default() }, 10).await;
    assert_eq!(found.unwrap().len(), 1);
    let filter = RunFilter { status: vec![Status::Completed], ..RunFilter::default() };
    let listed = store.runs(Some(&ns()), &filter, Page::default()).await.unwrap();
    assert_eq!(listed.iter().map(|run| run.run).collect::<Vec<RunId>>(), [3, BEGUN, ENDED].map(run_id));
}

fn rows_file(version: usize) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/postgres/rows_v{version}.sql"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_every_version_are_used_by_the_newest() {
    let newest = newest().await;
    for version in 1..=newest {
        let url = server::fresh_url();
        let made = Postgres::migrate_to(&url, version).await.unwrap();
        assert_eq!((made.from, made.to), (0, version));
        if version == newest {
            write_rows(&open(&url).await.unwrap()).await;
            if std::env::var("EDDY_WRITE_ROWS").is_ok() {
                dump(&url, version);
            }
        } else {
            let rows = std::fs::read_to_string(rows_file(version));
            let rows = rows
                .unwrap_or_else(|_| panic!("{} is missing: see the head of this file", rows_file(version).display()));
            beside(&url)
                .await
                .batch_execute(&rows.replace("eddyline.", &format!("{}.", schema_of(&url))))
                .await
                .unwrap();
            let refused =
                Postgres::open(&url, PostgresOptions { migrate: false, ..Default::default() }).await.unwrap_err();
            assert!(refused.to_string().contains(&format!("version {version}, and this Eddyline needs {newest}")));
        }
        assert_eq!(Postgres::migrate(&url).await.unwrap().from, version);
        assert_eq!(Postgres::migrate(&url).await.unwrap().from, newest, "once");
        go_on(&open(&url).await.unwrap()).await;
    }
}

/// Writes the rows of a schema for the test above.
fn dump(url: &str, version: usize) {
    let bin = server::binaries().unwrap().join("pg_dump");
    let schema = schema_of(url);
    let plain = url.split("&schema=").next().unwrap().split("?schema=").next().unwrap();
    let dumped = Process::new(bin)
        .args(["--data-only", "--column-inserts", "--schema", schema, "--exclude-table", "*.versions"])
        .args(["--exclude-table", "*.meta", plain])
        .output()
        .unwrap();
    assert!(dumped.status.success(), "{}", String::from_utf8_lossy(&dumped.stderr));
    let text = String::from_utf8(dumped.stdout).unwrap().replace(&format!("{schema}."), "eddyline.");
    let rows: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("INSERT") || line.starts_with("SELECT pg_catalog.setval"))
        .collect();
    std::fs::write(rows_file(version), rows.join("\n") + "\n").unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_processes_that_start_at_once_make_the_tables_once() {
    let url = server::fresh_url();
    let opening: Vec<_> = (0..6)
        .map(|_| {
            tokio::spawn({
                let url = url.clone();
                async move { open(&url).await }
            })
        })
        .collect();
    for opened in opening {
        opened.await.unwrap().unwrap();
    }
    let sql = format!("SELECT count(*) FROM {}.versions", schema_of(&url));
    let versions: i64 = beside(&url).await.query_one(&sql, &[]).await.unwrap().get(0);
    assert_eq!(versions as usize, newest().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_that_are_missing_are_not_made_unless_that_is_allowed() {
    let url = server::fresh_url();
    let options = PostgresOptions { migrate: false, ..PostgresOptions::default() };
    let why = Postgres::open(&url, options.clone()).await.unwrap_err().to_string();
    assert!(why.contains("has no tables") && why.contains("eddy migrate --store"), "{why}");
    let newest = newest().await;
    let migrated = Postgres::migrate(&url).await.unwrap();
    assert_eq!((migrated.schema.as_str(), migrated.from, migrated.to), (schema_of(&url), 0, newest));
    Postgres::open(&url, options.clone()).await.unwrap();
    let sql = format!("INSERT INTO {}.versions (version) VALUES (999)", schema_of(&url));
    beside(&url).await.batch_execute(&sql).await.unwrap();
    for why in [
        Postgres::open(&url, options).await.unwrap_err().to_string(),
        open(&url).await.unwrap_err().to_string(),
        Postgres::migrate(&url).await.unwrap_err().to_string(),
    ] {
        assert!(why.contains("version 999") && why.contains("newer Eddyline"), "{why}");
    }
}

/// What a newer Eddyline may do to the tables while this one serves: add columns, tables and functions of other names.
const NEWER: &str = "DO $$ DECLARE t text; BEGIN \
     FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'SCHEMA' AND tablename <> 'versions' LOOP \
         EXECUTE format('ALTER TABLE SCHEMA.%I ADD COLUMN newer text', t); \
     END LOOP; INSERT INTO SCHEMA.versions (version) SELECT max(version) + 1 FROM SCHEMA.versions; END $$";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_goes_on_beside_a_newer_one_that_has_changed_the_tables() {
    let url = server::fresh_url();
    let (store, mut decider) = (open(&url).await.unwrap(), Decider::new());
    // Everything is prepared and planned for the tables as they were.
    let run = whole_run(&store, &mut decider, 1).await;
    let due = async |store: &Postgres| {
        for what in [Due::Timers, Due::Messages, Due::Leases, Due::Documents] {
            store.due(what, &[], 10).await.unwrap();
        }
        story::everything(store, &[run]).await
    };
    let before = due(&store).await;
    let client = beside(&url).await;
    client.batch_execute(&NEWER.replace("SCHEMA", schema_of(&url))).await.unwrap();
    assert_eq!(due(&store).await, before);
    for n in 2..10 {
        let run = whole_run(&store, &mut decider, n).await;
        assert_whole(&store, run).await;
    }
    let info = InstanceInfo::default();
    store.check_in(InstanceId::default(), &info, 1).await.unwrap();
    let why = refused(&url).await;
    assert!(why.contains("newer Eddyline"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_format_is_written_when_all_instances_know_it_and_others_stop() {
    let url = server::fresh_url();
    let (store, mut decider) = (open(&url).await.unwrap(), Decider::new());
    let (own, info) = (InstanceId(uuid::Uuid::from_u128(1)), InstanceInfo::default());
    store.check_in(own, &info, 1).await.unwrap();
    // As a newer Eddyline checks in, which knows one format more.
    let check_in = format!(
        "SELECT out_format FROM {0}.check_in_v1(NULL, '{1}', 1, 2, '{{}}', 600000, 5000) LIMIT 1",
        schema_of(&url),
        uuid::Uuid::from_u128(2)
    );
    let client = beside(&url).await;
    let newer = async || client.query_one(&check_in, &[]).await.unwrap().get::<_, i64>(0);
    assert_eq!((newer().await, newer().await), (1, 1), "while this one serves, both write what it knows");
    whole_run(&store, &mut decider, 1).await;
    assert_eq!(store.health().await, Ok(()));

    store.check_out(own).await.unwrap();
    assert_eq!(newer().await, 2);
    store.check_in(own, &info, 1).await.unwrap();
    let commit = decider.start(&store, 2, "line", json!({})).await;
    let refusals = [
        store.health().await.unwrap_err().to_string(),
        store.commit(vec![Command::Run(commit)], Vec::new()).await.unwrap_err().to_string(),
        refused(&url).await,
    ];
    for why in refusals {
        assert!(why.contains("rows of format 2, and this Eddyline knows formats up to 1"), "{why}");
    }
    assert_eq!(newer().await, 2, "it is never lowered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_may_have_any_usual_name() {
    let base = server::fresh_url();
    let unique = schema_of(&base);
    let longest = format!("{unique}{}", "x".repeat(63 - unique.len()));
    for name in ["user", "2nd", "Mixed-Case", longest.as_str()] {
        let name = if name == longest { name.to_owned() } else { format!("{name}-{unique}") };
        let url = with(&base, &name);
        let (store, mut decider) = (open(&url).await.unwrap(), Decider::new());
        let run = whole_run(&store, &mut decider, 1).await;
        assert_whole(&store, run).await;
        assert_eq!(store.hears_others(), Some(true), "{name}");
        let sql = format!("SELECT count(*) FROM \"{name}\".steps_view");
        assert_eq!(beside(&url).await.query_one(&sql, &[]).await.unwrap().get::<_, i64>(0), 3);
        beside(&url).await.batch_execute(&format!("DROP SCHEMA \"{name}\" CASCADE")).await.unwrap();
    }
}

/// The runs that a store was told of so far.
fn told_runs(hints: &mut Hints) -> Vec<RunId> {
    let mut runs = Vec::new();
    while let Poll::Ready(Some(heard)) = hints.poll_next(&mut Context::from_waker(Waker::noop())) {
        if let Heard::Changes(changes) = heard {
            runs.extend(changes.iter().filter_map(|change| match change {
                Change::Run { run, .. } => Some(*run),
                _ => None,
            }));
        }
    }
    runs
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_schemas_of_one_database_do_not_hear_each_other() {
    let (url, other) = (server::fresh_url(), server::fresh_url());
    let (here, beside_it) = (open(&url).await.unwrap(), open(&url).await.unwrap());
    let (there, mut decider) = (open(&other).await.unwrap(), Decider::new());
    let mut hints = beside_it.watch();
    until_known(&there, &decider.start(&there, 1, "line", json!({})).await).await;
    assert!(here.summary(run_id(1)).await.unwrap().is_none());
    until_known(&here, &decider.start(&here, 2, "line", json!({})).await).await;
    let mut heard = Vec::new();
    until("the run is heard of", async || {
        heard.extend(told_runs(&mut hints));
        heard.contains(&run_id(2))
    })
    .await;
    assert!(!heard.contains(&run_id(1)), "{heard:?}");
    // A worker of the one is not asked for tasks of the other.
    assert_eq!(claimed(&here, claim(5, "ann", 9)).await.len(), 1);
}

/// As docs/stores.md says.
const GRANTS: &str = "
    GRANT USAGE ON SCHEMA flows TO server;
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA flows TO server;
    GRANT USAGE ON ALL SEQUENCES IN SCHEMA flows TO server;
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_needs_few_privileges_if_somebody_else_migrates() {
    let private = Private::start(TRUST, "", None);
    let admin = private.client().await;
    let roles = "CREATE ROLE owner LOGIN; CREATE ROLE server LOGIN; CREATE SCHEMA flows AUTHORIZATION owner";
    admin.batch_execute(roles).await.unwrap();
    let url = |user: &str| private.url(user, "127.0.0.1", "schema=flows");
    let options = PostgresOptions { migrate: false, ..PostgresOptions::default() };
    let why = Postgres::open(&url("server"), options.clone()).await.unwrap_err().to_string();
    assert!(why.contains("permission denied for schema flows"), "{why}");
    Postgres::migrate(&url("owner")).await.unwrap();
    admin.batch_execute(GRANTS).await.unwrap();
    let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/stores.md")).unwrap();
    for grant in GRANTS.lines().map(str::trim).filter(|line| !line.is_empty()) {
        assert!(docs.contains(grant), "docs/stores.md says otherwise: {grant}");
    }
    for options in [options, PostgresOptions::default()] {
        let store = Postgres::open(&url("server"), options).await.unwrap();
        let mut decider = Decider::new();
        let first = story::everything(&store, &[]).await.len() as u128;
        assert!(first > 0);
        let n = if store.summary(run_id(1)).await.unwrap().is_none() { 1 } else { 2 };
        for _ in 0..n * 100 {
            decider.skip();
        }
        assert_whole(&store, whole_run(&store, &mut decider, n).await).await;
        assert_eq!(store.hears_others(), Some(true));
        store.trim(&Trim::Traces { before: 1 }).await.unwrap();
    }
    let made = private.client().await.batch_execute("SET ROLE server; CREATE TABLE flows.more (n int)").await;
    assert!(made.is_err(), "it may not change tables");
}
