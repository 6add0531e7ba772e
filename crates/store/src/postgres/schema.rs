//! The tables and functions, and the migrations between their versions.

use tokio_postgres::types::Type;

use super::Migrated;
use super::connect::Object;
use super::database::Database;
use super::pg_error::PgResult;
use crate::error::{Result, StoreError};

/// Each entry updates the schema by one version. A released entry is never changed: a new one is appended, and a
/// function whose parameters or tables change gets a new name, since two versions of Eddyline may run side by side.
const STEPS: &[&[&str]] = &[&[
    include_str!("sql/tables.sql"),
    include_str!("sql/commit.sql"),
    include_str!("sql/limits.sql"),
    include_str!("sql/claims.sql"),
    include_str!("sql/leases.sql"),
    include_str!("sql/due.sql"),
    include_str!("sql/documents.sql"),
    include_str!("sql/instances.sql"),
    include_str!("sql/views.sql"),
]];

/// The newest format of bodies that is known here. Bodies are written in the format that `meta` names, which all processes
/// that serve know: they say so when they check in.
pub(super) const FORMAT: i32 = 1;

/// The oldest supported version of PostgreSQL.
const OLDEST: i32 = 140_000;

/// Refuses a server that could lose or corrupt acknowledged work.
pub(super) async fn check_server(client: &Object) -> PgResult<Result<()>> {
    let asked = "SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), \
                 current_setting('transaction_isolation'), current_setting('synchronous_commit'), \
                 current_setting('server_encoding')";
    let row = client.query_typed_one(asked, &[]).await?;
    let (version, standby): (i32, bool) = (row.try_get(0)?, row.try_get(1)?);
    let (isolation, synchronous, encoding): (String, String, String) =
        (row.try_get(2)?, row.try_get(3)?, row.try_get(4)?);
    let refuse = |why: String| Ok(Err(StoreError::Unavailable(why)));
    if version < OLDEST {
        return refuse(format!("the server is PostgreSQL {}; use version 14 or later", version / 10_000));
    }
    if standby {
        return refuse("the server is a read-only standby; use the primary's address".to_owned());
    }
    if isolation != "read committed" {
        return refuse(format!(
            "default_transaction_isolation is {isolation:?}; set it to \"read committed\" for this role or database"
        ));
    }
    if synchronous == "off" {
        return refuse(
            "synchronous_commit is off, so a crash could lose acknowledged work; set it to on for this role or database"
                .to_owned(),
        );
    }
    if encoding != "UTF8" {
        return refuse(format!("the database has the encoding {encoding}; create one with UTF8"));
    }
    Ok(Ok(()))
}

/// Updates the tables to version `to`, or the newest: all migrations or none, one process at a time. Newer tables are
/// left alone.
pub(super) async fn migrate(database: &Database, client: Object, allowed: bool, to: Option<usize>) -> Result<Migrated> {
    let to = to.map_or(STEPS.len(), |to| to.min(STEPS.len()));
    match in_transaction(database, &client, allowed, to).await {
        Ok(Ok(from)) => Ok(Migrated { schema: database.schema().to_owned(), from, to }),
        Ok(Err(refused)) => Err(refused),
        Err(error) => {
            // Closing the connection rolls back.
            database.discard(client, &error);
            Err(error.into_error())
        }
    }
}

/// Returns the version that it found.
async fn in_transaction(database: &Database, client: &Object, allowed: bool, to: usize) -> PgResult<Result<usize>> {
    let schema = database.schema();
    client.batch_execute("BEGIN").await?;
    let lock = "SELECT pg_advisory_xact_lock(hashtextextended($1, 3))";
    client.query_typed(lock, &[(&schema, Type::TEXT)]).await?;
    let found =
        "SELECT to_regclass(format('%I.versions', $1)) IS NOT NULL, to_regnamespace(quote_ident($1)) IS NOT NULL";
    let found = client.query_typed_one(found, &[(&schema, Type::TEXT)]).await?;
    let version = match found.try_get(0)? {
        true => {
            let sql = database.sql("SELECT coalesce(max(version), 0) FROM eddyline.versions");
            client.query_typed_one(&sql, &[]).await?.try_get::<_, i32>(0)? as usize
        }
        false => 0,
    };
    if let Some(refused) = refusal(schema, version, to, allowed) {
        client.batch_execute("ROLLBACK").await?;
        return Ok(Err(refused));
    }
    if !found.try_get(1)? {
        client.batch_execute(&format!("CREATE SCHEMA \"{schema}\"")).await?;
    }
    if version == 0 {
        let sql =
            "CREATE TABLE eddyline.versions (version int PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())";
        client.batch_execute(&database.sql(sql)).await?;
    }
    for (number, step) in STEPS.iter().enumerate().take(to).skip(version) {
        for part in *step {
            client.batch_execute(&database.sql(part)).await?;
        }
        let sql = database.sql("INSERT INTO eddyline.versions (version) VALUES ($1)");
        client.query_typed(&sql, &[(&(number as i32 + 1), Type::INT4)]).await?;
    }
    client.batch_execute("COMMIT").await?;
    Ok(Ok(version))
}

fn refusal(schema: &str, version: usize, to: usize, allowed: bool) -> Option<StoreError> {
    let why = if version > to {
        format!(
            "schema {schema} has tables of version {version}, but this Eddyline only supports versions up to {to}: use a \
             newer Eddyline"
        )
    } else if allowed || version == to {
        return None;
    } else if version == 0 {
        format!(
            "schema {schema} has no tables: create them with `eddy migrate --store URL`, or start without --no-migrate"
        )
    } else {
        format!(
            "schema {schema} has tables of version {version}, and this Eddyline needs {to}: run `eddy migrate --store \
             URL`, or start without --no-migrate"
        )
    };
    Some(StoreError::Unavailable(why))
}
