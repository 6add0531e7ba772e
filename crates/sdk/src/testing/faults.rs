//! What a test changes about its worker, and what it sees of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex};

use eddyline_protocol::EntryKind;
use futures_util::FutureExt;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::Notify;

use super::lock;
use super::shake::Shaken;
use crate::Worker;
use crate::code::probe::{Instead, Probe};
use crate::worker::{Handler, StepCtx, StepError, json};

type Stub = Arc<dyn Fn(Value) -> Instead + Send + Sync>;
type Error = Arc<dyn Fn() -> StepError + Send + Sync>;

pub(super) struct Faults {
    shakes: bool,
    state: Mutex<State>,
    death: Notify,
    restaff: Notify,
    shaken: Mutex<Shaken>,
}

#[derive(Default)]
struct State {
    stubs: HashMap<String, Stub>,
    failures: HashMap<String, (BTreeSet<u32>, Error)>,
    deaths: BTreeSet<String>,
    /// With the number of the message, and whether before it is sent.
    death_at: Option<(usize, bool)>,
    messages: [usize; 2],
    lost: usize,
    /// A worker died, and its tasks have not come back yet.
    lost_tasks: bool,
    /// Handlers and functions in progress, by name.
    at_work: BTreeMap<String, usize>,
    /// The stubs of the worker that begins.
    joining_with: BTreeSet<String>,
    /// The stubs that the worker in service knows, once it is registered.
    staffed_with: Option<BTreeSet<String>>,
    refused: Option<String>,
}

impl Faults {
    pub fn new(shakes: bool) -> Faults {
        Faults {
            shakes,
            state: Mutex::default(),
            death: Notify::new(),
            restaff: Notify::new(),
            shaken: Mutex::default(),
        }
    }

    pub fn stub<F, Fut, T>(&self, name: &str, stub: F)
    where
        F: Fn(Value) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<T, StepError>> + Send + 'static,
        T: Serialize + 'static,
    {
        let stub: Stub = Arc::new(move |input| {
            let running = stub(input);
            async move { json("the output", running.await?) }.boxed()
        });
        lock(&self.state).stubs.insert(name.to_owned(), stub);
        // A worker offers what it had when it began.
        if !self.is_staffed() {
            self.restaff.notify_one();
        }
    }

    /// Returns when the worker is to be replaced by one with more handlers.
    pub async fn restaffed(&self) {
        self.restaff.notified().await;
    }

    pub fn fail(
        &self,
        name: &str,
        attempts: impl IntoIterator<Item = u32>,
        error: impl Fn() -> StepError + Send + Sync + 'static,
    ) {
        let failure = (attempts.into_iter().collect(), Arc::new(error) as Error);
        lock(&self.state).failures.insert(name.to_owned(), failure);
    }

    pub fn die_after(&self, name: &str) {
        lock(&self.state).deaths.insert(name.to_owned());
    }

    pub fn die_at(&self, message: usize, before: bool) {
        lock(&self.state).death_at = Some((message, before));
    }

    pub fn lost(&self) -> usize {
        lock(&self.state).lost
    }

    /// Returns when the worker is to die.
    pub async fn died(&self) {
        self.death.notified().await;
        let mut state = lock(&self.state);
        state.at_work.clear();
        state.lost += 1;
        state.lost_tasks = true;
    }

    pub fn has_lost_tasks(&self) -> bool {
        lock(&self.state).lost_tasks
    }

    /// Nobody holds a task.
    pub fn recovered(&self) {
        lock(&self.state).lost_tasks = false;
    }

    /// Whether the worker has begun, with all stubs.
    pub fn is_staffed(&self) -> bool {
        let state = lock(&self.state);
        let known = state.staffed_with.as_ref();
        known.is_some_and(|known| state.stubs.keys().all(|stub| known.contains(stub))) || state.refused.is_some()
    }

    pub fn refuse(&self, why: String) {
        lock(&self.state).refused = Some(why);
    }

    pub fn refused(&self) -> Option<String> {
        lock(&self.state).refused.clone()
    }

    pub fn is_busy(&self) -> bool {
        !lock(&self.state).at_work.is_empty()
    }

    pub fn at_work(&self) -> Vec<String> {
        lock(&self.state).at_work.keys().cloned().collect()
    }

    /// Fails the test if a replay has asked for something else. Only where functions are handed over: the execution of a
    /// worker that has just died may overlap the one that follows it.
    pub fn check_shaken(&self) {
        if self.shakes
            && let Some(difference) = lock(&self.shaken).difference()
        {
            panic!("{difference}");
        }
    }

    /// The worker with its faults.
    pub fn probe(self: &Arc<Faults>, worker: Worker) -> Worker {
        let stubs: Vec<String> = lock(&self.state).stubs.keys().cloned().collect();
        let mut state = lock(&self.state);
        (state.joining_with, state.staffed_with) = (stubs.iter().cloned().collect(), None);
        drop(state);
        worker.probed(self.clone(), stubs, |name, handler| self.clone().wrap(name.to_owned(), handler))
    }

    fn wrap(self: Arc<Faults>, name: String, handler: Option<Handler>) -> Handler {
        Arc::new(move |ctx: StepCtx| {
            let (faults, name, handler) = (self.clone(), name.clone(), handler.clone());
            async move {
                let _at_work = AtWork::new(&faults, &name);
                let result = match (faults.replaced(&name, ctx.attempt(), ctx.task().input.clone()), handler) {
                    (Some(instead), _) => instead.await,
                    (None, Some(handler)) => handler(ctx).await,
                    (None, None) => Err(StepError::permanent(format!("the stub of {name} was removed"))),
                };
                if faults.dies_after(&name) {
                    std::future::pending::<()>().await;
                }
                result
            }
            .boxed()
        })
    }

    fn replaced(&self, name: &str, attempt: u32, input: Value) -> Option<Instead> {
        let (error, stub) = {
            let state = lock(&self.state);
            let names = [name, without_number(name)];
            let failure = names.iter().find_map(|name| state.failures.get(*name));
            let error = failure.filter(|(attempts, _)| attempts.contains(&attempt)).map(|(_, error)| error.clone());
            (error, names.iter().find_map(|name| state.stubs.get(*name)).cloned())
        };
        match (error, stub) {
            (Some(error), _) => Some(std::future::ready(Err(error())).boxed()),
            (None, stub) => stub.map(|stub| stub(input)),
        }
    }
}

impl Probe for Faults {
    fn joined(&self) {
        let mut state = lock(&self.state);
        state.staffed_with = Some(state.joining_with.clone());
    }

    fn instead(&self, step: &str, attempt: u32) -> Option<Instead> {
        self.replaced(step, attempt, Value::Null)
    }

    fn dies_after(&self, step: &str) -> bool {
        let dies = lock(&self.state).deaths.remove(step);
        if dies {
            self.death.notify_one();
        }
        dies
    }

    fn dies_at_message(&self, before: bool) -> bool {
        let mut state = lock(&self.state);
        let count = &mut state.messages[usize::from(before)];
        *count += 1;
        let dies = Some((*count, before)) == state.death_at;
        if dies {
            state.death_at = None;
            drop(state);
            self.death.notify_one();
        }
        dies
    }

    fn shakes(&self) -> bool {
        self.shakes
    }

    fn begun(&self, run: &str, attempt: u32) {
        lock(&self.shaken).begun(run, attempt);
    }

    fn unwinds(&self, run: &str) {
        lock(&self.shaken).unwinds(run);
    }

    fn asked(&self, run: &str, name: &str, kind: EntryKind) {
        lock(&self.shaken).asked(run, name, kind);
    }

    fn delivered(&self, run: &str, n: u64, name: &str) {
        lock(&self.shaken).delivered(run, n, name);
    }

    fn ended(&self, run: &str) {
        lock(&self.shaken).ended(run);
    }

    fn at_work(&self, name: &str, at_work: bool) {
        let mut state = lock(&self.state);
        let count = state.at_work.entry(name.to_owned()).or_insert(0);
        *count = if at_work { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            state.at_work.remove(name);
        }
    }
}

/// A handler in progress.
struct AtWork<'a> {
    faults: &'a Faults,
    name: &'a str,
}

impl<'a> AtWork<'a> {
    fn new(faults: &'a Faults, name: &'a str) -> AtWork<'a> {
        Probe::at_work(faults, name, true);
        AtWork { faults, name }
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        Probe::at_work(self.faults, self.name, false);
    }
}

/// `pay` of `pay#2`.
fn without_number(name: &str) -> &str {
    match name.rsplit_once('#') {
        Some((base, number)) if number.chars().all(|c| c.is_ascii_digit()) => base,
        _ => name,
    }
}
