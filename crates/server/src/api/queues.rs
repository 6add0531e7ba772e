//! Queues: their state and rules.

use eddyline_language::definition::wrong_name;
use eddyline_language::time::iso;
use eddyline_protocol as wire;
use eddyline_store as store;

use super::call::{ApiResult, Call, ok};
use super::failure::Failure;
use super::to_wire;

/// `GET /v1/queues`
pub(crate) async fn list(call: Call) -> ApiResult {
    let queues = call.engine().queues(call.ns()).await?.into_iter().map(show).collect();
    ok(&call.page(queues, |queue: &wire::QueueInfo| &queue.name)?)
}

/// `PUT /v1/queues/{name}`: replaces all rules; does not change whether the queue is paused.
pub(crate) async fn set(mut call: Call) -> ApiResult {
    let asked: wire::QueueRules = call.json().await?;
    let rate = asked.whole_rate().map_err(Failure::invalid)?.map(inner_rate).transpose()?;
    if [asked.concurrency, asked.flow_concurrency].contains(&Some(0)) {
        return Err(Failure::invalid("a concurrency must be 1 or more; pause a queue to stop it"));
    }
    change(call, |rules| {
        rules.concurrency = asked.concurrency;
        rules.flow_concurrency = asked.flow_concurrency;
        rules.rate = rate;
    })
    .await
}

/// `POST /v1/queues/{name}/pause`
pub(crate) async fn pause(call: Call) -> ApiResult {
    change(call, |rules| rules.paused = true).await
}

/// `POST /v1/queues/{name}/resume`
pub(crate) async fn resume(call: Call) -> ApiResult {
    change(call, |rules| rules.paused = false).await
}

async fn change(call: Call, change: impl Fn(&mut store::QueueRules)) -> ApiResult {
    let name = call.param("name");
    check_name(name)?;
    call.engine().set_queue(call.ns(), name, change).await?;
    ok(&show(call.engine().queue(call.ns(), name).await?))
}

fn show(queue: eddyline_engine::QueueInfo) -> wire::QueueInfo {
    let eddyline_engine::QueueInfo { state, rules, fault } = queue;
    wire::QueueInfo {
        name: state.name,
        paused: rules.paused,
        concurrency: rules.concurrency,
        rate: rules.rate.map(rate),
        flow_concurrency: rules.flow_concurrency,
        ready: state.ready as u64,
        claimed: state.claimed as u64,
        oldest: state.oldest.map(iso),
        fault,
    }
}

pub(super) fn check_name(name: &str) -> Result<(), Failure> {
    wrong_name(name).map_or(Ok(()), |problem| Err(Failure::invalid(problem)))
}

pub(super) fn rate(rate: store::Rate) -> wire::Rate {
    let per = wire::Span::from_ms(u64::try_from(rate.per_ms).unwrap_or(0));
    wire::Rate { count: rate.count, per, burst: rate.burst }
}

pub(super) fn inner_rate(rate: wire::Rate) -> Result<store::Rate, Failure> {
    if rate.count == 0 || rate.per.ms == 0 || rate.burst == 0 {
        return Err(Failure::invalid("`count`, `per` and `burst` must be 1 or more; pause a queue to stop it"));
    }
    Ok(store::Rate { count: rate.count, per_ms: to_wire::millis(rate.per), burst: rate.burst })
}
