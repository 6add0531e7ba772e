//! Publishes events, lists and opens gates.

use std::future::IntoFuture;

use eddyline_protocol::{GateInfo, Page, PublishEvent};
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use super::Client;
use super::address::segment;
use super::http::Repeat;
use crate::error::Error;

/// The maximum number of events in one request; more are split.
const MAX_EVENTS: usize = 1_000;

/// A list of open gates: `.await` fetches all of them.
#[must_use = "`.await` lists the gates"]
#[derive(Debug)]
pub struct Gates {
    client: Client,
    run: Option<String>,
    reason: Option<String>,
}

impl Client {
    /// Publishes events to the namespace. Events without an id get one, so that each is published once even if a
    /// response is lost.
    pub async fn publish(&self, events: impl IntoIterator<Item = PublishEvent>) -> Result<(), Error> {
        let mut events: Vec<PublishEvent> = events.into_iter().collect();
        for event in &mut events {
            event.id.get_or_insert_with(|| Uuid::now_v7().to_string());
        }
        for part in events.chunks(MAX_EVENTS) {
            let _: Value = self.post(Repeat::Safe, "/v1/events", part).await?;
        }
        Ok(())
    }

    /// The gates that are open for a payload.
    pub fn gates(&self) -> Gates {
        Gates { client: self.clone(), run: None, reason: None }
    }

    /// Opens the gate with this token and passes the payload to what waits for it. A gate opens only once: opening it
    /// again is a conflict.
    pub async fn open_gate(&self, token: &str, payload: &(impl Serialize + ?Sized + Sync)) -> Result<(), Error> {
        let _: Value = self.post(Repeat::Never, &format!("/v1/gates/{}", segment(token)), payload).await?;
        Ok(())
    }
}

impl Gates {
    /// Only gates of this run.
    pub fn run(mut self, id: impl Into<String>) -> Gates {
        self.run = Some(id.into());
        self
    }

    /// `time`, `webhook`, `event` or `manual`.
    pub fn reason(mut self, reason: impl Into<String>) -> Gates {
        self.reason = Some(reason.into());
        self
    }

    async fn all(self) -> Result<Vec<GateInfo>, Error> {
        let (mut gates, mut cursor) = (Vec::new(), None);
        loop {
            let parts = [("run", self.run.clone()), ("reason", self.reason.clone()), ("cursor", cursor)];
            let query: Vec<_> =
                parts.into_iter().filter_map(|(name, value)| value.map(|value| (name, value))).collect();
            let page: Page<GateInfo> = self.client.get("/v1/gates", &query).await?;
            gates.extend(page.items);
            match page.next {
                Some(next) => cursor = Some(next),
                None => return Ok(gates),
            }
        }
    }
}

impl IntoFuture for Gates {
    type Output = Result<Vec<GateInfo>, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.all())
    }
}
