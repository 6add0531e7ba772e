//! What is wrong with JSON that is not what it should be, in words for people: the parser speaks of Rust's types.

use eddyline_language::nearest::nearest;

/// What was found is shown up to this length.
const MAX_SHOWN_CHARS: usize = 80;

/// The problem, with its place where it is known.
pub(crate) fn in_words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let (what, place) = text.rfind(" at line ").map_or((text.as_str(), ""), |at| text.split_at(at));
    format!("{}{place}", problem(what))
}

/// The same of a field that nobody knows, with the one that was probably meant; its place is left out.
pub(crate) fn unknown_field(error: &serde_json::Error) -> Option<String> {
    let text = error.to_string();
    let what = text.rfind(" at line ").map_or(text.as_str(), |at| &text[..at]);
    what.starts_with("unknown field ").then(|| problem(what))
}

fn problem(what: &str) -> String {
    if let Some(field) = what.strip_prefix("missing field ") {
        return format!("{field} is missing");
    }
    if what.starts_with("data did not match any variant of") || what.starts_with("no variant of") {
        return "it has none of the forms that are taken here".to_owned();
    }
    if let Some(unknown) = what.strip_prefix("unknown field ") {
        return not_a_field(unknown);
    }
    // What was found may say anything, so the last one counts.
    let Some((found, wanted)) = what.rsplit_once(", expected ") else { return what.to_owned() };
    if let Some(length) = found.strip_prefix("invalid length ") {
        return format!("expected {}, found {length} of them", expected(wanted));
    }
    if let Some(name) = found.strip_prefix("unknown variant ") {
        return format!("{} is not known here: expected {wanted}", shorten(name));
    }
    let found = found.strip_prefix("invalid type: ").or_else(|| found.strip_prefix("invalid value: ")).unwrap_or(found);
    format!("expected {}, found {}", expected(wanted), name(found))
}

/// "`inputs`, expected one of `flow`, `input`", or "`inputs`, there are no fields".
fn not_a_field(unknown: &str) -> String {
    let (written, known) = unknown
        .rsplit_once(", expected ")
        .unwrap_or_else(|| (unknown.strip_suffix(", there are no fields").unwrap_or(unknown), ""));
    let written = written.trim_matches('`');
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    let help = match nearest(written, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if known.is_empty() => "this call takes no fields".to_owned(),
        None => format!("known here: {}", known.join(", ")),
    };
    format!("unknown field `{}`; {help}", shorten(written))
}

fn expected(wanted: &str) -> String {
    let said = match wanted {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number within its bounds",
        "f32" | "f64" => "a number",
        "a boolean" | "bool" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        "unit" => "null",
        "option" => "a value or null",
        "string or map" | "variant identifier" | "field identifier" => "a string",
        _ => {
            let of_rust = ["struct ", "tuple ", "enum ", "internally tagged ", "adjacently tagged "];
            let is_of_rust = of_rust.iter().any(|prefix| wanted.starts_with(prefix));
            if is_of_rust { "an object" } else { wanted }
        }
    };
    said.to_owned()
}

fn name(found: &str) -> String {
    let said = match found {
        "map" => "an object",
        "sequence" => "a list",
        "unit value" => "null",
        _ => {
            let kinds = ["string ", "integer ", "floating point ", "boolean "];
            let value = kinds.iter().find_map(|kind| found.strip_prefix(kind));
            value.map_or(found, |value| value.trim_matches('`'))
        }
    };
    shorten(said)
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use eddyline_protocol::{ClaimTasks, Heartbeat, RegisterWorker, Report, StartRun};
    use serde::Deserialize;
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::api::known_fields::KnownFields;

    fn said<T: DeserializeOwned + std::fmt::Debug>(text: &str) -> String {
        in_words(&serde_json::from_str::<T>(text).unwrap_err())
    }

    #[test]
    fn problems_speak_of_json_and_not_of_rust() {
        let place = " at line 1 column ";
        let cases = [
            (said::<ClaimTasks>(r#"{"max": "x"}"#), "expected a whole number from 0 to 4294967295, found \"x\""),
            (said::<ClaimTasks>(r#"{"max": -1}"#), "expected a whole number from 0 to 4294967295, found -1"),
            (said::<ClaimTasks>(r#"{"queues": "x"}"#), "expected a list, found \"x\""),
            (said::<ClaimTasks>(r#"{"worker_id": {}}"#), "expected a string, found an object"),
            (said::<ClaimTasks>("5"), "expected an object, found 5"),
            (said::<Heartbeat>(r#"{"seen": []}"#), "expected an object, found a list"),
            (said::<Report>(r#"{"task_id": "t", "token": "t"}"#), "`op` is missing"),
            (said::<StartRun>(r#"{"tags": true}"#), "expected a list, found true"),
            (said::<RegisterWorker>(r#"{"flows": 5}"#), "expected the code flows: a list of names or of objects"),
        ];
        for (said, starts) in cases {
            assert!(said.starts_with(starts), "{said}");
            assert!(said.contains(place), "{said}");
        }
        let unknown = said::<Report>(r#"{"task_id": "t", "token": "t", "op": "dance"}"#);
        assert!(unknown.starts_with("`dance` is not known here: expected one of `complete`, `fail`"), "{unknown}");
        let known_only = |text: &str| {
            let mut parser = serde_json::Deserializer::from_str(text);
            let error = StartRun::deserialize(KnownFields(&mut parser)).unwrap_err();
            unknown_field(&error).unwrap()
        };
        let meant = known_only(r#"{"idempotencyKey": 1}"#);
        assert_eq!(meant, "unknown field `idempotencyKey`; did you mean `idempotency_key`?");
        let none = known_only(r#"{"zzzzzzzzzzzzzzzzz, expected `x`": 1}"#);
        assert!(none.starts_with("unknown field `zzzzzzzzzzzzzzzzz, expected `x`; known here: flow, input"), "{none}");
        let long = said::<ClaimTasks>(&format!(r#"{{"max": "{}"}}"#, "x, expected u32".repeat(1_000)));
        assert!(long.len() < 300 && long.contains("found \"x, expected u32"), "{long}");
    }
}
