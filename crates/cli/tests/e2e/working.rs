//! Workers in this process, which are aborted when they are dropped.

use std::time::Duration;

use eddyline::Worker;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::eddy::LONG;

/// How a worker connects to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Socket,
    Http,
}

pub const TRANSPORTS: [Transport; 2] = [Transport::Socket, Transport::Http];

pub struct Working {
    stop: Option<oneshot::Sender<()>>,
    working: JoinHandle<Result<(), eddyline::Error>>,
}

pub fn work(worker: Worker, transport: Transport) -> Working {
    let worker = match transport {
        Transport::Socket => worker,
        Transport::Http => worker.http_only(),
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = worker.drain_timeout(Duration::from_secs(5));
    Working { stop: Some(stop), working: tokio::spawn(worker.run_until(stopped)) }
}

impl Working {
    /// Drains the worker, and waits for its end.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        let ended = tokio::time::timeout(LONG, &mut self.working).await.expect("the worker does not stop");
        ended.unwrap().unwrap();
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.working.abort();
    }
}
