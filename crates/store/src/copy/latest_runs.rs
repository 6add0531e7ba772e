//! State of the latest runs that a target needs for the rows that follow them.

use std::collections::{HashMap, VecDeque};

use eddyline_machine::RunId;

use super::RUNS_TOGETHER;

/// Bounded: a source yields the rows of a run before this many other runs.
#[derive(Debug)]
pub(crate) struct LatestRuns<T> {
    known: HashMap<RunId, T>,
    order: VecDeque<RunId>,
}

impl<T> Default for LatestRuns<T> {
    fn default() -> LatestRuns<T> {
        LatestRuns { known: HashMap::new(), order: VecDeque::new() }
    }
}

impl<T> LatestRuns<T> {
    pub fn insert(&mut self, run: RunId, what: T) {
        if self.order.len() >= RUNS_TOGETHER
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        self.order.push_back(run);
        self.known.insert(run, what);
    }

    pub fn get(&self, run: RunId) -> Option<&T> {
        self.known.get(&run)
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn only_the_latest_runs_are_kept() {
        let (run, mut runs) = (|n: usize| RunId(Uuid::from_u128(n as u128)), LatestRuns::default());
        for n in 0..RUNS_TOGETHER * 3 {
            runs.insert(run(n), n);
        }
        let known = |n: usize| runs.get(run(n)).copied();
        assert_eq!(known(RUNS_TOGETHER * 2), Some(RUNS_TOGETHER * 2));
        assert_eq!((known(RUNS_TOGETHER * 2 - 1), known(0)), (None, None));
        assert_eq!(runs.known.len(), RUNS_TOGETHER);
    }
}
