//! Turns the waiting inputs of a run into a commit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use eddyline_machine::{Answer, Input, Millis, Run, RunId, Version};
use eddyline_store::{CommandId, Consumed, Namespace, RunCommit, StartKey};
use uuid::Uuid;

use super::load::Wanted;
use super::question::{Attempt, Question, Undecided};
use super::{Committer, INPUTS_A_TRANSITION, InputOutcome, Pending};
use crate::error::EngineError;
use crate::quarantine;
use crate::run_cache::CachedRun;

/// A transition to be committed, with the submissions that wait for it.
#[derive(Debug)]
pub(super) struct Prepared {
    pub run: RunId,
    pub commit: RunCommit,
    /// The submissions whose inputs it decided.
    pub decided: Vec<Decided>,
}

#[derive(Debug)]
pub(super) struct Decided {
    pub pending: Pending,
    /// The inputs that this transition decided.
    pub taken: Vec<Input>,
    pub answers: Vec<InputOutcome>,
    /// The remaining inputs of the submission are not tried.
    pub broken: bool,
}

impl Committer {
    /// Decides the waiting inputs of a run. None if something has to be loaded first or there is nothing to commit.
    pub(super) fn prepare(&mut self, run: RunId) -> Option<Prepared> {
        let lane = self.lanes.get_mut(&run)?;
        if lane.waiting.is_empty() {
            self.lanes.remove(&run);
            return None;
        }
        if self.needs_turn(run) {
            self.load_in_turn(run);
            return None;
        }
        let lane = self.lanes.get_mut(&run)?;
        let Some(cached) = self.cache.get(run) else {
            // Most starts have a new run id. If the run exists after all, the commit is refused and the run is loaded.
            if let Some(new) = lane.waiting.front().and_then(|pending| pending.start.as_ref())
                && lane.conflicts == 0
            {
                self.cache.put(CachedRun::new(new.ns.clone(), new.flow.clone(), Run::new(run)));
                return self.prepare(run);
            }
            self.load(run, Wanted::Whole);
            return None;
        };
        if lane.waiting.iter().any(|pending| pending.is_foreign(&cached.ns)) {
            self.drop_foreign(run);
            return self.prepare(run);
        }
        if let Some(suspicion) = self.suspects.get(&run).filter(|suspicion| suspicion.quarantined) {
            let refusal = match cached.run.header.version {
                Version(0) => quarantine::refusal_to_start(run, suspicion.deaths),
                _ => quarantine::refusal(run, suspicion.deaths),
            };
            self.refuse(run, &refusal);
            self.cache.remove(run);
            self.release(run);
            return None;
        }
        let decided = match lane.take_heavy_decision(cached.run.header.version) {
            Some(decision) => decision.decided,
            None if lane.heavy => Err(Undecided::Heavy),
            None => {
                let question = Question::of(&lane.waiting, lane.at_most);
                lane.asked = question.len();
                question.attempt(cached, self.now, false, &self.config)
            }
        };
        match decided {
            Ok(attempt) => self.conclude(run, attempt),
            Err(Undecided::Heavy) => {
                self.decide_elsewhere(run);
                None
            }
            Err(Undecided::Values(needed)) => {
                self.read_values(run, &needed);
                None
            }
            Err(Undecided::Bug(bug)) => {
                self.undecidable(run, bug);
                None
            }
        }
    }

    /// Turns a decision into a commit, or answers at once if there is nothing to commit.
    fn conclude(&mut self, run: RunId, attempt: Attempt) -> Option<Prepared> {
        let Attempt { transition, mut outcomes, messages, events } = attempt;
        let (lane, ns) = (self.lanes.get_mut(&run)?, self.cache.get(run)?.ns.clone());
        if std::mem::take(&mut lane.heavy) {
            self.finish_read(run);
        }
        let lane = self.lanes.get_mut(&run)?;
        if self.suspects.remove(&run).is_some() {
            // The decision did not kill the process.
            self.suspicions_changed.fetch_add(1, Ordering::Relaxed);
            let command = CommandId(Uuid::from_bytes(half((self.config.chance)())));
            tokio::spawn(quarantine::absolve(self.store.clone(), command, ns.clone(), run));
        }
        let takes = outcomes.iter().any(|(at, ..)| lane.waiting[*at].taken.is_some());
        if transition.is_empty() && !takes {
            // No commit will confirm that the cached run is current. Submissions that arrived after it was last
            // compared with the store are answered after the next comparison.
            outcomes.retain(|(at, ..)| lane.waiting[*at].ticket < lane.fresh);
            if outcomes.is_empty() {
                self.load(run, Wanted::IfChanged(transition.base));
                return None;
            }
            let decided = collect(&mut lane.waiting, outcomes);
            self.cache.settle(run);
            self.answer_decided(run, decided, self.now);
            self.release(run);
            return None;
        }
        let decided = collect(&mut lane.waiting, outcomes);
        let takes: Vec<Consumed> = decided.iter().filter_map(|decided| decided.pending.taken.clone()).collect();
        lane.busy = true;
        // If this is committed, the cached run was current at a later moment than now.
        lane.fresh = self.tickets;
        let start = decided.iter().find_map(|decided| decided.pending.start.as_ref());
        let key: Option<StartKey> = start.and_then(|start| start.key.clone());
        let tells_line = start.and_then(|start| start.tells_line.clone());
        let command = CommandId(Uuid::from_bytes(half((self.config.chance)())));
        let transition = Arc::new(transition);
        let commit = RunCommit { ns, command, transition, messages, events, takes, key, tells_line };
        Some(Prepared { run, commit, decided })
    }

    /// Deciding the inputs fails and would fail again. Retries with half as many until a single input fails; only its
    /// submission is refused.
    pub(super) fn undecidable(&mut self, run: RunId, bug: String) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        if lane.asked > 1 {
            lane.at_most = lane.asked / 2;
            return self.release(run);
        }
        self.cache.remove(run);
        if lane.waiting.front().is_some_and(|pending| pending.ticket >= lane.fresh) {
            // An outdated cached run may be the cause: load it before refusing anything.
            return self.load(run, Wanted::Whole);
        }
        metrics::counter!("eddyline_bugs_total").increment(1);
        tracing::error!(instance = self.config.instance, %run, "refused an input that could not be decided: {bug}");
        lane.at_most = INPUTS_A_TRANSITION;
        if let Some(mut pending) = lane.waiting.pop_front() {
            match pending.outcomes.is_empty() {
                true => pending.fail(EngineError::Bug(bug)),
                // Earlier inputs of the submission are committed, so their answers stand.
                false => {
                    pending.inputs.pop_front();
                    pending.outcomes.push(InputOutcome::Answered { answer: Answer::Invalid(bug), at: self.now });
                    pending.outcomes.extend(pending.inputs.drain(..).map(|_| InputOutcome::NotTried));
                    pending.answer();
                }
            }
        }
        self.release(run);
    }

    /// Records the answers and replies if the submission is complete; otherwise returns its undecided rest.
    pub(super) fn settle(&mut self, decided: Decided, at: Millis) -> Option<Pending> {
        let Decided { mut pending, answers, broken, .. } = decided;
        pending.outcomes.extend(answers.into_iter().map(|outcome| match outcome {
            InputOutcome::Answered { answer, .. } => {
                if matches!(answer, Answer::Duplicate(_)) {
                    metrics::counter!("eddyline_duplicates_prevented_total").increment(1);
                }
                InputOutcome::Answered { answer, at }
            }
            other => other,
        }));
        if broken {
            pending.outcomes.extend(pending.inputs.drain(..).map(|_| InputOutcome::NotTried));
        }
        if pending.inputs.is_empty() {
            pending.answer();
            return None;
        }
        pending.taken = None;
        pending.start = None;
        Some(pending)
    }
}

impl Pending {
    pub(super) fn is_foreign(&self, ns: &Namespace) -> bool {
        self.ns.as_ref().is_some_and(|of| of != ns)
    }
}

/// Removes and returns the submissions whose inputs were decided.
fn collect(waiting: &mut VecDeque<Pending>, outcomes: Vec<(usize, InputOutcome, bool)>) -> Vec<Decided> {
    let mut decided: Vec<Decided> = Vec::new();
    let mut at_place = None;
    for (at, outcome, breaks) in outcomes {
        if at_place != Some(at) {
            at_place = Some(at);
            let Some(pending) = waiting.pop_front() else { break };
            decided.push(Decided { pending, taken: Vec::new(), answers: Vec::new(), broken: false });
        }
        if let Some(last) = decided.last_mut() {
            last.taken.extend(last.pending.inputs.pop_front());
            last.answers.push(outcome);
            last.broken |= breaks;
        }
    }
    decided
}

fn half(bytes: [u8; 32]) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&bytes[..16]);
    half
}
