//! A fair queue of runs: namespaces take turns, so that one with many runs does not delay the others.

use std::collections::VecDeque;

use eddyline_machine::RunId;
use eddyline_store::{Map, Namespace};

/// How many empty queues are kept for reuse.
const MOST_IDLE: usize = 64;

/// A queue of runs for each namespace. Runs whose namespace is not yet known share one queue.
#[derive(Debug, Default)]
pub(super) struct Turns {
    queues: Map<Option<Namespace>, VecDeque<RunId>>,
    /// Namespaces with waiting runs; the first one is next.
    order: VecDeque<Option<Namespace>>,
    len: usize,
}

impl Turns {
    pub fn push(&mut self, ns: Option<Namespace>, run: RunId) {
        self.len += 1;
        match self.queues.get_mut(&ns) {
            Some(queue) => {
                if queue.is_empty() {
                    self.order.push_back(ns);
                }
                queue.push_back(run);
            }
            None => {
                self.order.push_back(ns.clone());
                self.queues.insert(ns, VecDeque::from([run]));
            }
        }
    }

    pub fn pop(&mut self) -> Option<RunId> {
        let ns = self.order.pop_front()?;
        let queue = self.queues.get_mut(&ns)?;
        let run = queue.pop_front()?;
        self.len -= 1;
        if !queue.is_empty() {
            self.order.push_back(ns);
        } else if self.queues.len() > MOST_IDLE {
            self.queues.remove(&ns);
        }
        Some(run)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_namespace_with_many_runs_keeps_no_other_waiting() {
        let (busy, quiet) = (Some(Namespace::new("busy")), Some(Namespace::new("quiet")));
        let run = |n: u128| RunId(Uuid::from_u128(n));
        let mut turns = Turns::default();
        (0..100).for_each(|n| turns.push(busy.clone(), run(n)));
        assert_eq!(turns.pop(), Some(run(0)));
        turns.push(quiet.clone(), run(1_000));
        turns.push(None, run(2_000));
        let next: Vec<_> = std::iter::from_fn(|| turns.pop()).take(4).collect();
        assert_eq!(next, [run(1), run(1_000), run(2_000), run(2)]);
        assert_eq!(std::iter::from_fn(|| turns.pop()).count(), 97);
        assert!(turns.is_empty() && turns.pop().is_none());
    }
}
