//! Definitions: registered as documents, parsed once, kept at hand.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eddyline_machine::definition::{self, Parsed, Problem, Problems, SchemaFault};
use eddyline_machine::flow::{Since, Waits};
use eddyline_machine::{ActId, Flow, Millis, Run, StepId};
use eddyline_store::{
    Command, CommandId, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, Expect, Namespace, Store,
};
use jsonschema::error::ValidationErrorKind;
use jsonschema::{ReferencingError, ValidationError, Validator};
use serde_json::{Value, json};

use crate::error::{EngineError, Result};

/// The current version of a flow, by name.
pub const FLOW: &str = "flow";
/// A definition, by name and version.
pub const VERSION: &str = "version";
/// Parsed definitions at hand.
const AT_HAND: usize = 1_000;
/// Problems of a payload, or of a schema, that are told at once.
const MAX_DETAILS: usize = 20;
/// Bytes of one of them.
const MAX_DETAIL_BYTES: usize = 1 << 10;

/// A flow with what is checked at its borders.
#[derive(Debug)]
pub struct Registered {
    pub flow: Arc<Flow>,
    input: Option<Validator>,
    /// By the step that declares it, and its name.
    emits: BTreeMap<(StepId, String), Validator>,
}

/// What came of a registration.
#[derive(Debug, Clone, PartialEq)]
pub struct Registration {
    pub name: String,
    pub version: String,
    /// It was not the current version before.
    pub changed: bool,
    pub warnings: Vec<Problem>,
}

/// A text in JSON or YAML to a flow, its schemas checked as well: every problem at once, nothing unless there are none.
pub fn parse_definition(name: Option<&str>, text: &str) -> std::result::Result<Parsed, Problems> {
    definition::parse_checked(name, text, &schema_faults)
}

#[derive(Debug, Default)]
pub(crate) struct Flows {
    parsed: Mutex<HashMap<(Namespace, String), Arc<Registered>>>,
    /// Current versions, each with the number of the last change of documents at which it was read.
    current: Mutex<HashMap<(Namespace, String), (u64, String)>>,
}

impl Flows {
    pub async fn register(
        &self,
        store: &dyn Store,
        command: CommandId,
        ns: &Namespace,
        name: Option<&str>,
        text: &str,
    ) -> Result<Registration> {
        let parsed = parse_definition(name, text).map_err(EngineError::Definition)?;
        let flow = parsed.flow;
        let registered = Registered::new(flow)?;
        let (name, version) = (registered.flow.name.clone(), registered.flow.version.clone());
        let current = current_version(store, ns, &name).await?;
        let changed = current.as_deref() != Some(version.as_str());
        if changed {
            let put = |kind, id, body| DocumentChange {
                key: DocumentKey::new(kind, id),
                expect: Expect::Any,
                body: Some(body),
                due: None,
            };
            let definition = json!({"name": name, "version": version, "definition": registered.flow.canonical});
            let documents = vec![
                put(VERSION, versioned(&name, &version), definition),
                put(FLOW, name.clone(), json!({"version": version})),
            ];
            let ns = ns.clone();
            let commit =
                DocumentCommit { ns, command, documents, messages: Vec::new(), events: Vec::new(), drops: Vec::new() };
            let written = store.commit(vec![Command::Documents(commit)], Vec::new()).await?;
            if let Some(Err(refused)) = written.commands.into_iter().next() {
                return Err(EngineError::Conflict(refused.to_string()));
            }
        }
        self.keep(ns, Arc::new(registered));
        Ok(Registration { name, version, changed, warnings: parsed.warnings })
    }

    /// The flow at that version, or at its current one.
    pub async fn find(
        &self,
        store: &dyn Store,
        ns: &Namespace,
        name: &str,
        version: Option<&str>,
    ) -> Result<Option<Arc<Registered>>> {
        let current;
        let version = match version {
            Some(version) => version,
            None => match self.current(store, ns, name).await? {
                Some(found) => {
                    current = found;
                    &current
                }
                None => return Ok(None),
            },
        };
        let id = versioned(name, version);
        if let Some(found) = self.parsed().get(&(ns.clone(), id.clone())) {
            return Ok(Some(found.clone()));
        }
        let Some(document) = one(store, ns, VERSION, &id).await? else { return Ok(None) };
        let text = document["definition"].to_string();
        let parsed = definition::parse_named(Some(name), &text)
            .map_err(|problems| EngineError::Bug(format!("the stored definition {id} has problems: {problems}")))?;
        let registered = Arc::new(Registered::new(parsed.flow)?);
        self.keep(ns, registered.clone());
        Ok(Some(registered))
    }

    /// The current version of a flow, read again only if documents have changed since, or may have.
    async fn current(&self, store: &dyn Store, ns: &Namespace, name: &str) -> Result<Option<String>> {
        // Taken before the read: what is read may be newer, and is read once more then.
        let Some(changed) = store.documents_changed() else { return current_version(store, ns, name).await };
        let key = (ns.clone(), name.to_owned());
        let known = |versions: &HashMap<_, (u64, String)>| {
            versions.get(&key).filter(|(at, _)| *at == changed).map(|(_, version)| version.clone())
        };
        if let Some(version) = known(&self.versions()) {
            return Ok(Some(version));
        }
        let version = current_version(store, ns, name).await?;
        if let Some(version) = &version {
            let mut versions = self.versions();
            if versions.len() >= AT_HAND {
                versions.clear();
            }
            versions.insert(key, (changed, version.clone()));
        }
        Ok(version)
    }

    fn versions(&self) -> MutexGuard<'_, HashMap<(Namespace, String), (u64, String)>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, ns: &Namespace, registered: Arc<Registered>) {
        let mut parsed = self.parsed();
        if parsed.len() >= AT_HAND {
            parsed.clear();
        }
        parsed.insert((ns.clone(), versioned(&registered.flow.name, &registered.flow.version)), registered);
    }

    fn parsed(&self) -> MutexGuard<'_, HashMap<(Namespace, String), Arc<Registered>>> {
        self.parsed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    fn new(flow: Flow) -> Result<Registered> {
        let input = flow.input_schema.as_ref().map(|schema| compile("input_schema", schema)).transpose()?;
        let mut emits = BTreeMap::new();
        let events = flow.graph().into_iter().flat_map(|graph| &graph.scopes).flat_map(|scope| &scope.events);
        for event in events {
            for (step, schema) in &event.producers {
                if let Some(schema) = schema {
                    emits.insert((*step, event.name.clone()), compile(&format!("emits.{}", event.name), schema)?);
                }
            }
        }
        Ok(Registered { flow: Arc::new(flow), input, emits })
    }

    /// What is wrong with the input of a run.
    pub fn check_input(&self, input: &Value) -> std::result::Result<(), Vec<String>> {
        self.input.as_ref().map_or(Ok(()), |schema| check(schema, input))
    }

    /// How far back its gates look for events, as far as that is a time and not the life of a run.
    pub(crate) fn look_back_ms(&self) -> Millis {
        let gates = self.flow.graph().into_iter().flat_map(|graph| &graph.steps).filter_map(|step| step.gate.as_ref());
        let since = gates.filter_map(|gate| match gate.waits {
            Waits::Event { since: Since::Ago { ms }, .. } => Some(ms),
            _ => None,
        });
        since.max().unwrap_or(0)
    }

    pub(crate) fn checks_emits(&self) -> bool {
        !self.emits.is_empty()
    }

    /// What is wrong with an event that an activation emits.
    pub(crate) fn check_emit(
        &self,
        run: &Run,
        by: ActId,
        event: &str,
        payload: &Value,
    ) -> std::result::Result<(), String> {
        let schema = run.step(by).and_then(|step| self.emits.get(&(step, event.to_owned())));
        let Some(schema) = schema else { return Ok(()) };
        check(schema, payload).map_err(|details| {
            format!("the payload of {event} is not what its schema asks for: {}", details.join("; "))
        })
    }
}

fn check(schema: &Validator, value: &Value) -> std::result::Result<(), Vec<String>> {
    let details: Vec<String> = schema
        .iter_errors(value)
        .take(MAX_DETAILS)
        .map(|error| match error.instance_path().as_str() {
            "" => cut(error.to_string()),
            path => cut(format!("{path}: {error}")),
        })
        .collect();
    if details.is_empty() { Ok(()) } else { Err(details) }
}

/// What a schema refuses is quoted, and may have megabytes.
fn cut(mut detail: String) -> String {
    if detail.len() > MAX_DETAIL_BYTES {
        detail.truncate(detail.floor_char_boundary(MAX_DETAIL_BYTES));
        detail.push('…');
    }
    detail
}

/// What is wrong with a JSON Schema. What it could only be refused for when it is put to use, such as a reference to
/// nowhere, is told once it has the right shape.
fn schema_faults(schema: &Value) -> Vec<SchemaFault> {
    let fault = |error: &ValidationError<'_>| SchemaFault {
        path: error.instance_path().as_str().split('/').skip(1).map(unescaped).collect(),
        message: wrong_with(error),
    };
    let shape = match jsonschema::meta::validator_for(schema) {
        Ok(shape) => shape,
        Err(error) => return vec![fault(&error)],
    };
    let faults: Vec<SchemaFault> = shape.iter_errors(schema).take(MAX_DETAILS).map(|error| fault(&error)).collect();
    match jsonschema::validator_for(schema) {
        Err(error) if faults.is_empty() => vec![fault(&error)],
        _ => faults,
    }
}

fn wrong_with(error: &ValidationError<'_>) -> String {
    match error.kind() {
        ValidationErrorKind::Referencing(ReferencingError::Unretrievable { uri, .. }) => {
            format!("it refers to {uri}, and nothing is fetched from elsewhere")
        }
        _ => error.to_string(),
    }
}

/// A key, from the way it is written in a JSON Pointer.
fn unescaped(segment: &str) -> String {
    segment.replace("~1", "/").replace("~0", "~")
}

fn compile(what: &str, schema: &Value) -> Result<Validator> {
    jsonschema::validator_for(schema)
        .map_err(|error| EngineError::invalid(format!("{what} is not a JSON Schema: {error}")))
}

pub(crate) async fn current_version(store: &dyn Store, ns: &Namespace, name: &str) -> Result<Option<String>> {
    let document = one(store, ns, FLOW, name).await?;
    Ok(document.and_then(|body| body["version"].as_str().map(str::to_owned)))
}

async fn one(store: &dyn Store, ns: &Namespace, kind: &str, id: &str) -> Result<Option<Value>> {
    let filter = DocumentFilter { kind: kind.to_owned(), id: Some(id.to_owned()), ..DocumentFilter::default() };
    Ok(store.documents(Some(ns), &filter, 1).await?.pop().map(|document| document.body))
}

pub(crate) fn versioned(name: &str, version: &str) -> String {
    format!("{name}@{version}")
}
