//! What is due, each item handed out to one caller at a time.
//!
//! What is due is read from the disk, and who got it is remembered in memory. What is held by others is passed over, so
//! as many more rows are read as there are items held: they must not keep later ones from being handed out.

use std::collections::BTreeSet;

use eddyline_machine::{Message, Millis, RunId};
use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::list::{DOCUMENT, document};
use super::load::{inbox, timer};
use super::shared::Shared;
use super::trouble::Outcome;
use crate::document::Document;
use crate::holds::{Holds, Item, next_in};
use crate::ids::Namespace;
use crate::query::*;

/// Items of one answer.
const MOST: usize = 100_000;

fn bounded(limit: usize) -> usize {
    limit.min(MOST)
}

pub(super) fn leases(shared: &Shared, limit: usize) -> DueBatch {
    let now = shared.time.now();
    let tasks = &mut *shared.tasks();
    tasks.holds.expire(now);
    let holds = &mut tasks.holds;
    let up = tasks.lines.time_up(now, limit, |run, fence| holds.take(Item::Lease(run, fence), now));
    // What is up and not among these is held by somebody, unless there was no room for it.
    let next = if up.len() >= limit { Some(now) } else { tasks.lines.next_expiry(now) };
    let items = up.into_iter();
    let items = items.map(|up| DueItem::Lease { ns: up.ns, run: up.run, task: up.task, why: up.why, claim: up.claim });
    DueBatch { items: items.collect(), next_in: next_in(next, now, &tasks.holds) }
}

pub(super) fn timers(conn: &Connection, shared: &Shared, limit: usize) -> Outcome<DueBatch> {
    let (now, wall, limit) = (shared.time.now(), shared.time.wall(), bounded(limit));
    let most = limit + held(shared, now) + 1;
    let mut found = Vec::new();
    for (by_wall, clock) in [(false, now), (true, wall)] {
        let due = due_timers(conn, by_wall, clock, most)?;
        let next = if due.len() < most { next_timer(conn, by_wall, clock)? } else { None };
        found.push((clock, due, next));
    }
    let holds = &mut shared.tasks().holds;
    let (mut items, mut next) = (Vec::new(), None);
    for (clock, due, later) in found {
        let all_read = due.len() < most;
        let mut due = due.into_iter();
        let more = loop {
            match due.next() {
                Some(_) if items.len() >= limit => break true,
                Some((ns, run, timer)) => {
                    if holds.take(Item::Timer(run, timer.key, timer.due), now) {
                        items.push(DueItem::Timer { ns, run, timer });
                    }
                }
                None => break !all_read,
            }
        };
        let at = if more { Some(now) } else { later.map(|due| now + (due - clock).max(0)) };
        next = next.into_iter().chain(at).min();
    }
    Ok(DueBatch { items, next_in: next_in(next, now, holds) })
}

fn due_timers(conn: &Connection, wall: bool, clock: Millis, most: usize) -> Outcome<Vec<(Namespace, RunId, TimerRow)>> {
    let mut statement = conn.prepare_cached(
        "SELECT timers.activation, timers.kind, timers.fence, timers.due, timers.wall, runs.ns, runs.id \
         FROM timers CROSS JOIN runs ON runs.position = timers.run WHERE timers.wall = ?1 AND timers.due <= ?2 \
         ORDER BY timers.due, runs.id, timers.activation, timers.kind, timers.fence LIMIT ?3",
    )?;
    let mut rows = statement.query(params![wall, clock, most as i64])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let run = RunId(Uuid::from_bytes(row.get(6)?));
        found.push((Namespace::new(&row.get::<_, String>(5)?), run, timer(row, run)?));
    }
    Ok(found)
}

fn next_timer(conn: &Connection, wall: bool, clock: Millis) -> Outcome<Option<Millis>> {
    let mut statement = conn.prepare_cached("SELECT min(due) FROM timers WHERE wall = ?1 AND due > ?2")?;
    Ok(statement.query_row(params![wall, clock], |row| row.get(0))?)
}

pub(super) fn messages(conn: &Connection, shared: &Shared, limit: usize) -> Outcome<DueBatch> {
    let (now, limit) = (shared.time.now(), bounded(limit));
    let (found, mut more) = waiting(conn, shared, now, limit)?;
    let holds = &mut shared.tasks().holds;
    holds.expire(now);
    let mut items = Vec::new();
    for (ns, to, messages) in found {
        if holds.take_messages(to, &messages, now) {
            items.push(DueItem::Messages { ns, to, messages });
        } else {
            // Somebody else was faster.
            more = true;
        }
    }
    Ok(DueBatch { items, next_in: next_in(more.then_some(now), now, holds) })
}

type Waiting = (Namespace, RunId, Vec<Message>);

/// The oldest messages of up to so many runs that nobody delivers yet, and whether there are more.
fn waiting(conn: &Connection, shared: &Shared, now: Millis, limit: usize) -> Outcome<(Vec<Waiting>, bool)> {
    let mut statement = conn.prepare_cached("SELECT target, ns FROM messages ORDER BY place")?;
    let mut rows = statement.query([])?;
    let (mut found, mut seen, mut more) = (Vec::new(), BTreeSet::new(), false);
    while let Some(row) = rows.next()? {
        let to = RunId(Uuid::from_bytes(row.get(0)?));
        if !seen.insert(to) || shared.tasks().holds.messages_held(to, now) {
            continue;
        }
        if found.len() >= limit {
            return Ok((found, true));
        }
        let mut messages = inbox(conn, to, MAX_INBOX as i64 + 1)?;
        more |= messages.len() > MAX_INBOX;
        messages.truncate(MAX_INBOX);
        found.push((Namespace::new(&row.get::<_, String>(1)?), to, messages));
    }
    Ok((found, more))
}

pub(super) fn documents(conn: &Connection, shared: &Shared, limit: usize) -> Outcome<DueBatch> {
    let (now, wall, limit) = (shared.time.now(), shared.time.wall(), bounded(limit));
    let most = limit + held(shared, now) + 1;
    let found = due_documents(conn, wall, most)?;
    let later = if found.len() < most { next_document(conn, wall)? } else { None };
    let holds = &mut shared.tasks().holds;
    let (mut items, mut more) = (Vec::new(), found.len() >= most);
    for document in found {
        if items.len() >= limit {
            more = true;
            break;
        }
        if holds.take(Item::Document(document.ns.clone(), document.key.clone(), document.revision), now) {
            items.push(DueItem::Document(document));
        }
    }
    let next = if more { Some(now) } else { later.map(|at| now + (at - wall).max(0)) };
    Ok(DueBatch { items, next_in: next_in(next, now, holds) })
}

fn due_documents(conn: &Connection, wall: Millis, most: usize) -> Outcome<Vec<Document>> {
    let mut statement = conn.prepare_cached(&format!(
        "SELECT {DOCUMENT} FROM documents WHERE due IS NOT NULL AND due <= ?1 ORDER BY due, ns, kind, id LIMIT ?2"
    ))?;
    let mut rows = statement.query(params![wall, most as i64])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(document(row)?);
    }
    Ok(found)
}

fn next_document(conn: &Connection, wall: Millis) -> Outcome<Option<Millis>> {
    let mut statement =
        conn.prepare_cached("SELECT due FROM documents WHERE due IS NOT NULL AND due > ?1 ORDER BY due LIMIT 1")?;
    Ok(statement.query_row([wall], |row| row.get(0)).optional()?)
}

/// How many items somebody has.
fn held(shared: &Shared, now: Millis) -> usize {
    let holds: &mut Holds = &mut shared.tasks().holds;
    holds.expire(now);
    holds.len()
}
