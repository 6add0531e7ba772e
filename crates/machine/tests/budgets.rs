//! Budgets: what one decision may use, whatever the flow and its payloads are.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_machine::expr::EVALUATION;
use eddyline_machine::*;
use model::Trial;
use serde_json::json;

#[test]
fn a_spread_of_a_thousand_heavy_items_is_many_small_transitions() {
    let text = r#"{name: f, steps: {each: {spread: "range(1000)", as: n,
        steps: {s: {set: "${sum(range(2000).map(x, x + n))}"}}, output: "${steps.s.output}"}},
        output: "${size(steps.each.output)}"}"#;
    let t = Trial::new(text, json!(null));
    assert_eq!(t.output(), json!(1000));
    // Each item takes more than 5,000 steps.
    let least = 1000 * 5_000 / decide::BUDGET.steps;
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
    // Each takes about a third of it.
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
