//! The tables and functions, and the steps from one version of them to the next.

use deadpool_postgres::Object;

use super::database::Database;
use super::pg_error::{PgError, PgResult};
use crate::error::{Result, StoreError};

/// Each takes the database one version further. What was released is never changed; a new step is appended, and a function
/// whose parameters or tables change gets a new name, since two binaries may run side by side.
const STEPS: &[&[&str]] = &[&[
    include_str!("sql/tables.sql"),
    include_str!("sql/commit.sql"),
    include_str!("sql/claims.sql"),
    include_str!("sql/due.sql"),
    include_str!("sql/documents.sql"),
    include_str!("sql/instances.sql"),
]];

/// The oldest version of PostgreSQL that has what is used.
const OLDEST: i32 = 140_000;

/// Refuses a server that would lose or mix up what it acknowledged.
pub(super) async fn check_server(client: &Object) -> Result<()> {
    let asked = "SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), \
                 current_setting('transaction_isolation'), current_setting('synchronous_commit'), \
                 current_setting('server_encoding')";
    let row = client.query_one(asked, &[]).await.map_err(|error| PgError::from(error).into_error())?;
    let (version, standby): (i32, bool) = (row.get(0), row.get(1));
    let (isolation, synchronous, encoding): (String, String, String) = (row.get(2), row.get(3), row.get(4));
    let refuse = |why: String| Err(StoreError::Unavailable(why));
    if version < OLDEST {
        return refuse(format!("the server is PostgreSQL {}; use version 14 or later", version / 10_000));
    }
    if standby {
        return refuse("the server is a standby, which can't be written to; use the primary's address".to_owned());
    }
    if isolation != "read committed" {
        return refuse(format!(
            "default_transaction_isolation is {isolation:?}; set it to \"read committed\" for this role or database"
        ));
    }
    if synchronous == "off" {
        return refuse(
            "synchronous_commit is off, so a crash would lose acknowledged work; set it to on for this role or database"
                .to_owned(),
        );
    }
    if encoding != "UTF8" {
        return refuse(format!("the database has the encoding {encoding}; create one with UTF8"));
    }
    Ok(())
}

/// Brings the tables up to date, all steps or none; one process at a time. Tables of a newer version are left alone.
pub(super) async fn migrate(database: &Database, client: Object, allowed: bool) -> Result<()> {
    match in_transaction(database, &client, allowed).await {
        Ok(answer) => answer,
        Err(error) => {
            // What was begun is rolled back with its connection.
            drop(Object::take(client));
            Err(error.into_error())
        }
    }
}

async fn in_transaction(database: &Database, client: &Object, allowed: bool) -> PgResult<Result<()>> {
    client.batch_execute("BEGIN").await?;
    client.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 3))", &[&database.schema()]).await?;
    let there = client.query_one("SELECT to_regclass($1 || '.versions') IS NOT NULL", &[&database.schema()]).await?;
    let version = match there.get::<_, bool>(0) {
        true => {
            let sql = database.sql("SELECT coalesce(max(version), 0) FROM eddyline.versions");
            client.query_one(&*sql, &[]).await?.get::<_, i32>(0) as usize
        }
        false => 0,
    };
    if version > STEPS.len() || (version < STEPS.len() && !allowed) {
        client.batch_execute("ROLLBACK").await?;
        let schema = database.schema();
        return Ok(Err(StoreError::Unavailable(match version > STEPS.len() {
            true => format!(
                "schema {schema} has tables of version {version}, and this Eddyline knows them up to {}: start the newer \
                 Eddyline that wrote them",
                STEPS.len()
            ),
            false => format!(
                "schema {schema} has tables of version {version}, and this Eddyline needs {}: run `eddy migrate`",
                STEPS.len()
            ),
        })));
    }
    if version == 0 {
        let schema = database.schema();
        let sql = format!(
            "CREATE SCHEMA IF NOT EXISTS {schema}; CREATE TABLE {schema}.versions (version int PRIMARY KEY, applied_at \
             timestamptz NOT NULL DEFAULT now())"
        );
        client.batch_execute(&sql).await?;
    }
    for (number, step) in STEPS.iter().enumerate().skip(version) {
        for part in *step {
            client.batch_execute(&database.sql(part)).await?;
        }
        let sql = database.sql("INSERT INTO eddyline.versions (version) VALUES ($1)");
        client.execute(&*sql, &[&(number as i32 + 1)]).await?;
    }
    client.batch_execute("COMMIT").await?;
    Ok(Ok(()))
}
