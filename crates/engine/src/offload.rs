//! Work that takes longer than a moment and belongs to a tenant, such as the check of a large input: each piece runs on a
//! thread of its own that has the stack for it. Only a few run at a time, and one of each namespace, so nobody waits for
//! more than one piece of another tenant's work.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use eddyline_machine::Millis;
use eddyline_store::Namespace;
use tokio::sync::{Semaphore, oneshot};

use crate::error::{EngineError, Result};

/// Pieces of work of all namespaces that run at the same time.
const AT_A_TIME: usize = 4;
/// Enough for the longest row of subschemas at each level of the deepest payload, with much to spare. Only what is used
/// of it takes memory.
const STACK_BYTES: usize = 64 << 20;
/// When to come back, if there is no thread to be had.
const RETRY_AFTER_MS: Millis = 1_000;

#[derive(Debug)]
pub(crate) struct Offload {
    all: Arc<Semaphore>,
    of: Mutex<HashMap<Namespace, Weak<Semaphore>>>,
}

impl Default for Offload {
    fn default() -> Offload {
        Offload { all: Arc::new(Semaphore::new(AT_A_TIME)), of: Mutex::default() }
    }
}

impl Offload {
    /// Runs the work on another thread and waits for what comes of it.
    pub async fn run<T: Send + 'static>(&self, ns: &Namespace, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let stopped = |_| EngineError::Stopped;
        let turns = self.turns(ns);
        // They go with the thread, which runs to its end even if nobody waits for it any more.
        let own_turn = turns.acquire_owned().await.map_err(stopped)?;
        let turn = self.all.clone().acquire_owned().await.map_err(stopped)?;
        let (answer, answered) = oneshot::channel();
        let thread = std::thread::Builder::new().name("eddyline-offload".to_owned()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || {
            let done = work();
            drop((own_turn, turn));
            let _ = answer.send(done);
        });
        let failed = |why: String| EngineError::TooMany {
            message: format!("the server could not do this now: {why}"),
            retry_after_ms: RETRY_AFTER_MS,
        };
        started.map_err(|error| failed(format!("no thread can be started: {error}")))?;
        answered.await.map_err(|_| failed("the thread that worked on it stopped".to_owned()))
    }

    fn turns(&self, ns: &Namespace) -> Arc<Semaphore> {
        let mut of = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = of.get(ns).and_then(Weak::upgrade) {
            return turns;
        }
        of.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Semaphore::new(1));
        of.insert(ns.clone(), Arc::downgrade(&turns));
        turns
    }
}

/// Runs the work on a thread with a large stack and waits for it, on a thread that may wait. Nothing, if there is no thread
/// to be had or it panicked.
pub(crate) fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("eddyline-offload".to_owned()).stack_size(STACK_BYTES);
        thread.spawn_scoped(scope, work).ok()?.join().ok()
    })
}
