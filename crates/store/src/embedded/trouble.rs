//! What SQLite says went wrong, split by what becomes of the store.

use rusqlite::ErrorCode;
use rusqlite::ffi;

use crate::error::StoreError;

pub(super) type Outcome<T> = std::result::Result<T, Trouble>;

#[derive(Debug)]
pub(super) enum Trouble {
    Sqlite(rusqlite::Error),
    /// A row is not what was written.
    Corrupt(String),
    /// It can't be stored, and says why.
    Impossible(String),
}

/// What it means for the store when a write fails so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gravity {
    /// Nothing was written, and later writes may well succeed.
    Full,
    /// Nothing was written, since somebody outside keeps the file locked: whatever else is tried has to wait as long.
    Locked,
    /// Nothing was written; the reason may lie in what was to be written.
    Passing,
    /// What is on disk can't be trusted any more.
    Fatal,
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Trouble {
        Trouble::Sqlite(error)
    }
}

impl Trouble {
    pub fn gravity(&self) -> Gravity {
        let error = match self {
            Trouble::Corrupt(_) => return Gravity::Fatal,
            Trouble::Impossible(_) => return Gravity::Passing,
            Trouble::Sqlite(error) => error,
        };
        if is_no_space(error) {
            return Gravity::Full;
        }
        match error.sqlite_error_code() {
            Some(
                ErrorCode::SystemIoFailure
                | ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
                | ErrorCode::PermissionDenied,
            ) => Gravity::Fatal,
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Gravity::Locked,
            Some(_) => Gravity::Passing,
            // A column holds what was never written into it.
            None => Gravity::Fatal,
        }
    }

    pub fn into_error(self) -> StoreError {
        let error = match self {
            Trouble::Corrupt(what) => return StoreError::Corrupt(what),
            Trouble::Impossible(what) => return StoreError::Unavailable(what),
            Trouble::Sqlite(error) => error,
        };
        if is_no_space(&error) {
            return StoreError::Full(error.to_string());
        }
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) | None => StoreError::Corrupt(error.to_string()),
            Some(_) => StoreError::Unavailable(error.to_string()),
        }
    }
}

/// The disk, the quota or the page limit is used up. The index of the log is a file that grows too, and where it can't,
/// that is said in words of its own; it happens before anything is written.
fn is_no_space(error: &rusqlite::Error) -> bool {
    let Some(error) = error.sqlite_error() else { return false };
    error.code == ErrorCode::DiskFull
        || matches!(
            error.extended_code,
            ffi::SQLITE_IOERR_SHMSIZE | ffi::SQLITE_IOERR_SHMOPEN | ffi::SQLITE_IOERR_SHMMAP
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_passes_and_a_failed_sync_does_not() {
        let of = |code| Trouble::Sqlite(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)).gravity();
        assert_eq!(of(ffi::SQLITE_FULL), Gravity::Full);
        assert_eq!(of(ffi::SQLITE_IOERR_SHMSIZE), Gravity::Full);
        assert_eq!(of(ffi::SQLITE_IOERR_FSYNC), Gravity::Fatal);
        assert_eq!(of(ffi::SQLITE_IOERR_WRITE), Gravity::Fatal);
        assert_eq!(of(ffi::SQLITE_CORRUPT), Gravity::Fatal);
        assert_eq!(of(ffi::SQLITE_BUSY), Gravity::Locked);
        assert_eq!(of(ffi::SQLITE_TOOBIG), Gravity::Passing);
    }
}
