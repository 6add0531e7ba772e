//! Who may come in. With keys, a key; without, only pages and programs of this machine.

use axum::http::{HeaderMap, header};
use eddyline_protocol::{Code, NAMESPACE_HEADER, Scope};
use eddyline_store::Namespace;

use super::failure::Failure;
use super::keyring::{Key, word};
use super::routes::{Access, Route};
use super::{About, Api};

/// The longest name of a namespace.
pub(crate) const MAX_NAMESPACE_CHARS: usize = 64;

/// Whose request it is.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub ns: Namespace,
    /// Who is said to have done what this request does.
    pub name: String,
    scopes: Vec<Scope>,
    pass: Option<Pass>,
}

/// What let a caller in, and must go on doing so for as long as it waits.
#[derive(Debug, Clone)]
struct Pass {
    key: Key,
    access: Access,
}

impl Caller {
    /// `admin` reaches everything.
    pub fn may(&self, scope: Scope) -> bool {
        self.scopes.contains(&scope) || self.scopes.contains(&Scope::Admin)
    }

    fn anybody() -> Caller {
        Caller { ns: Namespace::default(), name: "anybody".to_owned(), scopes: Vec::new(), pass: None }
    }

    /// Comes back when the caller would not be let in any more: its key was revoked, has expired, or lacks the scope by now,
    /// or its namespace was disabled.
    pub async fn shut_out(&self, api: &Api) -> Failure {
        tokio::select! {
            failure = self.key_lost(api) => failure,
            failure = self.namespace_disabled(api) => failure,
        }
    }

    async fn namespace_disabled(&self, api: &Api) -> Failure {
        let mut watched = api.keyring().disabled();
        // It errs only when the server is gone, and the caller with it.
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
                    return stranger(INVALID_KEY);
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

fn stranger(message: &str) -> Failure {
    Failure::new(Code::Unauthorized, message)
}

fn disabled(ns: &Namespace) -> Failure {
    Failure::new(Code::Forbidden, format!("the namespace {ns} is disabled"))
}

/// The scope that a key would need besides those it has.
fn missing(scopes: &[Scope], access: Access) -> Option<String> {
    let may = |scope: Scope| scopes.contains(&scope) || scopes.contains(&Scope::Admin);
    match access {
        Access::Needs(scope) if !may(scope) => Some(word(scope).to_owned()),
        Access::Either(one, other) if !may(one) && !may(other) => Some(format!("{} or {}", word(one), word(other))),
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
    let Some(written) = bearer(headers) else {
        return Err(stranger("a key is needed, as `Authorization: Bearer eddy_…`"));
    };
    // Which of these it is, only whoever may list keys is told.
    let Some(key) = api.keyring().find(written).await? else {
        return Err(stranger(INVALID_KEY));
    };
    if let Some(name) = headers.get(NAMESPACE_HEADER)
        && name.as_bytes() != key.ns.as_str().as_bytes()
    {
        let message = format!("this key is of the namespace {}, and the request is for another", key.ns.as_str());
        return Err(Failure::new(Code::Forbidden, message));
    }
    if let Some(needed) = missing(&key.scopes, route.access) {
        let message = format!("this key's scopes do not reach so far: {needed} is needed");
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
            "the name of a namespace has letters, digits, `.`, `_` and `-`, at most {MAX_NAMESPACE_CHARS}"
        )));
    }
    Ok(Namespace::new(name))
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let written = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = written.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// A page of another site can make a browser send requests here. Its `Origin` gives it away, and where the name of its own
/// host was made to lead here, `Host` does.
fn refuse_other_sites(about: &About, headers: &HeaderMap) -> Result<(), Failure> {
    let text = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let refuse =
        |what: &str| Err(Failure::new(Code::Forbidden, format!("{what}; keys are off, so only this machine may")));
    // A server that others may reach without keys goes by names that it does not know.
    let any_name = about.settings.insecure && !about.addr.ip().is_loopback();
    match text(header::HOST) {
        Some(host) if !any_name && !is_ours(about, host) => {
            return refuse("the request is for another host");
        }
        None => return refuse("the request does not say for which host it is"),
        _ => {}
    }
    if let Some(origin) = text(header::ORIGIN) {
        let host = origin.split_once("://").map(|(_, host)| host);
        let is_ours = |host: &str| match any_name {
            // A page of its own says the same one twice.
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

/// Another port on this machine may be somebody else's page.
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
