//! What all contexts of one execution of a function share.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use serde_json::Value;
use tokio::sync::Notify;

use super::error::CtxError;
use super::memo::{EntryName, Opener};
use super::state::{Ask, Polled, State, Undo};
use crate::worker::TaskState;

pub(crate) struct Core {
    /// The task of the function.
    pub task: Arc<TaskState>,
    state: Mutex<State>,
    pub flow: Arc<FlowWake>,
    /// The driver is polling the function.
    pub polling: AtomicBool,
    warned: AtomicBool,
}

/// The waker of the function, and of everything else that the driver waits for.
#[derive(Debug, Default)]
pub(crate) struct FlowWake {
    /// The function can move without the driver.
    pub woken: AtomicBool,
    pub notify: Notify,
}

impl Wake for FlowWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.notify.notify_one();
    }
}

impl Core {
    pub fn new(task: Arc<TaskState>, started_at_ms: u64) -> Core {
        Core {
            task,
            state: Mutex::new(State::new(started_at_ms)),
            flow: Arc::default(),
            polling: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The idempotency key of an entry: the same in every attempt, and in a retry of the run.
    pub fn key(&self, name: &str) -> String {
        let task = &self.task.task;
        let intent = if task.intent.is_empty() { &task.run_id } else { &task.intent };
        format!("{intent}/{name}")
    }

    /// Something was asked for. If that was not in a poll by the driver, it must look at it.
    fn note_ask(&self, name: &str) {
        if self.polling.load(Ordering::Acquire) {
            return;
        }
        if cfg!(debug_assertions) && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                name,
                "the context of a code flow is used from another task, so the order of results may change in a replay; \
                 use FuturesUnordered or join! instead of tokio::spawn"
            );
        }
        self.flow.notify.notify_one();
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("run_id", &self.task.task.run_id).finish_non_exhaustive()
    }
}

/// One entry, from the side of the function: it is asked for at the first poll, and let go of when dropped.
pub(crate) struct Entry {
    pub core: Arc<Core>,
    /// The name with its scope, without a number.
    full: String,
    state: EntryState,
}

enum EntryState {
    /// The undo is in a mutex so that a future may be borrowed across an await, as for the URL of a gate.
    New {
        ask: Result<Ask, CtxError>,
        undo: Option<Mutex<Undo>>,
    },
    Undoing,
    Asked(EntryName),
    Done,
}

impl Entry {
    pub fn new(core: Arc<Core>, full: String, ask: Result<Ask, CtxError>) -> Entry {
        Entry { core, full, state: EntryState::New { ask, undo: None } }
    }

    /// A step that undoes another.
    pub fn undoing(core: Arc<Core>, full: String) -> Entry {
        Entry { core, full, state: EntryState::Undoing }
    }

    pub fn rename(&mut self, full: String) {
        self.full = full;
    }

    /// Changes what will be asked for.
    pub fn change(&mut self, change: impl FnOnce(&mut Ask)) {
        if let EntryState::New { ask: Ok(ask), .. } = &mut self.state {
            change(ask);
        }
    }

    pub fn fail(&mut self, error: CtxError) {
        if let EntryState::New { ask, .. } = &mut self.state {
            *ask = Err(error);
        }
    }

    pub fn set_undo(&mut self, with: Undo) {
        if let EntryState::New { ask, undo } = &mut self.state {
            *undo = Some(Mutex::new(with));
            if let Ok(Ask::Step { undo, .. }) = ask {
                *undo = true;
            }
        }
    }

    /// The name with its number, once it was asked for.
    pub fn name(&self) -> Option<&EntryName> {
        match &self.state {
            EntryState::Asked(name) => Some(name),
            _ => None,
        }
    }

    pub fn poll(&mut self, waker: &Waker) -> Polled {
        match &self.state {
            EntryState::Asked(_) => {}
            EntryState::Done => return Polled::Ended(Err(CtxError::Over { name: self.full.clone() })),
            EntryState::New { .. } | EntryState::Undoing => {
                let asked = match std::mem::replace(&mut self.state, EntryState::Done) {
                    EntryState::New { ask: Ok(ask), undo } => {
                        let undo = undo.map(|undo| undo.into_inner().unwrap_or_else(PoisonError::into_inner));
                        self.core.state().ask(&self.full, ask, undo)
                    }
                    EntryState::New { ask: Err(error), .. } => Err(error),
                    _ => self.core.state().ask_undo(&self.full),
                };
                match asked {
                    Ok((name, kind)) => {
                        if let Some(probe) = &self.core.task.probe {
                            probe.asked(&self.core.task.task.run_id, &name, kind);
                        }
                        self.state = EntryState::Asked(name);
                    }
                    Err(error) => return Polled::Ended(Err(error)),
                }
                self.core.note_ask(&self.full);
            }
        }
        let EntryState::Asked(name) = &self.state else { return Polled::Pending };
        let polled = self.core.state().poll(name, waker);
        if let Polled::Ended(_) = polled {
            self.state = EntryState::Done;
        }
        polled
    }

    /// Polls an entry without a body.
    pub fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<Result<Value, CtxError>> {
        match self.poll(cx.waker()) {
            Polled::Ended(end) => Poll::Ready(end),
            _ => Poll::Pending,
        }
    }

    /// Polls a wait for the token that opens it.
    pub fn poll_opened(&mut self, cx: &mut Context<'_>) -> Poll<Result<Opener, CtxError>> {
        match self.poll(cx.waker()) {
            Polled::Opened(opener) => Poll::Ready(Ok(opener)),
            Polled::Ended(end) => {
                Poll::Ready(Err(end.err().unwrap_or_else(|| CtxError::Over { name: self.full.clone() })))
            }
            _ => Poll::Pending,
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let EntryState::Asked(name) = &self.state {
            self.core.state().abandon(name);
            // Dropped outside the driver's poll: it has something to let go.
            if !self.core.polling.load(Ordering::Acquire) {
                self.core.flow.notify.notify_one();
            }
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry").field("name", self.name().map_or(&self.full as &dyn fmt::Debug, |name| name)).finish()
    }
}
