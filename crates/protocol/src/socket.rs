//! `GET /v1/workers/connect`: the same messages over a WebSocket, one JSON text a message. The worker says
//! [`FromWorker::Hello`] first; the server pushes tasks for as long as there are credits, each task using one up.

use serde::{Deserialize, Serialize};

use crate::error::ApiError;
use crate::tasks::{News, Outcome, Report, Task};
use crate::workers::{Beat, Heartbeat, RegisterWorker, WorkerRegistered};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromWorker<R = Report> {
    Hello {
        #[serde(flatten)]
        worker: RegisterWorker,
        /// The ids of the tasks that the worker has, from a connection before this one. Others that were pushed to it
        /// there never arrived, and are offered again without costing an attempt.
        #[serde(default)]
        tasks: Vec<String>,
    },
    /// Room for so many more tasks.
    Credit { n: u32 },
    /// Answered by [`FromServer::Reported`] with the same id.
    Report {
        id: u64,
        reports: Vec<R>,
        /// Room that became free with them.
        #[serde(default)]
        credit: u32,
    },
    Heartbeat {
        #[serde(flatten)]
        beat: Heartbeat,
    },
    /// No more tasks: the worker finishes what it has.
    Drain,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
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
        outcomes: Vec<Outcome>,
        #[serde(default)]
        news: News,
    },
    /// The answer to a heartbeat; also unasked, when a task is cancelled or lost, or the worker is to drain.
    Beat {
        #[serde(flatten)]
        beat: Beat,
    },
    /// The server closes the connection after it.
    Error {
        error: ApiError,
    },
}
