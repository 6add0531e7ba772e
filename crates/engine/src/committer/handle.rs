//! The handle through which callers reach the committer, and the loop that drives it. A caller who finds the committer
//! idle drives it itself: waking the loop's task and being woken by it would take longer than most of the work.

use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use eddyline_machine::{Input, RunId};
use eddyline_store::{Consumed, Map, Namespace, Store};
use tokio::sync::{Mutex, MutexGuard, mpsc};

use super::{Answered, Committer, GATHER, InputOutcome, NewRun, Order, panic_message};
use crate::bus::Bus;
use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::flows::Flows;
use crate::handled::Handled;
use crate::health::{Health, Reports};
use crate::quarantine::Suspicion;
use crate::shutdown::Shutdown;

/// Sends orders to the committer.
#[derive(Clone)]
pub(crate) struct CommitterHandle {
    orders: mpsc::Sender<Order>,
    slot: Arc<CommitterSlot>,
    suspicions_changed: Arc<AtomicU64>,
}

/// Empty before the loop starts and after it has ended. The loop waits for the lock; callers never do.
type CommitterSlot = Mutex<Option<Box<Committer>>>;

impl fmt::Debug for CommitterHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommitterHandle").finish_non_exhaustive()
    }
}

impl CommitterHandle {
    /// Submits inputs and waits until their outcomes are durable. Inputs of one submission are committed together.
    pub async fn submit(
        &self,
        run: RunId,
        inputs: Vec<Input>,
        taken: Option<Consumed>,
        start: Option<NewRun>,
    ) -> Result<Vec<InputOutcome>> {
        let answer = self.hand_in(run, inputs, taken, start).await?;
        answer.await.map_err(|_| EngineError::Stopped)?
    }

    /// The same for a caller who may only see runs of `ns`. Runs the committer on this task if it is idle.
    pub async fn submit_in(&self, ns: &Namespace, run: RunId, inputs: Vec<Input>) -> Result<Vec<InputOutcome>> {
        let (order, answer) = Order::submit_in(ns, run, inputs);
        self.ask(order).await?;
        answer.await.map_err(|_| EngineError::Stopped)?
    }

    /// Submits inputs without waiting for the answer, so that several submissions can be in progress.
    pub async fn hand_in(
        &self,
        run: RunId,
        inputs: Vec<Input>,
        taken: Option<Consumed>,
        start: Option<NewRun>,
    ) -> Result<Answered> {
        let (order, answer) = Order::submit(run, inputs, taken, start);
        self.send(order).await?;
        Ok(answer)
    }

    pub async fn send(&self, order: Order) -> Result<()> {
        self.orders.send(order).await.map_err(|_| EngineError::Stopped)
    }

    /// How often this process has changed the suspicions.
    pub fn suspicions_changed(&self) -> u64 {
        self.suspicions_changed.load(Ordering::Relaxed)
    }

    pub fn try_send(&self, order: Order) -> bool {
        self.orders.try_send(order).is_ok()
    }

    /// Sends an order whose answer the caller awaits right away. Executes it on this task if the committer is idle.
    pub async fn ask(&self, order: Order) -> Result<()> {
        match self.at_once(order) {
            Some(order) => self.send(order).await,
            None => Ok(()),
        }
    }

    /// Executes an order if the committer is idle; otherwise returns it.
    fn at_once(&self, order: Order) -> Option<Order> {
        let Ok(mut slot) = self.slot.try_lock() else { return Some(order) };
        // Taken out of the slot while it works: if it panics, it is dropped, which answers all callers with an error,
        // and the engine fails.
        let Some(mut committer) = slot.take_if(|committer| committer.is_idle()) else { return Some(order) };
        // The waker is the loop's: the loop continues whatever has to be awaited.
        let (driver, health) = (committer.driver.clone(), committer.health.clone());
        let worked = catch_unwind(AssertUnwindSafe(move || {
            committer.take(order);
            committer.work(&mut Context::from_waker(&committer.driver.clone()));
            committer
        }));
        let committer = match worked {
            Ok(committer) => committer,
            Err(panic) => {
                health.failed(&format!("the committer panicked: {}", panic_message(&*panic)));
                driver.wake();
                return None;
            }
        };
        if committer.next_try != committer.dispatcher.next_try() {
            driver.wake();
        }
        *slot = Some(committer);
        None
    }
}

/// The loop that drives the committer.
pub(crate) struct Driver {
    committer: Box<Committer>,
    slot: Arc<CommitterSlot>,
}

/// If the store passes hints between processes, waiting claims are tried without a hint only every so many polls.
const TICKS_WITH_HINTS: u64 = 15;

/// Why the loop stops processing orders.
enum Turn {
    /// The time at which to retry rate-limited queues has changed.
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
        slot: Empty,
    ) -> Driver {
        let mut committer = Box::new(Committer::new(store, flows, config, bus, health, handled, slot.orders));
        committer.suspicions_changed = slot.suspicions_changed;
        Driver { committer, slot: slot.slot }
    }

    /// Runs until everything that was submitted before the shutdown is answered.
    pub async fn run(self, suspects: Map<RunId, Suspicion>, mut shutdown: Shutdown) {
        let Driver { mut committer, slot } = self;
        committer.suspects = suspects;
        committer.suspicions_changed.fetch_add(1, Ordering::Relaxed);
        let (bus, store, health) = (committer.bus.clone(), committer.store.clone(), committer.health.clone());
        let mut poll = tokio::time::interval(Duration::from_millis(committer.config.poll_ms.max(1) as u64));
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ticks = 0;
        *slot.lock().await = Some(committer);
        let (mut orders, mut stopping, mut retry_in) = (Vec::with_capacity(GATHER), false, None);
        loop {
            tokio::select! {
                biased;
                turn = turn(&slot, &mut orders) => match turn {
                    Turn::Retry => {}
                    Turn::Ended => break,
                },
                // Hints may have been lost.
                _ = poll.tick() => {
                    ticks += 1;
                    let told = store.hears_others() == Some(true);
                    if let Some(committer) = &mut *slot.lock().await
                        && (!told || ticks % TICKS_WITH_HINTS == 0)
                    {
                        committer.dispatcher.hint_all();
                    }
                    if matches!(health.now(), Health::NotCommitting(_)) {
                        tokio::spawn(try_to_commit(store.clone(), health.clone()));
                    }
                }
                () = sleep(retry_in), if retry_in.is_some() => {
                    let now = store.now().await.ok();
                    if let (Some(committer), Some(now)) = (&mut *slot.lock().await, now) {
                        committer.now = now;
                        committer.dispatcher.wake_due(now);
                    }
                }
                () = shutdown.wait(), if !stopping => {
                    stopping = true;
                    if let Some(committer) = &mut *slot.lock().await {
                        committer.stop();
                    }
                }
            }
            if let Some(committer) = &mut *slot.lock().await {
                committer.next_try = committer.dispatcher.next_try();
                retry_in = committer.next_try.map(|at| Duration::from_millis((at - committer.now).max(1) as u64));
            }
        }
        // Dropping the committer answers callers that still wait with `Stopped`.
        *slot.lock().await = None;
        bus.wake_all();
    }
}

/// The slot for a committer that is not created yet, with its channel of orders.
pub(crate) struct Empty {
    orders: mpsc::Receiver<Order>,
    slot: Arc<CommitterSlot>,
    suspicions_changed: Arc<AtomicU64>,
}

/// Creates the handle, before there is a committer to execute its orders.
pub(crate) fn open(config: &Config) -> (CommitterHandle, Empty) {
    let (sender, orders) = mpsc::channel(config.queue);
    let slot = Arc::<CommitterSlot>::default();
    let suspicions_changed = Arc::<AtomicU64>::default();
    let committing =
        CommitterHandle { orders: sender, slot: slot.clone(), suspicions_changed: suspicions_changed.clone() };
    (committing, Empty { orders, slot, suspicions_changed })
}

/// Drives the committer whenever it is woken, until the loop has to do something else.
async fn turn(slot: &CommitterSlot, orders: &mut Vec<Order>) -> Turn {
    loop {
        let mut held = slot.lock().await;
        if let Some(turn) = poll_fn(|cx| Poll::Ready(work(&mut held, cx, orders))).await {
            return turn;
        }
        // Callers may use the committer until the loop is woken.
        drop(held);
        woken().await;
    }
}

fn work(
    slot: &mut MutexGuard<'_, Option<Box<Committer>>>,
    cx: &mut Context<'_>,
    orders: &mut Vec<Order>,
) -> Option<Turn> {
    let Some(mut committer) = slot.take() else { return Some(Turn::Ended) };
    committer.driver.clone_from(cx.waker());
    let ended = committer.work_on_orders(cx, orders);
    let retry = committer.next_try != committer.dispatcher.next_try();
    **slot = Some(committer);
    match (ended, retry) {
        (true, _) => Some(Turn::Ended),
        (false, true) => Some(Turn::Retry),
        (false, false) => None,
    }
}

/// Makes an empty commit to check whether the store accepts commits again.
async fn try_to_commit(store: Arc<dyn Store>, health: Reports) {
    let tried = store.commit(Vec::new(), Vec::new()).await;
    health.committed(tried.as_ref().err().map(|error| error as &dyn fmt::Display));
}

/// Returns when the task is woken.
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
