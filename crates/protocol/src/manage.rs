//! Queues, limits, keys, namespaces and server info.

use std::fmt;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::strict::words;
use crate::{Span, Timestamp, nullable};

/// Tasks per period: `{"count": 10, "per": "1s", "burst": 20}`. `per` defaults to one second and `burst` to `count`. A
/// bare number is tasks per second; a text such as `10/1s` is a rate too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenRate")]
pub struct Rate {
    pub count: u32,
    pub per: Span,
    pub burst: u32,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a rate: tasks per second, a text such as 10/1s, or {count, per, burst}")]
enum WrittenRate {
    PerSecond(u32),
    Text(String),
    Whole { count: u32, per: Option<Span>, burst: Option<u32> },
}

impl TryFrom<WrittenRate> for Rate {
    type Error = String;

    fn try_from(written: WrittenRate) -> Result<Rate, String> {
        let (count, per, burst) = match written {
            WrittenRate::PerSecond(count) => (count, None, None),
            WrittenRate::Text(text) => return text.parse(),
            WrittenRate::Whole { count, per, burst } => (count, per, burst),
        };
        Ok(Rate { count, per: per.unwrap_or(Span::from_ms(1_000)), burst: burst.unwrap_or(count) })
    }
}

/// A rate in the rules of a queue or limit. Unknown fields are errors, so that a misspelt one is not silently ignored.
fn written_rate<'de, D: Deserializer<'de>>(written: D) -> Result<Option<Rate>, D::Error> {
    let written: Option<StrictRate> = Option::deserialize(written)?;
    Ok(written.map(|StrictRate(rate)| rate))
}

struct StrictRate(Rate);

impl<'de> Deserialize<'de> for StrictRate {
    fn deserialize<D: Deserializer<'de>>(written: D) -> Result<StrictRate, D::Error> {
        written.deserialize_any(RateForms).map(StrictRate)
    }
}

struct RateForms;

impl<'de> Visitor<'de> for RateForms {
    type Value = Rate;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a rate: tasks per second, a text such as 10/1s, or {count, per, burst}")
    }

    fn visit_u64<E: Error>(self, count: u64) -> Result<Rate, E> {
        let count = u32::try_from(count).map_err(|_| E::invalid_value(Unexpected::Unsigned(count), &self))?;
        WrittenRate::PerSecond(count).try_into().map_err(E::custom)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Rate, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Rate, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Whole {
            count: u32,
            per: Option<Span>,
            burst: Option<u32>,
        }
        let Whole { count, per, burst } = Whole::deserialize(MapAccessDeserializer::new(fields))?;
        WrittenRate::Whole { count, per, burst }.try_into().map_err(A::Error::custom)
    }
}

/// `10`, `10/s` or `100/5m`.
impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        let (count, written) = text.split_once('/').unwrap_or((text, "1s"));
        let count: u32 = count.parse().map_err(|_| format!("`{count}` is not a number of tasks"))?;
        // A bare unit means one of it.
        let bare = !written.starts_with(|c: char| c.is_ascii_digit());
        let per = if bare { format!("1{written}").parse() } else { written.parse() };
        let per: Span = per.map_err(|_| {
            let shown: String = written.chars().take(40).collect();
            format!("\"{shown}\" is not a duration: expected one such as 1s or 5m, as in 10/1s")
        })?;
        Ok(Rate { count, per, burst: count })
    }
}

/// A `burst` next to the rate overrides the one inside it.
fn with_burst(rate: Option<Rate>, burst: Option<u32>) -> Result<Option<Rate>, String> {
    match (rate, burst) {
        (Some(rate), Some(burst)) => Ok(Some(Rate { burst, ..rate })),
        (None, Some(_)) => Err("`burst` needs a `rate`".to_owned()),
        (rate, None) => Ok(rate),
    }
}

/// `PUT /v1/queues/{name}`: replaces all rules; a missing one means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueRules {
    pub concurrency: Option<u32>,
    #[serde(deserialize_with = "written_rate")]
    pub rate: Option<Rate>,
    /// Of the rate; can also be set inside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
    /// How many tasks of one flow can be claimed at the same time.
    pub flow_concurrency: Option<u32>,
}

impl QueueRules {
    /// The rate with its burst.
    pub fn whole_rate(&self) -> Result<Option<Rate>, String> {
        with_burst(self.rate, self.burst)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueInfo {
    pub name: String,
    pub paused: bool,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    pub flow_concurrency: Option<u32>,
    /// Tasks waiting for a worker.
    pub ready: u64,
    /// Tasks held by a worker.
    pub claimed: u64,
    /// When the oldest waiting task was queued.
    pub oldest: Option<Timestamp>,
    /// Why the stored rules cannot be read. The queue is then paused until new rules are set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// `PUT /v1/limits/{name}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitRules {
    pub concurrency: Option<u32>,
    #[serde(deserialize_with = "written_rate")]
    pub rate: Option<Rate>,
    /// Of the rate; can also be set inside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
}

impl LimitRules {
    /// The rate with its burst.
    pub fn whole_rate(&self) -> Result<Option<Rate>, String> {
        with_burst(self.rate, self.burst)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitInfo {
    pub name: String,
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
    /// Set by a worker that asked to slow down (`defer`): no task passes before this time. Setting or deleting the
    /// limit clears it.
    #[serde(default)]
    pub closed_until: Option<Timestamp>,
    /// Why the stored rules cannot be read. No task passes until new rules are set or the limit is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// What a key can be used for. `admin` includes all others, and allows managing keys, namespaces, queues and limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Read everything but secrets.
    Read,
    /// Register flows, start runs and act on them.
    Start,
    /// Publish events and open gates.
    Signal,
    /// Claim tasks and report on them.
    Worker,
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 5] = [Scope::Read, Scope::Start, Scope::Signal, Scope::Worker, Scope::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Start => "start",
            Scope::Signal => "signal",
            Scope::Worker => "worker",
            Scope::Admin => "admin",
        }
    }

    pub fn named(name: &str) -> Option<Scope> {
        Scope::ALL.into_iter().find(|scope| scope.as_str() == name)
    }
}

/// `POST /v1/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CreateKey {
    /// A description for people.
    #[serde(deserialize_with = "nullable")]
    pub name: String,
    #[serde(deserialize_with = "words")]
    pub scopes: Vec<Scope>,
    /// The namespace of the key; the caller's own if left out. Only keys of `default` can create keys of another
    /// namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in: Option<Span>,
}

/// The only response that contains the key itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyCreated {
    pub key: String,
    #[serde(flatten)]
    pub info: KeyInfo,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    pub key_id: String,
    pub name: String,
    pub namespace: String,
    pub scopes: Vec<Scope>,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
}

/// `POST /v1/namespaces`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateNamespace {
    pub name: String,
}

/// `PATCH /v1/namespaces/{name}`: fields left out keep their value, null resets to the server's setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ChangeNamespace {
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub retention: Option<Option<ChangeRetention>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub disabled: Option<Option<bool>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub backlog: Option<Option<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ChangeRetention {
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub timelines: Option<Option<Span>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub runs: Option<Option<Span>>,
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub events: Option<Option<Span>>,
}

/// Distinguishes null (`Some(None)`) from a missing field (`None`).
fn given<'de, D, T>(written: D) -> Result<Option<Option<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(written).map(Some)
}

/// A namespace with its settings; null means the server's setting applies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceInfo {
    pub name: String,
    pub created_at: Option<Timestamp>,
    /// Requests with keys of this namespace are refused.
    #[serde(default)]
    pub disabled: bool,
    /// How many tasks can wait for workers before starts get 429.
    #[serde(default)]
    pub backlog: Option<u64>,
    #[serde(default)]
    pub retention: RetentionInfo,
    /// The settings in effect, including the server's.
    #[serde(default)]
    pub effective: EffectiveSettings,
}

/// Retention periods, as durations such as `7d`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RetentionInfo {
    /// Timelines, steps and values, after their run has ended.
    pub timelines: Option<String>,
    /// Headers and the run index, after the run has ended.
    pub runs: Option<String>,
    /// Events, after publication.
    pub events: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EffectiveSettings {
    pub backlog: u64,
    pub retention: RetentionInfo,
}

/// An item of `GET /v1/instances`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceInfo {
    /// New with each start.
    pub instance_id: String,
    pub name: String,
    /// The version of Eddyline.
    pub version: String,
    pub host: Option<String>,
    pub pid: Option<u32>,
    /// Where its API is.
    pub url: Option<String>,
    /// It answered the request.
    pub this: bool,
    /// `online`, or `gone` if it has not checked in for three seconds.
    pub status: String,
    pub started_at: Timestamp,
    pub seen_at: Timestamp,
}

/// `GET /v1/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    pub name: String,
    pub version: String,
    /// The version of the protocol that the server speaks.
    pub protocol: u32,
    /// The oldest version that workers and clients may speak.
    #[serde(default)]
    pub oldest_protocol: u32,
    /// `memory`, `embedded`, `postgres` or `redis`.
    pub store: String,
    pub instance: String,
    pub namespace: String,
    pub keys: bool,
    pub lease_ms: u64,
    pub heartbeat_ms: u64,
    pub started_at: Timestamp,
    /// The store's time.
    pub now: Timestamp,
    /// How far the store's time is ahead of the server's clock.
    #[serde(default)]
    pub clock_ahead_ms: i64,
    /// Nothing is deleted for its age before this time, because the clock had jumped when the store was opened.
    #[serde(default)]
    pub deletion_waits_until: Option<Timestamp>,
}

/// `POST /v1/test/clock`, only on a server with `--test-clock`. An empty object only reads the clock.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveTestClock {
    /// Moves the clock by this duration; whatever becomes due on the way happens in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advance: Option<Span>,
    /// Whether the clock jumps to the next due item whenever no task is queued or claimed and nothing is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestClock {
    pub now: Timestamp,
    pub auto: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_null_is_told_from_what_is_left_out() {
        let read = |text: &str| serde_json::from_str::<ChangeNamespace>(text).ok();
        assert_eq!(read("{}"), Some(ChangeNamespace::default()));
        let reset = ChangeNamespace { backlog: Some(None), ..ChangeNamespace::default() };
        assert_eq!(read(r#"{"backlog": null}"#), Some(reset));
        let retention = ChangeRetention { runs: Some(None), events: Some(Some(Span::from_ms(7))), timelines: None };
        let change = ChangeNamespace { retention: Some(Some(retention)), ..ChangeNamespace::default() };
        assert_eq!(read(r#"{"retention": {"runs": null, "events": "7ms"}}"#), Some(change));
    }

    #[test]
    fn a_rate_is_a_number_of_tasks_in_a_time() {
        let of = |count, ms| Ok(Rate { count, per: Span::from_ms(ms), burst: count });
        assert_eq!("10".parse(), of(10, 1_000));
        assert_eq!("10/s".parse(), of(10, 1_000));
        assert_eq!("100/5m".parse(), of(100, 300_000));
        assert!("ten".parse::<Rate>().is_err());
        assert!("10/".parse::<Rate>().is_err());
        let wrong = "10/x".parse::<Rate>().err().unwrap_or_default();
        assert!(wrong.starts_with("\"x\" is not a duration"), "what was written is quoted: {wrong}");
    }
}
