//! Checks what expressions read: every name must be known, and every step read must be certain to be decided before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::draft::{Draft, DraftStep, GateKind, ReadContext};
use super::problem::Problem;
use super::resolve::{says_it_ran, steps_of};
use super::source::shorten;
use crate::expr::{Read, Table};
use crate::flow::{Graph, Join, Source, When};
use crate::ids::StepId;
use crate::nearest::did_you_mean;

pub(super) fn check(draft: &mut Draft<'_>) {
    let sites = std::mem::take(&mut draft.sites);
    let certain = certain(draft);
    let blind = blind(draft);
    for site in &sites {
        for (inner, read) in &site.reads {
            // Explaining why a step is undecided searches the graph, so stop at the limit.
            if draft.is_full() {
                return;
            }
            let look = Look { draft, certain: &certain, blind: &blind, view: site.view };
            match (look.read(read), look.reader(read)) {
                (Ok(()), Some((reader, target))) => {
                    draft.steps[reader.0 as usize].step.reads.insert(target);
                }
                (Ok(()), None) => {}
                (Err((message, help)), _) => {
                    let (path, at) = draft.locate(&site.path, &site.node, inner, read.offset);
                    draft.problems.push(Problem { help, ..Problem::new(&path, at, message) });
                }
            }
        }
    }
}

/// Steps with an already reported problem upstream.
fn blind(draft: &Draft<'_>) -> BTreeSet<StepId> {
    let mut blind = BTreeSet::new();
    for id in by_level(draft) {
        let step = &draft.steps[id.0 as usize];
        let events = &draft.scope(step.step.scope).events;
        let sources = || step.step.arms.iter().flat_map(|arm| steps_of(events, arm.source));
        if step.blind || sources().any(|source| blind.contains(&source)) {
            blind.insert(id);
        }
    }
    blind
}

/// For one step: the steps of its scope that have certainly ended before it.
#[derive(Default)]
struct Certain {
    /// When it is decided to run.
    ran: BTreeSet<StepId>,
    /// When it has ended, possibly by being skipped: a subset of `ran`.
    ended: BTreeSet<StepId>,
    /// A join with `rest: cancel` may cancel it at any time.
    cancellable: bool,
}

/// Computes [`Certain`] for each step.
///
/// A live `x` or `failed:x` implies that x ran. `ended:x`, and any arm that may be dead, implies only that x ended: it
/// may have been skipped, by an `all` join at its first dead arm, while others are undecided. A `some` join waits until
/// every arm is live or dead, and at least one is live. An event, an `any` and an `at_least` join imply nothing.
fn certain(draft: &Draft<'_>) -> Vec<Certain> {
    let mut certain: Vec<Certain> = draft.steps.iter().map(|_| Certain::default()).collect();
    for step in draft.steps.iter().map(|step| &step.step) {
        for arm in step.arms.iter().filter(|_| matches!(step.join, Join::AtLeast { cancel_rest: true, .. })) {
            if let Source::Step(source, _) = arm.source {
                certain[source.0 as usize].cancellable = true;
            }
        }
    }
    for id in by_level(draft) {
        let step = draft.step(id);
        let arms: Vec<Behind> = step.arms.iter().map(|arm| behind(&certain, arm.source)).collect();
        let own = &mut certain[id.0 as usize];
        if step.needs_all() {
            own.ran = arms.iter().flat_map(|arm| &arm.live).copied().collect();
            // Any arm may be the first dead one.
            let certain_if_skipped = |id: &StepId| arms.iter().all(|arm| !arm.may_be_dead || arm.decided.contains(id));
            own.ended = own.ran.iter().copied().filter(certain_if_skipped).collect();
        } else if step.join == Join::Some {
            own.ended = arms.iter().flat_map(|arm| &arm.decided).copied().collect();
            // Any arm may be the live one.
            let mut live = arms.iter().map(|arm| arm.live.clone());
            let in_all = live.next().map(|first| live.fold(first, |all, arm| &all & &arm));
            own.ran = own.ended.iter().copied().chain(in_all.into_iter().flatten()).collect();
        }
        if own.cancellable {
            own.ended.clear();
        }
    }
    certain
}

/// The steps that have certainly ended when an arm gets its token.
#[derive(Default)]
struct Behind {
    live: BTreeSet<StepId>,
    /// Live or dead.
    decided: BTreeSet<StepId>,
    may_be_dead: bool,
}

fn behind(certain: &[Certain], source: Source) -> Behind {
    let Source::Step(step, when) = source else { return Behind { may_be_dead: true, ..Behind::default() } };
    let Certain { ran, ended, .. } = &certain[step.0 as usize];
    let and_it = |before: &BTreeSet<StepId>| before.iter().copied().chain([step]).collect();
    let live = and_it(if says_it_ran(when) { ran } else { ended });
    Behind { live, decided: and_it(ended), may_be_dead: when != When::Ended }
}

/// All steps, each after those it waits for.
pub(super) fn by_level(draft: &Draft<'_>) -> Vec<StepId> {
    let mut ids: Vec<StepId> = (0..draft.steps.len() as u32).map(StepId).collect();
    ids.sort_by_key(|id| draft.step(*id).level);
    ids
}

struct Look<'d, 't> {
    draft: &'d Draft<'t>,
    certain: &'d [Certain],
    blind: &'d BTreeSet<StepId>,
    view: ReadContext,
}

type Wrong = (String, Option<String>);

const RUN_FIELDS: [&str; 8] = Table::OF_RUN;

impl Look<'_, '_> {
    fn read(&self, read: &Read) -> Result<(), Wrong> {
        let example = match read.root.as_str() {
            "steps" => "steps.x.output",
            "events" => "events[\"name\"]",
            "gates" => "gates.x.url",
            "run" => return read.key.as_deref().map_or(Ok(()), |field| self.run(field)),
            root => return self.root(root),
        };
        let Some(key) = &read.key else {
            let message = format!("`{}` can only be read by name, such as `{example}`", read.root);
            return Err((message, None));
        };
        match read.root.as_str() {
            "steps" => self.step(key, read.field.as_deref()),
            "events" => self.event(key),
            _ => self.gate(key, read.field.as_deref()),
        }
    }

    /// The steps that enclose the expression, innermost first, each with what is available of it.
    fn around(&self) -> impl Iterator<Item = (StepId, &DraftStep, ReadContext)> {
        let mut next = self.view.step.map(|id| (id, self.view));
        std::iter::from_fn(move || {
            let (id, view) = next?;
            let step = &self.draft.steps[id.0 as usize];
            let owner = self.draft.scope(step.step.scope).owner;
            next = owner.map(|owner| (owner, ReadContext::round(owner)));
            Some((id, step, view))
        })
    }

    fn in_finally(&self) -> bool {
        self.around().last().is_some_and(|(_, step, _)| self.draft.scope(step.step.scope).outer.is_some())
    }

    fn root(&self, root: &str) -> Result<(), Wrong> {
        let mut items: Vec<&str> = Vec::new();
        let (mut rounds, mut gate) = (false, false);
        for (_, step, view) in self.around() {
            items.extend(step.item.as_deref().filter(|_| view.item));
            rounds |= view.rounds && step.repeats;
            gate |= view.gate && step.gate.is_some();
        }
        if root == "input" || items.contains(&root) {
            return Ok(());
        }
        let (here, only) = match root {
            "index" => (!items.is_empty(), "inside a `spread`: in its `input` and in the steps of its group"),
            "item" if items.is_empty() => (false, "inside a `spread`: in its `input` and in the steps of its group"),
            "state" | "round" => (rounds, "inside a `repeat`"),
            "gate" => (gate, "after a gate: in a step with `await`, except in its `if` and in `await` itself"),
            _ => {
                let tables = ["input", "steps", "events", "run", "gates", "gate", "index", "state", "round"];
                let help = match (root, items.first()) {
                    ("item", Some(item)) => Some(format!("this `spread` names its item `{item}`")),
                    _ => did_you_mean(root, items.iter().copied().chain(tables)),
                };
                return Err((format!("unknown name `{}`", shorten(root)), help));
            }
        };
        if here { Ok(()) } else { Err((format!("`{root}` is available only {only}"), None)) }
    }

    fn run(&self, field: &str) -> Result<(), Wrong> {
        if !RUN_FIELDS.contains(&field) {
            let help = did_you_mean(field, RUN_FIELDS);
            let known = || Some(format!("known fields: {}", RUN_FIELDS.join(", ")));
            return Err((format!("`run` has no `{}`", shorten(field)), help.or_else(known)));
        }
        if matches!(field, "outcome" | "error") && !self.in_finally() {
            return Err((format!("`run.{field}` is available only in `finally`"), None));
        }
        Ok(())
    }

    fn gate(&self, name: &str, field: Option<&str>) -> Result<(), Wrong> {
        let shown = shorten(name);
        if field != Some("url") {
            return Err((format!("expected `{}.url`", select("gates", &shown)), None));
        }
        let Some(id) = self.find(name) else { return Err(self.unknown_step(name)) };
        match self.draft.steps[id.0 as usize].gate {
            Some(GateKind::Url) => Ok(()),
            Some(GateKind::Other) => {
                Err((format!("the gate of `{shown}` has no URL: it is neither `webhook` nor `manual`"), None))
            }
            None => Err((format!("the step `{shown}` has no `await`"), None)),
        }
    }

    fn event(&self, name: &str) -> Result<(), Wrong> {
        let inside = self.view.inside.map(|scope| &self.draft.scope(scope).events);
        let ended = inside.into_iter().flatten().any(|event| event.name == name);
        let armed = |step: &DraftStep| {
            let events = &self.draft.scope(step.step.scope).events;
            step.step.arms.iter().any(|arm| matches!(arm.source, Source::Event(at) if events[at].name == name))
        };
        if ended || self.around().any(|(_, step, _)| armed(step) || step.blind) {
            return Ok(());
        }
        let shown = shorten(name);
        let known = |step: &DraftStep| {
            self.draft.scope(step.step.scope).events.iter().map(|event| event.name.as_str()).collect::<Vec<_>>()
        };
        let near: Vec<&str> = self.around().flat_map(|(_, step, _)| known(step)).collect();
        match self.around().next() {
            Some((_, step, _)) if near.contains(&name) => {
                let message = format!("`{}` does not wait for the event `{shown}`", step.step.name);
                Err((message, Some(format!("add `{shown}` to its `subscribes`"))))
            }
            _ => {
                let ended = inside.into_iter().flatten().map(|event| event.name.as_str());
                let all: Vec<&str> = ended.chain(near).collect();
                let help =
                    longer(name, '.', &all).map(|event| format!("write a name with a dot as `events[\"{event}\"]`"));
                let help = help.or_else(|| did_you_mean(name, all));
                Err((format!("no step here emits the event `{shown}`"), help))
            }
        }
    }

    fn step(&self, name: &str, field: Option<&str>) -> Result<(), Wrong> {
        let shown = shorten(name);
        let Some(target) = self.find(name) else { return Err(self.unknown_step(name)) };
        let Some(field) = field.filter(|field| matches!(*field, "output" | "status" | "error")) else {
            let read = select("steps", &shown);
            let message = match field {
                Some(field) => format!("a step has no field `{}`", shorten(field)),
                None => format!("`{read}` is the whole step"),
            };
            return Err((message, Some(format!("read `{read}.output`, `{read}.status` or `{read}.error`"))));
        };
        let Some(own) = self.sibling(target) else { return Ok(()) };
        if own == target {
            let itself = self.view.step == Some(target);
            let message = if itself { "a step cannot read itself" } else { "a step cannot read the group it is in" };
            return Err((format!("{message}: `{shown}` has not ended"), None));
        }
        if self.certain[own.0 as usize].ran.contains(&target) || self.blind.contains(&own) {
            return Ok(());
        }
        Err(self.undecided(own, target, field))
    }

    /// The enclosing step that is in the same scope as `target`. None if all steps of that scope have ended: in the
    /// `output` of a group or flow, after a round, in `finally`.
    fn sibling(&self, target: StepId) -> Option<StepId> {
        let scope = self.draft.step(target).scope;
        let mut around = self.around().filter(|_| self.view.inside != Some(scope));
        around.find(|(_, step, _)| step.step.scope == scope).map(|(id, ..)| id)
    }

    /// For a read of a step: the step that must come after it, and the step read.
    fn reader(&self, read: &Read) -> Option<(StepId, StepId)> {
        let name = read.key.as_deref().filter(|_| read.root == "steps")?;
        let target = self.find(name)?;
        Some((self.sibling(target)?, target))
    }

    /// Looks a step up by name, innermost scope first.
    fn find(&self, name: &str) -> Option<StepId> {
        let inside = self.view.inside;
        let outer = self.in_finally().then_some(Graph::ROOT);
        let scopes = inside.into_iter().chain(self.around().map(|(_, step, _)| step.step.scope)).chain(outer);
        scopes.into_iter().find_map(|scope| self.draft.scope(scope).steps.get(name).copied())
    }

    fn unknown_step(&self, name: &str) -> Wrong {
        let shown = shorten(name);
        let inside = self.view.inside.into_iter().chain(self.around().map(|(_, step, _)| step.step.scope));
        let names: Vec<&str> =
            inside.flat_map(|scope| self.draft.scope(scope).steps.keys().map(String::as_str)).collect();
        if let Some(step) = longer(name, '-', &names) {
            let help = format!("write a name with a dash as `steps[\"{step}\"]`");
            return (format!("there is no step `{shown}` here"), Some(help));
        }
        let elsewhere = self.draft.steps.iter().find(|step| step.step.name == name);
        let help = match elsewhere {
            Some(step) => Some(format!("`{}` is inside a group; from outside, read the group's output", step.path)),
            None => did_you_mean(name, names),
        };
        (format!("there is no step `{shown}` here"), help)
    }

    /// Everything a step waits for, directly or not, each with the reason why it may be undecided, if any.
    fn upstream(&self, id: StepId) -> BTreeMap<StepId, Option<String>> {
        let mut found = BTreeMap::new();
        // The flag says whether the step has certainly run.
        let mut queue = VecDeque::from([(id, true, None)]);
        while let Some((id, ran, doubt)) = queue.pop_front() {
            let step = self.draft.step(id);
            let events = &self.draft.scope(step.scope).events;
            for (at, arm) in step.arms.iter().enumerate() {
                let skips =
                    |other: usize| other != at && !matches!(step.arms[other].source, Source::Step(_, When::Ended));
                let here = match (step.join, arm.source) {
                    _ if doubt.is_some() => doubt.clone(),
                    (_, Source::Event(_)) => Some(format!("the event `{}`", arm.written)),
                    (Join::Any | Join::AtLeast { .. }, _) if step.arms.len() > 1 => {
                        Some(format!("the join of `{}`, which does not wait for all its arms", step.name))
                    }
                    _ if !ran && self.certain[id.0 as usize].cancellable => {
                        Some(format!("`{}`, which may be cancelled before that", step.name))
                    }
                    (Join::All, _) if !ran && (0..step.arms.len()).any(skips) => {
                        Some(format!("`{}`, which may be skipped before that", step.name))
                    }
                    _ => None,
                };
                let says_it_ran = matches!(arm.source, Source::Step(_, when) if says_it_ran(when));
                for source in steps_of(events, arm.source) {
                    if let std::collections::btree_map::Entry::Vacant(entry) = found.entry(source) {
                        entry.insert(here.clone());
                        queue.push_back((source, ran && step.needs_all() && says_it_ran, here.clone()));
                    }
                }
            }
        }
        found
    }

    fn undecided(&self, reader: StepId, target: StepId, field: &str) -> Wrong {
        let (step, name) = (self.draft.step(reader), &self.draft.step(target).name);
        let read = select("steps", name);
        let why = match self.upstream(reader).remove(&target) {
            Some(Some(doubt)) => format!("it is reached only through {doubt}"),
            _ if self.upstream(target).contains_key(&reader) => {
                let message = format!("`{read}` is not decided yet: `{name}` waits for `{}`", step.name);
                return (message, None);
            }
            _ => format!("`{}` does not wait for it", step.name),
        };
        // To read the output, the step must have completed: `ended:` would also count its failure as handled.
        let arm = if field == "output" { name.clone() } else { format!("ended:{name}") };
        let help = match step.join {
            Join::Any | Join::AtLeast { .. } if step.arms.len() > 1 => {
                format!("use `join: some` (or `all`) with `{arm}` in `after` of `{}`", step.name)
            }
            _ => format!("add `{arm}` to `after` of `{}`", step.name),
        };
        (format!("`{read}` may still be undecided when `{}` is decided: {why}", step.name), Some(help))
    }
}

/// The known name of which only the part before `sign` was read: `load` of `load-all`.
fn longer<'n>(name: &str, sign: char, names: &[&'n str]) -> Option<&'n str> {
    names.iter().copied().find(|known| known.strip_prefix(name).is_some_and(|rest| rest.starts_with(sign)))
}

/// `steps.load`, `steps["load-all"]`
fn select(table: &str, name: &str) -> String {
    let plain =
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.starts_with(|c: char| c.is_ascii_digit());
    if plain { format!("{table}.{name}") } else { format!("{table}[\"{name}\"]") }
}
