//! Durations, as people write them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
/// A hundred years. Anything longer is a mistake.
const MOST_MS: u64 = 100 * 366 * 86_400_000;

/// A duration: whole numbers with units (`"30s"`, `"1h30m"`), or a number of milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span {
    pub ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotASpan(String);

impl Span {
    pub const fn from_ms(ms: u64) -> Span {
        Span { ms }
    }

    /// For flags, the environment and query parameters: a bare number is in milliseconds, as in JSON.
    pub fn from_text(text: &str) -> Result<Span, NotASpan> {
        match text.trim().parse() {
            Ok(ms) if ms <= MOST_MS => Ok(Span { ms }),
            _ => text.parse(),
        }
    }
}

impl FromStr for Span {
    type Err = NotASpan;

    fn from_str(text: &str) -> Result<Span, NotASpan> {
        read(text).filter(|ms| *ms <= MOST_MS).map(Span::from_ms).ok_or_else(|| {
            let shown: String = text.chars().take(40).collect();
            NotASpan(shown)
        })
    }
}

fn read(text: &str) -> Option<u64> {
    let (mut rest, mut ms) = (text.trim(), 0u64);
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let count: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let (_, unit) = UNITS.iter().find(|(name, _)| *name == &rest[..letters])?;
        ms = ms.checked_add(count.checked_mul(*unit)?)?;
        rest = &rest[letters..];
    }
    Some(ms)
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.ms;
        if rest == 0 {
            return write!(f, "0s");
        }
        for (name, ms) in UNITS {
            if rest >= ms {
                write!(f, "{}{name}", rest / ms)?;
                rest %= ms;
            }
        }
        Ok(())
    }
}

impl fmt::Display for NotASpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\"{}\" is not a duration: expected whole numbers with units (d, h, m, s, ms), such as 30s or 1h30m, or \
             a number of milliseconds",
            self.0
        )
    }
}

impl std::error::Error for NotASpan {}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Span {
        Span { ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX) }
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Duration {
        Duration::from_millis(span.ms)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.ms)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Span, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a duration, such as \"30s\" or a number of milliseconds")]
        enum Written {
            Ms(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Ms(ms) if ms <= MOST_MS => Ok(Span { ms }),
            Written::Ms(ms) => Err(serde::de::Error::custom(NotASpan(ms.to_string()))),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_text_with_units_or_milliseconds() {
        for (text, ms) in [("30s", 30_000), ("1h30m", 5_400_000), ("250ms", 250), ("0s", 0), ("2d", 172_800_000)] {
            assert_eq!(text.parse(), Ok(Span::from_ms(ms)), "{text}");
            assert_eq!(Span::from_ms(ms).to_string(), text);
            assert_eq!(serde_json::from_value::<Span>(text.into()).ok(), Some(Span::from_ms(ms)));
        }
        assert_eq!(serde_json::from_str::<Span>("1500").ok(), Some(Span::from_ms(1_500)));
    }

    #[test]
    fn where_all_is_text_a_bare_number_is_of_milliseconds() {
        assert_eq!(Span::from_text("5000"), Ok(Span::from_ms(5_000)));
        assert_eq!(Span::from_text("5s"), Ok(Span::from_ms(5_000)));
        for text in ["", "-1", "1.5", "soon", "18446744073709551615", "99999999999999999999"] {
            assert!(Span::from_text(text).is_err(), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", " ", "30", "s", "30 s", "-1s", "1.5s", "1y", "99999999999999999999s", "400000d"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
        for json in ["-1", "1.5", "null", "[]", "18446744073709551615"] {
            assert!(serde_json::from_str::<Span>(json).is_err(), "{json}");
        }
    }
}
