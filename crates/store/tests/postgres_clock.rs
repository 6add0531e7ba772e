//! A clock of the database that jumps.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "postgres/server.rs"]
#[allow(dead_code)]
mod server;

use std::sync::Arc;

use eddyline_store::*;

const HOUR: i64 = 60 * 60 * 1_000;
const DAY: i64 = 24 * HOUR;
const START: i64 = 1_800_000_000_000;

async fn open(url: &str, clock: &Arc<ManualClock>) -> Postgres {
    let options = PostgresOptions { clock: Some(clock.clone()), ..PostgresOptions::default() };
    Postgres::open(url, options).await.unwrap()
}

async fn check_in(store: &Postgres) {
    let info = InstanceInfo { name: "a".to_owned(), ..InstanceInfo::default() };
    store.check_in(InstanceId::default(), &info, START).await.unwrap();
}

#[tokio::test]
async fn nothing_is_deleted_by_age_in_the_hour_after_a_jump_of_more_than_a_day() {
    let url = server::fresh_url();
    let clock = ManualClock::at(START);
    let store = open(&url, &clock).await;
    assert_eq!(store.deletion_waits().await, Ok(None), "a new store has nothing to compare with");
    for _ in 0..100 {
        clock.advance(HOUR / 2);
        check_in(&store).await;
    }
    assert_eq!(store.deletion_waits().await, Ok(None), "passing time is no jump");
    clock.advance(2 * DAY);
    let jumped = store.now().await.unwrap();
    check_in(&store).await;
    assert_eq!(store.deletion_waits().await, Ok(Some(jumped + HOUR)), "noticed while it serves");
    drop(store);

    let store = open(&url, &clock).await;
    clock.advance(HOUR / 2);
    assert_eq!(store.deletion_waits().await, Ok(Some(jumped + HOUR)), "known after a restart");
    clock.advance(HOUR / 2);
    assert_eq!(store.deletion_waits().await, Ok(None), "the hour is over");
    drop(store);

    clock.advance(40 * DAY);
    let store = open(&url, &clock).await;
    let jumped = store.now().await.unwrap();
    assert_eq!(store.deletion_waits().await, Ok(Some(jumped + HOUR)), "noticed by retention itself");
}
