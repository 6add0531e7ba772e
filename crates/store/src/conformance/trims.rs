//! Permanent deletion: only ended runs, hidden at once, and complete in the end.

use eddyline_machine::{RunId, Status, ValueId, Version};
use serde_json::json;

use super::drive::event;
use super::starts::trim_fully;
use super::{CHAIN, ONE, Trial};
use crate::*;

pub async fn a_run_that_has_not_ended_is_left_alone(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!({"n": 1})).await;
    t.take_one().await;
    let paused = t.start("chain", json!(null)).await;
    t.pause(paused).await;
    let before = t.everything().await;
    for run in [run, paused, t.new_run()] {
        trim_fully(t, &Trim::Timeline(run)).await;
        trim_fully(t, &Trim::Run(run)).await;
    }
    t.assert_unchanged(&before, "trimming a run that has not ended").await;
}

pub async fn a_trimmed_run_has_its_header_left(t: &mut Trial<'_>) {
    let run = ended(t).await;
    let other = ended(t).await;
    let (summary, others) = (t.summary(run).await, t.records(other).await);
    assert_eq!(summary.header.status(), Status::Completed);
    t.store.trim(&Trim::Timeline(run)).await.unwrap();
    assert_trimmed(t, run, &summary).await;
    trim_fully(t, &Trim::Timeline(run)).await;
    trim_fully(t, &Trim::Timeline(run)).await;
    assert_trimmed(t, run, &summary).await;
    assert_eq!(t.records(other).await, others, "another run is not touched");
    assert!(!t.store.values(other, &ids()).await.unwrap().is_empty());
    let filter = |trimmed| RunFilter { trimmed: Some(trimmed), ..RunFilter::default() };
    let listed = t.store.runs(Some(&t.ns), &filter(true), Page::default()).await.unwrap();
    assert_eq!(listed.iter().map(|summary| summary.run).collect::<Vec<_>>(), [run]);
    assert_eq!(t.store.count_runs(&t.ns, &filter(false)).await.unwrap(), 1);
    if t.reopen().await {
        assert_trimmed(t, run, &summary).await;
        assert_eq!(t.records(other).await, others);
    }
}

pub async fn a_deleted_run_leaves_nothing(t: &mut Trial<'_>) {
    let (run, trimmed, other) = (ended(t).await, ended(t).await, ended(t).await);
    trim_fully(t, &Trim::Timeline(trimmed)).await;
    for run in [run, trimmed] {
        t.store.trim(&Trim::Run(run)).await.unwrap();
        assert_gone(t, run).await;
        trim_fully(t, &Trim::Run(run)).await;
        assert_gone(t, run).await;
    }
    assert!(!t.records(other).await.is_empty());
    let listed = t.store.runs(None, &RunFilter::default(), Page::default()).await.unwrap();
    assert_eq!(listed.iter().map(|summary| summary.run).collect::<Vec<_>>(), [other]);
    if t.reopen().await {
        assert_gone(t, run).await;
        assert_gone(t, trimmed).await;
    }
}

/// Deleting a run does not free its position, and the others keep theirs.
pub async fn places_are_not_given_twice(t: &mut Trial<'_>) {
    let first = ended(t).await;
    let place = t.summary(first).await.position;
    trim_fully(t, &Trim::Run(first)).await;
    let second = ended(t).await;
    let next = t.summary(second).await.position;
    assert!(next > place, "a reader that has seen {place} would miss {next}");
    trim_fully(t, &Trim::Run(second)).await;
    if t.reopen().await {
        let third = ended(t).await;
        assert!(t.summary(third).await.position > next, "after the store was opened again");
    }
}

pub async fn a_trimmed_run_is_not_changed(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    let claimed = t.take_one().await;
    let late = t.prepare(run, &[t.report_of(&claimed, super::drive::completion(json!(1)))]).await;
    t.cancel(run).await;
    trim_fully(t, &Trim::Timeline(run)).await;
    let before = t.everything().await;
    assert_eq!(t.commit(late).await, Err(Refused::Conflict { current: Some(Version(2)) }));
    t.assert_unchanged(&before, "a late commit").await;
    assert!(matches!(t.store.load(run, Some(Version(2))).await.unwrap(), Found::Trimmed(_)));
}

pub async fn events_go_by_their_age(t: &mut Trial<'_>) {
    let elsewhere = t.within("other");
    let mut times = Vec::new();
    for n in 0..4 {
        times.push(t.now().await);
        t.publish(event(&format!("e{n}"), "ping", None, json!(n))).await;
        elsewhere.publish(event(&format!("e{n}"), "ping", None, json!(n))).await;
        t.advance(1_000);
    }
    let read = async |ns: &Namespace| -> Vec<String> {
        let items =
            t.store.feed(ns, &Feed::Events { name: None, key: None, since: None }, Page::default()).await.unwrap();
        let id = |item: FeedItem| match item.what {
            Fed::Event { id, .. } => id,
            Fed::Run { .. } => panic!("a run among events"),
        };
        items.into_iter().map(id).collect()
    };
    trim_fully(t, &Trim::Events { ns: t.ns.clone(), before: times[2] }).await;
    assert_eq!(read(&t.ns).await, ["e2", "e3"]);
    assert_eq!(read(&elsewhere.ns).await.len(), 4, "those of another namespace stay");
    t.publish(event("e0", "ping", None, json!("again"))).await;
    t.publish(event("e3", "ping", None, json!("again"))).await;
    assert_eq!(read(&t.ns).await, ["e2", "e3", "e0"], "an id is free again when its event is deleted");
}

pub async fn an_event_is_deleted_by_its_id(t: &mut Trial<'_>) {
    let elsewhere = t.within("other");
    for n in 0..3 {
        t.publish(event(&format!("e{n}"), "ping", None, json!(n))).await;
        elsewhere.publish(event(&format!("e{n}"), "ping", None, json!(n))).await;
    }
    let last = t.store.event(&t.ns, "e2").await.unwrap().expect("the event exists");
    for id in ["e0", "e2", "none"] {
        trim_fully(t, &Trim::Event { ns: t.ns.clone(), id: id.to_owned() }).await;
        assert_eq!(t.store.event(&t.ns, id).await.unwrap(), None);
    }
    let feed = Feed::Events { name: None, key: None, since: None };
    let left = async |ns: &Namespace| t.store.feed(ns, &feed, Page::default()).await.unwrap().len();
    assert_eq!((left(&t.ns).await, left(&elsewhere.ns).await), (1, 3));
    drop(elsewhere);
    if t.reopen().await {
        assert_eq!(t.publish_all(vec![event("e2", "ping", None, json!("again"))]).await, 0, "its id is free");
        let again = t.store.event(&t.ns, "e2").await.unwrap().expect("the event exists");
        assert!(again.position > last.position, "a reader that has seen {} would miss it", last.position);
    }
}

/// Commands are remembered for as long as they may be repeated; rates for as long as they block a claim.
pub async fn traces_go_by_their_age(t: &mut Trial<'_>) {
    t.put(kind::LIMIT, "api", json!({"rate": {"count": 1, "per_ms": 3_600_000, "burst": 1}})).await;
    t.flow("{name: limited, steps: {work: {limits: [api]}}}");
    t.start_all("limited", (0..2).map(|n| json!(n))).await;
    let put = |id: &str, expect| {
        let key = DocumentKey::new("thing", id);
        t.documents(vec![DocumentChange { key, expect, body: Some(json!(id)), due: None }])
    };
    let (old, new) = (put("old", Expect::Absent), put("new", Expect::Absent));
    t.command(old.clone()).await.unwrap();
    assert_eq!(t.take(9).await.len(), 1);
    t.advance(60_000);
    let before = t.now().await;
    t.command(new.clone()).await.unwrap();
    trim_fully(t, &Trim::Traces { before }).await;
    assert!(t.command(new.clone()).await.unwrap().before, "it is known");
    let refused = t.command(old).await;
    assert!(matches!(refused, Err(Refused::Revision { .. })), "it is no longer known: {refused:?}");
    assert_eq!(t.take(9).await.len(), 0, "the rate still blocks");
    t.advance(3_600_000);
    trim_fully(t, &Trim::Traces { before: t.now().await }).await;
    assert_eq!(t.take(9).await.len(), 1, "one may pass, as if the rate had been kept");
    assert_eq!(t.take(9).await.len(), 0);
    if t.reopen().await {
        assert_eq!(t.take(9).await.len(), 0, "after the store was opened again");
    }
}

fn ids() -> Vec<ValueId> {
    (0..20).map(ValueId).collect()
}

/// A run that has values, and that has ended.
async fn ended(t: &Trial<'_>) -> RunId {
    t.flow(CHAIN);
    let run = t.start("chain", json!({"big": "x".repeat(600)})).await;
    while let Some(claimed) = t.take(1).await.pop() {
        t.complete(&claimed, json!({"big": "y".repeat(600)})).await;
    }
    assert!(!t.store.values(run, &ids()).await.unwrap().is_empty());
    run
}

async fn assert_trimmed(t: &Trial<'_>, run: RunId, before: &Summary) {
    let Found::Trimmed(summary) = t.store.load(run, None).await.unwrap() else { panic!("the header is missing") };
    assert_eq!(*summary, Summary { trimmed: true, records: summary.records, ..before.clone() });
    let listed = t.store.runs(Some(&t.ns), &RunFilter::default(), Page::default()).await.unwrap();
    assert!(listed.contains(&summary), "the list has the same summary");
    assert!(t.records(run).await.is_empty());
    assert!(t.store.values(run, &ids()).await.unwrap().is_empty());
    assert_eq!(t.pending(run).await, PendingWork::default());
}

async fn assert_gone(t: &Trial<'_>, run: RunId) {
    assert!(matches!(t.store.load(run, None).await.unwrap(), Found::Nothing));
    assert!(t.records(run).await.is_empty());
    assert!(t.store.values(run, &ids()).await.unwrap().is_empty());
    assert_eq!(t.pending(run).await, PendingWork::default());
    let listed = t.store.runs(None, &RunFilter::default(), Page::default()).await.unwrap();
    assert!(listed.iter().all(|summary| summary.run != run));
    let feed = t.store.feed(&t.ns, &Feed::Runs { flow: None }, Page::default()).await.unwrap();
    assert!(feed.iter().all(|item| !matches!(item.what, Fed::Run { run: of, .. } if of == run)));
}
