//! The lines of runs with the same unique key: see [`LINE_LIMIT`](crate::LINE_LIMIT).

use eddyline_machine::run::{Header, Phase};
use eddyline_machine::{Input, Message, RunId, Unique};
use rusqlite::{Connection, OptionalExtension, params};

use super::body::Body;
use super::group::Group;
use super::sqlite_error::{SqliteError, SqliteResult};
use crate::LINE_LIMIT;
use crate::commit::RunCommit;
use crate::error::Refused;
use crate::ids::Namespace;

/// Whether a run is the first in its line.
pub(super) fn is_first(conn: &Connection, run: RunId) -> SqliteResult<bool> {
    let mut statement = conn.prepare_cached(
        "SELECT 1 FROM lines AS own WHERE own.run = ?1 AND NOT EXISTS (SELECT 1 FROM lines AS other \
         WHERE other.ns = own.ns AND other.flow = own.flow AND other.key = own.key AND other.place < own.place)",
    )?;
    Ok(statement.exists([run.0.as_bytes()])?)
}

impl Group<'_> {
    /// Why a start cannot join the line of its key.
    pub fn refused_by_line(&self, commit: &RunCommit) -> SqliteResult<Option<Refused>> {
        let header = &commit.transition.header;
        let Some(unique) = &header.unique else { return Ok(None) };
        let line = self.line(&commit.ns, &header.flow, unique)?;
        Ok(match line.first() {
            None => None,
            Some(_) if line.contains(&header.run) => None,
            Some(first) if !header.in_line => Some(Refused::UniqueTaken { run: *first }),
            Some(_) => (line.len() >= LINE_LIMIT).then_some(Refused::LineFull),
        })
    }

    pub fn join_line(&mut self, commit: &RunCommit) -> SqliteResult<()> {
        let (ns, header) = (&commit.ns, &commit.transition.header);
        let Some(unique) = &header.unique else { return Ok(()) };
        let line = self.line(ns, &header.flow, unique)?;
        if line.contains(&header.run) {
            return Ok(());
        }
        self.write(
            "INSERT INTO lines (ns, flow, key, run) VALUES (?1, ?2, ?3, ?4)",
            params![ns.as_str(), header.flow, unique.key, header.run.0.as_bytes()],
        )?;
        if let Some(input) = &commit.tells_line {
            for other in &line {
                self.tell(ns, Message::replaced(*other, header.run, Input::clone(input)))?;
            }
        }
        if line.is_empty() && header.in_line {
            self.tell(ns, Message::turn(header.run))?;
        }
        Ok(())
    }

    /// An ended run leaves its line, or hands its place to the run that continues it.
    pub fn end_in_line(&mut self, ns: &Namespace, header: &Header) -> SqliteResult<()> {
        if header.phase != Phase::Ended || header.unique.is_none() {
            return Ok(());
        }
        let Some(next) = header.continued_as else { return self.leave_line(ns, header.run) };
        let (run, next) = (header.run.0.as_bytes(), next.0.as_bytes());
        self.write("UPDATE lines SET run = ?2 WHERE run = ?1", params![run, next])?;
        Ok(())
    }

    pub fn leave_line(&mut self, ns: &Namespace, run: RunId) -> SqliteResult<()> {
        let was_first = is_first(self.conn, run)?;
        let Some((flow, key)) = self.line_of(run)? else { return Ok(()) };
        self.write("DELETE FROM lines WHERE run = ?1", [run.0.as_bytes()])?;
        if was_first && let Some(first) = self.line_from(ns, &flow, &key, 1)?.first() {
            self.tell(ns, Message::turn(*first))?;
        }
        Ok(())
    }

    fn line_of(&self, run: RunId) -> SqliteResult<Option<(String, String)>> {
        let mut statement = self.conn.prepare_cached("SELECT flow, key FROM lines WHERE run = ?1")?;
        let found = statement.query_row([run.0.as_bytes()], |row| Ok((row.get(0)?, row.get(1)?)));
        Ok(found.optional()?)
    }

    fn line(&self, ns: &Namespace, flow: &str, unique: &Unique) -> SqliteResult<Vec<RunId>> {
        self.line_from(ns, flow, &unique.key, LINE_LIMIT)
    }

    /// The first runs in a line.
    fn line_from(&self, ns: &Namespace, flow: &str, key: &str, most: usize) -> SqliteResult<Vec<RunId>> {
        let mut statement = self
            .conn
            .prepare_cached("SELECT run FROM lines WHERE ns = ?1 AND flow = ?2 AND key = ?3 ORDER BY place LIMIT ?4")?;
        let run = |row: &rusqlite::Row<'_>| Ok(RunId(uuid::Uuid::from_bytes(row.get(0)?)));
        let runs = statement.query_map(params![ns.as_str(), flow, key, most as i64], run)?;
        Ok(runs.collect::<rusqlite::Result<_>>()?)
    }

    fn tell(&mut self, ns: &Namespace, message: Message) -> SqliteResult<()> {
        let body = Body::of(&message.body).map_err(|error| SqliteError::Impossible(error.to_string()))?;
        self.send(ns, &message, &body)
    }
}
