//! `eddy backup`: copies an embedded store.

use std::path::PathBuf;

use eddyline_server::StoreUrl;
use eddyline_store::Embedded;
use serde_json::json;

use super::Context;
use super::trouble::Trouble;

#[derive(Debug, clap::Args)]
pub struct Backup {
    /// The directory of the store; a server may have it open
    #[arg(long, value_name = "DIR", default_value = "./.eddyline", env = "EDDY_STORE", hide_env_values = true)]
    store: String,
    /// A new directory for the copy, which can be opened as a store
    #[arg(value_name = "TO")]
    to: PathBuf,
}

pub async fn run(ctx: &Context, backup: Backup) -> Result<(), Trouble> {
    let StoreUrl::Directory(from) = StoreUrl::parse(&backup.store)? else {
        return Err(Trouble::usage("`eddy backup` copies embedded stores only")
            .help("back up a PostgreSQL store with PostgreSQL's tools, or copy it: `eddy store copy`"));
    };
    if !from.join("eddyline.db").is_file() {
        return Err(Trouble::not_found(format!("there is no store in {}", from.display())));
    }
    tokio::task::block_in_place(|| Embedded::backup_of(&from, &backup.to))
        .map_err(|error| Trouble::refused(error.reason()))?;
    let bytes = std::fs::metadata(backup.to.join("eddyline.db")).map(|file| file.len()).unwrap_or(0);
    let text = format!("{} copied to {} ({bytes} bytes, checked)", from.display(), backup.to.display());
    ctx.screen.answer(&json!({"from": from, "to": backup.to, "bytes": bytes}), text)
}
