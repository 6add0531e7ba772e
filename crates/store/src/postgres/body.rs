//! JSON bodies of rows, with a checksum over the body and the key of the row; and the escaping of texts in columns.

use std::borrow::Cow;

use crc32fast::Hasher;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::pg_error::{PgError, PgResult};
use crate::error::{Result, StoreError};

pub(super) fn text(value: &(impl Serialize + ?Sized)) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| StoreError::Unavailable(format!("a value can't be written as JSON: {error}")))
}

/// The checksum of a row, over its text and the parts of its key.
pub(super) fn seal(text: &str, key: &[&[u8]]) -> i32 {
    let mut hasher = Hasher::new();
    hasher.update(text.as_bytes());
    for part in key {
        hasher.update(&(part.len() as u32).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize() as i32
}

/// Parses a body after verifying its checksum. `name` names the row in an error.
pub(super) fn read<T: DeserializeOwned>(crc: i32, text: &str, key: &[&[u8]], name: impl Fn() -> String) -> PgResult<T> {
    check(crc, text, key, &name)?;
    parse(text).map_err(|error| PgError::Corrupt(format!("{} can't be read: {error}", name())))
}

/// Fails if a body does not match its checksum.
pub(super) fn check(crc: i32, text: &str, key: &[&[u8]], name: impl Fn() -> String) -> PgResult<()> {
    match seal(text, key) == crc {
        true => Ok(()),
        false => Err(PgError::Corrupt(format!("{} does not match its checksum", name()))),
    }
}

/// Parses without a depth limit: stored JSON was bounded when it was accepted, and the few levels that the store adds
/// must not make it unreadable.
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    let mut json = serde_json::Deserializer::from_str(text);
    json.disable_recursion_limit();
    let value = T::deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

const ESCAPE: char = '\u{1}';

/// PostgreSQL texts cannot contain U+0000: it is written as U+0001 and `0`, and U+0001 itself as U+0001 and `1`.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(['\0', ESCAPE]) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.replace(ESCAPE, "\u{1}1").replace('\0', "\u{1}0"))
}

pub(super) fn escaped(text: &str) -> String {
    escape(text).into_owned()
}

pub(super) fn unescape(text: String) -> String {
    if !text.contains(ESCAPE) {
        return text;
    }
    text.replace("\u{1}0", "\0").replace("\u{1}1", "\u{1}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_moved_or_changed_row_does_not_match_its_checksum() {
        assert_ne!(seal("{}", &[b"a", b"b"]), seal("{}", &[b"ab"]));
        assert_ne!(seal("{}", &[b"a"]), seal("[]", &[b"a"]));
        let read = |key: &[u8]| read::<Value>(seal("[1]", &[b"a"]), "[1]", &[key], || "the row".to_owned());
        assert_eq!(read(b"a").unwrap(), json!([1]));
        assert!(matches!(read(b"b"), Err(PgError::Corrupt(why)) if why == "the row does not match its checksum"));
    }

    #[test]
    fn escaped_texts_are_restored() {
        for text in ["", "plain", "\0", "a\0b\u{1}c\u{1}0\u{1}1", "\u{1}\0\u{1}"] {
            assert!(!escape(text).contains('\0'));
            assert_eq!(unescape(escaped(text)), text);
        }
    }
}
