//! A task in a handler's hands: what the handler and the worker's loop share of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eddyline_protocol::{Emit, Log, Op, Outcome, Task};
use tokio::sync::{Notify, mpsc, oneshot};

/// Log lines of one task that wait to be sent; more are left out, and it is said how many.
const MAX_LOGS: usize = 1_024;
/// Events that one attempt emits with its completion.
pub(crate) const MAX_EMITS: usize = 1_000;
/// What handlers have said and the loop has not heard yet.
pub(crate) const VOICES: usize = 1_024;

pub(crate) type TaskId = Arc<str>;

/// What a handler says to the loop.
#[derive(Debug)]
pub(crate) enum Said {
    /// It is done: this is what came of it, after what is left to be said before.
    Ended { task: TaskId, before: Vec<Op>, op: Op },
    /// It waits for what comes of this.
    Asked { task: TaskId, op: Op, answer: oneshot::Sender<Outcome> },
    /// It has notes, which need not go at once.
    Noted { task: TaskId },
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub id: TaskId,
    pub task: Task,
    pub voice: mpsc::Sender<Said>,
    cancelled: AtomicBool,
    lost: AtomicBool,
    on_cancel: Notify,
    notes: Mutex<Notes>,
}

/// What a handler has said without waiting.
#[derive(Debug, Default)]
struct Notes {
    emits: Vec<Emit>,
    logs: Vec<Log>,
    left_out: usize,
    /// The last one counts.
    progress: Option<Op>,
    /// The loop knows that there are some.
    told: bool,
}

impl Shared {
    pub fn new(task: Task, voice: mpsc::Sender<Said>) -> Shared {
        let (cancelled, lost, on_cancel) = (AtomicBool::new(false), AtomicBool::new(false), Notify::new());
        let (id, notes) = (Arc::from(task.task_id.as_str()), Mutex::default());
        Shared { id, task, voice, cancelled, lost, on_cancel, notes }
    }

    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.on_cancel.notify_waiters();
    }

    /// The task is not the worker's any more, which cancels it too.
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
            // Listening before looking: a cancel in between is not missed.
            notified.as_mut().enable();
            if so() {
                return;
            }
            notified.await;
        }
    }

    /// Keeps an event for the completion; false if there are too many.
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

    /// What was noted and goes now, while the handler goes on. Events stay for the completion.
    pub fn take_notes(&self) -> Vec<Op> {
        let mut notes = self.notes();
        notes.told = false;
        let (logs, progress) = (notes.logs(), notes.progress.take());
        logs.into_iter().map(Op::Log).chain(progress).collect()
    }

    /// The last word: what goes before it, and itself with what belongs to it.
    pub fn conclude(&self, op: Op) -> (Vec<Op>, Op) {
        let mut notes = self.notes();
        let (logs, progress) = (notes.logs(), notes.progress.take());
        match op {
            Op::Complete { output, .. } => {
                let emits = std::mem::take(&mut notes.emits);
                (progress.into_iter().collect(), Op::Complete { output, emits, logs })
            }
            // Nothing leaks from a failed attempt but what it logged.
            other => (logs.into_iter().map(Op::Log).chain(progress).collect(), other),
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, mut notes: MutexGuard<'_, Notes>) {
        if !notes.told {
            // Without room in the channel the notes go with whatever is said next.
            notes.told = self.voice.try_send(Said::Noted { task: self.id.clone() }).is_ok();
        }
    }
}

impl Notes {
    fn logs(&mut self) -> Vec<Log> {
        let mut logs = std::mem::take(&mut self.logs);
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            let msg = format!("{left_out} lines came too fast and were left out");
            logs.push(Log { level: "warn".to_owned(), msg, meta: None });
        }
        logs
    }
}
