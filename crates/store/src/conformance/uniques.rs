//! Unique keys: of the runs that have or wait for one, the first in line executes, and the others get their turn.

use eddyline_machine::{CodeOp, Input, Message, MessageBody, OnConflict, Op, RunId, Start, Status, Unique};
use serde_json::json;

use super::{Drive, ONE, Trial};
use crate::*;

const JOB: &str = "{name: job, code: true}";

pub async fn of_many_starts_under_one_unique_key_one_goes_on(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let mut racing = Vec::new();
    for _ in 0..24 {
        let commit = t.prepare_start(&flow, t.new_run(), under("k")).await;
        let (drive, run) = (t.drive.clone(), commit.transition.header.run);
        racing.push(tokio::spawn(async move { (run, drive.commit(commit).await) }));
    }
    let (mut winner, mut told) = (None, Vec::new());
    for racer in racing {
        match racer.await.unwrap() {
            (run, Ok(_)) => assert_eq!(winner.replace(run), None, "two have begun"),
            (_, Err(Refused::UniqueTaken { run })) => told.push(run),
            (_, Err(other)) => panic!("refused with {other:?}"),
        }
    }
    assert_eq!(told, vec![winner.expect("one has begun"); 23]);
    assert_eq!(t.store.count_runs(&t.ns, &RunFilter::default()).await.unwrap(), 1);
}

pub async fn a_unique_key_is_free_when_its_run_has_ended(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let first = started(t, &flow, under("k")).await.expect("the key is free");
    let before = t.everything().await;
    assert_eq!(started(t, &flow, under("k")).await, Err(Refused::UniqueTaken { run: first }));
    t.assert_unchanged(&before, "a start under a unique key that is taken").await;
    t.work_off().await;
    let second = started(t, &flow, under("k")).await.expect("the key is free again");
    t.cancel(second).await;
    started(t, &flow, under("k")).await.expect("and again");
}

pub async fn a_unique_key_is_of_one_flow_and_one_namespace(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let other = t.flow("{name: other, steps: {work: {}}}");
    started(t, &flow, under("k")).await.expect("free");
    started(t, &flow, under("l")).await.expect("another key is free");
    started(t, &other, under("k")).await.expect("another flow has keys of its own");
    let elsewhere = t.within("other");
    started(&elsewhere, &flow, under("k")).await.expect("and so has another namespace");
    assert!(started(&elsewhere, &flow, under("k")).await.is_err());
}

pub async fn a_run_that_ends_in_its_first_commit_leaves_its_unique_key_free(t: &mut Trial<'_>) {
    let flow = t.flow("{name: f, steps: {a: {set: 1}}}");
    let first = started(t, &flow, under("k")).await.expect("free");
    assert_eq!(t.status(first).await, Status::Completed);
    started(t, &flow, under("k")).await.expect("free again");
}

pub async fn runs_in_line_go_on_one_after_the_other(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let first = started(t, &flow, under("k")).await.expect("free");
    let mut line = vec![first];
    for _ in 0..3 {
        line.push(started(t, &flow, waiting("k")).await.expect("it waits"));
    }
    t.deliver().await;
    for run in &line {
        assert_eq!(going(t, &line).await, vec![*run], "in the order of their starts");
        assert!(t.pending(*run).await.first_in_line);
        let task = t.take_one().await;
        assert_eq!((task.run, t.take(9).await.len()), (*run, 0));
        t.complete(&task, json!(1)).await;
        t.deliver().await;
    }
    assert_eq!(going(t, &line).await, Vec::<RunId>::new());
    started(t, &flow, under("k")).await.expect("free again");
}

/// The turn is written by the commit that ends the previous run, so it survives a crash.
pub async fn a_turn_that_was_not_delivered_is_still_due(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    started(t, &flow, under("k")).await.expect("free");
    let second = started(t, &flow, waiting("k")).await.expect("it waits");
    t.work_off().await;
    assert_eq!(t.status(second).await, Status::Pending);
    assert_eq!(messages_to(t, second).await, ["turn"]);
    assert_eq!(started(t, &flow, under("k")).await, Err(Refused::UniqueTaken { run: second }), "it has the key by now");
    t.deliver().await;
    assert_eq!(t.status(second).await, Status::Running);
    assert_eq!(messages_to(t, second).await, Vec::<String>::new());
}

pub async fn a_run_that_waits_for_nobody_gets_its_turn_at_once(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let run = started(t, &flow, waiting("k")).await.expect("it waits");
    assert_eq!((t.status(run).await, messages_to(t, run).await), (Status::Pending, vec!["turn".to_owned()]));
    t.deliver().await;
    assert_eq!(t.status(run).await, Status::Running);
}

pub async fn a_run_that_ends_while_it_waits_gives_its_place_up(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let first = started(t, &flow, under("k")).await.expect("free");
    let second = started(t, &flow, waiting("k")).await.expect("it waits");
    let third = started(t, &flow, waiting("k")).await.expect("it waits");
    t.cancel(second).await;
    assert_eq!(messages_to(t, third).await, Vec::<String>::new(), "the first has not ended");
    t.cancel(first).await;
    // A run that ends before its turn is delivered passes the turn on.
    assert_eq!(messages_to(t, third).await, ["turn"]);
    let fourth = started(t, &flow, waiting("k")).await.expect("it waits");
    t.cancel(third).await;
    assert_eq!(messages_to(t, fourth).await, ["turn"]);
    t.deliver().await;
    assert_eq!(going(t, &[first, second, third, fourth]).await, [fourth]);
}

pub async fn a_run_that_replaces_others_tells_everybody_before_it(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let first = started(t, &flow, under("k")).await.expect("free");
    let second = started(t, &flow, waiting("k")).await.expect("it waits");
    let other = started(t, &flow, under("another")).await.expect("free");
    let mut commit = t.prepare_start(&flow, t.new_run(), waiting("k")).await;
    commit.tells_line = Some(Box::new(Input::Cancel { by: "ann".to_owned(), reason: None }));
    let run = commit.transition.header.run;
    t.commit(commit).await.unwrap();
    for told in [first, second] {
        assert_eq!(messages_to(t, told).await, [format!("replaced:{run}")]);
    }
    assert_eq!(messages_to(t, other).await, Vec::<String>::new());
    t.deliver().await;
    for told in [first, second] {
        assert_eq!(t.status(told).await, Status::Cancelled);
    }
    assert_eq!(going(t, &[run, other]).await, [run, other]);
}

pub async fn a_line_has_a_bound(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    started(t, &flow, under("k")).await.expect("free");
    for _ in 1..LINE_LIMIT {
        started(t, &flow, waiting("k")).await.expect("there is room");
    }
    assert_eq!(started(t, &flow, waiting("k")).await, Err(Refused::LineFull));
}

/// The process may die between the commit that ends a run and the one that begins the next.
pub async fn a_line_is_there_when_the_store_is_opened_again(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let first = started(t, &flow, under("k")).await.expect("free");
    let second = started(t, &flow, waiting("k")).await.expect("it waits");
    let third = started(t, &flow, waiting("k")).await.expect("it waits");
    if !t.reopen().await {
        return;
    }
    assert_eq!(started(t, &flow, under("k")).await, Err(Refused::UniqueTaken { run: first }));
    t.work_off().await;
    assert!(t.reopen().await);
    t.deliver().await;
    assert_eq!(going(t, &[first, second, third]).await, [second]);
    t.work_off().await;
    t.deliver().await;
    assert_eq!(going(t, &[first, second, third]).await, [third]);
}

pub async fn a_continued_run_has_the_unique_key_of_the_run_before_it(t: &mut Trial<'_>) {
    let flow = t.flow(JOB);
    let first = started(t, &flow, under("k")).await.expect("free");
    let next = continued(t, first).await;
    assert_eq!(started(t, &flow, under("k")).await, Err(Refused::UniqueTaken { run: next }), "before it is stored");
    t.deliver().await;
    assert_eq!(started(t, &flow, under("k")).await, Err(Refused::UniqueTaken { run: next }), "and after");
    t.work_off().await;
    started(t, &flow, under("k")).await.expect("free again");
}

pub async fn a_continued_run_that_never_starts_gives_its_unique_key_up(t: &mut Trial<'_>) {
    let flow = t.flow(JOB);
    let first = started(t, &flow, under("k")).await.expect("free");
    let second = started(t, &flow, waiting("k")).await.expect("it waits");
    let next = continued(t, first).await;
    assert_eq!(messages_to(t, second).await, Vec::<String>::new());
    let drops = vec![(next, "start".to_owned())];
    t.command(Command::Documents(DocumentCommit { drops, ..t.nothing() })).await.unwrap();
    assert_eq!(messages_to(t, second).await, ["turn"]);
}

/// Continues a code run; returns the new run, which is not stored before its start is delivered.
async fn continued(t: &Drive, run: RunId) -> RunId {
    let task = t.take_one().await;
    assert_eq!(task.run, run);
    let step = Op::Code { name: "a".to_owned(), op: CodeOp::Done { output: json!(1).into(), undo: false } };
    t.report(&task, step).await;
    t.report(&task, Op::ContinueAs { input: json!(2).into() }).await;
    t.summary(run).await.header.continued_as.expect("the run was continued")
}

fn under(key: &str) -> Start {
    let unique = Some(Unique { key: key.to_owned(), on_conflict: OnConflict::Queue });
    Start { unique, ..Start::default() }
}

fn waiting(key: &str) -> Start {
    Start { in_line: true, ..under(key) }
}

async fn started(t: &Drive, flow: &str, start: Start) -> std::result::Result<RunId, Refused> {
    let run = t.new_run();
    t.commit(t.prepare_start(flow, run, start).await).await.map(|_| run)
}

/// The runs that have begun and not ended.
async fn going(t: &Drive, runs: &[RunId]) -> Vec<RunId> {
    let mut going = Vec::new();
    for run in runs {
        if t.status(*run).await == Status::Running {
            going.push(*run);
        }
    }
    going
}

async fn messages_to(t: &Drive, run: RunId) -> Vec<String> {
    let messages = t.pending(run).await.messages;
    assert!(messages.iter().all(|Message { body, .. }| !matches!(body, MessageBody::Start { .. })), "{messages:?}");
    messages.into_iter().map(|message| message.id).collect()
}
