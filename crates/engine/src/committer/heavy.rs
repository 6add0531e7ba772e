//! Decisions that take long are made on other threads, a few at a time, while the committer goes on with other runs.

use std::collections::VecDeque;
use std::task::Context;

use eddyline_machine::{RunId, Version};
use futures_util::FutureExt;

use super::question::{Attempt, Obstacle, Question};
use super::{Committer, Lane, Pending, Ticket};
use crate::error::EngineError;

/// What was decided elsewhere, of the run at that version, on what these submissions ask for.
#[derive(Debug)]
pub(super) struct Thought {
    pub run: RunId,
    pub version: Version,
    pub tickets: Vec<Ticket>,
    pub decided: Result<Attempt, Obstacle>,
}

/// How many decisions are made elsewhere at the same time: one core is left to everything else.
pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1).max(1))
}

impl Committer {
    /// Puts a run in line for a decision elsewhere. It stays busy until that is made. What the run refers to is not kept
    /// while it waits: thousands may, and large payloads are read when its turn has come.
    pub(super) fn decide_elsewhere(&mut self, run: RunId) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = true;
        lane.heavy = true;
        if self.suspects.contains_key(&run) {
            self.heavy_suspects.push_back(run);
        } else if lane.has_turn {
            self.heavy_next.push_back(run);
        } else {
            self.heavy.push(self.hot.get(run).map(|hot| hot.ns.clone()), run);
            self.hot.settle(run);
        }
        metrics::gauge!("eddyline_heavy_decisions_waiting").set(self.heavy.len() as f64);
    }

    /// Begins as many of these decisions as there are threads for them.
    pub(super) fn begin_heavy(&mut self, cx: &mut Context<'_>) {
        while self.thread_is_free() && self.look_at_time(cx) {
            let suspect = self.heavy_suspects.pop_front();
            let Some(run) = suspect.or_else(|| self.heavy_next.pop_front()).or_else(|| self.heavy.pop()) else {
                return;
            };
            self.thinking_of_suspect = suspect.is_some();
            self.heavy_reading.retain(|run| self.lanes.get(run).is_some_and(|lane| lane.has_turn));
            self.begin_one(run);
            metrics::gauge!("eddyline_heavy_decisions_waiting").set(self.heavy.len() as f64);
        }
    }

    /// Whether a decision can begin. Beside that on a suspect there is no other, lest it be unclear which of them ended
    /// the process.
    fn thread_is_free(&self) -> bool {
        if !self.heavy_suspects.is_empty() {
            return self.thinking.is_empty();
        }
        let suspected = self.thinking_of_suspect && !self.thinking.is_empty();
        let free = self.thinking.len() < self.heavy_threads && self.ready_suspects.is_empty() && !suspected;
        if !self.heavy_next.is_empty() {
            return free;
        }
        // A run that is read because its turn has come keeps its place, or all that wait would be read at once.
        let reading = self.heavy_reading.iter().filter(|run| self.lanes.get(*run).is_some_and(|lane| lane.has_turn));
        free && !self.heavy.is_empty() && self.thinking.len() + reading.count() < self.heavy_threads
    }

    fn begin_one(&mut self, run: RunId) {
        // Those who came while it waited may be of another namespace.
        if self.drop_foreign(run) {
            return self.release(run);
        }
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        let Some(hot) = self.hot.share(run) else {
            // It was evicted while it waited: it is loaded, and does not lose its turn.
            lane.has_turn = true;
            self.heavy_reading.insert(run);
            return self.release(run);
        };
        lane.has_turn = false;
        self.heavy_reading.remove(&run);
        metrics::counter!("eddyline_heavy_decisions_total").increment(1);
        let question = Question::of(&lane.waiting, lane.at_most);
        lane.asked = question.len();
        let tickets = lane.tickets(question.submissions());
        let (now, version, config) = (self.now, hot.run.header.version, self.config.clone());
        let handled = self.handled.clone();
        handled.begin_apart(run);
        let deciding = tokio::task::spawn_blocking(move || {
            let decided = question.attempt(&hot, now, true, &config);
            handled.end_apart(run);
            decided
        });
        let thought = deciding.map(move |decided| {
            let stopped = |_| Err(Obstacle::Bug("the decision was interrupted".to_owned()));
            Thought { run, version, tickets, decided: decided.unwrap_or_else(stopped) }
        });
        self.thinking.push(thought.boxed());
    }

    /// Tells those who ask about a run of another namespace that there is none. True if nobody else is left.
    pub(super) fn drop_foreign(&mut self, run: RunId) -> bool {
        let (Some(lane), Some(hot)) = (self.lanes.get_mut(&run), self.hot.get(run)) else { return false };
        let (foreign, own): (VecDeque<Pending>, _) =
            lane.waiting.drain(..).partition(|pending| pending.is_foreign(&hot.ns));
        lane.waiting = own;
        foreign.into_iter().for_each(|pending| pending.fail(EngineError::no_run(run)));
        lane.waiting.is_empty()
    }

    /// A decision was made elsewhere: the run goes on with it.
    pub(super) fn thought(&mut self, thought: Thought) {
        let run = thought.run;
        self.handled.heard_apart();
        if let Some(lane) = self.lanes.get_mut(&run) {
            // What it lacks is read, and it is next.
            lane.has_turn = matches!(thought.decided, Err(Obstacle::Values(_)));
            if lane.has_turn {
                self.heavy_reading.insert(run);
            }
            lane.thought = Some(thought);
        }
        self.release(run);
    }
}

impl Lane {
    /// The tickets of the first submissions.
    fn tickets(&self, submissions: usize) -> Vec<Ticket> {
        self.waiting.iter().take(submissions).map(|pending| pending.ticket).collect()
    }

    /// What was decided elsewhere, if the run and those who wait are the same as then.
    pub(super) fn take_thought(&mut self, version: Version) -> Option<Thought> {
        let thought = self.thought.take()?;
        let same = thought.version == version && self.tickets(thought.tickets.len()) == thought.tickets;
        same.then_some(thought)
    }
}
