//! The cases of the suite that open a store again, and random histories, on a store that begins in PostgreSQL and moves at
//! that moment: to a directory, and back.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod copied;
#[path = "postgres/server.rs"]
mod server;

use copied::{Movers, Place, check_cases};
use eddyline_store::conformance::random_histories;

fn to_the_other(from: &Place) -> Vec<Place> {
    match from {
        Place::Postgres(_) => vec![Place::directory()],
        _ => vec![Place::postgres()],
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_begun_in_postgres_goes_on_in_a_directory_and_back() {
    check_cases(&Movers::new(|_| Place::postgres(), to_the_other), |name| name.contains("opened_again")).await;
}

#[test]
fn random_histories_that_are_copied_go_on() {
    random_histories(&Movers::new(|_| Place::postgres(), to_the_other));
}
