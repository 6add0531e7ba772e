//! Retry policies, written as in definitions.

use std::time::Duration;

use eddyline_protocol::Span;
use serde_json::{Map, Value, json};

/// How often and when something is tried again: a step, a call, a child or a whole code flow. What is left out keeps its
/// default: 5 attempts, waits from 1 s that double up to 60 s, varied by a fifth.
///
/// ```
/// use eddyline::Retry;
/// use std::time::Duration;
///
/// let patient = Retry::attempts(20).initial(Duration::from_secs(10)).max(Duration::from_secs(3_600));
/// let once = Retry::none();
/// # let _ = (patient, once);
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Retry {
    fields: Map<String, Value>,
}

impl Retry {
    /// At most this many attempts, the first one included.
    pub fn attempts(attempts: u32) -> Retry {
        Retry::default().with("attempts", json!(attempts.max(1)))
    }

    /// One attempt.
    pub fn none() -> Retry {
        Retry::attempts(1)
    }

    /// As often as it takes.
    pub fn forever() -> Retry {
        Retry::default().with("attempts", json!(-1))
    }

    /// The wait before the second attempt; defaults to 1 s.
    pub fn initial(self, wait: Duration) -> Retry {
        self.with("initial", written(wait))
    }

    /// By how much each wait is longer than the one before; defaults to 2.
    pub fn factor(self, factor: f64) -> Retry {
        self.with("factor", json!(factor))
    }

    /// The longest wait; defaults to 60 s.
    pub fn max(self, wait: Duration) -> Retry {
        self.with("max", written(wait))
    }

    /// The share by which waits vary at random, from 0 to 1; defaults to 0.2.
    pub fn jitter(self, share: f64) -> Retry {
        self.with("jitter", json!(share))
    }

    /// Kinds of failure that are not retried.
    pub fn non_retryable<K: Into<String>>(self, kinds: impl IntoIterator<Item = K>) -> Retry {
        let kinds: Vec<String> = kinds.into_iter().map(Into::into).collect();
        self.with("non_retryable", json!(kinds))
    }

    /// As in a definition. Durations have units there.
    pub(crate) fn to_json(&self) -> Value {
        Value::Object(self.fields.clone())
    }

    /// Whether the policy retries a failure of this kind.
    pub(crate) fn retries(&self, kind: &str) -> bool {
        let refused = self.fields.get("non_retryable").and_then(Value::as_array);
        !refused.into_iter().flatten().any(|refused| refused.as_str() == Some(kind))
    }

    fn with(mut self, field: &str, value: Value) -> Retry {
        self.fields.insert(field.to_owned(), value);
        self
    }
}

/// A duration on the wire. Longer ones than a server accepts are refused there, with the limit.
pub(crate) fn span(duration: Duration) -> Span {
    Span::from_ms(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

/// A duration in a definition, where numbers without a unit are warned about.
pub(crate) fn written(duration: Duration) -> Value {
    json!(format!("{}ms", duration.as_millis()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_said_is_written() {
        assert_eq!(Retry::none().to_json(), json!({"attempts": 1}));
        let policy = Retry::forever().initial(Duration::from_millis(5)).non_retryable(["Bad"]);
        assert_eq!(policy.to_json(), json!({"attempts": -1, "initial": "5ms", "non_retryable": ["Bad"]}));
        assert!(policy.retries("Other") && !policy.retries("Bad"));
    }
}
