//! A cache of projector states. A projection is a fold over the timeline, so reading a page needs the state before its
//! first record. With the cached state from the end of the previous page, a page costs as much as the first one.
//! Records never change, so a cached state never becomes stale.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_machine::RunId;
use eddyline_machine::project::Projector;

/// The maximum size of all states. The least recently used are evicted first.
const MAX_BYTES: usize = 64 << 20;
/// The maximum number of states per run in which readers stopped: a few readers, each at its own position.
const MAX_STATES: usize = 4;
/// While folding a timeline, a checkpoint is stored about every this many records, for readers that start elsewhere.
pub(super) const CHECKPOINT_EVERY: u64 = 1_000;
/// The maximum number of checkpoints per run; they take at most half of the cache. Beyond it, checkpoints are thinned
/// out.
const MAX_CHECKPOINTS: usize = 16;
/// The maximum number of cached counts. Each is a few numbers and its filter.
const MAX_COUNTS: usize = 1_000;

/// Identifies a count: records of a run's timeline, or of one of its projections, of these kinds and that step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CountKey {
    pub run: RunId,
    pub which: Option<u8>,
    pub kinds: Vec<String>,
    pub step: Option<String>,
}

#[derive(Debug)]
pub(crate) struct ProjectionCache {
    most_bytes: usize,
    kept: Mutex<Kept>,
    /// The last counted record, and the count.
    counts: Mutex<HashMap<CountKey, (u64, u64)>>,
}

#[derive(Debug, Default)]
struct Kept {
    by_run: HashMap<RunId, Vec<State>>,
    bytes: usize,
    /// Incremented with each use, for LRU.
    uses: u64,
}

#[derive(Debug, Clone)]
struct State {
    /// The number of the last folded record.
    at: u64,
    /// Which projection was read, and the last record up to `at` that changed it: a reader beyond that record has seen
    /// everything up to `at`.
    quiet: (u8, u64),
    projector: Arc<Projector>,
    bytes: usize,
    used: u64,
    /// No reader stopped here; stored while folding.
    checkpoint: bool,
}

impl Default for ProjectionCache {
    fn default() -> ProjectionCache {
        ProjectionCache::with(MAX_BYTES)
    }
}

impl ProjectionCache {
    fn with(most_bytes: usize) -> ProjectionCache {
        ProjectionCache { most_bytes, kept: Mutex::default(), counts: Mutex::default() }
    }

    /// The best state for reading a projection after record `after`, and the number of the last record folded into it.
    pub fn resume(&self, run: RunId, which: u8, after: u64) -> (Projector, u64) {
        match self.find(run, which, after) {
            // Cloned outside of the lock.
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

    /// Caches the state in which a reader of a projection stopped. `last` is the last record that changed the
    /// projection.
    pub fn keep(&self, run: RunId, which: u8, last: u64, at: u64, projector: Projector) {
        let bytes = projector.bytes();
        if at == 0 || bytes > self.most_bytes {
            return;
        }
        let quiet = (which, last);
        self.add(run, State { at, quiet, projector: Arc::new(projector), bytes, used: 0, checkpoint: false });
    }

    /// Caches a checkpoint if enough records were folded since `since`: about as many as there are open steps, so that
    /// copying takes no longer than folding. Returns whether enough were folded.
    pub fn pass(&self, run: RunId, which: u8, last: u64, at: u64, since: u64, projector: &Projector) -> bool {
        if at < since + CHECKPOINT_EVERY || at < since + projector.open_steps() as u64 {
            return false;
        }
        let bytes = projector.bytes();
        if bytes <= self.most_bytes / 4 {
            let (quiet, projector) = ((which, last), Arc::new(projector.clone()));
            self.add(run, State { at, quiet, projector, bytes, used: 0, checkpoint: true });
        }
        true
    }

    fn add(&self, run: RunId, mut state: State) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.uses += 1;
        state.used = kept.uses;
        kept.bytes += state.bytes;
        let states = kept.by_run.entry(run).or_default();
        let replaced = |other: &State| {
            other.at == state.at
                && other.checkpoint == state.checkpoint
                && (state.checkpoint || other.quiet.0 == state.quiet.0)
        };
        let mut freed: usize = states.extract_if(.., |other| replaced(other)).map(|other| other.bytes).sum();
        states.push(state);
        let readers = (0..states.len()).filter(|at| !states[*at].checkpoint);
        if readers.clone().count() > MAX_STATES
            && let Some(oldest) = readers.min_by_key(|at| states[*at].used)
        {
            freed += states.remove(oldest).bytes;
        }
        while let Some(dispensable) = least_useful(states, self.most_bytes / 2) {
            freed += states.remove(dispensable).bytes;
        }
        kept.bytes -= freed;
        while kept.bytes > self.most_bytes {
            kept.drop_oldest();
        }
    }

    /// The last counted record, and the count.
    pub fn counted(&self, what: &CountKey) -> (u64, u64) {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).get(what).copied().unwrap_or_default()
    }

    pub fn keep_count(&self, what: CountKey, at: u64, count: u64) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if counts.len() >= MAX_COUNTS && !counts.contains_key(&what) {
            counts.clear();
        }
        counts.insert(what, (at, count));
    }
}

/// If there are too many checkpoints, the least useful one: the one with the smallest gap between its neighbours.
fn least_useful(states: &[State], most_bytes: usize) -> Option<usize> {
    let mut checkpoints: Vec<usize> = (0..states.len()).filter(|at| states[*at].checkpoint).collect();
    let bytes: usize = checkpoints.iter().map(|at| states[*at].bytes).sum();
    if checkpoints.len() <= MAX_CHECKPOINTS && bytes <= most_bytes {
        return None;
    }
    checkpoints.sort_unstable_by_key(|at| states[*at].at);
    let before = |place: usize| place.checked_sub(1).map_or(0, |before| states[checkpoints[before]].at);
    // The last one is never removed: it has no successor yet.
    let gap = |place: usize| states[checkpoints[place + 1]].at - before(place);
    let least = (0..checkpoints.len() - 1).min_by_key(|place| gap(*place)).unwrap_or(0);
    Some(checkpoints[least])
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
        // Records 91 to 100 did not change the projection.
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

    #[test]
    fn checkpoints_are_kept_on_the_way_and_thinned_out_evenly() {
        let cache = ProjectionCache::default();
        let projector = Projector::new(run(1));
        let mut since = 0;
        for at in 1..=100_000 {
            if cache.pass(run(1), STEPS, at, at, since, &projector) {
                since = at;
            }
        }
        let resumed = |after| cache.resume(run(1), OTHER, after).1;
        for after in (0..=100_000).step_by(777) {
            assert!(after - resumed(after) <= 100_000 / 4, "after {after}: {}", resumed(after));
        }
        assert_eq!(resumed(100_000), 100_000);
        let kept = cache.kept.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(kept.by_run[&run(1)].len(), MAX_CHECKPOINTS);
        assert_eq!(kept.bytes, MAX_CHECKPOINTS * projector.bytes());
    }
}
