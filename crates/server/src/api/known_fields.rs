//! JSON with fields that nobody reads is refused: whoever writes `idempotencyKey` means something by it. The names are those
//! that serde knows of the types that are read, at every depth; payloads, which are of any shape, are left alone.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::forward_to_deserialize_any;

/// Reads from another deserializer, and refuses fields that the type to be read does not have.
pub(crate) struct KnownFields<D>(pub D);

macro_rules! passed_on {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.0.$method(visitor)
        }
    )*};
}

/// What these read may have objects in it.
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

/// A value, and what is inside it. With `fields` it is an object that has no others.
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
        self.visitor.visit_seq(Items(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_map(Entries { entries, fields: self.fields })
    }
}

struct Items<A>(A);

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Items<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(Value(seed))
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
            Some(fields) => self.entries.next_key_seed(Key { inner: seed, fields }),
            None => self.entries.next_key_seed(seed),
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.entries.next_value_seed(Value(seed))
    }

    fn size_hint(&self) -> Option<usize> {
        self.entries.size_hint()
    }
}

struct Value<S>(S);

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Value<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, written: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(KnownFields(written))
    }
}

/// The name of a field on its way to the type that is read: its seed, then its deserializer, then its visitor.
struct Key<T> {
    inner: T,
    fields: &'static [&'static str],
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Key<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, written: D) -> Result<S::Value, D::Error> {
        self.inner.deserialize(Key { inner: written, fields: self.fields })
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Key<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_identifier(Key { inner: visitor, fields: self.fields })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Key<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<V::Value, E> {
        match self.fields.contains(&name) {
            true => self.inner.visit_str(name),
            false => Err(E::unknown_field(name, self.fields)),
        }
    }
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
            // The text has a place, which follows the message.
            (Err(one), Err(other)) => assert!(one.starts_with(other.as_str()), "{one} / {other}"),
            _ => panic!("{from_text:?} / {from_value:?}"),
        }
        from_value
    }

    #[test]
    fn a_field_that_a_type_does_not_have_is_refused_wherever_it_is() {
        let unknown = read::<StartRun>(&json!({"input": 1, "inputs": 2})).unwrap_err();
        assert!(unknown.starts_with("unknown field `inputs`, expected one of `flow`, `input`"), "{unknown}");
        let unknown = read::<Vec<StartRun>>(&json!([{}, {"tag": "x"}])).unwrap_err();
        assert!(unknown.starts_with("unknown field `tag`"), "{unknown}");
        let nested = json!({"error": {"message": "no", "knd": "x"}});
        let unknown = read::<FailStep>(&nested).unwrap_err();
        assert!(unknown.starts_with("unknown field `knd`"), "{unknown}");
        let unknown = read::<QueueRules>(&json!({"rate": {"count": 1, "brust": 1}})).unwrap_err();
        assert!(unknown.starts_with("unknown field `brust`"), "{unknown}");
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
