//! Events are published, gates are opened.

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

/// How many events one request publishes; more are sent in parts.
const MAX_EVENTS: usize = 1_000;

/// Open gates that are about to be listed: `.await` gives all of them.
#[must_use = "gates are listed by `.await`"]
#[derive(Debug)]
pub struct Gates {
    client: Client,
    run: Option<String>,
    reason: Option<String>,
}

impl Client {
    /// Publishes events to the namespace. An event without an id gets one, so that it is published once even if an answer
    /// is lost on the way.
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

    /// The gates that wait to be opened.
    pub fn gates(&self) -> Gates {
        Gates { client: self.clone(), run: None, reason: None }
    }

    /// Opens the gate of that token; what waits for it goes on with the payload. A gate opens once: opening it again is a
    /// conflict.
    pub async fn open_gate(&self, token: &str, payload: &(impl Serialize + ?Sized + Sync)) -> Result<(), Error> {
        let _: Value = self.post(Repeat::Never, &format!("/v1/gates/{}", segment(token)), payload).await?;
        Ok(())
    }
}

impl Gates {
    /// Of one run.
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
