//! A large container is cancelled over several transitions; between them none of its tasks starts, and no report on
//! them counts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_machine::*;
use model::Trial;
use serde_json::json;

/// Transitions that touch few activations.
const FEW: usize = 16;

fn spread(step: &str) -> Trial {
    let mut t =
        Trial::new(&format!("{{name: f, steps: {{e: {{spread: 'range(60)', {step}}}, other: {{}}}}}}"), json!(null));
    t.model.deliver_all();
    t.model.max_touched = FEW;
    t
}

/// Claims the task of the last item.
fn last(t: &mut Trial) -> Task {
    let fence = *t.kept().tasks.iter().find(|(_, row)| row.task.name == "e[59]").unwrap().0;
    let run = t.run;
    t.model.claim(run, fence).expect("it is offered")
}

/// Submits one transition, without delivering messages.
fn submit(t: &mut Trial, input: Input) -> Answer {
    let run = t.run;
    t.model.submit(run, vec![input]).remove(0)
}

fn cancel(t: &mut Trial) {
    let cancel = Input::Cancel { by: "somebody".to_owned(), reason: None };
    assert!(matches!(submit(t, cancel), Answer::Applied(_)));
    assert!(!t.kept().is_ended() && t.model.header(t.run).holds_tasks(), "most of it is still to be cancelled");
}

fn complete(t: &mut Trial, task: &Task) -> Answer {
    let run = t.run;
    t.model.report(run, task, Some(1), Op::Complete { output: json!(1).into(), emits: Vec::new(), logs: Vec::new() })
}

#[test]
fn no_task_is_given_out() {
    let mut t = spread("run: h");
    cancel(&mut t);
    let run = t.run;
    let offered: Vec<Fence> = t.kept().tasks.keys().copied().collect();
    assert!(offered.len() > 30, "{}", offered.len());
    for fence in offered {
        assert!(t.model.claim(run, fence).is_none());
    }
    t.model.deliver_all();
    assert_eq!(t.status(), "cancelled");
}

#[test]
fn a_report_is_closed_as_it_will_be() {
    let mut t = spread("run: h");
    let task = last(&mut t);
    cancel(&mut t);
    assert_eq!(complete(&mut t, &task), Answer::Closed);
    t.model.deliver_all();
    assert_eq!((t.step("e[59]"), t.status()), ("cancelled", "cancelled"));
}

#[test]
fn with_undo_an_attempt_in_flight_reports_and_is_undone() {
    let mut t = spread("run: h, undo: {run: u}");
    let task = last(&mut t);
    cancel(&mut t);
    assert!(matches!(complete(&mut t, &task), Answer::Applied(_)));
    t.model.deliver_all();
    assert_eq!(t.offered(), ["undo:e[59]"]);
    assert!(!t.model.header(t.run).holds_tasks());
}

#[test]
fn a_gate_does_not_open() {
    let mut t = spread("steps: {g: {await: {manual: true}}}");
    let (gate, _) = t.kept().gates.iter().next_back().unwrap();
    let activation = *gate;
    cancel(&mut t);
    let open = Input::OpenGate { activation, by: OpenedBy::Manual, payload: json!(1).into() };
    let answer = submit(&mut t, open);
    assert!(matches!(answer, Answer::Conflict(_)), "{answer:?}");
    t.model.deliver_all();
    assert_eq!(t.status(), "cancelled");
}

#[test]
fn after_a_failed_item_no_other_begins_and_the_rest_of_the_run_goes_on() {
    let mut t = spread("run: h");
    let task = last(&mut t);
    let run = t.run;
    let error = Failure::new("Broken", "it broke".to_owned());
    let fail = Op::Fail { error, retryable: false, retry_after_ms: None };
    assert!(matches!(t.model.report(run, &task, Some(1), fail), Answer::Applied(_)));
    assert!(t.model.header(run).holds_tasks());
    t.model.deliver_all();
    assert!(!t.model.header(run).holds_tasks());
    assert_eq!(t.offered(), ["other"]);
}

#[test]
fn word_of_tasks_that_nobody_has_says_nothing_of_those_that_are_closed_with_it() {
    let mut t = Trial::new("{name: f, steps: {a: {undo: {run: u}}}}", json!(null));
    let (run, task) = t.claim("a");
    let cancel = Input::Cancel { by: "somebody".to_owned(), reason: None };
    // The facts collected before the cancel are decided together with it.
    t.model.submit(run, vec![cancel, Input::Drain { unclaimed: Vec::new() }]);
    assert!(matches!(complete(&mut t, &task), Answer::Applied(_)));
    t.model.deliver_all();
    assert_eq!(t.offered(), ["undo:a"]);
}
