//! Client-supplied times that are out of range are rejected with a reason, without side effects.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use eddyline_engine::{ClaimTasks, EngineError, Holding, MAX_MEMO_BYTES, MAX_PAYLOAD_BYTES, StartRequest, TaskId};
use eddyline_machine::{Answer, CodeOp, CodeWait, Data, Due, Failure, Millis, Op};
use rig::{LONG, Rig, claim, done};
use serde_json::json;

const ODD: [Millis; 4] = [Millis::MAX, Millis::MIN, -1, 400_000_000_000];

#[tokio::test]
async fn no_time_from_outside_overflows_a_clock() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {a: {}}").await;
    rig.register(r#"{"name": "job", "code": true}"#).await;
    for ms in ODD {
        let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
        for request in [
            StartRequest { delay_ms: Some(ms), ..request.clone() },
            StartRequest { deadline_ms: Some(ms), ..request.clone() },
        ] {
            let refused = rig.engine.start_run(&rig.ns, request).await;
            assert!(matches!(refused, Err(EngineError::Invalid { .. })), "{ms}: {refused:?}");
        }
    }
    rig.start("f", json!(null)).await;
    let lease = ClaimTasks { lease_ms: Some(Millis::MAX), ..claim("w") };
    let task = rig.engine.claim(&rig.ns, lease, LONG).await.unwrap().pop().unwrap();
    let held = TaskId { run: task.run, fence: task.token.fence };
    assert_eq!(rig.engine.beat(&rig.ns, "w", &[held]).await.unwrap(), [Holding::Held { memo: None }]);
    let error = || Failure::new("Boom", "no");
    for ms in ODD {
        for op in [
            Op::Defer { after_ms: ms, limit: Some("api".to_owned()) },
            Op::Fail { error: error(), retryable: true, retry_after_ms: Some(ms) },
        ] {
            let answer = rig.report(&task, op).await;
            assert!(matches!(answer, Answer::Invalid(_)), "{ms}: {answer:?}");
        }
    }
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(task.run).await;
    rig.start("job", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    for ms in ODD {
        for op in [
            CodeOp::Sleep { due: Due::After(ms) },
            CodeOp::Wait { wait: CodeWait::Manual, timeout_ms: Some(ms) },
            CodeOp::Failed { error: error(), retryable: true, retry_after_ms: Some(ms), retry: None },
        ] {
            let answer = rig.report(&task, Op::Code { name: "x".to_owned(), op }).await;
            assert!(matches!(answer, Answer::Invalid(_)), "{ms}: {answer:?}");
        }
    }
    for at in [Millis::MAX, Millis::MIN] {
        let op = Op::Code { name: "x".to_owned(), op: CodeOp::Sleep { due: Due::At(at) } };
        assert!(matches!(rig.report(&task, op).await, Answer::Invalid(_)), "{at}");
    }
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(task.run).await;
    rig.stop().await;
}

/// However large the memo of a code run is, delivering its task reads a bounded part of it.
#[tokio::test]
async fn what_a_code_run_remembers_is_read_in_parts() {
    let rig = Rig::new();
    rig.register(r#"{"name": "job", "code": true}"#).await;
    rig.start("job", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let names: Vec<String> = (0..6).map(|n| format!("s{n}")).collect();
    for name in &names {
        let op = CodeOp::Done { output: Data::from(json!("x".repeat(MAX_PAYLOAD_BYTES - 100))), undo: false };
        let answer = rig.report(&task, Op::Code { name: name.clone(), op }).await;
        assert!(matches!(answer, Answer::Applied(_)), "{answer:?}");
    }
    let held = TaskId { run: task.run, fence: task.token.fence };
    let (mut after, mut found) = (0, Vec::new());
    loop {
        let part = rig.engine.memo_of(&rig.ns, held, after).await.unwrap().unwrap();
        let bytes: usize = part.values().map(|entry| entry.to_string().len()).sum();
        assert!(bytes <= MAX_MEMO_BYTES + MAX_PAYLOAD_BYTES, "{bytes} bytes in one part");
        let Some(last) = part.values().filter_map(|entry| entry["n"].as_u64()).max() else { break };
        assert!(last > after);
        after = last;
        found.extend(part.into_iter().map(|(name, _)| name));
    }
    assert_eq!(found, names);
    rig.stop().await;
}
