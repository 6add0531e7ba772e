//! Problems reported for wrong definitions. Review each snapshot as the flow's author would read it.

use super::*;

#[test]
fn as_people_see_them() {
    let text = "name: order\nsteps:\n  load: {retires: {attempts: 3}}\n  pay:\n    after: [laod]\n    retry: {attempts: 0}\n    timeout: [30]\n    if: \"steps.load.output.total >\"\n";
    insta::assert_snapshot!(rendered(text));
}

#[test]
fn fields_of_steps() {
    let texts = [
        "a: {retires: {attempts: 3}}",
        "a: {zzzz: 1}",
        "a: {depends_on: [b]}",
        "a: {retry: {attempt: 3, max_delay: 5s}}",
        "a: handler",
        "a: [run, x]",
        "a: {run: 5}",
        "a: {run: ''}",
        "a: {run: x, worker: y}",
        "a: {run: x, flow: y}",
        "a: {set: 1, fail: x, steps: {b: }}",
        "a: {set: 1, retry: {attempts: 2}}",
        "a: {return: 1, timeout: 5s}",
        "a: {flow: x, retry: {attempts: 2}}",
        "a: {steps: {b: }, queue: q, detached: true}",
        "a: {run: x, output: 1, repeat: {until: 'true', max: 3}}",
        "a: {await: {time: 1s}, retry: {attempts: 3}}",
        "a: {await: {time: 1s}, timeout: 5s}",
        "a: {await: {time: 1s}, spread: 'input'}",
        "a: {set: 1, undo: {run: x}, emits: [e], input: 5}",
        "a: {undo: refund}",
        "a: {undo: {}}",
        "a: {queue: 'my queue', priority: high, requires: gpu}",
        "a: {limits: [5, {a: 1, b: 2}, ok, 'not ok']}",
        "a: {emits: paid}",
        "a: {emits: [paid, {paid: null}, 5, {x: string}]}",
        "a: {spread: 'input', emits: [e]}",
        "a: {if: 5}",
        "a: {if: '${input.x}'}",
        "a: {if: 'input.x = 5'}",
        "a: {input: {x: ['${input.}', '${input.y}', '${']}}",
        "a.b: {}",
        "'a b': {}",
        "finally: {}",
        "'': {}",
        "a: {description: [x]}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn durations_and_numbers() {
    let texts = [
        "a: {timeout: []}",
        "a: {timeout: '30'}",
        "a: {timeout: 1.5h}",
        "a: {timeout: 30 s}",
        "a: {timeout: 5w}",
        "a: {timeout: 30m1h}",
        "a: {timeout: -5}",
        "a: {timeout: 1.5}",
        "a: {timeout: 9999d}",
        "a: {timeout: 999999999999999}",
        "a: {timeout: }",
        "a: {retry: 3}",
        "a: {retry: {attempts: 0}}",
        "a: {retry: {attempts: -2}}",
        "a: {retry: {attempts: 2.5}}",
        "a: {retry: {factor: 0.5, jitter: 2, non_retryable: BadInput}}",
        "a: {retry: {jitter: some}}",
        "a: {priority: 99999999999}",
        "a: {spread: input, max_parallel: 0}",
        "a: {spread: input, max_parallel: 100001}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn gates_spreads_repeats_joins() {
    let texts = [
        "a: {await: 5s}",
        "a: {await: {}}",
        "a: {await: {time: 5s, webhook: true}}",
        "a: {await: {webhook: false}}",
        "a: {await: {webhook: true, key: input.x, since: run}}",
        "a: {await: {event: e, since: yesterday}}",
        "a: {await: {event: 'an event'}}",
        "a: {await: {manual: true, timeout: 1h, on_timeout: ignore}}",
        "a: {await: {manual: true, on_timeout: skip}}",
        "a: {as: x, max_parallel: 3}",
        "a: {spread: input, as: steps}",
        "a: {spread: input, as: a-b}",
        "a: {spread: [1, 2]}",
        "a: {spread: input, max_failures: 3}",
        "a: {spread: input, on_item_failure: ignore}",
        "a: {steps: {b: }, repeat: {max: 3}}",
        "a: {steps: {b: }, repeat: {until: 'true'}}",
        "a: {steps: {b: }, repeat: {until: 'true', while: 'true', max: 3}}",
        "a: {steps: {b: }, repeat: {until: 'true', max: 1000001}}",
        "a: {steps: {}}",
        "a: {steps: [b]}",
        "a: {join: any}",
        "a:\nb: {after: [a], join: first}",
        "a:\nb: {after: [a], join: {at_least: 2}}",
        "a:\nb: {after: [a], join: {at_least: 0}}",
        "a:\nb: {after: [a], join: {rest: cancel}}",
        "a: {emits: [e]}\nb: {subscribes: [e], join: {at_least: 1, rest: cancel}}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn arms() {
    let texts = [
        "load:\npay: {after: [laod]}",
        "a: {emits: [order.paid]}\nb: {subscribes: [order.payed]}",
        "a:\nb: {subscribes: [order.paid]}",
        "a:\nb: {subscribes: [a]}",
        "a: {emits: [e]}\nb: {after: [e]}",
        "a:\nb: {after: ['failed:c', 'done:a', 'event:a', ':a', 5]}",
        "a:\nb: {after: a}",
        "a:\nb: {after: [a, a]}",
        "a:\nb: {after: [a], subscribes: ['step:a']}",
        "a: {emits: [a]}\nb: {after: [a], subscribes: [a]}",
        "a: {steps: {inner: {emits: [e]}}}\nb: {after: [inner], subscribes: [e]}",
        "a:\ng: {steps: {b: {after: [a]}}}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn circles() {
    let texts = [
        "a: {after: [a]}",
        "a: {after: [c]}\nb: {after: [a]}\nc: {after: [b]}\nd: {after: [c]}\ne:",
        "a: {after: [b]}\nb: {after: ['failed:a']}\nx: {after: [y]}\ny: {after: [x]}",
        "a: {emits: [e], subscribes: [f]}\nb: {emits: [f], subscribes: [e]}",
        "a: {emits: [e]}\nb: {emits: [e], subscribes: [e]}",
        "g: {steps: {a: {after: [b]}, b: {after: [a], input: '${steps.a.output}'}}}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn top_level() {
    let texts = [
        "[1]",
        "name: f",
        "name: f\nsteps: {}",
        "name: f\nsteps: [a]",
        "name: 5\nsteps: {a: }",
        "name: f g\nsteps: {a: }",
        "name: f\nstep: {a: }",
        "name: f\nsteps: {a: }\nqueue: q",
        "name: f\ncode: true\nsteps: {a: }",
        "name: f\ncode: yes\nsteps: {a: }",
        "name: f\ncode: true\nbuilds: newest",
        "name: f\ninput_schema: object\nsteps: {a: }",
        "name: f\nfail_fast: 1\nsteps: {a: }",
        "name: f\nfinally: {a: }\nsteps: {a: }",
        "name: f\nfinally: {steps: {a: {after: [b]}}, timeout: x}\nsteps: {b: }",
        "name: f\nentry: a\nsteps: {b: , c: {after: [b]}}",
        "name: f\nentry: c\nsteps: {b: , c: {after: [b]}}",
        "name: f\nentry: {a: b}\nsteps: {b: }",
        "name: f\noutput: '${steps.b.outputs}'\nsteps: {b: }",
    ];
    insta::assert_snapshot!(cases(texts, of));
}

#[test]
fn warnings() {
    let texts = [
        "a:\nb: {after: [a, 'failed:a']}",
        "a:\nb: {after: [a]}\nc: {after: [b, 'failed:a']}\nd: {after: [c]}",
        "a: {fail: no}\nb: {after: [a]}",
        "a:\nb: {after: [a, 'failed:a'], join: any}",
        "a:\nb: {after: [a, 'ended:a']}",
        "a:\nb: {after: [a], if: 'input.x'}\nc: {after: [a], if: '!input.x'}\nd: {after: [b, c]}",
        "a:\nb: {after: [a], if: 'input.x'}\nc: {after: [a], if: '!input.x'}\nd: {after: [b, c], join: some}",
        "a:\nb: {after: [a], if: 'input.x'}\nc: {after: [a]}\nd: {after: [c, 'ended:b']}",
        "a:\nb: {after: [a], if: 'input.x'}\nc: {after: [b]}\nd: {after: [b]}\ne: {after: [c, d]}",
        "a: {if: 'input.x', emits: [e]}\nb: {emits: [f]}\nc: {subscribes: [e, f]}",
        "a:\nb: {after: [a, 'failed:a'], emits: [e]}\nc: {subscribes: [e]}\nd: {after: [c, a], join: any}",
        "a:\nb: {after: [a, 'failed:a', 'ended:a'], join: {at_least: 2}}",
        "a:\nb: {after: [a, 'failed:a'], join: {at_least: 2}}\nc: {after: [b, 'failed:b'], join: some}\nd: {after: ['ended:b', c], join: any}",
        "a: {if: false}\nb: {after: [a]}",
        "a: {return: 1}\nb: {after: [a]}\nc: {after: ['failed:a']}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
    let entry = "name: f\nentry: a\nsteps: {a: , b: }";
    insta::assert_snapshot!(of(entry), @"warning: 3:14 steps.b: `b` waits for nothing, so it starts with the run, although `entry` does not list it");
}

#[test]
fn a_bare_number_as_a_duration_is_a_warning() {
    let said = of("name: f\nsteps: {a: {timeout: 30}}");
    assert_eq!(said, "warning: 2:22 steps.a.timeout: `timeout: 30` means 30 ms; write `30ms` or `30s`");
    let fields = "a: {retry: {initial: 5, max: 7}, start_timeout: 9}\nb: {await: {time: 11}}\nc: {await: {event: e, timeout: 13}}";
    assert_eq!(of_steps(fields).lines().count(), 5, "{}", of_steps(fields));
    assert_eq!(of_steps("a: {retry: {initial: 0}, timeout: 30ms}"), "fine");
    assert_eq!(of("name: f\ncode: true\ntimeout: 60").lines().count(), 1);
    let many: String = (0..300).map(|n| format!("s{n}: {{timeout: 1}}\n")).collect();
    assert_eq!(of_steps(&many).lines().count(), MAX_PROBLEMS + 1);
}

#[test]
fn what_the_fields_of_a_code_flow_read_is_known_when_it_starts() {
    let of_limit = |key: &str| of(&format!("name: f\ncode: true\nlimits: [{{t: '${{{key}}}'}}]"));
    assert_eq!(of_limit("input.tenant + run.flow"), "fine");
    assert_eq!(of_limit("steps.a.output"), "3:17 limits[0].t: there is no step `a` here");
    assert!(of_limit("inputs.a").contains("did you mean `input`?"), "{}", of_limit("inputs.a"));
    assert!(of("name: f\ncode: true\nlimits: api").contains("limits"), "{}", of("name: f\ncode: true\nlimits: api"));
}

#[test]
fn limits() {
    let steps = |n: usize| (0..n).map(|n| format!("s{n}:\n")).collect::<String>();
    assert_eq!(of_steps(&steps(MAX_STEPS)), "fine");
    insta::assert_snapshot!(of_steps(&steps(MAX_STEPS + 3)));
    let mut nested = "{steps: {x: }}".to_owned();
    for _ in 0..MAX_GROUP_DEPTH {
        nested = format!("{{steps: {{x: {nested}}}}}");
    }
    insta::assert_snapshot!(of_steps(&format!("a: {nested}")));
    let unknown: String = (0..300).map(|n| format!("u{n}: 1\n")).collect();
    let said = of(&format!("name: f\nsteps: {{a: }}\n{unknown}"));
    assert_eq!(said.lines().count(), MAX_PROBLEMS + 1);
    assert!(said.ends_with("\n1:1 there are more problems; fix these to see them"), "{said}");
    let arms = format!("a:\nb: {{after: [{}]}}", vec!["a"; MAX_ARMS + 1].join(", "));
    insta::assert_snapshot!(of_steps(&arms));
    // Every second step emits what the others wait for.
    let events: Vec<_> = (0..90).map(|n| format!("e{n}")).collect();
    let dense: String = (0..400)
        .map(|n| match n % 2 {
            0 => format!("s{n}: {{emits: [{}]}}\n", events.join(", ")),
            _ => format!("s{n}: {{subscribes: [{}]}}\n", events.join(", ")),
        })
        .collect();
    insta::assert_snapshot!(of_steps(&dense));
}

#[test]
fn what_is_wrong_with_a_schema_is_told_where_it_is_and_with_everything_else() {
    let text = "name: x\ninput_schema: {type: 12}\nsteps:\n  a: {rum: a, emits: [{paid: {allOf: [{}, {type: 13}]}}]}\n";
    let check = |schema: &serde_json::Value| {
        let path: &[&str] = if schema["type"].is_null() { &["allOf", "1", "type"] } else { &["type"] };
        let path = path.iter().map(|key| (*key).to_owned()).collect();
        vec![SchemaFault { path, message: "not a type".to_owned() }]
    };
    let problems = parse_checked(None, text, &check).unwrap_err().0;
    let found: Vec<_> = problems.iter().map(|problem| (problem.path.as_str(), problem.line, problem.column)).collect();
    let expected = [("input_schema.type", 2, 22), ("steps.a.rum", 4, 7), ("steps.a.emits[0].allOf[1].type", 4, 50)];
    assert_eq!(found, expected);
    assert_eq!(problems[0].message, "this is not a JSON Schema: not a type");
    assert_eq!(parse(text).unwrap_err().0.len(), 1, "without a schema check");
}
