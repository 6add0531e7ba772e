//! A group: what many callers want, carried out in one transaction.
//!
//! Every command is checked completely before any of its writes, so a refusal leaves nothing to undo, and one refused
//! command never sinks the others. What can't be told from the rows is remembered here until the group is durable.
//!
//! The mirror of the tasks is locked for single decisions only, never while the disk is used: heartbeats and the state of
//! queues need it too, and must not wait for a disk.

use std::collections::BTreeMap;

use eddyline_machine::{Fence, Message, Millis, RunId};
use rusqlite::{CachedStatement, Connection, Params, params};

use super::body::Body;
use super::encode::{Encoded, EncodedTask};
use super::kept::Kept;
use super::options::call;
use super::shared::Shared;
use super::touched::Touched;
use super::trouble::Outcome;
use crate::Written;
use crate::claim::{ClaimRequest, Held, Lease};
use crate::commit::NewEvent;
use crate::holds::{Holds, Item};
use crate::ids::Namespace;
use crate::query::Change;

/// Hints of a group are compared with each other up to this many; beyond, some come twice.
const COMPARED: usize = 32;

/// A commit that takes longer than this takes a good part of the leases that are given out with it.
const LONG_COMMIT_MS: Millis = 1_000;

pub(super) struct Group<'a> {
    pub conn: &'a Connection,
    pub kept: &'a mut Kept,
    pub shared: &'a Shared,
    /// What is to be taken back if the group can't be written.
    pub touched: Touched,
    pub now: Millis,
    pub begun: bool,
    /// Tasks that were added, by key, and not written yet: those that are claimed in the same group are written once.
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
    /// Those that the group has carried out, by where their text is: a group carries out few, many times.
    statements: Vec<(&'static str, CachedStatement<'a>)>,
}

#[derive(Debug)]
pub(super) struct Added {
    pub task: EncodedTask,
    pub place: i64,
    pub closed: bool,
    pub held: Option<Held>,
}

/// What nobody else needs to be kept from any more, once the group is durable.
#[derive(Debug)]
pub(super) enum UsedUp {
    Item(Item),
    Message(RunId, String),
}

impl<'a> Group<'a> {
    pub fn new(conn: &'a Connection, kept: &'a mut Kept, shared: &'a Shared) -> Group<'a> {
        Group {
            conn,
            touched: Touched::new(kept.numbers()),
            kept,
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
    pub fn commit(&mut self, commands: &[Encoded], claims: &[ClaimRequest]) -> Outcome<Written> {
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

    /// Writes what was put off.
    pub fn finish(&mut self) -> Outcome<()> {
        self.write_added()?;
        let spent = {
            let lines = &mut self.shared.tasks().lines;
            self.changes.retain(|change| lines.is_worth(change, self.now));
            lines.take_spent()
        };
        // All of them before the first is written: if that fails, each is taken back.
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
            self.set_meta("gate", self.kept.gate)?;
        }
        if self.revision_moved {
            self.set_meta("revision", self.kept.revision)?;
        }
        Ok(())
    }

    /// Carries out a statement that writes, beginning the transaction if it is the first: a group that writes nothing
    /// costs no sync.
    pub fn write(&mut self, sql: &'static str, params: impl Params) -> Outcome<usize> {
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

    pub fn set_meta(&mut self, name: &str, value: i64) -> Outcome<()> {
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

    /// A task is given out with the commit.
    pub fn claimed(&mut self, ns: &Namespace, run: RunId, fence: Fence) {
        self.claimed.push((ns.clone(), Lease { run, fence }));
    }

    /// After a commit that took long: nobody knew of the leases before, so they run from now on.
    pub fn renew_leases(&self) {
        let now = self.shared.time.now();
        if now - self.now > LONG_COMMIT_MS {
            let lines = &mut self.shared.tasks().lines;
            self.claimed.iter().for_each(|(ns, lease)| _ = lines.extend(ns, None, *lease, now));
        }
    }

    /// After the commit: what was used up is let go of.
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

    pub fn send(&mut self, ns: &Namespace, message: &Message, body: &Body) -> Outcome<()> {
        let place = self.kept.message + 1;
        let sent = self.write(
            "INSERT INTO messages (place, ns, target, id, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6) \
             ON CONFLICT (target, id) DO NOTHING",
            params![place, ns.as_str(), message.to.0.as_bytes(), message.id, body.seal(&[place]), body.text],
        )?;
        if sent > 0 {
            self.kept.message = place;
            self.hint(Change::Messages);
        }
        Ok(())
    }

    pub fn drop_message(&mut self, to: RunId, id: &str) -> Outcome<()> {
        self.write("DELETE FROM messages WHERE target = ?1 AND id = ?2", params![to.0.as_bytes(), id])?;
        self.used_up(UsedUp::Message(to, id.to_owned()));
        // Others for the same run may have waited for this one.
        let mut others = self.conn.prepare_cached("SELECT 1 FROM messages WHERE target = ?1")?;
        if others.exists([to.0.as_bytes()])? {
            self.hint(Change::Messages);
        }
        Ok(())
    }

    /// How many of them were kept already.
    pub fn publish(&mut self, ns: &Namespace, events: &[NewEvent], bodies: &[Body]) -> Outcome<u32> {
        let mut repeats = 0;
        for (event, body) in events.iter().zip(bodies) {
            repeats += u32::from(!self.publish_one(ns, event, body)?);
        }
        Ok(repeats)
    }

    /// False if it was kept already.
    fn publish_one(&mut self, ns: &Namespace, event: &NewEvent, body: &Body) -> Outcome<bool> {
        if let Some(position) = self.find_event(ns, &event.id)? {
            if position > self.kept.forgotten.get(ns).copied().unwrap_or(0) {
                return Ok(false);
            }
            // It is going, so to everybody else it is gone.
            self.write("DELETE FROM events WHERE position = ?1", [position])?;
        }
        self.kept.event += 1;
        let (position, now) = (self.kept.event, self.now);
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

    fn find_event(&self, ns: &Namespace, id: &str) -> Outcome<Option<i64>> {
        let mut statement = self.conn.prepare_cached("SELECT position FROM events WHERE ns = ?1 AND id = ?2")?;
        let mut rows = statement.query(params![ns.as_str(), id])?;
        Ok(rows.next()?.map(|row| row.get(0)).transpose()?)
    }
}
