//! A cache of folded timelines. Records never change, so a cached view stays valid: the caller only folds newer records
//! into it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_machine::RunId;
use eddyline_machine::view::RunView;

/// The size of the cache. The least recently used views are evicted.
const MAX_BYTES: usize = 32 << 20;
/// The estimated memory of a view, of each of its steps and of each attempt.
const VIEW_BYTES: usize = 4 << 10;
const STEP_BYTES: usize = 512;
const ATTEMPT_BYTES: usize = 512;

#[derive(Debug)]
pub(crate) struct ViewCache {
    most_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_run: HashMap<RunId, View>,
    bytes: usize,
    /// Numbers uses, to order them.
    uses: u64,
}

#[derive(Debug)]
struct View {
    /// The number of the last record in it.
    at: u64,
    view: Arc<RunView>,
    bytes: usize,
    used: u64,
}

impl Default for ViewCache {
    fn default() -> ViewCache {
        ViewCache { most_bytes: MAX_BYTES, kept: Mutex::default() }
    }
}

impl ViewCache {
    /// The cached view of a run (empty if there is none), and the number of the last record in it.
    pub fn find(&self, run: RunId) -> (Arc<RunView>, u64) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        let used = kept.uses;
        kept.by_run.get_mut(&run).map_or_else(Default::default, |known| {
            known.used = used;
            (known.view.clone(), known.at)
        })
    }

    pub fn keep(&self, run: RunId, view: &Arc<RunView>, at: u64) {
        let bytes = bytes(view);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > self.most_bytes || kept.by_run.get(&run).is_some_and(|known| known.at >= at) {
            return;
        }
        kept.uses += 1;
        let known = View { at, view: view.clone(), bytes, used: kept.uses };
        kept.bytes += bytes;
        kept.bytes -= kept.by_run.insert(run, known).map_or(0, |before| before.bytes);
        while kept.bytes > self.most_bytes {
            let oldest = kept.by_run.iter().min_by_key(|(_, known)| known.used).map(|(run, _)| *run);
            let dropped = oldest.and_then(|run| kept.by_run.remove(&run));
            kept.bytes -= dropped.map_or(kept.bytes, |dropped| dropped.bytes);
        }
    }
}

fn bytes(view: &RunView) -> usize {
    let attempts: usize = view.steps().values().map(|step| step.attempts.len()).sum();
    VIEW_BYTES + STEP_BYTES * view.steps().len() + ATTEMPT_BYTES * attempts
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_newest_view_of_a_run_is_kept_within_a_bound_in_bytes() {
        let run = |n| RunId(Uuid::from_u128(n));
        let cache = ViewCache { most_bytes: 3 * VIEW_BYTES, kept: Mutex::default() };
        let at = |n| cache.find(run(n)).1;
        assert_eq!(at(1), 0);
        cache.keep(run(1), &Arc::default(), 5);
        cache.keep(run(1), &Arc::default(), 3);
        assert_eq!(at(1), 5);
        for n in 2..=3 {
            cache.keep(run(n), &Arc::default(), 1);
        }
        assert_eq!(at(1), 5);
        cache.keep(run(4), &Arc::default(), 1);
        assert_eq!(
            [at(1), at(2), at(3), at(4)],
            [5, 0, 1, 1],
            "the one that was not used for the longest time is gone"
        );
        assert_eq!(cache.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes, 3 * VIEW_BYTES);
    }
}
