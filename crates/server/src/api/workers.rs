//! Workers: registration, heartbeats and the list of workers.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use eddyline_engine::{
    BroughtFlow, CodeNews, Engine, HandlerSchemas, Holding, TaskId, WorkerFilter, WorkerRecord, WorkerSays, WorkerSpec,
    WorkerStatus,
};
use eddyline_language::time::iso;
use eddyline_protocol as wire;
use eddyline_protocol::{
    Beat, BringsFlow, BringsFlows, Flows, Heartbeat, RegisterWorker, WorkerInfo, WorkerRegistered,
};
use eddyline_store::{Namespace, Offer};
use serde_json::json;

use super::body::check_labels;
use super::call::{ApiResult, Call, answer, ok};
use super::failure::Failure;
use super::queues::check_name;
use super::tasks::{DEFAULT_QUEUE, MAX_QUEUES};

const STATUSES: [(&str, WorkerStatus); 3] =
    [("online", WorkerStatus::Online), ("draining", WorkerStatus::Draining), ("offline", WorkerStatus::Offline)];
/// The maximum number of handlers, flows and labels of a worker together.
const MAX_NAMES: usize = 10_000;
/// The random id that a worker process generates for itself.
const MAX_INSTANCE_BYTES: usize = 200;
/// The maximum number of tasks in one heartbeat.
pub(super) const MAX_TASKS: usize = 100_000;

/// `POST /v1/workers`
pub(crate) async fn register(mut call: Call) -> ApiResult {
    let asked: RegisterWorker = call.json_or_default().await?;
    let record = enrol(call.engine(), call.ns(), asked).await?;
    answer(StatusCode::CREATED, &welcome(call.engine(), record.id))
}

/// `GET /v1/workers`
pub(crate) async fn list(call: Call) -> ApiResult {
    let status = |word: String| {
        STATUSES
            .into_iter()
            .find(|(name, _)| *name == word)
            .map(|(_, status)| status)
            .ok_or_else(|| Failure::bad("the parameter `status` is not one of online, draining, offline"))
    };
    let filter = WorkerFilter {
        queue: call.text("queue").map(str::to_owned),
        status: call.texts("status").into_iter().map(status).collect::<Result<_, _>>()?,
    };
    let (limit, after) = (call.limit()?, call.text("cursor").map(str::to_owned));
    let (found, next) = call.engine().find_workers(call.ns(), &filter, after, limit).await?;
    let total = call.total(call.engine().count_workers(call.ns(), &filter)).await?;
    let mut items = Vec::with_capacity(found.len());
    for record in found {
        items.push(show(&call, record).await?);
    }
    ok(&eddyline_protocol::Page { items, next, total })
}

/// `GET /v1/workers/{id}`
pub(crate) async fn one(call: Call) -> ApiResult {
    let id = call.param("id");
    let record = call.engine().worker(call.ns(), id).await?.ok_or_else(|| Failure::not_found("worker", id))?;
    ok(&show(&call, record).await?)
}

/// `POST /v1/workers/{id}/heartbeat`
pub(crate) async fn heartbeat(mut call: Call) -> ApiResult {
    let asked: Heartbeat = call.json_or_default().await?;
    let id = call.param("id").to_owned();
    let known = call.engine().seen(call.ns(), &id, Some(says(&asked))).await?;
    // An unregistered worker is identified by its tasks. One without tasks may have been removed.
    if known.is_none() && asked.tasks.is_empty() {
        return Err(Failure::not_found("worker", &id));
    }
    ok(&beat(call.engine(), call.ns(), &id, &asked, known.as_ref()).await?)
}

/// `POST /v1/workers/{id}/drain`
pub(crate) async fn drain(call: Call) -> ApiResult {
    let record = call.engine().drain_worker(call.ns(), call.param("id")).await?;
    ok(&show(&call, record).await?)
}

/// `DELETE /v1/workers/{id}`
pub(crate) async fn leave(call: Call) -> ApiResult {
    call.engine().remove_worker(call.ns(), call.param("id")).await?;
    ok(&json!({"deleted": true}))
}

/// Registers a worker and the code flows that it brings.
pub(super) async fn enrol(engine: &Engine, ns: &Namespace, mut asked: RegisterWorker) -> Result<WorkerRecord, Failure> {
    let flows = listed(std::mem::take(&mut asked.flows));
    let builds = flows.iter().map(|(flow, build)| (flow.name.clone(), build.clone())).collect();
    let instance = asked.instance.take();
    if instance.as_ref().is_some_and(|instance| !(1..=MAX_INSTANCE_BYTES).contains(&instance.len())) {
        return Err(Failure::invalid(format!("`instance` must have 1 to {MAX_INSTANCE_BYTES} bytes")));
    }
    let schemas = std::mem::take(&mut asked.handler_schemas);
    let spec = spec(asked, builds)?;
    if let Some(unknown) = schemas.keys().find(|name| !spec.offer.handlers.contains(*name)) {
        return Err(Failure::invalid(format!("`handler_schemas`: `{unknown}` is not among the `handlers`")));
    }
    let schemas = schemas.into_iter().map(|(name, wire::HandlerSchemas { input_schema, output_schema })| {
        (name, HandlerSchemas { input_schema, output_schema })
    });
    engine.bring_handlers(ns, schemas.collect()).await?;
    engine.bring_flows(ns, &spec.queues, flows.into_iter().map(|(flow, _)| flow).collect()).await?;
    Ok(engine.register_worker(ns, instance.as_deref(), spec).await?)
}

/// Code flows, each with its build.
fn listed(flows: BringsFlows) -> Vec<(BroughtFlow, Option<String>)> {
    let named = |name| BroughtFlow { name, ..BroughtFlow::default() };
    match flows {
        BringsFlows::Builds(builds) => builds.into_iter().map(|(name, build)| (named(name), build)).collect(),
        BringsFlows::List(flows) => flows
            .into_iter()
            .map(|flow| match flow {
                BringsFlow::Name(name) => (named(name), None),
                BringsFlow::Whole { name, build, definition } => (BroughtFlow { name, definition }, build),
            })
            .collect(),
    }
}

/// Extends leases, and returns which tasks the worker can stop and new memo entries of its code runs.
pub(super) async fn beat(
    engine: &Engine,
    ns: &Namespace,
    worker: &str,
    asked: &Heartbeat,
    known: Option<&WorkerRecord>,
) -> Result<Beat, Failure> {
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
    for (task, holding) in tasks.iter().zip(engine.beat(ns, worker, &tasks).await?) {
        match holding {
            Holding::Held { memo: None } => {}
            Holding::Held { memo: Some(memo) } => {
                let id = task.to_string();
                let seen = asked.seen.get(&id).copied().unwrap_or(memo.handed_over);
                // A cancel is a change too, and the worker may have later changes of its own.
                if memo.newest <= memo.handed_over.min(seen) {
                    continue;
                }
                add_news(&mut beat, id, engine.news_of(ns, *task, Some(seen), &[]).await?);
            }
            Holding::Lost => beat.lost.push(task.to_string()),
            Holding::Cancelled => beat.cancel.push(task.to_string()),
        }
    }
    Ok(beat)
}

/// Adds what the worker of a code run's function does not know yet.
pub(super) fn add_news(beat: &mut Beat, task: String, news: Option<CodeNews>) {
    let Some(CodeNews { entries, next, told_to_leave }) = news else { return };
    if told_to_leave {
        beat.cancel.push(task.clone());
        beat.unwind.push(task.clone());
    }
    beat.news_next.extend(next.map(|next| (task.clone(), next)));
    if !entries.is_empty() {
        beat.news.insert(task, entries);
    }
}

pub(super) fn says(asked: &Heartbeat) -> WorkerSays {
    let tasks = u32::try_from(asked.tasks.len()).unwrap_or(u32::MAX);
    WorkerSays { tasks, completed: asked.completed, failed: asked.failed }
}

pub(super) fn welcome(engine: &Engine, worker_id: String) -> WorkerRegistered {
    let config = engine.config();
    let [lease_ms, heartbeat_ms] = [config.lease_ms, config.heartbeat_ms()].map(|ms| u64::try_from(ms).unwrap_or(0));
    WorkerRegistered { worker_id, lease_ms, heartbeat_ms }
}

fn spec(asked: RegisterWorker, flows: BTreeMap<String, Option<String>>) -> Result<WorkerSpec, Failure> {
    if asked.queues.len() > MAX_QUEUES || asked.handlers.len() + flows.len() + asked.labels.len() > MAX_NAMES {
        return Err(Failure::bad(format!(
            "a worker has at most {MAX_QUEUES} queues and {MAX_NAMES} handlers, flows and labels"
        )));
    }
    check_labels(asked.queues.iter().chain(&asked.handlers).chain(&asked.labels))?;
    asked.queues.iter().try_for_each(|name| check_name(name))?;
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

async fn show(call: &Call, record: WorkerRecord) -> Result<WorkerInfo, Failure> {
    let status = call.engine().worker_status(&record, call.engine().now().await?).as_str();
    let tasks = call.engine().tasks_held(call.ns(), &record.id).await?;
    let spec = &record.spec;
    let plain = spec.offer.flows.values().all(Option::is_none);
    Ok(WorkerInfo {
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
        tasks: u32::try_from(tasks).unwrap_or(u32::MAX),
        completed: record.counts.completed,
        failed: record.counts.failed,
    })
}
