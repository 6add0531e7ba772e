//! What a group has changed in memory. A group that could not be written is taken back by reading just this from the
//! disk again: that costs as much as the group, however much is queued.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::{Fence, Millis, RunId, Task};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;

use super::body;
use super::claims::{HELD, held, name};
use super::kept::{Kept, Numbers};
use super::restore;
use super::schema::key_of;
use super::shared::Shared;
use super::trouble::Outcome;
use crate::claim::Held;
use crate::document::{DocumentKey, kind};
use crate::ids::Namespace;
use crate::lines::{Bucket, BucketKey, Lines, Queued};

/// Tasks of a run by their fences, each with what was known of its claim when it was removed.
type Tasks = BTreeMap<Fence, Option<Held>>;

#[derive(Debug)]
pub(super) struct Touched {
    /// The numbers that were given out last when the group began.
    numbers: Numbers,
    /// Runs, with those of their tasks that were added, closed, claimed or removed; how far the lease of one that was
    /// removed had been extended is known from nowhere else.
    runs: BTreeMap<RunId, Tasks>,
    rules: Vec<(Namespace, DocumentKey)>,
    buckets: BTreeSet<BucketKey>,
    /// Up to where events were gone before.
    forgotten: BTreeMap<Namespace, Option<i64>>,
}

/// The same as it is on disk.
struct OnDisk {
    runs: Vec<(RunId, Tasks, Option<RunOnDisk>)>,
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

    /// Makes memory what the disk says, after the transaction was rolled back. Nobody waits while it is read.
    pub fn take_back(mut self, conn: &Connection, kept: &mut Kept, shared: &Shared) -> Outcome<()> {
        kept.set_numbers(self.numbers);
        for (run, fences) in &self.runs {
            kept.forget(*run);
            fences.keys().for_each(|fence| kept.drop_body(*run, *fence));
        }
        for (ns, before) in std::mem::take(&mut self.forgotten) {
            match before {
                Some(before) => kept.forgotten.insert(ns, before),
                None => kept.forgotten.remove(&ns),
            };
        }
        let spent = shared.tasks().lines.take_spent();
        self.buckets.extend(spent.into_iter().map(|(key, _)| key));
        let found = self.read(conn)?;
        found.put_into(&mut shared.tasks().lines, shared.time.now());
        Ok(())
    }

    fn read(self, conn: &Connection) -> Outcome<OnDisk> {
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
    fn put_into(self, lines: &mut Lines, now: Millis) {
        for (ns, key, rules) in &self.rules {
            lines.set_rules(ns, key, rules.as_ref());
        }
        for (key, bucket) in self.buckets {
            match bucket {
                Some(bucket) => lines.set_bucket(key, bucket),
                None => lines.drop_bucket(&key),
            }
        }
        for (run, fences, on_disk) in self.runs {
            let (mut known, mut starts) = (BTreeMap::new(), BTreeMap::new());
            for (fence, removed) in fences {
                starts.extend(lines.start_by(run, fence).map(|by| (fence, by)));
                known.extend(lines.held(run, fence).cloned().or(removed).map(|held| (fence, held)));
                lines.remove(run, fence);
            }
            if let Some(on_disk) = on_disk {
                on_disk.put_into(lines, run, &known, &starts, now);
            }
            lines.forget_idle(run);
        }
    }
}

impl RunOnDisk {
    fn put_into(
        self,
        lines: &mut Lines,
        run: RunId,
        known: &BTreeMap<Fence, Held>,
        starts: &BTreeMap<Fence, Millis>,
        now: Millis,
    ) {
        if self.tasks.is_empty() && !lines.knows(run) {
            return;
        }
        lines.set_run(&self.ns, run, &self.flow, self.paused, self.memo);
        for TaskOnDisk { task, place, queued_at, start_by, closed, held } in self.tasks {
            let held = held.map(|held| match known.get(&task.fence) {
                // How far it was extended is known only in memory.
                Some(known) if known.request == held.request && known.since == held.since => known.clone(),
                // It is another claim, of which nothing is known: it gets its full time.
                _ => Held { lease_until: held.lease_until.max(now + held.lease_ms), ..held },
            });
            // What was added to it while nobody served is known only in memory, too.
            let start_by = start_by.map(|by| starts.get(&task.fence).map_or(by, |known| by.max(*known)));
            lines.add(run, Queued { task: &task, queued_at, place, start_by, closed, held });
        }
    }
}

fn read_run<'f>(conn: &Connection, run: RunId, fences: impl Iterator<Item = &'f Fence>) -> Outcome<Option<RunOnDisk>> {
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

fn read_task(conn: &Connection, run: RunId, key: i64) -> Outcome<Option<TaskOnDisk>> {
    let mut statement =
        conn.prepare_cached(&format!("SELECT place, queued_at, closed, crc, body, {HELD} FROM tasks WHERE key = ?1"))?;
    let mut rows = statement.query(params![key])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let task: Task = body::read(row, 3, &[key], || name(run, key))?;
    let (place, queued_at, held) = (row.get::<_, i64>(0)? as u64, row.get(1)?, held(row, 5)?);
    let start_by = restore::start_by(&task, queued_at, held.is_some(), row.get("deadline")?);
    Ok(Some(TaskOnDisk { task, place, queued_at, start_by, closed: row.get(2)?, held }))
}
