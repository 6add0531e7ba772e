//! Parses the tree into a flow: the top level, scopes, and the two kinds of body.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::draft::{Draft, DraftScope, ReadContext};
use super::fields::{Fields, Out, boolean, check_name, choice, duration, list, name, template, text, timeout};
use super::policy::retry;
use super::problem::{Place, Problem, Problems};
use super::schema::{CheckSchema, schema};
use super::source::{Key, NodeValue, SourceNode, join};
use super::{MAX_GROUP_DEPTH, MAX_PROBLEMS, MAX_STEPS, Parsed, canonical, reads, resolve, step};
use crate::flow::{Body, Builds, CodeFlow, DEFAULT_QUEUE, Finally, Flow, Graph};
use crate::ids::{ScopeId, StepId};
use crate::nearest::did_you_mean;

/// `asked` is the name the flow was sent under, if any.
pub(super) fn flow(
    asked: Option<&str>,
    source: &str,
    schemas: CheckSchema<'_>,
    root: &SourceNode,
) -> Result<Parsed, Problems> {
    let mut draft = Draft::new(source, schemas);
    root.doubled("", &mut |problem| draft.problems.push(problem));
    let read = read(&mut draft, asked, root);
    let Draft { mut problems, mut warnings, .. } = draft;
    if let (Some(mut parsed), []) = (read, problems.as_slice()) {
        sort(&mut warnings);
        if warnings.len() > MAX_PROBLEMS {
            warnings.truncate(MAX_PROBLEMS);
            warnings.push(Problem::new("", Place::START, "there are more warnings; fix these to see them"));
        }
        parsed.warnings = warnings;
        return Ok(parsed);
    }
    sort(&mut problems);
    if problems.len() >= MAX_PROBLEMS {
        problems.truncate(MAX_PROBLEMS);
        problems.push(Problem::new("", Place::START, "there are more problems; fix these to see them"));
    }
    Err(Problems(problems))
}

fn sort(problems: &mut [Problem]) {
    problems.sort_by(|a, b| (a.line, a.column, &a.path).cmp(&(b.line, b.column, &b.path)));
}

const ANY: [&str; 5] = ["name", "description", "code", "input_schema", "output_schema"];
const GRAPH: [&str; 5] = ["steps", "output", "finally", "fail_fast", "entry"];
const CODE: [&str; 9] =
    ["queue", "limits", "priority", "requires", "retry", "step_retry", "timeout", "cancel_grace", "builds"];

fn read(draft: &mut Draft<'_>, asked: Option<&str>, root: &SourceNode) -> Option<Parsed> {
    let known = [ANY.as_slice(), &GRAPH, &CODE].concat();
    let mut fields = Fields::open(draft, "", root, "a map with `name` and `steps`", &known)?;
    let names_itself = fields.has("name");
    let name = flow_name(draft, asked, &mut fields);
    fields.take(draft, "description", text);
    fields.canonical_mut().remove("description");
    let input_schema = fields.take(draft, "input_schema", schema);
    let output_schema = fields.take(draft, "output_schema", schema);
    let body = if fields.take(draft, "code", boolean) == Some(true) {
        for name in GRAPH {
            let help = "a flow is either steps or, with `code: true`, a function on a worker";
            fields.refuse(draft, name, &format!("`{name}` does not go with `code: true`"), help);
        }
        Body::Code(code(draft, &mut fields))
    } else {
        fields.canonical_mut().remove("code");
        for name in CODE {
            let help = "set it on the steps it applies to, or add `code: true` if the flow is a function on a worker";
            fields.refuse(draft, name, &format!("`{name}` does not go with a flow of steps"), help);
        }
        Body::Graph(graph(draft, &mut fields)?)
    };
    let (canonical, version) = canonical::seal(std::mem::take(fields.canonical_mut()));
    let flow = Flow { name, version, input_schema, output_schema, body, canonical };
    Some(Parsed { flow, warnings: Vec::new(), names_itself })
}

fn flow_name(draft: &mut Draft<'_>, asked: Option<&str>, fields: &mut Fields<'_>) -> String {
    let own = fields.take(draft, "name", name);
    let at = fields.get("name").map_or(fields.at, |node| node.at);
    match (own, asked) {
        (Some(own), Some(asked)) if own != asked => {
            draft.problem("name", at, format!("the definition is named `{own}`, but it was sent as `{asked}`"));
            own
        }
        (Some(own), _) => own,
        (None, Some(asked)) => {
            if !fields.has("name") {
                check_name(draft, "name", at, asked);
            }
            fields.canonical_mut().insert("name".into(), asked.into());
            asked.to_owned()
        }
        (None, None) => {
            fields.require(draft, "name", "a flow needs a name");
            String::new()
        }
    }
}

fn code(draft: &mut Draft<'_>, fields: &mut Fields<'_>) -> CodeFlow {
    let code = CodeFlow {
        queue: fields.take(draft, "queue", name).unwrap_or_else(|| DEFAULT_QUEUE.into()),
        limits: step::limits(draft, fields, ReadContext::start()),
        priority: step::priority(draft, fields),
        requires: step::requires(draft, fields),
        retry: fields.take(draft, "retry", retry).unwrap_or_default(),
        step_retry: fields.take(draft, "step_retry", retry).unwrap_or_default(),
        timeout_ms: fields.take(draft, "timeout", timeout),
        cancel_grace_ms: fields.take(draft, "cancel_grace", duration),
        builds: fields
            .take(draft, "builds", choice(&[("latest", Builds::Latest), ("pinned", Builds::Pinned)]))
            .unwrap_or(Builds::Latest),
    };
    reads::check(draft);
    code
}

fn graph(draft: &mut Draft<'_>, fields: &mut Fields<'_>) -> Option<Graph> {
    fields.require(draft, "steps", "a flow needs at least one step");
    let root = fields.take(draft, "steps", |draft, path, node| scope(draft, path, node, None, None));
    let finally = fields.take(draft, "finally", finally);
    let root = root?;
    let output = fields.take(draft, "output", template(ReadContext::ended(None, root)));
    draft.scopes[root.0 as usize].output = output;
    let fail_fast = fields.take(draft, "fail_fast", boolean).unwrap_or(false);
    entry(draft, fields, root);
    Some(resolve::graph(draft, finally, fail_fast))
}

fn finally(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Finally> {
    let mut fields = Fields::open(draft, path, node, "a map with `steps`", &["steps", "timeout"])?;
    fields.require(draft, "steps", "they run before the run ends");
    let timeout_ms = fields.take(draft, "timeout", timeout);
    let scope = fields.take(draft, "steps", |draft, path, node| scope(draft, path, node, None, Some(Graph::ROOT)))?;
    Some((Finally { scope, timeout_ms }, fields.canonical()))
}

/// Reads a scope. Steps are numbered in the order of their names, so that the same version has the same numbers,
/// however the definition is written.
pub(super) fn scope(
    draft: &mut Draft<'_>,
    path: &str,
    node: &SourceNode,
    owner: Option<StepId>,
    outer: Option<ScopeId>,
) -> Out<ScopeId> {
    let NodeValue::Map(entries) = &node.value else {
        draft.expected(path, node, "a map of steps by name");
        return None;
    };
    if entries.is_empty() {
        draft.problem(path, node.at, "expected at least one step");
        return None;
    }
    let depth = owner.map_or(0, |owner| draft.scope(draft.step(owner).scope).depth + 1);
    if depth > MAX_GROUP_DEPTH {
        draft.problem(path, node.at, format!("groups are nested more than {MAX_GROUP_DEPTH} deep"));
        return None;
    }
    let id = ScopeId(draft.scopes.len() as u32);
    let (steps, events) = (BTreeMap::new(), Vec::new());
    draft.scopes.push(DraftScope { owner, outer, depth, steps, events, output: None });
    let mut sorted = BTreeMap::new();
    for (key, node) in entries {
        sorted.entry(key.text.as_str()).or_insert((key, node));
    }
    let mut canonical = Map::new();
    for (name, (key, node)) in sorted {
        if let Some(step) = add_step(draft, path, id, key, node) {
            canonical.insert(name.to_owned(), step);
        }
    }
    Some((id, Value::Object(canonical)))
}

fn add_step(draft: &mut Draft<'_>, path: &str, scope: ScopeId, key: &Key, node: &SourceNode) -> Option<Value> {
    let path = join(path, &key.text);
    if draft.steps.len() >= MAX_STEPS {
        if !std::mem::replace(&mut draft.overflowed, true) {
            let message = format!("more than {MAX_STEPS} steps in a flow");
            draft.problem_with(
                &path,
                key.at,
                message,
                "move some of them to a flow of their own, started by `flow: name`",
            );
        }
        return None;
    }
    if check_name(draft, &path, key.at, &key.text) {
        if key.text.contains('.') {
            draft.problem(&path, key.at, format!("a step's name cannot contain a dot, found `{}`", key.text));
        }
        if key.text == "finally" {
            draft.problem(&path, key.at, "`finally` is reserved; choose another name");
        }
    }
    let id = draft.add_step(&key.text, scope, key.at, &path);
    draft.scopes[scope.0 as usize].steps.insert(key.text.clone(), id);
    step::read(draft, id, node)
}

/// `entry` is redundant (the steps without arms), but must be correct.
fn entry(draft: &mut Draft<'_>, fields: &mut Fields<'_>, root: ScopeId) {
    let Some(node) = fields.get("entry") else { return };
    let found = match &node.value {
        NodeValue::String(_) => text(draft, "entry", node).map(|(name, _)| vec![name]),
        _ => list("the name of a step, or a list of them", text)(draft, "entry", node).map(|(names, _)| names),
    };
    let Some(names) = found else { return };
    for name in &names {
        let Some(id) = draft.scope(root).steps.get(name) else {
            let help = did_you_mean(name, draft.scope(root).steps.keys().map(String::as_str));
            let problem =
                Problem::new("entry", node.at, format!("there is no step `{}`", super::source::shorten(name)));
            draft.problems.push(Problem { help, ..problem });
            continue;
        };
        if let Some(arm) = draft.steps[id.0 as usize].arms.first() {
            let message = format!("`{name}` is not an entry: it waits for `{}`", arm.written);
            draft.problem("entry", node.at, message);
        }
    }
    for id in draft.scope(root).steps.values().copied().collect::<Vec<_>>() {
        let step = &draft.steps[id.0 as usize];
        if step.arms.is_empty() && !names.contains(&step.step.name) {
            let message = format!(
                "`{}` waits for nothing, so it starts with the run, although `entry` does not list it",
                step.step.name
            );
            draft.warnings.push(Problem::new(&step.path, step.at, message));
        }
    }
}
