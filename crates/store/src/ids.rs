//! Names.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

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
