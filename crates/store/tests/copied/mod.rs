//! A store that moves to another kind of store whenever it is opened again.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use eddyline_store::conformance::{Backend, cases};
use eddyline_store::copy::{CopyReport, CopySource, CopyTarget, copy};
use eddyline_store::*;
use tempfile::TempDir;

use crate::server;

/// Where a store is.
pub enum Place {
    Memory(Arc<Memory>),
    Directory(TempDir),
    Postgres(String),
}

impl Place {
    pub fn directory() -> Place {
        Place::Directory(tempfile::tempdir().unwrap())
    }

    pub fn postgres() -> Place {
        Place::Postgres(server::fresh_url())
    }

    pub async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        match self {
            Place::Memory(memory) => memory.clone(),
            Place::Directory(dir) => {
                Arc::new(Embedded::open(dir.path(), Options { clock, ..Options::default() }).unwrap())
            }
            Place::Postgres(url) => {
                let options = PostgresOptions { clock: Some(clock), ..PostgresOptions::default() };
                Arc::new(Postgres::open(url, options).await.unwrap())
            }
        }
    }

    pub async fn source(&self, clock: Arc<ManualClock>) -> Result<Box<dyn CopySource>> {
        let options = PostgresOptions { clock: Some(clock), ..PostgresOptions::default() };
        Ok(match self {
            Place::Memory(memory) => Box::new(Shared(memory.clone())),
            Place::Directory(dir) => Box::new(EmbeddedSource::open(dir.path())?),
            Place::Postgres(url) => Box::new(PostgresSource::open(url, options).await?),
        })
    }

    pub async fn target(&self, clock: Arc<ManualClock>) -> Result<Box<dyn CopyTarget>> {
        let options = PostgresOptions { clock: Some(clock), ..PostgresOptions::default() };
        Ok(match self {
            Place::Memory(_) => panic!("a memory store cannot be filled"),
            Place::Directory(dir) => Box::new(EmbeddedTarget::open(dir.path())?),
            Place::Postgres(url) => Box::new(PostgresTarget::open(url, options).await?),
        })
    }
}

#[derive(Debug)]
struct Shared(Arc<Memory>);

#[async_trait]
impl CopySource for Shared {
    async fn origin(&self) -> Result<copy::Origin> {
        self.0.origin().await
    }

    fn rows(&self) -> copy::Rows {
        CopySource::rows(&*self.0)
    }

    async fn check_unserved(&self) -> Result<()> {
        self.0.check_unserved().await
    }
}

/// Copies, and panics if the copy differs.
pub async fn moved(from: &Place, to: &Place, clock: &Arc<ManualClock>) -> CopyReport {
    let source = from.source(clock.clone()).await.unwrap();
    let mut target = to.target(clock.clone()).await.unwrap();
    let report = copy(&*source, &mut *target, false, &mut |_| {}).await.unwrap();
    assert!(report.is_equal(), "{report:#?}");
    report
}

/// Cases of the suite. Those that never open a store again copy nothing.
pub async fn check_cases(movers: &Movers, wanted: fn(&str) -> bool) {
    let cases: Vec<_> = cases().into_iter().filter(|case| wanted(case.name)).collect();
    assert!(cases.len() > 5);
    for case in cases {
        println!("{}", case.name);
        case.check(movers).await;
    }
}

/// Opening again is moving.
pub struct Movers {
    pub first: fn(Arc<ManualClock>) -> Place,
    /// Where it goes next, over all of them.
    pub next: fn(&Place) -> Vec<Place>,
    places: Mutex<HashMap<usize, Place>>,
    schemas: Mutex<Vec<String>>,
}

impl Movers {
    pub fn new(first: fn(Arc<ManualClock>) -> Place, next: fn(&Place) -> Vec<Place>) -> Movers {
        Movers { first, next, places: Mutex::default(), schemas: Mutex::default() }
    }

    async fn open_at(&self, place: Place, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let store = place.open(clock).await;
        if let Place::Postgres(url) = &place {
            self.schemas.lock().unwrap().push(url.clone());
        }
        self.places.lock().unwrap().insert(address(&store), place);
        store
    }
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}

impl Drop for Movers {
    fn drop(&mut self) {
        server::drop_schemas_now(std::mem::take(&mut *self.schemas.lock().unwrap()));
    }
}

#[async_trait]
impl Backend for Movers {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        // Histories come one after the other, each with a store of its own.
        let old = std::mem::take(&mut *self.schemas.lock().unwrap());
        if !old.is_empty() {
            server::drop_schemas(old).await;
        }
        self.open_at((self.first)(clock.clone()), clock).await
    }

    async fn reopen(&self, store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        let mut place = self.places.lock().unwrap().remove(&address(&store)).unwrap();
        drop(store);
        for next in (self.next)(&place) {
            let latest = place.source(clock.clone()).await.unwrap().origin().await.unwrap().latest;
            // PostgreSQL's own clock would not be behind.
            let next = if Clock::wall(&*clock) < latest { Place::directory() } else { next };
            moved(&place, &next, &clock).await;
            if let Place::Postgres(url) = &next {
                self.schemas.lock().unwrap().push(url.clone());
            }
            place = next;
        }
        Some(self.open_at(place, clock).await)
    }
}
