//! Regular expressions of `matches`.

use regex_lite::{Regex, RegexBuilder};

use super::eval::Eval;
use super::halt::{Halt, Res, shorten};

const MAX_BYTES: usize = 256;
/// Size of a compiled pattern in bytes: repetitions in it multiply.
const MAX_SIZE: usize = 16 * 1024;
/// A compiled pattern of this size takes one step per byte of text.
const SIZE_A_STEP: usize = 128;

/// Validates a constant pattern.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    Pattern::new(pattern).map(drop)
}

/// A compiled pattern.
pub(super) struct Pattern {
    source: String,
    compiled: Regex,
    /// Its compiled size, rounded up to a power of two.
    size: usize,
}

impl Pattern {
    fn new(pattern: &str) -> Result<Pattern, String> {
        if pattern.len() > MAX_BYTES {
            return Err(format!("the pattern is longer than {MAX_BYTES} bytes"));
        }
        let mut size = SIZE_A_STEP;
        loop {
            match RegexBuilder::new(pattern).size_limit(size).build() {
                Ok(compiled) => return Ok(Pattern { source: pattern.to_owned(), compiled, size }),
                Err(_) if size < MAX_SIZE => size *= 2,
                Err(error) => return Err(format!("`{}` is not a pattern: {error}", shorten(pattern))),
            }
        }
    }
}

pub(super) fn matches(eval: &mut Eval<'_, '_>, text: &str, pattern: &str) -> Res<bool> {
    if eval.pattern.as_ref().is_none_or(|last| last.source != pattern) {
        eval.spend(500 + pattern.len().saturating_mul(8))?;
        let pattern = Pattern::new(pattern).map_err(Halt::fault)?;
        eval.spend(pattern.size / 16)?;
        eval.hold(pattern.size * 4)?;
        eval.pattern = Some(pattern);
    }
    let size = eval.pattern.as_ref().map_or(0, |pattern| pattern.size);
    // A match tries each state of the pattern at each byte of the text.
    eval.spend((1 + text.len()).saturating_mul(size / SIZE_A_STEP))?;
    Ok(eval.pattern.as_ref().is_some_and(|pattern| pattern.compiled.is_match(text)))
}
