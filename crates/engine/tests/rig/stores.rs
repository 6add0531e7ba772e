//! The stores of a test's engines: one in memory, or a new one where the environment says.

use std::sync::{Arc, OnceLock};

use eddyline_store::{Memory, Postgres, PostgresOptions, Store};
use tokio::runtime::{Builder, Runtime};
use uuid::Uuid;

/// With `EDDYLINE_TEST_STORE`, a PostgreSQL URL without parameters of ours, a new schema of that database, opened by each
/// of `EDDYLINE_TEST_ENGINES` engines (1 if not set). The schema stays.
pub fn open() -> Vec<Arc<dyn Store>> {
    let Ok(url) = std::env::var("EDDYLINE_TEST_STORE") else { return vec![Arc::new(Memory::new())] };
    let engines = std::env::var("EDDYLINE_TEST_ENGINES").map_or(1, |engines| engines.parse().unwrap());
    let between = if url.contains('?') { '&' } else { '?' };
    let url = format!("{url}{between}schema=engine_{}", Uuid::new_v4().simple());
    (0..engines).map(|_| connect(url.clone())).collect()
}

/// Opened on a runtime that outlives that of the test, whose clock may be the test's.
fn connect(url: String) -> Arc<dyn Store> {
    static CONNECTIONS: OnceLock<Runtime> = OnceLock::new();
    let runtime =
        CONNECTIONS.get_or_init(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap());
    let opening = std::thread::spawn(move || runtime.block_on(Postgres::open(&url, PostgresOptions::default())));
    Arc::new(opening.join().unwrap().unwrap())
}
