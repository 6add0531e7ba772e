//! Reads the rows of a PostgreSQL store in one snapshot, and verifies their checksums.

use std::collections::HashMap;
use std::pin::pin;

use super::super::connect::Object;
use eddyline_machine::{Entry, Record, RunId};
use futures_util::TryStreamExt;
use tokio_postgres::Row as Found;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::copy::*;
use crate::ids::Namespace;
use crate::postgres::body::{self, check, text, unescape};
use crate::postgres::database::{Database, Param};
use crate::postgres::load::run_id;
use crate::postgres::pending::{message_key, timer};
use crate::postgres::pg_error::{PgError, PgResult};

pub(super) async fn all(database: &Database, mut out: Chunks) -> PgResult<Chunks> {
    let client = database.client().await?;
    let reader = Reader { database, client: &client };
    match reader.all(&mut out).await {
        Ok(()) => Ok(out),
        Err(error) => {
            drop(Object::take(client));
            Err(error)
        }
    }
}

struct Reader<'a> {
    database: &'a Database,
    client: &'a Object,
}

/// The runs of a batch, and whether they are trimmed.
type Batch = HashMap<RunId, bool>;

impl Reader<'_> {
    async fn all(&self, out: &mut Chunks) -> PgResult<()> {
        self.client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        self.outside_runs(out).await?;
        let mut after = 0_i64;
        loop {
            let (batch, last) = self.runs(after, out).await?;
            if batch.is_empty() || out.is_closed() {
                break;
            }
            after = last;
            self.state(&batch, out).await?;
            self.history(&batch, out).await?;
            self.pending(&batch, out).await?;
        }
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    /// Rows are streamed: a statement may return many.
    async fn each(
        &self,
        sql: &str,
        params: &[Param<'_>],
        out: &mut Chunks,
        mut read: impl FnMut(&Found) -> PgResult<Option<Row>>,
    ) -> PgResult<()> {
        let params = params.iter().map(|(value, of)| (*value, of.clone()));
        let rows = self.client.query_typed_raw(&self.database.sql(sql), params).await?;
        let mut rows = pin!(rows);
        while let Some(row) = rows.try_next().await? {
            if let Some(row) = read(&row)? {
                out.put(row).await;
            }
        }
        Ok(())
    }

    async fn outside_runs(&self, out: &mut Chunks) -> PgResult<()> {
        let sql =
            "SELECT ns, kind, id, revision, due, changed_at, crc, body FROM eddyline.documents ORDER BY kind, id, ns";
        self.each(sql, &[], out, document).await?;
        let sql = "SELECT b.ns, b.is_limit, b.name, div(b.level, r.per_ms)::bigint, mod(b.level, r.per_ms)::bigint, b.at \
             FROM eddyline.buckets b, LATERAL ( \
                 SELECT greatest(q.rate_per_ms, 1) AS per_ms FROM eddyline.queues q WHERE NOT b.is_limit AND q.ns = b.ns \
                     AND q.name = b.name AND q.rate_count IS NOT NULL \
                 UNION ALL SELECT greatest(l.rate_per_ms, 1) FROM eddyline.limits l WHERE b.is_limit AND l.ns = b.ns \
                     AND l.name = split_part(b.name, chr(31), 1) AND l.rate_count IS NOT NULL) r";
        self.each(sql, &[], out, rate).await?;
        let sql = "SELECT ns, name, closed_until FROM eddyline.limits WHERE closed_until > 0";
        self.each(sql, &[], out, |row| {
            let (ns, name) = (namespace(row, 0)?, unescape(row.try_get(1)?));
            Ok(Some(Row::ClosedLimit { ns, name, until: row.try_get(2)? }))
        })
        .await?;
        self.each("SELECT id, at FROM eddyline.commands ORDER BY at, id", &[], out, |row| {
            Ok(Some(Row::Command { id: row.try_get(0)?, at: row.try_get(1)? }))
        })
        .await?;
        self.each("SELECT place, ns, flow, key, run FROM eddyline.lines ORDER BY place", &[], out, |row| {
            let (flow, key) = (unescape(row.try_get(2)?), unescape(row.try_get(3)?));
            Ok(Some(Row::Line { place: number(row, 0)?, ns: namespace(row, 1)?, flow, key, run: run_id(row, 4)? }))
        })
        .await?;
        let sql = "SELECT place, ns, target, id, crc, body FROM eddyline.messages ORDER BY place";
        self.each(sql, &[], out, message).await?;
        // All of them are numbered: when the source was opened, or by the copy.
        let sql = "SELECT position, ns, id, name, key, at, gates_opened, crc, body FROM eddyline.events \
                   WHERE position IS NOT NULL ORDER BY position";
        self.each(sql, &[], out, event).await
    }

    /// The next runs, and the position of the last.
    async fn runs(&self, after: i64, out: &mut Chunks) -> PgResult<(Batch, i64)> {
        let sql = format!(
            "SELECT r.position, r.id, r.ns, f.position, r.created_at, r.started_at, r.ended_at, r.trimmed, r.records, \
                   r.version, r.crc, r.header, k.flow, k.key, k.fingerprint \
                   FROM (SELECT * FROM eddyline.runs WHERE position > $1 ORDER BY position LIMIT {RUNS_TOGETHER}) r \
                   LEFT JOIN eddyline.fed_runs f ON f.run = r.id LEFT JOIN eddyline.keys k ON k.run = r.id \
                   ORDER BY r.position"
        );
        let (mut batch, mut last) = (Batch::new(), after);
        self.each(&sql, &[(&after, Type::INT8)], out, |row| {
            let run = copied_run(row)?;
            batch.insert(run.run, run.trimmed);
            last = run.position as i64;
            Ok(Some(Row::Run(Box::new(run))))
        })
        .await?;
        Ok((batch, last))
    }

    async fn state(&self, batch: &Batch, out: &mut Chunks) -> PgResult<()> {
        let kept = of(batch, true);
        let kept: [Param<'_>; 1] = [(&kept, Type::UUID_ARRAY)];
        let sql = "SELECT run, id, version, crc, body FROM eddyline.activations WHERE run = ANY ($1) ORDER BY run, id";
        self.each(sql, &kept, out, |row| {
            let (run, id, version) = (run_id(row, 0)?, row.try_get::<_, i64>(1)?, row.try_get::<_, i64>(2)?);
            let key: [&[u8]; 3] = [&run.0.into_bytes(), &id.to_le_bytes(), &version.to_le_bytes()];
            let body = body_of(row, 3, &key, || format!("activations: activation {id} of run {run}"))?;
            Ok(Some(Row::Activation { run, id: id as u64, body }))
        })
        .await?;
        let sql = "SELECT run, id, crc, body FROM eddyline.\"values\" WHERE run = ANY ($1)";
        self.each(sql, &kept, out, |row| {
            let (run, id) = (run_id(row, 0)?, row.try_get::<_, i64>(1)?);
            let key: [&[u8]; 2] = [&run.0.into_bytes(), &id.to_le_bytes()];
            let body = body_of(row, 2, &key, || format!("values: value {id} of run {run}"))?;
            Ok(Some(Row::Value { run, id: id as u64, body }))
        })
        .await?;
        let sql = "SELECT run, scope, event, crc, body FROM eddyline.emitted WHERE run = ANY ($1)";
        self.each(sql, &kept, out, |row| {
            let (run, scope, event) =
                (run_id(row, 0)?, row.try_get::<_, i64>(1)? as u32, row.try_get::<_, i64>(2)? as u32);
            let key: [&[u8]; 3] = [&run.0.into_bytes(), &scope.to_le_bytes(), &event.to_le_bytes()];
            let body = body_of(row, 3, &key, || format!("emitted: event {event} of scope {scope} of run {run}"))?;
            Ok(Some(Row::Emitted { run, scope, event, body }))
        })
        .await?;
        let sql = "SELECT run, activation, crc, body FROM eddyline.reuse WHERE run = ANY ($1)";
        self.each(sql, &kept, out, |row| {
            let (run, activation) = (run_id(row, 0)?, unescape(row.try_get(1)?));
            let key: [&[u8]; 2] = [&run.0.into_bytes(), activation.as_bytes()];
            let body = body_of(row, 2, &key, || format!("reuse: {activation} of run {run}"))?;
            Ok(Some(Row::Reuse { run, activation, body }))
        })
        .await?;
        self.each("SELECT run, name, position FROM eddyline.cursors WHERE run = ANY ($1)", &kept, out, |row| {
            let (run, name) = (run_id(row, 0)?, unescape(row.try_get(1)?));
            Ok(Some(Row::Cursor { run, name, position: number(row, 2)? }))
        })
        .await
    }

    async fn history(&self, batch: &Batch, out: &mut Chunks) -> PgResult<()> {
        let kept = of(batch, true);
        let kept: [Param<'_>; 1] = [(&kept, Type::UUID_ARRAY)];
        // In the order of writing.
        let sql = "SELECT run, first, count, version, command, ts, fence, worker, crc, body FROM eddyline.records \
                   WHERE run = ANY ($1) ORDER BY run, first, version, count";
        self.each(sql, &kept, out, |row| Ok(Some(Row::Records(records(row)?)))).await?;
        self.each("SELECT run, activation, first FROM eddyline.logs WHERE run = ANY ($1)", &kept, out, |row| {
            let (run, activation) = (run_id(row, 0)?, unescape(row.try_get(1)?));
            Ok(Some(Row::Log { run, activation, first: number(row, 2)? }))
        })
        .await
    }

    async fn pending(&self, batch: &Batch, out: &mut Chunks) -> PgResult<()> {
        let (kept, any) = (of(batch, true), of(batch, false));
        let (kept, any): ([Param<'_>; 1], [Param<'_>; 1]) = ([(&kept, Type::UUID_ARRAY)], [(&any, Type::UUID_ARRAY)]);
        let sql = "SELECT run, fence, place, queued_at, closed, start_by, worker, request, since, lease_ms, deadline, build, \
                   memo, crc, body FROM eddyline.tasks WHERE run = ANY ($1) ORDER BY place";
        self.each(sql, &any, out, |row| Ok(Some(Row::Task(Box::new(task(row)?))))).await?;
        let sql = "SELECT activation, kind, fence, due, wall, run FROM eddyline.timers WHERE run = ANY ($1)";
        self.each(sql, &any, out, |row| {
            let run = run_id(row, 5)?;
            Ok(Some(Row::timer(run, timer(run, row, 0)?)))
        })
        .await?;
        let sql = "SELECT run, activation, token, position, closed, at, deadline, crc, body FROM eddyline.gates \
                   WHERE run = ANY ($1)";
        self.each(sql, &kept, out, |row| Ok(Some(Row::Gate(Box::new(gate(row)?))))).await
    }
}

/// The runs of a batch: all of them, or only those of which more than the header is `kept`.
fn of(batch: &Batch, kept: bool) -> Vec<Uuid> {
    batch.iter().filter(|(_, trimmed)| !(kept && **trimmed)).map(|(run, _)| run.0).collect()
}

fn namespace(row: &Found, at: usize) -> PgResult<Namespace> {
    Ok(Namespace::new(&unescape(row.try_get(at)?)))
}

fn number(row: &Found, at: usize) -> PgResult<u64> {
    Ok(row.try_get::<_, i64>(at)? as u64)
}

/// Reads the columns `crc` and `body`, the first at `at`.
fn body_of(row: &Found, at: usize, key: &[&[u8]], name: impl Fn() -> String) -> PgResult<String> {
    let body: String = row.try_get(at + 1)?;
    check(row.try_get(at)?, &body, key, name)?;
    Ok(body)
}

fn document(row: &Found) -> PgResult<Option<Row>> {
    let (ns, kind, id) = (namespace(row, 0)?, unescape(row.try_get(1)?), unescape(row.try_get(2)?));
    let key: [&[u8]; 3] = [ns.as_str().as_bytes(), kind.as_bytes(), id.as_bytes()];
    let body = body_of(row, 6, &key, || format!("documents: {kind} {id} of {ns}"))?;
    let (revision, due, changed_at) = (number(row, 3)?, row.try_get(4)?, row.try_get(5)?);
    Ok(Some(Row::Document(CopiedDocument { ns, kind, id, revision, due, changed_at, body })))
}

fn rate(row: &Found) -> PgResult<Option<Row>> {
    let (ns, is_limit, of): (_, bool, String) = (namespace(row, 0)?, row.try_get(1)?, row.try_get(2)?);
    let (name, key) = match of.split_once(crate::postgres::encode::BEFORE_KEY).filter(|_| is_limit) {
        Some((name, key)) => (name.to_owned(), Some(unescape(key.to_owned()))),
        None => (of, None),
    };
    let whole = u32::try_from(row.try_get::<_, i64>(3)?).unwrap_or(u32::MAX);
    let (parts, at) = (row.try_get(4)?, row.try_get(5)?);
    Ok(Some(Row::Rate { ns, is_limit, name: unescape(name), key, whole, parts, at }))
}

fn message(row: &Found) -> PgResult<Option<Row>> {
    let (to, id) = (run_id(row, 2)?, unescape(row.try_get(3)?));
    let target = to.0.into_bytes();
    let key = message_key(&target, &id, row.try_get(4)?, row.try_get(5)?);
    let body = body_of(row, 4, &key, || format!("messages: message {id} to run {to}"))?;
    Ok(Some(Row::Message(CopiedMessage { place: number(row, 0)?, ns: namespace(row, 1)?, to, id, body })))
}

fn event(row: &Found) -> PgResult<Option<Row>> {
    let (ns, id) = (namespace(row, 1)?, unescape(row.try_get(2)?));
    let payload = body_of(row, 7, &[ns.as_str().as_bytes(), id.as_bytes()], || format!("events: event {id} of {ns}"))?;
    Ok(Some(Row::Event(CopiedEvent {
        position: number(row, 0)?,
        ns,
        id,
        name: unescape(row.try_get(3)?),
        key: row.try_get::<_, Option<String>>(4)?.map(unescape),
        at: row.try_get(5)?,
        gates_opened: number(row, 6)?,
        payload,
    })))
}

fn copied_run(row: &Found) -> PgResult<CopiedRun> {
    let (run, version) = (run_id(row, 1)?, row.try_get::<_, i64>(9)?);
    let key: [&[u8]; 2] = [&run.0.into_bytes(), &version.to_le_bytes()];
    let header = body_of(row, 10, &key, || format!("runs: the header of run {run}"))?;
    let trimmed = row.try_get(7)?;
    let key = match row.try_get::<_, Option<String>>(12)? {
        None => None,
        Some(flow) => {
            let fingerprint: Vec<u8> = row.try_get(14)?;
            let size = |_| PgError::Corrupt(format!("keys: the fingerprint of run {run} has the wrong size"));
            let (key, fingerprint) = (unescape(row.try_get(13)?), fingerprint.try_into().map_err(size)?);
            Some(CopiedKey { flow: unescape(flow), key, fingerprint })
        }
    };
    let fed_at = row.try_get::<_, Option<i64>>(3)?;
    let fed_at = fed_at.ok_or_else(|| PgError::Corrupt(format!("fed_runs: run {run} has no position")))?;
    Ok(CopiedRun {
        run,
        ns: namespace(row, 2)?,
        position: number(row, 0)?,
        fed_at: fed_at as u64,
        created_at: row.try_get(4)?,
        started_at: row.try_get(5)?,
        ended_at: row.try_get(6)?,
        trimmed,
        records: if trimmed { 0 } else { number(row, 8)? },
        key,
        header,
    })
}

/// The row of a claim is sealed by its task, and its worker is a column.
fn records(row: &Found) -> PgResult<CopiedRecords> {
    let (run, first, count) = (run_id(row, 0)?, row.try_get::<_, i64>(1)?, row.try_get::<_, i32>(2)?);
    let (version, fence) = (row.try_get::<_, i64>(3)?, row.try_get::<_, Option<i64>>(6)?);
    let name = || format!("records: records {first} to {} of run {run}", first + i64::from(count) - 1);
    let key: [&[u8]; 2] = [&run.0.into_bytes(), &fence.unwrap_or(version).to_le_bytes()];
    let mut body = body_of(row, 8, &key, name)?;
    if fence.is_some() {
        let by = row.try_get::<_, Option<String>>(7)?.map(unescape);
        let packed: serde_json::Result<Vec<Record>> = body::parse(&body);
        let mut packed = packed.map_err(|error| PgError::Corrupt(format!("{} can't be read: {error}", name())))?;
        for record in &mut packed {
            if let Entry::AttemptStarted { worker, .. } = &mut record.entry {
                worker.clone_from(&by);
            }
        }
        body = text(&packed).map_err(|error| PgError::Corrupt(format!("{}: {error}", name())))?;
    }
    let (command, ts) = (row.try_get(4)?, row.try_get(5)?);
    Ok(CopiedRecords { run, first: first as u64, count: count as u32, version: version as u64, command, ts, body })
}

fn task(row: &Found) -> PgResult<CopiedTask> {
    let (run, fence) = (run_id(row, 0)?, number(row, 1)?);
    let key: [&[u8]; 2] = [&run.0.into_bytes(), &fence.to_le_bytes()];
    let body = body_of(row, 13, &key, || format!("tasks: task {fence} of run {run}"))?;
    let claim = match row.try_get::<_, Option<String>>(6)? {
        None => None,
        Some(worker) => Some(CopiedClaim {
            worker: unescape(worker),
            request: row.try_get(7)?,
            since: row.try_get(8)?,
            lease_ms: row.try_get(9)?,
            deadline: row.try_get(10)?,
            build: row.try_get::<_, Option<String>>(11)?.map(unescape),
            memo: row.try_get::<_, Option<i64>>(12)?.unwrap_or(0) as u64,
        }),
    };
    let start_by = row.try_get::<_, Option<i64>>(5)?.filter(|_| claim.is_none());
    let (place, queued_at, closed) = (number(row, 2)?, row.try_get(3)?, row.try_get(4)?);
    Ok(CopiedTask { run, fence, place, queued_at, closed, start_by, claim, body })
}

fn gate(row: &Found) -> PgResult<CopiedGate> {
    let (run, activation) = (run_id(row, 0)?, row.try_get::<_, i64>(1)? as u32);
    let arrival = match row.try_get::<_, Option<i64>>(5)? {
        None => None,
        Some(at) => {
            let key: [&[u8]; 2] = [&run.0.into_bytes(), &activation.to_le_bytes()];
            let body = body_of(row, 7, &key, || format!("gates: the gate of activation {activation} of run {run}"))?;
            Some(CopiedArrival { at, deadline: row.try_get(6)?, body })
        }
    };
    let token = row.try_get::<_, Option<String>>(2)?.map(unescape);
    Ok(CopiedGate { run, activation, token, position: number(row, 3)?, closed: row.try_get(4)?, arrival })
}
