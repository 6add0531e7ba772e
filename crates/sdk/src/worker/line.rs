//! The line to the server: down, being opened, or up; and back up again, for ever.

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
/// A server that asks for more time than this is looked after anyway.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);
/// How long a line that is being opened is waited for when it is to be closed.
const CLOSE: Duration = Duration::from_secs(5);
/// How long a line may take to be opened again, at least; more if heartbeats are further apart than this.
const OPEN: Duration = Duration::from_secs(1);

pub(crate) struct Line {
    state: State,
    /// Held while it opens a link.
    transport: Arc<Mutex<Box<dyn Transport>>>,
    backoff: Backoff,
    worker_id: Option<String>,
    /// How far apart heartbeats are, once a server has said so.
    heartbeat: Option<Duration>,
}

enum State {
    Down { until: Instant },
    Opening(BoxFuture<'static, Result<Opened, Cut>>),
    Up(Up),
}

/// An open link, and when it was last alive.
pub(crate) struct Up {
    link: Box<dyn Link>,
    heartbeat: Duration,
    lease: Duration,
    beat_at: Instant,
    heard_at: Instant,
}

#[derive(Debug)]
pub(crate) enum Event {
    /// It is time to open the line.
    Due,
    /// The line is up.
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

    /// What happens next. May be called off at any await without losing anything.
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
            // There are leases to keep, and one server of several may be the one that does not answer.
            Some(heartbeat) => Box::pin(async move {
                let opened = tokio::time::timeout(heartbeat.max(OPEN), opening).await;
                opened.unwrap_or_else(|_| Err(Cut::lost("the server does not answer in time")))
            }),
        });
    }

    /// The runtime that heard the line does not any more: it is opened anew from this one. Not at once: the server is to
    /// have seen the end of the old connection, so that what it sent and nobody read is sent again.
    pub async fn moved(&mut self) {
        self.down(None);
        self.transport.lock().await.moved();
    }

    /// The line is down; it is opened again after a while, which is given.
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

    /// The server knows this worker.
    pub fn was_up(&self) -> bool {
        self.worker_id.is_some()
    }

    /// Ends the line, and says goodbye.
    pub async fn close(&mut self) {
        match &mut self.state {
            State::Up(up) => up.link.close().await,
            // Only then is there somebody to say goodbye for.
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
            tracing::debug!("the server was not told that the worker left: {error}");
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
            // At once: it may be a while since the last one, and what was lost meanwhile is to be known.
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

    pub fn heartbeat(&self) -> Duration {
        self.heartbeat
    }

    pub fn is_settled(&self) -> bool {
        self.link.is_settled()
    }

    /// When there is something to do: a heartbeat, or to give the server up.
    pub fn wakes(&self) -> Instant {
        self.beat_at.min(self.silent_at())
    }

    /// Whether a heartbeat is due; the next one is an interval later.
    pub fn is_beat_due(&mut self, now: Instant) -> bool {
        let due = now >= self.beat_at;
        if due {
            self.beat_at = now + self.heartbeat;
        }
        due
    }

    /// Heartbeats are answered: a server that is silent for two thirds of a lease is gone, whatever the connection looks
    /// like, and there is time for a heartbeat over another before leases end.
    pub fn is_silent(&self, now: Instant) -> bool {
        now >= self.silent_at()
    }

    fn silent_at(&self) -> Instant {
        self.heard_at + self.lease * 2 / 3
    }
}
