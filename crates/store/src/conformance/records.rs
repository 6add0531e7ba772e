//! Records: numbered without gaps, in an order that never changes.

use eddyline_machine::{Input, Log, Numbered, Op, RunId};
use serde_json::json;

use super::drive::completion;
use super::{CHAIN, Trial};
use crate::*;

pub async fn records_are_numbered_without_gaps_while_claims_and_commits_race(t: &mut Trial<'_>) {
    let run = t.start(&t.flow("{name: wide, steps: {each: {spread: 'range(40)', run: item}}}"), json!(null)).await;
    let mut working = Vec::new();
    for at in 0..8 {
        let drive = t.drive.clone();
        working.push(tokio::spawn(async move {
            loop {
                let tasks = drive.claim(ClaimRequest { max: 2, worker: format!("w{at}"), ..drive.ask() }).await.tasks;
                if tasks.is_empty() {
                    return;
                }
                for claimed in tasks {
                    loop {
                        drive.advance(1);
                        let report = drive.report_of(&claimed, completion(json!(1)));
                        match drive.submit_taking(run, &[report], &[]).await {
                            Ok(_) => break,
                            Err(Refused::Conflict { .. }) => tokio::task::yield_now().await,
                            Err(other) => panic!("refused with {other:?}"),
                        }
                    }
                }
            }
        }));
    }
    let reader = {
        let drive = t.drive.clone();
        tokio::spawn(async move { follow(&drive, run).await })
    };
    for worker in working {
        worker.await.unwrap();
    }
    let followed = reader.await.unwrap();
    let records = t.records(run).await;
    assert_dense(&records);
    assert_eq!(followed, records, "a concurrent reader sees the same records");
    assert_eq!(t.summary(run).await.records, records.len() as u64);
    assert!(records.last().unwrap().record.entry.is_terminal());
    assert_eq!(records.iter().filter(|record| record.record.entry.is_terminal()).count(), 1);
}

pub async fn the_times_of_records_never_go_back(t: &mut Trial<'_>) {
    t.flow(CHAIN);
    let runs = t.start_all("chain", (0..20).map(|n| json!(n))).await;
    let mut ticking = Vec::new();
    for _ in 0..4 {
        let drive = t.drive.clone();
        ticking.push(tokio::spawn(async move {
            loop {
                let tasks = drive.take(3).await;
                if tasks.is_empty() {
                    return;
                }
                for claimed in tasks {
                    drive.advance(1);
                    drive.clock.jump(-60_000);
                    drive.complete(&claimed, json!(1)).await;
                }
            }
        }));
    }
    for one in ticking {
        one.await.unwrap();
    }
    for run in runs {
        let records = t.records(run).await;
        assert_dense(&records);
        assert!(records.last().unwrap().record.entry.is_terminal());
    }
}

pub async fn records_are_read_in_pages(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!(null)).await;
    t.work_off().await;
    let all = t.records(run).await;
    assert_dense(&all);
    for size in [1, 2, 5, all.len(), all.len() + 1] {
        let mut pages = Vec::new();
        loop {
            let page = t.store.records(run, pages.len() as u64, size).await.unwrap();
            assert!(page.len() <= size);
            if page.is_empty() {
                break;
            }
            pages.extend(page);
        }
        assert_eq!(pages, all, "in pages of {size}");
    }
    assert!(t.store.records(run, all.len() as u64, 10).await.unwrap().is_empty());
    assert!(t.store.records(run, 1 << 40, 10).await.unwrap().is_empty());
    assert!(t.store.records(t.new_run(), 0, 10).await.unwrap().is_empty());
}

pub async fn a_page_of_records_has_a_bound(t: &mut Trial<'_>) {
    let run = t.start(&t.flow("{name: one, steps: {work: {}}}"), json!(null)).await;
    let claimed = t.take_one().await;
    let log = |n: usize| Op::Log(Log { level: "info".to_owned(), msg: format!("line {n}"), meta: None });
    for part in 0..3 {
        let logs: Vec<Input> = (0..400).map(|n| t.report_of(&claimed, log(part * 400 + n))).collect();
        t.submit(run, &logs).await;
    }
    let page = t.store.records(run, 0, usize::MAX).await.unwrap();
    assert_eq!(page.len(), MAX_PAGE);
    let rest = t.store.records(run, MAX_PAGE as u64, usize::MAX).await.unwrap();
    let all: Vec<Numbered> = page.into_iter().chain(rest).collect();
    assert_dense(&all);
    assert_eq!(all.len() as u64, t.summary(run).await.records);
}

pub async fn logs_are_found_by_their_activation(t: &mut Trial<'_>) {
    let run = t.start(&t.flow("{name: two, steps: {a: {}, b: {}}}"), json!(null)).await;
    let tasks = t.take(2).await;
    let log = |n: usize| Op::Log(Log { level: "info".to_owned(), msg: format!("line {n}"), meta: None });
    for n in 0..30 {
        // Several in one commit, alternating between both tasks, and some commits without any.
        let logs: Vec<Input> = (0..n % 4).map(|at| t.report_of(&tasks[(n + at) % 2], log(n))).collect();
        if !logs.is_empty() {
            t.submit(run, &logs).await;
        }
    }
    for claimed in &tasks {
        t.complete(claimed, json!(1)).await;
    }
    let all = t.records(run).await;
    for name in ["a", "b", "c"] {
        let expected: Vec<Numbered> = all.iter().filter(|record| record.record.is_log_of(name)).cloned().collect();
        assert_eq!(expected.is_empty(), name == "c");
        assert_eq!(t.store.logs(run, name, 0, 1_000).await.unwrap(), expected);
        for after in 0..=all.len() as u64 {
            let rest: Vec<Numbered> = expected.iter().filter(|record| record.n > after).take(3).cloned().collect();
            assert_eq!(t.store.logs(run, name, after, 3).await.unwrap(), rest, "{name} after {after}");
        }
        assert!(t.store.logs(run, name, 1 << 40, 10).await.unwrap().is_empty());
        assert!(t.store.logs(t.new_run(), name, 0, 10).await.unwrap().is_empty());
    }
    while t.store.trim(&Trim::Timeline(run)).await.unwrap() {}
    assert!(t.store.logs(run, "a", 0, 10).await.unwrap().is_empty());
}

pub async fn records_of_runs_are_numbered_apart(t: &mut Trial<'_>) {
    t.flow(CHAIN);
    let runs = t.start_all("chain", (0..3).map(|n| json!(n))).await;
    t.work_off().await;
    let lengths: Vec<usize> = {
        let mut lengths = Vec::new();
        for run in runs {
            let records = t.records(run).await;
            assert_dense(&records);
            lengths.push(records.len());
        }
        lengths
    };
    assert!(lengths.windows(2).all(|pair| pair[0] == pair[1]), "{lengths:?}");
}

pub fn assert_dense(records: &[Numbered]) {
    for (record, n) in records.iter().zip(1..) {
        assert_eq!(record.n, n, "numbers without gaps");
    }
    assert!(records.windows(2).all(|pair| pair[0].ts <= pair[1].ts), "time never goes back");
}

/// Reads a timeline to its end while it is written.
async fn follow(drive: &super::Drive, run: RunId) -> Vec<Numbered> {
    let mut read: Vec<Numbered> = Vec::new();
    loop {
        let page = drive.store.records(run, read.len() as u64, 7).await.unwrap();
        read.extend(page);
        if read.last().is_some_and(|record| record.record.entry.is_terminal()) {
            return read;
        }
        tokio::task::yield_now().await;
    }
}
