//! A group: the requests of many callers in one transaction (group commit).
//!
//! Every command is checked completely before its first write, so a refusal leaves nothing to undo, and a refused
//! command does not affect the others. State that is not in the rows is kept here until the group is durable.
//!
//! The mirror of the tasks is locked for single decisions only, never during disk access: heartbeats and queue
//! statistics need it too and must not wait for the disk.

use std::collections::BTreeMap;

use eddyline_machine::{Fence, Message, Millis, RunId};
use rusqlite::{CachedStatement, Connection, Params, params};

use super::body::Body;
use super::encode::{Encoded, EncodedTask};
use super::options::call;
use super::shared::Shared;
use super::sqlite_error::SqliteResult;
use super::touched::Touched;
use super::writer_cache::WriterCache;
use crate::Written;
use crate::claim::{ClaimRequest, Held, Lease};
use crate::commit::NewEvent;
use crate::holds::{Holds, Item};
use crate::ids::Namespace;
use crate::query::Change;

/// Hints of a group are deduplicated up to this many; beyond, some are sent twice.
const COMPARED: usize = 32;

/// A commit that takes longer than this has used up a good part of the leases granted in it.
const LONG_COMMIT_MS: Millis = 1_000;

pub(super) struct Group<'a> {
    pub conn: &'a Connection,
    pub cache: &'a mut WriterCache,
    pub shared: &'a Shared,
    /// What to restore if the group cannot be written.
    pub touched: Touched,
    pub now: Millis,
    pub begun: bool,
    /// Added tasks, by key, not written yet: a task claimed in the same group is written only once.
    pub added: BTreeMap<i64, Added>,
    pub runs: Vec<(RunId, bool)>,
    pub changes: Vec<Change>,
    /// Counters of `meta` that changed.
    pub gates_moved: bool,
    pub revision_moved: bool,
    /// Documents were put or deleted.
    pub documents_moved: bool,
    used_up: Vec<UsedUp>,
    claimed: Vec<(Namespace, Lease)>,
    /// The statements used by the group, by the address of their text: a group uses few, many times.
    statements: Vec<(&'static str, CachedStatement<'a>)>,
}

#[derive(Debug)]
pub(super) struct Added {
    pub task: EncodedTask,
    pub place: i64,
    pub closed: bool,
    pub held: Option<Held>,
}

/// A consumed item whose hold is released once the group is durable.
#[derive(Debug)]
pub(super) enum UsedUp {
    Item(Item),
    Message(RunId, String),
}

impl<'a> Group<'a> {
    pub fn new(conn: &'a Connection, cache: &'a mut WriterCache, shared: &'a Shared) -> Group<'a> {
        Group {
            conn,
            touched: Touched::new(cache.numbers()),
            cache,
            shared,
            now: shared.time.now(),
            begun: false,
            added: BTreeMap::new(),
            runs: Vec::new(),
            changes: Vec::new(),
            gates_moved: false,
            revision_moved: false,
            documents_moved: false,
            used_up: Vec::new(),
            claimed: Vec::new(),
            statements: Vec::new(),
        }
    }

    /// One call of [`crate::Store::commit`].
    pub fn commit(&mut self, commands: &[Encoded], claims: &[ClaimRequest]) -> SqliteResult<Written> {
        let mut written = Written::default();
        for command in commands {
            written.commands.push(match command {
                Encoded::Run(run) => self.commit_run(run)?,
                Encoded::Documents(documents) => self.commit_documents(documents)?,
            });
        }
        for request in claims {
            written.claims.push(self.claim(request)?);
        }
        Ok(written)
    }

    /// Writes what was deferred to the end of the group.
    pub fn finish(&mut self) -> SqliteResult<()> {
        self.write_added()?;
        let spent = {
            let queues = &mut self.shared.tasks().queues;
            self.changes.retain(|change| queues.is_worth(change, self.now));
            queues.take_spent()
        };
        // Mark all before writing the first: if the group fails, every one is restored.
        spent.iter().for_each(|(key, _)| self.touched.bucket(key));
        for (key, bucket) in spent {
            self.write(
                "INSERT OR REPLACE INTO buckets (ns, kind, name, key, keyed, whole, parts, at, closed_until) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                params![
                    key.ns.as_str(),
                    key.kind,
                    key.name,
                    key.key.as_deref().unwrap_or_default(),
                    key.key.is_some(),
                    bucket.whole,
                    bucket.parts,
                    bucket.at,
                    bucket.closed_until
                ],
            )?;
        }
        if self.gates_moved {
            self.set_meta("gate", self.cache.gate)?;
        }
        if self.revision_moved {
            self.set_meta("revision", self.cache.revision)?;
        }
        Ok(())
    }

    /// Executes a write statement, beginning the transaction if it is the first: a group without writes costs no sync.
    pub fn write(&mut self, sql: &'static str, params: impl Params) -> SqliteResult<usize> {
        call(&self.shared.options.inside_commit);
        if !self.begun {
            self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
            self.begun = true;
        }
        let known = self.statements.iter().position(|(known, _)| std::ptr::eq(*known, sql));
        let at = match known {
            Some(at) => at,
            None => {
                self.statements.push((sql, self.conn.prepare_cached(sql)?));
                self.statements.len() - 1
            }
        };
        Ok(self.statements[at].1.execute(params)?)
    }

    pub fn set_meta(&mut self, name: &str, value: i64) -> SqliteResult<()> {
        self.write("INSERT OR REPLACE INTO meta (name, value) VALUES (?1, ?2)", params![name, value])?;
        Ok(())
    }

    pub fn hint(&mut self, change: Change) {
        if self.changes.len() > COMPARED || !self.changes.contains(&change) {
            self.changes.push(change);
        }
    }

    pub fn used_up(&mut self, what: UsedUp) {
        self.used_up.push(what);
    }

    /// Notes a task that is claimed with the commit.
    pub fn claimed(&mut self, ns: &Namespace, run: RunId, fence: Fence) {
        self.claimed.push((ns.clone(), Lease { run, fence }));
    }

    /// After a slow commit: the workers learn of their leases only now, so the leases run from now on.
    pub fn renew_leases(&self) {
        let now = self.shared.time.now();
        if now - self.now > LONG_COMMIT_MS {
            let queues = &mut self.shared.tasks().queues;
            self.claimed.iter().for_each(|(ns, lease)| _ = queues.extend(ns, None, *lease, now));
        }
    }

    /// After the commit: releases the holds of consumed items.
    pub fn release(&mut self, holds: &mut Holds) {
        for what in self.used_up.drain(..) {
            match what {
                UsedUp::Item(item) => holds.drop_item(&item),
                UsedUp::Message(to, id) => holds.drop_message(to, &id),
            }
        }
    }

    pub fn take_changes(&mut self) -> Vec<Change> {
        let runs = std::mem::take(&mut self.runs).into_iter().map(|(run, ended)| Change::Run { run, ended });
        std::mem::take(&mut self.changes).into_iter().chain(runs).collect()
    }

    pub fn send(&mut self, ns: &Namespace, message: &Message, body: &Body) -> SqliteResult<()> {
        let place = self.cache.message + 1;
        let sent = self.write(
            "INSERT INTO messages (place, ns, target, id, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6) \
             ON CONFLICT (target, id) DO NOTHING",
            params![place, ns.as_str(), message.to.0.as_bytes(), message.id, body.seal(&[place]), body.text],
        )?;
        if sent > 0 {
            self.cache.message = place;
            self.hint(Change::Messages);
        }
        Ok(())
    }

    pub fn drop_message(&mut self, to: RunId, id: &str) -> SqliteResult<()> {
        self.write("DELETE FROM messages WHERE target = ?1 AND id = ?2", params![to.0.as_bytes(), id])?;
        self.used_up(UsedUp::Message(to, id.to_owned()));
        // Later messages to the same run may have waited for this one.
        let mut others = self.conn.prepare_cached("SELECT 1 FROM messages WHERE target = ?1")?;
        if others.exists([to.0.as_bytes()])? {
            self.hint(Change::Messages);
        }
        Ok(())
    }

    /// Returns how many of the events were already stored.
    pub fn publish(&mut self, ns: &Namespace, events: &[NewEvent], bodies: &[Body]) -> SqliteResult<u32> {
        let mut repeats = 0;
        for (event, body) in events.iter().zip(bodies) {
            repeats += u32::from(!self.publish_one(ns, event, body)?);
        }
        Ok(repeats)
    }

    /// False if it was already stored.
    fn publish_one(&mut self, ns: &Namespace, event: &NewEvent, body: &Body) -> SqliteResult<bool> {
        if let Some(position) = self.find_event(ns, &event.id)? {
            if position > self.cache.forgotten.get(ns).copied().unwrap_or(0) {
                return Ok(false);
            }
            // It is being trimmed, so readers already do not see it.
            self.write("DELETE FROM events WHERE position = ?1", [position])?;
        }
        self.cache.event += 1;
        let (position, now) = (self.cache.event, self.now);
        self.write(
            "INSERT INTO events (position, ns, id, name, key, at, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                position,
                ns.as_str(),
                event.id,
                event.name,
                event.key,
                now,
                body.seal(&[position, now]),
                body.text
            ],
        )?;
        self.hint(Change::Events { ns: ns.clone() });
        Ok(true)
    }

    fn find_event(&self, ns: &Namespace, id: &str) -> SqliteResult<Option<i64>> {
        let mut statement = self.conn.prepare_cached("SELECT position FROM events WHERE ns = ?1 AND id = ?2")?;
        let mut rows = statement.query(params![ns.as_str(), id])?;
        Ok(rows.next()?.map(|row| row.get(0)).transpose()?)
    }
}
