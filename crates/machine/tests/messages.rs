//! The messages for failures and refusals in a run, collected in snapshots to review them as users read them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_machine::*;
use model::Trial;
use serde_json::{Value, json};

/// The error of a run whose step `a` completes with each of `outputs` in turn.
fn error(flow: &str, input: Value, outputs: &[Value]) -> String {
    let mut t = Trial::new(&format!("{{name: f, {flow}}}"), input);
    for output in outputs {
        let next = t.offered().first().cloned().expect("a task");
        t.complete(&next, output.clone());
    }
    while t.status() != "failed" {
        assert!(t.tick(), "{}", t.model.dump(t.run));
    }
    shown(&t.error())
}

fn shown(error: &Failure) -> String {
    let also: Vec<String> = error.also.iter().map(|also| format!(" and {}", shown(also))).collect();
    let step = error.step.as_deref().map(|step| format!(" [{step}]")).unwrap_or_default();
    format!("{}{step}: {}{}", error.kind, error.message, also.concat())
}

#[test]
fn failures_of_expressions() {
    let cases = [
        ("steps: {a: {}, b: {after: [a], if: steps.a.output}}", json!(null), vec![json!("yes")]),
        ("steps: {a: {}, b: {after: [a], if: 'steps.a.output.totl > 1'}}", json!(null), vec![json!({"total": 1})]),
        ("steps: {a: {}, b: {after: [a], set: '${steps.a.output.x.y}'}}", json!(null), vec![json!({"x": null})]),
        ("steps: {a: {}, b: {after: [a], spread: 'steps.a.output', run: h}}", json!(null), vec![json!({"items": []})]),
        ("steps: {a: {set: '${\"n: \" + input}'}}", json!(1), vec![]),
        ("steps: {a: {set: '${input / 0}'}}", json!(1), vec![]),
        ("steps: {a: {await: {until: 'input'}}}", json!("tomorrow"), vec![]),
        ("steps: {a: {await: {event: e, key: 'input'}}}", json!("x".repeat(2000)), vec![]),
        ("output: '${steps.a.output[3]}', steps: {a: {}}", json!(null), vec![json!([1])]),
        ("steps: {a: {run: h, limits: [{tenant: '${input.tenant}'}]}}", json!({}), vec![]),
        ("steps: {a: {fail: 'no stock for ${input.sku}'}}", json!({"sku": "x-1"}), vec![]),
        ("steps: {a: {repeat: {while: 'true', max: 2}, steps: {b: {set: 1}}}}", json!(null), vec![]),
        ("steps: {a: {await: {manual: true, timeout: 90s}}}", json!(null), vec![]),
        ("finally: {steps: {z: {fail: unclean}}}, steps: {a: {set: 1}}", json!(null), vec![]),
        ("steps: {a: {fail: one}, b: {fail: two}}", json!(null), vec![]),
        ("steps: {g: {spread: '[1]', steps: {a: {fail: deep}}}}", json!(null), vec![]),
        ("steps: {a: {flow: nowhere}}", json!(null), vec![]),
    ];
    let lines: Vec<String> = cases.into_iter().map(|(flow, input, outputs)| error(flow, input, &outputs)).collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn refusals() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {emits: [e]}, b: {}, g: {await: {webhook: true}}, s: {spread: '[1]', run: h}}}",
        json!(null),
    );
    let mut said = Vec::new();
    let (run, a) = t.claim("a");
    let emit = |event: &str| Op::Emit { event: event.to_owned(), payload: json!(1).into() };
    said.push(t.say(run, &a, emit("ee")));
    let (_, b) = t.claim("b");
    said.push(t.say(run, &b, emit("e")));
    let (_, item) = t.claim("s[0]");
    said.push(t.say(run, &item, emit("e")));
    said.push(t.say(run, &a, Op::Suspend { seen: None }));
    said.push(t.act("nosuch", StepAct::Skip));
    said.push(t.act("a", StepAct::Retry));
    said.push(t.send(Input::CancelGate { activation: ActId(1), by: "ann".into() }));
    t.open_gate("g", json!(1));
    said.push(t.open_gate("g", json!(1)));
    t.cancel();
    said.push(t.cancel());
    said.push(t.act("a", StepAct::Skip));
    said.push(t.send(Input::Pause { by: "ann".into() }));

    let mut t = Trial::new("{name: job, code: true}", json!(null));
    let (run, driver) = t.claim("@run");
    said.push(t.say(run, &driver, Op::Suspend { seen: None }));
    for name in ["", "@x", "pay~2", "a\nb"] {
        let op = CodeOp::Done { output: json!(1).into(), undo: false };
        said.push(t.say(run, &driver, Op::Code { name: name.to_owned(), op }));
    }
    said.push(t.say(run, &driver, emit("e")));
    let lines: Vec<String> = said
        .iter()
        .map(|answer| match answer {
            Answer::Invalid(message) => format!("invalid: {message}"),
            Answer::Conflict(message) => format!("conflict: {message}"),
            other => panic!("{other:?}"),
        })
        .collect();
    insta::assert_snapshot!(lines.join("\n"));
}

#[test]
fn what_a_waiting_run_waits_for() {
    let mut t = Trial::new(
        "
name: f
steps:
  a: {emits: [e]}
  b: {subscribes: [e], after: [a], join: any}
  c: {after: [b, 'ended:each'], subscribes: [e]}
  each: {spread: '[1, 2, 3]', run: h, max_parallel: 1}
  hook: {await: {webhook: true}}
  ping: {await: {event: paid, key: '7'}}
",
        json!(null),
    );
    t.fail_attempt("each[0]", "x");
    let kept = t.kept();
    let lines: Vec<String> =
        explain::explain(&kept.flow, &kept.run).iter().map(|line| json!(line).to_string()).collect();
    insta::assert_snapshot!(lines.join("\n"));
}
