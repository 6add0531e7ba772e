//! `eddy dev`: a server that registers flows and restarts a worker whenever their files change.

mod files;
mod flows;
mod restarts;

use std::path::PathBuf;
use std::time::Duration;

use eddyline_server::{ServeArgs, Server};
use tokio::sync::watch;

use super::connect::{Remote, Where};
use super::processes::asked_to_end;
use super::screen::{Ink, Line};
use super::trouble::Trouble;
use super::{Context, warnings_only};

/// How often files are checked for changes.
const LOOK: Duration = Duration::from_millis(300);

#[derive(Debug, clap::Args)]
pub struct Dev {
    /// The directory of the flows; they are registered at the start and whenever they change
    #[arg(long, value_name = "DIR", default_value = "flows")]
    flows: PathBuf,
    #[command(flatten)]
    serve: Box<ServeArgs>,
    /// Restart the worker when a file in this directory changes [default: `src` if it exists, else `.`]
    #[arg(long, value_name = "DIR")]
    watch: Option<PathBuf>,
    /// A worker to run, such as `-- cargo run`
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub async fn run(ctx: &Context, dev: Dev) -> Result<(), Trouble> {
    if let Some(dir) = dev.watch.as_deref().filter(|dir| !dir.is_dir()) {
        return Err(Trouble::usage(format!("--watch {}: there is no such directory", dir.display())));
    }
    // `eddy dev` prints what a developer needs to know; of the server's own log only warnings are shown.
    warnings_only(&ctx.screen);
    let server = eddyline_server::start(&dev.serve).await?;
    let api_key = match own_key(ctx, &server, &dev.serve) {
        Ok(key) => key,
        Err(trouble) => {
            server.stop().await;
            return Err(trouble);
        }
    };
    let at = Where { url: server.url(), api_key, ..ctx.at.clone() };
    let remote = Remote::new(&at)?;
    let kept = match server.store().as_str() {
        "memory:" | "memory" => "memory until it stops".to_owned(),
        place => place.to_owned(),
    };
    say(ctx, Ink::Strong, &format!("eddyline listens on {}, and keeps runs in {kept}", at.url));
    let (stop, stopping) = watch::channel(false);
    let worker = restarts::keep_running(ctx, &at, &dev.command, dev.watch.as_deref(), stopping);
    let flows = flows::keep_registered(ctx, &remote, &dev.flows);
    let asked = async {
        let asked = asked_to_end().await;
        say(ctx, Ink::Faint, "stopping");
        stop.send_replace(true);
        asked
    };
    let engine = server.engine().clone();
    let ended = tokio::select! {
        kept = flows => kept,
        why = engine.failed() => Err(Trouble::failed(format!("the engine has failed: {why}"))),
        // The worker ends when `stop` is sent; one that cannot be started at all ends `eddy dev`.
        ended = async { tokio::try_join!(worker, asked) } => ended.map(|_| ()),
    };
    tokio::select! {
        () = server.stop() => ended,
        again = asked_to_end() => again.and(Err(Trouble::interrupted())),
    }
}

/// The key with which flows are registered and which the worker gets, if the server requires keys.
fn own_key(ctx: &Context, server: &Server, serve: &ServeArgs) -> Result<Option<String>, Trouble> {
    let key = ctx.at.api_key.clone().or_else(|| serve.admin_key.clone());
    if server.asks_for_keys() && key.is_none() {
        let message = "the server requires keys, and `eddy dev` has none to register flows with";
        return Err(
            Trouble::usage(message).help("pass the server's first key with --admin-key, or a key with --api-key")
        );
    }
    Ok(key)
}

fn say(ctx: &Context, ink: Ink, text: &str) {
    ctx.screen.aside(Line::default().with(ink, text).paint(ctx.screen.log_colors));
}
