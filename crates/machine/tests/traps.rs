//! Cases that workflow engines typically get wrong, one test each.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_language::definition;
use eddyline_machine::run::Token;
use eddyline_machine::*;
use model::{Model, Trial};
use serde_json::json;

/// The open activations, with what they wait for.
fn waits(t: &Trial) -> String {
    let open = explain::explain(&t.kept().flow, &t.kept().run).into_iter();
    open.map(|open| format!("{} {}", open.activation, serde_json::to_string(&open.waits_for).unwrap()))
        .collect::<Vec<_>>()
        .join("\n")
}

fn warnings(text: &str) -> Vec<String> {
    definition::parse(text).expect("a flow").warnings.into_iter().map(|warning| warning.message).collect()
}

#[test]
fn a_branch_not_taken_ends_and_nothing_waits_for_it() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {after: [a], if: 'steps.a.output.big'}, c: {after: [b]}, d: {after: [a]}}}",
        json!({}),
    );
    t.complete("a", json!({"big": false}));
    assert_eq!(t.steps(), "a completed, b skipped, c skipped, d queued");
    t.complete("d", json!(1));
    assert_eq!(t.status(), "completed");
}

const IF_ELSE: &str = "
name: f
steps:
  a: {}
  yes: {after: [a], if: 'steps.a.output'}
  no: {after: [a], if: '!steps.a.output'}
  end: {after: [yes, no], join: JOIN}
";

#[test]
fn a_join_with_all_after_if_and_else_is_skipped_and_warned_of() {
    let flow = IF_ELSE.replace("JOIN", "all");
    assert_eq!(warnings(&flow).len(), 1, "{:?}", warnings(&flow));
    let mut t = Trial::new(&flow, json!(null));
    t.complete("a", json!(true));
    t.complete("yes", json!(1));
    assert_eq!((t.step("no"), t.step("end"), t.status()), ("skipped", "skipped", "completed"));
}

#[test]
fn a_join_with_any_or_some_after_if_and_else_runs_once() {
    for join in ["any", "some", "{at_least: 1}"] {
        let flow = IF_ELSE.replace("JOIN", join);
        assert_eq!(warnings(&flow), Vec::<String>::new(), "{join}");
        let mut t = Trial::new(&flow, json!(null));
        t.complete("a", json!(false));
        assert_eq!(t.step("end"), "waiting", "{join}");
        t.complete("no", json!("n"));
        assert_eq!(t.input_of("end"), json!({"no": "n"}), "{join}");
        t.complete("end", json!(null));
        assert_eq!(t.status(), "completed", "{join}");
    }
}

#[test]
fn of_two_producers_of_one_event_the_first_counts_and_the_arm_dies_only_with_both() {
    let flow = "{name: f, steps: {a: {emits: [e]}, b: {emits: [e]}, c: {subscribes: [e]}}}";
    let mut t = Trial::new(flow, json!(null));
    t.complete("a", json!(null));
    assert_eq!(t.step("c"), "waiting");
    t.complete_emitting("b", json!(null), &[("e", json!("from b"))]);
    assert_eq!(t.input_of("c"), json!({"e": "from b"}));

    let mut t = Trial::new(flow, json!(null));
    t.complete_emitting("a", json!(null), &[("e", json!("from a"))]);
    t.complete_emitting("b", json!(null), &[("e", json!("from b"))]);
    assert_eq!(t.input_of("c"), json!({"e": "from a"}));

    let mut t = Trial::new(flow, json!(null));
    t.complete("a", json!(null));
    t.fail("b", "no");
    assert_eq!(t.step("c"), "skipped");
}

#[test]
fn two_silent_producers_that_end_in_one_transition_give_one_dead_token() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {after: [a], emits: [e]}, c: {after: [a], emits: [e]}, d: {subscribes: [e]}}}",
        json!(null),
    );
    t.fail("a", "both are skipped at once");
    assert_eq!((t.step("d"), t.status()), ("skipped", "failed"));
}

#[test]
fn one_of_several_parallel_arms_returns_early() {
    let mut t = Trial::new(
        "{name: f, output: {never: 1}, steps: {a: {}, b: {}, out: {after: [a], return: {got: '${steps.a.output}'}}, z: {after: [b]}}}",
        json!(null),
    );
    let (run, late) = t.claim("b");
    t.complete("a", json!(7));
    assert_eq!(t.steps(), "a completed, b cancelled, out completed, z cancelled");
    assert_eq!((t.status(), t.output()), ("completed", json!({"got": 7})));
    let answer = t.say(run, &late, Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] });
    assert_eq!(answer, Answer::Closed);
}

#[test]
fn return_in_a_group_ends_the_group_only() {
    let mut t = Trial::new(
        "{name: f, output: '${steps.g.output}', steps: {g: {steps: {a: {}, b: {}, r: {after: [a], return: early}}}, z: {after: [g]}}}",
        json!(null),
    );
    t.complete("g.a", json!(1));
    assert_eq!(t.step("g.b"), "cancelled");
    assert_eq!(t.input_of("z"), json!({"g": "early"}));
    t.complete("z", json!(1));
    assert_eq!(t.output(), json!("early"));
}

#[test]
fn dependents_of_a_failed_step_are_skipped_and_the_run_fails_at_the_end() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {after: [a]}, c: {after: [b]}, d: {}}}", json!(null));
    t.fail("a", "out of stock");
    assert_eq!(t.steps(), "a failed, b skipped, c skipped, d queued");
    assert_eq!(t.status(), "running");
    t.complete("d", json!(1));
    assert_eq!(t.status(), "failed");
    let error = t.error();
    assert_eq!(
        (error.kind.as_str(), error.message.as_str(), error.step.as_deref()),
        ("Boom", "out of stock", Some("a"))
    );
}

#[test]
fn a_failure_is_handled_by_a_handler_that_completes_and_by_nothing_else() {
    let flow = "{name: f, steps: {a: {}, h: {after: ['failed:a'], if: 'input', retry: {attempts: 1}}}}";
    let mut t = Trial::new(flow, json!(true));
    t.fail("a", "x");
    assert_eq!(t.input_of("h")["failed:a"]["message"], json!("x"));
    t.complete("h", json!(null));
    assert_eq!(t.status(), "completed");

    let mut t = Trial::new(flow, json!(true));
    t.fail("a", "x");
    t.fail("h", "y");
    assert_eq!((t.status(), t.error().message.as_str(), t.error().also[0].message.as_str()), ("failed", "x", "y"));

    let mut t = Trial::new(flow, json!(false));
    t.fail("a", "x");
    assert_eq!((t.step("h"), t.status()), ("skipped", "failed"));
}

#[test]
fn a_handler_decided_before_the_failure_does_not_handle_it() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {}, h: {after: [a, 'failed:b'], join: any}}}", json!(null));
    t.complete("a", json!(1));
    t.fail("b", "too late for h");
    t.complete("h", json!(null));
    let h = &t.kept().run.activations[3];
    assert_eq!(h.arms, [Token::Live, Token::LateLive]);
    assert_eq!(t.status(), "failed");
}

#[test]
fn ended_arms_handle_failures_too() {
    let mut t = Trial::new("{name: f, steps: {a: {}, after_all: {after: ['ended:a']}}}", json!(null));
    t.fail("a", "x");
    assert_eq!(t.input_of("after_all")["ended:a"]["status"], json!("failed"));
    assert_eq!(t.input_of("after_all")["ended:a"]["error"]["message"], json!("x"));
    t.complete("after_all", json!(null));
    assert_eq!(t.status(), "completed");
}

#[test]
fn an_ended_arm_always_carries_a_status_and_an_output_or_an_error() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {if: 'false'}, c: {}, z: {after: ['ended:a', 'ended:b', 'ended:c']}}}",
        json!(null),
    );
    t.complete("a", json!(1));
    t.fail("c", "x");
    let input = t.input_of("z");
    assert_eq!(input["ended:a"], json!({"status": "completed", "output": 1}));
    assert_eq!(input["ended:b"], json!({"status": "skipped", "output": null}));
    assert_eq!(input["ended:c"], json!({"status": "failed", "error": {"kind": "Boom", "message": "x"}}));
}

#[test]
fn the_run_as_a_whole_is_an_object_of_its_fields() {
    let flow = "
name: f
steps: {a: {input: '${run}'}}
finally: {steps: {clean: {input: '${[keys(run), run[\"outcome\"]]}'}}}
";
    let start = Start { input: Some(json!({"n": 1}).into()), tags: vec!["web".into()], ..Start::default() };
    let mut t = Trial::starting(&[flow], start);
    let (run, version) = (t.run.to_string(), t.kept().flow.version.clone());
    let whole =
        json!({"id": run, "flow": "f", "version": version, "input": {"n": 1}, "tags": ["web"], "external_id": null});
    assert_eq!(t.input_of("a"), whole);
    t.complete("a", json!(1));
    let fields = json!(["id", "flow", "version", "input", "tags", "external_id", "outcome", "error"]);
    assert_eq!(t.input_of("finally.clean"), json!([fields, "completed"]));
}

#[test]
fn fail_fast_waits_for_a_handler_that_may_still_run_and_for_nothing_else() {
    let flow = "{name: f, fail_fast: true, steps: {a: {}, b: {}, h: {after: ['failed:a', b]}}}";
    let mut t = Trial::new(flow, json!(null));
    t.fail("a", "x");
    assert_eq!((t.status(), t.step("b"), t.step("h")), ("running", "queued", "waiting"));
    t.complete("b", json!(1));
    t.complete("h", json!(1));
    assert_eq!(t.status(), "completed");

    let mut t = Trial::new(flow, json!(null));
    t.fail("a", "x");
    t.fail("b", "now no handler can run");
    assert_eq!((t.status(), t.error().message.as_str()), ("failed", "x"));

    let mut t = Trial::new("{name: f, fail_fast: true, steps: {a: {}, b: {}, c: {after: [b]}}}", json!(null));
    t.fail("a", "x");
    assert_eq!((t.steps().as_str(), t.status()), ("a failed, b cancelled, c cancelled", "failed"));
}

#[test]
fn fail_fast_skips_what_can_never_run_and_cancels_the_rest() {
    let steps = "{a: {}, b: {after: [a]}, c: {after: [b]}, d: {after: [c]}, z: {}, y: {after: [d, z], join: any}}";
    for flow in [
        format!("{{name: f, fail_fast: true, steps: {steps}}}"),
        format!("{{name: f, fail_fast: true, steps: {{g: {{steps: {steps}}}}}}}"),
    ] {
        let mut t = Trial::new(&flow, json!(null));
        let group = if flow.contains("g:") { "g." } else { "" };
        t.fail(&format!("{group}a"), "x");
        let of = |name: &str| t.step(&format!("{group}{name}"));
        let found = ["a", "b", "c", "d", "z", "y"].map(of);
        assert_eq!(found, ["failed", "skipped", "skipped", "skipped", "cancelled", "cancelled"], "{flow}");
        assert_eq!(t.status(), "failed");
    }
}

#[test]
fn fail_fast_waits_for_a_handler_that_looks_at_the_end() {
    let mut t =
        Trial::new("{name: f, fail_fast: true, steps: {a: {}, b: {}, h: {after: ['ended:a', b]}}}", json!(null));
    t.fail("a", "no");
    assert_eq!((t.step("h"), t.status()), ("waiting", "running"));
    t.complete("b", json!(1));
    t.complete("h", json!(1));
    assert_eq!(t.status(), "completed");
}

#[test]
fn fail_fast_sees_a_handler_that_completed_in_the_same_decision() {
    let kid = "{name: kid, steps: {k: {}}}";
    for handler in [
        "{after: ['failed:a'], set: 1}",
        "{after: ['ended:a'], set: 1}",
        "{after: ['failed:a'], if: \"steps.a.status == 'failed'\", set: 1}",
        "{after: ['failed:a', z], join: any, set: 1}",
        "{after: ['failed:a', a, z], join: {at_least: 1}, set: 1}",
        "{after: ['failed:a', a], join: some, set: 1}",
        "{after: ['failed:a'], flow: kid, detached: true}",
        "{after: ['failed:a'], steps: {i: {set: 1}}}",
        "{after: ['failed:a'], run: x, spread: '[]'}",
    ] {
        let steps = format!("{{a: {{}}, h: {handler}, z: {{}}}}");
        let flow = format!("{{name: f, fail_fast: true, steps: {steps}}}");
        let mut t = Trial::with(&[&flow, kid], json!(null));
        t.fail("a", "x");
        assert_eq!((t.step("h"), t.step("z"), t.status()), ("completed", "queued", "running"), "{handler}");
        t.complete("z", json!(1));
        assert_eq!(t.status(), "completed", "{handler}");

        let flow = format!("{{name: f, fail_fast: true, steps: {{g: {{steps: {steps}}}}}}}");
        let mut t = Trial::with(&[&flow, kid], json!(null));
        t.fail("g.a", "x");
        assert_eq!((t.step("g.h"), t.step("g.z"), t.step("g")), ("completed", "queued", "open"), "{handler}");
        t.complete("g.z", json!(1));
        assert_eq!(t.status(), "completed", "{handler}");
    }
    // A handler that fails, is skipped or was decided before handles nothing.
    for handler in [
        "{after: ['failed:a'], fail: no}",
        "{after: ['failed:a'], if: 'false', set: 1}",
        "{after: ['failed:a'], set: '${1 / 0}'}",
        "{after: ['failed:a', y], join: any, set: 1}",
    ] {
        let flow = format!("{{name: f, fail_fast: true, steps: {{a: {{}}, h: {handler}, y: {{set: 1}}, z: {{}}}}}}");
        let mut t = Trial::new(&flow, json!(null));
        t.fail("a", "x");
        assert_eq!((t.step("z"), t.status(), t.error().message.as_str()), ("cancelled", "failed", "x"), "{handler}");
    }
}

#[test]
fn fail_fast_tells_only_what_nobody_handled() {
    let flow = "{name: f, fail_fast: true, steps: {
        a: {}, b: {after: ['failed:a'], fail: second}, h: {after: ['failed:a'], set: 1}, z: {}}}";
    let mut t = Trial::new(flow, json!(null));
    t.fail("a", "first");
    assert_eq!(t.steps(), "a failed, b failed, h completed, z cancelled");
    assert_eq!((t.error().message.as_str(), t.error().also), ("second", vec![]));
}

#[test]
fn two_failing_siblings_with_one_handler_are_both_handled_or_not() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {}, h: {after: ['failed:a', 'failed:b']}}}", json!(null));
    t.fail("a", "x");
    t.fail("b", "y");
    t.complete("h", json!(null));
    assert_eq!(t.status(), "completed");

    let mut t =
        Trial::new("{name: f, steps: {a: {}, b: {}, h: {after: ['failed:a', 'failed:b'], join: any}}}", json!(null));
    t.fail("a", "x");
    t.fail("b", "y");
    t.complete("h", json!(null));
    assert_eq!((t.status(), t.error().message.as_str()), ("failed", "y"), "h was decided when b failed");
}

#[test]
fn nothing_leaks_from_a_failed_attempt() {
    let mut t = Trial::new("{name: f, steps: {a: {emits: [e]}, b: {subscribes: [e]}}}", json!(null));
    let (run, task) = t.claim("a");
    t.fail_attempt_of(run, &task);
    assert_eq!((t.step("a"), t.step("b")), ("backing-off", "waiting"));
    t.tick();
    t.complete_emitting("a", json!(1), &[("e", json!(2))]);
    assert_eq!(t.input_of("b"), json!({"e": 2}));
    assert_eq!(t.kinds().iter().filter(|kind| kind.starts_with("emit")).count(), 1);
}

#[test]
fn emit_now_is_seen_at_once_and_stays_when_the_attempt_fails() {
    let mut t =
        Trial::new("{name: f, steps: {a: {emits: [e], retry: {attempts: 2}}, b: {subscribes: [e]}}}", json!(null));
    let (run, task) = t.claim("a");
    t.say(run, &task, Op::Emit { event: "e".into(), payload: json!("now").into() });
    assert_eq!(t.input_of("b"), json!({"e": "now"}));
    t.fail_attempt_of(run, &task);
    t.tick();
    let (run, task) = t.claim("a");
    t.say(run, &task, Op::Emit { event: "e".into(), payload: json!("again").into() });
    assert_eq!(t.input_of("b"), json!({"e": "now"}), "the first counts");
    t.say(run, &task, Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] });
    t.complete("b", json!(1));
    assert_eq!(t.status(), "completed");
}

#[test]
fn an_undeclared_emit_is_refused_and_the_task_stays() {
    let mut t = Trial::new("{name: f, steps: {a: {emits: [e]}}}", json!(null));
    let (run, task) = t.claim("a");
    let emits = vec![("x".to_owned(), json!(1).into())];
    let answer = t.say(run, &task, Op::Complete { output: json!(1).into(), emits, logs: vec![] });
    assert_eq!(answer, Answer::Invalid("`x` is not among the `emits` of a, which declares `e`".into()));
    let answer = t.say(run, &task, Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] });
    assert!(matches!(answer, Answer::Applied(_)));
}

#[test]
fn events_a_and_a_b_are_two_events() {
    let mut t = Trial::new(
        "{name: f, steps: {p: {emits: [a, a.b]}, x: {subscribes: [a]}, y: {subscribes: [a.b]}}}",
        json!(null),
    );
    t.complete_emitting("p", json!(null), &[("a.b", json!(1))]);
    assert_eq!(t.steps(), "p completed, x skipped, y queued");
}

#[test]
fn a_step_named_like_an_event_is_not_that_event() {
    let mut t = Trial::new(
        "{name: f, steps: {go: {emits: [ping]}, ping: {after: [go]}, x: {subscribes: [ping]}, y: {after: [ping]}}}",
        json!(null),
    );
    t.complete("go", json!(null));
    assert_eq!((t.step("ping"), t.step("x"), t.step("y")), ("queued", "skipped", "waiting"));
    t.complete("ping", json!(null));
    assert_eq!(t.step("y"), "queued");
}

#[test]
fn a_run_whose_steps_all_skip_completes() {
    let t = Trial::new("{name: f, steps: {a: {if: 'input > 1'}, b: {after: [a]}}}", json!(1));
    assert_eq!((t.steps().as_str(), t.status()), ("a skipped, b skipped", "completed"));
}

#[test]
fn a_spread_over_no_items_completes_with_an_empty_list() {
    let t = Trial::new(
        "{name: f, output: '${steps.b.output}', steps: {a: {spread: input.items}, b: {after: [a], set: '${size(steps.a.output)}'}}}",
        json!({"items": []}),
    );
    assert_eq!((t.status(), t.output(), t.output_of("a")), ("completed", json!(0), json!([])));
}

#[test]
fn a_second_round_that_spreads_over_fewer_items_is_not_touched_by_the_first() {
    let mut t = Trial::new(
        "
name: f
output: '${steps.l.output}'
steps:
  l:
    repeat: {until: 'round == 1', max: 3, state: {items: [1, 2, 3]}, next: {items: [9]}}
    steps: {each: {spread: state.items, run: h}}
    output: '${steps.each.output}'
",
        json!(null),
    );
    assert_eq!(t.offered(), ["l[0].each[0]", "l[0].each[1]", "l[0].each[2]"]);
    let (run, task) = t.claim("l[0].each[0]");
    for i in 1..3 {
        t.complete(&format!("l[0].each[{i}]"), json!(i));
    }
    t.say(run, &task, Op::Complete { output: json!(0).into(), emits: vec![], logs: vec![] });
    assert_eq!(t.offered(), ["l[1].each[0]"]);
    assert_eq!(t.input_of("l[1].each[0]"), json!(9));
    let late = t.say(run, &task, Op::Complete { output: json!(0).into(), emits: vec![], logs: vec![] });
    assert_eq!(late, Answer::Stale);
    t.complete("l[1].each[0]", json!("nine"));
    assert_eq!((t.status(), t.output()), ("completed", json!(["nine"])));
}

#[test]
fn a_loop_that_reaches_max_fails_and_says_so() {
    let mut t =
        Trial::new("{name: f, steps: {l: {repeat: {until: 'steps.c.output', max: 2}, steps: {c: {}}}}}", json!(null));
    t.complete("l[0].c", json!(false));
    t.complete("l[1].c", json!(false));
    assert_eq!(
        t.error_of("l").message,
        "`until: steps.c.output` is still false after 2 rounds, the most that `max` allows"
    );
    assert_eq!(t.status(), "failed");
}

#[test]
fn while_is_tested_before_a_round_and_state_carries_over() {
    let mut t = Trial::new(
        "
name: f
output: '${steps.l.output}'
steps:
  l:
    repeat: {while: 'state.n < 2', max: 5, state: {n: 0}, next: {n: '${state.n + 1}', got: '${steps.c.output}'}}
    output: '${state.n}:${steps.c.output}'
    steps: {c: {input: '${state}'}}
",
        json!(null),
    );
    assert_eq!(t.input_of("l[0].c"), json!({"n": 0}));
    t.complete("l[0].c", json!("x"));
    assert_eq!(t.input_of("l[1].c"), json!({"n": 1, "got": "x"}));
    t.complete("l[1].c", json!("y"));
    assert_eq!((t.status(), t.output()), ("completed", json!("1:y")));
}

#[test]
fn the_steps_of_a_round_read_the_input_of_the_loop() {
    let flow = "
name: f
output: '${steps.l.output}'
steps:
  l: {input: {x: 7}, repeat: {until: 'true', max: 1}, steps: {s: {set: '${input.x}'}}, output: '${steps.s.output}'}
";
    assert_eq!(Trial::new(flow, json!({"x": 1})).output(), json!(7));
}

#[test]
fn a_loop_in_a_spread_in_a_loop_reads_its_own_names() {
    let flow = "
name: f
output: '${steps.l.output}'
steps:
  l:
    repeat: {while: 'round < 2', max: 5, state: {n: 10}, next: {n: '${state.n + 1}'}}
    output: '${steps.e.output}'
    steps:
      e:
        spread: '[state.n, round]'
        as: it
        repeat: {until: 'round == 1', max: 3, state: '${it + state.n}', next: '${state + 100}'}
        output: '${steps.s.output}'
        steps: {s: {set: ['${it}', '${index}', '${state}', '${round}']}}
";
    assert_eq!(Trial::new(flow, json!(null)).output(), json!([[11, 0, 122, 1], [1, 1, 112, 1]]));
}

#[test]
fn a_failed_item_under_each_policy() {
    let flow = |policy: &str| {
        format!(
            "{{name: f, output: '${{steps.e.output}}', steps: {{e: {{spread: input, run: h, max_parallel: 2{policy}}}}}}}"
        )
    };
    let mut t = Trial::new(&flow(""), json!([1, 2, 3]));
    t.fail("e[0]", "no");
    assert_eq!((t.steps().as_str(), t.status()), ("e failed, e[0] failed, e[1] cancelled", "failed"));
    assert_eq!(t.error().step.as_deref(), Some("e[0]"));

    let mut t = Trial::new(&flow(", on_item_failure: collect"), json!([1, 2, 3]));
    t.fail("e[0]", "no");
    t.complete("e[2]", json!("c"));
    t.complete("e[1]", json!("b"));
    let output = t.output();
    assert_eq!(output[0]["error"]["message"], json!("no"));
    assert_eq!((&output[1], &output[2]), (&json!({"output": "b"}), &json!({"output": "c"})));

    let mut t = Trial::new(&flow(", on_item_failure: collect, max_failures: 1"), json!([1, 2, 3]));
    t.fail("e[0]", "no");
    assert_eq!(t.status(), "running");
    t.fail("e[1]", "no");
    assert_eq!((t.step("e[2]"), t.error().kind.as_str()), ("cancelled", "TooManyFailures"));
}

#[test]
fn items_become_activations_as_the_window_reaches_them() {
    let mut t = Trial::new("{name: f, steps: {e: {spread: input, run: h, max_parallel: 2}}}", json!([1, 2, 3]));
    assert_eq!(t.steps(), "e open, e[0] queued, e[1] queued");
    t.complete("e[1]", json!(null));
    assert_eq!(t.steps(), "e open, e[0] queued, e[1] completed, e[2] queued");
}

#[test]
fn a_spread_that_closes_has_no_items_to_come() {
    let flow = "{name: f, steps: {e: {spread: input, run: h, max_parallel: 2, undo: {run: u}}}}";
    let mut t = Trial::new(flow, json!([1, 2, 3]));
    assert!(waits(&t).contains(r#"e {"what":"inside","open":2,"to_come":1}"#), "{}", waits(&t));
    t.claim("e[1]");
    t.fail("e[0]", "no");
    assert_eq!(t.steps(), "e open, e[0] failed, e[1] draining");
    assert!(waits(&t).contains(r#"e {"what":"inside","open":1,"to_come":0}"#), "{}", waits(&t));
}

#[test]
fn an_expression_that_fails_deep_in_an_inline_chain_fails_its_step_and_commits() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {after: [a], set: '${steps.a.output.n}'}, c: {after: [b], set: '${10 / steps.b.output}'}, d: {after: [c]}, h: {after: ['failed:c']}}}",
        json!(null),
    );
    t.complete("a", json!({"n": 0}));
    assert_eq!(t.steps(), "a completed, b completed, c failed, d skipped, h queued");
    let error = t.error_of("c");
    assert_eq!(error.kind, "ExpressionError");
    assert!(error.message.starts_with("`10 / steps.b.output` failed at column "), "{}", error.message);
}

#[test]
fn a_need_in_the_middle_of_an_inline_chain_starts_the_decision_over() {
    let long = "x".repeat(4000);
    let mut t = Trial::new(
        "{name: f, output: '${steps.d.output}', steps: {a: {}, b: {after: [a], set: 1}, c: {after: [b], set: '${size(steps.a.output.long)}'}, d: {after: [c], set: '${steps.c.output + 1}'}}}",
        json!(null),
    );
    // The model decides with no payload loaded, and loads what the decision requests.
    t.complete("a", json!({"long": long}));
    assert_eq!((t.status(), t.output()), ("completed", json!(4001)));
}

#[test]
fn what_is_only_passed_on_is_never_loaded() {
    let long = json!("x".repeat(4000));
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {after: [a], input: {all: '${steps.a.output}'}}, c: {after: [a]}}}",
        json!(null),
    );
    let (run, task) = t.claim("a");
    let kept = &t.model.runs[&run];
    let report = Report {
        task: TaskRef { activation: task.activation, fence: task.fence },
        seq: None,
        op: Op::Complete {
            output: Data::Ref(ValueRef { id: ValueId(77), bytes: 4002, depth: 0, read_size: Default::default() }),
            emits: vec![],
            logs: vec![],
        },
        claim: Claim::default(),
    };
    let env = Env::new(0, [0; 32], "");
    let transition = decide(&kept.flow, &kept.run, &env, &[Input::Report(report)]).expect("no payload is needed");
    assert_eq!(transition.tasks.len(), 3);
    t.complete_claimed(run, &task, long.clone());
    assert_eq!((t.input_of("b"), t.input_of("c")), (json!({"all": long}), json!({"a": long})));
}

#[test]
fn a_state_that_holds_the_state_before_it_cannot_nest_without_end() {
    let filler = "x".repeat(300);
    let flow = format!(
        "{{name: f, steps: {{l: {{repeat: {{while: 'true', max: 100000, state: {{x: '{filler}'}}, next: {{prev: '${{state}}', x: '{filler}'}}}}, steps: {{a: {{set: 1}}}}}}}}}}"
    );
    let t = Trial::new(&flow, json!(null));
    assert_eq!(t.error_of("l").message, "`state` failed at column 1: the result is nested more than 100 deep");
}

#[test]
fn a_gate_opened_early_is_passed_on_arrival() {
    let mut t = Trial::new(
        "{name: f, output: '${steps.g.output}', steps: {a: {}, g: {after: [a], await: {webhook: true, timeout: 1h}}}}",
        json!(null),
    );
    assert!(matches!(t.open_gate("g", json!("early")), Answer::Applied(_)));
    assert_eq!(
        t.open_gate("g", json!("twice")),
        Answer::Conflict("the gate of g is already open; a gate opens only once".into())
    );
    assert_eq!(t.step("g"), "waiting");
    t.complete("a", json!(1));
    assert_eq!((t.status(), t.output()), ("completed", json!("early")));
    let awaits: Vec<_> = t.kinds().into_iter().filter(|kind| kind.contains("await")).collect();
    assert_eq!(awaits, ["step.await.scheduled g", "step.await.triggered g"]);
}

#[test]
fn a_gate_opens_once_times_out_once_and_is_closed_by_cancel() {
    let flow = |more: &str| {
        format!("{{name: f, steps: {{g: {{await: {{manual: true, timeout: 1h{more}}}}}, z: {{after: [g]}}}}}}")
    };
    let mut t = Trial::new(&flow(""), json!(null));
    assert_eq!(t.status(), "waiting");
    t.open_gate("g", json!({"ok": true}));
    assert_eq!(t.input_of("z"), json!({"g": {"ok": true}}));
    assert_eq!(
        t.open_gate("g", json!(2)),
        Answer::Conflict("the gate of g is already open; a gate opens only once".into())
    );
    assert!(!t.tick(), "the timer was cleared with the gate");

    let mut t = Trial::new(&flow(""), json!(null));
    t.tick();
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "GateTimeout"));
    assert_eq!(t.open_gate("g", json!(2)), Answer::Conflict("the gate of g has timed out".into()));

    let mut t = Trial::new(&flow(", on_timeout: continue"), json!(null));
    t.tick();
    assert_eq!(t.input_of("z"), json!({"g": null}));

    let mut t = Trial::new(&flow(", on_timeout: skip"), json!(null));
    t.tick();
    assert_eq!((t.steps().as_str(), t.status()), ("g skipped, z skipped", "completed"));

    let mut t = Trial::new(&flow(""), json!(null));
    t.cancel();
    assert_eq!(t.open_gate("g", json!(2)), Answer::Conflict("the gate of g is closed: the step was cancelled".into()));
    assert_eq!(t.status(), "cancelled");
}

#[test]
fn a_time_gate_before_a_step_opens_once_not_per_retry() {
    let mut t = Trial::new("{name: f, steps: {a: {run: h, await: {time: 2s}}}}", json!(null));
    assert_eq!((t.status(), t.step("a")), ("waiting", "gated"));
    t.tick();
    t.fail_attempt("a", "x");
    assert_eq!(t.status(), "waiting");
    t.tick();
    t.complete("a", json!(1));
    assert_eq!(t.status(), "completed");
    assert_eq!(t.kinds().iter().filter(|kind| kind.contains("await")).count(), 2);
}

#[test]
fn the_url_of_a_gate_can_be_read_before_it_is_reached() {
    let mut t = Trial::new(
        "{name: f, steps: {ask: {input: {link: '${gates.ok.url}'}}, ok: {after: [ask], await: {webhook: true}}}}",
        json!(null),
    );
    let link = t.input_of("ask")["link"].as_str().unwrap().to_owned();
    let token = link.strip_prefix("https://eddy.test/hooks/").expect("the hooks");
    assert_eq!(token.len(), 64);
    assert!(!t.kept().records.iter().any(|record| json!(record).to_string().contains(token)), "no record shows it");
    t.complete("ask", json!(1));
    t.open_gate("ok", json!(1));
    assert_eq!(t.status(), "completed");
}

#[test]
fn a_later_gate_takes_a_later_event_and_keys_compare_as_numbers() {
    let flow = "
name: f
steps:
  first: {await: {event: ping, key: 'input.k'}}
  second: {after: [first], await: {event: ping, key: '1'}}
";
    let mut t = Trial::new(flow, json!({"k": 1.0}));
    let waits =
        |t: &Trial| t.kept().gates.values().find_map(|gate| gate.arrival.clone()?.event).expect("an event gate");
    assert_eq!((waits(&t).key.as_deref(), waits(&t).after), (Some("1"), None));
    let activation = *t.kept().gates.keys().next().expect("a gate");
    t.send(Input::OpenGate { activation, by: OpenedBy::Event { position: 7 }, payload: json!(1).into() });
    assert_eq!((waits(&t).key.as_deref(), waits(&t).after), (Some("1"), Some(7)));
}

#[test]
fn a_cancelled_gate_fails_its_step() {
    let mut t = Trial::new("{name: f, steps: {g: {await: {manual: true}}}}", json!(null));
    t.send(Input::CancelGate { activation: ActId(1), by: "ann".into() });
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "GateCancelled"));
    assert_eq!(t.open_gate("g", json!(1)), Answer::Conflict("the gate of g was cancelled".into()));
}

#[test]
fn a_gate_whose_step_failed_by_hand_says_so_to_whoever_opens_it_later() {
    let mut t = Trial::new("{name: f, steps: {g: {await: {manual: true}}, z: {}}}", json!(null));
    t.act("g", StepAct::Fail { error: Failure::new("", "no") });
    let told = Answer::Conflict("the gate of g is closed: the step failed before it was opened".into());
    assert_eq!(t.open_gate("g", json!(1)), told);
}

const PARENT: &str = "{name: p, output: '${steps.c.output}', steps: {c: {flow: k, input: {n: 1}}, s: {}}}";
const CHILD: &str = "{name: k, output: '${steps.x.output}', steps: {x: {}}}";

#[test]
fn a_child_that_ends_before_its_parent_hears_is_heard_once() {
    let mut t = Trial::with(&[PARENT, CHILD], json!(null));
    assert_eq!(t.input_of("x"), json!({"n": 1}));
    let (run, task) = t.claim("x");
    t.model.report(run, &task, None, Op::Complete { output: json!("done").into(), emits: vec![], logs: vec![] });
    assert_eq!(t.step("c"), "child", "the message is not delivered yet");
    t.complete("s", json!(null));
    let message = t.model.inbox.front().cloned();
    assert!(message.is_none(), "delivered with the next ones");
    assert_eq!((t.status(), t.output()), ("completed", json!("done")));
}

#[test]
fn a_parent_that_is_cancelled_while_its_childs_end_is_on_its_way_stays_cancelled() {
    let mut t = Trial::with(&[PARENT, CHILD], json!(null));
    let (run, task) = t.claim("x");
    t.model.report(run, &task, None, Op::Complete { output: json!("done").into(), emits: vec![], logs: vec![] });
    let held = t.model.inbox.pop_front().expect("the message");
    t.cancel();
    t.model.inbox.push_back(held);
    t.model.deliver_all();
    assert_eq!((t.status(), t.step("c")), ("cancelled", "cancelled"));
}

#[test]
fn cancel_reaches_children_and_a_failed_child_fails_its_step() {
    let mut t = Trial::with(&[PARENT, CHILD], json!(null));
    t.cancel();
    let statuses: Vec<_> = t.model.runs.values().map(|kept| kept.run.header.status().as_str()).collect();
    assert_eq!(statuses, ["cancelled", "cancelled"]);

    let mut t = Trial::with(&[PARENT, CHILD], json!(null));
    t.fail("x", "broken");
    let error = t.error_of("c");
    assert_eq!((error.kind.as_str(), error.also[0].message.as_str()), ("ChildFailed", "broken"));
}

#[test]
fn a_detached_child_completes_its_step_at_once() {
    let t = Trial::with(&["{name: p, steps: {c: {flow: k, detached: true}}}", CHILD], json!(null));
    assert_eq!(t.status(), "completed");
    let child = t.output_of("c")["run_id"].as_str().unwrap().to_owned();
    let runs: Vec<String> = t.model.runs.keys().map(ToString::to_string).collect();
    assert!(runs.contains(&child), "{child} in {runs:?}");
    assert_eq!(t.offered(), ["x"]);
}

#[test]
fn a_detached_child_that_cannot_start_fails_its_step_and_says_why() {
    let flow = "{name: p, steps: {c: {flow: nowhere, detached: true}, after: {after: ['failed:c'], set: 1}}}";
    let t = Trial::new(flow, json!(null));
    let error = t.error_of("c");
    assert_eq!(error.kind, "FlowNotFound");
    assert_eq!(error.message, "the child run was not started: there is no flow nowhere");
    assert_eq!((t.status(), t.step("after")), ("completed", "completed"), "the failure can be handled");
}

#[test]
fn the_step_of_a_detached_child_is_open_until_the_child_has_started() {
    let mut model = Model::new();
    let names = ["{name: p, steps: {c: {flow: k, detached: true}}}", CHILD].map(|flow| model.register(flow));
    let run = model.start(&names[0], Start::default());
    assert_eq!(model.header(run).status().as_str(), "waiting", "its start is not delivered yet");
    model.submit(run, vec![Input::Cancel { by: "me".to_owned(), reason: None }]);
    model.deliver_all();
    let t = Trial { model, run };
    assert_eq!((t.status(), t.step("c")), ("cancelled", "cancelled"));
    assert_eq!(t.model.runs.len(), 1, "nothing waits for the child any more");
}

#[test]
fn a_detached_child_that_has_started_outlives_the_cancel_of_the_run_that_started_it() {
    let flow = "{name: p, steps: {c: {flow: k, detached: true}, d: {await: {manual: true}}}}";
    let mut t = Trial::with(&[flow, CHILD], json!(null));
    t.cancel();
    assert_eq!((t.status(), t.step("c")), ("cancelled", "completed"));
    assert_eq!(t.offered(), ["x"]);
}

#[test]
fn a_child_asked_for_before_a_cancel_does_not_start_during_finally() {
    for detached in [false, true] {
        let mut model = Model::new();
        let flow = format!(
            "{{name: p, steps: {{c: {{flow: k, detached: {detached}}}}},
               finally: {{steps: {{clean: {{await: {{manual: true}}}}}}}}}}"
        );
        let names = [&flow, CHILD].map(|flow| model.register(flow));
        let run = model.start(&names[0], Start::default());
        model.submit(run, vec![Input::Cancel { by: "me".to_owned(), reason: None }]);
        model.deliver_all();
        let t = Trial { model, run };
        assert_eq!((t.status(), t.step("c"), t.model.runs.len()), ("waiting", "cancelled", 1));
    }
}

#[test]
fn a_detached_child_starts_though_its_parent_has_completed_meanwhile() {
    let flow = "{name: p, steps: {c: {flow: k, detached: true}, r: {return: 1}}}";
    let t = Trial::with(&[flow, CHILD], json!(null));
    assert_eq!((t.status(), t.offered()), ("completed", vec!["x".to_owned()]));
}

#[test]
fn a_child_knows_the_top_of_its_tree_and_how_deep_it_is() {
    let flows = ["{name: p, steps: {c: {flow: q}}}", "{name: q, steps: {d: {flow: k, detached: true}}}", CHILD];
    let t = Trial::with(&flows, json!(null));
    let mut tree: Vec<_> = t.model.runs.values().map(|kept| (kept.run.header.depth, kept.run.header.root)).collect();
    tree.sort();
    assert_eq!(tree, [(0, None), (1, Some(t.run)), (2, Some(t.run))]);
}

#[test]
fn undo_goes_backwards_over_parallel_branches_one_at_a_time() {
    let mut t = Trial::new(
        "
name: f
steps:
  a: {undo: {run: ua}}
  b: {undo: {run: ub}}
  c: {after: [a], undo: {run: uc}}
  each: {after: [b], spread: '[1, 2]', run: h, undo: {run: ue}}
  z: {after: [c, each], retry: {attempts: 1}}
",
        json!("in"),
    );
    t.complete("b", json!("B"));
    t.complete("each[1]", json!("E1"));
    t.complete("a", json!("A"));
    t.complete("each[0]", json!("E0"));
    t.complete("c", json!("C"));
    t.fail("z", "no");
    assert_eq!(t.status(), "running");
    for (undo, input) in [
        ("undo:c", json!({"input": {"a": "A"}, "output": "C"})),
        ("undo:each[0]", json!({"input": 1, "output": "E0"})),
        ("undo:a", json!({"input": "in", "output": "A"})),
        ("undo:each[1]", json!({"input": 2, "output": "E1"})),
    ] {
        assert_eq!(t.offered(), [undo]);
        assert_eq!(t.input_of(undo), input);
        t.complete(undo, json!(null));
    }
    t.fail("undo:b", "can't");
    assert_eq!(
        (t.status(), t.error().message.as_str(), t.error().also[0].step.as_deref()),
        ("failed", "no", Some("undo:b"))
    );
}

#[test]
fn cancel_in_a_flow_with_undo_lets_attempts_in_flight_report() {
    let flow = "{name: f, steps: {a: {undo: {run: u}}, b: {undo: {run: u}}, c: {after: [a]}}}";
    let mut t = Trial::new(flow, json!(null));
    let (run, held) = t.claim("a");
    t.cancel();
    assert_eq!(t.steps(), "a draining, b cancelled, c cancelled");
    assert_eq!(t.status(), "running");
    t.complete_claimed(run, &held, json!("charged"));
    assert_eq!(t.offered(), ["undo:a"]);
    t.complete("undo:a", json!(null));
    assert_eq!(t.status(), "cancelled");

    let mut t = Trial::new(flow, json!(null));
    let (_, held) = t.claim("a");
    t.cancel();
    let task = TaskRef { activation: held.activation, fence: held.fence };
    t.send(Input::Expired { task, why: Expiry::LeaseLost, claim: Claim::default() });
    assert_eq!((t.step("a"), t.status()), ("cancelled", "cancelled"));
}

#[test]
fn an_undo_has_no_start_timeout_and_a_released_attempt_in_flight_ends() {
    let flow = "{name: f, steps: {a: {start_timeout: 10s, undo: {run: u}}, b: {after: [a]}}}";
    let mut t = Trial::new(flow, json!(null));
    t.complete("a", json!(1));
    t.fail("b", "no");
    let undo = &t.kept().tasks.values().next().expect("a task").task;
    assert_eq!((undo.name.as_str(), undo.start_timeout_ms), ("undo:a", None));

    let mut t = Trial::new(flow, json!(null));
    let (_, task) = t.claim("a");
    t.cancel();
    assert_eq!(t.step("a"), "draining");
    let task = TaskRef { activation: task.activation, fence: task.fence };
    t.send(Input::Expired { task, why: Expiry::Released, claim: Claim::default() });
    assert_eq!((t.step("a"), t.status()), ("cancelled", "cancelled"));
}

#[test]
fn finally_runs_after_cancel_and_sees_the_outcome() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {}}, finally: {steps: {clean: {input: '${run.outcome}'}}, timeout: 1m}}",
        json!(null),
    );
    let (run, late) = t.claim("a");
    t.cancel();
    assert_eq!((t.status(), t.input_of("finally.clean")), ("running", json!("cancelled")));
    let answer = t.say(run, &late, Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] });
    assert_eq!(answer, Answer::Closed);
    t.complete("finally.clean", json!(1));
    assert_eq!(t.status(), "cancelled");
    assert_eq!(t.kinds().last().unwrap(), "flow.cancelled");
}

#[test]
fn a_failed_finally_fails_a_run_that_would_have_completed() {
    let flow = "{name: f, output: '${steps.a.output}', steps: {a: {}}, finally: {steps: {clean: {}}, timeout: 1m}}";
    let mut t = Trial::new(flow, json!(null));
    t.complete("a", json!(1));
    t.fail("finally.clean", "stuck");
    assert_eq!((t.status(), t.error().step.as_deref()), ("failed", Some("finally.clean")));

    let mut t = Trial::new(flow, json!(null));
    t.complete("a", json!(1));
    t.tick();
    assert_eq!((t.status(), t.error().kind.as_str(), t.step("finally.clean")), ("failed", "Timeout", "cancelled"));
}

#[test]
fn a_deadline_fails_the_run_but_does_not_bind_finally() {
    let start = Start { deadline_ms: Some(1000), ..Start::default() };
    let mut t = Trial::starting(&["{name: f, steps: {a: {}}, finally: {steps: {clean: {}}}}"], start);
    t.tick();
    assert_eq!((t.status(), t.step("a")), ("running", "cancelled"));
    assert!(!t.tick());
    t.complete("finally.clean", json!(null));
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "DeadlineExceeded"));
}

#[test]
fn a_delayed_run_is_pending_and_can_be_cancelled() {
    let start = Start { delay_ms: Some(1000), ..Start::default() };
    let flow = "{name: f, steps: {a: {}}, finally: {steps: {clean: {}}}}";
    let mut t = Trial::starting(&[flow], start.clone());
    assert_eq!((t.status(), waits(&t).as_str()), ("pending", r#"@run {"what":"delay","until":null}"#));
    t.tick();
    assert_eq!((t.status(), t.step("a")), ("running", "queued"));
    let mut t = Trial::starting(&[flow], start);
    t.cancel();
    assert_eq!((t.status(), t.steps().as_str()), ("cancelled", ""));
}

#[test]
fn retries_follow_the_policy() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {retry: {attempts: 4, initial: 100ms, factor: 3, max: 500ms, non_retryable: [Fatal]}}}}",
        json!(null),
    );
    let mut seen = Vec::new();
    for _ in 0..3 {
        let before = t.model.now;
        t.fail_attempt("a", "x");
        t.tick();
        seen.push(t.model.now - before);
    }
    assert_eq!(seen, [100, 300, 500]);
    let (_, task) = t.claim("a");
    assert_eq!(task.attempt, 4);
    t.fail_attempt_of(t.run, &task);
    assert_eq!((t.step("a"), t.status()), ("failed", "failed"));

    let mut t = Trial::new("{name: f, steps: {a: {retry: {non_retryable: [Fatal]}}}}", json!(null));
    let (run, task) = t.claim("a");
    let fatal = Failure::new("Fatal", "no");
    t.say(run, &task, Op::Fail { error: fatal, retryable: true, retry_after_ms: None });
    assert_eq!(t.step("a"), "failed");
}

#[test]
fn retries_without_a_delay_stay_so_however_many_there_are() {
    let mut t = Trial::new("{name: f, steps: {a: {retry: {attempts: -1, initial: 0}}}}", json!(null));
    for _ in 0..1_100 {
        t.fail_attempt("a", "x");
    }
    assert_eq!(t.step("a"), "queued");
}

#[test]
fn a_worker_may_ask_for_another_delay_or_to_be_deferred_at_no_cost() {
    let mut t = Trial::new("{name: f, steps: {a: {retry: {attempts: 2}}}}", json!(null));
    let before = t.model.now;
    let (run, task) = t.claim("a");
    t.say(run, &task, Op::Defer { after_ms: 50, limit: Some("stripe".into()) });
    t.tick();
    let (run, task) = t.claim("a");
    assert_eq!((task.attempt, t.model.now - before), (1, 50));
    let error = Failure::new("Busy", "later");
    t.say(run, &task, Op::Fail { error, retryable: true, retry_after_ms: Some(30_000) });
    t.tick();
    assert_eq!(t.model.now - before, 30_050);
    let (_, task) = t.claim("a");
    assert_eq!(task.attempt, 2);
}

#[test]
fn a_defer_of_years_closes_its_limit_for_an_hour() {
    let mut t = Trial::new("{name: f, steps: {a: {limits: [api]}}}", json!(null));
    let (run, task) = t.claim("a");
    let task = TaskRef { activation: task.activation, fence: task.fence };
    let op = Op::Defer { after_ms: 10 * 365 * 86_400_000, limit: Some("api".into()) };
    let report = Input::Report(Report { task, seq: None, op, claim: Claim::default() });
    let kept = t.kept();
    let env = Env::new(t.model.now, [1; 32], "");
    let transition = decide(&kept.flow, &kept.run, &env, &[report]).unwrap();
    assert_eq!((kept.run.header.run, transition.slow_limits), (run, vec![("api".to_owned(), decide::MAX_SLOW_MS)]));
}

#[test]
fn a_lost_lease_is_an_attempt_and_a_poison_task_ends_as_failed() {
    let mut t = Trial::new("{name: f, steps: {a: {retry: {attempts: 2}}}}", json!(null));
    for _ in 0..2 {
        let (_, task) = t.claim("a");
        let lost = TaskRef { activation: task.activation, fence: task.fence };
        t.send(Input::Expired { task: lost, why: Expiry::LeaseLost, claim: Claim::default() });
        t.tick();
    }
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "LeaseLost"));
}

#[test]
fn a_released_task_costs_no_attempt_and_its_old_fence_is_stale() {
    let mut t = Trial::new("{name: f, steps: {a: {}}}", json!(null));
    let (run, old) = t.claim("a");
    let task = TaskRef { activation: old.activation, fence: old.fence };
    t.send(Input::Expired { task, why: Expiry::Released, claim: Claim::default() });
    let (_, new) = t.claim("a");
    assert_eq!(new.attempt, 1);
    assert!(new.fence > old.fence);
    let op = Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] };
    assert_eq!(t.say(run, &old, op), Answer::Stale);
}

#[test]
fn a_task_that_never_gets_to_its_worker_is_offered_less_and_less_often() {
    let mut t = Trial::new("{name: f, steps: {a: {}}}", json!(null));
    let mut delays = Vec::new();
    for _ in 0..14 {
        let (_, task) = t.claim("a");
        let (task, before) = (TaskRef { activation: task.activation, fence: task.fence }, t.model.now);
        t.send(Input::Expired { task, why: Expiry::Released, claim: Claim::default() });
        if t.step("a") != "queued" {
            t.tick();
        }
        delays.push(t.model.now - before);
    }
    assert_eq!(delays[..5], [0, 200, 400, 800, 1_600], "the first release has no delay");
    assert_eq!(delays[10..], [60_000; 4], "releases never fail the attempt");
    let (_, task) = t.claim("a");
    assert_eq!(task.attempt, 1);
}

#[test]
fn a_task_that_cannot_be_handed_over_fails_after_ten_tries_and_says_why() {
    let mut t = Trial::new("{name: f, steps: {a: {retry: {attempts: 5}}, b: {after: ['failed:a']}}}", json!(null));
    let undelivered = |t: &mut Trial| {
        let (_, task) = t.claim("a");
        let task = TaskRef { activation: task.activation, fence: task.fence };
        t.send(Input::Undelivered { task, claim: Claim::default(), why: "values: row 7 is damaged".to_owned() });
    };
    for _ in 0..9 {
        undelivered(&mut t);
        if t.step("a") != "queued" {
            t.tick();
        }
    }
    assert_eq!(t.step("a"), "queued");
    // An attempt that was delivered in between, and failed, resets the count.
    t.fail_attempt("a", "on its own");
    t.tick();
    for _ in 0..10 {
        assert_eq!(t.step("a"), "queued");
        undelivered(&mut t);
        if t.step("a") != "queued" && t.step("a") != "failed" {
            t.tick();
        }
    }
    assert_eq!((t.step("a"), t.step("b")), ("failed", "queued"));
    t.complete("b", json!(null));
    let error = t.kept().run.activations[1].clone();
    assert!(format!("{error:?}").contains("Undeliverable"), "{error:?}");
    assert!(format!("{error:?}").contains("10 times in a row: values: row 7 is damaged"), "{error:?}");
}

#[test]
fn a_timer_that_was_lost_is_set_again_for_its_own_time_while_it_is_waited_for() {
    let flow = "{name: f, steps: {a: {retry: {attempts: 2, initial: 1h, max: 1h, jitter: 0}}, g: {await: {time: 2h}}}}";
    let mut t = Trial::new(flow, json!(null));
    t.fail_attempt("a", "once");
    let timers: Vec<TimerKey> = t.kept().timers.keys().copied().collect();
    assert_eq!(timers.len(), 2);
    for timer in timers {
        t.send(Input::Rearm { timer, due: Due::After(5_000) });
        let other = TimerKey { kind: TimerKind::BackOff(Fence(77)), ..timer };
        t.send(Input::Rearm { timer: other, due: Due::After(1) });
    }
    assert_eq!(t.kept().timers.len(), 2, "nothing waits for another timer");
    let before = t.model.now;
    t.tick();
    assert_eq!(t.model.now - before, 5_000);
}

#[test]
fn a_start_timeout_fails_the_step() {
    let mut t = Trial::new("{name: f, steps: {a: {start_timeout: 1s}}}", json!(null));
    let row = t.kept().tasks.values().next().unwrap().task.clone();
    assert_eq!(row.start_timeout_ms, Some(1000));
    let task = TaskRef { activation: row.activation, fence: row.fence };
    t.send(Input::Expired { task, why: Expiry::StartTimeout, claim: Claim::default() });
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "StartTimeout"));
}

#[test]
fn a_report_with_a_known_seq_gets_its_first_answer_even_after_the_end() {
    let mut t = Trial::new("{name: f, steps: {a: {}}}", json!(null));
    let (run, task) = t.claim("a");
    let log = Op::Log(Log { level: "info".into(), msg: "hi".into(), meta: None });
    assert!(matches!(t.model.report(run, &task, Some(1), log.clone()), Answer::Applied(_)));
    assert!(matches!(t.model.report(run, &task, Some(1), log.clone()), Answer::Duplicate(_)));
    let done = Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] };
    assert!(matches!(t.model.report(run, &task, Some(3), done.clone()), Answer::Applied(_)));
    assert!(matches!(t.model.report(run, &task, Some(3), done.clone()), Answer::Duplicate(_)));
    assert_eq!(t.model.report(run, &task, Some(2), log), Answer::Closed, "2 was never applied");
    assert_eq!(t.model.report(run, &task, None, done), Answer::Closed);
    assert_eq!(t.kinds().iter().filter(|kind| kind.starts_with("runner.log")).count(), 1);
}

#[test]
fn a_report_numbered_zero_is_invalid_not_a_repeat() {
    let mut t = Trial::new("{name: f, steps: {a: {}}}", json!(null));
    let (run, task) = t.claim("a");
    let op = Op::Complete { output: json!(1).into(), emits: vec![], logs: vec![] };
    assert_eq!(t.model.report(run, &task, Some(0), op), Answer::Invalid("`seq` starts at 1".into()));
    assert_eq!(t.step("a"), "queued");
}

#[test]
fn a_paused_run_still_decides_but_offers_nothing() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {after: [a]}}}", json!(null));
    let (run, task) = t.claim("a");
    t.send(Input::Pause { by: "ann".into() });
    assert_eq!(t.status(), "paused");
    t.complete_claimed(run, &task, json!(1));
    assert_eq!((t.status(), t.step("b")), ("paused", "queued"));
    let fence = *t.kept().tasks.keys().next().unwrap();
    assert!(t.model.claim(run, fence).is_none());
    t.send(Input::Resume { by: "ann".into() });
    t.complete("b", json!(1));
    assert_eq!(t.status(), "completed");
}

#[test]
fn what_came_before_a_branch_is_read_after_it() {
    let flow = "{name: f, steps: {load: {}, l: {after: [load], if: 'steps.load.output > 1'},
        r: {after: [load], if: 'steps.load.output <= 1'},
        m: {after: [l, r], join: some, input: '${steps.load.output}'}}}";
    let mut t = Trial::new(flow, json!(null));
    t.complete("load", json!(5));
    t.complete("l", json!(null));
    assert_eq!((t.input_of("m"), t.step("r")), (json!(5), "skipped"));
}

#[test]
fn what_is_read_later_is_not_overtaken_by_hand() {
    let complete = || StepAct::Complete { output: json!("by hand").into() };
    let fail = || StepAct::Fail { error: Failure::new("", "by hand") };
    let waits =
        |reader: &str| Answer::Conflict(format!("b still waits for a, which {reader} reads after b: a must end first"));
    let flow = "{name: f, steps: {a: {}, b: {after: [a]}, c: {after: [b], input: '${steps.a.output}'}}}";
    let mut t = Trial::new(flow, json!(null));
    assert_eq!(t.act("b", complete()), waits("c"));
    assert_eq!(t.step("b"), "waiting");
    t.complete("a", json!(7));
    t.act("b", complete());
    assert_eq!(t.input_of("c"), json!(7));

    // A step that is skipped reads nothing.
    for act in [StepAct::Skip, fail()] {
        let mut t = Trial::new(flow, json!(null));
        assert!(matches!(t.act("b", act), Answer::Applied(_)));
        assert_eq!((t.step("a"), t.step("c")), ("queued", "skipped"));
    }

    // The reader may be further downstream or inside a group, and any end counts.
    let deep = "{name: f, steps: {a: {}, b: {after: [a]}, m: {after: ['ended:b']}, n: {after: [m], set: 1},
        g: {after: [n], steps: {x: {if: 'steps.a.output > 1'}}}}}";
    for act in [complete(), fail(), StepAct::Skip] {
        let mut t = Trial::new(deep, json!(null));
        assert_eq!(t.act("b", act), waits("g"));
    }

    // A reader that also waits for it itself is no conflict.
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {after: [a]}, c: {after: [b, 'ended:a'], input: '${steps.a.output}'}}}",
        json!(null),
    );
    assert!(matches!(t.act("b", complete()), Answer::Applied(_)));
    assert_eq!(t.step("c"), "waiting");
    t.complete("a", json!(7));
    assert_eq!(t.input_of("c"), json!(7));
}

#[test]
fn acts_on_one_activation() {
    let mut t = Trial::new(
        "{name: f, output: '${steps.b.output}', steps: {a: {}, b: {after: [a]}, c: {}, d: {}}}",
        json!(null),
    );
    t.act("b", StepAct::Complete { output: json!("by hand").into() });
    t.act("c", StepAct::Skip);
    t.act("d", StepAct::Fail { error: Failure::new("", "given up") });
    assert_eq!(t.steps(), "a queued, b completed, c skipped, d failed");
    assert_eq!(t.act("b", StepAct::Skip), Answer::Conflict("b has ended: completed".into()));
    assert_eq!(t.act("a", StepAct::Retry), Answer::Conflict("a is not waiting for a retry".into()));
    t.fail_attempt("a", "x");
    t.act("a", StepAct::Retry);
    assert_eq!(t.step("a"), "queued");
    t.complete("a", json!(1));
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "FailedByHand"));
    assert_eq!(t.act("a", StepAct::Retry), Answer::Conflict("the run has ended: failed".into()));
    let unknown = Answer::Invalid("there is no activation `x` in this run".into());
    assert_eq!(t.act("x", StepAct::Retry), unknown, "whether or not the run has ended");
}

#[test]
fn a_failure_that_comes_in_is_cut_to_bounds_at_a_character() {
    let mut long = Failure::new("Boom", "");
    long.message = "é".repeat(200_000);
    long.stack = Some("é".repeat(200_000));
    long.also = vec![Failure { also: vec![long.clone(); 20], ..long.clone() }; 20];
    let check = |error: &Failure| {
        assert!(error.message.len() <= failure::MAX_MESSAGE_BYTES && error.message.ends_with("é… (cut)"));
        let stack = error.stack.as_ref().expect("a stack");
        assert!(stack.len() <= failure::MAX_STACK_BYTES && stack.ends_with("é… (cut)"));
        assert!(error.also.len() <= failure::MAX_ALSO && error.also.iter().all(|other| other.also.is_empty()));
        assert!(json!(error).to_string().len() < 500_000);
    };
    let mut t = Trial::new("{name: f, steps: {a: {retry: {attempts: 1}}, b: {}}}", json!(null));
    let (run, task) = t.claim("a");
    t.say(run, &task, Op::Fail { error: long.clone(), retryable: true, retry_after_ms: None });
    t.act("b", StepAct::Fail { error: long.clone() });
    check(&t.error());
    for id in [1, 2] {
        let run::State::Ended(run::End::Failed(error)) = &t.kept().run.activations[id].state else { panic!("{id}") };
        check(error);
    }

    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", CodeOp::Failed { error: long, retryable: false, retry_after_ms: None, retry: None });
    let run::State::Ended(run::End::Failed(error)) = &t.kept().run.activations[1].state else { panic!("not failed") };
    check(error);

    let mut t = Trial::new("{name: f, steps: {a: {fail: '${input}'}}}", json!("é".repeat(200_000)));
    t.model.deliver_all();
    assert!(t.error().message.len() <= failure::MAX_MESSAGE_BYTES);
}

#[test]
fn completing_a_group_by_hand_cancels_what_is_in_it() {
    let mut t = Trial::new(
        "{name: f, output: '${steps.g.output}', steps: {g: {steps: {a: {}, b: {after: [a]}}}}}",
        json!(null),
    );
    t.act("g", StepAct::Complete { output: json!("x").into() });
    assert_eq!(t.steps(), "g completed, g.a cancelled, g.b cancelled");
    assert_eq!((t.status(), t.output()), ("completed", json!("x")));
}

#[test]
fn an_act_on_a_group_that_is_ending_is_refused() {
    let flow = "{name: f, steps: {g: {steps: {a: {undo: {run: u}}, b: {}, r: {after: [b], return: 1}}}}}";
    let mut t = Trial::new(flow, json!(null));
    let (run, task) = t.claim("g.a");
    t.complete("g.b", json!(1));
    assert_eq!(t.step("g.a"), "draining");
    let answer = t.act("g", StepAct::Fail { error: Failure::new("", "by hand") });
    assert_eq!(answer, Answer::Conflict("g is already ending".into()));
    t.complete_claimed(run, &task, json!(2));
    assert_eq!((t.output_of("g"), t.status()), (json!(1), "completed"));
}

#[test]
fn an_act_is_recorded_under_the_name_of_its_activation() {
    let mut t = Trial::new("{name: f, steps: {e: {spread: 'range(5)', run: h}}}", json!(null));
    t.act("e[+03]", StepAct::Skip);
    assert!(t.kinds().contains(&"act e[3]".to_owned()), "{:?}", t.kinds());
}

#[test]
fn at_least_with_rest_cancel_cancels_the_rest() {
    let mut t = Trial::new(
        "{name: f, steps: {a: {}, b: {}, c: {}, z: {after: [a, b, c], join: {at_least: 2, rest: cancel}}}}",
        json!(null),
    );
    t.complete("a", json!(1));
    t.complete("c", json!(3));
    assert_eq!(t.steps(), "a completed, b cancelled, c completed, z queued");
    assert_eq!(t.input_of("z"), json!({"a": 1, "c": 3}));
}

#[test]
fn events_in_a_group_stay_in_the_group() {
    let mut t = Trial::new(
        "{name: f, steps: {g: {spread: '[1, 2]', steps: {a: {emits: [e]}, b: {subscribes: [e], run: h}}}}}",
        json!(null),
    );
    t.complete_emitting("g[0].a", json!(null), &[("e", json!("zero"))]);
    assert_eq!((t.step("g[0].b"), t.step("g[1].b")), ("queued", "waiting"));
}

#[test]
fn an_event_of_a_group_hides_the_one_outside_even_when_it_was_not_emitted() {
    let flow = "
name: f
steps:
  p: {emits: [e]}
  g: {subscribes: [e], steps: {x: {emits: [e]}, y: {subscribes: [e], after: [x], join: some, set: '${events.e}'}}}
";
    let mut t = Trial::new(flow, json!(null));
    t.complete_emitting("p", json!(null), &[("e", json!("outside"))]);
    t.complete("g.x", json!(null));
    assert_eq!(t.step("g.y"), "failed");
}

#[test]
fn ten_thousand_items_are_cancelled_in_several_transitions_with_the_terminal_record_in_the_last() {
    let items: Vec<u32> = (0..10_000).collect();
    let mut t = Trial::new("{name: f, steps: {e: {spread: input, run: h, max_parallel: 10000}}}", json!(items));
    assert_eq!(t.kept().tasks.len(), 10_000);
    let versions = t.kept().run.header.version.0;
    t.model.submit(t.run, vec![Input::Cancel { by: "ann".into(), reason: None }]);
    assert_eq!(t.status(), "running", "one transition is not enough");
    t.model.deliver_all();
    assert_eq!((t.status(), t.kinds().last().unwrap().as_str()), ("cancelled", "flow.cancelled"));
    let transitions = t.kept().run.header.version.0 - versions;
    assert!((10..=13).contains(&transitions), "{transitions}");
}

// Code runs.

const CODE: &str = "{name: job, code: true, step_retry: {attempts: 2, initial: 1s}, retry: {attempts: 2, initial: 1s}}";

fn code(t: &mut Trial, task: &(RunId, Task), name: &str, op: CodeOp) -> Answer {
    t.say(task.0, &task.1, Op::Code { name: name.to_owned(), op })
}

/// The result of a report on an entry, without its details.
fn of_entry(t: &Trial) -> ReportResult {
    ReportResult { at: Some(t.model.now), ..ReportResult::default() }
}

fn done(output: serde_json::Value) -> CodeOp {
    CodeOp::Done { output: output.into(), undo: false }
}

fn memo(t: &Trial) -> Vec<String> {
    t.kept().run.memo(0).map(|entry| format!("{} {:?}", entry.name, entry.state).chars().take(40).collect()).collect()
}

#[test]
fn a_code_run_remembers_its_steps_sleeps_and_completes() {
    let mut t = Trial::new(CODE, json!({"order": 7}));
    let driver = t.claim("@run");
    assert_eq!((driver.1.handler.as_str(), driver.1.kind), ("job", TaskKind::Run));
    let answer = code(&mut t, &driver, "pay", done(json!("paid")));
    let recorded = ReportResult { decision: Some(Decision::Recorded), n: Some(1), ..of_entry(&t) };
    assert_eq!(answer, Answer::Applied(recorded));
    code(&mut t, &driver, "nap", CodeOp::Sleep { due: Due::After(5000) });
    assert!(matches!(t.say(driver.0, &driver.1, Op::Suspend { seen: None }), Answer::Applied(_)));
    assert_eq!((t.status(), t.offered().len()), ("waiting", 0));
    t.tick();
    let driver = t.claim("@run");
    assert_eq!(driver.1.attempt, 1, "a resume keeps its attempt");
    t.complete_claimed(driver.0, &driver.1, json!("all done"));
    assert_eq!((t.status(), t.output()), ("completed", json!("all done")));
    assert!(!t.kinds().contains(&"step.completed @run".to_owned()));
}

#[test]
fn the_task_of_a_function_has_the_limits_labels_and_priority_of_its_flow() {
    let flow = "{name: job, code: true, limits: [api, {tenant: '${input.t}'}], requires: [gpu], priority: 4}";
    let mut t = Trial::new(flow, json!({"t": "acme"}));
    let driver = t.claim("@run");
    let limits = [("api".to_owned(), None), ("tenant".to_owned(), Some("\"acme\"".to_owned()))];
    assert_eq!((&driver.1.limits[..], driver.1.priority), (&limits[..], 4));
    assert_eq!(driver.1.requires, ["gpu"]);
    // Its calls are separate tasks.
    code(
        &mut t,
        &driver,
        "embed",
        CodeOp::Call { handler: "embed".into(), input: json!(1).into(), queue: None, options: None },
    );
    let call = t.claim("embed");
    assert_eq!((call.1.limits.len(), call.1.requires.len(), call.1.priority), (0, 0, 0));
}

#[test]
fn a_code_run_fails_whose_limit_has_no_key() {
    let flow = "{name: job, code: true, limits: [{tenant: '${input.t + 1}'}]}";
    let t = Trial::new(flow, json!({"t": {}}));
    assert_eq!((t.status(), t.offered().len()), ("failed", 0));
}

#[test]
fn news_that_came_before_the_suspend_wakes_at_once() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(
        &mut t,
        &driver,
        "embed",
        CodeOp::Call { handler: "embed".into(), input: json!(1).into(), queue: None, options: None },
    );
    t.complete("embed", json!([0.5]));
    t.say(driver.0, &driver.1, Op::Suspend { seen: None });
    assert_eq!(t.offered(), ["@run"], "the call's end was not in the claim's memo");
    let driver = t.claim("@run");
    let seen = t.kept().run.header.code.as_ref().unwrap().news;
    let answer = t.say(driver.0, &driver.1, Op::Suspend { seen: Some(seen) });
    assert!(matches!(answer, Answer::Invalid(_)), "nothing is pending and nothing unseen: {answer:?}");
}

#[test]
fn a_suspend_that_claims_to_have_seen_what_has_not_happened_does_not_sleep_through_it() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(&mut t, &driver, "nap", CodeOp::Sleep { due: Due::After(10) });
    t.say(driver.0, &driver.1, Op::Suspend { seen: Some(99) });
    assert_eq!(t.status(), "waiting");
    t.tick();
    assert_eq!(t.offered(), ["@run"]);
}

#[test]
fn a_known_name_of_the_same_kind_is_the_same_entry_and_pay_2_is_another() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    let call = CodeOp::Call { handler: "h".into(), input: json!(1).into(), queue: None, options: None };
    code(&mut t, &driver, "price", call.clone());
    let answer = code(&mut t, &driver, "price", call);
    assert!(matches!(answer, Answer::Duplicate(ReportResult { known: true, .. })), "in flight: {answer:?}");
    assert_eq!(t.offered(), ["price"]);
    code(&mut t, &driver, "pay", done(json!(1)));
    code(&mut t, &driver, "pay#2", done(json!(2)));
    assert_eq!((t.output_of("pay"), t.output_of("pay#2")), (json!(1), json!(2)));
}

#[test]
fn a_changed_kind_under_a_remembered_name_fails_the_run_clearly() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(json!(1)));
    code(&mut t, &driver, "pay", CodeOp::Sleep { due: Due::After(1) });
    assert_eq!(t.status(), "failed");
    assert_eq!(
        t.error().message,
        "`pay` is recorded as a step, but the function now uses the name for a sleep; choose another name"
    );
}

#[test]
fn a_failing_code_step_is_retried_by_its_function_and_then_failed() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    let broken =
        CodeOp::Failed { error: Failure::new("Boom", "x"), retryable: true, retry_after_ms: None, retry: None };
    let answer = code(&mut t, &driver, "pay", broken.clone());
    let decision = Some(Decision::Retry { after_ms: 1000 });
    let retry = ReportResult { decision, n: Some(1), ..of_entry(&t) };
    assert_eq!(answer, Answer::Applied(retry));
    t.say(driver.0, &driver.1, Op::Suspend { seen: None });
    assert_eq!(t.status(), "waiting");
    t.tick();
    let driver = t.claim("@run");
    let answer = code(&mut t, &driver, "pay", broken);
    assert!(matches!(answer, Answer::Applied(ReportResult { decision: Some(Decision::Failed), .. })));
    // The function fails too: its next attempt discards failed entries.
    t.fail_attempt_of(driver.0, &driver.1);
    t.tick();
    let driver = t.claim("@run");
    assert_eq!((driver.1.attempt, memo(&t)), (2, vec![]));
    code(&mut t, &driver, "pay", done(json!("at last")));
    assert_eq!((t.step("pay"), t.output_of("pay~2")), ("failed", json!("at last")));
}

#[test]
fn the_back_off_of_a_code_step_is_ended_by_an_act_and_its_function_hears_of_it() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    let broken =
        CodeOp::Failed { error: Failure::new("Boom", "x"), retryable: true, retry_after_ms: None, retry: None };
    code(&mut t, &driver, "pay", broken.clone());
    let seen = t.kept().run.header.code.as_ref().unwrap().n;
    assert!(matches!(t.act("pay", StepAct::Retry), Answer::Applied(_)));
    assert_eq!(memo(&t), ["pay Retry { due: true }"], "a change for the claimed task");
    assert!(t.kept().run.header.code.as_ref().unwrap().news > seen);
    let over = "the back-off of pay is over: its function will retry it";
    assert_eq!(t.act("pay", StepAct::Retry), Answer::Conflict(over.into()));
    assert!(!t.tick(), "the timer was cleared with the back-off");

    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", broken);
    t.say(driver.0, &driver.1, Op::Suspend { seen: None });
    assert_eq!((t.status(), t.offered().len()), ("waiting", 0));
    t.act("pay", StepAct::Retry);
    assert_eq!(t.offered(), ["@run"], "offered again");
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(json!("paid")));
    assert_eq!(t.output_of("pay"), json!("paid"));
}

#[test]
fn a_lost_lease_counts_only_without_progress() {
    let mut t = Trial::new(CODE, json!(null));
    let lose = |t: &mut Trial, (_, task): &(RunId, Task)| {
        let claim = t.kept().tasks[&task.fence].claim.clone();
        let task = TaskRef { activation: task.activation, fence: task.fence };
        t.send(Input::Expired { task, why: Expiry::LeaseLost, claim });
    };
    for step in ["a", "b", "c"] {
        let driver = t.claim("@run");
        assert_eq!(driver.1.attempt, 1);
        code(&mut t, &driver, step, done(json!(1)));
        lose(&mut t, &driver);
    }
    let driver = t.claim("@run");
    lose(&mut t, &driver);
    t.tick();
    let driver = t.claim("@run");
    assert_eq!(driver.1.attempt, 2);
    lose(&mut t, &driver);
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "LeaseLost"));
}

#[test]
fn a_code_run_waits_for_a_person_and_for_a_child() {
    let mut t = Trial::with(&[CODE, CHILD], json!(null));
    let driver = t.claim("@run");
    let wait = CodeOp::Wait { wait: CodeWait::Manual, timeout_ms: Some(60_000) };
    let answer = code(&mut t, &driver, "ok", wait.clone());
    let Answer::Applied(ReportResult { token: Some(token), .. }) = answer else { panic!("{answer:?}") };
    let again = code(&mut t, &driver, "ok", wait);
    assert!(matches!(again, Answer::Duplicate(ReportResult { token: Some(same), .. }) if same == token));
    assert!(
        waits(&t).contains(r#"ok {"what":"gate","reason":"manual","event":null,"key":null,"until":null}"#),
        "{}",
        waits(&t)
    );
    let webhook = CodeOp::Wait { wait: CodeWait::Webhook, timeout_ms: None };
    code(&mut t, &driver, "hook", webhook);
    assert!(
        waits(&t).contains(r#"hook {"what":"gate","reason":"webhook","event":null,"key":null,"until":null}"#),
        "{}",
        waits(&t)
    );
    code(
        &mut t,
        &driver,
        "kid",
        CodeOp::Child { flow: "k".into(), input: json!(1).into(), detached: false, options: None },
    );
    t.say(driver.0, &driver.1, Op::Suspend { seen: None });
    t.open_gate("ok", json!("yes"));
    t.complete("x", json!("kid's"));
    assert_eq!((t.output_of("ok"), t.output_of("kid")), (json!("yes"), json!("kid's")));
    assert_eq!(t.offered(), ["@run"]);
}

#[test]
fn a_function_that_completes_cancels_what_it_left_open() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(&mut t, &driver, "nap", CodeOp::Sleep { due: Due::After(5000) });
    code(
        &mut t,
        &driver,
        "call",
        CodeOp::Call { handler: "h".into(), input: json!(1).into(), queue: None, options: None },
    );
    t.complete_claimed(driver.0, &driver.1, json!("done"));
    assert_eq!((t.steps().as_str(), t.status()), ("nap cancelled, call cancelled", "completed"));
}

#[test]
fn continue_as_new_goes_on_in_another_run_that_is_still_the_parents_child() {
    let parent = "{name: p, output: '${steps.c.output}', steps: {c: {flow: job}}}";
    let mut t = Trial::with(&[parent, CODE], json!(null));
    let driver = t.claim("@run");
    t.say(driver.0, &driver.1, Op::ContinueAs { input: json!({"page": 2}).into() });
    assert_eq!(t.step("c"), "child");
    assert_eq!(t.model.header(driver.0).status().as_str(), "completed");
    assert_eq!(t.input_of("@run"), json!({"page": 2}));
    let next = t.claim("@run");
    assert_eq!(t.model.header(driver.0).continued_as, Some(next.0));
    t.complete_claimed(next.0, &next.1, json!("end"));
    assert_eq!((t.status(), t.output()), ("completed", json!("end")));
}

#[test]
fn a_pinned_code_run_is_offered_to_its_build_only() {
    let mut t = Trial::new("{name: job, code: true, builds: pinned}", json!(null));
    let driver = t.claim("@run");
    assert_eq!(driver.1.build, None);
    code(&mut t, &driver, "nap", CodeOp::Sleep { due: Due::After(1) });
    t.say(driver.0, &driver.1, Op::Suspend { seen: None });
    t.tick();
    assert_eq!(t.claim("@run").1.build.as_deref(), Some("build-1"));
}

#[test]
fn an_input_between_two_parts_of_a_sweep_keeps_to_the_limit() {
    let flow = "
name: f
steps:
  e: {spread: 'range(3000)', max_parallel: 3000, run: h}
  w: {await: {webhook: true}, return: 1}
";
    let mut t = Trial::new(flow, json!(null));
    let run = t.run;
    t.model.submit(run, vec![Input::Act { activation: "e".into(), by: "ann".into(), act: StepAct::Skip }]);
    // The rest of the sweep is still an undelivered message when the gate opens.
    let gate = *t.kept().gates.keys().next().expect("a gate");
    t.model.submit(run, vec![Input::OpenGate { activation: gate, by: OpenedBy::Webhook, payload: json!(1).into() }]);
    t.model.deliver_all();
    assert_eq!((t.status(), t.output()), ("completed", json!(1)));
}

// Retry and rerun.

fn again(t: &Trial, reuse: Vec<run::Reused>) -> Start {
    t.model.again(t.run, reuse)
}

#[test]
fn a_retry_takes_over_what_completed_and_runs_the_rest() {
    let flow = "
name: f
output: '${steps.z.output}'
steps:
  a: {emits: [e]}
  maybe: {after: [a], if: 'false'}
  b: {subscribes: [e]}
  each: {after: [a], spread: '[1, 2, 3]', run: h, on_item_failure: collect, max_failures: 0, max_parallel: 3}
  z: {after: [b, each, 'ended:maybe']}
";
    let mut t = Trial::new(flow, json!("in"));
    t.complete_emitting("a", json!("A"), &[("e", json!("E"))]);
    t.complete("b", json!("x".repeat(1000)));
    t.complete("each[0]", json!(10));
    t.complete("each[2]", json!(30));
    t.fail("each[1]", "no");
    assert_eq!(t.status(), "failed");
    let start = again(&t, decide::retry(&t.kept().flow, &t.kept().run));
    let old = t.run;
    t.run = t.model.start("f", start);
    t.model.deliver_all();
    assert_eq!(t.offered(), ["each[1]"], "{}", t.steps());
    let reused: Vec<String> = t
        .kept()
        .records
        .iter()
        .map(|record| json!(record).to_string())
        .filter(|line| line.contains("reusedFrom"))
        .collect();
    assert_eq!(reused.len(), 5, "{reused:?}");
    assert!(reused.iter().all(|line| line.contains(&old.to_string())));
    t.complete("each[1]", json!(20));
    assert_eq!(t.input_of("z")["each"], json!([{"output": 10}, {"output": 20}, {"output": 30}]));
    t.complete("z", json!("end"));
    assert_eq!((t.status(), t.output()), ("completed", json!("end")));
}

#[test]
fn a_retry_waits_for_all_values_that_it_takes_over() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {after: [a], retry: {attempts: 1}}}}", json!("in"));
    let large = json!("x".repeat(1000));
    t.complete("a", large.clone());
    t.fail("b", "no");
    let complete = again(&t, decide::retry(&t.kept().flow, &t.kept().run));
    assert!(!complete.values.is_empty());
    let values = complete.values.clone();
    let start = Start { values: Vec::new(), more_values: true, ..complete };
    t.run = t.model.start("f", start.clone());
    assert_eq!((t.status(), t.offered().len()), ("pending", 0));
    t.send(Input::TakeOver { values: Vec::new(), more: true });
    assert_eq!((t.status(), t.offered().len()), ("pending", 0));
    let first_new = t.kept().run.header.next_value;
    t.send(Input::TakeOver { values: values.clone(), more: false });
    assert_eq!((t.offered(), t.output_of("a")), (vec!["b".to_owned()], large.clone()));
    t.complete("b", large);
    assert_eq!((t.status(), t.kept().timers.len()), ("completed", 0));
    assert!(values.iter().all(|(id, _)| id.0 < first_new) && t.kept().run.header.next_value > first_new);
    // The sender of the values has died: the run fails and accepts no more.
    t.run = t.model.start("f", start);
    t.send(Input::Due(TimerKey { activation: ActId(0), kind: TimerKind::Delay }));
    assert_eq!(t.status(), "failed");
    assert!(t.kinds().contains(&"flow.failed".to_owned()), "{:?}", t.kinds());
    let late = t.model.submit(t.run, vec![Input::TakeOver { values, more: false }]);
    assert_eq!(late, [Answer::Closed]);
}

#[test]
fn a_retry_and_a_rerun_say_right_after_their_start_who_asked_for_them() {
    let mut t = Trial::new("{name: f, steps: {a: {}}}", json!(null));
    t.fail("a", "x");
    let by = || "ann".to_owned();
    let cases = [
        (Again::Retry { by: by() }, json!({"act": "retry", "by": "ann"})),
        (Again::Rerun { by: by(), from: None }, json!({"act": "rerun", "by": "ann"})),
        (Again::Rerun { by: by(), from: Some("a".into()) }, json!({"act": "rerun", "by": "ann", "from": "a"})),
    ];
    for (how, data) in cases {
        let run = t.model.start("f", Start { again: Some(how), ..again(&t, Vec::new()) });
        let second = json!(t.model.runs[&run].records[1]);
        assert_eq!((&second["kind"], &second["data"]), (&json!("act"), &data));
    }
}

#[test]
fn a_rerun_runs_a_step_again_with_everything_after_it() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {after: [a]}, c: {after: [b]}, d: {after: [a]}}}", json!(null));
    for step in ["a", "b", "c", "d"] {
        t.complete(step, json!(step));
    }
    let start = again(&t, decide::rerun(&t.kept().flow, &t.kept().run, "b").unwrap());
    t.run = t.model.start("f", start);
    assert_eq!(t.steps(), "a completed, b queued, c waiting, d completed");
    assert!(!t.kinds().contains(&"act".to_owned()), "no requester was given");
    let wrong = decide::rerun(&t.kept().flow, &t.kept().run, "x");
    assert_eq!(wrong, Err("there is no step `x` at the top level of f".into()));
}

#[test]
fn what_was_undone_runs_again() {
    let mut t =
        Trial::new("{name: f, steps: {a: {undo: {run: u}}, b: {after: [a], retry: {attempts: 1}}}}", json!(null));
    t.complete("a", json!("A"));
    t.fail("b", "no");
    t.complete("undo:a", json!(null));
    assert_eq!(t.status(), "failed");
    assert_eq!(decide::retry(&t.kept().flow, &t.kept().run), vec![]);
}

#[test]
fn what_was_undone_inside_a_group_or_a_spread_runs_again() {
    let flow = "
name: f
steps:
  g: {steps: {a: {undo: {run: u}}, k: {}}}
  e: {after: [g], spread: '[1, 2]', run: h, undo: {run: u}}
  z: {after: [e]}
";
    let mut t = Trial::new(flow, json!(null));
    for step in ["g.a", "g.k", "e[0]", "e[1]"] {
        t.complete(step, json!(step));
    }
    t.fail("z", "no");
    for undo in ["undo:e[1]", "undo:e[0]", "undo:g.a"] {
        t.complete(undo, json!(null));
    }
    assert_eq!(t.status(), "failed");
    let reused = decide::retry(&t.kept().flow, &t.kept().run);
    assert_eq!(reused.iter().map(|reused| reused.activation.as_str()).collect::<Vec<_>>(), ["g.k"]);
    let start = again(&t, reused);
    t.run = t.model.start("f", start);
    assert_eq!((t.step("g.a"), t.step("g.k")), ("queued", "completed"));
}

#[test]
fn a_retried_code_run_keeps_its_completed_entries() {
    let mut t = Trial::new(CODE, json!(null));
    let driver = t.claim("@run");
    code(&mut t, &driver, "pay", done(json!("paid")));
    let error = Failure::new("Boom", "for good");
    t.say(driver.0, &driver.1, Op::Fail { error, retryable: false, retry_after_ms: None });
    assert_eq!(t.status(), "failed");
    let start = again(&t, decide::retry(&t.kept().flow, &t.kept().run));
    t.run = t.model.start("job", start);
    assert_eq!((t.step("pay"), t.output_of("pay")), ("completed", json!("paid")));
    let driver = t.claim("@run");
    assert!(matches!(code(&mut t, &driver, "pay", done(json!("twice"))), Answer::Duplicate(_)));
}

#[test]
fn a_retried_code_run_can_be_cancelled_while_it_remembers() {
    let reuse = |n| run::Reused {
        activation: format!("s{n:04}"),
        how: run::TakenOver::Whole(run::End::Completed(json!(n).into())),
        input: None,
        emits: Vec::new(),
        memo: Some(run::MemoKind::Step),
        n,
        undo: false,
    };
    for (entries, delivered) in [(1_500, 0), (2_500, 0), (3_500, 1), (3_500, 9)] {
        let mut model = model::Model::new();
        model.register(CODE);
        let run = model.start("job", Start { reuse: (0..entries).map(reuse).collect(), ..Start::default() });
        for _ in 0..delivered {
            model.deliver();
        }
        model.submit(run, vec![Input::Cancel { by: "ann".into(), reason: None }]);
        model.deliver_all();
        assert_eq!(model.header(run).status().as_str(), "cancelled", "{entries} entries, {delivered} messages");
    }
}

#[test]
fn what_a_rerun_took_over_from_a_spread_is_undone() {
    let mut t = Trial::new(
        "{name: f, steps: {e: {spread: '[1, 2]', run: h, undo: {run: u}}, p: {undo: {run: u}}, b: {after: [e, p], retry: {attempts: 1}}}}",
        json!(null),
    );
    t.complete("e[0]", json!("A"));
    t.complete("e[1]", json!("B"));
    t.complete("p", json!("P"));
    t.complete("b", json!("ok"));
    assert_eq!(t.status(), "completed");
    let start = again(&t, decide::rerun(&t.kept().flow, &t.kept().run, "b").unwrap());
    t.run = t.model.start("f", start);
    t.model.deliver_all();
    t.fail("b", "no");
    let mut undone = vec![];
    while let Some(name) = t.offered().first().cloned() {
        undone.push(name.clone());
        t.complete(&name, json!(null));
    }
    undone.sort();
    assert_eq!(undone, ["undo:e[0]", "undo:e[1]", "undo:p"]);
}

#[test]
fn a_group_that_is_taken_apart_passes_its_gate_and_a_loop_its_rounds() {
    let mut t = Trial::new(
        "
name: f
steps:
  g: {await: {manual: true}, steps: {p: {undo: {run: u}, input: '${gate}'}}}
  l: {repeat: {until: 'round == 1', max: 3}, steps: {q: {undo: {run: u}}}}
  z: {after: [g, l], retry: {attempts: 1}}
",
        json!(null),
    );
    t.open_gate("g", json!("approved"));
    for step in ["g.p", "l[0].q", "l[1].q"] {
        t.complete(step, json!(step));
    }
    t.complete("z", json!(1));
    let start = again(&t, decide::rerun(&t.kept().flow, &t.kept().run, "z").unwrap());
    t.run = t.model.start("f", start);
    t.model.deliver_all();
    assert_eq!((t.offered(), t.step("g"), t.step("l")), (vec!["z".to_owned()], "completed", "completed"));
    t.fail("z", "no");
    let mut undone = Vec::new();
    while let Some(name) = t.offered().first().cloned() {
        undone.push(name.clone());
        t.complete(&name, json!(null));
    }
    undone.sort();
    assert_eq!(undone, ["undo:g.p", "undo:l[0].q", "undo:l[1].q"]);
}

#[test]
fn a_loop_that_failed_in_a_round_goes_on_in_it_and_one_that_ran_out_of_rounds_begins_again() {
    let flow = "{name: f, steps: {l: {repeat: {until: 'steps.q.output', max: 2}, steps: {q: {retry: {attempts: 1}}}}}}";
    let mut t = Trial::new(flow, json!(null));
    t.complete("l[0].q", json!(false));
    t.fail("l[1].q", "no");
    let start = again(&t, decide::retry(&t.kept().flow, &t.kept().run));
    t.run = t.model.start("f", start);
    assert_eq!((t.step("l[0].q"), t.offered()), ("completed", vec!["l[1].q".to_owned()]));

    let mut t = Trial::new(flow, json!(null));
    t.complete("l[0].q", json!(false));
    t.complete("l[1].q", json!(false));
    assert_eq!(t.error().kind, "MaxRounds");
    let start = again(&t, decide::retry(&t.kept().flow, &t.kept().run));
    t.run = t.model.start("f", start);
    assert_eq!(t.offered(), ["l[0].q"]);
}

#[test]
fn of_several_failures_the_first_in_time_is_the_error() {
    let mut t = Trial::new("{name: f, steps: {a: {}, b: {}}}", json!(null));
    t.fail("b", "first");
    t.fail("a", "second");
    assert_eq!((t.error().message.as_str(), t.error().also[0].message.as_str()), ("first", "second"));
}

#[test]
fn a_timer_of_one_attempt_that_fires_again_does_not_cut_the_next_wait_short() {
    let mut t = Trial::new(CODE.replace("attempts: 2", "attempts: 5").as_str(), json!(null));
    let driver = t.claim("@run");
    let broken =
        CodeOp::Failed { error: Failure::new("Boom", "x"), retryable: true, retry_after_ms: None, retry: None };
    code(&mut t, &driver, "pay", broken.clone());
    let first = *t.kept().timers.keys().next().expect("the timer");
    t.tick();
    code(&mut t, &driver, "pay", broken);
    assert_eq!(t.send(Input::Due(first)), Answer::Nothing);
}

#[test]
fn a_retry_does_not_run_a_join_again_that_was_decided_without_what_was_cancelled() {
    let flow = "
name: f
steps:
  a: {}
  b: {}
  z: {after: [a, b], join: {at_least: 1, rest: cancel}}
  first: {after: [a, b], join: any}
  y: {after: [z, first], retry: {attempts: 1}}
";
    let mut t = Trial::new(flow, json!(null));
    t.complete("a", json!(1));
    assert_eq!(t.step("b"), "cancelled");
    t.complete("z", json!("charged"));
    t.complete("first", json!("charged too"));
    t.fail("y", "no");
    let start = again(&t, decide::retry(&t.kept().flow, &t.kept().run));
    t.run = t.model.start("f", start);
    assert_eq!(t.steps(), "a completed, b cancelled, first completed, y queued, z completed");
}

#[test]
fn a_gate_takes_no_event_that_an_earlier_gate_of_the_run_took() {
    let mut t = Trial::new(
        "{name: f, steps: {g: {await: {event: paid}}, h: {await: {event: paid}}, i: {after: [g, h], await: {event: paid}}}}",
        json!(null),
    );
    let open = |t: &mut Trial, activation: u32, position: u64| {
        let (activation, by) = (ActId(activation), OpenedBy::Event { position });
        t.send(Input::OpenGate { activation, by, payload: json!(position).into() })
    };
    assert!(matches!(open(&mut t, 1, 5), Answer::Applied(_)));
    assert!(matches!(open(&mut t, 2, 5), Answer::Applied(_)), "one event opens all open gates");
    assert_eq!(open(&mut t, 3, 5), Answer::Nothing);
    assert_eq!(t.step("i"), "gated");
    assert!(matches!(open(&mut t, 3, 6), Answer::Applied(_)));
    assert_eq!((t.status(), t.output_of("i")), ("completed", json!(6)));
}

#[test]
fn a_publish_goes_out_once_with_an_id_of_its_own_even_if_the_attempt_fails() {
    let mut t = Trial::new("{name: f, steps: {a: {}}}", json!(null));
    let (run, task) = t.claim("a");
    let publish =
        Op::Publish { name: "paid".into(), as_name: None, key: Some(json!(7).into()), payload: json!("x").into() };
    assert!(matches!(t.model.report(run, &task, Some(1), publish.clone()), Answer::Applied(_)));
    assert!(matches!(t.model.report(run, &task, Some(1), publish.clone()), Answer::Duplicate(_)));
    assert!(matches!(t.model.report(run, &task, Some(2), publish), Answer::Applied(_)));
    t.fail_attempt_of(run, &task);
    let ids: Vec<&str> = t.model.published.iter().map(|publish| publish.id.as_str()).collect();
    assert_eq!(ids, [format!("{run}.1"), format!("{run}.2")]);
}

#[test]
fn a_task_carries_what_its_queue_needs_to_know() {
    let flow = "{name: f, steps: {a: {run: h, queue: q, priority: 2, requires: [gpu], timeout: 5s, key: input.t, limits: [stripe, {tenant: '${input.t}'}]}}}";
    let start = Start { input: Some(json!({"t": 1.0}).into()), priority: 3, ..Start::default() };
    let mut t = Trial::starting(&[flow], start);
    let (_, task) = t.claim("a");
    assert_eq!((task.queue.as_str(), task.priority, task.timeout_ms), ("q", 5, Some(5_000)));
    assert_eq!((task.requires, task.key.as_deref()), (vec!["gpu".to_owned()], Some("1")));
    assert_eq!(task.limits, [("stripe".to_owned(), None), ("tenant".to_owned(), Some("1".to_owned()))]);
}
