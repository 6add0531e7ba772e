//! One decision, with copies of its inputs, so that it can be made on any thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use eddyline_machine::{Answer, Data, Env, Halt, Input, Message, Millis, Op, Transition, ValueRef, decide};
use eddyline_store::NewEvent;

use super::{InputOutcome, Pending};
use crate::config::{Config, Decision, MAX_REPORT_CHECK_STEPS};
use crate::events::look_backs;
use crate::inline_payloads;
use crate::run_cache::CachedRun;
use crate::schema::Allowance;

/// A decision that takes more steps than this is made on another thread. A step takes about 50 ns. A transition that
/// touches the most activations allowed and evaluates no expression stays below it, so it is not decided twice.
const INLINE_STEPS: u64 = 80_000;

/// When the schema checks of a decision have cost this many steps, the remaining reports are left to the next decision,
/// so that other runs get their turn at the thread.
const CHECK_STEPS: u64 = MAX_REPORT_CHECK_STEPS / 4;

/// Inputs that are decided together, copied from their submissions.
#[derive(Debug)]
pub(super) struct Question {
    inputs: Vec<Input>,
    /// For each input, the index of its submission.
    of: Vec<usize>,
    /// How many undecided inputs each submission has, including those that are not part of the question.
    lengths: Vec<usize>,
}

/// A decision.
#[derive(Debug)]
pub(super) struct Attempt {
    pub transition: Transition,
    /// For each decided input, in order: the index of its submission, its outcome, and whether the rest of the
    /// submission is not tried.
    pub outcomes: Vec<(usize, InputOutcome, bool)>,
    pub messages: Vec<Message>,
    pub events: Vec<NewEvent>,
}

/// Why there is no decision.
#[derive(Debug)]
pub(super) enum Undecided {
    /// The decision needs these stored values, and some of them are not loaded.
    Values(Vec<ValueRef>),
    /// It takes too long for this thread.
    Heavy,
    Bug(String),
}

impl Question {
    /// The first `at_most` waiting inputs.
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

    /// How many submissions the inputs belong to.
    pub fn submissions(&self) -> usize {
        self.lengths.len()
    }

    /// Decides, on the committer's thread or (`apart`) on another one. On the committer's thread it returns
    /// [`Undecided::Heavy`] for long decisions and schema checks. A panic becomes [`Undecided::Bug`] of this run alone.
    pub fn attempt(self, cached: &CachedRun, now: Millis, apart: bool, config: &Config) -> Result<Attempt, Undecided> {
        if !apart && cached.flow.checks_emits() && self.inputs.iter().any(emits) {
            return Err(Undecided::Heavy);
        }
        let since = Instant::now();
        // Unwind safe: the run is only read, and the question is dropped.
        let decided = catch_unwind(AssertUnwindSafe(|| self.decide(cached, now, apart, config)))
            .unwrap_or_else(|panic| Err(Undecided::Bug(format!("the decision panicked: {}", panic_message(&*panic)))));
        metrics::histogram!("eddyline_decision_seconds").record(since.elapsed().as_secs_f64());
        decided
    }

    fn decide(mut self, cached: &CachedRun, now: Millis, apart: bool, config: &Config) -> Result<Attempt, Undecided> {
        if let Some(on_decision) = &config.on_decision {
            on_decision(Decision { run: cached.run.header.run, apart });
        }
        let inline_steps = (!apart).then_some(INLINE_STEPS);
        let env = Env { inline_steps, ..Env::new(now, (config.chance)(), &config.hooks) };
        let mut refused = self.take_refused(cached);
        loop {
            let transition = decide(&cached.flow.flow, &cached.run, &env, &self.inputs).map_err(|halt| match halt {
                Halt::Need(needed) => Undecided::Values(needed),
                Halt::Heavy => Undecided::Heavy,
                Halt::Bug(bug) => Undecided::Bug(bug),
            })?;
            match self.outcomes(&transition, &refused, now) {
                Ok(outcomes) => {
                    let outgoing = inline_payloads::outgoing(&cached.run, &transition, config.max_payload_bytes);
                    let (mut messages, events) = outgoing.map_err(Undecided::Values)?;
                    messages.extend(look_backs(&transition));
                    return Ok(Attempt { transition, outcomes, messages, events });
                }
                // Decide again without the later inputs of that submission.
                Err(broken) => self.cut(broken, &mut refused),
            }
        }
    }

    /// Removes inputs whose events do not match their schemas, so that the machine never sees them. Returns for each
    /// input why it was refused, if it was. If the checks take too long, the last inputs are left out.
    fn take_refused(&mut self, cached: &CachedRun) -> Vec<Option<String>> {
        let (mut refused, mut steps) = (Vec::with_capacity(self.inputs.len()), 0);
        for input in &self.inputs {
            if steps > CHECK_STEPS && emits(input) {
                break;
            }
            let mut allowance = Allowance::of_report();
            refused.push(refusal(cached, input, &mut allowance));
            steps += allowance.spent();
        }
        self.inputs.truncate(refused.len());
        self.of.truncate(refused.len());
        let mut kept = refused.iter().map(Option::is_none);
        self.inputs.retain(|_| kept.next().unwrap_or(true));
        refused
    }

    /// The outcome of each input; or the index of an input that was not applied although a later one of its submission
    /// was decided.
    fn outcomes(
        &self,
        transition: &Transition,
        refused: &[Option<String>],
        now: Millis,
    ) -> Result<Vec<(usize, InputOutcome, bool)>, usize> {
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
            outcomes.push((*at, InputOutcome::Answered { answer, at: now }, breaks));
        }
        Ok(outcomes)
    }

    /// Removes the inputs after `place` that belong to the same submission.
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

/// Whether an input emits events, whose payloads may have JSON Schemas.
fn emits(input: &Input) -> bool {
    let Input::Report(report) = input else { return false };
    match &report.op {
        Op::Emit { .. } => true,
        Op::Complete { emits, .. } => !emits.is_empty(),
        _ => false,
    }
}

/// Why an input is refused by the schema of an event that it emits.
fn refusal(cached: &CachedRun, input: &Input, allowance: &mut Allowance) -> Option<String> {
    let Input::Report(report) = input else { return None };
    if !cached.flow.checks_emits() {
        return None;
    }
    let activation = report.task.activation;
    let mut check = |event: &str, payload: &Data| match payload {
        Data::Json(json) => cached.flow.check_emit(&cached.run, activation, event, json, allowance).err(),
        _ => None,
    };
    match &report.op {
        Op::Emit { event, payload } => check(event, payload),
        Op::Complete { emits, .. } => emits.iter().find_map(|(event, payload)| check(event, payload)),
        _ => None,
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => message,
        (None, Some(message)) => message,
        (None, None) => "without a message",
    }
}
