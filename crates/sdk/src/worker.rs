//! Workers: processes that execute the steps of flows.

mod ctx;
mod failure;
mod handler;
mod held;
mod http;
#[cfg(feature = "engine")]
mod in_process;
mod line;
mod link;
mod online;
mod outbox;
mod own_thread;
mod shift;
mod signals;
mod socket;
mod task;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use eddyline_protocol::{BringsFlow, BringsFlows, Op, RegisterWorker, ReportOutcome, Task};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use crate::client::Client;
use crate::code::probe::Probe;
use crate::code::{self, CodeFlow, FlowError, FlowOptions, RunCtx};
use crate::error::Error;
use handler::erase;
use online::Online;
use shift::{OnOutcome, Rules, Shift};
use signals::Signals;

pub use ctx::StepCtx;
pub(crate) use ctx::{BAD_INPUT, BAD_REPORT, json};
pub use failure::StepError;
pub(crate) use handler::{Handler, PANIC, panic_message};
pub(crate) use outbox::too_deep;
pub(crate) use task::{HandlerMessage, TaskState};

const MAX_CONCURRENT: u32 = 50;
const DRAIN: Duration = Duration::from_secs(30);
const CANCEL_GRACE: Duration = Duration::from_secs(10);
/// How long the function of a code flow that only waits stays in memory.
const HOLD: Duration = Duration::from_secs(5);
/// How many such functions a worker has at most.
const MAX_HELD: u32 = 1_000;
/// Practically for ever, without overflowing clocks.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3_600);

/// A worker: handlers by name, and where their tasks come from.
///
/// ```no_run
/// use eddyline::{StepCtx, StepError, Worker};
///
/// #[derive(serde::Deserialize)]
/// struct Payment { cents: u64 }
///
/// async fn pay(ctx: StepCtx, payment: Payment) -> Result<String, StepError> {
///     ctx.log(format!("charging {}", payment.cents));
///     Ok(format!("receipt for {}", ctx.key()))
/// }
///
/// # async fn example() -> Result<(), eddyline::Error> {
/// Worker::connect("http://127.0.0.1:7070").handler("pay", pay).run().await
/// # }
/// ```
#[must_use = "call `run` to start the worker"]
pub struct Worker {
    target: Target,
    key: Option<String>,
    namespace: Option<String>,
    http_only: bool,
    handlers: Vec<(String, Handler)>,
    flows: Vec<(String, CodeFlow, FlowOptions)>,
    me: RegisterWorker,
    rules: Rules,
    on_answer: Option<OnOutcome>,
    probe: Option<Arc<dyn Probe>>,
}

enum Target {
    Url(String),
    Client(Client),
    #[cfg(feature = "engine")]
    Engine(eddyline_engine::Engine),
}

/// A shift, by its transport, which determines where its loop runs.
enum Ready {
    Online(Shift),
    /// On the engine's runtime.
    #[cfg(feature = "engine")]
    InProcess(Shift),
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handlers: Vec<&str> = self.handlers.iter().map(|(name, _)| name.as_str()).collect();
        let flows: Vec<&str> = self.flows.iter().map(|(name, ..)| name.as_str()).collect();
        f.debug_struct("Worker")
            .field("handlers", &handlers)
            .field("flows", &flows)
            .field("queues", &self.me.queues)
            .finish_non_exhaustive()
    }
}

impl Worker {
    /// A worker for the server at this address. It connects when it is run.
    pub fn connect(url: impl Into<String>) -> Worker {
        Worker::of(Target::Url(url.into()))
    }

    /// A worker with the address, key and namespace of the client.
    pub fn with_client(client: Client) -> Worker {
        Worker::of(Target::Client(client))
    }

    /// A worker for an engine in this process.
    #[cfg(feature = "engine")]
    pub fn in_process(engine: eddyline_engine::Engine) -> Worker {
        Worker::of(Target::Engine(engine))
    }

    fn of(target: Target) -> Worker {
        let rules = Rules {
            max_concurrent: MAX_CONCURRENT,
            drain_timeout: DRAIN,
            cancel_grace: CANCEL_GRACE,
            hold: HOLD,
            max_held: MAX_HELD,
        };
        let (me, handlers, flows) = (RegisterWorker::default(), Vec::new(), Vec::new());
        let (key, namespace, on_answer, probe) = (None, None, None, None);
        Worker { target, key, namespace, http_only: false, handlers, flows, me, rules, on_answer, probe }
    }

    /// The key; it needs the scope `worker`.
    pub fn key(mut self, key: impl Into<String>) -> Worker {
        self.key = Some(key.into());
        self
    }

    /// The namespace, if keys are off or the engine is in this process.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Worker {
        self.namespace = Some(namespace.into());
        self
    }

    /// A queue to take tasks from; defaults to `default`. Can be called several times.
    pub fn queue(mut self, queue: impl Into<String>) -> Worker {
        self.me.queues.push(queue.into());
        self
    }

    /// The handler of steps with `run: name`. The input is deserialised into the handler's type; its output is the
    /// step's output. An input that does not fit fails the step without retries; an error or a panic fails the attempt.
    pub fn handler<F, Fut, In, Out, E>(mut self, name: impl Into<String>, handler: F) -> Worker
    where
        F: Fn(StepCtx, In) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Out, E>> + Send + 'static,
        In: DeserializeOwned + Send + 'static,
        Out: Serialize + 'static,
        E: Into<StepError> + 'static,
    {
        self.handlers.push((name.into(), erase(handler)));
        self
    }

    /// A code flow: its function runs on this worker. A flow that does not exist yet is registered with the defaults;
    /// the definition of an existing one stays as it is.
    ///
    /// ```no_run
    /// use eddyline::{FlowError, RunCtx, Worker};
    ///
    /// async fn greet(ctx: RunCtx, name: String) -> Result<String, FlowError> {
    ///     Ok(ctx.step("greet", || async { Ok::<_, FlowError>(format!("Hello, {name}!")) }).await?)
    /// }
    ///
    /// # async fn example() -> Result<(), eddyline::Error> {
    /// Worker::connect("http://127.0.0.1:7070").flow("greet", greet).run().await
    /// # }
    /// ```
    pub fn flow<F, Fut, In, Out, E>(self, name: impl Into<String>, flow: F) -> Worker
    where
        F: Fn(RunCtx, In) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Out, E>> + Send + 'static,
        In: DeserializeOwned + Send + 'static,
        Out: Serialize + 'static,
        E: Into<FlowError> + 'static,
    {
        self.flow_with(name, FlowOptions::default(), flow)
    }

    /// A code flow with its definition, which is registered as a new version if it differs from the existing one.
    pub fn flow_with<F, Fut, In, Out, E>(mut self, name: impl Into<String>, options: FlowOptions, flow: F) -> Worker
    where
        F: Fn(RunCtx, In) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Out, E>> + Send + 'static,
        In: DeserializeOwned + Send + 'static,
        Out: Serialize + 'static,
        E: Into<FlowError> + 'static,
    {
        let code = CodeFlow { run: code::erase(flow), retry: options.retry.clone() };
        self.flows.push((name.into(), code, options));
        self
    }

    /// Lets a test see and change what the worker does: a wrapper for each handler, by name, and a probe for functions.
    #[cfg(feature = "test")]
    pub(crate) fn probed(
        mut self,
        probe: Arc<dyn Probe>,
        also: impl IntoIterator<Item = String>,
        wrap: impl Fn(&str, Option<Handler>) -> Handler,
    ) -> Worker {
        self.probe = Some(probe);
        let own = std::mem::take(&mut self.handlers);
        let also: Vec<String> = also.into_iter().filter(|name| !own.iter().any(|(own, _)| own == name)).collect();
        let own = own.into_iter().map(|(name, handler)| (wrap(&name, Some(handler)), name));
        let also = also.into_iter().map(|name| (wrap(&name, None), name));
        self.handlers = own.chain(also).map(|(handler, name)| (name, handler)).collect();
        self
    }

    /// How long the function of a code flow stays in memory while it only waits for others; defaults to 5 s. After that
    /// it is suspended, and starts again from its memo when there is news.
    pub fn hold(mut self, hold: Duration) -> Worker {
        self.rules.hold = hold.min(LONGEST);
        self
    }

    /// How many functions that only wait stay in memory; defaults to 1,000. They do not count for `max_concurrent`.
    pub fn max_held(mut self, functions: u32) -> Worker {
        self.rules.max_held = functions;
        self
    }

    /// The maximum number of tasks at the same time; defaults to 50. Functions of code flows that only wait for others do
    /// not count.
    pub fn max_concurrent(mut self, tasks: u32) -> Worker {
        self.rules.max_concurrent = tasks;
        self
    }

    /// Labels of this worker that steps can require: `gpu`, `eu-west`.
    pub fn labels<L: Into<String>>(mut self, labels: impl IntoIterator<Item = L>) -> Worker {
        self.me.labels.extend(labels.into_iter().map(Into::into));
        self
    }

    /// The build of this worker, and of its code flows unless they name another.
    pub fn version(mut self, version: impl Into<String>) -> Worker {
        self.me.version = Some(version.into());
        self
    }

    /// How long tasks may take to finish when the worker stops; defaults to 30 s. Unfinished tasks are dropped and
    /// retried elsewhere when their leases expire.
    pub fn drain_timeout(mut self, timeout: Duration) -> Worker {
        self.rules.drain_timeout = timeout.min(LONGEST);
        self
    }

    /// How long a handler may continue after its task was cancelled, before it is aborted; defaults to 10 s.
    pub fn cancel_grace(mut self, grace: Duration) -> Worker {
        self.rules.cancel_grace = grace.min(LONGEST);
        self
    }

    /// Calls `callback` whenever a task is done, with its final report and the outcome: a result counts once it was
    /// applied. A result that the server rejects is reported as a failure of the kind `BadReport`, and the callback
    /// gets that. The calling thread also keeps leases, so the callback must not block; if it panics, the worker ends.
    pub fn on_answer(mut self, callback: impl Fn(&Task, &Op, &ReportOutcome) + Send + Sync + 'static) -> Worker {
        self.on_answer = Some(Box::new(callback));
        self
    }

    /// Uses plain HTTP without trying a WebSocket first.
    pub fn http_only(mut self) -> Worker {
        self.http_only = true;
        self
    }

    /// Works until the process gets SIGTERM or SIGINT, or the server tells it to drain; then finishes its tasks. A
    /// second signal does not wait for them.
    ///
    /// Reconnects for as long as it takes. An error means that the worker could not start, because the address, the key
    /// or the handlers are wrong, or that its key was revoked or has expired: then running tasks are dropped.
    pub async fn run(self) -> Result<(), Error> {
        let (stop, stopped) = oneshot::channel();
        match self.ready(stopped)? {
            Ready::Online(shift) => own_thread::work(shift, Some(stop)).await,
            #[cfg(feature = "engine")]
            Ready::InProcess(mut shift) => until_signalled(Signals::new()?, shift.work(), stop).await,
        }
    }

    /// Works until `stop` completes, or the server tells it to drain; then finishes its tasks. Dropping the future
    /// drops all tasks instead.
    pub async fn run_until(self, stop: impl Future) -> Result<(), Error> {
        let (stop_worker, stopped) = oneshot::channel();
        let ready = self.ready(stopped)?;
        let working = async {
            match ready {
                Ready::Online(shift) => own_thread::work(shift, None).await,
                #[cfg(feature = "engine")]
                Ready::InProcess(mut shift) => shift.work().await,
            }
        };
        tokio::pin!(working, stop);
        tokio::select! {
            result = &mut working => return result,
            _ = &mut stop => {}
        }
        // The worker may just have ended by itself.
        let _ = stop_worker.send(());
        working.await
    }

    fn ready(self, stop: oneshot::Receiver<()>) -> Result<Ready, Error> {
        let ((staff, me), rules) = (self.described()?, self.rules);
        let shift = |transport| Shift::new(staff, me, rules, self.on_answer, transport, stop);
        let mut client = match self.target {
            Target::Url(url) => Client::new(&url)?,
            // Connections belong to the runtime that opened them.
            Target::Client(client) => client.with_own_connections(),
            #[cfg(feature = "engine")]
            Target::Engine(engine) => {
                let in_process = in_process::InProcess::new(engine, self.namespace.as_deref());
                return Ok(Ready::InProcess(shift(Box::new(in_process))));
            }
        };
        if let Some(key) = self.key {
            client = client.with_key(key);
        }
        if let Some(namespace) = self.namespace {
            client = client.with_namespace(namespace);
        }
        Ok(Ready::Online(shift(Box::new(Online::new(client, self.http_only)))))
    }

    fn described(&self) -> Result<(Staff, RegisterWorker), Error> {
        let wrong = |problem: String| Err(Error::Config(problem));
        let mut staff = Staff { probe: self.probe.clone(), ..Staff::default() };
        for (name, handler) in &self.handlers {
            if staff.handlers.insert(name.clone(), handler.clone()).is_some() {
                return wrong(format!("two handlers have the name `{name}`"));
            }
        }
        for (name, flow, _) in &self.flows {
            if staff.flows.insert(name.clone(), flow.clone()).is_some() {
                return wrong(format!("two flows have the name `{name}`"));
            }
        }
        if staff.handlers.is_empty() && staff.flows.is_empty() {
            return wrong("a worker needs at least one handler or flow".to_owned());
        }
        if self.rules.max_concurrent == 0 {
            return wrong("`max_concurrent` must be 1 or more".to_owned());
        }
        let mut me = self.me.clone();
        me.handlers = self.handlers.iter().map(|(name, _)| name.clone()).collect();
        me.flows = BringsFlows::List(self.flows.iter().map(|flow| self.brings(flow)).collect());
        // The server counts all tasks that the worker holds; functions that only wait are tasks too.
        let held = if self.flows.is_empty() { 0 } else { self.rules.max_held };
        me.max_concurrent = Some(self.rules.max_concurrent.saturating_add(held));
        // One id for all connections of this worker.
        me.instance = Some(uuid::Uuid::new_v4().to_string());
        me.host = Some(host());
        me.pid = Some(std::process::id());
        Ok((staff, me))
    }

    fn brings(&self, (name, _, options): &(String, CodeFlow, FlowOptions)) -> BringsFlow {
        let build = options.build.clone().or_else(|| self.me.version.clone());
        match (build, options.definition.is_empty()) {
            (None, true) => BringsFlow::Name(name.clone()),
            (build, _) => BringsFlow::Whole { name: name.clone(), build, definition: options.definition.clone() },
        }
    }
}

/// What a worker can run, by name.
#[derive(Default)]
struct Staff {
    handlers: HashMap<String, Handler>,
    flows: HashMap<String, CodeFlow>,
    probe: Option<Arc<dyn Probe>>,
}

/// The first signal stops the worker gracefully, the second drops its tasks.
async fn until_signalled(
    mut signals: Signals,
    work: impl Future<Output = Result<(), Error>>,
    stop: oneshot::Sender<()>,
) -> Result<(), Error> {
    let twice = async {
        signals.next().await;
        // The worker may just have ended by itself.
        let _ = stop.send(());
        signals.next().await;
    };
    tokio::select! {
        result = work => result,
        () = twice => {
            tracing::warn!("second signal: dropping running tasks");
            Ok(())
        }
    }
}

/// The machine's host name.
fn host() -> String {
    let named = std::env::var("HOSTNAME").or_else(|_| std::env::var("COMPUTERNAME")).ok();
    let named = named.or_else(|| std::fs::read_to_string("/etc/hostname").ok());
    let name = named.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    name.unwrap_or_else(|| "localhost".to_owned())
}
