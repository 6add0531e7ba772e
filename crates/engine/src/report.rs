//! Checks the reports of workers on their tasks and submits them to the committer.

use std::collections::BTreeMap;

use eddyline_language::definition::wrong_name;
use eddyline_machine::{Answer, Claim, CodeOp, CodeWait, Data, Due, Input, Millis, Op, Report, TaskRef};
use eddyline_store::{Lease, Namespace, StoreError};

use crate::claim::{ClaimTasks, PendingClaim};
use crate::committer::{InputOutcome, Order};
use crate::config::{Config, MAX_PAYLOAD_DEPTH};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::start::bad_wait;
use crate::task_status::TaskId;
use crate::token::TaskToken;

/// The answer to a token that no claim issued.
const UNKNOWN_TASK: &str = "there is no such task";
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
            Op::Complete { .. } | Op::Fail { .. } | Op::Defer { .. } | Op::Suspend { .. } | Op::ContinueAs { .. }
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
        let matters = |op: &Op| matches!(op, Op::Code { .. } | Op::Suspend { .. } | Op::ContinueAs { .. });
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
            CodeOp::Done { output } => return weigh(config, "the output", output),
            CodeOp::Call { handler, input, queue } => {
                match wrong_name(handler).or_else(|| wrong_name(queue.as_deref()?)) {
                    Some(problem) => Some(problem),
                    None => return weigh(config, "the input", input),
                }
            }
            CodeOp::Child { flow, input, .. } => match wrong_name(flow) {
                Some(problem) => Some(problem),
                None => return weigh(config, "the input", input),
            },
            CodeOp::Failed { retry_after_ms: Some(ms), .. } => bad_wait("the back-off", *ms),
            CodeOp::Sleep { due: Due::After(ms) } => bad_wait("the sleep", *ms),
            CodeOp::Sleep { due: Due::At(at) } => (!(0..=MAX_MOMENT_MS).contains(at))
                .then(|| format!("the time {at} ms is not between the years 1970 and 9999")),
            CodeOp::Wait { wait, timeout_ms } => {
                let name = match wait {
                    CodeWait::Event { name, .. } => wrong_name(name),
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
