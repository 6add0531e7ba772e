//! A copy of the store while it is in use.
//!
//! A copy that was interrupted must never be taken for a store, least of all for an empty one. So the directory has its
//! name only once the copy in it is whole, and the file in it likewise; a directory that was there before holds a file
//! that says what it is ([`files::unfinished`]).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::files;
use super::trouble::{Outcome, Trouble};
use crate::error::StoreError;

/// Copies what `from` reads at one moment into a new directory, which can be opened as a store, and checks the copy.
pub(super) fn copy(from: &Connection, to: &Path) -> Result<(), StoreError> {
    let failed = |error: io::Error| StoreError::Unavailable(format!("{} can't be written: {error}", to.display()));
    if fs::read_dir(to).is_ok_and(|mut files| files.next().is_some()) {
        return Err(StoreError::Unavailable(format!("{} is not empty: a backup needs a new directory", to.display())));
    }
    if to.is_dir() {
        return write(from, to);
    }
    let at = beside(to)?;
    discard(&at).map_err(failed)?;
    write(from, &at)?;
    fs::rename(&at, to).map_err(failed)?;
    files::sync_directory(files::parent_of(to)).map_err(failed)
}

/// Where the copy is made: in the same directory, so that it can be renamed.
fn beside(to: &Path) -> Result<PathBuf, StoreError> {
    let unnamed = || StoreError::Unavailable(format!("{} is not a name for a directory", to.display()));
    let mut name = to.file_name().ok_or_else(unnamed)?.to_owned();
    name.push(".unfinished");
    Ok(to.with_file_name(name))
}

/// Removes what an interrupted copy left there, and nothing else.
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
    copy_rows(from, &unfinished).map_err(Trouble::into_error)?;
    File::open(&unfinished).and_then(|file| file.sync_all()).map_err(failed)?;
    fs::rename(&unfinished, files::database(dir)).map_err(failed)?;
    files::sync_directory(dir).map_err(failed)
}

fn copy_rows(from: &Connection, to: &Path) -> Outcome<()> {
    let Some(path) = to.to_str() else {
        return Err(Trouble::Impossible(format!("{} is not a path in UTF-8", to.display())));
    };
    // Smaller than a copy page by page, and it reads every row, so damage is found here and not when it is needed.
    from.execute("VACUUM INTO ?1", [path])?;
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let copy = Connection::open_with_flags(to, flags)?;
    let found: String = copy.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    match found.as_str() {
        "ok" => Ok(()),
        problem => Err(Trouble::Corrupt(format!("the backup in {} is not sound: {problem}", to.display()))),
    }
}
