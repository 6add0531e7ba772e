//! Commits beside commits: feeds and revisions that miss nothing, locks in one order, a row that cannot be stored.

use eddyline_machine::{Data, Input, RunId};
use eddyline_store::*;
use serde_json::json;

use crate::private::{Private, TRUST};
use crate::story::put;
use crate::{Two, at_once, feed, one};

fn event(id: &str) -> NewEvent {
    NewEvent { id: id.to_owned(), name: "paid".to_owned(), key: None, payload: Data::from(json!(1)) }
}

fn events(since: Option<i64>) -> Feed {
    Feed::Events { name: None, key: None, since }
}

fn ids(items: &[FeedItem]) -> Vec<String> {
    let id = |item: &FeedItem| match &item.what {
        Fed::Event { id, .. } => id.clone(),
        Fed::Run { run, .. } => run.to_string(),
    };
    items.iter().map(id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_commits_late_comes_late_in_feeds_and_is_missed_by_nobody() {
    let mut t = Two::new().await;
    // Whoever adds the first task of a kind at the same time waits.
    t.start("line", json!("before")).await;
    let before = feed(&t.b, Feed::Runs { flow: None }, None).await[0].position;
    // A call that has written a run and an event, and waits for the lock of revisions.
    let start = t.prepare_start("line", json!("early")).await;
    let early = start.transition.header.run;
    let mut published = t.documents(Vec::new());
    published.events = vec![event("early")];
    let change = t.documents(vec![put("schedule", "a", json!(1), None)]);
    t.execute("BEGIN; SELECT 1 FROM SCHEMA.meta WHERE name = 'revision' FOR UPDATE").await;
    let store = t.a.clone();
    let commands = vec![Command::Run(start), Command::Documents(published), Command::Documents(change)];
    let committing = at_once(async move { store.commit(commands, Vec::new()).await.unwrap().commands });
    t.until_blocked(1).await;

    let begun = t.b.now().await.unwrap();
    t.clock.advance(10);
    let commit = t.prepare_start("line", json!("late")).await;
    let late = commit.transition.header.run;
    one(&t.b, Command::Run(commit)).await.unwrap();
    let mut published = t.documents(Vec::new());
    published.events = vec![event("late")];
    one(&t.b, Command::Documents(published)).await.unwrap();
    let runs = feed(&t.b, Feed::Runs { flow: None }, Some(before)).await;
    assert_eq!(ids(&runs), [late.to_string()]);
    let told = feed(&t.b, events(None), None).await;
    assert_eq!(ids(&told), ["late"]);

    t.execute("COMMIT").await;
    assert!(committing.await.unwrap().iter().all(|answer| answer.is_ok()));
    let runs = feed(&t.b, Feed::Runs { flow: None }, Some(runs[0].position)).await;
    assert_eq!(ids(&runs), [early.to_string()]);
    assert_eq!(ids(&feed(&t.b, events(None), Some(told[0].position)).await), ["early"]);
    assert_eq!(ids(&feed(&t.a, events(None), None).await), ["late", "early"], "the order stays as it was read");

    // Since a moment: by the time of the event, whatever its position.
    assert_eq!(ids(&feed(&t.a, events(Some(begun + 1)), None).await), ["late"]);
    assert_eq!(ids(&feed(&t.a, events(Some(begun)), None).await), ["late", "early"]);
    assert_eq!(ids(&feed(&t.a, events(Some(begun + 11)), None).await), Vec::<String>::new());
    t.clock.advance(10);
    let mut published = t.documents(Vec::new());
    published.events = vec![event("last")];
    one(&t.b, Command::Documents(published)).await.unwrap();
    assert_eq!(ids(&feed(&t.a, events(Some(begun + 11)), None).await), ["last"]);
    assert_eq!(ids(&feed(&t.a, events(Some(begun + 1)), None).await), ["late", "last"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_that_commits_late_has_the_later_revision() {
    let mut t = Two::new().await;
    let run = t.start("line", json!(1)).await;
    let pause = t.decide(run, Input::Pause { by: "ann".to_owned() }).await;
    let first = t.documents(vec![put("schedule", "a", json!(1), None)]);
    let second = t.documents(vec![put("schedule", "b", json!(1), None)]);
    // The first call has its revision, and waits for its run.
    t.execute("BEGIN; SELECT 1 FROM SCHEMA.runs FOR UPDATE").await;
    let store = t.a.clone();
    let commands = vec![Command::Documents(first), Command::Run(pause)];
    let committing = at_once(async move { store.commit(commands, Vec::new()).await.unwrap() });
    t.until_blocked(1).await;
    let store = t.b.clone();
    let beside = at_once(async move { one(&store, Command::Documents(second)).await });
    t.until_blocked(2).await;
    t.execute("COMMIT").await;
    committing.await.unwrap();
    beside.await.unwrap().unwrap();
    let filter = DocumentFilter { kind: "schedule".to_owned(), ..DocumentFilter::default() };
    let found = t.b.documents(None, &filter, 10).await.unwrap();
    let revisions: Vec<(&str, u64)> = found.iter().map(|found| (found.key.id.as_str(), found.revision)).collect();
    assert_eq!(revisions, [("a", 1), ("b", 2)]);
}

/// Of two processes that change the same runs, none waits for the other in a circle, whatever the order of the commands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_with_the_same_runs_in_any_order_never_deadlock() {
    // Its log tells of deadlocks, which are tried again otherwise.
    let server = Private::start(TRUST, "", None);
    let mut t = Two::on(server.url("eddy", "127.0.0.1", "schema=any_order")).await;
    let mut runs = Vec::new();
    for n in 0..12 {
        runs.push(t.start("line", json!(n)).await);
    }
    let mut won = 0;
    for round in 0..20 {
        let input = match round % 2 {
            0 => Input::Pause { by: "ann".to_owned() },
            _ => Input::Resume { by: "ann".to_owned() },
        };
        let mut commits = Vec::new();
        for run in &runs {
            commits.push(t.decide(*run, input.clone()).await);
        }
        for n in 0..12 {
            commits.push(t.prepare_start("line", json!(n)).await);
        }
        let mut committing = Vec::new();
        for n in 0..4 {
            let mut commits = commits.clone();
            match n {
                0 => commits.reverse(),
                1 => commits.rotate_left(5),
                2 => commits.rotate_right(7),
                _ => {}
            }
            for commit in &mut commits {
                commit.command = CommandId(uuid::Uuid::new_v4());
            }
            let request = t.ask(&format!("worker-{n}"), 2);
            let store = [&t.a, &t.b][n % 2].clone();
            let commands = commits.into_iter().map(Command::Run).collect();
            committing.push(at_once(async move { store.commit(commands, vec![request]).await.unwrap() }));
        }
        for committed in committing {
            let written = committed.await.unwrap();
            won += written.commands.iter().filter(|answer| answer.is_ok()).count();
        }
        assert_eq!(won, (round + 1) * 24, "of the same transitions, one of each is written");
    }
    let log = std::fs::read_to_string(server.dir.join("log")).unwrap();
    assert!(!log.contains("deadlock detected"), "{log}");
}

/// A batch with a row that PostgreSQL does not take: the others are written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_command_that_cannot_be_stored_sinks_no_other() {
    let mut t = Two::new().await;
    t.execute(
        "CREATE FUNCTION SCHEMA.poison() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             RAISE EXCEPTION 'value out of range' USING ERRCODE = '22003'; END $$; \
         CREATE TRIGGER poison BEFORE INSERT ON SCHEMA.runs FOR EACH ROW WHEN (NEW.header LIKE '%poisoned%') \
             EXECUTE FUNCTION SCHEMA.poison()",
    )
    .await;
    let mut commits = Vec::new();
    for n in 0..21 {
        let id = if n == 13 { "poisoned" } else { "good" };
        let start = eddyline_machine::Start {
            input: Some(json!(n).into()),
            external_id: Some(id.to_owned()),
            ..eddyline_machine::Start::default()
        };
        let run = crate::run_id(t.number());
        let input = Input::Start(Box::new(start));
        commits.push(t.decider.decide(&*t.a, run, Some("line"), &[input]).await);
    }
    let runs: Vec<RunId> = commits.iter().map(|commit| commit.transition.header.run).collect();
    let request = t.ask("ann", 5);
    let commands: Vec<Command> = commits.iter().cloned().map(Command::Run).collect();
    let written = t.a.commit(commands, vec![request]).await.unwrap();
    for (at, answer) in written.commands.iter().enumerate() {
        match answer {
            Ok(committed) => assert!(at != 13 && !committed.before),
            Err(Refused::Unstorable(why)) => assert!(at == 13 && why.contains("value out of range"), "{why}"),
            other => panic!("{at}: {other:?}"),
        }
    }
    assert_eq!(written.claims[0].tasks.len(), 5);
    for (at, run) in runs.iter().enumerate() {
        assert_eq!(t.b.summary(*run).await.unwrap().is_some(), at != 13);
    }
    // Alone it is refused too, and the claims of its call are made.
    let request = t.ask("ann", 2);
    let written = t.b.commit(vec![Command::Run(commits[13].clone())], vec![request]).await.unwrap();
    assert!(matches!(written.commands[0], Err(Refused::Unstorable(_))));
    assert_eq!(written.claims[0].tasks.len(), 2);
}

/// A transaction holds its locks until all of it is written, so it is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_large_is_written_in_several_transactions() {
    let mut t = Two::new().await;
    let (large, small) = ("x".repeat(3 << 20), "x");
    let mut commands = Vec::new();
    for text in [small, &large, small, &large, &large, small, small] {
        commands.push(Command::Run(t.prepare_start("line", json!(text)).await));
    }
    let request = t.ask("ann", 9);
    let written = t.a.commit(commands, vec![request]).await.unwrap();
    assert!(written.commands.iter().all(|answer| answer.is_ok()));
    assert_eq!(written.claims[0].tasks.len(), 7, "claims come after all of them");
    let transactions = "SELECT count(DISTINCT xmin::text) FROM SCHEMA.\"values\"";
    assert_eq!(t.number_of(transactions).await, 3, "small and large, large, large and small");

    t.execute("TRUNCATE SCHEMA.\"values\"").await;
    let mut commands = Vec::new();
    for n in 0..900 {
        commands.push(Command::Run(t.prepare_start("line", json!(n)).await));
    }
    assert!(t.a.commit(commands, Vec::new()).await.unwrap().commands.iter().all(|answer| answer.is_ok()));
    let rows = "SELECT max(n) FROM (SELECT count(*) AS n FROM SCHEMA.activations GROUP BY xmin::text) x";
    assert!(t.number_of(rows).await <= 2_000);
    let transactions = "SELECT count(DISTINCT xmin::text) FROM SCHEMA.activations";
    assert!(t.number_of(transactions).await >= 2);
}
