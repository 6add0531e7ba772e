//! Compares `openapi.json` with the table of routes.

use std::collections::BTreeSet;

use eddyline_server::{Access, Route, routes};
use serde_json::{Value, json};

use crate::document::document;

#[test]
fn every_route_is_described_and_nothing_else_is() {
    let of = |route: &Route| format!("{} {}", route.method.as_str().to_lowercase(), route.path);
    let table: BTreeSet<String> = routes().iter().map(of).collect();
    let paths = document()["paths"].as_object().unwrap();
    let described: BTreeSet<String> = paths
        .iter()
        .flat_map(|(path, methods)| methods.as_object().unwrap().keys().map(move |method| format!("{method} {path}")))
        .collect();
    assert_eq!(table, described);
    assert_eq!(table.len(), routes().len(), "a route occurs twice");
}

#[test]
fn the_document_says_which_scope_a_route_takes_and_which_parts_its_path_has() {
    for route in routes() {
        let described = &document()["paths"][route.path][route.method.as_str().to_lowercase()];
        let scopes = match route.access {
            Access::Open => json!([]),
            Access::Key => json!([{"key": []}]),
            Access::Needs(scope) => json!([{"key": [scope]}]),
            Access::Either(one, other) => json!([{"key": [one]}, {"key": [other]}]),
        };
        assert_eq!(described["security"], scopes, "{}", route.path);
        let none = Vec::new();
        let parameters = described["parameters"].as_array().unwrap_or(&none);
        let named: Vec<&str> = parameters
            .iter()
            .filter(|parameter| parameter["in"] == "path")
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect();
        let parts: Vec<&str> =
            route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')).collect();
        assert_eq!(named, parts, "{}", route.path);
        if route.access != Access::Open {
            assert!(!described["responses"]["401"].is_null(), "{}", route.path);
        }
    }
}

#[test]
fn every_reference_leads_somewhere() {
    fn walk(value: &Value, whole: &Value) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(to)) = fields.get("$ref") {
                    assert!(whole.pointer(to.trim_start_matches('#')).is_some(), "{to}");
                }
                fields.values().for_each(|value| walk(value, whole));
            }
            Value::Array(items) => items.iter().for_each(|value| walk(value, whole)),
            _ => {}
        }
    }
    walk(document(), document());
    assert_eq!(document()["openapi"], "3.1.0");
}
