//! The schemas of handlers, as workers register them: for forms, generated types and readers. Inputs are not checked
//! against them.

use std::collections::BTreeMap;

use eddyline_language::definition::Problems;
use eddyline_store::{DocumentChange, DocumentKey, Expect, Namespace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::flows::parse_definition;

/// The kind of documents that hold the schemas of handlers, by name.
const HANDLER: &str = "handler";

/// What a handler takes and returns, as JSON Schemas.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HandlerSchemas {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_schema: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_schema: Option<Value>,
}

impl Engine {
    /// Keeps the schemas of handlers. The latest worker that registers a handler determines them. The problems of all
    /// schemas are returned together, and then nothing is kept.
    pub async fn bring_handlers(&self, ns: &Namespace, handlers: BTreeMap<String, HandlerSchemas>) -> Result<()> {
        let mut changes = Vec::new();
        let mut problems = Vec::new();
        for (name, schemas) in handlers {
            let body = json!(schemas);
            let stored = self.instance.document(Some(ns), HANDLER, &name).await?;
            if stored.is_some_and(|stored| stored.body == body) {
                continue;
            }
            problems.extend(faults(&name, &schemas).await?);
            let key = DocumentKey::new(HANDLER, &name);
            changes.push(DocumentChange { key, expect: Expect::Any, body: Some(body), due: None });
        }
        if !problems.is_empty() {
            return Err(EngineError::Definition(Problems(problems)));
        }
        if !changes.is_empty() {
            self.instance.put_all(ns, changes).await?;
        }
        Ok(())
    }

    /// The handlers that registered schemas, by name, after the given one.
    pub async fn handlers(
        &self,
        ns: &Namespace,
        after: Option<String>,
        limit: usize,
    ) -> Result<Vec<(String, HandlerSchemas)>> {
        let documents = self.instance.documents(ns, HANDLER, after, limit).await?;
        let read = |body| serde_json::from_value(body).unwrap_or_default();
        Ok(documents.into_iter().map(|document| (document.key.id, read(document.body))).collect())
    }
}

/// Checks the schemas with the parser of definitions, off this thread: a large schema takes a while.
async fn faults(name: &str, schemas: &HandlerSchemas) -> Result<Vec<eddyline_language::definition::Problem>> {
    let mut definition = json!(schemas);
    definition["code"] = json!(true);
    let text = definition.to_string();
    let checked = tokio::task::spawn_blocking(move || parse_definition(Some("handler"), &text).err()).await;
    let found = checked.map_err(|error| EngineError::Bug(format!("checking a schema panicked: {error}")))?;
    let problems = found.map(|problems| problems.0).unwrap_or_default();
    Ok(problems
        .into_iter()
        .map(|mut problem| {
            problem.path = format!("handler_schemas.{name}.{}", problem.path).trim_end_matches('.').to_owned();
            problem
        })
        .collect())
}
