//! Children: which start, which do not, and how their parents learn of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use eddyline_engine::{Config, StartRequest};
use eddyline_machine::{RunId, Status};
use eddyline_store::{Page, RunFilter};
use rig::{LONG, Rig, done};
use serde_json::{Value, json};

/// The kind and message of the error of a failed run.
async fn error_of(rig: &Rig, run: RunId) -> (String, String) {
    let result = rig.engine.result(&rig.ns, run, LONG).await.unwrap();
    let error = result.and_then(|result| result.error).unwrap_or_else(|| panic!("run {run} did not fail"));
    (error.kind, error.message)
}

/// A flow whose only step starts the child detached, with its own input.
fn detached(child: &str) -> String {
    format!("{{name: parent, steps: {{kid: {{flow: {child}, detached: true, input: '${{input}}'}}}}}}")
}

#[tokio::test]
async fn a_detached_child_of_a_flow_that_is_not_there_fails_its_step() {
    let rig = Rig::new();
    rig.register(&detached("nowhere")).await;
    let run = rig.start("parent", json!(1)).await;
    let (kind, message) = error_of(&rig, run).await;
    assert_eq!(
        (kind.as_str(), message.as_str()),
        ("FlowNotFound", "the child run was not started: there is no flow nowhere")
    );
    rig.stop().await;
}

#[tokio::test]
async fn a_detached_child_whose_input_is_refused_fails_its_step() {
    let rig = Rig::new();
    rig.register(&detached("kid")).await;
    rig.register("{name: kid, input_schema: {type: string}, steps: {a: {set: 1}}}").await;
    let run = rig.start("parent", json!(1)).await;
    let (kind, message) = error_of(&rig, run).await;
    assert_eq!(kind, "InvalidInput");
    let expected = "the input does not match the input_schema of kid: 1 is not of type \"string\"";
    assert!(message.contains(expected), "{message}");
    rig.stop().await;
}

#[tokio::test]
async fn a_child_whose_input_is_too_large_fails_its_step_detached_or_not() {
    for detached in [true, false] {
        let rig = Rig::new();
        rig.register("{name: kid, steps: {a: {set: 1}}}").await;
        let flow = format!(
            "{{name: parent, steps: {{kid: {{flow: kid, detached: {detached}, input: ['${{input}}', '${{input}}']}}}}}}"
        );
        rig.register(&flow).await;
        let run = rig.start("parent", json!("x".repeat(1_500_000))).await;
        let (kind, message) = error_of(&rig, run).await;
        assert_eq!(kind, "PayloadTooLarge", "{message}");
        rig.stop().await;
    }
}

#[tokio::test]
async fn a_detached_child_that_started_completes_its_step_with_its_id() {
    let mut rig = Rig::new();
    rig.register("{name: kid, steps: {a: {run: work}}, output: '${steps.a.output}'}").await;
    rig.register("{name: parent, steps: {kid: {flow: kid, detached: true}}, output: '${steps.kid.output}'}").await;
    let run = rig.start("parent", json!(7)).await;
    let output = rig.output(run).await;
    let kid: RunId = serde_json::from_value(output["run_id"].clone()).unwrap();
    rig.work(1, |task| done((*task.run_input).clone()));
    assert_eq!(rig.output(kid).await, json!(7));
    rig.stop().await;
}

const BOMB: &str = "{name: bomb, steps: {a: {flow: bomb}, b: {flow: bomb}}}";

async fn count(rig: &Rig, status: &[Status]) -> u64 {
    let filter = RunFilter { status: status.to_vec(), ..RunFilter::default() };
    rig.engine.store().count_runs(&rig.ns, &filter).await.unwrap()
}

const GOING: [Status; 4] = [Status::Pending, Status::Running, Status::Waiting, Status::Paused];

#[tokio::test]
async fn a_flow_that_starts_itself_twice_is_stopped_at_the_limit_of_descendants() {
    let config = Config { max_descendants: 300, ..Config::default() };
    let rig = Rig::with(config);
    rig.register(BOMB).await;
    let root = rig.start("bomb", json!(null)).await;
    let (kind, message) = error_of(&rig, root).await;
    assert_eq!(kind, "ChildFailed", "{message}");
    let all = count(&rig, &[]).await;
    // Starts in progress are not counted yet.
    assert!((300..1_500).contains(&all), "{all}");
    assert_eq!(count(&rig, &GOING).await, 0, "the failure of the last run reaches all");
    rig.stop().await;
}

#[tokio::test]
async fn a_flow_that_starts_itself_twice_detached_is_quiet_at_the_limit_of_descendants() {
    let config = Config { max_descendants: 300, ..Config::default() };
    let rig = Rig::with(config);
    rig.register("{name: bomb, steps: {a: {flow: bomb, detached: true}, b: {flow: bomb, detached: true}}}").await;
    rig.start("bomb", json!(null)).await;
    let mut rounds = rig.engine.rounds("inbox").unwrap();
    while count(&rig, &[]).await < 300 || count(&rig, &GOING).await > 0 {
        tokio::time::timeout(LONG, rounds.changed()).await.unwrap().unwrap();
    }
    let all = count(&rig, &[]).await;
    assert!((300..1_500).contains(&all), "{all}");
    let filter = RunFilter { status: vec![Status::Failed], ..RunFilter::default() };
    let failed = rig.engine.store().runs(Some(&rig.ns), &filter, Page { limit: 1, ..Page::default() }).await.unwrap();
    let (kind, message) = error_of(&rig, failed[0].run).await;
    assert_eq!(kind, "TooManyDescendants", "{message}");
    rig.stop().await;
}

#[tokio::test]
async fn a_cancelled_root_stops_everything_below_it_at_once() {
    let rig = Rig::new();
    rig.register(BOMB).await;
    let root = rig.start("bomb", json!(null)).await;
    while count(&rig, &[]).await < 500 {
        tokio::task::yield_now().await;
    }
    rig.engine.cancel(&rig.ns, root, "me", None).await.unwrap();
    let at_cancel = count(&rig, &[]).await;
    let mut rounds = rig.engine.rounds("inbox").unwrap();
    while count(&rig, &GOING).await > 0 {
        rounds.changed().await.unwrap();
    }
    let all = count(&rig, &[]).await;
    // Starts that were being delivered may still happen; without the check there would be 100,000.
    assert!(all <= at_cancel + 20_000, "{all} runs, of which {at_cancel} existed when the root was cancelled");
    rig.stop().await;
}

#[tokio::test]
async fn children_of_finally_start_after_a_cancel() {
    let rig = Rig::new();
    rig.register("{name: kid, steps: {a: {set: 1}}}").await;
    rig.register("{name: parent, steps: {a: {await: {manual: true}}}, finally: {steps: {clean: {flow: kid}}}}").await;
    let run = rig.start("parent", json!(null)).await;
    rig.engine.cancel(&rig.ns, run, "me", None).await.unwrap();
    let result = rig.engine.result(&rig.ns, run, LONG).await.unwrap().unwrap();
    assert_eq!((result.status, result.error.map(|error| error.message)), (Status::Cancelled, None));
    assert!(rig.kinds(run).await.contains(&"step.completed finally.clean".to_owned()));
    rig.stop().await;
}

#[tokio::test]
async fn a_start_is_refused_by_a_schema_that_takes_too_much_and_others_go_on() {
    let rig = Rig::new();
    let tree = json!({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [
        {"properties": {"x": {"$ref": "#/$defs/n"}, "z": false}, "required": ["x", "y"]},
        {"properties": {"x": {"$ref": "#/$defs/n"}, "y": false}, "required": ["x", "z"]},
        {"properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x", "w"]},
    ]}}});
    let flow = json!({"name": "costly", "input_schema": tree, "steps": {"a": {"set": 1}}});
    rig.register(&flow.to_string()).await;
    let deep = (0..60).fold(json!({"w": 1}), |inside, _| json!({"x": inside}));
    let request = StartRequest { flow: "costly".to_owned(), input: deep, ..StartRequest::default() };
    let error = rig.engine.start_run(&rig.ns, request).await.unwrap_err();
    assert_eq!(error.to_string(), "the input does not match the input_schema of costly");
    rig.register("{name: quick, steps: {a: {set: 1}}, output: '${steps.a.output}'}").await;
    let run = rig.start("quick", Value::Null).await;
    assert_eq!(rig.output(run).await, json!(1));
    rig.stop().await;
}
