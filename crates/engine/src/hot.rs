//! Runs in memory, so that a decision needs no reads. Never the truth: a commit checks the version.

use std::collections::BTreeMap;
use std::sync::Arc;

use eddyline_machine::{Run, RunId, Transition};
use eddyline_store::{Map, Namespace};

use crate::flows::Registered;

/// Payloads of one run that are kept at hand.
const VALUES_AT_HAND: usize = 256;

/// A run at the version that it had when it was loaded or last committed.
#[derive(Debug)]
pub(crate) struct Hot {
    pub ns: Namespace,
    pub flow: Arc<Registered>,
    pub run: Run,
}

impl Hot {
    pub fn apply(&mut self, transition: &Transition) {
        self.run.apply(transition, &self.flow.flow);
        if self.run.values.len() > VALUES_AT_HAND {
            self.run.values.clear();
        }
    }

    fn weight(&self) -> usize {
        self.run.activations.len() + 1
    }
}

/// Hot runs up to a bound; those that were not used for longest go first.
#[derive(Debug)]
pub(crate) struct HotRuns {
    runs: Map<RunId, (u64, usize, Hot)>,
    by_use: BTreeMap<u64, RunId>,
    uses: u64,
    weight: usize,
    max_runs: usize,
    max_weight: usize,
}

impl HotRuns {
    pub fn new(max_runs: usize, max_weight: usize) -> HotRuns {
        HotRuns { runs: Map::default(), by_use: BTreeMap::new(), uses: 0, weight: 0, max_runs, max_weight }
    }

    pub fn get(&self, run: RunId) -> Option<&Hot> {
        self.runs.get(&run).map(|(_, _, hot)| hot)
    }

    /// Takes it out, to put it back changed.
    pub fn take(&mut self, run: RunId) -> Option<Hot> {
        let (at, weight, hot) = self.runs.remove(&run)?;
        self.by_use.remove(&at);
        self.weight -= weight;
        Some(hot)
    }

    pub fn put(&mut self, hot: Hot) {
        let run = hot.run.header.run;
        self.take(run);
        self.uses += 1;
        let weight = hot.weight();
        self.weight += weight;
        self.by_use.insert(self.uses, run);
        self.runs.insert(run, (self.uses, weight, hot));
        while (self.runs.len() > self.max_runs || self.weight > self.max_weight) && self.runs.len() > 1 {
            let Some((_, oldest)) = self.by_use.first_key_value() else { return };
            let oldest = *oldest;
            self.take(oldest);
        }
    }
}
