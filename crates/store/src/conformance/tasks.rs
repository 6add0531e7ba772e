//! Adding, closing and removing tasks.

use eddyline_machine::{Input, StepAct};
use serde_json::json;

use super::drive::{completion, lease, names_of, runs_of};
use super::{CHAIN, ONE, Trial};
use crate::*;

/// When it is cancelled, attempts in flight may still report, so that their effects can be undone.
const UNDOABLE: &str = "{name: undoable, steps: {done: {undo: {run: undo}}, a: {after: [done], undo: {run: undo}}, \
                        b: {after: [done], undo: {run: undo}}}}";

pub async fn a_closed_task_is_not_offered_but_who_has_it_keeps_it(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(UNDOABLE), json!(null)).await;
    let first = t.take_one().await;
    t.complete(&first, json!(null)).await;
    let held = t.take_one().await;
    t.cancel(run).await;
    let rows = t.pending(run).await.tasks;
    assert_eq!(
        rows.iter().map(|row| (row.closed, row.held.is_some())).collect::<Vec<_>>(),
        [(true, true), (true, false)]
    );
    assert!(t.take(10).await.is_empty(), "closed tasks are not offered");

    t.advance(1_000);
    let lease_until = t.now().await + 30_000;
    let kept = t.store.extend(&t.ns, Some("w"), &[lease(&held)]).await.unwrap();
    assert_eq!(kept, [Extended::Until { lease_until, deadline: None, closed: true, memo: None }]);
    let waiting = Lease { run, fence: rows[1].task.fence };
    assert_eq!(t.store.extend(&t.ns, Some("w"), &[waiting]).await.unwrap(), [Extended::Lost], "it is not claimed");
    let again = t.claim(ClaimRequest { request: held.held.request, ..t.ask() }).await.tasks;
    assert_eq!(names_of(&again), ["a"], "a repeated claim still gets the held task");
    assert!(again.iter().all(|task| task.task.fence == held.task.fence));

    t.deliver().await;
    t.complete(&held, json!("its effect is undone")).await;
    assert!(matches!(t.take_one().await.task.name.as_str(), "undo:a" | "undo:done"));
}

pub async fn a_closed_task_whose_lease_ends_is_due(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(UNDOABLE), json!(null)).await;
    let first = t.take_one().await;
    t.complete(&first, json!(null)).await;
    let held = t.take_one().await;
    t.cancel(run).await;
    t.due(Due::Leases, 10).await;
    t.advance(5_000);
    for _ in 0..5 {
        t.due(Due::Leases, 10).await;
        t.advance(5_000);
    }
    let due = t.due(Due::Leases, 10).await.items;
    assert!(matches!(&due[..], [DueItem::Lease { task, .. }] if task.fence == held.task.fence), "{due:?}");
}

pub async fn a_removed_task_is_gone(t: &mut Trial<'_>) {
    let flow = t.flow("{name: two, steps: {a: {}, b: {}}}");
    let run = t.start(&flow, json!(null)).await;
    let held = t.take_one().await;
    let act = |activation: &str| Input::Act { activation: activation.to_owned(), by: "ann".into(), act: StepAct::Skip };
    t.submit(run, &[act("b")]).await;
    assert!(t.take(10).await.is_empty(), "a task that was removed while it waited");
    t.submit(run, &[act("a")]).await;
    assert_eq!(t.store.extend(&t.ns, Some("w"), &[lease(&held)]).await.unwrap(), [Extended::Lost]);
    assert!(t.pending(run).await.tasks.is_empty());
    let queue = t.queue("default").await;
    assert_eq!((queue.ready, queue.claimed), (0, 0));
    t.advance(60_000);
    assert!(t.due(Due::Leases, 10).await.items.is_empty(), "its lease was removed too");
}

pub async fn an_ended_run_has_no_tasks_and_no_timers(t: &mut Trial<'_>) {
    t.flow(
        "{name: wide, steps: {a: {start_timeout: 1h}, b: {}, nap: {await: {time: 1h}}, hook: {await: {manual: true}}}}",
    );
    let run = t.start("wide", json!(null)).await;
    let held = t.take_one().await;
    let token = t.pending(run).await.gates.iter().find_map(|gate| gate.token.clone()).expect("a gate with a token");
    t.cancel(run).await;
    let pending = t.pending(run).await;
    assert!(pending.tasks.is_empty() && pending.timers.is_empty(), "{pending:?}");
    assert!(pending.gates.iter().all(|gate| gate.closed), "{pending:?}");
    assert!(t.take(10).await.is_empty());
    assert_eq!(t.store.extend(&t.ns, Some("w"), &[lease(&held)]).await.unwrap(), [Extended::Lost]);
    let filter = GateFilter { token: Some(token), ..GateFilter::default() };
    assert_eq!(t.store.gates(Some(&t.ns), &filter, Page::default()).await.unwrap().len(), 1);
    t.advance(7_200_000);
    assert!(t.due(Due::Timers, 10).await.items.is_empty());
    assert!(t.due(Due::Leases, 10).await.items.is_empty());
}

pub async fn tasks_of_a_paused_run_are_offered_in_their_old_order_after_it(t: &mut Trial<'_>) {
    t.flow(ONE);
    let mut runs = Vec::new();
    for _ in 0..4 {
        runs.push(t.start("one", json!(null)).await);
        t.advance(10);
    }
    t.pause(runs[0]).await;
    t.pause(runs[2]).await;
    assert_eq!(t.queue("default").await.ready, 2);
    let first = t.take_one().await;
    assert_eq!(first.run, runs[1]);
    t.resume(runs[2]).await;
    t.resume(runs[0]).await;
    assert_eq!(t.queue("default").await.ready, 3);
    assert_eq!(runs_of(&t.take(10).await), [runs[0], runs[2], runs[3]]);
}

pub async fn a_task_that_a_paused_run_adds_waits_for_its_resume(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!(null)).await;
    let held = t.take_one().await;
    t.pause(run).await;
    let kept = t.store.extend(&t.ns, Some("w"), &[lease(&held)]).await.unwrap();
    assert!(matches!(kept[..], [Extended::Until { closed: false, .. }]), "a worker keeps its task");
    t.complete(&held, json!(1)).await;
    assert_eq!(t.pending(run).await.tasks.len(), 1);
    assert!(t.take(10).await.is_empty());
    t.resume(run).await;
    assert_eq!(names_of(&t.take(10).await), ["b"]);
}

/// The run has more activations than one transition touches, so the cancel takes several.
pub async fn what_is_being_cancelled_is_not_offered_meanwhile(t: &mut Trial<'_>) {
    let flow = "{name: wide, steps: {each: {spread: 'range(1500)', max_parallel: 1500, run: h, undo: {run: u}}}}";
    let run = t.start(&t.flow(flow), json!(null)).await;
    t.deliver().await;
    let first = t.take_one().await;
    t.cancel(run).await;
    assert!(t.pending(run).await.tasks.len() > 100, "most of it is still to be cancelled");
    assert_eq!((t.take(10).await.len(), t.queue("default").await.ready), (0, 0));
    t.complete(&first, json!(1)).await;
    t.deliver().await;
    assert_eq!(names_of(&t.take(10).await), ["undo:each[0]"]);
}

pub async fn a_run_that_is_paused_and_resumed_offers_its_tasks_once(t: &mut Trial<'_>) {
    let run = t.start(&t.flow("{name: two, steps: {a: {}, b: {}}}"), json!(null)).await;
    let held = t.take_one().await;
    for _ in 0..3 {
        t.pause(run).await;
        assert!(t.take(10).await.is_empty());
        t.resume(run).await;
    }
    assert_eq!(names_of(&t.take(10).await), ["b"], "but not the claimed one");
    t.complete(&held, json!(null)).await;
}

pub async fn a_new_attempt_is_a_new_task(t: &mut Trial<'_>) {
    let run = t.start(&t.flow("{name: again, steps: {work: {retry: {attempts: 3, initial: 0}}}}"), json!(null)).await;
    let first = t.take_one().await;
    let error = eddyline_machine::Failure::new("Boom", "it broke");
    let failed = eddyline_machine::Op::Fail { error, retryable: true, retry_after_ms: None };
    t.report(&first, failed).await;
    let second = t.take_one().await;
    assert_eq!((second.run, second.task.attempt), (run, 2));
    assert!(second.task.fence > first.task.fence);
    assert_eq!(t.store.extend(&t.ns, Some("w"), &[lease(&first)]).await.unwrap(), [Extended::Lost]);
    let late = t.report(&first, completion(json!("late"))).await;
    assert_eq!(late, eddyline_machine::Answer::Stale);
    assert_eq!(t.queue("default").await.claimed, 1);
}
