//! JSON and YAML: syntax errors, positions and limits.

use super::super::source::{NodeValue, SourceNode, read};
use super::*;

fn value(text: &str) -> serde_json::Value {
    read(text).unwrap_or_else(|problem| panic!("{problem}")).json()
}

#[test]
fn json_and_yaml_mean_the_same() {
    let json = value(r#"{"a": [1, -2.5, true, null, "x\u00e9\ud83d\ude00\n"], "b": {"": 1e3}}"#);
    let yaml = value("a: [1, -2.5, true, ~, \"x\\u00e9\\ud83d\\ude00\\n\"]\nb:\n  \"\": 1e3 # a comment\n");
    assert_eq!(json, yaml);
    assert_eq!(json, serde_json::json!({"a": [1, -2.5, true, null, "xé😀\n"], "b": {"": 1000.0}}));
}

#[test]
fn json_that_is_no_yaml_is_read() {
    let long = "k".repeat(3_000);
    let text = format!("{{\n\t\"a\": [\n\t\t1,\n\t\t\"\\ud83d\\ude00\u{7f}\"\n\t],\n\t\"{long}\": {{}}\n}}");
    assert_eq!(value(&text), serde_json::from_str::<serde_json::Value>(&text).unwrap());
}

#[test]
fn plain_scalars_by_the_core_schema() {
    let yaml =
        value("[0x1F, 0o17, +3, .5, 1., 1e2, 1_000, yes, on, '1', 2026-01-02, 30s, True, NULL, 0x, 0xg, 1e, e1]");
    let expected = serde_json::json!([
        31,
        15,
        3,
        0.5,
        1.0,
        100.0,
        "1_000",
        "yes",
        "on",
        "1",
        "2026-01-02",
        "30s",
        true,
        null,
        "0x",
        "0xg",
        "1e",
        "e1"
    ]);
    assert_eq!(yaml, expected);
}

#[test]
fn positions_are_of_what_is_written() {
    let places = |text: &str| {
        let SourceNode { value: NodeValue::Map(entries), .. } = read(text).unwrap() else { panic!("not a map") };
        entries.iter().map(|(key, node)| (key.at.line, key.at.column, node.at.line, node.at.column)).collect::<Vec<_>>()
    };
    assert_eq!(places("{\"é\": 1,\n \"b\": [2]}"), [(1, 2, 1, 7), (2, 2, 2, 7)]);
    assert_eq!(places("é: 1\nb:\n  c: 2\n"), [(1, 1, 1, 4), (2, 1, 3, 3)]);
    assert_eq!(places("{é: 1,\n b: [2]}"), [(1, 2, 1, 5), (2, 2, 2, 5)]);
}

#[test]
fn aliases_are_copies() {
    assert_eq!(value("a: &x {n: [1]}\nb: *x"), serde_json::json!({"a": {"n": [1]}, "b": {"n": [1]}}));
}

#[test]
fn what_is_wrong_with_the_syntax() {
    let texts = [
        "",
        "   \n# only a comment\n",
        "{\"name\": \"f\", \"steps\": {\"a\": {}}",
        "{\"name\": \"f\",, \"steps\": {}}",
        "{\"name\": \"f\" \"steps\": {}}",
        "{\"name\": f}x",
        "{\"name\": \"f\\q\"}x",
        "{\"name\": \"\\ud800\"}x",
        "{\"name\": 01}x",
        "{\"name\": \"f\"} {\"name\": \"g\"}",
        "{name: f, steps: {a: [}}",
        "name: f\n  steps: x\n",
        "name: \"f\nsteps: {}\n",
        "name: f\nsteps:\n\ta: {}\n",
        "name: !str f\n",
        "name: f\n---\nname: g\n",
        "base: &b {run: x}\nsteps:\n  a: {<<: *b}\n",
        "a: &a [*a]\n",
        "a: *nobody\n",
        "? [a, b]\n: x\n",
        ": x\n",
        "name: .inf\n",
        "name: 123456789012345678901234567890\n",
        "{\"name\": 123456789012345678901234567890}",
        "[1, 2]",
        "just words",
    ];
    insta::assert_snapshot!(cases(texts, of));
}

#[test]
fn limits() {
    let deep = |open: &str, close: &str, n: usize| format!("{}{}", open.repeat(n), close.repeat(n));
    assert!(read(&deep("[", "]", MAX_DEPTH)).is_ok());
    let blocks: String = (0..200).map(|n| format!("{}a:\n", " ".repeat(n))).collect();
    let many = format!("[{}1]", "1,".repeat(MAX_NODES));
    let long = "x".repeat(MAX_TEXT_BYTES + 1);
    // Each line expands to ten of the one before.
    let mut laughs = "a0: &a0 ha\n".to_owned();
    for n in 1..12 {
        let last = n - 1;
        laughs += &format!("a{n}: &a{n} [{}]\n", vec![format!("*a{last}"); 10].join(","));
    }
    let copies = format!("a: &a {}\nb: [{}*a]\n", "x".repeat(100_000), "*a,".repeat(50_000));
    let texts =
        [deep("[", "]", 65), deep("{\"a\":", "}", 100_000), deep("[", "", 500_000), blocks, many, long, laughs, copies];
    let said: Vec<_> = texts.iter().map(|text| of(text)).collect();
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn a_definition_with_very_many_expressions_is_refused() {
    let with = |count: usize| {
        let holes = vec!["\"${input}\""; count].join(",");
        of(&format!("{{\"name\": \"f\", \"steps\": {{\"a\": {{\"set\": [{holes}]}}}}}}"))
    };
    assert_eq!(with(MAX_EXPRESSIONS), "fine");
    let said = with(MAX_EXPRESSIONS + 1);
    assert!(said.ends_with("the definition has 10001 expressions in `${…}`, the limit is 10000"), "{said}");
    // Expanded aliases count too.
    let aliases = format!("name: f\nsteps: {{a: {{set: [&x '${{input}}', {}]}}}}", vec!["*x"; 20_000].join(","));
    assert!(of(&aliases).contains("20001 expressions"), "{}", of(&aliases));
}

#[test]
fn a_problem_far_out_in_a_long_line_is_shown_around_its_place() {
    let steps: Vec<_> = (0..40).map(|n| format!("\"step{n}\":{{\"run\":\"r\"}}")).collect();
    let text = format!("{{\"name\":\"f\",\"steps\":{{{},\"x\":{{\"rum\":\"r\"}}}}}}", steps.join(","));
    insta::assert_snapshot!(rendered(&text));
}

#[test]
fn doubled_keys_are_told_with_all_else() {
    insta::assert_snapshot!(rendered("name: f\nsteps:\n  a: {run: x, run: y}\n  b: {rum: x}\n  a: {}\n"));
    insta::assert_snapshot!(of(r#"{"name": "f", "name": "g", "steps": {"a": null}}"#));
}
