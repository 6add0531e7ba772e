//! The files of a store: creating, opening and checking them.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::options::Options;
use super::sqlite_error::{SqliteError, SqliteResult};
use crate::error::StoreError;

const PAGE_BYTES: u64 = 4_096;
/// The SQLite VFS that gathers writes to the log (`gather.c`).
const GATHER: &str = "eddyline-gather";
/// How long a connection waits for a lock; only an external tool that has the file open makes it wait.
pub(super) const BUSY: Duration = Duration::from_secs(5);
/// Prepared statements cached per connection.
const STATEMENTS: usize = 128;
/// A little more than hot runs need, not larger: after a page split SQLite scans its whole cache at the commit.
const WRITER_CACHE_KIB: i64 = 16 << 10;
const READER_CACHE_KIB: i64 = 8 << 10;
const FILLER_CACHE_KIB: i64 = 64 << 10;

/// A store contains every payload in plain text: only its owner may read it.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;
/// The permission bits of group and others.
const OTHERS: u32 = 0o077;

const DATABASE: &str = "eddyline.db";
/// A backup that is being written.
const UNFINISHED: &str = "eddyline.db.part";
/// A copy of another store that is being written.
const COPYING: &str = "eddyline.db.copying";
const LOCK: &str = "lock";
const HANDLING: &str = "handling";

pub(super) fn database(dir: &Path) -> PathBuf {
    dir.join(DATABASE)
}

pub(super) fn unfinished(dir: &Path) -> PathBuf {
    dir.join(UNFINISHED)
}

pub(super) fn copying(dir: &Path) -> PathBuf {
    dir.join(COPYING)
}

pub(super) fn log(dir: &Path) -> PathBuf {
    dir.join("eddyline.db-wal")
}

pub(super) fn log_index(dir: &Path) -> PathBuf {
    dir.join("eddyline.db-shm")
}

pub(super) fn lock(dir: &Path) -> PathBuf {
    dir.join(LOCK)
}

/// The note of the runs being decided on.
pub(super) fn handling(dir: &Path) -> PathBuf {
    dir.join(HANDLING)
}

pub(super) fn bytes(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}

/// Creates the directory durably: if a power cut loses the directory, the store has lost everything. An existing
/// directory with only a store in it is made private; one with other files keeps its permissions.
pub(super) fn make_directory(dir: &Path) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| StoreError::Unavailable(format!("cannot create {}: {error}", dir.display()));
    if dir.is_dir() {
        if is_ours_alone(dir) {
            close_to_others(dir, DIRECTORY_MODE);
        }
        return Ok(());
    }
    make_parents(parent_of(dir)).map_err(failed)?;
    DirBuilder::new().mode(DIRECTORY_MODE).create(dir).map_err(failed)?;
    sync_directory(parent_of(dir)).map_err(failed)
}

/// Creates missing parent directories, each synced in its own parent.
fn make_parents(dir: &Path) -> std::io::Result<()> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|dir| !dir.as_os_str().is_empty() && !dir.is_dir()).collect();
    for dir in missing.into_iter().rev() {
        match fs::create_dir(dir) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists || !dir.is_dir() => return Err(error),
            _ => sync_directory(parent_of(dir))?,
        }
    }
    Ok(())
}

pub(super) fn parent_of(dir: &Path) -> &Path {
    dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Opens a file of the store for reading and writing, creating it if necessary.
pub(super) fn open_private(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(FILE_MODE).open(path)
}

/// SQLite gives its other files the mode of the database file, so that file is created here, before SQLite would.
fn make_private(dir: &Path) -> std::io::Result<()> {
    open_private(&database(dir))?;
    for path in [database(dir), log(dir), log_index(dir), lock(dir), handling(dir)] {
        close_to_others(&path, FILE_MODE);
    }
    Ok(())
}

/// Revokes permissions of group and others that an earlier version or a umask granted.
fn close_to_others(path: &Path, mode: u32) {
    let Ok(found) = fs::metadata(path) else { return };
    if found.permissions().mode() & OTHERS != 0
        && let Err(error) = fs::set_permissions(path, Permissions::from_mode(mode))
    {
        tracing::warn!(path = %path.display(), %error, "cannot restrict permissions; other users may read the store");
    }
}

fn is_ours_alone(dir: &Path) -> bool {
    let ours = |name: &str| name == LOCK || name == HANDLING || name.starts_with(DATABASE);
    fs::read_dir(dir)
        .is_ok_and(|mut files| files.all(|file| file.is_ok_and(|file| file.file_name().to_str().is_some_and(ours))))
}

pub(super) fn sync_directory(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

/// The connection of the writer.
pub(super) fn open_writer(dir: &Path, options: &Options) -> SqliteResult<Connection> {
    let private = make_private(dir);
    private.map_err(|error| SqliteError::Impossible(format!("cannot open {}: {error}", database(dir).display())))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags_and_vfs(database(dir), flags, GATHER)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "page_size", PAGE_BYTES as i64)?;
    let mode: String = conn.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0))?;
    if mode != "wal" {
        let why = format!("the file system of {} does not support a write-ahead log", dir.display());
        return Err(SqliteError::Impossible(why));
    }
    // Not NORMAL: acknowledged commits must survive a power cut.
    conn.pragma_update(None, "synchronous", "FULL")?;
    // A thread of its own checkpoints the log; a commit must not.
    conn.pragma_update(None, "wal_autocheckpoint", 0)?;
    // The log exceeds `restart_bytes` when it restarts. Truncating it to that size would only make it grow again, and
    // appending to a file takes twice as long as overwriting it.
    conn.pragma_update(None, "journal_size_limit", 2 * options.restart_bytes as i64)?;
    settle(&conn, WRITER_CACHE_KIB)?;
    if let Some(most) = options.max_bytes {
        let pages = (most / PAGE_BYTES).max(1) as i64;
        conn.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))?;
    }
    Ok(conn)
}

/// A connection that only reads.
pub(super) fn open_reader(dir: &Path) -> SqliteResult<Connection> {
    open_reader_of(&database(dir))
}

pub(super) fn open_reader_of(database: &Path) -> SqliteResult<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(database, flags)?;
    conn.busy_timeout(BUSY)?;
    settle(&conn, READER_CACHE_KIB)?;
    Ok(conn)
}

/// The connection of the checkpointing thread.
pub(super) fn open_checkpointer(dir: &Path) -> SqliteResult<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // It writes no log, but needs the VFS's mapping of quota errors to "disk full".
    let conn = Connection::open_with_flags_and_vfs(database(dir), flags, GATHER)?;
    conn.busy_timeout(BUSY)?;
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.pragma_update(None, "wal_autocheckpoint", 0)?;
    Ok(conn)
}

fn settle(conn: &Connection, cache_kib: i64) -> SqliteResult<()> {
    conn.pragma_update(None, "foreign_keys", false)?;
    conn.pragma_update(None, "temp_store", "MEMORY")?;
    conn.pragma_update(None, "cache_size", -cache_kib)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS);
    Ok(())
}

/// The connection that fills a new database, which nobody uses before it is complete: a crash loses it as a whole.
pub(super) fn open_filler(database: &Path) -> SqliteResult<Connection> {
    let created = open_private(database);
    created.map_err(|error| SqliteError::Impossible(format!("cannot create {}: {error}", database.display())))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(database, flags)?;
    conn.pragma_update(None, "page_size", PAGE_BYTES as i64)?;
    let _: String = conn.pragma_update_and_check(None, "journal_mode", "OFF", |row| row.get(0))?;
    conn.pragma_update(None, "synchronous", "OFF")?;
    settle(&conn, FILLER_CACHE_KIB)?;
    Ok(conn)
}

/// Refuses a directory with an interrupted backup or copy: opening it would create an empty store there.
pub(super) fn refuse_unfinished(dir: &Path) -> Result<(), StoreError> {
    if copying(dir).exists() && bytes(&database(dir)) == 0 {
        return Err(StoreError::Corrupt(format!(
            "{} contains an unfinished copy of another store ({COPYING}). Repeat `eddy store copy` with --restart, or \
             delete the file",
            dir.display()
        )));
    }
    if unfinished(dir).exists() && bytes(&database(dir)) == 0 {
        return Err(StoreError::Corrupt(format!(
            "{} contains an interrupted backup ({UNFINISHED}). Delete it and make the backup again",
            dir.display()
        )));
    }
    Ok(())
}

/// Compares the database header with the file, at the cost of one read: detects a truncated file and a file that is no
/// database. Damage inside a page is detected when the page is used: by SQLite, or by a row's checksum.
pub(super) fn check(dir: &Path) -> Result<(), StoreError> {
    let path = database(dir);
    let Ok(mut file) = File::open(&path) else { return Ok(()) };
    let length = bytes(&path);
    if length == 0 && bytes(&log(dir)) == 0 {
        return Ok(());
    }
    let damaged = |why: String| StoreError::Corrupt(format!("{} {why}. Restore it from a backup", path.display()));
    let mut header = [0; 100];
    file.read_exact(&mut header).map_err(|_| damaged(format!("is truncated: it has {length} bytes")))?;
    if !header.starts_with(b"SQLite format 3\0") {
        return Err(damaged("is not a database".to_owned()));
    }
    let number = |at: usize| header[at..at + 4].iter().fold(0, |number, byte| (number << 8) | u64::from(*byte));
    let page = match number(14) & 0xffff {
        1 => 65_536,
        bytes => bytes,
    };
    // The page count is valid only if the two change counters agree. And while there is a log, counted pages may be in
    // the log instead.
    let counted = number(24) == number(92) && bytes(&log(dir)) == 0;
    let expected = number(28) * page;
    if counted && length < expected {
        return Err(damaged(format!("is truncated: it has {length} bytes and should have {expected}")));
    }
    Ok(())
}
