//! No text makes the parser panic, overflow the stack or hang.

use proptest::prelude::*;

use super::accepted::{FULFIL, SEED};
use super::*;

/// Problems must render; an accepted flow must parse again from its canonical form.
fn survives(text: &str) -> Result<(), TestCaseError> {
    match parse_named(Some("f"), text).or_else(|_| parse(text)) {
        Ok(parsed) => {
            let again = parse(&parsed.flow.canonical.to_string());
            let again = again.map_err(|problems| TestCaseError::fail(problems.to_string()))?;
            prop_assert_eq!(&again.flow.version, &parsed.flow.version);
            prop_assert_eq!(format!("{:?}", again.flow.body), format!("{:?}", parsed.flow.body));
            analysis(&parsed.flow);
        }
        Err(problems) => {
            prop_assert!(!problems.0.is_empty());
            problems.render(text);
        }
    }
    Ok(())
}

/// A text with pieces removed, duplicated and moved.
fn mutated() -> impl Strategy<Value = String> {
    let base = prop::sample::select(vec![FULFIL, SEED, include_str!("every_field.yaml")]);
    let piece = prop::sample::select(vec![
        "",
        "[",
        "{",
        "}",
        "]",
        "\"",
        "'",
        ":",
        ": ",
        "\n",
        "\n  ",
        "- ",
        "&x ",
        "*x",
        "<<",
        "!",
        "|",
        ">",
        "#",
        "\t",
        "null",
        "5",
        "-1",
        "1e9",
        "true",
        "${",
        "steps.a.output",
        "after: [a]",
        "spread: input",
        "steps: {b: }",
        "\u{feff}",
        "é",
        "\u{0}",
        "0x",
        "\\",
        "\\ud800",
        "?",
        "%",
        "---\n",
        "...",
        "@",
        "`",
    ]);
    let cut = (any::<prop::sample::Index>(), 0usize..30, piece);
    (base, prop::collection::vec(cut, 1..6)).prop_map(|(base, cuts)| {
        let mut text = base.to_owned();
        for (at, len, piece) in cuts {
            let start = text.floor_char_boundary(at.index(text.len() + 1));
            let end = text.floor_char_boundary((start + len).min(text.len()));
            text.replace_range(start..end.max(start), piece);
        }
        text
    })
}

/// Fields with values of any type.
fn shapes() -> impl Strategy<Value = String> {
    let fields = [
        "run",
        "worker",
        "set",
        "fail",
        "return",
        "steps",
        "flow",
        "after",
        "subscribes",
        "join",
        "if",
        "await",
        "queue",
        "limits",
        "retry",
        "timeout",
        "start_timeout",
        "emits",
        "priority",
        "requires",
        "key",
        "undo",
        "output",
        "repeat",
        "detached",
        "input",
        "spread",
        "as",
        "max_parallel",
        "on_item_failure",
        "max_failures",
        "description",
    ];
    let value = prop::sample::select(vec![
        "null",
        "true",
        "5",
        "-1",
        "1.5",
        "\"a\"",
        "\"\"",
        "\"step:a\"",
        "\"input.x\"",
        "\"${steps.a.output}\"",
        "\"30s\"",
        "[]",
        "[\"a\"]",
        "[\"ended:a\", \"a\"]",
        "[\"e\"]",
        "{}",
        "{\"a\": null}",
        "{\"run\": \"x\"}",
        "{\"time\": 5}",
        "{\"at_least\": 1}",
        "{\"until\": \"true\", \"max\": 3}",
        "[{\"e\": {}}]",
        "{\"a\": {\"steps\": {\"b\": {}}}}",
    ]);
    let field = (prop::sample::select(fields.to_vec()), value).prop_map(|(name, value)| format!("\"{name}\": {value}"));
    let step = prop::collection::vec(field, 0..4).prop_map(|fields| format!("{{{}}}", fields.join(", ")));
    let steps = prop::collection::vec(step, 1..4);
    steps.prop_map(|steps| {
        let steps: Vec<_> =
            steps.iter().zip(["a", "b", "c"]).map(|(step, name)| format!("\"{name}\": {step}")).collect();
        format!("{{\"name\": \"f\", \"steps\": {{{}}}}}", steps.join(", "))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutations_of_flows(text in mutated()) {
        survives(&text)?;
    }

    #[test]
    fn random_characters(text in "[ \\n\\t{}\\[\\]:,\"'#&*!|>%@`a-c0-9$.éΩ\u{1F600}-]{0,80}") {
        survives(&text)?;
    }

    #[test]
    fn any_characters(text in any::<String>()) {
        survives(&text)?;
    }

    #[test]
    fn fields_of_any_shape(text in shapes()) {
        survives(&text)?;
    }
}
