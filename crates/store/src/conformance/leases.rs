//! Leases: a worker keeps a task for as long as it extends the lease, and time without service does not count.

use eddyline_machine::{CodeOp, Data, Expiry, Fence, Millis, Op, TaskRef};
use serde_json::json;

use super::drive::lease;
use super::takes::expiry;
use super::{ONE, Trial};
use crate::*;

pub async fn a_lease_is_extended_by_who_has_it_only(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..2).map(|n| json!(n))).await;
    let held =
        t.claim(ClaimRequest { worker: "ann".to_owned(), max: 1, lease_ms: 40_000, ..t.ask() }).await.tasks.remove(0);
    let other = t.start("one", json!(null)).await;
    let unclaimed = Lease { run: other, fence: t.pending(other).await.tasks[0].task.fence };
    t.advance(20_000);
    let before = t.everything().await;
    let leases = [
        lease(&held),
        unclaimed,
        Lease { run: held.run, fence: Fence(99) },
        Lease { run: t.new_run(), fence: Fence(1) },
    ];
    let told = t.store.extend(&t.ns, Some("bob"), &leases).await.unwrap();
    assert_eq!(told, [Extended::Lost; 4]);
    t.assert_unchanged(&before, "extending a lost lease").await;

    let told = t.store.extend(&t.ns, Some("ann"), &leases).await.unwrap();
    let lease_until = t.now().await + 40_000;
    let kept = Extended::Until { lease_until, deadline: None, closed: false, memo: None };
    assert_eq!(told, [kept, Extended::Lost, Extended::Lost, Extended::Lost], "results in the order of the leases");
    let now_held = t.pending(held.run).await.tasks.remove(0).held.expect("it is held");
    assert_eq!(now_held, Held { lease_until, ..held.held });
    t.advance(1_000);
    let told = t.store.extend(&t.ns, None, &leases).await.unwrap();
    let kept = Extended::Until { lease_until: lease_until + 1_000, deadline: None, closed: false, memo: None };
    assert_eq!(told, [kept, Extended::Lost, Extended::Lost, Extended::Lost], "for any holder");
    if t.reopen().await {
        let told = t.store.extend(&t.ns, Some("ann"), &leases[..1]).await.unwrap();
        assert!(matches!(told[..], [Extended::Until { .. }]), "after the store was opened again");
        assert_eq!(t.store.extend(&t.ns, Some("bob"), &leases[..1]).await.unwrap(), [Extended::Lost]);
    }
}

pub async fn a_look_at_leases_tells_who_has_them_and_extends_none(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.flow("{name: job, code: true}");
    t.start("one", json!(null)).await;
    let job = t.start("job", json!(null)).await;
    let mut held = t.claim(ClaimRequest { worker: "ann".to_owned(), max: 2, lease_ms: 10_000, ..t.ask() }).await.tasks;
    held.sort_by_key(|claimed| claimed.run == job);
    let other = t.start("one", json!(null)).await;
    let unclaimed = Lease { run: other, fence: t.pending(other).await.tasks[0].task.fence };
    let leases = [lease(&held[0]), lease(&held[1]), unclaimed, Lease { run: t.new_run(), fence: Fence(1) }];
    // Expired leases are asked for all along, so that no time is credited.
    for _ in 0..3 {
        t.advance(3_000);
        assert_eq!(t.due(Due::Leases, 10).await.items.len(), 0);
    }
    let before = t.everything().await;
    let state = |claimed: &Claimed, memo| LeaseState::Held {
        task: TaskRef { activation: claimed.task.activation, fence: claimed.task.fence },
        claim: claimed.held.claim.clone(),
        closed: false,
        memo,
    };
    let lost = || LeaseState::Lost;
    let expected = [state(&held[0], None), state(&held[1], Some(0)), lost(), lost()];
    assert_eq!(t.store.leases(&t.ns, Some("ann"), &leases).await.unwrap(), expected);
    assert_eq!(t.store.leases(&t.ns, None, &leases).await.unwrap(), expected, "for any holder");
    assert_eq!(t.store.leases(&t.ns, Some("bob"), &leases).await.unwrap(), [lost(), lost(), lost(), lost()]);
    let elsewhere = Namespace::new("elsewhere");
    assert_eq!(t.store.leases(&elsewhere, Some("ann"), &leases).await.unwrap(), [lost(), lost(), lost(), lost()]);
    t.assert_unchanged(&before, "reading leases").await;

    let step = Op::Code { name: "pay".to_owned(), op: CodeOp::Done { output: Data::from(json!(1)), undo: false } };
    t.report(&held[1], step).await;
    let told = t.store.leases(&t.ns, Some("ann"), &leases[1..2]).await.unwrap();
    assert_eq!(told, [state(&held[1], Some(1))], "the memo has grown since the claim");
    t.advance(1_000);
    let due = t.due(Due::Leases, 10).await;
    assert_eq!(due.items.len(), 2, "neither lease was extended: {:?}", due.items);
}

pub async fn of_an_extension_and_an_expiry_at_once_one_wins(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..20).map(|n| json!(n))).await;
    let held = t.claim(ClaimRequest { lease_ms: 1_000, ..t.ask() }).await.tasks;
    t.advance(1_000);
    for claimed in held {
        let (input, taken) = expiry(&claimed, Expiry::LeaseLost);
        let mut commit = t.prepare(claimed.run, &[input]).await;
        commit.takes = vec![taken];
        let (drive, lease) = (t.drive.clone(), [lease(&claimed)]);
        let extending = tokio::spawn(async move { drive.store.extend(&drive.ns, Some("w"), &lease).await.unwrap() });
        let drive = t.drive.clone();
        let expiring = tokio::spawn(async move { drive.commit(commit).await.is_ok() });
        let kept = extending.await.unwrap() != [Extended::Lost];
        assert_ne!(kept, expiring.await.unwrap(), "a lease is either extended or expired, not both");
    }
}

pub async fn an_extended_lease_ends_later_and_its_deadline_stays(t: &mut Trial<'_>) {
    t.flow("{name: timed, steps: {work: {timeout: 25s}}}");
    t.start("timed", json!(null)).await;
    let began = t.now().await;
    let held = t.claim(ClaimRequest { lease_ms: 10_000, ..t.ask() }).await.tasks.remove(0);
    t.advance(9_000);
    let told = t.store.extend(&t.ns, Some("w"), &[lease(&held)]).await.unwrap();
    let expected =
        Extended::Until { lease_until: began + 19_000, deadline: Some(began + 25_000), closed: false, memo: None };
    assert_eq!(told, [expected]);
    assert_eq!(first_due(t, began, 12_000).await, Some((19_000, Expiry::LeaseLost)));
}

pub async fn a_lease_that_nobody_extends_is_due_at_its_end(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    let began = t.now().await;
    t.claim(ClaimRequest { lease_ms: 12_000, ..t.ask() }).await;
    assert_eq!(first_due(t, began, 15_000).await, Some((12_000, Expiry::LeaseLost)));
}

pub async fn an_attempt_is_due_at_its_deadline(t: &mut Trial<'_>) {
    t.flow("{name: timed, steps: {work: {timeout: 9s}}}");
    t.start("timed", json!(null)).await;
    t.advance(2_000);
    let began = t.now().await;
    t.claim(ClaimRequest { lease_ms: 60_000, ..t.ask() }).await;
    assert_eq!(first_due(t, began, 15_000).await, Some((9_000, Expiry::Timeout)));
}

pub async fn a_task_that_nobody_takes_is_due_at_the_end_of_its_time(t: &mut Trial<'_>) {
    t.flow("{name: start, steps: {work: {start_timeout: 8s}}}");
    let began = t.now().await;
    t.start("start", json!(null)).await;
    assert_eq!(first_due(t, began, 15_000).await, Some((8_000, Expiry::StartTimeout)));
}

pub async fn a_claimed_task_has_no_time_to_be_claimed(t: &mut Trial<'_>) {
    t.flow("{name: start, steps: {work: {start_timeout: 8s}}}");
    t.start("start", json!(null)).await;
    let began = t.now().await;
    t.claim(ClaimRequest { lease_ms: 11_000, ..t.ask() }).await;
    assert_eq!(first_due(t, began, 15_000).await, Some((11_000, Expiry::LeaseLost)));
}

pub async fn a_lease_follows_the_stores_clock_and_not_the_wall(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    let began = t.now().await;
    t.claim(ClaimRequest { lease_ms: 12_000, ..t.ask() }).await;
    t.clock.jump(86_400_000);
    assert_eq!(t.now().await, began, "store time does not jump");
    assert!(t.due(Due::Leases, 10).await.items.is_empty());
    t.clock.jump(-2 * 86_400_000);
    assert_eq!(first_due(t, began, 15_000).await, Some((12_000, Expiry::LeaseLost)));
}

pub async fn a_due_lease_says_how_it_was_held(t: &mut Trial<'_>) {
    t.flow(ONE);
    let run = t.start("one", json!(null)).await;
    t.due(Due::Leases, 10).await;
    let offer = std::sync::Arc::new(Offer { build: Some("b1".to_owned()), ..Offer::default() });
    let held = t.claim(ClaimRequest { lease_ms: 4_000, offer, ..t.ask() }).await.tasks.remove(0);
    t.advance(4_000);
    let task = eddyline_machine::TaskRef { activation: held.task.activation, fence: held.task.fence };
    let (ns, claim) = (t.ns.clone(), held.held.claim);
    assert_eq!(t.due(Due::Leases, 10).await.items, [DueItem::Lease { ns, run, task, why: Expiry::LeaseLost, claim }]);
}

pub async fn time_in_which_nobody_asked_is_not_held_against_workers(t: &mut Trial<'_>) {
    t.flow("{name: timed, steps: {work: {timeout: 25s}}}");
    t.start("timed", json!(null)).await;
    t.due(Due::Leases, 10).await;
    let began = t.now().await;
    let held = t.claim(ClaimRequest { lease_ms: 10_000, ..t.ask() }).await.tasks.remove(0);
    t.advance(3_000);
    t.due(Due::Leases, 10).await;
    // Nobody asks for 20 s: no server was running.
    t.advance(20_000);
    assert!(t.due(Due::Leases, 10).await.items.is_empty());
    let now_held = t.pending(held.run).await.tasks.remove(0).held.expect("it is held");
    assert_eq!(now_held.lease_until, began + 10_000 + 20_000);
    assert_eq!(now_held.deadline, Some(began + 25_000 + 20_000));
    assert_eq!(first_due(t, began + 23_000, 15_000).await, Some((30_000 - 23_000, Expiry::LeaseLost)));
}

pub async fn time_in_which_nobody_asked_is_not_held_against_unclaimed_tasks(t: &mut Trial<'_>) {
    t.flow("{name: start, steps: {work: {start_timeout: 8s}}}");
    t.start("start", json!(null)).await;
    t.due(Due::Leases, 10).await;
    let began = t.now().await;
    t.advance(3_000);
    t.due(Due::Leases, 10).await;
    // The machine is suspended for 20 s: no worker could have claimed it.
    t.advance(20_000);
    assert!(t.due(Due::Leases, 10).await.items.is_empty());
    assert_eq!(first_due(t, began + 23_000, 15_000).await, Some((5_000, Expiry::StartTimeout)));
}

pub async fn a_short_while_in_which_nobody_asked_counts(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    t.due(Due::Leases, 10).await;
    t.claim(ClaimRequest { lease_ms: 10_000, ..t.ask() }).await;
    t.advance(UNWATCHED_MS);
    t.due(Due::Leases, 10).await;
    t.advance(UNWATCHED_MS);
    assert_eq!(t.due(Due::Leases, 10).await.items.len(), 1);
}

/// Time between the opening of a store and the first request for expired leases is credited too.
pub async fn time_before_anybody_asked_is_not_held_against_workers(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    t.claim(ClaimRequest { lease_ms: 10_000, ..t.ask() }).await;
    t.advance(20_000);
    let began = t.now().await;
    assert!(t.due(Due::Leases, 10).await.items.is_empty());
    assert_eq!(first_due(t, began, 15_000).await, Some((10_000, Expiry::LeaseLost)));
}

pub async fn leases_have_their_full_time_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    if t.backend.keeps_leases() {
        return;
    }
    t.flow(ONE);
    t.start("one", json!(null)).await;
    t.due(Due::Leases, 10).await;
    t.claim(ClaimRequest { lease_ms: 10_000, ..t.ask() }).await;
    t.advance(4_000);
    t.due(Due::Leases, 10).await;
    t.advance(3_000);
    if !t.reopen().await {
        return;
    }
    let began = t.now().await;
    let Some((after, Expiry::LeaseLost)) = first_due(t, began, 60_000).await else { panic!("the lease never ends") };
    assert!((10_000..=20_000).contains(&after), "it ended {after} ms after the store was opened");
}

pub async fn a_lease_is_not_extended_from_another_namespace(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    let held = t.take_one().await;
    t.advance(20_000);
    let before = t.everything().await;
    let told = t.store.extend(&Namespace::new("other"), Some("w"), &[lease(&held)]).await.unwrap();
    assert_eq!(told, [Extended::Lost], "a worker of that name in another namespace is another worker");
    t.assert_unchanged(&before, "extending a lease of another namespace").await;
    let told = t.store.extend(&t.ns, Some("w"), &[lease(&held)]).await.unwrap();
    assert!(matches!(told[..], [Extended::Until { .. }]), "{told:?}");
}

/// Asks every second for `for_ms` whether a lease is due; returns when the first was, relative to `began`, and why.
async fn first_due(t: &Trial<'_>, began: Millis, for_ms: Millis) -> Option<(Millis, Expiry)> {
    for _ in 0..=for_ms / 1_000 {
        let batch = t.due(Due::Leases, 10).await;
        let after = t.now().await - began;
        if let Some(DueItem::Lease { why, .. }) = batch.items.first() {
            return Some((after, *why));
        }
        let next = batch.next_in.expect("a lease will be due");
        assert!(next > 0, "next_in is zero, but nothing was due");
        t.advance(1_000);
    }
    None
}
