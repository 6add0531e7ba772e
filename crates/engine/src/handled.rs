//! The runs that are being decided right now: noted in the store in case the process dies, and watched in case a
//! decision hangs.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use eddyline_machine::RunId;
use eddyline_store::{Handling, Store};

/// How often the watchdog checks for hanging decisions.
const LOOK: Duration = Duration::from_secs(1);

pub(crate) struct Handled {
    store: Arc<dyn Store>,
    /// Never locked while the note is written, which may take long on a bad disk. Only the committer writes notes, so
    /// the newest one is written last.
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    handling: Handling,
    /// A number for the batch and for each run that is decided on another thread, by which the watchdog recognises
    /// decisions that it saw before.
    batch: u64,
    apart: Vec<u64>,
    last: u64,
}

impl Handled {
    pub fn new(store: Arc<dyn Store>) -> Handled {
        Handled { store, now: Mutex::default() }
    }

    /// The committer begins to decide these runs, one after the other.
    pub fn begin(&self, runs: &[RunId]) {
        self.note(|now| {
            now.handling.batch.extend(runs);
            now.last += 1;
            now.batch = now.last;
        });
    }

    /// The committer has decided them.
    pub fn end(&self) {
        self.note(|now| now.handling.batch.clear());
    }

    /// A run is going to be decided on another thread.
    pub fn begin_apart(&self, run: RunId) {
        self.note(|now| {
            now.last += 1;
            now.handling.apart.push(run);
            now.apart.push(now.last);
        });
    }

    /// The other thread has decided the run. That thread must not wait for the disk, so the committer updates the note
    /// later ([`Handled::refresh_note`]). If the process dies before that, the run is suspected without cause.
    pub fn end_apart(&self, run: RunId) {
        let mut now = self.now();
        if let Some(at) = now.handling.apart.iter().position(|apart| *apart == run) {
            now.handling.apart.remove(at);
            now.apart.remove(at);
        }
    }

    pub fn refresh_note(&self) {
        self.note(|_| {});
    }

    fn note(&self, change: impl FnOnce(&mut Now)) {
        let handling = {
            let mut now = self.now();
            change(&mut now);
            now.handling.clone()
        };
        self.store.note_handling(&handling);
    }

    /// The decisions in progress, each with the runs that it may be about.
    fn under_way(&self) -> Vec<(u64, Vec<RunId>)> {
        let now = self.now();
        let apart = now.apart.iter().zip(&now.handling.apart).map(|(number, run)| (*number, vec![*run]));
        let batch = (!now.handling.batch.is_empty()).then(|| (now.batch, now.handling.batch.clone()));
        apart.chain(batch).collect()
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the watchdog thread, which ends when `handled` is dropped. It counts checks rather than time: for a process
/// that was suspended for an hour, a decision has hung for one check.
pub(crate) fn watch(handled: &Arc<Handled>, looks: u32, on_hang: impl FnOnce(&str) + Send + 'static) {
    let watched = Arc::downgrade(handled);
    let thread = std::thread::Builder::new().name("eddyline-watchdog".to_owned());
    let spawned = thread.spawn(move || {
        let mut seen: BTreeMap<u64, u32> = BTreeMap::new();
        loop {
            std::thread::sleep(LOOK);
            let Some(handled) = watched.upgrade() else { return };
            let under_way = handled.under_way();
            drop(handled);
            seen.retain(|number, _| under_way.iter().any(|(still, _)| still == number));
            for (number, runs) in under_way {
                let count = seen.entry(number).or_default();
                *count += 1;
                if *count > looks {
                    let runs: Vec<String> = runs.iter().map(RunId::to_string).collect();
                    return on_hang(&format!("a decision has hung for {looks} s on run {}", runs.join(" or ")));
                }
            }
        }
    });
    if let Err(error) = spawned {
        tracing::error!("could not start the watchdog for hanging decisions: {error}");
    }
}
