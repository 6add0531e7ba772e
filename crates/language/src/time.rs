//! Text forms of times and durations. Reads no clock: the current time comes in with the records.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::ids::Millis;

/// RFC 3339 in UTC with milliseconds: `2026-01-02T03:04:05.678Z`.
pub fn iso(at: Millis) -> String {
    Time::at(at).to_string()
}

/// A span as people write it: `1h30m`, `90ms`.
pub fn span(ms: Millis) -> String {
    let mut rest = ms;
    let mut text = String::new();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        if rest / size > 0 {
            text.push_str(&format!("{}{unit}", rest / size));
            rest %= size;
        }
    }
    if text.is_empty() { format!("{ms}ms") } else { text }
}

/// A point in time, serialised as RFC 3339.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(Timestamp);

impl Time {
    /// Times beyond the representable years (from a wait "for ever") are clamped.
    pub fn at(at: Millis) -> Time {
        let within = at.clamp(Timestamp::MIN.as_millisecond(), Timestamp::MAX.as_millisecond());
        Time(Timestamp::from_millisecond(within).unwrap_or(Timestamp::MAX))
    }

    pub fn millis(self) -> Millis {
        self.0.as_millisecond()
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.0)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Time, D::Error> {
        let text = String::deserialize(deserializer)?;
        let at: Timestamp = text.parse().map_err(|e| de::Error::custom(format!("{text:?} is not RFC 3339: {e}")))?;
        Ok(Time::at(at.as_millisecond()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_with_milliseconds_and_read_back() {
        assert_eq!(iso(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(iso(1_767_323_045_678), "2026-01-02T03:04:05.678Z");
        assert_eq!(iso(-1), "1969-12-31T23:59:59.999Z");
        assert_eq!(iso(Millis::MAX), "9999-12-30T22:00:00.999Z");
        for at in [0, -1, 1_767_323_045_678, Millis::MIN, Millis::MAX] {
            let json = serde_json::to_string(&Time::at(at)).unwrap();
            assert_eq!(serde_json::from_str::<Time>(&json).unwrap(), Time::at(at));
        }
    }
}
