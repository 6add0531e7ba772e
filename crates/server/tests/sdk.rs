//! The Rust client and worker against a real server, over connections that are cut again and again; and the examples of
//! the crate as readers run them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eddyline::{Client, Error, StepCtx, StepError, Worker};
use eddyline_server::{ServeArgs, Server, start};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};

/// Longer than anything here takes; only reached if something hangs.
const LONG: Duration = Duration::from_secs(60);

async fn server() -> Server {
    let args =
        ServeArgs { store: Some("memory:".to_owned()), listen: Some("127.0.0.1:0".to_owned()), ..ServeArgs::default() };
    start(&args).await.unwrap()
}

struct AtWork {
    stop: oneshot::Sender<()>,
    worker: JoinHandle<Result<(), Error>>,
}

fn put_to_work(url: &str, http_only: bool, staff: impl FnOnce(Worker) -> Worker) -> AtWork {
    let worker = staff(Worker::connect(url));
    let worker = if http_only { worker.http_only() } else { worker };
    let (stop, stopped) = oneshot::channel();
    AtWork { stop, worker: tokio::spawn(worker.run_until(stopped)) }
}

impl AtWork {
    async fn stop(self) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(LONG, self.worker).await.expect("the worker drains").unwrap().unwrap();
    }
}

/// Forwards connections to a server, and cuts all of them on demand.
struct Proxy {
    url: String,
    cut: watch::Sender<u32>,
    _passing_on: JoinSet<()>,
}

impl Proxy {
    async fn before(to: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let cut = watch::Sender::new(0);
        let cuts = cut.clone();
        let mut passing_on = JoinSet::new();
        passing_on.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut from, _) = listener.accept().await.unwrap();
                let mut cuts = cuts.subscribe();
                connections.spawn(async move {
                    let Ok(mut to) = TcpStream::connect(to).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut from, &mut to) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        Proxy { url, cut, _passing_on: passing_on }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_step_is_done_once_however_often_the_connection_is_cut() {
    const RUNS: usize = 200;
    const EVERY: usize = 30;
    for http_only in [false, true] {
        let server = server().await;
        let proxy = Proxy::before(server.addr()).await;
        let client = Client::new(&server.url()).unwrap();
        let flow = "
name: chain
steps:
  one:   {run: work}
  two:   {after: [one], run: work}
  three: {after: [two], run: work}
output: '${steps.three.output}'
";
        client.register_flow("chain", flow).await.unwrap();
        let done: Arc<Mutex<HashMap<String, u32>>> = Arc::default();
        let (counted, cut) = (done.clone(), proxy.cut.clone());
        let worker = put_to_work(&proxy.url, http_only, |worker| {
            worker.max_concurrent(40).handler("work", move |ctx: StepCtx, _: Value| {
                let (counted, cut) = (counted.clone(), cut.clone());
                async move {
                    let all = {
                        let mut counted = counted.lock().unwrap();
                        *counted.entry(ctx.key().to_owned()).or_default() += 1;
                        counted.len()
                    };
                    ctx.log("at work");
                    if all % EVERY == 0 {
                        cut.send_modify(|cuts| *cuts += 1);
                    }
                    tokio::task::yield_now().await;
                    Ok::<_, StepError>(ctx.attempt())
                }
            })
        });
        let items = (0..RUNS).map(|n| client.start("chain", &n).idempotency_key(n.to_string()).into_item().unwrap());
        let runs = client.start_batch(items).await.unwrap();
        for run in runs {
            let run = run.unwrap();
            let attempt = tokio::time::timeout(LONG, run.result::<u32>()).await.expect("it ends").unwrap();
            assert_eq!(attempt, 1, "no lease was lost, so no attempt was");
        }
        worker.stop().await;
        let done = done.lock().unwrap().clone();
        assert_eq!(done.len(), 3 * RUNS);
        let twice: Vec<_> = done.iter().filter(|(_, times)| **times > 1).collect();
        assert!(twice.is_empty(), "http_only {http_only}: done twice: {twice:?}");
        assert!(*proxy.cut.borrow() >= (3 * RUNS / EVERY) as u32);
        server.stop().await;
    }
}

#[tokio::test]
async fn an_output_of_more_than_2_mib_is_told_as_such_and_read_in_parts() {
    let server = server().await;
    let client = Client::new(&server.url()).unwrap();
    client
        .register_flow(
            "large",
            "{steps: {a: {run: text}, b: {run: text}}, output: [\"${steps.a.output}\", \"${steps.b.output}\"]}",
        )
        .await
        .unwrap();
    let text = async |_: StepCtx, _: Value| Ok::<_, StepError>("x".repeat(1_500_000));
    let work = put_to_work(&server.url(), false, |worker| worker.handler("text", text));
    let run = client.start("large", &json!(null)).await.unwrap();
    match run.result::<Vec<String>>().await {
        Err(Error::LargeOutput { output, .. }) => {
            for part in output.as_array().unwrap() {
                let reference = eddyline::protocol::Reference::read(part).unwrap();
                assert_eq!(run.value(&reference).await.unwrap(), json!("x".repeat(1_500_000)));
            }
        }
        other => panic!("{other:?}"),
    }
    work.stop().await;
    server.stop().await;
}

#[tokio::test]
async fn an_output_that_only_looks_like_a_reference_is_given_back_as_it_is() {
    let server = server().await;
    let client = Client::new(&server.url()).unwrap();
    let looks_so = json!({"$value": "00000000-0000-7000-8000-000000000000/12", "bytes": 100});
    let definition = json!({"steps": {"a": {"set": 1}}, "output": "${input}"}).to_string();
    client.register_flow("echo", &definition).await.unwrap();
    for input in [looks_so.clone(), json!([looks_so])] {
        let run = client.start("echo", &input).await.unwrap();
        assert_eq!(run.result::<Value>().await.unwrap(), input);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_cancelled_run_reaches_its_handler_long_before_the_next_heartbeat() {
    let server = server().await;
    let client = Client::new(&server.url()).unwrap();
    client.register_flow("long", "{name: long, steps: {wait: {}}}").await.unwrap();
    let (begun, cancelled) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, cancel) = (begun.clone(), cancelled.clone());
    let worker = put_to_work(&server.url(), false, |worker| {
        worker.handler("wait", move |ctx: StepCtx, (): ()| {
            let (begin, cancel) = (begin.clone(), cancel.clone());
            async move {
                begin.notify_one();
                ctx.cancelled().await;
                cancel.notify_one();
                Ok::<_, StepError>(())
            }
        })
    });
    let run = client.start("long", &()).await.unwrap();
    begun.notified().await;
    let info = client.info().await.unwrap();
    run.cancel(Some("no need")).await.unwrap();
    let soon = Duration::from_millis(info.heartbeat_ms / 2);
    tokio::time::timeout(soon, cancelled.notified()).await.expect("the handler is cancelled immediately");
    assert!(matches!(run.result::<Value>().await, Err(Error::RunCancelled { .. })));
    worker.stop().await;
    server.stop().await;
}

#[tokio::test]
async fn what_a_handler_says_is_in_the_timeline() {
    let server = server().await;
    let client = Client::new(&server.url()).unwrap();
    let flow = "{name: say, steps: {talk: {emits: [said, now]}, after: {subscribes: [now], run: talk_back}}, output: '${steps.after.output}'}";
    client.register_flow("say", flow).await.unwrap();
    let worker = put_to_work(&server.url(), false, |worker| {
        worker
            .handler("talk", |ctx: StepCtx, name: String| async move {
                ctx.log(format!("hello {name}"));
                ctx.emit_now("now", json!({"name": name})).await?;
                ctx.progress(1.0, Some(2.0), None);
                ctx.emit("said", 1)?;
                Ok::<_, StepError>(())
            })
            .handler("talk_back", |ctx: StepCtx, input: Value| async move {
                Ok::<_, StepError>(json!([input["now"]["name"], ctx.run_input::<String>()?]))
            })
    });
    let run = client.start("say", "Ada").await.unwrap();
    assert_eq!(run.result::<Value>().await.unwrap(), json!(["Ada", "Ada"]));
    let (mut timeline, mut kinds) = (run.follow(), Vec::new());
    while let Some(record) = timeline.next().await {
        kinds.push(record.unwrap().kind);
    }
    for (kind, times) in [("runner.log", 1), ("emit", 2), ("step.progress", 1), ("flow.completed", 1)] {
        assert_eq!(kinds.iter().filter(|seen| *seen == kind).count(), times, "{kind} in {kinds:?}");
    }
    worker.stop().await;
    assert!(
        client.call::<Value>(eddyline::Method::GET, "/v1/workers", &[], None::<&()>).await.unwrap()["items"]
            .as_array()
            .unwrap()
            .is_empty()
    );
    server.stop().await;
}

#[tokio::test]
async fn the_examples_do_what_they_say() {
    let server = server().await;
    let run = async |name: &str| {
        let running = example(name).env("EDDY_URL", server.url()).output();
        let output = tokio::time::timeout(LONG, running).await.expect("it ends").unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(run("batch").await.ends_with("the sum of their outputs is 5177125\n"));
    let approvals = run("approvals").await;
    assert!(
        approvals.contains("\"approved_by\":\"Grace\"") && approvals.contains("a gate opens only once"),
        "{approvals}"
    );
    assert_eq!(run("in_process").await, "completed: 100\n");
    let mut worker =
        example("worker").env("EDDY_URL", server.url()).stdout(Stdio::null()).kill_on_drop(true).spawn().unwrap();
    assert!(run("start_and_wait").await.ends_with("HELLO, ADA!\n"));
    let pid = worker.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
    let status = tokio::time::timeout(LONG, worker.wait()).await.expect("it drains").unwrap();
    assert!(status.success(), "{status}");
    server.stop().await;
}

/// An example of the crate `eddyline`. `cargo test` of the workspace builds it; `cargo test` of this package alone does
/// not.
fn example(name: &str) -> Command {
    let tests = std::env::current_exe().unwrap();
    let path: PathBuf = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    if !path.exists() {
        let built = std::process::Command::new(env!("CARGO"))
            .args(["build", "--locked", "--package", "eddyline", "--features", "engine", "--examples"])
            .status();
        assert!(built.unwrap().success() && path.exists(), "{} is not there", path.display());
    }
    Command::new(path)
}
