//! The processes that serve from this database.

use eddyline_machine::Millis;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::body::text;
use super::database::{Database, Param};
use super::pg_error::{PgError, PgResult};
use super::schema::FORMAT;
use crate::error::Result;
use crate::presence::{InstanceId, InstanceInfo, InstanceState, LISTED_MS, Present};
use crate::task_queues::UNWATCHED_MS;

const CHECK_IN: &str = "SELECT * FROM eddyline.check_in_v1($1, $2, $3, $4, $5, $6, $7)";

pub(super) async fn check_in(
    database: &Database,
    id: InstanceId,
    info: &InstanceInfo,
    started_at: Millis,
) -> Result<Present> {
    let (now, body) = (database.now_given(), text(info)?);
    let params: [Param<'_>; 7] = [
        (&now, Type::INT8),
        (&id.0, Type::UUID),
        (&started_at, Type::INT8),
        (&FORMAT, Type::INT4),
        (&body, Type::TEXT),
        (&LISTED_MS, Type::INT8),
        (&UNWATCHED_MS, Type::INT8),
    ];
    let rows = database.read(CHECK_IN, &params).await.map_err(PgError::into_error)?;
    let mut present = Present::default();
    for row in &rows {
        present.instances.push(instance(row).map_err(PgError::into_error)?);
        present.now = row.get("out_now");
        present.unwatched = row.get("out_unwatched");
    }
    if let Some(row) = rows.first() {
        database.learn_time(present.now);
        database.learn_format(row.get("out_format"));
        database.hub.saw_documents(row.get("out_changed"));
        database.hub.is_alone(present.instances.iter().all(|instance| instance.id == id));
    }
    Ok(present)
}

fn instance(row: &Row) -> PgResult<InstanceState> {
    // A newer Eddyline may have more fields, or a different format.
    let info = serde_json::from_str(row.try_get("out_body")?).unwrap_or_default();
    Ok(InstanceState {
        id: InstanceId(row.try_get("out_id")?),
        info,
        started_at: row.try_get("out_started_at")?,
        seen_at: row.try_get("out_seen")?,
    })
}

/// Until when deletion by age is suspended, because the database's clock has jumped.
pub(super) async fn deletion_waits(database: &Database) -> Result<Option<Millis>> {
    let now = database.now_given();
    let rows = database.read("SELECT eddyline.note_time_v1($1)", &[(&now, Type::INT8)]).await;
    let rows = rows.map_err(PgError::into_error)?;
    Ok(rows.first().and_then(|row| row.get(0)))
}

pub(super) async fn check_out(database: &Database, id: InstanceId) -> Result<()> {
    let sql = "DELETE FROM eddyline.instances WHERE id = $1";
    database.read(sql, &[(&id.0, Type::UUID)]).await.map_err(PgError::into_error)?;
    Ok(())
}
