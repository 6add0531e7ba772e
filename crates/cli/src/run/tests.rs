//! Snapshots of drawn and explained runs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use eddyline_protocol::{RunInfo, StepInfo};
use serde_json::{Value, json};

use super::tree::{Glance, draw};
use super::words::explain;

const START: &str = "2026-01-02T03:04:05.000Z";

fn run(status: &str, more: Value) -> RunInfo {
    let mut run = json!({
        "run_id": "0198c0de-0000-7000-8000-000000000001", "flow": "order", "version": "b24b82ebf2f90fa6",
        "status": status, "input": {}, "output": null, "error": null, "created_at": START, "started_at": START,
        "completed_at": null, "step_count": 4, "completed_steps": 1, "emitted_events": [], "tags": [],
        "external_id": null, "priority": 0, "waiting_for": [], "parent": null, "retry_of": null,
        "continued_as": null, "trimmed": false});
    merge(&mut run, more);
    serde_json::from_value(run).unwrap()
}

fn step(activation: &str, status: &str, more: Value) -> StepInfo {
    let mut step = json!({"activation": activation, "step": activation, "status": status, "attempts": [],
        "input": null, "output": null, "error": null, "started_at": null, "ended_at": null, "waits_for": null});
    merge(&mut step, more);
    serde_json::from_value(step).unwrap()
}

fn merge(into: &mut Value, more: Value) {
    for (name, value) in more.as_object().unwrap() {
        into[name] = value.clone();
    }
}

fn took(from_s: u32, to_s: u32) -> Value {
    json!({"started_at": format!("2026-01-02T03:04:{from_s:02}.000Z"), "ended_at": format!("2026-01-02T03:04:{to_s:02}.250Z")})
}

fn since(from_s: u32) -> Value {
    json!({"started_at": format!("2026-01-02T03:04:{from_s:02}.000Z")})
}

fn with(mut one: Value, more: Value) -> Value {
    merge(&mut one, more);
    one
}

fn attempt(number: u32, status: &str, error: Value) -> Value {
    json!({"attempt": number, "status": status, "worker": "w1", "started_at": START, "ended_at": null, "error": error})
}

fn picture(run: &RunInfo, steps: &[StepInfo], order: &[&str], width: usize) -> String {
    let order: Vec<String> = order.iter().map(|name| (*name).to_owned()).collect();
    // 15 s after its start.
    let glance = Glance { run, steps, order: &order, now_ms: 1_767_323_060_000 };
    let lines: Vec<String> = draw(&glance, width).iter().map(|line| line.paint(false)).collect();
    assert!(lines.iter().all(|line| line.chars().count() <= width));
    lines.join("\n")
}

fn under_way() -> (RunInfo, Vec<StepInfo>) {
    let arms = |arms: Value| json!({"waits_for": {"what": "arms", "arms": arms}});
    let open = |arm: &str, from: &str| json!({"arm": arm, "token": "open", "from": [from]});
    let busy = json!({"kind": "Busy", "message": "the bank does not answer\nat line 7"});
    let steps = vec![
        step(
            "approve",
            "waiting",
            with(since(7), json!({"waits_for": {"what": "gate", "reason": "manual", "event": null}})),
        ),
        step("load", "completed", took(5, 7)),
        step(
            "mail",
            "waiting",
            with(
                since(7),
                json!({"waits_for": {"what": "worker", "handler": "send", "queue": "slow",
            "attempt": 1, "fence": 3}}),
            ),
        ),
        step(
            "pay",
            "running",
            with(
                since(7),
                json!({"attempts": [attempt(1, "failed", busy.clone()), attempt(2, "running", json!(null))],
            "waits_for": {"what": "worker", "handler": "pay", "queue": "default", "attempt": 2, "fence": 9}}),
            ),
        ),
        step(
            "scan",
            "waiting",
            with(
                since(7),
                json!({"attempts": [attempt(1, "failed", busy)],
            "waits_for": {"what": "back_off", "attempt": 2}}),
            ),
        ),
        step(
            "ship",
            "pending",
            arms(json!([open("pay", "pay"), open("ended:mail", "mail"), open("order.approved", "approve"),
            {"arm": "load", "token": "live", "from": []}])),
        ),
        step(
            "sub",
            "waiting",
            with(since(8), json!({"waits_for": {"what": "child", "run_id": "0198c0de-0000-7000-8000-000000000002"}})),
        ),
    ];
    (run("running", json!({})), steps)
}

#[test]
fn a_run_under_way() {
    let (run, steps) = under_way();
    let order = ["load", "approve", "pay", "scan", "mail", "sub", "ship"];
    insta::assert_snapshot!(picture(&run, &steps, &order, 100));
}

#[test]
fn a_narrow_screen_cuts_and_does_not_wrap() {
    let (run, steps) = under_way();
    insta::assert_snapshot!(picture(&run, &steps, &[], 40));
}

#[test]
fn how_a_run_stands_is_seen_on_every_screen() {
    let (_, steps) = under_way();
    for flow in ["order", "a-flow-whose-name-is-longer-than-a-narrow-screen-is-wide"] {
        for status in ["running", "completed"] {
            for width in [40, 80, 120] {
                let picture = picture(&run(status, json!({"flow": flow})), &steps, &[], width);
                assert!(picture.lines().next().unwrap().contains(status), "{picture}");
                assert!(picture.contains("0198c0de-0000-7000-8000-000000000001"), "{picture}");
            }
        }
    }
}

#[test]
fn a_long_name_is_cut_and_breaks_no_line() {
    let long = "a-step-that-has-a-name-of-37-letters_";
    let steps = [
        step(
            long,
            "completed",
            with(
                took(5, 7),
                json!({"attempts": [attempt(1, "failed", json!(null)), attempt(2, "completed", json!(null))]}),
            ),
        ),
        step("short", "failed", with(took(5, 9), json!({"error": {"kind": "Boom", "message": "no"}}))),
    ];
    let run = run("running", json!({}));
    insta::assert_snapshot!([50, 100].map(|width| picture(&run, &steps, &[], width)).join("\n---\n"));
}

#[test]
fn what_keeps_a_task_from_every_worker_is_said() {
    let bounds = [
        json!({"what": "paused"}),
        json!({"what": "concurrency", "most": 2}),
        json!({"what": "flow_concurrency", "most": 3}),
        json!({"what": "rate"}),
        json!({"what": "limit", "name": "stripe", "most": 5}),
        json!({"what": "limit", "name": "stripe", "most": null}),
    ];
    let waits = |bound: &Value| json!({"what": "worker", "handler": "send", "queue": "slow", "attempt": 1, "fence": 3, "bound": bound});
    let steps: Vec<StepInfo> = bounds
        .iter()
        .enumerate()
        .map(|(at, bound)| step(&format!("mail{at}"), "waiting", json!({"waits_for": waits(bound)})))
        .collect();
    let run = run("running", json!({}));
    let told = [picture(&run, &steps, &[], 100), explain(&run, &steps).join("\n")];
    insta::assert_snapshot!(told.join("\n\n"));
}

#[test]
fn what_no_worker_has_is_said_and_beside_what_keeps_a_task_from_every_one() {
    let lacks = [
        json!({"what": "queue"}),
        json!({"what": "handler"}),
        json!({"what": "labels", "labels": ["gpu"]}),
        json!({"what": "labels", "labels": ["gpu", "eu"]}),
        json!({"what": "build", "build": "b7"}),
    ];
    let waits = |lack: &Value| json!({"what": "worker", "handler": "send", "queue": "slow", "attempt": 1, "fence": 3, "lack": lack});
    let mut all: Vec<Value> = lacks.iter().map(waits).collect();
    all.push(with(waits(&lacks[1]), json!({"bound": {"what": "concurrency", "most": 2}})));
    let named = |(at, waits): (usize, &Value)| step(&format!("mail{at}"), "running", json!({"waits_for": waits}));
    let steps: Vec<StepInfo> = all.iter().enumerate().map(named).collect();
    let run = run("running", json!({}));
    let told = [picture(&run, &steps, &[], 100), explain(&run, &steps).join("\n")];
    insta::assert_snapshot!(told.join("\n\n"));
}

#[test]
fn what_is_waited_for_in_words() {
    let (run, steps) = under_way();
    insta::assert_snapshot!(explain(&run, &steps).join("\n"));
}

#[test]
fn a_paused_run_says_so() {
    let (_, steps) = under_way();
    let said = explain(&run("paused", json!({})), &steps);
    assert_eq!(said[0], "the run is paused: its tasks are not offered until `eddy run resume`");
}

#[test]
fn many_items_are_counted_and_those_that_need_a_look_are_shown() {
    let mut steps = vec![step(
        "each",
        "running",
        with(since(5), json!({"waits_for": {"what": "inside", "open": 4, "to_come": 60}})),
    )];
    for at in 0..40 {
        let name = format!("each[{at}]");
        steps.push(match at {
            17 => step(
                &name,
                "failed",
                with(took(5, 6), json!({"error": {"kind": "Boom", "message": "no paper\nin tray 2"}})),
            ),
            30..33 => step(
                &name,
                "running",
                with(
                    since(9),
                    json!({"attempts": [attempt(1, "running", json!(null))],
                "waits_for": {"what": "worker", "handler": "price", "queue": "default", "attempt": 1, "fence": 1}}),
                ),
            ),
            33.. => step(&name, "pending", json!({})),
            _ => step(&name, "completed", took(5, 6)),
        });
    }
    insta::assert_snapshot!(picture(&run("running", json!({})), &steps, &[], 100));
    let told = explain(&run("running", json!({})), &steps);
    assert_eq!(told[0], "each has 60 items to come, waiting for one of the 4 open ones to end (max_parallel)");
}

#[test]
fn groups_and_rounds_are_inside_of_each_other() {
    let steps = [
        step("poll", "running", with(since(5), json!({"waits_for": {"what": "inside", "open": 1, "to_come": 0}}))),
        step("poll[0]", "completed", took(5, 6)),
        step("poll[0].check", "completed", took(5, 5)),
        step("poll[0].nap", "completed", took(5, 6)),
        step("poll[1]", "running", with(since(6), json!({"waits_for": {"what": "inside", "open": 1, "to_come": 0}}))),
        step("poll[1].check", "skipped", json!({})),
        step("undo:pay", "completed", took(9, 9)),
        step("finally.tidy", "completed", took(9, 9)),
    ];
    insta::assert_snapshot!(picture(&run("running", json!({})), &steps, &["poll"], 100));
}

#[test]
fn how_a_run_failed() {
    let error = json!({"kind": "Boom", "message": "out of paper\nsee tray 2", "step": "print.page",
        "also": [{"kind": "GateTimeout", "message": "nothing opened its gate within 1h", "step": "signed"}]});
    let ended = json!({"error": error, "completed_at": "2026-01-02T04:04:05.000Z"});
    let steps = [step(
        "print",
        "failed",
        with(
            took(5, 9),
            json!({"error": {"kind": "Boom", "message": "out of paper"},
        "attempts": [attempt(1, "failed", json!(null)), attempt(2, "failed", json!(null))]}),
        ),
    )];
    insta::assert_snapshot!(picture(&run("failed", ended), &steps, &[], 100));
}
