//! Errors of handlers.

use std::fmt;
use std::time::Duration;

use eddyline_protocol::{Failure, Op};

use crate::error::chain;

/// The default kind.
const ERROR: &str = "Error";
/// The kind of failure of a deferred step of a code flow.
const DEFERRED: &str = "Deferred";

/// Why an attempt failed, and what happens next. `?` converts any error: its kind is then the name of the error's type,
/// and the step's retry policy decides.
///
/// ```
/// use eddyline::StepError;
/// use std::time::Duration;
///
/// fn charge(cents: i64) -> Result<(), StepError> {
///     if cents < 0 {
///         return Err(StepError::permanent("the amount must not be negative").kind("BadAmount"));
///     }
///     std::fs::read("/no/such/ledger").map_err(|error| StepError::from(error).retry_after(Duration::from_secs(30)))?;
///     Ok(())
/// }
/// assert!(charge(-1).is_err_and(|error| !error.is_retryable()));
/// ```
pub struct StepError(Box<Next>);

enum Next {
    Fail { failure: Failure, retryable: bool, retry_after: Option<Duration> },
    Defer { after: Duration, limit: Option<String> },
}

impl StepError {
    /// A failure that is retried according to the step's retry policy.
    pub fn new(message: impl Into<String>) -> StepError {
        StepError::failed(Failure::new(ERROR, message), true)
    }

    /// A failure that must not be retried.
    pub fn permanent(message: impl Into<String>) -> StepError {
        StepError::failed(Failure::new(ERROR, message), false)
    }

    /// Not a failure: retry later without using up an attempt. `limit` names a limit to slow down as well.
    pub fn defer(after: Duration, limit: Option<&str>) -> StepError {
        StepError(Box::new(Next::Defer { after, limit: limit.map(str::to_owned) }))
    }

    /// A failure from a boxed error, such as that of a catch-all error library.
    pub fn from_boxed(error: Box<dyn std::error::Error + Send + Sync>) -> StepError {
        StepError::new(chain(error.as_ref()))
    }

    /// For programs, such as `non_retryable` of a retry policy.
    pub fn kind(mut self, kind: impl Into<String>) -> StepError {
        if let Next::Fail { failure, .. } = &mut *self.0 {
            failure.kind = kind.into();
        }
        self
    }

    /// Retry not before this time has passed, whatever the retry policy says.
    pub fn retry_after(mut self, after: Duration) -> StepError {
        match &mut *self.0 {
            Next::Fail { retry_after, .. } => *retry_after = Some(after),
            Next::Defer { after: when, .. } => *when = after,
        }
        self
    }

    /// Do not retry.
    pub fn not_retryable(mut self) -> StepError {
        if let Next::Fail { retryable, .. } = &mut *self.0 {
            *retryable = false;
        }
        self
    }

    pub fn is_retryable(&self) -> bool {
        !matches!(*self.0, Next::Fail { retryable: false, .. })
    }

    pub(crate) fn failed(failure: Failure, retryable: bool) -> StepError {
        StepError(Box::new(Next::Fail { failure, retryable, retry_after: None }))
    }

    /// The failure, whether it may be retried, and not before when. A step of a code flow cannot be deferred without
    /// using up an attempt, so a `defer` is a failure there.
    pub(crate) fn into_parts(self) -> (Failure, bool, Option<Duration>) {
        match *self.0 {
            Next::Fail { failure, retryable, retry_after } => (failure, retryable, retry_after),
            Next::Defer { after, .. } => (Failure::new(DEFERRED, "deferred"), true, Some(after)),
        }
    }

    pub(crate) fn into_op(self) -> Op {
        match *self.0 {
            Next::Fail { failure, retryable, retry_after } => {
                Op::Fail { error: failure, retryable, retry_after: retry_after.map(Into::into) }
            }
            Next::Defer { after, limit } => Op::Defer { after: after.into(), limit },
        }
    }
}

impl<E: std::error::Error + 'static> From<E> for StepError {
    fn from(error: E) -> StepError {
        let name = std::any::type_name::<E>();
        let name = name.split('<').next().unwrap_or(name);
        let kind = name.rsplit("::").next().filter(|kind| !kind.is_empty()).unwrap_or(ERROR);
        StepError::failed(Failure::new(kind, chain(&error)), true)
    }
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Next::Fail { failure, .. } => write!(f, "{}: {}", failure.kind, failure.message),
            Next::Defer { after, .. } => write!(f, "deferred by {after:?}"),
        }
    }
}

impl fmt::Debug for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{json, to_value};

    #[test]
    fn what_is_reported_of_each_kind_of_error() {
        #[derive(Debug, thiserror::Error)]
        #[error("the card was declined")]
        struct CardDeclined(#[source] std::io::Error);

        let said = |error: StepError| to_value(error.into_op()).unwrap_or_default();
        let cause = std::io::Error::other("no funds");
        assert_eq!(
            said(CardDeclined(cause).into()),
            json!({"op": "fail", "error": {"kind": "CardDeclined", "message": "the card was declined: no funds"},
                   "retryable": true})
        );
        assert_eq!(
            said(StepError::permanent("never").kind("Bad")),
            json!({"op": "fail", "error": {"kind": "Bad", "message": "never"}, "retryable": false})
        );
        assert_eq!(
            said(StepError::new("busy").retry_after(Duration::from_secs(30))),
            json!({"op": "fail", "error": {"kind": "Error", "message": "busy"}, "retryable": true,
                   "retry_after": 30_000})
        );
        assert_eq!(
            said(StepError::defer(Duration::from_secs(2), Some("stripe"))),
            json!({"op": "defer", "after": 2_000, "limit": "stripe"})
        );
    }
}
