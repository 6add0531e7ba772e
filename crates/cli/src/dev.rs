//! `eddy dev`: a server, flows that are registered as they are written, and a worker that is restarted as it is written.

mod files;
mod flows;
mod restarts;

use std::path::PathBuf;
use std::time::Duration;

use eddyline_server::ServeArgs;
use tokio::sync::watch;

use super::connect::{Remote, Where};
use super::processes::asked_to_end;
use super::screen::{Ink, Line};
use super::trouble::Trouble;
use super::{Context, warnings_only};

/// How often files are looked at.
const LOOK: Duration = Duration::from_millis(300);

#[derive(Debug, clap::Args)]
pub struct Dev {
    /// Where the flows are; they are registered, and again whenever they change
    #[arg(long, value_name = "DIR", default_value = "flows")]
    flows: PathBuf,
    /// Where runs are kept: a directory, or `memory:`
    #[arg(long, env = "EDDY_STORE", value_name = "URL", default_value = "./.eddyline")]
    store: String,
    /// Where to listen
    #[arg(long, env = "EDDY_LISTEN", value_name = "ADDR", default_value = "127.0.0.1:7070")]
    listen: String,
    /// The worker is restarted when a file in here changes; `src` if there is one, else this directory
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
    // What a developer has to know is said here; the server's own log is for when something is wrong.
    warnings_only();
    let args = ServeArgs { store: Some(dev.store.clone()), listen: Some(dev.listen.clone()), ..ServeArgs::default() };
    let server = eddyline_server::start(&args).await?;
    let at = Where { url: server.url(), ..ctx.at.clone() };
    let remote = Remote::new(&at)?;
    say(ctx, Ink::Strong, &format!("eddyline listens on {}, and keeps runs in {}", at.url, dev.store));
    let (stop, stopping) = watch::channel(false);
    let worker = restarts::keep_running(ctx, &at.url, &dev.command, dev.watch.as_deref(), stopping);
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
        // The worker ends when it is told to; one that cannot be started at all ends everything.
        ended = async { tokio::try_join!(worker, asked) } => ended.map(|_| ()),
    };
    tokio::select! {
        () = server.stop() => ended,
        again = asked_to_end() => again.and(Err(Trouble::interrupted())),
    }
}

fn say(ctx: &Context, ink: Ink, text: &str) {
    ctx.screen.aside(Line::default().with(ink, text).paint(ctx.screen.color));
}
