//! A flow with a chain, a diamond and a spread, whose output shows whether every step was executed correctly.

use eddyline::{Client, StepCtx, StepError, Worker};
use serde::Deserialize;
use serde_json::{Value, json};

pub const NAME: &str = "order";
/// Tasks of one run.
pub const TASKS: usize = 8;

/// Unlimited attempts, since workers are killed any number of times.
const RETRY: &str = "{attempts: -1, initial: 10ms, max: 100ms}";
const FLOW: &str = r#"
steps:
  reserve: {run: add, retry: RETRY, input: {n: "${input.n}", by: 1}}
  check:   {after: [reserve], run: add, retry: RETRY, input: {n: "${steps.reserve.output}", by: 10}}
  left:    {after: [check], run: add, retry: RETRY, input: {n: "${steps.check.output}", by: 100}}
  right:   {after: [check], run: add, retry: RETRY, input: {n: "${steps.check.output}", by: 1000}}
  items:   {after: [left, right], run: three, retry: RETRY, input: "${steps.left.output + steps.right.output}"}
  each:    {after: [items], spread: "steps.items.output", run: add, retry: RETRY, input: {n: "${item}", by: "${index}"}}
  total:   {after: [each], set: "${sum(steps.each.output)}"}
output: {total: "${steps.total.output}"}
"#;

pub async fn register(client: &Client) {
    client.register_flow(NAME, &FLOW.replace("RETRY", RETRY)).await.unwrap();
}

pub fn input(n: u64) -> Value {
    json!({ "n": n })
}

/// The expected output of a run with this input.
pub fn output(n: u64) -> Value {
    let both = (n + 1 + 10 + 100) + (n + 1 + 10 + 1000);
    json!({"total": both + (both + 1 + 1) + (both + 2 + 2)})
}

#[derive(Debug, Deserialize)]
pub struct Sum {
    pub n: u64,
    pub by: u64,
}

pub async fn add(_: StepCtx, sum: Sum) -> Result<u64, StepError> {
    Ok(sum.n + sum.by)
}

pub async fn three(_: StepCtx, first: u64) -> Result<[u64; 3], StepError> {
    Ok([first, first + 1, first + 2])
}

pub fn worker(url: String) -> Worker {
    Worker::connect(url).handler("add", add).handler("three", three).max_concurrent(8)
}
