//! Due items, each handed out to one caller at a time.
//!
//! Due items are read from disk; holds are kept in memory. Items held by other callers are skipped, so the read limit
//! is raised by the number of held items: they must not hide later ones.
//!
//! A commit may consume an item between the read and the hold; then no commit would ever release the hold. So every
//! item is looked up again after its hold was taken ([`still_there`]): an earlier commit is seen by that lookup, a
//! later one releases the hold.

use std::collections::BTreeSet;

use eddyline_machine::{Millis, RunId};
use rusqlite::{Connection, OptionalExtension, Row, params};
use uuid::Uuid;

use super::list::{DOCUMENT, document};
use super::load::{StoredMessages, inbox, timer};
use super::options::call;
use super::readers::renew_snapshot;
use super::shared::Shared;
use super::sqlite_error::SqliteResult;
use crate::document::Document;
use crate::holds::{Holds, Item, next_in};
use crate::ids::Namespace;
use crate::query::*;
use crate::timer_columns;

/// After skipping this many rows of runs already examined, the remaining runs are found by an index.
const MOST_REPEATS: usize = 10_000;

/// The most items in one batch.
const MOST: usize = 100_000;

fn bounded(limit: usize) -> usize {
    limit.min(MOST)
}

pub(super) fn leases(shared: &Shared, skip: &[Namespace], limit: usize) -> DueBatch {
    let now = shared.time.now();
    let tasks = &mut *shared.tasks();
    tasks.holds.expire(now);
    let holds = &mut tasks.holds;
    let up = tasks.queues.time_up(now, skip, limit, |run, fence| holds.take(Item::Lease(run, fence), now));
    // Expired tasks that are not in `up` are held by another caller, unless `limit` cut them off.
    let next = if up.len() >= limit { Some(now) } else { tasks.queues.next_expiry(now) };
    let items = up.into_iter();
    let items = items.map(|up| DueItem::Lease { ns: up.ns, run: up.run, task: up.task, why: up.why, claim: up.claim });
    DueBatch { items: items.collect(), next_in: next_in(next, now, &tasks.holds) }
}

pub(super) fn timers(conn: &Connection, shared: &Shared, skip: &str, limit: usize) -> SqliteResult<DueBatch> {
    let (now, wall, limit) = (shared.time.now(), shared.time.wall(), bounded(limit));
    let most = limit + held(shared, now) + 1;
    let mut found = Vec::new();
    for (by_wall, clock) in [(false, now), (true, wall)] {
        let due = due_timers(conn, by_wall, clock, skip, most)?;
        let next = if due.len() < most { next_timer(conn, by_wall, clock)? } else { None };
        found.push((clock, due, next));
    }
    call(&shared.options.after_due_read);
    let mut tasks = shared.tasks();
    let (mut held, mut next) = (Vec::new(), None);
    for (clock, due, later) in found {
        let all_read = due.len() < most;
        let mut due = due.into_iter();
        let more = loop {
            match due.next() {
                Some(_) if held.len() >= limit => break true,
                Some((ns, run, timer)) => {
                    if tasks.holds.take(Item::Timer(run, timer.key, timer.due), now) {
                        held.push((ns, run, timer));
                    }
                }
                None => break !all_read,
            }
        };
        let at = if more { Some(now) } else { later.map(|due| now + (due - clock).max(0)) };
        next = next.into_iter().chain(at).min();
    }
    drop(tasks);
    let item = |(_, run, timer): &(_, RunId, TimerRow)| Item::Timer(*run, timer.key, timer.due);
    let held = still_there(conn, shared, held, item, |(_, run, timer)| timer_is_there(conn, *run, timer))?;
    let items = held.into_iter().map(|(ns, run, timer)| DueItem::Timer { ns, run, timer }).collect();
    Ok(DueBatch { items, next_in: next_in(next, now, &shared.tasks().holds) })
}

/// Returns the held items that are still stored; releases the holds of the others.
fn still_there<T>(
    conn: &Connection,
    shared: &Shared,
    held: Vec<T>,
    item: impl Fn(&T) -> Item,
    is_there: impl Fn(&T) -> SqliteResult<bool>,
) -> SqliteResult<Vec<T>> {
    renew_snapshot(conn)?;
    let mut kept = Vec::with_capacity(held.len());
    for one in held {
        if is_there(&one)? {
            kept.push(one);
        } else {
            shared.tasks().holds.drop_item(&item(&one));
        }
    }
    Ok(kept)
}

fn timer_is_there(conn: &Connection, run: RunId, timer: &TimerRow) -> SqliteResult<bool> {
    let (activation, kind, fence) = timer_columns::columns(timer.key);
    let mut statement = conn.prepare_cached(
        "SELECT 1 FROM timers WHERE run = (SELECT position FROM runs WHERE id = ?1) AND activation = ?2 AND kind = ?3 \
         AND fence = ?4 AND due = ?5",
    )?;
    Ok(statement.exists(params![run.0.as_bytes(), activation, kind, fence, timer.due])?)
}

fn due_timers(
    conn: &Connection,
    wall: bool,
    clock: Millis,
    skip: &str,
    most: usize,
) -> SqliteResult<Vec<(Namespace, RunId, TimerRow)>> {
    let mut statement = conn.prepare_cached(
        "SELECT timers.activation, timers.kind, timers.fence, timers.due, timers.wall, runs.ns, runs.id \
         FROM timers CROSS JOIN runs ON runs.position = timers.run WHERE timers.wall = ?1 AND timers.due <= ?2 \
         AND runs.ns NOT IN (SELECT value FROM json_each(?3)) \
         ORDER BY timers.due, runs.id, timers.activation, timers.kind, timers.fence LIMIT ?4",
    )?;
    let mut rows = statement.query(params![wall, clock, skip, most as i64])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let run = RunId(Uuid::from_bytes(row.get(6)?));
        found.push((Namespace::new(&row.get::<_, String>(5)?), run, timer(row, run)?));
    }
    Ok(found)
}

fn next_timer(conn: &Connection, wall: bool, clock: Millis) -> SqliteResult<Option<Millis>> {
    let mut statement = conn.prepare_cached("SELECT min(due) FROM timers WHERE wall = ?1 AND due > ?2")?;
    Ok(statement.query_row(params![wall, clock], |row| row.get(0))?)
}

pub(super) fn messages(conn: &Connection, shared: &Shared, skip: &str, limit: usize) -> SqliteResult<DueBatch> {
    let (now, limit) = (shared.time.now(), bounded(limit));
    let (found, mut more) = waiting(conn, shared, skip, now, limit)?;
    call(&shared.options.after_due_read);
    let mut tasks = shared.tasks();
    tasks.holds.expire(now);
    let read = found.len();
    let mut free = |(_, to, inbox): &WaitingMessages| tasks.holds.take_messages(*to, &inbox.messages, now);
    let held: Vec<WaitingMessages> = found.into_iter().filter(|found| free(found)).collect();
    drop(tasks);
    renew_snapshot(conn)?;
    let mut items = Vec::with_capacity(held.len());
    for (ns, to, StoredMessages { mut messages, bytes, .. }) in held {
        let mut gone = Vec::new();
        for (at, message) in messages.iter().enumerate().rev() {
            if !message_is_there(conn, to, &message.id)? {
                gone.push(at);
            }
        }
        for at in gone {
            let message = messages.remove(at);
            shared.tasks().holds.drop_message(to, &message.id);
        }
        if !messages.is_empty() {
            items.push(DueItem::Messages { ns, to, messages, bytes });
        }
    }
    // Another caller got or consumed some of them first, and there may be new messages to the same run.
    more |= items.len() < read;
    Ok(DueBatch { items, next_in: next_in(more.then_some(now), now, &shared.tasks().holds) })
}

fn message_is_there(conn: &Connection, to: RunId, id: &str) -> SqliteResult<bool> {
    let mut statement = conn.prepare_cached("SELECT 1 FROM messages WHERE target = ?1 AND id = ?2")?;
    Ok(statement.exists(params![to.0.as_bytes(), id])?)
}

type WaitingMessages = (Namespace, RunId, StoredMessages);

/// The oldest messages to up to `limit` runs whose messages are not held, and whether there are more.
fn waiting(
    conn: &Connection,
    shared: &Shared,
    skip: &str,
    now: Millis,
    limit: usize,
) -> SqliteResult<(Vec<WaitingMessages>, bool)> {
    let mut inboxes =
        Inboxes { conn, shared, now, limit, found: Vec::new(), bytes: 0, seen: BTreeSet::new(), more: false };
    let mut statement = conn.prepare_cached(
        "SELECT target, ns FROM messages WHERE ns NOT IN (SELECT value FROM json_each(?1)) ORDER BY place",
    )?;
    let (mut rows, mut repeats) = (statement.query([skip])?, 0);
    while let Some(row) = rows.next()? {
        let to = RunId(Uuid::from_bytes(row.get(0)?));
        if !inboxes.seen.contains(&to) {
            let ns = Namespace::new(&row.get::<_, String>(1)?);
            if !inboxes.look_at(ns, to)? {
                return Ok((inboxes.found, true));
            }
            continue;
        }
        repeats += 1;
        if repeats > MOST_REPEATS {
            // Many messages to few runs: stop skipping their rows one by one.
            drop(rows);
            for (to, ns) in other_targets(conn, &inboxes.seen, skip)? {
                if !inboxes.look_at(ns, to)? {
                    return Ok((inboxes.found, true));
                }
            }
            break;
        }
    }
    Ok((inboxes.found, inboxes.more))
}

/// Collects the messages of runs.
struct Inboxes<'a> {
    conn: &'a Connection,
    shared: &'a Shared,
    now: Millis,
    limit: usize,
    found: Vec<WaitingMessages>,
    bytes: usize,
    seen: BTreeSet<RunId>,
    more: bool,
}

impl Inboxes<'_> {
    /// Adds the messages of a run; false if the batch is full.
    fn look_at(&mut self, ns: Namespace, to: RunId) -> SqliteResult<bool> {
        if !self.seen.insert(to) || self.shared.tasks().holds.messages_held(to, self.now) {
            return Ok(true);
        }
        if self.found.len() >= self.limit || self.bytes >= MAX_INBOX_BYTES {
            return Ok(false);
        }
        let inbox = inbox(self.conn, to)?;
        self.more |= inbox.more;
        self.bytes += inbox.bytes;
        self.found.push((ns, to, inbox));
        Ok(true)
    }
}

/// The runs not in `seen` that have messages, the one with the oldest message first. Each is found by the index,
/// regardless of how many messages the previous one has.
fn other_targets(conn: &Connection, seen: &BTreeSet<RunId>, skip: &str) -> SqliteResult<Vec<(RunId, Namespace)>> {
    let mut next = conn.prepare_cached("SELECT target FROM messages WHERE target > ?1 ORDER BY target LIMIT 1")?;
    let mut oldest = conn.prepare_cached(
        "SELECT place, ns FROM messages WHERE target = ?1 AND ns NOT IN (SELECT value FROM json_each(?2)) \
         ORDER BY +place LIMIT 1",
    )?;
    let (mut found, mut after) = (Vec::new(), Vec::new());
    while let Some(target) = next.query_row([&after], |row| row.get::<_, [u8; 16]>(0)).optional()? {
        after = target.to_vec();
        let to = RunId(Uuid::from_bytes(target));
        if !seen.contains(&to) {
            let row = |row: &Row<'_>| Ok((row.get::<_, i64>(0)?, row.get::<_, String>(1)?));
            if let Some((place, ns)) = oldest.query_row(params![&after, skip], row).optional()? {
                found.push((place, to, Namespace::new(&ns)));
            }
        }
    }
    found.sort_unstable_by_key(|(place, ..)| *place);
    Ok(found.into_iter().map(|(_, to, ns)| (to, ns)).collect())
}

pub(super) fn documents(conn: &Connection, shared: &Shared, skip: &str, limit: usize) -> SqliteResult<DueBatch> {
    let (now, wall, limit) = (shared.time.now(), shared.time.wall(), bounded(limit));
    let most = limit + held(shared, now) + 1;
    let found = due_documents(conn, wall, skip, most)?;
    let later = if found.len() < most { next_document(conn, wall)? } else { None };
    call(&shared.options.after_due_read);
    let item = |document: &Document| Item::Document(document.ns.clone(), document.key.clone(), document.revision);
    let mut tasks = shared.tasks();
    let (mut held, mut more) = (Vec::new(), found.len() >= most);
    for document in found {
        if held.len() >= limit {
            more = true;
            break;
        }
        if tasks.holds.take(item(&document), now) {
            held.push(document);
        }
    }
    drop(tasks);
    let held = still_there(conn, shared, held, item, |document| document_is_there(conn, document))?;
    let next = if more { Some(now) } else { later.map(|at| now + (at - wall).max(0)) };
    let items = held.into_iter().map(DueItem::Document).collect();
    Ok(DueBatch { items, next_in: next_in(next, now, &shared.tasks().holds) })
}

fn document_is_there(conn: &Connection, document: &Document) -> SqliteResult<bool> {
    let mut statement =
        conn.prepare_cached("SELECT 1 FROM documents WHERE kind = ?1 AND id = ?2 AND ns = ?3 AND revision = ?4")?;
    let key = &document.key;
    Ok(statement.exists(params![key.kind, key.id, document.ns.as_str(), document.revision as i64])?)
}

fn due_documents(conn: &Connection, wall: Millis, skip: &str, most: usize) -> SqliteResult<Vec<Document>> {
    let mut statement = conn.prepare_cached(&format!(
        "SELECT {DOCUMENT} FROM documents WHERE due IS NOT NULL AND due <= ?1 \
         AND ns NOT IN (SELECT value FROM json_each(?2)) ORDER BY due, ns, kind, id LIMIT ?3"
    ))?;
    let mut rows = statement.query(params![wall, skip, most as i64])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(document(row)?);
    }
    Ok(found)
}

fn next_document(conn: &Connection, wall: Millis) -> SqliteResult<Option<Millis>> {
    let mut statement =
        conn.prepare_cached("SELECT due FROM documents WHERE due IS NOT NULL AND due > ?1 ORDER BY due LIMIT 1")?;
    Ok(statement.query_row([wall], |row| row.get(0)).optional()?)
}

/// The number of held items.
fn held(shared: &Shared, now: Millis) -> usize {
    let holds: &mut Holds = &mut shared.tasks().holds;
    holds.expire(now);
    holds.len()
}
