//! Ranks below which a queue has had no ready task lately, so that a claim need not look there.
//!
//! PostgreSQL keeps the index entries of deleted tasks as long as any transaction of the database may see them (a backup, a
//! long report), and a claim that begins with the first entry passes them all, one at a time.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use eddyline_machine::Millis;

use crate::ids::Namespace;

/// How far a mark stays behind the first task that was seen: a commit may become visible later than one with higher ranks.
const TRAIL_MS: Millis = 5_000;
/// How long marks are used before a claim looks at all tasks again: runs that are resumed bring back tasks of old ranks.
const USED_FOR: Duration = Duration::from_secs(1);
/// Beyond that, all marks are forgotten.
const MOST_QUEUES: usize = 10_000;

#[derive(Debug, Default)]
pub(super) struct LowMarks(Mutex<HashMap<(Namespace, String), Queue>>);

#[derive(Debug)]
struct Queue {
    /// When a claim last looked at all its tasks.
    looked: Instant,
    /// By class. Ranks grow within a class.
    marks: HashMap<i64, Millis>,
}

impl LowMarks {
    /// The marks of a queue, by class; none if the caller is to look at all tasks.
    pub fn of(&self, ns: &Namespace, queue: &str) -> Vec<(i64, Millis)> {
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if queues.len() >= MOST_QUEUES {
            queues.clear();
        }
        let key = (ns.clone(), queue.to_owned());
        let queue = queues.entry(key).or_insert_with(|| Queue { looked: now - USED_FOR, marks: HashMap::new() });
        if now - queue.looked >= USED_FOR {
            queue.looked = now;
            return Vec::new();
        }
        queue.marks.iter().map(|(class, mark)| (*class, *mark)).collect()
    }

    /// The first task of a class has this rank.
    pub fn learn(&self, ns: &Namespace, queue: String, class: i64, rank: Millis) {
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get_mut(&(ns.clone(), queue)) {
            queue.marks.insert(class, rank.saturating_sub(TRAIL_MS));
        }
    }

    /// The queue may have tasks of any rank.
    pub fn forget(&self, ns: &Namespace, queue: &str) {
        let mut queues = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queues.remove(&(ns.clone(), queue.to_owned()));
    }
}
