//! What must hold of every timeline.

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

/// Numbered 1..n, with one end, which is the last, no step that ended twice and no attempt that ended without a claim. Gives the attempts of each step.
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
            // A step that the function of a code run carried out itself was never offered, and nobody claims it.
            "step.scheduled" => {
                begun.insert(job(record), false);
            }
            "step.attempt.completed" | "step.attempt.failed" => {
                let began = begun.remove(&job(record)).unwrap_or(true);
                assert!(began, "an attempt of {step} of {run} ended and never began");
            }
            _ => {}
        }
    }
    assert!(!records.is_empty(), "{run} has no timeline");
    attempts
}

/// The task that a record is of, new whenever an attempt is offered.
fn job(record: &Record) -> Option<String> {
    record.meta["jobId"].as_str().map(str::to_owned)
}
