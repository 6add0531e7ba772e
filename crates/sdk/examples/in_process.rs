//! Everything in one process: an engine on a directory, a worker, and a run of a flow.
//!
//! `cargo run --example in_process --features engine`. Nothing else is needed.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use eddyline::{StepCtx, StepError, Worker};
use eddyline_engine::{Config, Engine, StartRequest};
use eddyline_store::{Embedded, Namespace, Options};
use serde_json::json;
use tokio::sync::oneshot;

const FLOW: &str = "
name: invoice
steps:
  load:  {}
  each:  {after: [load], spread: steps.load.output, run: price}
  total: {after: [each], set: '${sum(steps.each.output)}'}
output: '${steps.total.output}'
";

async fn load(ctx: StepCtx, count: u32) -> Result<Vec<u32>, StepError> {
    ctx.log(format!("{count} items"));
    Ok((1..=count).collect())
}

async fn price(_: StepCtx, item: u32) -> Result<u32, StepError> {
    Ok(item * 10)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let store = Arc::new(Embedded::open(dir.path(), Options::default())?);
    let engine = Engine::start(store, Config::default());
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = Worker::in_process(engine.clone()).handler("load", load).handler("price", price);
    let worker = tokio::spawn(worker.run_until(stopped));

    let ns = Namespace::default();
    engine.register(&ns, None, FLOW).await?;
    let request = StartRequest { flow: "invoice".to_owned(), input: json!(4), ..StartRequest::default() };
    let started = engine.start_run(&ns, request).await?;
    match engine.result(&ns, started.run, Duration::from_secs(30)).await? {
        Some(result) => println!("{}: {}", result.status.as_str(), result.output.unwrap_or_default()),
        None => println!("not yet"),
    }

    // Dropping it would do as well: the worker finishes its tasks, then the engine stops.
    let _ = stop.send(());
    worker.await??;
    engine.shutdown().await;
    Ok(())
}
