//! Each namespace's share of a common resource.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use eddyline_store::Namespace;
use tokio::sync::Semaphore;

/// One semaphore per namespace, each with the same number of permits.
#[derive(Debug)]
pub(crate) struct Shares {
    permits: usize,
    /// Dropped when no permit is in use.
    by_namespace: Mutex<HashMap<Namespace, Weak<Semaphore>>>,
}

impl Shares {
    pub fn new(permits: usize) -> Shares {
        Shares { permits, by_namespace: Mutex::default() }
    }

    pub fn permits(&self) -> usize {
        self.permits
    }

    pub fn of(&self, ns: &Namespace) -> Arc<Semaphore> {
        let mut shares = self.by_namespace.lock().unwrap_or_else(PoisonError::into_inner);
        shares.get(ns).and_then(Weak::upgrade).unwrap_or_else(|| {
            shares.retain(|_, share| share.strong_count() > 0);
            let share = Arc::new(Semaphore::new(self.permits));
            shares.insert(ns.clone(), Arc::downgrade(&share));
            share
        })
    }
}
