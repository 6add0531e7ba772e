//! Invariants of every timeline.

use std::collections::BTreeMap;

use eddyline::protocol::Page;
use eddyline::{Client, Method, Record};

/// All records of a run.
pub async fn records(client: &Client, run: &str) -> Vec<Record> {
    let (mut records, mut after) = (Vec::new(), "0".to_owned());
    loop {
        let query = [("after", after), ("limit", "1000".to_owned())];
        let page = client.call(Method::GET, &format!("/v1/streams/nq:flow:{run}"), &query, None::<&()>).await;
        let page: Page<Record> = page.unwrap();
        records.extend(page.items);
        match page.next {
            Some(next) => after = next,
            None => return records,
        }
    }
}

/// Checks that records are numbered 1..n, that exactly the last one is terminal, that no step ended twice, and that no
/// attempt ended without a claim. Returns the number of attempts of each step.
pub async fn check(client: &Client, run: &str) -> BTreeMap<String, usize> {
    let records = records(client, run).await;
    let (mut ends, mut attempts, mut begun) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for (at, record) in records.iter().enumerate() {
        assert_eq!(record.id, (at + 1).to_string(), "a gap in {run}");
        assert_eq!(record.is_terminal(), at + 1 == records.len(), "{} is number {} in {run}", record.kind, at + 1);
        let Some(step) = record.activation() else { continue };
        match record.kind.as_str() {
            "step.completed" | "step.failed" | "step.skipped" | "step.cancelled" => {
                let before = ends.insert(step.to_owned(), record.kind.clone());
                assert_eq!(before, None, "{step} of {run} ended twice");
            }
            "step.attempt.started" => {
                *attempts.entry(step.to_owned()).or_default() += 1;
                begun.insert(job(record), true);
            }
            // A step that the function of a code run executed itself was never offered, so it has no claim.
            "step.scheduled" => {
                begun.insert(job(record), false);
            }
            "step.attempt.completed" | "step.attempt.failed" => {
                let began = begun.remove(&job(record)).unwrap_or(true);
                assert!(began, "an attempt of {step} of {run} ended without having started");
            }
            _ => {}
        }
    }
    assert!(!records.is_empty(), "{run} has no timeline");
    attempts
}

/// The task of a record: a new one for each offered attempt.
fn job(record: &Record) -> Option<String> {
    record.meta["jobId"].as_str().map(str::to_owned)
}
