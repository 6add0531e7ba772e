//! Workers: who they are, and that they are alive.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use eddyline_engine::{Engine, Holding, TaskId, WorkerCounts, WorkerRecord, WorkerSpec, WorkerStatus};
use eddyline_machine::Millis;
use eddyline_machine::time::iso;
use eddyline_protocol::{Beat, Flows, Heartbeat, RegisterWorker, WorkerInfo, WorkerRegistered};
use eddyline_store::{Namespace, Offer};
use serde_json::json;

use super::body::check_labels;
use super::call::{Answer, Call, answer, ok};
use super::failure::Failure;
use super::tasks::{DEFAULT_QUEUE, MAX_QUEUES};
use super::words;

/// Handlers, flows and labels of a worker, each.
const MAX_NAMES: usize = 10_000;
/// Tasks in one heartbeat.
const MAX_TASKS: usize = 100_000;

/// `POST /v1/workers`
pub(crate) async fn register(mut call: Call) -> Answer {
    let asked: RegisterWorker = call.json_or_default().await?;
    let record = call.engine().register_worker(call.ns(), spec(asked)?).await?;
    answer(StatusCode::CREATED, &welcome(call.engine(), record.id))
}

/// `GET /v1/workers`
pub(crate) async fn list(call: Call) -> Answer {
    let limit = call.limit()?;
    let found = call.engine().list_workers(call.ns(), call.text("cursor").map(str::to_owned), limit).await?;
    let next = (found.len() == limit).then(|| found.last().map(|last| last.id.clone())).flatten();
    let now = call.engine().now().await?;
    ok(&words::page(found.into_iter().map(|record| show(call.engine(), record, now)).collect(), next))
}

/// `POST /v1/workers/{id}/heartbeat`
pub(crate) async fn heartbeat(mut call: Call) -> Answer {
    let asked: Heartbeat = call.json_or_default().await?;
    let id = call.param("id").to_owned();
    let counts = counts(&asked);
    let known = call.engine().seen(call.ns(), &id, Some(counts)).await?;
    let (beat, held) = beat(call.engine(), call.ns(), &id, &asked, known.as_ref()).await?;
    // One that did not register is known by what it has.
    if known.is_none() && !held {
        return Err(Failure::not_found("worker", &id));
    }
    ok(&beat)
}

/// `POST /v1/workers/{id}/drain`
pub(crate) async fn drain(call: Call) -> Answer {
    let record = call.engine().drain_worker(call.ns(), call.param("id")).await?;
    let now = call.engine().now().await?;
    ok(&show(call.engine(), record, now))
}

/// `DELETE /v1/workers/{id}`
pub(crate) async fn leave(call: Call) -> Answer {
    call.engine().remove_worker(call.ns(), call.param("id")).await?;
    ok(&json!({"deleted": true}))
}

/// Leases go on, and the worker is told what it need not go on with; and whether it has anything at all.
pub(super) async fn beat(
    engine: &Engine,
    ns: &Namespace,
    worker: &str,
    asked: &Heartbeat,
    known: Option<&WorkerRecord>,
) -> Result<(Beat, bool), Failure> {
    if asked.tasks.len() > MAX_TASKS {
        return Err(Failure::bad(format!("more than {MAX_TASKS} tasks")));
    }
    let mut beat = Beat { drain: known.is_some_and(|record| record.draining), ..Beat::default() };
    let mut tasks = Vec::with_capacity(asked.tasks.len());
    for id in &asked.tasks {
        match TaskId::parse(id) {
            Some(task) => tasks.push(task),
            None => beat.lost.push(id.clone()),
        }
    }
    let mut held = false;
    for (task, holding) in tasks.iter().zip(engine.beat(ns, worker, &tasks).await?) {
        held |= holding == Holding::Held;
        match holding {
            Holding::Held => {}
            Holding::Lost => beat.lost.push(task.to_string()),
            Holding::Cancelled => beat.cancel.push(task.to_string()),
        }
    }
    for (id, seen) in &asked.seen {
        let Some(task) = TaskId::parse(id).filter(|task| tasks.contains(task)) else { continue };
        let news = engine.memo_of(ns, task, Some(*seen)).await?.filter(|news| !news.is_empty());
        beat.news.extend(news.map(|news| (id.clone(), news)));
    }
    Ok((beat, held))
}

pub(super) fn counts(asked: &Heartbeat) -> WorkerCounts {
    let tasks = u32::try_from(asked.tasks.len()).unwrap_or(u32::MAX);
    WorkerCounts { tasks, completed: asked.completed, failed: asked.failed }
}

pub(super) fn welcome(engine: &Engine, worker_id: String) -> WorkerRegistered {
    let lease_ms = u64::try_from(engine.config().lease_ms).unwrap_or(0);
    WorkerRegistered { worker_id, lease_ms, heartbeat_ms: heartbeat_ms(lease_ms) }
}

/// Two heartbeats may be lost before a lease is.
pub(super) fn heartbeat_ms(lease_ms: u64) -> u64 {
    (lease_ms / 3).max(1)
}

pub(super) fn spec(asked: RegisterWorker) -> Result<WorkerSpec, Failure> {
    let flows: BTreeMap<String, Option<String>> = match asked.flows {
        Flows::Names(names) => names.into_iter().map(|name| (name, None)).collect(),
        Flows::Builds(builds) => builds,
    };
    if asked.queues.len() > MAX_QUEUES || asked.handlers.len() + flows.len() + asked.labels.len() > MAX_NAMES {
        return Err(Failure::bad(format!(
            "a worker has at most {MAX_QUEUES} queues and {MAX_NAMES} handlers, flows and labels"
        )));
    }
    check_labels(asked.queues.iter().chain(&asked.handlers).chain(&asked.labels))?;
    check_labels(flows.iter().flat_map(|(name, build)| std::iter::once(name).chain(build)))?;
    check_labels(asked.version.iter().chain(&asked.host))?;
    let queues = if asked.queues.is_empty() { vec![DEFAULT_QUEUE.to_owned()] } else { asked.queues };
    let offer = Offer {
        handlers: asked.handlers.into_iter().collect(),
        flows,
        labels: asked.labels.into_iter().collect(),
        build: asked.version,
    };
    Ok(WorkerSpec { queues, offer, max_concurrent: asked.max_concurrent, host: asked.host, pid: asked.pid })
}

fn show(engine: &Engine, record: WorkerRecord, now: Millis) -> WorkerInfo {
    let status = match engine.worker_status(&record, now) {
        WorkerStatus::Online => "online",
        WorkerStatus::Draining => "draining",
        WorkerStatus::Offline => "offline",
    };
    let spec = &record.spec;
    let plain = spec.offer.flows.values().all(Option::is_none);
    WorkerInfo {
        worker_id: record.id.clone(),
        status: status.to_owned(),
        queues: spec.queues.clone(),
        handlers: spec.offer.handlers.iter().cloned().collect(),
        flows: if plain {
            Flows::Names(spec.offer.flows.keys().cloned().collect())
        } else {
            Flows::Builds(spec.offer.flows.clone())
        },
        max_concurrent: spec.max_concurrent,
        labels: spec.offer.labels.iter().cloned().collect(),
        version: spec.offer.build.clone(),
        host: spec.host.clone(),
        pid: spec.pid,
        started_at: iso(record.started_at),
        seen_at: iso(record.seen_at),
        tasks: record.counts.tasks,
        completed: record.counts.completed,
        failed: record.counts.failed,
    }
}
