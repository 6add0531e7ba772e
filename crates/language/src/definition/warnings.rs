//! Warnings about what is legal, but probably a mistake: joins that are never live, or only if several branches are
//! taken.

use std::collections::{BTreeMap, BTreeSet};

use super::draft::Draft;
use super::problem::Problem;
use super::reads::by_level;
use super::resolve::says_it_ran;
use crate::flow::{Action, Arm, Join, Source, Step, When};
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
            Some(Never { why, help }) => Some((format!("`{}` never runs: {why}", step.step.name), help.clone())),
            None => different_branches(draft, &facts, &step.step),
        };
        if let Some((message, help)) = message {
            warnings.push(Problem::new(&step.path, step.at, message).help(help));
        }
        facts[id.0 as usize] = mine;
    }
    draft.warnings.append(&mut warnings);
}

/// What is known to be true when a step runs.
#[derive(Default)]
struct Facts {
    completed: BTreeSet<StepId>,
    failed: BTreeSet<StepId>,
    /// The steps with an `if` that was true.
    taken: BTreeSet<StepId>,
    never: Option<Never>,
}

/// Why a step never runs, and what to do about it.
struct Never {
    why: String,
    help: String,
}

impl Never {
    fn new(why: String, help: impl Into<String>) -> Option<Never> {
        Some(Never { why, help: help.into() })
    }

    fn before(draft: &Draft<'_>, step: StepId) -> Option<Never> {
        let name = &draft.step(step).name;
        Never::new(format!("it waits for `{name}`, which never runs"), format!("fix `{name}` first"))
    }
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
                mine.never = Never::before(draft, source);
            }
            match when {
                Some(When::Completed) => mine.completed.insert(source),
                Some(When::Failed) => mine.failed.insert(source),
                _ => false,
            };
        }
        mine.never = mine.never.take().or_else(|| mine.contradiction(draft)).or_else(|| too_few(draft, facts, step));
        if let Some(condition) = &step.condition {
            mine.taken.insert(id);
            if mine.never.is_none() && condition.source().trim() == "false" {
                mine.never = Never::new("its `if` is never true".into(), "remove the step or change its `if`");
            }
        }
        mine
    }

    fn contradiction(&self, draft: &Draft<'_>) -> Option<Never> {
        if let Some(both) = self.completed.intersection(&self.failed).next() {
            let why = format!("it needs `{}` both completed and failed", draft.step(*both).name);
            return Never::new(why, "use `join: any` if one of the two is enough");
        }
        self.completed.iter().find_map(|id| {
            let step = draft.step(*id);
            let name = &step.name;
            match step.action {
                Action::Fail(_) => Never::new(
                    format!("it needs `{name}` completed, which always fails"),
                    format!("write `failed:{name}`"),
                ),
                Action::Return(_) => Never::new(
                    format!("it needs `{name}` completed, but its `return` ends the flow or group"),
                    format!("make it run before `{name}`"),
                ),
                _ => None,
            }
        })
    }
}

/// Whether fewer arms can be live at once than the join needs.
fn too_few(draft: &Draft<'_>, facts: &[Facts], step: &Step) -> Option<Never> {
    let needed = match step.join {
        Join::All => step.arms.len(),
        Join::Any | Join::Some => 1,
        Join::AtLeast { n, .. } => n as usize,
    };
    let never = |id: StepId| facts[id.0 as usize].never.is_some();
    let events = &draft.scope(step.scope).events;
    let (mut together, mut of_steps) = (0, BTreeMap::<StepId, [usize; 2]>::new());
    for arm in &step.arms {
        match arm.source {
            Source::Event(event) => {
                let producers = &events[event].producers;
                together += usize::from(producers.is_empty() || producers.iter().any(|(id, _)| !never(*id)));
            }
            Source::Step(source, when) => {
                let [completed, failed] = of_steps.entry(source).or_default();
                let runs = usize::from(!never(source) || when == When::Ended);
                *completed += if when == When::Failed { 0 } else { runs };
                *failed += if when == When::Completed { 0 } else { runs };
            }
        }
    }
    together += of_steps.into_values().map(|ends| ends.into_iter().max().unwrap_or(0)).sum::<usize>();
    if together >= needed {
        return None;
    }
    Never::new(
        format!("it needs {needed} of its arms live, but at most {together} can be"),
        "require fewer live arms, or wait for other steps",
    )
}

/// The step that must have run if the arm is live, and how it ended, if known.
fn ran(draft: &Draft<'_>, step: &Step, arm: &Arm) -> Option<(StepId, Option<When>)> {
    match arm.source {
        Source::Step(source, when) => says_it_ran(when).then_some((source, Some(when))),
        Source::Event(event) => match draft.scope(step.scope).events[event].producers.as_slice() {
            [(only, _)] => Some((*only, None)),
            _ => None,
        },
    }
}

/// Whether the arms of an `all` join depend on different `if`s.
fn different_branches(draft: &Draft<'_>, facts: &[Facts], step: &Step) -> Option<(String, String)> {
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
    let help = "if that is not intended, use `join: some`, which runs with the branches taken, or `ended:` arms";
    Some((message, help.into()))
}
