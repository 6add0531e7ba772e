//! Namespaces: nothing of one is visible through another.

use eddyline_machine::{Input, Version};
use serde_json::json;

use super::Trial;
use super::drive::event;
use crate::*;

const FLOW: &str = "{name: both, steps: {work: {key: input, limits: [api]}, hook: {await: {manual: true}}}}";

pub async fn nothing_of_a_namespace_is_seen_from_another(t: &mut Trial<'_>) {
    t.flow(FLOW);
    let (here, there) = (t.within("default"), t.within("other"));
    let mut runs = Vec::new();
    for drive in [&here, &there] {
        runs.push(drive.start("both", json!(1)).await);
        drive.put("thing", "same", json!(drive.ns.as_str())).await;
        drive.publish(event("same", "ping", None, json!(drive.ns.as_str()))).await;
    }
    let tokens: Vec<Option<String>> = {
        let mut tokens = Vec::new();
        for run in &runs {
            tokens.push(t.pending(*run).await.gates[0].token.clone());
        }
        tokens
    };
    for (at, drive) in [&here, &there].into_iter().enumerate() {
        let (ns, own) = (&drive.ns, runs[at]);
        let listed = t.store.runs(Some(ns), &RunFilter::default(), Page::default()).await.unwrap();
        assert_eq!(listed.iter().map(|summary| (summary.run, &summary.ns)).collect::<Vec<_>>(), [(own, ns)]);
        assert_eq!(t.store.count_runs(ns, &RunFilter::default()).await.unwrap(), 1);
        let gates = t.store.gates(Some(ns), &GateFilter::default(), Page::default()).await.unwrap();
        assert_eq!(gates.iter().map(|gate| (gate.id.run, &gate.ns)).collect::<Vec<_>>(), [(own, ns)]);
        for (of, token) in tokens.iter().enumerate() {
            let filter = GateFilter { token: token.clone(), ..GateFilter::default() };
            let found = t.store.gates(Some(ns), &filter, Page::default()).await.unwrap();
            assert_eq!(found.len(), usize::from(of == at), "a token of another namespace finds nothing");
            let filter = GateFilter { run: Some(runs[of]), ..GateFilter::default() };
            assert_eq!(t.store.gates(Some(ns), &filter, Page::default()).await.unwrap().len(), usize::from(of == at));
        }
        let things = DocumentFilter { kind: "thing".to_owned(), ..DocumentFilter::default() };
        let documents = t.store.documents(Some(ns), &things, 10).await.unwrap();
        assert_eq!(documents.iter().map(|found| &found.body).collect::<Vec<_>>(), [&json!(ns.as_str())]);
        let started = t.store.feed(ns, &Feed::Runs { flow: None }, Page::default()).await.unwrap();
        assert_eq!(
            started.iter().map(|item| &item.what).collect::<Vec<_>>(),
            [&Fed::Run { run: own, flow: "both".to_owned() }]
        );
        let events =
            t.store.feed(ns, &Feed::Events { name: None, key: None, since: None }, Page::default()).await.unwrap();
        assert!(
            matches!(&events[..], [FeedItem { what: Fed::Event { payload, .. }, .. }] if *payload == json!(ns.as_str()).into())
        );
        let queues = t.store.queues(ns).await.unwrap();
        assert_eq!(queues.iter().map(|queue| (queue.name.as_str(), queue.ready)).collect::<Vec<_>>(), [("default", 1)]);
    }
    let all = t.store.runs(None, &RunFilter::default(), Page::default()).await.unwrap();
    assert_eq!(all.len(), 2);
    let things = DocumentFilter { kind: "thing".to_owned(), ..DocumentFilter::default() };
    assert_eq!(t.store.documents(None, &things, 10).await.unwrap().len(), 2);
    let nobody = Namespace::new("nobody");
    assert!(t.store.queues(&nobody).await.unwrap().is_empty());

    let claimed = there.take(10).await;
    assert_eq!(claimed.iter().map(|claimed| (claimed.run, &claimed.ns)).collect::<Vec<_>>(), [(runs[1], &there.ns)]);
    assert_eq!(t.queue("default").await.claimed, 0);
}

pub async fn a_commit_to_a_run_of_another_namespace_is_refused(t: &mut Trial<'_>) {
    t.flow(FLOW);
    let run = t.start("both", json!(1)).await;
    let commit = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    let stranger = RunCommit { ns: Namespace::new("other"), ..commit.clone() };
    let before = t.everything().await;
    assert_eq!(t.commit(stranger).await, Err(Refused::Conflict { current: None }));
    t.assert_unchanged(&before, "a stranger's commit").await;
    t.commit(commit).await.unwrap();
    assert_eq!(t.summary(run).await.version, Version(2));
}

pub async fn the_rules_of_a_namespace_bind_no_other(t: &mut Trial<'_>) {
    t.flow(FLOW);
    let there = t.within("other");
    t.put(kind::QUEUE, "default", json!({"paused": true})).await;
    there.put(kind::LIMIT, "api", json!({"concurrency": 1, "rate": {"count": 1, "per_ms": 60_000, "burst": 1}})).await;
    t.start_all("both", (0..3).map(|n| json!(n))).await;
    there.start_all("both", (0..3).map(|n| json!(n))).await;
    assert_eq!(t.take(10).await.len(), 0);
    assert_eq!(there.take(10).await.len(), 1);
    t.put(kind::QUEUE, "default", json!({})).await;
    assert_eq!(t.take(10).await.len(), 3);
}

pub async fn documents_of_namespaces_are_apart(t: &mut Trial<'_>) {
    let there = t.within("other");
    t.put("thing", "a", json!(1)).await;
    let absent = |body| DocumentChange {
        key: DocumentKey::new("thing", "a"),
        expect: Expect::Absent,
        body: Some(body),
        due: Some(0),
    };
    there.command(there.documents(vec![absent(json!(2))])).await.unwrap();
    let gone = DocumentChange { expect: Expect::Any, body: None, ..absent(json!(0)) };
    t.command(t.documents(vec![gone])).await.unwrap();
    let batch = t.due(Due::Documents, 10).await;
    assert!(matches!(&batch.items[..], [DueItem::Document(found)] if found.ns == there.ns && found.body == json!(2)));
}
