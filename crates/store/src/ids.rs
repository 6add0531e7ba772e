//! `Namespace`, and the map type for hot lookups.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// For lookups on every commit: hashes in a fraction of the time of the standard map. Randomly seeded, because keys
/// come from clients.
pub type Map<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// A tenant. Every row and key belongs to one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Namespace(Arc<str>);

impl Namespace {
    pub fn new(name: &str) -> Namespace {
        Namespace(Arc::from(name))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Namespace {
    fn default() -> Namespace {
        Namespace::new("default")
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
