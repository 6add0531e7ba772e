//! JSON as serde_json writes it, byte for byte, in two thirds of the instructions: rows are made of many short texts under
//! plain names, and those are copied here in one piece. What is rare goes the usual way.

use serde::ser::{self, Serialize, Serializer};
use serde_json::{Error, Result};

/// Appends a value to a text.
pub(super) fn write(out: &mut String, value: &(impl Serialize + ?Sized)) -> Result<()> {
    value.serialize(Json(out))
}

struct Json<'a>(&'a mut String);

/// Whether a text stands in JSON as it is, between quotes. Looks at eight bytes at a time.
fn is_plain(text: &[u8]) -> bool {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const HIGHS: u64 = ONES << 7;
    // Of each byte the highest bit, if the byte is 0. It may be set for others above one that is: there is one then.
    let zero = |bytes: u64| bytes.wrapping_sub(ONES) & !bytes & HIGHS;
    let special = |bytes: u64| {
        let control = bytes.wrapping_sub(ONES * 0x20) & !bytes & HIGHS;
        control | zero(bytes ^ (ONES * u64::from(b'"'))) | zero(bytes ^ (ONES * u64::from(b'\\')))
    };
    let Some(last) = text.last_chunk::<8>() else {
        return !text.iter().fold(false, |found, byte| found | (*byte < 0x20 || *byte == b'"' || *byte == b'\\'));
    };
    // What comes before the last eight and after the last whole eight is looked at with both, not byte by byte.
    let eights = text.as_chunks::<8>().0.iter().chain([last]);
    eights.fold(0, |found, eight| found | special(u64::from_ne_bytes(*eight))) == 0
}

/// The name of a field or of a variant, which is plain because it was written in a program.
fn name(out: &mut String, name: &'static str) {
    debug_assert!(is_plain(name.as_bytes()), "{name}");
    out.push('"');
    out.push_str(name);
    out.push('"');
}

fn quoted(out: &mut String, text: &str) -> Result<()> {
    if !is_plain(text.as_bytes()) {
        out.push_str(&serde_json::to_string(text)?);
        return Ok(());
    }
    out.reserve(text.len() + 2);
    out.push('"');
    out.push_str(text);
    out.push('"');
    Ok(())
}

fn number(out: &mut String, number: impl itoa::Integer) {
    out.push_str(itoa::Buffer::new().format(number));
}

/// A list or an object that has begun.
struct Many<'a> {
    out: &'a mut String,
    is_first: bool,
    /// What ends it.
    end: &'static str,
}

impl<'a> Many<'a> {
    fn begin(out: &'a mut String, begin: char, end: &'static str) -> Many<'a> {
        out.push(begin);
        Many { out, is_first: true, end }
    }

    /// An object with one field, and in it something with many.
    fn begin_variant(out: &'a mut String, variant: &'static str, begin: char, end: &'static str) -> Many<'a> {
        out.push('{');
        name(out, variant);
        out.push(':');
        Many::begin(out, begin, end)
    }

    fn next(&mut self) {
        if !std::mem::replace(&mut self.is_first, false) {
            self.out.push(',');
        }
    }

    fn item(&mut self, value: &(impl Serialize + ?Sized)) -> Result<()> {
        self.next();
        value.serialize(Json(self.out))
    }

    fn field(&mut self, of: &'static str, value: &(impl Serialize + ?Sized)) -> Result<()> {
        self.next();
        name(self.out, of);
        self.out.push(':');
        value.serialize(Json(self.out))
    }

    fn finish(self) -> Result<()> {
        self.out.push_str(self.end);
        Ok(())
    }
}

impl<'a> Serializer for Json<'a> {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Many<'a>;
    type SerializeTuple = Many<'a>;
    type SerializeTupleStruct = Many<'a>;
    type SerializeTupleVariant = Many<'a>;
    type SerializeMap = Many<'a>;
    type SerializeStruct = Many<'a>;
    type SerializeStructVariant = Many<'a>;

    fn serialize_bool(self, value: bool) -> Result<()> {
        self.0.push_str(if value { "true" } else { "false" });
        Ok(())
    }

    fn serialize_i8(self, value: i8) -> Result<()> {
        self.serialize_i64(value.into())
    }

    fn serialize_i16(self, value: i16) -> Result<()> {
        self.serialize_i64(value.into())
    }

    fn serialize_i32(self, value: i32) -> Result<()> {
        self.serialize_i64(value.into())
    }

    fn serialize_i64(self, value: i64) -> Result<()> {
        number(self.0, value);
        Ok(())
    }

    fn serialize_i128(self, value: i128) -> Result<()> {
        number(self.0, value);
        Ok(())
    }

    fn serialize_u8(self, value: u8) -> Result<()> {
        self.serialize_u64(value.into())
    }

    fn serialize_u16(self, value: u16) -> Result<()> {
        self.serialize_u64(value.into())
    }

    fn serialize_u32(self, value: u32) -> Result<()> {
        self.serialize_u64(value.into())
    }

    fn serialize_u64(self, value: u64) -> Result<()> {
        number(self.0, value);
        Ok(())
    }

    fn serialize_u128(self, value: u128) -> Result<()> {
        number(self.0, value);
        Ok(())
    }

    fn serialize_f32(self, value: f32) -> Result<()> {
        self.0.push_str(&serde_json::to_string(&value)?);
        Ok(())
    }

    fn serialize_f64(self, value: f64) -> Result<()> {
        self.0.push_str(&serde_json::to_string(&value)?);
        Ok(())
    }

    fn serialize_char(self, value: char) -> Result<()> {
        quoted(self.0, value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Result<()> {
        quoted(self.0, value)
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<()> {
        self.collect_seq(value)
    }

    fn serialize_none(self) -> Result<()> {
        self.serialize_unit()
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<()> {
        self.0.push_str("null");
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<()> {
        self.serialize_unit()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<()> {
        name(self.0, variant);
        Ok(())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _: &'static str, value: &T) -> Result<()> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<()> {
        let mut object = Many::begin(self.0, '{', "}");
        object.field(variant, value)?;
        object.finish()
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Many<'a>> {
        Ok(Many::begin(self.0, '[', "]"))
    }

    fn serialize_tuple(self, _: usize) -> Result<Many<'a>> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Many<'a>> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_variant(self, _: &'static str, _: u32, variant: &'static str, _: usize) -> Result<Many<'a>> {
        Ok(Many::begin_variant(self.0, variant, '[', "]}"))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Many<'a>> {
        Ok(Many::begin(self.0, '{', "}"))
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Many<'a>> {
        self.serialize_map(None)
    }

    fn serialize_struct_variant(self, _: &'static str, _: u32, variant: &'static str, _: usize) -> Result<Many<'a>> {
        Ok(Many::begin_variant(self.0, variant, '{', "}}"))
    }
}

impl ser::SerializeSeq for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.item(value)
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

impl ser::SerializeTuple for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.item(value)
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

impl ser::SerializeTupleStruct for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.item(value)
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

impl ser::SerializeTupleVariant for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.item(value)
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

impl ser::SerializeMap for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<()> {
        self.next();
        let from = self.out.len();
        key.serialize(Json(self.out))?;
        // A number or a truth value becomes a name; anything larger is none.
        match self.out.as_bytes().get(from) {
            Some(b'"') => Ok(()),
            Some(b'0'..=b'9' | b'-' | b't' | b'f') => {
                self.out.insert(from, '"');
                self.out.push('"');
                Ok(())
            }
            _ => Err(ser::Error::custom("key must be a string")),
        }
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<()> {
        self.out.push(':');
        value.serialize(Json(self.out))
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

impl ser::SerializeStruct for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<()> {
        self.field(key, value)
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

impl ser::SerializeStructVariant for Many<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, key: &'static str, value: &T) -> Result<()> {
        self.field(key, value)
    }

    fn end(self) -> Result<()> {
        self.finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Serialize;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;

    fn same(value: &(impl Serialize + ?Sized)) {
        let mut ours = "before".to_owned();
        write(&mut ours, value).unwrap();
        assert_eq!(ours, format!("before{}", serde_json::to_string(value).unwrap()));
    }

    #[derive(Serialize)]
    enum Shape {
        Unit,
        Newtype(u8),
        Tuple(i64, String),
        Struct { a: Option<f64>, b: char },
    }

    #[derive(Serialize)]
    struct Everything<'a> {
        #[serde(flatten)]
        inner: Inner,
        odd: (u128, i128, f32),
        shapes: Vec<Shape>,
        names: BTreeMap<i32, &'a str>,
        truths: BTreeMap<bool, ()>,
        nothing: (),
        #[serde(skip_serializing_if = "Option::is_none")]
        left_out: Option<u8>,
        bytes: &'a [u8],
        list: [u16; 0],
    }

    #[derive(Serialize)]
    #[serde(tag = "kind", content = "data")]
    enum Inner {
        Tagged { deep: Vec<Vec<i8>> },
    }

    #[test]
    fn whatever_serde_can_describe_is_written_as_serde_json_writes_it() {
        let shapes = vec![
            Shape::Unit,
            Shape::Newtype(u8::MAX),
            Shape::Tuple(i64::MIN, "ä\u{1}\"\\\n".to_owned()),
            Shape::Struct { a: Some(1e300), b: '"' },
            Shape::Struct { a: Some(f64::NAN), b: '🦀' },
            Shape::Struct { a: None, b: ' ' },
        ];
        same(&Everything {
            inner: Inner::Tagged { deep: vec![vec![], vec![-128, 127]] },
            odd: (u128::MAX, i128::MIN, f32::MIN_POSITIVE),
            shapes,
            names: BTreeMap::from([(-1, "minus one"), (7, "")]),
            truths: BTreeMap::from([(false, ()), (true, ())]),
            nothing: (),
            left_out: None,
            bytes: &[0, 255],
            list: [],
        });
    }

    #[test]
    fn a_name_that_is_no_text_is_refused() {
        for refused in [
            write(&mut String::new(), &BTreeMap::from([((), 1)])),
            write(&mut String::new(), &BTreeMap::from([(vec![1], 1)])),
        ] {
            assert_eq!(refused.unwrap_err().to_string(), "key must be a string");
        }
    }

    #[test]
    fn a_byte_that_needs_an_escape_is_seen_wherever_it_stands() {
        for byte in 0..=0x7f_u8 {
            for len in 1..20 {
                for at in 0..len {
                    let mut text = vec![b'x'; len];
                    text[at] = byte;
                    same(std::str::from_utf8(&text).unwrap());
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_and_any_json_is_written_the_same(text in any::<String>(), value in value()) {
            same(&text);
            same(&value);
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,20}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(".{0,12}", inner, 0..6).prop_map(|map| json!(map)),
            ]
        })
    }
}
