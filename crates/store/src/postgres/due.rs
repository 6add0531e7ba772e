//! Due items, each handed out to one caller at a time.

use eddyline_machine::{ActId, Expiry, Fence, Millis, RunId, TaskRef};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::{escaped, unescape};
use super::claims::claim;
use super::database::{Database, Param};
use super::list::document;
use super::pending::{message, timer};
use super::pg_error::{PgError, PgResult};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::*;
use crate::task_queues::UNWATCHED_MS;

/// The most items of one response.
const MOST: usize = 100_000;

pub(super) async fn due(database: &Database, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch> {
    let skip: Vec<String> = skip.iter().map(|ns| escaped(ns.as_str())).collect();
    let limit = limit.min(MOST) as i32;
    let (now, wall) = (database.now_given(), database.wall_given());
    let (most, bytes, unwatched) = (MAX_INBOX as i32, MAX_INBOX_BYTES as i64, UNWATCHED_MS);
    let mut params: Vec<Param<'_>> = vec![(&now, Type::INT8)];
    if matches!(what, Due::Timers | Due::Documents) {
        params.push((&wall, Type::INT8));
    }
    params.push((&skip, Type::TEXT_ARRAY));
    params.push((&limit, Type::INT4));
    let sql = match what {
        Due::Timers => "SELECT * FROM eddyline.due_timers_v1($1, $2, $3, $4)",
        Due::Documents => "SELECT * FROM eddyline.due_documents_v1($1, $2, $3, $4)",
        Due::Messages => {
            params.push((&most, Type::INT4));
            params.push((&bytes, Type::INT8));
            "SELECT * FROM eddyline.due_messages_v1($1, $2, $3, $4, $5)"
        }
        Due::Leases => {
            params.push((&unwatched, Type::INT8));
            "SELECT * FROM eddyline.due_leases_v1($1, $2, $3, $4)"
        }
    };
    // If the response is lost, its items are due again when the hold ends.
    let rows = database.read(sql, &params).await.map_err(PgError::into_error)?;
    let batch = match what {
        Due::Timers => timers(&rows),
        Due::Documents => documents(&rows),
        Due::Messages => messages(&rows),
        Due::Leases => leases(&rows),
    };
    batch.map_err(PgError::into_error)
}

fn next(row: &Row) -> PgResult<Option<Millis>> {
    Ok(row.try_get::<_, Option<i64>>("out_next")?.map(|next| next.max(0)))
}

fn timers(rows: &[Row]) -> PgResult<DueBatch> {
    let (mut batch, mut found) = (DueBatch::default(), Vec::new());
    for row in rows {
        let Some(run) = row.try_get::<_, Option<Uuid>>(0)?.map(RunId) else {
            batch.next_in = next(row)?;
            continue;
        };
        let ns = Namespace::new(&unescape(row.try_get(1)?));
        found.push((run, ns, timer(run, row, 2)?));
    }
    found.sort_by_key(|(run, _, timer)| (timer.wall, timer.due, *run, timer.key));
    batch.items = found.into_iter().map(|(run, ns, timer)| DueItem::Timer { ns, run, timer }).collect();
    Ok(batch)
}

fn documents(rows: &[Row]) -> PgResult<DueBatch> {
    let (mut batch, mut found) = (DueBatch::default(), Vec::new());
    for row in rows {
        match row.try_get::<_, Option<&str>>("out_id")? {
            Some(_) => found.push(document(row)?),
            None => batch.next_in = next(row)?,
        }
    }
    found.sort_by(|a, b| (a.due, &a.ns, &a.key).cmp(&(b.due, &b.ns, &b.key)));
    batch.items = found.into_iter().map(DueItem::Document).collect();
    Ok(batch)
}

/// Rows are grouped by target, each group in order.
fn messages(rows: &[Row]) -> PgResult<DueBatch> {
    let mut batch = DueBatch::default();
    for row in rows {
        let Some(to) = row.try_get::<_, Option<Uuid>>("out_target")?.map(RunId) else {
            batch.next_in = next(row)?;
            continue;
        };
        let body: &str = row.try_get("out_body")?;
        let sent = message(to, row.try_get("out_id")?, row.try_get("out_crc")?, body)?;
        match batch.items.last_mut() {
            Some(DueItem::Messages { to: last, messages, bytes, .. }) if *last == to => {
                messages.push(sent);
                *bytes += body.len();
            }
            _ => {
                let ns = Namespace::new(&unescape(row.try_get("out_ns")?));
                batch.items.push(DueItem::Messages { ns, to, messages: vec![sent], bytes: body.len() });
            }
        }
    }
    Ok(batch)
}

fn leases(rows: &[Row]) -> PgResult<DueBatch> {
    let mut batch = DueBatch::default();
    for row in rows {
        let Some(run) = row.try_get::<_, Option<Uuid>>("out_run")?.map(RunId) else {
            batch.next_in = next(row)?;
            continue;
        };
        let task = TaskRef {
            activation: ActId(row.try_get::<_, i64>("out_activation")? as u32),
            fence: Fence(row.try_get::<_, i64>("out_fence")? as u64),
        };
        let why = match row.try_get::<_, i32>("out_why")? {
            0 => Expiry::LeaseLost,
            1 => Expiry::Timeout,
            _ => Expiry::StartTimeout,
        };
        let ns = Namespace::new(&unescape(row.try_get("out_ns")?));
        let claim = claim(row.try_get("out_build")?, row.try_get("out_memo")?);
        batch.items.push(DueItem::Lease { ns, run, task, why, claim });
    }
    Ok(batch)
}
