//! Values of expressions, borrowed from payloads wherever possible.

use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Map, Number, Value};

use super::halt::{Halt, Res, shorten};
use super::text::Text;
use crate::data::Data;
use crate::ids::Millis;

/// A value; cheap to clone. Payloads stay lazy: a reference is resolved when its content is needed, not when it is
/// passed on.
#[derive(Debug, Clone)]
pub enum Val<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Double(f64),
    Str(Text<'a>),
    /// An array or an object. (Scalars are accepted here and in `Data`, and unwrapped when they are read.)
    Json(&'a Value),
    /// A payload, not necessarily loaded.
    Data(&'a Data),
    List(Rc<Vec<Val<'a>>>),
    /// In insertion order, with unique keys.
    Map(Rc<Vec<(Text<'a>, Val<'a>)>>),
    /// Milliseconds since the epoch.
    Time(Millis),
    Span(Millis),
    Table(Table),
}

/// A table that can only be read by name: its entries are not all known at all times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    Steps,
    Events,
    Gates,
    Run,
}

impl Table {
    /// The fields of [`Table::Run`]; the last two exist only when the run ends.
    pub const OF_RUN: [&str; 8] = ["id", "flow", "version", "input", "tags", "external_id", "outcome", "error"];

    pub fn named(name: &str) -> Option<Table> {
        [Table::Steps, Table::Events, Table::Gates, Table::Run].into_iter().find(|table| table.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Table::Steps => "steps",
            Table::Events => "events",
            Table::Gates => "gates",
            Table::Run => "run",
        }
    }
}

/// The contents of a list or a map, in any representation.
pub(super) enum Shape<'v, 'a> {
    Items(Items<'v, 'a>),
    Fields(MapFields<'v, 'a>),
    Scalar,
}

#[derive(Clone, Copy)]
pub(super) enum Items<'v, 'a> {
    Vals(&'v [Val<'a>]),
    Json(&'a [Value]),
    Data(&'a [Data]),
}

#[derive(Clone, Copy)]
pub(super) enum MapFields<'v, 'a> {
    Vals(&'v [(Text<'a>, Val<'a>)]),
    Json(&'a Map<String, Value>),
    Data(&'a [(Arc<str>, Data)]),
}

impl<'a> From<&'a Value> for Val<'a> {
    fn from(json: &'a Value) -> Val<'a> {
        match json {
            Value::Null => Val::Null,
            Value::Bool(truth) => Val::Bool(*truth),
            // Beyond i64 it is a double in arithmetic, but stays exact when it is only passed on.
            Value::Number(number) if number.as_i64().is_none() && number.is_u64() => Val::Json(json),
            Value::Number(number) => number_val(number),
            Value::String(text) => Val::Str(Text::Borrowed(text)),
            Value::Array(_) | Value::Object(_) => Val::Json(json),
        }
    }
}

impl<'a> From<&'a Data> for Val<'a> {
    fn from(data: &'a Data) -> Val<'a> {
        match data {
            // Containers stay payloads, so that they can be shared.
            Data::Json(json) if !json.is_array() && !json.is_object() => Val::from(json.as_ref()),
            _ => Val::Data(data),
        }
    }
}

impl From<String> for Val<'_> {
    fn from(text: String) -> Self {
        Val::Str(Text::from(text))
    }
}

impl<'a> Val<'a> {
    pub(super) fn list(items: Vec<Val<'a>>) -> Val<'a> {
        Val::List(Rc::new(items))
    }

    /// A value that borrows nothing.
    pub(super) fn owned(json: Value) -> Val<'a> {
        match json {
            Value::Null => Val::Null,
            Value::Bool(truth) => Val::Bool(truth),
            Value::Number(number) => number_val(&number),
            Value::String(text) => Val::from(text),
            Value::Array(items) => Val::list(items.into_iter().map(Val::owned).collect()),
            Value::Object(fields) => {
                Val::Map(Rc::new(fields.into_iter().map(|(key, field)| (Text::from(key), Val::owned(field))).collect()))
            }
        }
    }

    /// Unwraps a scalar from its payload.
    pub(super) fn settle(self) -> Val<'a> {
        match self {
            Val::Json(Value::Number(number)) => number_val(number),
            Val::Json(json) => Val::from(json),
            Val::Data(data) => match Val::from(data) {
                Val::Json(Value::Number(number)) => number_val(number),
                value => value,
            },
            other => other,
        }
    }

    pub(super) fn shape(&self) -> Shape<'_, 'a> {
        match self {
            Val::List(items) => Shape::Items(Items::Vals(items)),
            Val::Map(fields) => Shape::Fields(MapFields::Vals(fields)),
            Val::Json(json) => json_shape(json),
            Val::Data(Data::Json(json)) => json_shape(json),
            Val::Data(Data::List(items)) => Shape::Items(Items::Data(items)),
            Val::Data(Data::Map(fields)) => Shape::Fields(MapFields::Data(fields)),
            _ => Shape::Scalar,
        }
    }

    /// The name of its type, as returned by `type(x)`.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Val::Null => "null",
            Val::Bool(_) => "bool",
            Val::Int(_) => "int",
            Val::Double(_) => "double",
            Val::Str(_) => "string",
            Val::Time(_) => "timestamp",
            Val::Span(_) => "duration",
            Val::Table(table) => table.name(),
            Val::Json(_) | Val::Data(_) | Val::List(_) | Val::Map(_) => match self.shape() {
                Shape::Items(_) => "list",
                Shape::Fields(_) => "map",
                Shape::Scalar => "value",
            },
        }
    }

    /// Its type with an article, for messages.
    pub(super) fn kind(&self) -> String {
        match self {
            Val::Null => "null".to_string(),
            Val::Int(_) => "an int".to_string(),
            Val::Table(table) => format!("`{}`", table.name()),
            _ => format!("a {}", self.type_name()),
        }
    }

    /// The order of `<`: numbers, strings, bools, times and durations, each only among themselves.
    pub(super) fn compare(&self, other: &Val<'_>) -> Option<Ordering> {
        match (self, other) {
            (Val::Int(l), Val::Int(r)) => Some(l.cmp(r)),
            (Val::Double(l), Val::Double(r)) => l.partial_cmp(r),
            (Val::Int(l), Val::Double(r)) => compare_int(*l, *r),
            (Val::Double(l), Val::Int(r)) => compare_int(*r, *l).map(Ordering::reverse),
            (Val::Str(l), Val::Str(r)) => Some(l.cmp(r)),
            (Val::Bool(l), Val::Bool(r)) => Some(l.cmp(r)),
            (Val::Time(l), Val::Time(r)) | (Val::Span(l), Val::Span(r)) => Some(l.cmp(r)),
            _ => None,
        }
    }

    /// A total order of values without references; `Equal` agrees with `==`. All numbers are of one kind.
    pub(super) fn order(&self, other: &Val<'a>) -> Ordering {
        if let Some(order) = self.compare(other) {
            return order;
        }
        match (self.shape(), other.shape()) {
            (Shape::Items(l), Shape::Items(r)) => order_all(l.iter(), r.iter(), |l, r| l.settle().order(&r.settle())),
            (Shape::Fields(l), Shape::Fields(r)) => order_all(l.sorted(), r.sorted(), |(l_key, l), (r_key, r)| {
                l_key.cmp(&r_key).then_with(|| l.settle().order(&r.settle()))
            }),
            _ => self.rank().cmp(&other.rank()),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Val::Null => 0,
            Val::Bool(_) => 1,
            Val::Int(_) => 2,
            // NaN sorts after all numbers and equals itself.
            Val::Double(number) => 2 + u8::from(number.is_nan()),
            Val::Str(_) => 4,
            Val::Time(_) => 5,
            Val::Span(_) => 6,
            Val::Table(_) => 7,
            Val::Json(_) | Val::Data(_) | Val::List(_) | Val::Map(_) => match self.shape() {
                Shape::Items(_) => 8,
                Shape::Fields(_) => 9,
                Shape::Scalar => 10,
            },
        }
    }
}

impl<'v, 'a: 'v> Items<'v, 'a> {
    pub fn len(self) -> usize {
        match self {
            Items::Vals(items) => items.len(),
            Items::Json(items) => items.len(),
            Items::Data(items) => items.len(),
        }
    }

    pub fn get(self, at: usize) -> Option<Val<'a>> {
        match self {
            Items::Vals(items) => items.get(at).cloned(),
            Items::Json(items) => items.get(at).map(Val::from),
            Items::Data(items) => items.get(at).map(Val::from),
        }
    }

    pub fn iter(self) -> impl Iterator<Item = Val<'a>> + 'v {
        (0..self.len()).map(move |at| self.get(at).unwrap_or(Val::Null))
    }
}

impl<'v, 'a: 'v> MapFields<'v, 'a> {
    pub fn len(self) -> usize {
        match self {
            MapFields::Vals(fields) => fields.len(),
            MapFields::Json(fields) => fields.len(),
            MapFields::Data(fields) => fields.len(),
        }
    }

    pub fn get(self, key: &str) -> Option<Val<'a>> {
        match self {
            MapFields::Vals(fields) => {
                fields.iter().find(|(name, _)| name.as_str() == key).map(|(_, field)| field.clone())
            }
            MapFields::Json(fields) => fields.get(key).map(Val::from),
            MapFields::Data(fields) => {
                fields.iter().find(|(name, _)| name.as_ref() == key).map(|(_, data)| data.into())
            }
        }
    }

    /// The cost of `get`, in steps.
    pub fn search_cost(self) -> usize {
        match self {
            MapFields::Json(_) => 1,
            _ => 1 + self.len() / 16,
        }
    }

    /// At most `most` keys.
    pub fn keys(self, most: usize) -> Vec<Text<'a>> {
        match self {
            MapFields::Vals(fields) => fields.iter().take(most).map(|(key, _)| key.clone()).collect(),
            MapFields::Json(fields) => fields.keys().take(most).map(|key| Text::Borrowed(key.as_str())).collect(),
            MapFields::Data(fields) => fields.iter().take(most).map(|(key, _)| Text::Borrowed(key.as_ref())).collect(),
        }
    }

    pub fn values(self) -> Vec<Val<'a>> {
        match self {
            MapFields::Vals(fields) => fields.iter().map(|(_, field)| field.clone()).collect(),
            MapFields::Json(fields) => fields.values().map(Val::from).collect(),
            MapFields::Data(fields) => fields.iter().map(|(_, data)| Val::from(data)).collect(),
        }
    }

    fn sorted(self) -> std::vec::IntoIter<(Text<'a>, Val<'a>)> {
        let mut fields: Vec<_> = self.keys(usize::MAX).into_iter().zip(self.values()).collect();
        fields.sort_by(|(l, _), (r, _)| l.cmp(r));
        fields.into_iter()
    }
}

/// Checks that the time can be written as a date.
pub(super) fn moment(ms: Millis) -> Res<Millis> {
    match Timestamp::from_millisecond(ms) {
        Ok(_) => Ok(ms),
        Err(_) => Err(Halt::fault(format!("{ms} ms since 1970 is out of the range of dates"))),
    }
}

pub(super) fn parse_time(text: &str) -> Res<Millis> {
    match text.parse::<Timestamp>() {
        Ok(time) => Ok(time.as_millisecond()),
        Err(_) => Err(Halt::fault(format!("`{}` is not a time like 2026-01-02T03:04:05Z", shorten(text)))),
    }
}

/// RFC 3339 in UTC with milliseconds.
pub(super) fn time_text(ms: Millis) -> Res<String> {
    moment(ms)?;
    Ok(Timestamp::from_millisecond(ms).map(|time| format!("{time:.3}")).unwrap_or_default())
}

/// CEL's format: seconds, or milliseconds if they are not whole.
pub(super) fn span_text(ms: Millis) -> String {
    if ms % 1000 == 0 { format!("{}s", ms / 1000) } else { format!("{ms}ms") }
}

/// `1h30m`, `250ms`, `-1.5s`, `2d`; rounded to milliseconds.
pub(super) fn parse_span(text: &str) -> Option<Millis> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    if rest.is_empty() {
        return None;
    }
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let ms = match unit {
            "ms" => 1.0,
            "s" => 1_000.0,
            "m" => 60_000.0,
            "h" => 3_600_000.0,
            "d" => 86_400_000.0,
            _ => return None,
        };
        total += number.parse::<f64>().ok()? * ms;
        rest = tail;
    }
    // Up to this bound (285,000 years) every integer is exact in a double.
    (total <= 9e15).then_some((sign * total).round() as Millis)
}

fn number_val<'a>(number: &Number) -> Val<'a> {
    match number.as_i64() {
        Some(int) => Val::Int(int),
        None => Val::Double(number.as_f64().unwrap_or(f64::NAN)),
    }
}

fn json_shape<'v, 'a>(json: &'a Value) -> Shape<'v, 'a> {
    match json {
        Value::Array(items) => Shape::Items(Items::Json(items)),
        Value::Object(fields) => Shape::Fields(MapFields::Json(fields)),
        _ => Shape::Scalar,
    }
}

/// Exact, although not every i64 is representable as a double.
fn compare_int(int: i64, double: f64) -> Option<Ordering> {
    const BEYOND: f64 = 9_223_372_036_854_775_808.0;
    if double.is_nan() {
        None
    } else if double >= BEYOND {
        Some(Ordering::Less)
    } else if double < -BEYOND {
        Some(Ordering::Greater)
    } else {
        let whole = int.cmp(&(double.trunc() as i64));
        Some(whole.then(0.0.partial_cmp(&double.fract())?))
    }
}

fn order_all<T>(
    mut left: impl Iterator<Item = T>,
    mut right: impl Iterator<Item = T>,
    order: impl Fn(T, T) -> Ordering,
) -> Ordering {
    loop {
        match (left.next(), right.next()) {
            (Some(l), Some(r)) => match order(l, r) {
                Ordering::Equal => {}
                unequal => return unequal,
            },
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
        }
    }
}
