//! Acts on one activation: complete, fail or skip it by hand; retry it now instead of after its back-off.

use std::collections::BTreeSet;

use super::report::applied;
use super::{Decider, Done};
use crate::failure::{Failure, kind};
use crate::ids::{ActId, StepId};
use crate::record::{ActName, Entry, Reason, Skipped};
use crate::run::{Activations, End, Phase, Place, State};
use crate::transition::{Answer, StepAct, TimerKind};
use eddyline_language::flow::{Source, When};

impl Decider<'_> {
    pub(super) fn act(&mut self, name: &str, by: &str, act: &StepAct) -> Done<Answer> {
        let Some(id) = self.find(name) else {
            return Ok(Answer::Invalid(format!("there is no activation `{name}` in this run")));
        };
        if self.header.phase == Phase::Ended {
            return Ok(Answer::Conflict(format!("the run has ended: {}", self.header.status().as_str())));
        }
        self.cancel_if_doomed(id)?;
        // The canonical name, not the one in the request: `each[3]`, not `each[+3]`.
        let name = &self.name_of(id);
        if let Some(end) = self.at(id).end() {
            return Ok(Answer::Conflict(format!("{name} has ended: {}", end.status())));
        }
        if self.at(id).inside().is_some_and(|inside| inside.closing.is_some()) {
            return Ok(Answer::Conflict(format!("{name} is already ending")));
        }
        let retry_now = match (act, &self.at(id).state) {
            (StepAct::Retry, State::BackOff { after, .. }) => Some(*after),
            (StepAct::Retry, State::Retrying { due: false, .. }) => Some(self.last_fence(id)),
            (StepAct::Retry, State::Retrying { due: true, .. }) => {
                let message = format!("the back-off of {name} is over: its function will retry it");
                return Ok(Answer::Conflict(message));
            }
            (StepAct::Retry, _) => {
                return Ok(Answer::Conflict(format!("{name} is not waiting for a retry")));
            }
            _ => None,
        };
        if matches!((act, &self.at(id).place), (StepAct::Skip, Place::Memo(_))) {
            let message = format!("{name} is a step of a code run and cannot be skipped; complete or fail it");
            return Ok(Answer::Conflict(message));
        }
        if let Some(conflict) = self.overtakes(id, act)? {
            return Ok(Answer::Conflict(conflict));
        }
        self.record(Entry::Act {
            act: act_name(act),
            by: by.to_owned(),
            step_key: Some(name.to_owned()),
            from: None,
            reason: None,
        });
        if let Some(fence) = retry_now {
            self.clear_timer(id, TimerKind::BackOff(fence));
            if matches!(self.at(id).state, State::Retrying { .. }) {
                // Its function must learn of it: as a change, or by being enqueued again.
                return self.retry_due(id);
            }
            self.enqueue(id, Some(Reason::Act))?;
            return applied();
        }
        let is_idle_entry = matches!(self.at(id).state, State::Retrying { due: true, .. });
        let end = match act {
            StepAct::Complete { output } => End::Completed(self.keep(output.clone())),
            StepAct::Fail { error } => {
                let mut error = error.clone().bounded();
                if error.kind.is_empty() {
                    error = Failure::new(kind::BY_HAND, error.message);
                }
                End::Failed(error)
            }
            StepAct::Skip | StepAct::Retry => End::Skipped(Skipped::Act),
        };
        match self.at(id).inside() {
            Some(_) => self.close_early(id, end)?,
            None => self.end(id, end)?,
        }
        if is_idle_entry {
            self.entry_brings_news(id);
        }
        applied()
    }

    /// Why a waiting step cannot be ended by hand: a later step reads one of the steps it waits for, which would then
    /// not be certain to have ended.
    fn overtakes(&self, id: ActId, act: &StepAct) -> Done<Option<String>> {
        let Place::Step { step, scope } = self.at(id).place else { return Ok(None) };
        if !matches!(self.at(id).state, State::Waiting | State::Certain { ready: false }) {
            return Ok(None);
        }
        let graph = self.graph()?;
        let open = self.waits_for(scope, step)?;
        let ends = match act {
            StepAct::Complete { .. } => Ends { completed: true, failed: false },
            StepAct::Fail { .. } => Ends { completed: false, failed: true },
            StepAct::Skip | StepAct::Retry => Ends::SKIPPED,
        };
        let mut seen = BTreeSet::new();
        let mut after = vec![(step, ends)];
        while let Some((step, ends)) = after.pop() {
            for watcher in &graph.step(step).watchers {
                let next = graph.step(watcher.step);
                let reader = self.in_scope(scope, watcher.step)?;
                if !matches!(self.at(reader).state, State::Waiting) {
                    continue;
                }
                let is_skipped = !ends.may_bring(next.arms[watcher.arm].source) && next.needs_all();
                let waits =
                    |read| next.arms.iter().any(|arm| matches!(arm.source, Source::Step(step, _) if step == read));
                let read = next.reads.iter().find(|read| open.contains(read) && !waits(**read));
                if let (Some(read), false) = (read, is_skipped) {
                    let [name, read, reader] = [id, self.in_scope(scope, *read)?, reader].map(|id| self.name_of(id));
                    return Ok(Some(format!(
                        "{name} still waits for {read}, which {reader} reads after {name}: {read} must end first"
                    )));
                }
                let ends = if is_skipped { Ends::SKIPPED } else { Ends::ANY };
                if seen.insert((watcher.step, ends)) {
                    after.push((watcher.step, ends));
                }
            }
        }
        Ok(None)
    }

    /// The open steps that a step waits for, directly or indirectly.
    fn waits_for(&self, scope: ActId, step: StepId) -> Done<BTreeSet<StepId>> {
        let mut open = BTreeSet::new();
        let mut before = vec![step];
        while let Some(step) = before.pop() {
            for arm in &self.graph()?.step(step).arms {
                if let Source::Step(source, _) = arm.source
                    && self.at(self.in_scope(scope, source)?).is_open()
                    && open.insert(source)
                {
                    before.push(source);
                }
            }
        }
        Ok(open)
    }

    /// Finds an activation by its public name.
    fn find(&self, name: &str) -> Option<ActId> {
        if self.graph.is_none() {
            return self.find_entry(name);
        }
        let undoes = name.strip_prefix("undo:");
        let path = undoes.unwrap_or(name);
        let mut scope = ActId(0);
        let mut found = None;
        for (depth, part) in path.split('.').enumerate() {
            let mut pieces = part.split('[');
            let step = pieces.next()?;
            let mut id = match (depth, step) {
                (0, "finally") => self.finally_activation()?,
                _ => {
                    let body = self.at(scope).body?;
                    let step = self.graph?.find(body.scope, step)?;
                    self.in_scope(scope, step).ok()?
                }
            };
            for index in pieces {
                id = self.part(id, index.strip_suffix(']')?.parse().ok()?)?;
            }
            (scope, found) = (id, Some(id));
        }
        match undoes {
            Some(_) => self.undo_of(found?),
            None => found,
        }
    }
}

/// How a step may end, apart from being skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ends {
    completed: bool,
    failed: bool,
}

impl Ends {
    const SKIPPED: Ends = Ends { completed: false, failed: false };
    const ANY: Ends = Ends { completed: true, failed: true };

    /// Whether the arm may be live after such an end.
    fn may_bring(self, arm: Source) -> bool {
        match arm {
            Source::Step(_, When::Completed) => self.completed,
            Source::Step(_, When::Failed) => self.failed,
            Source::Step(_, When::Ended) | Source::Event(_) => true,
        }
    }
}

fn act_name(act: &StepAct) -> ActName {
    match act {
        StepAct::Complete { .. } => ActName::Complete,
        StepAct::Fail { .. } => ActName::Fail,
        StepAct::Skip => ActName::Skip,
        StepAct::Retry => ActName::Retry,
    }
}
