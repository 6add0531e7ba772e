//! Compares every response that a test gets with `openapi.json`.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use eddyline_server::routes;
use hyper::Method;
use jsonschema::Validator;
use serde_json::{Value, json};

pub fn document() -> &'static Value {
    static DOCUMENT: OnceLock<Value> = OnceLock::new();
    DOCUMENT.get_or_init(|| serde_json::from_str(include_str!("../../openapi.json")).unwrap())
}

/// Checks that the document describes this response and its body.
pub fn check(method: &Method, path: &str, status: u16, body: &Value) {
    let Some(route) = routes().iter().find(|route| route.method == *method && fits(route.path, path)) else {
        assert!(matches!(status, 404 | 405), "{method} {path} is not in the table of routes, but returned {status}");
        return check_body("Error", &json!({"$ref": "#/components/schemas/Error"}), body);
    };
    let described = &document()["paths"][route.path][route.method.as_str().to_lowercase()];
    let mut response = &described["responses"][status.to_string()];
    if let Some(name) = response["$ref"].as_str() {
        response = document().pointer(name.trim_start_matches('#')).unwrap();
    }
    assert!(!response.is_null(), "{method} {} does not describe the status {status}: {body}", route.path);
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
    assert!(wrong.is_empty(), "{what} does not match its description: {wrong:#?}\n{body}");
}

fn fits(template: &str, path: &str) -> bool {
    let (template, path): (Vec<&str>, Vec<&str>) = (template.split('/').collect(), path.split('/').collect());
    template.len() == path.len()
        && template.iter().zip(&path).all(|(part, found)| part.starts_with('{') || part == found)
}
