//! A JSON value that charges the validator for every read.
//!
//! The validation library has no budget and cannot be stopped. But it reads the value through a trait, so the value
//! itself can count: each read is charged, and when the budget of the check is spent, the check is unwound. [`within`]
//! catches that.

use std::borrow::Cow;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread::LocalKey;

use jsonschema::json::{Array, Json, Node, NodeIdentity, Object, cmp, unique};
use jsonschema::types::JsonType;
use serde_json::{Map, Number, Value};

/// The budget of a check, and the costs of texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Budget {
    /// Reads of a value, or equivalent work.
    pub units: u64,
    /// A separate budget for texts.
    pub text_units: u64,
    /// The cost of each byte of a text that a pattern or format reads.
    pub text_byte: u64,
    /// The cost of each byte of a property's name, which is matched with all patterns of `patternProperties`.
    pub name_byte: u64,
}

/// The budget is spent.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Spent;

thread_local! {
    static LEFT: Cell<u64> = const { Cell::new(0) };
    static TEXT_LEFT: Cell<u64> = const { Cell::new(0) };
    static TEXT_BYTE: Cell<u64> = const { Cell::new(0) };
    static NAME_BYTE: Cell<u64> = const { Cell::new(0) };
}

/// Runs a check within a budget, and returns its cost. A panic of the library counts as a spent budget.
pub(super) fn within<T>(budget: Budget, check: impl FnOnce() -> T) -> (Result<T, Spent>, u64) {
    LEFT.set(budget.units);
    TEXT_LEFT.set(budget.text_units);
    TEXT_BYTE.set(budget.text_byte);
    NAME_BYTE.set(budget.name_byte);
    // Unwind safe: the validator is only read and keeps no state between checks.
    let checked = catch_unwind(AssertUnwindSafe(check)).map_err(|cause| {
        if !cause.is::<Spent>() {
            tracing::error!("a schema check panicked; treating it as over budget");
        }
        Spent
    });
    let cost =
        budget.units.saturating_sub(LEFT.get()).saturating_add(budget.text_units.saturating_sub(TEXT_LEFT.get()));
    (checked, cost)
}

fn charge(units: u64) {
    LEFT.with(|left| spend(left, units));
}

/// Charges for matching a text of this many bytes.
fn charge_text(bytes: usize, each: &'static LocalKey<Cell<u64>>) {
    charge(1);
    TEXT_LEFT.with(|left| spend(left, (bytes as u64).saturating_mul(each.get())));
}

fn spend(budget: &Cell<u64>, units: u64) {
    match budget.get().checked_sub(units) {
        Some(left) => budget.set(left),
        // Unwinds without calling the panic hook: this is not an error.
        None => resume_unwind(Box::new(Spent)),
    }
}

/// The JSON representation: `serde_json` with a meter.
#[derive(Debug)]
pub(super) struct Metered;

#[derive(Debug, Clone, Copy)]
pub(super) struct MeteredValue<'a>(pub &'a Value);

#[derive(Debug, Clone, Copy)]
pub(super) struct SeenObject<'a>(&'a Map<String, Value>);

#[derive(Debug, Clone, Copy)]
pub(super) struct SeenArray<'a>(&'a [Value]);

impl Json for Metered {
    type Node<'a> = MeteredValue<'a>;
    type PreparedKey = String;
    type StringBuffer = Value;

    fn prepare_key(key: &str) -> String {
        key.to_owned()
    }

    fn with_string_node<T>(buffer: &mut Value, string: &str, f: impl FnOnce(MeteredValue<'_>) -> T) -> T {
        *buffer = Value::String(string.to_owned());
        f(MeteredValue(buffer))
    }
}

impl<'a> Node<'a, Metered> for MeteredValue<'a> {
    type Object = SeenObject<'a>;
    type Array = SeenArray<'a>;
    type Number = &'a Number;

    fn as_object(&self) -> Option<SeenObject<'a>> {
        charge(1);
        self.0.as_object().map(SeenObject)
    }

    fn as_array(&self) -> Option<SeenArray<'a>> {
        charge(1);
        self.0.as_array().map(|items| SeenArray(items))
    }

    fn as_string(&self) -> Option<Cow<'a, str>> {
        let text = self.0.as_str();
        charge_text(text.map_or(0, str::len), &TEXT_BYTE);
        text.map(Cow::Borrowed)
    }

    fn as_number(&self) -> Option<&'a Number> {
        charge(1);
        match self.0 {
            Value::Number(number) => Some(number),
            _ => None,
        }
    }

    fn as_boolean(&self) -> Option<bool> {
        charge(1);
        self.0.as_bool()
    }

    fn is_null(&self) -> bool {
        charge(1);
        self.0.is_null()
    }

    fn is_number(&self) -> bool {
        charge(1);
        self.0.is_number()
    }

    fn json_type(&self) -> JsonType {
        charge(1);
        match self.0 {
            Value::Null => JsonType::Null,
            Value::Bool(_) => JsonType::Boolean,
            Value::Number(_) => JsonType::Number,
            Value::String(_) => JsonType::String,
            Value::Array(_) => JsonType::Array,
            Value::Object(_) => JsonType::Object,
        }
    }

    fn string_length(&self) -> Option<u64> {
        let text = self.0.as_str();
        charge(1 + text.map_or(0, |text| text.len() as u64 / BYTES_A_UNIT));
        text.map(|text| text.chars().count() as u64)
    }

    fn equals_value(&self, expected: &Value) -> bool {
        charge(size(expected));
        cmp::equal(self.0, expected)
    }

    fn to_value(&self) -> Cow<'a, Value> {
        charge(1);
        Cow::Borrowed(self.0)
    }

    fn identity(&self) -> Option<NodeIdentity> {
        charge(1);
        Some(NodeIdentity::new(std::ptr::from_ref(self.0) as usize))
    }
}

impl<'a> Object<'a, Metered> for SeenObject<'a> {
    type Node = MeteredValue<'a>;
    type MemberName = &'a str;
    type MembersIter = Members<'a>;

    fn len(&self) -> usize {
        charge(1);
        self.0.len()
    }

    fn get(&self, key: &String) -> Option<MeteredValue<'a>> {
        charge(1);
        self.0.get(key).map(MeteredValue)
    }

    fn members(&self) -> Members<'a> {
        Members(self.0.iter())
    }
}

#[derive(Debug, Clone)]
pub(super) struct Members<'a>(serde_json::map::Iter<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (&'a str, MeteredValue<'a>);

    fn next(&mut self) -> Option<(&'a str, MeteredValue<'a>)> {
        let (name, value) = self.0.next()?;
        charge_text(name.len(), &NAME_BYTE);
        Some((name, MeteredValue(value)))
    }
}

impl<'a> Array<'a, Metered> for SeenArray<'a> {
    type Node = MeteredValue<'a>;
    type ElementsIter = Elements<'a>;

    fn len(&self) -> usize {
        charge(1);
        self.0.len()
    }

    fn elements(&self) -> Elements<'a> {
        Elements(self.0.iter())
    }

    fn is_unique(&self) -> bool {
        // Elements of a large array are hashed; those of a small one are compared with each other.
        let all: u64 = self.0.iter().map(size).sum();
        charge(all.saturating_mul(PAIRS.min(self.0.len() as u64)).max(1));
        unique::is_unique(self.0)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Elements<'a>(std::slice::Iter<'a, Value>);

impl<'a> Iterator for Elements<'a> {
    type Item = MeteredValue<'a>;

    fn next(&mut self) -> Option<MeteredValue<'a>> {
        let value = self.0.next()?;
        charge(1);
        Some(MeteredValue(value))
    }
}

/// How many bytes can be counted or compared in the time of one read.
const BYTES_A_UNIT: u64 = 64;
/// The most comparisons for one element of a small array; elements of a large array are hashed.
const PAIRS: u64 = 8;

/// The cost of comparing or hashing a value.
fn size(value: &Value) -> u64 {
    match value {
        Value::String(text) => 1 + text.len() as u64 / BYTES_A_UNIT,
        Value::Array(items) => 1 + items.iter().map(size).sum::<u64>(),
        Value::Object(members) => 1 + members.values().map(|value| 1 + size(value)).sum::<u64>(),
        _ => 1,
    }
}
