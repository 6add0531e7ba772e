//! The cost of a decision: µs and allocations per transition of a chain, per item of a spread (which must not grow with
//! the number of items), per inline step. `cargo bench -p eddyline-machine`

// A benchmark reads the clock, and panics on unexpected results.
#![allow(clippy::disallowed_methods, clippy::panic)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use eddyline_language::definition;
use eddyline_machine::*;
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATIONS: dhat::Alloc = dhat::Alloc;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    chain(&mut criterion);
    spread(&mut criterion);
    inline(&mut criterion);
    criterion.final_summary();
    table();
    limits();
}

/// Ten worker steps one after the other: a transition is one report.
fn chain(criterion: &mut Criterion) {
    let flow = chain_of(10);
    criterion.bench_function("chain of 10, a transition", |bencher| {
        bencher.iter_custom(|runs| (0..runs).map(|_| per_transition(&flow, json!({"order": 7}))).sum());
    });
}

fn spread(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("spread, an item");
    group.sample_size(10);
    let flow = spread_flow();
    for items in [100u32, 1_000, 10_000] {
        group.bench_with_input(BenchmarkId::from_parameter(items), &items, |bencher, items| {
            bencher.iter_custom(|runs| (0..runs).map(|_| per_transition(&flow, list(*items))).sum());
        });
    }
}

fn inline(criterion: &mut Criterion) {
    let flow = inline_of(100);
    criterion.bench_function("inline step, in a chain of 100", |bencher| {
        bencher.iter_custom(|runs| {
            let time: Duration = (0..runs).map(|_| drive(&flow, json!({"n": 1})).0).sum();
            time / 100
        });
    });
}

/// The same, once, with its allocations.
fn table() {
    println!("\n{:<34} {:>12} {:>14} {:>14}", "", "transitions", "allocations", "bytes");
    let row = |name: &str, flow: &Flow, input: Value, per: u64| {
        let _profiler = dhat::Profiler::builder().testing().build();
        let before = dhat::HeapStats::get();
        let (_, transitions) = drive(flow, input);
        let after = dhat::HeapStats::get();
        let per = if per == 0 { transitions } else { per };
        println!(
            "{name:<34} {transitions:>12} {:>10} each {:>10} each",
            (after.total_blocks - before.total_blocks) / per,
            (after.total_bytes - before.total_bytes) / per
        );
    };
    row("chain of 10, a transition", &chain_of(10), json!({"order": 7}), 0);
    for items in [100u32, 1_000, 10_000] {
        row(&format!("spread over {items}, an item"), &spread_flow(), list(items), items.into());
    }
    row("inline step, in a chain of 100", &inline_of(100), json!({"n": 1}), 100);
}

/// The time of evaluations that use up their budget, on various kinds of work.
fn limits() {
    println!("\n{:<60} {:>10}", "an evaluation beyond its budget", "ms");
    let fields: serde_json::Map<String, Value> = (0..200).map(|n| (format!("field {n}"), json!(n))).collect();
    let input = json!({"s": "x".repeat(20_000), "m": fields});
    for expr in [
        "range(100000).map(i, range(100000).map(j, i + j))",
        "range(100000).map(i, range(1000))",
        "range(100000).filter(i, has(input.m.x) || has(input.m.y) || has(input.m.z))",
        "range(100000).exists(i, input.s.matches('(a|b|c)+d{1,20}e'))",
        "range(100000).exists(i, input.s.contains('xxxxxxxxxxxxy'))",
        "range(100000).map(i, input.s + string(i))",
        "range(100000).map(i, json(input.m))",
        "range(100000).map(i, input.m == {'a': i})",
        "range(100000).map(i, range(100).map(j, string(j)).sort())",
    ] {
        let flow = parse(&json!({"name": "f", "steps": {"s": {"set": format!("${{size({expr})}}")}}}).to_string());
        let (time, ..) = driven(&flow, input.clone());
        println!("{expr:<60} {:>10.1}", time.as_secs_f64() * 1e3);
    }
}

fn chain_of(steps: usize) -> Flow {
    let step = |i: usize| if i == 0 { "s0: {}".to_owned() } else { format!("s{i}: {{after: [s{}]}}", i - 1) };
    parse(&format!("{{name: chain, steps: {{{}}}}}", (0..steps).map(step).collect::<Vec<_>>().join(", ")))
}

fn inline_of(steps: usize) -> Flow {
    let step = |i: usize| match i {
        0 => "s0: {set: '${input.n}'}".to_owned(),
        _ => format!("s{i}: {{after: [s{}], set: '${{steps.s{}.output + 1}}'}}", i - 1, i - 1),
    };
    parse(&format!("{{name: inline, steps: {{{}}}}}", (0..steps).map(step).collect::<Vec<_>>().join(", ")))
}

fn spread_flow() -> Flow {
    parse("{name: fan, steps: {each: {spread: input, run: h}, end: {after: [each]}}}")
}

fn list(items: u32) -> Value {
    Value::Array((0..items).map(|n| json!({"sku": n, "count": 1})).collect())
}

fn parse(text: &str) -> Flow {
    match definition::parse(text) {
        Ok(parsed) => parsed.flow,
        Err(problems) => panic!("{problems}"),
    }
}

fn per_transition(flow: &Flow, input: Value) -> Duration {
    let (time, transitions) = drive(flow, input);
    time / transitions as u32
}

/// Drives a run to its end by completing its tasks in order; returns the time spent in `decide` and `apply`, and the
/// number of transitions.
fn drive(flow: &Flow, input: Value) -> (Duration, u64) {
    let (time, transitions, status) = driven(flow, input);
    assert_eq!(status, "completed");
    (time, transitions)
}

fn driven(flow: &Flow, input: Value) -> (Duration, u64, &'static str) {
    let env = Env::new(1_767_323_045_678, [7; 32], "");
    let mut run = Run::new(RunId::default());
    let mut open = std::collections::VecDeque::new();
    open.push_back(Input::Start(Box::new(Start { input: Some(input.into()), ..Start::default() })));
    let (mut time, mut transitions) = (Duration::ZERO, 0);
    while let Some(input) = open.pop_front() {
        let start = Instant::now();
        let transition = match decide(flow, &run, &env, black_box(std::slice::from_ref(&input))) {
            Ok(transition) => transition,
            Err(halt) => panic!("{halt}"),
        };
        run.apply(&transition, flow);
        time += start.elapsed();
        transitions += 1;
        for message in transition.messages {
            if let MessageBody::Input(input) = message.body {
                open.push_back(*input);
            }
        }
        for change in transition.tasks {
            if let TaskChange::Add(task) = change {
                let op = Op::Complete { output: json!({"ok": true}).into(), emits: vec![], logs: vec![] };
                let task = TaskRef { activation: task.activation, fence: task.fence };
                open.push_back(Input::Report(Report { task, seq: Some(1), op, claim: Claim::default() }));
            }
        }
    }
    (time, transitions, run.header.status().as_str())
}
