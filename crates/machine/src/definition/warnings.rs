//! What is legal but hardly meant: joins that are never live, or only when branches happen to be taken together.

use std::collections::BTreeSet;

use super::analyse::says_it_ran;
use super::draft::Draft;
use super::problem::Problem;
use super::reads::by_level;
use crate::flow::{Action, Arm, Source, Step, When};
use crate::ids::StepId;

pub(super) fn check(draft: &mut Draft<'_>) {
    if !draft.problems.is_empty() {
        return;
    }
    let mut facts: Vec<Facts> = draft.steps.iter().map(|_| Facts::default()).collect();
    let mut warnings = Vec::new();
    for id in by_level(draft) {
        let mine = Facts::of(draft, &facts, id);
        let step = &draft.steps[id.0 as usize];
        let message = match &mine.never {
            Some(Never::Here(why, help)) => Some((format!("`{}` never runs: {why}", step.step.name), help.clone())),
            Some(Never::Before) => None,
            None => apart(draft, &facts, &step.step),
        };
        if let Some((message, help)) = message {
            warnings.push(Problem::new(&step.path, step.at, message).help(help));
        }
        facts[id.0 as usize] = mine;
    }
    draft.warnings.append(&mut warnings);
}

/// What is true whenever a step runs.
#[derive(Default)]
struct Facts {
    completed: BTreeSet<StepId>,
    failed: BTreeSet<StepId>,
    /// The steps with an `if` that was true.
    taken: BTreeSet<StepId>,
    never: Option<Never>,
}

/// Why a step never runs.
enum Never {
    /// Its own arms rule each other out.
    Here(String, String),
    /// It waits for one that never runs.
    Before,
}

impl Facts {
    fn of(draft: &Draft<'_>, facts: &[Facts], id: StepId) -> Facts {
        let step = draft.step(id);
        let mut mine = Facts::default();
        for arm in step.arms.iter().filter(|_| step.needs_all()) {
            let Some((source, when)) = ran(draft, step, arm) else { continue };
            let before = &facts[source.0 as usize];
            mine.completed.extend(&before.completed);
            mine.failed.extend(&before.failed);
            mine.taken.extend(&before.taken);
            if before.never.is_some() {
                mine.never = Some(Never::Before);
            }
            match when {
                Some(When::Completed) => mine.completed.insert(source),
                Some(When::Failed) => mine.failed.insert(source),
                _ => false,
            };
        }
        if mine.never.is_none() {
            mine.never = mine.contradiction(draft);
        }
        if step.condition.is_some() {
            mine.taken.insert(id);
        }
        mine
    }

    fn contradiction(&self, draft: &Draft<'_>) -> Option<Never> {
        if let Some(both) = self.completed.intersection(&self.failed).next() {
            let why = format!("it needs `{}` both completed and failed", draft.step(*both).name);
            return Some(Never::Here(why, "use `join: any` if one of the two is enough".into()));
        }
        let fails = |id: &&StepId| matches!(draft.step(**id).action, Action::Fail(_));
        let failing = self.completed.iter().find(fails)?;
        let name = &draft.step(*failing).name;
        Some(Never::Here(format!("it needs `{name}` completed, which always fails"), format!("write `failed:{name}`")))
    }
}

/// The step that ran if the arm is live, and how it ended if that is known.
fn ran(draft: &Draft<'_>, step: &Step, arm: &Arm) -> Option<(StepId, Option<When>)> {
    match arm.source {
        Source::Step(source, when) => says_it_ran(when).then_some((source, Some(when))),
        Source::Event(event) => match draft.scope(step.scope).events[event].producers.as_slice() {
            [(only, _)] => Some((*only, None)),
            _ => None,
        },
    }
}

/// Whether the arms of an `all` join are behind different `if`s.
fn apart(draft: &Draft<'_>, facts: &[Facts], step: &Step) -> Option<(String, String)> {
    if !step.needs_all() {
        return None;
    }
    let sources = step.arms.iter().filter_map(|arm| ran(draft, step, arm));
    let branches: Vec<_> = sources.map(|(source, _)| &facts[source.0 as usize].taken).collect();
    let everywhere = |id: &&StepId| branches.iter().all(|taken| taken.contains(id));
    let all: BTreeSet<StepId> = branches.iter().flat_map(|taken| taken.iter().copied()).collect();
    let some: Vec<_> =
        all.iter().filter(|id| !everywhere(id)).map(|id| format!("`{}`", draft.step(*id).name)).collect();
    if some.is_empty() {
        return None;
    }
    let message = format!(
        "`{}` is skipped unless every branch it joins is taken: {} {} an `if`",
        step.name,
        some.join(", "),
        if some.len() == 1 { "has" } else { "have" }
    );
    let help = "if that is not meant, use `join: some`, which runs with the branches that were taken, or `ended:` arms";
    Some((message, help.into()))
}
