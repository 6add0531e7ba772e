//! Claims: each task goes to one worker that can execute it, with its lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::{Claim, CodeOp, Entry, Op, TaskKind};
use serde_json::json;

use super::drive::{completion, names_of, runs_of};
use super::{ONE, Trial};
use crate::*;

pub async fn a_task_is_claimed_at_most_once_by_many_at_once(t: &mut Trial<'_>) {
    t.flow(ONE);
    let runs = t.start_all("one", (0..500).map(|n| json!(n))).await;
    let mut claimers = Vec::new();
    for at in 0..32 {
        let drive = t.drive.clone();
        claimers.push(tokio::spawn(async move {
            let mut got = Vec::new();
            loop {
                let worker = format!("w{at}");
                let tasks = drive.claim(ClaimRequest { worker, max: 1 + at % 7, ..drive.ask() }).await.tasks;
                if tasks.is_empty() {
                    return got;
                }
                got.extend(tasks);
            }
        }));
    }
    let mut got = Vec::new();
    for claimer in claimers {
        got.extend(claimer.await.unwrap());
    }
    assert_eq!(got.len(), 500);
    let distinct: BTreeSet<_> = got.iter().map(|claimed| (claimed.run, claimed.task.fence)).collect();
    assert_eq!(distinct.len(), 500, "nothing is claimed twice");
    assert_eq!(distinct.iter().map(|(run, _)| *run).collect::<BTreeSet<_>>(), runs.into_iter().collect());
    for claimed in got.iter().step_by(50) {
        let held = t.pending(claimed.run).await.tasks.remove(0).held.expect("it is held");
        assert_eq!(held, claimed.held, "the stored claim equals the one returned");
        let started = t.records(claimed.run).await.into_iter().filter(|record| {
            matches!(&record.record.entry, Entry::AttemptStarted { worker, .. } if *worker == Some(held.worker.clone()))
        });
        assert_eq!(started.count(), 1);
    }
}

pub async fn a_claim_gets_no_more_than_it_asks_for(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..5).map(|n| json!(n))).await;
    assert_eq!(t.take(0).await.len(), 0);
    assert_eq!(t.take(2).await.len(), 2);
    assert_eq!(t.take(9).await.len(), 3);
    assert_eq!(t.take(9).await.len(), 0);
}

pub async fn a_worker_never_has_more_tasks_than_it_may(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..9).map(|n| json!(n))).await;
    let (ns, ann) = (t.ns.clone(), "ann".to_owned());
    let ask = |max: usize| ClaimRequest { worker: ann.clone(), max, most_held: Some(3), ..t.ask() };
    let first = t.claim(ask(2)).await;
    assert_eq!((first.tasks.len(), first.full), (2, false), "there is room for one more");
    // Two claims in one commit share the limit.
    let written = t.store.commit(Vec::new(), vec![ask(5), ask(5)]).await.unwrap();
    let got: Vec<_> = written.claims.iter().map(|claims| (claims.tasks.len(), claims.full)).collect();
    assert_eq!(got, [(1, true), (0, true)]);
    assert_eq!((t.store.held_by(&ns, "ann").await.unwrap(), t.store.held_by(&ns, "w").await.unwrap()), (3, 0));
    let again = t.claim(ClaimRequest { request: first.tasks[0].held.request, ..ask(2) }).await;
    assert_eq!((again.tasks.len(), again.full), (2, false), "a repeated claim gets the same tasks");
    // The limit of one worker does not affect others.
    assert_eq!(t.claim(ClaimRequest { max: 2, most_held: Some(2), ..t.ask() }).await.tasks.len(), 2);
    let elsewhere = Namespace::new("other");
    assert_eq!(t.store.held_by(&elsewhere, "ann").await.unwrap(), 0);
    t.complete(&first.tasks[0], json!(1)).await;
    let next = t.claim(ask(5)).await;
    assert_eq!((next.tasks.len(), next.full), (1, true), "a finished task makes room");
    let unbounded = t.claim(ClaimRequest { most_held: None, ..ask(2) }).await;
    assert_eq!((unbounded.tasks.len(), unbounded.full), (2, false));
    assert_eq!(t.store.held_by(&ns, "ann").await.unwrap(), 5);
}

pub async fn a_claim_gets_tasks_of_its_queues_only(t: &mut Trial<'_>) {
    t.flow("{name: queues, steps: {a: {queue: red}, b: {queue: green}, c: {queue: blue}, d: {}}}");
    t.start("queues", json!(null)).await;
    let of = |queues: &[&str]| ClaimRequest { queues: queues.iter().map(|name| name.to_string()).collect(), ..t.ask() };
    assert_eq!(names_of(&t.claim(of(&[])).await.tasks), Vec::<&str>::new());
    assert_eq!(names_of(&t.claim(of(&["yellow"])).await.tasks), Vec::<&str>::new());
    assert_eq!(names_of(&t.claim(of(&["green"])).await.tasks), ["b"]);
    let rest = t.claim(of(&["blue", "red", "green"])).await.tasks;
    assert_eq!(names_of(&rest).into_iter().collect::<BTreeSet<_>>(), BTreeSet::from(["a", "c"]));
    assert_eq!(names_of(&t.claim(of(&["default"])).await.tasks), ["d"]);
}

pub async fn a_worker_is_offered_what_it_can_do(t: &mut Trial<'_>) {
    t.flow("{name: mixed, steps: {a: {run: pay}, b: {run: mail}, c: {run: pay, requires: [gpu, eu]}}}");
    t.flow("{name: job, code: true}");
    t.flow("{name: pay, code: true}");
    t.start("mixed", json!(null)).await;
    t.start("job", json!(null)).await;
    t.start("pay", json!(null)).await;
    let offer = |handlers: &[&str], flows: &[&str], labels: &[&str]| Offer {
        handlers: handlers.iter().map(|name| name.to_string()).collect(),
        flows: flows.iter().map(|name| (name.to_string(), None)).collect(),
        labels: labels.iter().map(|name| name.to_string()).collect(),
        build: None,
    };
    let claim = async |offer: Offer| t.claim(ClaimRequest { offer: Arc::new(offer), ..t.ask() }).await.tasks;
    assert!(claim(offer(&["ship"], &["ship"], &["gpu", "eu"])).await.is_empty());
    assert!(claim(offer(&["job"], &["mail"], &[])).await.is_empty(), "a handler is no flow, and a flow no handler");
    assert_eq!(names_of(&claim(offer(&["pay"], &[], &["gpu"])).await), ["a"], "c requires both labels");
    let code = claim(offer(&[], &["pay"], &[])).await;
    assert_eq!((code[0].flow.as_str(), code[0].task.kind, code.len()), ("pay", TaskKind::Run, 1));
    assert_eq!(names_of(&claim(offer(&["pay"], &[], &["gpu", "eu", "more"])).await), ["c"]);
    let rest = claim(offer(&[], &[], &[])).await;
    assert_eq!(names_of(&rest).into_iter().collect::<BTreeSet<_>>(), BTreeSet::from(["@run", "b"]));
}

pub async fn a_pinned_run_goes_to_its_build_only(t: &mut Trial<'_>) {
    t.flow("{name: pinned, code: true, builds: pinned}");
    t.flow("{name: latest, code: true}");
    let runs = [t.start("pinned", json!(null)).await, t.start("latest", json!(null)).await];
    let with = |build: &str, of_flow: Option<&str>| {
        let flows = ["pinned", "latest"].map(|flow| (flow.to_owned(), of_flow.map(str::to_owned)));
        let offer = Offer { flows: BTreeMap::from(flows), build: Some(build.to_owned()), ..Offer::default() };
        ClaimRequest { offer: Arc::new(offer), ..t.ask() }
    };
    let first = t.claim(with("worker-1", Some("b1"))).await.tasks;
    assert_eq!(runs_of(&first), runs);
    for claimed in &first {
        assert_eq!(claimed.held.claim, Claim { build: Some("b1".to_owned()), memo: 0 }, "the flow's build wins");
        let sleep = CodeOp::Sleep { due: eddyline_machine::Due::After(0) };
        t.report(claimed, Op::Code { name: "nap".to_owned(), op: sleep }).await;
        t.report(claimed, Op::Suspend { seen: Some(9) }).await;
    }
    t.advance(1);
    for item in t.due(Due::Timers, 10).await.items {
        let DueItem::Timer { run, timer, .. } = item else { panic!("a timer") };
        let takes = [Consumed::Timer(timer.key, timer.due)];
        t.submit_taking(run, &[eddyline_machine::Input::Due(timer.key)], &takes).await.unwrap();
    }
    let waiting = t.queue("default").await.ready;
    let other = t.claim(with("worker-2", Some("b2"))).await.tasks;
    assert_eq!(runs_of(&other), runs[1..], "only the run that is not pinned");
    assert_eq!(other[0].held.claim.build.as_deref(), Some("b2"));
    let own = t.claim(with("b1", None)).await.tasks;
    assert_eq!(runs_of(&own), runs[..1], "a worker's build counts where its flow has none");
    assert_eq!(waiting, 2);
}

pub async fn a_claim_says_how_the_worker_has_the_task(t: &mut Trial<'_>) {
    t.flow("{name: timed, steps: {work: {timeout: 45s}, free: {}}}");
    let run = t.start("timed", json!({"n": 1})).await;
    t.advance(5_000);
    let now = t.now().await;
    let offer = Arc::new(Offer { build: Some("b7".to_owned()), ..Offer::default() });
    let request = ClaimRequest { worker: "ann".to_owned(), lease_ms: 12_000, offer, ..t.ask() };
    let id = request.request;
    let mut claimed = t.claim(request).await.tasks;
    claimed.sort_by(|a, b| b.task.name.cmp(&a.task.name));
    let held = Held {
        worker: "ann".to_owned(),
        request: id,
        since: now,
        lease_ms: 12_000,
        lease_until: now + 12_000,
        deadline: Some(now + 45_000),
        claim: Claim { build: Some("b7".to_owned()), memo: 0 },
    };
    assert_eq!(claimed[0].held, held);
    assert_eq!(claimed[1].held, Held { deadline: None, ..held.clone() });
    assert_eq!((&claimed[0].ns, claimed[0].run, claimed[0].flow.as_str()), (&t.ns, run, "timed"));
    assert_eq!(claimed[0].task.input, json!({"n": 1}).into());
    for row in t.pending(run).await.tasks {
        let told = claimed.iter().find(|claimed| claimed.task.fence == row.task.fence).expect("its claim");
        assert_eq!((&row.task, row.held.as_ref(), row.closed), (&*told.task, Some(&told.held), false));
        assert_eq!(row.queued_at, now - 5_000);
    }
}

pub async fn a_claim_of_a_code_run_says_how_new_the_memo_is(t: &mut Trial<'_>) {
    t.flow("{name: job, code: true, retry: {attempts: 3, initial: 0}}");
    let run = t.start("job", json!(null)).await;
    let first = t.take_one().await;
    assert_eq!(first.held.claim.memo, 0);
    for name in ["pay", "mail"] {
        t.report(&first, Op::Code { name: name.to_owned(), op: CodeOp::Done { output: json!(1).into(), undo: false } })
            .await;
    }
    let error = eddyline_machine::Failure::new("Boom", "it broke");
    t.report(&first, Op::Fail { error, retryable: true, retry_after_ms: None }).await;
    let memo = t.summary(run).await.header.code.expect("a code run").n;
    assert!(memo > 0);
    assert_eq!(t.take_one().await.held.claim.memo, memo);
}

pub async fn a_claim_is_recorded_with_its_worker(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    let before = t.records(run).await.len() as u64;
    t.advance(77);
    let now = t.now().await;
    let version = t.summary(run).await.version;
    let claimed = t.claim(ClaimRequest { worker: "ann".to_owned(), ..t.ask() }).await.tasks.remove(0);
    let records = t.records(run).await;
    let last = records.last().expect("a record");
    assert_eq!((last.n, last.ts), (before + 1, now));
    assert_eq!(last.record, claimed.task.started(Some("ann".to_owned())));
    let summary = t.summary(run).await;
    assert_eq!(summary.records, before + 1);
    assert_eq!(summary.version, version, "a claim does not change the version");
    t.complete(&claimed, json!(1)).await;
}

pub async fn a_claim_sees_what_the_commands_of_its_call_added(t: &mut Trial<'_>) {
    t.flow(super::CHAIN);
    let run = t.start("chain", json!(null)).await;
    let first = t.take_one().await;
    let commit = t.prepare(run, &[t.report_of(&first, completion(json!(1)))]).await;
    let requests = vec![ClaimRequest { max: 1, ..t.ask() }, ClaimRequest { max: 1, ..t.ask() }];
    let written = t.store.commit(vec![Command::Run(commit)], requests).await.unwrap();
    assert_eq!(names_of(&written.claims[0].tasks), ["b"]);
    assert!(written.claims[1].tasks.is_empty(), "claims of a call are granted in order");
    let records = t.records(run).await;
    assert!(records.iter().zip(1..).all(|(record, n)| record.n == n));
    assert!(matches!(records.last().unwrap().record.entry, Entry::AttemptStarted { .. }));
}

pub async fn a_claim_repeated_gets_the_same_tasks_and_no_more(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..6).map(|n| json!(n))).await;
    let request = ClaimRequest { max: 3, ..t.ask() };
    let first = t.claim(request.clone()).await.tasks;
    assert_eq!(first.len(), 3);
    let before = t.everything().await;
    t.advance(10);
    let mut again = t.claim(request.clone()).await.tasks;
    again.sort_by_key(|claimed| claimed.run);
    let mut expected = first.clone();
    expected.sort_by_key(|claimed| claimed.run);
    assert_eq!(again, expected, "with the same leases");
    t.assert_unchanged(&before, "a repeated claim").await;

    let stranger = ClaimRequest { worker: "someone else".to_owned(), ..request.clone() };
    let got = t.claim(stranger).await.tasks;
    assert!(got.iter().all(|claimed| !first.iter().any(|own| own.run == claimed.run)), "of another worker's claim");

    t.complete(&first[1], json!(null)).await;
    let mut rest = runs_of(&t.claim(request.clone()).await.tasks);
    rest.sort();
    let mut held = vec![first[0].run, first[2].run];
    held.sort();
    assert_eq!(rest, held, "only what is still held");
    if t.reopen().await {
        let mut again = runs_of(&t.claim(request).await.tasks);
        again.sort();
        assert_eq!(again, held, "after the store was opened again");
    }
}

pub async fn a_claim_repeated_from_another_namespace_gets_nothing_of_it(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    let request = t.ask();
    assert_eq!(t.claim(request.clone()).await.tasks.len(), 1);
    let foreign = ClaimRequest { ns: Namespace::new("other"), ..request };
    assert!(t.claim(foreign).await.tasks.is_empty(), "another tenant got the task");
}

pub async fn of_a_claim_that_is_repeated_at_once_all_get_the_same(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start_all("one", (0..50).map(|n| json!(n))).await;
    let request = ClaimRequest { max: 5, ..t.ask() };
    let claims = (0..16).map(|_| {
        let (drive, request) = (t.drive.clone(), request.clone());
        tokio::spawn(async move {
            let tasks = drive.claim(request).await.tasks;
            tasks.into_iter().map(|claimed| claimed.run).collect::<BTreeSet<_>>()
        })
    });
    let mut answers = BTreeSet::new();
    for claim in claims.collect::<Vec<_>>() {
        answers.insert(claim.await.unwrap());
    }
    assert_eq!(answers.len(), 1, "all callers got the same tasks");
    assert_eq!(t.queue("default").await.claimed, 5);
}

pub async fn a_queue_says_how_it_is(t: &mut Trial<'_>) {
    t.flow(ONE);
    let began = t.now().await;
    let runs = t.start_all("one", (0..2).map(|n| json!(n))).await;
    t.advance(1_000);
    let late = t.start("one", json!(null)).await;
    let state = |ready, claimed, oldest| QueueState { name: "default".to_owned(), ready, claimed, oldest };
    assert_eq!(t.queue("default").await, state(3, 0, Some(began)));
    let claimed = t.take(2).await;
    assert_eq!(t.queue("default").await, state(1, 2, Some(began + 1_000)));
    t.complete(&claimed[0], json!(null)).await;
    assert_eq!(t.queue("default").await, state(1, 1, Some(began + 1_000)));
    t.pause(late).await;
    assert_eq!(t.queue("default").await, state(0, 1, None), "tasks that are not offered do not count as ready");
    t.cancel(runs[1]).await;
    assert_eq!(t.queue("default").await, state(0, 0, None));
}
