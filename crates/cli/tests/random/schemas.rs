//! Random JSON Schemas with many references.

use serde_json::{Map, Value, json};

use crate::chance::Chance;

const MAX_DEFINITIONS: usize = 30;

pub fn schema(chance: &mut Chance) -> Value {
    let count = chance.below(MAX_DEFINITIONS);
    let mut definitions = Map::new();
    for at in 0..count {
        // References to earlier definitions always terminate; one in ten may refer to any definition, including itself.
        let known = if chance.one_in(10) { count } else { at };
        definitions.insert(format!("d{at}"), part(chance, known, 2));
    }
    let mut whole = part(chance, count, 3);
    if let (Some(whole), false) = (whole.as_object_mut(), definitions.is_empty()) {
        whole.insert(String::from("$defs"), Value::Object(definitions));
    }
    whole
}

fn part(chance: &mut Chance, known: usize, depth: usize) -> Value {
    let inner = |chance: &mut Chance| match known {
        1.. if chance.one_in(2) || depth == 0 => {
            json!({"$ref": format!("#/$defs/d{}", known - 1 - chance.below(known.min(3)))})
        }
        _ if depth == 0 => json!({"type": *chance.pick(&["string", "integer", "object", "array", "null"])}),
        _ => part(chance, known, depth - 1),
    };
    let two = |chance: &mut Chance| json!([inner(chance), inner(chance)]);
    match chance.below(14) {
        0 | 1 => json!({"anyOf": two(chance)}),
        2 => json!({"oneOf": two(chance)}),
        3 => json!({"allOf": two(chance)}),
        4 => json!({"not": inner(chance)}),
        5 => json!({"if": inner(chance), "then": inner(chance), "else": inner(chance)}),
        6 => json!({"items": inner(chance), "uniqueItems": chance.one_in(2)}),
        7 => json!({"contains": inner(chance), "maxContains": 1_000_000}),
        8 => json!({"properties": {"s": inner(chance), "l": inner(chance)}, "additionalProperties": inner(chance)}),
        9 => json!({"patternProperties": {"^(a|-|[a-z]+)+$": inner(chance)}, "unevaluatedProperties": inner(chance)}),
        10 => json!({"pattern": *chance.pick(&["^(a+)+$", "(.*a){20}", "^(([a-z])+.)+[A-Z]$"])}),
        11 => json!({"prefixItems": two(chance), "unevaluatedItems": inner(chance)}),
        12 => json!({"dependentSchemas": {"s": inner(chance)}, "propertyNames": inner(chance)}),
        _ => json!({"type": ["object", "array", "string", "integer", "null"], "enum": [1, "a", {"s": [1, 2]}]}),
    }
}
