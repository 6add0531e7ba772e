//! Timelines, followed live.

use std::collections::VecDeque;
use std::time::Duration;

use eddyline_protocol::{Page, Timestamp};
use futures_util::Stream;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::Client;
use super::address::segment;
use crate::error::Error;

/// How long one request waits for the next record.
const LONG_POLL: Duration = Duration::from_secs(30);
/// The minimum time between two requests that return nothing.
const PAUSE: Duration = Duration::from_millis(250);

/// One numbered entry of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its number in the stream; in a run's timeline they count from 1 without gaps.
    pub id: String,
    pub stream: String,
    pub ts: Timestamp,
    /// `flow.start`, `step.completed`, `emit`, …
    pub kind: String,
    #[serde(default)]
    pub subject: String,
    #[serde(default)]
    pub data: Value,
    #[serde(default)]
    pub meta: Value,
    #[serde(default)]
    pub v: u32,
}

impl Record {
    /// Whether it is the last record of its run.
    pub fn is_terminal(&self) -> bool {
        matches!(self.kind.as_str(), "flow.completed" | "flow.failed" | "flow.cancelled")
    }

    /// The activation that the record is about.
    pub fn activation(&self) -> Option<&str> {
        self.meta["stepKey"].as_str().or_else(|| self.data["stepKey"].as_str())
    }
}

/// The records of a run, live: in order, each once, without gaps, until the run has ended. Reconnects if the connection
/// breaks. After an error, the next call continues at the same position.
#[derive(Debug)]
pub struct Follow {
    client: Client,
    stream: String,
    after: u64,
    ready: VecDeque<Record>,
    ended: bool,
}

impl Client {
    pub(super) async fn records(
        &self,
        stream: &str,
        after: u64,
        wait: Option<Duration>,
    ) -> Result<Page<Record>, Error> {
        let mut query = vec![("after", after.to_string())];
        query.extend(wait.map(|wait| ("wait", format!("{}ms", wait.as_millis()))));
        self.get(&format!("/v1/streams/{}", segment(stream)), &query).await
    }
}

impl Follow {
    pub(super) fn new(client: Client, stream: String, after: u64) -> Follow {
        Follow { client, stream, after, ready: VecDeque::new(), ended: false }
    }

    /// The number of the last returned record.
    pub fn position(&self) -> u64 {
        self.after
    }

    /// Waits for the next record; `None` after the last one of the run.
    pub async fn next(&mut self) -> Option<Result<Record, Error>> {
        loop {
            if self.ended {
                return None;
            }
            if let Some(record) = self.ready.pop_front() {
                let number = record.id.parse::<u64>().ok();
                if number != Some(self.after + 1) {
                    // Discard what was read: the next call continues from the last good position.
                    self.ready.clear();
                    return Some(Err(self.gap(&record)));
                }
                self.after += 1;
                self.ended = record.is_terminal();
                return Some(Ok(record));
            }
            let asked = Instant::now();
            match self.client.records(&self.stream, self.after, Some(LONG_POLL)).await {
                Ok(page) if page.items.is_empty() => tokio::time::sleep_until(asked + PAUSE).await,
                Ok(page) => self.ready = page.items.into(),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// As a stream, which ends after the run's last record or an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<Record, Error>> + Send {
        futures_util::stream::unfold(Some(self), |follow| async move {
            let mut follow = follow?;
            match follow.next().await? {
                Ok(record) => Some((Ok(record), Some(follow))),
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    fn gap(&self, record: &Record) -> Error {
        let text = format!("record {} is followed by \"{}\"", self.after, record.id);
        Error::Decode { what: format!("the stream {}", self.stream), source: serde::de::Error::custom(text) }
    }
}
