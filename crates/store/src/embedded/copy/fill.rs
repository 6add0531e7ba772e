//! Writes copied rows into a new database.

use eddyline_machine::run::Header;
use eddyline_machine::{GateArrival, RunId};
use rusqlite::{Connection, Params, params};
use serde::de::DeserializeOwned;

use super::FED_RUN;
use crate::conditions::reason_text;
use crate::copy::*;
use crate::embedded::body::{parse, seal_text};
use crate::embedded::opening::{DELETIONS_FROM, RESET_EVENTS, RESET_RECORDS};
use crate::embedded::schema::{self, MOST_NUMBERS, key_of};
use crate::embedded::sqlite_error::{SqliteError, SqliteResult};
use crate::embedded::write_run::header_numbers;
use crate::error::Result;
use crate::ids::Namespace;
use crate::task_queues::BucketKey;
use crate::timer_columns;

#[derive(Debug)]
pub(super) struct Filler {
    conn: Connection,
    /// The position and namespace of each.
    runs: LatestRuns<(i64, Namespace)>,
}

impl Filler {
    pub fn begin(mut conn: Connection) -> Result<Filler> {
        schema::migrate(&mut conn)?;
        Ok(Filler { conn, runs: LatestRuns::default() })
    }

    /// Writes all rows in one transaction; if one fails, the whole copy fails.
    pub fn write(&mut self, rows: &[Row]) -> SqliteResult<()> {
        self.conn.execute_batch("BEGIN")?;
        for row in rows {
            self.write_row(row)?;
        }
        self.conn.execute_batch("COMMIT")?;
        Ok(())
    }

    /// Writes the state that is not in the rows.
    pub fn finish(&mut self, origin: &Origin) -> SqliteResult<()> {
        let last = origin.last;
        for (table, last) in [("runs", last.run.max(last.fed_run)), ("events", last.event)] {
            self.put("DELETE FROM sqlite_sequence WHERE name = ?1", [table])?;
            self.put("INSERT INTO sqlite_sequence (name, seq) VALUES (?1, ?2)", params![table, last as i64])?;
        }
        let fed_apart =
            self.conn.query_row("SELECT EXISTS (SELECT 1 FROM fed_runs)", [], |row| row.get::<_, bool>(0))?;
        let meta = [
            ("served_at", origin.latest),
            (DELETIONS_FROM, origin.deletions_from),
            ("gate", last.gate as i64),
            ("revision", last.revision as i64),
            (FED_RUN, if fed_apart { last.run.max(last.fed_run) as i64 } else { 0 }),
        ];
        for (name, value) in meta {
            self.put("INSERT OR REPLACE INTO meta (name, value) VALUES (?1, ?2)", params![name, value])?;
        }
        // The source's latest time is used, not that of its rows: some may have times from before its clock was reset.
        for (name, sql) in [
            (RESET_RECORDS, "INSERT OR REPLACE INTO meta SELECT ?1, coalesce(max(row), 0) FROM records"),
            (RESET_EVENTS, "INSERT OR REPLACE INTO meta SELECT ?1, coalesce(max(position), 0) FROM events"),
        ] {
            self.put(sql, [name])?;
        }
        Ok(())
    }

    fn put(&self, sql: &str, params: impl Params) -> SqliteResult<()> {
        self.conn.prepare_cached(sql)?.execute(params)?;
        Ok(())
    }

    fn run(&self, run: RunId) -> SqliteResult<(i64, &Namespace)> {
        let found = self.runs.get(run).map(|(position, ns)| (*position, ns));
        found.ok_or_else(|| SqliteError::Impossible(format!("a row precedes its run {run}")))
    }

    fn key(&self, run: RunId, number: u64) -> SqliteResult<i64> {
        if number >= MOST_NUMBERS {
            return Err(SqliteError::Impossible(format!(
                "run {run} is too large for an embedded store: it may have at most {MOST_NUMBERS} activations, values and \
                 tasks"
            )));
        }
        Ok(key_of(self.run(run)?.0, number))
    }

    fn write_row(&mut self, row: &Row) -> SqliteResult<()> {
        match row {
            Row::Run(run) => self.write_run(run),
            Row::Task(task) => self.write_task(task),
            Row::Gate(gate) => self.write_gate(gate),
            Row::Document(row) => {
                let revision = row.revision as i64;
                self.put(
                    "INSERT INTO documents (ns, kind, id, revision, due, changed_at, crc, body) \
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                    params![
                        row.ns.as_str(),
                        row.kind,
                        row.id,
                        revision,
                        row.due,
                        row.changed_at,
                        seal_text(&row.body, &[revision, row.changed_at]),
                        row.body
                    ],
                )
            }
            Row::Message(row) => {
                let place = row.place as i64;
                self.put(
                    "INSERT INTO messages (place, ns, target, id, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                    params![
                        place,
                        row.ns.as_str(),
                        row.to.0.as_bytes(),
                        row.id,
                        seal_text(&row.body, &[place]),
                        row.body
                    ],
                )
            }
            Row::Event(row) => {
                let position = row.position as i64;
                self.put(
                    "INSERT INTO events (position, ns, id, name, key, at, gates_opened, crc, body) \
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                    params![
                        position,
                        row.ns.as_str(),
                        row.id,
                        row.name,
                        row.key,
                        row.at,
                        row.gates_opened as i64,
                        seal_text(&row.payload, &[position, row.at]),
                        row.payload
                    ],
                )
            }
            Row::Rate { .. } | Row::ClosedLimit { .. } | Row::Command { .. } | Row::Line { .. } => {
                self.write_small(row)
            }
            Row::Activation { .. }
            | Row::Value { .. }
            | Row::Emitted { .. }
            | Row::Reuse { .. }
            | Row::Cursor { .. }
            | Row::Records(_)
            | Row::Log { .. }
            | Row::Timer { .. } => self.write_of_run(row),
        }
    }

    fn write_small(&self, row: &Row) -> SqliteResult<()> {
        let bucket = "INSERT INTO buckets (ns, kind, name, key, keyed, whole, parts, at, closed_until) \
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
        match row {
            Row::Rate { ns, is_limit, name, key, whole, parts, at } => {
                let kind = if *is_limit { BucketKey::LIMIT } else { BucketKey::QUEUE };
                let of = (ns.as_str(), kind, name, key.as_deref().unwrap_or_default(), key.is_some());
                self.put(bucket, params![of.0, of.1, of.2, of.3, of.4, whole, parts, at, 0])
            }
            Row::ClosedLimit { ns, name, until } => {
                self.put(bucket, params![ns.as_str(), BucketKey::SLOW, name, "", false, 1, 0, 0, until])
            }
            Row::Command { id, at } => {
                self.put("INSERT INTO commands (id, at) VALUES (?1, ?2)", params![id.as_bytes(), at])
            }
            Row::Line { place, ns, flow, key, run } => self.put(
                "INSERT INTO lines (place, ns, flow, key, run) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![*place as i64, ns.as_str(), flow, key, run.0.as_bytes()],
            ),
            _ => Ok(()),
        }
    }

    fn write_of_run(&self, row: &Row) -> SqliteResult<()> {
        match row {
            Row::Activation { run, id, body } => {
                let key = self.key(*run, *id)?;
                let sql = "INSERT INTO activations (key, crc, body) VALUES (?1, ?2, ?3)";
                self.put(sql, params![key, seal_text(body, &[key]), body])
            }
            Row::Value { run, id, body } => {
                let key = self.key(*run, *id)?;
                let sql = "INSERT INTO \"values\" (key, crc, body) VALUES (?1, ?2, ?3)";
                self.put(sql, params![key, seal_text(body, &[key]), body])
            }
            Row::Emitted { run, scope, event, body } => {
                let numbers = [self.run(*run)?.0, i64::from(*scope), i64::from(*event)];
                let sql = "INSERT INTO emitted (run, scope, event, crc, body) VALUES (?1, ?2, ?3, ?4, ?5)";
                self.put(sql, params![numbers[0], numbers[1], numbers[2], seal_text(body, &numbers), body])
            }
            Row::Reuse { run, activation, body } => {
                let (position, _) = self.run(*run)?;
                let sql = "INSERT INTO reuse (run, activation, crc, body) VALUES (?1, ?2, ?3, ?4)";
                self.put(sql, params![position, activation, seal_text(body, &[position]), body])
            }
            Row::Cursor { run, name, position } => {
                let sql = "INSERT INTO cursors (run, name, position) VALUES (?1, ?2, ?3)";
                self.put(sql, params![self.run(*run)?.0, name, *position as i64])
            }
            Row::Records(row) => {
                let (position, _) = self.run(row.run)?;
                let (first, count) = (row.first as i64, i64::from(row.count));
                self.put(
                    "INSERT INTO records (run, first, count, version, command, ts, crc, body) \
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                    params![
                        position,
                        first,
                        count,
                        row.version as i64,
                        row.command.as_ref().map(|command| command.as_bytes()),
                        row.ts,
                        seal_text(&row.body, &[position, first, count, row.ts]),
                        row.body
                    ],
                )
            }
            Row::Log { run, activation, first } => {
                let sql = "INSERT INTO logs (run, activation, first) VALUES (?1, ?2, ?3)";
                self.put(sql, params![self.run(*run)?.0, activation, *first as i64])
            }
            Row::Timer { run, key, due, wall } => {
                let (activation, kind, fence) = timer_columns::columns(*key);
                self.put(
                    "INSERT INTO timers (run, activation, kind, fence, due, wall) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                    params![self.run(*run)?.0, activation, kind, fence, due, wall],
                )
            }
            _ => Ok(()),
        }
    }

    fn write_run(&mut self, row: &CopiedRun) -> SqliteResult<()> {
        let header: Header = parsed(&row.header, || format!("the header of run {}", row.run))?;
        let position = row.position as i64;
        self.put(
            "INSERT INTO runs (position, id, ns, flow, status, external_id, created_at, started_at, ended_at, trimmed, \
             paused, memo, version, crc, header, root, retry_of) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
            params![
                position,
                row.run.0.as_bytes(),
                row.ns.as_str(),
                header.flow,
                header.status().as_str(),
                header.external_id,
                row.created_at,
                row.started_at,
                row.ended_at,
                row.trimmed,
                header.holds_tasks(),
                header.code.as_ref().map_or(0, |code| code.n) as i64,
                header.version.0 as i64,
                seal_text(&row.header, &header_numbers(row.run)),
                row.header,
                header.root.as_ref().map(|root| root.0.as_bytes()),
                header.retry_of.as_ref().map(|run| run.0.as_bytes())
            ],
        )?;
        for tag in &header.tags {
            self.put("INSERT OR IGNORE INTO tags (tag, run) VALUES (?1, ?2)", params![tag, position])?;
        }
        if let Some(key) = &row.key {
            self.put(
                "INSERT INTO keys (run, ns, flow, key, fingerprint) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![position, row.ns.as_str(), key.flow, key.key, key.fingerprint],
            )?;
        }
        // Either every run has a position in `fed_runs`, or none has: pages of a feed read the one and then the other.
        if row.fed_at != row.position || self.is_fed_apart()? {
            self.feed_those_before(position)?;
            self.put(
                "INSERT INTO fed_runs (ns, position, run) VALUES (?1, ?2, ?3)",
                params![row.ns.as_str(), row.fed_at as i64, position],
            )?;
        }
        self.runs.insert(row.run, (position, row.ns.clone()));
        Ok(())
    }

    fn is_fed_apart(&self) -> SqliteResult<bool> {
        Ok(self.conn.prepare_cached("SELECT EXISTS (SELECT 1 FROM fed_runs)")?.query_row([], |row| row.get(0))?)
    }

    /// The first run whose position differs makes it explicit for all earlier ones.
    fn feed_those_before(&self, position: i64) -> SqliteResult<()> {
        if self.is_fed_apart()? {
            return Ok(());
        }
        self.put("INSERT INTO fed_runs SELECT ns, position, position FROM runs WHERE position < ?1", [position])
    }

    fn write_task(&self, row: &CopiedTask) -> SqliteResult<()> {
        let key = self.key(row.run, row.fence)?;
        let claim = row.claim.as_ref();
        self.put(
            "INSERT INTO tasks (key, place, queued_at, closed, worker, request, since, lease_ms, lease_until, deadline, \
             build, memo, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
            params![
                key,
                row.place as i64,
                row.queued_at,
                row.closed,
                claim.map(|claim| &claim.worker),
                claim.map(|claim| claim.request.as_bytes()),
                claim.map(|claim| claim.since),
                claim.map(|claim| claim.lease_ms),
                // Each lease has its full time when the store is opened.
                claim.map(|claim| claim.since + claim.lease_ms),
                claim.map_or(row.start_by, |claim| claim.deadline),
                claim.and_then(|claim| claim.build.as_deref()),
                claim.map(|claim| claim.memo as i64),
                seal_text(&row.body, &[key]),
                row.body
            ],
        )
    }

    fn write_gate(&self, row: &CopiedGate) -> SqliteResult<()> {
        let (position, ns) = self.run(row.run)?;
        let activation = i64::from(row.activation);
        let Some(arrival) = &row.arrival else {
            return self.put(
                "INSERT INTO gates (run, activation, ns, token, position, closed) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                params![position, activation, ns.as_str(), row.token, row.position as i64, row.closed],
            );
        };
        let gate: GateArrival =
            parsed(&arrival.body, || format!("the gate of activation {activation} of run {}", row.run))?;
        let event = gate.event.as_ref();
        self.put(
            "INSERT INTO gates (run, activation, ns, token, position, at, deadline, reason, event, event_key, closed, crc, \
             body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
            params![
                position,
                activation,
                ns.as_str(),
                row.token,
                row.position as i64,
                arrival.at,
                arrival.deadline,
                reason_text(gate.reason),
                event.map(|event| &event.name),
                event.and_then(|event| event.key.as_ref()),
                row.closed,
                seal_text(&arrival.body, &[position, activation]),
                arrival.body
            ],
        )
    }
}

fn parsed<T: DeserializeOwned>(body: &str, name: impl Fn() -> String) -> SqliteResult<T> {
    parse(body.as_bytes()).map_err(|error| SqliteError::Corrupt(format!("{} can't be read: {error}", name())))
}
