//! What is to be decided on a run, apart from everything else, so that it can be decided on any thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use eddyline_machine::{Answer, Data, Env, Halt, Input, Message, Millis, Op, Transition, ValueRef, decide};
use eddyline_store::NewEvent;

use super::{Outcome, Pending};
use crate::carry;
use crate::config::{Config, Decision, MAX_REPORT_CHECK_STEPS};
use crate::events::look_backs;
use crate::hot::Hot;
use crate::schema::Allowance;

/// A decision that takes more steps than this is made on another thread. A step takes about 50 ns. A transition that touches
/// as many activations as it may and evaluates nothing takes fewer: it would be decided twice for nothing.
const INLINE_STEPS: u64 = 80_000;

/// When the JSON Schemas of a decision have cost this many steps, the reports after it are decided on next time: others
/// get their turn at the thread in between.
const CHECK_STEPS: u64 = MAX_REPORT_CHECK_STEPS / 4;

/// Inputs that are decided together, copied from the submissions that they belong to.
#[derive(Debug)]
pub(super) struct Question {
    inputs: Vec<Input>,
    /// The place of the submission that each input belongs to.
    of: Vec<usize>,
    /// How many inputs each submission has that are still to be decided, whether they are part of the question or not.
    lengths: Vec<usize>,
}

/// A decision.
#[derive(Debug)]
pub(super) struct Attempt {
    pub transition: Transition,
    /// Of each input that is decided, in order: the place of its submission, its answer, and whether the rest of the
    /// submission is not tried.
    pub outcomes: Vec<(usize, Outcome, bool)>,
    pub messages: Vec<Message>,
    pub events: Vec<NewEvent>,
}

/// Why there is no decision.
#[derive(Debug)]
pub(super) enum Obstacle {
    /// The decision needs these stored values, and some of them are not in memory.
    Values(Vec<ValueRef>),
    /// It is too much work for this thread.
    Heavy,
    Bug(String),
}

impl Question {
    /// The first inputs of those that wait.
    pub fn of(waiting: &VecDeque<Pending>, at_most: usize) -> Question {
        let mut question = Question { inputs: Vec::new(), of: Vec::new(), lengths: Vec::new() };
        for (at, pending) in waiting.iter().enumerate() {
            let room = at_most - question.inputs.len();
            if room == 0 {
                break;
            }
            question.lengths.push(pending.inputs.len());
            for input in pending.inputs.iter().take(room) {
                question.inputs.push(input.clone());
                question.of.push(at);
            }
        }
        question
    }

    pub fn len(&self) -> usize {
        self.inputs.len()
    }

    /// How many submissions the inputs are of.
    pub fn submissions(&self) -> usize {
        self.lengths.len()
    }

    /// Decides; on the committer's thread, or apart from it. What takes long, and every JSON Schema, is left to another
    /// thread. A panic on the way is a bug like any other: it concerns this run alone.
    pub fn attempt(self, hot: &Hot, now: Millis, apart: bool, config: &Config) -> Result<Attempt, Obstacle> {
        if !apart && hot.flow.checks_emits() && self.inputs.iter().any(emits) {
            return Err(Obstacle::Heavy);
        }
        let since = Instant::now();
        // Nothing that is changed on the way outlives a panic: the run is only read, and the question is dropped.
        let decided = catch_unwind(AssertUnwindSafe(|| self.decide(hot, now, apart, config)))
            .unwrap_or_else(|panic| Err(Obstacle::Bug(format!("the decision panicked: {}", said(&*panic)))));
        metrics::histogram!("eddyline_decision_seconds").record(since.elapsed().as_secs_f64());
        decided
    }

    fn decide(mut self, hot: &Hot, now: Millis, apart: bool, config: &Config) -> Result<Attempt, Obstacle> {
        if let Some(on_decision) = &config.on_decision {
            on_decision(Decision { run: hot.run.header.run, apart });
        }
        let inline_steps = (!apart).then_some(INLINE_STEPS);
        let env = Env { inline_steps, ..Env::new(now, (config.chance)(), &config.hooks) };
        let mut refused = self.take_refused(hot);
        loop {
            let transition = decide(&hot.flow.flow, &hot.run, &env, &self.inputs).map_err(|halt| match halt {
                Halt::Need(needed) => Obstacle::Values(needed),
                Halt::Heavy => Obstacle::Heavy,
                Halt::Bug(bug) => Obstacle::Bug(bug),
            })?;
            match self.outcomes(&transition, &refused, now) {
                Ok(outcomes) => {
                    let outgoing = carry::outgoing(&hot.run, &transition, config.max_payload_bytes);
                    let (mut messages, events) = outgoing.map_err(Obstacle::Values)?;
                    messages.extend(look_backs(&transition));
                    return Ok(Attempt { transition, outcomes, messages, events });
                }
                // Decided again without what comes after it in its submission.
                Err(broken) => self.cut(broken, &mut refused),
            }
        }
    }

    /// Takes the inputs out that are refused before the machine sees them. The rest of the submissions go on with the
    /// place that these had among all inputs. Leaves out the last inputs, if it takes too long to check them all.
    fn take_refused(&mut self, hot: &Hot) -> Vec<Option<String>> {
        let (mut refused, mut steps) = (Vec::with_capacity(self.inputs.len()), 0);
        for input in &self.inputs {
            if steps > CHECK_STEPS && emits(input) {
                break;
            }
            let mut allowance = Allowance::of_report();
            refused.push(refusal(hot, input, &mut allowance));
            steps += allowance.spent();
        }
        self.inputs.truncate(refused.len());
        self.of.truncate(refused.len());
        let mut kept = refused.iter().map(Option::is_none);
        self.inputs.retain(|_| kept.next().unwrap_or(true));
        refused
    }

    /// What became of each input; or the place of one that was not applied and after which no other of its submission
    /// may be.
    fn outcomes(
        &self,
        transition: &Transition,
        refused: &[Option<String>],
        now: Millis,
    ) -> Result<Vec<(usize, Outcome, bool)>, usize> {
        let mut answers = transition.answers.iter();
        let mut outcomes = Vec::with_capacity(self.of.len());
        let mut counted = vec![0; self.lengths.len()];
        for (place, (at, refused)) in self.of.iter().zip(refused).enumerate() {
            let answer = match refused {
                Some(reason) => Answer::Invalid(reason.clone()),
                None => match answers.next() {
                    Some(answer) => answer.clone(),
                    None => break,
                },
            };
            let applied = matches!(answer, Answer::Applied(_) | Answer::Duplicate(_));
            counted[*at] += 1;
            let breaks = !applied && counted[*at] < self.lengths[*at];
            if breaks && self.of.get(place + 1) == Some(at) {
                return Err(place);
            }
            outcomes.push((*at, Outcome::Answered { answer, at: now }, breaks));
        }
        Ok(outcomes)
    }

    /// Leaves out the inputs after one place that belong to the same submission.
    fn cut(&mut self, place: usize, refused: &mut Vec<Option<String>>) {
        let of = self.of[place];
        let last = self.of.iter().rposition(|at| *at == of).unwrap_or(place);
        let decided_on = |refused: &[Option<String>]| refused.iter().filter(|refused| refused.is_none()).count();
        let (from, to) = (decided_on(&refused[..=place]), decided_on(&refused[..=last]));
        self.inputs.drain(from..to);
        self.of.drain(place + 1..=last);
        refused.drain(place + 1..=last);
    }
}

/// Whether an input brings events whose payloads may have to suit a JSON Schema.
fn emits(input: &Input) -> bool {
    let Input::Report(report) = input else { return false };
    match &report.op {
        Op::Emit { .. } => true,
        Op::Complete { emits, .. } => !emits.is_empty(),
        _ => false,
    }
}

/// What is wrong with an input, as far as the machine does not look into it.
fn refusal(hot: &Hot, input: &Input, allowance: &mut Allowance) -> Option<String> {
    let Input::Report(report) = input else { return None };
    if !hot.flow.checks_emits() {
        return None;
    }
    let activation = report.task.activation;
    let mut check = |event: &str, payload: &Data| match payload {
        Data::Json(json) => hot.flow.check_emit(&hot.run, activation, event, json, allowance).err(),
        _ => None,
    };
    match &report.op {
        Op::Emit { event, payload } => check(event, payload),
        Op::Complete { emits, .. } => emits.iter().find_map(|(event, payload)| check(event, payload)),
        _ => None,
    }
}

/// The message of a panic.
pub(crate) fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => message,
        (None, Some(message)) => message,
        (None, None) => "without a message",
    }
}
