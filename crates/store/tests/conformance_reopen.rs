//! The cases that reopen a store, against a memory store that keeps everything: the suite must not require a store to
//! forget anything when it is reopened.

use std::sync::Arc;

use async_trait::async_trait;
use eddyline_store::conformance::{Backend, cases, random_histories};
use eddyline_store::{ManualClock, Memory, Store};

struct Staying;

#[async_trait]
impl Backend for Staying {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        Arc::new(Memory::with_clock(clock))
    }

    async fn reopen(&self, store: Arc<dyn Store>, _: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        Some(store)
    }

    /// It was never closed, so no time was lost.
    fn keeps_leases(&self) -> bool {
        true
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_stays_passes() {
    for case in cases() {
        println!("{}", case.name);
        case.check(&Staying).await;
    }
}

#[test]
fn a_store_that_stays_passes_random_histories() {
    random_histories(&Staying);
}
