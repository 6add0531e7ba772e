//! The conformance suite against the memory store.

use std::sync::Arc;

use async_trait::async_trait;
use eddyline_store::conformance::Backend;
use eddyline_store::{ManualClock, Memory, Store};

struct InMemory;

#[async_trait]
impl Backend for InMemory {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        Arc::new(Memory::with_clock(clock))
    }

    async fn reopen(&self, _: Arc<dyn Store>, _: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        None
    }
}

eddyline_store::conformance_tests!(InMemory);
