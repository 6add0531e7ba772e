//! The query parameters and body that a call accepts, as described in `openapi.json`, which callers rely on.

use std::collections::HashMap;
use std::sync::LazyLock;

use eddyline_language::nearest::nearest;
use serde_json::Value;

use super::failure::Failure;
use super::info::OPENAPI;
use super::routes::{Route, routes};

/// What a call accepts.
#[derive(Debug, Default)]
pub(crate) struct Takes {
    /// The names of its query parameters.
    pub query: Vec<String>,
    pub body: bool,
}

/// What a route accepts.
pub(crate) fn of(route: &'static Route) -> &'static Takes {
    static NOTHING: Takes = Takes { query: Vec::new(), body: false };
    BY_ROUTE.get(&(route.method.as_str(), route.path)).unwrap_or(&NOTHING)
}

/// A parameter that a call does not know would have no effect, and a misspelt filter would show everything.
pub(crate) fn refuse_unknown(query: &[(String, String)], known: &[String]) -> Result<(), Failure> {
    let Some((unknown, _)) = query.iter().find(|(name, _)| !known.contains(name)) else { return Ok(()) };
    let shown: String = unknown.chars().take(40).collect();
    let help = match nearest(unknown, known.iter().map(String::as_str)) {
        Some(near) => format!("did you mean `{near}`?"),
        None if known.is_empty() => "this call has no parameters".to_owned(),
        None => format!("known here: {}", known.join(", ")),
    };
    Err(Failure::bad(format!("unknown parameter `{shown}`; {help}")))
}

static BY_ROUTE: LazyLock<HashMap<(&'static str, &'static str), Takes>> = LazyLock::new(|| {
    let document: Value = serde_json::from_str(OPENAPI).unwrap_or_default();
    let described = |route: &'static Route| {
        let call = &document["paths"][route.path][route.method.as_str().to_lowercase()];
        let named = call["parameters"].as_array().into_iter().flatten();
        let query =
            named.map(|parameter| resolved(parameter, &document)).filter(|parameter| parameter["in"] == "query");
        let query = query.filter_map(|parameter| parameter["name"].as_str().map(str::to_owned)).collect();
        ((route.method.as_str(), route.path), Takes { query, body: !call["requestBody"].is_null() })
    };
    routes().iter().map(described).collect()
});

/// Follows a reference to a shared parameter.
fn resolved<'a>(parameter: &'a Value, document: &'a Value) -> &'a Value {
    let shared = parameter["$ref"].as_str().and_then(|to| document.pointer(to.trim_start_matches('#')));
    shared.unwrap_or(parameter)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_document_names_what_a_call_takes() {
        let find = |method: &str, path: &str| {
            of(routes().iter().find(|route| route.method.as_str() == method && route.path == path).unwrap())
        };
        let gates = find("GET", "/v1/gates");
        assert!(gates.query.iter().any(|name| name == "reason") && gates.query.iter().any(|name| name == "limit"));
        assert!(!gates.query.iter().any(|name| name == "Eddyline-Namespace"), "a header");
        assert!(!gates.body && !find("POST", "/v1/runs/{id}/pause").body && find("POST", "/v1/keys").body);
    }
}
