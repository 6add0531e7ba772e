//! Lists runs.

use std::collections::VecDeque;

use eddyline_protocol::{Page, RunSummary};

use super::Client;
use crate::error::Error;

/// A filter for runs; empty matches all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunFilter {
    pub flow: Option<String>,
    /// `pending`, `running`, `waiting`, `paused`, `completed`, `failed` or `cancelled`.
    pub status: Option<String>,
    /// All of these.
    pub tags: Vec<String>,
    pub external_id: Option<String>,
    /// Created since and until this time, in RFC 3339.
    pub since: Option<String>,
    pub until: Option<String>,
    /// The maximum page size.
    pub limit: Option<u32>,
    /// `next` of the previous page.
    pub cursor: Option<String>,
}

/// All runs that match a filter, fetched page by page.
#[derive(Debug)]
pub struct RunList {
    client: Client,
    filter: RunFilter,
    ready: VecDeque<RunSummary>,
    last: bool,
}

impl Client {
    /// A page of runs, newest first. Pass `next` as [`RunFilter::cursor`].
    pub async fn list(&self, filter: &RunFilter) -> Result<Page<RunSummary>, Error> {
        let one = |name: &'static str, value: &Option<String>| value.clone().map(|value| (name, value));
        let mut query: Vec<(&str, String)> = [
            one("flow", &filter.flow),
            one("status", &filter.status),
            one("external_id", &filter.external_id),
            one("since", &filter.since),
            one("until", &filter.until),
            one("cursor", &filter.cursor),
            filter.limit.map(|limit| ("limit", limit.to_string())),
        ]
        .into_iter()
        .flatten()
        .collect();
        query.extend(filter.tags.iter().map(|tag| ("tag", tag.clone())));
        self.get("/v1/runs", &query).await
    }

    /// All runs, newest first, fetched page by page on demand.
    pub fn list_all(&self, filter: RunFilter) -> RunList {
        RunList { client: self.clone(), filter, ready: VecDeque::new(), last: false }
    }
}

impl RunList {
    pub async fn next(&mut self) -> Option<Result<RunSummary, Error>> {
        loop {
            if let Some(run) = self.ready.pop_front() {
                return Some(Ok(run));
            }
            if self.last {
                return None;
            }
            match self.client.list(&self.filter).await {
                Ok(page) => {
                    self.last = page.next.is_none();
                    self.filter.cursor = page.next;
                    self.ready = page.items.into();
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }
}
