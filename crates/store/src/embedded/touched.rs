//! What a group has changed in memory. If the group cannot be written, only this is read from disk again: the cost
//! depends on the group, not on the number of queued tasks.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::{Fence, Millis, RunId, Task};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;

use super::body;
use super::claims::{HELD, held, name};
use super::restore;
use super::schema::key_of;
use super::shared::Shared;
use super::sqlite_error::SqliteResult;
use super::writer_cache::{Numbers, WriterCache};
use crate::claim::Held;
use crate::document::{DocumentKey, kind};
use crate::ids::Namespace;
use crate::task_queues::{Bucket, BucketKey, Queued, TaskQueues};

/// Tasks of a run by fence, each with its claim if it was removed.
type TouchedTasks = BTreeMap<Fence, Option<Held>>;

#[derive(Debug)]
pub(super) struct Touched {
    /// The last numbers assigned when the group began.
    numbers: Numbers,
    /// Runs, with their tasks that were added, closed, claimed or removed. For a removed task this is the only copy of
    /// how far its lease had been extended.
    runs: BTreeMap<RunId, TouchedTasks>,
    rules: Vec<(Namespace, DocumentKey)>,
    buckets: BTreeSet<BucketKey>,
    /// The previous values of `WriterCache::forgotten`.
    forgotten: BTreeMap<Namespace, Option<i64>>,
}

/// The same as stored on disk.
struct OnDisk {
    runs: Vec<(RunId, TouchedTasks, Option<RunOnDisk>)>,
    rules: Vec<(Namespace, DocumentKey, Option<Value>)>,
    buckets: Vec<(BucketKey, Option<Bucket>)>,
}

struct RunOnDisk {
    ns: Namespace,
    flow: String,
    paused: bool,
    memo: u64,
    tasks: Vec<TaskOnDisk>,
}

struct TaskOnDisk {
    task: Task,
    place: u64,
    queued_at: Millis,
    start_by: Option<Millis>,
    closed: bool,
    held: Option<Held>,
}

impl Touched {
    pub fn new(numbers: Numbers) -> Touched {
        Touched {
            numbers,
            runs: BTreeMap::new(),
            rules: Vec::new(),
            buckets: BTreeSet::new(),
            forgotten: BTreeMap::new(),
        }
    }

    pub fn run(&mut self, run: RunId) {
        self.runs.entry(run).or_default();
    }

    pub fn task(&mut self, run: RunId, fence: Fence) {
        self.runs.entry(run).or_default().entry(fence).or_default();
    }

    pub fn removed(&mut self, run: RunId, fence: Fence, held: Option<&Held>) {
        *self.runs.entry(run).or_default().entry(fence).or_default() = held.cloned();
    }

    pub fn document(&mut self, ns: &Namespace, key: &DocumentKey) {
        if [kind::QUEUE, kind::LIMIT].contains(&key.kind.as_str()) {
            self.rules.push((ns.clone(), key.clone()));
        }
    }

    pub fn bucket(&mut self, key: &BucketKey) {
        self.buckets.insert(key.clone());
    }

    pub fn forgotten(&mut self, ns: &Namespace, before: Option<i64>) {
        self.forgotten.entry(ns.clone()).or_insert(before);
    }

    /// Restores memory from disk after the transaction was rolled back. The mirror is not locked while reading.
    pub fn take_back(mut self, conn: &Connection, cache: &mut WriterCache, shared: &Shared) -> SqliteResult<()> {
        cache.set_numbers(self.numbers);
        for (run, fences) in &self.runs {
            cache.forget(*run);
            fences.keys().for_each(|fence| cache.drop_body(*run, *fence));
        }
        for (ns, before) in std::mem::take(&mut self.forgotten) {
            match before {
                Some(before) => cache.forgotten.insert(ns, before),
                None => cache.forgotten.remove(&ns),
            };
        }
        let spent = shared.tasks().queues.take_spent();
        self.buckets.extend(spent.into_iter().map(|(key, _)| key));
        let found = self.read(conn)?;
        found.put_into(&mut shared.tasks().queues, shared.time.now());
        Ok(())
    }

    fn read(self, conn: &Connection) -> SqliteResult<OnDisk> {
        let mut found = OnDisk { runs: Vec::new(), rules: Vec::new(), buckets: Vec::new() };
        for (run, fences) in self.runs {
            let of_run = read_run(conn, run, fences.keys())?;
            found.runs.push((run, fences, of_run));
        }
        for (ns, key) in self.rules {
            let rules = restore::rules(conn, &ns, &key)?;
            found.rules.push((ns, key, rules));
        }
        for key in self.buckets {
            let bucket = restore::bucket(conn, &key)?;
            found.buckets.push((key, bucket));
        }
        Ok(found)
    }
}

impl OnDisk {
    fn put_into(self, queues: &mut TaskQueues, now: Millis) {
        for (ns, key, rules) in &self.rules {
            queues.set_rules(ns, key, rules.as_ref());
        }
        for (key, bucket) in self.buckets {
            match bucket {
                Some(bucket) => queues.set_bucket(key, bucket),
                None => queues.drop_bucket(&key),
            }
        }
        for (run, fences, on_disk) in self.runs {
            let (mut known, mut starts) = (BTreeMap::new(), BTreeMap::new());
            for (fence, removed) in fences {
                starts.extend(queues.start_by(run, fence).map(|by| (fence, by)));
                known.extend(queues.held(run, fence).cloned().or(removed).map(|held| (fence, held)));
                queues.remove(run, fence);
            }
            if let Some(on_disk) = on_disk {
                on_disk.put_into(queues, run, &known, &starts, now);
            }
            queues.forget_idle(run);
        }
    }
}

impl RunOnDisk {
    fn put_into(
        self,
        queues: &mut TaskQueues,
        run: RunId,
        known: &BTreeMap<Fence, Held>,
        starts: &BTreeMap<Fence, Millis>,
        now: Millis,
    ) {
        if self.tasks.is_empty() && !queues.knows(run) {
            return;
        }
        queues.set_run(&self.ns, run, &self.flow, self.paused, self.memo);
        for TaskOnDisk { task, place, queued_at, start_by, closed, held } in self.tasks {
            let held = held.map(|held| match known.get(&task.fence) {
                // Extensions are only in memory.
                Some(known) if known.request == held.request && known.since == held.since => known.clone(),
                // Another claim, unknown in memory: it gets its full time.
                _ => Held { lease_until: held.lease_until.max(now + held.lease_ms), ..held },
            });
            // So are credits for time without service.
            let start_by = start_by.map(|by| starts.get(&task.fence).map_or(by, |known| by.max(*known)));
            queues.add(run, Queued { task: &task, queued_at, place, start_by, closed, held });
        }
    }
}

fn read_run<'f>(
    conn: &Connection,
    run: RunId,
    fences: impl Iterator<Item = &'f Fence>,
) -> SqliteResult<Option<RunOnDisk>> {
    let mut statement = conn.prepare_cached("SELECT position, ns, flow, paused, memo FROM runs WHERE id = ?1")?;
    let found = statement.query_row([run.0.as_bytes()], |row| {
        let ns = Namespace::new(&row.get::<_, String>(1)?);
        let memo = row.get::<_, i64>(4)? as u64;
        let of_run = RunOnDisk { ns, flow: row.get(2)?, paused: row.get(3)?, memo, tasks: Vec::new() };
        Ok((row.get::<_, i64>(0)?, of_run))
    });
    let Some((position, mut of_run)) = found.optional()? else { return Ok(None) };
    for fence in fences {
        of_run.tasks.extend(read_task(conn, run, key_of(position, fence.0))?);
    }
    Ok(Some(of_run))
}

fn read_task(conn: &Connection, run: RunId, key: i64) -> SqliteResult<Option<TaskOnDisk>> {
    let mut statement =
        conn.prepare_cached(&format!("SELECT place, queued_at, closed, crc, body, {HELD} FROM tasks WHERE key = ?1"))?;
    let mut rows = statement.query(params![key])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let task: Task = body::read(row, 3, &[key], || name(run, key))?;
    let (place, queued_at, held) = (row.get::<_, i64>(0)? as u64, row.get(1)?, held(row, 5)?);
    let start_by = restore::start_by(&task, queued_at, held.is_some(), row.get("deadline")?);
    Ok(Some(TaskOnDisk { task, place, queued_at, start_by, closed: row.get(2)?, held }))
}
