//! Stricter deserialisation: objects are JSON objects and enum values are strings. By default serde also accepts a list
//! of field values in order for an object, and an object with one field for an enum value.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// An optional object.
pub(crate) fn object<'de, D, T>(written: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let object: Option<Object<T>> = Option::deserialize(written)?;
    Ok(object.map(|Object(read)| read))
}

/// A list of objects; null is an empty list.
pub(crate) fn objects<'de, D, T>(written: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let objects: Option<Vec<Object<T>>> = Option::deserialize(written)?;
    Ok(objects.unwrap_or_default().into_iter().map(|Object(read)| read).collect())
}

/// A list of enum values; null is an empty list.
pub(crate) fn words<'de, D, T>(written: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let texts: Option<Vec<String>> = Option::deserialize(written)?;
    texts.unwrap_or_default().into_iter().map(|text| T::deserialize(text.into_deserializer())).collect()
}

struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(written: D) -> Result<Object<T>, D::Error> {
        written.deserialize_map(Fields(PhantomData)).map(Object)
    }
}

struct Fields<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
        T::deserialize(MapAccessDeserializer::new(fields))
    }
}
