//! Times and durations for people.

use std::time::{SystemTime, UNIX_EPOCH};

pub fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// An RFC 3339 text as milliseconds.
pub fn ms(timestamp: &str) -> Option<i64> {
    timestamp.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_millisecond)
}

/// `320ms`, `4.2s`, `3m07s`, `2h05m`, `3d04h`.
pub fn span(ms: i64) -> String {
    let ms = ms.max(0);
    let s = ms / 1_000;
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{s}.{}s", ms % 1_000 / 100),
        60..3_600 => format!("{}m{:02}s", s / 60, s % 60),
        3_600..86_400 => format!("{}h{:02}m", s / 3_600, s % 3_600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3_600),
    }
}

/// From one timestamp to another, or to now.
pub fn between(from: Option<&str>, to: Option<&str>, now: i64) -> Option<String> {
    let from = ms(from?)?;
    let to = match to {
        Some(to) => ms(to)?,
        None => now,
    };
    Some(span(to - from))
}

pub fn ago(timestamp: &str, now: i64) -> String {
    match ms(timestamp) {
        Some(at) => format!("{} ago", span(now - at)),
        None => timestamp.to_owned(),
    }
}

/// The time of day, UTC.
pub fn clock(timestamp: &str) -> &str {
    timestamp.get(11..23).unwrap_or(timestamp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_as_exact_as_is_of_use() {
        for (ms, text) in [
            (0, "0ms"),
            (320, "320ms"),
            (4_250, "4.2s"),
            (187_000, "3m07s"),
            (7_500_000, "2h05m"),
            (273_600_000, "3d04h"),
            (-5, "0ms"),
        ] {
            assert_eq!(span(ms), text);
        }
    }

    #[test]
    fn a_clock_is_taken_out_of_a_timestamp() {
        assert_eq!(clock("2026-01-02T03:04:05.678Z"), "03:04:05.678");
        assert_eq!(
            between(Some("2026-01-02T03:04:05.678Z"), Some("2026-01-02T03:04:06.678Z"), 0).as_deref(),
            Some("1.0s")
        );
    }
}
