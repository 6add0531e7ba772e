//! Lists across runs: of runs, gates, documents, and feeds.

use eddyline_machine::record::GateId;
use eddyline_machine::{ActId, Data, Status};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::body::{escape, escaped, read, unescape};
use super::database::{Database, Param};
use super::load::{SUMMARY, run_id, summary};
use super::pg_error::{PgError, PgResult};
use crate::conditions::{Conditions, Dialect, Value, clamped};
use crate::document::{Document, DocumentKey};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::*;

const POSTGRES: Dialect = Dialect {
    parameter: '$',
    runs: "r",
    gates: "g",
    tagged: "EXISTS (SELECT 1 FROM eddyline.tags t WHERE t.run = r.id AND t.tag = ?)",
    trimmed: "r.trimmed",
    kept: "NOT r.trimmed",
    gate_is_open: "g.at IS NOT NULL AND NOT g.closed",
    gate_is_kept: "EXISTS (SELECT 1 FROM eddyline.runs r WHERE r.id = g.run AND NOT r.trimmed)",
    gate_of_run: "g.run = ?",
    begins_with: "starts_with(id, ?)",
};

/// All rows of `sql` + conditions + `after`. Only the text of the conditions makes the statement, so it stays prepared.
async fn all<T>(
    database: &Database,
    wanted: Conditions,
    sql: &str,
    after: &str,
    read: impl Fn(&Row) -> PgResult<T>,
) -> Result<Vec<T>> {
    let sql = format!("{sql}{}{after}", wanted.text());
    let values = values(wanted);
    rows(database.read(&sql, &params(&values)).await, read)
}

/// The same, planned for these values: how many rows a filter leaves decides which index is the right one.
async fn all_planned_anew<T>(
    database: &Database,
    wanted: Conditions,
    sql: &str,
    after: &str,
    read: impl Fn(&Row) -> PgResult<T>,
) -> Result<Vec<T>> {
    let sql = format!("{sql}{}{after}", wanted.text());
    let values = values(wanted);
    rows(database.read_planned_anew(&sql, &params(&values)).await, read)
}

type Parameter = (Box<dyn ToSql + Sync + Send>, Type);

fn values(wanted: Conditions) -> Vec<Parameter> {
    wanted.values.into_iter().map(parameter).collect()
}

fn params(values: &[Parameter]) -> Vec<Param<'_>> {
    values.iter().map(|(value, of)| (&**value as &(dyn ToSql + Sync), of.clone())).collect()
}

fn rows<T>(rows: PgResult<Vec<Row>>, read: impl Fn(&Row) -> PgResult<T>) -> Result<Vec<T>> {
    rows.map_err(PgError::into_error)?.iter().map(read).collect::<PgResult<_>>().map_err(PgError::into_error)
}

fn parameter(value: Value) -> Parameter {
    match value {
        Value::Text(text) => (Box::new(escaped(&text)), Type::TEXT),
        Value::Number(number) => (Box::new(number), Type::INT8),
        Value::Run(run) => (Box::new(run.0), Type::UUID),
    }
}

pub(super) async fn runs(
    database: &Database,
    ns: Option<&Namespace>,
    filter: &RunFilter,
    page: Page,
) -> Result<Vec<Summary>> {
    let mut wanted = Conditions::of_runs(&POSTGRES, ns, filter);
    if let Some(before) = page.after {
        wanted.and("r.position < ?", clamped(before));
    }
    let order = format!(" ORDER BY r.position DESC LIMIT {}", page.limit.min(MAX_PAGE));
    all_planned_anew(database, wanted, &format!("SELECT {SUMMARY} FROM eddyline.runs r"), &order, summary).await
}

pub(super) async fn count_runs(database: &Database, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
    let wanted = Conditions::of_runs(&POSTGRES, Some(ns), filter);
    let counts = all_planned_anew(database, wanted, "SELECT count(*) FROM eddyline.runs r", "", |row| {
        Ok(row.try_get::<_, i64>(0)?)
    });
    Ok(counts.await?.first().copied().unwrap_or(0) as u64)
}

pub(super) async fn going(database: &Database) -> Result<Vec<GoingRuns>> {
    let sql = "SELECT ns, flow, status, count(*) FROM eddyline.runs WHERE ended_at IS NULL GROUP BY ns, flow, status";
    let rows = database.read(sql, &[]).await.map_err(PgError::into_error)?;
    let going = |row: &Row| -> PgResult<Option<GoingRuns>> {
        let status: &str = row.try_get(2)?;
        let Some(status) = Status::ALL.into_iter().find(|known| known.as_str() == status) else { return Ok(None) };
        let (ns, flow) = (Namespace::new(&unescape(row.try_get(0)?)), unescape(row.try_get(1)?));
        Ok(Some(GoingRuns { ns, flow, status, count: row.try_get::<_, i64>(3)? as u64 }))
    };
    let found = rows.iter().map(going).collect::<PgResult<Vec<_>>>().map_err(PgError::into_error)?;
    let mut found: Vec<GoingRuns> = found.into_iter().flatten().collect();
    found.sort();
    Ok(found)
}

/// The columns of a [`GateRow`].
pub(super) const GATE: &str =
    "g.crc, g.body, g.ns, g.position, g.run, g.activation, g.token, g.at, g.deadline, g.closed";

pub(super) fn gate(row: &Row) -> PgResult<GateRow> {
    let (run, activation) = (run_id(row, 4)?, row.try_get::<_, i64>(5)? as u32);
    let arrival = match row.try_get::<_, Option<i64>>(7)? {
        None => None,
        Some(at) => {
            let name = || format!("gates: the gate of activation {activation} of run {run}");
            let key: [&[u8]; 2] = [&run.0.into_bytes(), &activation.to_le_bytes()];
            let gate = read(row.try_get(0)?, row.try_get(1)?, &key, name)?;
            Some(Arrived { at, gate, deadline: row.try_get(8)? })
        }
    };
    Ok(GateRow {
        ns: Namespace::new(&unescape(row.try_get(2)?)),
        position: row.try_get::<_, i64>(3)? as u64,
        id: GateId { run, activation: ActId(activation) },
        token: row.try_get::<_, Option<String>>(6)?.map(unescape),
        arrival,
        closed: row.try_get(9)?,
    })
}

pub(super) async fn gates(
    database: &Database,
    ns: Option<&Namespace>,
    filter: &GateFilter,
    page: Page,
) -> Result<Vec<GateRow>> {
    let mut wanted = Conditions::of_gates(&POSTGRES, "g.ns", ns, filter);
    if let Some(after) = page.after {
        wanted.and("g.position > ?", clamped(after));
    }
    let order = format!(" ORDER BY g.position LIMIT {}", page.limit.min(MAX_PAGE));
    all(database, wanted, &format!("SELECT {GATE} FROM eddyline.gates g"), &order, gate).await
}

/// Reads the columns crc, body, ns, kind, id, revision, due and changed_at, starting at the first.
pub(super) fn document(row: &Row) -> PgResult<Document> {
    let (ns, kind, id) = (unescape(row.try_get(2)?), unescape(row.try_get(3)?), unescape(row.try_get(4)?));
    let key: [&[u8]; 3] = [ns.as_bytes(), kind.as_bytes(), id.as_bytes()];
    let body = read(row.try_get(0)?, row.try_get(1)?, &key, || format!("documents: {kind} {id} of {ns}"))?;
    Ok(Document {
        ns: Namespace::new(&ns),
        key: DocumentKey { kind, id },
        revision: row.try_get::<_, i64>(5)? as u64,
        body,
        due: row.try_get(6)?,
        changed_at: row.try_get(7)?,
    })
}

pub(super) async fn documents(
    database: &Database,
    ns: Option<&Namespace>,
    filter: &DocumentFilter,
    limit: usize,
) -> Result<Vec<Document>> {
    let wanted = Conditions::of_documents(&POSTGRES, ns, filter);
    let order = format!(" ORDER BY id, ns LIMIT {}", limit.min(MAX_PAGE));
    let sql = "SELECT crc, body, ns, kind, id, revision, due, changed_at FROM eddyline.documents";
    all(database, wanted, sql, &order, document).await
}

/// Numbers committed rows in a transaction of its own. Readers then read numbered rows only.
pub(super) async fn number(database: &Database, ns: &Namespace) -> Result<()> {
    let ns = escape(ns.as_str());
    let numbered = database.read("SELECT eddyline.number_v1($1)", &[(&ns, Type::TEXT)]).await;
    numbered.map(|_| ()).map_err(PgError::into_error)
}

pub(super) async fn feed(database: &Database, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
    number(database, ns).await?;
    let order = format!(" ORDER BY position LIMIT {}", page.limit.min(MAX_PAGE));
    let mut wanted = Conditions::new(&POSTGRES);
    wanted.and("ns = ?", ns.as_str());
    wanted.and("position > ?", clamped(page.after.unwrap_or(0)));
    match feed {
        Feed::Runs { flow } => {
            if let Some(flow) = flow {
                wanted.and("flow = ?", flow.as_str());
            }
            let sql = "SELECT position, at, run, flow FROM eddyline.fed_runs";
            let item = |row: &Row| -> PgResult<FeedItem> {
                let what = Fed::Run { run: run_id(row, 2)?, flow: unescape(row.try_get(3)?) };
                Ok(FeedItem { position: row.try_get::<_, i64>(0)? as u64, at: row.try_get(1)?, what })
            };
            all(database, wanted, sql, &order, item).await
        }
        Feed::Events { name, key, since } => {
            if let Some(name) = name {
                wanted.and("name = ?", name.as_str());
            }
            if let Some(key) = key {
                wanted.and("key = ?", key.as_str());
            }
            if let Some(since) = since {
                wanted.and("at >= ?", *since);
                let at = wanted.values.len();
                let (beyond, first) = (i64::MAX, "SELECT f.position FROM eddyline.events f");
                wanted.only(format!(
                    "position >= coalesce(({first} WHERE f.ns = $1 AND f.noted >= ${at} AND f.position IS NOT NULL \
                     ORDER BY f.noted, f.position LIMIT 1), {beyond})"
                ));
            }
            let sql = "SELECT position, at, id, name, key, crc, body FROM eddyline.events";
            all(database, wanted, sql, &order, |row| event_item(ns, row)).await
        }
    }
}

fn event_item(ns: &Namespace, row: &Row) -> PgResult<FeedItem> {
    let id = unescape(row.try_get(2)?);
    let name = || format!("events: event {id} of {ns}");
    let payload: Data = read(row.try_get(5)?, row.try_get(6)?, &[ns.as_str().as_bytes(), id.as_bytes()], name)?;
    let (name, key) = (unescape(row.try_get(3)?), row.try_get::<_, Option<String>>(4)?.map(unescape));
    let what = Fed::Event { id, name, key, payload };
    Ok(FeedItem { position: row.try_get::<_, i64>(0)? as u64, at: row.try_get(1)?, what })
}

pub(super) async fn event(database: &Database, ns: &Namespace, id: &str) -> Result<Option<EventState>> {
    number(database, ns).await?;
    let mut wanted = Conditions::new(&POSTGRES);
    wanted.and("ns = ?", ns.as_str());
    wanted.and("id = ?", id);
    wanted.only("position IS NOT NULL");
    let state = |row: &Row| -> PgResult<EventState> {
        Ok(EventState {
            position: row.try_get::<_, i64>(0)? as u64,
            at: row.try_get(1)?,
            name: unescape(row.try_get(2)?),
            key: row.try_get::<_, Option<String>>(3)?.map(unescape),
            gates_opened: row.try_get::<_, i64>(4)? as u64,
        })
    };
    let sql = "SELECT position, at, name, key, gates_opened FROM eddyline.events";
    Ok(all(database, wanted, sql, "", state).await?.pop())
}
