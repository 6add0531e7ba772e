//! The views, which people read.

use serde_json::{Value, json};

use crate::story::{Decider, claim, run_id};
use crate::{beside, open, schema_of, server, until_known, whole_run};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_steps_and_timelines_can_be_read_with_sql() {
    let url = server::fresh_url();
    let (store, mut decider) = (open(&url).await.unwrap(), Decider::new());
    let run = whole_run(&store, &mut decider, 1).await;
    // A text that jsonb does not take, between texts that look like it.
    let odd = json!({"n": "\0", "text": "a\0\0b\\u0000 \\\0"});
    until_known(&store, &decider.start(&store, 2, "line", odd).await).await;
    let tasks = crate::claimed(&store, claim(77, "odd\0worker\u{1}", 1)).await;
    let failure = eddyline_machine::Failure {
        kind: "Broken".to_owned(),
        message: "out of\0paper".to_owned(),
        stack: None,
        step: None,
        also: Vec::new(),
    };
    let fails = eddyline_machine::Op::Fail { error: failure, retryable: false, retry_after_ms: None };
    until_known(&store, &decider.report(&store, &tasks[0], fails).await).await;

    let (sql, schema) = (beside(&url).await, schema_of(&url));
    let one = async |text: &str| {
        let text = text.replace("eddyline.", &format!("\"{schema}\"."));
        let row = sql.query_one(&format!("SELECT to_jsonb(x)::text FROM ({text}) x"), &[]).await.unwrap();
        serde_json::from_str::<Value>(row.get(0)).unwrap()
    };
    let ran = one(&format!("SELECT * FROM eddyline.runs_view WHERE run = '{run}'")).await;
    assert_eq!(
        (&ran["namespace"], &ran["flow"], &ran["status"]),
        (&json!("default"), &json!("line"), &json!("completed"))
    );
    assert_eq!((&ran["records"], &ran["error_kind"]), (&json!(14), &Value::Null));
    for column in ["created_at", "started_at", "ended_at", "changed_at"] {
        assert!(ran[column].as_str().is_some_and(|at| at.starts_with("20")), "{column} of {ran}");
    }
    let recent = "SELECT count(*) AS n FROM eddyline.runs_view WHERE ended_at > now() - interval '1 hour'";
    assert_eq!(one(recent).await["n"], json!(2), "times are of the right scale");
    let failed = one(&format!("SELECT * FROM eddyline.runs_view WHERE run = '{}'", run_id(2))).await;
    assert_eq!(failed["status"], json!("failed"));
    assert!(failed["error_message"].as_str().is_some_and(|text| text.contains("out of\u{fffd}paper")), "{failed}");

    let of_run = format!("FROM eddyline.steps_view WHERE run = '{run}'");
    let steps = one(&format!(
        "SELECT jsonb_object_agg(step, to_jsonb(v)) AS steps {}",
        of_run.replace("steps_view", "steps_view v")
    ))
    .await;
    for (step, number) in [("a", 0), ("b", 1), ("c", 2)] {
        let found = &steps["steps"][step];
        assert_eq!(
            (&found["status"], &found["attempts"], &found["worker"]),
            (&json!("completed"), &json!(1), &json!("ann"))
        );
        // As it is stored: a small payload under `j`, a reference to a large one under `r`.
        let result = json!({"j": {"step": number}});
        assert_eq!((&found["queue"], &found["result"]), (&json!("default"), &result), "{found}");
        assert!(!found["ended_at"].is_null() && !found["started_at"].is_null(), "{found}");
    }
    let failed = one(&format!("SELECT * FROM eddyline.steps_view WHERE run = '{}' AND step = 'a'", run_id(2))).await;
    assert_eq!((&failed["status"], &failed["worker"]), (&json!("failed"), &json!("odd\u{fffd}worker\u{1}")));
    assert_eq!(failed["error_message"], json!("out of\u{fffd}paper"));

    let timeline = format!(
        "SELECT jsonb_agg(kind ORDER BY n) AS kinds, jsonb_agg(n ORDER BY n) AS numbers \
                            FROM eddyline.timeline_view WHERE run = '{run}'"
    );
    let timeline = one(&timeline).await;
    let records = eddyline_store::Store::records(&store, run, 0, 100).await.unwrap();
    let kinds: Vec<Value> = records.iter().map(|record| json!(record)["kind"].clone()).collect();
    assert_eq!(timeline["kinds"], Value::Array(kinds));
    assert_eq!(timeline["numbers"], json!((1..=14).collect::<Vec<_>>()));
    let start = format!("SELECT data FROM eddyline.timeline_view WHERE run = '{}' AND n = 1", run_id(2));
    assert_eq!(one(&start).await["data"]["flowName"], json!("line"));
    // A backslash before the text is not an escape.
    let escaped = r#"SELECT eddyline.json_v1('["\u0000\u0000", "\\u0000", "\\\u0000", "x"]') AS read"#;
    let read = one(escaped).await;
    assert_eq!(read["read"], json!(["\u{fffd}\u{fffd}", "\\u0000", "\\\u{fffd}", "x"]));
}
