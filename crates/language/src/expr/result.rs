//! Turns values into payloads, within bounds: payloads that are only passed on are shared, the rest is copied.

use std::mem;
use std::sync::Arc;

use serde_json::{Map, Number, Value};

use super::MAX_PAYLOAD_BYTES;
use super::eval::Eval;
use super::halt::{Halt, Res, by_name_only, gather};
use super::text::Text;
use super::value::{Val, span_text, time_text};
use crate::data::{Data, INLINE_BYTES};

/// Nesting depth of a result: JSON parsers stop at 128, and records nest it further.
const MAX_RESULT_DEPTH: usize = 100;
/// Memory of a value of the result, without its text.
const NODE_BYTES: usize = 112;

/// A part of a result: copied into it, or shared with its source.
pub(super) enum Part {
    Own(Value),
    Shared(Data),
}

impl<'a> Eval<'a, '_> {
    /// The value as a payload. A payload that is only passed on is shared.
    pub fn data(&mut self, value: Val<'a>) -> Res<Data> {
        match value {
            Val::Data(data) => Ok(data.clone()),
            value => Ok(self.part(value, 0)?.data()),
        }
    }

    pub fn part(&mut self, value: Val<'a>, depth: usize) -> Res<Part> {
        self.spend(1)?;
        self.hold(NODE_BYTES)?;
        check_depth(depth)?;
        let own = match value {
            Val::Null => Value::Null,
            Val::Bool(truth) => Value::Bool(truth),
            Val::Int(int) => Value::from(int),
            Val::Double(double) => {
                let number = Number::from_f64(double).map(Value::Number);
                number.ok_or_else(|| Halt::fault(format!("the result is not a finite number: {double}")))?
            }
            Val::Str(text) => {
                self.hold(text.len())?;
                Value::String(text.to_string())
            }
            Val::Time(ms) => Value::String(time_text(ms)?),
            Val::Span(ms) => Value::String(span_text(ms)),
            Val::Table(table) => return Err(by_name_only(table)),
            Val::Json(json) => return self.copy(json, depth),
            Val::Data(data) => return self.share(data, depth),
            Val::List(items) => return self.list_part(items.iter().cloned(), depth),
            Val::Map(fields) => {
                let fields = fields.iter().map(|(key, field)| (Arc::from(key.as_str()), field.clone()));
                return self.map_part(fields, depth);
            }
        };
        self.take_room(match &own {
            Value::String(text) => text.len() + 2,
            _ => 4,
        })?;
        Ok(Part::Own(own))
    }

    fn list_part(&mut self, items: impl Iterator<Item = Val<'a>>, depth: usize) -> Res<Part> {
        gather(items.map(|item| self.part(item, depth + 1))).map(Part::list)
    }

    fn map_part(&mut self, fields: impl Iterator<Item = (Arc<str>, Val<'a>)>, depth: usize) -> Res<Part> {
        let parts = gather(fields.map(|(key, field)| {
            self.take_room(key.len() + 4)?;
            self.hold(2 * key.len() + NODE_BYTES)?;
            Ok((key, self.part(field, depth + 1)?))
        }))?;
        Ok(Part::map(parts))
    }

    fn copy(&mut self, json: &Value, depth: usize) -> Res<Part> {
        self.admit_json(json, depth, true)?;
        Ok(Part::Own(json.clone()))
    }

    /// Small JSON is copied; everything else is shared.
    pub fn share(&mut self, data: &Data, depth: usize) -> Res<Part> {
        self.admit(data, depth)?;
        match data {
            Data::Json(json) if data.own_bytes(INLINE_BYTES) <= INLINE_BYTES => {
                self.hold_json(json)?;
                Ok(Part::Own(Value::clone(json)))
            }
            _ => Ok(Part::Shared(data.clone())),
        }
    }

    /// Checks that the result has room for it at that depth.
    fn admit(&mut self, data: &Data, depth: usize) -> Res<()> {
        match data {
            Data::Json(json) => return self.admit_json(json, depth, false),
            Data::Ref(stored) => {
                // Otherwise a loop whose state contains the previous state could nest without bound, one reference a
                // round.
                check_depth(depth + usize::from(stored.depth))?;
                return self.take_room(24);
            }
            Data::List(_) | Data::Map(_) => self.spend(1)?,
        }
        check_depth(depth)?;
        match data {
            Data::List(items) => items.iter().try_for_each(|item| self.admit(item, depth + 1)),
            Data::Map(fields) => fields.iter().try_for_each(|(key, field)| {
                self.take_room(key.len() + 4)?;
                self.admit(field, depth + 1)
            }),
            Data::Json(_) | Data::Ref(_) => Ok(()),
        }
    }

    /// Checks that the result has room for the JSON; charges for its memory if it is copied.
    fn admit_json(&mut self, json: &Value, depth: usize, copied: bool) -> Res<()> {
        self.spend(1)?;
        check_depth(depth)?;
        if copied {
            self.hold_json_node(json)?;
        }
        match json {
            Value::String(text) => self.take_room(text.len() + 2),
            Value::Array(items) => items.iter().try_for_each(|item| self.admit_json(item, depth + 1, copied)),
            Value::Object(fields) => fields.iter().try_for_each(|(key, field)| {
                self.take_room(key.len() + 4)?;
                self.admit_json(field, depth + 1, copied)
            }),
            _ => self.take_room(4),
        }
    }

    fn hold_json(&mut self, json: &Value) -> Res<()> {
        self.hold_json_node(json)?;
        match json {
            Value::Array(items) => items.iter().try_for_each(|item| self.hold_json(item)),
            Value::Object(fields) => fields.values().try_for_each(|field| self.hold_json(field)),
            _ => Ok(()),
        }
    }

    fn hold_json_node(&mut self, json: &Value) -> Res<()> {
        self.hold(match json {
            Value::String(text) => NODE_BYTES + text.len(),
            Value::Object(fields) => fields.keys().map(|key| NODE_BYTES + key.len()).sum::<usize>() + NODE_BYTES,
            _ => NODE_BYTES,
        })
    }

    pub fn take_room(&mut self, bytes: usize) -> Res<()> {
        self.room = self
            .room
            .checked_sub(bytes + 1)
            .ok_or_else(|| Halt::fault(format!("the result is larger than {} MiB", MAX_PAYLOAD_BYTES >> 20)))?;
        self.spend_bytes(bytes)
    }

    /// The fully loaded value as JSON text.
    pub fn json_text(&mut self, value: Val<'a>) -> Res<String> {
        let value = self.solid(value)?;
        // This is an intermediate value, so it does not use up the room of the result.
        let room = mem::replace(&mut self.room, MAX_PAYLOAD_BYTES);
        let json = match value {
            Val::Data(Data::Json(json)) => self.copy(json, 0),
            value => self.part(value, 0),
        };
        let taken = MAX_PAYLOAD_BYTES - mem::replace(&mut self.room, room);
        let json = json?;
        // The string grows by doubling.
        self.hold(taken.saturating_mul(2))?;
        match json {
            Part::Own(json) => Ok(json.to_string()),
            Part::Shared(Data::Json(json)) => Ok(json.to_string()),
            Part::Shared(_) => Err(Halt::fault("is not loaded")),
        }
    }

    /// The value as part of a string.
    pub fn render(&mut self, value: Val<'a>) -> Res<Text<'a>> {
        match self.force(value)? {
            Val::Null => Ok(Text::Borrowed("")),
            Val::Str(text) => Ok(text),
            Val::Time(ms) => time_text(ms).map(Text::from),
            Val::Span(ms) => Ok(Text::from(span_text(ms))),
            value => {
                let text = self.json_text(value)?;
                self.hold(text.len())?;
                Ok(Text::from(text))
            }
        }
    }
}

impl Part {
    pub fn data(self) -> Data {
        match self {
            Part::Own(json) => Data::from(json),
            Part::Shared(data) => data,
        }
    }

    pub fn list(parts: Vec<Part>) -> Part {
        if parts.iter().any(|part| matches!(part, Part::Shared(_))) {
            return Part::Shared(Data::List(Arc::new(parts.into_iter().map(Part::data).collect())));
        }
        Part::Own(Value::Array(parts.into_iter().filter_map(Part::own).collect()))
    }

    pub fn map(parts: Vec<(Arc<str>, Part)>) -> Part {
        if parts.iter().any(|(_, part)| matches!(part, Part::Shared(_))) {
            let fields = parts.into_iter().map(|(key, part)| (key, part.data())).collect();
            return Part::Shared(Data::Map(Arc::new(fields)));
        }
        let fields = parts.into_iter().filter_map(|(key, part)| Some((key.to_string(), part.own()?)));
        Part::Own(Value::Object(fields.collect::<Map<_, _>>()))
    }

    fn own(self) -> Option<Value> {
        match self {
            Part::Own(json) => Some(json),
            Part::Shared(_) => None,
        }
    }
}

fn check_depth(depth: usize) -> Res<()> {
    if depth > MAX_RESULT_DEPTH {
        return Err(Halt::fault(format!("the result is nested more than {MAX_RESULT_DEPTH} deep")));
    }
    Ok(())
}
