//! Backups: copies of the store while it is in use.
//!
//! An interrupted copy must never be mistaken for a store, least of all for an empty one. So the copy is made under a
//! temporary directory name and file name and renamed when complete; in a directory that existed before, a marker file
//! ([`files::unfinished`]) shows that the copy is incomplete.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::files;
use super::sqlite_error::{SqliteError, SqliteResult};
use crate::error::StoreError;

/// Copies a snapshot read by `from` into a new directory, which can be opened as a store, and checks the copy.
pub(super) fn copy(from: &Connection, to: &Path) -> Result<(), StoreError> {
    let failed = |error: io::Error| StoreError::Unavailable(format!("{} can't be written: {error}", to.display()));
    if fs::read_dir(to).is_ok_and(|mut files| files.next().is_some()) {
        return Err(StoreError::Unavailable(format!("{} is not empty: a backup needs a new directory", to.display())));
    }
    if to.is_dir() {
        return write(from, to);
    }
    let at = staging_directory(to)?;
    discard(&at).map_err(failed)?;
    write(from, &at)?;
    fs::rename(&at, to).map_err(failed)?;
    files::sync_directory(files::parent_of(to)).map_err(failed)
}

/// The temporary directory of the copy, next to its target so that it can be renamed.
fn staging_directory(to: &Path) -> Result<PathBuf, StoreError> {
    let unnamed = || StoreError::Unavailable(format!("{} is not a name for a directory", to.display()));
    let mut name = to.file_name().ok_or_else(unnamed)?.to_owned();
    name.push(".unfinished");
    Ok(to.with_file_name(name))
}

/// Removes the files of an interrupted copy, and nothing else.
fn discard(at: &Path) -> io::Result<()> {
    for left in [files::unfinished(at), files::database(at)] {
        remove(fs::remove_file(left))?;
    }
    remove(fs::remove_dir(at))
}

fn remove(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn write(from: &Connection, dir: &Path) -> Result<(), StoreError> {
    let failed = |error: io::Error| StoreError::Unavailable(format!("{} can't be written: {error}", dir.display()));
    files::make_directory(dir)?;
    let unfinished = files::unfinished(dir);
    files::open_private(&unfinished).map_err(failed)?;
    files::sync_directory(dir).map_err(failed)?;
    copy_rows(from, &unfinished).map_err(SqliteError::into_error)?;
    File::open(&unfinished).and_then(|file| file.sync_all()).map_err(failed)?;
    fs::rename(&unfinished, files::database(dir)).map_err(failed)?;
    files::sync_directory(dir).map_err(failed)
}

fn copy_rows(from: &Connection, to: &Path) -> SqliteResult<()> {
    let Some(path) = to.to_str() else {
        return Err(SqliteError::Impossible(format!("{} is not a path in UTF-8", to.display())));
    };
    // VACUUM makes a smaller file than a page-by-page copy, and reads every row, so damage is found now and not when
    // the backup is needed.
    from.execute("VACUUM INTO ?1", [path])?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let copy = Connection::open_with_flags(to, flags)?;
    let found: String = copy.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    match found.as_str() {
        "ok" => Ok(()),
        problem => Err(SqliteError::Corrupt(format!("the backup in {} is damaged: {problem}", to.display()))),
    }
}
