//! Stories of code runs: what a new attempt forgets, in which order a retry remembers, and how a run unwinds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_machine::run::RunOutcome;
use eddyline_machine::*;
use model::Trial;
use serde_json::json;

const CODE: &str = "{name: job, code: true, step_retry: {attempts: 2, initial: 1s}, retry: {attempts: 2, initial: 1s}}";

type Held = (RunId, Task);

fn code(t: &mut Trial, task: &Held, name: &str, op: CodeOp) -> Answer {
    t.say(task.0, &task.1, Op::Code { name: name.to_owned(), op })
}

fn done(undo: bool) -> CodeOp {
    CodeOp::Done { output: json!(1).into(), undo }
}

fn call() -> CodeOp {
    CodeOp::Call { handler: "h".into(), input: json!(1).into(), queue: None, options: None }
}

fn broken(retryable: bool) -> CodeOp {
    CodeOp::Failed { error: Failure::new("Boom", "x"), retryable, retry_after_ms: None, retry: None }
}

fn fail(t: &mut Trial, task: &Held) -> Answer {
    t.say(task.0, &task.1, Op::Fail { error: Failure::new("Boom", "the end"), retryable: true, retry_after_ms: None })
}

fn unwind(t: &mut Trial, task: &Held) -> Answer {
    t.say(task.0, &task.1, Op::Unwind { error: Failure::new("Boom", "for good") })
}

fn lose(t: &mut Trial, task: &Held) -> Answer {
    let claim = t.kept().tasks[&task.1.fence].claim.clone();
    let task = TaskRef { activation: task.1.activation, fence: task.1.fence };
    t.send(Input::Expired { task, why: Expiry::LeaseLost, claim })
}

fn names(t: &Trial) -> Vec<String> {
    let mut entries: Vec<_> = t.kept().run.memo(0).map(|entry| (entry.n, entry.name.to_owned())).collect();
    entries.sort();
    entries.into_iter().map(|(_, name)| name).collect()
}

fn also(t: &Trial) -> Vec<(String, String)> {
    let failures = match t.model.header(t.run).outcome.as_ref().unwrap() {
        RunOutcome::Completed(_) => Vec::new(),
        RunOutcome::Failed(failure) => failure.also.clone(),
        RunOutcome::Cancelled(also) => also.clone(),
    };
    failures.into_iter().map(|failure| (failure.step.unwrap_or_default(), failure.kind)).collect()
}

#[test]
fn an_attempt_forgets_what_had_failed_before_it_and_hears_of_what_fails_later() {
    let mut t = Trial::new(CODE.replace("attempts: 2, initial: 1s}}", "attempts: 3, initial: 1s}}").as_str(), json!(1));
    let first = t.claim("@run");
    for name in ["early", "late"] {
        code(&mut t, &first, name, call());
    }
    t.fail("early", "no");
    fail(&mut t, &first);
    t.tick();
    let second = t.claim("@run");
    assert_eq!((second.1.attempt, names(&t)), (2, vec!["late".to_owned()]));
    t.fail("late", "no");
    assert_eq!(names(&t), ["late"], "it was pending when the attempt began");
    assert!(t.kept().run.memo(0).next().unwrap().news);
    // Asked again under its name: another activation, whose task has the name of the first.
    code(&mut t, &second, "early", call());
    assert_eq!(t.claim("early~2").1.step, "early");
    fail(&mut t, &second);
    t.tick();
    t.claim("@run");
    assert_eq!(names(&t), ["early"], "what failed in attempt 2 is forgotten by attempt 3, what is pending is not");
}

#[test]
fn a_retry_takes_entries_over_in_the_order_of_their_numbers() {
    let mut t = Trial::new(CODE, json!(1));
    let driver = t.claim("@run");
    for name in ["z", "a", "m"] {
        code(&mut t, &driver, name, done(name == "m"));
    }
    t.say(driver.0, &driver.1, Op::Fail { error: Failure::new("B", "x"), retryable: false, retry_after_ms: None });
    assert_eq!(also(&t), [("m".to_owned(), "NotUndone".to_owned())]);
    let start = t.model.again(t.run, decide::retry(&t.kept().flow, &t.kept().run));
    t.run = t.model.start("job", start);
    assert_eq!(names(&t), ["z", "a", "m"]);
    assert_eq!(t.kept().run.memo(0).filter(|entry| entry.undo).count(), 1);
}

#[test]
fn letting_go_ends_calls_sleeps_and_back_offs_and_is_no_news() {
    let mut t = Trial::new(CODE, json!(1));
    let driver = t.claim("@run");
    code(&mut t, &driver, "call", call());
    code(&mut t, &driver, "nap", CodeOp::Sleep { due: Due::After(500) });
    code(&mut t, &driver, "flaky", broken(true));
    let called = t.claim("call");
    let news = t.model.header(t.run).code.as_ref().unwrap().news;
    for name in ["call", "nap", "flaky"] {
        let let_go = Op::LetGo { name: name.to_owned() };
        assert!(matches!(t.say(driver.0, &driver.1, let_go.clone()), Answer::Applied(_)), "{name}");
        assert!(matches!(t.say(driver.0, &driver.1, let_go), Answer::Duplicate(_)), "{name} twice");
        assert_eq!(t.step(name), "cancelled");
    }
    assert_eq!(t.model.header(t.run).code.as_ref().unwrap().news, news);
    assert_eq!(t.complete_claimed(called.0, &called.1, json!(1)), Answer::Stale);
    assert!(t.kept().timers.is_empty(), "its timers are gone");
    assert!(matches!(t.say(driver.0, &driver.1, Op::Suspend { seen: None }), Answer::Invalid(_)));
}

#[test]
fn the_last_attempt_that_is_lost_leaves_its_undo_to_the_next_worker() {
    let flow = "{name: job, code: true, retry: {attempts: 1}}";
    let mut t = Trial::new(flow, json!(1));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(true));
    assert!(matches!(lose(&mut t, &driver), Answer::Applied(_)));
    // The memo had grown, so this attempt goes on; the next loss is the last.
    let driver = t.claim("@run");
    lose(&mut t, &driver);
    assert_eq!(t.status(), "running");
    let driver = t.claim("@run");
    assert_eq!(driver.1.attempt, 1);
    code(&mut t, &driver, "undo:pay", done(false));
    fail(&mut t, &driver);
    assert_eq!((t.status(), t.error().kind.as_str(), also(&t).len()), ("failed", "LeaseLost", 0));
}

#[test]
fn a_function_that_kills_its_workers_while_unwinding_ends_in_the_end() {
    let mut t = Trial::new(CODE, json!(1));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(true));
    unwind(&mut t, &driver);
    lose(&mut t, &driver);
    for lost in 1..=decide::MAX_LOST_UNWINDING {
        assert_eq!(t.status(), "running", "lost {lost} times");
        let driver = t.claim("@run");
        lose(&mut t, &driver);
    }
    assert_eq!((t.status(), t.error().message.as_str()), ("failed", "for good"));
    assert_eq!(also(&t), [("pay".to_owned(), "NotUndone".to_owned())]);
}

#[test]
fn a_deadline_unwinds_and_the_grace_ends_it() {
    let flow = "{name: job, code: true, cancel_grace: 5s}";
    let start = || Start { deadline_ms: Some(1_000), ..Start::default() };
    let mut t = Trial::starting(&[flow], start());
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(true));
    t.say(driver.0, &driver.1, Op::Defer { after_ms: 60_000, limit: None });
    t.tick();
    let driver = t.claim("@run");
    assert!(t.model.header(t.run).code.as_ref().unwrap().leaving.as_ref().unwrap().unwinding);
    code(&mut t, &driver, "undo:pay", done(false));
    fail(&mut t, &driver);
    assert_eq!((t.status(), t.error().kind.as_str(), also(&t).len()), ("failed", "DeadlineExceeded", 0));

    let mut t = Trial::starting(&[flow], start());
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(true));
    t.tick();
    assert_eq!(t.status(), "running", "it may undo");
    code(&mut t, &driver, "mail", done(true));
    t.tick();
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "DeadlineExceeded"));
    let expected = ["mail", "pay"].map(|step| (step.to_owned(), "NotUndone".to_owned()));
    assert_eq!(also(&t), expected);
    assert_eq!(unwind(&mut t, &driver), Answer::Closed);
}

#[test]
fn a_function_that_completes_before_it_hears_of_a_cancel_has_completed() {
    let mut t = Trial::new("{name: job, code: true, cancel_grace: 5s}", json!(1));
    let driver = t.claim("@run");
    assert!(matches!(t.cancel(), Answer::Applied(_)));
    assert!(matches!(t.say(driver.0, &driver.1, Op::ContinueAs { input: json!(1).into() }), Answer::Invalid(_)));
    t.complete_claimed(driver.0, &driver.1, json!(1));
    assert_eq!(t.status(), "completed");
}

#[test]
fn a_paused_run_that_is_cancelled_undoes_too() {
    let mut t = Trial::new("{name: job, code: true, cancel_grace: 5s}", json!(1));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(true));
    t.say(driver.0, &driver.1, Op::Release);
    t.send(Input::Pause { by: "ann".into() });
    t.cancel();
    let driver = t.claim("@run");
    code(&mut t, &driver, "undo:pay", done(false));
    fail(&mut t, &driver);
    assert_eq!((t.status(), also(&t).len()), ("cancelled", 0));
}

#[test]
fn many_pending_entries_end_over_several_transitions() {
    let mut t = Trial::new(CODE, json!(1));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(true));
    for n in 0..2_500 {
        code(&mut t, &driver, &format!("c{n}"), call());
    }
    unwind(&mut t, &driver);
    assert_eq!(t.offered(), [""; 0], "all calls are cancelled");
    code(&mut t, &driver, "undo:pay", broken(false));
    fail(&mut t, &driver);
    assert_eq!((t.status(), also(&t)), ("failed", vec![("undo:pay".to_owned(), "Boom".to_owned())]));
}

#[test]
fn an_event_is_published_once_under_its_name() {
    let mut t = Trial::new(CODE, json!(1));
    let driver = t.claim("@run");
    let publish = Op::Publish {
        name: "paid".into(),
        as_name: Some("told".into()),
        key: Some(json!(7).into()),
        payload: json!("x").into(),
    };
    assert!(matches!(t.say(driver.0, &driver.1, publish.clone()), Answer::Applied(_)));
    fail(&mut t, &driver);
    t.tick();
    let driver = t.claim("@run");
    assert!(matches!(t.say(driver.0, &driver.1, publish), Answer::Duplicate(_)), "attempt 2 remembers it");
    assert_eq!((t.model.published.len(), t.step("told")), (1, "completed"));
}
