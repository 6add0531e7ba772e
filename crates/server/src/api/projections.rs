//! A cache of projector states. A projection is a fold of the timeline, so a page of it begins with the state before its
//! first record; with the state in which the page before ended, it costs what the first page costs. Records never change,
//! so a state is right for as long as it is kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_machine::RunId;
use eddyline_machine::project::Projector;

/// What all states may take together. Those not used for the longest time go first.
const MAX_BYTES: usize = 32 << 20;
/// States of one run: some readers, each at a place of its own.
const MAX_STATES: usize = 4;

#[derive(Debug)]
pub(crate) struct ProjectionCache {
    most_bytes: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_run: HashMap<RunId, Vec<State>>,
    bytes: usize,
    /// Counts uses, to tell which was the last.
    uses: u64,
}

#[derive(Debug, Clone)]
struct State {
    /// The number of the last record that was folded.
    at: u64,
    /// Which projection was read, and the last record up to `at` that changed it: whoever has read so far has read all.
    quiet: (u8, u64),
    projector: Arc<Projector>,
    bytes: usize,
    used: u64,
}

impl Default for ProjectionCache {
    fn default() -> ProjectionCache {
        ProjectionCache::with(MAX_BYTES)
    }
}

impl ProjectionCache {
    fn with(most_bytes: usize) -> ProjectionCache {
        ProjectionCache { most_bytes, kept: Mutex::default() }
    }

    /// The best state from which to go on reading a projection after a record, and the number of the last record in it.
    pub fn resume(&self, run: RunId, which: u8, after: u64) -> (Projector, u64) {
        match self.find(run, which, after) {
            // Copied once nobody else has to wait for it.
            Some((projector, at)) => (Projector::clone(&projector), at),
            None => (Projector::new(run), 0),
        }
    }

    fn find(&self, run: RunId, which: u8, after: u64) -> Option<(Arc<Projector>, u64)> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        let used = kept.uses;
        let states = kept.by_run.get_mut(&run)?.iter_mut();
        let fits = |state: &&mut State| state.at <= after || (state.quiet.0 == which && state.quiet.1 <= after);
        let state = states.filter(fits).max_by_key(|state| state.at)?;
        state.used = used;
        Some((state.projector.clone(), state.at))
    }

    /// Keeps the state in which a reader of a projection stopped. `last` is the last record that changed the projection.
    pub fn keep(&self, run: RunId, which: u8, last: u64, at: u64, projector: Projector) {
        let bytes = projector.bytes();
        if at == 0 || bytes > self.most_bytes {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        let state = State { at, quiet: (which, last), projector: Arc::new(projector), bytes, used: kept.uses };
        let states = kept.by_run.entry(run).or_default();
        let mut freed = 0;
        states.retain(|other| {
            let stays = other.at != at || other.quiet.0 != which;
            freed += if stays { 0 } else { other.bytes };
            stays
        });
        states.push(state);
        if states.len() > MAX_STATES
            && let Some(oldest) = (0..states.len()).min_by_key(|at| states[*at].used)
        {
            freed += states.remove(oldest).bytes;
        }
        kept.bytes = kept.bytes + bytes - freed;
        while kept.bytes > self.most_bytes {
            kept.drop_oldest();
        }
    }
}

impl Kept {
    fn drop_oldest(&mut self) {
        let oldest = self.by_run.iter().min_by_key(|(_, states)| states.iter().map(|state| state.used).max());
        let Some(run) = oldest.map(|(run, _)| *run) else {
            self.bytes = 0;
            return;
        };
        let states = self.by_run.remove(&run).unwrap_or_default();
        self.bytes -= states.iter().map(|state| state.bytes).sum::<usize>();
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const STEPS: u8 = 1;
    const OTHER: u8 = 2;

    fn run(n: u128) -> RunId {
        RunId(Uuid::from_u128(n))
    }

    #[test]
    fn a_reader_goes_on_where_the_page_before_ended() {
        let cache = ProjectionCache::default();
        let resumed = |which, after| cache.resume(run(1), which, after).1;
        assert_eq!(resumed(STEPS, 100), 0);
        // The records 91 to 100 did not change the projection.
        cache.keep(run(1), STEPS, 90, 100, Projector::new(run(1)));
        assert_eq!(
            [resumed(STEPS, 89), resumed(STEPS, 90), resumed(STEPS, 100), resumed(STEPS, 500)],
            [0, 100, 100, 100]
        );
        assert_eq!([resumed(OTHER, 90), resumed(OTHER, 100)], [0, 100]);
        cache.keep(run(1), STEPS, 200, 200, Projector::new(run(1)));
        assert_eq!([resumed(STEPS, 150), resumed(STEPS, 200)], [100, 200]);
        assert_eq!(cache.resume(run(2), STEPS, 200).1, 0);
    }

    #[test]
    fn what_is_kept_has_a_bound_in_bytes_and_in_states_of_a_run() {
        let each = Projector::new(run(1)).bytes();
        let cache = ProjectionCache::with(6 * each);
        for at in 1..=10 {
            cache.keep(run(1), STEPS, at, at, Projector::new(run(1)));
        }
        assert_eq!(cache.resume(run(1), STEPS, 6).1, 0, "only the last four");
        assert_eq!(cache.resume(run(1), STEPS, 10).1, 10);
        for n in 2..100 {
            cache.keep(run(n), STEPS, 1, 1, Projector::new(run(n)));
        }
        let kept = cache.kept.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(kept.bytes <= 6 * each && kept.by_run.len() <= 6, "{kept:?}");
        let counted: usize = kept.by_run.values().flatten().map(|state| state.bytes).sum();
        assert_eq!(kept.bytes, counted);
    }
}
