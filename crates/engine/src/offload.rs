//! Runs long work on behalf of a namespace, such as the check of a large input, each piece on its own thread with a
//! large stack. Only a few pieces run at a time, and one per namespace, so that tenants do not delay each other much.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use eddyline_machine::Millis;
use eddyline_store::Namespace;
use tokio::sync::{Semaphore, oneshot};

use crate::error::{EngineError, Result};

/// How many pieces of work run at the same time, over all namespaces.
const AT_A_TIME: usize = 4;
/// Far more than the longest chain of subschemas needs at each level of the deepest payload. Only the used part takes
/// memory.
const STACK_BYTES: usize = 64 << 20;
/// When a caller may retry if no thread can be started.
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
    /// Runs the work on another thread and waits for the result.
    pub async fn run<T: Send + 'static>(&self, ns: &Namespace, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let stopped = |_| EngineError::Stopped;
        let turns = self.turns(ns);
        // The permits move into the thread, which runs to its end even if the caller stops waiting.
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
        started.map_err(|error| failed(format!("could not start a thread: {error}")))?;
        answered.await.map_err(|_| failed("the thread stopped unexpectedly".to_owned()))
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

/// Runs the work on a thread with a large stack, blocking the calling thread. None if no thread could be started or it
/// panicked.
pub(crate) fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("eddyline-offload".to_owned()).stack_size(STACK_BYTES);
        thread.spawn_scoped(scope, work).ok()?.join().ok()
    })
}
