//! Threads of a runtime that wait for the disk. The one that listens to the runtime's network and clock is the one that
//! finds something to do, and while it writes or reads right there, the others may be asleep, so that nobody listens. That
//! does no harm for the moment that a sync takes. If it takes longer, it is noticed here, and another thread is woken.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};

use super::shared::Shared;
use super::threads::spawn_essential;
use crate::error::Result;

/// How often it is looked, while the disk is in use; and so, how long a runtime may listen to nobody.
const LOOK: Duration = Duration::from_millis(20);
/// After so many looks at nothing, the disk is not in use.
const LOOKS: u32 = 50;

/// For what a thread of a runtime waits. One at a time of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Write,
    Read,
    /// Noting which runs are being handled.
    Note,
}

#[derive(Debug, Default)]
pub(super) struct Watch {
    state: Mutex<State>,
    change: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waits: [Option<Wait>; 3],
    awake: bool,
    ended: bool,
}

#[derive(Debug)]
struct Wait {
    runtime: Handle,
    since: Instant,
}

/// The wait is over when this is dropped.
pub(super) struct Waiting<'a>(&'a Watch, For);

/// Watches for as long as it is there.
#[derive(Debug)]
pub(super) struct Watcher {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    pub fn start(shared: &Arc<Shared>) -> Result<Watcher> {
        let watch = Arc::new(Watch::default());
        let watching = watch.clone();
        let thread = spawn_essential("eddyline-watch", shared, move || watching.run())?;
        Ok(Watcher { watch, thread: Some(thread) })
    }

    pub fn watch(&self) -> Arc<Watch> {
        self.watch.clone()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.watch.state().ended = true;
        self.watch.change.notify_one();
        self.thread.take().map(JoinHandle::join);
    }
}

impl Watch {
    /// This thread may wait for the disk, and is watched while it does; unless its runtime has none left then.
    pub fn wait(&self, what: For) -> Option<Waiting<'_>> {
        let runtime = Handle::try_current().ok()?;
        let mut state = self.state();
        let left = runtime.metrics().num_workers() > 1 + state.waits.iter().flatten().count();
        if runtime.runtime_flavor() != RuntimeFlavor::MultiThread || !left {
            return None;
        }
        state.waits[what as usize] = Some(Wait { runtime, since: Instant::now() });
        if !std::mem::replace(&mut state.awake, true) {
            self.change.notify_one();
        }
        Some(Waiting(self, what))
    }

    fn run(&self) {
        let mut looks = 0;
        let mut state = self.state();
        while !state.ended {
            state = if state.awake {
                self.change.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
            } else {
                looks = 0;
                self.change.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
            for wait in state.waits.iter().flatten().filter(|wait| wait.since.elapsed() >= LOOK) {
                // Whoever is woken for this finds nothing else to do, and listens.
                wait.runtime.spawn(async {});
            }
            looks = if state.waits.iter().any(Option::is_some) { 0 } else { looks + 1 };
            state.awake = looks < LOOKS;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state().waits[self.1 as usize] = None;
    }
}
