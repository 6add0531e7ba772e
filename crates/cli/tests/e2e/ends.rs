//! Runs of every shape end with the right result.

use std::collections::BTreeMap;

use eddyline::protocol::Failure;
use eddyline::{Client, Error, Run, StepCtx, StepError, Worker};
use serde_json::{Value, json};

use crate::eddy::Eddy;
use crate::order;
use crate::timeline::check;
use crate::working::{TRANSPORTS, work};

/// The statuses of the steps of a run, by activation.
async fn statuses(run: &Run) -> BTreeMap<String, String> {
    run.steps().await.unwrap().into_iter().map(|step| (step.activation, step.status)).collect()
}

/// Runs a flow over both transports, with one worker whose handler `work` serves all steps.
async fn play<F, Fut>(flow: &str, input: Value, handler: F, mut look: impl AsyncFnMut(&Client, &Run))
where
    F: Fn(StepCtx, Value) -> Fut + Send + Sync + Clone + 'static,
    Fut: Future<Output = Result<Value, StepError>> + Send + 'static,
{
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("f", flow).await.unwrap();
    for transport in TRANSPORTS {
        let worker = work(Worker::connect(eddy.url()).handler("work", handler.clone()), transport);
        let run = client.start("f", &input).await.unwrap();
        let _ = run.result::<Value>().await;
        look(&client, &run).await;
        check(&client, run.id()).await;
        worker.stop().await;
    }
}

#[tokio::test]
async fn a_chain_a_diamond_and_a_spread() {
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    order::register(&client).await;
    for (n, transport) in [7, 8].into_iter().zip(TRANSPORTS) {
        let worker = work(order::worker(eddy.url()), transport);
        let run = client.start(order::NAME, &order::input(n)).await.unwrap();
        assert_eq!(run.result::<Value>().await.unwrap(), order::output(n));
        let attempts = check(&client, run.id()).await;
        assert_eq!((attempts.len(), attempts.values().sum::<usize>()), (order::TASKS, order::TASKS));
        worker.stop().await;
    }
}

#[tokio::test]
async fn a_branch_that_is_not_taken_ends_and_so_does_what_hangs_on_it() {
    let flow = r#"
steps:
  load: {run: work}
  big: {after: [load], if: "steps.load.output.total > 100", run: work}
  stamp: {after: [big], run: work}
  small: {after: [load], if: "steps.load.output.total <= 100", run: work}
  done: {after: [stamp, small], join: some, run: work}
output: "${steps.done.output.step}"
"#;
    let handler = |ctx: StepCtx, _: Value| async move { Ok(json!({"total": 50, "step": ctx.step()})) };
    play(flow, json!(null), handler, async |_, run| {
        assert_eq!(run.result::<Value>().await.unwrap(), "done");
        let statuses = statuses(run).await;
        let ended = ["load", "big", "stamp", "small", "done"].map(|step| statuses[step].as_str());
        assert_eq!(ended, ["completed", "skipped", "skipped", "completed", "completed"]);
    })
    .await;
}

#[tokio::test]
async fn a_step_that_fails_twice_is_tried_a_third_time() {
    let flow = "steps: {a: {run: work, retry: {attempts: 3, initial: 10ms}}}\noutput: \"${steps.a.output}\"";
    let handler = |ctx: StepCtx, _: Value| async move {
        match ctx.attempt() {
            3 => Ok(json!({"attempt": 3})),
            _ => Err(StepError::new("not yet").kind("Busy")),
        }
    };
    play(flow, json!(null), handler, async |client, run| {
        assert_eq!(run.result::<Value>().await.unwrap(), json!({"attempt": 3}));
        assert_eq!(check(client, run.id()).await["a"], 3);
        let attempts = run.steps().await.unwrap().remove(0).attempts;
        let kinds: Vec<Option<&str>> =
            attempts.iter().map(|attempt| attempt.error.as_ref().map(|error| error.kind.as_str())).collect();
        assert_eq!(kinds, [Some("Busy"), Some("Busy"), None]);
    })
    .await;
}

#[tokio::test]
async fn a_spread_keeps_the_order_of_its_items_and_an_item_that_fails_for_good_fails_the_run() {
    let flow = r#"{steps: {each: {spread: "input.items", run: work, max_parallel: 7, retry: {attempts: 1}}}, output: "${steps.each.output}"}"#;
    let handler = |_: StepCtx, item: Value| async move {
        match item.as_u64() {
            Some(1_000) => Err(StepError::permanent("this one not").kind("Bad")),
            other => Ok(json!(other.map(|n| n * 2))),
        }
    };
    let items: Vec<u64> = (0..50).collect();
    let doubled: Vec<u64> = items.iter().map(|n| n * 2).collect();
    play(flow, json!({ "items": items }), handler, async |_, run| {
        assert_eq!(run.result::<Vec<u64>>().await.unwrap(), doubled);
    })
    .await;
    play(flow, json!({"items": []}), handler, async |_, run| {
        assert_eq!(run.result::<Vec<u64>>().await.unwrap(), [0u64; 0]);
    })
    .await;
    play(flow, json!({"items": [1, 1_000, 3]}), handler, async |_, run| {
        match run.result::<Value>().await.unwrap_err() {
            Error::RunFailed { failure, .. } => {
                let Failure { kind, step, .. } = *failure;
                assert_eq!((kind.as_str(), step.as_deref()), ("Bad", Some("each[1]")));
            }
            other => panic!("{other}"),
        }
    })
    .await;
}
