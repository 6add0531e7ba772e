//! The suite against PostgreSQL. Closing and opening again is a part of it.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "postgres/server.rs"]
mod server;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use eddyline_store::conformance::Backend;
use eddyline_store::{ManualClock, Postgres, PostgresOptions, Store};

/// Where the stores are that a case has opened.
#[derive(Default)]
struct OnServer {
    urls: Mutex<HashMap<usize, String>>,
    /// All that were made and not deleted.
    made: Mutex<Vec<String>>,
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}

impl OnServer {
    async fn open_at(&self, url: String, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let options = PostgresOptions { clock: Some(clock), ..PostgresOptions::default() };
        let store: Arc<dyn Store> = Arc::new(Postgres::open(&url, options).await.unwrap());
        self.urls.lock().unwrap().insert(address(&store), url);
        store
    }
}

impl Drop for OnServer {
    fn drop(&mut self) {
        server::drop_schemas_now(std::mem::take(&mut *self.made.lock().unwrap()));
    }
}

#[async_trait]
impl Backend for OnServer {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        // Histories come one after the other, each with a store of its own.
        let old = std::mem::take(&mut *self.made.lock().unwrap());
        if !old.is_empty() {
            server::drop_schemas(old).await;
        }
        let url = server::fresh_url();
        self.made.lock().unwrap().push(url.clone());
        self.open_at(url, clock).await
    }

    async fn reopen(&self, store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        let url = self.urls.lock().unwrap().remove(&address(&store)).unwrap();
        drop(store);
        Some(self.open_at(url, clock).await)
    }

    /// Leases are rows, and others may serve while this process is away.
    fn keeps_leases(&self) -> bool {
        true
    }
}

eddyline_store::conformance_tests!(OnServer::default());
