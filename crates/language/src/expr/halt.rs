//! How an evaluation ends early, and how missing payloads are collected first.

use std::borrow::Cow;
use std::mem;

use super::value::Table;
use super::{EvalError, Stop};
use crate::data::ValueRef;

pub(super) type Res<T> = Result<T, Halt>;

#[derive(Debug)]
pub(super) enum Halt {
    Need(Vec<ValueRef>),
    /// More steps than the inline limit.
    Heavy,
    Fault(Box<Fault>),
}

#[derive(Debug)]
pub(super) struct Fault {
    at: Option<u32>,
    message: String,
    what: What,
    /// The number of the failed field lookup, so that a hint can be added if the fault is shown.
    missed: Option<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    Wrong,
    /// Something is absent: `default` and `has` handle this.
    Absent,
    /// The budget is spent: nothing can handle this.
    Spent,
}

impl Halt {
    pub fn fault(message: impl Into<String>) -> Halt {
        Halt::new(message.into(), What::Wrong)
    }

    pub fn absent(message: impl Into<String>) -> Halt {
        Halt::new(message.into(), What::Absent)
    }

    pub fn spent(message: impl Into<String>) -> Halt {
        Halt::new(message.into(), What::Spent)
    }

    fn new(message: String, what: What) -> Halt {
        Halt::Fault(Box::new(Fault { at: None, message, what, missed: None }))
    }

    /// A field is absent; `number` identifies the lookup.
    pub fn no_field(message: String, number: u32) -> Halt {
        Halt::Fault(Box::new(Fault { at: None, message, what: What::Absent, missed: Some(number) }))
    }

    /// The number of the failed field lookup, if that is the fault.
    pub fn missed(&self) -> Option<u32> {
        match self {
            Halt::Fault(fault) => fault.missed,
            Halt::Need(_) | Halt::Heavy => None,
        }
    }

    pub fn is_absent(&self) -> bool {
        matches!(self, Halt::Fault(fault) if fault.what == What::Absent)
    }

    /// Whether it ends the whole evaluation, regardless of other operands.
    pub fn is_final(&self) -> bool {
        match self {
            Halt::Need(_) | Halt::Heavy => true,
            Halt::Fault(fault) => fault.what == What::Spent,
        }
    }

    /// Sets the position; the innermost failed node wins.
    pub fn at(mut self, at: u32) -> Halt {
        if let Halt::Fault(fault) = &mut self {
            fault.at.get_or_insert(at);
        }
        self
    }

    pub fn stop(self, source: &str, hint: Option<String>) -> Stop {
        match self {
            Halt::Need(mut missing) => {
                missing.sort_unstable();
                missing.dedup();
                Stop::Need(missing)
            }
            Halt::Heavy => Stop::Heavy,
            Halt::Fault(fault) => Stop::Failed(EvalError {
                text: source.to_string(),
                offset: fault.at.unwrap_or(0) as usize,
                message: match hint {
                    Some(hint) => format!("{}; {hint}", fault.message),
                    None => fault.message,
                },
            }),
        }
    }
}

/// Collects unloaded values while the rest of the expression is still evaluated to find more.
#[derive(Default)]
pub(super) struct Needs(Vec<ValueRef>);

impl Needs {
    /// None if the result needs a value. Once something is missing, a failure may be due to that, so it is reported as
    /// `Need`: the outcome does not depend on what was already loaded. Missing values are already paid for, so they
    /// never exceed what an evaluation may read.
    pub fn take<T>(&mut self, result: Res<T>) -> Res<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Halt::Need(missing)) => {
                self.add(missing);
                Ok(None)
            }
            Err(fault) if self.0.is_empty() => Err(fault),
            Err(_) => Err(Halt::Need(mem::take(&mut self.0))),
        }
    }

    pub fn add(&mut self, missing: Vec<ValueRef>) {
        self.0.extend(missing);
    }

    pub fn done(self) -> Res<()> {
        if self.0.is_empty() { Ok(()) } else { Err(Halt::Need(self.0)) }
    }

    pub fn any(&self) -> bool {
        !self.0.is_empty()
    }
}

/// All present results, or everything that is missing.
pub(super) fn gather_some<T>(results: impl IntoIterator<Item = Res<Option<T>>>) -> Res<Vec<T>> {
    let mut needs = Needs::default();
    let mut all = Vec::new();
    for result in results {
        all.extend(needs.take(result)?.flatten());
    }
    needs.done()?;
    Ok(all)
}

pub(super) fn gather<T>(results: impl IntoIterator<Item = Res<T>>) -> Res<Vec<T>> {
    gather_some(results.into_iter().map(|result| result.map(Some)))
}

/// Shortens a text for a message.
pub(super) fn shorten(text: &str) -> Cow<'_, str> {
    const MOST: usize = 120;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

pub(super) fn overflow() -> Halt {
    Halt::fault("the number does not fit in 64 bits")
}

pub(super) fn by_name_only(table: Table) -> Halt {
    Halt::fault(format!("`{}` can only be read by name", table.name()))
}
