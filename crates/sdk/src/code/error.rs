//! Errors of code flows: what the futures of a context return, and what a flow returns.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use eddyline_protocol::Failure;
use serde_json::Value;

use crate::error::chain;
use crate::worker::StepError;

/// The kind of a failure whose error has no other.
const ERROR: &str = "Error";

/// Why a future of a [`RunCtx`](crate::RunCtx) gave no value. A flow that returns it with `?` fails for good: whatever
/// failed has used up its own retries.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CtxError {
    /// A step or a call has failed for good.
    #[error(transparent)]
    Step(#[from] StepFailed),
    /// A child run has failed, or was cancelled.
    #[error(transparent)]
    Child(#[from] ChildFailed),
    /// A wait timed out.
    #[error("`{name}` was waited for in vain: its timeout is over")]
    WaitTimeout { name: String },
    /// The entry was cancelled: let go in an earlier attempt, or by hand.
    #[error("`{name}` was cancelled")]
    Cancelled { name: String },
    /// The name is in use by something that has not ended.
    #[error(
        "`{name}` is still in progress; give each of several at the same time a key: `(\"{name}\", key)` instead of \
         `\"{name}\"`"
    )]
    NameInFlight { name: String },
    /// The name cannot be used.
    #[error("`{name}` cannot be a name: {problem}")]
    BadName { name: String, problem: String },
    /// The input of a call or a child, or the key of an event, cannot be serialised as JSON.
    #[error("what `{name}` is given cannot be serialised as JSON: {problem}")]
    Encode { name: String, problem: String },
    /// The remembered value does not match the type that the code expects. Another version of the code may have
    /// recorded it.
    #[error("the recorded value of `{name}` does not match the type that is asked for: {problem}")]
    Decode { name: String, problem: String },
    /// The server refused it.
    #[error("the server refused `{name}`: {message}")]
    Refused { name: String, message: String },
    /// The function of this context has ended, or was suspended.
    #[error("the function of this context is no longer running, so `{name}` cannot begin")]
    Over { name: String },
}

/// A step or a call that has failed for good.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("step `{name}` failed: {}: {}", .failure.kind, .failure.message)]
pub struct StepFailed {
    pub name: String,
    pub failure: Box<Failure>,
}

/// A child run that failed or was cancelled.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("child `{name}` failed: {}: {}", .failure.kind, .failure.message)]
pub struct ChildFailed {
    pub name: String,
    pub failure: Box<Failure>,
}

impl CtxError {
    /// The failure, of a step, a call or a child that failed.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            CtxError::Step(failed) => Some(&failed.failure),
            CtxError::Child(failed) => Some(&failed.failure),
            _ => None,
        }
    }

    fn into_failure(self) -> Failure {
        let message = self.to_string();
        let kind = match self {
            CtxError::Step(StepFailed { name, failure }) => return within(name, *failure),
            CtxError::Child(ChildFailed { name, failure }) => return within(name, *failure),
            CtxError::WaitTimeout { name } => return within(name, Failure::new("WaitTimeout", message)),
            CtxError::Cancelled { name } => return within(name, Failure::new("Cancelled", message)),
            CtxError::NameInFlight { .. } => "NameInFlight",
            CtxError::BadName { .. } => "BadName",
            CtxError::Encode { .. } => "Encode",
            CtxError::Decode { .. } => "Decode",
            CtxError::Refused { .. } => "Refused",
            CtxError::Over { .. } => "Over",
        };
        Failure::new(kind, message)
    }
}

/// The failure with the entry in which it happened first.
fn within(name: String, failure: Failure) -> Failure {
    Failure { step: failure.step.or(Some(name)), ..failure }
}

/// Why a code flow has failed. `?` makes one of any error.
///
/// An error of a step, a call, a child or a wait that escapes the function fails the run for good, since its own retries
/// are used up. Any other error fails this attempt of the function, and the flow's retry policy decides.
///
/// ```
/// use eddyline::FlowError;
///
/// fn parse(text: &str) -> Result<i64, FlowError> {
///     let cents: i64 = text.parse()?;
///     if cents < 0 {
///         return Err(FlowError::permanent("the amount must not be negative").kind("BadAmount"));
///     }
///     Ok(cents)
/// }
/// assert!(parse("x").is_err_and(|error| error.is_retryable()));
/// assert!(parse("-1").is_err_and(|error| !error.is_retryable()));
/// ```
pub struct FlowError(Box<FlowEnd>);

/// How a function ends without a result.
pub(crate) enum FlowEnd {
    Fail {
        failure: Failure,
        retryable: bool,
        retry_after: Option<Duration>,
    },
    /// The run continues as a new one with this input.
    Continue(Value),
}

impl FlowError {
    /// A failure of this attempt; the flow's retry policy decides about the next.
    pub fn new(message: impl Into<String>) -> FlowError {
        FlowError::failed(Failure::new(ERROR, message), true)
    }

    /// A failure that must not be retried.
    pub fn permanent(message: impl Into<String>) -> FlowError {
        FlowError::failed(Failure::new(ERROR, message), false)
    }

    /// From a boxed error, such as that of a catch-all error library.
    pub fn from_boxed(error: Box<dyn StdError + Send + Sync>) -> FlowError {
        match error.downcast::<CtxError>() {
            Ok(of_ctx) => FlowError::failed(of_ctx.into_failure(), false),
            Err(error) => {
                let retryable = of_ctx(error.as_ref()).is_none();
                FlowError::failed(Failure::new(ERROR, chain(error.as_ref())), retryable)
            }
        }
    }

    /// For programs, such as `non_retryable` of a retry policy.
    pub fn kind(mut self, kind: impl Into<String>) -> FlowError {
        if let FlowEnd::Fail { failure, .. } = &mut *self.0 {
            failure.kind = kind.into();
        }
        self
    }

    /// Retry not before this time has passed.
    pub fn retry_after(mut self, after: Duration) -> FlowError {
        if let FlowEnd::Fail { retry_after, .. } = &mut *self.0 {
            *retry_after = Some(after);
        }
        self
    }

    /// Do not retry.
    pub fn not_retryable(mut self) -> FlowError {
        if let FlowEnd::Fail { retryable, .. } = &mut *self.0 {
            *retryable = false;
        }
        self
    }

    pub fn is_retryable(&self) -> bool {
        matches!(*self.0, FlowEnd::Fail { retryable: true, .. })
    }

    pub(crate) fn failed(failure: Failure, retryable: bool) -> FlowError {
        FlowError(Box::new(FlowEnd::Fail { failure, retryable, retry_after: None }))
    }

    pub(crate) fn continuing(input: Value) -> FlowError {
        FlowError(Box::new(FlowEnd::Continue(input)))
    }

    pub(crate) fn into_end(self) -> FlowEnd {
        *self.0
    }
}

impl<E: StdError + 'static> From<E> for FlowError {
    fn from(error: E) -> FlowError {
        let error: &(dyn StdError + 'static) = &error;
        if let Some(of_ctx) = error.downcast_ref::<CtxError>() {
            return FlowError::failed(of_ctx.clone().into_failure(), false);
        }
        // An error around that of a step keeps its own words, and is as final.
        let name = std::any::type_name::<E>();
        let name = name.split('<').next().unwrap_or(name);
        let kind = name.rsplit("::").next().filter(|kind| !kind.is_empty()).unwrap_or(ERROR);
        FlowError::failed(Failure::new(kind, chain(error)), of_ctx(error).is_none())
    }
}

impl From<StepError> for FlowError {
    fn from(error: StepError) -> FlowError {
        let (failure, retryable, retry_after) = error.into_parts();
        FlowError(Box::new(FlowEnd::Fail { failure, retryable, retry_after }))
    }
}

/// The error of a context among the sources of this one.
fn of_ctx<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a CtxError> {
    let mut at = Some(error);
    while let Some(error) = at {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        at = error.source();
    }
    None
}

impl fmt::Display for FlowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            FlowEnd::Fail { failure, .. } => write!(f, "{}: {}", failure.kind, failure.message),
            FlowEnd::Continue(_) => f.write_str("continues as a new run"),
        }
    }
}

impl fmt::Debug for FlowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    fn said(error: FlowError) -> (String, Option<String>, bool) {
        match error.into_end() {
            FlowEnd::Fail { failure, retryable, .. } => (failure.kind, failure.step, retryable),
            FlowEnd::Continue(_) => panic!("not a failure"),
        }
    }

    #[test]
    fn what_escapes_a_flow_is_final_only_if_its_own_retries_are_used_up() {
        #[derive(Debug, thiserror::Error)]
        #[error("no label")]
        struct NoLabel(#[source] CtxError);

        let declined = || {
            CtxError::from(StepFailed {
                name: "pay".to_owned(),
                failure: Box::new(Failure::new("Declined", "no funds")),
            })
        };
        let pay = Some("pay".to_owned());
        assert_eq!(said(declined().into()), ("Declined".to_owned(), pay.clone(), false));
        assert_eq!(said(FlowError::from_boxed(Box::new(declined()))), ("Declined".to_owned(), pay, false));
        assert_eq!(said(NoLabel(declined()).into()), ("NoLabel".to_owned(), None, false));
        assert_eq!(said("x".parse::<u8>().unwrap_err().into()), ("ParseIntError".to_owned(), None, true));
        assert_eq!(said(StepError::permanent("never").kind("Never").into()), ("Never".to_owned(), None, false));
    }
}
