//! Refuses JSON with unknown fields: a client that sends `idempotencyKey` expects an effect. The known names are those
//! of the deserialised types, at every depth; payloads may have any shape.

use std::fmt;

use eddyline_language::nearest::nearest;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;

const UNKNOWN: &str = "unknown field ";
/// How much of an unknown name is quoted.
const MAX_SHOWN_CHARS: usize = 80;

/// Wraps a deserializer and refuses fields that the target type does not have.
pub(crate) struct KnownFields<D>(pub D);

macro_rules! passed_on {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method(visitor)
        }
    )*};
}

/// These may contain objects.
macro_rules! looked_into {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method(Inside { visitor, fields: None })
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for KnownFields<D> {
    type Error = D::Error;

    passed_on! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_i128
        deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128 deserialize_f32 deserialize_f64
        deserialize_char deserialize_str deserialize_string deserialize_bytes deserialize_byte_buf deserialize_unit
        deserialize_identifier deserialize_ignored_any
    }

    looked_into! { deserialize_option deserialize_seq deserialize_map }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_struct(name, fields, Inside { visitor, fields: Some(fields) })
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_newtype_struct(name, Inside { visitor, fields: None })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_tuple(length, Inside { visitor, fields: None })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_tuple_struct(name, length, Inside { visitor, fields: None })
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_unit_struct(name, visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }
}

/// Visits a value and everything inside it. With `fields`, the value is an object with only these fields.
struct Inside<V> {
    visitor: V,
    fields: Option<&'static [&'static str]>,
}

macro_rules! visited {
    ($($method:ident $type:ty;)*) => {$(
        fn $method<E: Error>(self, value: $type) -> Result<V::Value, E> {
            self.visitor.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Inside<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }

    visited! {
        visit_bool bool; visit_i64 i64; visit_u64 u64; visit_f64 f64; visit_str &str; visit_borrowed_str &'de str;
        visit_string String; visit_bytes &[u8]; visit_borrowed_bytes &'de [u8]; visit_byte_buf Vec<u8>;
    }

    fn visit_none<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_none()
    }

    fn visit_unit<E: Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_some(KnownFields(inner))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_newtype_struct(KnownFields(inner))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_seq(KnownItems(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_map(Entries { entries, fields: self.fields })
    }
}

struct KnownItems<A>(A);

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for KnownItems<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(KnownFieldsSeed(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.0.size_hint()
    }
}

struct Entries<A> {
    entries: A,
    fields: Option<&'static [&'static str]>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Entries<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        match self.fields {
            Some(fields) => self.entries.next_key_seed(KnownKey { inner: seed, fields }),
            None => self.entries.next_key_seed(seed),
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.entries.next_value_seed(KnownFieldsSeed(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.entries.size_hint()
    }
}

struct KnownFieldsSeed<S>(S);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for KnownFieldsSeed<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, written: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(KnownFields(written))
    }
}

/// A field name on its way to the target type: wraps the seed, then the deserializer, then the visitor.
struct KnownKey<T> {
    inner: T,
    fields: &'static [&'static str],
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for KnownKey<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, written: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(KnownKey { inner: written, fields: self.fields })
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for KnownKey<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_identifier(KnownKey { inner: visitor, fields: self.fields })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for KnownKey<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<V::Value, E> {
        match self.fields.contains(&name) {
            true => self.inner.visit_str(name),
            false => Err(E::custom(unknown(name, self.fields))),
        }
    }
}

fn unknown(name: &str, fields: &[&str]) -> String {
    let help = match nearest(name, fields.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if fields.is_empty() => "this call takes no fields".to_owned(),
        None => format!("known here: {}", fields.join(", ")),
    };
    let shown: String = name.chars().take(MAX_SHOWN_CHARS).collect();
    format!("{UNKNOWN}`{shown}`; {help}")
}

/// The message about an unknown field, without its position. Of types that reject such fields by themselves it is serde's:
/// "unknown field `x`, expected one of `a`, `b`".
pub(crate) fn unknown_field(error: &serde_json::Error) -> Option<String> {
    let text = error.to_string();
    let message = text.rfind(" at line ").map_or(text.as_str(), |at| &text[..at]);
    let rest = message.strip_prefix(UNKNOWN)?;
    Some(match rest.rsplit_once(", expected ") {
        Some((name, known)) => {
            unknown(name.trim_matches('`'), &known.split('`').skip(1).step_by(2).collect::<Vec<_>>())
        }
        None => message.to_owned(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use eddyline_protocol::{FailStep, QueueRules, StartRun};
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    fn read<T: DeserializeOwned + PartialEq + fmt::Debug>(written: &Value) -> Result<T, String> {
        let text = written.to_string();
        let mut parser = serde_json::Deserializer::from_str(&text);
        let from_text = T::deserialize(KnownFields(&mut parser)).map_err(|error| error.to_string());
        let from_value = T::deserialize(KnownFields(written.clone())).map_err(|error| error.to_string());
        match (&from_text, &from_value) {
            (Ok(one), Ok(other)) => assert_eq!(one, other),
            // Only the error from text has a position, after the message.
            (Err(one), Err(other)) => assert!(one.starts_with(other.as_str()), "{one} / {other}"),
            _ => panic!("{from_text:?} / {from_value:?}"),
        }
        from_value
    }

    #[test]
    fn a_field_that_a_type_does_not_have_is_refused_wherever_it_is() {
        let unknown = read::<StartRun>(&json!({"input": 1, "inputs": 2})).unwrap_err();
        assert!(unknown.starts_with("unknown field `inputs`; did you mean `input`?"), "{unknown}");
        let unknown = read::<Vec<StartRun>>(&json!([{}, {"tag": "x"}])).unwrap_err();
        assert!(unknown.starts_with("unknown field `tag`"), "{unknown}");
        let nested = json!({"error": {"message": "no", "knd": "x"}});
        let unknown = read::<FailStep>(&nested).unwrap_err();
        assert!(unknown.starts_with("unknown field `knd`"), "{unknown}");
        let unknown = read::<QueueRules>(&json!({"rate": {"count": 1, "brust": 1}})).unwrap_err();
        assert!(unknown.starts_with("unknown field `brust`"), "{unknown}");
    }

    #[test]
    fn a_field_that_is_far_from_all_names_gets_their_list() {
        let unknown = read::<StartRun>(&json!({"zzzzzzzzzzzzzzzzz": 1})).unwrap_err();
        assert!(unknown.starts_with("unknown field `zzzzzzzzzzzzzzzzz`; known here: flow, input"), "{unknown}");
        let unknown = read::<StartRun>(&json!({"z".repeat(1_000): 1})).unwrap_err();
        assert!(unknown.len() < 500, "{unknown}");
    }

    #[test]
    fn what_is_known_is_read_as_ever_and_payloads_have_any_fields() {
        let written = json!({
            "input": {"inputs": [{"a": null}]}, "tags": ["a"], "delay": "1s", "deadline": 5, "priority": -1, "retry": {"x": 1},
            "external_id": null
        });
        let start = read::<StartRun>(&written).unwrap();
        assert_eq!(start, serde_json::from_value(written).unwrap());
        let rules = read::<QueueRules>(&json!({"rate": {"count": 1, "per": "2s"}, "concurrency": 3})).unwrap();
        assert_eq!((rules.rate.unwrap().per.ms, rules.concurrency), (2_000, Some(3)));
    }
}
