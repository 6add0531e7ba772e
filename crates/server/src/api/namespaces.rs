//! Namespaces: all of them for an admin of `default`, its own for anybody else.

use axum::http::StatusCode;
use eddyline_language::time::iso;
use eddyline_protocol::{Code, CreateNamespace, NamespaceInfo};
use eddyline_store::Namespace;

use super::call::{Answer, Call, answer, ok};
use super::failure::Failure;
use super::guard::namespace;

/// `GET /v1/namespaces`
pub(crate) async fn list(call: Call) -> Answer {
    let everything = *call.ns() == Namespace::default();
    let found = call.engine().namespaces().await?.into_iter().filter(|(ns, _)| everything || ns == call.ns());
    let found = found.map(|(ns, at)| NamespaceInfo { name: ns.to_string(), created_at: at.map(iso) }).collect();
    ok(&call.page(found, |ns: &NamespaceInfo| &ns.name)?)
}

/// `POST /v1/namespaces`
pub(crate) async fn create(mut call: Call) -> Answer {
    let asked: CreateNamespace = call.json().await?;
    if *call.ns() != Namespace::default() {
        return Err(Failure::new(Code::Forbidden, "a namespace is made by an admin of `default`"));
    }
    let ns = namespace(&asked.name).map_err(|failure| Failure::invalid(failure.0.message))?;
    let now = call.engine().now().await?;
    if ns == Namespace::default() || !call.engine().add_namespace(&ns, now).await? {
        return Err(Failure::new(Code::Conflict, format!("the namespace {ns} is there already")));
    }
    answer(StatusCode::CREATED, &NamespaceInfo { name: asked.name, created_at: Some(iso(now)) })
}
