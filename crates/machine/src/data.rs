//! Payloads. JSON, and JSON put together from stored values without copying them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::ValueId;

/// A payload of up to this many bytes is kept where it is used; a larger one becomes a stored value with a key.
pub const INLINE_BYTES: usize = 256;

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

/// The key of a stored value, with its size as JSON and how deep it is nested, which bound what can be made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueRef {
    pub id: ValueId,
    pub bytes: u32,
    pub depth: u16,
}

impl Data {
    pub fn null() -> Data {
        Data::Json(Arc::new(Value::Null))
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Data::Json(json) if json.is_null())
    }

    /// Its size as JSON, counted only up to `limit`.
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
            Data::Ref(_) => 24,
            Data::List(items) => bounded(limit, items.iter().map(|item| 1 + item.own_bytes(limit))),
            Data::Map(fields) => bounded(limit, fields.iter().map(|(key, item)| key.len() + 4 + item.own_bytes(limit))),
        }
    }

    /// Its JSON, with every reference followed through `load`; the keys that `load` did not have, if any.
    pub fn materialise<'a>(&'a self, load: &impl Fn(ValueId) -> Option<&'a Data>) -> Result<Value, Vec<ValueId>> {
        let mut missing = Vec::new();
        let value = build(self, load, &mut missing);
        if missing.is_empty() { Ok(value) } else { Err(missing) }
    }
}

impl From<Value> for Data {
    fn from(value: Value) -> Data {
        Data::Json(Arc::new(value))
    }
}

fn build<'a>(data: &'a Data, load: &impl Fn(ValueId) -> Option<&'a Data>, missing: &mut Vec<ValueId>) -> Value {
    match data {
        Data::Json(json) => Value::clone(json),
        Data::Ref(value) => match load(value.id) {
            Some(inner) => build(inner, load, missing),
            None => {
                missing.push(value.id);
                Value::Null
            }
        },
        Data::List(items) => Value::Array(items.iter().map(|item| build(item, load, missing)).collect()),
        Data::Map(fields) => {
            Value::Object(fields.iter().map(|(key, item)| (key.to_string(), build(item, load, missing))).collect())
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_aggregate_names_every_missing_value_at_once() {
        let at = |id| Data::Ref(ValueRef { id: ValueId(id), bytes: 9, depth: 1 });
        let list = Data::List(Arc::new(vec![at(1), Data::from(json!(2)), at(3)]));
        assert_eq!(list.materialise(&|_| None), Err(vec![ValueId(1), ValueId(3)]));
        let one = Data::from(json!("one"));
        let three = Data::from(json!({"n": 3}));
        let load = |id| if id == ValueId(1) { Some(&one) } else { Some(&three) };
        assert_eq!(list.materialise(&load), Ok(json!(["one", 2, {"n": 3}])));
    }

    #[test]
    fn depth_counts_what_is_referred_to() {
        let stored = Data::Ref(ValueRef { id: ValueId(1), bytes: 9, depth: 7 });
        assert_eq!(Data::List(Arc::new(vec![Data::from(json!([[]])), stored])).depth(), 8);
        assert_eq!((Data::from(json!(1)).depth(), Data::from(json!({"a": [1]})).depth()), (0, 2));
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
