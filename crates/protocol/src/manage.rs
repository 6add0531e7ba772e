//! Queues, limits, keys, namespaces, and what a server says of itself.

use std::fmt;
use std::str::FromStr;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::strict::words;
use crate::{Span, Timestamp, nullable};

/// So many in so much time: `{"count": 10, "per": "1s", "burst": 20}`. `per` is a second and `burst` is `count` where they
/// are left out; a bare number is so many in a second, and a text such as `10/1s` is a rate too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WrittenRate")]
pub struct Rate {
    pub count: u32,
    pub per: Span,
    pub burst: u32,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a rate: a number of tasks a second, a text such as 10/1s, or {count, per, burst}"
)]
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

/// `10`, `10/s` or `100/5m`.
/// A rate as people write it into rules. An object has no other fields, so that none that was meant to be one of them is
/// without effect.
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
        f.write_str("a rate: a number of tasks a second, a text such as 10/1s, or {count, per, burst}")
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

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Rate, String> {
        let (count, written) = text.split_once('/').unwrap_or((text, "1s"));
        let count: u32 = count.parse().map_err(|_| format!("`{count}` is not a number of tasks"))?;
        // A unit alone is one of it.
        let bare = !written.starts_with(|c: char| c.is_ascii_digit());
        let per = if bare { format!("1{written}").parse() } else { written.parse() };
        let per: Span = per.map_err(|_| {
            let shown: String = written.chars().take(40).collect();
            format!("\"{shown}\" is not a length of time: expected one such as 1s or 5m, as in 10/1s")
        })?;
        Ok(Rate { count, per, burst: count })
    }
}

/// What stands beside a rate goes before what it says itself.
fn with_burst(rate: Option<Rate>, burst: Option<u32>) -> Result<Option<Rate>, String> {
    match (rate, burst) {
        (Some(rate), Some(burst)) => Ok(Some(Rate { burst, ..rate })),
        (None, Some(_)) => Err("`burst` says how many pass at once, and there is no `rate`".to_owned()),
        (rate, None) => Ok(rate),
    }
}

/// `PUT /v1/queues/{name}`: the rules as a whole; what is left out is without bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueRules {
    pub concurrency: Option<u32>,
    #[serde(deserialize_with = "written_rate")]
    pub rate: Option<Rate>,
    /// Of the rate; it may be in there as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u32>,
    /// How many tasks of one flow are claimed at once.
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
    /// Tasks that wait for a worker.
    pub ready: u64,
    /// Tasks that a worker has.
    pub claimed: u64,
    /// Since when the task has waited that has waited longest.
    pub oldest: Option<Timestamp>,
    /// Why its rules can't be read; it is paused then, until they are set anew.
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
    /// Of the rate; it may be in there as well.
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
    /// A worker asked to slow it down (`defer`): nothing passes it until then. Setting or deleting the limit lifts it.
    #[serde(default)]
    pub closed_until: Option<Timestamp>,
    /// Why its rules can't be read; nothing passes it then, until they are set anew or deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// What a key may be used for. `admin` is all of them, and keys, namespaces, queues and limits besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Look at everything but secrets.
    Read,
    /// Register flows, start runs and act on them.
    Start,
    /// Publish events, open gates.
    Signal,
    /// Claim tasks and report on them.
    Worker,
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 5] = [Scope::Read, Scope::Start, Scope::Signal, Scope::Worker, Scope::Admin];
}

/// `POST /v1/keys`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CreateKey {
    /// What it is for, in a person's words.
    #[serde(deserialize_with = "nullable")]
    pub name: String,
    #[serde(deserialize_with = "words")]
    pub scopes: Vec<Scope>,
    /// The namespace it is bound to; the caller's own where it is left out. Another one takes a key of `default`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in: Option<Span>,
}

/// The only time that the key itself is shown.
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

/// `PATCH /v1/namespaces/{name}`: what is left out stays as it is, null resets it to the server's setting.
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

/// A field that is there, null or not; one that is left out is `None` by its default.
fn given<'de, D, T>(written: D) -> Result<Option<Option<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(written).map(Some)
}

/// A namespace with its settings; null is where the server's setting applies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceInfo {
    pub name: String,
    pub created_at: Option<Timestamp>,
    /// Requests with keys of it are refused.
    #[serde(default)]
    pub disabled: bool,
    /// How many tasks wait for workers before starts get 429.
    #[serde(default)]
    pub backlog: Option<u64>,
    #[serde(default)]
    pub retention: RetentionInfo,
    /// What applies, with the server's settings.
    #[serde(default)]
    pub effective: EffectiveSettings,
}

/// How long things are kept, as durations such as `7d`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RetentionInfo {
    /// Timelines, steps and values, after the end of their run.
    pub timelines: Option<String>,
    /// Headers and the run index, after the end of the run.
    pub runs: Option<String>,
    /// Events, after they were published.
    pub events: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct EffectiveSettings {
    pub backlog: u64,
    pub retention: RetentionInfo,
}

/// `GET /v1/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    pub name: String,
    pub version: String,
    pub protocol: u32,
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
    /// Until then nothing is deleted for its age, since time had jumped when the store was opened.
    #[serde(default)]
    pub deletion_waits_until: Option<Timestamp>,
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
        assert!(wrong.starts_with("\"x\" is not a length of time"), "what was written is quoted: {wrong}");
    }
}
