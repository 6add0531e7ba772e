//! Reads one step.

use serde_json::Value;

use super::draft::{Draft, DraftArm, DraftEmit, ReadContext, Wants};
use super::fields::{Fields, Out, boolean, check_name, expr, list, name, template, text, timeout, whole, word};
use super::policy::{self, retry};
use super::schema::schema;
use super::source::{NodeValue, SourceNode, join, shorten};
use super::{MAX_ARMS, parse};
use crate::flow::{Action, LimitUse, When, Worker};
use crate::ids::StepId;

#[derive(Clone, Copy, PartialEq, Eq)]
enum StepKind {
    Worker,
    Inline,
    Group,
    Child,
    Gate,
}

/// The fields that set a step's kind.
const KINDS: [(&str, StepKind); 7] = [
    ("run", StepKind::Worker),
    ("worker", StepKind::Worker),
    ("set", StepKind::Inline),
    ("fail", StepKind::Inline),
    ("return", StepKind::Inline),
    ("steps", StepKind::Group),
    ("flow", StepKind::Child),
];

const ANY: [&str; 6] = ["after", "subscribes", "join", "if", "await", "description"];

/// Fields that only some kinds have.
const BELONGS: [(&[&str], &[StepKind]); 5] = [
    (
        &["queue", "limits", "retry", "timeout", "start_timeout", "emits", "priority", "requires", "key", "undo"],
        &[StepKind::Worker],
    ),
    (&["output", "repeat"], &[StepKind::Group]),
    (&["detached"], &[StepKind::Child]),
    (&["input"], &[StepKind::Worker, StepKind::Group, StepKind::Child]),
    (
        &["spread", "as", "max_parallel", "on_item_failure", "max_failures"],
        &[StepKind::Worker, StepKind::Group, StepKind::Child],
    ),
];

/// Fills in the step; returns its canonical form.
pub(super) fn read(draft: &mut Draft<'_>, id: StepId, node: &SourceNode) -> Option<Value> {
    let path = draft.steps[id.0 as usize].path.clone();
    let known: Vec<&str> = ANY
        .into_iter()
        .chain(KINDS.map(|(name, _)| name))
        .chain(BELONGS.iter().flat_map(|(names, _)| names.iter().copied()))
        .collect();
    let mut fields = match node.value {
        NodeValue::Null => Fields::none(&path, draft.steps[id.0 as usize].at),
        _ => Fields::open(draft, &path, node, "a step: a map such as {run: handler}", &known)?,
    };
    fields.take(draft, "description", text);
    fields.canonical_mut().remove("description");
    let kind = kind(draft, &fields);
    misplaced(draft, &fields, kind);
    arms(draft, &mut fields, id);
    let condition = fields.take(draft, "if", expr(ReadContext::deciding(id)));
    let gate = fields.take(draft, "await", |draft, path, node| policy::gate(draft, path, node, id));
    let spread = policy::spread(draft, &mut fields, id);
    let input = fields.take(draft, "input", template(ReadContext::doing(id)));
    let action = action(draft, &mut fields, id, kind);
    if path.starts_with("finally.") {
        let why = "`undo` does nothing in `finally`, which runs after everything is undone";
        fields.refuse(draft, "undo", why, "leave it out, or add a step that cleans up");
    }
    let undo = fields.take(draft, "undo", policy::undo);
    let step = &mut draft.steps[id.0 as usize].step;
    step.condition = condition;
    step.gate = gate;
    step.spread = spread;
    step.input = input;
    step.undo = undo;
    if let Some(action) = action {
        step.action = action;
    }
    Some(fields.canonical())
}

fn kind(draft: &mut Draft<'_>, fields: &Fields<'_>) -> StepKind {
    let present: Vec<_> = KINDS.into_iter().filter(|(name, _)| fields.has(name)).collect();
    match present.as_slice() {
        [] if fields.has("await") => StepKind::Gate,
        [] => StepKind::Worker,
        [("run", _), ("worker", _), ..] => {
            fields.refuse(draft, "worker", "`worker` is an alias of `run`, which is also set", "keep one of them");
            StepKind::Worker
        }
        [(_, kind)] => *kind,
        [(first, kind), (second, _), ..] => {
            let why = format!("a step has one kind, found both `{first}` and `{second}`");
            fields.refuse(draft, second, &why, "move one of them to its own step");
            *kind
        }
    }
}

/// Reports fields that the kind does not have.
fn misplaced(draft: &mut Draft<'_>, fields: &Fields<'_>, kind: StepKind) {
    let here = match kind {
        StepKind::Worker => "a worker step".to_owned(),
        StepKind::Group => "a group (`steps`)".into(),
        StepKind::Child => "a child (`flow`)".into(),
        StepKind::Gate => "a gate alone (`await` without `run`)".into(),
        StepKind::Inline => {
            let name = ["set", "fail", "return"].into_iter().find(|name| fields.has(name));
            format!("`{}`", name.unwrap_or_default())
        }
    };
    for (names, kinds) in BELONGS.iter().filter(|(_, kinds)| !kinds.contains(&kind)) {
        for name in names.iter().filter(|name| fields.has(name)) {
            let help = match (*name, kind) {
                ("timeout", StepKind::Gate) => "write it inside `await`, or add `run: handler`".into(),
                (_, StepKind::Gate) if kinds.contains(&StepKind::Worker) => {
                    "add `run: handler` to make it a worker step".into()
                }
                _ => format!("it belongs to {}", homes(kinds)),
            };
            fields.refuse(draft, name, &format!("`{name}` does not go with {here}"), &help);
        }
    }
}

fn homes(kinds: &[StepKind]) -> &'static str {
    match kinds {
        [StepKind::Worker] => "a worker step (`run: handler`)",
        [StepKind::Group] => "a group (`steps: {…}`)",
        [StepKind::Child] => "a child (`flow: name`)",
        _ => "a worker step (`run`), a group (`steps`) or a child (`flow`)",
    }
}

fn action(draft: &mut Draft<'_>, fields: &mut Fields<'_>, id: StepId, kind: StepKind) -> Option<Action> {
    match kind {
        StepKind::Worker => Some(Action::Worker(worker(draft, fields, id))),
        StepKind::Gate => Some(Action::Gate),
        StepKind::Inline => {
            let doing = || template(ReadContext::doing(id));
            let set = fields.take(draft, "set", doing()).map(Action::Set);
            let fail = fields.take(draft, "fail", doing()).map(Action::Fail);
            let end = fields.take(draft, "return", doing()).map(Action::Return);
            set.or(fail).or(end)
        }
        StepKind::Child => {
            let detached = fields.take(draft, "detached", boolean).unwrap_or(false);
            fields.take(draft, "flow", name).map(|flow| Action::Child { flow, detached })
        }
        StepKind::Group => {
            // Set before the inner steps are read, because they see the rounds.
            draft.steps[id.0 as usize].repeats = fields.has("repeat");
            let scope =
                fields.take(draft, "steps", |draft, path, node| parse::scope(draft, path, node, Some(id), None))?;
            let output = fields.take(draft, "output", template(ReadContext::ended(Some(id), scope)));
            draft.scopes[scope.0 as usize].output = output;
            let repeat = fields.take(draft, "repeat", |draft, path, node| policy::repeat(draft, path, node, id, scope));
            draft.steps[id.0 as usize].step.repeat = repeat;
            Some(Action::Group(scope))
        }
    }
}

fn worker(draft: &mut Draft<'_>, fields: &mut Fields<'_>, id: StepId) -> Worker {
    let mut handler = fields.take(draft, "run", word);
    if let Some(word) = fields.take(draft, "worker", word) {
        let canonical = fields.canonical_mut();
        canonical.remove("worker");
        canonical.insert("run".into(), word.as_str().into());
        handler = Some(word);
    }
    if let Some(events) = fields.take(draft, "emits", emits) {
        if fields.has("spread") {
            let help = "make its items a group with a step that emits, or emit in a step after it";
            fields.refuse(
                draft,
                "emits",
                "`emits` does not go with `spread`: every item would emit the same event",
                help,
            );
        }
        draft.steps[id.0 as usize].emits = events;
    }
    Worker {
        handler: handler.unwrap_or_else(|| draft.step(id).name.clone()),
        queue: fields.take(draft, "queue", name),
        limits: limits(draft, fields, ReadContext::doing(id)),
        retry: fields.take(draft, "retry", retry).unwrap_or_default(),
        timeout_ms: fields.take(draft, "timeout", timeout),
        start_timeout_ms: fields.take(draft, "start_timeout", timeout),
        priority: priority(draft, fields),
        requires: requires(draft, fields),
        key: fields.take(draft, "key", expr(ReadContext::doing(id))),
    }
}

pub(super) fn limits(draft: &mut Draft<'_>, fields: &mut Fields<'_>, view: ReadContext) -> Vec<LimitUse> {
    let limits = list("a list of limits such as [stripe, {tenant: \"${input.tenant}\"}]", limit(view));
    fields.take(draft, "limits", limits).unwrap_or_default()
}

pub(super) fn priority(draft: &mut Draft<'_>, fields: &mut Fields<'_>) -> i32 {
    let priority = fields.take(draft, "priority", whole(i32::MIN.into(), i32::MAX.into()));
    priority.and_then(|priority| i32::try_from(priority).ok()).unwrap_or(0)
}

pub(super) fn requires(draft: &mut Draft<'_>, fields: &mut Fields<'_>) -> Vec<String> {
    fields.take(draft, "requires", list("a list of labels such as [gpu]", word)).unwrap_or_default()
}

/// `stripe`, `{tenant: "${input.tenant}"}`
fn limit(view: ReadContext) -> impl Fn(&mut Draft<'_>, &str, &SourceNode) -> Out<LimitUse> {
    move |draft, path, node| match &node.value {
        NodeValue::Map(entries) if entries.len() == 1 => {
            let (key, node) = &entries[0];
            let path = join(path, &key.text);
            let fits = check_name(draft, &path, key.at, &key.text);
            let (template, canonical) = template(view)(draft, &path, node)?;
            let limit = LimitUse { name: key.text.clone(), key: Some(template) };
            fits.then(|| (limit, serde_json::json!({ key.text.as_str(): canonical })))
        }
        NodeValue::String(_) => {
            name(draft, path, node).map(|(name, canonical)| (LimitUse { name, key: None }, canonical))
        }
        _ => {
            draft.expected(path, node, "the name of a limit, or a map of one name to its key");
            None
        }
    }
}

/// `[paid]`, `[{paid: schema}]` or `{paid: schema}`; the last is canonical.
fn emits(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Vec<DraftEmit>> {
    let mut found: Vec<(&str, super::problem::Place, Option<&SourceNode>, String)> = Vec::new();
    match &node.value {
        NodeValue::Map(entries) => {
            found.extend(
                entries.iter().map(|(key, node)| (key.text.as_str(), key.at, Some(node), join(path, &key.text))),
            );
        }
        NodeValue::List(items) => {
            for (at, item) in items.iter().enumerate() {
                let path = format!("{path}[{at}]");
                match &item.value {
                    NodeValue::String(name) => found.push((name, item.at, None, path)),
                    NodeValue::Map(entries) if entries.len() == 1 => {
                        found.push((&entries[0].0.text, entries[0].0.at, Some(&entries[0].1), path));
                    }
                    _ => draft.expected(&path, item, "the name of an event, or a map of one name to its JSON Schema"),
                }
            }
        }
        _ => {
            draft.expected(path, node, "a list of events such as [paid], or a map of their JSON Schemas");
            return None;
        }
    }
    let mut canonical = serde_json::Map::new();
    let mut events = Vec::new();
    for (name, at, node, path) in found {
        if !check_name(draft, &path, at, name) {
            continue;
        }
        let given = node.filter(|node| node.value != NodeValue::Null);
        let schema = given.and_then(|node| schema(draft, &path, node)).map(|(schema, _)| schema);
        if canonical.insert(name.to_owned(), schema.clone().unwrap_or(Value::Null)).is_some() {
            draft.problem(&path, at, format!("the event `{name}` is listed twice"));
            continue;
        }
        events.push(DraftEmit { name: name.to_owned(), schema, at, path });
    }
    Some((events, Value::Object(canonical)))
}

/// `after` and `subscribes`, and the `join` of both.
fn arms(draft: &mut Draft<'_>, fields: &mut Fields<'_>, id: StepId) {
    let after = fields.take(draft, "after", list("a list of steps such as [load]", |d, p, n| arm(d, p, n, false)));
    let events =
        fields.take(draft, "subscribes", list("a list of events such as [order.paid]", |d, p, n| arm(d, p, n, true)));
    let written = ["after", "subscribes"].map(|name| {
        fields.canonical_mut().retain(|key, value| key != name || value.as_array().is_none_or(|list| !list.is_empty()));
        fields.get(name).map_or(0, |node| if let NodeValue::List(items) = &node.value { items.len() } else { 1 })
    });
    let count = written[0] + written[1];
    let arms: Vec<_> = after.into_iter().chain(events).flatten().collect();
    if count > MAX_ARMS {
        let message = format!("the step has {count} arms, at most {MAX_ARMS} are allowed");
        draft.problem(&fields.path.clone(), fields.at, message);
    }
    let join = fields.take(draft, "join", |draft, path, node| policy::join(draft, path, node, count, &arms));
    let step = &mut draft.steps[id.0 as usize];
    step.blind = arms.len() != count || count > MAX_ARMS;
    // Too many arms are not compared with each other.
    step.arms = if count > MAX_ARMS { Vec::new() } else { arms };
    if let Some(join) = join {
        step.step.join = join;
    }
}

/// `load`, `step:load`, `failed:load`, `ended:load`; without a prefix, a step in `after` and an event in `subscribes`.
fn arm(draft: &mut Draft<'_>, path: &str, node: &SourceNode, subscribes: bool) -> Out<DraftArm> {
    let (written, canonical) = text(draft, path, node)?;
    let (prefix, name) = written.split_once(':').map_or(("", written.as_str()), |(prefix, name)| (prefix, name));
    let wants = match prefix {
        "" if written.starts_with(':') => None,
        "" if subscribes => Some(Wants::Event(name.to_owned())),
        "" | "step" => Some(Wants::Step(name.to_owned(), When::Completed)),
        "failed" => Some(Wants::Step(name.to_owned(), When::Failed)),
        "ended" => Some(Wants::Step(name.to_owned(), When::Ended)),
        _ => None,
    };
    let Some(wants) = wants else {
        let help = "use `step:`, `failed:` or `ended:` before the name of a step";
        draft.problem_with(path, node.at, format!("unknown prefix `{}:`", shorten(prefix)), help);
        return None;
    };
    let arm = DraftArm { wants, at: node.at, path: path.to_owned(), written: written.clone() };
    Some((arm, canonical))
}
