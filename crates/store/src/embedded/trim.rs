//! Permanent deletion, a slice at a time, so that the writer is never busy for long.
//!
//! The first slice hides everything. A run whose timeline is deleted is marked `trimmed`; a run that is deleted loses
//! its row at once and is listed in `leaving`, so that the rest is deleted even if the process dies in between; events
//! are deleted up to a position.

use eddyline_machine::{Millis, RunId};
use rusqlite::{OptionalExtension, params};

use super::group::Group;
use super::schema::key_of;
use super::sqlite_error::SqliteResult;
use crate::ids::Namespace;
use crate::query::Trim;

/// The most rows of a table that one call deletes.
const SLICE: usize = 5_000;

/// Deletes the rows of a run in tables with a column `run`; `BY_KEY` is for tables keyed by [`key_of`].
const BY_RUN: [&str; 6] = [
    "DELETE FROM records WHERE row IN (SELECT row FROM records WHERE run = ?1 LIMIT ?2)",
    "DELETE FROM logs WHERE (run, activation, first) IN \
     (SELECT run, activation, first FROM logs WHERE run = ?1 LIMIT ?2)",
    "DELETE FROM emitted WHERE rowid IN (SELECT rowid FROM emitted WHERE run = ?1 LIMIT ?2)",
    "DELETE FROM reuse WHERE rowid IN (SELECT rowid FROM reuse WHERE run = ?1 LIMIT ?2)",
    "DELETE FROM cursors WHERE run = ?1 AND name IN (SELECT name FROM cursors WHERE run = ?1 LIMIT ?2)",
    "DELETE FROM gates WHERE rowid IN (SELECT rowid FROM gates WHERE run = ?1 LIMIT ?2)",
];
const BY_KEY: [&str; 2] = [
    "DELETE FROM activations WHERE key IN (SELECT key FROM activations WHERE key >= ?1 AND key < ?2 LIMIT ?3)",
    "DELETE FROM \"values\" WHERE key IN (SELECT key FROM \"values\" WHERE key >= ?1 AND key < ?2 LIMIT ?3)",
];

impl Group<'_> {
    /// True while there is more to delete.
    pub fn trim(&mut self, what: &Trim) -> SqliteResult<bool> {
        match what {
            Trim::Timeline(run) => self.trim_timeline(*run),
            Trim::Run(run) => self.trim_run(*run),
            Trim::Events { ns, before } => self.trim_events(ns, *before),
            Trim::Event { ns, id } => {
                self.write("DELETE FROM events WHERE ns = ?1 AND id = ?2", params![ns.as_str(), id])?;
                Ok(false)
            }
            Trim::Traces { before } => self.trim_traces(*before),
        }
    }

    fn trim_timeline(&mut self, run: RunId) -> SqliteResult<bool> {
        let Some((position, trimmed)) = self.ended(run)? else { return Ok(false) };
        if !trimmed {
            self.touched.run(run);
            self.write("UPDATE runs SET trimmed = 1 WHERE position = ?1", [position])?;
            self.cache.forget(run);
        }
        self.delete_slice(position)
    }

    fn trim_run(&mut self, run: RunId) -> SqliteResult<bool> {
        if let Some((position, _)) = self.ended(run)? {
            self.touched.run(run);
            self.write("INSERT OR IGNORE INTO leaving (run, id) VALUES (?1, ?2)", params![position, run.0.as_bytes()])?;
            self.write("DELETE FROM runs WHERE position = ?1", [position])?;
            self.write("DELETE FROM keys WHERE run = ?1", [position])?;
            self.write("DELETE FROM tags WHERE run = ?1", [position])?;
            self.write("DELETE FROM timers WHERE run = ?1", [position])?;
            self.write("DELETE FROM fed_runs WHERE run = ?1", [position])?;
            self.cache.forget(run);
        }
        let Some(position) = self.leaving(Some(run))? else { return Ok(false) };
        if self.finish_leaving(position)? {
            return Ok(true);
        }
        // This run is done; delete a slice of one left over by a process that died.
        if let Some(other) = self.leaving(None)? {
            self.finish_leaving(other)?;
        }
        Ok(self.leaving(Some(run))?.is_some())
    }

    fn trim_events(&mut self, ns: &Namespace, before: Millis) -> SqliteResult<bool> {
        let last = self.last_event_before(ns, before)?;
        if let Some(last) = last
            && self.cache.forgotten.get(ns).is_none_or(|known| *known < last)
        {
            self.touched.forgotten(ns, self.cache.forgotten.get(ns).copied());
            self.write("INSERT OR REPLACE INTO forgotten (ns, position) VALUES (?1, ?2)", params![ns.as_str(), last])?;
            self.cache.forgotten.insert(ns.clone(), last);
        }
        let Some(last) = self.cache.forgotten.get(ns).copied() else { return Ok(false) };
        if !self.any_event_up_to(ns, last)? {
            return Ok(false);
        }
        let deleted = self.write(
            "DELETE FROM events WHERE position IN \
             (SELECT position FROM events WHERE ns = ?1 AND position <= ?2 ORDER BY position LIMIT ?3)",
            params![ns.as_str(), last, SLICE as i64],
        )?;
        Ok(deleted == SLICE)
    }

    fn trim_traces(&mut self, before: Millis) -> SqliteResult<bool> {
        let full = self.shared.tasks().queues.forget_full(before);
        full.iter().for_each(|key| self.touched.bucket(key));
        for key in full {
            self.write(
                "DELETE FROM buckets WHERE ns = ?1 AND kind = ?2 AND name = ?3 AND key = ?4 AND keyed = ?5",
                params![key.ns.as_str(), key.kind, key.name, key.key.as_deref().unwrap_or_default(), key.key.is_some()],
            )?;
        }
        // Commands are ordered by time, so only the first ones need a look.
        let mut oldest = self.conn.prepare_cached("SELECT row, at FROM commands ORDER BY row LIMIT 1")?;
        let oldest: Option<(i64, Millis)> = oldest.query_row([], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
        let Some((first, _)) = oldest.filter(|(_, at)| *at < before) else { return Ok(false) };
        self.write("DELETE FROM commands WHERE row < ?1 AND at < ?2", params![first + SLICE as i64, before])?;
        Ok(true)
    }

    fn ended(&mut self, run: RunId) -> SqliteResult<Option<(i64, bool)>> {
        let head = self.cache.head(self.conn, run)?.filter(|head| head.ended_at.is_some());
        Ok(head.map(|head| (head.position, head.trimmed)))
    }

    fn leaving(&self, run: Option<RunId>) -> SqliteResult<Option<i64>> {
        let mut statement = self.conn.prepare_cached("SELECT run FROM leaving WHERE ?1 IS NULL OR id = ?1 LIMIT 1")?;
        let id = run.as_ref().map(|run| run.0.as_bytes());
        Ok(statement.query_row([id], |row| row.get(0)).optional()?)
    }

    fn finish_leaving(&mut self, position: i64) -> SqliteResult<bool> {
        let more = self.delete_slice(position)?;
        if !more {
            self.write("DELETE FROM leaving WHERE run = ?1", [position])?;
        }
        Ok(more)
    }

    fn delete_slice(&mut self, position: i64) -> SqliteResult<bool> {
        let mut more = false;
        for sql in BY_RUN {
            more |= self.write(sql, params![position, SLICE as i64])? == SLICE;
        }
        for sql in BY_KEY {
            more |= self.write(sql, params![key_of(position, 0), key_of(position + 1, 0), SLICE as i64])? == SLICE;
        }
        Ok(more)
    }

    /// The last event of a namespace before a time. Times grow with positions, so this is a binary search.
    fn last_event_before(&self, ns: &Namespace, before: Millis) -> SqliteResult<Option<i64>> {
        let mut at_or_after = self.conn.prepare_cached(
            "SELECT position, at FROM events WHERE ns = ?1 AND position >= ?2 ORDER BY position LIMIT 1",
        )?;
        let (mut low, mut high, mut found) = (0, self.cache.event, None);
        while low <= high {
            let middle = low + (high - low) / 2;
            let event = at_or_after.query_row(params![ns.as_str(), middle], |row| Ok((row.get(0)?, row.get(1)?)));
            let event: Option<(i64, Millis)> = event.optional()?;
            match event {
                Some((position, at)) if at < before => {
                    found = Some(position);
                    low = position + 1;
                }
                _ => high = middle - 1,
            }
        }
        Ok(found)
    }

    fn any_event_up_to(&self, ns: &Namespace, last: i64) -> SqliteResult<bool> {
        let mut statement =
            self.conn.prepare_cached("SELECT 1 FROM events WHERE ns = ?1 AND position <= ?2 LIMIT 1")?;
        Ok(statement.exists(params![ns.as_str(), last])?)
    }
}
