//! The worker's loop: it receives messages from the server and the handlers, and connects the two. It awaits nothing
//! but the next event, and can be cancelled at that await and continued on another thread.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use eddyline_protocol::{Beat, FromServer, Op, RegisterWorker, ReportOutcome, Task, TaskKind};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Staff;
use super::handler::{PANIC, carry_out};
use super::held::{Doing, HeldTask, HeldTasks, Why, fail};
use super::line::{Event, Line};
use super::link::{Cut, Hello, ToServer, Transport};
use super::task::{HandlerMessage, TaskId, TaskState, VOICES};
use crate::code::driver::{MemoPages, Patience, Port, ToDriver, drive};
use crate::error::Error;

/// How long log lines and progress wait to be sent with others, such as the step's completion.
const LINGER: Duration = Duration::from_millis(50);
/// The worker requests no more tasks while it has this many unacknowledged reports per slot.
const MAX_UNACKNOWLEDGED: usize = 4;
/// How long aborting the handlers may take at the end.
const LET_GO: Duration = Duration::from_secs(1);
/// The kind of failure of a task that this worker cannot run.
const NO_HANDLER: &str = "NoHandler";

/// A callback for every finished task, with its final report and the outcome.
pub(crate) type OnOutcome = Box<dyn Fn(&Task, &Op, &ReportOutcome) + Send + Sync>;

/// The worker's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub max_concurrent: u32,
    pub drain_timeout: Duration,
    pub cancel_grace: Duration,
    /// How long functions of code flows that only wait stay in memory, and how many of them.
    pub hold: Duration,
    pub max_held: u32,
}

pub(crate) struct Shift {
    staff: Staff,
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
    /// Handlers and functions at work.
    running: u32,
    /// Functions that only wait, oldest first; some are there twice, or wait no longer.
    waiting: VecDeque<TaskId>,
    pages: Arc<dyn MemoPages>,
    /// Credits that the server has and has not used.
    granted: u32,
    notes: VecDeque<(Instant, TaskId)>,
    graces: VecDeque<(Instant, TaskId)>,
    drain: Option<Drain>,
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
        staff: Staff,
        me: RegisterWorker,
        rules: Rules,
        on_outcome: Option<OnOutcome>,
        transport: Box<dyn Transport>,
        stop: oneshot::Receiver<()>,
    ) -> Shift {
        let (voice, inbox) = mpsc::channel(VOICES);
        let pages = transport.pages();
        Shift {
            staff,
            rules,
            me,
            line: Line::new(transport),
            stop: Some(stop),
            voice,
            inbox,
            crew: JoinSet::new(),
            runtime: Handle::current(),
            held_tasks: HeldTasks::new(on_outcome),
            running: 0,
            waiting: VecDeque::new(),
            pages,
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
            Event::Opened => {
                if let Some(probe) = &self.staff.probe {
                    probe.joined();
                }
            }
            Event::Heard(message) => self.on_message(message),
            #[cfg(feature = "engine")]
            Event::Cut(Cut::Over) => {
                self.held_tasks.cancel_all();
                return Some(Ok(()));
            }
            Event::Cut(Cut::Refused(error)) if !self.line.was_up() => return Some(Err(error)),
            // The key was revoked or has expired. The worker has no other, and cannot report results without it.
            Event::Cut(Cut::Refused(error @ Error::Api { status: 401 | 403, .. })) => {
                self.held_tasks.cancel_all();
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
            FromServer::Reported { id, outcomes, news, news_next } => {
                self.held_tasks.reported(id, outcomes, news, news_next);
            }
            FromServer::Beat { beat } => self.on_beat(beat),
            // Handled where the link is opened and read.
            FromServer::Welcome { .. } | FromServer::Error { .. } => {}
        }
    }

    fn on_beat(&mut self, beat: Beat) {
        if let Some(drain) = &mut self.drain {
            drain.confirmed = drain.sent;
        }
        self.held_tasks.news(beat.news, beat.news_next);
        let lost = beat.lost.iter().map(|id| (id, Why::Lost));
        for (id, why) in lost.chain(beat.cancel.iter().map(|id| (id, Why::Cancelled))) {
            if self.held_tasks.cancel_function(id, why, beat.unwind.contains(id)) {
                continue;
            }
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
        self.held_tasks.tell_functions(|| ToDriver::Drain);
    }

    fn begin(&mut self, task: Task) {
        self.granted = self.granted.saturating_sub(1);
        if self.held_tasks.has(&task.task_id) {
            return;
        }
        let shared = Arc::new(TaskState::new(task, self.voice.clone()).with_probe(self.staff.probe.clone()));
        let id = shared.id.clone();
        let task = &shared.task;
        let (stop, driver) = match task.kind {
            TaskKind::Step => match self.staff.handlers.get(&task.handler).cloned() {
                Some(handler) => (self.crew.spawn_on(carry_out(handler, shared.clone()), &self.runtime), None),
                None => return self.cannot_run(shared, "handler"),
            },
            TaskKind::Run => match self.staff.flows.get(&task.handler).cloned() {
                Some(flow) => {
                    let (to, inbox) = mpsc::unbounded_channel();
                    if self.drain.is_some() {
                        // It may have been on its way when the drain began.
                        let _ = to.send(ToDriver::Drain);
                    }
                    let port = Port { voice: self.voice.clone(), inbox, pages: self.pages.clone() };
                    let patience = Patience { hold: self.rules.hold, cancel_grace: self.rules.cancel_grace };
                    let driving = drive(flow, shared.clone(), port, patience);
                    (self.crew.spawn_on(driving, &self.runtime), Some(to))
                }
                None => return self.cannot_run(shared, "flow"),
            },
        };
        self.running += 1;
        self.held_tasks.add(id, HeldTask::new(shared, Doing::Running { stop, why: None }, driver));
    }

    fn cannot_run(&mut self, shared: Arc<TaskState>, what: &str) {
        let message = format!("this worker has no {what} `{}`", shared.task.handler);
        let id = shared.id.clone();
        self.held_tasks.add(id.clone(), HeldTask::new(shared, Doing::Ended, None));
        self.held_tasks.say(&id, fail(NO_HANDLER, message, true), true, None);
    }

    fn on_handler_message(&mut self, message: HandlerMessage) {
        match message {
            HandlerMessage::Ended { task, before, op } => {
                let (ended, freed) = (self.held_tasks.is_running(&task), self.held_tasks.end(&task));
                self.running -= u32::from(freed);
                if ended {
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
            HandlerMessage::Frame { task, seen, ops, last } => {
                self.held_tasks.say_notes(&task);
                if self.held_tasks.say_frame(&task, seen, ops, last) && last {
                    // Its credit goes with the report.
                    self.at_work(&task, false);
                }
            }
            HandlerMessage::AtWork { task, at_work } => {
                self.at_work(&task, at_work);
                if !at_work {
                    self.waiting.push_back(task);
                    self.make_room();
                }
            }
            HandlerMessage::Gone { task } => {
                self.at_work(&task, false);
                self.held_tasks.drop_task(&task);
            }
        }
    }

    /// The function of a code run is at work, or waits for others only.
    fn at_work(&mut self, task: &TaskId, at_work: bool) {
        match (self.held_tasks.set_at_work(task, at_work), at_work) {
            (true, true) => self.running += 1,
            (true, false) => self.running -= 1,
            (false, _) => {}
        }
    }

    /// Suspends the functions that have waited longest, if there are too many.
    fn make_room(&mut self) {
        let most = self.rules.max_held as usize;
        if self.waiting.len() <= most {
            return;
        }
        // Functions that wait again are in there twice: only the last time counts.
        let (mut known, mut waiting) = (HashSet::new(), VecDeque::new());
        for task in self.waiting.drain(..).rev() {
            if self.held_tasks.waits(&task) && known.insert(task.clone()) {
                waiting.push_front(task);
            }
        }
        let too_many = waiting.len().saturating_sub(most);
        for task in waiting.drain(..too_many) {
            self.held_tasks.tell_function(&task, ToDriver::MakeRoom);
        }
        self.waiting = waiting;
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
        let idle = self.held_tasks.is_empty();
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
