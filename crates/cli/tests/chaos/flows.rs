//! The flows of the workload, and the handlers of their steps.

use std::sync::Arc;
use std::time::Duration;

use eddyline::protocol::Verdict;
use eddyline::{Client, StepCtx, StepError, Worker};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::Api;
use crate::hands::CODE;
use crate::ledger::Ledger;

/// Unlimited, since any number of attempts lose their lease.
const RETRY: &str = "{attempts: -1, initial: 10ms, max: 100ms}";

pub const NARROW: usize = 3;
pub const TENANT: usize = 1;
pub const SLIM: usize = 2;
/// The limit's rate: tasks per second, and its burst.
pub const PACED: (u64, u64) = (20, 5);

const FLOWS: [(&str, &str); 9] = [
    (
        "diamond",
        r#"
steps:
  top:   {run: work, retry: RETRY, input: {n: "${input.n}", by: 1}}
  left:  {after: [top], run: work, retry: RETRY, input: {n: "${steps.top.output}", by: 10}}
  right: {after: [top], run: work, retry: RETRY, input: {n: "${steps.top.output}", by: 100}}
  join:  {after: [left, right], run: work, retry: RETRY, input: {n: "${steps.left.output + steps.right.output}", by: 0}}
output: "${steps.join.output}"
"#,
    ),
    (
        "wide",
        r#"
steps:
  each: {spread: "input.items", run: work, retry: RETRY, input: {n: "${item}", by: 1}}
  join: {after: [each], run: work, retry: RETRY, input: {n: "${sum(steps.each.output)}", by: 0}}
output: "${steps.join.output}"
"#,
    ),
    (
        "gate",
        r#"
steps:
  ask:  {await: {manual: true}}
  then: {after: [ask], run: work, retry: RETRY, input: {n: "${steps.ask.output.n}", by: 1}}
output: "${steps.then.output}"
"#,
    ),
    (
        "event",
        r#"
steps:
  paid: {await: {event: paid, key: "input.id"}}
  then: {after: [paid], run: work, retry: RETRY, input: {n: "${steps.paid.output.n}", by: 1}}
output: "${steps.then.output}"
"#,
    ),
    (
        "parent",
        r#"
steps:
  each: {spread: "input.items", flow: diamond, input: {n: "${item}"}}
  join: {after: [each], run: work, retry: RETRY, input: {n: "${sum(steps.each.output)}", by: 0}}
output: "${steps.join.output}"
"#,
    ),
    (
        "limited",
        r#"
steps:
  narrow: {spread: "[1, 2]", run: work, retry: RETRY, limits: [narrow], input: {n: "${item}", by: 0, ms: 20}}
  tenant: {run: work, retry: RETRY, limits: [{tenant: "${input.tenant}"}], input: {n: 1, by: 0, ms: 20}}
  paced:  {run: work, retry: RETRY, limits: [paced], input: {n: 1, by: 0}}
  slim:   {run: work, retry: RETRY, queue: slim, input: {n: 1, by: 0, ms: 20}}
  join:   {after: [narrow, tenant, paced, slim], set: "${sum(steps.narrow.output) + steps.tenant.output + steps.paced.output + steps.slim.output}"}
output: "${steps.join.output}"
"#,
    ),
    (
        "flaky",
        r#"
steps:
  fetch: {run: flaky, retry: {attempts: -1, initial: 50ms, factor: 2.0, max: 200ms, jitter: 0.5}}
  nap:   {after: [fetch], await: {time: 300ms}}
  then:  {after: [nap], run: work, retry: RETRY, input: {n: 1, by: 1}}
output: "${steps.then.output}"
"#,
    ),
    (
        "doomed",
        r#"
steps:
  first: {run: doomed, retry: RETRY, input: {n: "${input.n}", by: 1}}
  then:  {after: [first], run: work, retry: RETRY, input: {n: "${steps.first.output}", by: 1}}
output: "${steps.then.output}"
"#,
    ),
    (
        "hand",
        r#"
steps:
  first: {run: hand, retry: RETRY, input: {n: "${input.n}", by: 1}}
  each:  {after: [first], spread: "[1, 2, 3, 4]", run: hand, retry: RETRY, input: {n: "${item}", by: "${steps.first.output}"}}
  join:  {after: [each], run: hand, retry: RETRY, input: {n: "${sum(steps.each.output)}", by: 0}}
output: "${steps.join.output}"
"#,
    ),
];

pub async fn register(client: &Client, api: &Api) {
    for (name, text) in FLOWS {
        client.register_flow(name, &text.replace("RETRY", RETRY)).await.unwrap();
    }
    client.register_flow(CODE, "{code: true}").await.unwrap();
    let _: Value = api.put("/v1/limits/narrow", &json!({"concurrency": NARROW})).await;
    let _: Value = api.put("/v1/limits/tenant", &json!({"concurrency": TENANT})).await;
    let (count, burst) = PACED;
    let _: Value = api.put("/v1/limits/paced", &json!({"rate": {"count": count, "per": "1s", "burst": burst}})).await;
    let _: Value = api.put("/v1/queues/slim", &json!({"concurrency": SLIM})).await;
}

#[derive(Debug, Deserialize)]
pub struct Work {
    pub n: u64,
    pub by: u64,
    #[serde(default)]
    ms: u64,
}

/// A worker that records what it does and what was acknowledged.
pub fn worker(url: String, ledger: &Arc<Ledger>) -> Worker {
    let (working, flaking, answered) = (ledger.clone(), ledger.clone(), ledger.clone());
    let doomed = ledger.clone();
    Worker::connect(url)
        .queue("default")
        .queue("slim")
        .handler("work", move |ctx: StepCtx, work: Work| worked(working.clone(), ctx, work))
        .handler("doomed", move |ctx: StepCtx, work: Work| worked(doomed.clone(), ctx, work))
        .handler("flaky", move |ctx: StepCtx, _: Value| flaked(flaking.clone(), ctx))
        .max_concurrent(8)
        .on_answer(move |task, op, outcome| {
            if let (eddyline::protocol::Op::Complete { output, .. }, Verdict::Applied) = (op, outcome.outcome) {
                answered.completed(task, output);
            }
        })
}

async fn worked(ledger: Arc<Ledger>, ctx: StepCtx, work: Work) -> Result<u64, StepError> {
    ledger.begun(ctx.task());
    if work.ms > 0 {
        tokio::time::sleep(Duration::from_millis(work.ms)).await;
    }
    Ok(work.n + work.by)
}

async fn flaked(ledger: Arc<Ledger>, ctx: StepCtx) -> Result<u32, StepError> {
    ledger.begun(ctx.task());
    match ctx.attempt() {
        1 | 2 => Err(StepError::new("not yet").kind("Flaky")),
        attempt => Ok(attempt),
    }
}
