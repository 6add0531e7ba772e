//! Reads across runs: lists, feeds and counts.

use eddyline_machine::{Data, Millis, RunId, Status};
use rusqlite::types::ToSqlOutput;
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params, params_from_iter};
use uuid::Uuid;

use super::body;
use super::copy::FED_RUN;
use super::load::{GATE, SUMMARY, gate, summary};
use super::restore::meta;
use super::sqlite_error::SqliteResult;
use crate::conditions::{Conditions, Dialect, Value, clamped};
use crate::document::{Document, DocumentKey};
use crate::ids::Namespace;
use crate::query::*;

const SQLITE: Dialect = Dialect {
    parameter: '?',
    runs: "runs",
    gates: "gates",
    tagged: "runs.position IN (SELECT run FROM tags WHERE tag = ?)",
    trimmed: "runs.trimmed = 1",
    kept: "runs.trimmed = 0",
    gate_is_open: "gates.at IS NOT NULL AND gates.closed = 0",
    gate_is_kept: "runs.trimmed = 0",
    gate_of_run: "runs.id = ?",
    begins_with: "substr(id, 1, length(?)) = ?",
};

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match self {
            Value::Text(text) => text.to_sql(),
            Value::Number(number) => number.to_sql(),
            Value::Run(run) => Ok(ToSqlOutput::from(&run.0.as_bytes()[..])),
        }
    }
}

/// All rows of the statement `sql` + conditions + `after`.
fn all<T>(
    conn: &Connection,
    wanted: &Conditions,
    sql: &str,
    after: &str,
    read: impl Fn(&Row<'_>) -> SqliteResult<T>,
) -> SqliteResult<Vec<T>> {
    let mut statement = conn.prepare_cached(&format!("{sql}{}{after}", wanted.text()))?;
    let mut rows = statement.query(params_from_iter(&wanted.values))?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(read(row)?);
    }
    Ok(found)
}

pub(super) fn runs(
    conn: &Connection,
    ns: Option<&Namespace>,
    filter: &RunFilter,
    page: Page,
) -> SqliteResult<Vec<Summary>> {
    let mut wanted = Conditions::of_runs(&SQLITE, ns, filter);
    if let Some(before) = page.after {
        wanted.and("runs.position < ?", clamped(before));
    }
    let (sql, after) = runs_text(filter, page);
    all(conn, &wanted, &sql, &after, summary)
}

/// The parts of the statement before and after the conditions.
fn runs_text(filter: &RunFilter, page: Page) -> (String, String) {
    let limit = page.limit.min(MAX_PAGE);
    let order = format!(" ORDER BY runs.position DESC LIMIT {limit}");
    if filter.ended_before.is_none() {
        return (format!("SELECT {SUMMARY} FROM runs"), order);
    }
    // The inner SELECT finds the runs in an index by end; only those rows are read. The unary plus keeps SQLite from
    // scanning by position instead, which would start with the newest runs.
    let sql = format!("SELECT {SUMMARY} FROM runs WHERE runs.position IN (SELECT runs.position FROM runs");
    (sql, format!(" ORDER BY +runs.position DESC LIMIT {limit}){order}"))
}

pub(super) fn count_runs(conn: &Connection, ns: &Namespace, filter: &RunFilter) -> SqliteResult<u64> {
    let wanted = Conditions::of_runs(&SQLITE, Some(ns), filter);
    let mut statement = conn.prepare_cached(&format!("SELECT count(*) FROM runs{}", wanted.text()))?;
    let count: i64 = statement.query_row(params_from_iter(&wanted.values), |row| row.get(0))?;
    Ok(count as u64)
}

/// By the index of runs that have not ended, so that ended runs are not read.
const GOING: &str = "SELECT ns, flow, status, count(*) FROM runs INDEXED BY runs_going WHERE ended_at IS NULL \
                     GROUP BY ns, flow, status";

pub(super) fn going(conn: &Connection) -> SqliteResult<Vec<GoingRuns>> {
    let mut statement = conn.prepare_cached(GOING)?;
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let (ns, status): (String, String) = (row.get(0)?, row.get(2)?);
        let Some(status) = Status::ALL.into_iter().find(|known| known.as_str() == status) else { continue };
        let (flow, count) = (row.get(1)?, row.get::<_, i64>(3)? as u64);
        found.push(GoingRuns { ns: Namespace::new(&ns), flow, status, count });
    }
    Ok(found)
}

pub(super) fn gates(
    conn: &Connection,
    ns: Option<&Namespace>,
    filter: &GateFilter,
    page: Page,
) -> SqliteResult<Vec<GateRow>> {
    // Find the gates of a run by the run, not by the index over the namespace.
    let of_run = filter.run.is_some() && filter.token.is_none();
    let ns_column = if of_run { "+gates.ns" } else { "gates.ns" };
    let mut wanted = Conditions::of_gates(&SQLITE, ns_column, ns, filter);
    if let Some(after) = page.after {
        wanted.and("gates.position > ?", clamped(after));
    }
    let sql = format!("SELECT {GATE}, runs.id FROM gates JOIN runs ON runs.position = gates.run");
    let order = format!(" ORDER BY gates.position LIMIT {}", page.limit.min(MAX_PAGE));
    all(conn, &wanted, &sql, &order, |row| gate(row, RunId(Uuid::from_bytes(row.get(10)?))))
}

pub(super) const DOCUMENT: &str = "crc, body, ns, kind, id, revision, due, changed_at";

pub(super) fn document(row: &Row<'_>) -> SqliteResult<Document> {
    let (ns, kind, id): (String, String, String) = (row.get(2)?, row.get(3)?, row.get(4)?);
    let (revision, changed_at): (i64, i64) = (row.get(5)?, row.get(7)?);
    let body = body::read(row, 0, &[revision, changed_at], || format!("documents: {kind} {id} of {ns}"))?;
    Ok(Document {
        ns: Namespace::new(&ns),
        key: DocumentKey { kind, id },
        revision: revision as u64,
        body,
        due: row.get(6)?,
        changed_at,
    })
}

pub(super) fn documents(
    conn: &Connection,
    ns: Option<&Namespace>,
    filter: &DocumentFilter,
    limit: usize,
) -> SqliteResult<Vec<Document>> {
    let wanted = Conditions::of_documents(&SQLITE, ns, filter);
    let order = format!(" ORDER BY id, ns LIMIT {}", limit.min(MAX_PAGE));
    all(conn, &wanted, &format!("SELECT {DOCUMENT} FROM documents"), &order, document)
}

pub(super) fn feed(conn: &Connection, ns: &Namespace, feed: &Feed, page: Page) -> SqliteResult<Vec<FeedItem>> {
    match feed {
        Feed::Runs { flow } => fed_runs(conn, ns, flow.as_deref(), page),
        Feed::Events { name, key, since } => {
            let Some(first) = first_event(conn, ns, *since)? else { return Ok(Vec::new()) };
            let wanted = fed_events_where(ns, name.as_deref(), key.as_deref(), *since, first, page);
            fed_events(conn, ns, &wanted, page)
        }
    }
}

/// Runs that were copied from a store where their places in feeds are not their positions come first: all of them are
/// older.
fn fed_runs(conn: &Connection, ns: &Namespace, flow: Option<&str>, page: Page) -> SqliteResult<Vec<FeedItem>> {
    let (after, limit) = (clamped(page.after.unwrap_or(0)), page.limit.min(MAX_PAGE));
    let copied = meta(conn, FED_RUN)?;
    let mut found = Vec::new();
    if after < copied {
        let from =
            "SELECT fed_runs.position, created_at, id, flow FROM fed_runs JOIN runs ON runs.position = fed_runs.run";
        found = fed_runs_in(conn, from, "fed_runs", ns, flow, after, limit)?;
    }
    if found.len() < limit {
        let from = "SELECT runs.position, created_at, id, flow FROM runs";
        let left = limit - found.len();
        found.extend(fed_runs_in(conn, from, "runs", ns, flow, after.max(copied), left)?);
    }
    Ok(found)
}

fn fed_runs_in(
    conn: &Connection,
    from: &str,
    table: &str,
    ns: &Namespace,
    flow: Option<&str>,
    after: i64,
    limit: usize,
) -> SqliteResult<Vec<FeedItem>> {
    let mut wanted = Conditions::new(&SQLITE);
    wanted.and(&format!("{table}.ns = ?"), ns.as_str());
    if let Some(flow) = flow {
        wanted.and("flow = ?", flow);
    }
    wanted.and(&format!("{table}.position > ?"), after);
    all(conn, &wanted, from, &format!(" ORDER BY {table}.position LIMIT {limit}"), |row| {
        let what = Fed::Run { run: RunId(Uuid::from_bytes(row.get(2)?)), flow: row.get(3)? };
        Ok(FeedItem { position: row.get::<_, i64>(0)? as u64, at: row.get(1)?, what })
    })
}

/// A position at or before the first visible event of a namespace published at `since` or later.
fn first_event(conn: &Connection, ns: &Namespace, since: Option<Millis>) -> SqliteResult<Option<i64>> {
    let mut statement = conn.prepare_cached("SELECT position + 1 FROM forgotten WHERE ns = ?1")?;
    let there: Option<i64> = statement.query_row([ns.as_str()], |row| row.get(0)).optional()?;
    let there = there.unwrap_or(0);
    let Some(since) = since else { return Ok(Some(there)) };
    let mut statement = conn.prepare_cached(FIRST_SINCE)?;
    let first: Option<i64> = statement.query_row(params![ns.as_str(), since], |row| row.get(0)).optional()?;
    Ok(first.map(|first| first.max(there)))
}

const FIRST_SINCE: &str = "SELECT position FROM events WHERE ns = ?1 AND at >= ?2 ORDER BY at, position LIMIT 1";

fn fed_events_where(
    ns: &Namespace,
    name: Option<&str>,
    key: Option<&str>,
    since: Option<Millis>,
    first: i64,
    page: Page,
) -> Conditions {
    let mut wanted = Conditions::new(&SQLITE);
    wanted.and("ns = ?", ns.as_str());
    if let Some(name) = name {
        wanted.and("name = ?", name);
    }
    if let Some(key) = key {
        wanted.and("key = ?", key);
    }
    // The unary plus keeps SQLite from using the index by time: pages are ordered by position.
    if let Some(since) = since {
        wanted.and("+at >= ?", since);
    }
    wanted.and("position >= ?", page.after.map_or(first, |after| clamped(after).saturating_add(1).max(first)));
    wanted
}

fn fed_events(conn: &Connection, ns: &Namespace, wanted: &Conditions, page: Page) -> SqliteResult<Vec<FeedItem>> {
    let order = format!(" ORDER BY position LIMIT {}", page.limit.min(MAX_PAGE));
    all(conn, wanted, EVENTS, &order, |row| {
        let (position, at): (i64, i64) = (row.get(2)?, row.get(3)?);
        let payload: Data = body::read(row, 0, &[position, at], || format!("events: event {position} of {ns}"))?;
        let what = Fed::Event { id: row.get(4)?, name: row.get(5)?, key: row.get(6)?, payload };
        Ok(FeedItem { position: position as u64, at, what })
    })
}

pub(super) fn event(conn: &Connection, ns: &Namespace, id: &str) -> SqliteResult<Option<EventState>> {
    let Some(first) = first_event(conn, ns, None)? else { return Ok(None) };
    let mut statement = conn.prepare_cached(
        "SELECT position, at, name, key, gates_opened FROM events WHERE ns = ?1 AND id = ?2 AND +position >= ?3",
    )?;
    let found = statement.query_row(params![ns.as_str(), id, first], |row| {
        Ok(EventState {
            position: row.get::<_, i64>(0)? as u64,
            at: row.get(1)?,
            name: row.get(2)?,
            key: row.get(3)?,
            gates_opened: row.get::<_, i64>(4)? as u64,
        })
    });
    Ok(found.optional()?)
}

const EVENTS: &str = "SELECT crc, body, position, at, id, name, key FROM events";

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::schema::migrate;
    use super::*;

    /// Checks the query plan.
    #[track_caller]
    fn check(ns: Option<&Namespace>, filter: &RunFilter, after: Option<u64>, expected: &[&str]) {
        let mut conn = Connection::open_in_memory().unwrap();
        migrate(&mut conn).unwrap();
        let page = Page { after, limit: 100 };
        let (sql, order) = runs_text(filter, page);
        let mut wanted = Conditions::of_runs(&SQLITE, ns, filter);
        if let Some(before) = after {
            wanted.and("runs.position < ?", clamped(before));
        }
        let plan =
            all(&conn, &wanted, &format!("EXPLAIN QUERY PLAN {sql}"), &order, |row| Ok(row.get::<_, String>(3)?));
        let plan = plan.unwrap();
        let looks: Vec<&String> = plan.iter().filter(|step| step.contains(" runs")).collect();
        assert_eq!(looks, expected, "{plan:?}");
    }

    #[test]
    fn runs_that_have_not_ended_are_found_by_their_status_in_every_namespace() {
        for status in Status::ALL.into_iter().filter(|status| !status.is_end()) {
            let filter = RunFilter { status: vec![status], ..RunFilter::default() };
            check(None, &filter, None, &["SEARCH runs USING INDEX runs_going (status=?)"]);
            check(None, &filter, Some(7), &["SEARCH runs USING INDEX runs_going (status=? AND rowid<?)"]);
        }
    }

    #[test]
    fn events_are_found_by_name_key_and_position_and_the_first_of_a_moment_by_time() {
        let mut conn = Connection::open_in_memory().unwrap();
        migrate(&mut conn).unwrap();
        let plan = |wanted: &Conditions, sql: &str, order: &str| {
            let plan =
                all(&conn, wanted, &format!("EXPLAIN QUERY PLAN {sql}"), order, |row| Ok(row.get::<_, String>(3)?));
            plan.unwrap()
        };
        for (name, key, index) in [
            (None, None, "events_by_ns (ns=? AND rowid>?)"),
            (Some("a"), None, "events_by_name (ns=? AND name=? AND rowid>?)"),
            (Some("a"), Some("7"), "events_by_key (ns=? AND name=? AND key=? AND rowid>?)"),
        ] {
            let page = Page { after: Some(3), limit: 10 };
            let wanted = fed_events_where(&Namespace::default(), name, key, Some(5), 2, page);
            let found = plan(&wanted, EVENTS, " ORDER BY position LIMIT 10");
            assert_eq!(found, [format!("SEARCH events USING INDEX {index}")]);
        }
        let mut first = Conditions::new(&SQLITE);
        first.values = vec!["x".into(), 5.into()];
        let found = plan(&first, FIRST_SINCE, "");
        assert_eq!(found, ["SEARCH events USING COVERING INDEX events_by_time (ns=? AND at>?)"]);
    }

    #[test]
    fn runs_that_are_old_enough_to_be_trimmed_are_found_by_their_end() {
        for (trimmed, index) in [(false, "runs_by_end"), (true, "runs_trimmed")] {
            let filter = RunFilter { ended_before: Some(1), trimmed: Some(trimmed), ..RunFilter::default() };
            let by_end = format!("SEARCH runs USING COVERING INDEX {index} (ns=? AND ended_at<?)");
            check(
                Some(&Namespace::default()),
                &filter,
                None,
                &["SEARCH runs USING INTEGER PRIMARY KEY (rowid=?)", &by_end],
            );
        }
    }
}
