//! `eddy migrate`: creates or updates the tables of a PostgreSQL store.

use eddyline_server::StoreUrl;
use eddyline_store::Postgres;
use serde_json::json;

use super::Context;
use super::trouble::Trouble;

#[derive(Debug, clap::Args)]
pub struct Migrate {
    /// The store: `postgres://…`
    #[arg(long, value_name = "URL", default_value = "./.eddyline", env = "EDDY_STORE", hide_env_values = true)]
    store: String,
}

pub async fn run(ctx: &Context, migrate: Migrate) -> Result<(), Trouble> {
    let StoreUrl::Postgres(url) = StoreUrl::parse(&migrate.store)? else {
        let text = "only PostgreSQL stores are migrated; an embedded store updates itself when it is opened";
        return ctx.screen.answer(&json!({"migrates_itself": true}), text);
    };
    let migrated = Postgres::migrate(&url).await.map_err(|error| Trouble::refused(error.reason()))?;
    let (schema, from, to) = (migrated.schema, migrated.from, migrated.to);
    let text = match from {
        0 => format!("schema {schema}: created the tables, version {to}"),
        _ if from == to => format!("schema {schema}: the tables are up to date, version {to}"),
        _ => format!("schema {schema}: updated the tables from version {from} to {to}"),
    };
    ctx.screen.answer(&json!({"schema": schema, "from": from, "to": to}), text)
}
