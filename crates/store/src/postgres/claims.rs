//! Tasks: claimed, kept, counted.

use std::sync::{Arc, LazyLock};

use eddyline_machine::{ActId, Claim, Fence, RunId, Task, TaskRef};
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::body::{escape, escaped, read, text, unescape};
use super::columns::{Groups, Lows, Requests};
use super::connect::Object;
use super::database::{Database, Param};
use super::encode::BETWEEN;
use super::pg_error::{PgError, PgResult};
use crate::claim::{ClaimRequest, Claimed, Claims, Extended, Held, Lease, LeaseState, Offer, RequestId};
use crate::error::Result;
use crate::ids::Namespace;
use crate::query::{LimitState, QueueState};

/// With how many groups a claim is compared.
const MOST_COMPARED: usize = 16;

/// Claims, as the parameters of `claim_v1` and of `commit_v1`.
#[derive(Debug, Default)]
pub(super) struct ClaimRows {
    pub requests: Requests,
    groups: Groups,
    lows: Lows,
}

static CLAIM: LazyLock<String> = LazyLock::new(|| {
    let places = |from: usize, to: usize| (from..=to).map(|at| format!("${at}")).collect::<Vec<_>>().join(", ");
    format!("SELECT * FROM eddyline.claim_v1({}, '{{}}', {})", places(1, 7), places(8, 14))
});

impl ClaimRows {
    pub fn of(database: &Database, claims: &[ClaimRequest]) -> Result<ClaimRows> {
        let mut rows = ClaimRows::default();
        let mut groups: Vec<&ClaimRequest> = Vec::new();
        for claim in claims {
            let equal = |other: &&ClaimRequest| {
                other.ns == claim.ns
                    && other.queues == claim.queues
                    && (Arc::ptr_eq(&other.offer, &claim.offer) || other.offer == claim.offer)
            };
            // Beyond a few, a group of its own for each is quicker than looking for an equal one.
            let known = groups.iter().rev().take(MOST_COMPARED).position(equal).map(|back| groups.len() - back);
            let group = match known {
                Some(group) => group,
                None => {
                    groups.push(claim);
                    rows.add_group(database, groups.len() as i32, claim)?;
                    groups.len()
                }
            };
            let requests = &mut rows.requests;
            requests.group.push(group as i32);
            requests.request.push(claim.request.0);
            requests.worker.push(escaped(&claim.worker));
            requests.max.push(i32::try_from(claim.max).unwrap_or(i32::MAX));
            requests.most.push(claim.most_held.map(|most| i32::try_from(most).unwrap_or(i32::MAX)));
            requests.lease_ms.push(claim.lease_ms);
        }
        Ok(rows)
    }

    fn add_group(&mut self, database: &Database, group: i32, claim: &ClaimRequest) -> Result<()> {
        let queues: Vec<String> = claim.queues.iter().map(|queue| escaped(queue)).collect();
        for queue in &queues {
            for (class, low) in database.low_marks(&claim.ns, queue) {
                self.lows.group.push(group);
                self.lows.queue.push(queue.clone());
                self.lows.class.push(class);
                self.lows.low.push(low);
            }
        }
        self.groups.ns.push(escaped(claim.ns.as_str()));
        self.groups.queues.push(queues.join(BETWEEN));
        self.groups.offer.push(text(&escaped_offer(&claim.offer))?);
        Ok(())
    }

    pub fn params<'a>(&'a self, params: &mut Vec<Param<'a>>) {
        self.requests.params(params);
        self.groups.params(params);
        self.lows.params(params);
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

pub(super) async fn send(database: &Database, client: &Object, rows: &ClaimRows) -> PgResult<Vec<Row>> {
    let now = database.now_given();
    let mut params: Vec<Param<'_>> = vec![(&now, Type::INT8)];
    rows.params(&mut params);
    database.query(client, &CLAIM, &params).await
}

/// What each claim got, and whether it had got it before.
#[derive(Debug, Default)]
pub(super) struct ClaimAnswers {
    pub claims: Vec<Claims>,
    pub before: Vec<bool>,
}

impl ClaimAnswers {
    pub fn new(requests: &[ClaimRequest]) -> ClaimAnswers {
        ClaimAnswers { claims: vec![Claims::default(); requests.len()], before: vec![false; requests.len()] }
    }

    /// A row of `claim_v1`.
    pub fn add(&mut self, database: &Database, requests: &[ClaimRequest], row: &Row) -> PgResult<()> {
        let at = row.try_get::<_, i32>("out_r")? as usize - 1;
        let (Some(claims), Some(before), Some(request)) =
            (self.claims.get_mut(at), self.before.get_mut(at), requests.get(at))
        else {
            return Ok(());
        };
        if let Some(low) = row.try_get::<_, Option<i64>>("out_low")? {
            let (queue, class): (String, i64) = (row.try_get("out_queue")?, row.try_get("out_class")?);
            database.learn_low_mark(&request.ns, queue, class, low);
            return Ok(());
        }
        *before |= row.try_get::<_, bool>("out_before")?;
        match row.try_get::<_, Option<Uuid>>("out_run")? {
            Some(run) => claims.tasks.push(claimed(request, RunId(run), row)?),
            None => {
                claims.retry_at = row.try_get("out_retry_at")?;
                claims.full = row.try_get::<_, Option<bool>>("out_full")?.unwrap_or(false);
                claims.exhausted = row.try_get::<_, Option<bool>>("out_exhausted")?.unwrap_or(false);
            }
        }
        Ok(())
    }
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
