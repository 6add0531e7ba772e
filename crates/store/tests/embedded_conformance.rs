//! The conformance suite against the embedded store, including closing and reopening.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use eddyline_store::conformance::Backend;
use eddyline_store::{Embedded, ManualClock, Options, Store};
use tempfile::TempDir;

/// The directories of the open stores.
#[derive(Default)]
struct OnDisk {
    dirs: Mutex<HashMap<usize, TempDir>>,
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}

impl OnDisk {
    fn open_in(&self, dir: TempDir, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let options = Options { clock, ..Options::default() };
        let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path(), options).unwrap());
        self.dirs.lock().unwrap().insert(address(&store), dir);
        store
    }
}

#[async_trait]
impl Backend for OnDisk {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        self.open_in(tempfile::tempdir().unwrap(), clock)
    }

    async fn reopen(&self, store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        let dir = self.dirs.lock().unwrap().remove(&address(&store)).unwrap();
        assert_eq!(Arc::strong_count(&store), 1, "the store is still shared");
        drop(store);
        Some(self.open_in(dir, clock))
    }
}

eddyline_store::conformance_tests!(OnDisk::default());
