//! Compare-and-set: a transition is written as a whole, only on the version it was decided on, at most once.

use std::collections::BTreeSet;

use eddyline_machine::{Entry, Input, RunId, Start, Version};
use serde_json::json;

use super::drive::{completion, event, note};
use super::{CHAIN, NAP, ONE, Trial};
use crate::*;

pub async fn a_stale_commit_is_refused_with_the_version_and_writes_nothing(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!({"n": 1})).await;
    let other = t.start(CHAIN_NAME, json!(null)).await;
    t.send(vec![note(run, "m1")]).await;
    let task = t.take_one().await;
    let mut stale = t.prepare(run, &[t.report_of(&task, completion(json!("x".repeat(600))))]).await;
    stale.takes = vec![Consumed::Message("m1".to_owned())];
    stale.messages = vec![note(other, "from the stale one")];
    stale.events = vec![event("e1", "ping", None, json!(1))];
    t.pause(run).await;
    let before = t.everything().await;

    let refused = t.commit(stale).await;
    assert_eq!(refused, Err(Refused::Conflict { current: Some(Version(2)) }));
    t.assert_unchanged(&before, "a refused commit").await;
}

pub async fn a_start_of_a_run_that_exists_is_refused(t: &mut Trial<'_>) {
    let flow = t.flow(CHAIN);
    let run = t.start(&flow, json!({"n": 1})).await;
    let again = t.prepare_start(&flow, run, Start { input: Some(json!({"n": 2}).into()), ..Start::default() }).await;
    let before = t.everything().await;
    assert_eq!(t.commit(again).await, Err(Refused::Conflict { current: Some(Version(1)) }));
    t.assert_unchanged(&before, "a second start").await;
}

pub async fn a_commit_on_a_run_that_is_not_there_is_refused(t: &mut Trial<'_>) {
    let flow = t.flow(CHAIN);
    let run = t.start(&flow, json!(null)).await;
    let commit = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    let mut transition = (*commit.transition).clone();
    transition.header.run = t.new_run();
    let before = t.everything().await;
    let commit = RunCommit { transition: transition.into(), ..commit };
    assert_eq!(t.commit(commit).await, Err(Refused::Conflict { current: None }));
    t.assert_unchanged(&before, "a commit on nothing").await;
}

pub async fn of_many_racing_commits_on_one_run_exactly_one_wins(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    for round in 0..5 {
        let version = Version(round + 1);
        let mut commits = Vec::new();
        for at in 0..16 {
            let by = format!("racer {at}");
            let input = if round % 2 == 0 { Input::Pause { by } } else { Input::Resume { by } };
            commits.push(t.prepare(run, &[input]).await);
        }
        let racing = commits.into_iter().map(|commit| {
            let drive = t.drive.clone();
            tokio::spawn(async move { drive.commit(commit).await })
        });
        let mut won = 0;
        for racer in racing.collect::<Vec<_>>() {
            match racer.await.unwrap() {
                Ok(committed) => {
                    won += 1;
                    assert!(!committed.before);
                }
                Err(refused) => assert_eq!(refused, Refused::Conflict { current: Some(Version(version.0 + 1)) }),
            }
        }
        assert_eq!(won, 1, "exactly one wins");
    }
    assert_eq!(t.summary(run).await.version, Version(6));
    let acts = t.records(run).await.into_iter().filter(|record| matches!(record.record.entry, Entry::Act { .. }));
    assert_eq!(acts.count(), 5, "one act for each version");
}

pub async fn one_refused_command_does_not_sink_the_others(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let run = t.start(&flow, json!(null)).await;
    t.put("thing", "taken", json!(1)).await;
    let first = t.prepare_start(&flow, t.new_run(), Start::default()).await;
    let good = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    let bad = RunCommit { command: t.new_command(), ..good.clone() };
    let absent = |id: &str| DocumentChange {
        key: DocumentKey::new("thing", id),
        expect: Expect::Absent,
        body: Some(json!(id)),
        due: None,
    };
    let last = t.prepare_start(&flow, t.new_run(), Start::default()).await;
    let last_run = last.transition.header.run;
    let commands = vec![
        Command::Run(first),
        t.documents(vec![absent("taken")]),
        Command::Run(good),
        Command::Run(bad),
        t.documents(vec![absent("free")]),
        Command::Run(last),
    ];
    let written = t.store.commit(commands, vec![t.ask()]).await.unwrap();
    let answers: Vec<String> = written.commands.iter().map(word).collect();
    assert_eq!(answers, ["done", "revision", "done", "conflict", "done", "done"]);
    assert!(t.summary(run).await.header.paused);
    assert_eq!(t.summary(last_run).await.version, Version(1));
    let things = DocumentFilter { kind: "thing".to_owned(), ..DocumentFilter::default() };
    let found = t.store.documents(Some(&t.ns), &things, 10).await.unwrap();
    assert_eq!(found.iter().map(|found| found.key.id.as_str()).collect::<Vec<_>>(), ["free", "taken"]);
    assert_eq!(written.claims[0].tasks.len(), 2, "the claim sees tasks added by the call, except of the paused run");
}

pub async fn the_commands_of_a_call_are_carried_out_in_order(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let run = t.new_run();
    let start = t.prepare_start(&flow, run, Start::default()).await;
    t.commit(start.clone()).await.unwrap();
    let pause = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;

    // The same two in one call, for another run that does not exist yet.
    let other = t.new_run();
    let moved = |commit: &RunCommit| {
        let mut transition = (*commit.transition).clone();
        transition.header.run = other;
        RunCommit { command: t.new_command(), transition: transition.into(), ..commit.clone() }
    };
    let commands = vec![Command::Run(moved(&start)), Command::Run(moved(&pause))];
    let written = t.store.commit(commands, Vec::new()).await.unwrap();
    assert_eq!(written.commands.iter().map(word).collect::<Vec<_>>(), ["done", "done"]);
    let firsts: Vec<u64> = written.commands.iter().map(|answer| answer.as_ref().unwrap().first).collect();
    assert_eq!(firsts, [1, start.transition.records.len() as u64 + 1]);
    assert_eq!(t.summary(other).await.version, Version(2));

    let commands = vec![Command::Run(moved(&pause)), Command::Run(moved(&start))];
    let written = t.store.commit(commands, Vec::new()).await.unwrap();
    assert_eq!(written.commands.iter().map(word).collect::<Vec<_>>(), ["conflict", "conflict"]);
}

pub async fn a_command_that_was_carried_out_is_answered_as_the_first_time(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!(null)).await;
    let task = t.take_one().await;
    t.send(vec![note(run, "m1")]).await;
    let mut commit = t.prepare(run, &[t.report_of(&task, completion(json!(1)))]).await;
    commit.takes = vec![Consumed::Message("m1".to_owned())];
    commit.messages = vec![note(run, "m2")];
    commit.events = vec![event("e1", "ping", None, json!(1))];
    t.advance(10);
    let first = t.commit(commit.clone()).await.unwrap();
    assert!(!first.before && first.first > 1);
    let again = Committed { before: true, ..first };

    let before = t.everything().await;
    t.advance(5);
    assert_eq!(t.commit(commit.clone()).await, Ok(again), "immediately");
    t.assert_unchanged(&before, "a repeated command").await;

    let other = RunCommit { command: t.new_command(), ..commit.clone() };
    assert_eq!(t.commit(other.clone()).await, Err(Refused::Conflict { current: Some(Version(2)) }));

    // The run advances, by claims and by commits.
    let next = t.take_one().await;
    t.complete(&next, json!(2)).await;
    t.pause(run).await;
    let before = t.everything().await;
    assert_eq!(t.commit(commit.clone()).await, Ok(again), "after the run has advanced");
    assert_eq!(t.commit(other).await, Err(Refused::Conflict { current: Some(Version(4)) }));
    t.assert_unchanged(&before, "a repeated command").await;

    if t.reopen().await {
        assert_eq!(t.commit(commit).await, Ok(again), "after the store was opened again");
        t.assert_unchanged(&before, "a repeated command").await;
    }
}

pub async fn a_start_that_was_carried_out_is_answered_as_the_first_time(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let run = t.new_run();
    let mut start = t.prepare_start(&flow, run, Start::default()).await;
    start.key = Some(StartKey { flow, key: "k".to_owned(), fingerprint: [1; 32] });
    let first = t.commit(start.clone()).await.unwrap();
    assert_eq!((first.first, first.before), (1, false));
    assert_eq!(t.commit(start.clone()).await, Ok(Committed { before: true, ..first }));
    t.work_off().await;
    t.advance(1_000);
    assert_eq!(t.commit(start).await, Ok(Committed { before: true, ..first }));
}

pub async fn a_document_command_that_was_carried_out_is_answered_as_the_first_time(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    let change =
        DocumentChange { key: DocumentKey::new("thing", "a"), expect: Expect::Absent, body: Some(json!(1)), due: None };
    let commit = DocumentCommit {
        documents: vec![change],
        messages: vec![note(run, "m1")],
        events: vec![event("e1", "ping", None, json!(1))],
        ..t.nothing()
    };
    let first = t.command(Command::Documents(commit.clone())).await.unwrap();
    t.put("thing", "a", json!(2)).await;
    t.consume(run, note(run, "m1")).await;
    let before = t.everything().await;
    t.advance(7);
    let again = Ok(Committed { before: true, ..first });
    assert_eq!(t.command(Command::Documents(commit.clone())).await, again);
    t.assert_unchanged(&before, "a repeated command").await;
    if t.reopen().await {
        assert_eq!(t.command(Command::Documents(commit)).await, again);
        t.assert_unchanged(&before, "a repeated command").await;
    }
}

pub async fn a_command_that_is_submitted_by_many_at_once_is_carried_out_once(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    for round in 0..5 {
        let by = "ann".to_owned();
        let input = if round % 2 == 0 { Input::Pause { by } } else { Input::Resume { by } };
        let events = vec![event(&format!("e{round}"), "ping", None, json!(round))];
        let documents = DocumentCommit { events, ..t.nothing() };
        for command in [Command::Run(t.prepare(run, &[input]).await), Command::Documents(documents)] {
            let racing = (0..12).map(|_| {
                let (drive, command) = (t.drive.clone(), command.clone());
                tokio::spawn(async move { drive.command(command).await })
            });
            let mut answers = Vec::new();
            for racer in racing.collect::<Vec<_>>() {
                answers.push(racer.await.unwrap().unwrap());
            }
            assert_eq!(answers.iter().filter(|committed| !committed.before).count(), 1, "it is applied once");
            assert!(answers.windows(2).all(|pair| (pair[0].at, pair[0].first) == (pair[1].at, pair[1].first)));
        }
    }
    assert_eq!(t.summary(run).await.version, Version(6));
}

pub async fn a_command_that_was_refused_can_be_submitted_again(t: &mut Trial<'_>) {
    let change =
        |expect| DocumentChange { key: DocumentKey::new("thing", "a"), expect, body: Some(json!(1)), due: None };
    t.put("thing", "a", json!(0)).await;
    let commit = t.documents(vec![change(Expect::Absent)]);
    assert_eq!(word(&t.command(commit.clone()).await), "revision");
    let gone = DocumentChange { body: None, ..change(Expect::Any) };
    t.command(t.documents(vec![gone])).await.unwrap();
    let committed = t.command(commit).await.unwrap();
    assert!(!committed.before, "a refusal is not an execution");
}

pub async fn a_commit_says_when_it_was_and_where_its_records_begin(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!(null)).await;
    for _ in 0..3 {
        t.advance(1_000);
        let task = t.take_one().await;
        t.advance(1_000);
        let so_far = t.records(run).await.len() as u64;
        let commit = t.prepare(run, &[t.report_of(&task, completion(json!(1)))]).await;
        let expected = Committed { at: t.now().await, first: so_far + 1, before: false, repeats: 0 };
        assert_eq!(t.commit(commit).await, Ok(expected));
        let records = t.records(run).await;
        assert!(records[so_far as usize..].iter().all(|record| record.ts == expected.at));
    }
}

/// Messages without effect are consumed without a new version.
pub async fn a_commit_without_a_transition_uses_up_what_it_takes(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(NAP), json!(null)).await;
    t.send(vec![note(run, "m1"), note(run, "m2")]).await;
    let mut commit = t.prepare(run, &[Input::Resume { by: "ann".to_owned() }]).await;
    assert!(commit.transition.is_empty(), "a run that is not paused has nothing to resume");
    commit.takes = vec![Consumed::Message("m1".to_owned())];
    commit.messages = vec![note(run, "m3")];
    let records = t.records(run).await;
    t.commit(commit).await.unwrap();
    assert_eq!(t.summary(run).await.version, Version(1));
    assert_eq!(t.records(run).await, records);
    let left: Vec<String> = t.pending(run).await.messages.into_iter().map(|message| message.id).collect();
    assert_eq!(left, ["m2", "m3"]);
}

pub async fn runs_that_start_at_once_all_start(t: &mut Trial<'_>) {
    t.flow(ONE);
    let starts = (0..64).map(|_| {
        let drive = t.drive.clone();
        tokio::spawn(async move { drive.start("one", json!(null)).await })
    });
    let mut started = BTreeSet::new();
    for start in starts.collect::<Vec<_>>() {
        started.insert(start.await.unwrap());
    }
    let listed = t.store.runs(Some(&t.ns), &RunFilter::default(), Page::default()).await.unwrap();
    let listed: BTreeSet<RunId> = listed.into_iter().map(|summary| summary.run).collect();
    assert_eq!(listed, started);
    assert_eq!(t.take(100).await.len(), 64);
}

const CHAIN_NAME: &str = "chain";

pub fn word(answer: &std::result::Result<Committed, Refused>) -> String {
    match answer {
        Ok(Committed { before: false, .. }) => "done",
        Ok(Committed { before: true, .. }) => "before",
        Err(Refused::Conflict { .. }) => "conflict",
        Err(Refused::KeyTaken { .. }) => "key",
        Err(Refused::UniqueTaken { .. } | Refused::LineFull) => "unique",
        Err(Refused::Gone(_)) => "gone",
        Err(Refused::Revision { .. }) => "revision",
        Err(Refused::Unstorable(_)) => "unstorable",
    }
    .to_owned()
}
