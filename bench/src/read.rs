//! Reading a long timeline through a server: pages of a projection, and the log of one step.

use std::time::{Duration, Instant};

use eddyline::{Client, Method, StepCtx, StepError, Worker};
use eddyline_server::{ServeArgs, start};
use serde_json::{Value, json};

use crate::measure::{Measure, Row};

type Failed = Box<dyn std::error::Error>;

/// An item of a spread leaves four records.
const RECORDS_AN_ITEM: usize = 4;
const PAGE: usize = 1_000;
const READS: usize = 20;

/// A run with about `records` records, one of them a log: the cost of its first and last page, and of that log.
pub async fn pages(records: usize) -> Result<Vec<Row>, Failed> {
    let dir = tempfile::tempdir()?;
    let store = Some(dir.path().display().to_string());
    let server = start(&ServeArgs { store, listen: Some("127.0.0.1:0".to_owned()), ..ServeArgs::default() }).await?;
    let client = Client::new(&server.url())?;
    client.register_flow("wide", "{steps: {each: {spread: input, run: item}}}").await?;
    let items = records / RECORDS_AN_ITEM;
    let item = move |ctx: StepCtx, n: usize| async move {
        if n == items / 2 {
            ctx.log("half of it");
        }
        Ok::<_, StepError>(n)
    };
    let worker = Worker::connect(server.url()).queue("default").handler("item", item).max_concurrent(100);
    let worker = tokio::spawn(worker.run_until(std::future::pending::<()>()));
    let run = client.start("wide", &(0..items).collect::<Value>()).await?;
    run.result::<Value>().await?;
    worker.abort();

    let (steps, flow) = (format!("nq:proj:flow-steps:{}", run.id()), format!("nq:proj:flow:wide:{}", run.id()));
    let last = records - PAGE;
    let mut rows = Vec::new();
    for (what, stream) in [("steps", &steps), ("snapshot", &flow)] {
        rows.push(read(&client, &format!("{what}, page 1"), stream, &[], 0, READS).await?);
        rows.push(read(&client, &format!("{what}, last page, first time"), stream, &[], last, 1).await?);
        rows.push(read(&client, &format!("{what}, last page"), stream, &[], last, READS).await?);
        rows.push(in_order(&client, &format!("{what}, all pages in order"), stream).await?);
    }
    let timeline = format!("nq:flow:{}", run.id());
    let of_step = [("step", format!("each[{}]", items / 2)), ("kind", "runner.log".to_owned())];
    rows.push(read(&client, "the log of one step", &timeline, &of_step, 0, READS).await?);
    server.stop().await;
    Ok(rows)
}

async fn page(
    client: &Client,
    stream: &str,
    query: &[(&str, String)],
    after: usize,
) -> Result<(Value, Duration), Failed> {
    let mut query = query.to_vec();
    query.extend([("after", after.to_string()), ("limit", PAGE.to_string())]);
    let since = Instant::now();
    let page: Value = client.call(Method::GET, &format!("/v1/streams/{stream}"), &query, None::<&()>).await?;
    Ok((page, since.elapsed()))
}

/// Reads the same page repeatedly.
async fn read(
    client: &Client,
    what: &str,
    stream: &str,
    query: &[(&str, String)],
    after: usize,
    times: usize,
) -> Result<Row, Failed> {
    let (measure, mut took) = (Measure::start(), Vec::new());
    for _ in 0..times {
        let (read, needed) = page(client, stream, query, after).await?;
        if read["items"].as_array().is_none_or(Vec::is_empty) {
            return Err(format!("{stream} has nothing after {after}").into());
        }
        took.push(needed);
    }
    Ok(measure.row(format!("read {what}"), "embedded", times as u64, took))
}

async fn in_order(client: &Client, what: &str, stream: &str) -> Result<Row, Failed> {
    let (measure, mut took, mut after) = (Measure::start(), Vec::new(), json!("0"));
    while let Some(from) = after.as_str().and_then(|after| after.parse().ok()) {
        let (read, needed) = page(client, stream, &[], from).await?;
        took.push(needed);
        after = read["next"].clone();
    }
    Ok(measure.row(format!("read {what}"), "embedded", took.len() as u64, took))
}
