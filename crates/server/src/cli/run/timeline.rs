//! Reads a run's timeline as it grows.

use std::time::Duration;

use eddyline_protocol::{Page, Span};
use serde_json::Value;
use tokio::time::Instant;

use crate::cli::connect::{Remote, segment};
use crate::cli::moment;
use crate::cli::screen::{Ink, Line};
use crate::cli::trouble::{Exit, Trouble};

/// How long one request waits for the next record.
const WAIT: Duration = Duration::from_secs(10);
/// Between two tries at a server that is away.
const AGAIN: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub struct Timeline {
    remote: Remote,
    path: String,
    after: u64,
    pub ended: bool,
    /// For how long a server that is away is waited for.
    patience: Duration,
}

impl Timeline {
    pub fn new(remote: Remote, run: &str, after: u64, patience: Duration) -> Timeline {
        let path = format!("/v1/streams/nq:flow:{}", segment(run));
        Timeline { remote, path, after, ended: false, patience }
    }

    /// How many records there are up to here.
    pub fn length(&self) -> u64 {
        self.after
    }

    /// What there is now, if there is something.
    pub async fn read(&mut self) -> Result<Vec<Value>, Trouble> {
        self.ask(Duration::ZERO).await
    }

    /// The next records, or none after a while. A server that goes away is waited for.
    pub async fn next(&mut self) -> Result<Vec<Value>, Trouble> {
        let mut away_since = None;
        loop {
            match self.ask(WAIT).await {
                Err(trouble) if matches!(trouble.exit(), Exit::Unreachable | Exit::Unavailable) => {
                    let since = *away_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.patience {
                        return Err(trouble);
                    }
                    tokio::time::sleep(AGAIN).await;
                }
                answer => return answer,
            }
        }
    }

    async fn ask(&mut self, wait: Duration) -> Result<Vec<Value>, Trouble> {
        let query = [("after", self.after.to_string()), ("wait", Span::from(wait).to_string())];
        let page: Page<Value> = self.remote.get(&self.path, &query).await?;
        for record in &page.items {
            if let Some(id) = record["id"].as_str().and_then(|id| id.parse().ok()) {
                self.after = id;
            }
            let kind = record["kind"].as_str();
            self.ended |= matches!(kind, Some("flow.completed" | "flow.failed" | "flow.cancelled"));
        }
        Ok(page.items)
    }
}

/// A record on a line.
pub fn line(record: &Value) -> Line {
    let text = |field: &str| record[field].as_str().unwrap_or_default();
    let kind = text("kind");
    let ink = match kind.rsplit('.').next() {
        Some("completed") => Ink::Good,
        Some("failed" | "timeout") => Ink::Bad,
        Some("started" | "triggered") => Ink::Busy,
        Some("skipped" | "cancelled") => Ink::Faint,
        _ => Ink::Plain,
    };
    let mut data = record["data"].clone();
    if let Some(fields) = data.as_object_mut() {
        fields.remove("stepKey");
    }
    let data = if data.as_object().is_some_and(serde_json::Map::is_empty) { String::new() } else { data.to_string() };
    let step = record["meta"]["stepKey"].as_str().unwrap_or_default();
    Line::default()
        .with(Ink::Faint, format!("{:>4}  {}  ", text("id"), moment::clock(text("ts"))))
        .with(ink, format!("{kind:<24}"))
        .with(Ink::Strong, format!("{step:<12}"))
        .with(Ink::Faint, format!("  {data}"))
}
