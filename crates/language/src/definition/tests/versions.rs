//! Equal content has the same version, however it is written.

use serde_json::Value;

use super::accepted::{FULFIL, SEED};
use super::*;

fn version(text: &str) -> String {
    parse(text).unwrap_or_else(|problems| panic!("{}", problems.render(text))).flow.version
}

#[test]
fn the_same_content_is_the_same_version() {
    let same = [
        "name: f\nsteps:\n  a: {run: x, timeout: 90s, retry: {factor: 2, jitter: true}, emits: [e, d]}\n  b: {after: [a]}\n  c:\n",
        "# a comment\nsteps: {c: {}, b: {after: [a], subscribes: []}, a: {emits: [d, e], retry: {jitter: 0.5, factor: 2.0}, timeout: 1m30s, worker: x}}\nname: f\n",
        r#"{"name":"f","description":"d","entry":["a","c"],"steps":{"a":{"run":"x","timeout":90000,"retry":{"factor":2,"jitter":true},"emits":{"e":null,"d":null}},"b":{"after":["a"]},"c":null}}"#,
    ];
    for text in same {
        assert_eq!(version(text), version(same[0]), "{text}");
    }
    assert_eq!(version(same[0]).len(), 16);
}

#[test]
fn another_content_is_another_version() {
    let texts = [
        "name: f\nsteps: {a: }",
        "name: g\nsteps: {a: }",
        "name: f\nsteps: {b: }",
        "name: f\nsteps: {a: {run: b}}",
        "name: f\nsteps: {a: {set: null}}",
        "name: f\nsteps: {a: {set: 1}}",
        "name: f\nsteps: {a: {set: 1.0}}",
        "name: f\nsteps: {a: {set: '1'}}",
        "name: f\nsteps: {a: {timeout: 1}}",
        "name: f\nsteps: {a: {retry: {attempts: 5}}}",
        "name: f\nfail_fast: true\nsteps: {a: }",
    ];
    let versions: std::collections::BTreeSet<_> = texts.iter().map(|text| version(text)).collect();
    assert_eq!(versions.len(), texts.len());
}

#[test]
fn the_canonical_form_is_its_own() {
    let every = include_str!("every_field.yaml");
    for text in [FULFIL, &SEED.replacen('{', "{\"name\": \"seed\",", 1), every, "{name: j, code: true, timeout: 1d}"] {
        let flow = parse(text).unwrap_or_else(|problems| panic!("{}", problems.render(text))).flow;
        let again = parse(&flow.canonical.to_string()).unwrap().flow;
        assert_eq!(again.version, flow.version);
        assert_eq!(again.canonical, flow.canonical);
        assert_eq!(format!("{:?}", again.body), format!("{:?}", flow.body));
    }
}

#[test]
fn what_the_canonical_form_is() {
    let flow = parse_named(Some("seed"), SEED).unwrap().flow;
    insta::assert_snapshot!(serde_json::to_string_pretty(&flow.canonical).unwrap());
    let steps = &parse(FULFIL).unwrap().flow.canonical["steps"];
    assert_eq!(steps["load"]["timeout"], Value::from(30_000));
}
