//! A cache of parsed definitions, bounded in bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use eddyline_store::Namespace;

use crate::flows::Registered;

/// A version of a flow in a namespace.
pub(crate) type FlowKey = (Namespace, String);

/// Evicts the least recently used flow.
#[derive(Debug)]
pub(crate) struct FlowCache {
    budget: usize,
    bytes: usize,
    flows: HashMap<FlowKey, Cached>,
    /// In the order of their last use.
    by_use: BTreeMap<u64, FlowKey>,
    uses: u64,
}

#[derive(Debug)]
struct Cached {
    flow: Arc<Registered>,
    bytes: usize,
    used: u64,
}

impl FlowCache {
    pub fn new(budget: usize) -> FlowCache {
        FlowCache { budget, bytes: 0, flows: HashMap::new(), by_use: BTreeMap::new(), uses: 0 }
    }

    pub fn get(&mut self, key: &FlowKey) -> Option<Arc<Registered>> {
        let cached = self.flows.get_mut(key)?;
        if let Some(key) = self.by_use.remove(&cached.used) {
            self.uses += 1;
            cached.used = self.uses;
            self.by_use.insert(self.uses, key);
        }
        Some(cached.flow.clone())
    }

    pub fn put(&mut self, key: FlowKey, flow: Arc<Registered>) {
        self.remove(&key);
        let bytes = flow.bytes();
        self.uses += 1;
        self.bytes += bytes;
        self.by_use.insert(self.uses, key.clone());
        self.flows.insert(key, Cached { flow, bytes, used: self.uses });
        // The newest always stays: the caller is about to use it.
        while self.bytes > self.budget
            && self.flows.len() > 1
            && let Some((_, oldest)) = self.by_use.first_key_value()
        {
            let oldest = oldest.clone();
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &FlowKey) {
        if let Some(cached) = self.flows.remove(key) {
            self.bytes -= cached.bytes;
            self.by_use.remove(&cached.used);
        }
    }

    #[cfg(test)]
    fn holds(&self) -> Vec<&str> {
        self.by_use.values().map(|(_, version)| version.as_str()).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::parse_definition;

    fn flow(name: &str) -> (FlowKey, Arc<Registered>) {
        let text = format!("{{name: {name}, steps: {{a: {{set: {}}}}}}}", "x".repeat(10_000));
        let flow = Arc::new(Registered::new(parse_definition(None, &text).unwrap().flow));
        ((Namespace::default(), name.to_owned()), flow)
    }

    #[test]
    fn the_flow_that_was_not_used_for_the_longest_time_is_evicted_when_the_bytes_are_used_up() {
        let (a, one) = flow("a");
        let each = one.bytes();
        assert!(each >= 10_000, "{each}");
        let mut cache = FlowCache::new(3 * each + each / 2);
        cache.put(a.clone(), one);
        for name in ["b", "c"] {
            let (key, flow) = flow(name);
            cache.put(key, flow);
        }
        assert!(cache.get(&a).is_some());
        let (key, d) = flow("d");
        cache.put(key, d);
        assert_eq!(cache.holds(), ["c", "a", "d"]);
        assert!(cache.bytes <= cache.budget);
    }

    #[test]
    fn a_flow_that_is_larger_than_the_budget_is_kept_alone() {
        let mut cache = FlowCache::new(10);
        for name in ["a", "b"] {
            let (key, flow) = flow(name);
            cache.put(key, flow);
        }
        assert_eq!(cache.holds(), ["b"]);
        let (key, flow) = flow("b");
        cache.put(key, flow.clone());
        assert_eq!((cache.holds(), cache.bytes), (vec!["b"], flow.bytes()), "the same again counts once");
    }
}
