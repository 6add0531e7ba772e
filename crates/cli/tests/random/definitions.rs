//! Random valid flows, with a bias towards expensive ones.

use serde_json::{Map, Value, json};

use crate::chance::Chance;
use crate::expressions::{Scope, any, bool, int, list, template};
use crate::schemas::schema;

/// The number of flows. Each is registered many times, and any of them may start any other as its child.
pub const FLOWS: usize = 12;
const MAX_STEPS: usize = 7;
const MAX_DEPTH: usize = 2;
const DEPTH_OF_EXPRESSIONS: usize = 4;

pub fn name(at: usize) -> String {
    format!("random-{at}")
}

pub fn definition(chance: &mut Chance) -> Value {
    let outer = Scope { values: vec![String::from("input")], numbers: Vec::new() };
    let (steps, readable) = steps(chance, &outer, MAX_DEPTH);
    let mut flow = json!({ "steps": steps });
    if chance.one_in(2) {
        flow["output"] = template(chance, &readable, 2);
    }
    if chance.one_in(3) {
        flow["input_schema"] = schema(chance);
    }
    if chance.one_in(5) {
        flow["fail_fast"] = json!(true);
    }
    if chance.one_in(6) {
        let set = template(chance, &outer, 2);
        flow["finally"] = json!({"steps": {"tidy": {"set": set}, "tell": {"run": "tell"}}, "timeout": "5s"});
    }
    flow
}

/// Steps that wait for some of the steps before them, and what can be read when all of them have ended.
fn steps(chance: &mut Chance, outer: &Scope, depth: usize) -> (Value, Scope) {
    let mut steps = Map::new();
    let mut all = outer.clone();
    for at in 0..1 + chance.below(MAX_STEPS) {
        // A name that no enclosing scope uses.
        let name = format!("s{depth}{at}");
        let mut scope = outer.clone();
        let mut after = Vec::new();
        for before in 0..at {
            if chance.one_in(2) {
                let before = format!("s{depth}{before}");
                scope.values.push(format!("steps.{before}.output"));
                after.push(json!(if chance.one_in(3) { format!("ended:{before}") } else { before }));
            }
        }
        let mut step = step(chance, &scope, depth);
        if !after.is_empty() {
            if chance.one_in(5) {
                step["join"] = json!("some");
            }
            step["after"] = json!(after);
        }
        all.values.push(format!("steps.{name}.output"));
        steps.insert(name, step);
    }
    (Value::Object(steps), all)
}

fn step(chance: &mut Chance, scope: &Scope, depth: usize) -> Value {
    let mut step = match chance.below(if depth == 0 { 6 } else { 9 }) {
        0 | 1 => json!({"set": template(chance, scope, DEPTH_OF_EXPRESSIONS)}),
        2 => worker_step(chance, scope),
        3 => json!({"flow": name(chance.below(FLOWS)), "detached": chance.one_in(4)}),
        4 => return json!({ "await": gate(chance, scope) }),
        5 => match chance.below(4) {
            0 => json!({"fail": template(chance, scope, 2)}),
            1 => json!({"return": template(chance, scope, 2)}),
            _ => worker_step(chance, scope),
        },
        6 => group(chance, scope, depth),
        7 => spread(chance, scope, depth),
        _ => repeat(chance, scope, depth),
    };
    if chance.one_in(8) {
        step["await"] = gate(chance, scope);
    }
    if chance.one_in(6) {
        step["if"] = json!(bool(chance, scope, DEPTH_OF_EXPRESSIONS));
    }
    step
}

fn worker_step(chance: &mut Chance, scope: &Scope) -> Value {
    let mut step =
        json!({"run": "work", "retry": {"attempts": 1 + chance.below(2), "initial": "20ms"}, "timeout": "5s"});
    if chance.one_in(2) {
        step["input"] = template(chance, scope, DEPTH_OF_EXPRESSIONS);
    }
    if chance.one_in(5) {
        step["key"] = json!(any(chance, scope, 2));
    }
    if chance.one_in(5) {
        let key = format!("${{{}}}", any(chance, scope, 2));
        step["limits"] = json!([{"tenant": key}]);
    }
    if chance.one_in(5) {
        step["emits"] = json!([{"happened": schema(chance)}]);
    }
    if chance.one_in(5) {
        step["undo"] = json!({"run": "undo"});
    }
    step
}

/// Every gate opens by itself.
fn gate(chance: &mut Chance, scope: &Scope) -> Value {
    let on_timeout = *chance.pick(&["fail", "continue", "skip"]);
    match chance.below(5) {
        0 => json!({"time": *chance.pick(&["1ms", "50ms", "1s"])}),
        1 => json!({"until": format!("now() + duration('{}ms')", chance.below(300))}),
        2 => json!({"event": "random.event", "key": int(chance, scope, 2), "timeout": "1s", "on_timeout": on_timeout}),
        3 => json!({"event": "random.event", "timeout": "2s", "on_timeout": on_timeout}),
        _ => json!({"manual": true, "timeout": "1s", "on_timeout": on_timeout}),
    }
}

fn group(chance: &mut Chance, scope: &Scope, depth: usize) -> Value {
    let (steps, readable) = steps(chance, scope, depth - 1);
    json!({"steps": steps, "output": template(chance, &readable, 2)})
}

fn spread(chance: &mut Chance, scope: &Scope, depth: usize) -> Value {
    let over = if chance.one_in(3) {
        format!("range({})", chance.pick(&[0, 1, 5, 50, 1_000]))
    } else {
        format!("slice({}, 0, 200)", list(chance, scope, 3))
    };
    let mut inner = scope.clone();
    inner.values.push(String::from("item"));
    inner.numbers.push(String::from("index"));
    let mut step = match chance.below(3) {
        0 => worker_step_of_items(chance, &inner),
        1 => json!({"flow": name(chance.below(FLOWS)), "input": template(chance, &inner, 2)}),
        _ => group(chance, &inner, depth),
    };
    step["spread"] = json!(over);
    step["max_parallel"] = json!(*chance.pick(&[1, 10, 1_000]));
    step["on_item_failure"] = json!(*chance.pick(&["fail", "collect"]));
    step
}

fn worker_step_of_items(chance: &mut Chance, scope: &Scope) -> Value {
    json!({"run": "work", "input": template(chance, scope, 3), "retry": {"attempts": 1}, "timeout": "5s"})
}

fn repeat(chance: &mut Chance, scope: &Scope, depth: usize) -> Value {
    let mut inner = scope.clone();
    inner.values.push(String::from("state"));
    inner.numbers.push(String::from("round"));
    let (state, next) = (template(chance, scope, 2), template(chance, &inner, 2));
    let max = *chance.pick(&[1, 3, 20, 300]);
    let mut step = group(chance, &inner, depth);
    step["repeat"] = json!({"while": bool(chance, &inner, 3), "max": max, "state": state, "next": next});
    step
}
