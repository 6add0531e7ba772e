//! A worker in its own process is asked to stop. The process is this test again; its environment tells it to be the
//! worker.

#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake;

use std::process::Stdio;

use eddyline::protocol::Op;
use eddyline::{StepCtx, StepError, Worker};
use fake::{Fake, LONG, State};
use serde_json::json;
use tokio::process::{Child, Command};

const URL: &str = "SIGNALS_TEST_URL";

/// Says that it has begun, and continues until it is cancelled.
async fn wait(ctx: StepCtx, (): ()) -> Result<&'static str, StepError> {
    ctx.emit_now("begun", ()).await?;
    ctx.cancelled().await;
    Ok("finished")
}

fn worker_process(test: &str, fake: &Fake) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(URL, &fake.url).stdout(Stdio::null()).kill_on_drop(true);
    command.spawn().unwrap()
}

/// The worker, if this process should be one. Exits the process.
async fn be_the_worker_if_told() {
    let Ok(url) = std::env::var(URL) else { return };
    let result = Worker::connect(url).handler("wait", wait).run().await;
    std::process::exit(if result.is_ok() { 0 } else { 1 });
}

async fn terminate(child: &Child) {
    let pid = child.id().expect("it runs").to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
}

fn begun(state: &State) -> Option<()> {
    state.effects.iter().any(|report| matches!(&report.op, Op::Emit(_))).then_some(())
}

#[tokio::test]
async fn a_signal_drains() {
    be_the_worker_if_told().await;
    let fake = Fake::new().await;
    fake.offer("wait", [json!(null)]);
    let mut worker = worker_process("a_signal_drains", &fake);
    fake.until("the handler", begun).await;
    terminate(&worker).await;
    fake.until("the drain", |state| state.drained.then_some(())).await;
    fake.set(|state| state.cancel = vec!["wait-0".to_owned()]);
    let status = tokio::time::timeout(LONG, worker.wait()).await.expect("it ends").unwrap();
    assert!(status.success(), "{status}");
    let last = fake.set(|state| state.effects.last().cloned()).unwrap();
    assert!(matches!(&last.op, Op::Complete { output, .. } if output == "finished"), "{last:?}");
    assert!(fake.set(|state| state.left));
}

#[tokio::test]
async fn a_second_signal_does_not_wait() {
    be_the_worker_if_told().await;
    let fake = Fake::new().await;
    fake.offer("wait", [json!(null)]);
    let mut worker = worker_process("a_second_signal_does_not_wait", &fake);
    fake.until("the handler", begun).await;
    terminate(&worker).await;
    fake.until("the drain", |state| state.drained.then_some(())).await;
    terminate(&worker).await;
    let status = tokio::time::timeout(LONG, worker.wait()).await.expect("it ends").unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(fake.set(|state| state.effects.len()), 1, "running tasks are dropped");
}
