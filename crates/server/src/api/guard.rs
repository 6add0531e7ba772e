//! Authorises requests: by key, or, with keys off, only requests from this machine.

use axum::http::{HeaderMap, header};
use eddyline_protocol::{Code, NAMESPACE_HEADER, Scope};
use eddyline_store::Namespace;

use super::failure::Failure;
use super::keyring::Key;
use super::routes::{Access, Route};
use super::{About, Api, socket_key};

/// The maximum length of a namespace's name.
pub(crate) const MAX_NAMESPACE_CHARS: usize = 64;

/// Who sent a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub ns: Namespace,
    /// The name recorded as the author of acts.
    pub name: String,
    scopes: Vec<Scope>,
    pass: Option<Pass>,
}

/// What the request was authorised by; it must stay valid while the request waits.
#[derive(Debug, Clone)]
struct Pass {
    key: Key,
    access: Access,
}

impl Caller {
    /// `admin` includes every scope.
    pub fn may(&self, scope: Scope) -> bool {
        self.scopes.contains(&scope) || self.scopes.contains(&Scope::Admin)
    }

    fn anybody() -> Caller {
        Caller { ns: Namespace::default(), name: "anybody".to_owned(), scopes: Vec::new(), pass: None }
    }

    /// Returns when the caller is no longer authorised: its key was revoked, has expired or no longer has the scope, or
    /// its namespace was disabled.
    pub async fn shut_out(&self, api: &Api) -> Failure {
        tokio::select! {
            failure = self.key_lost(api) => failure,
            failure = self.namespace_disabled(api) => failure,
        }
    }

    async fn namespace_disabled(&self, api: &Api) -> Failure {
        let mut watched = api.keyring().disabled();
        // An error means that the server is shutting down, and the caller with it.
        let is_disabled = watched.wait_for(|disabled| disabled.contains(&self.ns)).await.is_ok();
        if !is_disabled {
            std::future::pending::<()>().await;
        }
        disabled(&self.ns)
    }

    async fn key_lost(&self, api: &Api) -> Failure {
        if let Some(Pass { key, access }) = &self.pass {
            let mut watched = api.keyring().watch(key);
            loop {
                let now = watched.borrow_and_update().clone();
                let same = now.is_some_and(|now| now.is_same(key) && missing(&now.scopes, *access).is_none());
                if !same {
                    return unauthorized(INVALID_KEY);
                }
                if watched.changed().await.is_err() {
                    break;
                }
            }
        }
        std::future::pending().await
    }
}

const INVALID_KEY: &str = "this key is not valid: it is unknown, revoked or expired";

fn unauthorized(message: &str) -> Failure {
    Failure::new(Code::Unauthorized, message)
}

fn disabled(ns: &Namespace) -> Failure {
    Failure::new(Code::Forbidden, format!("the namespace {ns} is disabled"))
}

/// The scope that the key lacks.
fn missing(scopes: &[Scope], access: Access) -> Option<String> {
    let may = |scope: Scope| scopes.contains(&scope) || scopes.contains(&Scope::Admin);
    match access {
        Access::Needs(scope) if !may(scope) => Some(format!("`{}`", scope.as_str())),
        Access::Either(one, other) if !may(one) && !may(other) => {
            Some(format!("`{}` or `{}`", one.as_str(), other.as_str()))
        }
        _ => None,
    }
}

pub(crate) async fn admit(api: &Api, route: &Route, headers: &HeaderMap) -> Result<Caller, Failure> {
    if !api.about().keys {
        refuse_other_sites(api.about(), headers)?;
        let ns = match headers.get(NAMESPACE_HEADER) {
            Some(name) => namespace(name.to_str().unwrap_or(""))?,
            None => Namespace::default(),
        };
        if api.keyring().is_disabled(&ns) {
            return Err(disabled(&ns));
        }
        return Ok(Caller { ns, name: "api".to_owned(), scopes: vec![Scope::Admin], pass: None });
    }
    if route.access == Access::Open {
        return Ok(Caller::anybody());
    }
    let written = bearer(headers).map(str::to_owned).or_else(|| socket_key::of(headers));
    let Some(written) = written else {
        return Err(unauthorized("a key is required: send `Authorization: Bearer eddy_…`"));
    };
    // The error does not say which of these it is; only callers that can list keys can find out.
    let Some(key) = api.keyring().find(&written).await? else {
        return Err(unauthorized(INVALID_KEY));
    };
    if let Some(name) = headers.get(NAMESPACE_HEADER)
        && name.as_bytes() != key.ns.as_str().as_bytes()
    {
        let message = format!("this key belongs to the namespace {}, but the request names another", key.ns.as_str());
        return Err(Failure::new(Code::Forbidden, message));
    }
    if let Some(needed) = missing(&key.scopes, route.access) {
        let message = format!("this key lacks the scope {needed}");
        return Err(Failure::new(Code::Forbidden, message));
    }
    if api.keyring().is_disabled(&key.ns) {
        return Err(disabled(&key.ns));
    }
    let (ns, name, scopes) = (key.ns.clone(), key.name.clone(), key.scopes.clone());
    Ok(Caller { ns, name, scopes, pass: Some(Pass { key, access: route.access }) })
}

pub(crate) fn namespace(name: &str) -> Result<Namespace, Failure> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > MAX_NAMESPACE_CHARS || !name.chars().all(allowed) {
        return Err(Failure::bad(format!(
            "the name of a namespace can have up to {MAX_NAMESPACE_CHARS} letters, digits, `.`, `_` and `-`"
        )));
    }
    Ok(Namespace::new(name))
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let written = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = written.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Pages of other sites can make a browser send requests here. `Origin` reveals them, and `Host` reveals DNS rebinding.
fn refuse_other_sites(about: &About, headers: &HeaderMap) -> Result<(), Failure> {
    let text = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let refuse =
        |what: &str| Err(Failure::new(Code::Forbidden, format!("{what}; without keys only this machine has access")));
    // A server that others can reach without keys does not know all of its names.
    let any_name = about.settings.insecure && !about.addr.ip().is_loopback();
    match text(header::HOST) {
        Some(host) if !any_name && !is_ours(about, host) => {
            return refuse("the request is for another host");
        }
        None => return refuse("the request has no `Host` header"),
        _ => {}
    }
    if let Some(origin) = text(header::ORIGIN) {
        let host = origin.split_once("://").map(|(_, host)| host);
        let is_ours = |host: &str| match any_name {
            // For the server's own page, `Origin` and `Host` match.
            true => text(header::HOST).is_some_and(|asked| asked.eq_ignore_ascii_case(host)),
            false => is_ours(about, host) && same_port(host, text(header::HOST)),
        };
        if !host.is_some_and(is_ours) {
            return refuse("the request comes from a page of another site");
        }
    }
    if headers.get("sec-fetch-site").is_some_and(|site| site == "cross-site") {
        return refuse("the request comes from a page of another site");
    }
    Ok(())
}

/// A page on another port of this machine may belong to somebody else.
fn same_port(origin: &str, host: Option<&str>) -> bool {
    host.is_some_and(|host| split_port(host).1 == split_port(origin).1)
}

fn is_ours(about: &About, written: &str) -> bool {
    let (host, _) = split_port(written);
    let loopback = host.eq_ignore_ascii_case("localhost")
        || host
            .trim_start_matches('[')
            .trim_end_matches(']')
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback() || ip == about.addr.ip());
    let public = about.public_url.split_once("://").map_or("", |(_, rest)| rest.split('/').next().unwrap_or(""));
    loopback || split_port(public).0.eq_ignore_ascii_case(host)
}

/// Host and port of `host:port`, `[::1]:port` or either without a port.
fn split_port(written: &str) -> (&str, Option<&str>) {
    match written.rsplit_once(':') {
        Some((host, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => (host, Some(port)),
        _ => (written, None),
    }
}
