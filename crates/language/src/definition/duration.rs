//! `"30s"`, `"1h30m"`.

use super::source::shorten;
use crate::ids::Millis;

/// Ten years: anything longer is a mistake, and sums of a few of these cannot overflow.
pub const MAX_DURATION_MS: Millis = 3_650 * 24 * 60 * 60 * 1_000;

const UNITS: [(&str, Millis); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

const KNOWN: &str = "d, h, m, s, ms";

/// Parses a duration: numbers with `d`, `h`, `m`, `s` or `ms`, each unit at most once and the largest first. The error
/// says what is wrong.
pub fn duration(text: &str) -> Result<Millis, String> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err("it is empty".into());
    }
    let mut total: Millis = 0;
    let mut last = None;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let letters = rest[digits..].bytes().take_while(u8::is_ascii_alphabetic).count();
        let (number, unit) = (&rest[..digits], &rest[digits..digits + letters]);
        rest = &rest[digits + letters..];
        if digits == 0 || (letters == 0 && !rest.is_empty()) {
            return Err(format!("expected whole numbers with units ({KNOWN}), such as 30s or 1h30m"));
        }
        if letters == 0 {
            return Err(format!("the unit is missing ({KNOWN})"));
        }
        let Some(at) = UNITS.iter().position(|(name, _)| *name == unit) else {
            return Err(format!("the unit `{}` is not one of {KNOWN}", shorten(unit)));
        };
        if last.replace(at).is_some_and(|last| last >= at) {
            return Err("write units from largest to smallest, each at most once".into());
        }
        let part = number.parse::<Millis>().ok().and_then(|number| number.checked_mul(UNITS[at].1));
        total = part.and_then(|part| total.checked_add(part)).filter(|ms| *ms <= MAX_DURATION_MS).ok_or(TOO_LONG)?;
    }
    Ok(total)
}

pub(super) const TOO_LONG: &str = "it is more than ten years (3650d)";
