//! The files of a store: their permissions, and what happens when they are removed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use eddyline_store::*;
use story::*;

fn open(dir: &Path) -> Embedded {
    Embedded::open(dir, Options { clock: ManualClock::at(START), ..Options::default() }).unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

async fn start(store: &Embedded, n: u128) -> Result<Written> {
    let commit = Decider::new().start(store, n, "line", big()).await;
    store.commit(vec![Command::Run(commit)], vec![claim(n, "w", 1)]).await
}

#[tokio::test]
async fn only_the_owner_may_read_a_store_or_its_backup() {
    let root = tempfile::tempdir().unwrap();
    let (dir, copy) = (root.path().join("a/store"), root.path().join("copy"));
    let store = open(&dir);
    start(&store, 1).await.unwrap();
    store.backup(&copy).await.unwrap();
    assert_eq!((mode(&dir), mode(&copy)), (0o700, 0o700));
    for file in ["eddyline.db", "eddyline.db-wal", "eddyline.db-shm", "lock"] {
        assert_eq!(mode(&dir.join(file)), 0o600, "{file}");
    }
    assert_eq!(mode(&copy.join("eddyline.db")), 0o600);
    store.close().unwrap();

    // A store of an earlier version is made private when it is opened.
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
    for file in ["eddyline.db", "lock"] {
        fs::set_permissions(dir.join(file), Permissions::from_mode(0o644)).unwrap();
    }
    let store = open(&dir);
    start(&store, 2).await.unwrap();
    assert_eq!(mode(&dir), 0o700);
    for file in ["eddyline.db", "eddyline.db-wal", "eddyline.db-shm", "lock"] {
        assert_eq!(mode(&dir.join(file)), 0o600, "{file}");
    }
    store.close().unwrap();

    // A directory with other files keeps its permissions.
    fs::write(dir.join("notes"), "").unwrap();
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
    open(&dir).close().unwrap();
    assert_eq!((mode(&dir), mode(&dir.join("eddyline.db"))), (0o755, 0o600));
}

#[tokio::test]
async fn an_interrupted_backup_is_not_opened_as_an_empty_store() {
    let root = tempfile::tempdir().unwrap();
    let (dir, copy) = (root.path().join("store"), root.path().join("copy"));
    let store = open(&dir);
    start(&store, 1).await.unwrap();
    // What a killed backup leaves: the directory has its temporary name.
    let unfinished = root.path().join("copy.unfinished");
    fs::create_dir(&unfinished).unwrap();
    fs::write(unfinished.join("eddyline.db.part"), "half").unwrap();
    assert!(!copy.exists());
    let error = Embedded::open(&unfinished, Options::default()).unwrap_err().to_string();
    assert!(error.contains("contains an interrupted backup"), "{error}");
    assert!(!unfinished.join("eddyline.db").exists(), "no store is created there");
    // The next backup replaces it.
    store.backup(&copy).await.unwrap();
    assert!(!unfinished.exists());
    assert_eq!(open(&copy).count_runs(&ns(), &RunFilter::default()).await, Ok(1));

    // The same in a directory that existed before.
    let empty = root.path().join("empty");
    fs::create_dir(&empty).unwrap();
    fs::write(empty.join("eddyline.db.part"), "half").unwrap();
    let error = Embedded::open(&empty, Options::default()).unwrap_err().to_string();
    assert!(error.contains("Delete it and make the backup again"), "{error}");
    fs::remove_file(empty.join("eddyline.db.part")).unwrap();
    store.backup(&empty).await.unwrap();
    assert_eq!(open(&empty).count_runs(&ns(), &RunFilter::default()).await, Ok(1));
}

/// Removes or replaces a file of an open store. Within a second the store refuses writes and says why.
async fn loses(what: &str, take: impl FnOnce(&Path), expected: &str) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let failed = Arc::new(AtomicBool::new(false));
    let tell = failed.clone();
    let on_failure = Arc::new(move |_: &StoreFailure| tell.store(true, Ordering::Relaxed));
    let store = Embedded::open(&dir, Options { on_failure, ..Options::default() }).unwrap();
    start(&store, 1).await.unwrap();
    assert_eq!(store.health().await, Ok(()));
    take(&dir);
    let since = Instant::now();
    let error = loop {
        match store.health().await {
            Ok(()) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(error) => break error,
        }
        assert!(since.elapsed() < Duration::from_secs(20), "{what}: it was not noticed");
    };
    let StoreError::Unavailable(said) = &error else { panic!("{what}: {error}") };
    assert!(said.contains(expected) && said.contains("Writes are refused"), "{what}: {said}");
    assert_eq!(start(&store, 2).await.unwrap_err(), error, "{what}: later writes are refused");
    assert_eq!(store.count_runs(&ns(), &RunFilter::default()).await, Ok(1), "{what}: reads still work");
    assert!(!failed.load(Ordering::Relaxed), "{what}: the process keeps running");
    drop(store);
}

#[tokio::test]
async fn a_store_whose_files_are_removed_or_replaced_refuses_to_write() {
    loses("the directory", |dir| fs::remove_dir_all(dir).unwrap(), "was removed").await;
    loses("the whole store", |dir| fs::rename(dir, dir.with_extension("moved")).unwrap(), "was removed").await;
    for file in ["eddyline.db", "eddyline.db-wal", "eddyline.db-shm", "lock"] {
        let expected = format!("{file} was removed");
        loses(file, |dir| fs::remove_file(dir.join(file)).unwrap(), &expected).await;
        let expected = format!("{file} was replaced");
        loses(file, |dir| replace(&dir.join(file)), &expected).await;
    }
}

fn replace(path: &Path) {
    let copy = path.with_extension("copy");
    fs::copy(path, &copy).unwrap();
    fs::rename(copy, path).unwrap();
}
