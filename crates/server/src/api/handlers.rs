//! Handlers with registered schemas.

use eddyline_protocol::{HandlerInfo, Page};

use super::call::{ApiResult, Call, ok};

/// `GET /v1/handlers`
pub(crate) async fn list(call: Call) -> ApiResult {
    let limit = call.limit()?;
    let found = call.engine().handlers(call.ns(), call.text("cursor").map(str::to_owned), limit).await?;
    let next = (found.len() == limit).then(|| found.last().map(|(name, _)| name.clone())).flatten();
    let show = |(handler, schemas): (String, eddyline_engine::HandlerSchemas)| HandlerInfo {
        handler,
        input_schema: schemas.input_schema,
        output_schema: schemas.output_schema,
    };
    ok(&Page { items: found.into_iter().map(show).collect(), next, total: None })
}
