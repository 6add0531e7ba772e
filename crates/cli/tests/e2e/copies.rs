//! `eddy store copy`: whatever was begun on one store goes on to its right end on the other.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use eddyline::protocol::{OnConflict, Page, PublishEvent};
use eddyline::{Client, Method, Run, StepCtx, StepError, Worker};
use serde_json::{Value, json};

use crate::eddy::{Eddy, LONG};
use crate::postgres::{drop_schemas_now, execute, fresh_url};
use crate::timeline::{check, records};
use crate::working::{Transport, work};

/// A schema that is deleted at the end.
struct Schema(String);

impl Drop for Schema {
    fn drop(&mut self) {
        drop_schemas_now(vec![std::mem::take(&mut self.0)]);
    }
}

fn eddy(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
    command.args(args).env_remove("EDDY_STORE").stdin(Stdio::null());
    command
}

fn copy(from: &str, to: &str, more: &[&str]) -> Output {
    eddy(&[&["store", "copy", "--from", from, "--to", to][..], more].concat()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Copies and returns the document.
fn copied(from: &str, to: &str) -> Value {
    let output = copy(from, to, &["--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "with --json there is only the document");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["equal"], true, "{document}");
    document
}

fn rows(document: &Value, table: &str) -> u64 {
    let found = document["tables"].as_array().unwrap().iter().find(|row| row["table"] == table);
    found.unwrap()["target"]["rows"].as_u64().unwrap()
}

async fn post(client: &Client, path: &str, body: Value) -> Value {
    client.call(Method::POST, path, &[], Some(&body)).await.unwrap()
}

async fn put(client: &Client, path: &str, body: Value) {
    let _: Value = client.call(Method::PUT, path, &[], Some(&body)).await.unwrap();
}

async fn claim(client: &Client, queue: &str, wait_ms: u64) -> Option<Value> {
    let ask = json!({"worker_id": "w", "queues": [queue], "max": 1, "wait_ms": wait_ms});
    post(client, "/v1/tasks/claim", ask).await["tasks"].as_array().unwrap().first().cloned()
}

async fn report(client: &Client, task: &Value, op: Value) -> String {
    let mut report = json!({"task_id": task["task_id"], "token": task["token"], "seq": 1});
    report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
    let answer = post(client, "/v1/tasks/report", json!({"worker_id": "w", "reports": [report]})).await;
    answer["outcomes"][0]["outcome"].as_str().unwrap().to_owned()
}

/// The token of the only open gate of a run.
async fn token(client: &Client, run: &str) -> String {
    let deadline = Instant::now() + LONG;
    loop {
        let query = [("run", run.to_owned())];
        let gates: Page<Value> = client.call(Method::GET, "/v1/gates", &query, None::<&()>).await.unwrap();
        if let [gate] = gates.items.as_slice() {
            return gate["token"].as_str().unwrap().to_owned();
        }
        assert!(Instant::now() < deadline, "{:?}", gates.items);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn status(client: &Client, run: &str) -> String {
    client.run(run).info().await.unwrap().status
}

/// What a client can list: runs in their order with their states, flows, queues, limits and keys.
async fn listed(client: &Client) -> Vec<Value> {
    let mut all = Vec::new();
    for path in ["/v1/runs", "/v1/flows", "/v1/queues", "/v1/limits", "/v1/keys", "/v1/namespaces"] {
        let page: Page<Value> = client.call(Method::GET, path, &[], None::<&()>).await.unwrap();
        // Queues without rules are forgotten when they are empty.
        let items = page.items.into_iter().filter(|item| path != "/v1/queues" || !item["concurrency"].is_null());
        let stable = ["run_id", "status", "name", "current", "key_id", "scopes", "concurrency", "tags", "external_id"];
        all.extend(items.map(|mut item| {
            let fields = item.as_object_mut().unwrap();
            fields.retain(|name, _| stable.contains(&name.as_str()));
            item
        }));
    }
    all
}

const FLOWS: [(&str, &str); 9] = [
    ("quick", "{steps: {a: {set: 1}}, output: \"${steps.a.output}\"}"),
    ("work", "{steps: {a: {queue: open}, b: {after: [a], queue: open}}, output: \"${steps.b.output}\"}"),
    ("held", "{steps: {a: {queue: held}}, output: \"${steps.a.output}\"}"),
    ("broken", "{steps: {a: {queue: broken}}}"),
    ("again", "{steps: {a: {queue: again, retry: {attempts: 2, initial: 3s}}}, output: \"${steps.a.output}\"}"),
    ("nap", "{steps: {nap: {await: {time: 3s}}}, output: done}"),
    ("ask", "{steps: {ask: {await: {manual: true}}}, output: \"${steps.ask.output}\"}"),
    ("paid", "{steps: {paid: {await: {event: paid, key: input.id}}}, output: \"${steps.paid.output}\"}"),
    ("parent", "{steps: {child: {flow: ask}}, output: \"${steps.child.output}\"}"),
];

/// Runs in every state, and what is needed to end them.
struct Begun {
    done: Run,
    failed: String,
    queued: String,
    paused: String,
    held: (String, Value),
    limited: [String; 2],
    limited_task: Value,
    again: String,
    nap: String,
    ask: String,
    paid: String,
    parent: String,
    lines: [String; 2],
    later: String,
}

async fn begin(client: &Client) -> Begun {
    for (name, flow) in FLOWS {
        client.register_flow(name, flow).await.unwrap();
    }
    client.register_flow("limited", "{steps: {a: {queue: limited, limits: [api]}}, output: ok}").await.unwrap();
    put(client, "/v1/limits/api", json!({"concurrency": 1})).await;
    put(client, "/v1/queues/open", json!({"concurrency": 3})).await;
    post(client, "/v1/keys", json!({"name": "ci", "scopes": ["read"]})).await;
    let start = async |flow: &str| client.start(flow, &json!({"id": 7})).await.unwrap().id().to_owned();
    let done = client.start("quick", &json!(1)).idempotency_key("k1").tags(["t"]).external_id("x").await.unwrap();
    let failed = start("broken").await;
    let task = claim(client, "broken", 30_000).await.unwrap();
    let fail =
        |retryable: bool| json!({"op": "fail", "error": {"kind": "Boom", "message": "m"}, "retryable": retryable});
    assert_eq!(report(client, &task, fail(false)).await, "applied");
    let again = start("again").await;
    let task = claim(client, "again", 30_000).await.unwrap();
    assert_eq!(report(client, &task, fail(true)).await, "applied");
    let held = start("held").await;
    let held = (held, claim(client, "held", 30_000).await.unwrap());
    let limited = [start("limited").await, start("limited").await];
    let limited_task = claim(client, "limited", 30_000).await.unwrap();
    assert!(claim(client, "limited", 0).await.is_none(), "the limit is reached");
    let (queued, paused) = (start("work").await, start("work").await);
    client.run(&paused).pause().await.unwrap();
    let (nap, ask, paid, parent) = (start("nap").await, start("ask").await, start("paid").await, start("parent").await);
    let line = async || client.start("ask", &json!(null)).unique("u", OnConflict::Queue).await.unwrap().id().to_owned();
    let lines = [line().await, line().await];
    let later = start("ask").await;
    // All of them have begun to wait.
    for run in [&ask, &lines[0], &later] {
        token(client, run).await;
    }
    done.result::<Value>().await.unwrap();
    let begun = Begun {
        done,
        failed,
        queued,
        paused,
        held,
        limited,
        limited_task,
        again,
        nap,
        ask,
        paid,
        parent,
        lines,
        later,
    };
    assert_eq!(status(client, &begun.failed).await, "failed");
    begun
}

async fn echo(_: StepCtx, _: Value) -> Result<&'static str, StepError> {
    Ok("echo")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_in_every_state_go_on_in_postgres_and_back_in_a_directory() {
    let mut first = Eddy::start(&[]);
    let begun = begin(&first.client()).await;
    let (before, timeline) = (listed(&first.client()).await, records(&first.client(), begun.done.id()).await);
    assert!(first.terminate().await.success());
    let (schema, directory) = (Schema(fresh_url()), first.store().to_string_lossy().into_owned());
    let document = copied(&directory, &schema.0);
    assert_eq!(rows(&document, "unique keys"), 2);
    // Two instances go on with it.
    let mut instances = [Eddy::on_store(&schema.0, &[]), Eddy::on_store(&schema.0, &[])];
    let [one, two] = [instances[0].client(), instances[1].client()];
    // The nap may have ended meanwhile.
    let still = |listed: Vec<Value>| -> Vec<Value> {
        listed.into_iter().filter(|item| item["run_id"] != begun.nap && item["run_id"] != begun.again).collect()
    };
    assert_eq!(still(listed(&one).await), still(before));
    assert_eq!(records(&two, begun.done.id()).await, timeline);
    let same = two.start("quick", &json!(1)).idempotency_key("k1").await.unwrap();
    assert_eq!((same.id(), same.existing()), (begun.done.id(), true));
    assert_eq!(status(&two, &begun.paused).await, "paused");
    // Workers that still hold their tasks report them, to any instance; a limit counts them.
    assert!(claim(&one, "limited", 0).await.is_none(), "the limit is still reached");
    assert_eq!(report(&two, &begun.held.1, json!({"op": "complete", "output": "kept"})).await, "applied");
    assert_eq!(report(&one, &begun.limited_task, json!({"op": "complete"})).await, "applied");
    let copy_while_served = copy(&schema.0, "/nonexistent/never", &[]);
    assert_eq!(copy_while_served.status.code(), Some(5));
    assert!(text(&copy_while_served.stderr).contains("is served by"), "{}", text(&copy_while_served.stderr));
    end(&one, &two, &begun, instances[1].url()).await;
    // And back, with a run that still waits.
    for instance in &mut instances {
        assert!(instance.terminate().await.success());
    }
    let home = tempfile::tempdir().unwrap();
    let back = home.path().join("back").to_string_lossy().into_owned();
    copied(&schema.0, &back);
    let third = Eddy::on_store(&back, &[]);
    let client = third.client();
    let same = client.start("quick", &json!(1)).idempotency_key("k1").await.unwrap();
    assert_eq!((same.id(), same.existing()), (begun.done.id(), true));
    assert_eq!(records(&client, begun.done.id()).await, timeline);
    client.open_gate(&token(&client, &begun.later).await, &json!("late")).await.unwrap();
    assert_eq!(client.run(&begun.later).result::<Value>().await.unwrap(), json!("late"));
    check(&client, &begun.later).await;
}

/// Brings every run but one to its end, through both instances.
async fn end(one: &Client, two: &Client, begun: &Begun, url: String) {
    two.run(&begun.paused).resume().await.unwrap();
    one.open_gate(&token(two, &begun.ask).await, &json!("yes")).await.unwrap();
    let paid = PublishEvent { name: "paid".to_owned(), key: Some(json!(7)), payload: json!("now"), id: None };
    two.publish([paid]).await.unwrap();
    assert_eq!(status(one, &begun.lines[1]).await, "pending");
    for run in &begun.lines {
        one.open_gate(&token(two, run).await, &json!("next")).await.unwrap();
        assert_eq!(two.run(run).result::<Value>().await.unwrap(), json!("next"));
    }
    // The only gates to open by hand are the child's and the one that is left for later.
    let gates: Page<Value> = one.call(Method::GET, "/v1/gates", &[], None::<&()>).await.unwrap();
    // The event may not have reached its gate yet.
    let by_hand = gates.items.iter().filter(|gate| gate["token"].is_string());
    let child = by_hand.map(|gate| gate["run_id"].as_str().unwrap()).find(|run| *run != begun.later);
    let child = child.unwrap().to_owned();
    two.open_gate(&token(one, &child).await, &json!("from below")).await.unwrap();
    let worker =
        ["open", "limited", "again"].into_iter().fold(Worker::connect(url), |worker, queue| worker.queue(queue));
    let worker = work(worker.handler("a", echo).handler("b", echo), Transport::Socket);
    for (run, output) in [
        (&begun.queued, json!("echo")),
        (&begun.paused, json!("echo")),
        (&begun.again, json!("echo")),
        (&begun.held.0, json!("kept")),
        (&begun.limited[0], json!("ok")),
        (&begun.limited[1], json!("ok")),
        (&begun.nap, json!("done")),
        (&begun.ask, json!("yes")),
        (&begun.paid, json!("now")),
        (&begun.parent, json!("from below")),
        (&child, json!("from below")),
    ] {
        let ended = one.run(run).wait(LONG).await.unwrap().unwrap_or_else(|| panic!("{run} did not end"));
        assert_eq!((ended.status.as_str(), &ended.output), ("completed", &output), "{run}");
        check(two, run).await;
    }
    let attempts = check(one, &begun.held.0).await;
    assert_eq!(attempts["a"], 1, "the worker kept its task");
    assert_eq!(check(one, &begun.again).await["a"], 2);
    check(one, &begun.failed).await;
    assert_eq!(status(two, &begun.later).await, "waiting");
    worker.stop().await;
}

/// A store in a directory with runs that take a while to copy.
async fn large() -> Eddy {
    let mut eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("ask", "{steps: {ask: {await: {manual: true}}}}").await.unwrap();
    let input = json!({"text": "x".repeat(2_000)});
    for _ in 0..4 {
        let items = (0..500).map(|_| client.start("ask", &input).into_item().unwrap());
        assert!(client.start_batch(items).await.unwrap().iter().all(Result::is_ok));
    }
    assert!(eddy.terminate().await.success());
    eddy
}

/// What `eddy serve` says when it refuses a store.
fn serve_refused(store: &str) -> String {
    let output = eddy(&["serve", "--store", store, "--listen", "127.0.0.1:0"]).output().unwrap();
    assert_ne!(output.status.code(), Some(0));
    text(&output.stderr)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_killed_is_not_served_and_begins_anew() {
    let source = large().await;
    let from = source.store().to_string_lossy().into_owned();
    let (schema, home) = (Schema(fresh_url()), tempfile::tempdir().unwrap());
    let directory = home.path().join("copy");
    let directory_url = directory.to_string_lossy().into_owned();
    for to in [&schema.0, &directory_url] {
        let mut copying = eddy(&["store", "copy", "--from", &from, "--to", to]).stdout(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + LONG;
        while !has_begun(to, &directory).await {
            assert!(copying.try_wait().unwrap().is_none(), "it ended before it could be killed");
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        copying.kill().unwrap();
        assert!(!copying.wait().unwrap().success(), "it was killed too late");
        let why = serve_refused(to);
        assert!(why.contains("unfinished copy") && why.contains("--restart"), "{why}");
        let output = copy(&from, to, &[]);
        assert_eq!(output.status.code(), Some(5));
        assert!(text(&output.stderr).contains("use --restart"), "{}", text(&output.stderr));
        let output = copy(&from, to, &["--restart"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let shown = text(&output.stdout);
        assert!(shown.contains("TABLE") && shown.contains("2000 runs"), "{shown}");
        let served = Eddy::on_store(to, &[]);
        let query = [("count", "true".to_owned())];
        let page: Page<Value> = served.client().call(Method::GET, "/v1/runs", &query, None::<&()>).await.unwrap();
        assert_eq!(page.total, Some(2_000));
    }
}

/// Whether a copy has written some rows.
async fn has_begun(to: &str, directory: &Path) -> bool {
    match to.starts_with("postgres") {
        // An error unless there are runs.
        true => execute(to, "SELECT 1 / count(*) FROM SCHEMA.runs").await,
        false => std::fs::metadata(directory.join("eddyline.db.copying")).is_ok_and(|file| file.len() > 1 << 20),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_says_what_stands_in_its_way() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).to_string_lossy().into_owned();
    let says = |output: Output, code: i32, words: &str| {
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(words), "{said}");
    };
    says(copy("memory:", &path("a"), &[]), 2, "cannot be a memory store");
    says(copy(&path("a"), "redis://db", &[]), 2, "does not support redis stores");
    says(copy(&path("a"), &path("a"), &[]), 2, "are both");
    says(copy(&path("a"), &path("b"), &[]), 5, "there is no store in");
    let mut eddy = Eddy::start(&[]);
    let from = eddy.store().to_string_lossy().into_owned();
    says(copy(&from, &path("b"), &[]), 5, "is locked by process");
    eddy.client().register_flow("quick", "{steps: {a: {set: 1}}}").await.unwrap();
    eddy.client().start("quick", &json!(1)).await.unwrap().result::<Value>().await.unwrap();
    assert!(eddy.terminate().await.success());
    says(copy(&from, &from, &[]), 2, "are both");
    copied(&from, &path("b"));
    says(copy(&from, &path("b"), &["--restart"]), 5, "already has a store (with 1 runs");
    let conn = rusqlite::Connection::open(eddy.store().join("eddyline.db")).unwrap();
    conn.execute("UPDATE records SET body = replace(body, 'quick', 'quack') WHERE first = 1", []).unwrap();
    drop(conn);
    says(copy(&from, &path("c"), &[]), 1, "records: records 1 to");
    let why = serve_refused(&path("c"));
    assert!(why.contains("unfinished copy"), "{why}");
}
