//! Reads request bodies within their limits and parses them.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use eddyline_engine::MAX_PAYLOAD_DEPTH;
use eddyline_protocol::Code;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;

use super::failure::Failure;
use super::known_fields::{KnownFields, unknown_field};
use super::memory_budget::Reservation;

/// At least [`PACE_BYTES`] of a body, or all of its rest, must arrive within each [`PACE_WINDOW`].
const PACE_WINDOW: Duration = Duration::from_secs(5);
const PACE_BYTES: usize = 80 << 10;
/// How long a body waits for the memory budget before it is refused.
const BUDGET_WAIT: Duration = Duration::from_secs(2);
/// The maximum nesting depth of JSON: that of a payload, plus what a request wraps around it.
pub(crate) const MAX_DEPTH: u16 = MAX_PAYLOAD_DEPTH + 8;
/// The maximum number of values in a JSON body. A parsed value takes [`VALUE_BYTES`], however short its text is.
const MAX_VALUES: usize = 4_000_000;
const VALUE_BYTES: usize = std::mem::size_of::<Value>();
/// The initial allocation for a body, whatever length it declares.
const FIRST_ROOM: usize = 64 << 10;

/// Which content types a route accepts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyKind {
    Json,
    /// A definition: JSON, YAML or text.
    Definition,
}

/// Reads a whole body, if it is not too large, does not arrive too slowly, and the budget has room for it.
pub(crate) async fn read(
    mut body: Body,
    headers: &HeaderMap,
    limit: usize,
    reserved: &mut Reservation,
) -> Result<Bytes, Failure> {
    let too_large = || Failure::new(Code::TooLarge, format!("the body is larger than {limit} bytes"));
    let declared: Option<usize> =
        headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if declared.is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    reserve(reserved, declared.unwrap_or(0)).await?;
    let mut whole = Vec::with_capacity(declared.unwrap_or(0).min(FIRST_ROOM));
    let mut pace = Pace::begin();
    loop {
        let frame = match tokio::time::timeout_at(pace.until, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return Err(Failure::bad("the body ended early")),
            Ok(None) => break,
            Err(_) => return Err(Failure::new(Code::Timeout, "the body took too long to arrive")),
        };
        if let Ok(data) = frame.into_data() {
            let length = whole.len() + data.len();
            if length > limit {
                return Err(too_large());
            }
            if length > whole.capacity() {
                // Doubling keeps the number of copies low; a declared length is the upper bound.
                let capacity = length.next_power_of_two().max(FIRST_ROOM).min(declared.unwrap_or(limit)).max(length);
                reserve(reserved, capacity).await?;
                whole.reserve_exact(capacity - whole.len());
            }
            whole.extend_from_slice(&data);
            pace.came(data.len());
        }
    }
    reserve(reserved, parsed_bytes(&whole)).await?;
    Ok(Bytes::from(whole))
}

/// The memory that JSON needs while it is handled: its text and its parsed values.
pub(crate) fn parsed_bytes(text: &[u8]) -> usize {
    text.len() + VALUE_BYTES * values(text).min(MAX_VALUES)
}

async fn reserve(reserved: &mut Reservation, bytes: usize) -> Result<(), Failure> {
    reserved.grow_within(bytes, BUDGET_WAIT).await.map_err(|_| {
        metrics::counter!("eddyline_bodies_refused_total").increment(1);
        Failure::new(Code::Unavailable, "too many large bodies are being read; retry in a second")
    })
}

/// The rate of a body over the last seconds, so that a client that starts fast and then trickles is also cut off.
struct Pace {
    until: Instant,
    came: usize,
}

impl Pace {
    fn begin() -> Pace {
        Pace { until: Instant::now() + PACE_WINDOW, came: 0 }
    }

    fn came(&mut self, bytes: usize) {
        self.came += bytes;
        if self.came >= PACE_BYTES {
            *self = Pace::begin();
        }
    }
}

/// Whether unknown fields are allowed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fields {
    /// Unknown fields are errors.
    Known,
    /// Unknown fields are ignored.
    Any,
}

pub(crate) fn json<T: DeserializeOwned>(bytes: &[u8], headers: &HeaderMap, fields: Fields) -> Result<T, Failure> {
    check_type(headers, BodyKind::Json)?;
    check_shape(bytes)?;
    // All of it, since serde does not validate the contents of ignored fields.
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Failure::bad(format!("the body is not JSON: it is not UTF-8 after {} bytes", error.valid_up_to()))
    })?;
    parse(text, fields).map_err(|error| {
        if bytes.is_empty() {
            return Failure::bad("the body is empty: expected JSON");
        }
        let error_text = without_type_names(&error.to_string());
        let problem = serde_json::json!({
            "path": "", "message": error_text, "line": error.line(), "column": error.column()
        });
        let message = unknown_field(&error).unwrap_or_else(|| format!("invalid body: {error_text}"));
        Failure::bad(message).details(vec![problem])
    })
}

/// serde names the expected Rust type, which a caller does not know.
fn without_type_names(message: &str) -> String {
    let Some((before, rest)) = message.split_once("expected struct ") else { return message.to_owned() };
    let after = rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
    format!("{before}expected an object{after}")
}

fn parse<T: DeserializeOwned>(text: &str, fields: Fields) -> serde_json::Result<T> {
    if fields == Fields::Any {
        return serde_json::from_str(text);
    }
    let mut parser = serde_json::Deserializer::from_str(text);
    let read = T::deserialize(KnownFields(&mut parser))?;
    parser.end()?;
    Ok(read)
}

/// serde would read a list as the fields of an object in order.
pub(crate) fn refuse_list(bytes: &[u8]) -> Result<(), Failure> {
    match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'[') => Err(Failure::bad("the body is a list: expected an object")),
        _ => Ok(()),
    }
}

/// Reads a list of objects, or a single one, with unknown fields as errors.
pub(crate) fn many<T: DeserializeOwned>(written: Value, expected: &str) -> Result<Vec<T>, Failure> {
    let items = match written {
        Value::Array(items) => items,
        one => vec![one],
    };
    items.into_iter().map(|item| one(item, expected)).collect()
}

/// Reads one object, with unknown fields as errors.
pub(crate) fn one<T: DeserializeOwned>(item: Value, expected: &str) -> Result<T, Failure> {
    match item {
        Value::Object(_) => {
            let read = T::deserialize(KnownFields(item));
            read.map_err(|error| {
                let message = unknown_field(&error)
                    .unwrap_or_else(|| format!("{}: {expected}", without_type_names(&error.to_string())));
                Failure::bad(message)
            })
        }
        _ => Err(Failure::bad(expected)),
    }
}

/// Names and labels are copied to many places and are not meant for data.
const MAX_LABEL_BYTES: usize = 512;

pub(crate) fn check_labels<'a>(labels: impl IntoIterator<Item = &'a String>) -> Result<(), Failure> {
    let Some(label) = labels.into_iter().find(|label| label.len() > MAX_LABEL_BYTES) else { return Ok(()) };
    let shown: String = label.chars().take(40).collect();
    Err(Failure::invalid(format!("the label {shown}… is longer than {MAX_LABEL_BYTES} bytes")))
}

/// Another content type is never parsed as JSON, whatever the body looks like: pages of other origins can send forms
/// and plain text without a preflight request.
pub(crate) fn check_type(headers: &HeaderMap, taken: BodyKind) -> Result<(), Failure> {
    let Some(written) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let written = written.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    let json = written == "application/json" || written.ends_with("+json");
    let fits = match taken {
        BodyKind::Json => json,
        BodyKind::Definition => {
            // curl sends any file as a form by default.
            json || written.starts_with("text/")
                || written.ends_with("yaml")
                || written == "application/x-www-form-urlencoded"
        }
    };
    if fits {
        return Ok(());
    }
    let expected = match taken {
        BodyKind::Json => "application/json",
        BodyKind::Definition => "application/json or application/yaml",
    };
    Err(Failure::new(
        Code::UnsupportedMediaType,
        format!("the content type of the body is {written}: set the header content-type to {expected}"),
    ))
}

/// Runs before parsing, so that no text can make the parser recurse deeply or use far more memory than the text itself.
pub(crate) fn check_shape(bytes: &[u8]) -> Result<(), Failure> {
    if is_deeper(bytes, MAX_DEPTH) {
        return Err(Failure::bad(format!("the body is nested more than {MAX_DEPTH} deep")));
    }
    // A value takes at least two bytes.
    if bytes.len() / 2 > MAX_VALUES && values(bytes) > MAX_VALUES {
        return Err(Failure::new(Code::TooLarge, format!("the body has more than {MAX_VALUES} values")));
    }
    Ok(())
}

/// Whether JSON is nested deeper than `most`, without parsing it.
pub(crate) fn is_deeper(bytes: &[u8], most: u16) -> bool {
    let mut depth = 0u16;
    for byte in marks(bytes) {
        match byte {
            b'[' | b'{' => {
                depth += 1;
                if depth > most {
                    return true;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

/// The approximate number of values in JSON: all but the first of a list or an object follow a comma.
fn values(bytes: &[u8]) -> usize {
    1 + marks(bytes).filter(|byte| matches!(byte, b',' | b'[' | b'{')).count()
}

/// The bytes of JSON outside of strings.
fn marks(bytes: &[u8]) -> impl Iterator<Item = u8> + '_ {
    let (mut text, mut escaped) = (false, false);
    bytes.iter().copied().filter(move |byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if text => escaped = true,
            b'"' => text = !text,
            _ => return !text,
        }
        false
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_texts_do_not_nest() {
        assert!(check_shape("[".repeat(72).as_bytes()).is_ok());
        assert!(check_shape("[".repeat(73).as_bytes()).is_err());
        assert!(check_shape("[]".repeat(1_000).as_bytes()).is_ok());
        assert!(check_shape(format!("\"{}\"", "[".repeat(1_000)).as_bytes()).is_ok());
        assert!(check_shape(format!("\"\\\"{}\"", "[".repeat(1_000)).as_bytes()).is_ok());
        assert!(check_shape(format!("\"\\\\\"{}", "[".repeat(1_000)).as_bytes()).is_err());
    }

    #[test]
    fn a_body_of_millions_of_values_is_not_parsed() {
        let zeros = |count: usize| format!("[{}0]", "0,".repeat(count));
        assert!(check_shape(zeros(MAX_VALUES - 10).as_bytes()).is_ok());
        assert_eq!(check_shape(zeros(MAX_VALUES).as_bytes()).unwrap_err().0.code, Code::TooLarge);
        assert!(check_shape(format!("\"{}\"", ",".repeat(3 * MAX_VALUES)).as_bytes()).is_ok());
    }

    #[test]
    fn what_is_not_utf8_is_not_json_wherever_it_is() {
        #[derive(Debug, serde::Deserialize)]
        struct Nothing {}
        let read = |bytes: &[u8]| json::<Nothing>(bytes, &HeaderMap::new(), Fields::Any);
        assert!(read(b"{\"unread\": \"\xc3\xa9\"}").is_ok());
        let failure = read(b"{\"unread\": \"\xff\"}").unwrap_err();
        assert_eq!((failure.0.code, failure.0.message.contains("12 bytes")), (Code::BadRequest, true), "{failure:?}");
    }

    #[test]
    fn problems_have_a_place() {
        let failure = json::<serde_json::Value>(b"{\n  \"a\": nul }", &HeaderMap::new(), Fields::Any).unwrap_err();
        assert_eq!(failure.0.code, Code::BadRequest);
        assert_eq!(failure.0.details[0]["line"], 2);
    }
}
