//! A copy of the store while it is in use.

use std::fs::{self, File};
use std::path::Path;

use rusqlite::{Connection, OpenFlags};

use super::files;
use super::trouble::{Outcome, Trouble};
use crate::error::StoreError;

/// Copies what `from` reads at one moment into a new directory, which can be opened as a store, and checks the copy. The
/// copy has its name only once it is whole.
pub(super) fn copy(from: &Connection, to: &Path) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| StoreError::Unavailable(format!("{} can't be written: {error}", to.display()));
    if fs::read_dir(to).is_ok_and(|mut files| files.next().is_some()) {
        return Err(StoreError::Unavailable(format!("{} is not empty: a backup needs a new directory", to.display())));
    }
    files::make_directory(to)?;
    let unfinished = to.join("eddyline.db.part");
    write(from, &unfinished).map_err(Trouble::into_error)?;
    File::open(&unfinished).and_then(|file| file.sync_all()).map_err(failed)?;
    fs::rename(&unfinished, files::database(to)).map_err(failed)?;
    files::sync_directory(to).map_err(failed)
}

fn write(from: &Connection, to: &Path) -> Outcome<()> {
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
