//! The one place where runs are decided on and committed.
//!
//! While a batch is being written the next gathers: one transition a run, all waiting inputs of a run decided together.
//! Inputs are never dropped: a conflict loads the run and decides again, and what the store would not take is answered
//! with its error. Claims of workers go with the batches, see [`crate::dispatcher`].
//!
//! It is a state, and whoever holds it works: its loop ([`desk`]), or a caller who finds it with nothing to do.

mod batch;
mod desk;
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

use eddyline_machine::{Answer, Input, Millis, RunId};
use eddyline_store::{Change, Claimed, Heard, Hints, Map, Namespace, RequestId, StartKey, Store, Taken};
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
use crate::hot::HotRuns;
use crate::quarantine::Suspicion;
use batch::Sent;
pub(crate) use desk::{Committing, Driver, open};
use heavy::Thought;
use load::Loaded;
pub(crate) use question::said;
use turns::Turns;

/// Messages taken from callers in one go.
const GATHER: usize = 1_024;
/// Inputs of one run that are decided together at most.
const INPUTS_A_TRANSITION: usize = 512;

/// What callers send to the committer.
#[derive(Debug)]
pub(crate) enum Order {
    Submit(Submission),
    Park(Parked),
    Unpark(RequestId),
    /// The worker gets nothing more: its claims wait no longer.
    Dismiss(Namespace, String),
    /// Claimed, but never delivered.
    Release(Vec<Claimed>),
    /// What is known of a run has changed.
    Suspect(RunId, Suspicion),
    /// What the store knows of all runs, read when the number of changes made here was `as_of`.
    Suspects {
        known: Map<RunId, Suspicion>,
        as_of: u64,
    },
    /// All of these before anything is sent: what a worker reports, and its claim of what comes of it.
    All(Vec<Order>),
}

impl Order {
    /// Inputs of a run, and where the answer comes.
    pub fn submit(run: RunId, inputs: Vec<Input>, taken: Option<Taken>, start: Option<NewRun>) -> (Order, Answered) {
        let (reply, answer) = oneshot::channel();
        (Order::Submit(Submission { run, ns: None, inputs, taken, start, reply }), answer)
    }

    /// The same from somebody of a namespace.
    pub fn submit_in(ns: &Namespace, run: RunId, inputs: Vec<Input>) -> (Order, Answered) {
        let (reply, answer) = oneshot::channel();
        (Order::Submit(Submission { run, ns: Some(ns.clone()), inputs, taken: None, start: None, reply }), answer)
    }
}

/// Inputs of one run that belong together: they are decided in order, and none after one that was not applied.
#[derive(Debug)]
pub(crate) struct Submission {
    pub run: RunId,
    /// Whoever asks must be of the run's namespace; to all others it is not there.
    pub ns: Option<Namespace>,
    pub inputs: Vec<Input>,
    /// Used up by the commit in which the (only) input is decided.
    pub taken: Option<Taken>,
    /// Makes the run, if it is not there.
    pub start: Option<NewRun>,
    pub reply: oneshot::Sender<Result<Vec<Outcome>>>,
}

#[derive(Debug, Clone)]
pub(crate) struct NewRun {
    pub ns: Namespace,
    pub flow: Arc<Registered>,
    pub key: Option<StartKey>,
    /// See [`eddyline_store::RunCommit::tells_line`].
    pub tells_line: Option<Box<Input>>,
}

/// What became of an input.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    Answered {
        answer: Answer,
        at: Millis,
    },
    /// An input before it was not applied.
    NotTried,
    /// The due item it came from was used up by somebody else.
    Gone,
    /// The idempotency key belongs to another run.
    KeyTaken {
        run: RunId,
        fingerprint: [u8; 32],
    },
    /// Another run has the unique key.
    UniqueTaken {
        run: RunId,
    },
    /// Too many runs wait for the unique key.
    LineFull,
}

/// What became of inputs, when that is durable.
pub(crate) type Answered = oneshot::Receiver<Result<Vec<Outcome>>>;

pub(crate) struct Committer {
    store: Arc<dyn Store>,
    flows: Arc<Flows>,
    config: Arc<Config>,
    orders: mpsc::Receiver<Order>,
    hints: Hints,
    bus: Arc<Bus>,
    health: Reports,
    hot: HotRuns,
    lanes: Map<RunId, Lane>,
    ready: Turns,
    /// Runs that were being handled when a process died. Each is handled alone, or not at all.
    suspects: Map<RunId, Suspicion>,
    /// How often this process has changed them.
    suspicions_changed: Arc<AtomicU64>,
    ready_suspects: VecDeque<RunId>,
    handled: Arc<Handled>,
    /// Runs whose decisions are too much work for this thread, and those that are being decided elsewhere.
    heavy: Turns,
    heavy_suspects: VecDeque<RunId>,
    /// Those whose turn had come, and that had to be read first.
    heavy_next: VecDeque<RunId>,
    /// Those among them and those that are still being read.
    heavy_reading: BTreeSet<RunId>,
    /// The run whose decision has read much, and those that wait for it to be made because theirs would too.
    reads_much: Option<RunId>,
    much_to_read: Turns,
    thinking: FuturesUnordered<BoxFuture<'static, Thought>>,
    /// A suspect is being decided on elsewhere, and nothing else beside it.
    thinking_of_suspect: bool,
    heavy_threads: usize,
    dispatcher: Dispatcher,
    /// Claims that are being tried.
    trying: Map<RequestId, Trying>,
    loads: FuturesUnordered<BoxFuture<'static, Loaded>>,
    sent: FuturesUnordered<BoxFuture<'static, Sent>>,
    /// The ticket of the next submission.
    tickets: Ticket,
    /// The store's time as of the last look.
    now: Millis,
    asking_time: Option<BoxFuture<'static, eddyline_store::Result<Millis>>>,
    /// What was accepted is still committed, and nothing more is claimed.
    stopping: bool,
    /// The loop, and when it looks after what a rate holds back.
    driver: Waker,
    next_try: Option<Millis>,
}

/// A claim that is being tried.
#[derive(Debug)]
struct Trying {
    ns: Namespace,
    worker: String,
    /// It waits no longer, whatever comes of it.
    called_off: bool,
}

/// Numbers submissions in the order in which they came, so that it is known which of them waited when a load began.
type Ticket = u64;

/// A run with inputs that wait.
#[derive(Debug)]
struct Lane {
    waiting: VecDeque<Pending>,
    /// A load or a commit of it is on its way.
    busy: bool,
    /// The run in memory was compared with the store when the submissions with tickets below this one waited already.
    /// Those, and no others, may be answered from memory.
    fresh: Ticket,
    /// How often in a row it was refused.
    conflicts: u32,
    /// How many inputs are decided together. Fewer than usual while one is searched for that cannot be decided on.
    at_most: usize,
    /// How many inputs the last decision was about.
    asked: usize,
    /// The inputs are too much work for the committer's thread.
    heavy: bool,
    /// Its turn for a thread had come when it was found that it has to be read first.
    has_turn: bool,
    /// What was decided elsewhere on the inputs.
    thought: Option<Thought>,
}

impl Default for Lane {
    fn default() -> Lane {
        Lane {
            waiting: VecDeque::new(),
            busy: false,
            fresh: 0,
            conflicts: 0,
            at_most: INPUTS_A_TRANSITION,
            asked: 0,
            heavy: false,
            has_turn: false,
            thought: None,
        }
    }
}

/// A submission as far as it got.
#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    ns: Option<Namespace>,
    inputs: VecDeque<Input>,
    outcomes: Vec<Outcome>,
    taken: Option<Taken>,
    start: Option<NewRun>,
    reply: oneshot::Sender<Result<Vec<Outcome>>>,
}

impl Pending {
    fn is_message(&self) -> bool {
        matches!(self.taken, Some(Taken::Message(_)))
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
            hot: HotRuns::new(config.cache_bytes),
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
            reads_much: None,
            much_to_read: Turns::default(),
            thinking: FuturesUnordered::new(),
            thinking_of_suspect: false,
            heavy_threads: heavy::threads(),
            dispatcher: Dispatcher::default(),
            trying: Map::default(),
            loads: FuturesUnordered::new(),
            sent: FuturesUnordered::new(),
            tickets: 0,
            now: 0,
            asking_time: None,
            stopping: false,
            driver: Waker::noop().clone(),
            next_try: None,
        }
    }

    /// Nothing is on its way, and nobody waits for anything but hints and time.
    fn is_idle(&self) -> bool {
        self.sent.is_empty()
            && self.loads.is_empty()
            && !self.is_ready()
            && self.heavy.is_empty()
            && self.heavy_suspects.is_empty()
            && self.heavy_next.is_empty()
            && self.much_to_read.is_empty()
            && self.thinking.is_empty()
            && self.asking_time.is_none()
            && self.orders.is_empty()
            && !self.stopping
    }

    /// Does everything that can be done without waiting, but takes no orders.
    fn work(&mut self, cx: &mut Context<'_>) {
        // Most of what there is to hear follows from what is done here.
        self.hints.hush();
        loop {
            self.send_batches(cx);
            self.begin_heavy(cx);
            if let Poll::Ready(Some(sent)) = self.sent.poll_next_unpin(cx) {
                self.finished(sent);
            } else if let Poll::Ready(Some(loaded)) = self.loads.poll_next_unpin(cx) {
                self.loaded(loaded);
            } else if let Poll::Ready(Some(thought)) = self.thinking.poll_next_unpin(cx) {
                self.thought(thought);
            } else if let Poll::Ready(Some(heard)) = self.hints.poll_next(cx) {
                self.hinted(heard);
            } else if !self.next_to_read_much() {
                return;
            }
        }
    }

    /// Takes orders as well. True when everything that was accepted before it was told to stop is answered.
    fn work_on_orders(&mut self, cx: &mut Context<'_>, taken: &mut Vec<Order>) -> bool {
        loop {
            self.work(cx);
            if self.stopping {
                let heavy = !self.heavy.is_empty() || !self.heavy_suspects.is_empty() || !self.heavy_next.is_empty();
                let heavy = heavy || !self.much_to_read.is_empty();
                let deciding = self.is_ready() || heavy || !self.thinking.is_empty();
                return self.sent.is_empty() && self.loads.is_empty() && !deciding;
            }
            match self.orders.poll_recv_many(cx, taken, GATHER) {
                Poll::Ready(0) => self.stopping = true,
                Poll::Ready(_) => taken.drain(..).for_each(|order| self.take(order)),
                Poll::Pending => return false,
            }
        }
    }

    /// Asks the store for the time; false if the answer is not there yet.
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
        // What is in the channel was accepted: it is still answered.
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
                    // Neither parked nor being tried: it has its answer.
                    if let Some(trying) = self.trying.get_mut(&request) {
                        trying.called_off = true;
                    }
                }
            },
            Order::Dismiss(ns, worker) => {
                for parked in self.dispatcher.dismiss(&ns, &worker) {
                    let _ = parked.reply.send(Ok(Vec::new()));
                }
                // What they get all the same is theirs, and they are told of it.
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
            self.get_in_line(submission.run);
        }
    }

    /// Takes up a run again that was busy, or forgets that it had anything to do.
    fn release(&mut self, run: RunId) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = false;
        if lane.waiting.is_empty() {
            self.lanes.remove(&run);
        } else {
            self.get_in_line(run);
        }
    }

    /// Puts a run among those whose inputs can be decided on.
    fn get_in_line(&mut self, run: RunId) {
        let front = self.lanes.get(&run).and_then(|lane| lane.waiting.front());
        let ns = front.and_then(|front| front.start.as_ref().map(|start| &start.ns).or(front.ns.as_ref()));
        let ns = ns.or_else(|| self.hot.get(run).map(|hot| &hot.ns)).cloned();
        match self.suspects.contains_key(&run) {
            true => self.ready_suspects.push_back(run),
            false => self.ready.push(ns, run),
        }
    }

    /// Whether there are runs whose inputs can be decided on.
    fn is_ready(&self) -> bool {
        !self.ready.is_empty() || !self.ready_suspects.is_empty()
    }
}
