//! Server info and the OpenAPI document.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use eddyline_language::time::iso;
use eddyline_protocol::{OLDEST_VERSION, ServerInfo, VERSION};

use super::call::{ApiResult, Call, ok};

/// The OpenAPI document; a test compares it with the table of routes.
pub(crate) const OPENAPI: &str = include_str!("../../openapi.json");

/// `GET /v1/info`
pub(crate) async fn info(call: Call) -> ApiResult {
    let (about, config) = (call.api.about(), call.engine().config());
    let now = call.engine().now().await?;
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as i64;
    let [lease_ms, heartbeat_ms] = [config.lease_ms, config.heartbeat_ms()].map(|ms| u64::try_from(ms).unwrap_or(0));
    ok(&ServerInfo {
        name: "eddyline".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol: VERSION,
        oldest_protocol: OLDEST_VERSION,
        store: about.store.to_owned(),
        instance: config.instance.clone(),
        namespace: call.ns().to_string(),
        keys: about.keys,
        lease_ms,
        heartbeat_ms,
        started_at: iso(about.started_at),
        now: iso(now),
        clock_ahead_ms: now - wall,
        deletion_waits_until: call.engine().deletion_waits().await?.map(iso),
    })
}

/// `GET /openapi.json`
pub(crate) async fn openapi(_call: Call) -> ApiResult {
    let mut response = Response::new(Body::from(OPENAPI));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}
