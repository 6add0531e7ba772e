//! JSON in a row, with a checksum over it and over what says whose row it is.

use crc32fast::Hasher;
use rusqlite::Row;
use rusqlite::types::ValueRef;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::json;
use super::trouble::{Outcome, Trouble};
use crate::error::StoreError;

/// Most rows have less, and are written without asking for more memory on the way.
const USUAL_BYTES: usize = 512;

/// JSON that is about to be stored. It is made by the caller, so that the writer only writes it.
#[derive(Debug)]
pub(super) struct Body {
    pub text: String,
    crc: u32,
}

impl Body {
    pub fn of(value: &(impl Serialize + ?Sized)) -> Result<Body, StoreError> {
        let mut text = String::with_capacity(USUAL_BYTES);
        json::write(&mut text, value)
            .map_err(|error| StoreError::Unavailable(format!("it can't be written as JSON: {error}")))?;
        let crc = crc32fast::hash(text.as_bytes());
        Ok(Body { text, crc })
    }

    /// The checksum of the row: of the text and of the numbers by which the row is found.
    pub fn seal(&self, numbers: &[i64]) -> u32 {
        seal(self.crc, numbers)
    }
}

fn seal(text: u32, numbers: &[i64]) -> u32 {
    let mut hasher = Hasher::new_with_initial(text);
    for number in numbers {
        hasher.update(&number.to_le_bytes());
    }
    hasher.finalize()
}

/// The columns `crc` and `body` of a row, the first at `at`, checked before anything is made of them. `name` says which
/// row it is, in words for people.
pub(super) fn read<T: DeserializeOwned>(
    row: &Row<'_>,
    at: usize,
    numbers: &[i64],
    name: impl Fn() -> String,
) -> Outcome<T> {
    let damaged = |why: &str| Trouble::Corrupt(format!("{} {why}", name()));
    let stored: i64 = row.get(at)?;
    let text = match row.get_ref(at + 1)? {
        ValueRef::Text(text) => text,
        _ => return Err(damaged("has no body")),
    };
    if i64::from(seal(crc32fast::hash(text), numbers)) != stored {
        return Err(damaged("does not match its checksum"));
    }
    parse(text).map_err(|error| damaged(&format!("can't be read: {error}")))
}

/// What was stored was bounded when it came in; here it is only nested a little deeper, which must not make it
/// unreadable.
fn parse<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    let mut json = serde_json::Deserializer::from_slice(text);
    json.disable_recursion_limit();
    let value = T::deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_row_that_moved_or_changed_does_not_match() {
        let body = Body::of(&json!({"a": 1})).unwrap();
        assert_eq!(body.seal(&[1, 2]), seal(crc32fast::hash(br#"{"a":1}"#), &[1, 2]));
        assert_ne!(body.seal(&[1, 2]), body.seal(&[2, 1]));
        assert_ne!(body.seal(&[1, 2]), seal(crc32fast::hash(br#"{"a":2}"#), &[1, 2]));
    }

    #[test]
    fn floats_and_depth_come_back_as_they_were() {
        let mut deep = json!(0.1 + 0.2);
        for _ in 0..200 {
            deep = json!([deep]);
        }
        let body = Body::of(&deep).unwrap();
        assert_eq!(parse::<Value>(body.text.as_bytes()).unwrap(), deep);
    }
}
