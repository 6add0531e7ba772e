//! Reads of one run.

use eddyline_machine::run::{Header, Run};
use eddyline_machine::{ActId, Data, Entry, Numbered, Record, RunId, ValueId, Version};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::{escape, read, unescape};
use super::database::Database;
use super::pg_error::{PgError, PgResult};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::*;

/// The columns of a [`Summary`].
pub(super) const SUMMARY: &str = "r.id, r.ns, r.position, r.created_at, r.started_at, r.ended_at, r.trimmed, r.records, \
                                  r.version, r.crc, r.header";

pub(super) fn summary(row: &Row) -> PgResult<Summary> {
    let run = RunId(row.try_get(0)?);
    let version = Version(row.try_get::<_, i64>(8)? as u64);
    let key: [&[u8]; 2] = [&run.0.into_bytes(), &version.0.to_le_bytes()];
    let header: Header = read(row.try_get(9)?, row.try_get(10)?, &key, || format!("runs: the header of run {run}"))?;
    Ok(Summary {
        ns: Namespace::new(&unescape(row.try_get(1)?)),
        run,
        position: row.try_get::<_, i64>(2)? as u64,
        version,
        records: row.try_get::<_, i64>(7)? as u64,
        created_at: row.try_get(3)?,
        started_at: row.try_get(4)?,
        ended_at: row.try_get(5)?,
        trimmed: row.try_get(6)?,
        header,
    })
}

pub(super) async fn summary_of(database: &Database, run: RunId) -> Result<Option<Summary>> {
    let sql = format!("SELECT {SUMMARY} FROM eddyline.runs r WHERE r.id = $1");
    let rows = database.read(&sql, &[(&run.0, Type::UUID)]).await.map_err(PgError::into_error)?;
    rows.first().map(summary).transpose().map_err(PgError::into_error)
}

/// One statement, so that it reads one snapshot: the columns of a [`Summary`], or of another row in their places, and the
/// kind of the row. For a run at the known version only the version is read; for a later version, the activations that
/// were written since.
const LOAD: &str = "SELECT r.id, r.ns, r.position, r.created_at, r.started_at, r.ended_at, r.trimmed, r.records, r.version, \
         r.crc, CASE WHEN r.version IS DISTINCT FROM $2 OR r.trimmed THEN r.header END, 0 \
         FROM eddyline.runs r WHERE r.id = $1 \
     UNION ALL SELECT NULL, NULL, a.id, NULL, NULL, NULL, NULL, NULL, a.version, a.crc, a.body, 1 \
         FROM eddyline.activations a, eddyline.runs r \
         WHERE a.run = $1 AND r.id = $1 AND r.version IS DISTINCT FROM $2 AND NOT r.trimmed \
         AND (r.version < $2 OR a.version > $2) IS NOT FALSE \
     UNION ALL SELECT NULL, NULL, a.scope, NULL, NULL, NULL, NULL, NULL, a.event, a.crc, a.body, 2 \
         FROM eddyline.emitted a, eddyline.runs r \
         WHERE a.run = $1 AND r.id = $1 AND r.version IS DISTINCT FROM $2 AND NOT r.trimmed \
     UNION ALL SELECT NULL, a.activation, NULL, NULL, NULL, NULL, NULL, NULL, NULL, a.crc, a.body, 3 \
         FROM eddyline.reuse a, eddyline.runs r \
         WHERE a.run = $1 AND r.id = $1 AND r.version IS DISTINCT FROM $2 AND NOT r.trimmed \
     UNION ALL SELECT NULL, a.name, a.position, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 4 \
         FROM eddyline.cursors a, eddyline.runs r \
         WHERE a.run = $1 AND r.id = $1 AND r.version IS DISTINCT FROM $2 AND NOT r.trimmed";

pub(super) async fn load(database: &Database, run: RunId, since: Option<Version>) -> Result<Found> {
    let since = since.map(|version| version.0 as i64);
    let rows = database.read(LOAD, &[(&run.0, Type::UUID), (&since, Type::INT8)]).await;
    let rows = rows.map_err(PgError::into_error)?;
    found(run, since, &rows).map_err(PgError::into_error)
}

fn found(run: RunId, since: Option<i64>, rows: &[Row]) -> PgResult<Found> {
    let Some(first) = rows.iter().find(|row| row.get::<_, i32>(11) == 0) else { return Ok(Found::Nothing) };
    if first.try_get::<_, Option<&str>>(10)?.is_none() {
        return Ok(Found::Same);
    }
    let summary = summary(first)?;
    let changed = since.is_some_and(|since| since > 0 && summary.version.0 as i64 > since);
    let id = run.0.into_bytes();
    if summary.trimmed {
        return Ok(Found::Trimmed(Box::new(summary)));
    }
    let mut loaded = Run::new(run);
    loaded.header = summary.header.clone();
    let mut activations = Vec::new();
    for row in rows {
        match row.try_get::<_, i32>(11)? {
            1 => activations.push((row.try_get::<_, i64>(2)?, row)),
            2 => {
                let (scope, event) = (row.try_get::<_, i64>(2)? as u32, row.try_get::<_, i64>(8)? as u32);
                let name = || format!("emitted: event {event} of scope {scope} of run {run}");
                let key: [&[u8]; 3] = [&id, &scope.to_le_bytes(), &event.to_le_bytes()];
                let emitted = read(row.try_get(9)?, row.try_get(10)?, &key, name)?;
                loaded.emitted.insert((ActId(scope), event), emitted);
            }
            3 => {
                let activation = unescape(row.try_get(1)?);
                let name = || format!("reuse: {activation} of run {run}");
                let reused = read(row.try_get(9)?, row.try_get(10)?, &[&id, activation.as_bytes()], name)?;
                loaded.reuse.insert(activation, reused);
            }
            4 => _ = loaded.cursors.insert(unescape(row.try_get(1)?), row.try_get::<_, i64>(2)? as u64),
            _ => {}
        }
    }
    activations.sort_by_key(|(number, _)| *number);
    for (expected, (number, row)) in (0..).zip(activations) {
        // They are numbered without gaps, and looked up by their number.
        if number != expected && !changed {
            return Err(PgError::Corrupt(format!("activations: activation {expected} of run {run} is missing")));
        }
        let written = row.try_get::<_, i64>(8)?;
        let key: [&[u8]; 3] = [&id, &number.to_le_bytes(), &written.to_le_bytes()];
        let name = || format!("activations: activation {number} of run {run}");
        loaded.activations.push(read(row.try_get(9)?, row.try_get(10)?, &key, name)?);
    }
    let loaded = Box::new(Loaded { summary, rows: loaded });
    Ok(if changed { Found::Changed(loaded) } else { Found::Run(loaded) })
}

pub(super) async fn values(database: &Database, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>> {
    let numbers: Vec<i64> = ids.iter().map(|id| i64::from(id.0)).collect();
    let sql = "SELECT v.id, v.crc, v.body FROM eddyline.\"values\" v JOIN eddyline.runs r ON r.id = v.run AND NOT r.trimmed \
               WHERE v.run = $1 AND v.id = ANY ($2)";
    let rows = database.read(sql, &[(&run.0, Type::UUID), (&numbers, Type::INT8_ARRAY)]).await;
    let value = |row: &Row| -> PgResult<(ValueId, Data)> {
        let number: i64 = row.try_get(0)?;
        let key: [&[u8]; 2] = [&run.0.into_bytes(), &number.to_le_bytes()];
        let name = || format!("values: value {number} of run {run}");
        Ok((ValueId(number as u32), read(row.try_get(1)?, row.try_get(2)?, &key, name)?))
    };
    let rows = rows.map_err(PgError::into_error)?;
    rows.iter().map(value).collect::<PgResult<_>>().map_err(PgError::into_error)
}

/// A row holds several records: the first may begin before the requested one.
const RECORDS: &str = "SELECT o.first, o.version, o.count, o.ts, o.fence, o.worker, o.crc, o.body FROM eddyline.records o \
     JOIN eddyline.runs r ON r.id = o.run AND NOT r.trimmed \
     WHERE o.run = $1 AND o.count > 0 AND o.first >= (SELECT coalesce(max(b.first), 0) FROM eddyline.records b \
         WHERE b.run = $1 AND b.first <= $2 AND b.count > 0) \
     ORDER BY o.first LIMIT $3";

pub(super) async fn records(database: &Database, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
    let limit = limit.min(MAX_PAGE);
    let Ok(after) = i64::try_from(after) else { return Ok(Vec::new()) };
    let (from, most) = (after.saturating_add(1), limit as i64);
    let params = [(&run.0 as _, Type::UUID), (&from as _, Type::INT8), (&most as _, Type::INT8)];
    let rows = database.read(RECORDS, &params).await.map_err(PgError::into_error)?;
    let read = || -> PgResult<Vec<Numbered>> {
        let (mut found, mut next) = (Vec::new(), None);
        for row in &rows {
            let (first, ts, packed) = packed(run, row)?;
            let expected = next.replace(first + packed.len() as i64).unwrap_or(first.min(from));
            if first != expected {
                return Err(PgError::Corrupt(format!("records: record {expected} of run {run} is missing")));
            }
            let numbered = packed.into_iter().zip(first..).filter(|(_, n)| *n > after);
            found.extend(numbered.map(|(record, n)| Numbered { n: n as u64, ts, record }));
        }
        found.truncate(limit);
        Ok(found)
    };
    read().map_err(PgError::into_error)
}

/// The rows that have logs of an activation are found by an index.
const LOGS: &str = "SELECT o.first, o.version, o.count, o.ts, o.fence, o.worker, o.crc, o.body FROM eddyline.logs l \
     JOIN eddyline.records o ON o.run = l.run AND o.first = l.first AND o.count > 0 \
     JOIN eddyline.runs r ON r.id = o.run AND NOT r.trimmed \
     WHERE l.run = $1 AND l.activation = $4 AND l.first >= (SELECT coalesce(max(b.first), 0) FROM eddyline.logs b \
         WHERE b.run = $1 AND b.activation = $4 AND b.first <= $2) \
     ORDER BY l.first LIMIT $3";

pub(super) async fn logs(
    database: &Database,
    run: RunId,
    activation: &str,
    after: u64,
    limit: usize,
) -> Result<Vec<Numbered>> {
    let limit = limit.min(MAX_PAGE);
    let Ok(after) = i64::try_from(after) else { return Ok(Vec::new()) };
    // The first row may contain only logs that the caller has already read.
    let (from, most, name) = (after.saturating_add(1), limit as i64 + 1, escape(activation));
    let params =
        [(&run.0 as _, Type::UUID), (&from as _, Type::INT8), (&most as _, Type::INT8), (&name as _, Type::TEXT)];
    let rows = database.read(LOGS, &params).await.map_err(PgError::into_error)?;
    let mut found = Vec::new();
    for row in &rows {
        let (first, ts, packed) = packed(run, row).map_err(PgError::into_error)?;
        let logs = packed.into_iter().zip(first..).filter(|(record, n)| *n > after && record.is_log_of(activation));
        found.extend(logs.map(|(record, n)| Numbered { n: n as u64, ts, record }));
    }
    found.truncate(limit);
    Ok(found)
}

/// A row of records: the number of the first, when they were written, and the records. The row of a claim is sealed by
/// its task, and its worker is a column.
fn packed(run: RunId, row: &Row) -> PgResult<(i64, i64, Vec<Record>)> {
    let (first, version, count): (i64, i64, i32) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let name = || format!("records: records {first} to {} of run {run}", first + i64::from(count) - 1);
    let fence = row.try_get::<_, Option<i64>>(4)?;
    let key: [&[u8]; 2] = [&run.0.into_bytes(), &fence.unwrap_or(version).to_le_bytes()];
    let mut packed: Vec<Record> = read(row.try_get(6)?, row.try_get(7)?, &key, name)?;
    if packed.len() as i64 != i64::from(count) {
        return Err(PgError::Corrupt(format!("{} are {}", name(), packed.len())));
    }
    if fence.is_some() {
        let by = row.try_get::<_, Option<String>>(5)?.map(unescape);
        for record in &mut packed {
            if let Entry::AttemptStarted { worker, .. } = &mut record.entry {
                worker.clone_from(&by);
            }
        }
    }
    Ok((first, row.try_get(3)?, packed))
}

/// The id of a run in a column.
pub(super) fn run_id(row: &Row, at: usize) -> PgResult<RunId> {
    Ok(RunId(row.try_get::<_, Uuid>(at)?))
}
