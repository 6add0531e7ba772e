//! Assembles a claimed task for its worker: payloads, run input, memo.

use std::collections::BTreeMap;
use std::sync::Arc;

use eddyline_language::data::MAX_BUILT_BYTES;
use eddyline_language::time::iso;
use eddyline_machine::memo::{MemoEntry, MemoState};
use eddyline_machine::run::{End, Header, MemoKind};
use eddyline_machine::{Data, Failure, Millis, Run, RunId, TaskKind, Unbuilt, ValueId};
use eddyline_store::{Claimed, Found, Namespace, Store};
use serde_json::{Map, Value, json};

use crate::config::{MAX_INPUT_BYTES, MAX_MEMO_BYTES};
use crate::error::{EngineError, Result};
use crate::flows::Flows;
use crate::run_cache::CachedRun;
use crate::token::TaskToken;

/// Loaded payloads, by key.
pub(crate) type Values = BTreeMap<ValueId, Data>;

/// A claimed task on its way from the committer to a worker, with what the committer had cached of its run.
#[derive(Debug)]
pub(crate) struct Handed {
    pub claimed: Claimed,
    about: Option<About>,
    values: Values,
}

/// The facts from the run's header that every task of it carries.
#[derive(Debug)]
struct About {
    input: Data,
    version: String,
    key_run: RunId,
    traceparent: Option<String>,
    /// For a code run: when its function could first run.
    began_at: Option<Millis>,
}

impl About {
    fn of(header: &Header) -> About {
        About {
            input: header.input.clone().unwrap_or_else(Data::null),
            version: header.flow_version.clone(),
            key_run: header.key_run(),
            traceparent: header.traceparent.clone(),
            began_at: header.code.as_ref().map(|code| code.began_at),
        }
    }
}

/// Part of the memo of a code run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MemoPart {
    pub entries: Map<String, Value>,
    /// Set if not everything fitted: the number of the last entry, after which it goes on.
    pub next: Option<u64>,
}

/// The last phase of a code run.
#[derive(Debug, Clone, PartialEq)]
pub struct UnwindingRun {
    /// The error that it ends with; none if it was cancelled.
    pub error: Option<Failure>,
    /// The reason given with the cancel.
    pub reason: Option<String>,
    pub until: Option<Millis>,
}

/// A task with everything that a handler needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    pub token: TaskToken,
    pub run: RunId,
    pub flow: String,
    pub version: String,
    pub step: String,
    pub activation: String,
    pub handler: String,
    pub attempt: u32,
    pub kind: TaskKind,
    pub input: Arc<Value>,
    pub run_input: Arc<Value>,
    pub gate: Option<Arc<Value>>,
    /// The same for every attempt: the idempotency key for the handler's effects.
    pub key: String,
    /// The run whose idempotency keys it uses: of a retry, the run that it retries.
    pub intent: RunId,
    pub lease_ms: Millis,
    pub deadline: Option<Millis>,
    /// Of a code run: when its function could first run.
    pub started_at: Option<Millis>,
    /// How many attempts its retry policy allows.
    pub attempts: Option<u32>,
    /// Of a code run: its memo entries by name, the oldest up to [`MAX_MEMO_BYTES`]. The worker fetches the rest.
    pub memo: Option<Map<String, Value>>,
    /// The number after which the memo goes on, if it is not complete.
    pub memo_next: Option<u64>,
    /// Of a code run in its last phase.
    pub unwind: Option<UnwindingRun>,
    /// The W3C `traceparent` of its run.
    pub traceparent: Option<String>,
    /// Its flow has steps with `undo`: its final report is accepted even after a cancel.
    pub undo: bool,
    /// About how many bytes its inputs have.
    pub bytes: usize,
}

impl Handed {
    pub fn new(cached: Option<&CachedRun>, claimed: Claimed) -> Handed {
        let Some(cached) = cached else { return Handed { claimed, about: None, values: Values::new() } };
        let about = About::of(&cached.run.header);
        let mut values = Values::new();
        for data in [Some(&claimed.task.input), claimed.task.gate.as_ref(), Some(&about.input)].into_iter().flatten() {
            // Payloads that are too large are not assembled anyway.
            if data.bytes(MAX_INPUT_BYTES) <= MAX_INPUT_BYTES {
                gather(data, &cached.run, &mut values);
            }
        }
        Handed { claimed, about: Some(about), values }
    }

    /// Moves the payloads out for assembling; the claim stays here too, so that it can be released.
    pub fn take_up(&mut self) -> Handed {
        Handed { claimed: self.claimed.clone(), about: self.about.take(), values: std::mem::take(&mut self.values) }
    }

    /// About how many bytes its inputs have.
    pub fn bytes(&self) -> usize {
        let task = &self.claimed.task;
        let run_input = self.about.as_ref().map(|about| &about.input);
        [Some(&task.input), task.gate.as_ref(), run_input]
            .into_iter()
            .flatten()
            .map(|data| data.bytes(MAX_INPUT_BYTES))
            .sum()
    }

    /// Drops its payloads; [`Handed::assemble`] reads them again.
    pub fn forget_values(&mut self) {
        self.values = Values::new();
    }

    /// Assembles the task, reading the payloads that are missing.
    ///
    /// This is not noted as handling the run ([`crate::handled`]): it evaluates no expression, and what it reads and
    /// copies is bounded whatever the run contains. Each payload has at most [`MAX_INPUT_BYTES`], the memo of a code
    /// run [`MAX_MEMO_BYTES`] plus one entry, and the depth of a payload is checked before it is built.
    pub async fn assemble(
        mut self,
        store: &dyn Store,
        flows: &Flows,
        hooks: &str,
        token: TaskToken,
    ) -> Result<Assignment> {
        let run = self.claimed.run;
        let About { input: run_input, version, key_run, traceparent, began_at } = match self.about.take() {
            Some(about) => about,
            None => match store.summary(run).await? {
                Some(summary) => About::of(&summary.header),
                None => return Err(EngineError::no_run(run)),
            },
        };
        let claimed = &self.claimed;
        let task = claimed.task.clone();
        let payloads = [Some(&task.input), task.gate.as_ref(), Some(&run_input)];
        let bytes = payloads.into_iter().flatten().map(|data| data.bytes(MAX_INPUT_BYTES)).sum();
        let flow = flows.find(store, &claimed.ns, &claimed.flow, Some(&version)).await?;
        let undo = flow.is_some_and(|flow| flow.flow.graph().is_some_and(|graph| graph.has_undo));
        let memo = match task.kind {
            TaskKind::Step => None,
            TaskKind::Run => Some(memo(store, flows, hooks, &claimed.ns, run, |_| true).await?),
        };
        let (memo, unwind) = memo.map_or((None, None), |(part, unwind)| (Some(part), unwind));
        let (memo, memo_next) = memo.map_or((None, None), |part| (Some(part.entries), part.next));
        // A call of a code run keeps its key when a later attempt of the function asks for it again under its name.
        let keyed_by = if began_at.is_some() && task.kind == TaskKind::Step { &task.step } else { &task.name };
        Ok(Assignment {
            token,
            run,
            flow: claimed.flow.clone(),
            version,
            step: task.step.clone(),
            activation: task.name.clone(),
            handler: task.handler.clone(),
            attempt: task.attempt,
            kind: task.kind,
            key: format!("{key_run}/{keyed_by}"),
            intent: key_run,
            lease_ms: claimed.held.lease_ms,
            deadline: claimed.held.deadline,
            input: self.json(store, &task.input).await?,
            run_input: self.json(store, &run_input).await?,
            gate: match &task.gate {
                Some(gate) => Some(self.json(store, gate).await?),
                None => None,
            },
            started_at: began_at.filter(|_| task.kind == TaskKind::Run),
            attempts: task.attempts,
            memo,
            memo_next,
            unwind,
            traceparent,
            undo,
            bytes,
        })
    }

    /// A payload as JSON, shared instead of copied if it is stored in one piece: the run's input goes with each task.
    async fn json(&mut self, store: &dyn Store, data: &Data) -> Result<Arc<Value>> {
        if let Data::Ref(value) = data
            && value.bytes as usize <= MAX_INPUT_BYTES
            && !self.values.contains_key(&value.id)
        {
            self.values.extend(store.values(self.claimed.run, &[value.id]).await?);
        }
        let whole = match data {
            Data::Ref(value) => self.values.get(&value.id),
            other => Some(other),
        };
        if let Some(Data::Json(json)) = whole {
            return Ok(json.clone());
        }
        materialise(store, self.claimed.run, data, &mut self.values).await.map(Arc::new)
    }
}

/// The wanted memo entries of a code run, by name; only their payloads are read. Entries are added in the order of
/// their changes until they exceed [`MAX_MEMO_BYTES`]; for the rest, the caller asks for entries after the last one
/// returned. Sizes are known before payloads are read. Also whether the run is in its last phase.
pub(crate) async fn memo(
    store: &dyn Store,
    flows: &Flows,
    hooks: &str,
    ns: &Namespace,
    run: RunId,
    wanted: impl Fn(&MemoEntry<'_>) -> bool,
) -> Result<(MemoPart, Option<UnwindingRun>)> {
    let loaded = match store.load(run, None).await? {
        Found::Run(loaded) if loaded.summary.ns == *ns => loaded,
        _ => return Err(EngineError::no_run(run)),
    };
    let header = &loaded.rows.header;
    let flow = flows.find(store, ns, &header.flow, Some(&header.flow_version)).await?;
    let flow = flow.ok_or_else(|| EngineError::no_flow(&header.flow))?;
    let unwind = unwinding(header);
    let rows = Run::load(loaded.rows, &flow.flow);
    let (mut entries, mut values) = (Map::new(), Values::new());
    let mut oldest_first: Vec<MemoEntry<'_>> = rows.memo(0).filter(|entry| wanted(entry)).collect();
    oldest_first.sort_by_key(|entry| entry.n);
    let (mut bytes, mut last, mut next) = (0, 0, None);
    for entry in oldest_first {
        if bytes > MAX_MEMO_BYTES {
            next = Some(last);
            break;
        }
        last = entry.n;
        bytes += entry.name.len();
        let mut body =
            json!({"kind": kind_name(entry.kind), "n": entry.n, "at": iso(entry.at), "attempt": entry.attempt});
        match entry.state {
            MemoState::Pending => {
                body["status"] = json!("pending");
                if let Some(token) = entry.token {
                    body["token"] = json!(token);
                    body["url"] = json!(format!("{hooks}{token}"));
                }
            }
            MemoState::Retry { due } => {
                body["status"] = json!("retry");
                body["due"] = json!(due);
            }
            MemoState::Ended(end) => {
                body["status"] = json!(end.status());
                match end {
                    End::Completed(output) => {
                        if entry.undo {
                            body["undo"] = json!(true);
                        }
                        bytes += output.bytes(MAX_INPUT_BYTES);
                        body["output"] = materialise(store, run, output, &mut values).await?;
                    }
                    End::Failed(failure) => {
                        body["error"] = json!(failure);
                        bytes += body["error"].to_string().len();
                    }
                    End::Skipped(_) | End::Cancelled => {}
                }
            }
        }
        entries.insert(entry.name.to_owned(), body);
    }
    Ok((MemoPart { entries, next }, unwind))
}

/// The last phase of a code run, from its header.
fn unwinding(header: &Header) -> Option<UnwindingRun> {
    let leaving = header.code.as_ref()?.leaving.as_ref()?;
    let reason = header.cancel_reason.clone().filter(|_| leaving.error.is_none());
    Some(UnwindingRun { error: leaving.error.clone(), reason, until: leaving.until })
}

fn kind_name(kind: MemoKind) -> Value {
    json!(kind)
}

/// A payload of a run as JSON. Adds the values that it reads to `values`. Its size is checked before anything is read.
pub(crate) async fn materialise(store: &dyn Store, run: RunId, data: &Data, values: &mut Values) -> Result<Value> {
    let too_large = |bytes| EngineError::TooLarge { what: "the payload", bytes, limit: MAX_INPUT_BYTES };
    let bytes = data.bytes(MAX_INPUT_BYTES + 1);
    if bytes > MAX_INPUT_BYTES {
        return Err(too_large(bytes));
    }
    loop {
        let missing = match data.materialise(&|id| values.get(&id)) {
            Ok(json) => return Ok(json),
            Err(Unbuilt::Missing(missing)) => missing.iter().map(|stored| stored.id).collect::<Vec<_>>(),
            Err(Unbuilt::TooLarge) => return Err(too_large(MAX_BUILT_BYTES)),
        };
        let found = store.values(run, &missing).await?;
        if found.len() < missing.len() {
            return Err(EngineError::Trimmed(run));
        }
        values.extend(found);
    }
}

/// Copies the cached values that `data` refers to, each once.
fn gather(data: &Data, run: &Run, values: &mut Values) {
    match data {
        Data::Json(_) => {}
        Data::Ref(value) => {
            if let Some(found) = run.values.get(&value.id)
                && values.insert(value.id, found.clone()).is_none()
            {
                gather(found, run, values);
            }
        }
        Data::List(items) => items.iter().for_each(|item| gather(item, run, values)),
        Data::Map(fields) => fields.iter().for_each(|(_, item)| gather(item, run, values)),
    }
}

impl Assignment {
    /// The id of the task, which is new for each attempt.
    pub fn task_id(&self) -> String {
        self.token.task_id()
    }
}
