//! A run that outlives its process. A child process works on an order and is killed halfway; this process opens the
//! same directory, and the run continues where it was: `cargo run --example survive`.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{Assignment, ClaimTasks, Config, Engine, StartRequest, TaskReport};
use eddyline_machine::{Data, Failure, Op, RunId};
use eddyline_store::{Embedded, Namespace, Offer, Options};
use serde_json::{Value, json};

const FLOW: &str = r#"
name: order
steps:
  reserve: {retry: {attempts: 3, initial: 100ms}}
  review:  {after: [reserve], if: "steps.reserve.output.total > 100"}
  each:    {after: [reserve], spread: "steps.reserve.output.items", run: price}
  sum:     {after: [each], set: "${sum(steps.each.output)}"}
  rest:    {after: [sum], await: {time: 300ms}}
  ship:    {after: [rest, "ended:review"]}
output: {total: "${steps.sum.output}", label: "${steps.ship.output}"}
"#;

/// The environment variable that passes the directory to the process that will be killed.
const CHILD: &str = "SURVIVE_DIR";
/// A worker that is silent for this long loses its task.
const LEASE_MS: i64 = 500;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    if let Some(dir) = std::env::var_os(CHILD) {
        return begin(dir.as_ref()).await;
    }
    let dir = tempfile::tempdir()?;
    let mut child = Command::new(std::env::current_exe()?).env(CHILD, dir.path()).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
    let run: RunId = serde_json::from_value(json!(lines.next().ok_or("the child printed no run id")??))?;
    for line in lines {
        let line = line?;
        println!("{line}");
        if line.ends_with("pricing each[1]") {
            child.kill()?;
            println!("process {}   killed", child.id());
            break;
        }
    }
    child.wait()?;
    go_on(dir.path(), run).await
}

/// Starts the order and works on it.
async fn begin(dir: &Path) -> Result<(), Box<dyn Error>> {
    let ns = Namespace::default();
    let engine = engine(dir)?;
    engine.register(&ns, None, FLOW).await?;
    let request = StartRequest { flow: "order".to_owned(), input: json!({"id": 7}), ..StartRequest::default() };
    let started = engine.start_run(&ns, request).await?;
    println!("{}", started.run);
    tokio::spawn(work(engine.clone()));
    engine.result(&ns, started.run, Duration::from_secs(60)).await?;
    Ok(())
}

/// Opens the directory and finishes the run.
async fn go_on(dir: &Path, run: RunId) -> Result<(), Box<dyn Error>> {
    let ns = Namespace::default();
    let engine = engine(dir)?;
    tokio::spawn(work(engine.clone()));
    let result = engine.result(&ns, run, Duration::from_secs(60)).await?;
    println!("\nthe timeline of run {run}:\n");
    let mut follower = engine.follow(&ns, run, 0).await?;
    let mut first = None;
    while let Some(records) = follower.next().await? {
        for record in records {
            let began = *first.get_or_insert(record.ts);
            let entry = serde_json::to_value(&record.record.entry)?;
            let step = record.record.entry.step_key().unwrap_or_default();
            println!(
                "{:>3}  {:>6} ms  {:<24} {step}",
                record.n,
                record.ts - began,
                entry["kind"].as_str().unwrap_or_default()
            );
        }
    }
    if let Some(result) = result {
        println!("\n{}: {}", result.status.as_str(), result.output.unwrap_or_default());
    }
    engine.shutdown().await;
    Ok(())
}

fn engine(dir: &Path) -> Result<Engine, Box<dyn Error>> {
    let store = Arc::new(Embedded::open(dir, Options::default())?);
    Ok(Engine::start(store, Config { lease_ms: LEASE_MS, ..Config::default() }))
}

/// Claims, executes and reports one task after the other.
async fn work(engine: Engine) {
    let ns = Namespace::default();
    loop {
        let claim = ClaimTasks {
            worker: format!("process {}", std::process::id()),
            queues: vec!["default".to_owned()],
            offer: Arc::new(Offer::default()),
            max: 1,
            most_held: None,
            request: None,
            lease_ms: None,
        };
        let Ok(tasks) = engine.claim(&ns, claim, Duration::from_secs(60)).await else { return };
        for task in tasks {
            let op = handle(&task);
            tokio::time::sleep(Duration::from_millis(50)).await;
            let report = TaskReport { token: task.token, seq: Some(1), op };
            if engine.report(&ns, vec![report]).await.is_err() {
                return;
            }
        }
    }
}

fn say(what: &str) {
    println!("process {}   {what}", std::process::id());
}

fn handle(task: &Assignment) -> Op {
    let done = |output: Value| Op::Complete { output: Data::from(output), emits: Vec::new(), logs: Vec::new() };
    match (task.handler.as_str(), task.attempt) {
        ("reserve", 1) => {
            say("reserving, attempt 1: the warehouse does not answer");
            Op::Fail {
                error: Failure::new("Busy", "the warehouse did not answer"),
                retryable: true,
                retry_after_ms: None,
            }
        }
        ("reserve", attempt) => {
            say(&format!("reserving, attempt {attempt}"));
            done(json!({"total": 90, "items": [{"sku": "a", "cents": 250}, {"sku": "b", "cents": 400}]}))
        }
        ("price", _) => {
            say(&format!("pricing {}", task.activation));
            done(task.input["cents"].clone())
        }
        (handler, _) => {
            say(&format!("{handler}ping"));
            done(json!(format!("{handler} done")))
        }
    }
}
