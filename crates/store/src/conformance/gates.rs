//! Gates: found by their token in any state, listed while they are open.

use eddyline_machine::record::GateReason;
use eddyline_machine::{ActId, Input, OpenedBy, RunId};
use serde_json::json;

use super::starts::trim_fully;
use super::{NAP, Trial};
use crate::*;

const HOOKS: &str = "{name: hooks, steps: {first: {}, hook: {after: [first], await: {webhook: true, timeout: 1h}}, \
                     person: {await: {manual: true}}, after: {after: [hook]}}}";
const PAID: &str = "{name: paid, steps: {paid: {await: {event: paid, key: input.k}}}}";

pub async fn a_token_finds_its_gate_in_every_state(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(HOOKS), json!(null)).await;
    let other = t.start("hooks", json!(null)).await;
    let rows = t.pending(run).await.gates;
    let early = rows.iter().find(|gate| gate.arrival.is_none()).expect("a gate ahead").clone();
    let token = early.token.clone().expect("its token");
    assert_ne!(t.pending(other).await.gates.iter().find(|gate| gate.arrival.is_none()).unwrap().token, early.token);
    let found = async || {
        let filter = GateFilter { token: Some(token.clone()), ..GateFilter::default() };
        let mut found = t.store.gates(Some(&t.ns), &filter, Page::default()).await.unwrap();
        assert_eq!(t.store.gates(None, &filter, Page::default()).await.unwrap(), found, "a token needs no namespace");
        let elsewhere = Namespace::new("elsewhere");
        assert!(t.store.gates(Some(&elsewhere), &filter, Page::default()).await.unwrap().is_empty());
        assert_eq!(found.len(), 1);
        found.remove(0)
    };
    let gate = found().await;
    assert_eq!((gate.id, gate.closed, gate.arrival), (early.id, false, None), "before its activation reaches it");
    assert!(!listed(t, &GateFilter::default()).await.contains(&(run, "hook".to_owned())), "it is not listed yet");

    t.advance(1_000);
    let now = t.now().await;
    let claimed = t.take(9).await.into_iter().find(|claimed| claimed.run == run).expect("the first step");
    t.complete(&claimed, json!(null)).await;
    let gate = found().await;
    let arrived = gate.arrival.clone().expect("the gate was reached");
    assert_eq!((gate.id, gate.closed, &gate.token), (early.id, false, &early.token));
    assert_eq!((arrived.at, arrived.deadline), (now, Some(now + 3_600_000)), "the timeout starts at the arrival");
    assert_eq!((arrived.gate.reason, arrived.gate.name.as_str()), (GateReason::Webhook, "hook"));
    assert!(listed(t, &GateFilter::default()).await.contains(&(run, "hook".to_owned())));
    assert!(t.pending(run).await.gates.contains(&gate), "the same in the pending work of its run");

    let (activation, payload) = (gate.id.activation, json!({"ok": true}).into());
    t.submit(run, &[Input::OpenGate { activation, by: OpenedBy::Webhook, payload }]).await;
    let gate = found().await;
    assert!(gate.closed, "a late opening finds the gate closed");
    assert_eq!(gate.arrival, Some(arrived));
    assert!(!listed(t, &GateFilter::default()).await.contains(&(run, "hook".to_owned())));
    t.cancel(run).await;
    assert!(found().await.closed, "also after the end of its run");
    trim_fully(t, &Trim::Timeline(run)).await;
    let filter = GateFilter { token: Some(token.clone()), ..GateFilter::default() };
    assert!(t.store.gates(Some(&t.ns), &filter, Page::default()).await.unwrap().is_empty(), "until it is trimmed");
}

pub async fn a_token_that_was_never_given_finds_nothing(t: &mut Trial<'_>) {
    t.start(&t.flow(HOOKS), json!(null)).await;
    for token in ["", "0", "%"] {
        let filter = GateFilter { token: Some(token.to_owned()), ..GateFilter::default() };
        assert!(t.store.gates(Some(&t.ns), &filter, Page::default()).await.unwrap().is_empty());
    }
}

pub async fn gates_are_listed_by_run_reason_and_event(t: &mut Trial<'_>) {
    t.flow(HOOKS);
    t.flow(PAID);
    t.flow(NAP);
    t.flow("{name: unkeyed, steps: {paid: {await: {event: paid}}}}");
    let hooks = t.start("hooks", json!(null)).await;
    let one = t.start("paid", json!({"k": 1})).await;
    let two = t.start("paid", json!({"k": "1"})).await;
    let unkeyed = t.start("unkeyed", json!(null)).await;
    let nap = t.start("nap", json!(null)).await;
    let claimed = t.take_one().await;
    t.complete(&claimed, json!(null)).await;
    let named = |run: RunId, name: &str| (run, name.to_owned());
    let order = [
        named(hooks, "person"),
        named(one, "paid"),
        named(two, "paid"),
        named(unkeyed, "paid"),
        named(nap, "nap"),
        named(hooks, "hook"),
    ];
    assert_eq!(listed(t, &GateFilter::default()).await, order, "in the order of arrival");
    let of_run = GateFilter { run: Some(hooks), ..GateFilter::default() };
    assert_eq!(listed(t, &of_run).await, [order[0].clone(), order[5].clone()]);
    let last = t.store.gates(Some(&t.ns), &of_run, Page::default()).await.unwrap().pop().expect("a gate").id.activation;
    let part = |from, to| GateFilter { activations: Some((from, to)), ..of_run.clone() };
    assert_eq!(listed(t, &part(last, last)).await, order[5..], "of a part of the run");
    assert_eq!(listed(t, &part(ActId(0), ActId(u32::MAX))).await.len(), 2);
    assert!(listed(t, &part(ActId(0), ActId(0))).await.is_empty());
    let reason = |reason| GateFilter { reason: Some(reason), ..GateFilter::default() };
    assert_eq!(listed(t, &reason(GateReason::Manual)).await, order[..1]);
    assert_eq!(listed(t, &reason(GateReason::Event)).await, order[1..4]);
    assert_eq!(listed(t, &reason(GateReason::Time)).await, order[4..5]);
    assert_eq!(listed(t, &reason(GateReason::Webhook)).await, order[5..]);
    let event = |name: &str, key: Option<&str>| GateFilter {
        event: Some((name.to_owned(), key.map(str::to_owned))),
        ..GateFilter::default()
    };
    assert_eq!(listed(t, &event("paid", Some("1"))).await, order[1..2]);
    assert_eq!(listed(t, &event("paid", Some("\"1\""))).await, order[2..3]);
    assert_eq!(listed(t, &event("paid", None)).await, order[3..4], "None selects only gates without a key");
    assert!(listed(t, &event("pai", Some("1"))).await.is_empty());
    let all = GateFilter { run: Some(two), reason: Some(GateReason::Event), ..event("paid", Some("\"1\"")) };
    assert_eq!(listed(t, &all).await, order[2..3]);
    let none = GateFilter { run: Some(one), ..all };
    assert!(listed(t, &none).await.is_empty(), "all of them must match");
    assert!(listed(t, &GateFilter { run: Some(t.new_run()), ..GateFilter::default() }).await.is_empty());
}

pub async fn a_gate_closes_when_it_opens_times_out_or_is_cancelled(t: &mut Trial<'_>) {
    t.flow("{name: three, steps: {a: {await: {manual: true}}, b: {await: {manual: true, timeout: 5s, on_timeout: skip}}, c: {await: {manual: true}}}}");
    let run = t.start("three", json!(null)).await;
    let gates = t.pending(run).await.gates;
    let named = |name: &str| {
        let gate = gates.iter().find(|gate| gate.arrival.as_ref().is_some_and(|it| it.gate.name == name));
        gate.expect("the gate").id.activation
    };
    t.submit(run, &[Input::OpenGate { activation: named("a"), by: OpenedBy::Manual, payload: json!(1).into() }]).await;
    assert_eq!(listed(t, &GateFilter::default()).await.len(), 2);
    t.advance(5_000);
    let timer = t.pending(run).await.timers[0];
    t.submit_taking(run, &[Input::Due(timer.key)], &[Consumed::Timer(timer.key, timer.due)]).await.unwrap();
    assert_eq!(listed(t, &GateFilter::default()).await, [(run, "c".to_owned())]);
    t.submit(run, &[Input::CancelGate { activation: named("c"), by: "ann".to_owned() }]).await;
    assert!(listed(t, &GateFilter::default()).await.is_empty());
    assert!(t.pending(run).await.gates.iter().all(|gate| gate.closed));
}

pub async fn pages_of_gates_miss_none_while_others_come_and_go(t: &mut Trial<'_>) {
    t.flow(PAID);
    let runs = t.start_all("paid", (0..10).map(|n| json!({"k": n}))).await;
    let (mut got, mut after) = (Vec::new(), None);
    loop {
        let page = t.store.gates(Some(&t.ns), &GateFilter::default(), Page { after, limit: 3 }).await.unwrap();
        assert!(page.len() <= 3);
        let Some(last) = page.last() else { break };
        assert!(page.windows(2).all(|pair| pair[0].position < pair[1].position));
        after = Some(last.position);
        got.extend(page.iter().map(|gate| gate.id.run));
        if got.len() < 12 {
            t.start("paid", json!({"k": 1})).await;
            t.cancel(runs[got.len() - 2]).await;
        }
    }
    assert_eq!(got[..10], runs, "each once, oldest first");
    assert!(got.len() > 10, "and those added meanwhile");
}

async fn listed(t: &Trial<'_>, filter: &GateFilter) -> Vec<(RunId, String)> {
    let gates = t.store.gates(Some(&t.ns), filter, Page::default()).await.unwrap();
    assert!(gates.iter().all(|gate| !gate.closed && gate.arrival.is_some()));
    let name = |gate: GateRow| (gate.id.run, gate.arrival.map(|arrived| arrived.gate.name).unwrap_or_default());
    gates.into_iter().map(name).collect()
}
