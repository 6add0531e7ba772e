//! Checks the reports of workers on their tasks and submits them to the committer.

use std::collections::BTreeMap;

use eddyline_language::definition::{wrong_name, wrong_word};
use eddyline_machine::{
    Answer, CallOptions, ChildOptions, Claim, CodeOp, CodeWait, Data, Due, Input, Millis, Op, Report, Since, TaskRef,
};
use eddyline_store::{Lease, Namespace, StoreError};

use crate::claim::{ClaimTasks, PendingClaim};
use crate::committer::{InputOutcome, Order};
use crate::config::{Config, MAX_METADATA_BYTES, MAX_PAYLOAD_DEPTH};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::start::bad_wait;
use crate::task_status::TaskId;
use crate::token::TaskToken;

/// The answer to a token that no claim issued.
const UNKNOWN_TASK: &str = "there is no such task";
/// The most limits of a call of a code run, and the most labels that it requires.
const MAX_CALL_LIMITS: usize = 32;
/// The longest key of a call or of one of its limits, as JSON.
const MAX_KEY_BYTES: usize = 1 << 10;
/// The most tags of a child run.
const MAX_TAGS: usize = 64;
/// The longest tag, external id or unique key of a child run.
const MAX_LABEL_BYTES: usize = 512;
/// The end of the year 9999.
const MAX_MOMENT_MS: Millis = 253_402_300_799_999;

/// A report of a worker on one of its tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskReport {
    pub token: TaskToken,
    /// Counts per task from 1; a repeated number returns its first outcome.
    pub seq: Option<u32>,
    pub op: Op,
}

impl TaskReport {
    /// Whether it is the final report on its task.
    pub fn is_last(&self) -> bool {
        matches!(
            self.op,
            Op::Complete { .. }
                | Op::Fail { .. }
                | Op::Defer { .. }
                | Op::Release
                | Op::Suspend { .. }
                | Op::ContinueAs { .. }
        )
    }
}

/// The result of a report.
#[derive(Debug, Clone, PartialEq)]
pub enum Reported {
    Answer {
        answer: Answer,
        /// Advice on a report that was accepted.
        warning: Option<String>,
    },
    /// An earlier report on the same task was not applied.
    NotTried,
}

impl Engine {
    /// Applies reports independently, in order for each task. Returns when everything that was applied is durable.
    pub async fn report(&self, ns: &Namespace, reports: Vec<TaskReport>) -> Result<Vec<Reported>> {
        let (reported, _) = self.report_and_ask(ns, reports, None).await?;
        Ok(reported)
    }

    /// The same together with a claim: the commit that applies the reports can also claim the tasks that they create.
    pub async fn report_and_ask(
        &self,
        ns: &Namespace,
        reports: Vec<TaskReport>,
        claim: Option<ClaimTasks>,
    ) -> Result<(Vec<Reported>, Option<PendingClaim>)> {
        let mut by_task: BTreeMap<TaskToken, Vec<(usize, TaskReport)>> = BTreeMap::new();
        let count = reports.len();
        for (at, report) in reports.into_iter().enumerate() {
            by_task.entry(report.token).or_default().push((at, report));
        }
        let mut reported = vec![Reported::NotTried; count];
        let key = self.tokens.key(&self.instance).await?;
        let mut submitted = Vec::with_capacity(by_task.len());
        let mut orders = Vec::with_capacity(by_task.len() + 1);
        for (token, reports) in by_task {
            if !key.verifies(ns, &token) {
                for (at, _) in reports.into_iter().take(1) {
                    reported[at] = Reported::Answer { answer: Answer::Invalid(UNKNOWN_TASK.to_owned()), warning: None };
                }
                continue;
            }
            let claim = self.claim_of(ns, token, &reports).await?;
            let task = TaskRef { activation: token.activation, fence: token.fence };
            let (mut places, mut inputs) = (Vec::new(), Vec::new());
            for (at, report) in reports {
                let last = report.is_last();
                let warning = match check(&self.instance.config, &report.op) {
                    Ok(warning) => warning,
                    Err(problem) => {
                        reported[at] = Reported::Answer { answer: Answer::Invalid(problem), warning: None };
                        break;
                    }
                };
                places.push((at, last, warning));
                inputs.push(Input::Report(Report { task, seq: report.seq, op: report.op, claim: claim.clone() }));
            }
            if !inputs.is_empty() {
                let (order, answer) = Order::submit_in(ns, token.run, inputs);
                orders.push(order);
                submitted.push((token, places, answer));
            }
        }
        let waiting = claim.filter(|_| !self.stopping.is_now()).map(|claim| {
            let (order, waiting) = self.park(ns, claim, false);
            orders.push(order);
            waiting
        });
        self.committing().ask(Order::All(orders)).await?;
        let mut alive = Vec::new();
        for (token, places, answer) in submitted {
            let outcomes = match answer.await.map_err(|_| EngineError::Stopped)? {
                Ok(outcomes) => outcomes,
                Err(EngineError::NotFound { .. }) => refused(UNKNOWN_TASK.to_owned(), places.len()),
                // An error of this run must not affect the reports on others.
                Err(
                    EngineError::Bug(why)
                    | EngineError::Quarantined(why)
                    | EngineError::Store(StoreError::Corrupt(why)),
                ) => refused(why, places.len()),
                Err(EngineError::Trimmed(_)) => {
                    vec![InputOutcome::Answered { answer: Answer::Closed, at: 0 }; places.len()]
                }
                Err(error) => return Err(error),
            };
            let mut continues = false;
            for ((at, last, warning), outcome) in places.into_iter().zip(outcomes) {
                let answer = match outcome {
                    InputOutcome::Answered { answer, .. } => answer,
                    InputOutcome::NotTried => continue,
                    InputOutcome::Gone
                    | InputOutcome::KeyTaken { .. }
                    | InputOutcome::UniqueTaken { .. }
                    | InputOutcome::LineFull => Answer::Stale,
                };
                let taken = matches!(answer, Answer::Applied(_) | Answer::Duplicate(_) | Answer::Nothing);
                let warning = warning.filter(|_| taken);
                if taken {
                    continues = !last;
                }
                if last && matches!(answer, Answer::Applied(_)) {
                    self.measures().claim_times.end(token.run, token.fence);
                }
                if let Some(warning) = &warning {
                    tracing::warn!(task = token.task_id(), "{warning}");
                }
                reported[at] = Reported::Answer { answer, warning };
            }
            if continues {
                alive.push(Lease { run: token.run, fence: token.fence });
            }
        }
        self.keep(ns, &alive).await;
        Ok((reported, waiting))
    }

    /// Extends the leases of reported tasks. The token identifies the claim, whatever name the worker uses.
    async fn keep(&self, ns: &Namespace, tasks: &[Lease]) {
        if !tasks.is_empty()
            && let Err(error) = self.instance.store.extend(ns, None, tasks).await
        {
            // The reports are durable, so they are still answered as applied.
            tracing::warn!("could not extend the leases of reported tasks: {error}");
        }
    }

    /// The claim of a code run's task, if a report needs it.
    async fn claim_of(&self, ns: &Namespace, token: TaskToken, reports: &[(usize, TaskReport)]) -> Result<Claim> {
        let matters = |op: &Op| {
            matches!(
                op,
                Op::Code { .. }
                    | Op::LetGo { .. }
                    | Op::Unwind { .. }
                    | Op::Publish { as_name: Some(_), .. }
                    | Op::Suspend { .. }
                    | Op::ContinueAs { .. }
            )
        };
        if token.activation.0 != 0 || !reports.iter().any(|(_, report)| matters(&report.op)) {
            return Ok(Claim::default());
        }
        self.facts.of(&*self.instance.store, ns, TaskId { run: token.run, fence: token.fence }).await
    }
}

/// Outcomes of which the first is invalid and the others are not tried.
fn refused(why: String, count: usize) -> Vec<InputOutcome> {
    let invalid = InputOutcome::Answered { answer: Answer::Invalid(why), at: 0 };
    std::iter::once(invalid).chain(std::iter::repeat_n(InputOutcome::NotTried, count.saturating_sub(1))).collect()
}

/// Validates a report without reading anything. Returns a warning if it is valid but should be changed.
fn check(config: &Config, op: &Op) -> std::result::Result<Option<String>, String> {
    let problem = match op {
        Op::Complete { output, emits, .. } => {
            let mut warning = weigh(config, "the output", output)?;
            for (event, payload) in emits {
                let of_event = weigh(config, &format!("the payload of {event}"), payload)?;
                warning = warning.or(of_event);
            }
            return Ok(warning);
        }
        Op::Publish { name, payload, .. } => match wrong_name(name) {
            Some(problem) => Some(problem),
            None => return weigh(config, "the payload", payload),
        },
        Op::Emit { payload, .. } => return weigh(config, "the payload", payload),
        Op::ContinueAs { input } => return weigh(config, "the input", input),
        Op::Fail { retry_after_ms: Some(ms), .. } => bad_wait("the back-off", *ms),
        Op::Defer { after_ms, .. } => bad_wait("the delay", *after_ms),
        Op::Code { op, .. } => match op {
            CodeOp::Done { output, .. } => return weigh(config, "the output", output),
            CodeOp::Call { handler, input, queue, options } => {
                let named = wrong_name(handler).or_else(|| wrong_name(queue.as_deref()?));
                match named.or_else(|| wrong_call(options.as_deref()?)) {
                    Some(problem) => Some(problem),
                    None => return weigh(config, "the input", input),
                }
            }
            CodeOp::Child { flow, input, options, .. } => {
                match wrong_name(flow).or_else(|| wrong_child(config, options.as_deref()?)) {
                    Some(problem) => Some(problem),
                    None => return weigh(config, "the input", input),
                }
            }
            CodeOp::Failed { retry_after_ms: Some(ms), .. } => bad_wait("the back-off", *ms),
            CodeOp::Sleep { due: Due::After(ms) } => bad_wait("the sleep", *ms),
            CodeOp::Sleep { due: Due::At(at) } => (!(0..=MAX_MOMENT_MS).contains(at))
                .then(|| format!("the time {at} ms is not between the years 1970 and 9999")),
            CodeOp::Wait { wait, timeout_ms } => {
                let name = match wait {
                    CodeWait::Event { name, since: Since::Ago { ms }, .. } => {
                        wrong_name(name).or_else(|| bad_wait("`since`", *ms))
                    }
                    CodeWait::Event { name, since: Since::Run, .. } => wrong_name(name),
                    CodeWait::Webhook | CodeWait::Manual => None,
                };
                name.or_else(|| bad_wait("the timeout", (*timeout_ms)?))
            }
            _ => None,
        },
        _ => None,
    };
    problem.map_or(Ok(None), Err)
}

fn wrong_call(options: &CallOptions) -> Option<String> {
    let CallOptions { timeout_ms, start_timeout_ms, limits, requires, key, .. } = options;
    let spans = [("`timeout`", timeout_ms), ("`start_timeout`", start_timeout_ms)];
    let wrong_span = spans.iter().find_map(|(what, ms)| match **ms {
        Some(0) => Some(format!("{what} of 0 is not allowed; leave it out for none")),
        ms => bad_wait(what, ms?),
    });
    let keys = limits.iter().filter_map(|(_, key)| key.as_ref()).chain(key);
    wrong_span
        .or_else(|| limits.iter().find_map(|(name, _)| wrong_name(name)))
        .or_else(|| requires.iter().find_map(|label| wrong_word(label).map(|problem| format!("`requires`: {problem}"))))
        .or_else(|| {
            (limits.len() > MAX_CALL_LIMITS || requires.len() > MAX_CALL_LIMITS)
                .then(|| format!("a call has at most {MAX_CALL_LIMITS} limits and {MAX_CALL_LIMITS} labels"))
        })
        .or_else(|| {
            let long = keys.map(String::len).max().is_some_and(|bytes| bytes > MAX_KEY_BYTES);
            long.then(|| format!("a key of a call has at most {MAX_KEY_BYTES} bytes"))
        })
}

fn wrong_child(config: &Config, options: &ChildOptions) -> Option<String> {
    let spans = [("`delay`", options.delay_ms), ("`deadline`", options.deadline_ms)];
    let wrong_span = spans.iter().find_map(|(what, ms)| bad_wait(what, (*ms)?));
    let texts =
        options.tags.iter().chain(&options.external_id).chain(options.unique.as_ref().map(|unique| &unique.key));
    wrong_span
        .or_else(|| wrong_name(options.queue.as_deref()?).map(|problem| format!("`queue`: {problem}")))
        .or_else(|| (options.tags.len() > MAX_TAGS).then(|| format!("a run has at most {MAX_TAGS} tags")))
        .or_else(|| {
            let long = texts.map(String::len).max().is_some_and(|bytes| bytes > MAX_LABEL_BYTES);
            long.then(|| format!("a label, tag or key has at most {MAX_LABEL_BYTES} bytes"))
        })
        .or_else(|| {
            let metadata = options.metadata.as_ref()?;
            let bytes = metadata.bytes(MAX_METADATA_BYTES + 1);
            (bytes > MAX_METADATA_BYTES || weigh(config, "the metadata", metadata).is_err())
                .then(|| format!("the metadata is larger than {MAX_METADATA_BYTES} bytes or nested too deep"))
        })
}

/// Checks a payload against its limits. Returns a warning if it is large.
fn weigh(config: &Config, what: &str, data: &Data) -> std::result::Result<Option<String>, String> {
    let limit = config.max_payload_bytes;
    let bytes = data.bytes(limit + 1);
    if bytes > limit {
        return Err(format!("{what} is larger than {limit} bytes"));
    }
    if data.depth() > MAX_PAYLOAD_DEPTH {
        return Err(format!("{what} is nested more than {MAX_PAYLOAD_DEPTH} deep"));
    }
    Ok((bytes >= config.large_payload_bytes())
        .then(|| format!("{what} is {bytes} bytes, of at most {limit}; store large data elsewhere")))
}
