//! The worker's loop: it receives messages from the server and the handlers, and connects the two. It awaits nothing
//! but the next event, and can be cancelled at that await and continued on another thread.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use eddyline_protocol::{
    Beat, Failure, FromServer, Heartbeat, Op, RegisterWorker, Report, ReportOutcome, Task, TaskKind, Verdict,
};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::Instant;

use super::ctx::BAD_REPORT;
use super::handler::{Handler, PANIC, carry_out};
use super::line::{Event, Line};
use super::link::{Cut, Hello, ToServer, Transport};
use super::outbox::{Outbox, Pending};
use super::task::{HandlerMessage, Shared, TaskId, VOICES};
use crate::error::Error;

/// How long log lines and progress wait to be sent with others, such as the step's completion.
const LINGER: Duration = Duration::from_millis(50);
/// The worker requests no more tasks while it has this many unacknowledged reports per slot.
const MAX_UNACKNOWLEDGED: usize = 4;
/// How long aborting the handlers may take at the end.
const LET_GO: Duration = Duration::from_secs(1);
/// Kinds of failure that the worker itself reports.
const NO_HANDLER: &str = "NoHandler";
const CANCELLED: &str = "Cancelled";

/// A callback for every finished task, with its final report and the outcome.
pub(crate) type OnOutcome = Box<dyn Fn(&Task, &Op, &ReportOutcome) + Send + Sync>;

/// The worker's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub max_concurrent: u32,
    pub drain_timeout: Duration,
    pub cancel_grace: Duration,
}

pub(crate) struct Shift {
    handlers: HashMap<String, Handler>,
    rules: Rules,
    me: RegisterWorker,
    line: Line,
    /// Completes when the worker should stop. If the sender is dropped, the worker continues.
    stop: Option<oneshot::Receiver<()>>,
    voice: mpsc::Sender<HandlerMessage>,
    inbox: mpsc::Receiver<HandlerMessage>,
    /// Dropped with the shift, which aborts the handlers.
    crew: JoinSet<()>,
    /// Where the handlers run.
    runtime: Handle,
    held_tasks: HeldTasks,
    /// Running handlers.
    running: u32,
    /// Credits that the server has and has not used.
    granted: u32,
    notes: VecDeque<(Instant, TaskId)>,
    graces: VecDeque<(Instant, TaskId)>,
    drain: Option<Drain>,
}

/// The worker's tasks and their reports.
#[derive(Default)]
struct HeldTasks {
    held: HashMap<TaskId, HeldTask>,
    outbox: Outbox,
    completed: u64,
    failed: u64,
    on_outcome: Option<OnOutcome>,
}

struct HeldTask {
    shared: std::sync::Arc<Shared>,
    /// The sequence number of the next report.
    seq: u32,
    state: Doing,
}

enum Doing {
    Running {
        stop: AbortHandle,
        why: Option<Why>,
    },
    /// Its final report is in the outbox.
    Ended,
}

/// Why a handler should stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Lost,
    Cancelled,
}

struct Drain {
    until: Instant,
    /// `drain` was sent on this connection.
    sent: bool,
    /// The server has responded since: no more tasks are on their way.
    confirmed: bool,
}

impl Shift {
    /// Handlers run on the runtime that this is called on.
    pub fn new(
        handlers: HashMap<String, Handler>,
        me: RegisterWorker,
        rules: Rules,
        on_outcome: Option<OnOutcome>,
        transport: Box<dyn Transport>,
        stop: oneshot::Receiver<()>,
    ) -> Shift {
        let (voice, inbox) = mpsc::channel(VOICES);
        Shift {
            handlers,
            rules,
            me,
            line: Line::new(transport),
            stop: Some(stop),
            voice,
            inbox,
            crew: JoinSet::new(),
            runtime: Handle::current(),
            held_tasks: HeldTasks { on_outcome, ..HeldTasks::default() },
            running: 0,
            granted: 0,
            notes: VecDeque::new(),
            graces: VecDeque::new(),
            drain: None,
        }
    }

    /// Works until it is told to stop, by `stop` or the server; then finishes its tasks.
    pub async fn work(&mut self) -> Result<(), Error> {
        while !self.is_done() {
            // Messages of handlers go into the next batch, so drain all of them before sending one.
            while let Ok(message) = self.inbox.try_recv() {
                self.on_handler_message(message);
            }
            self.send();
            let wakes = self.wakes();
            let event = tokio::select! {
                // Other branches first, so that a server that never pauses does not delay heartbeats.
                biased;
                Some(message) = self.inbox.recv() => {
                    self.on_handler_message(message);
                    None
                }
                () = tokio::time::sleep_until(wakes) => self.on_time(),
                () = asked(&mut self.stop), if self.drain.is_none() => {
                    self.begin_drain("asked to stop");
                    None
                }
                event = self.line.next() => Some(event),
            };
            if let Some(end) = event.and_then(|event| self.on_line(event)) {
                return end;
            }
            if !self.crew_is_there() {
                return Err(Error::Config("the runtime of the handlers has shut down".to_owned()));
            }
        }
        if self.running > 0 {
            tracing::warn!(tasks = self.running, "dropped unfinished tasks; they are retried when their leases expire");
        }
        let unacknowledged = self.held_tasks.outbox.len();
        if unacknowledged > 0 {
            tracing::warn!(reports = unacknowledged, "dropped unacknowledged reports; their attempts are retried");
        }
        // A handler that blocks its thread is not waited for either.
        let _ = tokio::time::timeout(LET_GO, self.crew.shutdown()).await;
        self.line.close().await;
        Ok(())
    }

    /// Joins handlers that have ended. Returns false if one was aborted by something else: its runtime has shut down,
    /// and no other handler will ever run.
    fn crew_is_there(&mut self) -> bool {
        while let Some(ended) = self.crew.try_join_next() {
            if let Err(error) = ended
                && let Some(task) = self.held_tasks.running_as(error.id())
            {
                if error.is_cancelled() {
                    return false;
                }
                // Panics while it runs are caught; this one happened when its state was dropped.
                let op = fail(PANIC, "the handler panicked while its state was dropped".to_owned(), false);
                self.on_handler_message(HandlerMessage::Ended { task, before: Vec::new(), op });
            }
        }
        true
    }

    fn on_line(&mut self, event: Event) -> Option<Result<(), Error>> {
        match event {
            Event::Due => {
                let tasks = self.held_tasks.ids();
                self.line.open(Hello { worker: self.me.clone(), tasks });
            }
            Event::Opened => {}
            Event::Heard(message) => self.on_message(message),
            #[cfg(feature = "engine")]
            Event::Cut(Cut::Over) => {
                self.held_tasks.held.values().for_each(|held| held.shared.cancel());
                return Some(Ok(()));
            }
            Event::Cut(Cut::Refused(error)) if !self.line.was_up() => return Some(Err(error)),
            // The key was revoked or has expired. The worker has no other, and cannot report results without it.
            Event::Cut(Cut::Refused(error @ Error::Api { status: 401 | 403, .. })) => {
                self.held_tasks.held.values().for_each(|held| held.shared.cancel());
                return Some(Err(error));
            }
            Event::Cut(Cut::Refused(error)) => {
                if matches!(error, Error::Api { status: 400 | 413 | 422, .. }) {
                    self.held_tasks.refused(&error.to_string());
                }
                self.cut(&error.to_string(), None);
            }
            Event::Cut(Cut::Lost { why, after }) => self.cut(&why, after),
        }
        None
    }

    /// The connection is lost. Handlers continue; their reports are kept.
    fn cut(&mut self, why: &str, after: Option<Duration>) {
        let pause = self.line.down(after);
        tracing::warn!("connection lost ({why}); reconnecting in {pause:?}");
        self.off_line();
    }

    /// Unanswered messages must be sent again.
    fn off_line(&mut self) {
        self.held_tasks.outbox.take_back();
        self.granted = 0;
        if let Some(drain) = &mut self.drain {
            (drain.sent, drain.confirmed) = (false, false);
        }
    }

    fn on_message(&mut self, message: FromServer) {
        match message {
            FromServer::Tasks { tasks } => tasks.into_iter().for_each(|task| self.begin(task)),
            FromServer::Reported { id, outcomes, .. } => self.held_tasks.reported(id, outcomes),
            FromServer::Beat { beat } => self.on_beat(beat),
            // Handled where the link is opened and read.
            FromServer::Welcome { .. } | FromServer::Error { .. } => {}
        }
    }

    fn on_beat(&mut self, beat: Beat) {
        if let Some(drain) = &mut self.drain {
            drain.confirmed = drain.sent;
        }
        let lost = beat.lost.iter().map(|id| (id, Why::Lost));
        for (id, why) in lost.chain(beat.cancel.iter().map(|id| (id, Why::Cancelled))) {
            if let Some(task) = self.held_tasks.cancel(id, why)
                && !self.held_tasks.may_finish(&task)
            {
                self.graces.push_back((Instant::now() + self.rules.cancel_grace, task));
            }
        }
        if beat.drain && self.drain.is_none() {
            self.begin_drain("the server asked to drain");
        }
    }

    fn begin_drain(&mut self, why: &str) {
        tracing::info!(tasks = self.running, "{why}: finishing running tasks");
        let until = Instant::now() + self.rules.drain_timeout;
        self.drain = Some(Drain { until, sent: false, confirmed: false });
    }

    fn begin(&mut self, task: Task) {
        self.granted = self.granted.saturating_sub(1);
        if self.held_tasks.held.contains_key(task.task_id.as_str()) {
            return;
        }
        let handler = match task.kind {
            TaskKind::Step => self.handlers.get(&task.handler).cloned(),
            TaskKind::Run => None,
        };
        let shared = std::sync::Arc::new(Shared::new(task, self.voice.clone()));
        let state = match handler {
            Some(handler) => {
                self.running += 1;
                let stop = self.crew.spawn_on(carry_out(handler, shared.clone()), &self.runtime);
                Doing::Running { stop, why: None }
            }
            None => Doing::Ended,
        };
        let (id, ended) = (shared.id.clone(), matches!(state, Doing::Ended));
        let message = format!("this worker has no handler `{}`", shared.task.handler);
        self.held_tasks.held.insert(id.clone(), HeldTask { shared, seq: 1, state });
        if ended {
            self.held_tasks.say(&id, fail(NO_HANDLER, message, true), true, None);
        }
    }

    fn on_handler_message(&mut self, message: HandlerMessage) {
        match message {
            HandlerMessage::Ended { task, before, op } => {
                if self.held_tasks.end(&task) {
                    self.running -= 1;
                    before.into_iter().for_each(|op| self.held_tasks.say(&task, op, false, None));
                    self.held_tasks.say(&task, op, true, None);
                }
            }
            HandlerMessage::Asked { task, op, answer } => {
                // In the order in which the handler sent it.
                self.held_tasks.say_notes(&task);
                self.held_tasks.say(&task, op, false, Some(answer));
            }
            HandlerMessage::Noted { task } => self.notes.push_back((Instant::now() + LINGER, task)),
        }
    }

    /// Handles what is due. May return an event of the line.
    fn on_time(&mut self) -> Option<Event> {
        let now = Instant::now();
        while let Some((_, task)) = self.notes.pop_front_if(|(at, _)| *at <= now) {
            self.held_tasks.say_notes(&task);
        }
        while let Some((_, task)) = self.graces.pop_front_if(|(at, _)| *at <= now) {
            if self.held_tasks.stop(&task) {
                self.running -= 1;
            }
        }
        let up = self.line.up()?;
        if up.is_silent(now) {
            // Or this process was stalled, and there is something to read.
            let heard = self.line.next().now_or_never();
            if heard.is_none() {
                self.cut("no message from the server for most of a lease", None);
            }
            return heard;
        }
        if up.is_beat_due(now) {
            up.say(ToServer::Heartbeat { beat: self.held_tasks.heartbeat() });
        }
        None
    }

    /// Sends what is pending: reports together with the credits that they free, or credits alone.
    fn send(&mut self) {
        let room = self.room();
        let Some(up) = self.line.up() else { return };
        if let Some((id, reports)) = self.held_tasks.outbox.next_batch() {
            up.say(ToServer::Report { id, reports, credit: room });
            self.granted += room;
        } else if room > 0 && !self.held_tasks.outbox.is_gathering() {
            // While reports gather, their credits wait to be sent with them: the server then needs one commit for both.
            up.say(ToServer::Credit { n: room });
            self.granted += room;
        }
        if let Some(drain) = &mut self.drain
            && !std::mem::replace(&mut drain.sent, true)
        {
            up.say(ToServer::Drain);
            up.say(ToServer::Heartbeat { beat: self.held_tasks.heartbeat() });
        }
    }

    /// How many more credits to grant.
    fn room(&self) -> u32 {
        let slow = self.held_tasks.outbox.len() > MAX_UNACKNOWLEDGED * self.rules.max_concurrent as usize;
        if self.drain.is_some() || slow {
            return 0;
        }
        self.rules.max_concurrent.saturating_sub(self.running).saturating_sub(self.granted)
    }

    /// Whether the worker has drained, or the time for it is over.
    fn is_done(&self) -> bool {
        let Some(drain) = &self.drain else { return false };
        let idle = self.held_tasks.held.is_empty() && self.held_tasks.outbox.is_empty();
        let last_word = match self.line.up_now() {
            Some(up) => drain.confirmed && up.is_settled(),
            None => true,
        };
        (idle && last_word) || Instant::now() >= drain.until
    }

    /// When the loop must wake up even if nothing happens.
    fn wakes(&mut self) -> Instant {
        let next = [
            self.line.up().map(|up| up.wakes()),
            self.notes.front().map(|(at, _)| *at),
            self.graces.front().map(|(at, _)| *at),
            self.drain.as_ref().map(|drain| drain.until),
        ];
        next.into_iter().flatten().min().unwrap_or_else(|| Instant::now() + Duration::from_secs(3_600))
    }
}

impl HeldTasks {
    fn ids(&self) -> Vec<String> {
        self.held.keys().map(|id| id.to_string()).collect()
    }

    fn heartbeat(&self) -> Heartbeat {
        let (completed, failed) = (Some(self.completed), Some(self.failed));
        Heartbeat { tasks: self.ids(), completed, failed, ..Heartbeat::default() }
    }

    /// Adds a report to the outbox, with its sequence number.
    fn say(&mut self, task: &TaskId, op: Op, last: bool, answer: Option<oneshot::Sender<ReportOutcome>>) {
        let Some(held) = self.held.get_mut(task) else { return };
        let about = &held.shared.task;
        let (task_id, token) = (about.task_id.clone(), about.token.clone());
        let report = Report { task_id, token, seq: Some(held.seq), seen: None, op };
        held.seq += 1;
        self.outbox.push(Pending::new(task.clone(), report, last, answer));
    }

    fn say_notes(&mut self, task: &TaskId) {
        if let Some(HeldTask { shared, state: Doing::Running { .. }, .. }) = self.held.get(task) {
            for op in shared.clone().take_notes() {
                self.say(task, op, false, None);
            }
        }
    }

    /// Call it when the handler has ended by itself. Returns false if it was aborted before.
    fn end(&mut self, task: &TaskId) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        matches!(std::mem::replace(&mut held.state, Doing::Ended), Doing::Running { .. })
    }

    /// The task whose handler is this tokio task.
    fn running_as(&self, id: Id) -> Option<TaskId> {
        let runs = |held: &&HeldTask| matches!(&held.state, Doing::Running { stop, .. } if stop.id() == id);
        self.held.values().find(runs).map(|held| held.shared.id.clone())
    }

    /// Cancels the handler: once, and once more when a cancelled task is lost as well.
    fn cancel(&mut self, id: &str, because: Why) -> Option<TaskId> {
        let held = self.held.get_mut(id)?;
        let Doing::Running { why, .. } = &mut held.state else { return None };
        if *why == Some(Why::Lost) || *why == Some(because) {
            return None;
        }
        *why = Some(because);
        match because {
            Why::Lost => held.shared.lose(),
            Why::Cancelled => held.shared.cancel(),
        }
        Some(held.shared.id.clone())
    }

    /// Whether a cancelled handler may finish, because its result is needed for undo.
    fn may_finish(&self, task: &TaskId) -> bool {
        let of = self.held.get(task);
        of.is_some_and(|held| {
            held.shared.task.undo && matches!(held.state, Doing::Running { why: Some(Why::Cancelled), .. })
        })
    }

    /// Aborts a handler that ignored its cancellation. Returns false if it has ended meanwhile.
    fn stop(&mut self, task: &TaskId) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        let Doing::Running { stop, why } = &held.state else { return false };
        stop.abort();
        let (activation, lost) = (&held.shared.task.activation, *why == Some(Why::Lost));
        tracing::warn!(activation, "the handler ignored its cancellation and was aborted");
        held.state = Doing::Ended;
        if lost {
            self.held.remove(task);
        } else {
            // The run may wait for the end of the attempt before it undoes other steps.
            self.say(task, fail(CANCELLED, "aborted because the run was cancelled".to_owned(), false), true, None);
        }
        true
    }

    /// Call it when the server rejected the last message: a batch of one report counts as answered with `invalid`.
    fn refused(&mut self, why: &str) {
        if let Some(pending) = self.outbox.refused() {
            let outcome = ReportOutcome::new(&*pending.report.task_id, Verdict::Invalid);
            let outcome = ReportOutcome { message: Some(why.to_owned()), ..outcome };
            self.settle(pending, outcome);
        }
    }

    fn reported(&mut self, id: u64, outcomes: Vec<ReportOutcome>) {
        for (pending, outcome) in self.outbox.answered(id, outcomes) {
            self.settle(pending, outcome);
        }
    }

    fn settle(&mut self, pending: Pending, outcome: ReportOutcome) {
        let Pending { task, report, last, answer, .. } = pending;
        let invalid = outcome.outcome == Verdict::Invalid;
        let message = || outcome.message.clone().unwrap_or_else(|| "the server gave no reason".to_owned());
        if invalid {
            tracing::warn!(task = &*task, "the server rejected a report: {}", message());
        }
        match (last, invalid, &report.op) {
            (false, ..) => {}
            // The worker still holds the task, so it fails the task with the reason.
            (true, true, Op::Complete { .. } | Op::Defer { .. }) => {
                self.say(&task, fail(BAD_REPORT, message(), false), true, None);
            }
            (true, _, op) => {
                let applied = outcome.outcome == Verdict::Applied;
                self.completed += u64::from(applied && matches!(op, Op::Complete { .. }));
                self.failed += u64::from(applied && matches!(op, Op::Fail { .. }));
                if let (Some(held), Some(on_outcome)) = (self.held.remove(&task), &self.on_outcome) {
                    on_outcome(&held.shared.task, op, &outcome);
                }
            }
        }
        if let Some(answer) = answer {
            // The handler that waits for it may have been aborted.
            let _ = answer.send(outcome);
        }
    }
}

/// Returns once, when the worker should stop.
async fn asked(stop: &mut Option<oneshot::Receiver<()>>) {
    if let Some(asked) = stop {
        let asked = asked.await;
        *stop = None;
        if asked.is_ok() {
            return;
        }
    }
    std::future::pending().await
}

fn fail(kind: &str, message: String, retryable: bool) -> Op {
    Op::Fail { error: Failure::new(kind, message), retryable, retry_after: None }
}
