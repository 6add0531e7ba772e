//! Where the committer sits. Its loop works there whenever something comes in, and so does a caller who finds it with
//! nothing to do: to wake another task and be woken by it takes longer than most of what there is to do.

use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use eddyline_machine::{Input, RunId};
use eddyline_store::{Map, Namespace, Store, Taken};
use tokio::sync::{Mutex, MutexGuard, mpsc};

use super::{Answered, Committer, GATHER, NewRun, Order, Outcome, said};
use crate::bus::Bus;
use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::flows::Flows;
use crate::handled::Handled;
use crate::health::{Health, Reports};
use crate::quarantine::Suspicion;
use crate::shutdown::Shutdown;

/// Where callers send to.
#[derive(Clone)]
pub(crate) struct Committing {
    orders: mpsc::Sender<Order>,
    desk: Arc<Desk>,
    suspicions_changed: Arc<AtomicU64>,
}

/// Empty before the loop has begun and after it has ended. The loop waits for its turn; callers never do.
type Desk = Mutex<Option<Box<Committer>>>;

impl fmt::Debug for Committing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committing").finish_non_exhaustive()
    }
}

impl Committing {
    /// What became of the inputs, once that is durable. Several that are submitted together are committed together.
    pub async fn submit(
        &self,
        run: RunId,
        inputs: Vec<Input>,
        taken: Option<Taken>,
        start: Option<NewRun>,
    ) -> Result<Vec<Outcome>> {
        let answer = self.hand_in(run, inputs, taken, start).await?;
        answer.await.map_err(|_| EngineError::Stopped)?
    }

    /// The same for somebody of a namespace, who has nothing else to submit.
    pub async fn submit_in(&self, ns: &Namespace, run: RunId, inputs: Vec<Input>) -> Result<Vec<Outcome>> {
        let (order, answer) = Order::submit_in(ns, run, inputs);
        self.ask(order).await?;
        answer.await.map_err(|_| EngineError::Stopped)?
    }

    /// Hands inputs in and returns at once: several are on their way together.
    pub async fn hand_in(
        &self,
        run: RunId,
        inputs: Vec<Input>,
        taken: Option<Taken>,
        start: Option<NewRun>,
    ) -> Result<Answered> {
        let (order, answer) = Order::submit(run, inputs, taken, start);
        self.send(order).await?;
        Ok(answer)
    }

    pub async fn send(&self, order: Order) -> Result<()> {
        self.orders.send(order).await.map_err(|_| EngineError::Stopped)
    }

    /// How often this process has changed what it knows of suspected runs.
    pub fn suspicions_changed(&self) -> u64 {
        self.suspicions_changed.load(Ordering::Relaxed)
    }

    pub fn try_send(&self, order: Order) -> bool {
        self.orders.try_send(order).is_ok()
    }

    /// Sends an order whose answer is waited for right away: it is carried out here and now, if nothing else is.
    pub async fn ask(&self, order: Order) -> Result<()> {
        match self.at_once(order) {
            Some(order) => self.send(order).await,
            None => Ok(()),
        }
    }

    /// Carries an order out, or gives it back.
    fn at_once(&self, order: Order) -> Option<Order> {
        let Ok(mut desk) = self.desk.try_lock() else { return Some(order) };
        // Taken from its place while it works: should it panic, it is gone, all who wait for it are told so, and the
        // engine has failed.
        let Some(mut committer) = desk.take_if(|committer| committer.is_idle()) else { return Some(order) };
        // Whatever has to be waited for goes on in the loop.
        let (driver, health) = (committer.driver.clone(), committer.health.clone());
        let worked = catch_unwind(AssertUnwindSafe(move || {
            committer.take(order);
            committer.work(&mut Context::from_waker(&committer.driver.clone()));
            committer
        }));
        let committer = match worked {
            Ok(committer) => committer,
            Err(panic) => {
                health.failed(&format!("the committer panicked: {}", said(&*panic)));
                driver.wake();
                return None;
            }
        };
        if committer.next_try != committer.dispatcher.next_try() {
            driver.wake();
        }
        *desk = Some(committer);
        None
    }
}

/// The loop.
pub(crate) struct Driver {
    committer: Box<Committer>,
    desk: Arc<Desk>,
}

/// Why the loop turns to something else than orders.
enum Turn {
    /// When it looks after what a rate holds back has changed.
    Retry,
    Ended,
}

impl Driver {
    pub fn new(
        store: Arc<dyn Store>,
        flows: Arc<Flows>,
        config: Arc<Config>,
        bus: Arc<Bus>,
        health: Reports,
        handled: Arc<Handled>,
        desk: Empty,
    ) -> Driver {
        let mut committer = Box::new(Committer::new(store, flows, config, bus, health, handled, desk.orders));
        committer.suspicions_changed = desk.suspicions_changed;
        Driver { committer, desk: desk.desk }
    }

    /// Until everything that was handed in before the shutdown is answered.
    pub async fn run(self, suspects: Map<RunId, Suspicion>, mut shutdown: Shutdown) {
        let Driver { mut committer, desk } = self;
        committer.suspects = suspects;
        committer.suspicions_changed.fetch_add(1, Ordering::Relaxed);
        let (bus, store, health) = (committer.bus.clone(), committer.store.clone(), committer.health.clone());
        let mut poll = tokio::time::interval(Duration::from_millis(committer.config.poll_ms.max(1) as u64));
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        *desk.lock().await = Some(committer);
        let (mut orders, mut stopping, mut retry_in) = (Vec::with_capacity(GATHER), false, None);
        loop {
            tokio::select! {
                biased;
                turn = turn(&desk, &mut orders) => match turn {
                    Turn::Retry => {}
                    Turn::Ended => break,
                },
                // Hints may not have come.
                _ = poll.tick() => {
                    if let Some(committer) = &mut *desk.lock().await {
                        committer.dispatcher.hint_all();
                    }
                    if matches!(health.now(), Health::NotCommitting(_)) {
                        tokio::spawn(try_to_commit(store.clone(), health.clone()));
                    }
                }
                () = sleep(retry_in), if retry_in.is_some() => {
                    let now = store.now().await.ok();
                    if let (Some(committer), Some(now)) = (&mut *desk.lock().await, now) {
                        committer.now = now;
                        committer.dispatcher.wake_due(now);
                    }
                }
                () = shutdown.wait(), if !stopping => {
                    stopping = true;
                    if let Some(committer) = &mut *desk.lock().await {
                        committer.stop();
                    }
                }
            }
            if let Some(committer) = &mut *desk.lock().await {
                committer.next_try = committer.dispatcher.next_try();
                retry_in = committer.next_try.map(|at| Duration::from_millis((at - committer.now).max(1) as u64));
            }
        }
        // Those who still wait for an answer are told that there will be none.
        *desk.lock().await = None;
        bus.wake_all();
    }
}

/// A place for a committer, with the orders that gather there.
pub(crate) struct Empty {
    orders: mpsc::Receiver<Order>,
    desk: Arc<Desk>,
    suspicions_changed: Arc<AtomicU64>,
}

/// Where orders are sent to, before there is anybody to carry them out.
pub(crate) fn open(config: &Config) -> (Committing, Empty) {
    let (sender, orders) = mpsc::channel(config.queue);
    let desk = Arc::<Desk>::default();
    let suspicions_changed = Arc::<AtomicU64>::default();
    let committing = Committing { orders: sender, desk: desk.clone(), suspicions_changed: suspicions_changed.clone() };
    (committing, Empty { orders, desk, suspicions_changed })
}

/// Works whenever there is something to do, until there is something else to look after.
async fn turn(desk: &Desk, orders: &mut Vec<Order>) -> Turn {
    loop {
        let mut held = desk.lock().await;
        if let Some(turn) = poll_fn(|cx| Poll::Ready(work(&mut held, cx, orders))).await {
            return turn;
        }
        // Whoever wants it may have it until there is something to do.
        drop(held);
        woken().await;
    }
}

fn work(
    desk: &mut MutexGuard<'_, Option<Box<Committer>>>,
    cx: &mut Context<'_>,
    orders: &mut Vec<Order>,
) -> Option<Turn> {
    let Some(mut committer) = desk.take() else { return Some(Turn::Ended) };
    committer.driver.clone_from(cx.waker());
    let ended = committer.work_on_orders(cx, orders);
    let retry = committer.next_try != committer.dispatcher.next_try();
    **desk = Some(committer);
    match (ended, retry) {
        (true, _) => Some(Turn::Ended),
        (false, true) => Some(Turn::Retry),
        (false, false) => None,
    }
}

/// Commits nothing, to learn whether that is possible again.
async fn try_to_commit(store: Arc<dyn Store>, health: Reports) {
    let tried = store.commit(Vec::new(), Vec::new()).await;
    health.committed(tried.as_ref().err().map(|error| error as &dyn fmt::Display));
}

/// Until the task is woken.
async fn woken() {
    let mut asked = false;
    poll_fn(|_| if std::mem::replace(&mut asked, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

async fn sleep(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}
