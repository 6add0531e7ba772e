//! From the inputs of a run to a commit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use eddyline_machine::{Answer, Input, Millis, Run, RunId, Version};
use eddyline_store::{CommandId, Namespace, RunCommit, StartKey, Taken};
use uuid::Uuid;

use super::load::Wanted;
use super::question::{Attempt, Obstacle, Question};
use super::{Committer, INPUTS_A_TRANSITION, Outcome, Pending};
use crate::error::EngineError;
use crate::hot::Hot;
use crate::quarantine;

/// A transition on its way, with those who wait for it.
#[derive(Debug)]
pub(super) struct Prepared {
    pub run: RunId,
    pub commit: RunCommit,
    /// Those of whose inputs it took some, with what is decided of them.
    pub decided: Vec<Decided>,
}

#[derive(Debug)]
pub(super) struct Decided {
    pub pending: Pending,
    /// Inputs that this transition took.
    pub taken: Vec<Input>,
    pub answers: Vec<Outcome>,
    /// The rest of its inputs is not tried.
    pub broken: bool,
}

impl Committer {
    /// Decides what waits for a run. Nothing, if something has to be loaded first or nothing is left to commit.
    pub(super) fn prepare(&mut self, run: RunId) -> Option<Prepared> {
        let lane = self.lanes.get_mut(&run)?;
        if lane.waiting.is_empty() {
            self.lanes.remove(&run);
            return None;
        }
        let Some(hot) = self.hot.get(run) else {
            // Most starts make a run of a new id; if it is there after all, the commit is refused and it is loaded.
            if let Some(new) = lane.waiting.front().and_then(|pending| pending.start.as_ref())
                && lane.conflicts == 0
            {
                self.hot.put(Hot::new(new.ns.clone(), new.flow.clone(), Run::new(run)));
                return self.prepare(run);
            }
            self.load(run, Wanted::Whole);
            return None;
        };
        if lane.waiting.iter().any(|pending| pending.is_foreign(&hot.ns)) {
            self.drop_foreign(run);
            return self.prepare(run);
        }
        if let Some(suspicion) = self.suspects.get(&run).filter(|suspicion| suspicion.quarantined) {
            let refusal = match hot.run.header.version {
                Version(0) => quarantine::refusal_to_start(run, suspicion.deaths),
                _ => quarantine::refusal(run, suspicion.deaths),
            };
            self.refuse(run, &refusal);
            self.hot.remove(run);
            self.release(run);
            return None;
        }
        let decided = match lane.take_thought(hot.run.header.version) {
            Some(thought) => thought.decided,
            None if lane.heavy => Err(Obstacle::Heavy),
            None => {
                let question = Question::of(&lane.waiting, lane.at_most);
                lane.asked = question.len();
                question.attempt(hot, self.now, false, &self.config)
            }
        };
        match decided {
            Ok(attempt) => self.conclude(run, attempt),
            Err(Obstacle::Heavy) => {
                self.decide_elsewhere(run);
                None
            }
            Err(Obstacle::Values(needed)) => {
                self.read_values(run, &needed);
                None
            }
            Err(Obstacle::Bug(bug)) => {
                self.undecidable(run, bug);
                None
            }
        }
    }

    /// Makes a commit of a decision; or gives the answers at once, where there is nothing to commit.
    fn conclude(&mut self, run: RunId, attempt: Attempt) -> Option<Prepared> {
        let Attempt { transition, mut outcomes, messages, events } = attempt;
        let (lane, ns) = (self.lanes.get_mut(&run)?, self.hot.get(run)?.ns.clone());
        if std::mem::take(&mut lane.heavy) {
            self.has_read(run);
        }
        let lane = self.lanes.get_mut(&run)?;
        if self.suspects.remove(&run).is_some() {
            // It was decided on, and the process is still there.
            self.suspicions_changed.fetch_add(1, Ordering::Relaxed);
            let command = CommandId(Uuid::from_bytes(half((self.config.chance)())));
            tokio::spawn(quarantine::absolve(self.store.clone(), command, ns.clone(), run));
        }
        let takes = outcomes.iter().any(|(at, ..)| lane.waiting[*at].taken.is_some());
        if transition.is_empty() && !takes {
            // No commit will show that the run in memory is the stored one. Those who came after it was last compared
            // with the store get their answers after the next comparison.
            outcomes.retain(|(at, ..)| lane.waiting[*at].ticket < lane.fresh);
            if outcomes.is_empty() {
                self.load(run, Wanted::IfChanged(transition.base));
                return None;
            }
            let decided = collect(&mut lane.waiting, outcomes);
            self.hot.settle(run);
            self.give_back(run, decided, self.now);
            self.release(run);
            return None;
        }
        let decided = collect(&mut lane.waiting, outcomes);
        let takes: Vec<Taken> = decided.iter().filter_map(|decided| decided.pending.taken.clone()).collect();
        lane.busy = true;
        // If this is committed, the run in memory was the stored one at a moment that is still to come.
        lane.fresh = self.tickets;
        let start = decided.iter().find_map(|decided| decided.pending.start.as_ref());
        let key: Option<StartKey> = start.and_then(|start| start.key.clone());
        let tells_line = start.and_then(|start| start.tells_line.clone());
        let command = CommandId(Uuid::from_bytes(half((self.config.chance)())));
        let transition = Arc::new(transition);
        let commit = RunCommit { ns, command, transition, messages, events, takes, key, tells_line };
        Some(Prepared { run, commit, decided })
    }

    /// There is no decision on the inputs that were asked about, and there will be none. Fewer are tried until the one
    /// is known that is to blame; only its submission is refused.
    pub(super) fn undecidable(&mut self, run: RunId, bug: String) {
        let Some(lane) = self.lanes.get_mut(&run) else { return };
        if lane.asked > 1 {
            lane.at_most = lane.asked / 2;
            return self.release(run);
        }
        self.hot.remove(run);
        if lane.waiting.front().is_some_and(|pending| pending.ticket >= lane.fresh) {
            // The run in memory may be to blame: nobody is refused because of an outdated one.
            return self.load(run, Wanted::Whole);
        }
        metrics::counter!("eddyline_bugs_total").increment(1);
        tracing::error!(instance = self.config.instance, %run, "no decision on an input, which is refused: {bug}");
        lane.at_most = INPUTS_A_TRANSITION;
        if let Some(mut pending) = lane.waiting.pop_front() {
            match pending.outcomes.is_empty() {
                true => pending.fail(EngineError::Bug(bug)),
                // The inputs before it are committed, and their answers stand.
                false => {
                    pending.inputs.pop_front();
                    pending.outcomes.push(Outcome::Answered { answer: Answer::Invalid(bug), at: self.now });
                    pending.outcomes.extend(pending.inputs.drain(..).map(|_| Outcome::NotTried));
                    pending.answer();
                }
            }
        }
        self.release(run);
    }

    /// Takes the answers as given; what is left of the submission, if it was not decided to its end.
    pub(super) fn settle(&mut self, decided: Decided, at: Millis) -> Option<Pending> {
        let Decided { mut pending, answers, broken, .. } = decided;
        pending.outcomes.extend(answers.into_iter().map(|outcome| match outcome {
            Outcome::Answered { answer, .. } => {
                if matches!(answer, Answer::Duplicate(_)) {
                    metrics::counter!("eddyline_duplicates_prevented_total").increment(1);
                }
                Outcome::Answered { answer, at }
            }
            other => other,
        }));
        if broken {
            pending.outcomes.extend(pending.inputs.drain(..).map(|_| Outcome::NotTried));
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

/// Takes the submissions out of which inputs were decided.
fn collect(waiting: &mut VecDeque<Pending>, outcomes: Vec<(usize, Outcome, bool)>) -> Vec<Decided> {
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
