//! What went wrong in PostgreSQL, and what a caller can do about it.

use tokio_postgres::error::SqlState;

use crate::error::StoreError;

#[derive(Debug)]
pub(super) enum PgError {
    Postgres(tokio_postgres::Error),
    /// No connection could be had.
    Connect(String),
    Corrupt(String),
}

pub(super) type PgResult<T> = std::result::Result<T, PgError>;

impl From<tokio_postgres::Error> for PgError {
    fn from(error: tokio_postgres::Error) -> PgError {
        PgError::Postgres(error)
    }
}

impl PgError {
    fn code(&self) -> Option<&SqlState> {
        match self {
            PgError::Postgres(error) => error.code(),
            _ => None,
        }
    }

    /// Nothing was written, and the same may well succeed at once.
    pub fn is_passing(&self) -> bool {
        let passing =
            [SqlState::T_R_DEADLOCK_DETECTED, SqlState::T_R_SERIALIZATION_FAILURE, SqlState::LOCK_NOT_AVAILABLE];
        self.code().is_some_and(|code| passing.contains(code))
    }

    /// The connection was lost on the way: it is not known how far the server got.
    pub fn is_cut(&self) -> bool {
        let cut = [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN];
        match self {
            PgError::Postgres(error) => {
                error.code().map_or(error.is_closed() || is_io(error), |code| cut.contains(code))
            }
            _ => false,
        }
    }

    /// Of a read, or of a write that was certainly not made.
    pub fn into_error(self) -> StoreError {
        match self {
            PgError::Corrupt(why) => StoreError::Corrupt(why),
            PgError::Connect(why) => StoreError::Unavailable(why),
            PgError::Postgres(error) => match error.code() {
                Some(code) if *code == SqlState::DISK_FULL => StoreError::Full(describe(&error)),
                Some(code) if *code == SqlState::DATA_CORRUPTED || *code == SqlState::INDEX_CORRUPTED => {
                    StoreError::Corrupt(describe(&error))
                }
                _ => StoreError::Unavailable(describe(&error)),
            },
        }
    }

    /// Of a write.
    pub fn into_write_error(self) -> StoreError {
        if self.is_cut() { StoreError::Unknown } else { self.into_error() }
    }
}

fn is_io(error: &tokio_postgres::Error) -> bool {
    use std::error::Error;
    error.source().is_some_and(|source| source.is::<std::io::Error>())
}

/// The message of the server, which the driver keeps apart.
pub(super) fn describe(error: &tokio_postgres::Error) -> String {
    use std::error::Error;
    match error.as_db_error() {
        Some(db) => {
            let place = db.where_().map(|place| format!(" ({place})")).unwrap_or_default();
            format!("PostgreSQL: {} [{}]{place}", db.message(), db.code().code())
        }
        None => match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        },
    }
}
