//! Decisions that take long are made on other threads, a few at a time, while the committer goes on with other runs.

use std::task::Context;

use eddyline_machine::{RunId, Version};
use futures_util::FutureExt;

use super::Committer;
use super::question::{Attempt, Obstacle, Question};

/// What was decided elsewhere, of the run at that version.
#[derive(Debug)]
pub(super) struct Thought {
    pub run: RunId,
    pub version: Version,
    pub decided: Result<Attempt, Obstacle>,
}

/// How many decisions are made elsewhere at the same time: one core is left to everything else.
pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().saturating_sub(1).max(1))
}

impl Committer {
    /// Puts a run in line for a decision elsewhere. It stays busy until that is made.
    pub(super) fn decide_elsewhere(&mut self, run: RunId) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        lane.busy = true;
        lane.heavy = true;
        match self.suspects.contains_key(&run) {
            true => self.heavy_suspects.push_back(run),
            false => self.heavy.push(self.hot.get(run).map(|hot| hot.ns.clone()), run),
        }
    }

    /// Begins as many of these decisions as there are threads for them.
    pub(super) fn begin_heavy(&mut self, cx: &mut Context<'_>) {
        while self.thread_is_free() && self.look_at_time(cx) {
            let suspect = self.heavy_suspects.pop_front();
            let Some(run) = suspect.or_else(|| self.heavy.pop()) else { return };
            self.thinking_of_suspect = suspect.is_some();
            self.begin_one(run);
        }
    }

    /// Whether a decision can begin. Beside that on a suspect there is no other, lest it be unclear which of them ended
    /// the process.
    fn thread_is_free(&self) -> bool {
        if !self.heavy_suspects.is_empty() {
            return self.thinking.is_empty();
        }
        let suspected = self.thinking_of_suspect && !self.thinking.is_empty();
        let free = self.thinking.len() < self.heavy_threads && self.ready_suspects.is_empty();
        free && !self.heavy.is_empty() && !suspected
    }

    fn begin_one(&mut self, run: RunId) {
        let (Some(lane), Some(hot)) = (self.lanes.get_mut(&run), self.hot.share(run)) else {
            // It was evicted while it waited: it is loaded, and gets in line again.
            return self.release(run);
        };
        metrics::counter!("eddyline_heavy_decisions_total").increment(1);
        let question = Question::of(&lane.waiting, lane.at_most);
        lane.asked = question.len();
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
            Thought { run, version, decided: decided.unwrap_or_else(stopped) }
        });
        self.thinking.push(thought.boxed());
    }

    /// A decision was made elsewhere: the run goes on with it.
    pub(super) fn thought(&mut self, thought: Thought) {
        let run = thought.run;
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.thought = Some(thought);
        }
        self.release(run);
    }
}
