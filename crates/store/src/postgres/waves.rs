//! Splits the commands of a call into waves, each of which is written by one statement.
//!
//! Independent transitions are one wave. A command that may depend on an earlier one begins the next wave; a commit of
//! documents is a wave of its own. Nearly every call is a single wave.

use std::collections::HashSet;

use eddyline_machine::run::Phase;
use eddyline_machine::{Data, RunId};
use serde_json::json;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::{escaped, seal, text};
use super::columns::{Events, Messages};
use super::database::{Database, Param};
use super::encode::{Batch, add_event, add_message, turn};
use crate::commit::{Command, Consumed, DocumentCommit, RunCommit};
use crate::document::{DocumentChange, Expect, LimitRules, QueueRules, Rate, kind};
use crate::error::Result;

#[derive(Debug)]
pub(super) enum Wave {
    Runs { batch: Box<Batch>, lock: Option<Vec<Uuid>>, commands: Vec<usize> },
    Documents { rows: Box<DocumentRows>, command: usize },
}

#[derive(Debug, Default)]
struct Touched<'a> {
    runs: HashSet<RunId>,
    sent: HashSet<(RunId, &'a str)>,
    keys: HashSet<(&'a str, &'a str, &'a str)>,
    lines: HashSet<(&'a str, &'a str, &'a str)>,
}

impl<'a> Touched<'a> {
    /// Whether the commit is independent of those before it.
    fn take(&mut self, commit: &'a RunCommit) -> bool {
        let (ns, header) = (commit.ns.as_str(), &commit.transition.header);
        let run = header.run;
        let key = commit.key.as_ref().map(|key| (ns, key.flow.as_str(), key.key.as_str()));
        let moves = commit.transition.base.0 == 0 || header.phase == Phase::Ended;
        let line = header.unique.as_ref().filter(|_| moves);
        let line = line.map(|unique| (ns, header.flow.as_str(), unique.key.as_str()));
        let waits =
            |taken: &Consumed| matches!(taken, Consumed::Message(id) if self.sent.contains(&(run, id.as_str())));
        let apart = !self.runs.contains(&run)
            && !commit.takes.iter().any(waits)
            && key.is_none_or(|key| !self.keys.contains(&key))
            && line.is_none_or(|line| !self.lines.contains(&line));
        if apart {
            self.runs.insert(run);
            self.keys.extend(key);
            self.lines.extend(line);
            self.sent.extend(commit.messages.iter().map(|message| (message.to, message.id.as_str())));
        }
        apart
    }
}

/// What one transaction writes, unless a single command is more.
const MOST_ROWS: usize = 2_000;
const MOST_BYTES: usize = 4 << 20;
/// A row that is not a payload, roughly.
const ROW_BYTES: usize = 500;

/// The commands of a call, in order, in parts that are each a transaction.
pub(super) fn parts(commands: Vec<Command>) -> Vec<Vec<Command>> {
    let (mut parts, mut part) = (Vec::new(), Vec::new());
    let (mut rows, mut bytes) = (0, 0);
    for command in commands {
        let (more_rows, more_bytes) = weight(&command);
        if !part.is_empty() && (rows + more_rows > MOST_ROWS || bytes + more_bytes > MOST_BYTES) {
            parts.push(std::mem::take(&mut part));
            (rows, bytes) = (0, 0);
        }
        part.push(command);
        (rows, bytes) = (rows + more_rows, bytes + more_bytes);
    }
    parts.push(part);
    parts
}

/// How many rows a command writes, and of how many bytes, roughly.
fn weight(command: &Command) -> (usize, usize) {
    let (rows, payloads): (usize, Vec<&Data>) = match command {
        Command::Run(commit) => {
            let transition = &*commit.transition;
            let changes = transition.activations.len() + transition.records.len() + transition.tasks.len();
            let rows = changes + transition.timers.len() + transition.values.len() + commit.messages.len();
            let values = transition.values.iter().map(|(_, value)| value);
            (rows + commit.events.len(), values.chain(commit.events.iter().map(|event| &event.payload)).collect())
        }
        Command::Documents(commit) => {
            let rows = commit.documents.len() + commit.messages.len() + commit.events.len();
            (rows, commit.events.iter().map(|event| &event.payload).collect())
        }
    };
    let bytes: usize = payloads.iter().map(|payload| payload.own_bytes(MOST_BYTES)).sum();
    (rows, rows * ROW_BYTES + bytes)
}

pub(super) fn waves(database: &Database, commands: &[Command]) -> Result<Vec<Wave>> {
    let mut all = runs_of(commands);
    all.sort();
    all.dedup();
    // The first wave locks the runs of all waves, in one order.
    let mut lock = Some(all);
    let (mut waves, mut touched) = (Vec::new(), Touched::default());
    for (at, command) in commands.iter().enumerate() {
        match command {
            Command::Documents(commit) => {
                let rows = Box::new(DocumentRows::of(commit)?);
                waves.push(Wave::Documents { rows, command: at });
            }
            Command::Run(commit) => {
                let follows = matches!(waves.last(), Some(Wave::Runs { .. })) && touched.take(commit);
                if !follows {
                    touched = Touched::default();
                    touched.take(commit);
                    waves.push(Wave::Runs { batch: Box::default(), lock: lock.take(), commands: Vec::new() });
                }
                if let Some(Wave::Runs { batch, commands, .. }) = waves.last_mut() {
                    batch.add(database, commit)?;
                    commands.push(at);
                }
            }
        }
    }
    for wave in &mut waves {
        if let Wave::Runs { batch, .. } = wave {
            batch.close()?;
        }
    }
    Ok(waves)
}

fn runs_of(commands: &[Command]) -> Vec<Uuid> {
    let run = |command: &Command| match command {
        Command::Run(commit) => Some(commit.transition.header.run.0),
        Command::Documents(_) => None,
    };
    commands.iter().filter_map(run).collect()
}

/// A commit of documents, as the parameters of `commit_documents_v1`.
#[derive(Debug)]
pub(super) struct DocumentRows {
    ns: String,
    command: Uuid,
    kind: Vec<String>,
    id: Vec<String>,
    expect: Vec<i32>,
    revision: Vec<Option<i64>>,
    crc: Vec<Option<i32>>,
    body: Vec<Option<String>>,
    due: Vec<Option<i64>>,
    rules: Vec<Option<String>>,
    messages: Messages,
    events: Events,
    drop_target: Vec<Uuid>,
    drop_id: Vec<String>,
    turn: (i32, String),
}

impl DocumentRows {
    fn of(commit: &DocumentCommit) -> Result<DocumentRows> {
        let mut rows = DocumentRows {
            ns: escaped(commit.ns.as_str()),
            command: commit.command.0,
            kind: Vec::new(),
            id: Vec::new(),
            expect: Vec::new(),
            revision: Vec::new(),
            crc: Vec::new(),
            body: Vec::new(),
            due: Vec::new(),
            rules: Vec::new(),
            messages: Messages::default(),
            events: Events::default(),
            drop_target: commit.drops.iter().map(|(to, _)| to.0).collect(),
            drop_id: commit.drops.iter().map(|(_, id)| escaped(id)).collect(),
            turn: turn()?,
        };
        for change in &commit.documents {
            rows.add_document(commit, change)?;
        }
        for message in &commit.messages {
            add_message(&mut rows.messages, 0, message)?;
        }
        for event in &commit.events {
            add_event(&mut rows.events, 0, &commit.ns, event)?;
        }
        Ok(rows)
    }

    fn add_document(&mut self, commit: &DocumentCommit, change: &DocumentChange) -> Result<()> {
        let (expect, revision) = match change.expect {
            Expect::Any => (0, None),
            Expect::Absent => (1, None),
            Expect::Revision(revision) => (2, Some(revision as i64)),
        };
        let body = change.body.as_ref().map(text).transpose()?;
        let (kind, id) = (change.key.kind.as_bytes(), change.key.id.as_bytes());
        self.crc.push(body.as_ref().map(|body| seal(body, &[commit.ns.as_str().as_bytes(), kind, id])));
        self.kind.push(escaped(&change.key.kind));
        self.id.push(escaped(&change.key.id));
        self.expect.push(expect);
        self.revision.push(revision);
        self.body.push(body);
        self.due.push(change.due);
        self.rules.push(rules(change));
        Ok(())
    }

    pub fn params<'a>(&'a self, now: &'a Option<i64>) -> Vec<Param<'a>> {
        let mut params: Vec<Param<'a>> = vec![
            (now, Type::INT8),
            (&self.ns, Type::TEXT),
            (&self.command, Type::UUID),
            (&self.kind, Type::TEXT_ARRAY),
            (&self.id, Type::TEXT_ARRAY),
            (&self.expect, Type::INT4_ARRAY),
            (&self.revision, Type::INT8_ARRAY),
            (&self.crc, Type::INT4_ARRAY),
            (&self.body, Type::TEXT_ARRAY),
            (&self.due, Type::INT8_ARRAY),
            (&self.rules, Type::TEXT_ARRAY),
        ];
        self.messages.params_alone(&mut params);
        self.events.params_alone(&mut params);
        params.push((&self.drop_target, Type::UUID_ARRAY));
        params.push((&self.drop_id, Type::TEXT_ARRAY));
        params.push((&self.turn.0, Type::INT4));
        params.push((&self.turn.1, Type::TEXT));
        params
    }
}

/// The rules of a queue or limit, as the columns that claims read.
fn rules(change: &DocumentChange) -> Option<String> {
    let body = change.body.as_ref()?;
    let rate =
        |rate: Option<Rate>| (rate.map(|rate| rate.count), rate.map(|rate| rate.per_ms), rate.map(|rate| rate.burst));
    let rules = match change.key.kind.as_str() {
        kind::QUEUE => {
            let rules = QueueRules::read(body);
            let (count, per_ms, burst) = rate(rules.rate);
            json!({
                "ruled": rules != QueueRules::default(), "paused": rules.paused, "concurrency": rules.concurrency,
                "flow_concurrency": rules.flow_concurrency, "count": count, "per_ms": per_ms, "burst": burst,
            })
        }
        kind::LIMIT => {
            let rules = LimitRules::read(body);
            let (count, per_ms, burst) = rate(rules.rate);
            json!({"ruled": true, "concurrency": rules.concurrency, "count": count, "per_ms": per_ms, "burst": burst})
        }
        _ => return None,
    };
    Some(rules.to_string())
}
