//! Limits: named bounds that tasks must pass, across queues.

use eddyline_language::time::iso;
use eddyline_protocol::{LimitInfo, LimitRules};
use eddyline_store as store;
use serde_json::json;

use super::call::{ApiResult, Call, ok};
use super::failure::Failure;
use super::queues::{check_name, inner_rate, rate};

/// `GET /v1/limits`
pub(crate) async fn list(call: Call) -> ApiResult {
    let limits = call.engine().limits(call.ns()).await?;
    let limits = limits.into_iter().map(show).collect();
    ok(&call.page(limits, |limit: &LimitInfo| &limit.name)?)
}

/// `PUT /v1/limits/{name}`: replaces all rules.
pub(crate) async fn set(mut call: Call) -> ApiResult {
    let asked: LimitRules = call.json().await?;
    let name = call.param("name");
    check_name(name)?;
    let rate = asked.whole_rate().map_err(Failure::invalid)?;
    let rules = store::LimitRules { concurrency: asked.concurrency, rate: rate.map(inner_rate).transpose()? };
    call.engine().set_limit(call.ns(), name, rules.clone()).await?;
    ok(&show(eddyline_engine::LimitInfo { name: name.to_owned(), rules, ..Default::default() }))
}

/// `DELETE /v1/limits/{name}`
pub(crate) async fn delete(call: Call) -> ApiResult {
    call.engine().delete_limit(call.ns(), call.param("name")).await?;
    ok(&json!({"deleted": true}))
}

fn show(limit: eddyline_engine::LimitInfo) -> LimitInfo {
    let eddyline_engine::LimitInfo { name, rules, closed_until, fault } = limit;
    let (concurrency, rate) = (rules.concurrency, rules.rate.map(rate));
    LimitInfo { name, concurrency, rate, closed_until: closed_until.map(iso), fault }
}
