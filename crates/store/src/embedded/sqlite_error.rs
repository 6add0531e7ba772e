//! Errors of SQLite, classified by their consequence for the store.

use rusqlite::ErrorCode;
use rusqlite::ffi;

use crate::error::StoreError;

pub(super) type SqliteResult<T> = std::result::Result<T, SqliteError>;

#[derive(Debug)]
pub(super) enum SqliteError {
    Sqlite(rusqlite::Error),
    /// A row differs from what was written.
    Corrupt(String),
    /// It cannot be stored, for this reason.
    Impossible(String),
}

/// The consequence of a failed write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Severity {
    /// Nothing was written; later writes may succeed.
    Full,
    /// Nothing was written, because an external tool keeps the file locked: a retry would wait as long.
    Locked,
    /// Nothing was written; one of the requests may be the cause.
    Passing,
    /// The data on disk can no longer be trusted.
    Fatal,
}

impl From<rusqlite::Error> for SqliteError {
    fn from(error: rusqlite::Error) -> SqliteError {
        SqliteError::Sqlite(error)
    }
}

impl SqliteError {
    pub fn severity(&self) -> Severity {
        let error = match self {
            SqliteError::Corrupt(_) => return Severity::Fatal,
            SqliteError::Impossible(_) => return Severity::Passing,
            SqliteError::Sqlite(error) => error,
        };
        if is_no_space(error) {
            return Severity::Full;
        }
        match error.sqlite_error_code() {
            Some(
                ErrorCode::SystemIoFailure
                | ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
                | ErrorCode::PermissionDenied,
            ) => Severity::Fatal,
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Severity::Locked,
            Some(_) => Severity::Passing,
            // A column contains a value that was never written to it.
            None => Severity::Fatal,
        }
    }

    pub fn into_error(self) -> StoreError {
        let error = match self {
            SqliteError::Corrupt(what) => return StoreError::Corrupt(what),
            SqliteError::Impossible(what) => return StoreError::Unavailable(what),
            SqliteError::Sqlite(error) => error,
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

/// The disk is full, or the quota or page limit is reached. The index of the log (the `-shm` file) grows too; if it
/// cannot, SQLite reports one of the SHM errors, before anything is written.
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
        let of = |code| SqliteError::Sqlite(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)).severity();
        assert_eq!(of(ffi::SQLITE_FULL), Severity::Full);
        assert_eq!(of(ffi::SQLITE_IOERR_SHMSIZE), Severity::Full);
        assert_eq!(of(ffi::SQLITE_IOERR_FSYNC), Severity::Fatal);
        assert_eq!(of(ffi::SQLITE_IOERR_WRITE), Severity::Fatal);
        assert_eq!(of(ffi::SQLITE_CORRUPT), Severity::Fatal);
        assert_eq!(of(ffi::SQLITE_BUSY), Severity::Locked);
        assert_eq!(of(ffi::SQLITE_TOOBIG), Severity::Passing);
    }
}
