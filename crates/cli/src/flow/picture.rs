//! What a picture of a flow shows, whatever it is drawn with: steps by level, what each does, what it waits for.

use eddyline_machine::{
    Action, Body, Flow, Graph, Join, LimitUse, OnTimeout, ScopeId, Since, Source, Step, Test, Waits, When, Worker,
};
use eddyline_protocol::Span;
use serde_json::Value;

#[derive(Debug)]
pub struct Picture {
    pub title: String,
    pub nodes: Vec<Node>,
    pub finally: Vec<Node>,
    /// A code flow's steps are known only when it runs.
    pub code: bool,
}

#[derive(Debug)]
pub struct Node {
    pub name: String,
    pub level: u32,
    pub edges: Vec<Edge>,
    /// How its arms come together, where that is not `all`.
    pub join: Option<String>,
    /// What it does, one thing a line.
    pub says: Vec<String>,
    /// Short marks behind its name: it is spread, repeated, gated, conditional, undone.
    pub marks: String,
    pub inner: Vec<Node>,
}

#[derive(Debug)]
pub struct Edge {
    /// The steps it comes from; several may emit one event.
    pub from: Vec<String>,
    /// Said where it is more than `after`.
    pub label: Option<String>,
}

impl Edge {
    pub fn text(&self) -> String {
        match &self.label {
            None => self.from.join(", "),
            Some(label) if label.starts_with("event ") => format!("{label} of {}", self.from.join(", ")),
            Some(label) => format!("{label} {}", self.from.join(", ")),
        }
    }
}

pub fn picture(flow: &Flow) -> Picture {
    let title = format!("{} {}", flow.name, flow.version);
    let Body::Graph(graph) = &flow.body else {
        return Picture { title, nodes: Vec::new(), finally: Vec::new(), code: true };
    };
    let finally = graph.finally.as_ref();
    let finally = finally.map(|finally| nodes(graph, finally.scope, &flow.canonical["finally"]["steps"]));
    Picture {
        title,
        nodes: nodes(graph, Graph::ROOT, &flow.canonical["steps"]),
        finally: finally.unwrap_or_default(),
        code: false,
    }
}

/// `written` is the same steps in the canonical definition, where expressions are text.
fn nodes(graph: &Graph, scope: ScopeId, written: &Value) -> Vec<Node> {
    let steps = graph.scope(scope).steps.iter().map(|id| graph.step(*id));
    let mut nodes: Vec<Node> = steps.map(|step| node(graph, step, &written[&step.name])).collect();
    nodes.sort_by_key(|node| node.level);
    nodes
}

fn node(graph: &Graph, step: &Step, written: &Value) -> Node {
    let inner = match step.action {
        Action::Group(scope) => nodes(graph, scope, &written["steps"]),
        _ => Vec::new(),
    };
    Node {
        name: step.name.clone(),
        level: step.level,
        edges: step.arms.iter().map(|arm| edge(graph, step, arm.source)).collect(),
        join: join(step.join),
        says: says(graph, step, written),
        marks: marks(step),
        inner,
    }
}

fn edge(graph: &Graph, step: &Step, source: Source) -> Edge {
    let name = |id| graph.step(id).name.clone();
    match source {
        Source::Step(from, when) => Edge {
            from: vec![name(from)],
            label: match when {
                When::Completed => None,
                When::Failed => Some("failed".to_owned()),
                When::Ended => Some("ended".to_owned()),
            },
        },
        Source::Event(at) => {
            let event = &graph.scope(step.scope).events[at];
            Edge {
                from: event.producers.iter().map(|(from, _)| name(*from)).collect(),
                label: Some(format!("event {}", event.name)),
            }
        }
    }
}

fn join(join: Join) -> Option<String> {
    match join {
        Join::All => None,
        Join::Any => Some("any of them".to_owned()),
        Join::Some => Some("some of them".to_owned()),
        Join::AtLeast { n, cancel_rest: false } => Some(format!("at least {n} of them")),
        Join::AtLeast { n, cancel_rest: true } => Some(format!("at least {n} of them, the rest is cancelled")),
    }
}

fn marks(step: &Step) -> String {
    let all = [
        (step.condition.is_some(), "?"),
        (step.gate.is_some(), "⏸"),
        (step.spread.is_some(), "⇶"),
        (step.repeat.is_some(), "↻"),
        (step.undo.is_some(), "↩"),
    ];
    all.iter().filter(|(has, _)| *has).map(|(_, mark)| *mark).collect::<Vec<_>>().join(" ")
}

fn says(graph: &Graph, step: &Step, written: &Value) -> Vec<String> {
    let mut says = Vec::new();
    if step.condition.is_some() {
        says.push(format!("if {}", text(&written["if"])));
    }
    if let Some(gate) = &step.gate {
        says.push(gate_text(&gate.waits, &written["await"]));
        if let Some(ms) = gate.timeout_ms {
            let then = match gate.on_timeout {
                OnTimeout::Fail => "fails",
                OnTimeout::Continue => "goes on",
                OnTimeout::Skip => "is skipped",
            };
            says.push(format!("  {then} after {}", time(ms)));
        }
    }
    if let Some(spread) = &step.spread {
        let mut each = format!("for each {} of {}", spread.item, text(&written["spread"]));
        if written.get("max_parallel").is_some() {
            each.push_str(&format!(", {} at once", spread.max_parallel));
        }
        says.push(each);
        match (spread.collect, spread.max_failures) {
            (true, None) => says.push("  failures are collected".to_owned()),
            (true, Some(most)) => says.push(format!("  failures are collected, {most} at most")),
            (false, _) => {}
        }
    }
    if let Some(repeat) = &step.repeat {
        let (word, field) = match repeat.test {
            Test::While(_) => ("while", "while"),
            Test::Until(_) => ("until", "until"),
        };
        says.push(format!("{word} {}, at most {} rounds", text(&written["repeat"][field]), repeat.max));
    }
    says.extend(action_text(step, written));
    if let Action::Worker(worker) = &step.action {
        says.extend(conditions(worker, written).into_iter().map(|line| format!("  {line}")));
    }
    if !step.emits.is_empty() {
        let events = &graph.scope(step.scope).events;
        let names: Vec<&str> = step.emits.iter().map(|at| events[*at].name.as_str()).collect();
        says.push(format!("emits {}", names.join(", ")));
    }
    if let Some(undo) = &step.undo {
        says.push(format!("undone by {undo}"));
    }
    says
}

fn action_text(step: &Step, written: &Value) -> Option<String> {
    Some(match &step.action {
        Action::Worker(worker) => {
            let mut parts = vec![format!("run {}", worker.handler)];
            let queue = worker.queue_or(None);
            if queue != "default" {
                parts.push(format!("on {queue}"));
            }
            match (written.get("retry").is_some(), worker.retry.attempts) {
                (true, Some(1)) => parts.push("once".to_owned()),
                (true, Some(attempts)) => parts.push(format!("{attempts} attempts")),
                (true, None) => parts.push("attempts without end".to_owned()),
                (false, _) => {}
            }
            if let Some(ms) = worker.timeout_ms {
                parts.push(format!("within {}", time(ms)));
            }
            parts.join(", ")
        }
        Action::Set(_) => format!("set {}", text(&written["set"])),
        Action::Fail(_) => format!("fail {}", text(&written["fail"])),
        Action::Return(_) => format!("return {}", text(&written["return"])),
        Action::Child { flow, detached: false } => format!("flow {flow}"),
        Action::Child { flow, detached: true } => format!("flow {flow}, not waited for"),
        Action::Group(_) | Action::Gate => return None,
    })
}

/// What has to be so for a worker to begin, beyond that it takes from the queue.
fn conditions(worker: &Worker, written: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    if !worker.limits.is_empty() {
        let limit = |(used, written): (&LimitUse, &Value)| match used.key {
            None => used.name.clone(),
            Some(_) => format!("{} of {}", used.name, text(&written[&used.name])),
        };
        let limits = written["limits"].as_array().into_iter().flatten();
        let limits: Vec<String> = worker.limits.iter().zip(limits).map(limit).collect();
        lines.push(format!("within limits {}", limits.join(", ")));
    }
    if !worker.requires.is_empty() {
        lines.push(format!("requires {}", worker.requires.join(", ")));
    }
    if let Some(ms) = worker.start_timeout_ms {
        lines.push(format!("taken within {}", time(ms)));
    }
    if worker.priority != 0 {
        lines.push(format!("priority {}", worker.priority));
    }
    if worker.key.is_some() {
        lines.push(format!("in turns by {}", text(&written["key"])));
    }
    lines
}

fn gate_text(waits: &Waits, written: &Value) -> String {
    let since = |since: &Since| match since {
        Since::Run => String::new(),
        Since::Ago { ms } => format!(", since {} before", time(*ms)),
    };
    match waits {
        Waits::Time { ms } => format!("wait {}", time(*ms)),
        Waits::Until(_) => format!("wait until {}", text(&written["until"])),
        Waits::Webhook => "wait for a webhook".to_owned(),
        Waits::Manual => "wait for a person".to_owned(),
        Waits::Event { name, key: None, since: from } => format!("wait for event {name}{}", since(from)),
        Waits::Event { name, key: Some(_), since: from } => {
            format!("wait for event {name} with key {}{}", text(&written["key"]), since(from))
        }
    }
}

fn time(ms: impl TryInto<u64>) -> Span {
    Span::from_ms(ms.try_into().unwrap_or_default())
}

/// An expression or a template, short enough for a picture.
fn text(written: &Value) -> String {
    const LONGEST: usize = 48;
    let text = written.as_str().map_or_else(|| written.to_string(), str::to_owned);
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST - 1).chain(['…']).collect()
}
