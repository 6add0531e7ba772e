//! Times on the wire: RFC 3339 in UTC with milliseconds.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY_MS: u64 = 24 * 60 * 60 * 1_000;
/// The end of the year 9999, the latest time that a server accepts.
const MAX_MS: u64 = 253_402_300_799_999;

/// Milliseconds since 1970 of `2026-01-02T03:04:05.678Z`.
pub(crate) fn millis(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.splitn(3, '-').map(str::parse::<u64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let (whole, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut whole = whole.splitn(3, ':').map(str::parse::<u64>);
    let (hour, minute, second) = (whole.next()?.ok()?, whole.next()?.ok()?, whole.next()?.ok()?);
    let fraction = format!("{fraction:0<3}").get(..3)?.parse::<u64>().ok()?;
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years start in March, so that the leap day is the last day.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000 + fraction)
}

/// The time as a server writes it. Times outside 1970 to 9999 become the nearest in that range.
pub(crate) fn iso(at: SystemTime) -> String {
    let ms = at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(MAX_MS));
    let ms = ms.min(MAX_MS);
    let (days, of_day) = (ms / DAY_MS + 719_468, ms % DAY_MS);
    // Eras of 400 years; years start in March.
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year_of_era, if month < 10 { month + 3 } else { month - 9 });
    let year = if month <= 2 { year + 1 } else { year };
    let (hour, minute) = (of_day / 3_600_000, of_day / 60_000 % 60);
    let (second, milli) = (of_day / 1_000 % 60, of_day % 1_000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

pub(crate) fn from_ms(ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms.min(MAX_MS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        for (text, ms) in [
            ("1970-01-01T00:00:00.000Z", 0),
            ("2000-02-29T12:00:00.500Z", 951_825_600_500),
            ("2026-01-02T03:04:05.678Z", 1_767_323_045_678),
            ("2026-12-31T23:59:59.000Z", 1_798_761_599_000),
            ("9999-12-31T23:59:59.999Z", MAX_MS),
        ] {
            assert_eq!(millis(text), Some(ms), "{text}");
            assert_eq!(iso(from_ms(ms)), text);
        }
        assert_eq!(millis("2026-12-31T23:59:59Z"), Some(1_798_761_599_000));
        for text in ["", "now", "2026-01-02", "2026-13-02T00:00:00Z", "2026-01-02T03:04:05.678"] {
            assert_eq!(millis(text), None, "{text}");
        }
    }
}
