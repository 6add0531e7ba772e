//! Errors of PostgreSQL, and what a caller can do about them.

use tokio_postgres::error::{Severity, SqlState};

use crate::error::StoreError;

#[derive(Debug)]
pub(super) enum PgError {
    Postgres(tokio_postgres::Error),
    /// No connection could be opened.
    Connect(String),
    /// A prepared statement was missing or was another one, because a proxy gave the connection another session.
    /// Nothing was written, and statements are no longer prepared.
    Unprepared(tokio_postgres::Error),
    /// There was no response in time: it is unknown how far the server got.
    Silent,
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

    /// Nothing was written, and a retry may succeed at once.
    pub fn is_passing(&self) -> bool {
        let passing =
            [SqlState::T_R_DEADLOCK_DETECTED, SqlState::T_R_SERIALIZATION_FAILURE, SqlState::LOCK_NOT_AVAILABLE];
        matches!(self, PgError::Unprepared(_)) || self.code().is_some_and(|code| passing.contains(code))
    }

    /// Nothing was written, because of a value in what was to be written: out of range, too long, or not unique.
    pub fn is_of_data(&self) -> bool {
        self.code().is_some_and(|code| ["22", "23", "54"].iter().any(|class| code.code().starts_with(class)))
    }

    /// The connection broke or is unusable: it is unknown how far the server got.
    pub fn is_cut(&self) -> bool {
        match self {
            PgError::Silent => true,
            PgError::Postgres(error) => match error.as_db_error() {
                // The server or a proxy closes the connection after such an error.
                Some(db) => matches!(db.parsed_severity(), Some(Severity::Fatal | Severity::Panic)),
                None => error.is_closed() || is_io(error),
            },
            _ => false,
        }
    }

    /// The error of a read, or of a write that was certainly not carried out.
    pub fn into_error(self) -> StoreError {
        match self {
            PgError::Corrupt(why) => StoreError::Corrupt(why),
            PgError::Connect(why) => StoreError::Unavailable(why),
            PgError::Silent => StoreError::Unavailable("PostgreSQL did not respond in time".to_owned()),
            PgError::Unprepared(error) => StoreError::Unavailable(describe(&error)),
            PgError::Postgres(error) => match error.code() {
                Some(code) if *code == SqlState::DISK_FULL => StoreError::Full(describe(&error)),
                Some(code) if *code == SqlState::DATA_CORRUPTED || *code == SqlState::INDEX_CORRUPTED => {
                    StoreError::Corrupt(describe(&error))
                }
                _ => StoreError::Unavailable(describe(&error)),
            },
        }
    }

    /// The error of a write.
    pub fn into_write_error(self) -> StoreError {
        if self.is_cut() { StoreError::Unknown } else { self.into_error() }
    }
}

/// The errors of a prepared statement behind a proxy that gives each transaction another session: the statement is
/// missing, its name is taken, or another statement of that name has other parameters.
pub(super) fn is_of_a_proxy(error: &tokio_postgres::Error) -> bool {
    let codes = [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT, SqlState::PROTOCOL_VIOLATION];
    error
        .as_db_error()
        .is_some_and(|db| codes.contains(db.code()) && matches!(db.parsed_severity(), Some(Severity::Error)))
}

fn is_io(error: &tokio_postgres::Error) -> bool {
    use std::error::Error;
    error.source().is_some_and(|source| source.is::<std::io::Error>())
}

/// The server's message, which the driver keeps separately.
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
