//! Describes what a step waits for.

use eddyline_protocol::{RunInfo, StepInfo};
use serde_json::Value;

use crate::screen::{Ink, Line, counted};

/// The error kind of a quarantined run.
const QUARANTINED: &str = "Quarantined";

/// The note next to a step in the tree.
pub fn note(step: &StepInfo) -> Line {
    let tried = step.attempts.len();
    let attempts = if tried > 1 { format!("{tried} attempts") } else { String::new() };
    let (ink, text) = match (step.status.as_str(), &step.error, &step.waits_for) {
        ("failed", Some(error), _) => {
            let message = error.message.lines().next().unwrap_or("");
            (Ink::Bad, format!("{}: {message}", error.kind))
        }
        ("completed" | "failed", _, _) => (Ink::Plain, String::new()),
        ("skipped", _, _) => (Ink::Faint, "skipped".to_owned()),
        ("cancelled", _, _) => (Ink::Faint, "cancelled".to_owned()),
        (_, _, Some(waits)) => (Ink::Faint, briefly(step, waits)),
        _ => (Ink::Plain, String::new()),
    };
    let separator = if attempts.is_empty() || text.is_empty() { "" } else { ", " };
    Line::default().with(Ink::Note, attempts).with(ink, format!("{separator}{text}"))
}

fn briefly(step: &StepInfo, waits: &Value) -> String {
    let text = |field: &str| waits[field].as_str().unwrap_or_default().to_owned();
    match waits["what"].as_str().unwrap_or_default() {
        "arms" => format!("waits for {}", open_arms(waits).collect::<Vec<_>>().join(", ")),
        "gate" => format!("waits {}{}", gate(waits), gate_until(waits)),
        "worker" => match running(step) {
            Some(worker) => format!("on {}", short(worker)),
            None => match (bound(waits), lack(waits)) {
                (Some(bound), _) => format!("waits: {bound}"),
                (None, Some(lack)) => format!("waits: no online worker {lack}"),
                (None, None) => format!("waits for a worker on queue {}", text("queue")),
            },
        },
        "back_off" => match last_error(step) {
            Some(error) => format!("retries{} after {error}", at(waits)),
            None => format!("retries{}", at(waits)),
        },
        "child" => format!("run {}", text("run_id")),
        "inside" => match to_come(step) {
            0 => String::new(),
            more => format!("{more} to come"),
        },
        "last_report" => "waits for its worker's last report".to_owned(),
        "news" => "suspended".to_owned(),
        _ => String::new(),
    }
}

/// The time until which the step waits, if known.
fn at(waits: &Value) -> String {
    waits["until"].as_str().map_or_else(String::new, |until| format!(" at {until}"))
}

/// When a gate times out, unless it is a gate for a time.
fn gate_until(waits: &Value) -> String {
    match (waits["reason"].as_str(), waits["until"].as_str()) {
        (Some("time"), _) | (_, None) => String::new(),
        (_, Some(until)) => format!(" (times out at {until})"),
    }
}

/// The first characters of a worker's id.
fn short(worker: &str) -> &str {
    const SHOWN: usize = 8;
    match worker.len() == 36 && worker.is_ascii() {
        true => &worker[..SHOWN],
        false => worker,
    }
}

/// A sentence for the run and for each step that has not ended, except containers whose items are all open.
pub fn explain(run: &RunInfo, steps: &[StepInfo]) -> Vec<String> {
    let mut sentences = Vec::new();
    if run.completed_at.is_none() && run.error.as_ref().is_some_and(|error| error.kind == QUARANTINED) {
        let run = &run.run_id;
        sentences.push(format!(
            "the run is quarantined: nothing is decided until `eddy run resume {run}` or `eddy run cancel {run}`"
        ));
    }
    if run.status == "paused" {
        sentences.push("the run is paused: its tasks are not offered until `eddy run resume`".to_owned());
    }
    let delay = run.waiting_for.iter().find(|waiting| waiting.waits_for["what"] == "delay");
    if let Some(delay) = delay {
        let until = delay.waits_for["until"].as_str();
        sentences.push(format!("the run begins {}", until.map_or("later".to_owned(), |until| format!("at {until}"))));
    }
    if let Some(unique) = run.waiting_for.iter().find(|waiting| waiting.waits_for["what"] == "unique") {
        let key = unique.waits_for["key"].as_str().unwrap_or_default();
        sentences.push(format!("the run waits for earlier runs with the unique key `{key}` to end"));
    }
    for step in steps {
        let Some(waits) = &step.waits_for else { continue };
        if let Some(why) = why(step, waits, steps) {
            sentences.push(format!("{} {why}", step.activation));
        }
    }
    sentences
}

fn why(step: &StepInfo, waits: &Value, steps: &[StepInfo]) -> Option<String> {
    let text = |field: &str| waits[field].as_str().unwrap_or_default();
    let attempt = waits["attempt"].as_u64().unwrap_or(1);
    Some(match text("what") {
        "arms" => format!("waits for {}", and(waits["arms"].as_array()?.iter().filter_map(|arm| arm_text(arm, steps)))),
        "gate" => format!("waits {}{}", gate(waits), gate_until(waits)),
        "worker" => match running(step) {
            Some(worker) => format!("is running, attempt {attempt} of worker {worker}"),
            None => match (bound(waits), lack(waits)) {
                (Some(bound), None) => format!("is queued (attempt {attempt}): {bound}"),
                (Some(bound), Some(lack)) => {
                    format!("is queued (attempt {attempt}): {bound}; and no online worker {lack}")
                }
                (None, Some(lack)) => format!("waits for a worker (attempt {attempt}): no online worker {lack}"),
                (None, None) => format!(
                    "waits for a worker that handles {} on queue {} (attempt {attempt})",
                    text("handler"),
                    text("queue")
                ),
            },
        },
        "back_off" => match (step.attempts.last(), last_error(step)) {
            (Some(last), Some(error)) => {
                format!("waits for its retry{}: attempt {} failed with {error}", at(waits), last.attempt)
            }
            _ => format!("waits for its retry{}", at(waits)),
        },
        "child" => format!("waits for run {}, which it started", text("run_id")),
        "inside" if to_come(step) > 0 => format!(
            "has {} to come, waiting for one of the {} open ones to end (max_parallel)",
            counted(to_come(step), "item"),
            waits["open"].as_u64().unwrap_or(0)
        ),
        "last_report" => "was cancelled, and waits for its worker's last report".to_owned(),
        "news" => "is suspended until something it awaits has a result".to_owned(),
        "function" => "is retried by its function".to_owned(),
        "next_transition" => "is about to be decided".to_owned(),
        _ => return None,
    })
}

/// Items of a spread that do not exist yet, because of `max_parallel`.
pub fn to_come(step: &StepInfo) -> u64 {
    step.waits_for.as_ref().and_then(|waits| waits["to_come"].as_u64()).unwrap_or(0)
}

/// The rule of a queue or limit that holds the task back from all workers.
fn bound(waits: &Value) -> Option<String> {
    let bound = waits.get("bound")?;
    let queue = waits["queue"].as_str().unwrap_or_default();
    let most = bound["most"].as_u64();
    let reached = |what: &str| match most {
        Some(most) => format!("has reached its concurrency of {most}{what}"),
        None => "has reached its rate".to_owned(),
    };
    let why = match bound["what"].as_str()? {
        "paused" => format!("is paused: `eddy queue resume {queue}`"),
        "flow_concurrency" => reached(" for this flow"),
        _ => reached(""),
    };
    let who = match bound["name"].as_str() {
        Some(limit) => format!("limit {limit}"),
        None => format!("queue {queue}"),
    };
    Some(format!("{who} {why}"))
}

/// What all online workers lack to claim the task, as the end of a sentence.
fn lack(waits: &Value) -> Option<String> {
    let lack = waits.get("lack")?;
    let text = |field: &str| waits[field].as_str().unwrap_or_default();
    let handles = format!("handles {} on queue {}", text("handler"), text("queue"));
    Some(match lack["what"].as_str()? {
        "queue" => format!("serves queue {}", text("queue")),
        "labels" => {
            let labels: Vec<&str> = lack["labels"].as_array()?.iter().filter_map(Value::as_str).collect();
            format!("{handles} with the label{} {}", if labels.len() == 1 { "" } else { "s" }, labels.join(", "))
        }
        "build" => format!("{handles} in build {}", lack["build"].as_str()?),
        _ => handles,
    })
}

fn open_arms(waits: &Value) -> impl Iterator<Item = &str> {
    let arms = waits["arms"].as_array().map(Vec::as_slice).unwrap_or_default();
    arms.iter().filter(|arm| arm["token"] == "open").filter_map(|arm| arm["arm"].as_str())
}

/// An arm without a token, with the state of the step that could send one.
fn arm_text(arm: &Value, steps: &[StepInfo]) -> Option<String> {
    if arm["token"] != "open" {
        return None;
    }
    let written = arm["arm"].as_str()?;
    let from: Vec<&str> = arm["from"].as_array()?.iter().filter_map(Value::as_str).collect();
    let state = |name: &str| steps.iter().find(|step| step.activation == name).map(state);
    let is_step = |name: &str| from.iter().any(|from| *from == name || from.ends_with(&format!(".{name}")));
    Some(match written.split_once(':') {
        Some(("failed", name)) => format!("{name} to fail{}", from.first().and_then(|from| state(from)).map(bracket)?),
        Some(("ended", name)) => format!("{name} to end{}", from.first().and_then(|from| state(from)).map(bracket)?),
        Some((_, name)) => format!("{name}{}", from.first().and_then(|from| state(from)).map(bracket)?),
        None if is_step(written) => format!("{written}{}", from.first().and_then(|from| state(from)).map(bracket)?),
        None => format!("event {written} of {}", and(from.iter().map(|from| (*from).to_owned()))),
    })
}

fn bracket(state: String) -> String {
    format!(" ({state})")
}

fn state(step: &StepInfo) -> String {
    let what = step.waits_for.as_ref().and_then(|waits| waits["what"].as_str());
    match (step.status.as_str(), running(step), what) {
        (_, Some(worker), _) => format!("running, attempt {} of worker {worker}", step.attempts.len()),
        (_, _, Some("back_off")) => "waiting for its retry".to_owned(),
        (_, _, Some("gate")) => "at its gate".to_owned(),
        (_, _, Some("worker")) => match step.waits_for.as_ref().and_then(bound) {
            Some(_) => "queued".to_owned(),
            None => "waiting for a worker".to_owned(),
        },
        (status, _, _) => status.to_owned(),
    }
}

fn gate(waits: &Value) -> String {
    match (waits["reason"].as_str().unwrap_or_default(), waits["event"].as_str()) {
        ("event", Some(event)) => format!("for event {event}"),
        ("webhook", _) => "for a webhook".to_owned(),
        ("manual", _) => "for a person: `eddy gate list`".to_owned(),
        ("time", _) => waits["until"].as_str().map_or("for its time".to_owned(), |until| format!("until {until}")),
        (other, _) => format!("for {other}"),
    }
}

/// The worker that runs the step now.
pub fn running(step: &StepInfo) -> Option<&str> {
    step.attempts.last().filter(|attempt| attempt.status == "running").and_then(|attempt| attempt.worker.as_deref())
}

fn last_error(step: &StepInfo) -> Option<String> {
    let error = step.attempts.last()?.error.as_ref()?;
    Some(format!("{}: {}", error.kind, error.message.lines().next().unwrap_or("")))
}

fn and(parts: impl Iterator<Item = String>) -> String {
    let mut parts: Vec<String> = parts.collect();
    match parts.pop() {
        None => "an unknown step".to_owned(),
        Some(last) if parts.is_empty() => last,
        Some(last) => format!("{} and for {last}", parts.join(", ")),
    }
}
