//! `openapi.json`, compared with the table of routes and with every answer.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, OnceLock};

use eddyline_server::{Access, Route, routes};
use hyper::Method;
use jsonschema::Validator;
use serde_json::{Value, json};

fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| serde_json::from_str(include_str!("../../openapi.json")).unwrap())
}

/// The answer is one that the document says there can be, and has the body that it says.
pub fn check(method: &Method, path: &str, status: u16, body: &Value) {
    let Some(route) = routes().iter().find(|route| route.method == *method && fits(route.path, path)) else {
        assert!(matches!(status, 404 | 405), "{method} {path} is in no table, and came to {status}");
        return check_body("Error", &json!({"$ref": "#/components/schemas/Error"}), body);
    };
    let described = &document()["paths"][route.path][route.method.as_str().to_lowercase()];
    let mut response = &described["responses"][status.to_string()];
    if let Some(name) = response["$ref"].as_str() {
        response = document().pointer(name.trim_start_matches('#')).unwrap();
    }
    assert!(!response.is_null(), "{method} {} does not say that it can come to {status}: {body}", route.path);
    let content = &response["content"]["application/json"];
    if !content.is_null() {
        check_body(&format!("{method} {} {status}", route.path), &content["schema"], body);
    }
}

fn check_body(what: &str, schema: &Value, body: &Value) {
    static VALIDATORS: OnceLock<Mutex<HashMap<String, &'static Validator>>> = OnceLock::new();
    let validators = VALIDATORS.get_or_init(Mutex::default);
    let key = schema.to_string();
    let known = validators.lock().unwrap().get(&key).copied();
    let validator = known.unwrap_or_else(|| {
        let mut whole = schema.clone();
        whole["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
        whole["components"] = document()["components"].clone();
        let made: &'static Validator = Box::leak(Box::new(jsonschema::validator_for(&whole).unwrap()));
        validators.lock().unwrap().insert(key, made);
        made
    });
    let wrong: Vec<String> =
        validator.iter_errors(body).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(wrong.is_empty(), "{what} is not as it is described: {wrong:#?}\n{body}");
}

fn fits(template: &str, path: &str) -> bool {
    let (template, path): (Vec<&str>, Vec<&str>) = (template.split('/').collect(), path.split('/').collect());
    template.len() == path.len()
        && template.iter().zip(&path).all(|(part, found)| part.starts_with('{') || part == found)
}

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
    assert_eq!(table.len(), routes().len(), "a route is there twice");
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
