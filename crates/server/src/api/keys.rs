//! Keys of a namespace: create, list, revoke.

use axum::http::StatusCode;
use eddyline_engine::KeyRecord;
use eddyline_language::time::iso;
use eddyline_protocol::{Code, CreateKey, KeyCreated, KeyInfo, Scope};
use eddyline_store::Namespace;
use serde_json::json;

use super::body::check_labels;
use super::call::{ApiResult, Call, answer, ok};
use super::failure::Failure;
use super::guard::namespace;
use super::{keyring, to_wire};

/// `GET /v1/keys`
pub(crate) async fn list(call: Call) -> ApiResult {
    let ns = chosen(&call, call.text("namespace"))?;
    let keys = call.engine().keys(&ns).await?.into_iter().map(show).collect();
    ok(&call.page(keys, |key: &KeyInfo| &key.key_id)?)
}

/// `POST /v1/keys`
pub(crate) async fn create(mut call: Call) -> ApiResult {
    let asked: CreateKey = call.json().await?;
    if asked.scopes.is_empty() {
        return Err(Failure::invalid("`scopes` is empty: expected some of read, start, signal, worker, admin"));
    }
    check_labels([&asked.name])?;
    let ns = chosen(&call, asked.namespace.as_deref())?;
    let now = call.engine().now().await?;
    let expires_at = asked.expires_in.map(|span| now.saturating_add(to_wire::millis(span)));
    let (key, record) = keyring::make(call.engine(), ns, asked.name, &asked.scopes, now, expires_at);
    if !call.engine().add_key(&record).await? {
        return Err(Failure::new(Code::Conflict, "the new key's id is taken; try again"));
    }
    answer(StatusCode::CREATED, &KeyCreated { key, info: show(record) })
}

/// `DELETE /v1/keys/{id}`
pub(crate) async fn revoke(call: Call) -> ApiResult {
    let id = call.param("id");
    call.engine().delete_key(&chosen(&call, call.text("namespace"))?, id).await?;
    call.api.keyring().forget(id);
    ok(&json!({"revoked": true}))
}

/// The caller's namespace, or another one for an admin of `default`.
fn chosen(call: &Call, name: Option<&str>) -> Result<Namespace, Failure> {
    let ns = name.map_or_else(|| Ok(call.ns().clone()), namespace)?;
    if ns != *call.ns() && *call.ns() != Namespace::default() {
        return Err(Failure::new(Code::Forbidden, "keys of another namespace require an admin key of `default`"));
    }
    Ok(ns)
}

fn show(record: KeyRecord) -> KeyInfo {
    KeyInfo {
        key_id: record.id,
        name: record.name,
        namespace: record.ns.to_string(),
        scopes: record.scopes.iter().filter_map(|name| Scope::named(name)).collect(),
        created_at: iso(record.created_at),
        expires_at: record.expires_at.map(iso),
    }
}
