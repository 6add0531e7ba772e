//! Sizes in bytes, as people write them: `256MiB`, `1GiB`, or a number of bytes.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};

const UNITS: [(&str, usize); 7] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("B", 1),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub bytes: usize,
}

impl Size {
    pub(super) fn from_text(text: &str) -> Result<Size, String> {
        let wrong =
            || format!("\"{text}\" is not a size: expected a number of bytes, or one with a unit, such as 256MiB");
        let written = text.trim();
        let unit = UNITS.iter().find_map(|(unit, factor)| Some((strip_unit(written, unit)?, *factor)));
        let (number, factor) = unit.unwrap_or((written, 1));
        let number: usize = number.trim().parse().map_err(|_| wrong())?;
        number.checked_mul(factor).map(|bytes| Size { bytes }).ok_or_else(wrong)
    }
}

fn strip_unit<'a>(text: &'a str, unit: &str) -> Option<&'a str> {
    let (number, end) = text.split_at_checked(text.len().checked_sub(unit.len())?)?;
    end.eq_ignore_ascii_case(unit).then_some(number)
}

impl<'de> de::Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Size, D::Error> {
        struct Written;
        impl Visitor<'_> for Written {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size, such as \"256MiB\" or a number of bytes")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                Size::from_text(text).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
                usize::try_from(bytes).map(|bytes| Size { bytes }).map_err(E::custom)
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Size, E> {
                usize::try_from(bytes).map(|bytes| Size { bytes }).map_err(E::custom)
            }
        }
        from.deserialize_any(Written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_numbers_with_or_without_a_unit() {
        let bytes = |text: &str| Size::from_text(text).map(|size| size.bytes).ok();
        for (text, expected) in [
            ("0", 0),
            ("4096", 4096),
            ("512B", 512),
            ("64KiB", 64 << 10),
            ("256 MiB", 256 << 20),
            ("1gib", 1 << 30),
            ("2MB", 2_000_000),
        ] {
            assert_eq!(bytes(text), Some(expected), "{text}");
        }
        for text in ["", "MiB", "-1", "1.5GiB", "12 elephants", "99999999999999GiB", "1é"] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }
}
