//! The label `namespace` of metrics.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

use eddyline_store::Namespace;

/// The most namespaces with their own label. Every label is a time series in memory for the life of the process, and
/// without keys any client can invent namespaces.
const MAX_NAMESPACES: usize = 1_000;
/// The label that all other namespaces share. No namespace can have this name.
const OTHERS: &str = "*";

static COUNTED: RwLock<BTreeSet<String>> = RwLock::new(BTreeSet::new());

pub fn namespace_label(ns: &Namespace) -> String {
    let name = ns.as_str();
    if COUNTED.read().unwrap_or_else(PoisonError::into_inner).contains(name) {
        return name.to_owned();
    }
    let mut counted = COUNTED.write().unwrap_or_else(PoisonError::into_inner);
    if counted.len() >= MAX_NAMESPACES && !counted.contains(name) {
        return OTHERS.to_owned();
    }
    counted.insert(name.to_owned());
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_beyond_the_limit_are_counted_together() {
        let label = |n: usize| namespace_label(&Namespace::new(&format!("tenant-{n}")));
        let labels: BTreeSet<String> = (0..2 * MAX_NAMESPACES).map(label).collect();
        // Other tests in this process may have added namespaces before.
        assert!(labels.len() <= MAX_NAMESPACES + 1 && labels.contains(OTHERS), "{} labels", labels.len());
        assert_eq!((label(0), label(2 * MAX_NAMESPACES)), ("tenant-0".to_owned(), OTHERS.to_owned()));
    }
}
