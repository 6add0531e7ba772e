//! Starts that happen once: under a derived id, or under an idempotency key.

use eddyline_machine::{Start, Version};
use serde_json::json;

use super::{ONE, Trial};
use crate::*;

pub async fn of_many_starts_under_one_id_one_happens(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let run = t.new_run().derive("slot 7");
    let mut racing = Vec::new();
    for at in 0..16 {
        let start = Start { external_id: Some(format!("{at}")), ..Start::default() };
        let (drive, commit) = (t.drive.clone(), t.prepare_start(&flow, run, start).await);
        racing.push(tokio::spawn(async move { drive.commit(commit).await }));
    }
    let mut won = 0;
    for racer in racing {
        match racer.await.unwrap() {
            Ok(committed) => won += usize::from(!committed.before),
            Err(refused) => assert_eq!(refused, Refused::Conflict { current: Some(Version(1)) }),
        }
    }
    assert_eq!(won, 1);
    assert_eq!(t.take(10).await.len(), 1);
    assert_eq!(t.store.count_runs(&t.ns, &RunFilter::default()).await.unwrap(), 1);
}

pub async fn of_many_starts_under_one_key_one_happens_and_all_are_told_which(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let mut racing = Vec::new();
    for at in 0..24u8 {
        let mut commit = t.prepare_start(&flow, t.new_run(), Start::default()).await;
        commit.key = Some(key(&flow, "order-1", at));
        let (drive, run) = (t.drive.clone(), commit.transition.header.run);
        racing.push(tokio::spawn(async move { (run, at, drive.commit(commit).await) }));
    }
    let (mut winner, mut told) = (None, Vec::new());
    for racer in racing {
        match racer.await.unwrap() {
            (run, at, Ok(_)) => {
                assert!(winner.is_none(), "two started");
                winner = Some((run, [at; 32]));
            }
            (_, _, Err(Refused::KeyTaken { run, fingerprint })) => told.push((run, fingerprint)),
            (_, _, Err(other)) => panic!("refused with {other:?}"),
        }
    }
    let winner = winner.expect("one started");
    assert_eq!(told, vec![winner; 23], "with the fingerprint of the first request");
    assert_eq!(t.store.count_runs(&t.ns, &RunFilter::default()).await.unwrap(), 1);
    assert_eq!(t.take(99).await.len(), 1);
}

pub async fn starts_under_one_key_in_one_call_start_one_run(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let mut commands = Vec::new();
    for at in 0..3 {
        let mut commit = t.prepare_start(&flow, t.new_run(), Start::default()).await;
        commit.key = Some(key(&flow, "k", at));
        commands.push(Command::Run(commit));
    }
    let written = t.store.commit(commands, Vec::new()).await.unwrap();
    let words: Vec<String> = written.commands.iter().map(super::commits::word).collect();
    assert_eq!(words, ["done", "key", "key"]);
}

pub async fn a_start_whose_key_is_taken_writes_nothing(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let first = start_under(t, &flow, "k", 1).await.expect("the key is free");
    let before = t.everything().await;
    assert_eq!(start_under(t, &flow, "k", 2).await, Err((first, [1; 32])));
    t.assert_unchanged(&before, "a start under a taken key").await;
    if t.reopen().await {
        assert_eq!(start_under(t, &flow, "k", 2).await, Err((first, [1; 32])));
    }
}

pub async fn a_key_is_of_one_flow_and_one_namespace(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let other = t.flow("{name: other, steps: {work: {}}}");
    start_under(t, &flow, "k", 1).await.expect("free");
    start_under(t, &flow, "l", 1).await.expect("another key is free");
    start_under(t, &other, "k", 1).await.expect("another flow has keys of its own");
    let elsewhere = t.within("other");
    start_under(&elsewhere, &flow, "k", 1).await.expect("and so has another namespace");
    assert!(start_under(&elsewhere, &flow, "k", 1).await.is_err());
}

pub async fn a_key_is_free_again_when_its_run_is_deleted(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let run = start_under(t, &flow, "k", 1).await.expect("free");
    t.work_off().await;
    assert_eq!(start_under(t, &flow, "k", 2).await, Err((run, [1; 32])), "the end of a run does not free its key");
    trim_fully(t, &Trim::Timeline(run)).await;
    assert_eq!(start_under(t, &flow, "k", 2).await, Err((run, [1; 32])), "nor does the end of its timeline");
    trim_fully(t, &Trim::Run(run)).await;
    start_under(t, &flow, "k", 2).await.expect("free again");
}

pub async fn trim_fully(t: &super::Drive, what: &Trim) {
    while t.store.trim(what).await.unwrap() {}
}

type UsedKey = (eddyline_machine::RunId, [u8; 32]);

async fn start_under(
    t: &super::Drive,
    flow: &str,
    name: &str,
    fingerprint: u8,
) -> std::result::Result<eddyline_machine::RunId, UsedKey> {
    let run = t.new_run();
    let mut commit = t.prepare_start(flow, run, Start { input: Some(json!(1).into()), ..Start::default() }).await;
    commit.key = Some(key(flow, name, fingerprint));
    match t.commit(commit).await {
        Ok(_) => Ok(run),
        Err(Refused::KeyTaken { run, fingerprint }) => Err((run, fingerprint)),
        Err(other) => panic!("refused with {other:?}"),
    }
}

fn key(flow: &str, key: &str, fingerprint: u8) -> StartKey {
    StartKey { flow: flow.to_owned(), key: key.to_owned(), fingerprint: [fingerprint; 32] }
}
