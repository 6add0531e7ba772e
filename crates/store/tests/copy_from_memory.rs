//! The suite, and random histories, on stores that are copied whenever they are opened again: from memory to a directory, to
//! PostgreSQL and to a directory. What can be read is the same, and what was begun goes on.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod copied;
#[path = "postgres/server.rs"]
mod server;

use std::sync::Arc;

use copied::{Movers, Place, check_cases};
use eddyline_store::conformance::random_histories;
use eddyline_store::{ManualClock, Memory};

fn in_memory(clock: Arc<ManualClock>) -> Place {
    Place::Memory(Arc::new(Memory::with_clock(clock)))
}

fn over_postgres(from: &Place) -> Vec<Place> {
    match from {
        Place::Memory(_) => vec![Place::directory(), Place::postgres(), Place::directory()],
        _ => vec![Place::postgres(), Place::directory()],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_begun_in_memory_goes_on_after_three_copies() {
    check_cases(&Movers::new(in_memory, over_postgres), |_| true).await;
}

#[test]
fn random_histories_that_are_copied_go_on() {
    random_histories(&Movers::new(in_memory, over_postgres));
}
