//! Watches runtime threads that block on the disk. In tokio the thread that drives IO and timers may pick up a task
//! that reads or writes here; while it blocks, the other threads may be asleep, so that nothing drives IO and timers.
//! That is harmless for the duration of a sync. If it takes longer, the watcher wakes another thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};

use super::shared::Shared;
use super::threads::spawn_essential;
use crate::error::Result;

/// The interval of checks while the disk is in use, and thus the longest time without a thread that drives IO.
const LOOK: Duration = Duration::from_millis(20);
/// After this many checks without a wait, the watcher sleeps.
const LOOKS: u32 = 50;

/// What a runtime thread waits for; at most one thread for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Write,
    Read,
    /// Writing the note of the runs being decided on.
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

/// Ends the wait when dropped.
pub(super) struct DiskWait<'a>(&'a Watch, For);

/// The watcher thread; stopped when dropped.
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
    /// Allows this thread to block on the disk, watched until the result is dropped. None if its runtime would have no
    /// other thread left.
    pub fn wait(&self, what: For) -> Option<DiskWait<'_>> {
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
        Some(DiskWait(self, what))
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
                // The thread woken for this empty task then drives IO and timers.
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

impl Drop for DiskWait<'_> {
    fn drop(&mut self) {
        self.0.state().waits[self.1 as usize] = None;
    }
}
