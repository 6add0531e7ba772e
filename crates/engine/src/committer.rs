//! The one place where inputs of runs are decided and committed.
//!
//! While one batch is being written, the next one fills up: one transition per run, with all waiting inputs of the run
//! decided together. Inputs are never dropped: after a conflict the run is loaded and decided again, and a commit that
//! the store rejects is answered with the error. Claims are part of the batches, see [`crate::dispatcher`].
//!
//! The committer is a struct behind a lock. Its loop ([`handle`]) drives it, and so does a caller who finds it idle.

mod batch;
mod handle;
mod heavy;
mod load;
mod prepare;
mod question;
mod reading;
mod turns;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use eddyline_machine::{Answer, Input, Millis, RunId};
use eddyline_store::{Change, Claimed, Consumed, Heard, Hints, Map, Namespace, RequestId, StartKey, Store};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use futures_util::stream::StreamExt;
use tokio::sync::{mpsc, oneshot};

use crate::bus::Bus;
use crate::config::Config;
use crate::dispatcher::{Dispatcher, Parked};
use crate::error::{EngineError, Result};
use crate::flows::{Flows, Registered};
use crate::handled::Handled;
use crate::health::Reports;
use crate::quarantine::Suspicion;
use crate::run_cache::RunCache;
use batch::Sent;
pub(crate) use handle::{CommitterHandle, Driver, open};
use heavy::HeavyDecision;
use load::{FinishedLoad, InTurn};
pub(crate) use question::panic_message;
use turns::Turns;

/// The most orders that are taken from the channel at once.
const GATHER: usize = 1_024;
/// The most inputs of one run that are decided together.
const INPUTS_A_TRANSITION: usize = 512;

/// What callers send to the committer.
#[derive(Debug)]
pub(crate) enum Order {
    Submit(Submission),
    Park(Parked),
    Unpark(RequestId),
    /// The worker gets no more tasks: answer its parked claims.
    Dismiss(Namespace, String),
    /// Claimed, but never delivered.
    Release(Vec<Claimed>),
    /// The suspicion of a run has changed.
    Suspect(RunId, Suspicion),
    /// All suspicions in the store, read when this process had made `as_of` changes to them.
    Suspects {
        known: Map<RunId, Suspicion>,
        as_of: u64,
    },
    /// Hints were lost.
    Missed,
    /// Takes all of these before the next batch, so that a worker's claim can get the tasks that its reports create.
    All(Vec<Order>),
}

impl Order {
    /// Inputs of a run, and the receiver of the answer.
    pub fn submit(run: RunId, inputs: Vec<Input>, taken: Option<Consumed>, start: Option<NewRun>) -> (Order, Answered) {
        let (reply, answer) = oneshot::channel();
        (Order::Submit(Submission { run, ns: None, inputs, taken, start, reply }), answer)
    }

    /// The same for a caller who may only see runs of `ns`.
    pub fn submit_in(ns: &Namespace, run: RunId, inputs: Vec<Input>) -> (Order, Answered) {
        let (reply, answer) = oneshot::channel();
        (Order::Submit(Submission { run, ns: Some(ns.clone()), inputs, taken: None, start: None, reply }), answer)
    }
}

/// Inputs of one run that belong together: they are decided in order, up to the first that is not applied.
#[derive(Debug)]
pub(crate) struct Submission {
    pub run: RunId,
    /// The namespace of the caller. A run of another namespace is reported as not found.
    pub ns: Option<Namespace>,
    pub inputs: Vec<Input>,
    /// Consumed by the commit in which the (only) input is decided.
    pub taken: Option<Consumed>,
    /// Creates the run if it does not exist.
    pub start: Option<NewRun>,
    pub reply: oneshot::Sender<Result<Vec<InputOutcome>>>,
}

#[derive(Debug, Clone)]
pub(crate) struct NewRun {
    pub ns: Namespace,
    pub flow: Arc<Registered>,
    pub key: Option<StartKey>,
    /// See [`eddyline_store::RunCommit::tells_line`].
    pub tells_line: Option<Box<Input>>,
}

/// The result of one input.
#[derive(Debug, Clone, PartialEq)]
pub enum InputOutcome {
    Answered {
        answer: Answer,
        at: Millis,
    },
    /// An earlier input of the submission was not applied.
    NotTried,
    /// The due item that it came from was already consumed.
    Gone,
    /// The idempotency key belongs to another run.
    KeyTaken {
        run: RunId,
        fingerprint: [u8; 32],
    },
    /// Another run holds the unique key.
    UniqueTaken {
        run: RunId,
    },
    /// Too many runs wait for the unique key.
    LineFull,
}

/// Receives the results of a submission once they are durable.
pub(crate) type Answered = oneshot::Receiver<Result<Vec<InputOutcome>>>;

pub(crate) struct Committer {
    store: Arc<dyn Store>,
    flows: Arc<Flows>,
    config: Arc<Config>,
    orders: mpsc::Receiver<Order>,
    hints: Hints,
    bus: Arc<Bus>,
    health: Reports,
    cache: RunCache,
    lanes: Map<RunId, Lane>,
    ready: Turns,
    /// Runs that were being decided when a process died. Each is decided alone, or not at all if quarantined.
    suspects: Map<RunId, Suspicion>,
    /// How often this process has changed the suspicions.
    suspicions_changed: Arc<AtomicU64>,
    ready_suspects: VecDeque<RunId>,
    handled: Arc<Handled>,
    /// Runs that wait to be decided on another thread, because their decisions take too long for this one.
    heavy: Turns,
    heavy_suspects: VecDeque<RunId>,
    /// Heavy runs that had their turn but had to be loaded first; they go before `heavy`.
    heavy_next: VecDeque<RunId>,
    /// Heavy runs that keep their turn while they are loaded, including those in `heavy_next`.
    heavy_reading: BTreeSet<RunId>,
    /// The run whose decision holds a large read in memory, and the runs that wait for it to finish.
    large_read: Option<RunId>,
    large_read_waiting: Turns,
    heavy_deciding: FuturesUnordered<BoxFuture<'static, HeavyDecision>>,
    /// The only heavy decision in progress is about a suspect.
    deciding_suspect: bool,
    heavy_threads: usize,
    dispatcher: Dispatcher,
    /// Claims in the batches that are being written.
    trying: Map<RequestId, Trying>,
    loads: FuturesUnordered<BoxFuture<'static, FinishedLoad>>,
    /// Runs that other instances change too, and until when their commits need a turn.
    contended: Map<RunId, Instant>,
    sent: FuturesUnordered<BoxFuture<'static, Sent>>,
    /// How many transitions are in them.
    sending: usize,
    /// The ticket of the next submission.
    tickets: Ticket,
    /// The store's time when it was last read.
    now: Millis,
    asking_time: Option<BoxFuture<'static, eddyline_store::Result<Millis>>>,
    /// Accepted inputs are still committed, but nothing more is claimed.
    stopping: bool,
    /// Wakes the loop.
    driver: Waker,
    /// When the loop next retries queues that are blocked by a rate limit.
    next_try: Option<Millis>,
}

/// A claim in a batch that is being written.
#[derive(Debug)]
struct Trying {
    ns: Namespace,
    worker: String,
    /// Answer it after this try, even without tasks.
    called_off: bool,
}

/// Numbers submissions in order of arrival, which tells which of them arrived before a load began.
type Ticket = u64;

/// The waiting inputs of a run.
#[derive(Debug)]
struct Lane {
    waiting: VecDeque<Pending>,
    /// The run is being loaded, committed or decided on another thread.
    busy: bool,
    /// The cached run was compared with the store after the submissions with lower tickets had arrived. Only those may
    /// be answered from the cache.
    fresh: Ticket,
    /// How many commits of the run were refused in a row.
    conflicts: u32,
    /// Held until the next commit.
    turn: Option<InTurn>,
    /// How many inputs are decided together. Lowered while searching for an input whose decision fails.
    at_most: usize,
    /// How many inputs the last decision took.
    asked: usize,
    /// The decision takes too long for the committer's thread.
    heavy: bool,
    /// It had its turn for a thread but has to be loaded first.
    has_turn: bool,
    /// The decision that another thread made on the inputs.
    heavy_decision: Option<HeavyDecision>,
}

impl Default for Lane {
    fn default() -> Lane {
        Lane {
            waiting: VecDeque::new(),
            busy: false,
            fresh: 0,
            conflicts: 0,
            turn: None,
            at_most: INPUTS_A_TRANSITION,
            asked: 0,
            heavy: false,
            has_turn: false,
            heavy_decision: None,
        }
    }
}

/// A submission and the results that it has so far.
#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    ns: Option<Namespace>,
    inputs: VecDeque<Input>,
    outcomes: Vec<InputOutcome>,
    taken: Option<Consumed>,
    start: Option<NewRun>,
    reply: oneshot::Sender<Result<Vec<InputOutcome>>>,
}

impl Pending {
    fn is_message(&self) -> bool {
        matches!(self.taken, Some(Consumed::Message(_)))
    }

    fn answer(self) {
        let _ = self.reply.send(Ok(self.outcomes));
    }

    fn fail(self, error: EngineError) {
        let _ = self.reply.send(Err(error));
    }
}

impl Committer {
    fn new(
        store: Arc<dyn Store>,
        flows: Arc<Flows>,
        config: Arc<Config>,
        bus: Arc<Bus>,
        health: Reports,
        handled: Arc<Handled>,
        orders: mpsc::Receiver<Order>,
    ) -> Committer {
        Committer {
            hints: store.watch(),
            bus,
            health,
            store,
            flows,
            orders,
            cache: RunCache::new(config.cache_bytes),
            config,
            lanes: Map::default(),
            ready: Turns::default(),
            suspects: Map::default(),
            suspicions_changed: Arc::default(),
            ready_suspects: VecDeque::new(),
            handled,
            heavy: Turns::default(),
            heavy_suspects: VecDeque::new(),
            heavy_next: VecDeque::new(),
            heavy_reading: BTreeSet::new(),
            large_read: None,
            large_read_waiting: Turns::default(),
            heavy_deciding: FuturesUnordered::new(),
            deciding_suspect: false,
            heavy_threads: heavy::threads(),
            dispatcher: Dispatcher::default(),
            trying: Map::default(),
            loads: FuturesUnordered::new(),
            contended: Map::default(),
            sent: FuturesUnordered::new(),
            sending: 0,
            tickets: 0,
            now: 0,
            asking_time: None,
            stopping: false,
            driver: Waker::noop().clone(),
            next_try: None,
        }
    }

    /// No commit, load or decision is pending, and no order waits.
    fn is_idle(&self) -> bool {
        self.sent.is_empty()
            && self.loads.is_empty()
            && !self.is_ready()
            && self.heavy.is_empty()
            && self.heavy_suspects.is_empty()
            && self.heavy_next.is_empty()
            && self.large_read_waiting.is_empty()
            && self.heavy_deciding.is_empty()
            && self.asking_time.is_none()
            && self.orders.is_empty()
            && !self.stopping
    }

    /// Makes all progress that is possible without waiting, but takes no orders.
    fn work(&mut self, cx: &mut Context<'_>) {
        // Most hints follow from the commits made here, and this loop polls for them anyway.
        self.hints.hush();
        loop {
            self.send_batches(cx);
            self.begin_heavy(cx);
            if let Poll::Ready(Some(sent)) = self.sent.poll_next_unpin(cx) {
                self.finished(sent);
            } else if let Poll::Ready(Some(loaded)) = self.loads.poll_next_unpin(cx) {
                self.loaded(loaded);
            } else if let Poll::Ready(Some(decision)) = self.heavy_deciding.poll_next_unpin(cx) {
                self.heavy_decided(decision);
            } else if let Poll::Ready(Some(heard)) = self.hints.poll_next(cx) {
                self.hinted(heard);
            } else if !self.start_next_large_read() {
                return;
            }
        }
    }

    /// Takes orders as well. True when it is stopping and everything that was accepted is answered.
    fn work_on_orders(&mut self, cx: &mut Context<'_>, taken: &mut Vec<Order>) -> bool {
        loop {
            self.work(cx);
            if self.stopping {
                let heavy = !self.heavy.is_empty() || !self.heavy_suspects.is_empty() || !self.heavy_next.is_empty();
                let heavy = heavy || !self.large_read_waiting.is_empty();
                let deciding = self.is_ready() || heavy || !self.heavy_deciding.is_empty();
                return self.sent.is_empty() && self.loads.is_empty() && !deciding;
            }
            match self.orders.poll_recv_many(cx, taken, GATHER) {
                Poll::Ready(0) => self.stopping = true,
                Poll::Ready(_) => taken.drain(..).for_each(|order| self.take(order)),
                Poll::Pending => return false,
            }
        }
    }

    /// Reads the store's time; false while the store has not answered.
    fn look_at_time(&mut self, cx: &mut Context<'_>) -> bool {
        let store = &self.store;
        let asking = self.asking_time.get_or_insert_with(|| {
            let store = store.clone();
            async move { store.now().await }.boxed()
        });
        let Poll::Ready(now) = asking.poll_unpin(cx) else { return false };
        self.asking_time = None;
        self.now = now.unwrap_or(self.now);
        true
    }

    fn stop(&mut self) {
        self.stopping = true;
        // Orders in the channel were accepted, so they are still answered.
        self.orders.close();
        while let Ok(order) = self.orders.try_recv() {
            self.take(order);
        }
        for parked in self.dispatcher.drain() {
            let _ = parked.reply.send(Ok(Vec::new()));
        }
        self.bus.wake_all();
    }

    fn hinted(&mut self, heard: Heard) {
        let Heard::Changes(changes) = heard else {
            self.dispatcher.hint_all();
            return self.bus.wake_all();
        };
        for change in changes.iter() {
            if let Change::Tasks { ns, queue } = change {
                self.dispatcher.hint(ns.clone(), queue.clone());
            }
        }
        self.bus.pass_on(&changes);
    }

    fn take(&mut self, order: Order) {
        match order {
            Order::Submit(submission) => self.accept(submission),
            Order::Park(parked) => {
                if let Some(repeated) = self.dispatcher.park(parked) {
                    let _ = repeated.reply.send(Ok(Vec::new()));
                }
            }
            Order::Unpark(request) => match self.dispatcher.unpark(request) {
                Some(parked) => {
                    let _ = parked.reply.send(Ok(Vec::new()));
                }
                None => {
                    // A claim that is neither parked nor being tried is already answered.
                    if let Some(trying) = self.trying.get_mut(&request) {
                        trying.called_off = true;
                    }
                }
            },
            Order::Dismiss(ns, worker) => {
                for parked in self.dispatcher.dismiss(&ns, &worker) {
                    let _ = parked.reply.send(Ok(Vec::new()));
                }
                // Claims in a batch may still get tasks; those are delivered.
                let its = self.trying.values_mut().filter(|trying| trying.ns == ns && trying.worker == worker);
                its.for_each(|trying| trying.called_off = true);
            }
            Order::Suspect(run, suspicion) => {
                self.suspicions_changed.fetch_add(1, Ordering::Relaxed);
                self.suspects.insert(run, suspicion);
            }
            Order::Suspects { known, as_of } => {
                if self.suspicions_changed.load(Ordering::Relaxed) == as_of {
                    self.suspects = known;
                }
            }
            Order::Missed => self.hinted(Heard::Missed),
            Order::Release(claimed) => claimed.into_iter().for_each(|claimed| self.release_task(claimed)),
            Order::All(orders) => orders.into_iter().for_each(|order| self.take(order)),
        }
    }

    fn accept(&mut self, submission: Submission) {
        let lane = self.lanes.entry(submission.run).or_default();
        lane.waiting.push_back(Pending {
            ticket: self.tickets,
            ns: submission.ns,
            inputs: submission.inputs.into(),
            outcomes: Vec::new(),
            taken: submission.taken,
            start: submission.start,
            reply: submission.reply,
        });
        self.tickets += 1;
        if !lane.busy && lane.waiting.len() == 1 {
            self.make_ready(submission.run);
        }
    }

    /// A run is no longer busy: makes it ready, or removes its lane if no inputs wait.
    fn release(&mut self, run: RunId) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = false;
        if lane.waiting.is_empty() {
            self.lanes.remove(&run);
        } else {
            self.make_ready(run);
        }
    }

    /// Queues a run whose inputs can be decided.
    fn make_ready(&mut self, run: RunId) {
        let front = self.lanes.get(&run).and_then(|lane| lane.waiting.front());
        let ns = front.and_then(|front| front.start.as_ref().map(|start| &start.ns).or(front.ns.as_ref()));
        let ns = ns.or_else(|| self.cache.get(run).map(|cached| &cached.ns)).cloned();
        match self.suspects.contains_key(&run) {
            true => self.ready_suspects.push_back(run),
            false => self.ready.push(ns, run),
        }
    }

    /// Whether there are runs whose inputs can be decided.
    fn is_ready(&self) -> bool {
        !self.ready.is_empty() || !self.ready_suspects.is_empty()
    }
}
