//! Reads a run's timeline as it grows.

use std::time::Duration;

use eddyline_protocol::{Page, Span};
use serde_json::Value;
use tokio::time::Instant;

use crate::connect::{Remote, segment};
use crate::moment;
use crate::screen::{Ink, Line};
use crate::trouble::{Exit, Trouble};

/// How long one request waits for the next record.
const WAIT: Duration = Duration::from_secs(10);
/// Pause between two tries to reach an unavailable server.
const AGAIN: Duration = Duration::from_millis(250);
/// How long to wait for a restarted server, so that a user who follows a run need not start over.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Retries `ask` while the server is unreachable or unavailable, for up to `PATIENCE`.
pub async fn patiently<T, F: Future<Output = Result<T, Trouble>>>(mut ask: impl FnMut() -> F) -> Result<T, Trouble> {
    let mut unavailable_since = None;
    loop {
        match ask().await {
            Err(trouble) if matches!(trouble.exit(), Exit::Unreachable | Exit::Unavailable) => {
                let since = *unavailable_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= PATIENCE {
                    return Err(trouble);
                }
                tokio::time::sleep(AGAIN).await;
            }
            answer => return answer,
        }
    }
}

#[derive(Debug)]
pub struct Timeline {
    remote: Remote,
    path: String,
    after: u64,
    pub ended: bool,
}

impl Timeline {
    pub fn new(remote: Remote, run: &str, after: u64) -> Timeline {
        let path = format!("/v1/streams/nq:flow:{}", segment(run));
        Timeline { remote, path, after, ended: false }
    }

    /// How many records were read so far.
    pub fn length(&self) -> u64 {
        self.after
    }

    /// The records that exist now. Fails at once if the server is unavailable.
    pub async fn read(&mut self) -> Result<Vec<Value>, Trouble> {
        let page = self.ask(Duration::ZERO).await?;
        Ok(self.advance(page))
    }

    /// The records that exist now. Waits for a server that is restarted.
    pub async fn rest(&mut self) -> Result<Vec<Value>, Trouble> {
        let page = patiently(|| self.ask(Duration::ZERO)).await?;
        Ok(self.advance(page))
    }

    /// Waits for the next records; none after `WAIT`. Waits for a server that is restarted.
    pub async fn next(&mut self) -> Result<Vec<Value>, Trouble> {
        let page = patiently(|| self.ask(WAIT)).await?;
        Ok(self.advance(page))
    }

    async fn ask(&self, wait: Duration) -> Result<Page<Value>, Trouble> {
        let query = [("after", self.after.to_string()), ("wait", Span::from(wait).to_string())];
        self.remote.get(&self.path, &query).await
    }

    /// Advances the position behind the records, and notes the end of the run.
    fn advance(&mut self, page: Page<Value>) -> Vec<Value> {
        for record in &page.items {
            if let Some(id) = record["id"].as_str().and_then(|id| id.parse().ok()) {
                self.after = id;
            }
            let kind = record["kind"].as_str();
            self.ended |= matches!(kind, Some("flow.completed" | "flow.failed" | "flow.cancelled"));
        }
        page.items
    }
}

/// A record as one line.
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
