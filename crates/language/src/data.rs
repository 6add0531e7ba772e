//! Payloads. JSON, and JSON put together from stored values without copying them.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::ValueId;

/// A payload of up to this many bytes is kept where it is used; a larger one becomes a stored value with a key.
pub const INLINE_BYTES: usize = 256;

/// How much JSON is built in one piece, at most: aggregates by reference can stand for far more than was ever written.
pub const MAX_BUILT_BYTES: usize = 16 << 20;
/// How deep the JSON may be nested that is built in one piece: what is written and sent may be no deeper.
pub const MAX_BUILT_DEPTH: u16 = 256;
/// An aggregate that takes no more memory than this is copied into one piece of JSON when it is sent.
const COPIED_BYTES: usize = 16 << 10;
/// What a value takes to be read beside its text: it is parsed, and short ones are larger in memory than in JSON.
const READ_VALUE: usize = 8;
/// What a reference takes where it is written.
const REF_BYTES: usize = 24;

/// What something that is allocated takes beside itself, about: counts of its owners, room to grow, rounding.
const ALLOCATED: usize = 24;

/// A payload as the machine handles it: JSON at hand, a reference to a stored value, or an aggregate of both. An
/// aggregate is a list of references, so a fan-in of 10,000 outputs copies none of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Data {
    #[serde(rename = "j")]
    Json(Arc<Value>),
    #[serde(rename = "r")]
    Ref(ValueRef),
    #[serde(rename = "l")]
    List(Arc<Vec<Data>>),
    #[serde(rename = "m")]
    Map(Arc<Vec<(Arc<str>, Data)>>),
}

/// The key of a stored value, with its size as JSON (or the most that can be said) and how deep it is nested, which bound
/// what can be made of it, and with what it takes to read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueRef {
    pub id: ValueId,
    pub bytes: u32,
    pub depth: u16,
    /// [`Data::read_bytes`] of the value; 0 in what was written before this was counted.
    #[serde(default)]
    pub read_size: RoughSize,
}

/// A number of bytes, rounded up by less than a thousandth, in two bytes: with them a [`Data`] has 16, and runs consist of
/// those. The upper four bits say by how much the lower twelve are shifted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RoughSize(u16);

impl RoughSize {
    const DIGITS: u32 = 12;

    pub fn of(bytes: usize) -> RoughSize {
        let most = (1 << RoughSize::DIGITS) - 1;
        let fits = |shift: &u32| bytes.div_ceil(1 << shift) <= most;
        let Some(shift) = (0..16).find(fits) else { return RoughSize(u16::MAX) };
        RoughSize((shift << RoughSize::DIGITS) as u16 | bytes.div_ceil(1 << shift) as u16)
    }

    pub fn bytes(self) -> u64 {
        let shift = u32::from(self.0) >> RoughSize::DIGITS;
        u64::from(u32::from(self.0) & ((1 << RoughSize::DIGITS) - 1)) << shift
    }
}

impl ValueRef {
    /// What it takes to read the value, what it refers to aside.
    pub fn read_bytes(&self) -> u64 {
        if self.read_size == RoughSize::default() { u64::from(self.bytes) } else { self.read_size.bytes() }
    }
}

/// Why the JSON of a payload was not built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unbuilt {
    /// These values are not at hand.
    #[error("the values {0:?} are not loaded")]
    Missing(Vec<ValueRef>),
    /// So large or so deep that nobody builds it.
    #[error("the payload has more than {MAX_BUILT_BYTES} bytes or is nested more than {MAX_BUILT_DEPTH} deep")]
    TooLarge,
}

impl Data {
    pub fn null() -> Data {
        Data::Json(Arc::new(Value::Null))
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Data::Json(json) if json.is_null())
    }

    /// Its size as JSON, counted only up to `limit`, and in a time that `limit` bounds, however often it holds the same.
    pub fn bytes(&self, limit: usize) -> usize {
        match self {
            Data::Json(json) => json_bytes(json, limit),
            Data::Ref(value) => value.bytes as usize,
            Data::List(items) => sum(limit, items.iter().map(|item| (1, item))),
            Data::Map(fields) => sum(limit, fields.iter().map(|(key, item)| (key.len() + 4, item))),
        }
    }

    /// How deep it is nested, what it refers to included; a scalar is 0 deep.
    pub fn depth(&self) -> u16 {
        match self {
            Data::Json(json) => json_depth(json),
            Data::Ref(value) => value.depth,
            Data::List(items) => deeper(items.iter().map(Data::depth)),
            Data::Map(fields) => deeper(fields.iter().map(|(_, item)| item.depth())),
        }
    }

    /// How much of it is written where it is used: a reference counts as a reference, not as what it refers to.
    pub fn own_bytes(&self, limit: usize) -> usize {
        match self {
            Data::Json(json) => json_bytes(json, limit),
            Data::Ref(_) => REF_BYTES,
            Data::List(items) => bounded(limit, items.iter().map(|item| 1 + item.own_bytes(limit))),
            Data::Map(fields) => bounded(limit, fields.iter().map(|(key, item)| key.len() + 4 + item.own_bytes(limit))),
        }
    }

    /// What it takes to read it from a store: the text that is written of it, and a little for each value in it.
    pub fn read_bytes(&self, limit: usize) -> usize {
        READ_VALUE
            + match self {
                Data::Json(json) => json_read_bytes(json, limit),
                Data::Ref(_) => REF_BYTES,
                Data::List(items) => bounded(limit, items.iter().map(|item| 1 + item.read_bytes(limit))),
                Data::Map(fields) => {
                    bounded(limit, fields.iter().map(|(key, item)| key.len() + 4 + item.read_bytes(limit)))
                }
            }
    }

    /// What it takes in memory, about, without what it refers to. Small elements take far more there than as JSON. Counted
    /// only up to `limit`, and in a time that `limit` bounds.
    pub fn memory_bytes(&self, limit: usize) -> usize {
        let inside = match self {
            Data::Json(json) => ALLOCATED + json_memory(json, limit),
            Data::Ref(_) => 0,
            Data::List(items) => ALLOCATED + bounded(limit, items.iter().map(|item| item.memory_bytes(limit))),
            Data::Map(fields) => {
                let field = |(key, item): &(Arc<str>, Data)| {
                    size_of::<Arc<str>>() + ALLOCATED + key.len() + item.memory_bytes(limit)
                };
                ALLOCATED + bounded(limit, fields.iter().map(field))
            }
        };
        size_of::<Data>() + inside
    }

    /// The values that it refers to itself, one by one.
    pub fn each_ref(&self, visit: &mut impl FnMut(ValueRef)) {
        match self {
            Data::Json(_) => {}
            Data::Ref(stored) => visit(*stored),
            Data::List(items) => items.iter().for_each(|item| item.each_ref(visit)),
            Data::Map(fields) => fields.iter().for_each(|(_, item)| item.each_ref(visit)),
        }
    }

    /// Its JSON, with every reference followed through `load`. Its size is looked at before anything is built, and
    /// again while it is, in case a reference says less than it stands for.
    pub fn materialise<'a>(&'a self, load: &impl Fn(ValueId) -> Option<&'a Data>) -> Result<Value, Unbuilt> {
        if self.bytes(MAX_BUILT_BYTES) > MAX_BUILT_BYTES {
            return Err(Unbuilt::TooLarge);
        }
        let mut build = Build::new(load);
        let value = build.value(self, 0);
        build.finish(value)
    }

    /// The same payload with every reference replaced by what it refers to. Unlike [`Data::materialise`] it copies no large
    /// JSON: what is sent to a thousand children is in memory once. Small aggregates become JSON, which is shorter.
    pub fn resolve<'a>(&'a self, load: &impl Fn(ValueId) -> Option<&'a Data>) -> Result<Data, Unbuilt> {
        if self.bytes(MAX_BUILT_BYTES) > MAX_BUILT_BYTES {
            return Err(Unbuilt::TooLarge);
        }
        let mut build = Build::new(load);
        let data = build.shared(self, 0);
        let data = build.finish(data)?;
        match data {
            Data::List(_) | Data::Map(_) if data.memory_bytes(COPIED_BYTES + 1) <= COPIED_BYTES => {
                data.materialise(&|_| None).map(Data::from)
            }
            data => Ok(data),
        }
    }
}

impl From<Value> for Data {
    fn from(value: Value) -> Data {
        Data::Json(Arc::new(value))
    }
}

/// Follows references, and counts what is built on the way.
struct Build<'l, L> {
    load: &'l L,
    /// Bytes that may still be built.
    left: usize,
    missing: BTreeSet<ValueRef>,
}

impl<'a, 'l, L: Fn(ValueId) -> Option<&'a Data>> Build<'l, L> {
    fn new(load: &'l L) -> Self {
        Build { load, left: MAX_BUILT_BYTES, missing: BTreeSet::new() }
    }

    fn finish<T>(self, built: Option<T>) -> Result<T, Unbuilt> {
        let built = built.ok_or(Unbuilt::TooLarge)?;
        if self.missing.is_empty() { Ok(built) } else { Err(Unbuilt::Missing(self.missing.into_iter().collect())) }
    }

    /// As [`Build::value`], with the JSON that is there instead of a copy.
    fn shared(&mut self, data: &'a Data, depth: u16) -> Option<Data> {
        if depth > MAX_BUILT_DEPTH {
            return None;
        }
        match data {
            Data::Json(json) => {
                self.take(json_bytes(json, self.left))?;
                Some(data.clone())
            }
            Data::Ref(stored) => match (self.load)(stored.id) {
                Some(inner) => self.shared(inner, depth + 1),
                None => {
                    self.take(stored.bytes as usize)?;
                    self.missing.insert(*stored);
                    Some(Data::null())
                }
            },
            Data::List(items) => {
                self.take(items.len() + 2)?;
                let items = items.iter().map(|item| self.shared(item, depth + 1)).collect::<Option<_>>()?;
                Some(Data::List(Arc::new(items)))
            }
            Data::Map(fields) => {
                let field = |(key, item): &'a (Arc<str>, Data)| {
                    self.take(key.len() + 4)?;
                    Some((key.clone(), self.shared(item, depth + 1)?))
                };
                Some(Data::Map(Arc::new(fields.iter().map(field).collect::<Option<_>>()?)))
            }
        }
    }

    /// None if it is too large or too deep. What is missing counts as it says of itself.
    fn value(&mut self, data: &'a Data, depth: u16) -> Option<Value> {
        if depth > MAX_BUILT_DEPTH {
            return None;
        }
        match data {
            Data::Json(json) => {
                self.take(json_bytes(json, self.left))?;
                Some(Value::clone(json))
            }
            Data::Ref(stored) => match (self.load)(stored.id) {
                Some(inner) => self.value(inner, depth + 1),
                None => {
                    self.take(stored.bytes as usize)?;
                    self.missing.insert(*stored);
                    Some(Value::Null)
                }
            },
            Data::List(items) => {
                self.take(items.len() + 2)?;
                items.iter().map(|item| self.value(item, depth + 1)).collect::<Option<_>>().map(Value::Array)
            }
            Data::Map(fields) => {
                let field = |(key, item): &'a (Arc<str>, Data)| {
                    self.take(key.len() + 4)?;
                    Some((key.to_string(), self.value(item, depth + 1)?))
                };
                fields.iter().map(field).collect::<Option<_>>().map(Value::Object)
            }
        }
    }

    fn take(&mut self, bytes: usize) -> Option<()> {
        self.left = self.left.checked_sub(bytes)?;
        Some(())
    }
}

fn sum<'a>(limit: usize, parts: impl Iterator<Item = (usize, &'a Data)>) -> usize {
    bounded(limit, parts.map(|(extra, part)| extra + part.bytes(limit)))
}

fn bounded(limit: usize, sizes: impl Iterator<Item = usize>) -> usize {
    let mut total = 2;
    for size in sizes {
        total += size;
        if total > limit {
            break;
        }
    }
    total
}

fn json_depth(json: &Value) -> u16 {
    match json {
        Value::Array(items) => deeper(items.iter().map(json_depth)),
        Value::Object(fields) => deeper(fields.values().map(json_depth)),
        _ => 0,
    }
}

fn deeper(depths: impl Iterator<Item = u16>) -> u16 {
    depths.max().unwrap_or(0).saturating_add(1)
}

const NODE_FIELDS: usize = 11;

fn json_memory(json: &Value, limit: usize) -> usize {
    let inside = match json {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => ALLOCATED + text.len(),
        Value::Array(items) => ALLOCATED + bounded(limit, items.iter().map(|item| json_memory(item, limit))),
        Value::Object(fields) => {
            // A map is a tree whose nodes have room for 11 fields each, however few there are.
            let nodes = fields.len().div_ceil(NODE_FIELDS) * NODE_FIELDS * (size_of::<String>() + size_of::<Value>());
            let field =
                |(key, item): (&String, &Value)| ALLOCATED + key.len() + json_memory(item, limit) - size_of::<Value>();
            nodes + bounded(limit, fields.iter().map(field))
        }
    };
    size_of::<Value>() + inside
}

fn json_bytes(json: &Value, limit: usize) -> usize {
    match json {
        Value::Null | Value::Bool(true) => 4,
        Value::Bool(false) => 5,
        Value::Number(number) => match number.as_i64() {
            Some(int) => int.unsigned_abs().checked_ilog10().unwrap_or(0) as usize + 1 + usize::from(int < 0),
            None => 17,
        },
        Value::String(text) => text.len() + 2,
        Value::Array(items) => bounded(limit, items.iter().map(|item| 1 + json_bytes(item, limit))),
        Value::Object(fields) => {
            bounded(limit, fields.iter().map(|(key, item)| key.len() + 4 + json_bytes(item, limit)))
        }
    }
}

fn json_read_bytes(json: &Value, limit: usize) -> usize {
    match json {
        Value::Array(items) => bounded(limit, items.iter().map(|item| 1 + READ_VALUE + json_read_bytes(item, limit))),
        Value::Object(fields) => {
            let field = |(key, item): (&String, &Value)| key.len() + 4 + READ_VALUE + json_read_bytes(item, limit);
            bounded(limit, fields.iter().map(field))
        }
        scalar => json_bytes(scalar, limit),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_aggregate_names_every_missing_value_at_once() {
        let at = |id| ValueRef { id: ValueId(id), bytes: 9, depth: 1, read_size: RoughSize::of(17) };
        let list = Data::List(Arc::new(vec![Data::Ref(at(1)), Data::from(json!(2)), Data::Ref(at(3))]));
        assert_eq!(list.materialise(&|_| None), Err(Unbuilt::Missing(vec![at(1), at(3)])));
        let one = Data::from(json!("one"));
        let three = Data::from(json!({"n": 3}));
        let load = |id| if id == ValueId(1) { Some(&one) } else { Some(&three) };
        assert_eq!(list.materialise(&load), Ok(json!(["one", 2, {"n": 3}])));
    }

    #[test]
    fn a_resolved_payload_shares_large_json_and_copies_small_aggregates() {
        let large = Data::from(json!(vec![json!({"a": 1}); 1_000]));
        let stored = ValueRef { id: ValueId(1), bytes: 8_000, depth: 2, read_size: RoughSize::of(8_000) };
        let load = |id| (id == ValueId(1)).then_some(&large);
        let same =
            |data: &Data| matches!((data, &large), (Data::Json(one), Data::Json(other)) if Arc::ptr_eq(one, other));
        let refers = Data::Ref(stored);
        assert!(same(&refers.resolve(&load).unwrap()));
        let inside = Data::Map(Arc::new(vec![("x".into(), Data::List(Arc::new(vec![Data::Ref(stored); 2])))]));
        let Data::Map(fields) = inside.resolve(&load).unwrap() else { panic!("it is large") };
        let Data::List(items) = &fields[0].1 else { panic!("it is a list") };
        assert!(items.iter().all(same));
        let small = Data::List(Arc::new(vec![Data::from(json!(1)), Data::from(json!("two"))]));
        assert_eq!(small.resolve(&load), Ok(Data::from(json!([1, "two"]))));
        let missing = ValueRef { id: ValueId(2), ..stored };
        let refers = Data::List(Arc::new(vec![Data::Ref(stored), Data::Ref(missing)]));
        assert_eq!(refers.resolve(&load), Err(Unbuilt::Missing(vec![missing])));
    }

    #[test]
    fn what_doubles_by_reference_is_never_built() {
        // Each holds the one before it twice: 2^60 bytes in all.
        let mut stored = vec![Data::from(json!("x".repeat(300)))];
        let mut at_hand = stored[0].clone();
        for id in 0..60 {
            let twice = Arc::new(vec![
                Data::Ref(ValueRef {
                    id: ValueId(id),
                    bytes: 300,
                    depth: 1,
                    read_size: RoughSize::default()
                });
                2
            ]);
            stored.push(Data::List(twice));
            at_hand = Data::List(Arc::new(vec![at_hand.clone(), at_hand]));
        }
        let load = |id: ValueId| stored.get(id.0 as usize);
        assert_eq!(stored[60].materialise(&load), Err(Unbuilt::TooLarge), "though each says that it is small");
        assert_eq!(at_hand.materialise(&load), Err(Unbuilt::TooLarge));
        assert_eq!(stored[60].resolve(&load), Err(Unbuilt::TooLarge));
        assert_eq!(at_hand.resolve(&load), Err(Unbuilt::TooLarge));
        assert!(at_hand.bytes(1 << 20) > 1 << 20);
    }

    #[test]
    fn a_rough_size_is_a_little_more_and_a_payload_has_two_words() {
        for bytes in [0, 1, 4_095, 4_096, 4_097, 12_345, 1 << 20, (1 << 20) + 1, 99_999_999] {
            let rough = RoughSize::of(bytes).bytes();
            assert!((bytes as u64..=bytes as u64 + bytes as u64 / 1_000).contains(&rough), "{bytes}: {rough}");
        }
        assert!(RoughSize::of(usize::MAX).bytes() > 100 << 20);
        assert_eq!(size_of::<Data>(), 16);
    }

    #[test]
    fn depth_counts_what_is_referred_to() {
        let stored = Data::Ref(ValueRef { id: ValueId(1), bytes: 9, depth: 7, read_size: RoughSize::default() });
        assert_eq!(Data::List(Arc::new(vec![Data::from(json!([[]])), stored])).depth(), 8);
        assert_eq!((Data::from(json!(1)).depth(), Data::from(json!({"a": [1]})).depth()), (0, 2));
    }

    #[test]
    fn what_a_payload_takes_to_be_read_is_its_own_text_and_a_little_for_each_value() {
        let large = Data::Ref(ValueRef { id: ValueId(1), bytes: 1 << 20, depth: 0, read_size: RoughSize::of(1 << 20) });
        let refs = Data::List(Arc::new(vec![large; 100]));
        assert!(refs.read_bytes(1 << 20) < 4_000, "{}", refs.read_bytes(1 << 20));
        let (text, numbers) = (Data::from(json!("x".repeat(1_000))), Data::from(json!(vec![1; 1_000])));
        assert_eq!((text.read_bytes(1 << 20), numbers.read_bytes(1 << 20)), (1_010, 10_010));
        assert!(numbers.read_bytes(100) < 200);
    }

    #[test]
    fn sizes_are_close_to_the_text_and_stop_at_the_limit() {
        for value in [json!({"a": [1, -20, true, null, "text"]}), json!([]), json!(0), json!({"k": {"l": "m"}})] {
            let text = value.to_string().len();
            let counted = Data::from(value).bytes(1 << 20);
            assert!(counted.abs_diff(text) <= 4, "{counted} for {text}");
        }
        let long = Data::from(Value::Array(vec![json!("x"); 100_000]));
        assert!(long.bytes(1000) < 1100);
    }
}
