//! Expressions over many stored values, each within its limit, together more than fits in memory.

use std::time::Instant;

use serde_json::{Map, json};

use crate::rig::withstands;
use crate::tenant::PATIENCE;

/// The number of stored values of almost 2 MiB: together more than the server may use.
const VALUES: usize = 550;

/// Expressions that read all of them.
const LOOKS: [&str; 4] = [
    "steps.each.output.map(x, size(x))",
    "steps.each.output.exists(x, x == 'nothing')",
    "size(distinct(steps.each.output))",
    "size(json(steps.each.output))",
];

#[tokio::test]
async fn an_expression_cannot_have_more_stored_values_in_memory_than_it_may_read() {
    withstands(&[], async |rig| {
        let input = json!({"s": "x".repeat((2 << 20) - 1_000)});
        let item = json!({"s": {"set": "${run.input.s + string(n)}"}});
        let spread = format!("range({VALUES})");
        let each = json!({"spread": spread, "as": "n", "steps": item, "output": "${steps.s.output}"});
        let mut steps = Map::from_iter([("each".to_owned(), each)]);
        for (at, look) in LOOKS.iter().enumerate() {
            steps.insert(format!("look-{at}"), json!({"after": ["each"], "set": format!("${{{look}}}")}));
        }
        // An expression that does not read the values is not limited.
        steps.insert("count".to_owned(), json!({"after": ["each"], "set": "${size(steps.each.output)}"}));
        assert!(rig.attacker.register("values", &json!({ "steps": steps })).await);
        let run = rig.attacker.start("values", &input).await;
        let since = Instant::now();
        let ended = loop {
            if let Some(ended) = rig.attacker.result(&run, 20).await {
                break ended;
            }
            assert!(since.elapsed() < 4 * PATIENCE, "the run neither ends nor fails");
        };
        let error = &ended["error"];
        assert_eq!(error["also"].as_array().map(Vec::len), Some(LOOKS.len() - 1), "{ended}");
        assert!(
            error["message"].as_str().unwrap_or_default().contains("read more than 32 MiB of stored values"),
            "{ended}"
        );
    })
    .await;
}
