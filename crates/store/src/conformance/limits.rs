//! Bounds on claims: of queues, and of limits across queues. They hold at all times.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use eddyline_machine::explain::Bound;
use eddyline_machine::{Op, RunId};
use serde_json::{Value, json};

use super::drive::{completion, runs_of};
use super::takes::expiry;
use super::{ONE, Trial};
use crate::*;

pub async fn a_paused_queue_offers_nothing(t: &mut Trial<'_>) {
    t.flow(ONE);
    let run = t.start("one", json!(null)).await;
    t.put(kind::QUEUE, "default", json!({"paused": true})).await;
    assert_eq!(t.claim(t.ask()).await, Claims::default());
    t.put(kind::QUEUE, "default", json!({"paused": false})).await;
    assert_eq!(runs_of(&t.take(9).await), [run]);
    let later = t.start("one", json!(null)).await;
    t.put(kind::QUEUE, "default", json!({"paused": true})).await;
    assert!(t.take(9).await.is_empty());
    let key = DocumentKey::new(kind::QUEUE, "default");
    let deleted = DocumentChange { key, expect: Expect::Any, body: None, due: None };
    t.command(t.documents(vec![deleted])).await.unwrap();
    assert_eq!(runs_of(&t.take(9).await), [later], "without rules there are no bounds");
}

pub async fn a_queue_has_no_more_claimed_than_its_concurrency(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.put(kind::QUEUE, "default", json!({"concurrency": 3})).await;
    t.start_all("one", (0..10).map(|n| json!(n))).await;
    let held = t.take(10).await;
    assert_eq!(held.len(), 3);
    assert_eq!(t.claim(t.ask()).await, Claims::default(), "no rate blocks a task, so there is no time to retry at");
    t.complete(&held[0], json!(null)).await;
    assert_eq!(t.take(10).await.len(), 1);
    let (input, taken) = expiry(&held[1], eddyline_machine::Expiry::Released);
    t.submit_taking(held[1].run, &[input], &[taken]).await.unwrap();
    assert_eq!(t.take(10).await.len(), 1, "a task that is released makes room");
    t.cancel(held[2].run).await;
    assert_eq!(t.take(10).await.len(), 1, "and so does one that is cancelled");
    t.put(kind::QUEUE, "default", json!({"concurrency": 5})).await;
    assert_eq!(t.take(10).await.len(), 2);
    t.put(kind::QUEUE, "default", json!({"concurrency": 0})).await;
    assert_eq!(t.take(10).await.len(), 0);
}

pub async fn a_queue_has_no_more_claimed_of_a_flow_than_its_bound(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.flow("{name: two, steps: {work: {}}}");
    t.put(kind::QUEUE, "default", json!({"flow_concurrency": 2})).await;
    t.start_all("one", (0..5).map(|n| json!(n))).await;
    t.start_all("two", (0..5).map(|n| json!(n))).await;
    let held = t.take(10).await;
    let of_one = held.iter().filter(|claimed| claimed.flow == "one").count();
    assert_eq!((of_one, held.len()), (2, 4));
    t.complete(held.iter().find(|claimed| claimed.flow == "two").unwrap(), json!(null)).await;
    let next = t.take(10).await;
    assert_eq!((next.len(), next[0].flow.as_str()), (1, "two"));
}

pub async fn a_queue_gives_out_no_more_than_its_rate(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.put(kind::QUEUE, "default", json!({"rate": {"count": 2, "per_ms": 1_000, "burst": 3}})).await;
    t.start_all("one", (0..20).map(|n| json!(n))).await;
    let began = t.now().await;
    let first = t.claim(t.ask()).await;
    assert_eq!(first.tasks.len(), 3, "its burst");
    let retry_at = first.retry_at.expect("a time to retry");
    assert!(retry_at > began && retry_at <= began + 500, "{}", retry_at - began);
    t.advance(499);
    assert!(t.take(9).await.is_empty(), "one claim takes half a second");
    t.advance(1);
    assert_eq!(t.take(9).await.len(), 1);
    let mut got = 0;
    for _ in 0..10 {
        t.advance(250);
        got += t.take(9).await.len();
    }
    assert_eq!(got, 5, "two a second");
    t.advance(3_600_000);
    assert_eq!(t.take(9).await.len(), 3, "no more than its burst, however long it was idle");
}

pub async fn a_rate_of_a_queue_is_not_spent_by_another(t: &mut Trial<'_>) {
    t.flow("{name: queues, steps: {a: {queue: red}, b: {}}}");
    t.put(kind::QUEUE, "red", json!({"rate": {"count": 1, "per_ms": 60_000, "burst": 1}})).await;
    t.start_all("queues", (0..3).map(|n| json!(n))).await;
    let both = ClaimRequest { queues: vec!["red".to_owned(), "default".to_owned()], ..t.ask() };
    let got = t.claim(both).await;
    let of_red = got.tasks.iter().filter(|claimed| claimed.task.queue == "red").count();
    assert_eq!((of_red, got.tasks.len()), (1, 4));
    assert_eq!(got.retry_at, Some(t.now().await + 60_000));
    assert_eq!(t.claim(t.ask()).await, Claims::default(), "the default queue is empty");
}

pub async fn a_task_that_waits_says_what_keeps_it_back(t: &mut Trial<'_>) {
    t.flow("{name: one, steps: {work: {limits: [api]}}}");
    let runs = t.start_all("one", (0..3).map(|n| json!(n))).await;
    assert_eq!((runs_of(&t.take(1).await), bound_of(t, runs[1]).await), (vec![runs[0]], None));
    for (rules, bound) in [
        (json!({"concurrency": 1}), Bound::Concurrency { most: 1 }),
        (json!({"flow_concurrency": 1}), Bound::FlowConcurrency { most: 1 }),
        (json!({"paused": true, "concurrency": 1}), Bound::Paused),
    ] {
        t.put(kind::QUEUE, "default", rules).await;
        assert_eq!((bound_of(t, runs[0]).await, bound_of(t, runs[1]).await), (None, Some(bound)));
    }
    let (once, limit) = (json!({"rate": {"count": 1, "per_ms": 60_000, "burst": 1}}), |most| {
        Some(Bound::Limit { name: "api".to_owned(), most })
    });
    t.put(kind::QUEUE, "default", json!({})).await;
    t.put(kind::LIMIT, "api", json!({"concurrency": 1})).await;
    assert_eq!(bound_of(t, runs[1]).await, limit(Some(1)));
    t.put(kind::QUEUE, "default", once.clone()).await;
    t.put(kind::LIMIT, "api", once).await;
    assert_eq!((bound_of(t, runs[1]).await, runs_of(&t.take(9).await)), (None, vec![runs[1]]));
    assert_eq!(bound_of(t, runs[2]).await, Some(Bound::Rate));
    t.put(kind::QUEUE, "default", json!({})).await;
    assert_eq!(bound_of(t, runs[2]).await, limit(None));
    t.advance(60_000);
    assert_eq!(bound_of(t, runs[2]).await, None);
}

async fn bound_of(t: &Trial<'_>, run: RunId) -> Option<Bound> {
    t.pending(run).await.tasks.remove(0).bound
}

const LIMITED: &str = "{name: limited, steps: {work: {limits: [{tenant: '${input.k}'}], queue: default}}}";

pub async fn a_limit_bounds_each_of_its_keys(t: &mut Trial<'_>) {
    t.flow(LIMITED);
    t.put(kind::LIMIT, "tenant", json!({"concurrency": 2})).await;
    t.start_all("limited", of_keys(&[("a", 5), ("b", 1), ("c", 4)])).await;
    let held = t.take(20).await;
    assert_eq!(count_of(&held, "a"), 2);
    assert_eq!(count_of(&held, "b"), 1);
    assert_eq!(count_of(&held, "c"), 2);
    t.complete(held.iter().find(|claimed| key_of(claimed) == "a").unwrap(), json!(null)).await;
    let next = t.take(20).await;
    assert_eq!((next.len(), count_of(&next, "a")), (1, 1));
    t.put(kind::LIMIT, "tenant", json!({})).await;
    assert_eq!(t.take(20).await.len(), 4, "a limit without rules bounds nothing");
}

pub async fn a_limit_bounds_across_queues_and_flows(t: &mut Trial<'_>) {
    t.flow("{name: red, steps: {work: {limits: [api], queue: red}}}");
    t.flow("{name: green, steps: {work: {limits: [api, other], queue: green}}}");
    t.put(kind::LIMIT, "api", json!({"concurrency": 3})).await;
    t.start_all("red", (0..2).map(|n| json!(n))).await;
    t.start_all("green", (0..4).map(|n| json!(n))).await;
    let of = |queue: &str| ClaimRequest { queues: vec![queue.to_owned()], ..t.ask() };
    let red = t.claim(of("red")).await.tasks;
    assert_eq!((red.len(), t.claim(of("green")).await.tasks.len()), (2, 1));
    t.complete(&red[0], json!(null)).await;
    assert_eq!(t.claim(of("green")).await.tasks.len(), 1);
}

pub async fn a_limit_without_a_key_is_one_limit(t: &mut Trial<'_>) {
    t.flow("{name: one, steps: {work: {limits: [api]}}}");
    t.flow(&LIMITED.replace("tenant", "api"));
    t.put(kind::LIMIT, "api", json!({"concurrency": 1})).await;
    t.start_all("one", (0..3).map(|n| json!(n))).await;
    t.start_all("limited", of_keys(&[("a", 2), ("b", 2)])).await;
    let held = t.take(20).await;
    assert_eq!(held.iter().filter(|claimed| claimed.flow == "one").count(), 1);
    assert_eq!((count_of(&held, "a"), count_of(&held, "b")), (1, 1), "each key has its own bound");
}

pub async fn a_limit_lets_no_more_pass_than_its_rate(t: &mut Trial<'_>) {
    t.flow(LIMITED);
    t.put(kind::LIMIT, "tenant", json!({"rate": {"count": 1, "per_ms": 10_000, "burst": 2}})).await;
    t.start_all("limited", of_keys(&[("a", 6), ("b", 1)])).await;
    let first = t.claim(t.ask()).await;
    assert_eq!((count_of(&first.tasks, "a"), count_of(&first.tasks, "b")), (2, 1));
    assert_eq!(first.retry_at, Some(t.now().await + 10_000));
    for claimed in &first.tasks {
        t.complete(claimed, json!(null)).await;
    }
    assert!(t.take(9).await.is_empty(), "completed tasks still count for the rate");
    t.advance(9_999);
    assert!(t.take(9).await.is_empty());
    t.advance(1);
    assert_eq!(t.take(9).await.len(), 1);
    if t.reopen().await {
        assert!(t.take(9).await.is_empty(), "claims still count for the rate");
    }
}

pub async fn a_limit_that_was_slowed_down_lets_nothing_pass_until_then(t: &mut Trial<'_>) {
    t.flow(LIMITED);
    t.flow(ONE);
    t.start_all("limited", of_keys(&[("a", 2), ("b", 2)])).await;
    let first = t.take_one().await;
    let run = first.run;
    t.report(&first, Op::Defer { after_ms: 30_000, limit: Some("tenant".to_owned()) }).await;
    let until = t.now().await + 30_000;
    let free = t.start("one", json!(null)).await;
    let got = t.claim(t.ask()).await;
    assert_eq!((runs_of(&got.tasks), got.retry_at), (vec![free], Some(until)), "for every key, and for nothing else");
    t.advance(29_999);
    assert!(t.take(9).await.is_empty());
    t.advance(1);
    assert_eq!(t.take(9).await.len(), 3);
    let timer = t.pending(run).await.timers[0];
    assert_eq!(timer.due, until, "the task itself is retried by its timer");
}

pub async fn a_limit_that_was_slowed_down_stays_so_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    t.flow(LIMITED);
    t.start_all("limited", of_keys(&[("a", 2)])).await;
    let first = t.take_one().await;
    t.report(&first, Op::Defer { after_ms: 30_000, limit: Some("tenant".to_owned()) }).await;
    let until = t.now().await + 30_000;
    assert_eq!(t.claim(t.ask()).await, Claims { retry_at: Some(until), ..Claims::default() });
    if t.reopen().await {
        assert_eq!(t.claim(t.ask()).await, Claims { retry_at: Some(until), ..Claims::default() });
    }
}

pub async fn a_limit_that_was_slowed_down_is_listed_and_opened_by_a_change_of_its_rules(t: &mut Trial<'_>) {
    t.flow(LIMITED);
    for body in [None, Some(json!({"concurrency": 9}))] {
        let until = slow_down(t).await;
        let closed = LimitState { name: "tenant".to_owned(), closed_until: until };
        assert_eq!(t.store.limits(&t.ns).await.unwrap(), [closed]);
        assert_eq!(t.store.limits(&Namespace::new("other")).await.unwrap(), []);
        assert!(t.take(9).await.is_empty());
        set_limit(t, body).await;
        assert_eq!(t.store.limits(&t.ns).await.unwrap(), []);
        assert_eq!(t.take(9).await.len(), 1);
        t.advance(30_000);
    }
    slow_down(t).await;
    t.advance(30_000);
    assert_eq!(t.store.limits(&t.ns).await.unwrap(), [], "the limit is open again");
    slow_down(t).await;
    if t.reopen().await {
        assert_eq!(t.store.limits(&t.ns).await.unwrap().len(), 1);
        set_limit(t, Some(json!({}))).await;
        t.reopen().await;
        assert_eq!(t.store.limits(&t.ns).await.unwrap(), [], "it stays open when the store is opened again");
    }
}

/// Closes the limit; returns until when.
async fn slow_down(t: &Trial<'_>) -> eddyline_machine::Millis {
    t.start_all("limited", of_keys(&[("a", 2)])).await;
    let first = t.take_one().await;
    t.report(&first, Op::Defer { after_ms: 30_000, limit: Some("tenant".to_owned()) }).await;
    t.now().await + 30_000
}

async fn set_limit(t: &Trial<'_>, body: Option<Value>) {
    let key = DocumentKey::new(kind::LIMIT, "tenant");
    t.command(t.documents(vec![DocumentChange { key, expect: Expect::Any, body, due: None }])).await.unwrap();
}

/// The bounds of unreadable rules are unknown, so nothing may pass.
pub async fn rules_that_cannot_be_read_let_nothing_pass(t: &mut Trial<'_>) {
    t.flow("{name: free, steps: {work: {queue: red}}}");
    t.flow("{name: bound, steps: {work: {limits: [api]}}}");
    t.put(kind::QUEUE, "red", json!({"concurrency": "lots"})).await;
    t.put(kind::LIMIT, "api", json!(["nonsense"])).await;
    let runs = [t.start("free", json!(null)).await, t.start("bound", json!(null)).await];
    let all = |t: &Trial<'_>| ClaimRequest { queues: vec!["red".to_owned(), "default".to_owned()], ..t.ask() };
    assert_eq!(t.claim(all(t)).await, Claims::default());
    t.put(kind::QUEUE, "red", json!({})).await;
    t.put(kind::LIMIT, "api", json!({})).await;
    assert_eq!(runs_of(&t.claim(all(t)).await.tasks), runs);
    t.put(kind::QUEUE, "red", json!("damaged")).await;
    t.put(kind::LIMIT, "api", json!("damaged")).await;
    t.start("free", json!(null)).await;
    t.start("bound", json!(null)).await;
    if t.reopen().await {
        assert_eq!(t.claim(all(t)).await, Claims::default(), "after the store was opened again");
    }
}

pub async fn bounds_hold_at_every_moment_under_concurrent_claims(t: &mut Trial<'_>) {
    t.flow(LIMITED);
    t.put(kind::QUEUE, "default", json!({"concurrency": 7})).await;
    t.put(kind::LIMIT, "tenant", json!({"concurrency": 3})).await;
    t.start_all("limited", of_keys(&[("a", 60), ("b", 60)])).await;
    let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let mut workers = Vec::new();
    for at in 0..16 {
        let (drive, counts) = (t.drive.clone(), counts.clone());
        workers.push(tokio::spawn(async move {
            let (mut done, mut idle) = (0, 0);
            while idle < 200 {
                let request = ClaimRequest { max: 1 + at % 3, worker: format!("w{at}"), ..drive.ask() };
                let tasks = drive.claim(request).await.tasks;
                idle = if tasks.is_empty() { idle + 1 } else { 0 };
                for claimed in &tasks {
                    let now = counts[slot(claimed)].fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= 3, "{now} of one key at once");
                    let all = counts[0].load(Ordering::SeqCst) + counts[1].load(Ordering::SeqCst);
                    assert!(all <= 7, "{all} of the queue at once");
                }
                for claimed in &tasks {
                    let commit = drive.prepare(claimed.run, &[drive.report_of(claimed, completion(json!(1)))]).await;
                    // Decrement before the commit: the commit makes room.
                    counts[slot(claimed)].fetch_sub(1, Ordering::SeqCst);
                    drive.commit(commit).await.unwrap();
                    done += 1;
                }
                tokio::task::yield_now().await;
            }
            done
        }));
    }
    let mut done = 0;
    for worker in workers {
        done += worker.await.unwrap();
    }
    // Workers may have stopped too early and left tasks, which is not the store's fault.
    while let [claimed, ..] = &t.take(1).await[..] {
        t.complete(claimed, json!(1)).await;
        done += 1;
    }
    assert_eq!(done, 120);
}

fn slot(claimed: &Claimed) -> usize {
    usize::from(key_of(claimed) == "b")
}

fn of_keys(keys: &[(&str, usize)]) -> Vec<Value> {
    keys.iter().flat_map(|(key, count)| (0..*count).map(|_| json!({"k": *key}))).collect()
}

fn key_of(claimed: &Claimed) -> String {
    claimed.task.limits.iter().find_map(|(_, key)| key.clone()).unwrap_or_default().trim_matches('"').to_owned()
}

fn count_of(claimed: &[Claimed], key: &str) -> usize {
    claimed.iter().filter(|claimed| key_of(claimed) == key).count()
}
