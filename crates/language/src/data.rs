//! Payloads: JSON, and aggregates that refer to stored values without copying them.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::ValueId;

/// Payloads up to this size are stored inline; larger ones become a stored value with its own key.
pub const INLINE_BYTES: usize = 256;
/// The same limit for its memory: small objects take up to eighty times as much there as in JSON, and a run has up to
/// three payloads for each of its activations.
const INLINE_MEMORY: usize = 2 << 10;

/// The largest JSON that is materialised at once: an aggregate of references can expand to far more than was ever
/// written.
pub const MAX_BUILT_BYTES: usize = 16 << 20;
/// The deepest nesting of JSON that is materialised, written or sent.
pub const MAX_BUILT_DEPTH: u16 = 256;
/// An aggregate that takes no more memory than this is copied into a single JSON value when it is sent.
const COPIED_BYTES: usize = 16 << 10;
/// Cost of reading a value, on top of its text: it is parsed, and short values are larger in memory than as JSON.
const READ_VALUE: usize = 8;
/// Size of a reference where it is written.
const REF_BYTES: usize = 24;

/// Approximate overhead of an allocation: reference counts, spare capacity, rounding.
const ALLOCATED: usize = 24;

/// A payload as the machine handles it: loaded JSON, a reference to a stored value, or an aggregate of both. An
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

/// The key of a stored value, with its size as JSON (or an upper bound), its nesting depth, and its cost to read. Size
/// and depth limit what may be built from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueRef {
    pub id: ValueId,
    pub bytes: u32,
    pub depth: u16,
    /// [`Data::read_bytes`] of the value; 0 in records written before this field existed.
    #[serde(default)]
    pub read_size: RoughSize,
}

/// A number of bytes in two bytes, rounded up by less than a thousandth, so that a [`Data`] takes 16 bytes: runs
/// consist of those. The upper four bits say by how much the lower twelve are shifted.
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
    /// The cost of reading the value, without what it refers to.
    pub fn read_bytes(&self) -> u64 {
        if self.read_size == RoughSize::default() { u64::from(self.bytes) } else { self.read_size.bytes() }
    }
}

/// Why a payload could not be materialised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unbuilt {
    /// These values are not loaded.
    #[error("the values {0:?} are not loaded")]
    Missing(Vec<ValueRef>),
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

    /// Its size as JSON. Counting stops at `limit`, which also bounds the time, even if the same value occurs many
    /// times.
    pub fn bytes(&self, limit: usize) -> usize {
        match self {
            Data::Json(json) => json_bytes(json, limit),
            Data::Ref(value) => value.bytes as usize,
            Data::List(items) => sum(limit, items.iter().map(|item| (1, item))),
            Data::Map(fields) => sum(limit, fields.iter().map(|(key, item)| (key.len() + 4, item))),
        }
    }

    /// Nesting depth, including referenced values; a scalar has depth 0.
    pub fn depth(&self) -> u16 {
        match self {
            Data::Json(json) => json_depth(json),
            Data::Ref(value) => value.depth,
            Data::List(items) => deeper(items.iter().map(Data::depth)),
            Data::Map(fields) => deeper(fields.iter().map(|(_, item)| item.depth())),
        }
    }

    /// Its size where it is written: a reference counts as a reference, not as the value it refers to.
    pub fn own_bytes(&self, limit: usize) -> usize {
        match self {
            Data::Json(json) => json_bytes(json, limit),
            Data::Ref(_) => REF_BYTES,
            Data::List(items) => bounded(limit, items.iter().map(|item| 1 + item.own_bytes(limit))),
            Data::Map(fields) => bounded(limit, fields.iter().map(|(key, item)| key.len() + 4 + item.own_bytes(limit))),
        }
    }

    /// The cost of reading it from a store: its own text, and a little for each value in it.
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

    /// Whether it is stored where it is used instead of as a value of its own.
    pub fn is_inline(&self) -> bool {
        self.own_bytes(INLINE_BYTES) <= INLINE_BYTES && self.memory_bytes(INLINE_MEMORY) <= INLINE_MEMORY
    }

    /// Approximate size in memory, without referenced values. Small elements take far more memory than JSON text.
    /// Counting stops at `limit`, which also bounds the time.
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

    /// Visits its direct references.
    pub fn each_ref(&self, visit: &mut impl FnMut(ValueRef)) {
        match self {
            Data::Json(_) => {}
            Data::Ref(stored) => visit(*stored),
            Data::List(items) => items.iter().for_each(|item| item.each_ref(visit)),
            Data::Map(fields) => fields.iter().for_each(|(_, item)| item.each_ref(visit)),
        }
    }

    /// Its JSON, with every reference resolved through `load`. The size is checked before anything is built, and again
    /// during the build, in case a reference understates its size.
    pub fn materialise<'a>(&'a self, load: &impl Fn(ValueId) -> Option<&'a Data>) -> Result<Value, Unbuilt> {
        if self.bytes(MAX_BUILT_BYTES) > MAX_BUILT_BYTES {
            return Err(Unbuilt::TooLarge);
        }
        let mut build = JsonBuilder::new(load);
        let value = build.value(self, 0);
        build.finish(value)
    }

    /// The same payload with every reference replaced by its value. Unlike [`Data::materialise`] it does not copy large
    /// JSON, so a payload sent to a thousand children is in memory once. Small aggregates become JSON, which is
    /// smaller.
    pub fn resolve<'a>(&'a self, load: &impl Fn(ValueId) -> Option<&'a Data>) -> Result<Data, Unbuilt> {
        if self.bytes(MAX_BUILT_BYTES) > MAX_BUILT_BYTES {
            return Err(Unbuilt::TooLarge);
        }
        let mut build = JsonBuilder::new(load);
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

/// Resolves references and counts the bytes built.
struct JsonBuilder<'l, L> {
    load: &'l L,
    /// Bytes that may still be built.
    left: usize,
    missing: BTreeSet<ValueRef>,
}

impl<'a, 'l, L: Fn(ValueId) -> Option<&'a Data>> JsonBuilder<'l, L> {
    fn new(load: &'l L) -> Self {
        JsonBuilder { load, left: MAX_BUILT_BYTES, missing: BTreeSet::new() }
    }

    fn finish<T>(self, built: Option<T>) -> Result<T, Unbuilt> {
        let built = built.ok_or(Unbuilt::TooLarge)?;
        if self.missing.is_empty() { Ok(built) } else { Err(Unbuilt::Missing(self.missing.into_iter().collect())) }
    }

    /// Like [`JsonBuilder::value`], but shares existing JSON instead of copying it.
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

    /// None if it is too large or too deep. A missing value counts with the size in its reference.
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
            // A map is a B-tree whose nodes have room for 11 fields each, however few are used.
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
        let Data::Map(fields) = inside.resolve(&load).unwrap() else { panic!("expected a map") };
        let Data::List(items) = &fields[0].1 else { panic!("expected a list") };
        assert!(items.iter().all(same));
        let small = Data::List(Arc::new(vec![Data::from(json!(1)), Data::from(json!("two"))]));
        assert_eq!(small.resolve(&load), Ok(Data::from(json!([1, "two"]))));
        let missing = ValueRef { id: ValueId(2), ..stored };
        let refers = Data::List(Arc::new(vec![Data::Ref(stored), Data::Ref(missing)]));
        assert_eq!(refers.resolve(&load), Err(Unbuilt::Missing(vec![missing])));
    }

    #[test]
    fn what_doubles_by_reference_is_never_built() {
        // Each contains the previous one twice: 2^60 bytes in all.
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
        assert_eq!(stored[60].materialise(&load), Err(Unbuilt::TooLarge), "although each reference claims to be small");
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
    fn a_payload_is_inline_if_it_is_small_in_text_and_in_memory() {
        for inline in [json!(1), json!("x".repeat(200)), json!({"id": 7, "to": {"name": "ada"}}), json!([1, 2, 3])] {
            assert!(Data::from(inline.clone()).is_inline(), "{inline}");
        }
        let small_objects = Data::from(json!(vec![json!({"a": 1}); 25]));
        assert!(small_objects.own_bytes(1_000) < INLINE_BYTES && !small_objects.is_inline());
        assert!(!Data::from(json!("x".repeat(300))).is_inline());
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
