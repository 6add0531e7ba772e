//! The invariants, checked after every commit.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::run::{Activation, End, Phase, Place, Run, State, Token};
use eddyline_machine::view::RunView;
use eddyline_machine::*;

use super::TaskRow;

/// State of the checks between commits of a run.
#[derive(Clone, Default)]
pub struct Checks {
    checked: usize,
    ended: BTreeSet<String>,
    terminal: bool,
    projected: Projected,
}

/// The folds of the timeline: of its records, and of its projections.
#[derive(Clone, Default)]
struct Projected {
    view: RunView,
    projector: Option<project::Projector>,
    snapshot: project::Snapshot,
    steps: BTreeMap<String, project::StepSnapshot>,
}

/// A run after a commit.
pub struct Parts<'a> {
    pub flow: &'a Flow,
    pub run: &'a Run,
    pub records: &'a [Numbered],
    pub tasks: &'a BTreeMap<Fence, TaskRow>,
}

impl Checks {
    pub fn after_commit(&mut self, before: &Run, now: Parts<'_>, transition: &Transition) {
        assert!(transition.activations.len() <= decide::MAX_TOUCHED, "touched {}", transition.activations.len());
        self.records(&now);
        one_token_an_arm(before, transition);
        tasks(&now);
        for activation in &transition.activations {
            started_by_its_arms(&now, activation);
            failed_for_what_nobody_handled(before, &now, activation);
        }
        self.projected.is_the_state(&now);
        memo_is_numbered(before, &now);
        unwinds_only(before, &now);
        let explained = explain::explain(now.flow, now.run);
        assert_eq!(explained.is_empty(), now.run.header.phase == Phase::Ended, "{explained:?}");
        if now.run.header.phase == Phase::Ended {
            assert!(self.terminal, "ended without a terminal record");
            nothing_is_left(&now);
        }
    }

    fn records(&mut self, now: &Parts<'_>) {
        for (index, numbered) in now.records.iter().enumerate().skip(self.checked) {
            assert_eq!(numbered.n, index as u64 + 1, "numbers are dense");
            assert!(!self.terminal, "a record after the terminal one: {numbered:?}");
            let entry = &numbered.record.entry;
            assert_eq!(index == 0, matches!(entry, Entry::FlowStart { .. }), "flow.start is the first record, once");
            self.terminal |= entry.is_terminal();
            self.projected.apply(now.run.header.run, numbered);
            let ends = matches!(
                entry,
                Entry::StepCompleted { .. }
                    | Entry::StepFailed { .. }
                    | Entry::StepSkipped { .. }
                    | Entry::StepCancelled { .. }
            );
            if let Some(step) = entry.step_key() {
                // Projections drop ended steps: only these records may still follow.
                let harmless = matches!(entry, Entry::Log { .. } | Entry::Emit { .. } | Entry::Act { .. });
                assert!(harmless || !self.ended.contains(step), "{step} has ended: {entry:?}");
                if ends {
                    self.ended.insert(step.to_owned());
                }
            }
            if let Entry::StepFailed { step_key, error } = entry {
                assert!(!error.message.contains("is not decided yet"), "{step_key} read too early: {}", error.message);
            }
        }
        self.checked = now.records.len();
    }
}

impl Projected {
    fn apply(&mut self, run: RunId, numbered: &Numbered) {
        let projector = self.projector.get_or_insert_with(|| project::Projector::new(run));
        let patches = projector.apply(numbered);
        self.view.apply(numbered);
        if let Some(patch) = &patches.snapshot {
            self.snapshot.apply(patch);
        }
        if let Some(patch) = &patches.step {
            self.steps.entry(patch.step_key.clone()).or_default().apply(patch);
        }
    }

    /// The timeline agrees with the state.
    fn is_the_state(&self, now: &Parts<'_>) {
        let view = &self.view;
        let header = &now.run.header;
        assert_eq!(view.status(), header.status().as_str(), "the status");
        assert_eq!(view.tasks_open(), header.open_tasks as usize, "tasks");
        assert_eq!(view.step_count(), header.step_count, "steps");
        assert_eq!(view.completed_steps(), header.completed_steps, "completed steps");
        for activation in &now.run.activations {
            let name = now.run.activation_name(now.flow, activation.id);
            let Some(end) = activation.end().filter(|_| activation.place != Place::Root) else { continue };
            let seen = view.steps().get(&name).unwrap_or_else(|| panic!("{name} is not in the timeline"));
            assert_eq!(seen.status(), end.status(), "the status of {name}");
            match end {
                End::Completed(output) => assert_eq!(seen.output(), Some(output), "the output of {name}"),
                End::Failed(failure) => assert_eq!(seen.error(), Some(failure), "the error of {name}"),
                End::Skipped(_) | End::Cancelled => {}
            }
        }
        assert_eq!(self.snapshot, view.snapshot(header.run), "the fold of the projection");
        assert_eq!(self.steps, view.step_snapshots(), "the fold of the steps' projection");
        if let Some(outcome) = header.outcome.as_ref().filter(|_| header.phase == Phase::Ended) {
            match outcome {
                run::RunOutcome::Completed(output) => assert_eq!(view.output(), Some(output)),
                run::RunOutcome::Failed(failure) => assert_eq!(view.error(), Some(failure)),
                run::RunOutcome::Cancelled(_) => assert_eq!(view.output(), None),
            }
        }
    }
}

/// Each change of a memo has its own number, and times grow with numbers.
fn memo_is_numbered(before: &Run, now: &Parts<'_>) {
    let Some(code) = &now.run.header.code else { return };
    let old = before.header.code.clone().unwrap_or_default();
    assert!(code.n >= old.n && code.at >= old.at && code.news <= code.n && code.forgets <= code.n, "numbers run back");
    let mut at_of = BTreeMap::new();
    for activation in &now.run.activations {
        let Place::Memo(memo) = &activation.place else { continue };
        assert!(memo.n <= code.n && memo.at <= code.at, "{} changed in the future", memo.name);
        assert!(at_of.insert(memo.n, memo.at).is_none(), "the number {} is used twice", memo.n);
    }
    assert!(at_of.values().collect::<Vec<_>>().is_sorted(), "times do not grow with numbers");
    let undoable = now.run.activations.iter().filter(|activation| {
        let undo = matches!(&activation.place, Place::Memo(memo) if memo.undo);
        undo && matches!(activation.end(), Some(End::Completed(_))) && !activation.undone
    });
    assert_eq!(undoable.count(), code.undoable as usize, "what can be undone is counted");
}

/// A run that unwinds has no open entries but undo steps, and gets no others; it never completes.
fn unwinds_only(before: &Run, now: &Parts<'_>) {
    let leaving = |run: &Run| run.header.code.as_ref().and_then(|code| code.leaving.clone());
    let (old, new) = (leaving(before), leaving(now.run));
    assert!(old.is_none() || new.is_some(), "the run no longer leaves");
    let Some(new) = new.filter(|new| new.unwinding) else { return };
    for activation in now.run.activations.iter() {
        let Place::Memo(memo) = &activation.place else { continue };
        let is_undo = memo.name.starts_with(decide::UNDO_PREFIX);
        let left_over = !now.run.header.agenda.is_empty();
        assert!(is_undo || activation.end().is_some() || left_over, "{} is open while unwinding", memo.name);
        let is_new = activation.id.0 as usize >= before.activations.len();
        let unwound = old.as_ref().is_some_and(|old| old.unwinding);
        assert!(is_undo || !is_new || !unwound, "{} is new while unwinding", memo.name);
    }
    match &now.run.header.outcome {
        None => {}
        Some(run::RunOutcome::Completed(_)) => panic!("completed while unwinding"),
        Some(run::RunOutcome::Failed(failure)) => {
            let error = new.error.as_ref().expect("failed although it was cancelled");
            assert_eq!((&failure.kind, &failure.message), (&error.kind, &error.message), "failed for another reason");
        }
        Some(run::RunOutcome::Cancelled(_)) => assert!(new.error.is_none(), "cancelled instead of failed"),
    }
}

fn one_token_an_arm(before: &Run, transition: &Transition) {
    for activation in &transition.activations {
        let Some(old) = before.activations.get(activation.id.0 as usize) else { continue };
        for (old, new) in old.arms.iter().zip(&activation.arms) {
            assert!(old == new || *old == Token::Open, "a token changed from {old:?} to {new:?}");
        }
        if let State::Ended(end) = &old.state {
            assert_eq!(&activation.state, &State::Ended(end.clone()), "an end changed");
        }
    }
}

fn tasks(now: &Parts<'_>) {
    assert_eq!(now.run.header.open_tasks as usize, now.tasks.len(), "the header counts the tasks");
    let fences: BTreeSet<Fence> = now.run.activations.iter().filter_map(Activation::fence).collect();
    assert_eq!(fences, now.tasks.keys().copied().collect(), "every task belongs to an activation");
}

/// Tokens match the ends of their sources, and no step began unless its tokens made it ready.
fn started_by_its_arms(now: &Parts<'_>, activation: &Activation) {
    let (Some(graph), Place::Step { step, scope }) = (now.flow.graph(), &activation.place) else { return };
    let step = graph.step(*step);
    let body = now.run.activations[scope.0 as usize].body.expect("an open scope");
    let source = |id: StepId| &now.run.activations[(body.first.0 + graph.step(id).slot) as usize];
    for (arm, token) in step.arms.iter().zip(&activation.arms) {
        let live = matches!(token, Token::Live | Token::LateLive);
        if *token == Token::Open {
            continue;
        }
        let expected = match arm.source {
            Source::Event(event) => now.run.emitted.contains_key(&(*scope, event as u32)),
            Source::Step(id, when) => match (source(id).end(), when) {
                (None, _) => panic!("a token from {} before it ended", graph.step(id).name),
                (Some(_), When::Ended) => true,
                (Some(End::Completed(_)), When::Completed) | (Some(End::Failed(_)), When::Failed) => true,
                _ => false,
            },
        };
        assert_eq!(live, expected, "arm {} of {}", arm.written, step.name);
    }
    let count = |wanted| activation.arms.iter().filter(|token| **token == wanted).count();
    let (live, dead, arms) = (count(Token::Live), count(Token::Dead), activation.arms.len());
    let ready = match step.join {
        Join::All => live == arms,
        Join::Any => live > 0 || arms == 0,
        Join::Some => live + dead == arms && (live > 0 || arms == 0),
        Join::AtLeast { n, .. } => live >= n as usize,
    };
    let began = activation.attempt > 0
        || activation.input.is_some()
        || !matches!(activation.state, State::Waiting | State::Certain { .. } | State::Ended(_));
    assert!(ready || !began, "{} began before its arms made it ready: {:?}", step.name, activation.arms);
}

/// A scope fails only because of an unhandled failure in it. If there were several, one of them may still be handled.
fn failed_for_what_nobody_handled(before: &Run, now: &Parts<'_>, scope: &Activation) {
    let failure = |activation: &Activation| match &activation.state {
        State::Ended(End::Failed(failure)) => Some(failure.clone()),
        State::Open(run::Inside { closing: Some(End::Failed(failure)), .. }) => Some(failure.clone()),
        _ => None,
    };
    let had_failed = before.activations.get(scope.id.0 as usize).is_some_and(|old| failure(old).is_some());
    let reported = failure(scope).filter(|reported| reported.also.is_empty() && !had_failed);
    let (Some(reported), Some(body)) = (reported, scope.body) else { return };
    let Some(graph) = now.flow.graph() else { return };
    for slot in 0..graph.scope(body.scope).steps.len() {
        let part = &now.run.activations[body.first.0 as usize + slot];
        let Some(End::Failed(own)) = part.end() else { continue };
        let name = now.run.activation_name(now.flow, part.id);
        let is_reported = reported.step == own.step.clone().or(Some(name.clone())) && reported.message == own.message;
        assert!(!is_reported || !part.handled, "the failure of {name} was handled, but is reported");
    }
}

fn nothing_is_left(now: &Parts<'_>) {
    let header = &now.run.header;
    assert!(header.agenda.is_empty(), "work is left: {:?}", header.agenda);
    for activation in &now.run.activations {
        let name = now.run.activation_name(now.flow, activation.id);
        assert!(activation.end().is_some(), "{name} has not ended");
        assert!(!activation.arms.contains(&Token::Open), "{name} has an arm without a token");
    }
}
