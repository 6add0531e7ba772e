//! Aggregates that refer to the previous one twice: a few bytes that expand to gigabytes.

use std::time::Instant;

use serde_json::{Map, Value, json};

use crate::rig::{Rig, withstands};
use crate::tenant::PATIENCE;

/// The size doubles per level.
const LEVELS: usize = 29;
const WORKER: &str = "aggregate-worker";

/// Steps `s0` to `s29`; the output of each is that of the previous one, twice.
fn doubling() -> Map<String, Value> {
    let mut steps = Map::from_iter([(String::from("s0"), json!({"set": "x".repeat(300)}))]);
    for level in 1..=LEVELS {
        let (before, output) = (format!("s{}", level - 1), format!("${{steps.s{}.output}}", level - 1));
        steps.insert(format!("s{level}"), json!({"after": [before], "set": [output, output]}));
    }
    steps
}

/// Steps that use the last output in a way in which its size matters.
fn uses() -> Vec<(&'static str, Value)> {
    let last = format!("steps.s{LEVELS}.output");
    let (after, whole) = (json!([format!("s{LEVELS}")]), format!("${{{last}}}"));
    let in_text = format!("it is {whole}");
    vec![
        ("task", json!({"after": after, "run": "use", "retry": {"attempts": 1}, "input": whole})),
        ("arms", json!({"after": after, "run": "use", "retry": {"attempts": 1}})),
        ("child", json!({"after": after, "flow": "used", "input": whole})),
        ("group", json!({"after": after, "input": whole, "steps": {"t": {"run": "use", "retry": {"attempts": 1}}}})),
        ("text", json!({"after": after, "set": in_text})),
        ("json", json!({"after": after, "set": format!("${{size(json({last}))}}")})),
        ("flatten", json!({"after": after, "set": format!("${{size(flatten(flatten({last})))}}")})),
        ("equal", json!({"after": after, "if": format!("{last} == {last}"), "set": 1})),
        ("distinct", json!({"after": after, "set": format!("${{distinct({last})}}")})),
        ("fail", json!({"after": after, "fail": whole})),
        ("key", json!({"after": after, "run": "use", "retry": {"attempts": 1}, "input": 1, "key": last})),
        ("gate", json!({"after": after, "await": {"event": "e", "key": last, "timeout": "100ms"}})),
        (
            "limit",
            json!({"after": after, "run": "use", "retry": {"attempts": 1}, "input": 1, "limits": [{"l": whole}]}),
        ),
        ("spread", json!({"after": after, "spread": last, "run": "use", "retry": {"attempts": 1}})),
    ]
}

/// Works off whatever tasks the attacker's runs have, until one run has ended.
async fn work_until_end(rig: &Rig, name: &str, run: &str) {
    let since = Instant::now();
    while rig.attacker.result(run, 0).await.is_none() {
        assert!(since.elapsed() < PATIENCE, "the run with the step `{name}` does not end");
        for task in rig.attacker.claim(WORKER, 200).await.unwrap() {
            rig.attacker.report(WORKER, &task, json!({"op": "complete", "output": 1})).await.unwrap();
        }
    }
}

#[tokio::test]
async fn references_that_double_are_not_followed_beyond_a_bound() {
    withstands(&[], async |rig| {
        let used = json!({"steps": {"t": {"run": "use", "retry": {"attempts": 1}}}});
        assert!(rig.attacker.register("used", &used).await);
        let mut runs = Vec::new();
        for (name, step) in uses() {
            let mut steps = doubling();
            steps.insert("use".to_owned(), step);
            let flow = format!("double-{name}");
            let output = format!("${{steps.s{LEVELS}.output}}");
            assert!(rig.attacker.register(&flow, &json!({"steps": steps, "output": output})).await);
            runs.push((name, rig.attacker.start(&flow, &json!(null)).await));
        }
        // The same with the state of a loop.
        let state = json!({"max": 60, "while": "true", "state": ["x"], "next": ["${state}", "${state}"]});
        let steps = json!({"l": {"repeat": state, "steps": {"a": {"set": "${state}"}}}});
        assert!(rig.attacker.register("double-state", &json!({ "steps": steps })).await);
        runs.push(("state", rig.attacker.start("double-state", &json!(null)).await));
        for (name, run) in runs {
            work_until_end(rig, name, &run).await;
            // All views of the run must be readable.
            for path in ["", "/steps"] {
                let read = rig.attacker.get(&format!("/v1/runs/{run}{path}")).await.unwrap();
                assert_eq!(read.status, 200, "{name}{path}: {}", read.body);
            }
            let timeline = rig.attacker.get(&format!("/v1/streams/nq:flow:{run}")).await.unwrap();
            assert_eq!(timeline.status, 200, "{name}: {}", timeline.body);
        }
    })
    .await;
}
