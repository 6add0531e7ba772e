//! Expressions that want more memory or time than there is.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use crate::rig::{Rig, withstands};

/// Registers `set` behind a short timer, so that it is evaluated by a transition that nobody's request is waiting for,
/// and that comes again after a restart.
async fn start_set(rig: &Rig, flow: &str, set: &Value, input: &Value) -> Option<String> {
    let steps = json!({"nap": {"await": {"time": "20ms"}}, "a": {"after": ["nap"], "set": set}});
    if !rig.attacker.register(flow, &json!({ "steps": steps })).await {
        return None;
    }
    rig.attacker.try_start(flow, input).await
}

/// Each is small, within the limits of an expression, and asks for gigabytes.
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
        // Templates: many in one step, each of them made of many.
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

/// A map in which nothing is found, with keys that look alike.
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

/// How long a run that is busy with itself is watched before it is cancelled.
const BUSY: Duration = Duration::from_secs(6);
/// A cancel is one more input of a busy run.
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
            // It may have ended before.
            assert!(matches!(reply.status, 200 | 409), "{reply:?}");
            assert!(since.elapsed() < CANCELLED_WITHIN, "the cancel took {:?}", since.elapsed());
            let ended = rig.attacker.result(run, 20).await;
            assert!(ended.is_some(), "the run goes on after its cancel");
        }
    })
    .await;
}

fn add(mut step: Value, field: &str, value: Value) -> Value {
    step[field] = value;
    step
}
