//! Keeps a worker running: again when its files change, and when it dies.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::Instant;

use super::files::{Changes, Wanted};
use super::{LOOK, say};
use crate::Context;
use crate::connect::Where;
use crate::processes::Group;
use crate::screen::Ink;
use crate::trouble::Trouble;

/// How long a worker has to end when it is asked to.
const GRACE: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A worker that lived so long did not die of what it was started with.
const LIVED: Duration = Duration::from_secs(10);

const SOURCES: [&str; 14] =
    ["sh", "bash", "py", "js", "mjs", "cjs", "ts", "rb", "go", "rs", "java", "kt", "php", "toml"];

/// Until it is told to stop; or at once, if it cannot be started at all.
pub async fn keep_running(
    ctx: &Context,
    at: &Where,
    command: &[String],
    dir: Option<&Path>,
    mut stopping: watch::Receiver<bool>,
) -> Result<(), Trouble> {
    let Some((program, arguments)) = command.split_first() else { return Ok(()) };
    let (dir, wanted) = watched(dir);
    let mut changes = Changes::of(&dir, wanted);
    changes.look();
    let (mut pause, mut started) = (FIRST_PAUSE, false);
    loop {
        let mut worker = Command::new(program);
        worker.args(arguments).env("EDDY_URL", &at.url).stdin(Stdio::null());
        if let Some(key) = &at.api_key {
            worker.env("EDDY_KEY", key);
        }
        if let Some(path) = path_with_eddy() {
            worker.env("PATH", path);
        }
        let began = Instant::now();
        let happened = match Group::spawn(&mut worker) {
            Ok(mut group) => {
                started = true;
                say(ctx, Ink::Faint, &format!("worker: {}", command.join(" ")));
                let happened = tokio::select! {
                    ended = group.wait() => Happened::Died(ended.map_or_else(|error| error.to_string(), |how| how.to_string())),
                    () = changed(&mut changes) => Happened::Changed,
                    () = told(&mut stopping) => Happened::Told,
                };
                if !matches!(happened, Happened::Died(_)) {
                    group.stop_worker(GRACE).await;
                }
                happened
            }
            // It could be before: its file is being written, perhaps.
            Err(error) if started => Happened::Died(format!("it cannot be started: {error}")),
            Err(error) => return Err(Trouble::usage(format!("`{}` cannot be started: {error}", command.join(" ")))),
        };
        match happened {
            Happened::Told => return Ok(()),
            Happened::Changed => {
                say(ctx, Ink::Faint, &format!("{} changed: the worker is restarted", dir.display()));
                pause = FIRST_PAUSE;
            }
            Happened::Died(how) => {
                pause = if began.elapsed() >= LIVED { FIRST_PAUSE } else { pause };
                say(ctx, Ink::Bad, &format!("the worker ended ({how}); again in {pause:?}, or when a file changes"));
                tokio::select! {
                    _ = tokio::time::timeout(pause, changed(&mut changes)) => {}
                    () = told(&mut stopping) => return Ok(()),
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

enum Happened {
    Died(String),
    Changed,
    Told,
}

/// Whoever could tell being gone is as good as being told.
async fn told(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// Everything in a directory that is meant; of this directory, where a worker may well write, only what is source.
fn watched(dir: Option<&Path>) -> (PathBuf, &'static Wanted) {
    let src = Path::new("src");
    match dir {
        Some(dir) => (dir.to_owned(), &|_| true),
        None if src.is_dir() => (src.to_owned(), &|_| true),
        None => (PathBuf::from("."), &|path| {
            let ending = path.extension().and_then(|ending| ending.to_str());
            ending.is_some_and(|ending| SOURCES.contains(&ending))
        }),
    }
}

/// A worker may be a script that calls `eddy`: this one, and not another that happens to be installed.
fn path_with_eddy() -> Option<OsString> {
    let own = std::env::current_exe().ok()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(own.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&path))).ok()
}

/// Never at once: whatever writes files all the time must not make this a busy loop.
async fn changed(changes: &mut Changes<'_>) {
    loop {
        tokio::time::sleep(LOOK).await;
        if !changes.look().is_empty() {
            return;
        }
    }
}
