//! From the inputs of a run to a commit.

use std::collections::VecDeque;
use std::sync::Arc;

use eddyline_machine::{Answer, Data, Env, Halt, Input, Millis, Op, RunId, Transition, ValueId, decide};
use eddyline_store::{CommandId, Namespace, RunCommit, StartKey, Taken};
use uuid::Uuid;

use super::{Committer, INPUTS_A_TRANSITION, Outcome, Pending, Wanted};
use crate::carry;
use crate::config::Config;
use crate::error::EngineError;
use crate::events::look_backs;
use crate::hot::Hot;

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

/// What stands in the way of a decision.
enum Obstacle {
    Values(Vec<ValueId>),
    Bug(String),
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
                let hot = Hot { ns: new.ns.clone(), flow: new.flow.clone(), run: eddyline_machine::Run::new(run) };
                self.hot.put(hot);
                return self.prepare(run);
            }
            self.load(run, Wanted::Whole);
            return None;
        };
        if lane.waiting.iter().any(|pending| pending.is_foreign(&hot.ns)) {
            let (foreign, own): (VecDeque<Pending>, _) =
                lane.waiting.drain(..).partition(|pending| pending.is_foreign(&hot.ns));
            lane.waiting = own;
            foreign.into_iter().for_each(|pending| pending.fail(EngineError::no_run(run)));
            return self.prepare(run);
        }
        let decision = attempt(hot, &lane.waiting, self.now, &self.config);
        match decision {
            Ok(Attempt { transition, outcomes, messages, events }) => {
                if transition.is_empty() && !lane.fresh {
                    // Answers are about the store: what is in memory may be old.
                    let version = transition.base;
                    self.load(run, Wanted::IfChanged(version));
                    return None;
                }
                let ns = hot.ns.clone();
                let decided = collect(&mut lane.waiting, outcomes);
                let takes: Vec<Taken> = decided.iter().filter_map(|decided| decided.pending.taken.clone()).collect();
                if transition.is_empty() && takes.is_empty() {
                    lane.fresh = false;
                    self.give_back(run, decided, self.now);
                    self.release(run);
                    return None;
                }
                lane.busy = true;
                lane.fresh = false;
                let key: Option<StartKey> =
                    decided.iter().find_map(|decided| decided.pending.start.as_ref()?.key.clone());
                let command = CommandId(Uuid::from_bytes(half((self.config.chance)())));
                let commit = RunCommit { ns, command, transition: Arc::new(transition), messages, events, takes, key };
                Some(Prepared { run, commit, decided })
            }
            Err(Obstacle::Values(ids)) => {
                self.load(run, Wanted::Values(ids));
                None
            }
            Err(Obstacle::Bug(bug)) => {
                metrics::counter!("eddyline_bugs_total").increment(1);
                tracing::error!(instance = self.config.instance, %run, "no decision, nothing committed: {bug}");
                // The first input may be to blame: it is refused, so that the others get their chance.
                if let Some(pending) = lane.waiting.pop_front() {
                    pending.fail(EngineError::Bug(bug));
                }
                self.hot.take(run);
                self.release(run);
                None
            }
        }
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
    fn is_foreign(&self, ns: &Namespace) -> bool {
        self.ns.as_ref().is_some_and(|of| of != ns)
    }
}

struct Attempt {
    transition: Transition,
    /// Of each input that is decided now, in order: the place of its submission, and its answer.
    outcomes: Vec<(usize, Outcome, bool)>,
    messages: Vec<eddyline_machine::Message>,
    events: Vec<eddyline_store::NewEvent>,
}

fn attempt(hot: &Hot, waiting: &VecDeque<Pending>, now: Millis, config: &Config) -> Result<Attempt, Obstacle> {
    // Inputs that are left out because one before them in their submission was not applied.
    let mut cut: Vec<usize> = waiting.iter().map(|pending| pending.inputs.len()).collect();
    let env = Env::new(now, (config.chance)(), &config.hooks);
    loop {
        let mut inputs: Vec<Input> = Vec::new();
        // What is answered without a decision, by its place among the inputs.
        let mut places: Vec<(usize, Option<String>)> = Vec::new();
        'gather: for (at, pending) in waiting.iter().enumerate() {
            for input in pending.inputs.iter().take(cut[at]) {
                if places.len() >= INPUTS_A_TRANSITION {
                    break 'gather;
                }
                match refusal(hot, input) {
                    Some(reason) => places.push((at, Some(reason))),
                    None => {
                        places.push((at, None));
                        inputs.push(input.clone());
                    }
                }
            }
        }
        let transition = decide(&hot.flow.flow, &hot.run, &env, &inputs).map_err(|halt| match halt {
            Halt::Need(ids) => Obstacle::Values(ids),
            // Without a limit of inline steps none is.
            halt @ Halt::Heavy => Obstacle::Bug(halt.to_string()),
            Halt::Bug(bug) => Obstacle::Bug(bug),
        })?;
        let mut answers = transition.answers.iter();
        let mut outcomes = Vec::with_capacity(places.len());
        let mut counted = vec![0; waiting.len()];
        let mut broken = None;
        for (at, refused) in places {
            let answer = match refused {
                Some(reason) => Answer::Invalid(reason),
                None => match answers.next() {
                    Some(answer) => answer.clone(),
                    None => break,
                },
            };
            let applied = matches!(answer, Answer::Applied(_) | Answer::Duplicate(_));
            counted[at] += 1;
            let breaks = !applied && counted[at] < waiting[at].inputs.len();
            if breaks && counted[at] < cut[at] {
                broken = Some(at);
                break;
            }
            outcomes.push((at, Outcome::Answered { answer, at: now }, breaks));
        }
        if let Some(at) = broken {
            // Decided again without what comes after it in its submission.
            cut[at] = counted[at];
            continue;
        }
        let (mut messages, events) = carry::outgoing(&hot.run, &transition).map_err(Obstacle::Values)?;
        messages.extend(look_backs(&transition));
        return Ok(Attempt { transition, outcomes, messages, events });
    }
}

/// What is wrong with an input, as far as the machine does not look into it.
fn refusal(hot: &Hot, input: &Input) -> Option<String> {
    let Input::Report(report) = input else { return None };
    if !hot.flow.checks_emits() {
        return None;
    }
    let activation = report.task.activation;
    let check = |event: &str, payload: &Data| match payload {
        Data::Json(json) => hot.flow.check_emit(&hot.run, activation, event, json).err(),
        _ => None,
    };
    match &report.op {
        Op::Emit { event, payload } => check(event, payload),
        Op::Complete { emits, .. } => emits.iter().find_map(|(event, payload)| check(event, payload)),
        _ => None,
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
