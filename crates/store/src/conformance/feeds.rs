//! Feeds: a reader that continues after the last position it saw gets every item once, including late commits.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use eddyline_machine::{Input, Millis, OpenedBy};
use serde_json::json;

use super::drive::{Drive, event};
use super::starts::trim_fully;
use super::{CHAIN, ONE, Trial};
use crate::*;

const WRITERS: usize = 8;
const EACH: usize = 25;

pub async fn a_reader_that_follows_the_runs_gets_each_once(t: &mut Trial<'_>) {
    t.flow(ONE);
    let expected = followed_while(t, Feed::Runs { flow: None }, |drive, _, _| {
        Box::pin(async move { drive.start("one", json!(null)).await.to_string() })
    })
    .await;
    assert_eq!(expected.len(), WRITERS * EACH);
}

pub async fn a_reader_that_follows_the_events_gets_each_once(t: &mut Trial<'_>) {
    let events = Feed::Events { name: None, key: None, since: None };
    let expected = followed_while(t, events, |drive, writer, n| {
        Box::pin(async move {
            let id = format!("e{writer}-{n}");
            drive.publish(event(&id, "ping", None, json!(n))).await;
            id
        })
    })
    .await;
    assert_eq!(expected.len(), WRITERS * EACH);
}

pub async fn a_reader_that_follows_one_key_gets_each_once(t: &mut Trial<'_>) {
    let events = Feed::Events { name: Some("ping".to_owned()), key: Some("1".to_owned()), since: None };
    followed_while(t, events, |drive, writer, n| {
        Box::pin(async move {
            let id = format!("e{writer}-{n}");
            let noise = event(&format!("noise {id}"), "ping", Some("2"), json!(n));
            let events = vec![noise, event(&id, "ping", Some("1"), json!(n))];
            drive.publish_all(events).await;
            id
        })
    })
    .await;
}

/// The number of gates an event has opened is updated in the commits that open them.
pub async fn an_event_knows_how_many_gates_it_has_opened(t: &mut Trial<'_>) {
    t.flow("{name: waits, steps: {one: {await: {event: ping}}, two: {await: {event: ping}}}}");
    t.publish(event("e1", "ping", None, json!(1))).await;
    t.publish(event("e2", "ping", None, json!(2))).await;
    let state = async |id: &str| t.store.event(&t.ns, id).await.unwrap().expect("the event exists");
    let (first, second) = (state("e1").await, state("e2").await);
    assert_eq!((first.name.as_str(), &first.key, first.gates_opened), ("ping", &None, 0));
    assert!(first.position < second.position && first.at <= second.at);
    let run = t.start("waits", json!(null)).await;
    let gates = t.pending(run).await.gates;
    let open = |at: usize| Input::OpenGate {
        activation: gates[at].id.activation,
        by: OpenedBy::Event { position: first.position },
        payload: json!(1).into(),
    };
    let both = t.prepare(run, &[open(0), open(1)]).await;
    let late = t.prepare(run, &[open(0)]).await;
    t.commit(both.clone()).await.unwrap();
    assert!(t.commit(both).await.unwrap().before);
    assert!(t.commit(late).await.is_err(), "the run has advanced");
    assert_eq!((state("e1").await.gates_opened, state("e2").await.gates_opened), (2, 0));
    assert_eq!(t.store.event(&t.ns, "e3").await.unwrap(), None);
    assert_eq!(t.store.event(&Namespace::new("other"), "e1").await.unwrap(), None);
    if t.reopen().await {
        let reopened = t.store.event(&t.ns, "e1").await.unwrap();
        assert_eq!(reopened, Some(EventState { gates_opened: 2, ..first }));
        trim_fully(t, &Trim::Events { ns: t.ns.clone(), before: t.now().await + 1 }).await;
        assert_eq!(t.store.event(&t.ns, "e1").await.unwrap(), None);
    }
}

pub async fn an_event_with_an_id_that_is_kept_changes_nothing(t: &mut Trial<'_>) {
    assert_eq!(t.publish_all(vec![event("e1", "ping", Some("1"), json!("first"))]).await, 0);
    t.advance(10);
    assert_eq!(t.publish_all(vec![event("e1", "pong", Some("2"), json!("second"))]).await, 1);
    t.publish(event("e2", "ping", None, json!("third"))).await;
    let events = vec![event("e3", "ping", None, json!(1)), event("e3", "ping", None, json!(2))];
    assert_eq!(t.publish_all(events).await, 1);
    let read =
        t.store.feed(&t.ns, &Feed::Events { name: None, key: None, since: None }, Page::default()).await.unwrap();
    assert_eq!(read.len(), 3);
    let first = Fed::Event {
        id: "e1".to_owned(),
        name: "ping".to_owned(),
        key: Some("1".to_owned()),
        payload: json!("first").into(),
    };
    assert_eq!((&read[0].what, read[0].at), (&first, t.now().await - 10));
    assert!(matches!(&read[2].what, Fed::Event { payload, .. } if *payload == json!(1).into()));
    let elsewhere = t.within("other");
    elsewhere.publish(event("e1", "ping", None, json!("elsewhere"))).await;
    let read = t
        .store
        .feed(&elsewhere.ns, &Feed::Events { name: None, key: None, since: None }, Page::default())
        .await
        .unwrap();
    assert_eq!(read.len(), 1, "ids are unique per namespace only");
}

pub async fn a_run_that_publishes_writes_its_event_with_its_commit(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    let claimed = t.take_one().await;
    let publish = eddyline_machine::Op::Publish {
        name: "paid".to_owned(),
        as_name: None,
        key: Some(json!({"b": 1, "a": 2}).into()),
        payload: json!({"n": 1}).into(),
    };
    let commit = t.prepare(run, &[t.report_of(&claimed, publish)]).await;
    assert_eq!(commit.events.len(), 1);
    t.commit(commit.clone()).await.unwrap();
    t.commit(commit).await.unwrap();
    let read = t
        .store
        .feed(&t.ns, &Feed::Events { name: Some("paid".to_owned()), key: None, since: None }, Page::default())
        .await
        .unwrap();
    assert_eq!(read.len(), 1);
    assert!(matches!(&read[0].what, Fed::Event { key, .. } if key.as_deref() == Some(r#"{"a":2,"b":1}"#)));
}

pub async fn a_feed_is_read_in_pages_and_by_name_and_key(t: &mut Trial<'_>) {
    for n in 0..12 {
        let name = ["ping", "pong"][n % 2];
        let key = [None, Some("1"), Some("\"1\"")][n % 3];
        t.publish(event(&format!("e{n}"), name, key, json!(n))).await;
    }
    let read = async |name: Option<&str>, key: Option<&str>, limit: usize| {
        let feed = Feed::Events { name: name.map(str::to_owned), key: key.map(str::to_owned), since: None };
        let (mut got, mut after) = (Vec::new(), None);
        loop {
            let page = t.store.feed(&t.ns, &feed, Page { after, limit }).await.unwrap();
            assert!(page.len() <= limit);
            let Some(last) = page.last() else { return got };
            after = Some(last.position);
            got.extend(page.into_iter().map(|item| id_of(&item)));
        }
    };
    let of = |numbers: &[usize]| numbers.iter().map(|n| format!("e{n}")).collect::<Vec<_>>();
    for limit in [1, 2, 5, 100] {
        assert_eq!(read(None, None, limit).await, of(&(0..12).collect::<Vec<_>>()), "{limit}");
        assert_eq!(read(Some("ping"), None, limit).await, of(&[0, 2, 4, 6, 8, 10]), "{limit}");
        assert_eq!(read(Some("ping"), Some("1"), limit).await, of(&[4, 10]), "{limit}");
        assert_eq!(read(Some("pong"), Some("\"1\""), limit).await, of(&[5, 11]), "{limit}");
        assert!(read(Some("pin"), None, limit).await.is_empty());
    }
}

pub async fn events_of_a_moment_or_later_are_a_feed(t: &mut Trial<'_>) {
    let mut times = Vec::new();
    for n in 0..6 {
        times.push(t.now().await);
        t.publish(event(&format!("e{n}"), ["ping", "pong"][n % 2], Some("1"), json!(n))).await;
        t.advance(1_000);
    }
    let read = async |name: Option<&str>, since: Millis, after: Option<u64>| {
        let feed = Feed::Events { name: name.map(str::to_owned), key: None, since: Some(since) };
        let page = t.store.feed(&t.ns, &feed, Page { after, limit: 10 }).await.unwrap();
        page.iter().map(id_of).collect::<Vec<_>>()
    };
    assert_eq!(read(None, times[4], None).await, ["e4", "e5"]);
    assert_eq!(read(None, times[3] + 1, None).await, ["e4", "e5"]);
    assert_eq!(read(Some("ping"), times[1], None).await, ["e2", "e4"]);
    assert_eq!(read(None, times[5] + 1, None).await, Vec::<String>::new());
    let all = t.store.feed(&t.ns, &Feed::Events { name: None, key: None, since: None }, Page::default()).await.unwrap();
    assert_eq!(read(Some("ping"), times[0], Some(all[2].position)).await, ["e4"]);
}

pub async fn the_runs_of_a_flow_are_a_feed(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.flow(CHAIN);
    let mut of_one = Vec::new();
    for n in 0..6 {
        t.advance(5);
        let run = t.start(if n % 2 == 0 { "one" } else { "chain" }, json!(n)).await;
        if n % 2 == 0 {
            of_one.push((run, t.now().await));
        }
    }
    let feed = Feed::Runs { flow: Some("one".to_owned()) };
    let read = t.store.feed(&t.ns, &feed, Page::default()).await.unwrap();
    let got: Vec<_> = read.iter().map(|item| (id_of(item), item.at)).collect();
    assert_eq!(got, of_one.iter().map(|(run, at)| (run.to_string(), *at)).collect::<Vec<_>>());
    assert!(read.iter().all(|item| matches!(&item.what, Fed::Run { flow, .. } if flow == "one")));
    let rest = t.store.feed(&t.ns, &feed, Page { after: Some(read[0].position), limit: 1 }).await.unwrap();
    assert_eq!(rest, read[1..2]);
    let summary = t.summary(of_one[1].0).await;
    assert_eq!(read[1].position, summary.position, "a run has the same position in lists and feeds");
}

pub async fn a_feed_goes_on_after_what_was_trimmed(t: &mut Trial<'_>) {
    t.publish(event("e1", "ping", None, json!(1))).await;
    t.advance(1_000);
    let feed = Feed::Events { name: None, key: None, since: None };
    let seen = t.store.feed(&t.ns, &feed, Page::default()).await.unwrap()[0].position;
    let ns = t.ns.clone();
    trim_fully(t, &Trim::Events { ns, before: t.now().await }).await;
    t.publish(event("e2", "ping", None, json!(2))).await;
    let read = t.store.feed(&t.ns, &feed, Page { after: Some(seen), limit: 10 }).await.unwrap();
    assert_eq!(read.len(), 1, "a position is never given twice");
    t.advance(1_000);
    trim_fully(t, &Trim::Events { ns: t.ns.clone(), before: t.now().await }).await;
    if t.reopen().await {
        t.publish(event("e3", "ping", None, json!(3))).await;
        let again = t.store.feed(&t.ns, &feed, Page { after: Some(read[0].position), limit: 10 }).await.unwrap();
        assert_eq!(again.len(), 1, "nor after the store was opened again");
    }
}

/// Writes the n-th item of a writer; returns its id in the feed.
type Write = fn(Drive, usize, usize) -> Pin<Box<dyn Future<Output = String> + Send>>;

/// Runs eight writers and two readers that follow. Checks that each reader got each item once, in the order of
/// positions, and never an item before a position already read. Returns the ids written.
async fn followed_while(t: &Trial<'_>, feed: Feed, write: Write) -> BTreeSet<String> {
    let done = Arc::new(AtomicBool::new(false));
    let mut readers = Vec::new();
    for limit in [3, 100] {
        let (store, ns, feed, done) = (t.store.clone(), t.ns.clone(), feed.clone(), done.clone());
        readers.push(tokio::spawn(async move {
            let (mut got, mut after) = (Vec::new(), None);
            loop {
                let last = done.load(Ordering::SeqCst);
                let page = store.feed(&ns, &feed, Page { after, limit }).await.unwrap();
                for item in &page {
                    assert!(after.is_none_or(|after| item.position > after), "a position before one already read");
                    after = Some(item.position);
                    got.push(id_of(item));
                }
                if page.is_empty() && last {
                    return got;
                }
                tokio::task::yield_now().await;
            }
        }));
    }
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let drive = t.drive.clone();
        writers.push(tokio::spawn(async move {
            let mut written = Vec::new();
            for n in 0..EACH {
                written.push(write(drive.clone(), writer, n).await);
            }
            written
        }));
    }
    let mut written = BTreeSet::new();
    for writer in writers {
        written.extend(writer.await.unwrap());
    }
    done.store(true, Ordering::SeqCst);
    for reader in readers {
        let got = reader.await.unwrap();
        assert_eq!(got.len(), written.len(), "each once");
        assert_eq!(got.into_iter().collect::<BTreeSet<_>>(), written);
    }
    written
}

fn id_of(item: &FeedItem) -> String {
    match &item.what {
        Fed::Run { run, .. } => run.to_string(),
        Fed::Event { id, .. } => id.clone(),
    }
}
