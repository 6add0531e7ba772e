//! Flows that are accepted.

use serde_json::json;

use super::*;
use crate::flow::*;
use crate::ids::{ScopeId, StepId};

pub(super) const FULFIL: &str = r#"
name: fulfil
input_schema: {type: object, required: [orders]}          # JSON Schema, checked at start: 422
steps:
  load:    {run: load_orders, retry: {attempts: 3}, timeout: 30s}
  review:  {after: [load], if: "steps.load.output.total > 100", run: review}
  each:    {after: [load], spread: "steps.load.output.items", as: item, run: price,
            input: {sku: "${item.sku}", at: "${index}", currency: EUR}, max_parallel: 50}
  sum:     {after: [each], set: "${sum(steps.each.output.map(x, x.price))}"}
  poll:    {after: [load], repeat: {until: "steps.check.output.ready", max: 10},
            steps: {check: {run: check}, nap: {after: [check], await: {time: 100ms}}}}
  ask:     {after: [sum], run: send_mail, input: {link: "${gates.approve.url}"}}
  approve: {after: [ask], await: {webhook: true, timeout: 24h, on_timeout: fail}}
  pay:     {after: [approve, "ended:review"], run: charge, undo: {run: refund}}
  ship:    {after: [pay, poll], flow: shipping, input: {items: "${steps.each.output}"}}
  alarm:   {after: ["failed:ship"], run: page_someone}
output: {total: "${steps.sum.output}", shipped: "${steps.ship.output}"}
"#;

/// The form of the original design document, where the flow's name is in the URL.
pub(super) const SEED: &str = r#"{
  "entry": "start",
  "steps": {
    "start": {"worker": "startWorker", "queue": "default", "subscribes": [], "emits": ["step.a.trigger", "step.b.trigger"]},
    "parallelA": {"worker": "parallelAWorker", "queue": "default", "subscribes": ["step.a.trigger"], "emits": ["step.a.done"]},
    "parallelB": {"worker": "parallelBWorker", "queue": "default", "subscribes": ["step.b.trigger"], "emits": ["step.b.done"]},
    "final": {"worker": "finalWorker", "queue": "default", "subscribes": ["step.a.done", "step.b.done"]}
  }
}"#;

fn graph(text: &str) -> Graph {
    let parsed = parse(text).unwrap_or_else(|problems| panic!("{}", problems.render(text)));
    match parsed.flow.body {
        Body::Graph(graph) => graph,
        Body::Code(_) => panic!("a code flow"),
    }
}

fn step<'g>(graph: &'g Graph, name: &str) -> &'g Step {
    graph.steps.iter().find(|step| step.name == name).unwrap()
}

#[test]
fn the_flow_of_the_documentation() {
    let parsed = parse(FULFIL).unwrap();
    assert_eq!(parsed.warnings, []);
    assert!(parsed.names_itself);
    assert_eq!(parsed.flow.name, "fulfil");
    assert_eq!(parsed.flow.input_schema, Some(json!({"type": "object", "required": ["orders"]})));
    let graph = parsed.flow.graph().unwrap();
    assert_eq!(graph.steps.len(), 12);
    assert!(graph.has_undo);
    let load = step(graph, "load");
    let Action::Worker(worker) = &load.action else { panic!("{:?}", load.action) };
    assert_eq!((worker.handler.as_str(), worker.queue.as_deref()), ("load_orders", None));
    assert_eq!((worker.retry.attempts, worker.timeout_ms), (Some(3), Some(30_000)));
    let each = step(graph, "each").spread.as_ref().unwrap();
    assert_eq!((each.item.as_str(), each.max_parallel, each.collect), ("item", 50, false));
    let pay = step(graph, "pay");
    let arms: Vec<_> = pay.arms.iter().map(|arm| arm.written.as_str()).collect();
    assert_eq!(arms, ["approve", "ended:review"]);
    assert_eq!(pay.undo.as_deref(), Some("refund"));
    let Action::Group(inner) = step(graph, "poll").action else { panic!("not a group") };
    assert_eq!(graph.scope(inner).owner, graph.find(Graph::ROOT, "poll"));
    assert!(matches!(step(graph, "nap").action, Action::Gate));
}

#[test]
fn the_shape_of_a_flow() {
    let parsed = parse(FULFIL).unwrap();
    let shape = serde_json::to_string_pretty(&analysis(&parsed.flow)).unwrap();
    insta::assert_snapshot!(shape);
}

#[test]
fn the_seeds_form() {
    let parsed = parse_named(Some("seed"), SEED).unwrap();
    assert_eq!(parsed.warnings, []);
    assert!(!parsed.names_itself);
    assert_eq!(parsed.flow.name, "seed");
    let graph = parsed.flow.graph().unwrap();
    let levels: Vec<_> = graph.steps.iter().map(|step| (step.name.as_str(), step.level)).collect();
    assert_eq!(levels, [("final", 2), ("parallelA", 1), ("parallelB", 1), ("start", 0)]);
    let events = &graph.scope(Graph::ROOT).events;
    let names: Vec<_> = events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names, ["step.a.done", "step.a.trigger", "step.b.done", "step.b.trigger"]);
    assert_eq!(events[0].subscribers, [Watcher { step: StepId(0), arm: 0 }]);
    assert_eq!(events[2].subscribers, [Watcher { step: StepId(0), arm: 1 }]);
    assert_eq!(events[1].producers, [(StepId(3), None)]);
    assert_eq!(step(graph, "start").emits, [1, 3]);
}

#[test]
fn the_name_is_given_once_or_twice_the_same() {
    assert_eq!(parse_named(Some("f"), "name: f\nsteps: {a: }").unwrap().flow.name, "f");
    let wrong = parse_named(Some("g"), "name: f\nsteps: {a: }").unwrap_err();
    insta::assert_snapshot!(wrong, @"1:7 name: the definition is named `f`, but it was sent as `g`");
    let wrong = parse_named(Some("no name"), "steps: {a: }").unwrap_err();
    insta::assert_snapshot!(wrong, @"1:1 name: `no name` is not a valid name: ` ` is not allowed; use letters (a-z, A-Z), digits, `.`, `_` and `-`");
    let wrong = parse("steps: {a: }").unwrap_err();
    insta::assert_snapshot!(wrong, @"1:1 name: `name` is missing: a flow needs a name");
}

#[test]
fn a_step_without_a_kind_runs_the_handler_of_its_name() {
    let graph =
        graph("name: f\nsteps:\n  load:\n  other: {}\n  wait: {await: {manual: true}}\n  null_too: {set: null}");
    let handler = |name| match &step(&graph, name).action {
        Action::Worker(worker) => worker.handler.clone(),
        other => format!("{other:?}"),
    };
    assert_eq!([handler("load"), handler("other"), handler("wait")], ["load", "other", "Gate"]);
    assert!(matches!(step(&graph, "null_too").action, Action::Set(_)));
}

#[test]
fn every_field_of_every_kind() {
    let graph = graph(include_str!("every_field.yaml"));
    let Action::Worker(a) = &step(&graph, "a").action else { panic!("not a worker step") };
    assert_eq!((a.handler.as_str(), a.queue.as_deref(), a.priority), ("pkg/module:handler", Some("slow"), -3));
    let limits: Vec<_> = a.limits.iter().map(|limit| (limit.name.as_str(), limit.key.is_some())).collect();
    assert_eq!(limits, [("stripe", false), ("tenant", true)]);
    let (non_retryable, max_ms) = (vec!["BadInput".to_owned()], 5_400_000);
    let retry = Retry { attempts: None, initial_ms: 100, factor: 1.0, max_ms, jitter: 0.5, non_retryable };
    assert_eq!(a.retry, retry);
    assert_eq!((a.timeout_ms, a.start_timeout_ms), (Some(60_000), Some(86_400_000)));
    assert_eq!(
        (&a.requires, a.key.as_ref().unwrap().source()),
        (&vec!["gpu".into(), "region=eu".into()], "input.tenant")
    );
    let events = &graph.scope(Graph::ROOT).events;
    assert_eq!(events[0].producers, [(StepId(0), Some(json!({"type": "object"})))]);
    assert_eq!(events[1].producers, [(StepId(0), None)]);

    assert!(matches!(&step(&graph, "b").action, Action::Child { flow, detached: true } if flow == "other"));
    let sources: Vec<_> = step(&graph, "b").arms.iter().map(|arm| arm.source).collect();
    assert_eq!(sources, [Source::Event(0), Source::Step(StepId(0), When::Completed)]);
    let joins = ["a", "b", "c", "d"].map(|name| step(&graph, name).join);
    let at_least = |cancel_rest| Join::AtLeast { n: 1, cancel_rest };
    assert_eq!(joins, [Join::All, Join::Any, at_least(false), at_least(true)]);
    assert!(matches!(step(&graph, "c").action, Action::Fail(_)));
    assert!(matches!(step(&graph, "d").action, Action::Return(_)));

    let gate = step(&graph, "e").gate.as_ref().unwrap();
    let Waits::Event { name, key, since } = &gate.waits else { panic!("{gate:?}") };
    assert_eq!((name.as_str(), key.is_some(), *since), ("go", true, Since::Ago { ms: 300_000 }));
    assert_eq!((gate.timeout_ms, gate.on_timeout), (Some(3_600_000), OnTimeout::Skip));

    let g = step(&graph, "g");
    assert!(matches!(g.gate.as_ref().unwrap().waits, Waits::Until(_)));
    let Spread { item, max_parallel, collect, max_failures, .. } = g.spread.as_ref().unwrap();
    assert_eq!((item.as_str(), *max_parallel, *collect, *max_failures), ("order", 3, true, Some(2)));
    let repeat = g.repeat.as_ref().unwrap();
    assert!(matches!(repeat.test, Test::While(_)) && repeat.state.is_some() && repeat.next.is_some());
    assert_eq!(repeat.max, 4);
    let Action::Group(inner) = g.action else { panic!("not a group") };
    assert!(graph.scope(inner).output.is_some() && g.input.is_some());
    assert_eq!(graph.scope(inner).events[0].name, "inner");

    let Finally { scope, timeout_ms } = graph.finally.unwrap();
    assert_eq!((scope, timeout_ms, graph.fail_fast), (ScopeId(2), Some(10_000), true));
}

#[test]
fn code_flows() {
    let parsed = parse(r#"{"name": "job", "code": true}"#).unwrap();
    let Body::Code(code) = &parsed.flow.body else { panic!("a graph") };
    assert_eq!((code.queue.as_str(), &code.retry, code.builds), ("default", &Retry::default(), Builds::Latest));
    assert_eq!(analysis(&parsed.flow), Analysis::default());
    let text =
        "name: job\ncode: true\nqueue: q\nretry: {attempts: 1}\nstep_retry: {attempts: 9}\ntimeout: 1d\nbuilds: pinned";
    let Body::Code(code) = parse(text).unwrap().flow.body else { panic!("a graph") };
    assert_eq!((code.step_retry.attempts, code.timeout_ms, code.builds), (Some(9), Some(86_400_000), Builds::Pinned));
    let text = "name: job\ncode: true\nlimits: [api, {tenant: '${input.t}'}]\nrequires: [gpu]\npriority: -2";
    let Body::Code(code) = parse(text).unwrap().flow.body else { panic!("a graph") };
    let limits: Vec<_> = code.limits.iter().map(|limit| (limit.name.as_str(), limit.key.is_some())).collect();
    assert_eq!(limits, [("api", false), ("tenant", true)]);
    assert_eq!((code.requires, code.priority), (vec!["gpu".to_owned()], -2));
}

#[test]
fn slots_and_watchers_are_the_way_back() {
    let graph = graph("name: f\nsteps: {b: {after: [a, 'ended:c']}, a: , c: {after: [a]}}");
    let (a, b, c) = (StepId(0), StepId(1), StepId(2));
    assert_eq!(graph.scope(ScopeId(0)).steps, [a, b, c]);
    assert_eq!(graph.step(a).watchers, [Watcher { step: b, arm: 0 }, Watcher { step: c, arm: 0 }]);
    assert_eq!(graph.step(c).watchers, [Watcher { step: b, arm: 1 }]);
    assert_eq!(graph.steps.iter().map(|step| (step.slot, step.level)).collect::<Vec<_>>(), [(0, 0), (1, 2), (2, 1)]);
}

#[test]
fn durations() {
    for (text, ms) in [("0s", 0), ("100ms", 100), ("30s", 30_000), ("1h30m", 5_400_000), ("1d1h1m1s1ms", 90_061_001)] {
        assert_eq!(duration(text), Ok(ms), "{text}");
    }
    for text in ["", "s", "5", "5 s", "-5s", "1.5h", "5w", "1m1h", "1s1s", "3651d", "99999999999999999999s", "5µs"] {
        assert!(duration(text).is_err(), "{text}");
    }
}

#[test]
fn a_step_that_waits_for_nothing_may_say_that_it_joins_all() {
    let graph = graph("{name: f, steps: {a: {join: all}}}");
    assert_eq!(step(&graph, "a").join, Join::All);
}
