//! Turns a draft into a graph: resolves arms to sources and events to producers, and assigns levels.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::{Draft, DraftArm, DraftScope, Wants};
use super::problem::Problem;
use super::source::shorten;
use super::{MAX_EDGES, MAX_EVENTS, reads, warnings};
use crate::flow::{Arm, Event, Finally, Graph, Scope, Source, Step, Watcher, When};
use crate::ids::{ScopeId, StepId};
use crate::nearest::did_you_mean;

/// The graph of a draft. Valid only if no problems were added to the draft.
pub(super) fn graph(draft: &mut Draft<'_>, finally: Option<Finally>, fail_fast: bool) -> Graph {
    let scopes = (0..draft.scopes.len() as u32).map(ScopeId);
    scopes.clone().for_each(|scope| events(draft, scope));
    for id in (0..draft.steps.len() as u32).map(StepId) {
        resolve_arms(draft, id);
    }
    scopes.for_each(|scope| order(draft, scope));
    reads::check(draft);
    warnings::check(draft);
    let steps: Vec<Step> = std::mem::take(&mut draft.steps).into_iter().map(|step| step.step).collect();
    let scopes = std::mem::take(&mut draft.scopes).into_iter().map(|scope| Scope {
        owner: scope.owner,
        steps: scope.steps.into_values().collect(),
        events: scope.events,
        output: scope.output,
    });
    let scopes = scopes.collect();
    let has_undo = steps.iter().any(|step| step.undo.is_some());
    let mut graph = Graph { steps, scopes, finally, fail_fast, has_undo };
    link(&mut graph);
    graph
}

/// Fills in watchers, the reverse of arms, and slots.
fn link(graph: &mut Graph) {
    for scope in &graph.scopes {
        for (slot, id) in scope.steps.iter().enumerate() {
            graph.steps[id.0 as usize].slot = slot as u32;
        }
    }
    for at in 0..graph.steps.len() {
        let Step { arms, scope, .. } = &graph.steps[at];
        let scope = *scope;
        let sources: Vec<Source> = arms.iter().map(|arm| arm.source).collect();
        for (arm, source) in sources.into_iter().enumerate() {
            let watcher = Watcher { step: StepId(at as u32), arm };
            match source {
                Source::Step(step, _) => graph.steps[step.0 as usize].watchers.push(watcher),
                Source::Event(event) => graph.scopes[scope.0 as usize].events[event].subscribers.push(watcher),
            }
        }
    }
}

/// Collects the events of a scope, sorted by name.
fn events(draft: &mut Draft<'_>, scope: ScopeId) {
    let steps: Vec<StepId> = draft.scope(scope).steps.values().copied().collect();
    let mut found: BTreeMap<String, Event> = BTreeMap::new();
    let mut last = None;
    for id in &steps {
        for emit in &draft.steps[id.0 as usize].emits {
            let (name, producers, subscribers) = (emit.name.clone(), Vec::new(), Vec::new());
            let event = found.entry(name.clone()).or_insert(Event { name, producers, subscribers });
            event.producers.push((*id, emit.schema.clone()));
            last = Some(emit);
        }
    }
    if let Some(emit) = last.filter(|_| found.len() > MAX_EVENTS) {
        let problem = Problem::new(&emit.path, emit.at, format!("more than {MAX_EVENTS} events in one scope"));
        draft.problems.push(problem);
    }
    let events: Vec<Event> = found.into_values().collect();
    for (place, event) in events.iter().enumerate() {
        for (id, _) in &event.producers {
            draft.steps[id.0 as usize].step.emits.push(place);
        }
    }
    draft.scopes[scope.0 as usize].events = events;
}

fn resolve_arms(draft: &mut Draft<'_>, id: StepId) {
    let written = std::mem::take(&mut draft.steps[id.0 as usize].arms);
    let mut arms: Vec<Arm> = Vec::new();
    for arm in &written {
        let Some(source) = resolve(draft, id, arm) else {
            let problem = unresolved(draft, id, arm);
            draft.problems.push(problem);
            draft.steps[id.0 as usize].blind = true;
            continue;
        };
        match arms.iter().find(|other| other.source == source || other.written == arm.written) {
            Some(other) => draft.problems.push(doubled(arm, other.source == source, &other.written)),
            None => arms.push(Arm { written: arm.written.clone(), source }),
        }
    }
    let step = &mut draft.steps[id.0 as usize];
    step.step.arms = arms;
    step.arms = written;
}

fn resolve(draft: &Draft<'_>, id: StepId, arm: &DraftArm) -> Option<Source> {
    let scope = draft.scope(draft.step(id).scope);
    match &arm.wants {
        Wants::Step(name, when) => scope.steps.get(name).map(|step| Source::Step(*step, *when)),
        Wants::Event(name) => {
            let place = scope.events.binary_search_by(|event| event.name.as_str().cmp(name));
            place.ok().map(Source::Event)
        }
    }
}

fn unresolved(draft: &Draft<'_>, id: StepId, arm: &DraftArm) -> Problem {
    let message = match &arm.wants {
        Wants::Step(name, _) => format!("there is no step `{}` here", shorten(name)),
        Wants::Event(name) => format!("no step here emits the event `{}`", shorten(name)),
    };
    let help = if draft.is_full() { None } else { advice(draft, id, arm) };
    Problem { help, ..Problem::new(&arm.path, arm.at, message) }
}

fn advice(draft: &Draft<'_>, id: StepId, arm: &DraftArm) -> Option<String> {
    let scope = draft.scope(draft.step(id).scope);
    let events = || scope.events.iter().map(|event| event.name.as_str());
    match &arm.wants {
        Wants::Step(name, _) => {
            if *name == arm.written && events().any(|event| event == name) {
                return Some(format!("`{name}` is an event; write it in `subscribes`"));
            }
            match draft.steps.iter().find(|other| other.step.name == *name) {
                Some(other) => Some(format!(
                    "`{}` is in another group; a step can only wait for steps of its own group",
                    other.path
                )),
                None => did_you_mean(name, scope.steps.keys().map(String::as_str)),
            }
        }
        Wants::Event(name) => {
            if scope.steps.contains_key(name) {
                return Some(format!("`{name}` is a step; write `step:{name}`, or `{name}` in `after`"));
            }
            match draft.steps.iter().find(|step| step.emits.iter().any(|emit| emit.name == *name)) {
                Some(other) => {
                    Some(format!("`{}` emits it in another group; events are visible only in their group", other.path))
                }
                None => did_you_mean(name, events())
                    .or_else(|| Some(format!("declare it on the step that emits it: `emits: [{}]`", shorten(name)))),
            }
        }
    }
}

fn doubled(arm: &DraftArm, same_source: bool, other: &str) -> Problem {
    let written = shorten(&arm.written);
    if same_source && other == arm.written {
        return Problem::new(&arm.path, arm.at, format!("`{written}` is listed twice"));
    }
    if same_source {
        return Problem::new(&arm.path, arm.at, format!("`{written}` is the same arm as `{}`", shorten(other)));
    }
    // Both would have the same key in the step's input.
    let message = format!("`{written}` is both a step and an event");
    Problem::new(&arm.path, arm.at, message).help(format!("write `step:{written}` for the step"))
}

/// The steps behind a source: one, or all producers of the event.
pub(super) fn steps_of(events: &[Event], source: Source) -> Vec<StepId> {
    match source {
        Source::Step(step, _) => vec![step],
        Source::Event(event) => events[event].producers.iter().map(|(step, _)| *step).collect(),
    }
}

/// Whether a live arm of this kind implies that the step ran, and so that everything it waited for had happened.
pub(super) fn says_it_ran(when: When) -> bool {
    when != When::Ended
}

/// Assigns levels to the steps of a scope in topological order; steps left over are in a cycle.
fn order(draft: &mut Draft<'_>, scope: ScopeId) {
    if has_too_many_edges(draft, scope) {
        return;
    }
    let waits_for = |draft: &Draft<'_>, id: StepId| -> BTreeSet<StepId> {
        let events = &draft.scope(scope).events;
        draft.step(id).arms.iter().flat_map(|arm| steps_of(events, arm.source)).collect()
    };
    let mut open: BTreeMap<StepId, BTreeSet<StepId>> =
        draft.scope(scope).steps.values().map(|id| (*id, waits_for(draft, *id))).collect();
    let mut watchers: BTreeMap<StepId, Vec<StepId>> = BTreeMap::new();
    for (id, sources) in &open {
        sources.iter().for_each(|source| watchers.entry(*source).or_default().push(*id));
    }
    let mut left: BTreeMap<StepId, usize> = open.iter().map(|(id, sources)| (*id, sources.len())).collect();
    let mut ready: Vec<StepId> = left.iter().filter(|(_, left)| **left == 0).map(|(id, _)| *id).collect();
    loop {
        while let Some(id) = ready.pop() {
            open.remove(&id);
            let level = draft.step(id).level + 1;
            for watcher in watchers.get(&id).into_iter().flatten() {
                let step = &mut draft.steps[watcher.0 as usize].step;
                step.level = step.level.max(level);
                if let Some(count) = left.get_mut(watcher) {
                    *count -= 1;
                    if *count == 0 {
                        ready.push(*watcher);
                    }
                }
            }
        }
        let Some(cycle) = find_cycle(&open) else { break };
        report_cycle(draft, &cycle);
        // Treat the cycle as resolved, so that it is reported once and the steps that depend on it are not.
        for id in cycle {
            left.remove(&id);
            draft.steps[id.0 as usize].blind = true;
            ready.push(id);
        }
    }
}

/// Each pair of a producer and a subscriber is an edge, so a short text can have very many.
fn has_too_many_edges(draft: &mut Draft<'_>, scope: ScopeId) -> bool {
    let DraftScope { steps, events, .. } = draft.scope(scope);
    let width = |source: Source| match source {
        Source::Step(..) => 1,
        Source::Event(event) => events[event].producers.len(),
    };
    let edges: usize = steps.values().flat_map(|id| &draft.step(*id).arms).map(|arm| width(arm.source)).sum();
    let Some(first) = steps.values().next().filter(|_| edges > MAX_EDGES) else { return false };
    let step = &draft.steps[first.0 as usize];
    let message = format!("{edges} connections between steps, at most {MAX_EDGES} are allowed");
    let problem = Problem::new(&step.path, step.at, message).help("let fewer steps emit the same event");
    draft.problems.push(problem);
    let steps: Vec<StepId> = draft.scope(scope).steps.values().copied().collect();
    steps.iter().for_each(|id| draft.steps[id.0 as usize].blind = true);
    true
}

/// A cycle: each step waits for the one before it, and the first for the last.
fn find_cycle(open: &BTreeMap<StepId, BTreeSet<StepId>>) -> Option<Vec<StepId>> {
    let mut way = vec![*open.keys().next()?];
    loop {
        // Every remaining step waits for another remaining one, or it would have been ready.
        let next = *open.get(way.last()?)?.iter().find(|source| open.contains_key(source))?;
        if let Some(start) = way.iter().position(|id| *id == next) {
            let mut cycle = way.split_off(start);
            cycle.reverse();
            let first = cycle.iter().enumerate().min_by_key(|(_, id)| **id)?.0;
            cycle.rotate_left(first);
            return Some(cycle);
        }
        way.push(next);
    }
}

fn report_cycle(draft: &mut Draft<'_>, cycle: &[StepId]) {
    let Some(first) = cycle.first().map(|id| &draft.steps[id.0 as usize]) else { return };
    let problem = if cycle.len() == 1 {
        Problem::new(&first.path, first.at, format!("`{}` waits for itself", first.step.name))
    } else {
        let names: Vec<_> = cycle.iter().chain(cycle.first()).map(|id| draft.step(*id).name.as_str()).collect();
        let message = format!("these steps wait for each other in a cycle: {}", names.join(" -> "));
        Problem::new(&first.path, first.at, message).help("each arrow points to the step that waits")
    };
    draft.problems.push(problem);
}
