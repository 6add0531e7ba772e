//! Due items: by which clock, to which caller, how often, and when to ask again.

use std::collections::BTreeSet;

use eddyline_machine::{ActId, Input, Message, MessageBody, Millis, RunId, TimerKind};
use serde_json::json;

use super::drive::{Drive, event, note};
use super::{BEGINNING, NAP, ONE, Trial};
use crate::*;

const UNTIL: &str = "{name: until, steps: {morning: {await: {until: 'input.at'}}}}";

pub async fn timers_follow_the_stores_clock(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(NAP), json!(null)).await;
    let due = t.now().await + 10_000;
    let timer = t.pending(run).await.timers[0];
    assert_eq!((timer.due, timer.wall, timer.key.kind), (due, false, TimerKind::Gate));
    t.clock.jump(86_400_000);
    assert!(t.due(Due::Timers, 10).await.items.is_empty(), "the wall clock jumped, but no time passed");
    t.clock.jump(-2 * 86_400_000);
    t.advance(9_999);
    let batch = t.due(Due::Timers, 10).await;
    assert_eq!(batch, DueBatch { items: Vec::new(), next_in: Some(1) });
    t.advance(1);
    let ns = t.ns.clone();
    assert_eq!(
        t.due(Due::Timers, 10).await.items,
        [DueItem::Timer { ns, run, timer }],
        "regardless of how far the wall clock is behind"
    );
}

pub async fn timers_for_a_moment_follow_the_wall_clock(t: &mut Trial<'_>) {
    let at = BEGINNING + 3_600_000;
    let run = t.start(&t.flow(UNTIL), json!({"at": at})).await;
    let timer = t.pending(run).await.timers[0];
    assert_eq!((timer.due, timer.wall), (at, true));
    let batch = t.due(Due::Timers, 10).await;
    assert_eq!(batch.items, []);
    assert!(batch.next_in.is_some_and(|next| next > 0 && next <= 3_600_000), "{batch:?}");
    t.clock.jump(3_599_999);
    assert_eq!(t.due(Due::Timers, 10).await, DueBatch { items: Vec::new(), next_in: Some(1) });
    t.clock.jump(1);
    assert_eq!(t.due(Due::Timers, 10).await.items.len(), 1);
    let late = t.start("until", json!({"at": at + 1_000})).await;
    t.advance(1_000);
    assert!(matches!(t.due(Due::Timers, 10).await.items[..], [DueItem::Timer { run, .. }] if run == late));
}

pub async fn documents_are_due_by_the_wall_clock(t: &mut Trial<'_>) {
    slot(t, "a", BEGINNING + 5_000).await;
    slot(t, "b", BEGINNING + 1_000).await;
    t.put("slot", "never", json!(null)).await;
    let batch = t.due(Due::Documents, 10).await;
    assert_eq!(batch, DueBatch { items: Vec::new(), next_in: Some(1_000) });
    t.clock.jump(1_000);
    assert_eq!(due_documents(t, 10).await, ["b"]);
    t.advance(4_000);
    assert_eq!(due_documents(t, 10).await, ["a"]);
    t.clock.jump(-3_600_000);
    slot(t, "c", BEGINNING + 5_000).await;
    assert!(due_documents(t, 10).await.is_empty(), "the wall clock went back");
}

pub async fn a_due_item_is_handed_out_once_until_the_hold_is_over(t: &mut Trial<'_>) {
    fill(t).await;
    for what in ALL {
        let first = ids(&t.due(what, 100).await);
        assert_eq!(first.len(), 3, "{what:?}");
        let again = t.due(what, 100).await;
        assert_eq!(ids(&again), Vec::<String>::new(), "{what:?} was handed out");
        let next = again.next_in.expect("it may be due again");
        assert!((1..=HOLD_MS).contains(&next), "{what:?} in {next}");
    }
    t.advance(UNWATCHED_MS);
    t.due(Due::Leases, 0).await;
    t.advance(HOLD_MS - UNWATCHED_MS - 1);
    for what in ALL {
        assert_eq!(ids(&t.due(what, 100).await), Vec::<String>::new(), "{what:?} is still held");
    }
    t.advance(1);
    for what in ALL {
        assert_eq!(ids(&t.due(what, 100).await).len(), 3, "{what:?} was not consumed, so another caller gets it");
    }
}

pub async fn a_due_item_goes_to_one_of_many_who_ask(t: &mut Trial<'_>) {
    fill(t).await;
    for what in ALL {
        let mut asking = Vec::new();
        for _ in 0..16 {
            let drive = t.drive.clone();
            asking.push(tokio::spawn(async move { ids(&drive.due(what, 2).await) }));
        }
        let mut got = Vec::new();
        for one in asking {
            got.extend(one.await.unwrap());
        }
        assert_eq!((got.len(), got.iter().collect::<BTreeSet<_>>().len()), (3, 3), "{what:?}: {got:?}");
    }
}

pub async fn due_items_come_in_bounded_parts(t: &mut Trial<'_>) {
    fill(t).await;
    for what in ALL {
        let first = t.due(what, 2).await;
        assert_eq!((first.items.len(), first.next_in), (2, Some(0)), "{what:?}: there is more");
        let second = t.due(what, 2).await;
        assert_eq!(second.items.len(), 1, "{what:?}: held items do not hide later ones");
        assert!(second.next_in.is_some_and(|next| next > 0), "{what:?}: no more are due");
        let all: BTreeSet<String> = ids(&first).into_iter().chain(ids(&second)).collect();
        assert_eq!(all.len(), 3, "{what:?}");
    }
}

pub async fn items_of_skipped_namespaces_stay_due(t: &mut Trial<'_>) {
    let there = t.within("other");
    fill_namespace(&there).await;
    fill(t).await;
    for what in ALL {
        let skip = [there.ns.clone(), Namespace::new("nobody")];
        let mut batch = t.store.due(what, &skip, 2).await.unwrap();
        assert_eq!((batch.items.len(), batch.next_in), (2, Some(0)), "{what:?}: there is more");
        batch.items.extend(t.store.due(what, &skip, 100).await.unwrap().items);
        assert_eq!(batch.items.len(), 3, "{what:?}");
        assert!(batch.items.iter().all(|item| *ns(item) == t.ns), "{what:?}: {batch:?}");
        let none = t.store.due(what, &skip, 100).await.unwrap();
        assert!(none.items.is_empty() && none.next_in != Some(0), "{what:?}: {none:?}");
        let rest = t.due(what, 100).await.items;
        assert_eq!(rest.len(), 3, "{what:?}: the others were not held");
        assert!(rest.iter().all(|item| *ns(item) == there.ns), "{what:?}: {rest:?}");
    }
}

fn ns(item: &DueItem) -> &Namespace {
    match item {
        DueItem::Timer { ns, .. } | DueItem::Messages { ns, .. } | DueItem::Lease { ns, .. } => ns,
        DueItem::Document(document) => &document.ns,
    }
}

pub async fn what_was_used_up_is_never_due_again(t: &mut Trial<'_>) {
    fill(t).await;
    for what in ALL {
        for item in t.due(what, 100).await.items {
            use_up(t, item).await;
        }
        assert_eq!(ids(&t.due(what, 100).await), Vec::<String>::new());
    }
    for _ in 0..4 {
        t.advance(HOLD_MS / 2);
        for what in ALL {
            assert_eq!(ids(&t.due(what, 100).await), Vec::<String>::new(), "{what:?}");
        }
    }
}

pub async fn the_longest_due_come_first(t: &mut Trial<'_>) {
    t.flow("{name: naps, steps: {nap: {await: {time: 3s}}}}");
    let later = t.start("naps", json!(null)).await;
    t.flow("{name: naps, steps: {nap: {await: {time: 1s}}}}");
    t.advance(100);
    let sooner = t.start("naps", json!(null)).await;
    slot(t, "a", BEGINNING + 300).await;
    slot(t, "b", BEGINNING + 200).await;
    t.advance(4_000);
    let DueItem::Timer { run, .. } = t.due(Due::Timers, 1).await.items[0] else { panic!("a timer") };
    assert_eq!(run, sooner);
    let DueItem::Timer { run, .. } = t.due(Due::Timers, 1).await.items[0] else { panic!("a timer") };
    assert_eq!(run, later);
    assert_eq!(due_documents(t, 1).await, ["b"]);
}

pub async fn the_next_is_never_later_than_it_is(t: &mut Trial<'_>) {
    t.flow("{name: naps, steps: {nap: {await: {time: 7s}}}}");
    t.due(Due::Leases, 1).await;
    for what in ALL {
        assert_eq!(t.due(what, 10).await, DueBatch::default(), "{what:?}: nothing will be due");
    }
    let first = t.start("naps", json!(null)).await;
    t.advance(2_000);
    let second = t.start("naps", json!(null)).await;
    slot(t, "a", BEGINNING + 9_500).await;
    t.flow(ONE);
    t.start("one", json!(null)).await;
    t.claim(ClaimRequest { lease_ms: 4_000, ..t.ask() }).await;
    let (mut seen, mut now) = (Vec::new(), 2_000);
    while seen.len() < 4 && now < 60_000 {
        let mut next = Millis::MAX;
        for what in [Due::Timers, Due::Documents, Due::Leases] {
            let batch = t.due(what, 10).await;
            for item in &batch.items {
                seen.push((name(item), now));
            }
            next = next.min(batch.next_in.unwrap_or(Millis::MAX));
            assert!(next > 0 || !batch.items.is_empty(), "{what:?}: next_in is zero, but nothing was due");
        }
        let step = next.clamp(1, 5_000);
        t.advance(step);
        now += step;
    }
    let expected = [(format!("{first}"), 7_000), (format!("{second}"), 9_000), ("a".to_owned(), 9_500)];
    for (who, at) in expected {
        assert!(seen.contains(&(who.clone(), at)), "{who} at {at}: {seen:?}");
    }
    assert!(seen.iter().any(|(who, at)| who.starts_with("lease") && *at == 6_000), "{seen:?}");
}

pub async fn a_timer_that_is_cleared_or_set_anew_is_not_due(t: &mut Trial<'_>) {
    t.flow("{name: wide, steps: {nap: {await: {time: 5s}}, hook: {await: {manual: true, timeout: 4s}}}}");
    let run = t.start("wide", json!(null)).await;
    let gates = t.pending(run).await.gates;
    let gate = gates.iter().find(|gate| gate.token.is_some()).expect("the manual gate");
    let open = Input::OpenGate {
        activation: gate.id.activation,
        by: eddyline_machine::OpenedBy::Manual,
        payload: json!(1).into(),
    };
    t.submit(run, &[open]).await;
    t.advance(4_500);
    assert!(t.due(Due::Timers, 10).await.items.is_empty());
    t.cancel(run).await;
    t.advance(4_500);
    assert_eq!(t.due(Due::Timers, 10).await.items, []);
    assert!(t.pending(run).await.timers.is_empty());
}

pub async fn messages_of_one_target_come_together_and_in_order(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let (run, other) = (t.start(&flow, json!(null)).await, t.start(&flow, json!(null)).await);
    for at in [10, 2, 33, 4] {
        t.send(vec![note(run, &format!("m{at}")), note(other, &format!("m{}", 100 - at))]).await;
    }
    let items = t.due(Due::Messages, 10).await.items;
    let mut got: Vec<(RunId, Vec<String>)> = items.into_iter().map(|item| messages_in(item, &t.ns)).collect();
    got.sort_by_key(|(to, _)| *to != run);
    let ids = |ids: [&str; 4]| ids.map(str::to_owned).to_vec();
    assert_eq!(got, [(run, ids(["m10", "m2", "m33", "m4"])), (other, ids(["m90", "m98", "m67", "m96"]))]);
    let pending: Vec<String> = t.pending(run).await.messages.into_iter().map(|message| message.id).collect();
    assert_eq!(pending, ["m10", "m2", "m33", "m4"]);
}

pub async fn messages_of_one_target_come_in_bounded_parts(t: &mut Trial<'_>) {
    let (run, other) = (t.new_run(), t.new_run());
    let sent: Vec<String> = (0..MAX_INBOX + 2).map(|at| format!("m{}", 5_000 - at)).collect();
    t.send(sent.iter().map(|id| note(run, id)).chain([note(other, "m1")]).collect()).await;
    let batch = t.due(Due::Messages, 10).await;
    assert_eq!(batch.next_in, Some(0), "there is more");
    let mut items = batch.items.into_iter();
    let (to, first) = messages_in(items.next().expect("messages"), &t.ns);
    assert_eq!((to, &first[..]), (run, &sent[..MAX_INBOX]));
    assert_eq!(items.len(), 1, "messages to other runs are still handed out");
    let again = t.due(Due::Messages, 10).await;
    assert!(again.items.is_empty() && again.next_in != Some(0), "the rest would overtake: {again:?}");
    let drops = first.into_iter().map(|id| (run, id)).collect();
    t.command(Command::Documents(DocumentCommit { drops, ..t.nothing() })).await.unwrap();
    let item = t.due(Due::Messages, 10).await.items.remove(0);
    assert_eq!(messages_in(item, &t.ns), (run, sent[MAX_INBOX..].to_vec()));
}

pub async fn large_messages_come_in_bounded_parts(t: &mut Trial<'_>) {
    const PART: usize = MAX_INBOX_BYTES / 3;
    let large = |to: RunId, id: &str| {
        let payload = json!("x".repeat(PART)).into();
        let open = Input::OpenGate { activation: ActId(0), by: eddyline_machine::OpenedBy::Manual, payload };
        Message { to, id: id.to_owned(), body: MessageBody::Input(Box::new(open)) }
    };
    let runs: Vec<RunId> = (0..5).map(|_| t.new_run()).collect();
    let ids = ["m1", "m2", "m3", "m4"];
    for run in &runs {
        t.send(ids.iter().map(|id| large(*run, id)).collect()).await;
    }
    let batch = t.due(Due::Messages, 10).await;
    assert_eq!(batch.next_in, Some(0), "there is more");
    let sizes: Vec<(usize, usize)> = batch
        .items
        .into_iter()
        .map(|item| match item {
            DueItem::Messages { messages, bytes, .. } => (messages.len(), bytes),
            other => panic!("messages were due, not {other:?}"),
        })
        .collect();
    assert!(sizes.iter().all(|(count, bytes)| *count == 2 && (2 * PART..MAX_INBOX_BYTES).contains(bytes)), "{sizes:?}");
    assert_eq!(sizes.len(), 2, "the limit applies to all runs together: {sizes:?}");
    assert_eq!(t.pending(runs[4]).await.messages.len(), 2);

    // A message larger than the limit is handed out alone.
    let one = t.new_run();
    let huge = json!("x".repeat(2 * MAX_INBOX_BYTES)).into();
    let open = Input::OpenGate { activation: ActId(0), by: eddyline_machine::OpenedBy::Manual, payload: huge };
    let huge = Message { to: one, id: "huge".to_owned(), body: MessageBody::Input(Box::new(open)) };
    t.send(vec![huge, large(one, "m2")]).await;
    assert_eq!(t.pending(one).await.messages.len(), 1);
}

pub async fn newer_messages_wait_for_those_that_are_being_delivered(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    t.send(vec![note(run, "m1"), note(run, "m2")]).await;
    assert_eq!(t.due(Due::Messages, 10).await.items.len(), 1);
    t.send(vec![note(run, "m3")]).await;
    assert!(t.due(Due::Messages, 10).await.items.is_empty(), "m3 would overtake");
    t.consume(run, note(run, "m1")).await;
    assert!(t.due(Due::Messages, 10).await.items.is_empty(), "m2 is not delivered yet");
    t.consume(run, note(run, "m2")).await;
    let item = t.due(Due::Messages, 10).await.items.remove(0);
    assert_eq!(messages_in(item, &t.ns), (run, vec!["m3".to_owned()]));

    t.send(vec![note(run, "m4")]).await;
    t.advance(HOLD_MS);
    let item = t.due(Due::Messages, 10).await.items.remove(0);
    assert_eq!(messages_in(item, &t.ns), (run, vec!["m3".to_owned(), "m4".to_owned()]), "after the hold, all of them");
}

pub async fn messages_that_were_dropped_make_way(t: &mut Trial<'_>) {
    let nobody = t.new_run();
    t.send(vec![note(nobody, "m1")]).await;
    assert_eq!(t.due(Due::Messages, 10).await.items.len(), 1);
    t.send(vec![note(nobody, "m2")]).await;
    let drops = vec![(nobody, "m1".to_owned())];
    t.command(Command::Documents(DocumentCommit { drops, ..t.nothing() })).await.unwrap();
    let item = t.due(Due::Messages, 10).await.items.remove(0);
    assert_eq!(messages_in(item, &t.ns), (nobody, vec!["m2".to_owned()]));
}

pub async fn a_message_carries_what_was_sent(t: &mut Trial<'_>) {
    t.flow("{name: parent, steps: {kid: {flow: one, input: {big: '${input}'}}}}");
    t.flow(ONE);
    let big = json!("x".repeat(2_000));
    let parent = t.start("parent", big.clone()).await;
    let item = t.due(Due::Messages, 10).await.items.remove(0);
    let DueItem::Messages { to, messages, .. } = item else { panic!("messages") };
    let eddyline_machine::MessageBody::Start { flow, start } = messages[0].body.clone() else { panic!("a start") };
    assert_eq!((flow.as_str(), start.input), ("one", Some(json!({"big": big}).into())));
    assert_eq!(start.parent.map(|parent| parent.run), Some(parent));
    t.consume(to, messages[0].clone()).await;
    t.work_off().await;
    t.deliver().await;
    assert_eq!(t.status(parent).await, eddyline_machine::Status::Completed);
}

pub async fn a_document_that_changed_is_due_as_it_is_now(t: &mut Trial<'_>) {
    slot(t, "a", BEGINNING).await;
    assert_eq!(due_documents(t, 10).await, ["a"]);
    slot(t, "a", BEGINNING + 1).await;
    assert!(due_documents(t, 10).await.is_empty());
    t.advance(1);
    assert_eq!(due_documents(t, 10).await, ["a"], "a new slot, although the hold of the previous one has not expired");
    t.put("slot", "a", json!("no more")).await;
    t.advance(HOLD_MS);
    assert!(due_documents(t, 10).await.is_empty());
}

const ALL: [Due; 4] = [Due::Timers, Due::Messages, Due::Leases, Due::Documents];

/// Creates three due items of each kind.
async fn fill(t: &Trial<'_>) {
    fill_namespace(t).await;
    for _ in 0..2 {
        t.advance(UNWATCHED_MS);
        t.due(Due::Leases, 0).await;
    }
}

/// Creates three items of each kind that will be due later.
async fn fill_namespace(t: &Drive) {
    t.flow(NAP);
    // One attempt, so that nothing is due after a lease ends.
    t.flow("{name: one, steps: {work: {retry: {attempts: 1}}}}");
    t.start_all("nap", (0..3).map(|n| json!(n))).await;
    for run in t.start_all("one", (0..3).map(|n| json!(n))).await {
        t.send(vec![note(run, "m1"), note(run, "m2")]).await;
    }
    t.publish(event("e", "ping", None, json!(1))).await;
    t.claim(ClaimRequest { lease_ms: 10_000, ..t.ask() }).await;
    for id in ["a", "b", "c"] {
        slot(t, id, BEGINNING + 10_000).await;
    }
}

async fn slot(t: &Drive, id: &str, at: Millis) {
    let change = DocumentChange {
        key: DocumentKey::new("slot", id),
        expect: Expect::Any,
        body: Some(json!({"at": at})),
        due: Some(at),
    };
    t.command(t.documents(vec![change])).await.unwrap();
}

async fn due_documents(t: &Trial<'_>, limit: usize) -> Vec<String> {
    ids(&t.due(Due::Documents, limit).await)
}

async fn use_up(t: &Trial<'_>, item: DueItem) {
    match item {
        DueItem::Timer { run, timer, .. } => {
            let takes = [Consumed::Timer(timer.key, timer.due)];
            t.submit_taking(run, &[Input::Due(timer.key)], &takes).await.unwrap();
        }
        DueItem::Messages { to, messages, .. } => {
            for message in messages {
                t.consume(to, message).await;
            }
        }
        DueItem::Lease { run, task, why, claim, .. } => {
            let takes = [Consumed::Expiry(task.fence, why)];
            t.submit_taking(run, &[Input::Expired { task, why, claim }], &takes).await.unwrap();
        }
        DueItem::Document(document) => {
            let expect = Expect::Revision(document.revision);
            let change = DocumentChange { key: document.key, expect, body: Some(json!("done")), due: None };
            t.command(t.documents(vec![change])).await.unwrap();
        }
    }
}

fn messages_in(item: DueItem, within: &Namespace) -> (RunId, Vec<String>) {
    let DueItem::Messages { ns, to, messages, .. } = item else { panic!("messages were due, not {item:?}") };
    assert_eq!(ns, *within);
    assert!(messages.iter().all(|message| message.to == to));
    (to, messages.into_iter().map(|message| message.id).collect())
}

fn ids(batch: &DueBatch) -> Vec<String> {
    batch.items.iter().map(name).collect()
}

fn name(item: &DueItem) -> String {
    match item {
        DueItem::Timer { run, .. } => run.to_string(),
        DueItem::Messages { to, .. } => to.to_string(),
        DueItem::Lease { run, task, .. } => format!("lease {run} {}", task.fence),
        DueItem::Document(document) => document.key.id.clone(),
    }
}
