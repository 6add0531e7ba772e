//! Rejected schemas, values whose checks exceed the budget, and the messages about both.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::*;

/// Much longer than any case here takes.
const SOON: Duration = Duration::from_secs(20);

/// The faults of a schema, each with its path.
fn wrong(schema: &Value) -> Vec<String> {
    faults(schema).into_iter().map(|fault| format!("{}: {}", fault.path.join("/"), fault.message)).collect()
}

#[track_caller]
fn check(schema: &Value, value: &Value, expected: &[&str]) {
    let began = Instant::now();
    assert_eq!(wrong(schema), Vec::<String>::new());
    let schema = Schema::stored(schema);
    let bytes = value.to_string().len();
    let found = on_a_large_stack(|| whole(&schema, value, bytes)).err().unwrap_or_default();
    assert_eq!(found, expected);
    if let Ok(at_once) = schema.check_at_once(value, &mut Allowance::of_report()) {
        assert_eq!(at_once.map_err(details).err().unwrap_or_default(), expected, "at once");
    }
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
}

/// Checks a value with a full allowance.
fn whole(schema: &Schema, value: &Value, bytes: usize) -> Result<(), Details> {
    schema.check(value, bytes, &mut Allowance::of_report()).map_err(details)
}

fn details(mismatch: Mismatch) -> Details {
    match mismatch {
        Mismatch::Invalid(details) => details,
        Mismatch::Exhausted(limit) => panic!("{limit}"),
    }
}

fn on_a_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    crate::offload::on_large_stack(work).unwrap()
}

/// A chain of `levels` definitions, each of which refers to the next one twice.
fn doubling(levels: usize, keyword: &str, last: Value) -> Value {
    let mut schema = json!({"$ref": "#/$defs/s0", "$defs": {}});
    for n in 0..levels {
        let next = json!({"$ref": format!("#/$defs/s{}", n + 1)});
        schema["$defs"][format!("s{n}")] = json!({keyword: [next, next]});
    }
    schema["$defs"][format!("s{levels}")] = last;
    schema
}

#[test]
fn forty_levels_of_two_alternatives_are_refused_with_their_place() {
    let began = Instant::now();
    for keyword in ["anyOf", "allOf", "oneOf"] {
        for (levels, limit) in [(40, "more than 64 subschemas"), (20, "the limit is 4000")] {
            let found = wrong(&doubling(levels, keyword, json!({"type": "string"})));
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].starts_with("$defs/s") && found[0].contains(limit), "{found:?}");
        }
    }
    assert_eq!(wrong(&doubling(8, "anyOf", json!({"type": "string"}))), Vec::<String>::new());
    assert!(began.elapsed() < SOON);
}

#[test]
fn a_schema_may_refer_to_itself_for_what_is_inside_a_value_only() {
    let tree = json!({"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}});
    check(&tree, &json!({"left": {"right": {}}}), &[]);
    check(&tree, &json!({"left": {"right": 1}}), &["/left/right: 1 is not of type \"object\""]);
    for endless in [
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
        json!({"$dynamicAnchor": "x", "allOf": [{"$dynamicRef": "#x"}]}),
        json!({"$ref": "#/elsewhere", "elsewhere": {"if": {"$ref": "#/elsewhere"}}}),
    ] {
        let found = wrong(&endless);
        assert!(found.len() == 1 && found[0].contains("applies itself to the same value"), "{endless}: {found:?}");
    }
}

#[test]
fn a_long_row_of_references_is_refused_and_one_through_values_is_compiled() {
    let mut row = json!({"$ref": "#/$defs/s0", "$defs": {"s5000": {}}});
    let mut deep = row.clone();
    for n in 0..5_000 {
        let next = json!({"$ref": format!("#/$defs/s{}", n + 1)});
        row["$defs"][format!("s{n}")] = next.clone();
        deep["$defs"][format!("s{n}")] = json!({"properties": {"x": next}});
    }
    let found = wrong(&row);
    assert!(found.len() == 1 && found[0].contains("more than 64 subschemas apply to one value"), "{found:?}");
    let found = on_a_large_stack(|| wrong(&deep));
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn patterns_are_matched_in_linear_time_and_their_number_and_size_is_bounded() {
    let evil = json!({"type": "string", "pattern": "^(a+)+$"});
    let text = format!("{}!", "a".repeat(100_000));
    let began = Instant::now();
    let found = whole(&Schema::stored(&evil), &json!(text), text.len()).unwrap_err();
    assert!(began.elapsed() < SOON && found[0].ends_with('…') && found[0].len() < 400, "{found:?}");

    assert_eq!(wrong(&json!({"pattern": "^(?=.*[A-Z])x"})).len(), 1, "look-around is not linear");
    assert_eq!(wrong(&json!({"pattern": "((a{99}){99}){99}"})).len(), 1, "a pattern of a million states");
    let many: Vec<Value> = (0..100).map(|n| json!({"pattern": format!("^{n}")})).collect();
    assert_eq!(wrong(&json!({"anyOf": many})), [": it has 100 patterns; the limit is 64"]);
}

#[test]
fn formats_are_not_checked_at_once_in_a_long_text() {
    let many: Vec<Value> = (0..3_000).map(|_| json!({"format": "json-pointer"})).collect();
    let schema = Schema::stored(&json!({"$schema": "http://json-schema.org/draft-07/schema#", "allOf": many}));
    let short = json!("/a");
    assert!(schema.check(&short, 4, &mut Allowance::of_report()).is_ok());
    assert!(schema.check(&json!("a"), 3, &mut Allowance::of_report()).is_err());
    let long = json!(format!("/{}", "a".repeat(1 << 20)));
    assert!(schema.check_at_once(&long, &mut Allowance::of_report()).is_err());
    let began = Instant::now();
    assert!(schema.check(&long, 1 << 20, &mut Allowance::of_report()).is_err(), "each of them reads the whole text");
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
}

#[test]
fn a_check_that_takes_too_much_is_given_up() {
    // Each level reads all properties again for each of them.
    let mut nested = json!({"unevaluatedProperties": false, "properties": {"x": true}});
    for _ in 0..12 {
        nested = json!({"unevaluatedProperties": false, "anyOf": [nested.clone(), {"properties": {"y": true}}]});
    }
    let many: Value = (0..2_000).map(|n| (format!("k{n}"), json!(n))).collect::<serde_json::Map<_, _>>().into();
    let began = Instant::now();
    if wrong(&nested).is_empty() {
        let schema = Schema::stored(&nested);
        let found = on_a_large_stack(|| whole(&schema, &many, many.to_string().len()));
        assert!(found.is_err());
    }
    assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
}

#[test]
fn what_is_wrong_with_a_large_value_is_said_in_a_few_words() {
    let schema = json!({"type": "array", "items": {"type": "string", "maxLength": 3}});
    let large: Value = (0..20_000).map(|n| json!(format!("{n:0>100}"))).collect();
    let began = Instant::now();
    let found = whole(&Schema::stored(&schema), &large, large.to_string().len()).unwrap_err();
    let bytes: usize = found.iter().map(String::len).sum();
    assert!((1..=MAX_DETAILS).contains(&found.len()) && bytes < 10_000, "{} details, {bytes} bytes", found.len());
    let one = whole(&Schema::stored(&json!({"type": "string"})), &large, 2 << 20).unwrap_err();
    assert!(one.len() == 1 && one[0].len() <= MAX_DETAIL_BYTES + 3 && one[0].ends_with('…'), "{one:?}");
    assert!(began.elapsed() < SOON);
}

#[test]
fn a_stored_schema_that_would_be_refused_today_refuses_every_value_and_says_why() {
    let schema = Schema::stored(&doubling(40, "anyOf", json!({"type": "string"})));
    let found = details(schema.check_at_once(&json!("x"), &mut Allowance::of_report()).unwrap().unwrap_err());
    assert!(found[0].starts_with("the flow's schema is no longer accepted; register the flow"), "{found:?}");
}

#[test]
fn ordinary_schemas_are_checked_at_once() {
    let order = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["id", "items"],
        "properties": {
            "id": {"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}$", "format": "uuid"},
            "items": {"type": "array", "minItems": 1, "uniqueItems": true, "items": {"$ref": "#/$defs/item"}},
            "note": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/note"}]}
        },
        "additionalProperties": false,
        "$defs": {
            "item": {"type": "object", "properties": {"sku": {"enum": ["a", "b", 1]}, "n": {"minimum": 1}}},
            "note": {"$anchor": "note", "type": "string", "maxLength": 10}
        }
    });
    check(&order, &json!({"id": "0123abcd-ef01", "items": [{"sku": "a", "n": 2}, {"sku": 1.0}], "note": "hi"}), &[]);
    check(
        &order,
        &json!({"id": "0123abcd-ef01", "items": [{"sku": "c", "n": 0}], "more": 1}),
        &[
            "/items/0/n: 0 is less than the minimum of 1",
            "/items/0/sku: \"c\" is not one of \"a\", \"b\" or 1",
            "Additional properties are not allowed ('more' was unexpected)",
        ],
    );
    let value = json!({"id": "x", "items": [1, 1]});
    assert!(Schema::stored(&order).check_at_once(&value, &mut Allowance::of_report()).is_ok());
    assert_eq!(
        wrong(&json!({"$ref": "https://example.org/other.json"})),
        [": it refers to https://example.org/other.json; remote schemas are not fetched"]
    );
    assert_eq!(wrong(&json!({"type": "strin"})).len(), 1);
}

#[test]
fn checks_that_share_an_allowance_end_with_it() {
    let schema = Schema::stored(&json!({"type": "array", "items": {"type": "integer"}}));
    let value: Value = (0..1_000).collect();
    let bytes = value.to_string().len();
    let mut allowance = Allowance { limit: 10_000, left: 10_000, of: "call" };
    let verdicts: Vec<_> = (0..20).map(|_| schema.check(&value, bytes, &mut allowance)).collect();
    let good = verdicts.iter().take_while(|verdict| verdict.is_ok()).count();
    assert!((1..10).contains(&good), "{verdicts:?}");
    for verdict in &verdicts[good..] {
        let Err(Mismatch::Exhausted(limit)) = verdict else { panic!("{verdict:?}") };
        assert!(limit.contains("more than 10000 steps, the limit for one call"), "{limit}");
    }
    let mut allowance = Allowance { limit: 10_000, left: 10_000, of: "call" };
    let wrong = (0..100).filter(|_| schema.check(&json!(["x"]), 5, &mut allowance) != Ok(())).count();
    assert_eq!(wrong, 100);
    assert!(allowance.spent() > 100, "saying what is wrong costs something as well");
}

#[test]
fn the_largest_payload_is_checked_within_the_allowance_of_a_report() {
    let units = CHECK_UNITS + CHECK_UNITS_A_BYTE * crate::config::MAX_PAYLOAD_BYTES as u64;
    let most = 2 * units + crate::config::MAX_PAYLOAD_BYTES as u64 / BYTES_A_STEP;
    assert!(most < MAX_REPORT_CHECK_STEPS, "{most}");
}
