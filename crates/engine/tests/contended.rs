//! Several engines on one store change the same run at the same time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use eddyline_engine::Config;
use eddyline_machine::{Entry, RunId};
use eddyline_store::{Found, Memory, Store};
use rig::hooked::Hooked;
use rig::{Rig, done};
use serde_json::json;
use tokio::sync::Mutex;

const ITEMS: usize = 200;
/// How often a run is repeated until engines meet on it.
const ROUNDS: usize = 100;
const WIDE: &str = "name: wide\nsteps: {each: {spread: input, run: square}}\noutput: \"${steps.each.output}\"";

/// Engines on stores that share their data, with workers that report on the same run through all of them.
async fn square_everywhere(stores: Vec<Arc<dyn Store>>) -> (Vec<Rig>, RunId) {
    let mut rigs: Vec<Rig> = stores.into_iter().map(|store| Rig::on(store, Config::default())).collect();
    rigs[0].register(WIDE).await;
    for rig in &mut rigs {
        rig.work(8, |task| {
            let n = task.input.as_i64().unwrap();
            done(json!(n * n))
        });
    }
    let items: Vec<usize> = (0..ITEMS).collect();
    let run = rigs[0].start("wide", json!(items)).await;
    let squares: Vec<usize> = items.iter().map(|n| n * n).collect();
    assert_eq!(rigs[1].output(run).await, json!(squares));
    (rigs, run)
}

async fn assert_each_item_was_done_once(rig: &Rig, run: RunId) {
    let mut done = BTreeMap::new();
    for record in rig.records(run).await {
        if let Entry::AttemptCompleted { .. } = &record.record.entry {
            *done.entry(record.record.entry.step_key().unwrap().to_owned()).or_insert(0) += 1;
        }
    }
    assert_eq!(done.len(), ITEMS);
    assert!(done.values().all(|times| *times == 1), "{done:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_conflict_only_what_changed_is_loaded() {
    let memory: Arc<dyn Store> = Arc::new(Memory::new());
    let (changed, whole) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let watched = || {
        let (changed, whole) = (changed.clone(), whole.clone());
        let watching = move |found: &mut Found| match found {
            Found::Changed(loaded) => {
                assert!(loaded.rows.activations.len() < ITEMS, "it has no more than what changed");
                changed.fetch_add(1, Ordering::SeqCst);
            }
            Found::Run(loaded) if loaded.rows.activations.len() > ITEMS => _ = whole.fetch_add(1, Ordering::SeqCst),
            _ => {}
        };
        Arc::new(Hooked { tampering: Some(Box::new(watching)), ..Hooked::new(memory.clone()) }) as Arc<dyn Store>
    };
    for _ in 0..ROUNDS {
        let (rigs, run) = square_everywhere((0..3).map(|_| watched()).collect()).await;
        assert_each_item_was_done_once(&rigs[2], run).await;
        for rig in rigs {
            rig.stop().await;
        }
        if changed.load(Ordering::SeqCst) > 0 {
            break;
        }
    }
    let (changed, whole) = (changed.load(Ordering::SeqCst), whole.load(Ordering::SeqCst));
    assert!(changed > 0, "nobody lost against another");
    println!("{changed} loads of changes, {whole} of the whole run");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_lost_twice_waits_for_its_turn_and_gives_it_back() {
    let memory: Arc<dyn Store> = Arc::new(Memory::new());
    let (turns, given) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
    let with_turns = || {
        let hooked = Hooked::new(memory.clone());
        let (turns, turns_given) = (Some(turns.clone()), given.clone());
        Arc::new(Hooked { turns, turns_given, ..hooked }) as Arc<dyn Store>
    };
    for _ in 0..ROUNDS {
        let (rigs, run) = square_everywhere((0..3).map(|_| with_turns()).collect()).await;
        assert_each_item_was_done_once(&rigs[2], run).await;
        for rig in rigs {
            rig.stop().await;
        }
        if given.load(Ordering::SeqCst) > 0 {
            break;
        }
    }
    assert!(given.load(Ordering::SeqCst) > 0, "nobody lost twice");
    assert!(turns.try_lock().is_ok(), "a turn was not given back");
}
