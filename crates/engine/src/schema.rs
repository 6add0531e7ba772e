//! JSON Schemas: what is wrong with one, and what is wrong with a value, found out within a budget.
//!
//! Whoever registers a flow brings the schemas, and whoever starts a run the values. So both are bounded: a schema by its
//! [`shape`], a check by a budget ([`metered`]) that grows with the value, and what is said of it by its length.

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

use metered::{Budget, Metered, Seen, Spent, within};
use shape::Shape;

use crate::config::{MAX_PAYLOAD_DEPTH, MAX_REPORT_CHECK_STEPS, MAX_START_CHECK_STEPS};

/// Problems of a value, or of a schema, that are told at once, and how long each is in bytes: they quote what they are
/// about.
const MAX_DETAILS: usize = 20;
const MAX_DETAIL_BYTES: usize = 300;

/// What a check may cost, in looks at the value: so much, and so much more for each byte of it. The same again for
/// matching texts with patterns. Below half a second for the largest payload.
const CHECK_UNITS: u64 = 1_000_000;
const CHECK_UNITS_A_BYTE: u64 = 4;
/// A check costs one more step for each so many bytes of the value.
const BYTES_A_STEP: u64 = 16;
/// What may be spent at once, on whatever thread: well below a millisecond.
const AT_ONCE_UNITS: u64 = 5_000;
/// And so many subschemas may be inside each other on that thread, whose stack is small.
const AT_ONCE_DEPTH: usize = 256;
/// What is spent to say what is wrong. Each of these may become an error in memory.
const TELLING_UNITS: u64 = 20_000;

/// The largest pattern that is taken, as it is in memory, and the largest that counts as a small one.
const PATTERN_BYTES: usize = 32 << 10;
const SMALL_PATTERN_BYTES: usize = 4 << 10;
/// What a byte of text costs if it is matched with a small pattern, or a large one.
const SMALL_PATTERN_UNITS: u64 = 8;
const LARGE_PATTERN_UNITS: u64 = 64;
/// What a byte of text costs if it is read because of a `format`.
const FORMAT_UNITS: u64 = 1;

/// A schema, ready to check values with.
#[derive(Debug)]
pub(crate) struct Schema {
    validator: Result<Validator<Metered>, String>,
    shape: Shape,
    pattern_units: u64,
}

/// What is wrong with a value, in a few words each.
pub(crate) type Details = Vec<String>;

/// It cannot be said within the budget.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooCostly;

/// Why a value is not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// It does not match its schema, or takes too much to check by itself.
    Invalid(Details),
    /// The checks before it have used up what all of them share. Says which limit that is.
    Exhausted(String),
}

/// What all checks of one report, or of one call, may cost together. Each look at a value is a step, and so is each
/// [`BYTES_A_STEP`] bytes of it. The largest payload can be checked within it, whatever its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    limit: u64,
    left: u64,
    /// What shares it, for the message.
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

    /// What was spent of it.
    pub fn spent(&self) -> u64 {
        self.limit - self.left
    }

    fn spend(&mut self, steps: u64) {
        self.left = self.left.saturating_sub(steps);
    }

    fn exhausted(&self) -> Mismatch {
        let Allowance { limit, of, .. } = self;
        Mismatch::Exhausted(format!(
            "checking this {of} against JSON Schemas takes more than {limit} steps, the limit for one {of}: split it, or make \
             the payloads smaller or the schemas simpler"
        ))
    }
}

impl Schema {
    /// Of a flow that is stored. A schema that would be refused today, because it was registered before there were
    /// limits, refuses every value and says why.
    pub fn stored(schema: &Value) -> Schema {
        match compile(schema) {
            Ok(schema) => schema,
            Err(fault) => {
                let why = format!(
                    "the schema of the flow is not taken any more, register the flow with another one: {}",
                    fault.message
                );
                Schema { validator: Err(why), shape: Shape::default(), pattern_units: 0 }
            }
        }
    }

    /// What is wrong with a value, if that is found out in a moment.
    pub fn check_at_once(&self, value: &Value, allowance: &mut Allowance) -> Result<Result<(), Mismatch>, TooCostly> {
        let levels = depth(value, usize::from(MAX_PAYLOAD_DEPTH) + 1) + 1;
        if self.shape.chain.saturating_mul(levels) > AT_ONCE_DEPTH {
            return Err(TooCostly);
        }
        self.check_within(value, AT_ONCE_UNITS, allowance)
    }

    /// What is wrong with a value of so many bytes, on a thread with the stack for it.
    pub fn check(&self, value: &Value, bytes: usize, allowance: &mut Allowance) -> Result<(), Mismatch> {
        allowance.spend(bytes as u64 / BYTES_A_STEP);
        let units = CHECK_UNITS + CHECK_UNITS_A_BYTE * bytes as u64;
        let left = allowance.left;
        self.check_within(value, units, allowance).unwrap_or_else(|TooCostly| {
            if left < units {
                return Err(allowance.exhausted());
            }
            let unknown = "it takes too much to check it against its schema: make it smaller, or the schema simpler";
            Err(Mismatch::Invalid(vec![unknown.to_owned()]))
        })
    }

    /// About how much memory it takes, beyond its text.
    pub fn bytes(&self) -> usize {
        // With what the matching of each pattern builds up.
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
        let (verdict, cost) = within(self.budget(units, units), || validator.is_valid(Seen(value)));
        allowance.spend(cost);
        match verdict {
            Ok(true) => Ok(Ok(())),
            Ok(false) => invalid(self.tell(validator, value, units, allowance)),
            Err(Spent) => Err(TooCostly),
        }
    }

    /// All that is wrong, or what is found first, or only that something is: whatever can be said at a bounded cost.
    fn tell(
        &self,
        validator: &Validator<Metered>,
        value: &Value,
        text_units: u64,
        allowance: &mut Allowance,
    ) -> Details {
        // A text that does not match is matched once more to say so.
        let budget = self.budget(TELLING_UNITS, text_units.saturating_mul(2));
        let (all, cost) =
            within(budget, || validator.iter_errors(Seen(value)).take(MAX_DETAILS).map(|error| told(&error)).collect());
        allowance.spend(cost);
        if let Ok(all) = all {
            return all;
        }
        let (first, cost) = within(budget, || validator.validate(Seen(value)).err().map(|error| vec![told(&error)]));
        allowance.spend(cost);
        match first {
            Ok(Some(first)) => first,
            _ => vec!["it does not match its schema, in a way that takes too much to say".to_owned()],
        }
    }

    fn budget(&self, units: u64, text_units: u64) -> Budget {
        let names = self.shape.name_patterns as u64;
        // Formats read a text too.
        let text_byte = self.pattern_units.max(FORMAT_UNITS);
        Budget { units, text_units, text_byte, name_byte: names * self.pattern_units }
    }
}

/// Everything that is wrong with a JSON Schema. What it could only be refused for when it is put to use, such as a
/// reference to nowhere, is told once it has the right shape.
pub(crate) fn faults(schema: &Value) -> Vec<SchemaFault> {
    // The shape first: what comes after it takes time and stack by the shape.
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
    // Without look-around and back-references the time of a match is linear in the text.
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
                bounded(format_args!("it refers to {uri}, and nothing is fetched from elsewhere"))
            }
            _ => bounded(format_args!("{error}")),
        },
    }
}

/// A key, from the way it is written in a JSON Pointer.
fn unescaped(segment: &str) -> String {
    segment.replace("~1", "/").replace("~0", "~")
}

fn told(error: &ValidationError<'_>) -> String {
    match error.instance_path().as_str() {
        "" => bounded(format_args!("{error}")),
        path => bounded(format_args!("{path}: {error}")),
    }
}

/// A text that is cut where it gets long; what comes after that is not even written down.
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

/// How deep a value nests, counted up to a limit.
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
