//! The pending work of a run.

use eddyline_machine::explain::Bound;
use eddyline_machine::{Fence, Message, RunId};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::{read, seal, unescape};
use super::claims::{claim, task};
use super::connect::Object;
use super::database::{Database, Param, READ_TIMEOUT, in_time};
use super::list::{GATE, gate};
use super::pg_error::{PgError, PgResult};
use crate::claim::{Held, RequestId};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::*;
use crate::timer_columns;

pub(super) async fn pending(database: &Database, run: RunId) -> Result<PendingWork> {
    let mut tries = 0;
    loop {
        let client = database.client().await.map_err(PgError::into_error)?;
        match in_time(READ_TIMEOUT, at_one_moment(database, &client, run)).await {
            Ok(pending) => return Ok(pending),
            Err(error) => database.before_retry(client, error, &mut tries).await.map_err(PgError::into_error)?,
        }
    }
}

const TASKS: &str = "SELECT t.fence, t.crc, t.body, t.queued_at, t.closed, t.worker, t.request, t.since, t.lease_ms, \
     eddyline.lease_end_v1(t.ns, t.worker, t.by_worker, t.lease_until, t.lease_ms), t.deadline, t.build, t.memo, \
     b.why, b.most, b.name FROM eddyline.tasks t \
     LEFT JOIN LATERAL eddyline.bound_v1(t.ns, t.queue, t.flow, t.limits, coalesce($2, eddyline.wall_ms())) b \
         ON t.worker IS NULL AND NOT t.closed \
     WHERE t.run = $1 ORDER BY t.fence";
const TIMERS: &str = "SELECT activation, kind, fence, due, wall FROM eddyline.timers WHERE run = $1 \
     ORDER BY activation, kind, fence";
const MESSAGES: &str = "SELECT id, crc, body, ns FROM eddyline.messages WHERE target = $1 ORDER BY place LIMIT 1000";
const RUN: &str = "SELECT r.trimmed, EXISTS (SELECT 1 FROM eddyline.lines l WHERE l.run = $1 AND NOT EXISTS \
     (SELECT 1 FROM eddyline.lines o WHERE o.ns = l.ns AND o.flow = l.flow AND o.key = l.key AND o.place < l.place)) \
     FROM eddyline.runs r WHERE r.id = $1";

async fn at_one_moment(database: &Database, client: &Object, run: RunId) -> PgResult<PendingWork> {
    let now = database.now_given();
    let id: [Param<'_>; 1] = [(&run.0, Type::UUID)];
    let gates = format!("SELECT {GATE} FROM eddyline.gates g WHERE g.run = $1 ORDER BY g.activation");
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
    let messages = database.query(client, MESSAGES, &id).await?;
    let found = database.query(client, RUN, &id).await?;
    let tasks = database.query(client, TASKS, &[(&run.0, Type::UUID), (&now, Type::INT8)]).await?;
    let timers = database.query(client, TIMERS, &id).await?;
    let gates = database.query(client, &gates, &id).await?;
    client.batch_execute("COMMIT").await?;
    let unstored_in = match messages.first() {
        Some(row) => Some(Namespace::new(&unescape(row.try_get(3)?))),
        None => None,
    };
    let messages = inbox(run, &messages)?;
    let Some(found) = found.first() else {
        return Ok(PendingWork { messages, unstored_in, ..PendingWork::default() });
    };
    let trimmed: bool = found.try_get(0)?;
    let gates = if trimmed { Vec::new() } else { gates };
    Ok(PendingWork {
        tasks: tasks.iter().map(|row| task_row(run, row)).collect::<PgResult<_>>()?,
        timers: timers.iter().map(|row| timer(run, row, 0)).collect::<PgResult<_>>()?,
        gates: gates.iter().map(gate).collect::<PgResult<_>>()?,
        messages,
        first_in_line: found.try_get(1)?,
        unstored_in: None,
    })
}

/// As many messages as are delivered together, at most.
fn inbox(run: RunId, rows: &[Row]) -> PgResult<Vec<Message>> {
    let (mut messages, mut bytes) = (Vec::new(), 0);
    for row in rows {
        let body: &str = row.try_get(2)?;
        bytes += body.len();
        if !messages.is_empty() && (messages.len() >= MAX_INBOX || bytes > MAX_INBOX_BYTES) {
            break;
        }
        messages.push(message(run, row.try_get(0)?, row.try_get(1)?, body)?);
    }
    Ok(messages)
}

pub(super) fn message(to: RunId, id: String, crc: i32, body: &str) -> PgResult<Message> {
    let (id, target) = (unescape(id), to.0.into_bytes());
    let key = message_key(&target, &id, crc, body);
    let body = read(crc, body, &key, || format!("messages: message {id} to run {to}"))?;
    Ok(Message { to, id, body })
}

pub(super) fn seal_message(to: RunId, id: &str, body: &str) -> i32 {
    seal(body, &[&to.0.into_bytes(), id.as_bytes()])
}

/// What a message is sealed by: its target and id. Those that the database addresses (in lines of unique keys) are sealed
/// by their id alone.
pub(super) fn message_key<'a>(target: &'a [u8; 16], id: &'a str, crc: i32, body: &str) -> Vec<&'a [u8]> {
    let addressed = vec![target.as_slice(), id.as_bytes()];
    if seal(body, &addressed) == crc { addressed } else { vec![id.as_bytes()] }
}

fn task_row(run: RunId, row: &Row) -> PgResult<TaskRow> {
    let fence = Fence(row.try_get::<_, i64>(0)? as u64);
    let held = match row.try_get::<_, Option<String>>(5)? {
        None => None,
        Some(worker) => Some(Held {
            worker: unescape(worker),
            request: RequestId(row.try_get::<_, Uuid>(6)?),
            since: row.try_get(7)?,
            lease_ms: row.try_get(8)?,
            lease_until: row.try_get(9)?,
            deadline: row.try_get(10)?,
            claim: claim(row.try_get(11)?, row.try_get(12)?),
        }),
    };
    let most = row.try_get::<_, Option<i64>>(14)?.map(|most| most as u32);
    let bound = match row.try_get::<_, Option<&str>>(13)? {
        Some("paused") => Some(Bound::Paused),
        Some("concurrency") => Some(Bound::Concurrency { most: most.unwrap_or(0) }),
        Some("rate") => Some(Bound::Rate),
        Some("flow") => Some(Bound::FlowConcurrency { most: most.unwrap_or(0) }),
        Some("limit") => Some(Bound::Limit { name: unescape(row.try_get(15)?), most }),
        _ => None,
    };
    Ok(TaskRow {
        task: task(run, fence, row.try_get(1)?, row.try_get(2)?)?,
        queued_at: row.try_get(3)?,
        closed: row.try_get(4)?,
        held,
        bound,
    })
}

/// Reads the columns activation, kind, fence, due and wall, the first at `at`.
pub(super) fn timer(run: RunId, row: &Row, at: usize) -> PgResult<TimerRow> {
    let kind: i32 = row.try_get(at + 1)?;
    let key = timer_columns::key(row.try_get(at)?, kind, row.try_get(at + 2)?)
        .ok_or_else(|| PgError::Corrupt(format!("timers: a timer of run {run} is of kind {kind}")))?;
    Ok(TimerRow { key, due: row.try_get(at + 3)?, wall: row.try_get(at + 4)? })
}
