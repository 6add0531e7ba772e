//! Leases: heartbeats against expiries, what a heartbeat says, repeated claims, time in which nobody looked.

use eddyline_machine::Millis;
use eddyline_store::*;
use serde_json::json;

use crate::story::ns;
use crate::{Two, at_once, claims, leases_of, one};

const LEASE: Millis = 30_000;

/// A worker with the tasks of as many runs.
async fn working(t: &mut Two, count: usize) -> Vec<Claimed> {
    for n in 0..count {
        t.start("line", json!(n)).await;
    }
    let request = t.ask("ann", count);
    let tasks = claims(&t.a, request).await.tasks;
    assert_eq!(tasks.len(), count);
    tasks
}

async fn end(t: &Two, claimed: &Claimed) -> Millis {
    t.b.pending(claimed.run).await.unwrap().tasks.remove(0).held.unwrap().lease_until
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_heartbeat_that_met_an_expiry_is_told_that_the_task_is_lost() {
    let mut t = Two::new().await;
    let tasks = working(&mut t, 1).await;
    t.a.extend(&ns(), Some("ann"), &leases_of(&tasks)).await.unwrap();
    t.clock.advance(LEASE);
    let expiry = t.expiry(&tasks[0]).await;
    // As the commit of an expiry holds it.
    t.execute("BEGIN; SELECT 1 FROM SCHEMA.workers FOR SHARE").await;
    let (store, leases) = (t.b.clone(), leases_of(&tasks));
    let heartbeat = at_once(async move { store.extend(&ns(), Some("ann"), &leases).await.unwrap() });
    t.until_blocked(1).await;
    one(&t.a, Command::Run(expiry)).await.unwrap();
    assert!(!heartbeat.is_finished());
    t.execute("COMMIT").await;
    assert_eq!(heartbeat.await.unwrap(), [Extended::Lost]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expiry_that_met_a_heartbeat_is_refused() {
    let mut t = Two::new().await;
    let tasks = working(&mut t, 1).await;
    t.a.extend(&ns(), Some("ann"), &leases_of(&tasks)).await.unwrap();
    t.clock.advance(LEASE);
    let expiry = t.expiry(&tasks[0]).await;
    // As a heartbeat does it.
    t.execute(&format!("BEGIN; UPDATE SCHEMA.workers SET seen = seen + {LEASE}")).await;
    let (store, takes) = (t.b.clone(), expiry.takes.clone());
    let expiring = at_once(async move { one(&store, Command::Run(expiry)).await });
    t.until_blocked(1).await;
    t.execute("COMMIT").await;
    assert_eq!(expiring.await.unwrap(), Err(Refused::Gone(takes)));
    assert!(end(&t, &tasks[0]).await > t.a.now().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_a_heartbeat_that_lists_all_tasks_counts_for_the_worker() {
    let mut t = Two::new().await;
    let tasks = working(&mut t, 2).await;
    let all = leases_of(&tasks);
    let first = &all[..1];
    let begun = t.a.now().await.unwrap();
    t.a.due(Due::Leases, &[], 10).await.unwrap();
    let seen = "SELECT coalesce(max(seen), 0) FROM SCHEMA.workers";
    let ends = async |t: &Two| [end(t, &tasks[0]).await - LEASE - begun, end(t, &tasks[1]).await - LEASE - begun];

    t.clock.advance(1_000);
    t.b.extend(&ns(), None, first).await.unwrap();
    assert_eq!((t.number_of(seen).await, ends(&t).await), (0, [1_000, 0]), "a report extends what it names");
    t.clock.advance(1_000);
    t.a.extend(&ns(), Some("ann"), first).await.unwrap();
    assert_eq!((t.number_of(seen).await, ends(&t).await), (0, [2_000, 0]), "one task is missing");
    t.clock.advance(1_000);
    t.b.extend(&ns(), Some("ann"), &all).await.unwrap();
    assert_eq!((t.number_of(seen).await - begun, ends(&t).await), (3_000, [3_000, 3_000]));
    t.clock.advance(1_000);
    t.a.due(Due::Leases, &[], 10).await.unwrap();
    t.a.extend(&ns(), None, first).await.unwrap();
    assert_eq!((t.number_of(seen).await - begun, ends(&t).await), (3_000, [4_000, 3_000]));
    t.clock.advance(1_000);
    t.b.extend(&ns(), Some("ann"), first).await.unwrap();
    assert_eq!((t.number_of(seen).await - begun, ends(&t).await), (3_000, [5_000, 3_000]));

    // A task that was left out and is listed again is its worker's again.
    t.clock.advance(1_000);
    t.a.extend(&ns(), Some("ann"), &all).await.unwrap();
    assert_eq!(ends(&t).await, [6_000, 6_000]);
    assert_eq!(t.number_of("SELECT count(*) FROM SCHEMA.tasks WHERE by_worker").await, 2);

    // A worker without a row was never heard of: its tasks end as they were claimed or extended last.
    t.execute("DELETE FROM SCHEMA.workers").await;
    assert_eq!(ends(&t).await, [5_000, 0]);
    let mut due = Vec::new();
    while t.a.now().await.unwrap() < begun + LEASE {
        // Time in which nobody looks would be added to the leases.
        t.clock.advance(1_000);
        due.extend(t.b.due(Due::Leases, &[], 10).await.unwrap().items);
    }
    assert!(matches!(due.as_slice(), [DueItem::Lease { run, .. }] if *run == tasks[1].run), "{due:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_repeated_anywhere_at_once_gets_the_same_and_no_more() {
    let mut t = Two::new().await;
    for n in 0..20 {
        t.start("line", json!(n)).await;
    }
    let request = t.ask("ann", 3);
    let asking: Vec<_> = (0..8)
        .map(|n| {
            let (store, request) = ([&t.a, &t.b][n % 2].clone(), request.clone());
            at_once(async move { claims(&store, request).await.tasks })
        })
        .collect();
    let mut answers = Vec::new();
    for asked in asking {
        let mut tasks: Vec<Lease> = leases_of(&asked.await.unwrap());
        tasks.sort();
        answers.push(tasks);
    }
    assert_eq!(answers[0].len(), 3);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    assert_eq!(t.a.held_by(&ns(), "ann").await.unwrap(), 3);

    // In a call with a commit too.
    let commit = t.prepare_start("line", json!(0)).await;
    let request = t.ask("bob", 2);
    let mut got = Vec::new();
    for store in [&t.a, &t.b, &t.a] {
        let written = store.commit(vec![Command::Run(commit.clone())], vec![request.clone()]).await.unwrap();
        got.push(leases_of(&written.claims[0].tasks));
    }
    assert_eq!((got[0].len(), &got[1], &got[2]), (2, &got[0], &got[0]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_of_a_worker_through_several_processes_never_give_it_more_than_it_may_have() {
    let mut t = Two::new().await;
    for n in 0..40 {
        t.start("line", json!(n)).await;
    }
    for round in 0..5 {
        let worker = format!("worker-{round}");
        let asking: Vec<_> = (0..6)
            .map(|n| {
                let request = ClaimRequest { most_held: Some(5), ..t.ask(&worker, 4) };
                let store = [&t.a, &t.b][n % 2].clone();
                at_once(async move { claims(&store, request).await.tasks.len() })
            })
            .collect();
        let mut got = 0;
        for asked in asking {
            got += asked.await.unwrap();
        }
        assert_eq!((got, t.a.held_by(&ns(), &worker).await.unwrap()), (5, 5));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_in_which_nobody_looked_is_added_once_and_before_anything_expires() {
    let mut t = Two::new().await;
    let tasks = working(&mut t, 30).await;
    let begun = t.a.now().await.unwrap();
    t.a.due(Due::Leases, &[], 100).await.unwrap();
    t.clock.advance(3 * LEASE);
    let asking: Vec<_> = (0..6)
        .map(|n| {
            let store = [&t.a, &t.b][n % 2].clone();
            at_once(async move { store.due(Due::Leases, &[], 100).await.unwrap().items })
        })
        .collect();
    for asked in asking {
        assert!(asked.await.unwrap().is_empty());
    }
    for task in &tasks {
        assert_eq!(end(&t, task).await, begun + 4 * LEASE);
    }
}
