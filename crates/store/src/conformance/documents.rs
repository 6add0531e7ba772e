//! Documents: changed only at the expected revision, found by their ids.

use serde_json::{Value, json};

use super::drive::{event, note};
use super::{ONE, Trial};
use crate::*;

pub async fn a_document_changes_only_as_expected(t: &mut Trial<'_>) {
    let refused = |current| Err(Refused::Revision { key: DocumentKey::new("thing", "a"), current });
    assert_eq!(change(t, "a", Expect::Revision(1), Some(json!(0))).await, refused(None));
    change(t, "a", Expect::Absent, Some(json!(1))).await.unwrap();
    let first = revision(t, "a").await.expect("the document exists");
    assert!(first >= 1);
    assert_eq!(change(t, "a", Expect::Absent, Some(json!(2))).await, refused(Some(first)));
    assert_eq!(change(t, "a", Expect::Revision(first + 1), Some(json!(2))).await, refused(Some(first)));
    change(t, "a", Expect::Revision(first), Some(json!(2))).await.unwrap();
    let second = revision(t, "a").await.expect("the document exists");
    assert!(second > first);
    assert_eq!(change(t, "a", Expect::Revision(first), None).await, refused(Some(second)));
    change(t, "a", Expect::Any, Some(json!(3))).await.unwrap();
    let third = revision(t, "a").await.expect("the document exists");
    assert!(third > second);
    change(t, "a", Expect::Revision(third), None).await.unwrap();
    assert_eq!(revision(t, "a").await, None);
    change(t, "a", Expect::Absent, None).await.unwrap();
    change(t, "a", Expect::Any, None).await.unwrap();
    assert_eq!(change(t, "a", Expect::Revision(third), Some(json!(4))).await, refused(None));
}

pub async fn a_revision_is_never_given_twice(t: &mut Trial<'_>) {
    change(t, "a", Expect::Any, Some(json!(1))).await.unwrap();
    change(t, "a", Expect::Any, Some(json!(2))).await.unwrap();
    let before = revision(t, "a").await.expect("the document exists");
    change(t, "a", Expect::Any, None).await.unwrap();
    change(t, "a", Expect::Absent, Some(json!(3))).await.unwrap();
    let after = revision(t, "a").await.expect("the document exists");
    assert!(after > before, "{after} after {before}: a new document must not get an old revision");
    change(t, "a", Expect::Any, None).await.unwrap();
    if t.reopen().await {
        change(t, "a", Expect::Absent, Some(json!(4))).await.unwrap();
        assert!(revision(t, "a").await.expect("the document exists") > after, "after the store was opened again");
    }
}

pub async fn of_many_who_change_one_revision_one_does(t: &mut Trial<'_>) {
    for round in 0..5 {
        let expect = revision(t, "a").await.map_or(Expect::Absent, Expect::Revision);
        let racing = (0..16).map(|at| {
            let drive = t.drive.clone();
            let change =
                DocumentChange { key: DocumentKey::new("thing", "a"), expect, body: Some(json!(at)), due: None };
            tokio::spawn(async move { drive.command(drive.documents(vec![change])).await.is_ok() })
        });
        let mut won = 0;
        for racer in racing.collect::<Vec<_>>() {
            won += usize::from(racer.await.unwrap());
        }
        assert_eq!(won, 1, "round {round}");
    }
}

pub async fn a_commit_of_documents_is_a_whole(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    t.send(vec![note(run, "kept")]).await;
    t.put("thing", "b", json!("old")).await;
    let thing = |id: &str, expect| DocumentChange {
        key: DocumentKey::new("thing", id),
        expect,
        body: Some(json!("new")),
        due: Some(5),
    };
    let commit = DocumentCommit {
        documents: vec![thing("a", Expect::Absent), thing("b", Expect::Absent), thing("c", Expect::Any)],
        messages: vec![note(run, "new")],
        events: vec![event("e1", "ping", None, json!(1))],
        drops: vec![(run, "kept".to_owned())],
        ..t.nothing()
    };
    let before = t.everything().await;
    let refused = t.command(Command::Documents(commit.clone())).await;
    assert!(matches!(refused, Err(Refused::Revision { ref key, current: Some(_) }) if key.id == "b"), "{refused:?}");
    t.assert_unchanged(&before, "a refused commit of documents").await;
    assert!(t.due(Due::Documents, 10).await.items.is_empty());

    let documents = vec![thing("a", Expect::Absent), thing("b", Expect::Any), thing("c", Expect::Any)];
    let committed = t.command(Command::Documents(DocumentCommit { documents, ..commit })).await.unwrap();
    assert_eq!(committed, Committed { at: t.now().await, first: 0, before: false, repeats: 0 });
    assert_eq!(t.due(Due::Documents, 10).await.items.len(), 3);
    let messages: Vec<String> = t.pending(run).await.messages.into_iter().map(|message| message.id).collect();
    assert_eq!(messages, ["new"]);
    let events =
        t.store.feed(&t.ns, &Feed::Events { name: None, key: None, since: None }, Page::default()).await.unwrap();
    assert_eq!(events.len(), 1);
}

pub async fn documents_are_found_by_id_prefix_and_place(t: &mut Trial<'_>) {
    for id in ["b", "a", "a/2", "a/10", "a/1", "a%", "ab", "A", "ä", ""] {
        t.put("thing", id, json!({"id": id})).await;
    }
    t.put("slot", "a/3", json!(null)).await;
    let all = ["", "A", "a", "a%", "a/1", "a/10", "a/2", "ab", "b", "ä"];
    let find = async |filter: DocumentFilter, limit| -> Vec<String> {
        let filter = DocumentFilter { kind: "thing".to_owned(), ..filter };
        let found = t.store.documents(Some(&t.ns), &filter, limit).await.unwrap();
        for document in &found {
            assert_eq!(document.body, json!({"id": document.key.id}));
        }
        found.into_iter().map(|document| document.key.id).collect()
    };
    let none = DocumentFilter::default;
    assert_eq!(find(none(), 100).await, all, "in the order of their bytes");
    assert_eq!(find(none(), 3).await, all[..3]);
    assert_eq!(find(DocumentFilter { id: Some("a".to_owned()), ..none() }, 9).await, ["a"]);
    assert!(find(DocumentFilter { id: Some("c".to_owned()), ..none() }, 9).await.is_empty());
    let prefix = |prefix: &str| DocumentFilter { prefix: Some(prefix.to_owned()), ..none() };
    assert_eq!(find(prefix("a/"), 9).await, ["a/1", "a/10", "a/2"]);
    assert_eq!(find(prefix("a%"), 9).await, ["a%"]);
    assert_eq!(find(prefix(""), 99).await, all);
    let after = |after: &str| DocumentFilter { after: Some(after.to_owned()), ..none() };
    assert_eq!(find(after("a/1"), 9).await, ["a/10", "a/2", "ab", "b", "ä"]);
    assert_eq!(find(after("a/11"), 2).await, ["a/2", "ab"]);
    assert_eq!(find(DocumentFilter { after: Some("a/1".to_owned()), ..prefix("a/") }, 9).await, ["a/10", "a/2"]);
    assert_eq!(find(DocumentFilter { id: Some("a/1".to_owned()), ..prefix("b") }, 9).await, Vec::<String>::new());
}

pub async fn documents_of_all_namespaces_are_read_in_pages(t: &mut Trial<'_>) {
    let mut expected = Vec::new();
    for id in ["a", "b", "b/c"] {
        for ns in ["alpha", "default", "other", "zeta"] {
            t.within(ns).put("thing", id, json!(null)).await;
            expected.push((id.to_owned(), ns.to_owned()));
        }
    }
    for limit in [1, 2, 3, 5, 100] {
        let mut filter = DocumentFilter { kind: "thing".to_owned(), ..DocumentFilter::default() };
        let mut read = Vec::new();
        loop {
            let page = t.store.documents(None, &filter, limit).await.unwrap();
            let Some(last) = page.last() else { break };
            filter.after = Some(last.key.id.clone());
            filter.after_ns = Some(last.ns.clone());
            read.extend(page.into_iter().map(|found| (found.key.id, found.ns.to_string())));
        }
        assert_eq!(read, expected, "in pages of {limit}");
    }
}

pub async fn a_document_comes_back_as_it_was_written(t: &mut Trial<'_>) {
    let body = json!({"z": 1, "a": [0.1, -0.0, 1e300, i64::MIN, u64::MAX, null, true, "ü\u{0}\n😀"], "": {}});
    t.advance(123);
    let change = DocumentChange {
        key: DocumentKey::new("thing", "x"),
        expect: Expect::Absent,
        body: Some(body.clone()),
        due: Some(-5),
    };
    t.command(t.documents(vec![change])).await.unwrap();
    let now = t.now().await;
    let filter = DocumentFilter { kind: "thing".to_owned(), ..DocumentFilter::default() };
    let found = t.store.documents(None, &filter, 10).await.unwrap().remove(0);
    assert_eq!(found.body.to_string(), body.to_string());
    assert_eq!((found.ns.clone(), found.due, found.changed_at), (t.ns.clone(), Some(-5), now));
    let batch = t.due(Due::Documents, 10).await;
    assert_eq!(batch.items, [DueItem::Document(found)]);
}

async fn change(
    t: &Trial<'_>,
    id: &str,
    expect: Expect,
    body: Option<Value>,
) -> std::result::Result<Committed, Refused> {
    let change = DocumentChange { key: DocumentKey::new("thing", id), expect, body, due: None };
    t.command(t.documents(vec![change])).await
}

async fn revision(t: &Trial<'_>, id: &str) -> Option<u64> {
    let filter = DocumentFilter { kind: "thing".to_owned(), id: Some(id.to_owned()), ..DocumentFilter::default() };
    t.store.documents(Some(&t.ns), &filter, 10).await.unwrap().first().map(|document| document.revision)
}
