//! The body of a request: read within its limits, then parsed.

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
use super::known_fields::KnownFields;
use super::memory_budget::Reservation;
use super::wording::{in_words, unknown_field};

/// Of a body at least [`PACE_BYTES`] come within each [`PACE_WINDOW`], or all that is left of it.
const PACE_WINDOW: Duration = Duration::from_secs(5);
const PACE_BYTES: usize = 80 << 10;
/// A body that finds the budget used up waits this long before it is refused.
const BUDGET_WAIT: Duration = Duration::from_secs(2);
/// Nothing is parsed that is nested deeper: a payload, and what a request wraps it in.
pub(crate) const MAX_DEPTH: u16 = MAX_PAYLOAD_DEPTH + 8;
/// Values in one JSON body. Parsed, a value takes [`VALUE_BYTES`], however short its text is.
const MAX_VALUES: usize = 4_000_000;
const VALUE_BYTES: usize = std::mem::size_of::<Value>();
/// Memory that is allocated beforehand for a body, whatever length it declares.
const FIRST_ROOM: usize = 64 << 10;

/// Which bodies a route takes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Json,
    /// A definition: JSON, YAML or text.
    Definition,
}

/// All of a body, if it is not too large, does not come too slowly, and the budget has room for it.
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
            Ok(Some(Err(_))) => return Err(Failure::bad("the body broke off")),
            Ok(None) => break,
            Err(_) => return Err(Failure::new(Code::Timeout, "the body took too long to arrive")),
        };
        if let Ok(data) = frame.into_data() {
            let length = whole.len() + data.len();
            if length > limit {
                return Err(too_large());
            }
            if length > whole.capacity() {
                // Doubled, so that all of it is copied only a few times; a declared length is the most that is needed.
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

/// What JSON takes while it is handled: its text, and the values that it is parsed into.
pub(crate) fn parsed_bytes(text: &[u8]) -> usize {
    text.len() + VALUE_BYTES * values(text).min(MAX_VALUES)
}

async fn reserve(reserved: &mut Reservation, bytes: usize) -> Result<(), Failure> {
    reserved.grow_within(bytes, BUDGET_WAIT).await.map_err(|_| {
        metrics::counter!("eddyline_bodies_refused_total").increment(1);
        Failure::new(Code::Unavailable, "too many large bodies are being read; send it again in a second")
    })
}

/// How fast a body comes, over the last seconds: whoever sends much at first and then trickles is cut off too.
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

/// Which fields an object may have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fields {
    /// Those of the type that is read.
    Known,
    /// Others too, which are ignored.
    Any,
}

pub(crate) fn json<T: DeserializeOwned>(bytes: &[u8], headers: &HeaderMap, fields: Fields) -> Result<T, Failure> {
    check_type(headers, Taken::Json)?;
    check_shape(bytes)?;
    // All of it, since what is in a field that nobody reads is only looked over.
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Failure::bad(format!("the body is not JSON: it is not UTF-8 after {} bytes", error.valid_up_to()))
    })?;
    parse(text, fields).map_err(|error| {
        if bytes.is_empty() {
            return Failure::bad("the body is empty: expected JSON");
        }
        let said = in_words(&error);
        let problem = serde_json::json!({
            "path": "", "message": said, "line": error.line(), "column": error.column()
        });
        let message = unknown_field(&error).unwrap_or_else(|| format!("the body is not what it should be: {said}"));
        Failure::bad(message).details(vec![problem])
    })
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

/// A list would be read as the fields of an object in their order, which nobody means.
pub(crate) fn refuse_list(bytes: &[u8]) -> Result<(), Failure> {
    match bytes.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'[') => Err(Failure::bad("the body is a list: expected an object")),
        _ => Ok(()),
    }
}

/// Many of something that people write, each an object: a list of them, or one alone.
pub(crate) fn many<T: DeserializeOwned>(written: Value, expected: &str) -> Result<Vec<T>, Failure> {
    let items = match written {
        Value::Array(items) => items,
        one => vec![one],
    };
    items.into_iter().map(|item| one(item, expected)).collect()
}

/// One of them.
pub(crate) fn one<T: DeserializeOwned>(item: Value, expected: &str) -> Result<T, Failure> {
    match item {
        Value::Object(_) => {
            let read = T::deserialize(KnownFields(item));
            read.map_err(|error| {
                let message = unknown_field(&error).unwrap_or_else(|| format!("{}: {expected}", in_words(&error)));
                Failure::bad(message)
            })
        }
        _ => Err(Failure::bad(expected)),
    }
}

/// Names and labels are kept in many places, and are not for keeping data.
const MAX_LABEL_BYTES: usize = 512;

pub(crate) fn check_labels<'a>(labels: impl IntoIterator<Item = &'a String>) -> Result<(), Failure> {
    let Some(label) = labels.into_iter().find(|label| label.len() > MAX_LABEL_BYTES) else { return Ok(()) };
    let shown: String = label.chars().take(40).collect();
    Err(Failure::invalid(format!("the label {shown}… is longer than {MAX_LABEL_BYTES} bytes")))
}

/// A body of another type is not taken for JSON, whatever it looks like: a page elsewhere can send forms and plain text
/// without asking.
pub(crate) fn check_type(headers: &HeaderMap, taken: Taken) -> Result<(), Failure> {
    let Some(written) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let written = written.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    let json = written == "application/json" || written.ends_with("+json");
    let fits = match taken {
        Taken::Json => json,
        Taken::Definition => {
            // A form is what curl says of any file.
            json || written.starts_with("text/")
                || written.ends_with("yaml")
                || written == "application/x-www-form-urlencoded"
        }
    };
    if fits {
        return Ok(());
    }
    let expected = match taken {
        Taken::Json => "application/json",
        Taken::Definition => "application/json or application/yaml",
    };
    Err(Failure::new(Code::UnsupportedMediaType, format!("a body of type {written} is not taken here: {expected} is")))
}

/// Checked before anything is parsed, so that no text can make the parser nest, or make far more memory of it than the
/// text has.
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

/// Whether JSON is nested deeper than that, without parsing it.
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

/// About how many values JSON has: all but the first of a list or an object follow a comma.
fn values(bytes: &[u8]) -> usize {
    1 + marks(bytes).filter(|byte| matches!(byte, b',' | b'[' | b'{')).count()
}

/// The bytes of JSON that are not inside texts.
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
