//! Tasks: claimed, kept, counted.

use std::sync::Arc;

use eddyline_machine::{ActId, Claim, Fence, Millis, RunId, Task, TaskRef};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::{escape, escaped, read, text, unescape};
use super::connect::Object;
use super::database::{Database, Param};
use super::encode::BETWEEN;
use super::pg_error::{PgError, PgResult};
use crate::claim::{ClaimRequest, Claimed, Claims, Extended, Held, Lease, LeaseState, Offer, RequestId};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::{LimitState, QueueState};

/// Claims, as the parameters of `claim_v1`.
#[derive(Debug, Default)]
pub(super) struct ClaimRows {
    now: Option<Millis>,
    ns: Vec<String>,
    request: Vec<Uuid>,
    worker: Vec<String>,
    queues: Vec<String>,
    offer: Vec<String>,
    max: Vec<i32>,
    most: Vec<Option<i32>>,
    lease_ms: Vec<i64>,
}

const CLAIM: &str = "SELECT * FROM eddyline.claim_v1($1, $2, $3, $4, $5, $6, $7, $8, $9)";

impl ClaimRows {
    pub fn of(claims: &[ClaimRequest]) -> Result<ClaimRows> {
        let mut rows = ClaimRows::default();
        for claim in claims {
            rows.ns.push(escaped(claim.ns.as_str()));
            rows.request.push(claim.request.0);
            rows.worker.push(escaped(&claim.worker));
            rows.queues.push(claim.queues.iter().map(|queue| escaped(queue)).collect::<Vec<_>>().join(BETWEEN));
            rows.offer.push(text(&escaped_offer(&claim.offer))?);
            rows.max.push(i32::try_from(claim.max).unwrap_or(i32::MAX));
            rows.most.push(claim.most_held.map(|most| i32::try_from(most).unwrap_or(i32::MAX)));
            rows.lease_ms.push(claim.lease_ms);
        }
        Ok(rows)
    }

    fn params<'a>(&'a self, now: &'a Option<Millis>) -> Vec<Param<'a>> {
        vec![
            (now, Type::INT8),
            (&self.ns, Type::TEXT_ARRAY),
            (&self.request, Type::UUID_ARRAY),
            (&self.worker, Type::TEXT_ARRAY),
            (&self.queues, Type::TEXT_ARRAY),
            (&self.offer, Type::TEXT_ARRAY),
            (&self.max, Type::INT4_ARRAY),
            (&self.most, Type::INT4_ARRAY),
            (&self.lease_ms, Type::INT8_ARRAY),
        ]
    }
}

fn escaped_offer(offer: &Offer) -> Offer {
    Offer {
        handlers: offer.handlers.iter().map(|name| escaped(name)).collect(),
        flows: offer.flows.iter().map(|(name, build)| (escaped(name), build.as_deref().map(escaped))).collect(),
        labels: offer.labels.iter().map(|label| escaped(label)).collect(),
        build: offer.build.as_deref().map(escaped),
    }
}

pub(super) async fn prepare(database: &Database, client: &Object, rows: &ClaimRows) -> PgResult<()> {
    database.prepare(client, CLAIM, &rows.params(&rows.now)).await
}

pub(super) async fn send(database: &Database, client: &Object, rows: &ClaimRows) -> PgResult<Vec<Row>> {
    let now = database.now_given();
    database.query(client, CLAIM, &rows.params(&now)).await
}

/// What each claim got, and whether it had got it before.
pub(super) fn answers(requests: &[ClaimRequest], rows: Vec<Row>) -> PgResult<(Vec<Claims>, Vec<bool>)> {
    let mut claims = vec![Claims::default(); requests.len()];
    let mut before = vec![false; requests.len()];
    for row in rows {
        let at = row.try_get::<_, i32>("out_r")? as usize - 1;
        let (Some(claims), Some(before), Some(request)) = (claims.get_mut(at), before.get_mut(at), requests.get(at))
        else {
            continue;
        };
        *before |= row.try_get::<_, bool>("out_before")?;
        match row.try_get::<_, Option<Uuid>>("out_run")? {
            Some(run) => claims.tasks.push(claimed(request, RunId(run), &row)?),
            None => {
                claims.retry_at = row.try_get("out_retry_at")?;
                claims.full = row.try_get::<_, Option<bool>>("out_full")?.unwrap_or(false);
            }
        }
    }
    Ok((claims, before))
}

fn claimed(request: &ClaimRequest, run: RunId, row: &Row) -> PgResult<Claimed> {
    let fence = Fence(row.try_get::<_, i64>("out_fence")? as u64);
    let task = task(run, fence, row.try_get("out_crc")?, row.try_get("out_body")?)?;
    let held = Held {
        worker: request.worker.clone(),
        request: RequestId(row.try_get("out_request")?),
        since: row.try_get("out_since")?,
        lease_ms: row.try_get("out_lease_ms")?,
        lease_until: row.try_get("out_lease_until")?,
        deadline: row.try_get("out_deadline")?,
        claim: claim(row.try_get("out_build")?, row.try_get("out_memo")?),
    };
    let flow = unescape(row.try_get("out_flow")?);
    Ok(Claimed { ns: request.ns.clone(), run, flow, task: Arc::new(task), held })
}

pub(super) fn task(run: RunId, fence: Fence, crc: i32, body: &str) -> PgResult<Task> {
    let key: [&[u8]; 2] = [&run.0.into_bytes(), &fence.0.to_le_bytes()];
    read(crc, body, &key, || format!("tasks: task {fence} of run {run}"))
}

pub(super) fn claim(build: Option<String>, memo: Option<i64>) -> Claim {
    Claim { build: build.map(unescape), memo: memo.unwrap_or(0) as u64 }
}

fn keys(leases: &[Lease]) -> (Vec<Uuid>, Vec<i64>) {
    leases.iter().map(|lease| (lease.run.0, lease.fence.0 as i64)).unzip()
}

pub(super) async fn extend(
    database: &Database,
    ns: &Namespace,
    worker: Option<&str>,
    leases: &[Lease],
) -> Result<Vec<Extended>> {
    let (ns, worker, (runs, fences)) = (escaped(ns.as_str()), worker.map(escaped), keys(leases));
    let now = database.now_given();
    let params: [Param<'_>; 5] = [
        (&now, Type::INT8),
        (&ns, Type::TEXT),
        (&worker, Type::TEXT),
        (&runs, Type::UUID_ARRAY),
        (&fences, Type::INT8_ARRAY),
    ];
    let sql = "SELECT * FROM eddyline.extend_v1($1, $2, $3, $4, $5)";
    let rows = database.read(sql, &params).await.map_err(PgError::into_error)?;
    let mut told = vec![Extended::Lost; leases.len()];
    let read = |row: &Row| -> PgResult<(usize, Extended)> {
        let extended = Extended::Until {
            lease_until: row.try_get("out_lease_until")?,
            deadline: row.try_get("out_deadline")?,
            closed: row.try_get("out_closed")?,
            memo: row.try_get::<_, Option<i64>>("out_memo")?.map(|memo| memo as u64),
        };
        Ok((row.try_get::<_, i32>("out_i")? as usize - 1, extended))
    };
    for row in &rows {
        let (at, extended) = read(row).map_err(PgError::into_error)?;
        told[at] = extended;
    }
    Ok(told)
}

pub(super) async fn leases(
    database: &Database,
    ns: &Namespace,
    worker: Option<&str>,
    leases: &[Lease],
) -> Result<Vec<LeaseState>> {
    let (ns, worker, (runs, fences)) = (escaped(ns.as_str()), worker.map(escaped), keys(leases));
    let params: [Param<'_>; 4] =
        [(&ns, Type::TEXT), (&worker, Type::TEXT), (&runs, Type::UUID_ARRAY), (&fences, Type::INT8_ARRAY)];
    let sql = "SELECT x.i, t.activation, t.build, t.memo, t.closed, CASE WHEN t.is_run THEN r.memo END \
               FROM unnest($3::uuid[], $4::bigint[]) WITH ORDINALITY x(run, fence, i) \
               JOIN eddyline.tasks t ON t.run = x.run AND t.fence = x.fence JOIN eddyline.runs r ON r.id = t.run \
               WHERE t.ns = $1 AND t.worker IS NOT NULL AND ($2::text IS NULL OR t.worker = $2)";
    let rows = database.read(sql, &params).await.map_err(PgError::into_error)?;
    let mut told = vec![LeaseState::Lost; leases.len()];
    let read = |row: &Row| -> PgResult<(usize, LeaseState)> {
        let at = row.try_get::<_, i64>(0)? as usize - 1;
        let task = TaskRef { activation: ActId(row.try_get::<_, i64>(1)? as u32), fence: leases[at].fence };
        let claim = claim(row.try_get(2)?, row.try_get(3)?);
        let memo = row.try_get::<_, Option<i64>>(5)?.map(|memo| memo as u64);
        Ok((at, LeaseState::Held { task, claim, closed: row.try_get(4)?, memo }))
    };
    for row in &rows {
        let (at, state) = read(row).map_err(PgError::into_error)?;
        told[at] = state;
    }
    Ok(told)
}

pub(super) async fn queues(database: &Database, ns: &Namespace) -> Result<Vec<QueueState>> {
    let ns = escape(ns.as_str());
    let sql = "SELECT queue, count(*) FILTER (WHERE worker IS NULL AND NOT closed AND NOT paused), count(worker), \
               min(queued_at) FILTER (WHERE worker IS NULL AND NOT closed AND NOT paused) \
               FROM eddyline.tasks WHERE ns = $1 GROUP BY queue \
               UNION ALL SELECT name, 0, 0, NULL FROM eddyline.queues q WHERE ns = $1 \
               AND NOT EXISTS (SELECT 1 FROM eddyline.tasks t WHERE t.ns = $1 AND t.queue = q.name) ORDER BY 1";
    let rows = database.read(sql, &[(&ns, Type::TEXT)]).await.map_err(PgError::into_error)?;
    let state = |row: &Row| -> PgResult<QueueState> {
        Ok(QueueState {
            name: unescape(row.try_get(0)?),
            ready: row.try_get::<_, i64>(1)? as usize,
            claimed: row.try_get::<_, i64>(2)? as usize,
            oldest: row.try_get(3)?,
        })
    };
    rows.iter().map(state).collect::<PgResult<_>>().map_err(PgError::into_error)
}

pub(super) async fn limits(database: &Database, ns: &Namespace) -> Result<Vec<LimitState>> {
    let (ns, now) = (escape(ns.as_str()), database.now_given());
    let sql = "SELECT name, closed_until FROM eddyline.limits \
               WHERE ns = $1 AND closed_until > coalesce($2, eddyline.wall_ms()) ORDER BY name";
    let rows = database.read(sql, &[(&ns, Type::TEXT), (&now, Type::INT8)]).await.map_err(PgError::into_error)?;
    let state = |row: &Row| -> PgResult<LimitState> {
        Ok(LimitState { name: unescape(row.try_get(0)?), closed_until: row.try_get(1)? })
    };
    rows.iter().map(state).collect::<PgResult<_>>().map_err(PgError::into_error)
}

pub(super) async fn held_by(database: &Database, ns: &Namespace, worker: &str) -> Result<usize> {
    let (ns, worker) = (escape(ns.as_str()), escape(worker));
    let sql = "SELECT count(*) FROM eddyline.tasks WHERE ns = $1 AND worker = $2";
    count(database, sql, &[(&ns, Type::TEXT), (&worker, Type::TEXT)]).await
}

pub(super) async fn backlog(database: &Database, ns: &Namespace) -> Result<usize> {
    let ns = escape(ns.as_str());
    let sql = "SELECT count(*) FROM eddyline.tasks WHERE ns = $1 AND worker IS NULL AND NOT closed AND NOT paused";
    count(database, sql, &[(&ns, Type::TEXT)]).await
}

async fn count(database: &Database, sql: &str, params: &[Param<'_>]) -> Result<usize> {
    let rows = database.read(sql, params).await.map_err(PgError::into_error)?;
    Ok(rows.first().map_or(0, |row| row.get::<_, i64>(0)) as usize)
}
