//! Validates JSON Schemas, and values against them, within a budget.
//!
//! Clients supply both schemas and values, so both are bounded: a schema by its [`shape`], a check by a budget
//! ([`metered`]) that grows with the value, and error messages by their length.

mod metered;
mod shape;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

use std::fmt::{self, Write as _};

use eddyline_language::definition::SchemaFault;
use jsonschema::error::ValidationErrorKind;
use jsonschema::{PatternOptions, ReferencingError, ValidationError, Validator};
use serde_json::Value;

use metered::{Budget, Metered, MeteredValue, Spent, within};
use shape::Shape;

use crate::config::{MAX_PAYLOAD_DEPTH, MAX_REPORT_CHECK_STEPS, MAX_START_CHECK_STEPS};

/// The most problems of a value or schema that are listed, and the most bytes of each: they quote the value.
const MAX_DETAILS: usize = 20;
const MAX_DETAIL_BYTES: usize = 300;

/// The budget of a check, in reads of the value: a fixed part, and more for each byte of the value. Matching texts with
/// patterns has the same budget again. Takes less than half a second for the largest payload.
const CHECK_UNITS: u64 = 1_000_000;
const CHECK_UNITS_A_BYTE: u64 = 4;
/// A check costs one more step for each of this many bytes of the value.
const BYTES_A_STEP: u64 = 16;
/// The budget of a check on the calling thread: well below a millisecond.
const INLINE_UNITS: u64 = 5_000;
/// How deep subschemas may nest on that thread, whose stack is small.
const INLINE_DEPTH: usize = 256;
/// The budget for listing errors. Each unit may become an error in memory.
const DESCRIBE_UNITS: u64 = 20_000;

/// The largest pattern that is accepted, by its size in memory, and the largest that counts as small.
const PATTERN_BYTES: usize = 32 << 10;
const SMALL_PATTERN_BYTES: usize = 4 << 10;
/// The cost of matching a byte of text with a small pattern, and with a large one.
const SMALL_PATTERN_UNITS: u64 = 8;
const LARGE_PATTERN_UNITS: u64 = 64;
/// The cost of reading a byte of text for a `format`.
const FORMAT_UNITS: u64 = 1;

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct Schema {
    validator: Result<Validator<Metered>, String>,
    shape: Shape,
    pattern_units: u64,
}

/// The problems of a value, one line each.
pub(crate) type Details = Vec<String>;

/// The check exceeds the budget.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooCostly;

/// Why a value is rejected.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// It does not match its schema, or its own check exceeds the budget.
    Invalid(Details),
    /// Earlier checks have used up the shared allowance. The message names the limit.
    Exhausted(String),
}

/// The budget that all checks of one report or call share. Each read of a value is a step, and so are each
/// [`BYTES_A_STEP`] bytes of it. It suffices for the largest payload with any schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    limit: u64,
    left: u64,
    /// What the limit applies to, for the message.
    of: &'static str,
}

impl Allowance {
    /// For the events of one report.
    pub fn of_report() -> Allowance {
        Allowance { limit: MAX_REPORT_CHECK_STEPS, left: MAX_REPORT_CHECK_STEPS, of: "report" }
    }

    /// For the inputs of all runs that one call starts.
    pub fn of_starts() -> Allowance {
        Allowance { limit: MAX_START_CHECK_STEPS, left: MAX_START_CHECK_STEPS, of: "call" }
    }

    /// The steps spent so far.
    pub fn spent(&self) -> u64 {
        self.limit - self.left
    }

    fn spend(&mut self, steps: u64) {
        self.left = self.left.saturating_sub(steps);
    }

    fn exhausted(&self) -> Mismatch {
        let Allowance { limit, of, .. } = self;
        Mismatch::Exhausted(format!(
            "checking this {of} against JSON Schemas takes more than {limit} steps, the limit for one {of}: split it, \
             or make the payloads smaller or the schemas simpler"
        ))
    }
}

impl Schema {
    /// Compiles the schema of a stored flow. A schema that is no longer accepted, because it was registered before
    /// there were limits, rejects every value and says why.
    pub fn stored(schema: &Value) -> Schema {
        match compile(schema) {
            Ok(schema) => schema,
            Err(fault) => {
                let why = format!(
                    "the flow's schema is no longer accepted; register the flow with another one: {}",
                    fault.message
                );
                Schema { validator: Err(why), shape: Shape::default(), pattern_units: 0 }
            }
        }
    }

    /// Checks a value on the calling thread, if that is quick.
    pub fn check_at_once(&self, value: &Value, allowance: &mut Allowance) -> Result<Result<(), Mismatch>, TooCostly> {
        let levels = depth(value, usize::from(MAX_PAYLOAD_DEPTH) + 1) + 1;
        if self.shape.chain.saturating_mul(levels) > INLINE_DEPTH {
            return Err(TooCostly);
        }
        self.check_within(value, INLINE_UNITS, allowance)
    }

    /// Checks a value of the given size, on a thread with a large stack.
    pub fn check(&self, value: &Value, bytes: usize, allowance: &mut Allowance) -> Result<(), Mismatch> {
        allowance.spend(bytes as u64 / BYTES_A_STEP);
        let units = CHECK_UNITS + CHECK_UNITS_A_BYTE * bytes as u64;
        let left = allowance.left;
        self.check_within(value, units, allowance).unwrap_or_else(|TooCostly| {
            if left < units {
                return Err(allowance.exhausted());
            }
            let over_budget = "it takes too long to check against its schema; make it smaller or the schema simpler";
            Err(Mismatch::Invalid(vec![over_budget.to_owned()]))
        })
    }

    /// Its estimated memory, beyond its text.
    pub fn bytes(&self) -> usize {
        // Twice, for the cache that matching each pattern builds up.
        self.shape.patterns * 2 * PATTERN_BYTES
    }

    fn check_within(
        &self,
        value: &Value,
        units: u64,
        allowance: &mut Allowance,
    ) -> Result<Result<(), Mismatch>, TooCostly> {
        let invalid = |details| Ok(Err(Mismatch::Invalid(details)));
        let validator = match &self.validator {
            Ok(validator) => validator,
            Err(refused) => return invalid(vec![refused.clone()]),
        };
        if depth(value, usize::from(MAX_PAYLOAD_DEPTH) + 1) > usize::from(MAX_PAYLOAD_DEPTH) {
            return invalid(vec![format!("it is nested more than {MAX_PAYLOAD_DEPTH} deep")]);
        }
        let units = units.min(allowance.left);
        let (verdict, cost) = within(self.budget(units, units), || validator.is_valid(MeteredValue(value)));
        allowance.spend(cost);
        match verdict {
            Ok(true) => Ok(Ok(())),
            Ok(false) => invalid(self.errors(validator, value, units, allowance)),
            Err(Spent) => Err(TooCostly),
        }
    }

    /// All errors of a value, or only the first, or none in particular: whatever the budget allows.
    fn errors(
        &self,
        validator: &Validator<Metered>,
        value: &Value,
        text_units: u64,
        allowance: &mut Allowance,
    ) -> Details {
        // A text that does not match is matched once more for its error.
        let budget = self.budget(DESCRIBE_UNITS, text_units.saturating_mul(2));
        let (all, cost) = within(budget, || {
            validator.iter_errors(MeteredValue(value)).take(MAX_DETAILS).map(|error| describe(&error)).collect()
        });
        allowance.spend(cost);
        if let Ok(all) = all {
            return all;
        }
        let (first, cost) =
            within(budget, || validator.validate(MeteredValue(value)).err().map(|error| vec![describe(&error)]));
        allowance.spend(cost);
        match first {
            Ok(Some(first)) => first,
            _ => vec!["it does not match its schema; listing the errors takes too long".to_owned()],
        }
    }

    fn budget(&self, units: u64, text_units: u64) -> Budget {
        let names = self.shape.name_patterns as u64;
        // Formats read texts too.
        let text_byte = self.pattern_units.max(FORMAT_UNITS);
        Budget { units, text_units, text_byte, name_byte: names * self.pattern_units }
    }
}

/// All faults of a JSON Schema. Faults that only compiling finds, such as a dangling reference, are reported once the
/// schema conforms to its meta-schema.
pub(crate) fn faults(schema: &Value) -> Vec<SchemaFault> {
    // The shape first: it bounds the time and stack of the other checks.
    let shape = match shape::shape_of(schema) {
        Ok(shape) => shape,
        Err(fault) => return vec![fault],
    };
    let meta = match jsonschema::meta::validator_for(schema) {
        Ok(meta) => meta,
        Err(error) => return vec![fault(&error)],
    };
    let faults: Vec<SchemaFault> = meta.iter_errors(schema).take(MAX_DETAILS).map(|error| fault(&error)).collect();
    match compile_shaped(schema, shape) {
        Err(fault) if faults.is_empty() => vec![fault],
        _ => faults,
    }
}

fn compile(schema: &Value) -> Result<Schema, SchemaFault> {
    compile_shaped(schema, shape::shape_of(schema)?)
}

fn compile_shaped(schema: &Value, shape: Shape) -> Result<Schema, SchemaFault> {
    // This regex engine has no look-around and no back-references, so matching is linear in the text.
    let build = |pattern_bytes: usize| {
        let patterns = PatternOptions::regex().size_limit(pattern_bytes).dfa_size_limit(PATTERN_BYTES);
        jsonschema::options_for::<Metered>().with_pattern_options(patterns).build(schema)
    };
    let (validator, pattern_units) = match build(SMALL_PATTERN_BYTES) {
        Ok(validator) => (validator, SMALL_PATTERN_UNITS),
        Err(_) => (build(PATTERN_BYTES).map_err(|error| fault(&error))?, LARGE_PATTERN_UNITS),
    };
    if let Some(fault) = shape.unfollowed {
        return Err(fault);
    }
    let pattern_units = if shape.patterns == 0 { 0 } else { pattern_units };
    Ok(Schema { validator: Ok(validator), shape, pattern_units })
}

fn fault(error: &ValidationError<'_>) -> SchemaFault {
    SchemaFault {
        path: error.instance_path().as_str().split('/').skip(1).map(unescaped).collect(),
        message: match error.kind() {
            ValidationErrorKind::Referencing(ReferencingError::Unretrievable { uri, .. }) => {
                bounded(format_args!("it refers to {uri}; remote schemas are not fetched"))
            }
            _ => bounded(format_args!("{error}")),
        },
    }
}

/// Unescapes a segment of a JSON Pointer.
fn unescaped(segment: &str) -> String {
    segment.replace("~1", "/").replace("~0", "~")
}

fn describe(error: &ValidationError<'_>) -> String {
    match error.instance_path().as_str() {
        "" => bounded(format_args!("{error}")),
        path => bounded(format_args!("{path}: {error}")),
    }
}

/// Formats a text up to [`MAX_DETAIL_BYTES`]; the rest is not even formatted.
fn bounded(text: fmt::Arguments<'_>) -> String {
    struct Bounded(String);
    impl fmt::Write for Bounded {
        fn write_str(&mut self, more: &str) -> fmt::Result {
            let room = MAX_DETAIL_BYTES.saturating_sub(self.0.len());
            let fits = more.floor_char_boundary(room);
            self.0.push_str(&more[..fits]);
            if fits < more.len() { Err(fmt::Error) } else { Ok(()) }
        }
    }
    let mut written = Bounded(String::new());
    if written.write_fmt(text).is_err() {
        written.0.push('…');
    }
    written.0
}

/// How deep a value nests, counted up to `most`.
fn depth(value: &Value, most: usize) -> usize {
    if most == 0 {
        return 0;
    }
    let inside = |value: &Value| depth(value, most - 1);
    match value {
        Value::Array(items) => 1 + items.iter().map(inside).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(inside).max().unwrap_or(0),
        _ => 0,
    }
}
