//! `GET /v1/workers/connect`: the same messages over a WebSocket, one JSON text per message. The worker sends
//! [`FromWorker::Hello`] first; the server pushes tasks as long as the worker has credits. Each task uses one credit.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::nullable;
use crate::tasks::{News, NewsNext, Report, ReportOutcome, Task};
use crate::workers::{Beat, Heartbeat, RegisterWorker, WorkerRegistered};

/// The close code of a socket whose key was revoked, has expired or no longer has the scope.
pub const CLOSE_UNAUTHORIZED: u16 = 4401;
/// The subprotocol of the connection.
pub const SUBPROTOCOL: &str = "eddyline.v1";
/// A subprotocol with this prefix carries the API key, in base64url without padding, for clients that cannot set
/// headers.
pub const KEY_SUBPROTOCOL: &str = "eddyline.key.";

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromWorker<R = Report> {
    Hello {
        #[serde(flatten)]
        worker: RegisterWorker,
        /// The ids of the tasks that the worker still holds from an earlier connection. Other tasks that were pushed to
        /// it there never arrived; they are offered again without using up an attempt.
        tasks: Vec<String>,
    },
    /// Adds `n` credits.
    Credit { n: u32 },
    /// Answered by [`FromServer::Reported`] with the same id.
    Report {
        id: u64,
        reports: Vec<R>,
        /// Credits to add, for slots that these reports free.
        credit: u32,
    },
    Heartbeat {
        #[serde(flatten)]
        beat: Heartbeat,
    },
    /// The worker takes no more tasks and finishes those it has.
    Drain,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromServer {
    Welcome {
        #[serde(flatten)]
        worker: WorkerRegistered,
    },
    Tasks {
        tasks: Vec<Task>,
    },
    Reported {
        id: u64,
        outcomes: Vec<ReportOutcome>,
        news: News,
        #[serde(skip_serializing_if = "NewsNext::is_empty")]
        news_next: NewsNext,
    },
    /// The answer to a heartbeat; also sent unasked when a task is cancelled or lost, or the worker should drain.
    Beat {
        #[serde(flatten)]
        beat: Beat,
    },
    /// The server closes the connection after this.
    Error {
        error: ApiError,
    },
}

/// A message whose `type` determines its other fields. If `type` comes first, as Eddyline writes it, the fields are
/// deserialised directly; otherwise they are buffered first. Every step takes several messages, and parsing them is
/// most of a worker's overhead.
trait Typed: Sized {
    type Kind: for<'de> Deserialize<'de>;
    fn read<'de, D: Deserializer<'de>>(kind: Self::Kind, fields: D) -> Result<Self, D::Error>;
}

struct Message<T>(PhantomData<T>);

impl<'de, T: Typed> Visitor<'de> for Message<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `type`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<T, A::Error> {
        let (mut kind, mut gathered) = (None, Map::new());
        while let Some(Name(name)) = fields.next_key()? {
            if name != "type" {
                gathered.insert(name.into_owned(), fields.next_value()?);
                continue;
            }
            let said: T::Kind = fields.next_value()?;
            if gathered.is_empty() && kind.is_none() {
                return T::read(said, MapAccessDeserializer::new(fields));
            }
            if kind.replace(said).is_some() {
                return Err(A::Error::duplicate_field("type"));
            }
        }
        let kind = kind.ok_or_else(|| A::Error::missing_field("type"))?;
        T::read(kind, Value::Object(gathered)).map_err(A::Error::custom)
    }
}

/// A field name, borrowed if possible.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[derive(Deserialize)]
#[serde(variant_identifier, rename_all = "snake_case")]
enum SaidByWorker {
    Hello,
    Credit,
    Report,
    Heartbeat,
    Drain,
}

impl<R: for<'a> Deserialize<'a>> Typed for FromWorker<R> {
    type Kind = SaidByWorker;

    fn read<'de, D: Deserializer<'de>>(kind: SaidByWorker, fields: D) -> Result<FromWorker<R>, D::Error> {
        #[derive(Deserialize)]
        struct Hello {
            #[serde(flatten)]
            worker: RegisterWorker,
            #[serde(default, deserialize_with = "nullable")]
            tasks: Vec<String>,
        }
        #[derive(Deserialize)]
        struct Credit {
            n: u32,
        }
        #[derive(Deserialize)]
        struct Reports<R> {
            id: u64,
            reports: Vec<R>,
            #[serde(default, deserialize_with = "nullable")]
            credit: u32,
        }
        Ok(match kind {
            SaidByWorker::Hello => {
                let Hello { worker, tasks } = Hello::deserialize(fields)?;
                FromWorker::Hello { worker, tasks }
            }
            SaidByWorker::Credit => FromWorker::Credit { n: Credit::deserialize(fields)?.n },
            SaidByWorker::Report => {
                let Reports { id, reports, credit } = Reports::deserialize(fields)?;
                FromWorker::Report { id, reports, credit }
            }
            SaidByWorker::Heartbeat => FromWorker::Heartbeat { beat: Heartbeat::deserialize(fields)? },
            SaidByWorker::Drain => {
                IgnoredAny::deserialize(fields)?;
                FromWorker::Drain
            }
        })
    }
}

impl<'de, R: for<'a> Deserialize<'a>> Deserialize<'de> for FromWorker<R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FromWorker<R>, D::Error> {
        deserializer.deserialize_map(Message(PhantomData))
    }
}

#[derive(Deserialize)]
#[serde(variant_identifier, rename_all = "snake_case")]
enum SaidByServer {
    Welcome,
    Tasks,
    Reported,
    Beat,
    Error,
}

impl Typed for FromServer {
    type Kind = SaidByServer;

    fn read<'de, D: Deserializer<'de>>(kind: SaidByServer, fields: D) -> Result<FromServer, D::Error> {
        #[derive(Deserialize)]
        struct Tasks {
            tasks: Vec<Task>,
        }
        #[derive(Deserialize)]
        struct Reported {
            id: u64,
            outcomes: Vec<ReportOutcome>,
            #[serde(default)]
            news: News,
            #[serde(default)]
            news_next: NewsNext,
        }
        #[derive(Deserialize)]
        struct Failed {
            error: ApiError,
        }
        Ok(match kind {
            SaidByServer::Welcome => FromServer::Welcome { worker: WorkerRegistered::deserialize(fields)? },
            SaidByServer::Tasks => FromServer::Tasks { tasks: Tasks::deserialize(fields)?.tasks },
            SaidByServer::Reported => {
                let Reported { id, outcomes, news, news_next } = Reported::deserialize(fields)?;
                FromServer::Reported { id, outcomes, news, news_next }
            }
            SaidByServer::Beat => FromServer::Beat { beat: Beat::deserialize(fields)? },
            SaidByServer::Error => FromServer::Error { error: Failed::deserialize(fields)?.error },
        })
    }
}

impl<'de> Deserialize<'de> for FromServer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FromServer, D::Error> {
        deserializer.deserialize_map(Message(PhantomData))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Round trip with the type first and last.
    fn both_ways<T: Serialize + for<'a> Deserialize<'a> + PartialEq + fmt::Debug>(message: &T) {
        let text = serde_json::to_string(message).unwrap();
        assert!(text.starts_with(r#"{"type":""#), "{text}");
        assert_eq!(&serde_json::from_str::<T>(&text).unwrap(), message, "{text}");
        let Value::Object(mut fields) = serde_json::from_str(&text).unwrap() else { unreachable!() };
        let kind = fields.remove("type").unwrap();
        let rest = serde_json::to_string(&fields).unwrap();
        let comma = if fields.is_empty() { "" } else { "," };
        let turned = format!(r#"{}{comma}"type":{kind}}}"#, rest.strip_suffix('}').unwrap());
        assert_eq!(&serde_json::from_str::<T>(&turned).unwrap(), message, "{turned}");
        assert_eq!(&serde_json::from_value::<T>(json!(message)).unwrap(), message);
    }

    #[test]
    fn messages_are_read_as_they_were_written_in_any_order() {
        let worker = RegisterWorker { handlers: vec!["pay".to_owned()], ..RegisterWorker::default() };
        let report = json!({"task_id": "a", "token": "b", "op": "complete", "output": {"x": [1, null]}});
        for message in [
            FromWorker::Hello { worker, tasks: vec!["one".to_owned()] },
            FromWorker::Credit { n: 3 },
            FromWorker::Report { id: 7, reports: vec![report], credit: 2 },
            FromWorker::Heartbeat { beat: Heartbeat { tasks: vec!["one".to_owned()], ..Heartbeat::default() } },
            FromWorker::Drain,
        ] {
            both_ways::<FromWorker<Value>>(&message);
        }
        let outcome = json!({"task_id": "a", "outcome": "applied"});
        for message in [
            FromServer::Tasks { tasks: Vec::new() },
            FromServer::Reported {
                id: 7,
                outcomes: vec![serde_json::from_value(outcome).unwrap()],
                news: News::default(),
                news_next: NewsNext::from([("a".to_owned(), 4)]),
            },
            FromServer::Beat { beat: Beat { drain: true, ..Beat::default() } },
        ] {
            both_ways(&message);
        }
    }

    #[test]
    fn fields_that_may_be_left_out_may() {
        let report: FromWorker = serde_json::from_str(r#"{"type":"report","id":1,"reports":[]}"#).unwrap();
        assert_eq!(report, FromWorker::Report { id: 1, reports: Vec::new(), credit: 0 });
        let drain: FromWorker = serde_json::from_str(r#"{"type":"drain","more":[{}]}"#).unwrap();
        assert_eq!(drain, FromWorker::Drain);
    }

    #[test]
    fn what_is_wrong_with_a_message_is_said() {
        let wrong = |text: &str| serde_json::from_str::<FromWorker>(text).unwrap_err().to_string();
        assert!(wrong("{}").starts_with("missing field `type`"));
        assert!(wrong(r#"{"n":1}"#).starts_with("missing field `type`"));
        assert!(wrong(r#"{"n":1,"type":"credit","type":"drain"}"#).starts_with("duplicate field `type`"));
        assert!(wrong(r#"{"type":"shout"}"#).starts_with("unknown variant `shout`, expected one of `hello`, `credit`"));
        assert!(wrong(r#"{"type":"credit"}"#).starts_with("missing field `n`"));
        assert!(wrong(r#"{"n":-1,"type":"credit"}"#).starts_with("invalid value: integer `-1`"));
        assert!(wrong(r#"{"type":null}"#).starts_with("invalid type: null, expected variant identifier"));
        assert!(
            wrong(r#"{"type":{"credit":null},"n":1}"#).starts_with("invalid type: map, expected variant identifier")
        );
        assert!(wrong("[]").starts_with("invalid type: sequence, expected an object with a `type`"));
    }
}
