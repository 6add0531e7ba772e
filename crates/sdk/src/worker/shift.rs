//! The worker's loop: it hears the server and the handlers, and keeps everything they need to know of each other. Nothing
//! here waits for anything but the next thing that happens, and whenever it waits it can be called off and go on elsewhere.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use eddyline_protocol::{
    Beat, Failure, FromServer, Heartbeat, Op, Outcome, RegisterWorker, Report, Task, TaskKind, Verdict,
};
use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::Instant;

use super::apart::Pace;
use super::ctx::BAD_REPORT;
use super::handler::{Handler, PANIC, carry_out};
use super::line::{Event, Line};
use super::link::{Cut, Hello, ToServer, Transport};
use super::outbox::{Outbox, Pending};
use super::task::{Said, Shared, TaskId, VOICES};
use crate::error::Error;

/// How long log lines and progress wait for company, such as the step's completion.
const LINGER: Duration = Duration::from_millis(50);
/// While this many reports a slot are not acknowledged, no more tasks are asked for.
const MAX_UNACKNOWLEDGED: usize = 4;
/// How long handlers may take to be stopped at the end.
const LET_GO: Duration = Duration::from_secs(1);
/// The kinds of failure that the worker itself brings about.
const NO_HANDLER: &str = "NoHandler";
const CANCELLED: &str = "Cancelled";

/// Who is told of every task that is done: its last report, and what the server answered.
pub(crate) type Told = Box<dyn Fn(&Task, &Op, &Outcome) + Send + Sync>;

/// What the worker keeps to.
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
    /// Comes when the worker is to stop. If nobody is left who could say so, it goes on.
    stop: Option<oneshot::Receiver<()>>,
    pub pace: Pace,
    voice: mpsc::Sender<Said>,
    inbox: mpsc::Receiver<Said>,
    /// Dropped with the shift, and the handlers with it.
    crew: JoinSet<()>,
    /// Where the handlers run.
    runtime: Handle,
    desk: Desk,
    /// Handlers at work.
    running: u32,
    /// Credits that the server has and has not used.
    granted: u32,
    notes: VecDeque<(Instant, TaskId)>,
    graces: VecDeque<(Instant, TaskId)>,
    drain: Option<Drain>,
}

/// The tasks that the worker has, and what is to be said of them.
#[derive(Default)]
struct Desk {
    held: HashMap<TaskId, Held>,
    outbox: Outbox,
    completed: u64,
    failed: u64,
    told: Option<Told>,
}

struct Held {
    shared: std::sync::Arc<Shared>,
    /// The number of the next report.
    seq: u32,
    state: Doing,
}

enum Doing {
    Running {
        stop: AbortHandle,
        why: Option<Why>,
    },
    /// Its last report is in the outbox.
    Ended,
}

/// Why a handler is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Lost,
    Cancelled,
}

struct Drain {
    until: Instant,
    /// The server was told on this connection.
    told: bool,
    /// The server has answered since: no task is on its way here.
    confirmed: bool,
}

impl Shift {
    /// Handlers will run where this is called.
    pub fn new(
        handlers: HashMap<String, Handler>,
        me: RegisterWorker,
        rules: Rules,
        told: Option<Told>,
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
            pace: Pace::default(),
            voice,
            inbox,
            crew: JoinSet::new(),
            runtime: Handle::current(),
            desk: Desk { told, ..Desk::default() },
            running: 0,
            granted: 0,
            notes: VecDeque::new(),
            graces: VecDeque::new(),
            drain: None,
        }
    }

    /// Works until it is told to stop, or until the server says so; then finishes what it has.
    pub async fn work(&mut self) -> Result<(), Error> {
        while !self.is_done() {
            // What handlers have said goes with the next batch, so all of it is heard before one goes.
            while let Ok(said) = self.inbox.try_recv() {
                self.on_said(said);
            }
            self.send();
            let wakes = self.wakes();
            let event = tokio::select! {
                // A line that never falls silent keeps no heartbeat back.
                biased;
                Some(said) = self.inbox.recv() => {
                    self.on_said(said);
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
                return Err(Error::Config("the runtime of the handlers has ended".to_owned()));
            }
        }
        if self.running > 0 {
            tracing::warn!(tasks = self.running, "not finished in time and let go; their leases will end");
        }
        let unheard = self.desk.outbox.len();
        if unheard > 0 {
            tracing::warn!(reports = unheard, "not acknowledged by a server and lost: what they are of is done again");
        }
        // One that blocks its thread is not waited for either.
        let _ = tokio::time::timeout(LET_GO, self.crew.shutdown()).await;
        self.line.close().await;
        Ok(())
    }

    /// It was called off, and goes on here.
    pub async fn moved(&mut self) {
        self.line.moved().await;
        self.off_line();
    }

    /// Takes note of handlers that have ended. False if one was stopped that nobody here stopped: its runtime is gone, and
    /// no other handler will ever run.
    fn crew_is_there(&mut self) -> bool {
        while let Some(ended) = self.crew.try_join_next() {
            if let Err(error) = ended
                && let Some(task) = self.desk.running_as(error.id())
            {
                if error.is_cancelled() {
                    return false;
                }
                // Not while it ran, which is caught, but with what it left behind.
                let op = fail(PANIC, "the handler panicked when it was done".to_owned(), false);
                self.on_said(Said::Ended { task, before: Vec::new(), op });
            }
        }
        true
    }

    fn on_line(&mut self, event: Event) -> Option<Result<(), Error>> {
        match event {
            Event::Due => {
                let tasks = self.desk.ids();
                self.line.open(Hello { worker: self.me.clone(), tasks });
            }
            Event::Opened => {
                if let Some(up) = self.line.up() {
                    self.pace.set(up.heartbeat());
                }
            }
            Event::Heard(message) => self.on_message(message),
            #[cfg(feature = "engine")]
            Event::Cut(Cut::Over) => {
                self.desk.held.values().for_each(|held| held.shared.cancel());
                return Some(Ok(()));
            }
            Event::Cut(Cut::Refused(error)) if !self.line.was_up() => return Some(Err(error)),
            // The key was revoked or has expired. It is the only one this worker has, and no result can be reported with it.
            Event::Cut(Cut::Refused(error @ Error::Api { status: 401 | 403, .. })) => {
                self.desk.held.values().for_each(|held| held.shared.cancel());
                return Some(Err(error));
            }
            Event::Cut(Cut::Refused(error)) => {
                if matches!(error, Error::Api { status: 400 | 413 | 422, .. }) {
                    self.desk.refused(&error.to_string());
                }
                self.cut(&error.to_string(), None);
            }
            Event::Cut(Cut::Lost { why, after }) => self.cut(&why, after),
        }
        None
    }

    /// The connection is gone. Handlers go on; what they say is kept.
    fn cut(&mut self, why: &str, after: Option<Duration>) {
        let pause = self.line.down(after);
        tracing::warn!("no connection ({why}); trying again in {pause:?}");
        self.off_line();
    }

    /// What was said and not answered is to be said again.
    fn off_line(&mut self) {
        self.desk.outbox.take_back();
        self.granted = 0;
        if let Some(drain) = &mut self.drain {
            (drain.told, drain.confirmed) = (false, false);
        }
    }

    fn on_message(&mut self, message: FromServer) {
        match message {
            FromServer::Tasks { tasks } => tasks.into_iter().for_each(|task| self.begin(task)),
            FromServer::Reported { id, outcomes, .. } => self.desk.reported(id, outcomes),
            FromServer::Beat { beat } => self.on_beat(beat),
            // They are dealt with where the line is opened, and where it is read.
            FromServer::Welcome { .. } | FromServer::Error { .. } => {}
        }
    }

    fn on_beat(&mut self, beat: Beat) {
        if let Some(drain) = &mut self.drain {
            drain.confirmed = drain.told;
        }
        let lost = beat.lost.iter().map(|id| (id, Why::Lost));
        for (id, why) in lost.chain(beat.cancel.iter().map(|id| (id, Why::Cancelled))) {
            if let Some(task) = self.desk.cancel(id, why)
                && !self.desk.may_finish(&task)
            {
                self.graces.push_back((Instant::now() + self.rules.cancel_grace, task));
            }
        }
        if beat.drain && self.drain.is_none() {
            self.begin_drain("told by the server to drain");
        }
    }

    fn begin_drain(&mut self, why: &str) {
        tracing::info!(tasks = self.running, "{why}: finishing what is at work");
        let until = Instant::now() + self.rules.drain_timeout;
        self.drain = Some(Drain { until, told: false, confirmed: false });
    }

    fn begin(&mut self, task: Task) {
        self.granted = self.granted.saturating_sub(1);
        if self.desk.held.contains_key(task.task_id.as_str()) {
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
        self.desk.held.insert(id.clone(), Held { shared, seq: 1, state });
        if ended {
            self.desk.say(&id, fail(NO_HANDLER, message, true), true, None);
        }
    }

    fn on_said(&mut self, said: Said) {
        match said {
            Said::Ended { task, before, op } => {
                if self.desk.end(&task) {
                    self.running -= 1;
                    before.into_iter().for_each(|op| self.desk.say(&task, op, false, None));
                    self.desk.say(&task, op, true, None);
                }
            }
            Said::Asked { task, op, answer } => {
                // In the order in which the handler said it.
                self.desk.say_notes(&task);
                self.desk.say(&task, op, false, Some(answer));
            }
            Said::Noted { task } => self.notes.push_back((Instant::now() + LINGER, task)),
        }
    }

    /// What is due. May come upon something that was on the line.
    fn on_time(&mut self) -> Option<Event> {
        let now = Instant::now();
        while let Some((_, task)) = self.notes.pop_front_if(|(at, _)| *at <= now) {
            self.desk.say_notes(&task);
        }
        while let Some((_, task)) = self.graces.pop_front_if(|(at, _)| *at <= now) {
            if self.desk.stop(&task) {
                self.running -= 1;
            }
        }
        let up = self.line.up()?;
        if up.is_silent(now) {
            // Or this process was, and there is something to hear.
            let heard = self.line.next().now_or_never();
            if heard.is_none() {
                self.cut("the server has been silent for most of a lease", None);
            }
            return heard;
        }
        if up.is_beat_due(now) {
            up.say(ToServer::Heartbeat { beat: self.desk.heartbeat() });
        }
        None
    }

    /// Says what there is to say: reports with the room that they made, or the room alone.
    fn send(&mut self) {
        let room = self.room();
        let Some(up) = self.line.up() else { return };
        if let Some((id, reports)) = self.desk.outbox.next_batch() {
            up.say(ToServer::Report { id, reports, credit: room });
            self.granted += room;
        } else if room > 0 && !self.desk.outbox.is_gathering() {
            // While reports gather, their room waits to go with them: the server then needs one commit for both.
            up.say(ToServer::Credit { n: room });
            self.granted += room;
        }
        if let Some(drain) = &mut self.drain
            && !std::mem::replace(&mut drain.told, true)
        {
            up.say(ToServer::Drain);
            up.say(ToServer::Heartbeat { beat: self.desk.heartbeat() });
        }
    }

    /// How many more tasks may be asked for.
    fn room(&self) -> u32 {
        let slow = self.desk.outbox.len() > MAX_UNACKNOWLEDGED * self.rules.max_concurrent as usize;
        if self.drain.is_some() || slow {
            return 0;
        }
        self.rules.max_concurrent.saturating_sub(self.running).saturating_sub(self.granted)
    }

    /// Drained, or out of time for it.
    fn is_done(&self) -> bool {
        let Some(drain) = &self.drain else { return false };
        let idle = self.desk.held.is_empty() && self.desk.outbox.is_empty();
        let last_word = match self.line.up_now() {
            Some(up) => drain.confirmed && up.is_settled(),
            None => true,
        };
        (idle && last_word) || Instant::now() >= drain.until
    }

    /// When there is something to do even if nothing happens.
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

impl Desk {
    fn ids(&self) -> Vec<String> {
        self.held.keys().map(|id| id.to_string()).collect()
    }

    fn heartbeat(&self) -> Heartbeat {
        let (completed, failed) = (Some(self.completed), Some(self.failed));
        Heartbeat { tasks: self.ids(), completed, failed, ..Heartbeat::default() }
    }

    /// Puts a report of a task into the outbox, with its number.
    fn say(&mut self, task: &TaskId, op: Op, last: bool, answer: Option<oneshot::Sender<Outcome>>) {
        let Some(held) = self.held.get_mut(task) else { return };
        let about = &held.shared.task;
        let (task_id, token) = (about.task_id.clone(), about.token.clone());
        let report = Report { task_id, token, seq: Some(held.seq), seen: None, op };
        held.seq += 1;
        self.outbox.push(Pending::new(task.clone(), report, last, answer));
    }

    fn say_notes(&mut self, task: &TaskId) {
        if let Some(Held { shared, state: Doing::Running { .. }, .. }) = self.held.get(task) {
            for op in shared.clone().take_notes() {
                self.say(task, op, false, None);
            }
        }
    }

    /// The handler has ended by itself. False if it was stopped before.
    fn end(&mut self, task: &TaskId) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        matches!(std::mem::replace(&mut held.state, Doing::Ended), Doing::Running { .. })
    }

    /// The task that is at work as this task of the runtime.
    fn running_as(&self, id: Id) -> Option<TaskId> {
        let runs = |held: &&Held| matches!(&held.state, Doing::Running { stop, .. } if stop.id() == id);
        self.held.values().find(runs).map(|held| held.shared.id.clone())
    }

    /// Tells the handler to stop: once, and once more when a task that was cancelled is lost as well.
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

    /// Whether a handler that was told to stop is let finish, since its result tells what there is to undo.
    fn may_finish(&self, task: &TaskId) -> bool {
        let of = self.held.get(task);
        of.is_some_and(|held| {
            held.shared.task.undo && matches!(held.state, Doing::Running { why: Some(Why::Cancelled), .. })
        })
    }

    /// Stops a handler that was told to and did not. False if it has ended meanwhile.
    fn stop(&mut self, task: &TaskId) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        let Doing::Running { stop, why } = &held.state else { return false };
        stop.abort();
        let (activation, lost) = (&held.shared.task.activation, *why == Some(Why::Lost));
        tracing::warn!(activation, "the handler did not heed its cancellation and was stopped");
        held.state = Doing::Ended;
        if lost {
            self.held.remove(task);
        } else {
            // The run may wait for the attempt to end, so that what others did can be undone.
            self.say(task, fail(CANCELLED, "stopped, because the run was cancelled".to_owned(), false), true, None);
        }
        true
    }

    /// What was sent last is not taken: as if a report had been answered so, if it was one alone.
    fn refused(&mut self, why: &str) {
        if let Some(pending) = self.outbox.refused() {
            let outcome = Outcome::new(&*pending.report.task_id, Verdict::Invalid);
            let outcome = Outcome { message: Some(why.to_owned()), ..outcome };
            self.settle(pending, outcome);
        }
    }

    fn reported(&mut self, id: u64, outcomes: Vec<Outcome>) {
        for (pending, outcome) in self.outbox.answered(id, outcomes) {
            self.settle(pending, outcome);
        }
    }

    fn settle(&mut self, pending: Pending, outcome: Outcome) {
        let Pending { task, report, last, answer, .. } = pending;
        let invalid = outcome.outcome == Verdict::Invalid;
        let message = || outcome.message.clone().unwrap_or_else(|| "the server does not say why".to_owned());
        if invalid {
            tracing::warn!(task = &*task, "the server does not take a report: {}", message());
        }
        match (last, invalid, &report.op) {
            (false, ..) => {}
            // It is still this worker's task, so it ends with what is wrong.
            (true, true, Op::Complete { .. } | Op::Defer { .. }) => {
                self.say(&task, fail(BAD_REPORT, message(), false), true, None);
            }
            (true, _, op) => {
                let applied = outcome.outcome == Verdict::Applied;
                self.completed += u64::from(applied && matches!(op, Op::Complete { .. }));
                self.failed += u64::from(applied && matches!(op, Op::Fail { .. }));
                if let (Some(held), Some(told)) = (self.held.remove(&task), &self.told) {
                    told(&held.shared.task, op, &outcome);
                }
            }
        }
        if let Some(answer) = answer {
            // Whoever asked may have been stopped.
            let _ = answer.send(outcome);
        }
    }
}

/// Comes back once: when the worker is asked to stop.
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
