//! Reading across runs.

use eddyline_machine::record::{GateId, GateReason};
use eddyline_machine::{ActId, Data, RunId, Status};
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::body::{escape, escaped, read, unescape};
use super::database::{Database, Param};
use super::load::{SUMMARY, run_id, summary};
use super::pg_error::{PgError, PgResult};
use crate::document::{Document, DocumentKey};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::*;

/// Conditions that all must hold, with their parameters. Only the text of the conditions makes the statement, so there
/// are few of them, and they stay prepared.
#[derive(Default)]
struct Where {
    conditions: Vec<String>,
    values: Vec<(Box<dyn ToSql + Sync + Send>, Type)>,
}

impl Where {
    /// Every `?` in the condition stands for the value.
    fn and(&mut self, condition: &str, value: impl ToSql + Sync + Send + 'static, of: Type) {
        self.values.push((Box::new(value), of));
        self.conditions.push(condition.replace('?', &format!("${}", self.values.len())));
    }

    fn text(&mut self, condition: &str, value: &str) {
        self.and(condition, escaped(value), Type::TEXT);
    }

    fn number(&mut self, condition: &str, value: i64) {
        self.and(condition, value, Type::INT8);
    }

    fn run(&mut self, condition: &str, run: RunId) {
        self.and(condition, run.0, Type::UUID);
    }

    fn only(&mut self, condition: &str) {
        self.conditions.push(condition.to_owned());
    }

    fn clause(&self) -> String {
        match self.conditions.is_empty() {
            true => String::new(),
            false => format!(" WHERE {}", self.conditions.join(" AND ")),
        }
    }

    /// All rows of `sql`, which says everything but the conditions and what comes `after` them.
    async fn all<T>(
        &self,
        database: &Database,
        sql: &str,
        after: &str,
        read: impl Fn(&Row) -> PgResult<T>,
    ) -> Result<Vec<T>> {
        let rows = database.read(&format!("{sql}{}{after}", self.clause()), &self.params()).await;
        all(rows, read)
    }

    /// The same, planned for these values: how much a filter leaves decides by which index runs are found.
    async fn all_planned_anew<T>(
        &self,
        database: &Database,
        sql: &str,
        after: &str,
        read: impl Fn(&Row) -> PgResult<T>,
    ) -> Result<Vec<T>> {
        let rows = database.read_planned_anew(&format!("{sql}{}{after}", self.clause()), &self.params()).await;
        all(rows, read)
    }

    fn params(&self) -> Vec<Param<'_>> {
        self.values.iter().map(|(value, of)| (&**value as &(dyn ToSql + Sync), of.clone())).collect()
    }
}

fn all<T>(rows: PgResult<Vec<Row>>, read: impl Fn(&Row) -> PgResult<T>) -> Result<Vec<T>> {
    let rows = rows.map_err(PgError::into_error)?;
    rows.iter().map(read).collect::<PgResult<_>>().map_err(PgError::into_error)
}

pub(super) async fn runs(
    database: &Database,
    ns: Option<&Namespace>,
    filter: &RunFilter,
    page: Page,
) -> Result<Vec<Summary>> {
    let mut wanted = matching(ns, filter);
    if let Some(before) = page.after {
        wanted.number("r.position < ?", clamped(before));
    }
    let order = format!(" ORDER BY r.position DESC LIMIT {}", page.limit.min(MAX_PAGE));
    wanted.all_planned_anew(database, &format!("SELECT {SUMMARY} FROM eddyline.runs r"), &order, summary).await
}

pub(super) async fn count_runs(database: &Database, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
    let wanted = matching(Some(ns), filter);
    let sql = "SELECT count(*) FROM eddyline.runs r";
    let counts = wanted.all_planned_anew(database, sql, "", |row| Ok(row.try_get::<_, i64>(0)?));
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

fn matching(ns: Option<&Namespace>, filter: &RunFilter) -> Where {
    let mut wanted = Where::default();
    if let Some(ns) = ns {
        wanted.text("r.ns = ?", ns.as_str());
    }
    if let Some(flow) = &filter.flow {
        wanted.text("r.flow = ?", flow);
    }
    match filter.status.as_slice() {
        [] => {}
        [status] => wanted.text("r.status = ?", status.as_str()),
        several => {
            let several: Vec<&'static str> = several.iter().map(|status| status.as_str()).collect();
            wanted.and("r.status = ANY (?)", several, Type::TEXT_ARRAY);
        }
    }
    if ns.is_none() && !filter.status.is_empty() && filter.status.iter().all(|status| !status.is_end()) {
        // Written out, so that the index of what goes on is found.
        wanted.only("r.ended_at IS NULL");
    }
    if let Some(id) = &filter.external_id {
        wanted.text("r.external_id = ?", id);
    }
    if let Some(root) = filter.root {
        wanted.run("r.root = ?", root);
    }
    if let Some(run) = filter.retry_of {
        wanted.run("r.retry_of = ?", run);
    }
    for tag in &filter.tags {
        wanted.text("EXISTS (SELECT 1 FROM eddyline.tags g WHERE g.run = r.id AND g.tag = ?)", tag);
    }
    if let Some(since) = filter.since {
        wanted.number("r.created_at >= ?", since);
    }
    if let Some(until) = filter.until {
        wanted.number("r.created_at < ?", until);
    }
    if let Some(before) = filter.ended_before {
        wanted.number("r.ended_at < ?", before);
    }
    // Written out, so that the index of what is left to trim is found.
    match filter.trimmed {
        Some(true) => wanted.only("r.trimmed"),
        Some(false) => wanted.only("NOT r.trimmed"),
        None => {}
    }
    wanted
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
    let mut wanted = Where::default();
    if let Some(ns) = ns {
        wanted.text("g.ns = ?", ns.as_str());
    }
    // The gates of a run that is trimmed are on their way out.
    wanted.only("EXISTS (SELECT 1 FROM eddyline.runs r WHERE r.id = g.run AND NOT r.trimmed)");
    match &filter.token {
        Some(token) => wanted.text("g.token = ?", token),
        None => {
            wanted.only("g.at IS NOT NULL AND NOT g.closed");
            if let Some(run) = filter.run {
                wanted.run("g.run = ?", run);
            }
            if let Some((from, to)) = filter.activations {
                wanted.number("g.activation >= ?", from.0.into());
                wanted.number("g.activation <= ?", to.0.into());
            }
            if let Some(reason) = filter.reason {
                wanted.text("g.reason = ?", reason_text(reason));
            }
            if let Some((name, key)) = &filter.event {
                wanted.text("g.event = ?", name);
                match key {
                    Some(key) => wanted.text("g.event_key = ?", key),
                    None => wanted.only("g.event_key IS NULL"),
                }
            }
        }
    }
    if let Some(after) = page.after {
        wanted.number("g.position > ?", clamped(after));
    }
    let order = format!(" ORDER BY g.position LIMIT {}", page.limit.min(MAX_PAGE));
    wanted.all(database, &format!("SELECT {GATE} FROM eddyline.gates g"), &order, gate).await
}

pub(super) fn reason_text(reason: GateReason) -> &'static str {
    match reason {
        GateReason::Time => "time",
        GateReason::Webhook => "webhook",
        GateReason::Event => "event",
        GateReason::Manual => "manual",
    }
}

/// Columns crc, body, ns, kind, id, revision, due and changed_at, from the first on.
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
    let mut wanted = Where::default();
    wanted.text("kind = ?", &filter.kind);
    if let Some(ns) = ns {
        wanted.text("ns = ?", ns.as_str());
    }
    if let Some(id) = &filter.id {
        wanted.text("id = ?", id);
    }
    if let Some(prefix) = &filter.prefix {
        wanted.text("id >= ?", prefix);
        wanted.text("starts_with(id, ?)", prefix);
    }
    match (&filter.after, &filter.after_ns) {
        (Some(after), None) => wanted.text("id > ?", after),
        (Some(after), Some(ns)) => {
            wanted.text("id >= ?", after);
            let at = wanted.values.len();
            wanted.text(&format!("(id, ns) > (${at}, ?)"), ns.as_str());
        }
        (None, _) => {}
    }
    let order = format!(" ORDER BY id, ns LIMIT {}", limit.min(MAX_PAGE));
    let sql = "SELECT crc, body, ns, kind, id, revision, due, changed_at FROM eddyline.documents";
    wanted.all(database, sql, &order, document).await
}

/// Committed rows get their numbers, in a transaction of its own; then those with numbers are read.
pub(super) async fn number(database: &Database, ns: &Namespace) -> Result<()> {
    let ns = escape(ns.as_str());
    let numbered = database.read("SELECT eddyline.number_v1($1)", &[(&ns, Type::TEXT)]).await;
    numbered.map(|_| ()).map_err(PgError::into_error)
}

pub(super) async fn feed(database: &Database, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
    number(database, ns).await?;
    let order = format!(" ORDER BY position LIMIT {}", page.limit.min(MAX_PAGE));
    let mut wanted = Where::default();
    wanted.text("ns = ?", ns.as_str());
    wanted.number("position > ?", clamped(page.after.unwrap_or(0)));
    match feed {
        Feed::Runs { flow } => {
            if let Some(flow) = flow {
                wanted.text("flow = ?", flow);
            }
            let sql = "SELECT position, at, run, flow FROM eddyline.fed_runs";
            let item = |row: &Row| -> PgResult<FeedItem> {
                let what = Fed::Run { run: run_id(row, 2)?, flow: unescape(row.try_get(3)?) };
                Ok(FeedItem { position: row.try_get::<_, i64>(0)? as u64, at: row.try_get(1)?, what })
            };
            wanted.all(database, sql, &order, item).await
        }
        Feed::Events { name, key, since } => {
            if let Some(name) = name {
                wanted.text("name = ?", name);
            }
            if let Some(key) = key {
                wanted.text("key = ?", key);
            }
            if let Some(since) = since {
                wanted.number("at >= ?", *since);
                let at = wanted.values.len();
                let (beyond, first) = (i64::MAX, "SELECT f.position FROM eddyline.events f");
                wanted.only(&format!(
                    "position >= coalesce(({first} WHERE f.ns = $1 AND f.noted >= ${at} AND f.position IS NOT NULL \
                     ORDER BY f.noted, f.position LIMIT 1), {beyond})"
                ));
            }
            let sql = "SELECT position, at, id, name, key, crc, body FROM eddyline.events";
            wanted.all(database, sql, &order, |row| event_item(ns, row)).await
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
    let mut wanted = Where::default();
    wanted.text("ns = ?", ns.as_str());
    wanted.text("id = ?", id);
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
    Ok(wanted.all(database, sql, "", state).await?.pop())
}

/// Positions are signed to PostgreSQL; one beyond them is beyond everything.
fn clamped(position: u64) -> i64 {
    i64::try_from(position).unwrap_or(i64::MAX)
}
