//! The files of a store: how they are opened, and what can be told about them before they are.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::options::Options;
use super::trouble::{Outcome, Trouble};
use crate::error::StoreError;

const PAGE_BYTES: u64 = 4_096;
/// The file system that writes the log in one piece (`gather.c`).
const GATHER: &str = "eddyline-gather";
/// How long a connection waits for another; only a tool that looks into the file from outside makes it wait.
pub(super) const BUSY: Duration = Duration::from_secs(5);
/// Prepared statements that a connection keeps.
const STATEMENTS: usize = 128;
/// More than hot runs need, and no more: whenever a page was split, SQLite goes over all of its cache at the commit.
const WRITER_CACHE_KIB: i64 = 16 << 10;
const READER_CACHE_KIB: i64 = 8 << 10;

pub(super) fn database(dir: &Path) -> PathBuf {
    dir.join("eddyline.db")
}

pub(super) fn log(dir: &Path) -> PathBuf {
    dir.join("eddyline.db-wal")
}

pub(super) fn bytes(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}

/// Makes the directory, durably: a store whose directory is gone after a power cut has lost everything.
pub(super) fn make_directory(dir: &Path) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| StoreError::Unavailable(format!("{} can't be made: {error}", dir.display()));
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir).map_err(failed)?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    sync_directory(parent).map_err(failed)
}

pub(super) fn sync_directory(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The connection that writes.
pub(super) fn open_writer(dir: &Path, options: &Options) -> Outcome<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags_and_vfs(database(dir), flags, GATHER)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "page_size", PAGE_BYTES as i64)?;
    let mode: String = conn.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
    if mode != "wal" {
        return Err(Trouble::Impossible(format!("{} can't be kept with a write-ahead log", dir.display())));
    }
    // Not NORMAL: what was acknowledged must survive a power cut.
    conn.pragma_update(None, "synchronous", "FULL")?;
    // The log is copied back by a thread of its own; a commit must not do it.
    conn.pragma_update(None, "wal_autocheckpoint", 0)?;
    // It has grown beyond that by the time it starts over, and to cut it off only makes it grow again: to write where
    // nothing was written before takes twice as long.
    conn.pragma_update(None, "journal_size_limit", 2 * options.restart_bytes as i64)?;
    settle(&conn, WRITER_CACHE_KIB)?;
    if let Some(most) = options.max_bytes {
        let pages = (most / PAGE_BYTES).max(1) as i64;
        conn.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))?;
    }
    Ok(conn)
}

/// A connection that only reads.
pub(super) fn open_reader(dir: &Path) -> Outcome<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(database(dir), flags)?;
    conn.busy_timeout(BUSY)?;
    settle(&conn, READER_CACHE_KIB)?;
    Ok(conn)
}

/// The connection that copies the log back.
pub(super) fn open_checkpointer(dir: &Path) -> Outcome<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(database(dir), flags)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.pragma_update(None, "wal_autocheckpoint", 0)?;
    Ok(conn)
}

fn settle(conn: &Connection, cache_kib: i64) -> Outcome<()> {
    conn.pragma_update(None, "foreign_keys", false)?;
    conn.pragma_update(None, "temp_store", "MEMORY")?;
    conn.pragma_update(None, "cache_size", -cache_kib)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS);
    Ok(())
}

/// What the first page says is compared with the file, which tells a file that is cut short or something else altogether
/// at the cost of one read. A page that is damaged inside is found when it is used: by SQLite, or by a row's checksum.
pub(super) fn check(dir: &Path) -> Result<(), StoreError> {
    let path = database(dir);
    let Ok(mut file) = File::open(&path) else { return Ok(()) };
    let length = bytes(&path);
    if length == 0 && bytes(&log(dir)) == 0 {
        return Ok(());
    }
    let damaged = |why: String| StoreError::Corrupt(format!("{} {why}. Restore it from a backup", path.display()));
    let mut header = [0; 100];
    file.read_exact(&mut header).map_err(|_| damaged(format!("is cut short: it has {length} bytes")))?;
    if !header.starts_with(b"SQLite format 3\0") {
        return Err(damaged("is not a database".to_owned()));
    }
    let number = |at: usize| header[at..at + 4].iter().fold(0, |number, byte| (number << 8) | u64::from(*byte));
    let page = match number(14) & 0xffff {
        1 => 65_536,
        bytes => bytes,
    };
    // Only while the two counters agree is the page count kept up to date. And while there is a log, pages that the
    // first one counts may be in there instead.
    let counted = number(24) == number(92) && bytes(&log(dir)) == 0;
    let expected = number(28) * page;
    if counted && length < expected {
        return Err(damaged(format!("is cut short: it has {length} bytes and should have {expected}")));
    }
    Ok(())
}
