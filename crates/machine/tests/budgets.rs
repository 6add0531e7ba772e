//! The budget of a decision holds for any flow and payload.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_language::definition;
use eddyline_language::expr::EVALUATION;
use eddyline_machine::*;
use model::Trial;
use serde_json::json;

#[test]
fn a_spread_of_heavy_items_is_many_small_transitions() {
    let text = r#"{name: f, steps: {each: {spread: "range(200)", as: n,
        steps: {s: {set: "${sum(range(2000).map(x, x + n))}"}}, output: "${steps.s.output}"}},
        output: "${size(steps.each.output)}"}"#;
    let t = Trial::new(text, json!(null));
    assert_eq!(t.output(), json!(200));
    // Each item takes more than 5,000 steps.
    let least = 200 * 5_000 / decide::BUDGET.steps;
    let transitions = t.kept().run.header.version.0;
    assert!(transitions > least, "{transitions} transitions");
}

#[test]
fn a_heavy_decision_is_told_and_made_without_the_limit() {
    let flow = definition::parse(r#"{name: f, steps: {s: {set: "${sum(range(2000).map(x, x + 1))}"}}}"#).unwrap().flow;
    let run = Run::new(RunId::default());
    let start = [Input::Start(Box::default())];
    let env = Env::new(0, [0; 32], "");
    let few = Env { inline_steps: Some(1_000), ..env.clone() };
    assert_eq!(decide(&flow, &run, &few, &start), Err(Halt::Heavy));
    let enough = Env { inline_steps: Some(EVALUATION.steps), ..env.clone() };
    assert_eq!(decide(&flow, &run, &enough, &start), decide(&flow, &run, &env, &start));
}

#[test]
fn the_expressions_of_one_step_have_one_budget() {
    // Each takes about a third of the budget.
    let heavy = "sum(range(45000).map(x, x + 1)) > 0";
    let hole = format!("${{{heavy}}}");
    let text = format!(
        r#"{{name: f, steps: {{two: {{if: "{heavy}", set: "{hole}"}},
            four: {{if: "{heavy}", set: ["{hole}", "{hole}", "{hole}"]}}}}}}"#
    );
    let t = Trial::new(&text, json!(null));
    let error = t.error_of("four").message;
    assert_eq!(t.output_of("two"), json!(true));
    assert!(error.contains("took more than 1000000 steps"), "{error}");
}

/// The first transition of a run.
fn started(text: &str, input: serde_json::Value) -> Transition {
    let flow = definition::parse(text).unwrap_or_else(|problems| panic!("{problems}")).flow;
    let start = Start { input: Some(input.into()), ..Start::default() };
    decide(&flow, &Run::new(RunId::default()), &Env::new(0, [0; 32], ""), &[Input::Start(Box::new(start))]).unwrap()
}

fn failure(transition: &Transition) -> &Failure {
    let failed = transition.records.iter().find_map(|record| match &record.entry {
        Entry::StepFailed { error, .. } => Some(error),
        _ => None,
    });
    failed.unwrap_or_else(|| panic!("nothing failed: {:?}", transition.records))
}

#[test]
fn a_spread_over_too_many_items_fails() {
    let items = vec![1; decide::MAX_ITEMS + 1];
    let transition = started("{name: f, steps: {each: {spread: input, run: h}}}", json!(items));
    let failure = failure(&transition);
    assert_eq!(failure.kind, "TooManyItems");
    assert!(failure.message.ends_with(&format!("at most {}", decide::MAX_ITEMS)), "{}", failure.message);
}

#[test]
fn what_is_written_out_for_children_counts() {
    let text = "{name: f, steps: {each: {spread: 'range(1000)', flow: child, input: '${run.input}'}}}";
    let small = started(text, json!("x"));
    let large = started(text, json!("x".repeat(1 << 20)));
    let children = |transition: &Transition| transition.messages.len();
    assert!(children(&small) > 900, "{}", children(&small));
    assert!(children(&large) < 30, "{} children with 1 MiB each in one transition", children(&large));
    assert!(!large.header.agenda.is_empty(), "the rest is deferred");
}

#[test]
fn a_state_that_doubles_ends_the_loop() {
    let looped = |next: &str| {
        let text = format!(
            "{{name: f, steps: {{loop: {{steps: {{a: {{set: 1}}}},
                repeat: {{while: 'true', max: 1000, state: \"${{input}}\", next: {next}}}}}}}}}"
        );
        let t = Trial::new(&text, json!("x".repeat(300)));
        t.error_of("loop").message
    };
    assert!(looped("'${state + state}'").contains("larger than 2 MiB"), "{}", looped("'${state + state}'"));
    let nested = looped("['${state}', '${state}']");
    assert!(nested.contains("nested more than 100 deep"), "{nested}");
}

#[test]
fn text_and_misses_are_charged_for() {
    let evaluated = |expr: &str, input: serde_json::Value| {
        let transition = started(&format!("{{name: f, steps: {{s: {{set: \"${{{expr}}}\"}}}}}}"), input);
        transition.records.iter().find_map(|record| match &record.entry {
            Entry::StepFailed { error, .. } => Some(error.message.clone()),
            _ => None,
        })
    };
    let text = json!({"s": "x".repeat(1 << 20), "m": (0..200).map(|n| (format!("field {n}"), json!(n))).collect::<serde_json::Map<_, _>>()});
    for expr in [
        "size(range(1000).map(i, input.s + 'a'))",
        "size(range(1000).map(i, input.s.upperAscii()))",
        "size(range(1000).map(i, input.s.replace('x', 'y')))",
        "size(range(1000).map(i, input.s.split('')))",
        "size(range(1000).map(i, json(input)))",
        "size(range(100000).map(i, range(100)))",
        "size(range(1000).map(i, range(1000).reverse()))",
        "size(range(1000).map(i, range(1000).slice(1)))",
        "size(range(1000).map(i, range(1000) + [1]))",
        "size(range(10000).map(i, keys(input.m)))",
        "size(range(10000).map(i, values(input.m)))",
    ] {
        let message = evaluated(expr, text.clone()).unwrap_or_else(|| panic!("{expr} did not exceed the budget"));
        assert!(message.contains("used more than 32 MiB of memory") || message.contains("steps"), "{expr}: {message}");
    }
    // A missing field costs little; the hint is computed only when the error is shown.
    assert_eq!(evaluated("size(range(20000).filter(i, has(input.m.x)))", text.clone()), None);
    let shown = evaluated("input.m.field_7", text).unwrap();
    assert!(shown.contains("has no field `field_7`; did you mean `field 7`?"), "{shown}");
}

/// A spread over that many stored values of 1 MiB each, and a step that evaluates `expr` over its output.
fn looked_at(values: usize, expr: &str) -> Trial {
    let text = format!(
        r#"{{name: f, steps: {{each: {{spread: "range({values})", as: n,
            steps: {{s: {{set: "${{run.input.s + string(n)}}"}}}}, output: "${{steps.s.output}}"}},
            all: {{after: [each], set: "${{{expr}}}"}}}}}}"#
    );
    Trial::new(&text, json!({"s": "x".repeat(1 << 20)}))
}

#[test]
fn an_expression_that_reads_too_many_stored_values_fails_and_says_so() {
    let sizes = "sum(steps.each.output.map(x, size(x)))";
    assert_eq!(looked_at(20, sizes).output_of("all"), json!(20 * (1 << 20) + 30));
    let error = looked_at(40, sizes).error_of("all").message;
    assert!(error.contains("read more than 32 MiB of stored values"), "{error}");
    // Values that are only counted or passed on are not read.
    assert_eq!(looked_at(100, "size(steps.each.output)").output_of("all"), json!(100));
}

#[test]
fn a_transition_that_has_read_much_leaves_the_rest_to_the_next() {
    let transitions = |set: &str| {
        let text = format!(
            r#"{{name: f, steps: {{each: {{spread: "range(40)", as: n,
                steps: {{s: {{set: "${{run.input.s + string(n)}}"}}}}, output: "${{steps.s.output}}"}},
                again: {{after: [each], spread: "steps.each.output", as: x, steps: {{s: {{set: "{set}"}}}}}}}}}}"#
        );
        Trial::new(&text, json!({"s": "x".repeat(1 << 20)})).kept().run.header.version.0
    };
    let (passed_on, read, read_again) =
        (transitions("${x}"), transitions("${size(x)}"), transitions("${size(run.input)}"));
    assert!(read >= passed_on + 2, "reading 40 MiB took {read} transitions, passing it on took {passed_on}");
    assert_eq!(read_again, passed_on, "a value that every item reads is in memory once");
}

#[test]
fn a_run_that_grows_beyond_the_limit_fails_and_says_so() {
    let mut t =
        Trial::new("{name: f, steps: {e: {spread: 'range(60)', max_parallel: 10, run: item}, other: {}}}", json!(null));
    t.model.deliver_all();
    t.model.max_activations = 20;
    for n in 0..60 {
        if t.kept().is_ended() {
            break;
        }
        t.complete(&format!("e[{n}]"), json!(n));
        t.model.deliver_all();
    }
    let error = t.error();
    assert_eq!(error.kind, "TooManyActivations");
    assert_eq!(error.message, "the run has more than 20 activations");
}

#[test]
fn a_finally_that_grows_beyond_the_limit_fails_and_the_run_ends() {
    let text = "{name: f, steps: {a: {}}, finally: {steps: {e: {spread: 'range(60)', max_parallel: 10, run: item}}}}";
    let mut t = Trial::new(text, json!(null));
    t.model.max_activations = 20;
    t.complete("a", json!(1));
    t.model.deliver_all();
    for n in 0..60 {
        if t.kept().is_ended() {
            break;
        }
        t.complete(&format!("finally.e[{n}]"), json!(n));
        t.model.deliver_all();
    }
    let error = t.error();
    assert_eq!((t.status(), error.kind.as_str()), ("failed", "TooManyActivations"));
    assert!(error.message.contains("`finally` has more than 18 activations"), "{}", error.message);
    assert!(t.kept().run.activations.len() < 35, "{} activations", t.kept().run.activations.len());
}

#[test]
fn a_run_that_is_too_large_still_has_room_for_its_finally() {
    let text = "{name: f, steps: {e: {spread: 'range(60)', max_parallel: 10, run: item}},
        finally: {steps: {clean: {}}}}";
    let mut t = Trial::new(text, json!(null));
    t.model.max_activations = 40;
    for n in 0..60 {
        t.model.deliver_all();
        if !t.offered().contains(&format!("e[{n}]")) {
            break;
        }
        t.complete(&format!("e[{n}]"), json!(n));
    }
    t.complete("finally.clean", json!(1));
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "TooManyActivations"));
    assert_eq!(t.error().also.len(), 0, "{:?}", t.error());
}

#[test]
fn the_pending_operations_of_a_code_run_count() {
    let mut t = Trial::new("{name: job, code: true}", json!(null));
    t.model.max_activations = 20;
    let (run, driver) = t.claim("@run");
    for n in 0..40 {
        if t.kept().is_ended() {
            break;
        }
        let op = match n % 3 {
            0 => CodeOp::Sleep { due: Due::After(1_000) },
            1 => CodeOp::Call { handler: "h".to_owned(), input: json!(1).into(), queue: None, options: None },
            _ => CodeOp::Wait { wait: CodeWait::Manual, timeout_ms: None },
        };
        t.say(run, &driver, Op::Code { name: format!("op {n}"), op });
        t.model.deliver_all();
    }
    assert_eq!((t.status(), t.error().kind.as_str()), ("failed", "TooManyActivations"));
    assert_eq!(t.kept().run.activations.len(), 21);
}
