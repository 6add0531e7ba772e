//! Acknowledged writes exist after the store is opened again.

use eddyline_machine::{CodeOp, Op, Start};
use serde_json::json;

use super::drive::{event, note, runs_of};
use super::everything::{Looked, assert_same};
use super::starts::trim_fully;
use super::{CHAIN, NAP, ONE, Trial};
use crate::*;

pub async fn everything_is_there_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    one_of_everything(t).await;
    let durable = Looked { numbers: true, leases: false };
    let before = t.look(durable).await;
    for _ in 0..3 {
        if !t.reopen().await {
            return;
        }
        assert_same(&before, &t.look(durable).await, "reopening");
    }
    t.advance(HOLD_MS);
    t.deliver().await;
    t.work_off().await;
}

pub async fn tasks_keep_their_order_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    t.flow(ONE);
    let mut runs = t.start_all("one", (0..5).map(|n| json!(n))).await;
    let high = t.start_with("one", Start { priority: 1, ..Start::default() }).await;
    t.advance(1);
    runs.extend(t.start_all("one", (0..3).map(|n| json!(n))).await);
    t.pause(runs[1]).await;
    if !t.reopen().await {
        return;
    }
    t.resume(runs[1]).await;
    let got = runs_of(&t.take(100).await);
    assert_eq!(got[0], high);
    assert_eq!(got[1..], runs);
}

pub async fn bounds_count_what_is_held_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    t.flow("{name: limited, steps: {work: {limits: [api]}}}");
    t.put(kind::QUEUE, "default", json!({"concurrency": 3, "flow_concurrency": 3})).await;
    t.put(kind::LIMIT, "api", json!({"concurrency": 2})).await;
    t.start_all("limited", (0..6).map(|n| json!(n))).await;
    let held = t.take(10).await;
    assert_eq!(held.len(), 2);
    if !t.reopen().await {
        return;
    }
    assert!(t.take(10).await.is_empty(), "both are still held");
    t.complete(&held[0], json!(null)).await;
    assert_eq!(t.take(10).await.len(), 1);
    t.put(kind::LIMIT, "api", json!({})).await;
    assert_eq!(t.take(10).await.len(), 1, "the queue's bound counts as well");
}

pub async fn what_was_due_is_due_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    t.flow(NAP);
    let run = t.start("nap", json!(null)).await;
    t.send(vec![note(run, "m1"), note(run, "m2")]).await;
    t.advance(10_000);
    // A caller got the items and died with the process.
    assert_eq!(t.due(Due::Timers, 10).await.items.len(), 1);
    assert_eq!(t.due(Due::Messages, 10).await.items.len(), 1);
    if !t.reopen().await {
        return;
    }
    t.advance(HOLD_MS);
    assert_eq!(t.due(Due::Timers, 10).await.items.len(), 1);
    let item = t.due(Due::Messages, 10).await.items.remove(0);
    let DueItem::Messages { messages, .. } = item else { panic!("messages") };
    assert_eq!(messages.iter().map(|message| message.id.as_str()).collect::<Vec<_>>(), ["m1", "m2"]);
}

pub async fn a_worker_has_what_it_had_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..4).map(|n| json!(n))).await;
    let ns = t.ns.clone();
    t.claim(ClaimRequest { worker: "ann".to_owned(), max: 2, ..t.ask() }).await;
    if !t.reopen().await {
        return;
    }
    assert_eq!(t.store.held_by(&ns, "ann").await.unwrap(), 2);
    let claims = t.claim(ClaimRequest { worker: "ann".to_owned(), max: 9, most_held: Some(3), ..t.ask() }).await;
    assert_eq!((claims.tasks.len(), claims.full), (1, true));
}

pub async fn time_does_not_go_back_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!(null)).await;
    t.advance(60_000);
    let claimed = t.take_one().await;
    t.complete(&claimed, json!(null)).await;
    let before = t.records(run).await.last().expect("records").ts;
    t.clock.jump(-86_400_000);
    if !t.reopen().await {
        return;
    }
    assert!(t.now().await >= before, "the wall clock went back while it was closed");
    t.work_off().await;
    super::records::assert_dense(&t.records(run).await);
}

async fn one_of_everything(t: &Trial<'_>) {
    for flow in [ONE, CHAIN, NAP] {
        t.flow(flow);
    }
    t.flow(
        "{name: parent, steps: {kid: {flow: one}, hook: {await: {webhook: true, timeout: 1h}}, \
            paid: {await: {event: paid, key: input.k}}, until: {await: {until: '4102444800000'}}, \
            after: {after: [hook], await: {manual: true}}}}",
    );
    t.flow("{name: job, code: true}");
    t.flow(
        "{name: timed, steps: {a: {timeout: 10m, start_timeout: 1h, key: input.k, limits: [api, {of: '${input.k}'}], \
            requires: [gpu], priority: 3, queue: red}, b: {retry: {initial: 5s}}}}",
    );
    t.put(kind::QUEUE, "red", json!({"concurrency": 9, "rate": {"count": 5, "per_ms": 1_000, "burst": 5}})).await;
    t.put(kind::LIMIT, "api", json!({"concurrency": 3})).await;
    t.start("job", json!(null)).await;
    let job = t.take_one().await;
    t.report(
        &job,
        Op::Code { name: "pay".to_owned(), op: CodeOp::Done { output: json!("x".repeat(500)).into(), undo: false } },
    )
    .await;
    let start = Start {
        input: Some(json!({"k": 7, "big": "y".repeat(500)}).into()),
        external_id: Some("ext".to_owned()),
        tags: vec!["t1".to_owned(), "t2".to_owned()],
        priority: 2,
        deadline_ms: Some(3_600_000),
        ..Start::default()
    };
    let parent = t.start_with("parent", start.clone()).await;
    let timed = t.start_with("timed", start).await;
    t.advance(1_000);
    let claimed = t.take_one().await;
    let error = eddyline_machine::Failure::new("Boom", "it broke");
    t.report(&claimed, Op::Fail { error, retryable: true, retry_after_ms: None }).await;
    t.pause(timed).await;
    t.resume(timed).await;
    let gpu = Offer { labels: ["gpu".to_owned()].into(), build: Some("b1".to_owned()), ..Offer::default() };
    t.claim(ClaimRequest { queues: vec!["red".to_owned()], offer: gpu.into(), max: 1, ..t.ask() }).await;
    let paused = t.start("chain", json!(null)).await;
    t.pause(paused).await;
    let trimmed = t.start("one", json!(null)).await;
    t.cancel(trimmed).await;
    trim_fully(t, &Trim::Timeline(trimmed)).await;
    let deleted = t.start("one", json!(null)).await;
    t.cancel(deleted).await;
    trim_fully(t, &Trim::Run(deleted)).await;
    t.start_with("nap", Start { delay_ms: Some(500), ..Start::default() }).await;
    t.send(vec![note(parent, "m1"), note(t.new_run(), "to nobody")]).await;
    for n in 0..3 {
        t.publish(event(&format!("e{n}"), "ping", Some("1"), json!({"n": n}))).await;
    }
    t.within("other").start("one", json!(null)).await;
    t.within("other").put("thing", "a", json!({"n": 1})).await;
    let slot = DocumentChange {
        key: DocumentKey::new("slot", "s"),
        expect: Expect::Absent,
        body: Some(json!({"cron": "* * * * *"})),
        due: Some(9_000_000_000_000),
    };
    t.command(t.documents(vec![slot])).await.unwrap();
}
