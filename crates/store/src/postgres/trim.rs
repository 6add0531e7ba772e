//! Deletes rows permanently, a slice at a time.

use tokio_postgres::types::Type;

use super::body::escape;
use super::database::{Database, Param};
use super::pg_error::PgError;
use crate::error::Result;
use crate::query::Trim;

/// The most rows of a table that one call deletes.
const SLICE: i32 = 5_000;

pub(super) async fn trim(database: &Database, what: &Trim) -> Result<bool> {
    let slice: Param<'_> = (&SLICE, Type::INT4);
    match what {
        Trim::Timeline(run) => {
            more(database, "SELECT eddyline.trim_timeline_v1($1, $2)", &[(&run.0, Type::UUID), slice]).await
        }
        Trim::Run(run) => more(database, "SELECT eddyline.trim_run_v1($1, $2)", &[(&run.0, Type::UUID), slice]).await,
        Trim::Events { ns, before } => {
            let ns = escape(ns.as_str());
            // The first slice already hides all of them, so they are deleted in one statement.
            let sql = "WITH gone AS (DELETE FROM eddyline.events WHERE ns = $1 AND at < $2 RETURNING 1) \
                       SELECT count(*) < 0 FROM gone";
            more(database, sql, &[(&ns, Type::TEXT), (before, Type::INT8)]).await
        }
        Trim::Event { ns, id } => {
            let (ns, id) = (escape(ns.as_str()), escape(id));
            let sql = "WITH gone AS (DELETE FROM eddyline.events WHERE ns = $1 AND id = $2 RETURNING 1) \
                       SELECT count(*) < 0 FROM gone";
            more(database, sql, &[(&ns, Type::TEXT), (&id, Type::TEXT)]).await
        }
        Trim::Traces { before } => {
            // A bucket that is full again is equivalent to none.
            let full = "WITH gone AS (DELETE FROM eddyline.buckets b WHERE b.at < $1 AND NOT EXISTS ( \
                 SELECT 1 FROM eddyline.queues q WHERE NOT b.is_limit AND q.ns = b.ns AND q.name = b.name \
                     AND q.rate_count IS NOT NULL AND b.level + ($1 - b.at)::numeric * q.rate_count \
                     < greatest(q.rate_per_ms, 1)::numeric * greatest(q.rate_burst, 1) \
                 UNION ALL SELECT 1 FROM eddyline.limits l WHERE b.is_limit AND l.ns = b.ns \
                     AND l.name = split_part(b.name, chr(31), 1) AND l.rate_count IS NOT NULL \
                     AND b.level + ($1 - b.at)::numeric * l.rate_count \
                     < greatest(l.rate_per_ms, 1)::numeric * greatest(l.rate_burst, 1)) RETURNING 1) \
                 SELECT count(*) < 0 FROM gone";
            more(database, full, &[(before, Type::INT8)]).await?;
            let sql = "WITH gone AS (DELETE FROM eddyline.commands WHERE id IN (SELECT id FROM eddyline.commands \
                       WHERE at < $1 ORDER BY at LIMIT 5000) RETURNING 1) SELECT count(*) >= 5000 FROM gone";
            more(database, sql, &[(before, Type::INT8)]).await
        }
    }
}

async fn more(database: &Database, sql: &str, params: &[Param<'_>]) -> Result<bool> {
    let rows = database.read_planned_anew(sql, params).await.map_err(PgError::into_error)?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}
