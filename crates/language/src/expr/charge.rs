//! Charges for work and memory, always before the work is done.

use serde_json::Value;

use super::Cost;
use super::eval::Eval;
use super::halt::Res;
use super::text::Text;
use super::value::Val;
use crate::data::Data;

/// Memory of a list element and of a map field, including spare capacity.
const ELEMENT_BYTES: usize = 48;
const FIELD_BYTES: usize = 112;

impl<'a> Eval<'a, '_> {
    pub fn spend(&mut self, steps: usize) -> Res<()> {
        self.fuel.take(Cost { steps: steps as u64, ..Cost::default() })
    }

    /// Charges for reading text.
    pub fn spend_bytes(&mut self, bytes: usize) -> Res<()> {
        self.spend(bytes / 64)
    }

    /// Charges for memory before it is allocated.
    pub fn hold(&mut self, bytes: usize) -> Res<()> {
        self.fuel.take(Cost { bytes: bytes as u64, ..Cost::default() })
    }

    pub fn hold_elements(&mut self, count: usize) -> Res<()> {
        self.hold(ELEMENT_BYTES.saturating_mul(count + 1))
    }

    pub fn hold_element(&mut self) -> Res<()> {
        self.hold(ELEMENT_BYTES)
    }

    pub fn hold_fields(&mut self, count: usize) -> Res<()> {
        self.hold(FIELD_BYTES.saturating_mul(count + 1))
    }

    /// New text of at most that length. Charged twice, because making it shareable copies it once.
    pub fn made(&mut self, bytes: usize, make: impl FnOnce() -> String) -> Res<Val<'a>> {
        self.spend_bytes(bytes)?;
        self.hold(64 + bytes.saturating_mul(2))?;
        Ok(Val::Str(Text::from(make())))
    }

    /// Part of a text. A text borrowed from a payload stays borrowed.
    pub fn piece(&mut self, text: &Text<'a>, from: usize, to: usize) -> Res<Val<'a>> {
        match text {
            Text::Borrowed(text) => Ok(Val::Str(Text::Borrowed(text.get(from..to).unwrap_or_default()))),
            Text::Made(whole) if from == 0 && to == whole.len() => Ok(Val::Str(text.clone())),
            Text::Made(whole) => self.made(to - from, || whole.get(from..to).unwrap_or_default().to_owned()),
        }
    }

    /// Steps spent so far.
    pub fn steps(&self) -> u64 {
        self.fuel.spent().steps
    }

    /// Charges for one comparison of a value without references.
    pub fn weigh(&mut self, value: &Val<'a>) -> Res<()> {
        match value {
            Val::Str(text) => self.spend_bytes(text.len()),
            Val::Json(json) => self.weigh_json(json),
            Val::Data(Data::Json(json)) => self.weigh_json(json),
            Val::List(items) => items.iter().try_for_each(|item| self.spend(1).and_then(|()| self.weigh(item))),
            Val::Map(fields) => {
                self.sorting(fields.len())?;
                fields.iter().try_for_each(|(key, field)| {
                    self.spend_bytes(key.len())?;
                    self.weigh(field)
                })
            }
            _ => Ok(()),
        }
    }

    fn weigh_json(&mut self, json: &Value) -> Res<()> {
        self.spend(1)?;
        match json {
            Value::String(text) => self.spend_bytes(text.len()),
            Value::Array(items) => items.iter().try_for_each(|item| self.weigh_json(item)),
            Value::Object(fields) => {
                self.sorting(fields.len())?;
                fields.iter().try_for_each(|(key, field)| {
                    self.spend_bytes(key.len())?;
                    self.weigh_json(field)
                })
            }
            _ => Ok(()),
        }
    }

    /// Maps are compared in key order, which sorts their fields.
    fn sorting(&mut self, fields: usize) -> Res<()> {
        self.hold_fields(fields)?;
        self.spend(fields.saturating_mul(2 + fields.checked_ilog2().unwrap_or(0) as usize / 4))
    }
}
