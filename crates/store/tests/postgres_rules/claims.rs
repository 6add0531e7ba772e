//! Claims beside claims: nobody stalls, no bound is passed, no task is passed by.

use std::time::Duration;

use eddyline_machine::{Input, RunId, Start};
use eddyline_store::*;
use serde_json::json;

use crate::{Two, at_once, claims, one};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_task_is_claimed_at_once_only_if_nothing_is_before_it() {
    let mut t = Two::new().await;
    let older = t.start("line", json!(1)).await;
    let commit = t.prepare_start("line", json!(2)).await;
    let new = commit.transition.header.run;
    let request = t.ask("ann", 1);
    let written = t.b.commit(vec![Command::Run(commit)], vec![request]).await.unwrap();
    assert_eq!(written.claims[0].tasks[0].run, older, "the older task comes first, though another process added it");
    let request = t.ask("ann", 5);
    assert_eq!(claims(&t.b, request).await.tasks[0].run, new);

    let commit = t.prepare_start("line", json!(3)).await;
    let new = commit.transition.header.run;
    let request = t.ask("ann", 5);
    let written = t.b.commit(vec![Command::Run(commit)], vec![request]).await.unwrap();
    assert_eq!(written.claims[0].tasks.iter().map(|claimed| claimed.run).collect::<Vec<_>>(), [new]);
    let numbers: Vec<u64> = t.a.records(new, 0, 100).await.unwrap().iter().map(|record| record.n).collect();
    assert_eq!(numbers, [1, 2, 3], "the start, the step, and its attempt");
    let started = format!("SELECT count(*) FROM SCHEMA.records WHERE run = '{new}' AND command IS NULL AND first = 3");
    assert_eq!(t.number_of(&started).await, 1, "the start of the attempt is a row of its own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_that_another_process_made_bind_the_tasks_of_a_commit() {
    let mut t = Two::new().await;
    let start = async |t: &mut Two, max: usize| {
        let mut commands = Vec::new();
        for n in 0..4 {
            commands.push(Command::Run(t.prepare_start("line", json!(n)).await));
        }
        let request = t.ask("ann", max);
        t.b.commit(commands, vec![request]).await.unwrap().claims.remove(0).tasks.len()
    };
    assert_eq!(start(&mut t, 3).await, 3, "the other process knows the queue without rules");
    t.rule(kind::QUEUE, "default", json!({"concurrency": 4})).await;
    assert_eq!(start(&mut t, 9).await, 1);
    t.rule(kind::QUEUE, "default", json!({"paused": true})).await;
    assert_eq!(start(&mut t, 9).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_a_claim_that_is_still_open_others_are_told_to_come_again_and_paused_tasks_hide_none() {
    let mut t = Two::new().await;
    let mut runs = Vec::new();
    for n in 0..60 {
        runs.push(t.start("line", json!(n)).await);
    }
    // Far more than a claim looks at.
    for run in &runs[..40] {
        let pause = t.decide(*run, Input::Pause { by: "ann".to_owned() }).await;
        one(&t.a, Command::Run(pause)).await.unwrap();
    }
    let request = t.ask("ann", 4);
    let got: Vec<RunId> = claims(&t.a, request).await.tasks.iter().map(|claimed| claimed.run).collect();
    assert_eq!(got, runs[40..44]);

    let first = runs[44..54].iter().map(|run| format!("'{run}'")).collect::<Vec<_>>().join(", ");
    t.execute(&format!("BEGIN; SELECT 1 FROM SCHEMA.tasks WHERE run IN ({first}) FOR UPDATE")).await;
    let request = t.ask("bob", 4);
    let beside = claims(&t.b, request).await;
    let now = t.b.now().await.unwrap();
    assert!(beside.tasks.is_empty());
    assert!(beside.retry_at.is_some_and(|at| at <= now + 10), "{beside:?}: there are more, in a moment");
    let request = t.ask("bob", 16);
    let beside: Vec<RunId> = claims(&t.b, request).await.tasks.iter().map(|claimed| claimed.run).collect();
    assert_eq!(beside, runs[54..60], "what it looks at behind the locked ones is given out");
    t.execute("COMMIT").await;
    let request = t.ask("bob", 4);
    assert_eq!(claims(&t.b, request).await.tasks.len(), 4);
}

const XY: &str = "{name: xy, steps: {a: {limits: [x, y], queue: one}}}";
const YX: &str = "{name: yx, steps: {a: {limits: [y, x, {z: '${input}'}], queue: two}}}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_queues_share_hold_between_processes_and_claims_of_them_never_deadlock() {
    let mut t = Two::new().await;
    for flow in [XY, YX] {
        t.flow(flow);
    }
    for (kind, id) in [(kind::LIMIT, "x"), (kind::LIMIT, "y"), (kind::QUEUE, "one"), (kind::QUEUE, "two")] {
        t.rule(kind, id, json!({"concurrency": if id == "x" { 3 } else { 5 }})).await;
    }
    for n in 0..20 {
        t.start("xy", json!(n)).await;
        t.start("yx", json!(n)).await;
    }
    assert_eq!(t.number_of("SELECT count(*) FROM SCHEMA.classes").await, 2, "keys of limits make no classes");
    for round in 0..10 {
        let asking: Vec<_> = (0..6)
            .map(|n| {
                let queues = if n % 3 == 0 { ["one", "two"] } else { ["two", "one"] };
                let queues = queues.map(str::to_owned).to_vec();
                let requests: Vec<_> = (0..2)
                    .map(|_| ClaimRequest { queues: queues.clone(), ..t.ask(&format!("w{round}-{n}"), 2) })
                    .collect();
                let store = [&t.a, &t.b][n % 2].clone();
                at_once(async move { store.commit(Vec::new(), requests).await.unwrap().claims })
            })
            .collect();
        let mut tasks = Vec::new();
        for asked in asking {
            tasks.extend(asked.await.unwrap().into_iter().flat_map(|claims| claims.tasks));
        }
        assert!((1..=3).contains(&tasks.len()), "{} tasks pass a limit of 3", tasks.len());
        assert_eq!(t.number_of("SELECT count(*) FROM SCHEMA.passing WHERE \"limit\" = 'x'").await, tasks.len() as i64);
        for task in &tasks {
            let done = t.complete(task).await;
            one(&t.b, Command::Run(done)).await.unwrap();
        }
    }
    assert_eq!(t.number_of("SELECT count(*) FROM SCHEMA.passing").await, 0);
}

/// Ranks below which a process looks only once a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_come_back_before_others_are_found_within_a_second() {
    let mut t = Two::in_real_time().await;
    let old = t.start("line", json!("old")).await;
    let pause = t.decide(old, Input::Pause { by: "ann".to_owned() }).await;
    one(&t.a, Command::Run(pause)).await.unwrap();
    // As if it had been queued long ago.
    t.execute("UPDATE SCHEMA.tasks SET rank = rank - 1000000").await;
    for n in 0..30 {
        t.start("line", json!(n)).await;
    }
    let claim_one = async |t: &mut Two| {
        let request = t.ask("bob", 1);
        claims(&t.b, request).await.tasks.into_iter().map(|claimed| claimed.run).next()
    };
    // The other process learns where the queue begins.
    for _ in 0..3 {
        assert_ne!(claim_one(&mut t).await, Some(old));
    }
    let resume = t.decide(old, Input::Resume { by: "ann".to_owned() }).await;
    one(&t.a, Command::Run(resume)).await.unwrap();
    let resumed = std::time::Instant::now();
    let mut passed = 0;
    while claim_one(&mut t).await != Some(old) {
        passed += 1;
        assert!(resumed.elapsed() < Duration::from_millis(1_500) && passed < 25, "{passed} others were given out");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // A higher priority has marks of its own.
    let start = Start { input: Some(json!(1).into()), priority: 9, ..Start::default() };
    let urgent = t.start_with("line", start).await;
    assert_eq!(claim_one(&mut t).await, Some(urgent));
}

/// Of an empty queue, nobody is told that it is empty while there is something in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_answer_is_never_due_to_what_a_process_remembers() {
    let mut t = Two::in_real_time().await;
    let run = t.start("line", json!(0)).await;
    let request = t.ask("bob", 1);
    assert_eq!(claims(&t.b, request).await.tasks[0].run, run);
    let run = t.start("line", json!(1)).await;
    t.execute(&format!("UPDATE SCHEMA.tasks SET rank = rank - 1000000 WHERE run = '{run}'")).await;
    let begun = std::time::Instant::now();
    loop {
        let request = t.ask("bob", 1);
        if claims(&t.b, request).await.tasks.iter().any(|claimed| claimed.run == run) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_millis(1_500), "it is not found");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_a_run_are_with_one_process_at_a_time() {
    let mut t = Two::new().await;
    let message = |to: u128, id: &str| eddyline_machine::Message {
        to: crate::run_id(to),
        id: id.to_owned(),
        body: eddyline_machine::MessageBody::Input(Box::new(Input::Continue)),
    };
    let mut commit = t.documents(Vec::new());
    commit.messages = (0..40).flat_map(|to| ["a", "b", "c"].map(|id| message(to, id))).collect();
    one(&t.a, Command::Documents(commit)).await.unwrap();
    let asking: Vec<_> = (0..8)
        .map(|n| {
            let store = [&t.a, &t.b][n % 2].clone();
            at_once(async move { store.due(Due::Messages, &[], 10).await.unwrap().items })
        })
        .collect();
    let mut targets = Vec::new();
    for asked in asking {
        for item in asked.await.unwrap() {
            let DueItem::Messages { to, messages, .. } = item else { panic!("{item:?}") };
            assert_eq!(messages.iter().map(|message| message.id.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
            targets.push(to);
        }
    }
    let rest = t.a.due(Due::Messages, &[], 100).await.unwrap().items;
    targets.extend(rest.into_iter().map(|item| match item {
        DueItem::Messages { to, .. } => to,
        other => panic!("{other:?}"),
    }));
    targets.sort();
    assert_eq!(targets, (0..40).map(crate::run_id).collect::<Vec<_>>(), "each once");

    // One that comes now waits for those that are being delivered, whoever delivers them.
    let mut commit = t.documents(Vec::new());
    commit.messages = vec![message(7, "d")];
    one(&t.b, Command::Documents(commit)).await.unwrap();
    assert!(t.b.due(Due::Messages, &[], 100).await.unwrap().items.is_empty());
    let mut commit = t.documents(Vec::new());
    commit.drops = ["a", "b", "c"].map(|id| (crate::run_id(7), id.to_owned())).to_vec();
    one(&t.a, Command::Documents(commit)).await.unwrap();
    let items = t.b.due(Due::Messages, &[], 100).await.unwrap().items;
    let [DueItem::Messages { messages, .. }] = items.as_slice() else { panic!("{items:?}") };
    assert_eq!(messages[0].id, "d");
}
