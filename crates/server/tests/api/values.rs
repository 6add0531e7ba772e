//! Payloads that are too large to be shown inline.

use eddyline::protocol::Reference;
use eddyline_machine::RunId;
use eddyline_store::Trim;
use serde_json::{Value, json};

use crate::client::{Client, Rig};

const LARGE: usize = 1_500_000;

/// A completed run of a flow whose only worker step is a spread: each item's output is a text of [`LARGE`] bytes.
async fn spread_of_texts(rig: &Rig, items: usize, output: &str) -> String {
    rig.flow("large", &format!("steps: {{each: {{spread: input, run: a}}}}\noutput: {output}")).await;
    let run = rig.run("large", (0..items).collect::<Value>()).await;
    for _ in 0..items {
        let task = rig.claim("w").await;
        let text = text_of(&task["input"]);
        assert_eq!(rig.report(&task, json!({"op": "complete", "output": text})).await["outcome"], "applied");
    }
    run
}

/// One digit, repeated.
fn text_of(item: &Value) -> String {
    (item.as_u64().unwrap() % 10).to_string().repeat(LARGE)
}

async fn follow(client: &Client, reference: &Value) -> Value {
    let reference = Reference::read(reference).unwrap_or_else(|| panic!("{reference} is not a reference"));
    let (run, key) = reference.parts().unwrap();
    let reply = client.get(&format!("/v1/runs/{run}/values/{key}")).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body
}

#[tokio::test]
async fn a_run_with_an_output_of_18_megabytes_is_looked_at_and_its_output_read_in_parts() {
    let rig = Rig::start().await;
    let run = spread_of_texts(&rig, 12, "\"${steps.each.output}\"").await;
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!((result.status, &result.body["status"]), (200, &json!("completed")), "{}", result.body);
    let shown = rig.get(&format!("/v1/runs/{run}")).await;
    assert_eq!((shown.status, &shown.body["output"]), (200, &result.body["output"]));
    let steps = rig.get(&format!("/v1/runs/{run}/steps?limit=1")).await;
    assert_eq!(steps.items()[0]["output"], result.body["output"]);
    let records = rig.get(&format!("/v1/streams/nq:flow:{run}?kind=flow.completed")).await;
    assert_eq!(records.items()[0]["data"]["output"], result.body["output"]);

    assert!(result.body["output"]["bytes"].as_u64().unwrap() > 18_000_000, "{}", result.body);
    let parts = follow(&rig, &result.body["output"]).await;
    assert_eq!(parts.as_array().unwrap().len(), 12);
    for (n, part) in parts.as_array().unwrap().iter().enumerate() {
        assert_eq!(follow(&rig, part).await, json!(text_of(&json!(n))));
    }
    rig.server.stop().await;
}

/// With some of its features serde_json reads such objects as numbers or parsed JSON, bypassing the limits of a body.
#[tokio::test]
async fn no_key_of_a_payload_has_a_meaning_for_the_parser() {
    let rig = Rig::start().await;
    rig.flow("same", "steps: {a: {set: 1}}\noutput: \"${input}\"").await;
    for key in ["$serde_json::private::RawValue", "$serde_json::private::Number"] {
        let input = json!([{key: "[1, 2]"}, {key: 3}]);
        let run = rig.run("same", input.clone()).await;
        let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
        assert_eq!(result.body["output"], input);
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_large_object_of_a_few_payloads_has_references_for_them() {
    let rig = Rig::start().await;
    let output = "{count: 2, first: \"${steps.each.output[0]}\", last: \"${steps.each.output[1]}\"}";
    let run = spread_of_texts(&rig, 2, output).await;
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    let output = &result.body["output"];
    assert_eq!(output["count"], 2, "{output}");
    assert_eq!(follow(&rig, &output["first"]).await, json!("0".repeat(LARGE)));
    assert_eq!(follow(&rig, &output["last"]).await, json!("1".repeat(LARGE)));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_value_is_found_in_its_run_and_namespace_alone() {
    let rig = Rig::start().await;
    let run = spread_of_texts(&rig, 2, "\"${steps.each.output}\"").await;
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    let Some(reference) = Reference::find(&result.body["output"]) else { panic!("{}", result.body) };
    let (_, key) = reference.parts().unwrap();
    let path = format!("/v1/runs/{run}/values/{key}");
    assert_eq!(rig.get(&path).await.status, 200);
    assert_eq!(rig.header("eddyline-namespace", "other").get(&path).await.code(), (404, "not_found"));
    for key in ["4000000000", "-1", "x", "99999999999999999999"] {
        assert_eq!(rig.get(&format!("/v1/runs/{run}/values/{key}")).await.code(), (404, "not_found"), "{key}");
    }
    assert_eq!(rig.delete(&format!("/v1/runs/{run}")).await.status, 200);
    assert_eq!(rig.get(&path).await.code(), (404, "not_found"));
    rig.server.stop().await;
}

#[tokio::test]
async fn values_of_a_trimmed_run_are_gone() {
    let rig = Rig::start().await;
    let run = spread_of_texts(&rig, 2, "\"${steps.each.output}\"").await;
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    let Some(reference) = Reference::find(&result.body["output"]) else { panic!("{}", result.body) };
    let (_, key) = reference.parts().unwrap();
    let path = format!("/v1/runs/{run}/values/{key}");
    assert_eq!(rig.get(&path).await.status, 200);
    let trim = Trim::Timeline(RunId(run.parse().unwrap()));
    while rig.server.engine().store().trim(&trim).await.unwrap() {}
    assert_eq!(rig.get(&path).await.code(), (410, "trimmed"));
    assert_eq!(rig.get(&format!("/v1/runs/{run}/values/x")).await.code(), (410, "trimmed"), "whatever the key is");
    assert_eq!(rig.header("eddyline-namespace", "other").get(&path).await.code(), (404, "not_found"));
    rig.server.stop().await;
}

/// Whatever puts 100 KB into a timeline is shown as a reference, and the reference leads to all of it.
#[tokio::test]
async fn payloads_and_log_lines_of_100_kilobytes_are_read_by_the_references_in_the_timeline() {
    let rig = Rig::start().await;
    rig.flow("child", "steps: {c: {set: \"${input}\"}}\noutput: \"${steps.c.output}\"").await;
    let flow = "steps:
  a: {run: a, emits: [e]}
  gate: {await: {manual: true}}
  hand: {run: never, queue: nobody}
  set: {after: [gate], set: {all: \"${steps.gate.output}\"}}
  child: {after: [set], flow: child, input: \"${steps.gate.output}\"}
output: {copy: \"${steps.child.output}\", text: \"${steps.gate.output + steps.a.output}\"}";
    rig.flow("f", flow).await;
    let run = rig.run("f", json!(1)).await;
    let text = |letter: &str| json!(letter.repeat(100_000));
    let task = rig.claim("w").await;
    let log = json!({"op": "log", "level": "info", "msg": text("l"), "meta": {"m": text("m")}});
    assert_eq!(rig.report(&task, log).await["outcome"], "applied");
    let emits = json!([{"event": "e", "payload": text("e")}]);
    let logs = json!([{"level": "warn", "msg": text("\u{1}")}, {"level": "info", "msg": "short"}]);
    let complete = json!({"op": "complete", "output": text("o"), "emits": emits, "logs": logs});
    assert_eq!(rig.report(&task, complete).await["outcome"], "applied");
    let gate = rig.get("/v1/gates").await.items()[0]["gate_id"].as_str().unwrap().to_owned();
    assert_eq!(rig.post(&format!("/v1/gates/{gate}"), text("g")).await.status, 200);
    let path = format!("/v1/runs/{run}/steps/hand/complete");
    assert_eq!(rig.post(&path, json!({"output": text("h")})).await.status, 200);
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["status"], "completed", "{}", result.body["error"]);

    let records = rig.get(&format!("/v1/streams/nq:flow:{run}?limit=1000")).await;
    let shown = |kind: &str, step: &str, field: &str| {
        let is_it = |record: &&Value| record["kind"] == kind && (step.is_empty() || record["data"]["stepKey"] == step);
        records.items().iter().filter(is_it).map(|record| record["data"][field].clone()).collect::<Vec<_>>()
    };
    for (of, whole) in [
        (&shown("runner.log", "a", "msg")[0], text("l")),
        (&shown("runner.log", "a", "meta")[0], json!({"m": text("m")})),
        (&shown("runner.log", "a", "msg")[1], text("\u{1}")),
        (&shown("emit", "a", "payload")[0], text("e")),
        (&shown("step.attempt.completed", "a", "result")[0], text("o")),
        (&shown("step.completed", "gate", "result")[0], text("g")),
        (&shown("step.completed", "hand", "result")[0], text("h")),
        (&shown("step.completed", "child", "result")[0], text("g")),
    ] {
        assert!(of["bytes"].as_u64().is_some_and(|bytes| bytes > 100_000), "{}", short(of));
        assert!(follow(&rig, of).await == whole, "{} leads elsewhere", short(of));
    }
    assert_eq!(shown("runner.log", "a", "msg")[2], "short");
    let set = &shown("step.completed", "set", "result")[0];
    assert!(whole(&rig, set).await == json!({"all": text("g")}), "{}", short(set));
    let output = &shown("flow.completed", "", "output")[0];
    let joined = text("g").as_str().unwrap().to_owned() + text("o").as_str().unwrap();
    assert!(whole(&rig, output).await == json!({"copy": text("g"), "text": joined}), "{}", short(output));
    assert!(!records.body.to_string().contains("\"$value\":null"), "a payload is nowhere to be read");
    rig.server.stop().await;
}

/// An object with everything that it refers to.
async fn whole(client: &Client, shown: &Value) -> Value {
    let mut object = if Reference::read(shown).is_some() { follow(client, shown).await } else { shown.clone() };
    for field in object.as_object_mut().unwrap().values_mut() {
        if Reference::read(field).is_some() {
            *field = follow(client, field).await;
        }
    }
    object
}

fn short(value: &Value) -> String {
    value.to_string().chars().take(200).collect()
}
