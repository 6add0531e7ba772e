//! Gates: list, open, cancel.

use eddyline_language::time::iso;
use eddyline_machine::OpenedBy;
use eddyline_machine::project::gate_name;
use eddyline_machine::record::GateReason;
use eddyline_protocol::{Code, GateInfo, Scope};
use eddyline_store::{GateFilter, GateRow, Page};
use serde_json::json;

use super::call::{ApiResult, Call, ok, run_id};
use super::failure::Failure;

const REASONS: [(&str, GateReason); 4] = [
    ("time", GateReason::Time),
    ("webhook", GateReason::Webhook),
    ("event", GateReason::Event),
    ("manual", GateReason::Manual),
];

/// `GET /v1/gates`
pub(crate) async fn list(call: Call) -> ApiResult {
    let reason = match call.text("reason") {
        Some(word) => Some(
            REASONS
                .into_iter()
                .find(|(name, _)| *name == word)
                .map(|(_, reason)| reason)
                .ok_or_else(|| Failure::bad("the parameter `reason` is not one of time, webhook, event, manual"))?,
        ),
        None => None,
    };
    let run = call.text("run").map(run_id).transpose()?;
    if let Some(run) = run {
        call.engine().header(call.ns(), run).await?;
    }
    let filter = GateFilter { run, reason, ..GateFilter::default() };
    let (limit, after) = (call.limit()?, call.cursor()?);
    let total = call.total(call.engine().count_gates(call.ns(), &filter)).await?;
    let found = call.engine().gates(call.ns(), &filter, Page { after, limit }).await?;
    let next = (found.len() == limit).then(|| found.last().map(|last| last.position.to_string())).flatten();
    let secrets = call.may(Scope::Signal);
    let hooks = &call.engine().config().hooks;
    let items: Vec<_> = found.into_iter().filter_map(|gate| show(gate, hooks, secrets)).collect();
    ok(&eddyline_protocol::Page { items, next, total })
}

fn show(gate: GateRow, hooks: &str, secrets: bool) -> Option<GateInfo> {
    let arrived = gate.arrival?;
    let reason = REASONS.into_iter().find(|(_, reason)| *reason == arrived.gate.reason).map_or("", |(name, _)| name);
    let token = gate.token.filter(|_| secrets);
    let (event, key) = arrived.gate.event.map(|event| (event.name, event.key)).unzip();
    Some(GateInfo {
        gate_id: gate_name(gate.id),
        url: token.as_ref().map(|token| format!("{hooks}{token}")),
        token,
        run_id: gate.id.run.to_string(),
        activation: arrived.gate.name,
        reason: reason.to_owned(),
        event,
        key: key.flatten().and_then(|key| serde_json::from_str(&key).ok()).unwrap_or_default(),
        deadline: arrived.deadline.map(iso),
    })
}

/// `POST /v1/gates/{gate}`, by token or id
pub(crate) async fn open(mut call: Call) -> ApiResult {
    let payload = call.payload_or_null().await?;
    opened(call.engine().open_gate_named(call.ns(), call.param("gate"), OpenedBy::Manual, payload).await)
}

/// `DELETE /v1/gates/{gate}`, by id
pub(crate) async fn cancel(call: Call) -> ApiResult {
    call.engine().cancel_gate_of(call.ns(), call.param("gate"), &call.caller.name).await?;
    ok(&json!({"cancelled": true}))
}

pub(super) fn opened(result: eddyline_engine::Result<()>) -> ApiResult {
    match result.map_err(Failure::from) {
        Ok(()) => ok(&json!({"opened": true})),
        // The run was trimmed together with the gate: for the holder of the token the gate is closed.
        Err(failure) if failure.0.code == Code::Trimmed => {
            Err(Failure::new(Code::Conflict, "the gate is no longer open"))
        }
        Err(failure) => Err(failure),
    }
}
