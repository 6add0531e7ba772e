//! Tasks on disk: adding, claiming and removing them.

use std::sync::Arc;

use eddyline_machine::{Claim, Fence, RunId, Task, TaskChange};
use rusqlite::{Connection, Row, params};
use uuid::Uuid;

use super::body::{self, Body};
use super::encode::EncodedRun;
use super::group::{Added, Group};
use super::schema::key_of;
use super::sqlite_error::{SqliteError, SqliteResult};
use crate::claim::{ClaimRequest, Claimed, Claims, Held, RequestId};
use crate::query::Change;
use crate::task_queues::{Picked, Queued, TaskQueues};

impl Group<'_> {
    /// Changes the tasks of a run in the mirror, without disk access; [`Group::write_tasks`] writes the rows.
    pub fn change_tasks(&mut self, queues: &mut TaskQueues, encoded: &EncodedRun) {
        let (ns, header) = (&encoded.commit.ns, &encoded.commit.transition.header);
        let (run, changes) = (header.run, &encoded.commit.transition.tasks);
        self.touched.run(run);
        if changes.is_empty() && !queues.knows(run) {
            return;
        }
        for queue in queues.set_run(ns, run, &header.flow, header.holds_tasks(), encoded.memo) {
            self.hint(Change::Tasks { ns: ns.clone(), queue });
        }
        let mut place = self.cache.place;
        for (change, added) in changes.iter().zip(&encoded.tasks) {
            match (change, added) {
                (TaskChange::Add(_), Some(added)) => {
                    let task = &added.task;
                    place += 1;
                    let (queued_at, place) = (self.now, place as u64);
                    let start_by = task.start_timeout_ms.map(|ms| queued_at + ms);
                    self.touched.task(run, task.fence);
                    queues.add(run, Queued { task, queued_at, place, start_by, closed: false, held: None });
                }
                (TaskChange::Add(_), None) => {}
                (TaskChange::Close(fence), _) => {
                    self.touched.task(run, *fence);
                    queues.close(run, *fence);
                }
                (TaskChange::Remove(fence), _) => {
                    self.touched.removed(run, *fence, queues.held(run, *fence));
                    for queue in queues.remove(run, *fence) {
                        self.hint(Change::Tasks { ns: ns.clone(), queue });
                    }
                }
            }
        }
        queues.forget_idle(run);
    }

    /// Writes the changes of [`Group::change_tasks`].
    pub fn write_tasks(&mut self, position: i64, encoded: &EncodedRun) -> SqliteResult<()> {
        let (ns, transition) = (&encoded.commit.ns, &encoded.commit.transition);
        let run = transition.header.run;
        for (change, added) in transition.tasks.iter().zip(&encoded.tasks) {
            match (change, added) {
                (TaskChange::Add(_), Some(added)) => {
                    let task = &added.task;
                    self.cache.place += 1;
                    self.cache.keep_body(run, task);
                    self.hint(Change::Tasks { ns: ns.clone(), queue: task.queue.clone() });
                    if task.start_timeout_ms.is_some() {
                        self.hint(Change::Leases);
                    }
                    let key = key_of(position, task.fence.0);
                    let added = Added { task: added.clone(), place: self.cache.place, closed: false, held: None };
                    self.added.insert(key, added);
                }
                (TaskChange::Add(_), None) => {}
                (TaskChange::Close(fence), _) => {
                    let key = key_of(position, fence.0);
                    match self.added.get_mut(&key) {
                        Some(added) => added.closed = true,
                        None => {
                            self.write("UPDATE tasks SET closed = 1 WHERE key = ?1", [key])?;
                        }
                    }
                }
                (TaskChange::Remove(fence), _) => {
                    self.cache.drop_body(run, *fence);
                    let key = key_of(position, fence.0);
                    if self.added.remove(&key).is_none() {
                        self.write("DELETE FROM tasks WHERE key = ?1", [key])?;
                    }
                }
            }
        }
        Ok(())
    }

    pub fn claim(&mut self, request: &ClaimRequest) -> SqliteResult<Claims> {
        let (picked, retry_at, full) = {
            let queues = &mut self.shared.tasks().queues;
            let (picked, retry_at) = queues.claim(request, self.now);
            let full = picked.len() < request.max && queues.is_full(request);
            (picked, retry_at, full)
        };
        // Mark all before writing the first: if the group fails, every one is restored.
        for picked in picked.iter().filter(|picked| !picked.before) {
            self.touched.task(picked.run, picked.fence);
            self.claimed(&request.ns, picked.run, picked.fence);
        }
        let mut tasks = Vec::with_capacity(picked.len());
        for picked in picked {
            tasks.push(self.hand_over(picked)?);
        }
        Ok(Claims { tasks, retry_at, full, exhausted: false })
    }

    /// Records the claim of a task and returns the task.
    fn hand_over(&mut self, picked: Picked) -> SqliteResult<Claimed> {
        let Picked { run, fence, held, before } = picked;
        let missing = || SqliteError::Corrupt(format!("tasks: task {fence} of run {run} has no run"));
        let head = self.cache.head(self.conn, run)?.ok_or_else(missing)?;
        let (position, version) = (head.position, head.version);
        let (ns, flow) = (head.ns.clone(), head.facts.flow.clone());
        if !before {
            head.records += 1;
        }
        let first = head.records as i64;
        let key = key_of(position, fence.0);
        let task = self.task(run, fence, key)?;
        if !before {
            let record = [task.started(Some(held.worker.clone()))];
            let body = Body::of(&record).map_err(|error| SqliteError::Impossible(error.to_string()))?;
            self.append(position, first, 1, version, None, &body)?;
            match self.added.get_mut(&key) {
                Some(added) => added.held = Some(held.clone()),
                None => self.write_claim(key, &held)?,
            }
            self.runs.push((run, false));
            self.hint(Change::Leases);
        }
        Ok(Claimed { ns, run, flow, task, held })
    }

    fn task(&self, run: RunId, fence: Fence, key: i64) -> SqliteResult<Arc<Task>> {
        if let Some(added) = self.added.get(&key) {
            return Ok(added.task.task.clone());
        }
        if let Some(task) = self.cache.body(run, fence) {
            return Ok(task);
        }
        read_task(self.conn, run, key)
    }

    fn write_claim(&mut self, key: i64, held: &Held) -> SqliteResult<()> {
        self.write(
            "UPDATE tasks SET worker = ?2, request = ?3, since = ?4, lease_ms = ?5, lease_until = ?6, deadline = ?7, \
             build = ?8, memo = ?9 WHERE key = ?1",
            params![
                key,
                held.worker,
                held.request.0.as_bytes(),
                held.since,
                held.lease_ms,
                held.lease_until,
                held.deadline,
                held.claim.build,
                held.claim.memo as i64
            ],
        )?;
        Ok(())
    }

    /// Writes the tasks that the group added and did not remove again, with their claims.
    pub fn write_added(&mut self) -> SqliteResult<()> {
        let now = self.now;
        for (key, added) in std::mem::take(&mut self.added) {
            let held = added.held.as_ref();
            self.write(
                "INSERT OR REPLACE INTO tasks (key, place, queued_at, closed, worker, request, since, lease_ms, lease_until, \
                 deadline, build, memo, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
                params![
                    key,
                    added.place,
                    now,
                    added.closed,
                    held.map(|held| &held.worker),
                    held.map(|held| held.request.0.as_bytes()),
                    held.map(|held| held.since),
                    held.map(|held| held.lease_ms),
                    held.map(|held| held.lease_until),
                    held.and_then(|held| held.deadline),
                    held.and_then(|held| held.claim.build.as_deref()),
                    held.map(|held| held.claim.memo as i64),
                    added.task.body.seal(&[key]),
                    added.task.body.text
                ],
            )?;
        }
        Ok(())
    }
}

fn read_task(conn: &Connection, run: RunId, key: i64) -> SqliteResult<Arc<Task>> {
    let mut statement = conn.prepare_cached("SELECT crc, body FROM tasks WHERE key = ?1")?;
    let mut rows = statement.query([key])?;
    match rows.next()? {
        Some(row) => Ok(Arc::new(body::read(row, 0, &[key], || name(run, key))?)),
        None => Err(SqliteError::Corrupt(format!("{} is missing", name(run, key)))),
    }
}

pub(super) fn name(run: RunId, key: i64) -> String {
    format!("tasks: task {} of run {run}", super::schema::number_of(key))
}

/// The columns of a claim, the first at `at`.
pub(super) const HELD: &str = "worker, request, since, lease_ms, lease_until, deadline, build, memo";

pub(super) fn held(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<Held>> {
    let Some(worker) = row.get::<_, Option<String>>(at)? else { return Ok(None) };
    Ok(Some(Held {
        worker,
        request: RequestId(Uuid::from_bytes(row.get(at + 1)?)),
        since: row.get(at + 2)?,
        lease_ms: row.get(at + 3)?,
        lease_until: row.get(at + 4)?,
        deadline: row.get(at + 5)?,
        claim: Claim { build: row.get(at + 6)?, memo: row.get::<_, i64>(at + 7)? as u64 },
    }))
}
