//! Reads the nested maps of a step: `retry`, `join`, `await`, `spread`, `repeat`, `undo`.

use super::draft::{Draft, DraftArm, GateKind, ReadContext, Wants};
use super::fields::{Fields, Out, choice, duration, expr, list, name, real, template, timeout, whole, word};
use super::problem::Problem;
use super::source::{NodeValue, SourceNode, shorten};
use super::{DEFAULT_PARALLEL, MAX_PARALLEL, MAX_ROUNDS};
use crate::flow::{Gate, Join, OnTimeout, Repeat, Retry, Since, Spread, Test, Waits};
use crate::ids::{ScopeId, StepId};
use crate::time::span;

pub(super) fn retry(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Retry> {
    let known = ["attempts", "initial", "factor", "max", "jitter", "non_retryable"];
    let mut fields = Fields::open(draft, path, node, "a retry policy such as {attempts: 3}", &known)?;
    let usual = Retry::default();
    let attempts = fields.take(draft, "attempts", attempts).unwrap_or(usual.attempts);
    let initial_ms = fields.take(draft, "initial", duration).unwrap_or(usual.initial_ms);
    let max_ms = fields.take(draft, "max", duration);
    if let (Some(max), Some(key)) = (max_ms, fields.key("max"))
        && max < initial_ms
    {
        let message = format!("the longest back-off, {}, is shorter than the first, {}", span(max), span(initial_ms));
        draft.problem(&fields.path_of("max"), key.at, message);
    }
    let retry = Retry {
        attempts,
        initial_ms,
        factor: fields.take(draft, "factor", real(1.0, 1_000.0)).unwrap_or(usual.factor),
        max_ms: max_ms.unwrap_or(usual.max_ms.max(initial_ms)),
        jitter: fields.take(draft, "jitter", jitter).unwrap_or(usual.jitter),
        non_retryable: fields
            .take(draft, "non_retryable", list("a list of kinds of error such as [BadInput]", word))
            .unwrap_or_default(),
    };
    Some((retry, fields.canonical()))
}

/// The total number of attempts; -1 is unlimited.
fn attempts(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Option<u32>> {
    let found = if let NodeValue::Number(number) = &node.value { number.as_i64() } else { None };
    match (found, found.and_then(|number| u32::try_from(number).ok())) {
        (Some(-1), _) => Some((None, (-1).into())),
        (_, Some(number @ 1..)) => Some((Some(number), number.into())),
        _ => {
            draft.expected(path, node, "the number of attempts: 1 or more, or -1 for unlimited");
            None
        }
    }
}

fn jitter(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<f64> {
    match node.value {
        NodeValue::Bool(on) => {
            let part = if on { 0.5 } else { 0.0 };
            Some((part, part.into()))
        }
        NodeValue::Number(_) => real(0.0, 1.0)(draft, path, node),
        _ => {
            draft.expected(path, node, "a fraction from 0 to 1, or `true` for 0.5");
            None
        }
    }
}

/// `written` counts the arms, including those that failed to parse.
pub(super) fn join(
    draft: &mut Draft<'_>,
    path: &str,
    node: &SourceNode,
    written: usize,
    arms: &[DraftArm],
) -> Out<Join> {
    // `all` is the default.
    let is_all = matches!(&node.value, NodeValue::String(word) if word == "all");
    if written == 0 && !is_all {
        let help = "add `after` or `subscribes`, or remove `join`";
        draft.problem_with(path, node.at, "`join` needs something to join", help);
        return None;
    }
    let known = [("all", Join::All), ("any", Join::Any), ("some", Join::Some)];
    match &node.value {
        NodeValue::Map(_) => {}
        NodeValue::String(word) if known.iter().any(|(name, _)| name == word) => {
            return choice(&known)(draft, path, node);
        }
        _ => {
            draft.expected(path, node, "`all`, `any`, `some` or {at_least: n, rest: keep|cancel}");
            return None;
        }
    }
    let mut fields = Fields::open(draft, path, node, "", &["at_least", "rest"])?;
    fields.require(draft, "at_least", "how many arms must be live");
    let most = i64::try_from(written).unwrap_or(i64::MAX);
    let n = fields.take(draft, "at_least", |draft, path, node| match &node.value {
        NodeValue::Number(number) if number.as_i64().is_some_and(|n| n > most) => {
            draft.problem(
                path,
                node.at,
                format!("expected at most {most}, the number of the step's arms, found {number}"),
            );
            None
        }
        _ => whole(1, most)(draft, path, node),
    });
    let cancel_rest = fields.take(draft, "rest", choice(&[("keep", false), ("cancel", true)])).unwrap_or(false);
    if let Some(event) = arms.iter().find(|arm| cancel_rest && matches!(arm.wants, Wants::Event(_))) {
        let why = format!("`rest: cancel` cancels steps, but `{}` is an event", shorten(&event.written));
        fields.refuse(draft, "rest", &why, "wait for the steps that emit it, or use `rest: keep`");
    }
    let n = u32::try_from(n?).ok()?;
    Some((Join::AtLeast { n, cancel_rest }, fields.canonical()))
}

const WAITS: [&str; 5] = ["time", "until", "webhook", "event", "manual"];

pub(super) fn gate(draft: &mut Draft<'_>, path: &str, node: &SourceNode, id: StepId) -> Out<Gate> {
    draft.steps[id.0 as usize].gate = Some(GateKind::Other);
    let known = [WAITS.as_slice(), &["key", "since", "timeout", "on_timeout"]].concat();
    let mut fields = Fields::open(draft, path, node, "what to wait for, such as {time: 30s}", &known)?;
    if fields.has("webhook") || fields.has("manual") {
        draft.steps[id.0 as usize].gate = Some(GateKind::Url);
    }
    let present: Vec<_> = WAITS.into_iter().filter(|name| fields.has(name)).collect();
    match present.as_slice() {
        [] => draft.problem(
            path,
            node.at,
            format!("expected one of {}", WAITS.map(|name| format!("`{name}`")).join(", ")),
        ),
        [_] => {}
        [first, second, ..] => {
            let why = format!("a gate waits for one thing, found both `{first}` and `{second}`");
            fields.refuse(draft, second, &why, "move one of them to its own step");
        }
    }
    if !fields.has("event") {
        for name in ["key", "since"] {
            fields.refuse(draft, name, &format!("`{name}` goes with `event` only"), "leave it out");
        }
    }
    if fields.has("time") || fields.has("until") {
        for name in ["timeout", "on_timeout"] {
            let why = format!("`{name}` does not go with a gate on time, which opens by itself");
            fields.refuse(draft, name, &why, "leave it out");
        }
    }
    let waits = waits(draft, &mut fields, id);
    let timeout_ms = fields.take(draft, "timeout", timeout);
    let choices = [("fail", OnTimeout::Fail), ("continue", OnTimeout::Continue), ("skip", OnTimeout::Skip)];
    let on_timeout = fields.take(draft, "on_timeout", choice(&choices)).unwrap_or(OnTimeout::Fail);
    if let (Some(key), false) = (fields.key("on_timeout"), fields.has("timeout")) {
        let message = "`on_timeout` without a `timeout` has no effect";
        draft.warnings.push(Problem::new(&fields.path_of("on_timeout"), key.at, message));
    }
    Some((Gate { waits: waits?, timeout_ms, on_timeout }, fields.canonical()))
}

fn waits(draft: &mut Draft<'_>, fields: &mut Fields<'_>, id: StepId) -> Option<Waits> {
    let deciding = || expr(ReadContext::deciding(id));
    let time = fields.take(draft, "time", duration).map(|ms| Waits::Time { ms });
    let until = fields.take(draft, "until", deciding()).map(Waits::Until);
    let webhook = fields.take(draft, "webhook", set).map(|()| Waits::Webhook);
    let manual = fields.take(draft, "manual", set).map(|()| Waits::Manual);
    let key = fields.take(draft, "key", deciding());
    let since = fields.take(draft, "since", since).unwrap_or(Since::Run);
    let event = fields.take(draft, "event", name).map(|name| Waits::Event { name, key, since });
    time.or(until).or(webhook).or(manual).or(event)
}

/// `true`; `false` would mean nothing.
fn set(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<()> {
    if node.value == NodeValue::Bool(true) {
        return Some(((), true.into()));
    }
    draft.expected(path, node, "`true`");
    None
}

fn since(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<Since> {
    match &node.value {
        NodeValue::String(text) if text == "run" => Some((Since::Run, "run".into())),
        _ => duration(draft, path, node).map(|(ms, canonical)| (Since::Ago { ms }, canonical)),
    }
}

/// Reserved names that `as` cannot use.
const TAKEN: [&str; 9] = ["input", "events", "steps", "state", "round", "gate", "gates", "run", "index"];

pub(super) fn spread(draft: &mut Draft<'_>, fields: &mut Fields<'_>, id: StepId) -> Option<Spread> {
    if !fields.has("spread") {
        for name in ["as", "max_parallel", "on_item_failure", "max_failures"] {
            fields.refuse(draft, name, &format!("`{name}` goes with `spread` only"), "add `spread`, or leave it out");
        }
        return None;
    }
    let item = fields.take(draft, "as", item_name).unwrap_or_else(|| "item".into());
    draft.steps[id.0 as usize].item = Some(item.clone());
    let list = fields.take(draft, "spread", expr(ReadContext::opened(id)));
    let count = |draft: &mut Draft<'_>, fields: &mut Fields<'_>, name: &str, min: i64, max: u32| {
        fields.take(draft, name, whole(min, max.into())).and_then(|number| u32::try_from(number).ok())
    };
    let max_parallel = count(draft, fields, "max_parallel", 1, MAX_PARALLEL).unwrap_or(DEFAULT_PARALLEL);
    let collect = fields.take(draft, "on_item_failure", choice(&[("fail", false), ("collect", true)])).unwrap_or(false);
    let max_failures = count(draft, fields, "max_failures", 0, u32::MAX);
    if !collect {
        let help = "add `on_item_failure: collect`; without it the first failure fails the step";
        fields.refuse(draft, "max_failures", "`max_failures` goes with `on_item_failure: collect`", help);
    }
    Some(Spread { list: list?, item, max_parallel, collect, max_failures })
}

fn item_name(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<String> {
    let (name, canonical) = super::fields::text(draft, path, node)?;
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    let identifier = name.starts_with(letter) && name.chars().all(|c| letter(c) || c.is_ascii_digit());
    let reserved = ["true", "false", "null", "in"].contains(&name.as_str());
    if TAKEN.contains(&name.as_str()) || reserved {
        draft.problem(path, node.at, format!("`{name}` means something else in expressions; choose another name"));
    } else if !identifier || name.len() > super::MAX_NAME_CHARS {
        draft.expected(
            path,
            node,
            "a name for use in expressions: letters, digits and `_`, not beginning with a digit",
        );
    } else {
        return Some((name, canonical));
    }
    None
}

pub(super) fn repeat(draft: &mut Draft<'_>, path: &str, node: &SourceNode, id: StepId, scope: ScopeId) -> Out<Repeat> {
    let known = ["while", "until", "max", "state", "next"];
    let mut fields = Fields::open(draft, path, node, "a map such as {until: expression, max: 10}", &known)?;
    fields.require(draft, "max", "the maximum number of rounds");
    match (fields.has("while"), fields.has("until")) {
        (true, true) => {
            let why = "`while` and `until` exclude each other";
            fields.refuse(draft, "until", why, "`while` is tested before a round, `until` after it; keep one");
        }
        (false, false) => {
            let help = "`while` is tested before a round, `until` after it";
            draft.problem_with(path, node.at, "expected `while` or `until`", help);
        }
        _ => {}
    }
    let ended = ReadContext::ended(Some(id), scope);
    let before = fields.take(draft, "while", expr(ReadContext::round(id))).map(Test::While);
    let after = fields.take(draft, "until", expr(ended)).map(Test::Until);
    let max = fields.take(draft, "max", whole(1, MAX_ROUNDS.into())).and_then(|max| u32::try_from(max).ok());
    let state = fields.take(draft, "state", template(ReadContext::doing(id)));
    let next = fields.take(draft, "next", template(ended));
    Some((Repeat { test: before.or(after)?, max: max?, state, next }, fields.canonical()))
}

/// `{run: handler}`
pub(super) fn undo(draft: &mut Draft<'_>, path: &str, node: &SourceNode) -> Out<String> {
    let mut fields = Fields::open(draft, path, node, "a map such as {run: handler}", &["run"])?;
    fields.require(draft, "run", "the handler that undoes the step");
    let handler = fields.take(draft, "run", word)?;
    Some((handler, fields.canonical()))
}
