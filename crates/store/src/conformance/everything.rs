//! Everything that can be read from a store, as text, to compare two times or two stores.

use std::collections::BTreeMap;
use std::fmt::Debug;

use eddyline_machine::{RunId, ValueId};

use crate::*;

/// The kinds of documents that the cases write.
const KINDS: [&str; 4] = [kind::QUEUE, kind::LIMIT, "thing", "slot"];

/// Descriptions of reads, with their results.
pub type Everything = BTreeMap<String, String>;

/// What to compare.
#[derive(Debug, Clone, Copy)]
pub struct Looked {
    /// Positions and revisions, whose values differ between stores.
    pub numbers: bool,
    /// The ends of leases, which are later after a time without service.
    pub leases: bool,
}

pub async fn everything(store: &dyn Store, namespaces: &[Namespace], runs: &[RunId], looked: Looked) -> Everything {
    let mut all = Everything::new();
    let mut known: Vec<RunId> = runs.to_vec();
    let position = |position: u64| if looked.numbers { position } else { 0 };
    let listed = store.runs(None, &RunFilter::default(), Page::default()).await.unwrap();
    known.extend(listed.iter().map(|summary| summary.run));
    known.sort();
    known.dedup();
    // A store need not keep the length of the timeline of a trimmed run.
    let records = |summary: &Summary| if summary.trimmed { 0 } else { summary.records };
    let listed = listed.into_iter().map(|summary| Summary {
        position: position(summary.position),
        records: records(&summary),
        ..summary
    });
    note(&mut all, "runs", listed.collect::<Vec<_>>());
    for run in known {
        of_run(&mut all, store, run, looked).await;
    }
    for ns in namespaces {
        let gates = store.gates(Some(ns), &GateFilter::default(), Page::default()).await.unwrap();
        let gates = gates.into_iter().map(|gate| GateRow { position: position(gate.position), ..gate });
        note(&mut all, format!("{ns}: gates"), gates.collect::<Vec<_>>());
        for kind in KINDS {
            let filter = DocumentFilter { kind: kind.to_owned(), ..DocumentFilter::default() };
            let documents = store.documents(Some(ns), &filter, MAX_PAGE).await.unwrap();
            let documents = documents.into_iter().map(|found| Document { revision: position(found.revision), ..found });
            note(&mut all, format!("{ns}: {kind} documents"), documents.collect::<Vec<_>>());
        }
        for feed in [Feed::Runs { flow: None }, Feed::Events { name: None, key: None, since: None }] {
            let items = store.feed(ns, &feed, Page::default()).await.unwrap();
            let items = items.into_iter().map(|item| FeedItem { position: position(item.position), ..item });
            note(&mut all, format!("{ns}: {feed:?}"), items.collect::<Vec<_>>());
        }
        // A store may forget an empty queue.
        let queues = store.queues(ns).await.unwrap();
        let queues = queues.into_iter().filter(|queue| queue.ready + queue.claimed > 0);
        note(&mut all, format!("{ns}: queues"), queues.collect::<Vec<_>>());
    }
    all
}

async fn of_run(all: &mut Everything, store: &dyn Store, run: RunId, looked: Looked) {
    let mut values = 0;
    match store.load(run, None).await.unwrap() {
        Found::Run(loaded) => {
            let rows = loaded.rows;
            values = rows.header.next_value + 2;
            note(all, format!("{run}: header"), &rows.header);
            note(all, format!("{run}: activations"), &rows.activations);
            note(all, format!("{run}: emitted, reuse, cursors"), (&rows.emitted, &rows.reuse, &rows.cursors));
        }
        Found::Trimmed(summary) => note(all, format!("{run}: header"), ("trimmed", summary.header)),
        other => note(all, format!("{run}: header"), other),
    }
    let ids: Vec<ValueId> = (0..values).map(ValueId).collect();
    let mut found = store.values(run, &ids).await.unwrap();
    found.sort_by_key(|(id, _)| *id);
    note(all, format!("{run}: values"), found);
    note(all, format!("{run}: records"), store.records(run, 0, MAX_PAGE).await.unwrap());
    let mut pending = store.pending(run).await.unwrap();
    pending.tasks.sort_by_key(|row| row.task.fence);
    pending.timers.sort();
    pending.gates.sort_by_key(|gate| gate.id);
    for gate in &mut pending.gates {
        gate.position = if looked.numbers { gate.position } else { 0 };
    }
    for held in pending.tasks.iter_mut().filter_map(|row| row.held.as_mut()) {
        if !looked.leases {
            (held.lease_until, held.deadline) = (0, held.deadline.map(|_| 0));
        }
    }
    note(all, format!("{run}: tasks"), pending.tasks);
    note(all, format!("{run}: timers"), pending.timers);
    note(all, format!("{run}: gates"), pending.gates);
    note(all, format!("{run}: messages"), pending.messages);
}

fn note(all: &mut Everything, at: impl Into<String>, what: impl Debug) {
    all.insert(at.into(), format!("{what:?}"));
}

/// Panics with the first difference.
pub fn assert_same(before: &Everything, after: &Everything, why: &str) {
    let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for key in keys {
        let (a, b) = (before.get(key), after.get(key));
        let nothing = "(nothing)".to_owned();
        assert!(a == b, "{why}: {key} differs\n  {}\n  {}", a.unwrap_or(&nothing), b.unwrap_or(&nothing));
    }
}
