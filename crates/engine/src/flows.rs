//! Definitions: registered as documents, parsed once, cached.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eddyline_language::definition::{self, Parsed, Problem, Problems};
use eddyline_language::flow::{Since, Waits};
use eddyline_machine::{ActId, Flow, Millis, Run, StepId};
use eddyline_store::{
    Command, CommandId, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, Expect, Namespace, Store,
};
use serde_json::{Value, json};

use crate::certain;
use crate::config::FLOW_CACHE_BYTES;
use crate::error::{EngineError, Result};
use crate::flow_cache::FlowCache;
use crate::offload::{Offload, on_large_stack};
use crate::schema::{self, Allowance, Mismatch, Schema, TooCostly};

/// The kind of documents that hold the current version of a flow, by name.
pub const FLOW: &str = "flow";
/// The kind of documents that hold a definition, by name and version.
pub const VERSION: &str = "version";
/// The most flows whose current version is cached.
const CURRENT_VERSIONS: usize = 10_000;
/// A larger definition is parsed on another thread, since that takes longer.
const PARSED_AT_ONCE_BYTES: usize = 4 << 10;
/// The memory of a parsed definition as a multiple of its text. 2.5 was measured for definitions of many small steps;
/// templates and schemas take more.
const BYTES_A_BYTE: usize = 8;
/// The memory that any parsed definition takes in addition.
const BYTES_AT_LEAST: usize = 4 << 10;

/// A flow with the compiled schemas of its input and events.
#[derive(Debug)]
pub struct Registered {
    pub flow: Arc<Flow>,
    input: Option<Schema>,
    /// By the step that declares it, and its name.
    emits: BTreeMap<(StepId, String), Schema>,
    bytes: usize,
}

/// The result of a registration.
#[derive(Debug, Clone, PartialEq)]
pub struct Registration {
    pub name: String,
    pub version: String,
    /// True if another version, or none, was current before.
    pub changed: bool,
    pub warnings: Vec<Problem>,
}

/// Parses a definition in JSON or YAML and checks its schemas. Returns all problems at once, or a flow without any.
pub fn parse_definition(name: Option<&str>, text: &str) -> std::result::Result<Parsed, Problems> {
    definition::parse_checked(name, text, &schema::faults)
}

#[derive(Debug)]
pub(crate) struct Flows {
    parsed: Mutex<FlowCache>,
    offload: Offload,
    /// Current versions, each with the value of `documents_changed` when it was read.
    current: Mutex<HashMap<(Namespace, String), (u64, String)>>,
}

impl Default for Flows {
    fn default() -> Flows {
        let parsed = Mutex::new(FlowCache::new(FLOW_CACHE_BYTES));
        Flows { parsed, offload: Offload::default(), current: Mutex::default() }
    }
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
        let (wanted, definition) = (name.map(str::to_owned), text.to_owned());
        let parse = move || {
            let parsed = parse_definition(wanted.as_deref(), &definition)?;
            Ok((Registered::new(parsed.flow), parsed.warnings))
        };
        let parsed = if text.len() > PARSED_AT_ONCE_BYTES { self.offload.run(ns, parse).await? } else { parse() };
        let (registered, warnings) = parsed.map_err(EngineError::Definition)?;
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
            let written = certain::commit_one(store, Command::Documents(commit)).await?;
            if let Some(Err(refused)) = written.commands.into_iter().next() {
                return Err(EngineError::Conflict(refused.to_string()));
            }
        }
        self.keep(ns, Arc::new(registered));
        Ok(Registration { name, version, changed, warnings })
    }

    /// The flow at the given version, or at its current one.
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
            return Ok(Some(found));
        }
        let Some(document) = one(store, ns, VERSION, &id).await? else { return Ok(None) };
        let (text, name) = (document["definition"].to_string(), name.to_owned());
        let heavy = text.len() > PARSED_AT_ONCE_BYTES;
        let parse = move || definition::parse_named(Some(&name), &text).map(|parsed| Registered::new(parsed.flow));
        let parsed = if heavy { self.offload.run(ns, parse).await? } else { parse() };
        let registered = parsed
            .map_err(|problems| EngineError::Bug(format!("the stored definition {id} has problems: {problems}")))?;
        let registered = Arc::new(registered);
        self.keep(ns, registered.clone());
        Ok(Some(registered))
    }

    /// Checks the input of a run against its schema. A long check runs on another thread.
    pub async fn check_input(
        &self,
        ns: &Namespace,
        flow: &Arc<Registered>,
        input: &Arc<Value>,
        bytes: usize,
        allowance: &mut Allowance,
    ) -> Result<std::result::Result<(), Mismatch>> {
        let Some(schema) = &flow.input else { return Ok(Ok(())) };
        // A call that starts thousands of runs must yield to other tasks in between.
        tokio::task::coop::consume_budget().await;
        if let Ok(verdict) = schema.check_at_once(input, allowance) {
            return Ok(verdict);
        }
        let (flow, input, mut left) = (flow.clone(), input.clone(), *allowance);
        let check = move || {
            let verdict = flow.input.as_ref().map_or(Ok(()), |schema| schema.check(&input, bytes, &mut left));
            (verdict, left)
        };
        let (verdict, left) = self.offload.run(ns, check).await?;
        *allowance = left;
        Ok(verdict)
    }

    /// The current version of a flow, read again only if documents may have changed since.
    async fn current(&self, store: &dyn Store, ns: &Namespace, name: &str) -> Result<Option<String>> {
        // Taken before the read: if the document changes meanwhile, the next call reads it again.
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
            if versions.len() >= CURRENT_VERSIONS {
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
        let id = versioned(&registered.flow.name, &registered.flow.version);
        self.parsed().put((ns.clone(), id), registered);
    }

    fn parsed(&self) -> MutexGuard<'_, FlowCache> {
        self.parsed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    pub(crate) fn new(flow: Flow) -> Registered {
        let input = flow.input_schema.as_ref().map(Schema::stored);
        let mut emits = BTreeMap::new();
        let events = flow.graph().into_iter().flat_map(|graph| &graph.scopes).flat_map(|scope| &scope.events);
        for event in events {
            for (step, schema) in &event.producers {
                if let Some(schema) = schema {
                    emits.insert((*step, event.name.clone()), Schema::stored(schema));
                }
            }
        }
        let schemas: usize = input.iter().chain(emits.values()).map(Schema::bytes).sum();
        let bytes = BYTES_AT_LEAST + BYTES_A_BYTE * json_bytes(&flow.canonical) + schemas;
        Registered { flow: Arc::new(flow), input, emits, bytes }
    }

    /// Its estimated memory.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The longest `since` of its event gates that is a duration, not the start of the run.
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

    /// Checks an event that an activation emits against its schema. The cost is bounded but not small: never call this
    /// on the committer's thread.
    pub(crate) fn check_emit(
        &self,
        run: &Run,
        by: ActId,
        event: &str,
        payload: &Value,
        allowance: &mut Allowance,
    ) -> std::result::Result<(), String> {
        let schema = run.step(by).and_then(|step| self.emits.get(&(step, event.to_owned())));
        let Some(schema) = schema else { return Ok(()) };
        let verdict = match schema.check_at_once(payload, allowance) {
            Ok(verdict) => verdict,
            Err(TooCostly) => on_large_stack(|| schema.check(payload, json_bytes(payload), allowance))
                .unwrap_or_else(|| Err(Mismatch::Invalid(vec!["the server could not check it; try again".to_owned()]))),
        };
        verdict.map_err(|mismatch| match mismatch {
            Mismatch::Invalid(details) => {
                format!("the payload of {event} does not match its schema: {}", details.join("; "))
            }
            Mismatch::Exhausted(limit) => limit,
        })
    }
}

pub(crate) async fn current_version(store: &dyn Store, ns: &Namespace, name: &str) -> Result<Option<String>> {
    let document = one(store, ns, FLOW, name).await?;
    Ok(document.and_then(|body| body["version"].as_str().map(str::to_owned)))
}

async fn one(store: &dyn Store, ns: &Namespace, kind: &str, id: &str) -> Result<Option<Value>> {
    let filter = DocumentFilter { kind: kind.to_owned(), id: Some(id.to_owned()), ..DocumentFilter::default() };
    Ok(store.documents(Some(ns), &filter, 1).await?.pop().map(|document| document.body))
}

/// The length of a value as JSON.
fn json_bytes(value: &Value) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // A writer that only counts cannot fail.
    let _ = serde_json::to_writer(&mut count, value);
    count.0
}

pub(crate) fn versioned(name: &str, version: &str) -> String {
    format!("{name}@{version}")
}
