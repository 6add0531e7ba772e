//! The cost of one flow: expressions and payloads that would take the process down fail only their own run.

use serde_json::{Value, json};

use crate::client::Rig;

/// The peak memory of this process in MiB. (Each test runs in its own process.)
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib >> 10)
}

async fn ended(rig: &Rig, run: &str) -> Value {
    rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body
}

#[tokio::test]
async fn an_expression_that_asks_for_too_much_memory_fails_its_step() {
    let rig = Rig::start().await;
    let before = peak_mib();
    let input = json!({"s": "x".repeat(1 << 20)});
    // The text is shared, not copied: this is within the budget, or close to it.
    rig.flow("shared", "steps: {a: {set: \"${size([[input.s + 'a']].map(l, range(100000).map(i, l.reverse())))}\"}}")
        .await;
    let shared = rig.run("shared", input.clone()).await;
    assert!(ended(&rig, &shared).await["status"].is_string());
    // A separate text for each element is not.
    rig.flow("copied", "steps: {a: {set: '${size(range(100000).map(i, input.s + string(i)))}'}}").await;
    let copied = rig.run("copied", input).await;
    let result = ended(&rig, &copied).await;
    let message = result["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("used more than 32 MiB of memory"), "{result}");
    if let (Some(before), Some(after)) = (before, peak_mib()) {
        assert!(after - before < 200, "from {before} to {after} MiB");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_field_that_is_not_there_is_cheap_to_ask_for() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: '${range(20000).filter(i, has(input.m.x)).size()}'}}").await;
    let keys: serde_json::Map<String, Value> =
        (0..200).map(|n| (format!("a_field_of_that_name_{n}"), json!(n))).collect();
    let begun = std::time::Instant::now();
    let run = rig.run("f", json!({"m": keys})).await;
    assert_eq!(ended(&rig, &run).await["status"], "completed");
    // It took minutes when a suggestion was computed for each miss.
    assert!(begun.elapsed().as_secs() < 15, "{:?}", begun.elapsed());
    rig.server.stop().await;
}

#[tokio::test]
async fn an_input_that_doubles_by_reference_fails_its_attempt() {
    let rig = Rig::start().await;
    let doubled = |n: usize| {
        let last = n - 1;
        format!("s{n}: {{after: [s{last}], set: ['${{steps.s{last}.output}}', '${{steps.s{last}.output}}']}}")
    };
    let steps: Vec<String> = (1..30).map(doubled).collect();
    let text = format!(
        "steps: {{s0: {{set: '${{input}}'}}, {}, last: {{after: [s29], run: h, input: '${{steps.s29.output}}'}}}}",
        steps.join(", ")
    );
    rig.flow("f", &text).await;
    let run = rig.run("f", json!("x".repeat(1_000))).await;
    let claimed = rig.post("/v1/tasks/claim", json!({"worker_id": "w", "wait_ms": 10_000})).await;
    assert_eq!(claimed.body, json!({"tasks": []}), "it cannot be assembled");
    let result = ended(&rig, &run).await;
    assert_eq!(
        (&result["status"], &result["error"]["kind"]),
        (&json!("failed"), &json!("PayloadTooLarge")),
        "{result}"
    );
    rig.server.stop().await;
}
