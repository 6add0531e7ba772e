//! Namespaces: an admin of `default` sees all of them, other admins only their own.

use axum::http::StatusCode;
use eddyline_engine::{Config, NamespaceChange, NamespaceState, RetentionSettings};
use eddyline_language::time::{iso, span};
use eddyline_machine::Millis;
use eddyline_protocol::{
    ChangeNamespace, Code, CreateNamespace, EffectiveSettings, NamespaceInfo, RetentionInfo, Span,
};
use eddyline_store::Namespace;

use super::call::{ApiResult, Call, answer, ok};
use super::failure::Failure;
use super::guard::namespace;

/// `GET /v1/namespaces`
pub(crate) async fn list(call: Call) -> ApiResult {
    let everything = *call.ns() == Namespace::default();
    let found = call.engine().namespaces().await?.into_iter().filter(|(ns, _)| everything || ns == call.ns());
    let found = found.map(|(ns, state)| info(call.engine().config(), &ns, &state)).collect();
    ok(&call.page(found, |ns: &NamespaceInfo| &ns.name)?)
}

/// `GET /v1/namespaces/{name}`
pub(crate) async fn show(call: Call) -> ApiResult {
    let ns = named(&call)?;
    let state = call.engine().namespace(&ns).await?.ok_or_else(|| unknown(&ns))?;
    ok(&info(call.engine().config(), &ns, &state))
}

/// `POST /v1/namespaces`
pub(crate) async fn create(mut call: Call) -> ApiResult {
    let asked: CreateNamespace = call.json().await?;
    if *call.ns() != Namespace::default() {
        return Err(Failure::new(Code::Forbidden, "only an admin of `default` can create namespaces"));
    }
    let ns = namespace(&asked.name).map_err(|failure| Failure::invalid(failure.0.message))?;
    let now = call.engine().now().await?;
    if ns == Namespace::default() || !call.engine().add_namespace(&ns, now).await? {
        return Err(Failure::new(Code::Conflict, format!("the namespace {ns} already exists")));
    }
    let mut state = NamespaceState::default();
    state.settings.created_at = Some(now);
    answer(StatusCode::CREATED, &info(call.engine().config(), &ns, &state))
}

/// `PATCH /v1/namespaces/{name}`
pub(crate) async fn change(mut call: Call) -> ApiResult {
    let ns = named(&call)?;
    if *call.ns() != Namespace::default() {
        return Err(Failure::new(Code::Forbidden, "only an admin of `default` can change the settings of a namespace"));
    }
    let asked: ChangeNamespace = call.json().await?;
    let ms = |span: Option<Span>| span.map(|span| Millis::try_from(span.ms).unwrap_or(Millis::MAX));
    let (timelines, runs, events) = match asked.retention {
        None => (None, None, None),
        Some(None) => (Some(None), Some(None), Some(None)),
        Some(Some(kept)) => (kept.timelines, kept.runs, kept.events),
    };
    let change = NamespaceChange {
        timelines_ms: timelines.map(ms),
        runs_ms: runs.map(ms),
        events_ms: events.map(ms),
        backlog: asked.backlog.map(|most| most.map(|most| usize::try_from(most).unwrap_or(usize::MAX))),
        disabled: asked.disabled.map(Option::unwrap_or_default),
    };
    let state = call.engine().change_namespace(&ns, change).await?;
    // It takes effect here before the response is sent, on other instances within a second.
    call.api.keyring().look_at_disabled().await?;
    ok(&info(call.engine().config(), &ns, &state))
}

/// The namespace in the path. The namespaces of others look like ones that do not exist.
fn named(call: &Call) -> Result<Namespace, Failure> {
    let name = call.param("name");
    let ns = namespace(name).map_err(|_| unknown(&name.chars().take(120).collect::<String>()))?;
    match *call.ns() == Namespace::default() || ns == *call.ns() {
        true => Ok(ns),
        false => Err(unknown(&ns)),
    }
}

fn unknown(name: &impl std::fmt::Display) -> Failure {
    Failure::new(Code::NotFound, format!("there is no namespace {name}"))
}

fn info(config: &Config, ns: &Namespace, state: &NamespaceState) -> NamespaceInfo {
    let settings = &state.settings;
    let RetentionSettings { timelines_ms, runs_ms, events_ms } = settings.retention;
    let applied = settings.retention.over(config.retention);
    NamespaceInfo {
        name: ns.to_string(),
        created_at: settings.created_at.map(iso),
        disabled: state.disabled,
        backlog: settings.backlog.map(|most| most as u64),
        retention: retention([timelines_ms, runs_ms, events_ms]),
        effective: EffectiveSettings {
            backlog: settings.backlog.unwrap_or(config.backlog) as u64,
            retention: retention([applied.timelines_ms, applied.runs_ms, applied.events_ms].map(Some)),
        },
    }
}

fn retention(kept: [Option<Millis>; 3]) -> RetentionInfo {
    let [timelines, runs, events] = kept.map(|ms| ms.map(span));
    RetentionInfo { timelines, runs, events }
}
