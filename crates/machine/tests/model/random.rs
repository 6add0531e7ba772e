//! Random definitions: every kind of step, join, arm, loop, spread, gate and child, nested.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::tape::Tape;

/// The depth of `finally` and of a kid: no deeper nesting.
const FINALLY: usize = 8;
const KID: usize = 9;
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "g"];

#[derive(Default)]
struct Events {
    declared: BTreeSet<String>,
    heard: BTreeSet<String>,
}

/// A graph named `f`, which may start `kid` (a graph) and `job` (code).
pub fn flow(tape: &mut Tape<'_>) -> Value {
    let mut flow = Map::new();
    flow.insert("name".into(), json!("f"));
    flow.insert("steps".into(), steps(tape, 0));
    if tape.one_in(4) {
        flow.insert("fail_fast".into(), json!(true));
    }
    if tape.one_in(4) {
        let mut finally = json!({"steps": steps(tape, FINALLY)});
        if tape.one_in(2) {
            finally["timeout"] = json!("5s");
        }
        flow.insert("finally".into(), finally);
    }
    if tape.one_in(3) {
        let output = *tape.pick(&["${steps.a.output}", "${steps.a.status}: ${run.id}", "${input.n / 0}", "${now()}"]);
        flow.insert("output".into(), json!(output));
    }
    Value::Object(flow)
}

pub fn kid(tape: &mut Tape<'_>) -> Value {
    json!({"name": "kid", "steps": steps(tape, KID)})
}

pub fn job(tape: &mut Tape<'_>) -> Value {
    let attempts = 1 + tape.below(3);
    let builds = *tape.pick(&["latest", "pinned"]);
    let mut job = json!({"name": "job", "code": true, "builds": builds, "retry": {"attempts": attempts, "initial": "1s"},
               "step_retry": {"attempts": attempts, "initial": tape.below(2) * 50}});
    if tape.one_in(2) {
        job["cancel_grace"] = json!(tape.below(3) * 1_000);
    }
    job
}

/// The same flow, with every step reading every step of its scope that it may.
pub fn curious(mut flow: Value) -> Value {
    read_all(&mut flow, &|_, _| true);
    if let Err(problems) = eddyline_language::definition::parse(&flow.to_string()) {
        let refused: BTreeSet<(String, String)> = problems
            .0
            .iter()
            .filter_map(|problem| {
                let step = problem.message.strip_prefix("`steps.")?.split('`').next()?;
                Some((problem.path.clone(), step.to_owned()))
            })
            .collect();
        read_all(&mut flow, &|path, step| !refused.contains(&(path.to_owned(), step.to_owned())));
    }
    flow
}

/// Gives every step an `if` that is true and reads other steps.
fn read_all(flow: &mut Value, may_read: &dyn Fn(&str, &str) -> bool) {
    fn scope(steps: &mut Value, path: &str, may_read: &dyn Fn(&str, &str) -> bool) {
        let Some(steps) = steps.as_object_mut() else { return };
        let names: Vec<String> = steps.keys().cloned().collect();
        for (name, step) in steps {
            let path = format!("{path}.{name}");
            let others = names.iter().filter(|other| *other != name && may_read(&format!("{path}.if"), other));
            let reads: Vec<String> = others.map(|other| format!("steps.{other}.status")).collect();
            step["if"] = json!(format!("size([{}]) >= 0", reads.join(", ")));
            if let Some(inner) = step.get_mut("steps") {
                scope(inner, &format!("{path}.steps"), may_read);
            }
        }
    }
    scope(&mut flow["steps"], "steps", may_read);
}

fn steps(tape: &mut Tape<'_>, depth: usize) -> Value {
    let count = 1 + tape.below(if depth == 0 { 6 } else { 3 });
    let mut steps = Map::new();
    // Events that can be subscribed to, because an earlier worker step declares them; and those with a subscriber,
    // which no later step may emit, or there would be a cycle.
    let mut events = Events::default();
    for (index, name) in NAMES.iter().enumerate().take(count) {
        let step = step(tape, depth, &NAMES[..index], &mut events);
        steps.insert((*name).to_owned(), step);
    }
    Value::Object(steps)
}

fn step(tape: &mut Tape<'_>, depth: usize, earlier: &[&str], events: &mut Events) -> Value {
    let mut step = Map::new();
    let readable = arms(tape, earlier, events, &mut step);
    if tape.one_in(4) {
        let mut conditions =
            vec!["input.flag".to_owned(), "true".to_owned(), "false".to_owned(), "input.n / 0 == 1".to_owned()];
        conditions.extend(readable.iter().map(|name| format!("steps.{name}.status == 'completed'")));
        conditions.extend(readable.iter().map(|name| format!("steps.{name}.output.n > 0")));
        step.insert("if".into(), json!(tape.pick(&conditions)));
    }
    let gate_alone = kind(tape, depth, &mut step, &readable, events);
    if gate_alone || tape.one_in(6) {
        step.insert("await".into(), gate(tape));
    }
    Value::Object(step)
}

/// Adds its arms and join; returns the steps that it may read.
fn arms<'a>(
    tape: &mut Tape<'_>,
    earlier: &[&'a str],
    events: &mut Events,
    step: &mut Map<String, Value>,
) -> Vec<&'a str> {
    let mut after = Vec::new();
    let mut readable = Vec::new();
    let mut only_steps = true;
    for name in earlier {
        if tape.one_in(3) {
            let prefix = *tape.pick(&["", "", "", "failed:", "ended:", "step:"]);
            after.push(json!(format!("{prefix}{name}")));
            readable.push(*name);
        }
    }
    let mut subscribes = Vec::new();
    for event in events.declared.clone() {
        if tape.one_in(3) {
            only_steps = false;
            subscribes.push(json!(event));
            events.heard.insert(event);
        }
    }
    let count = after.len() + subscribes.len();
    if count > 1 && tape.one_in(2) {
        let join = match tape.below(4) {
            0 => json!("some"),
            1 => json!("any"),
            2 => json!({"at_least": 1 + tape.below(count)}),
            _ if only_steps => json!({"at_least": 1 + tape.below(count), "rest": "cancel"}),
            _ => json!("all"),
        };
        if !matches!(join.as_str(), Some("some" | "all")) {
            readable.clear();
        }
        step.insert("join".into(), join);
    }
    if !after.is_empty() {
        step.insert("after".into(), Value::Array(after));
    }
    if !subscribes.is_empty() {
        step.insert("subscribes".into(), Value::Array(subscribes));
    }
    readable
}

/// Adds the step's action; true for a gate alone.
fn kind(
    tape: &mut Tape<'_>,
    depth: usize,
    step: &mut Map<String, Value>,
    readable: &[&str],
    events: &mut Events,
) -> bool {
    let value = |tape: &mut Tape<'_>| {
        let mut values =
            vec!["${input}".to_owned(), "plain".to_owned(), "${1 / 0}".to_owned(), "${input.n + 1}".to_owned()];
        values.extend(readable.iter().map(|name| format!("${{steps.{name}.output}}")));
        json!(tape.pick(&values))
    };
    match tape.below(16) {
        0..=5 => {
            worker(tape, step);
            if spread(tape, step) {
                return false;
            }
            if tape.one_in(3) {
                let event = (*tape.pick(&["x", "x.y", "z"])).to_owned();
                if !events.heard.contains(&event) {
                    step.insert("emits".into(), json!([event]));
                    events.declared.insert(event);
                }
            }
        }
        6 | 7 => {
            step.insert("set".into(), value(tape));
        }
        8 => {
            step.insert("fail".into(), value(tape));
        }
        9 => {
            step.insert("return".into(), value(tape));
        }
        10..=12 if depth < 2 => {
            step.insert("steps".into(), steps(tape, depth + 1));
            spread(tape, step);
            if tape.one_in(3) {
                let max = 1 + tape.below(3);
                let test = match tape.below(4) {
                    0 => ("until", "round == 1"),
                    1 => ("while", "round < 2"),
                    2 => ("until", "false"),
                    _ => ("until", "steps.a.output.n == 1"),
                };
                let mut repeat = json!({"max": max, "state": {"n": 0}, "next": {"n": "${state.n + 1}"}});
                repeat[test.0] = json!(test.1);
                step.insert("repeat".into(), repeat);
            }
            if tape.one_in(2) {
                step.insert("output".into(), json!("${steps.a.output}"));
            }
        }
        13 => {
            // A kid has no kids, or a case might never end.
            let flows: &[&str] = if depth == KID { &["nowhere"] } else { &["kid", "job", "nowhere"] };
            step.insert("flow".into(), json!(*tape.pick(flows)));
            if tape.one_in(3) {
                step.insert("detached".into(), json!(true));
            }
            spread(tape, step);
        }
        14 => return true,
        _ => {
            worker(tape, step);
            if depth != FINALLY {
                step.insert("undo".into(), json!({"run": "undo"}));
            }
            spread(tape, step);
        }
    }
    false
}

fn worker(tape: &mut Tape<'_>, step: &mut Map<String, Value>) {
    step.insert("run".into(), json!("h"));
    step.insert("retry".into(), json!({"attempts": 1 + tape.below(3), "initial": tape.below(3) * 100, "jitter": 0.5}));
    if tape.one_in(6) {
        step.insert("start_timeout".into(), json!("10s"));
    }
}

fn spread(tape: &mut Tape<'_>, step: &mut Map<String, Value>) -> bool {
    if !tape.one_in(4) {
        return false;
    }
    let list = *tape.pick(&["input.items", "[]", "[{'n': 1}]", "range(4)", "input.n"]);
    step.insert("spread".into(), json!(list));
    step.insert("max_parallel".into(), json!(1 + tape.below(4)));
    match tape.below(3) {
        0 => {}
        1 => {
            step.insert("on_item_failure".into(), json!("collect"));
        }
        _ => {
            step.insert("on_item_failure".into(), json!("collect"));
            step.insert("max_failures".into(), json!(tape.below(2)));
        }
    }
    true
}

fn gate(tape: &mut Tape<'_>) -> Value {
    let mut gate = match tape.below(5) {
        0 => return json!({"time": "1s"}),
        1 => return json!({"until": "now()"}),
        2 => json!({"webhook": true}),
        3 => json!({"manual": true}),
        _ => json!({"event": "ping", "key": "input.n"}),
    };
    if tape.one_in(2) {
        gate["timeout"] = json!("1m");
        gate["on_timeout"] = json!(*tape.pick(&["fail", "continue", "skip"]));
    }
    gate
}
