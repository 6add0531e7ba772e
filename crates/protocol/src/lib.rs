//! The wire protocol of Eddyline's server, workers and clients: JSON over HTTP, and the same messages over a WebSocket.
//!
//! Types only. Unknown fields are ignored and absent fields have defaults, so that older and newer peers stay
//! compatible; a breaking change needs a new [`VERSION`].

mod code;
mod error;
mod events;
mod flows;
mod manage;
mod runs;
mod socket;
mod span;
mod strict;
mod tasks;
mod workers;

pub use code::*;
pub use error::*;
pub use events::*;
pub use flows::*;
pub use manage::*;
pub use runs::*;
pub use socket::*;
pub use span::{NotASpan, Span};
pub use tasks::*;
pub use workers::*;

use serde::{Deserialize, Deserializer, Serialize};

/// The protocol version: the `/v1` in every path.
pub const VERSION: u32 = 1;
/// The oldest protocol version of workers and clients that this server accepts.
pub const OLDEST_VERSION: u32 = 1;
/// The header that selects the namespace when API keys are off.
pub const NAMESPACE_HEADER: &str = "eddyline-namespace";

/// A time in RFC 3339, in UTC with milliseconds: `2026-01-02T03:04:05.678Z`.
pub type Timestamp = String;

/// A page of a list. Pass `next` as `cursor` of the next request (for streams: as `after`). Only a missing `next` marks
/// the last page; a page may be short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next: Option<String>,
    /// The number of items in the whole list; only with `?count=true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}

/// Reads `null` as the default value: many languages serialise absent fields as `null`.
pub(crate) fn nullable<'de, D, T>(written: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(written)?.unwrap_or_default())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_null_is_as_good_as_nothing() {
        let left_out: RegisterWorker = from_value(json!({})).unwrap();
        let null = json!({"queues": null, "handlers": null, "flows": null, "labels": null, "host": null});
        assert_eq!(from_value::<RegisterWorker>(null).unwrap(), left_out);
        assert_eq!(from_value::<StartRun>(json!({"tags": null})).unwrap(), StartRun::default());
        let complete: Op = from_value(json!({"op": "complete", "emits": null, "logs": null})).unwrap();
        assert_eq!(complete, from_value(json!({"op": "complete"})).unwrap());
        for (null, left_out) in [
            (json!({"op": "log", "msg": "m", "level": null}), json!({"op": "log", "msg": "m"})),
            (json!({"op": "defer", "after": null}), json!({"op": "defer"})),
            (json!({"op": "step", "name": "s", "retryable": null}), json!({"op": "step", "name": "s"})),
            (json!({"op": "wait", "name": "w", "webhook": null, "manual": null}), json!({"op": "wait", "name": "w"})),
            (
                json!({"op": "child", "name": "c", "flow": "f", "detached": null}),
                json!({"op": "child", "name": "c", "flow": "f"}),
            ),
        ] {
            assert_eq!(from_value::<Op>(null).unwrap(), from_value::<Op>(left_out).unwrap());
        }
        let fail: Op = from_value(json!({"op": "fail", "error": {"message": "no"}, "retryable": null})).unwrap();
        assert_eq!(fail, from_value(json!({"op": "fail", "error": {"message": "no"}})).unwrap());
    }
}
