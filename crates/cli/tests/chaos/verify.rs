//! Compares the timelines of all runs with the ledger.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline::protocol::{EventInfo, Page, RunSummary};
use eddyline::{Client, Record};
use futures_util::stream::{self, StreamExt};
use serde_json::Value;

use crate::api::Api;
use crate::disturb::{Disturbed, PROBE};
use crate::flows::{NARROW, PACED, SLIM, TENANT};
use crate::ledger::{Book, Ledger};
use crate::timeline;

const AT_ONCE: usize = 8;
/// The most runs with problems whose timelines are printed.
const MOST_SHOWN: usize = 3;

/// A claim of a task in its timeline, with times by the store's clock.
#[derive(Debug, Clone)]
pub struct Attempt {
    pub job: String,
    pub activation: String,
    pub started_at: i64,
    pub ended_at: i64,
    /// The kind of error it ended with.
    pub error: Option<String>,
}

/// The contents of a timeline, after its invariants were checked.
#[derive(Debug, Default)]
pub struct Told {
    pub run: String,
    pub flow: String,
    pub started_at: i64,
    pub ended_at: i64,
    pub attempts: Vec<Attempt>,
    /// Results by task.
    results: BTreeMap<String, Vec<Value>>,
    logs: Vec<String>,
    /// How often gates were opened, and by what.
    opened: usize,
    opened_by: Vec<Value>,
}

#[derive(Debug, Default)]
pub struct Summed {
    pub runs: usize,
    pub records: usize,
    pub attempts: usize,
    pub lost: usize,
}

/// Reads every run of the namespace, alternating between the instances.
pub async fn verify(api: &Api, clients: &[Client], ledger: &Arc<Ledger>, disturbed: &[Disturbed]) -> Summed {
    let runs = all_runs(api).await;
    let mut reading = stream::iter(runs.iter().enumerate())
        .map(|(at, run)| {
            let client = clients[at % clients.len()].clone();
            async move {
                timeline::check(&client, &run.run_id).await;
                timeline::records(&client, &run.run_id).await
            }
        })
        .buffered(AT_ONCE);
    let (mut told, mut summed) = (Vec::new(), Summed::default());
    while let Some(records) = reading.next().await {
        summed.records += records.len();
        told.push(read(&records, ledger));
    }
    drop(reading);
    summed.runs = told.len();
    summed.attempts = told.iter().map(|told| told.attempts.len()).sum();
    let lost = |attempt: &&Attempt| attempt.error.as_deref() == Some("LeaseLost");
    summed.lost = told.iter().flat_map(|told| &told.attempts).filter(lost).count();
    let mut problems = known_runs(&runs, &ledger.book());
    problems.extend(acknowledged(&told, &ledger.book()));
    problems.extend(limits(&told, &ledger.book()));
    problems.extend(late(&told, disturbed));
    problems.into_iter().for_each(|problem| ledger.problem(problem));
    events(api, ledger).await;
    let problems: Vec<String> = ledger.book().problems.iter().cloned().collect();
    let named = runs.iter().filter(|run| problems.iter().any(|problem| problem.contains(&run.run_id)));
    for run in named.take(MOST_SHOWN) {
        show(&clients[0], run).await;
    }
    summed
}

/// Prints the timeline of a run that has problems.
async fn show(client: &Client, run: &RunSummary) {
    eprintln!("timeline of {} of {}:", run.run_id, run.flow);
    for record in timeline::records(client, &run.run_id).await {
        eprintln!("  {} {} {} {} {}", record.id, record.ts, record.kind, record.data, record.meta["jobId"]);
    }
}

async fn all_runs(api: &Api) -> Vec<RunSummary> {
    let (mut runs, mut cursor): (Vec<RunSummary>, Option<String>) = (Vec::new(), None);
    loop {
        let mut query = vec![("limit", "1000".to_owned())];
        query.extend(cursor.take().map(|cursor| ("cursor", cursor)));
        let page: Page<RunSummary> = api.get("/v1/runs", &query).await;
        runs.extend(page.items);
        match page.next {
            Some(next) => cursor = Some(next),
            None => return runs,
        }
    }
}

/// Every acknowledged run exists once, and there are no others except runs whose start got no response.
fn known_runs(runs: &[RunSummary], book: &Book) -> Vec<String> {
    let mut problems = Vec::new();
    let listed: BTreeSet<&str> = runs.iter().map(|run| run.run_id.as_str()).collect();
    if listed.len() != runs.len() {
        problems.push("a run is listed twice".to_owned());
    }
    for run in book.runs.keys().filter(|run| !listed.contains(run.as_str())) {
        problems.push(format!("the start of {run} was acknowledged, but the run does not exist"));
    }
    for run in runs {
        let tagged = run.tags.first().and_then(|tag| book.tags.get(tag));
        let may_be = tagged.is_some_and(|tagged| tagged.uncertain) || run.tags.iter().any(|tag| tag == PROBE);
        if !book.runs.contains_key(&run.run_id) && run.parent.is_none() && !may_be {
            problems.push(format!("run {} of {} {:?} was never requested", run.run_id, run.flow, run.tags));
        }
        if run.status != "completed" {
            problems.push(format!("{} of {} ended {}: {:?}", run.run_id, run.flow, run.status, run.error));
        }
    }
    problems
}

/// Reads the attempts of a run, and checks them: a task is queued and claimed once, and a step has one open attempt at
/// a time.
fn read(records: &[Record], ledger: &Ledger) -> Told {
    let Some(first) = records.first() else { return Told::default() };
    let (run, flow) = (text(&first.meta["flowId"]), text(&first.meta["flowName"]));
    let mut told = Told { run, flow, started_at: ms(first), ended_at: ms(first), ..Told::default() };
    let (mut queued, mut open): (BTreeSet<String>, BTreeMap<String, String>) = Default::default();
    let mut claimed: BTreeMap<String, usize> = BTreeMap::new();
    let mut latest = i64::MIN;
    for record in records {
        let (run, at) = (&told.run, ms(record));
        if at < latest {
            ledger.problem(format!("record {} of {run} is older than the one before it", record.id));
        }
        latest = at;
        told.ended_at = at;
        let (Some(step), job) = (record.activation().map(str::to_owned), text(&record.meta["jobId"])) else { continue };
        match record.kind.as_str() {
            "step.scheduled" if record.data["as"] == "task" => {
                if !queued.insert(job.clone()) {
                    ledger.problem(format!("{job} of {step} of {run} was queued twice"));
                }
                let before = open.insert(step.clone(), job);
                let reason = text(&record.data["reason"]);
                // A released task was claimed but never delivered; nothing else ends its attempt.
                let attempt = before.as_ref().and_then(|before| claimed.get(before)).copied();
                match (before, reason.as_str()) {
                    (None, _) => {}
                    (Some(_), "released" | "resumed") => {
                        if let Some(attempt) = attempt {
                            told.attempts[attempt].ended_at = at;
                        }
                    }
                    (Some(before), _) => {
                        ledger.problem(format!("{step} of {run} was queued again while {before} was open: {reason}"));
                    }
                }
            }
            "step.attempt.started" => {
                let attempt = Attempt { job, activation: step, started_at: at, ended_at: i64::MAX, error: None };
                if claimed.insert(attempt.job.clone(), told.attempts.len()).is_some() {
                    ledger.problem(format!("{} of {run} was claimed twice", attempt.job));
                }
                told.attempts.push(attempt);
            }
            "step.attempt.completed" | "step.attempt.failed" => {
                open.remove(&step);
                if let Some(attempt) = claimed.get(&job) {
                    let attempt = &mut told.attempts[*attempt];
                    attempt.ended_at = at;
                    attempt.error = record.data["error"]["kind"].as_str().map(str::to_owned);
                }
                if record.kind == "step.attempt.completed" && record.data["suspended"] != true {
                    told.results.entry(job).or_default().push(record.data["result"].clone());
                }
            }
            "runner.log" => told.logs.push(text(&record.data["msg"])),
            "step.await.triggered" if record.data["by"] != "timeout" => told.opened += 1,
            // Steps that are only a gate: the payload that opened it is their result.
            "step.completed" if ["ask", "paid"].contains(&step.as_str()) => {
                told.opened_by.push(record.data["result"].clone());
            }
            _ => {}
        }
    }
    if !open.is_empty() {
        ledger.problem(format!("{} ended while tasks were open: {open:?}", told.run));
    }
    told
}

/// Everything acknowledged is in the timelines once, and every task of a handler was claimed by it.
fn acknowledged(told: &[Told], book: &Book) -> Vec<String> {
    let mut problems = Vec::new();
    let by_run: BTreeMap<&str, &Told> = told.iter().map(|told| (told.run.as_str(), told)).collect();
    for (task, (run, result)) in &book.results {
        let results = by_run.get(run.as_str()).and_then(|told| told.results.get(task));
        let results = results.map(Vec::as_slice).unwrap_or_default();
        // The result of a function is the result of its run.
        if results.len() != 1 || (results[0] != *result && !results[0].is_null()) {
            problems.push(format!("{result} of {task} was acknowledged; the timeline has {results:?}"));
        }
    }
    for (message, run) in &book.logs {
        let times = by_run.get(run.as_str()).map_or(0, |told| told.logs.iter().filter(|log| *log == message).count());
        if times != 1 {
            problems.push(format!("the log {message} of {run} was acknowledged; the timeline has it {times} times"));
        }
    }
    for (run, payload) in &book.gates {
        let told = by_run.get(run.as_str());
        let opened_by = told.map(|told| told.opened_by.as_slice()).unwrap_or_default();
        if opened_by != std::slice::from_ref(payload) || told.is_none_or(|told| told.opened != 1) {
            problems.push(format!("the gate of {run} was opened with {payload}; the timeline has {opened_by:?}"));
        }
    }
    for run in book.events.values() {
        let opened = by_run.get(run.as_str()).map_or(0, |told| told.opened);
        if opened != 1 {
            problems.push(format!("the event gate of {run} was opened {opened} times"));
        }
    }
    for (task, (run, times)) in &book.tasks {
        let claimed = by_run.get(run.as_str()).is_some_and(|told| told.attempts.iter().any(|it| it.job == *task));
        if *times != 1 || !claimed {
            problems
                .push(format!("{task} was handed to handlers {times} times; its claim is in the timeline: {claimed}"));
        }
    }
    for ((run, step, attempt), times) in book.attempts.iter().filter(|(_, times)| **times != 1) {
        // The function of a code run keeps its number when it is resumed.
        if step != "@run" {
            problems.push(format!("attempt {attempt} of {step} of {run} was made {times} times"));
        }
    }
    problems
}

fn limits(told: &[Told], book: &Book) -> Vec<String> {
    let mut problems = Vec::new();
    let limited = told.iter().filter(|told| told.flow == "limited");
    let (mut by_limit, mut paced): (BTreeMap<String, Vec<&Attempt>>, Vec<i64>) = Default::default();
    for told in limited {
        for attempt in &told.attempts {
            let step = attempt.activation.split('[').next().unwrap_or_default();
            let limit = match step {
                "paced" => {
                    paced.push(attempt.started_at);
                    continue;
                }
                "tenant" => format!("tenant {}", book.tenants.get(&told.run).cloned().unwrap_or_default()),
                other => other.to_owned(),
            };
            by_limit.entry(limit).or_default().push(attempt);
        }
    }
    for (limit, attempts) in by_limit {
        let most = match limit.as_str() {
            "narrow" => NARROW,
            "slim" => SLIM,
            _ => TENANT,
        };
        let (held, at) = most_at_once(&attempts);
        println!("limit {limit}: {} attempts, at most {held} of {most} at once", attempts.len());
        if held > most {
            problems.push(format!("{held} tasks of {limit} were held at {at}; the limit is {most}"));
        }
    }
    problems.extend(too_fast(paced));
    problems
}

/// The most attempts that are open at the same time, and when.
pub fn most_at_once(attempts: &[&Attempt]) -> (usize, i64) {
    let mut changes: Vec<(i64, i64)> = Vec::new();
    for attempt in attempts {
        changes.push((attempt.started_at, 1));
        changes.push((attempt.ended_at, -1));
    }
    // At the same moment, ends come first.
    changes.sort_unstable();
    let (mut open, mut most) = (0, (0, 0));
    for (at, change) in changes {
        open += change;
        most = most.max((open, at));
    }
    (most.0 as usize, most.1)
}

/// Checks that in no period more tasks started than the rate and its burst allow.
fn too_fast(mut started: Vec<i64>) -> Option<String> {
    started.sort_unstable();
    let (rate, burst) = PACED;
    for (at, first) in started.iter().enumerate() {
        for (count, last) in started[at..].iter().enumerate() {
            let allowed = burst as f64 + (last - first) as f64 * rate as f64 / 1_000.0;
            if (count + 1) as f64 > allowed + 1.0 {
                return Some(format!("{} tasks of a rate started between {first} and {last}", count + 1));
            }
        }
    }
    None
}

/// Runs that were in progress when a disturbance ended must end soon after, unless they wait by themselves.
fn late(told: &[Told], disturbed: &[Disturbed]) -> Vec<String> {
    let mut problems = Vec::new();
    for Disturbed { what, began_at, over_at, allowed, .. } in disturbed {
        let in_flight = |told: &&Told| told.started_at < *over_at && told.ended_at > *began_at;
        let waits = |told: &&Told| ["diamond", "wide", "hand"].contains(&told.flow.as_str());
        let ends = told.iter().filter(in_flight).filter(waits).map(|told| (told.ended_at - over_at, &told.run));
        let (after, run) = ends.max().map_or((0, String::new()), |(after, run)| (after, run.clone()));
        println!("{what:?}: the last run that was under way ended {after} ms after it was over");
        if after > allowed.as_millis() as i64 {
            problems.push(format!("{run} was under way when {what:?} was over and ended {after} ms later"));
        }
    }
    problems
}

async fn events(api: &Api, ledger: &Ledger) {
    let ids: Vec<String> = ledger.book().events.keys().cloned().collect();
    for id in ids {
        let event: EventInfo = api.get(&format!("/v1/events/{id}"), &[]).await;
        if !event.delivered || event.gates_opened != 1 {
            ledger.problem(format!("{event:?} should have opened one gate"));
        }
    }
}

pub fn ms(record: &Record) -> i64 {
    record.ts.parse::<jiff::Timestamp>().unwrap().as_millisecond()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[test]
fn overlapping_attempts_are_counted() {
    let attempt = |started_at, ended_at| Attempt {
        job: String::new(),
        activation: String::new(),
        started_at,
        ended_at,
        error: None,
    };
    let all = [attempt(0, 10), attempt(5, 20), attempt(10, 30), attempt(31, 40)];
    assert_eq!(most_at_once(&all.iter().collect::<Vec<_>>()).0, 2);
    assert_eq!(too_fast(vec![0; 6]), None);
    assert!(too_fast(vec![0; 7]).is_some());
}
