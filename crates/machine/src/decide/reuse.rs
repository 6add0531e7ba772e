//! Retry and rerun: a new run takes over the results of an old one that need not be computed again.

use std::collections::{BTreeMap, BTreeSet};

use super::unwind::is_undo;
use super::{Decider, Done};
use crate::ids::{ActId, ScopeId, StepId};
use crate::run::{Activation, Activations, End, GateState, Place, Reused, Run, TakenOver, Token};
use eddyline_language::data::Data;
use eddyline_language::flow::{Flow, Graph, Watcher};

/// What a retry of an ended run takes over: activations that completed (and were not undone) or were skipped, and do
/// not come after one that runs again.
pub fn retry(flow: &Flow, run: &Run) -> Vec<Reused> {
    match flow.graph() {
        Some(graph) => Old::new(flow, graph, run).reusable(None),
        None => memo(flow, run, None),
    }
}

/// Like [`retry`], for a rerun from a top-level step, which runs again with everything after it.
pub fn rerun(flow: &Flow, run: &Run, from: &str) -> Result<Vec<Reused>, String> {
    match flow.graph() {
        Some(graph) => match graph.find(Graph::ROOT, from) {
            Some(step) => Ok(Old::new(flow, graph, run).reusable(Some(step))),
            None => Err(format!("there is no step `{from}` at the top level of {}", flow.name)),
        },
        None => match run.index.memo.get(from) {
            Some(id) => Ok(memo(flow, run, run.at(*id).ended.or(Some(u32::MAX)))),
            None => Err(format!("the run has no step `{from}`")),
        },
    }
}

/// The completed memo entries of a code run; with `before`, only those that ended earlier.
fn memo(flow: &Flow, run: &Run, before: Option<u32>) -> Vec<Reused> {
    let entries = run.index.memo.values().map(|id| run.at(*id));
    let mut reused: Vec<Reused> = entries
        .filter(|entry| before.is_none_or(|before| entry.ended.is_some_and(|ended| ended < before)))
        .filter(|entry| matches!(entry.end(), Some(End::Completed(_))) && !entry.undone)
        .filter_map(|entry| {
            let Place::Memo(memo) = &entry.place else { return None };
            if is_undo(&memo.name) {
                return None;
            }
            let taken = taken(flow, run, entry)?;
            let (activation, kind, n, undo) = (memo.name.to_string(), Some(memo.kind), memo.n, memo.undo);
            Some(Reused { activation, memo: kind, n, undo, ..taken })
        })
        .collect();
    // The function sees results in the order of their numbers, so it gets them in the same order again.
    reused.sort_by_key(|reused| reused.n);
    reused
}

fn taken(flow: &Flow, run: &Run, activation: &Activation) -> Option<Reused> {
    let end = activation.end()?.clone();
    let (input, name) = (activation.input.clone(), run.name(flow.graph(), activation.id));
    let how = TakenOver::Whole(end);
    Some(Reused { activation: name, how, input, emits: Vec::new(), memo: None, n: 0, undo: false })
}

struct Old<'a> {
    flow: &'a Flow,
    graph: &'a Graph,
    run: &'a Run,
    /// Containers with something undone inside, whose result is therefore not valid any more.
    spoiled: BTreeSet<ActId>,
    /// Containers of activations that may have to be undone.
    holds: BTreeSet<ActId>,
}

impl<'a> Old<'a> {
    fn new(flow: &'a Flow, graph: &'a Graph, run: &'a Run) -> Old<'a> {
        let around = |id: ActId| std::iter::successors(run.at(id).parent(), |id| run.at(*id).parent());
        let undone = run.activations.iter().filter(|activation| activation.undone);
        let spoiled = undone.flat_map(|activation| around(activation.id)).collect();
        let holds = run.index.undoable.values().flat_map(|id| around(*id)).collect();
        Old { flow, graph, run, spoiled, holds }
    }

    fn reusable(&self, from: Option<StepId>) -> Vec<Reused> {
        let mut reused = Vec::new();
        self.collect(ActId(0), Graph::ROOT, from, &mut reused);
        reused
    }

    /// Collects what is taken over of a scope, and recursively of unfinished containers in it.
    fn collect(&self, at: ActId, scope: ScopeId, from: Option<StepId>, reused: &mut Vec<Reused>) {
        let Some(body) = self.run.at(at).body else { return };
        let emits = self.emits(at, scope);
        let steps = &self.graph.scope(scope).steps;
        let activation = |step: StepId| self.run.at(ActId(body.first.0 + self.graph.step(step).slot));
        let unfinished = |step: &StepId| Some(*step) == from || !self.is_done(activation(*step));
        let unfinished: BTreeSet<StepId> = steps.iter().copied().filter(unfinished).collect();
        let after = self.after(&unfinished, at, scope);
        for step in steps {
            if after.contains(step) || Some(*step) == from {
                continue;
            }
            let activation = activation(*step);
            if unfinished.contains(step) {
                self.collect_inside(activation, reused);
            } else if self.holds.contains(&activation.id) {
                let gate = match &activation.gate {
                    GateState::Opened(payload) => Some(payload.clone()),
                    _ => None,
                };
                let name = self.run.name(Some(self.graph), activation.id);
                let how = TakenOver::Inside { gate };
                let (input, emits, memo) = (None, Vec::new(), None);
                reused.push(Reused { activation: name, how, input, emits, memo, n: 0, undo: false });
                self.collect_inside(activation, reused);
            } else {
                if let Some(mut taken) = taken(self.flow, self.run, activation) {
                    taken.emits = emits.get(&activation.id).cloned().unwrap_or_default();
                    reused.push(taken);
                }
            }
        }
    }

    /// Collects what is taken over inside a group, a spread or a loop.
    fn collect_inside(&self, activation: &Activation, reused: &mut Vec<Reused>) {
        if let Some(body) = activation.body {
            return self.collect(activation.id, body.scope, None, reused);
        }
        let parts = self.run.index.parts.range((activation.id, 0)..=(activation.id, u32::MAX));
        let parts: Vec<&Activation> = parts.map(|(_, id)| self.run.at(*id)).collect();
        let in_a_loop = matches!(parts.last(), Some(Activation { place: Place::Round { .. }, .. }));
        if in_a_loop && !self.is_done(activation) && parts.last().is_some_and(|last| self.is_done(last)) {
            // The loop failed, not a round: taken over, it would fail again at once.
            return;
        }
        for part in parts {
            // The loop reads from its rounds, so a round needs its steps.
            if self.is_done(part) && !in_a_loop && !self.holds.contains(&part.id) {
                reused.extend(taken(self.flow, self.run, part));
            } else {
                self.collect_inside(part, reused);
            }
        }
    }

    /// The steps of a scope that come after one of `of`, except those that were decided without waiting for it.
    fn after(&self, of: &BTreeSet<StepId>, at: ActId, scope: ScopeId) -> BTreeSet<StepId> {
        let definition = self.graph.scope(scope);
        let mut after = BTreeSet::new();
        let mut open: Vec<StepId> = of.iter().copied().collect();
        while let Some(step) = open.pop() {
            let step = self.graph.step(step);
            let events = step.emits.iter().flat_map(|event| &definition.events[*event].subscribers);
            for watcher in step.watchers.iter().chain(events) {
                if !self.decided_without(at, watcher) && after.insert(watcher.step) {
                    open.push(watcher.step);
                }
            }
        }
        after
    }

    /// Whether the token came after the decision, such as that of a later arm of an `any` join.
    fn decided_without(&self, at: ActId, watcher: &Watcher) -> bool {
        let Some(body) = self.run.at(at).body else { return false };
        let target = self.run.at(ActId(body.first.0 + self.graph.step(watcher.step).slot));
        self.is_done(target) && matches!(target.arms[watcher.arm], Token::LateLive | Token::LateDead)
    }

    /// The first emits of each activation of a scope.
    fn emits(&self, at: ActId, scope: ScopeId) -> BTreeMap<ActId, Vec<(String, Data)>> {
        let mut emits: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for ((_, event), emitted) in self.run.emitted.range((at, 0)..=(at, u32::MAX)) {
            let name = self.graph.scope(scope).events[*event as usize].name.clone();
            emits.entry(emitted.by).or_default().push((name, emitted.payload.clone()));
        }
        emits
    }

    /// Whether it need not run again: it completed and was not undone, or was skipped.
    fn is_done(&self, activation: &Activation) -> bool {
        match activation.end() {
            Some(End::Completed(_)) => !activation.undone && !self.spoiled.contains(&activation.id),
            Some(End::Skipped(_)) => true,
            _ => false,
        }
    }
}

impl Decider<'_> {
    /// Ends an activation as in the retried run, if its result is taken over.
    pub(super) fn take_over(&mut self, id: ActId) -> Done<bool> {
        if self.run.reuse.is_empty() && self.reuse.is_empty() {
            return Ok(false);
        }
        let name = self.name_of(id);
        let Some(Reused { how: TakenOver::Whole(end), input, emits, .. }) = self.reusable(&name).cloned() else {
            return Ok(false);
        };
        self.reuse_done.insert(name);
        self.edit(id).input = input;
        for (event, payload) in emits {
            self.emit(id, &event, payload)?;
        }
        let from = self.header.retry_of;
        self.end_as(id, end, from)?;
        Ok(true)
    }

    /// The payload that opened the gate in the retried run, if the activation's contents are taken over.
    pub(super) fn take_over_gate(&mut self, id: ActId) -> Option<Data> {
        if self.run.reuse.is_empty() && self.reuse.is_empty() {
            return None;
        }
        let name = self.name_of(id);
        match self.reusable(&name).map(|reused| &reused.how) {
            Some(TakenOver::Inside { gate: Some(gate) }) => Some(gate.clone()),
            _ => None,
        }
    }

    pub(super) fn reusable(&self, name: &str) -> Option<&Reused> {
        let found = self.reuse.get(name).or_else(|| self.run.reuse.get(name))?;
        (!self.reuse_done.contains(name)).then_some(found)
    }

    /// The names of the memo entries still to be taken over, in the order of their numbers, as many as one transition
    /// can touch.
    pub(super) fn still_to_reuse(&self) -> Vec<String> {
        let entries = self.reuse.values().chain(self.run.reuse.values());
        let left = entries.filter(|reused| !self.reuse_done.contains(&reused.activation));
        let mut left: Vec<(u64, &str)> = left.map(|reused| (reused.n, reused.activation.as_str())).collect();
        left.sort_unstable();
        left.into_iter().take(super::MAX_TOUCHED).map(|(_, name)| name.to_owned()).collect()
    }
}
