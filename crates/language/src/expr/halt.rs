//! How an evaluation ends early, and how all that is missing is gathered first.

use std::borrow::Cow;
use std::mem;

use super::value::Table;
use super::{EvalError, Stop};
use crate::data::ValueRef;

pub(super) type Res<T> = Result<T, Halt>;

#[derive(Debug)]
pub(super) enum Halt {
    Need(Vec<ValueRef>),
    /// More work than is done inline.
    Heavy,
    Fault(Box<Fault>),
}

#[derive(Debug)]
pub(super) struct Fault {
    at: Option<u32>,
    message: String,
    what: What,
    /// The number of the field that was looked for and not found, so that a hint can be added if the fault is shown.
    missed: Option<u32>,
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    Wrong,
    /// Nothing is wrong but that something is not there: `default` and `has` make up for it.
    Absent,
    /// The budget is spent: nothing makes up for it.
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

    /// A field is not there, the one of that number.
    pub fn no_field(message: String, number: u32) -> Halt {
        Halt::Fault(Box::new(Fault { at: None, message, what: What::Absent, missed: Some(number) }))
    }

    /// The number of the field that is not there, if that is what is wrong.
    pub fn missed(&self) -> Option<u32> {
        match self {
            Halt::Fault(fault) => fault.missed,
            Halt::Need(_) | Halt::Heavy => None,
        }
    }

    pub fn is_absent(&self) -> bool {
        matches!(self, Halt::Fault(fault) if fault.what == What::Absent)
    }

    /// Whether the whole evaluation ends with it, whatever another operand would say.
    pub fn is_final(&self) -> bool {
        match self {
            Halt::Need(_) | Halt::Heavy => true,
            Halt::Fault(fault) => fault.what == What::Spent,
        }
    }

    /// The innermost node that failed is where it failed.
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

/// Values that are not loaded, while the rest is still looked at for more of them.
#[derive(Default)]
pub(super) struct Needs(Vec<ValueRef>);

impl Needs {
    /// None if it waits for a value. What fails after something is missing may fail only for lack of it: it counts as
    /// missing. So the outcome does not depend on what was loaded before. What is missing is paid for already, so it is
    /// never more than an evaluation may read.
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

/// All that are there; what is missing is gathered first.
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

/// At most a line of a text, for a message.
pub(super) fn shorten(text: &str) -> Cow<'_, str> {
    const MOST: usize = 120;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

pub(super) fn overflow() -> Halt {
    Halt::fault("the number does not fit 64 bits")
}

pub(super) fn by_name_only(table: Table) -> Halt {
    Halt::fault(format!("`{}` can only be read by name", table.name()))
}
