//! The one place where runs are decided on and committed.
//!
//! While a batch is being written the next gathers: one transition a run, all waiting inputs of a run decided together.
//! Inputs are never dropped: a conflict loads the run and decides again, and what the store would not take is answered
//! with its error. Claims of workers go with the batches, see [`crate::dispatcher`].
//!
//! It is a state, and whoever holds it works: its loop ([`desk`]), or a caller who finds it with nothing to do.

mod batch;
mod desk;
mod prepare;

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use eddyline_machine::{Answer, Input, Millis, Run, RunId, ValueId};
use eddyline_store::{Change, Claimed, Found, Heard, Hints, Map, Namespace, RequestId, StartKey, Store, Taken};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use futures_util::stream::StreamExt;
use tokio::sync::{mpsc, oneshot};

use crate::bus::Bus;
use crate::config::Config;
use crate::dispatcher::{Dispatcher, Parked};
use crate::error::{EngineError, Result};
use crate::flows::{Flows, Registered};
use crate::hot::{Hot, HotRuns};
use batch::Sent;
pub(crate) use desk::{Committing, Driver, open};

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

#[derive(Debug)]
pub(crate) struct NewRun {
    pub ns: Namespace,
    pub flow: Arc<Registered>,
    pub key: Option<StartKey>,
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
    hot: HotRuns,
    lanes: Map<RunId, Lane>,
    ready: VecDeque<RunId>,
    dispatcher: Dispatcher,
    /// Claims that are being tried.
    trying: Map<RequestId, Trying>,
    loads: FuturesUnordered<BoxFuture<'static, (RunId, Result<Load>)>>,
    sent: FuturesUnordered<BoxFuture<'static, Sent>>,
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

/// A run with inputs that wait.
#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<Pending>,
    /// A load or a commit of it is on its way.
    busy: bool,
    /// What is in memory was found to be what is stored, so answers may be given from it.
    fresh: bool,
    /// How often in a row it was refused.
    conflicts: u32,
}

/// A submission as far as it got.
#[derive(Debug)]
struct Pending {
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

/// What was loaded for a run.
#[derive(Debug)]
enum Load {
    Whole(Box<Hot>),
    /// It is what is in memory.
    Same,
    Values(Vec<(ValueId, eddyline_machine::Data)>),
    Missing,
    Trimmed,
}

impl Committer {
    fn new(
        store: Arc<dyn Store>,
        flows: Arc<Flows>,
        config: Arc<Config>,
        bus: Arc<Bus>,
        orders: mpsc::Receiver<Order>,
    ) -> Committer {
        Committer {
            hints: store.watch(),
            bus,
            store,
            flows,
            orders,
            hot: HotRuns::new(config.hot_runs, config.hot_activations),
            config,
            lanes: Map::default(),
            ready: VecDeque::new(),
            dispatcher: Dispatcher::default(),
            trying: Map::default(),
            loads: FuturesUnordered::new(),
            sent: FuturesUnordered::new(),
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
            && self.ready.is_empty()
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
            if let Poll::Ready(Some(sent)) = self.sent.poll_next_unpin(cx) {
                self.finished(sent);
            } else if let Poll::Ready(Some((run, load))) = self.loads.poll_next_unpin(cx) {
                self.loaded(run, load);
            } else if let Poll::Ready(Some(heard)) = self.hints.poll_next(cx) {
                self.hinted(heard);
            } else {
                return;
            }
        }
    }

    /// Takes orders as well. True when everything that was accepted before it was told to stop is answered.
    fn work_on_orders(&mut self, cx: &mut Context<'_>, taken: &mut Vec<Order>) -> bool {
        loop {
            self.work(cx);
            if self.stopping {
                return self.sent.is_empty() && self.loads.is_empty() && self.ready.is_empty();
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
            Order::Release(claimed) => claimed.into_iter().for_each(|claimed| self.release_task(claimed)),
            Order::All(orders) => orders.into_iter().for_each(|order| self.take(order)),
        }
    }

    fn accept(&mut self, submission: Submission) {
        let lane = self.lanes.entry(submission.run).or_default();
        lane.waiting.push_back(Pending {
            ns: submission.ns,
            inputs: submission.inputs.into(),
            outcomes: Vec::new(),
            taken: submission.taken,
            start: submission.start,
            reply: submission.reply,
        });
        if !lane.busy && lane.waiting.len() == 1 {
            self.ready.push_back(submission.run);
        }
    }

    /// Takes up a run again that was busy, or forgets that it had anything to do.
    fn release(&mut self, run: RunId) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = false;
        if lane.waiting.is_empty() {
            self.lanes.remove(&run);
        } else {
            self.ready.push_back(run);
        }
    }

    fn load(&mut self, run: RunId, what: Wanted) {
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.busy = true;
        }
        let (store, flows) = (self.store.clone(), self.flows.clone());
        self.loads.push(Box::pin(async move { (run, load(&*store, &flows, run, what).await) }));
    }

    fn loaded(&mut self, run: RunId, load: Result<Load>) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        match load {
            Ok(Load::Whole(hot)) => {
                lane.fresh = true;
                self.hot.put(*hot);
            }
            Ok(Load::Same) => lane.fresh = true,
            Ok(Load::Values(values)) => {
                if let Some(mut hot) = self.hot.take(run) {
                    hot.run.values.extend(values);
                    self.hot.put(hot);
                }
            }
            Ok(Load::Missing) => self.start_or_refuse(run, || EngineError::no_run(run)),
            Ok(Load::Trimmed) => self.refuse(run, || EngineError::Trimmed(run)),
            Err(error) => self.refuse(run, || error.clone()),
        }
        self.release(run);
    }

    /// The run is not there: a start makes it, anything before that start has nothing to act on.
    fn start_or_refuse(&mut self, run: RunId, error: impl Fn() -> EngineError) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        while lane.waiting.front().is_some_and(|pending| pending.start.is_none()) {
            if let Some(pending) = lane.waiting.pop_front() {
                pending.fail(error());
            }
        }
        if let Some(new) = lane.waiting.front().and_then(|pending| pending.start.as_ref()) {
            lane.fresh = true;
            self.hot.put(Hot { ns: new.ns.clone(), flow: new.flow.clone(), run: Run::new(run) });
        }
    }

    fn refuse(&mut self, run: RunId, error: impl Fn() -> EngineError) {
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.waiting.drain(..).for_each(|pending| pending.fail(error()));
        }
    }
}

/// What a run is loaded for.
#[derive(Debug)]
enum Wanted {
    Whole,
    IfChanged(eddyline_machine::Version),
    Values(Vec<ValueId>),
}

async fn load(store: &dyn Store, flows: &Flows, run: RunId, what: Wanted) -> Result<Load> {
    let since = match what {
        Wanted::Values(ids) => {
            let values = store.values(run, &ids).await?;
            if values.len() < ids.len() {
                return Err(EngineError::Bug(format!("run {run} refers to values that are not stored: {ids:?}")));
            }
            return Ok(Load::Values(values));
        }
        Wanted::Whole => None,
        Wanted::IfChanged(version) => Some(version),
    };
    match store.load(run, since).await? {
        Found::Nothing => Ok(Load::Missing),
        Found::Same => Ok(Load::Same),
        Found::Trimmed(_) => Ok(Load::Trimmed),
        Found::Run(loaded) => {
            let header = &loaded.rows.header;
            let ns = loaded.summary.ns.clone();
            let flow = flows.find(store, &ns, &header.flow, Some(&header.flow_version)).await?;
            let flow = flow.ok_or_else(|| {
                EngineError::Bug(format!(
                    "run {run} is of {}@{}, which is not stored",
                    header.flow, header.flow_version
                ))
            })?;
            let run = Run::load(loaded.rows, &flow.flow);
            Ok(Load::Whole(Box::new(Hot { ns, flow, run })))
        }
    }
}
