//! The number of tasks each worker holds.

use crate::ids::{Map, Namespace};

#[derive(Debug, Default)]
pub(super) struct HeldBy {
    counts: Map<Namespace, Map<String, usize>>,
}

impl HeldBy {
    pub fn count(&self, ns: &Namespace, worker: &str) -> usize {
        self.counts.get(ns).and_then(|workers| workers.get(worker)).copied().unwrap_or(0)
    }

    pub fn add(&mut self, ns: &Namespace, worker: &str) {
        if !self.counts.contains_key(ns) {
            self.counts.insert(ns.clone(), Map::default());
        }
        let Some(workers) = self.counts.get_mut(ns) else { return };
        match workers.get_mut(worker) {
            Some(count) => *count += 1,
            None => {
                workers.insert(worker.to_owned(), 1);
            }
        }
    }

    /// Drops workers without tasks: every worker process has a new name, so they would accumulate.
    pub fn remove(&mut self, ns: &Namespace, worker: &str) {
        let Some(workers) = self.counts.get_mut(ns) else { return };
        let Some(count) = workers.get_mut(worker) else { return };
        *count -= 1;
        if *count == 0 {
            workers.remove(worker);
        }
        if workers.is_empty() {
            self.counts.remove(ns);
        }
    }
}
