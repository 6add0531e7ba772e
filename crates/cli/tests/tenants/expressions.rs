//! Expressions that use very much memory or time.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::rig::{Rig, withstands};

/// Registers `set` after a short timer, so that it is evaluated in a transition for which no request waits, and again
/// after a restart.
async fn start_set(rig: &Rig, flow: &str, set: &Value, input: &Value) -> Option<String> {
    let steps = json!({"nap": {"await": {"time": "20ms"}}, "a": {"after": ["nap"], "set": set}});
    if !rig.attacker.register(flow, &json!({ "steps": steps })).await {
        return None;
    }
    rig.attacker.try_start(flow, input).await
}

/// Short expressions that would use gigabytes.
const GROWING: [&str; 12] = [
    "size([[input.s + 'a']].map(l, range(100000).map(i, l.reverse())))",
    "size([input.s + 'a'].map(s, range(100000).map(i, [s, s])))",
    "size(range(100000).map(i, input.s + string(i)))",
    "size(range(100000).map(i, {'a': input.s}.values()))",
    "size(range(100000).map(i, [input.s + 'a'].slice(0, 1)))",
    "size(range(1000).map(i, input.s.replace('x', 'yy')))",
    "size(range(1000).map(i, input.s.split('')))",
    "size(range(1000).map(i, [input.s, input.s].join('-')))",
    "size(range(1000).map(i, json([input.s])))",
    "size(range(1000).map(i, input.s.substring(1, 1000000)))",
    "size(range(1000).map(i, input.s.upperAscii()))",
    "range(1000).map(i, input.s)",
];

#[tokio::test]
async fn an_expression_cannot_take_the_memory_of_the_others() {
    withstands(&[], async |rig| {
        let input = json!({"s": "x".repeat(1 << 20)});
        let mut runs = Vec::new();
        for (at, expression) in GROWING.iter().enumerate() {
            let set = json!(format!("${{{expression}}}"));
            runs.extend(start_set(rig, &format!("growing-{at}"), &set, &input).await);
        }
        // A step with many templates of many expressions each.
        let text = "${input.s}".repeat(30);
        let texts = vec![json!(text); 300];
        runs.extend(start_set(rig, "texts", &json!(texts), &input).await);
        for run in runs {
            let ended = rig.attacker.result(&run, 20).await.expect("the run neither ends nor fails");
            assert!(matches!(ended["status"].as_str(), Some("completed" | "failed")), "{ended}");
        }
    })
    .await;
}

/// A map with many similar keys.
fn crowded_map() -> Value {
    let keys = (0..200).map(|at| (format!("a-rather-long-name-of-a-key-{at}"), json!(at)));
    Value::Object(keys.collect::<Map<_, _>>())
}

#[tokio::test]
async fn looking_for_what_is_not_there_again_and_again_is_nobody_elses_loss() {
    withstands(&[], async |rig| {
        let input = json!({"m": crowded_map()});
        let expressions = [
            "size(range(100000).filter(i, has(input.m.a_rather_long_name_of_a_key)))",
            "sum(range(100000).map(i, default(input.m.a_rather_long_name_of_a_key, 1)))",
            "size(range(100000).filter(i, 'a-rather-long-name-of-a-key' in input.m))",
            "size(range(100000).filter(i, input.m.a_rather_long_name_of_a_key == 1 || true))",
        ];
        let mut runs = Vec::new();
        for (at, expression) in expressions.iter().enumerate() {
            let set = json!(format!("${{{expression}}}"));
            runs.extend(start_set(rig, &format!("missing-{at}"), &set, &input).await);
        }
        for run in runs {
            assert!(rig.attacker.result(&run, 20).await.is_some(), "the run neither ends nor fails");
        }
    })
    .await;
}

/// How long the run is busy before it is cancelled.
const BUSY: Duration = Duration::from_secs(6);
/// How long the cancel of a busy run may take.
const CANCELLED_WITHIN: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_thousand_heavy_decisions_in_one_run_are_nobody_elses_loss() {
    withstands(&[], async |rig| {
        // Each `set` stays within the budget of an expression.
        let heavy = "${size(range(90000).filter(i, i * 3 + 1 > 7))}";
        let each = json!({"spread": "range(1000)", "steps": {"s": {"set": heavy}}});
        let loops = json!({
            "repeat": {"max": 1_000_000, "while": "size(range(90000).filter(i, i > 7)) > 0"},
            "steps": {"s": {"set": heavy}}
        });
        let mut runs = Vec::new();
        for (flow, step) in [("spread-of-heavy-sets", each), ("loop-of-heavy-sets", loops)] {
            let steps = json!({"nap": {"await": {"time": "20ms"}}, "x": add(step, "after", json!(["nap"]))});
            assert!(rig.attacker.register(flow, &json!({ "steps": steps })).await);
            runs.push(rig.attacker.start(flow, &json!(null)).await);
        }
        let since = Instant::now();
        for run in &runs {
            let left = BUSY.saturating_sub(since.elapsed()).as_secs() as u32;
            rig.attacker.result(run, left).await;
        }
        for run in &runs {
            let since = Instant::now();
            let reply = rig.attacker.post(&format!("/v1/runs/{run}/cancel"), &json!({})).await.unwrap();
            // It may have ended already.
            assert!(matches!(reply.status, 200 | 409), "{reply:?}");
            assert!(since.elapsed() < CANCELLED_WITHIN, "the cancel took {:?}", since.elapsed());
            let ended = rig.attacker.result(run, 20).await;
            assert!(ended.is_some(), "the run does not end after its cancel");
        }
    })
    .await;
}

fn add(mut step: Value, field: &str, value: Value) -> Value {
    step[field] = value;
    step
}
