//! Items that commits consume: messages, timers and expiries, each once and only while it exists.

use eddyline_machine::{Claim, Expiry, Fence, Input, TaskRef, TimerKey, TimerKind, Version};
use serde_json::json;

use super::drive::{completion, event, lease, note};
use super::{NAP, ONE, Trial};
use crate::*;

pub async fn a_message_is_used_up_once(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    t.send(vec![note(run, "m1"), note(run, "m2")]).await;
    let pause = [Input::Pause { by: "ann".to_owned() }];
    t.submit_taking(run, &pause, &[Consumed::Message("m1".to_owned())]).await.unwrap();

    let mut second = t.prepare(run, &[Input::Resume { by: "ann".to_owned() }]).await;
    second.takes = vec![Consumed::Message("m2".to_owned()), Consumed::Message("m1".to_owned())];
    second.messages = vec![note(run, "m3")];
    second.events = vec![event("e1", "ping", None, json!(1))];
    let before = t.everything().await;
    let gone = Err(Refused::Gone(vec![Consumed::Message("m1".to_owned())]));
    assert_eq!(t.commit(second.clone()).await, gone, "only the missing message is listed");
    t.assert_unchanged(&before, "a commit whose message is gone").await;

    second.takes = vec![Consumed::Message("m2".to_owned())];
    t.commit(second).await.unwrap();
    let left: Vec<String> = t.pending(run).await.messages.into_iter().map(|message| message.id).collect();
    assert_eq!(left, ["m3"]);
}

pub async fn of_many_who_take_one_message_one_gets_it(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    t.send(vec![note(run, "m1")]).await;
    let mut racing = Vec::new();
    for _ in 0..16 {
        // With an empty transition, so that only the message can conflict.
        let mut commit = t.prepare(run, &[Input::Resume { by: "ann".to_owned() }]).await;
        commit.takes = vec![Consumed::Message("m1".to_owned())];
        let drive = t.drive.clone();
        racing.push(tokio::spawn(async move { drive.commit(commit).await.is_ok() }));
    }
    let mut won = 0;
    for racer in racing {
        won += usize::from(racer.await.unwrap());
    }
    assert_eq!(won, 1);
}

pub async fn a_message_to_another_run_is_not_there(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let (run, other) = (t.start(&flow, json!(null)).await, t.start(&flow, json!(null)).await);
    t.send(vec![note(other, "m1")]).await;
    let takes = [Consumed::Message("m1".to_owned())];
    let refused = t.submit_taking(run, &[Input::Pause { by: "ann".to_owned() }], &takes).await;
    assert_eq!(refused, Err(Refused::Gone(takes.to_vec())));
    assert_eq!(t.pending(other).await.messages.len(), 1);
}

pub async fn a_message_that_is_waiting_is_not_sent_twice(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let (run, other) = (t.start(&flow, json!(null)).await, t.start(&flow, json!(null)).await);
    t.send(vec![note(run, "m1"), note(run, "m2")]).await;
    t.send(vec![note(run, "m1"), note(other, "m1")]).await;
    let ids = |pending: PendingWork| pending.messages.into_iter().map(|message| message.id).collect::<Vec<_>>();
    assert_eq!(ids(t.pending(run).await), ["m1", "m2"]);
    assert_eq!(ids(t.pending(other).await), ["m1"], "an id is unique for its target only");
}

pub async fn messages_that_cannot_be_delivered_are_dropped(t: &mut Trial<'_>) {
    let nobody = t.new_run();
    t.send(vec![note(nobody, "m1"), note(nobody, "m2")]).await;
    assert_eq!(t.pending(nobody).await.messages.len(), 2, "a message may wait for a run that does not exist yet");
    let drops = vec![(nobody, "m1".to_owned()), (nobody, "never sent".to_owned())];
    t.command(Command::Documents(DocumentCommit { drops, ..t.nothing() })).await.unwrap();
    let left: Vec<String> = t.pending(nobody).await.messages.into_iter().map(|message| message.id).collect();
    assert_eq!(left, ["m2"]);
}

pub async fn a_timer_that_was_set_for_another_moment_is_gone(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(NAP), json!(null)).await;
    let timer = t.pending(run).await.timers[0];
    assert_eq!(timer.due, t.now().await + 10_000);
    t.advance(10_000);
    let before = t.everything().await;
    for wrong in [
        Consumed::Timer(timer.key, timer.due - 1),
        Consumed::Timer(timer.key, timer.due + 1),
        Consumed::Timer(TimerKey { kind: TimerKind::Deadline, ..timer.key }, timer.due),
    ] {
        let refused = t.submit_taking(run, &[Input::Due(timer.key)], std::slice::from_ref(&wrong)).await;
        assert_eq!(refused, Err(Refused::Gone(vec![wrong])));
        t.assert_unchanged(&before, "a commit that takes another timer").await;
    }
    let taken = Consumed::Timer(timer.key, timer.due);
    t.submit_taking(run, &[Input::Due(timer.key)], std::slice::from_ref(&taken)).await.unwrap();
    assert!(t.pending(run).await.timers.is_empty());
    let mut again = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    again.takes = vec![taken.clone()];
    assert_eq!(t.commit(again).await, Err(Refused::Gone(vec![taken])), "a timer fires once");
}

pub async fn a_lease_ends_only_when_its_time_is_up_by_the_stores_clock(t: &mut Trial<'_>) {
    t.flow("{name: timed, steps: {work: {timeout: 20s, retry: {attempts: 9, initial: 0}}}}");
    let run = t.start("timed", json!(null)).await;
    let claimed = t.claim(ClaimRequest { lease_ms: 5_000, ..t.ask() }).await.tasks.remove(0);
    // The wall clock jumps ahead, which must not matter.
    t.clock.jump(3_600_000);
    t.advance(4_999);
    let expire = |why| expiry(&claimed, why);
    for why in [Expiry::LeaseLost, Expiry::Timeout, Expiry::StartTimeout] {
        let (input, taken) = expire(why);
        let refused = t.submit_taking(run, &[input], std::slice::from_ref(&taken)).await;
        assert_eq!(refused, Err(Refused::Gone(vec![taken])), "{why:?} before its time");
    }
    t.advance(1);
    for why in [Expiry::Timeout, Expiry::StartTimeout] {
        let (input, taken) = expire(why);
        assert!(t.submit_taking(run, &[input], &[taken]).await.is_err(), "{why:?} before its time");
    }
    let (input, taken) = expire(Expiry::LeaseLost);
    t.submit_taking(run, std::slice::from_ref(&input), std::slice::from_ref(&taken)).await.unwrap();
    assert_eq!(t.summary(run).await.version, Version(2));

    let mut again = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    again.takes = vec![taken.clone()];
    assert_eq!(t.commit(again).await, Err(Refused::Gone(vec![taken])), "its task is gone");
}

pub async fn an_attempts_time_is_up_at_its_deadline_however_long_the_lease(t: &mut Trial<'_>) {
    t.flow("{name: timed, steps: {work: {timeout: 20s}}}");
    let run = t.start("timed", json!(null)).await;
    let claimed = t.claim(ClaimRequest { lease_ms: 60_000, ..t.ask() }).await.tasks.remove(0);
    t.advance(19_999);
    let (input, taken) = expiry(&claimed, Expiry::Timeout);
    assert!(t.submit_taking(run, std::slice::from_ref(&input), std::slice::from_ref(&taken)).await.is_err());
    t.advance(1);
    let (lost, lost_taken) = expiry(&claimed, Expiry::LeaseLost);
    assert!(t.submit_taking(run, &[lost], &[lost_taken]).await.is_err(), "the lease has not ended");
    t.submit_taking(run, &[input], &[taken]).await.unwrap();
}

pub async fn the_time_to_be_claimed_is_up_only_for_a_task_that_nobody_has(t: &mut Trial<'_>) {
    t.flow("{name: start, steps: {work: {start_timeout: 10s}}}");
    let run = t.start("start", json!(null)).await;
    let task = t.pending(run).await.tasks[0].task.clone();
    let input = |why| Input::Expired {
        task: TaskRef { activation: task.activation, fence: task.fence },
        why,
        claim: Claim::default(),
    };
    let taken = [Consumed::Expiry(task.fence, Expiry::StartTimeout)];
    t.advance(9_999);
    assert!(t.submit_taking(run, &[input(Expiry::StartTimeout)], &taken).await.is_err(), "before its time");
    t.advance(1);
    for why in [Expiry::LeaseLost, Expiry::Timeout, Expiry::Released] {
        let taken = [Consumed::Expiry(task.fence, why)];
        assert!(t.submit_taking(run, &[input(why)], &taken).await.is_err(), "{why:?} of an unclaimed task");
    }
    let held = t.start("start", json!(null)).await;
    t.advance(10_000);
    let claimed = t.take(2).await.into_iter().find(|claimed| claimed.run == held).expect("its task");
    let (late, late_taken) = expiry(&claimed, Expiry::StartTimeout);
    assert!(t.submit_taking(held, &[late], &[late_taken]).await.is_err(), "it was claimed in time");
}

pub async fn the_time_to_be_claimed_ends_an_unclaimed_task(t: &mut Trial<'_>) {
    t.flow("{name: start, steps: {work: {start_timeout: 10s}}}");
    let run = t.start("start", json!(null)).await;
    // Expired leases are asked for all along, so that no time is credited.
    t.due(Due::Leases, 10).await;
    t.advance(5_000);
    t.due(Due::Leases, 10).await;
    t.advance(5_000);
    let fence = t.pending(run).await.tasks[0].task.fence;
    let DueItem::Lease { task, why, claim, .. } = t.due(Due::Leases, 10).await.items.remove(0) else {
        panic!("no lease")
    };
    assert_eq!(why, Expiry::StartTimeout);
    let input = Input::Expired { task, why, claim };
    t.submit_taking(run, &[input], &[Consumed::Expiry(fence, why)]).await.unwrap();
    assert!(t.take(1).await.is_empty());
}

pub async fn a_lease_that_is_extended_at_the_moment_it_ends_is_kept(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    let claimed = t.claim(ClaimRequest { lease_ms: 5_000, ..t.ask() }).await.tasks.remove(0);
    t.advance(5_000);
    let now = t.now().await;
    assert_eq!(claimed.held.lease_until, now);
    assert_eq!(t.due(Due::Leases, 10).await.items.len(), 1, "a caller is about to expire it");
    let kept = t.store.extend(&t.ns, Some("w"), &[lease(&claimed)]).await.unwrap();
    assert_eq!(kept, [Extended::Until { lease_until: now + 5_000, deadline: None, closed: false, memo: None }]);

    let (input, taken) = expiry(&claimed, Expiry::LeaseLost);
    let before = t.everything().await;
    let refused = t.submit_taking(run, std::slice::from_ref(&input), std::slice::from_ref(&taken)).await;
    assert_eq!(refused, Err(Refused::Gone(vec![taken.clone()])));
    t.assert_unchanged(&before, "an expiry that came too late").await;
    t.advance(5_000);
    t.submit_taking(run, &[input], &[taken]).await.unwrap();
}

pub async fn a_task_that_was_never_delivered_is_released(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    let claimed = t.take_one().await;
    let (input, taken) = expiry(&claimed, Expiry::Released);
    t.submit_taking(run, &[input], &[taken]).await.unwrap();
    let again = t.take_one().await;
    assert_eq!((again.run, again.task.attempt), (run, claimed.task.attempt), "it costs no attempt");
    assert!(again.task.fence > claimed.task.fence);
    let unknown = Consumed::Expiry(Fence(999), Expiry::Released);
    let refused =
        t.submit_taking(run, &[t.report_of(&again, completion(json!(1)))], std::slice::from_ref(&unknown)).await;
    assert_eq!(refused, Err(Refused::Gone(vec![unknown])));
}

pub fn expiry(claimed: &Claimed, why: Expiry) -> (Input, Consumed) {
    let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
    let input = Input::Expired { task, why, claim: claimed.held.claim.clone() };
    (input, Consumed::Expiry(claimed.task.fence, why))
}
