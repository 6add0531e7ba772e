//! Store time when a store is opened: it continues from the latest stored time, or from the wall clock if that is
//! later. Starting once with a wrong wall clock must not cost data, and can be corrected afterwards.

use eddyline_machine::Millis;
use rusqlite::{Connection, OptionalExtension, params};

use super::restore::meta;
use super::sqlite_error::SqliteResult;

/// If time has jumped by more than this since the store was last open, the wall clock may be wrong.
const JUMP_MS: Millis = 24 * 60 * 60 * 1_000;
/// For how long retention then deletes nothing.
const WAIT_MS: Millis = 60 * 60 * 1_000;
/// A wall clock that is behind by less is not reported.
const BEHIND_MS: Millis = 2_000;

/// From when on retention may delete.
pub(super) const DELETIONS_FROM: &str = "deletions_from";
/// Rows up to these positions have times from before the clock was reset.
pub(super) const RESET_RECORDS: &str = "reset_records";
pub(super) const RESET_EVENTS: &str = "reset_events";

/// The latest stored time.
pub(super) fn latest(conn: &Connection) -> SqliteResult<Millis> {
    let mut latest = meta(conn, "served_at")?;
    let (records, events) = (meta(conn, RESET_RECORDS)?, meta(conn, RESET_EVENTS)?);
    for (sql, after) in [
        ("SELECT ts FROM records WHERE row > ?1 ORDER BY row DESC LIMIT 1", records),
        ("SELECT at FROM events WHERE position > ?1 ORDER BY position DESC LIMIT 1", events),
        ("SELECT at FROM commands WHERE row > ?1 ORDER BY row DESC LIMIT 1", 0),
    ] {
        let at: Option<Millis> = conn.query_row(sql, [after], |row| row.get(0)).optional()?;
        latest = latest.max(at.unwrap_or(0));
    }
    Ok(latest)
}

/// From when on retention may delete, if the store is opened at `wall`.
pub(super) fn deletions_from(conn: &Connection, latest: Millis, wall: Millis) -> SqliteResult<Millis> {
    let noted = meta(conn, DELETIONS_FROM)?;
    if latest == 0 || wall - latest <= JUMP_MS {
        return Ok(noted);
    }
    let hours = (wall - latest) / (60 * 60 * 1_000);
    tracing::warn!(
        hours,
        "the clock is more than a day ahead of when the store was last open: retention deletes nothing for the next \
         hour. If the clock is wrong, stop this process, set the clock and start once with --reset-clock"
    );
    Ok(noted.max(wall + WAIT_MS))
}

/// Warns if the wall clock is behind store time.
pub(super) fn tell_behind(latest: Millis, wall: Millis) {
    let seconds = (latest - wall) / 1_000;
    if latest - wall > BEHIND_MS {
        tracing::warn!(
            seconds,
            "the clock is behind store time, which never goes back: new times will be ahead of the clock. If the store \
             was opened with a wrong clock, start once with --reset-clock"
        );
    }
}

/// Sets store time back to the wall clock. Waits keep their remaining time; past times that lie ahead of the wall clock
/// become now. The times in timelines and of events cannot change and stay as they are.
pub(super) fn reset_clock(conn: &Connection, latest: Millis, wall: Millis) -> SqliteResult<()> {
    let by = latest - wall;
    if by <= 0 {
        tracing::info!("store time is not ahead of the clock: nothing to reset");
        return Ok(());
    }
    let tx = conn.unchecked_transaction()?;
    for sql in [
        "UPDATE timers SET due = due - ?1 WHERE wall = 0",
        "UPDATE gates SET deadline = deadline - ?1 WHERE deadline IS NOT NULL AND closed = 0",
        "UPDATE tasks SET deadline = deadline - ?1 WHERE deadline IS NOT NULL",
    ] {
        tx.execute(sql, [by])?;
    }
    tx.execute("UPDATE buckets SET closed_until = closed_until - ?1 WHERE closed_until > ?2", [by, wall])?;
    for sql in [
        "UPDATE gates SET at = ?1 WHERE at > ?1",
        "UPDATE tasks SET queued_at = min(queued_at, ?1), since = min(since, ?1), lease_until = min(lease_until, ?1)",
        "UPDATE buckets SET at = ?1 WHERE at > ?1",
        "UPDATE runs SET created_at = min(created_at, ?1), started_at = min(started_at, ?1), \
         ended_at = min(ended_at, ?1) WHERE created_at > ?1 OR started_at > ?1 OR ended_at > ?1",
        "UPDATE commands SET at = ?1 WHERE at > ?1",
    ] {
        tx.execute(sql, [wall])?;
    }
    let set = "INSERT OR REPLACE INTO meta (name, value) VALUES (?1, ?2)";
    tx.execute(set, params!["served_at", wall])?;
    tx.execute(set, params![DELETIONS_FROM, 0])?;
    for (name, last) in [
        (RESET_RECORDS, "INSERT OR REPLACE INTO meta SELECT ?1, coalesce(max(row), 0) FROM records"),
        (RESET_EVENTS, "INSERT OR REPLACE INTO meta SELECT ?1, coalesce(max(position), 0) FROM events"),
    ] {
        tx.execute(last, [name])?;
    }
    tx.commit()?;
    tracing::warn!(seconds = by / 1_000, "store time was set back to the clock");
    Ok(())
}
