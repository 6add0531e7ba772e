//! Long decisions are made on blocking threads, a few at a time, while the committer decides other runs.

use std::collections::VecDeque;
use std::task::Context;

use eddyline_machine::{RunId, Version};
use futures_util::FutureExt;

use super::question::{Attempt, Question, Undecided};
use super::{Committer, Lane, Pending, Ticket};
use crate::error::EngineError;

/// A decision that another thread made, for the run at this version and the submissions with these tickets.
#[derive(Debug)]
pub(super) struct HeavyDecision {
    pub run: RunId,
    pub version: Version,
    pub tickets: Vec<Ticket>,
    pub decided: Result<Attempt, Undecided>,
}

/// How many heavy decisions are made at the same time: one core is left for everything else.
pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1).max(1))
}

impl Committer {
    /// Queues a run for a decision on another thread; it stays busy until that is made. Its large payloads are evicted
    /// meanwhile, since thousands of runs may wait, and read again when it has its turn.
    pub(super) fn decide_elsewhere(&mut self, run: RunId) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = true;
        lane.heavy = true;
        if self.suspects.contains_key(&run) {
            self.heavy_suspects.push_back(run);
        } else if lane.has_turn {
            self.heavy_next.push_back(run);
        } else {
            self.heavy.push(self.cache.get(run).map(|cached| cached.ns.clone()), run);
            self.cache.settle(run);
        }
        metrics::gauge!("eddyline_heavy_decisions_waiting").set(self.heavy.len() as f64);
    }

    /// Begins heavy decisions while threads are free.
    pub(super) fn begin_heavy(&mut self, cx: &mut Context<'_>) {
        while self.thread_is_free() && self.look_at_time(cx) {
            let suspect = self.heavy_suspects.pop_front();
            let Some(run) = suspect.or_else(|| self.heavy_next.pop_front()).or_else(|| self.heavy.pop()) else {
                return;
            };
            self.deciding_suspect = suspect.is_some();
            self.heavy_reading.retain(|run| self.lanes.get(run).is_some_and(|lane| lane.has_turn));
            self.begin_one(run);
            metrics::gauge!("eddyline_heavy_decisions_waiting").set(self.heavy.len() as f64);
        }
    }

    /// Whether a heavy decision can begin. A suspect is decided alone, so that it is clear which run killed the
    /// process.
    fn thread_is_free(&self) -> bool {
        if !self.heavy_suspects.is_empty() {
            return self.heavy_deciding.is_empty();
        }
        let suspected = self.deciding_suspect && !self.heavy_deciding.is_empty();
        let free = self.heavy_deciding.len() < self.heavy_threads && self.ready_suspects.is_empty() && !suspected;
        if !self.heavy_next.is_empty() {
            return free;
        }
        // A run that is being loaded for its turn keeps its thread; otherwise all waiting runs would be loaded at once.
        let reading = self.heavy_reading.iter().filter(|run| self.lanes.get(*run).is_some_and(|lane| lane.has_turn));
        free && !self.heavy.is_empty() && self.heavy_deciding.len() + reading.count() < self.heavy_threads
    }

    fn begin_one(&mut self, run: RunId) {
        // Submissions from other namespaces may have arrived while it waited.
        if self.drop_foreign(run) {
            return self.release(run);
        }
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        let Some(cached) = self.cache.share(run) else {
            // It was evicted while it waited: load it, and keep its turn.
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
        let (now, version, config) = (self.now, cached.run.header.version, self.config.clone());
        let handled = self.handled.clone();
        handled.begin_apart(run);
        let deciding = tokio::task::spawn_blocking(move || {
            let decided = question.attempt(&cached, now, true, &config);
            handled.end_apart(run);
            decided
        });
        let decision = deciding.map(move |decided| {
            let stopped = |_| Err(Undecided::Bug("the decision was interrupted".to_owned()));
            HeavyDecision { run, version, tickets, decided: decided.unwrap_or_else(stopped) }
        });
        self.heavy_deciding.push(decision.boxed());
    }

    /// Answers submissions from other namespaces with "not found". True if no others are left.
    pub(super) fn drop_foreign(&mut self, run: RunId) -> bool {
        let (Some(lane), Some(cached)) = (self.lanes.get_mut(&run), self.cache.get(run)) else { return false };
        let (foreign, own): (VecDeque<Pending>, _) =
            lane.waiting.drain(..).partition(|pending| pending.is_foreign(&cached.ns));
        lane.waiting = own;
        foreign.into_iter().for_each(|pending| pending.fail(EngineError::no_run(run)));
        lane.waiting.is_empty()
    }

    /// Another thread has made a decision: the run is committed with it.
    pub(super) fn heavy_decided(&mut self, decision: HeavyDecision) {
        let run = decision.run;
        self.handled.refresh_note();
        if let Some(lane) = self.lanes.get_mut(&run) {
            // If it lacks values, they are read and it keeps its turn.
            lane.has_turn = matches!(decision.decided, Err(Undecided::Values(_)));
            if lane.has_turn {
                self.heavy_reading.insert(run);
            }
            lane.heavy_decision = Some(decision);
        }
        self.release(run);
    }
}

impl Lane {
    /// The tickets of the first submissions.
    fn tickets(&self, submissions: usize) -> Vec<Ticket> {
        self.waiting.iter().take(submissions).map(|pending| pending.ticket).collect()
    }

    /// The decision that another thread made, if the run and its first submissions have not changed since.
    pub(super) fn take_heavy_decision(&mut self, version: Version) -> Option<HeavyDecision> {
        let decision = self.heavy_decision.take()?;
        let same = decision.version == version && self.tickets(decision.tickets.len()) == decision.tickets;
        same.then_some(decision)
    }
}
