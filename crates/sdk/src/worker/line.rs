//! The connection to the server: down, being opened, or up; reconnects for ever.

use std::sync::Arc;
use std::time::Duration;

use eddyline_protocol::{FromServer, WorkerRegistered};
use futures_util::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::link::{Cut, Hello, Link, Opened, ToServer, Transport};
use crate::backoff::Backoff;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The longest `Retry-After` that is honoured.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);
/// How long to wait for a link that is being opened before closing it.
const CLOSE: Duration = Duration::from_secs(5);
/// The minimum timeout for reconnecting; longer if the heartbeat interval is longer.
const OPEN: Duration = Duration::from_secs(1);

pub(crate) struct Line {
    state: State,
    /// Locked while a link is being opened.
    transport: Arc<Mutex<Box<dyn Transport>>>,
    backoff: Backoff,
    worker_id: Option<String>,
    /// The heartbeat interval, once known.
    heartbeat: Option<Duration>,
}

enum State {
    Down { until: Instant },
    Opening(BoxFuture<'static, Result<Opened, Cut>>),
    Up(Up),
}

/// An open link, and when it was last active.
pub(crate) struct Up {
    link: Box<dyn Link>,
    heartbeat: Duration,
    lease: Duration,
    beat_at: Instant,
    heard_at: Instant,
}

#[derive(Debug)]
pub(crate) enum Event {
    /// It is time to connect.
    Due,
    /// The link is up.
    Opened,
    Heard(FromServer),
    Cut(Cut),
}

impl Line {
    pub fn new(transport: Box<dyn Transport>) -> Line {
        let backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let transport = Arc::new(Mutex::new(transport));
        Line { state: State::Down { until: Instant::now() }, transport, backoff, worker_id: None, heartbeat: None }
    }

    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> Event {
        match &mut self.state {
            State::Down { until } => {
                tokio::time::sleep_until(*until).await;
                Event::Due
            }
            State::Opening(opening) => match opening.await {
                Ok((link, worker)) => self.opened(link, worker),
                Err(cut) => Event::Cut(cut),
            },
            State::Up(up) => match up.link.hear().await {
                Ok(message) => {
                    up.heard_at = Instant::now();
                    self.backoff.reset();
                    Event::Heard(message)
                }
                Err(cut) => Event::Cut(cut),
            },
        }
    }

    pub fn open(&mut self, hello: Hello) {
        let transport = self.transport.clone().lock_owned();
        let opening = async move { transport.await.open(&hello).await };
        self.state = State::Opening(match self.heartbeat {
            None => Box::pin(opening),
            // There are leases to extend, and of several servers only one may be unresponsive.
            Some(heartbeat) => Box::pin(async move {
                let opened = tokio::time::timeout(heartbeat.max(OPEN), opening).await;
                opened.unwrap_or_else(|_| Err(Cut::lost("the server did not respond in time")))
            }),
        });
    }

    /// Marks the connection as down and returns how long to wait before reconnecting.
    pub fn down(&mut self, after: Option<Duration>) -> Duration {
        let pause = self.backoff.next().max(after.unwrap_or_default().min(LONGEST_RETRY_AFTER));
        self.state = State::Down { until: Instant::now() + pause };
        pause
    }

    pub fn up_now(&self) -> Option<&Up> {
        match &self.state {
            State::Up(up) => Some(up),
            _ => None,
        }
    }

    pub fn up(&mut self) -> Option<&mut Up> {
        match &mut self.state {
            State::Up(up) => Some(up),
            _ => None,
        }
    }

    /// Whether the server has registered this worker.
    pub fn was_up(&self) -> bool {
        self.worker_id.is_some()
    }

    /// Closes the link and unregisters the worker.
    pub async fn close(&mut self) {
        match &mut self.state {
            State::Up(up) => up.link.close().await,
            // Only then is the worker's id known.
            State::Opening(opening) => {
                if let Ok(Ok((mut link, worker))) = tokio::time::timeout(CLOSE, opening).await {
                    link.close().await;
                    self.worker_id = Some(worker.worker_id);
                }
            }
            State::Down { .. } => {}
        }
        self.state = State::Down { until: Instant::now() };
        if let Some(worker_id) = &self.worker_id
            && let Err(error) = self.transport.lock().await.leave(worker_id).await
        {
            tracing::debug!("cannot unregister the worker: {error}");
        }
    }

    fn opened(&mut self, link: Box<dyn Link>, worker: WorkerRegistered) -> Event {
        let now = Instant::now();
        tracing::info!(worker = worker.worker_id, "connected");
        self.worker_id = Some(worker.worker_id);
        let heartbeat = Duration::from_millis(worker.heartbeat_ms.max(1));
        self.heartbeat = Some(heartbeat);
        self.state = State::Up(Up {
            link,
            heartbeat,
            lease: Duration::from_millis(worker.lease_ms.max(1)),
            // Immediately: the last one may be long ago, and tasks may have been lost meanwhile.
            beat_at: now,
            heard_at: now,
        });
        Event::Opened
    }
}

impl Up {
    pub fn say(&mut self, message: ToServer) {
        self.link.say(message);
    }

    pub fn is_settled(&self) -> bool {
        self.link.is_settled()
    }

    /// When there is something to do: a heartbeat, or giving up on the server.
    pub fn wakes(&self) -> Instant {
        self.beat_at.min(self.silent_at())
    }

    /// Whether a heartbeat is due; schedules the next one.
    pub fn is_beat_due(&mut self, now: Instant) -> bool {
        let due = now >= self.beat_at;
        if due {
            self.beat_at = now + self.heartbeat;
        }
        due
    }

    /// Heartbeats are answered, so a server that is silent for two thirds of a lease counts as gone, whatever the state
    /// of the connection. That leaves time for a heartbeat over another connection before leases expire.
    pub fn is_silent(&self, now: Instant) -> bool {
        now >= self.silent_at()
    }

    fn silent_at(&self) -> Instant {
        self.heard_at + self.lease * 2 / 3
    }
}
