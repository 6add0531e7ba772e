//! Lists of runs: every filter, and pages that miss nothing.

use std::collections::BTreeSet;

use eddyline_machine::{Input, RunId, Start, Status};
use serde_json::json;

use super::starts::trim_fully;
use super::{CHAIN, NAP, ONE, Trial};
use crate::*;

pub async fn every_filter_finds_what_it_says(t: &mut Trial<'_>) {
    fill(t).await;
    let all = t.store.runs(Some(&t.ns), &RunFilter::default(), Page::default()).await.unwrap();
    assert!(all.len() >= 30);
    let statuses: BTreeSet<Status> = all.iter().map(|summary| summary.header.status()).collect();
    assert_eq!(statuses.len(), 7, "the case has runs of every status: {statuses:?}");
    let filters = filters(&all);
    for filter in &filters {
        check(t, &all, filter).await;
    }
    // Two at a time, and then all that are compatible together.
    for (at, one) in filters.iter().enumerate() {
        for other in &filters[at + 1..] {
            check(t, &all, &both(one, other)).await;
        }
    }
    for summary in &all {
        let everything = RunFilter {
            flow: Some(summary.header.flow.clone()),
            status: vec![summary.header.status()],
            tags: summary.header.tags.clone(),
            external_id: summary.header.external_id.clone(),
            root: summary.header.root,
            retry_of: summary.header.retry_of,
            since: Some(summary.created_at),
            until: Some(summary.created_at + 1),
            ended_before: summary.ended_at.map(|at| at + 1),
            trimmed: Some(summary.trimmed),
        };
        check(t, &all, &everything).await;
        let found = t.store.runs(Some(&t.ns), &everything, Page::default()).await.unwrap();
        assert!(found.contains(summary), "a run matches itself");
    }
}

pub async fn runs_that_go_on_are_counted_by_flow_and_status(t: &mut Trial<'_>) {
    fill(t).await;
    let elsewhere = t.within("other");
    elsewhere.flow(ONE);
    elsewhere.start("one", json!(null)).await;
    let mut expected = std::collections::BTreeMap::new();
    for ns in [&t.ns, &elsewhere.ns] {
        for summary in t.store.runs(Some(ns), &RunFilter::default(), Page::default()).await.unwrap() {
            let status = summary.header.status();
            if !status.is_end() {
                *expected.entry((ns.clone(), summary.header.flow.clone(), status)).or_insert(0) += 1;
            }
        }
    }
    let counted = |((ns, flow, status), count)| GoingRuns { ns, flow, status, count };
    let mut expected: Vec<GoingRuns> = expected.into_iter().map(counted).collect();
    let mut found = t.store.going().await.unwrap();
    found.retain(|going| [&t.ns, &elsewhere.ns].contains(&&going.ns));
    expected.sort();
    found.sort();
    assert!(expected.len() >= 4, "the case has runs of several statuses: {expected:?}");
    assert_eq!(found, expected);
}

pub async fn retries_are_found_by_the_run_that_they_retry(t: &mut Trial<'_>) {
    t.flow(ONE);
    let (first, other) = (t.start("one", json!(null)).await, t.start("one", json!(null)).await);
    let mut again = Vec::new();
    for of in [first, other, first] {
        again.push(t.start_with("one", Start { retry_of: Some(of), ..Start::default() }).await);
    }
    let elsewhere = t.within("other");
    elsewhere.flow(ONE);
    elsewhere.start_with("one", Start { retry_of: Some(first), ..Start::default() }).await;
    let filter = RunFilter { retry_of: Some(first), ..RunFilter::default() };
    let found = async || -> Vec<RunId> {
        let runs = t.store.runs(Some(&t.ns), &filter, Page::default()).await.unwrap();
        runs.iter().map(|summary| summary.run).collect()
    };
    assert_eq!(found().await, [again[2], again[0]]);
    assert_eq!(t.store.count_runs(&t.ns, &filter).await.unwrap(), 2);
}

pub async fn descendants_are_found_and_counted_by_their_root(t: &mut Trial<'_>) {
    t.flow(ONE);
    let root = t.start("one", json!(null)).await;
    let mut below = Vec::new();
    for depth in [1, 2, 2] {
        let start = Start { root: Some(root), depth, ..Start::default() };
        below.push(t.start_with("one", start).await);
        t.start("one", json!(null)).await;
    }
    let filter = RunFilter { root: Some(root), ..RunFilter::default() };
    let mut found: Vec<RunId> =
        t.store.runs(Some(&t.ns), &filter, Page::default()).await.unwrap().iter().map(|summary| summary.run).collect();
    found.reverse();
    assert_eq!(found, below);
    assert_eq!(t.store.count_runs(&t.ns, &filter).await.unwrap(), 3);
    let elsewhere = Namespace::new("elsewhere");
    assert_eq!(t.store.count_runs(&elsewhere, &filter).await.unwrap(), 0);
}

pub async fn a_list_follows_the_status_of_its_runs(t: &mut Trial<'_>) {
    t.flow(CHAIN);
    let run = t.start_with("chain", Start { delay_ms: Some(1_000), ..Start::default() }).await;
    expect_status(t, run, Status::Pending).await;
    t.pause(run).await;
    expect_status(t, run, Status::Paused).await;
    t.resume(run).await;
    expect_status(t, run, Status::Pending).await;
    t.advance(1_000);
    let timer = t.pending(run).await.timers[0];
    t.submit_taking(run, &[Input::Due(timer.key)], &[Consumed::Timer(timer.key, timer.due)]).await.unwrap();
    expect_status(t, run, Status::Running).await;
    let claimed = t.take_one().await;
    expect_status(t, run, Status::Running).await;
    let error = eddyline_machine::Failure::new("Boom", "it broke");
    t.report(&claimed, eddyline_machine::Op::Fail { error, retryable: true, retry_after_ms: Some(1_000) }).await;
    expect_status(t, run, Status::Waiting).await;
    t.cancel(run).await;
    expect_status(t, run, Status::Cancelled).await;
    let done = t.start("chain", json!(null)).await;
    t.work_off().await;
    expect_status(t, done, Status::Completed).await;
    expect_status(t, run, Status::Cancelled).await;
}

pub async fn pages_of_runs_go_from_the_newest_to_the_oldest(t: &mut Trial<'_>) {
    t.flow(ONE);
    let mut runs = t.start_all("one", (0..7).map(|n| json!(n))).await;
    for _ in 0..6 {
        runs.push(t.start("one", json!(null)).await);
    }
    runs.reverse();
    for size in [1, 2, 5, 13, 14] {
        assert_eq!(paged(t, &RunFilter::default(), size, async |_| {}).await, runs, "in pages of {size}");
    }
    let positions: Vec<u64> = {
        let listed = t.store.runs(None, &RunFilter::default(), Page::default()).await.unwrap();
        listed.into_iter().map(|summary| summary.position).collect()
    };
    assert!(positions.windows(2).all(|pair| pair[0] > pair[1]), "{positions:?}");
}

pub async fn a_page_misses_no_run_while_others_are_started_and_change(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.flow(NAP);
    let mut runs = Vec::new();
    for n in 0..12 {
        runs.push(t.start(if n % 3 == 0 { "nap" } else { "one" }, json!(n)).await);
    }
    let mut expected = runs.clone();
    expected.reverse();
    let got = paged(t, &RunFilter::default(), 2, async |at| {
        t.start_all("one", (0..3).map(|n| json!(n))).await;
        // Runs that the reader has not reached yet change; their positions must not.
        t.cancel(runs[at % 5]).await;
    })
    .await;
    assert_eq!(got, expected, "those that existed at its start, each once");

    let filter = RunFilter { flow: Some("nap".to_owned()), ..RunFilter::default() };
    let got = paged(t, &filter, 1, async |_| {
        t.start("nap", json!(null)).await;
    })
    .await;
    assert_eq!(got, [runs[9], runs[6], runs[3], runs[0]]);
}

pub async fn a_page_of_runs_has_a_bound(t: &mut Trial<'_>) {
    t.flow(NAP);
    t.start_all("nap", (0..MAX_PAGE + 3).map(|n| json!(n))).await;
    let page = Page { after: None, limit: usize::MAX };
    assert_eq!(t.store.runs(None, &RunFilter::default(), page).await.unwrap().len(), MAX_PAGE);
    assert_eq!(t.store.count_runs(&t.ns, &RunFilter::default()).await.unwrap(), MAX_PAGE as u64 + 3);
    assert_eq!(paged(t, &RunFilter::default(), usize::MAX, async |_| {}).await.len(), MAX_PAGE + 3);
    let feed = t.store.feed(&t.ns, &Feed::Runs { flow: None }, page).await.unwrap();
    assert_eq!(feed.len(), MAX_PAGE);
}

/// Runs of every status, flow, tag, age and end.
async fn fill(t: &Trial<'_>) {
    for flow in [ONE, CHAIN, NAP] {
        t.flow(flow);
    }
    let mut ended = Vec::new();
    for round in 0..4 {
        for (n, flow) in ["one", "chain", "nap"].into_iter().enumerate() {
            let tags = ["red", "green", "blue"][..(round + n) % 4].iter().map(|tag| tag.to_string()).collect();
            let external_id = (n != 1).then(|| format!("x{}", (round + n) % 3));
            let start = |delay_ms| Start { tags, external_id, delay_ms, ..Start::default() };
            t.start_with(flow, start((round == 3).then_some(60_000))).await;
            t.advance(1_000);
        }
        let pausing = t.start("one", json!(null)).await;
        t.pause(pausing).await;
        let failing = t.start("one", json!(null)).await;
        while let Some(claimed) = t.take(1).await.pop() {
            if claimed.run == failing {
                t.fail(&claimed).await;
            } else {
                t.complete(&claimed, json!(null)).await;
            }
        }
        let cancelled = t.start("chain", json!(null)).await;
        t.advance(500);
        t.cancel(cancelled).await;
        ended.extend([failing, cancelled]);
        t.start("chain", json!(null)).await;
        t.start("one", json!(null)).await;
        t.take(1).await;
        t.advance(1_000);
    }
    trim_fully(t, &Trim::Timeline(ended[0])).await;
    trim_fully(t, &Trim::Timeline(ended[3])).await;
    t.within("other").start("one", json!(null)).await;
}

fn filters(all: &[Summary]) -> Vec<RunFilter> {
    let some = |change: &dyn Fn(&mut RunFilter)| {
        let mut filter = RunFilter::default();
        change(&mut filter);
        filter
    };
    let mut filters = Vec::new();
    for flow in ["one", "chain", "nap", "none"] {
        filters.push(some(&|filter| filter.flow = Some(flow.to_owned())));
    }
    for status in Status::ALL {
        filters.push(some(&|filter| filter.status = vec![status]));
    }
    for several in [&[Status::Completed, Status::Running][..], &[Status::Failed, Status::Waiting, Status::Paused]] {
        filters.push(some(&|filter| filter.status = several.to_vec()));
    }
    for tags in [&["red"][..], &["green"], &["red", "blue"], &["blue", "red", "green"], &["re"], &["red", "no"]] {
        filters.push(some(&|filter| filter.tags = tags.iter().map(|tag| tag.to_string()).collect()));
    }
    for external_id in ["x0", "x1", "x"] {
        filters.push(some(&|filter| filter.external_id = Some(external_id.to_owned())));
    }
    let middle = all[all.len() / 2].created_at;
    let ends: Vec<i64> = all.iter().filter_map(|summary| summary.ended_at).collect();
    for at in [middle, middle + 1, all[0].created_at, all[0].created_at + 1] {
        filters.push(some(&|filter| filter.since = Some(at)));
        filters.push(some(&|filter| filter.until = Some(at)));
    }
    for at in [ends[ends.len() / 2], ends[ends.len() / 2] + 1, 0] {
        filters.push(some(&|filter| filter.ended_before = Some(at)));
    }
    for trimmed in [true, false] {
        filters.push(some(&|filter| filter.trimmed = Some(trimmed)));
    }
    filters
}

fn both(one: &RunFilter, other: &RunFilter) -> RunFilter {
    RunFilter {
        flow: one.flow.clone().or(other.flow.clone()),
        status: if one.status.is_empty() { other.status.clone() } else { one.status.clone() },
        tags: one.tags.iter().chain(&other.tags).cloned().collect(),
        external_id: one.external_id.clone().or(other.external_id.clone()),
        root: one.root.or(other.root),
        retry_of: one.retry_of.or(other.retry_of),
        since: one.since.or(other.since),
        until: one.until.or(other.until),
        ended_before: one.ended_before.or(other.ended_before),
        trimmed: one.trimmed.or(other.trimmed),
    }
}

/// Compares the store with a naive filter over all runs, and the count.
async fn check(t: &Trial<'_>, all: &[Summary], filter: &RunFilter) {
    let expected: Vec<&Summary> = all.iter().filter(|summary| matches(summary, filter)).collect();
    let found = t.store.runs(Some(&t.ns), filter, Page::default()).await.unwrap();
    assert_eq!(found.iter().collect::<Vec<_>>(), expected, "{filter:?}");
    assert_eq!(t.store.count_runs(&t.ns, filter).await.unwrap(), expected.len() as u64, "{filter:?}");
    let few = t.store.runs(Some(&t.ns), filter, Page { after: None, limit: 3 }).await.unwrap();
    assert_eq!(few[..], found[..few.len()], "{filter:?}");
    assert_eq!(few.len(), found.len().min(3), "{filter:?}");
}

fn matches(summary: &Summary, filter: &RunFilter) -> bool {
    let header = &summary.header;
    let mut yes = true;
    if let Some(flow) = &filter.flow {
        yes &= header.flow == *flow;
    }
    if !filter.status.is_empty() {
        yes &= filter.status.contains(&header.status());
    }
    for tag in &filter.tags {
        yes &= header.tags.contains(tag);
    }
    if filter.external_id.is_some() {
        yes &= header.external_id == filter.external_id;
    }
    if filter.root.is_some() {
        yes &= header.root == filter.root;
    }
    if filter.retry_of.is_some() {
        yes &= header.retry_of == filter.retry_of;
    }
    if let Some(since) = filter.since {
        yes &= summary.created_at >= since;
    }
    if let Some(until) = filter.until {
        yes &= summary.created_at < until;
    }
    if let Some(before) = filter.ended_before {
        yes &= summary.ended_at.is_some() && summary.ended_at < Some(before);
    }
    if let Some(trimmed) = filter.trimmed {
        yes &= summary.trimmed == trimmed;
    }
    yes
}

async fn expect_status(t: &Trial<'_>, run: RunId, expected: Status) {
    for status in [
        Status::Pending,
        Status::Running,
        Status::Waiting,
        Status::Paused,
        Status::Completed,
        Status::Failed,
        Status::Cancelled,
    ] {
        let filter = RunFilter { status: vec![status], ..RunFilter::default() };
        let found = t.store.runs(Some(&t.ns), &filter, Page::default()).await.unwrap();
        let listed = found.iter().any(|summary| summary.run == run);
        assert_eq!(listed, status == expected, "listed under {status:?} while it is {expected:?}");
        assert_eq!(t.store.count_runs(&t.ns, &filter).await.unwrap(), found.len() as u64);
    }
}

/// Reads all runs in pages, calling `between` after each page.
async fn paged(t: &Trial<'_>, filter: &RunFilter, limit: usize, between: impl AsyncFn(usize)) -> Vec<RunId> {
    let (mut got, mut after) = (Vec::new(), None);
    loop {
        let page = t.store.runs(None, filter, Page { after, limit }).await.unwrap();
        assert!(page.len() <= limit);
        let Some(last) = page.last() else { return got };
        after = Some(last.position);
        got.extend(page.iter().map(|summary| summary.run));
        between(got.len()).await;
    }
}
