//! The real memory of any evaluation stays within a small factor of what it is charged.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use eddyline_language::expr::{Cost, Expr, Fuel, Names, Stop, Table, Template, Val};
use eddyline_machine::{Data, Millis, ValueId};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// How much real memory may exceed the charge.
const FACTOR: u64 = 3;
/// Uncharged memory of every evaluation: its own tables, an error's text.
const SLACK: u64 = 64 << 10;
/// Small, so that it is reached often.
const LIMIT: Cost = Cost { steps: 40_000, bytes: 1 << 20, read: 1 << 20 };

struct Roots(BTreeMap<&'static str, Data>);

impl<'a> Names<'a> for &'a Roots {
    fn root(&self, name: &str) -> Option<Val<'a>> {
        self.0.get(name).map(Val::Data)
    }

    fn entry(&self, _: Table, _: &str) -> Option<Val<'a>> {
        None
    }

    fn value(&self, _: ValueId) -> Option<&'a Data> {
        None
    }

    fn now(&self) -> Millis {
        0
    }
}

fn roots() -> Roots {
    let fields: Value =
        (0..60).map(|n| (format!("key {n}"), json!([n, {"a": n}]))).collect::<serde_json::Map<_, _>>().into();
    let items: Vec<Value> =
        (0..300).map(|n| if n % 2 == 0 { json!(n) } else { json!({"n": n, "s": "text"}) }).collect();
    let words: Vec<Value> = (0..300).map(|n| json!(format!("word {n}"))).collect();
    Roots(BTreeMap::from([
        ("s", Data::from(json!("some text, ".repeat(2_000)))),
        ("l", Data::from(json!(items))),
        ("w", Data::from(json!(words))),
        ("m", Data::from(fields)),
    ]))
}

/// Peak memory while it ran, and what was charged.
fn measured<T>(run: impl FnOnce(&mut Fuel) -> Result<T, Stop>) -> (u64, Cost) {
    let mut fuel = Fuel::new(LIMIT);
    let profiler = dhat::Profiler::builder().testing().build();
    let result = run(&mut fuel);
    let peak = dhat::HeapStats::get().max_bytes as u64;
    drop(result);
    drop(profiler);
    (peak, fuel.spent())
}

fn any_expression() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "s",
        "l",
        "w",
        "m",
        "x",
        "1",
        "'ab'",
        "[1, 'x']",
        "{'k': s}",
        "range(500)",
        "s + 'a'",
    ]);
    leaf.prop_map(String::from).prop_recursive(6, 24, 3, |inner| {
        let calls = vec![
            "reverse", "flatten", "distinct", "sort", "keys", "values", "size", "json", "string", "join", "trim",
            "upperAscii", "first", "type",
        ];
        let methods = vec![
            "substring(1)", "slice(1)", "replace('t', 'tttt')", "split('')", "split(' ')", "contains('x, s')",
            "matches('(a|b)+t')", "join(s)",
        ];
        let pair = (inner.clone(), inner.clone());
        prop_oneof![
            4 => pair.clone().prop_map(|(l, r)| format!("({l}).map(x, {r})")),
            1 => pair.clone().prop_map(|(l, r)| format!("({l}).filter(x, ({r}) != x)")),
            2 => (pair.clone(), prop::sample::select(vec!["+", "==", "in"])).prop_map(|((l, r), op)| format!("({l} {op} {r})")),
            1 => pair.clone().prop_map(|(l, r)| format!("[{l}, {{'k': {r}}}, {l}]")),
            1 => pair.prop_map(|(l, r)| format!("default({l}, {r})")),
            3 => (inner.clone(), prop::sample::select(calls)).prop_map(|(of, call)| format!("{call}({of})")),
            2 => (inner.clone(), prop::sample::select(methods)).prop_map(|(of, method)| format!("({of}).{method}")),
            1 => inner.prop_map(|of| format!("parse_json(json({of}))")),
        ]
    })
}

#[test]
fn real_memory_stays_within_a_small_factor_of_the_budget() {
    let roots = roots();
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let spent_all = std::cell::Cell::new(0);
    let outcome = runner.run(&any_expression(), |text| {
        let Ok(expr) = Expr::parse(&text) else { return Ok(()) };
        let template = Template::parse(&json!({"all": [format!("<${{{text}}}>"), format!("${{{text}}}")]}));
        let of_expr = measured(|fuel| expr.data(&&roots, fuel));
        let of_template =
            template.map_or((0, Cost::default()), |template| measured(|fuel| template.eval(&&roots, fuel)));
        for (peak, spent) in [of_expr, of_template] {
            let charged = spent.bytes.min(LIMIT.bytes);
            prop_assert!(peak <= FACTOR * charged + SLACK, "{peak} bytes, charged {charged}");
            if spent.bytes > LIMIT.bytes {
                spent_all.set(spent_all.get() + 1);
            }
        }
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    assert!(spent_all.get() > 5, "too few cases exceeded the memory limit: {}", spent_all.get());
}
