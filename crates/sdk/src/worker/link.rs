//! The link between worker and server. All transports use the messages of the WebSocket protocol: tasks against
//! credits, reports answered by id, heartbeats answered with lost tasks.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{FromServer, FromWorker, RegisterWorker, Report, WorkerRegistered};

use crate::code::driver::MemoPages;
use crate::error::{Error, Refusal};

pub(crate) type ToServer = FromWorker<Arc<Report>>;

/// The worker, with the tasks it holds from an earlier connection.
#[derive(Debug, Clone)]
pub(crate) struct Hello {
    pub worker: RegisterWorker,
    pub tasks: Vec<String>,
}

/// Why there is no link.
#[derive(Debug)]
pub(crate) enum Cut {
    /// Reconnect, but not before the time the server asks for.
    Lost { why: String, after: Option<Duration> },
    /// The server refuses this worker as configured.
    Refused(Error),
    /// The engine has stopped for good.
    #[cfg(feature = "engine")]
    Over,
}

pub(crate) type Opened = (Box<dyn Link>, WorkerRegistered);

/// Opens links.
#[async_trait]
pub(crate) trait Transport: Send {
    async fn open(&mut self, hello: &Hello) -> Result<Opened, Cut>;
    /// Reads the memos of code runs, on the runtime that it is called on.
    fn pages(&self) -> Arc<dyn MemoPages>;
    /// Unregisters the worker.
    async fn leave(&mut self, worker_id: &str) -> Result<(), Error>;
}

/// An open connection.
#[async_trait]
pub(crate) trait Link: Send {
    /// Queues a message. Its result arrives through `hear`.
    fn say(&mut self, message: ToServer);
    /// Sends queued messages and returns the next received one. Cancel-safe.
    async fn hear(&mut self) -> Result<FromServer, Cut>;
    /// Whether there is no unanswered claim whose tasks the worker may hold without knowing.
    fn is_settled(&self) -> bool {
        true
    }
    /// Closes the link cleanly, if that is possible within a moment.
    async fn close(&mut self);
}

impl Cut {
    pub fn lost(why: impl Into<String>) -> Cut {
        Cut::Lost { why: why.into(), after: None }
    }
}

impl From<Refusal> for Cut {
    fn from(refusal: Refusal) -> Cut {
        match refusal.error {
            Error::Api { status: 400 | 401 | 403 | 404 | 413 | 415 | 422, .. } | Error::Config(_) => {
                Cut::Refused(refusal.error)
            }
            error => Cut::Lost { why: error.to_string(), after: refusal.retry_after },
        }
    }
}
