//! A task in progress: the state shared by its handler and the worker's loop.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eddyline_protocol::{Emit, Log, Op, ReportOutcome, Task, TaskKind};
use serde_json::{Map, Value};
use tokio::sync::{Notify, mpsc, oneshot};

use crate::code::probe::Probe;

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
    /// Reports of the driver of a code run, which has read its memo up to `seen`. `last` if the last one ends the task.
    Frame { task: TaskId, seen: u64, ops: Vec<Op>, last: bool },
    /// The function of a code run waits for others only, or no longer.
    AtWork { task: TaskId, at_work: bool },
    /// The driver has given up its task, because it is lost or no longer wanted.
    Gone { task: TaskId },
}

pub(crate) struct TaskState {
    pub id: TaskId,
    pub task: Task,
    pub voice: mpsc::Sender<HandlerMessage>,
    cancelled: AtomicBool,
    lost: AtomicBool,
    on_cancel: Notify,
    notes: Mutex<Notes>,
    /// Of a code run, until its driver takes it.
    memo: Mutex<Option<Map<String, Value>>>,
    /// Of a step that a function runs itself: the task of the function.
    function: Option<Arc<TaskState>>,
    /// Of a function in a test.
    pub probe: Option<Arc<dyn Probe>>,
}

impl fmt::Debug for TaskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskState").field("task", &self.task).finish_non_exhaustive()
    }
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

impl TaskState {
    pub fn new(mut task: Task, voice: mpsc::Sender<HandlerMessage>) -> TaskState {
        let (cancelled, lost, on_cancel) = (AtomicBool::new(false), AtomicBool::new(false), Notify::new());
        let (id, notes) = (Arc::from(task.task_id.as_str()), Mutex::default());
        let memo = Mutex::new(task.memo.take());
        TaskState { id, task, voice, cancelled, lost, on_cancel, notes, memo, function: None, probe: None }
    }

    pub fn with_probe(self, probe: Option<Arc<dyn Probe>>) -> TaskState {
        TaskState { probe, ..self }
    }

    /// A step that the function of a code run executes itself. Its reports are those of the function's task.
    pub fn of_step(function: &Arc<TaskState>, name: &str, key: String, attempt: u32) -> TaskState {
        let of = &function.task;
        let task = Task {
            task_id: of.task_id.clone(),
            token: of.token.clone(),
            run_id: of.run_id.clone(),
            flow: of.flow.clone(),
            version: of.version.clone(),
            step: name.to_owned(),
            activation: name.to_owned(),
            handler: of.handler.clone(),
            attempt,
            kind: TaskKind::Step,
            input: Value::Null,
            run_input: Value::Null,
            gate: Value::Null,
            key,
            intent: of.intent.clone(),
            lease_ms: of.lease_ms,
            deadline: of.deadline.clone(),
            started_at: of.started_at.clone(),
            attempts: None,
            memo: None,
            memo_next: None,
            unwind: None,
            traceparent: of.traceparent.clone(),
            undo: false,
        };
        let step = TaskState::new(task, function.voice.clone());
        TaskState { function: Some(function.clone()), ..step }
    }

    pub fn is_of_function(&self) -> bool {
        self.function.is_some()
    }

    /// The input of the run.
    pub fn run_input(&self) -> &Value {
        self.function.as_ref().map_or(&self.task.run_input, |function| &function.task.run_input)
    }

    pub fn take_memo(&self) -> Map<String, Value> {
        self.memo.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
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
        self.of_task().cancelled.load(Ordering::Acquire)
    }

    pub fn is_lost(&self) -> bool {
        self.of_task().lost.load(Ordering::Acquire)
    }

    /// The state of the task that is reported on.
    fn of_task(&self) -> &TaskState {
        self.function.as_deref().unwrap_or(self)
    }

    pub async fn until_cancelled(&self) {
        self.until(|| self.is_cancelled()).await;
    }

    pub async fn until_lost(&self) {
        self.until(|| self.is_lost()).await;
    }

    async fn until(&self, so: impl Fn() -> bool) {
        loop {
            let notified = self.of_task().on_cancel.notified();
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

    pub fn log(&self, mut log: Log) {
        if let Some(function) = &self.function {
            // The line is one of the run; say which step wrote it.
            log.meta.get_or_insert_with(|| serde_json::json!({"step": self.task.step}));
            return function.log(log);
        }
        let mut notes = self.notes();
        if notes.logs.len() < MAX_LOGS {
            notes.logs.push(log);
        } else {
            notes.left_out += 1;
        }
        self.tell(notes);
    }

    pub fn progress(&self, progress: Op) {
        if let Some(function) = &self.function {
            return function.progress(progress);
        }
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
