//! The instances that serve from the store.

use eddyline_engine::INSTANCE_GONE_MS;
use eddyline_language::time::iso;
use eddyline_protocol::{Code, InstanceInfo};
use eddyline_store::Namespace;

use super::call::{ApiResult, Call, ok};
use super::failure::Failure;

/// `GET /v1/instances`
pub(crate) async fn list(call: Call) -> ApiResult {
    if *call.ns() != Namespace::default() {
        return Err(Failure::new(Code::Forbidden, "only an admin of `default` can list instances"));
    }
    let (own, (now, found)) = (call.engine().instance_id(), call.engine().instances());
    let info = |state: eddyline_store::InstanceState| InstanceInfo {
        instance_id: state.id.0.to_string(),
        name: state.info.name,
        version: state.info.version,
        host: state.info.host,
        pid: state.info.pid,
        url: state.info.url,
        this: state.id.0 == own,
        status: if now - state.seen_at > INSTANCE_GONE_MS { "gone" } else { "online" }.to_owned(),
        started_at: iso(state.started_at),
        seen_at: iso(state.seen_at),
    };
    let mut found: Vec<InstanceInfo> = found.into_iter().map(info).collect();
    found.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    ok(&call.page(found, |instance: &InstanceInfo| &instance.instance_id)?)
}
