//! A task in progress: the state shared by its handler and the worker's loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eddyline_protocol::{Emit, Log, Op, ReportOutcome, Task};
use tokio::sync::{Notify, mpsc, oneshot};

/// The maximum number of unsent log lines of a task; more are dropped, and their number is logged.
const MAX_LOGS: usize = 1_024;
/// The maximum number of events that an attempt emits with its completion.
pub(crate) const MAX_EMITS: usize = 1_000;
/// The capacity of the channel from handlers to the loop.
pub(crate) const VOICES: usize = 1_024;

pub(crate) type TaskId = Arc<str>;

/// A message from a handler to the loop.
#[derive(Debug)]
pub(crate) enum HandlerMessage {
    /// The handler has ended: `op` is its final report, `before` must be sent first.
    Ended { task: TaskId, before: Vec<Op>, op: Op },
    /// The handler waits for the outcome of this report.
    Asked { task: TaskId, op: Op, answer: oneshot::Sender<ReportOutcome> },
    /// The handler has notes, which need not be sent immediately.
    Noted { task: TaskId },
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub id: TaskId,
    pub task: Task,
    pub voice: mpsc::Sender<HandlerMessage>,
    cancelled: AtomicBool,
    lost: AtomicBool,
    on_cancel: Notify,
    notes: Mutex<Notes>,
}

/// Logs, progress and events that are sent later.
#[derive(Debug, Default)]
struct Notes {
    emits: Vec<Emit>,
    logs: Vec<Log>,
    left_out: usize,
    /// Only the last one counts.
    progress: Option<Op>,
    /// The loop knows that there are notes.
    announced: bool,
}

impl Shared {
    pub fn new(task: Task, voice: mpsc::Sender<HandlerMessage>) -> Shared {
        let (cancelled, lost, on_cancel) = (AtomicBool::new(false), AtomicBool::new(false), Notify::new());
        let (id, notes) = (Arc::from(task.task_id.as_str()), Mutex::default());
        Shared { id, task, voice, cancelled, lost, on_cancel, notes }
    }

    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.on_cancel.notify_waiters();
    }

    /// The worker no longer holds the task, which cancels it too.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.cancel();
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    pub async fn until_cancelled(&self) {
        self.until(|| self.is_cancelled()).await;
    }

    pub async fn until_lost(&self) {
        self.until(|| self.is_lost()).await;
    }

    async fn until(&self, so: impl Fn() -> bool) {
        loop {
            let notified = self.on_cancel.notified();
            tokio::pin!(notified);
            // Subscribe before checking, so that no cancel in between is missed.
            notified.as_mut().enable();
            if so() {
                return;
            }
            notified.await;
        }
    }

    /// Keeps an event for the completion; returns false if there are too many.
    pub fn emit(&self, emit: Emit) -> bool {
        let mut notes = self.notes();
        let room = notes.emits.len() < MAX_EMITS;
        if room {
            notes.emits.push(emit);
        }
        room
    }

    pub fn log(&self, log: Log) {
        let mut notes = self.notes();
        if notes.logs.len() < MAX_LOGS {
            notes.logs.push(log);
        } else {
            notes.left_out += 1;
        }
        self.tell(notes);
    }

    pub fn progress(&self, progress: Op) {
        let mut notes = self.notes();
        notes.progress = Some(progress);
        self.tell(notes);
    }

    /// Takes the notes that are sent while the handler runs. Events are kept for the completion.
    pub fn take_notes(&self) -> Vec<Op> {
        let mut notes = self.notes();
        notes.announced = false;
        let (logs, progress) = (notes.logs(), notes.progress.take());
        logs.into_iter().map(Op::Log).chain(progress).collect()
    }

    /// Completes the final report with the remaining notes; also returns what must be sent before it.
    pub fn conclude(&self, op: Op) -> (Vec<Op>, Op) {
        let mut notes = self.notes();
        let (logs, progress) = (notes.logs(), notes.progress.take());
        match op {
            Op::Complete { output, .. } => {
                let emits = std::mem::take(&mut notes.emits);
                (progress.into_iter().collect(), Op::Complete { output, emits, logs })
            }
            // A failed attempt leaves nothing but its logs and progress.
            other => (logs.into_iter().map(Op::Log).chain(progress).collect(), other),
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, mut notes: MutexGuard<'_, Notes>) {
        if !notes.announced {
            // If the channel is full, the notes are sent with the next message.
            notes.announced = self.voice.try_send(HandlerMessage::Noted { task: self.id.clone() }).is_ok();
        }
    }
}

impl Notes {
    fn logs(&mut self) -> Vec<Log> {
        let mut logs = std::mem::take(&mut self.logs);
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            let msg = format!("{left_out} lines were dropped because they came too fast");
            logs.push(Log { level: "warn".to_owned(), msg, meta: None });
        }
        logs
    }
}
