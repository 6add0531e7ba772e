//! The one place where runs are decided on and committed.
//!
//! While a batch is being written the next gathers: one transition a run, all waiting inputs of a run decided together.
//! Inputs are never dropped: a conflict loads the run and decides again, and what the store would not take is answered
//! with its error. Claims of workers go with the batches, see [`crate::dispatcher`].

mod batch;
mod prepare;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::{Answer, Input, Millis, Run, RunId, ValueId};
use eddyline_store::{Change, Claimed, Found, Namespace, RequestId, StartKey, Store, Taken};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{broadcast, mpsc, oneshot};

use crate::bus::Bus;
use crate::config::Config;
use crate::dispatcher::{Dispatcher, Parked};
use crate::error::{EngineError, Result};
use crate::flows::{Flows, Registered};
use crate::hot::{Hot, HotRuns};
use crate::shutdown::Shutdown;
use batch::Sent;

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
    /// Claimed, but never delivered.
    Release(Vec<Claimed>),
    /// All of these before anything is sent: what a worker reports, and its claim of what comes of it.
    All(Vec<Order>),
}

impl Order {
    /// Inputs from somebody of a namespace, and where the answer comes.
    pub fn submit(ns: &Namespace, run: RunId, inputs: Vec<Input>) -> (Order, Answered) {
        let (reply, answer) = oneshot::channel();
        let submission = Submission { run, ns: Some(ns.clone()), inputs, taken: None, start: None, reply };
        (Order::Submit(submission), answer)
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

/// Where callers send to.
#[derive(Debug, Clone)]
pub(crate) struct Committing(pub mpsc::Sender<Order>);

impl Committing {
    /// What became of the inputs, once that is durable.
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

    /// The same for somebody of a namespace.
    pub async fn submit_in(&self, ns: &Namespace, run: RunId, inputs: Vec<Input>) -> Result<Vec<Outcome>> {
        let (order, answer) = Order::submit(ns, run, inputs);
        self.send(order).await?;
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
        let (reply, answer) = oneshot::channel();
        let submission = Submission { run, ns: None, inputs, taken, start, reply };
        self.send(Order::Submit(submission)).await?;
        Ok(answer)
    }

    pub async fn send(&self, order: Order) -> Result<()> {
        self.0.send(order).await.map_err(|_| EngineError::Stopped)
    }
}

type Hints = broadcast::Receiver<Arc<[Change]>>;

pub(crate) struct Committer {
    store: Arc<dyn Store>,
    flows: Arc<Flows>,
    config: Arc<Config>,
    orders: mpsc::Receiver<Order>,
    hints: Option<Hints>,
    hot: HotRuns,
    lanes: HashMap<RunId, Lane>,
    ready: VecDeque<RunId>,
    dispatcher: Dispatcher,
    /// Claims that are being tried, and whether they were called off meanwhile.
    trying: HashMap<RequestId, bool>,
    loads: FuturesUnordered<BoxFuture<'static, (RunId, Result<Load>)>>,
    sent: FuturesUnordered<BoxFuture<'static, Sent>>,
    /// The store's time as of the last look.
    now: Millis,
    /// What was accepted is still committed, and nothing more is claimed.
    stopping: bool,
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
    pub fn new(store: Arc<dyn Store>, flows: Arc<Flows>, config: Arc<Config>) -> (Committer, Committing) {
        let (sender, orders) = mpsc::channel(config.queue);
        let committer = Committer {
            hints: Some(store.watch()),
            store,
            flows,
            orders,
            hot: HotRuns::new(config.hot_runs, config.hot_activations),
            config,
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            dispatcher: Dispatcher::default(),
            trying: HashMap::new(),
            loads: FuturesUnordered::new(),
            sent: FuturesUnordered::new(),
            now: 0,
            stopping: false,
        };
        (committer, Committing(sender))
    }

    /// Until everything that was handed in before the shutdown is answered.
    pub async fn run(mut self, bus: Arc<Bus>, mut shutdown: Shutdown) {
        let mut orders = Vec::with_capacity(GATHER);
        let mut poll = tokio::time::interval(Duration::from_millis(self.config.poll_ms.max(1) as u64));
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.send_batches().await;
            if self.stopping && self.sent.is_empty() && self.loads.is_empty() && self.ready.is_empty() {
                break;
            }
            let next_try = self.dispatcher.next_try().map(|at| (at - self.now).max(1) as u64);
            tokio::select! {
                biased;
                Some(sent) = self.sent.next(), if !self.sent.is_empty() => self.finished(sent),
                Some((run, load)) = self.loads.next(), if !self.loads.is_empty() => self.loaded(run, load),
                // Before orders, of which there may always be more.
                changes = hear(&mut self.hints) => self.hinted(&bus, changes),
                taken = self.orders.recv_many(&mut orders, GATHER) => {
                    if taken == 0 {
                        self.stopping = true;
                    }
                    for order in orders.drain(..) {
                        self.take(order);
                    }
                }
                // Hints may not have come.
                _ = poll.tick() => self.dispatcher.hint_all(),
                () = sleep_ms(next_try), if next_try.is_some() => {
                    self.now = self.store.now().await.unwrap_or(self.now);
                    self.dispatcher.wake_due(self.now);
                }
                () = shutdown.wait(), if !self.stopping => {
                    self.stopping = true;
                    // What is in the channel was accepted: it is still answered.
                    self.orders.close();
                    while let Ok(order) = self.orders.try_recv() {
                        self.take(order);
                    }
                    for parked in self.dispatcher.drain() {
                        let _ = parked.reply.send(Ok(Vec::new()));
                    }
                    bus.wake_all();
                }
            }
        }
        bus.wake_all();
    }

    fn hinted(&mut self, bus: &Bus, changes: Option<Arc<[Change]>>) {
        let Some(changes) = changes else {
            self.dispatcher.hint_all();
            return bus.wake_all();
        };
        for change in changes.iter() {
            if let Change::Tasks { ns, queue } = change {
                self.dispatcher.hint(ns.clone(), queue.clone());
            }
        }
        bus.pass_on(&changes);
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
                    if let Some(called_off) = self.trying.get_mut(&request) {
                        *called_off = true;
                    }
                }
            },
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

/// The next hints; none if some were missed. Waits for ever once the store says nothing any more.
async fn hear(hints: &mut Option<Hints>) -> Option<Arc<[Change]>> {
    if let Some(store) = hints {
        match store.recv().await {
            Ok(changes) => return Some(changes),
            Err(broadcast::error::RecvError::Lagged(_)) => return None,
            Err(broadcast::error::RecvError::Closed) => *hints = None,
        }
    }
    std::future::pending().await
}

async fn sleep_ms(ms: Option<u64>) {
    match ms {
        Some(ms) => tokio::time::sleep(std::time::Duration::from_millis(ms)).await,
        None => std::future::pending().await,
    }
}
