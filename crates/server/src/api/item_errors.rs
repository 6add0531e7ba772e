//! Reads a list item by item: an item that cannot be parsed does not fail the others.
//!
//! A body is parsed as a whole first. Only if that fails are the items of the list located, without parsing them and so
//! however deep they are, and those that cannot be parsed are replaced. (`RawValue` would locate them too, but the feature
//! that it needs makes serde_json give objects with a certain key another meaning, in every payload.)

use std::collections::BTreeMap;
use std::ops::Range;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Deserializer, Value, json};

use super::body::{MAX_DEPTH, is_deeper};
use super::failure::Failure;

/// What is nested deeper is not looked over.
const DEEPEST: u16 = 1_000;
/// What has more fields is no body, and no item, of ours.
const MOST_FIELDS: usize = 100;
/// An item is in a list, and that is in an object.
const MAX_ITEM_DEPTH: u16 = MAX_DEPTH - 2;

/// What is wrong with items that could not be read, by their place in the list.
pub(crate) type ItemErrors = BTreeMap<usize, String>;

/// The list in question.
#[derive(Clone, Copy)]
pub(crate) struct List {
    /// The field of the body that it is.
    pub field: &'static str,
    /// The body may be the list as well.
    pub bare: bool,
    /// Longer ones are refused anyway.
    pub most: usize,
}

/// Reads a body; in the place of an item that cannot be read there is null, or an object with its `task_id` alone.
pub(crate) fn read<T>(
    bytes: &[u8],
    list: List,
    whole: impl Fn(&[u8]) -> Result<T, Failure>,
) -> Result<(T, ItemErrors), Failure> {
    let failure = match whole(bytes) {
        Ok(read) => return Ok((read, ItemErrors::new())),
        Err(failure) => failure,
    };
    match std::str::from_utf8(bytes).ok().and_then(|text| without_unreadable(text, list)) {
        Some((text, unread)) => Ok((whole(text.as_bytes())?, unread)),
        None => Err(failure),
    }
}

/// The text without what cannot be read of the list, if that is anything.
fn without_unreadable(text: &str, list: List) -> Option<(String, ItemErrors)> {
    if is_deeper(text.as_bytes(), DEEPEST) {
        return None;
    }
    let (mut kept, mut unread, mut from) = (String::with_capacity(text.len()), ItemErrors::new(), 0);
    for (at, item) in items(text, list)?.into_iter().enumerate() {
        let Some(problem) = problem(&text[item.clone()]) else { continue };
        kept.push_str(&text[from..item.start]);
        kept.push_str(&stand_in(&text[item.clone()]).to_string());
        unread.insert(at, problem);
        from = item.end;
    }
    kept.push_str(&text[from..]);
    (!unread.is_empty()).then_some((kept, unread))
}

fn problem(item: &str) -> Option<String> {
    if is_deeper(item.as_bytes(), MAX_ITEM_DEPTH) {
        return Some(format!("it is nested more than {MAX_ITEM_DEPTH} deep"));
    }
    read_one::<Value>(item).err().map(|error| error.to_string())
}

/// What is still known of it: the task that it is about.
fn stand_in(item: &str) -> Value {
    let task = Cursor::at(item, 0).fields().and_then(|fields| one_of(&fields, "task_id"));
    match task.and_then(|task| read_one::<String>(&item[task]).ok()) {
        Some(task) => json!({"task_id": task}),
        None => Value::Null,
    }
}

fn read_one<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    serde_json::from_str(text)
}

/// Where the items of the list are.
fn items(text: &str, list: List) -> Option<Vec<Range<usize>>> {
    let start = match text.trim_start().as_bytes().first()? {
        b'[' if list.bare => 0,
        _ => one_of(&Cursor::at(text, 0).fields()?, list.field)?.start,
    };
    Cursor::at(text, start).items(list.most)
}

/// The field of that name; `None` if there are two, because it is unclear which is meant.
fn one_of(fields: &[(String, Range<usize>)], name: &str) -> Option<Range<usize>> {
    let mut named = fields.iter().filter(|(field, _)| field == name);
    let (_, range) = named.next()?;
    named.next().is_none().then(|| range.clone())
}

/// Goes along a text of JSON without reading the values in it. Nothing here recurses.
struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl Cursor<'_> {
    fn at(text: &str, at: usize) -> Cursor<'_> {
        Cursor { text, at }
    }

    /// The fields of the object here, each with the place of its value.
    fn fields(mut self) -> Option<Vec<(String, Range<usize>)>> {
        let mut fields = Vec::new();
        self.expect(b'{')?;
        if self.expect(b'}').is_some() {
            return Some(fields);
        }
        while fields.len() < MOST_FIELDS {
            let name = self.value()?;
            let name = read_one(&self.text[name]).ok()?;
            self.expect(b':')?;
            fields.push((name, self.value()?));
            if self.expect(b',').is_none() {
                return self.expect(b'}').map(|()| fields);
            }
        }
        None
    }

    /// The places of the items of the list here.
    fn items(mut self, most: usize) -> Option<Vec<Range<usize>>> {
        let mut items = Vec::new();
        self.expect(b'[')?;
        if self.expect(b']').is_some() {
            return Some(items);
        }
        while items.len() < most {
            items.push(self.value()?);
            if self.expect(b',').is_none() {
                return self.expect(b']').map(|()| items);
            }
        }
        None
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.skip_space();
        if self.text.as_bytes().get(self.at) != Some(&byte) {
            return None;
        }
        self.at += 1;
        Some(())
    }

    /// A value by its grammar alone.
    fn value(&mut self) -> Option<Range<usize>> {
        self.skip_space();
        let start = self.at;
        let mut values = Deserializer::from_str(&self.text[start..]).into_iter::<IgnoredAny>();
        values.next()?.ok()?;
        self.at += values.byte_offset();
        Some(start..self.at)
    }

    fn skip_space(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LIST: List = List { field: "items", bare: true, most: 5 };

    fn left(text: &str) -> Option<(Value, Vec<usize>)> {
        let (text, unread) = without_unreadable(text, LIST)?;
        Some((serde_json::from_str(&text).unwrap(), unread.into_keys().collect()))
    }

    #[test]
    fn only_what_cannot_be_read_is_taken_out() {
        let deep = format!("{}{}", "[".repeat(900), "]".repeat(900));
        for unreadable in ["1e999", r#""\ud800""#, deep.as_str(), r#"{"a": [{"b": "\udfff"}]}"#] {
            let list = format!(" [ 1 ,{unreadable}\n, \"]\" , {unreadable}]");
            assert_eq!(left(&list), Some((json!([1, null, "]", null]), vec![1, 3])), "{unreadable}");
            let whole = format!(r#"{{"x": {{"items": [1]}}, "it\u0065ms": {list}, "y": 1}} "#);
            let expected = json!({"x": {"items": [1]}, "items": [1, null, "]", null], "y": 1});
            assert_eq!(left(&whole), Some((expected, vec![1, 3])), "{unreadable}");
            let of_task = format!(r#"[{{"a": {unreadable}, "task_id": "t"}}, {{"task_id": 5, "a": {unreadable}}}]"#);
            assert_eq!(left(&of_task), Some((json!([{"task_id": "t"}, null]), vec![0, 1])), "{unreadable}");
        }
    }

    #[test]
    fn what_is_wrong_as_a_whole_is_left_as_it_is() {
        let deep = |depth: usize| format!("[1, {}{}]", "[".repeat(depth), "]".repeat(depth));
        for whole in [
            "",
            "5",
            "[]",
            "[1, 2]",
            "[1e999",
            "[1e999,]",
            "[1e999 1]",
            "[1e999}",
            r#"{"items": [1e999}"#,
            r#"{"items": {"a": 1e999}}"#,
            r#"{"others": [1e999]}"#,
            r#"{"items": [1e999], "items": []}"#,
            "[1, 2, 3, 4, 5, 1e999]",
            &format!("{{{} \"items\": [1e999]}}", "\"a\": 1,".repeat(MOST_FIELDS)),
            &deep(1_000),
            &deep(100_000),
        ] {
            assert_eq!(left(whole), None, "{}", &whole[..whole.len().min(40)]);
        }
        assert!(left(&deep(999)).is_some());
    }
}
