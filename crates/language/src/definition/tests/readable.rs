//! Which names an expression can read, and which steps are certain to be decided before.

use super::*;

#[test]
fn steps_that_are_certain_to_be_decided() {
    // What `z` waits for, which steps it can read, which it cannot.
    let flow = "a: {emits: [e]}\nb: {after: [a]}\nc: {after: ['ended:b']}\nd: {subscribes: [e]}\n";
    let table = [
        ("after: [a]", "a", "b c d"),
        ("after: [b]", "a b", "c d"),
        ("after: ['step:b']", "a b", "c d"),
        ("after: ['failed:b']", "a b", "c d"),
        ("after: ['ended:b']", "a b", "c d"),
        ("after: [c]", "a b c", "d"),
        ("after: [b, d]", "a b d", "c"),
        ("after: [d]", "d", "a b c"),
        ("subscribes: [e]", "", "a b c d"),
        ("subscribes: [e, 'step:b']", "a b", "c d"),
        ("after: [b, d], join: some", "a b d", "c"),
        ("after: [b, d], join: any", "", "a b c d"),
        ("after: [b], join: any", "a b", "c d"),
        ("after: [b, d], join: {at_least: 2}", "", "a b c d"),
        ("after: [b], join: some", "a b", "c d"),
        ("set: 1", "", "a b c d"),
    ];
    for (arms, readable, unreadable) in table {
        let read = |step: &str| of_steps(&format!("{flow}z: {{{arms}, if: \"steps.{step}.output == 1\"}}"));
        for step in readable.split_whitespace() {
            assert_eq!(read(step), "fine", "{arms}: {step}");
        }
        for step in unreadable.split_whitespace() {
            assert!(read(step).contains("may still be undecided"), "{arms}: {step}: {}", read(step));
        }
    }
}

#[test]
fn what_is_certain_behind_a_step_that_may_be_skipped() {
    // The steps between, what `z` waits for, which steps it can read, which it cannot.
    let table = [
        // Both sides of a branch wait for the same step.
        ("l: {after: [a]}\nr: {after: [a]}", "after: [l, r], join: some", "a l r", "b"),
        ("l: {after: [a]}\nr: {after: ['failed:a']}", "after: ['ended:l', 'ended:r']", "a l r", "b"),
        ("l: {after: [a]}\nm: {after: [l]}\nn: {after: [m]}", "after: ['ended:n']", "a l m n", "b"),
        // An `all` join is skipped at its first dead arm, when others may be undecided.
        ("l: {after: [a, b]}", "after: [l]", "a b l", ""),
        ("l: {after: [a, b]}", "after: ['failed:l']", "a b l", ""),
        ("l: {after: [a, b]}", "after: ['ended:l']", "l", "a b"),
        ("l: {after: [a, b]}\nr: {after: [a]}", "after: [l, r], join: some", "a l r", "b"),
        ("l: {after: [a, b]}\nm: {after: ['ended:l']}", "after: [m]", "l m", "a b"),
        // An arm that is never dead cannot cause a skip.
        ("l: {after: [a, 'ended:b']}", "after: ['ended:l']", "a l", "b"),
        ("l: {after: ['ended:a', 'ended:b']}", "after: ['ended:l']", "a b l", ""),
        // `a` has ended, whichever arm is dead.
        ("k: {after: [a]}\nl: {after: [a]}\nm: {after: [k, l]}", "after: ['ended:m']", "a m", "b k l"),
        // At least one arm is live, and both need `a`.
        ("l: {after: [a, b]}\nr: {after: [a, c]}", "after: [l, r], join: some", "a l r", "b c"),
        ("l: {after: [a, b]}\nr: {after: [a, c]}", "after: [l, 'ended:r'], join: some", "l r", "a b c"),
        ("l: {after: [a, b], join: some}", "after: ['ended:l']", "a b l", ""),
        // An event implies nothing, nor does a join that does not wait for all arms.
        ("l: {after: [a], subscribes: [e]}", "after: ['ended:l']", "l", "a b"),
        ("l: {subscribes: [e]}", "after: ['ended:l']", "l", "a b"),
        ("l: {after: [a, b], join: any}", "after: ['ended:l']", "l", "a b"),
        // `rest: cancel` may cancel a step at any time.
        ("l: {after: [a]}\nq: {after: [l, b], join: {at_least: 1, rest: cancel}}", "after: ['ended:l']", "l", "a b"),
        ("l: {after: [a]}\nq: {after: [l, b], join: {at_least: 1, rest: cancel}}", "after: [l]", "a l", "b"),
        ("l: {after: [a]}\nq: {after: [l, b], join: {at_least: 1}}", "after: ['ended:l']", "a l", "b"),
    ];
    for (between, arms, readable, unreadable) in table {
        let flow = format!("a:\nb:\nc: {{emits: [e]}}\n{between}\n");
        let read = |step: &str| of_steps(&format!("{flow}z: {{{arms}, if: \"steps.{step}.output == 1\"}}"));
        for step in readable.split_whitespace() {
            assert_eq!(read(step), "fine", "{between}: {arms}: {step}");
        }
        for step in unreadable.split_whitespace() {
            assert!(read(step).contains("may still be undecided"), "{between}: {arms}: {step}: {}", read(step));
        }
    }
}

#[test]
fn why_a_step_is_not_readable() {
    let texts = [
        "a:\nb:\nz: {after: [a], if: steps.b.output}",
        "a: {emits: [e]}\nz: {subscribes: [e], if: steps.a.output}",
        "a:\nb:\nc: {after: [a, b], join: any}\nz: {after: [c], if: steps.b.output}",
        "a:\nb:\nz: {after: [a, b], join: any, if: steps.b.output}",
        "a:\nb:\nc: {after: [a, b]}\nz: {after: ['ended:c'], if: steps.a.output}",
        "a:\nb:\nc: {after: [a, b]}\nd:\nz: {after: [c, d], join: some, if: steps.a.output}",
        "a:\nb: {after: [a]}\nc:\nd: {after: [b, c], join: {at_least: 1, rest: cancel}}\nz: {after: ['ended:b'], if: steps.a.output}",
        "z: {if: steps.b.output}\nb: {after: [z]}",
        "z: {if: steps.z.output}",
        "g: {steps: {x: {if: steps.g.output}}}",
        "a-b:\nz: {input: '${steps[\"a-b\"].output}'}",
        "a:\nb:\ng: {after: [a], steps: {x: {if: steps.a.output}, y: {if: steps.b.output}}}",
        "a:\ng: {after: [a], steps: {x: }, output: '${steps.x.output}', input: '${steps.x.output}'}",
        "load:\nz: {after: [load], if: steps.laod.output}",
        "a:\nz: {after: [a], if: steps.a.outptu}",
        "a:\nz: {after: [a], input: '${steps.a}'}",
        "a:\nz: {after: [a], input: '${steps}'}",
        "a:\nz: {after: [a], input: '${steps[input.x].output}'}",
        "a:\nz: {after: [x], if: steps.a.output}",
        "load-all:\nz: {after: [load-all], if: steps.load-all.output}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn only_who_asks_how_a_step_ended_is_told_to_wait_for_its_end_however_it_comes() {
    for (field, arm) in [("output", "charge"), ("status", "ended:charge"), ("error", "ended:charge")] {
        let alone = of_steps(&format!("charge:\nship: {{input: '${{steps.charge.{field}}}'}}"));
        assert!(alone.ends_with(&format!("; add `{arm}` to `after` of `ship`")), "{alone}");
        let joined =
            of_steps(&format!("a:\ncharge:\nship: {{after: [a, charge], join: any, if: steps.charge.{field}}}"));
        let help = format!("; use `join: some` (or `all`) with `{arm}` in `after` of `ship`");
        assert!(joined.ends_with(&help), "{joined}");
        // The suggested change is accepted.
        let followed = format!("charge:\nship: {{after: ['{arm}'], input: '${{steps.charge.{field}}}'}}");
        assert_eq!(of_steps(&followed), "fine");
    }
}

#[test]
fn names_and_where_they_are_known() {
    let fine = [
        "a: {spread: input, input: '${item}', limits: [{l: '${item.x}'}], key: item.y}",
        "a: {spread: input, as: order, steps: {b: {steps: {c: {set: '${[order, index]}'}}}}}",
        "a: {steps: {b: {if: 'round > 0', set: '${state}'}}, repeat: {while: 'state.x', max: 3}, output: '${round}'}",
        "a: {steps: {b: {emits: [e]}}, repeat: {until: 'events[\"e\"].x && steps.b.output', max: 3, next: '${events.e}'}}",
        "a: {await: {manual: true}, spread: gate.items, run: x}",
        "a: {await: {manual: true}, steps: {b: {if: gate.x}}}",
        "a: {input: '${gates.b.url}'}\nb: {after: [a], await: {webhook: true}}",
        "b: {await: {manual: true}}\ng: {steps: {a: {input: '${gates.b.url}'}}}",
        "a: {input: '${[run.id, run.flow, run.version, run.input, run.tags, run.external_id]}'}",
        "a: {input: '${run}'}",
        "a: {emits: [e]}\ng: {subscribes: [e], steps: {b: {set: '${events.e}'}}}",
    ];
    for text in fine {
        assert_eq!(of_steps(text), "fine", "{text}");
    }
    let texts = [
        "a: {if: inptu.x}",
        "a: {spread: item.x}",
        "a: {spread: input, if: item.x}",
        "a: {spread: input, as: order, input: '${item}'}",
        "a: {if: index > 0}",
        "a: {if: state.x || round > 1}",
        "a: {steps: {b: }, repeat: {until: 'true', max: 3, state: '${round}'}}",
        "a: {await: {manual: true}, if: gate.x}",
        "a: {await: {until: gate.x}}",
        "a: {if: gate.x}",
        "a: {input: '${gates.b.url}'}\nb: {await: {time: 5s}}\nc:",
        "a: {input: '${[gates.c.url, gates.d.url]}'}\nc:",
        "a: {input: '${gates.b.token}'}\nb: {await: {manual: true}}",
        "a: {if: run.outcome == 'failed'}",
        "a: {if: run.idd}",
        "a: {emits: [e]}\nb: {after: [a], set: '${events.e}'}",
        "a: {emits: [paid]}\nb: {subscribes: [paid], set: '${events.payed}'}",
        "a: {set: '${events.e}'}",
        "a: {emits: [order.paid]}\nb: {subscribes: [order.paid], set: '${events.order.paid}'}",
    ];
    insta::assert_snapshot!(cases(texts, of_steps));
}

#[test]
fn finally_sees_how_the_run_ended() {
    let text = |input: &str| {
        format!(
            "name: f\nsteps: {{a: {{emits: [e]}}}}\nfinally: {{steps: {{x: , y: {{input: '${{{input}}}'}}}}}}\noutput: '${{steps.a.output}}'"
        )
    };
    for input in ["run.outcome", "run.error", "steps.a.output"] {
        assert_eq!(of(&text(input)), "fine", "{input}");
    }
    let said: Vec<_> = ["steps.x.output", "steps.q.output", "events.e"].map(|input| of(&text(input))).into();
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn places_inside_texts() {
    let text = "name: f\nsteps:\n  a:\n    input:\n      list:\n        - x\n        - \"n: ${wrong.x} ${input.y}\"\n      plain: ${ugly}\n      block: |\n        one\n        ${bad}\n";
    insta::assert_snapshot!(rendered(text));
}
