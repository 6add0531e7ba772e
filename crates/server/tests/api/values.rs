//! Payloads that are too large to be shown where they are used.

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

/// One digit, again and again.
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
