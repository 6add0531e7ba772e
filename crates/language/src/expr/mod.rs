//! Expressions and templates: CEL text, parsed once, evaluated over borrowed payloads.
//!
//! An evaluation is pure and bounded: the same names give the same result, no matter which payloads were already
//! loaded, and it ends within its [`Fuel`]. All payloads that it needs but are not loaded are reported at once
//! ([`Stop::Need`]).

mod ast;
mod charge;
mod eval;
mod fuel;
mod functions;
mod halt;
mod operators;
mod parse;
mod pattern;
mod result;
mod scan;
mod template;
#[cfg(test)]
mod tests;
mod text;
mod value;

use std::fmt;
use std::sync::Arc;

use crate::data::{Data, ValueRef};
use crate::ids::{Millis, ValueId};

pub use fuel::{Cost, EVALUATION, Fuel};
pub use template::{Template, TemplateError};
pub use text::Text;
pub use value::{Table, Val};

use ast::Node;
use eval::Eval;
use halt::{Halt, Res};

/// The most an expression or a template may write into its own result; referenced payloads do not count.
pub const MAX_PAYLOAD_BYTES: usize = 2 << 20;

/// The names of all functions, including those that do not evaluate all their arguments.
pub fn functions() -> impl Iterator<Item = &'static str> {
    functions::names()
}

/// A parsed expression. Two are equal if their source is.
#[derive(Clone)]
pub struct Expr(Arc<ParsedExpr>);

struct ParsedExpr {
    source: Box<str>,
    ast: Node,
    reads: Vec<Read>,
}

/// A name that an expression reads: `steps.load.output.total` has the root `steps`, the key `load` and the field
/// `output`. Key and field are set only if they are constants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    pub root: String,
    pub key: Option<String>,
    pub field: Option<String>,
    /// Byte offset of the root in the text.
    pub offset: usize,
}

/// A syntax error in an expression.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("column {}: {message}", .offset + 1)]
pub struct ExprError {
    pub message: String,
    /// Byte offset in the text.
    pub offset: usize,
}

/// How an evaluation reads the state of a run. `steps`, `events`, `gates` and `run` are tables, whose entries are
/// looked up one at a time; every other name is a root.
pub trait Names<'a> {
    fn root(&self, name: &str) -> Option<Val<'a>>;
    fn entry(&self, table: Table, key: &str) -> Option<Val<'a>>;
    /// The stored payload, if it is loaded.
    fn value(&self, id: ValueId) -> Option<&'a Data>;
    /// The value of `now()`: the time of the transition.
    fn now(&self) -> Millis;
}

/// Why an evaluation has no result.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Stop {
    /// Load these stored payloads and evaluate again.
    #[error("{} stored values are not loaded", .0.len())]
    Need(Vec<ValueRef>),
    /// It takes more steps than the [`Fuel`] allows inline; without the inline limit it may succeed.
    #[error("the evaluation takes too many steps to run inline")]
    Heavy,
    #[error(transparent)]
    Failed(#[from] EvalError),
}

/// An expression that failed at run time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct EvalError {
    /// The expression; empty if the template as a whole failed.
    pub text: String,
    /// Byte offset in the expression.
    pub offset: usize,
    pub message: String,
}

impl fmt::Display for EvalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.text.is_empty() {
            return f.write_str(&self.message);
        }
        let before = self.text.get(..self.offset).unwrap_or(&self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or(before).chars().count() + 1;
        let shown = halt::shorten(&self.text);
        match line {
            1 => write!(f, "`{shown}` failed at column {column}: {}", self.message),
            _ => write!(f, "`{shown}` failed at line {line}, column {column}: {}", self.message),
        }
    }
}

impl Expr {
    pub fn parse(text: &str) -> Result<Expr, ExprError> {
        let (ast, reads) = parse::parse(text)?;
        Ok(Expr(Arc::new(ParsedExpr { source: text.into(), ast, reads })))
    }

    pub fn source(&self) -> &str {
        &self.0.source
    }

    /// In source order.
    pub fn reads(&self) -> &[Read] {
        &self.0.reads
    }

    pub fn eval<'a>(&'a self, names: &dyn Names<'a>, fuel: &mut Fuel) -> Result<Val<'a>, Stop> {
        let mut eval = Eval::new(names, fuel);
        eval.node(&self.0.ast).map_err(|halt| eval.stop(halt, self.source()))
    }

    /// Evaluates a condition. Any result other than `true` and `false` is an error.
    pub fn test(&self, names: &dyn Names<'_>, fuel: &mut Fuel) -> Result<bool, Stop> {
        self.finish(names, fuel, |eval, value| match eval.force(value)? {
            Val::Bool(truth) => Ok(truth),
            other => Err(Halt::fault(format!("a condition must be true or false, found {}", other.kind()))),
        })
    }

    /// The result as a payload. Payloads that are only passed through are neither loaded nor copied.
    pub fn data(&self, names: &dyn Names<'_>, fuel: &mut Fuel) -> Result<Data, Stop> {
        self.finish(names, fuel, |eval, value| eval.data(value))
    }

    /// A point in time: a timestamp, an RFC 3339 string, or milliseconds since the epoch.
    pub fn time(&self, names: &dyn Names<'_>, fuel: &mut Fuel) -> Result<Millis, Stop> {
        self.finish(names, fuel, |eval, value| match eval.force(value)? {
            Val::Time(ms) => Ok(ms),
            Val::Int(ms) => value::moment(ms),
            Val::Str(text) => value::parse_time(&text),
            other => Err(Halt::fault(format!(
                "must be a time: a timestamp, an RFC 3339 text or milliseconds since 1970, found {}",
                other.kind()
            ))),
        })
    }

    /// A list whose elements may be unloaded: a JSON array or an aggregate.
    pub fn list(&self, names: &dyn Names<'_>, fuel: &mut Fuel) -> Result<Data, Stop> {
        self.finish(names, fuel, |eval, value| {
            let value = eval.force(value)?;
            match value.shape() {
                value::Shape::Items(_) => eval.data(value),
                _ => Err(Halt::fault(format!("must be a list, found {}", value.kind()))),
            }
        })
    }

    fn finish<T>(
        &self,
        names: &dyn Names<'_>,
        fuel: &mut Fuel,
        finish: impl for<'s> FnOnce(&mut Eval<'s, '_>, Val<'s>) -> Res<T>,
    ) -> Result<T, Stop> {
        let names = Within(names);
        let mut eval = Eval::new(&names, fuel);
        let value = eval.node(&self.0.ast);
        value.and_then(|value| finish(&mut eval, value)).map_err(|halt| eval.stop(halt, self.source()))
    }

    fn ast(&self) -> &Node {
        &self.0.ast
    }
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Expr").field(&self.source()).finish()
    }
}

impl PartialEq for Expr {
    fn eq(&self, other: &Expr) -> bool {
        self.source() == other.source()
    }
}

impl Eq for Expr {}

/// Names with a shorter lifetime, so that the caller's state and its expressions need not live equally long.
pub(super) struct Within<'n, 'a>(&'n dyn Names<'a>);

impl<'s, 'a: 's> Names<'s> for Within<'_, 'a> {
    fn root(&self, name: &str) -> Option<Val<'s>> {
        self.0.root(name)
    }

    fn entry(&self, table: Table, key: &str) -> Option<Val<'s>> {
        self.0.entry(table, key)
    }

    fn value(&self, id: ValueId) -> Option<&'s Data> {
        self.0.value(id)
    }

    fn now(&self) -> Millis {
        self.0.now()
    }
}
