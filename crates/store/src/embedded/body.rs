//! JSON in a row, with a checksum over the text and over the numbers that identify the row.

use crc32fast::Hasher;
use rusqlite::Row;
use rusqlite::types::ValueRef;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::sqlite_error::{SqliteError, SqliteResult};
use crate::error::StoreError;

/// JSON about to be stored. The caller serialises it, to keep that work off the writer.
#[derive(Debug)]
pub(super) struct Body {
    pub text: String,
    crc: u32,
}

impl Body {
    pub fn of(value: &(impl Serialize + ?Sized)) -> Result<Body, StoreError> {
        let text = serde_json::to_string(value)
            .map_err(|error| StoreError::Unavailable(format!("cannot serialise a row to JSON: {error}")))?;
        let crc = crc32fast::hash(text.as_bytes());
        Ok(Body { text, crc })
    }

    /// The checksum of the row: over the text and the numbers that identify the row.
    pub fn seal(&self, numbers: &[i64]) -> u32 {
        seal(self.crc, numbers)
    }
}

/// The checksum of a row whose JSON is given.
pub(super) fn seal_text(text: &str, numbers: &[i64]) -> u32 {
    seal(crc32fast::hash(text.as_bytes()), numbers)
}

fn seal(text: u32, numbers: &[i64]) -> u32 {
    let mut hasher = Hasher::new_with_initial(text);
    for number in numbers {
        hasher.update(&number.to_le_bytes());
    }
    hasher.finalize()
}

/// Reads the columns `crc` and `body` of a row, the first at `at`, and verifies the checksum before parsing. `name`
/// describes the row in error messages.
pub(super) fn read<T: DeserializeOwned>(
    row: &Row<'_>,
    at: usize,
    numbers: &[i64],
    name: impl Fn() -> String,
) -> SqliteResult<T> {
    let text = verified(row, at, numbers, &name)?;
    parse(text).map_err(|error| SqliteError::Corrupt(format!("{} can't be read: {error}", name())))
}

/// The same without parsing.
pub(super) fn read_text(row: &Row<'_>, at: usize, numbers: &[i64], name: impl Fn() -> String) -> SqliteResult<String> {
    let text = verified(row, at, numbers, &name)?;
    let text = std::str::from_utf8(text);
    text.map(str::to_owned).map_err(|error| SqliteError::Corrupt(format!("{} can't be read: {error}", name())))
}

fn verified<'a>(row: &'a Row<'_>, at: usize, numbers: &[i64], name: impl Fn() -> String) -> SqliteResult<&'a [u8]> {
    let damaged = |why: &str| SqliteError::Corrupt(format!("{} {why}", name()));
    let stored: i64 = row.get(at)?;
    let text = match row.get_ref(at + 1)? {
        ValueRef::Text(text) => text,
        _ => return Err(damaged("has no body")),
    };
    match i64::from(seal(crc32fast::hash(text), numbers)) == stored {
        true => Ok(text),
        false => Err(damaged("does not match its checksum")),
    }
}

/// Parses without a depth limit: values were bounded on the way in, and rows nest them a little deeper.
pub(super) fn parse<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
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
