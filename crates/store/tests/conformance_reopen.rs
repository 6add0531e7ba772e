//! The parts of the suite in which a store is opened again, against a memory that stays as it is: the suite itself must
//! not expect what a store that forgets nothing does not do.

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
}

/// It was never closed, so no time was lost.
const NOT_FOR_IT: &str = "leases_have_their_full_time_when_the_store_is_opened_again";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_stays_passes() {
    for case in cases().iter().filter(|case| case.name != NOT_FOR_IT) {
        println!("{}", case.name);
        case.check(&Staying).await;
    }
}

#[test]
fn a_store_that_stays_passes_random_histories() {
    random_histories(&Staying);
}
