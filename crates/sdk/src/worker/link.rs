//! How a worker and a server reach each other. Whatever lies between, what is said is the protocol of the WebSocket:
//! tasks come against credits, reports are answered by number, heartbeats by what has been lost.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{FromServer, FromWorker, RegisterWorker, Report, WorkerRegistered};

use crate::error::{Error, Refusal};

pub(crate) type ToServer = FromWorker<Arc<Report>>;

/// Who is there, with the tasks it has from a connection before.
#[derive(Debug, Clone)]
pub(crate) struct Hello {
    pub worker: RegisterWorker,
    pub tasks: Vec<String>,
}

/// Why there is no link, or none any more.
#[derive(Debug)]
pub(crate) enum Cut {
    /// Try again, not before the time that the server asks for.
    Lost { why: String, after: Option<Duration> },
    /// The server does not want this worker as it is.
    Refused(Error),
    /// There is nothing on the other side any more, and never will be again.
    #[cfg(feature = "engine")]
    Over,
}

pub(crate) type Opened = (Box<dyn Link>, WorkerRegistered);

/// Opens links.
#[async_trait]
pub(crate) trait Transport: Send {
    async fn open(&mut self, hello: &Hello) -> Result<Opened, Cut>;
    /// From now on another runtime hears what comes.
    fn moved(&mut self) {}
    /// The worker goes for good.
    async fn leave(&mut self, worker_id: &str) -> Result<(), Error>;
}

/// An open connection.
#[async_trait]
pub(crate) trait Link: Send {
    /// Takes a message to be sent. What becomes of it shows in what is heard.
    fn say(&mut self, message: ToServer);
    /// Sends what there is to send, and gives the next message. May be called off at any await without losing anything.
    async fn hear(&mut self) -> Result<FromServer, Cut>;
    /// There is no claim whose tasks may be this worker's without its knowing.
    fn is_settled(&self) -> bool {
        true
    }
    /// Ends it in good order, if that is possible within a moment.
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
