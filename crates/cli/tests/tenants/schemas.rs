//! JSON Schemas whose check takes very long.

use serde_json::{Map, Value, json};

use crate::rig::{Rig, withstands};
use crate::tenant::Tenant;

/// Depths: some are rejected at registration as too expensive, others just pass.
const LEVELS: [usize; 5] = [8, 12, 16, 24, 40];
const WORKER: &str = "schema-worker";

/// Each level tries the next one twice, so the work doubles per level, and no value matches.
fn doubling(levels: usize, keyword: &str) -> Value {
    let mut defs = Map::from_iter([(String::from("l0"), json!({"type": "boolean"}))]);
    for level in 1..=levels {
        let next = format!("#/$defs/l{}", level - 1);
        defs.insert(format!("l{level}"), json!({keyword: [{"$ref": next}, {"$ref": next}]}));
    }
    json!({"$ref": format!("#/$defs/l{levels}"), "$defs": defs})
}

/// Expensive schemas; of each kind, the most expensive last.
fn schemas() -> Vec<Value> {
    let mut schemas: Vec<Value> = LEVELS.iter().map(|levels| doubling(*levels, "anyOf")).collect();
    schemas.extend(["oneOf", "allOf"].map(|keyword| doubling(40, keyword)));
    schemas.push(json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"not": {"$ref": "#/$defs/a"}}, {"$ref": "#/$defs/a"}]}}}));
    schemas.push(json!({"type": "array", "uniqueItems": true, "items": {"type": "array", "uniqueItems": true}}));
    schemas.push(json!({"items": {"pattern": "^(([a-z]+)+)+$"}}));
    schemas.push(json!({"items": {"pattern": "(a{1,100}){1,100}b"}}));
    schemas.push(json!({"contains": {"contains": {"const": 1}}, "items": {"contains": {"enum": [1, 2, 3]}}}));
    schemas
}

/// A value that takes long to check with all of them.
fn value() -> Value {
    let lists: Vec<Value> = (0..60).map(|n| json!([n, "a".repeat(60), [n, [n]]])).collect();
    Value::Array(lists)
}

async fn start(rig: &Rig, at: usize, schema: &Value) {
    let flow = format!("start-{at}");
    let definition = json!({"input_schema": schema, "steps": {"a": {"set": 1}}});
    if rig.attacker.register(&flow, &definition).await {
        rig.attacker.try_start(&flow, &value()).await;
    }
}

async fn emit(rig: &Rig, at: usize, schema: &Value) {
    let flow = format!("emit-{at}");
    let steps = json!({"a": {"run": "a", "emits": [{"e": schema}]}, "b": {"subscribes": ["e"], "set": 1}});
    if !rig.attacker.register(&flow, &json!({ "steps": steps })).await {
        return;
    }
    let run = rig.attacker.start(&flow, &json!(null)).await;
    let tasks = rig.attacker.claim(WORKER, 10_000).await.unwrap();
    let report = json!({"op": "complete", "output": 1, "emits": [{"event": "e", "payload": value()}]});
    rig.attacker.report(WORKER, &tasks[0], report).await.unwrap();
    cancel(&rig.attacker, &run).await;
}

async fn child(rig: &Rig, at: usize, schema: &Value) {
    let (parent, child) = (format!("parent-{at}"), format!("child-{at}"));
    let definition = json!({"input_schema": schema, "steps": {"a": {"set": 1}}});
    if !rig.attacker.register(&child, &definition).await {
        return;
    }
    let steps =
        json!({"c": {"flow": child, "input": "${input}"}, "d": {"flow": child, "input": "${input}", "detached": true}});
    assert!(rig.attacker.register(&parent, &json!({ "steps": steps })).await);
    let run = rig.attacker.start(&parent, &value()).await;
    let ended = rig.attacker.result(&run, 20).await;
    assert!(ended.is_some(), "the parent waits for a child that is never started nor refused");
}

async fn cancel(tenant: &Tenant, run: &str) {
    let reply = tenant.post(&format!("/v1/runs/{run}/cancel"), &json!({})).await.unwrap();
    assert!(matches!(reply.status, 200 | 409), "{reply:?}");
}

#[tokio::test]
async fn a_schema_that_takes_for_ever_is_nobody_elses_loss() {
    withstands(&[], async |rig| {
        for (at, schema) in schemas().iter().enumerate() {
            start(rig, at, schema).await;
            emit(rig, at, schema).await;
            child(rig, at, schema).await;
        }
    })
    .await;
}
