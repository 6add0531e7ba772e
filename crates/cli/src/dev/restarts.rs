//! Keeps a worker running: restarts it when its files change and when it exits.

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

/// How long a worker may take to exit after SIGTERM.
const GRACE: Duration = Duration::from_secs(10);
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A worker that ran this long did start properly: the pause before its restart is reset.
const STARTED_WELL: Duration = Duration::from_secs(10);

const SOURCES: [&str; 14] =
    ["sh", "bash", "py", "js", "mjs", "cjs", "ts", "rb", "go", "rs", "java", "kt", "php", "toml"];

/// Runs until `stopping` is true. Fails at once if the worker cannot be started the first time.
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
        let event = match Group::spawn(&mut worker) {
            Ok(mut group) => {
                started = true;
                say(ctx, Ink::Faint, &format!("worker: {}", command.join(" ")));
                let event = tokio::select! {
                    ended = group.wait() => {
                        WorkerEvent::Exited(ended.map_or_else(|error| error.to_string(), |how| how.to_string()))
                    }
                    () = changed(&mut changes) => WorkerEvent::FilesChanged,
                    () = stop_requested(&mut stopping) => WorkerEvent::StopRequested,
                };
                if !matches!(event, WorkerEvent::Exited(_)) {
                    group.stop_worker(GRACE).await;
                }
                event
            }
            // It did start before: its file may be in the middle of a save.
            Err(error) if started => WorkerEvent::Exited(format!("it cannot be started: {error}")),
            Err(error) => return Err(Trouble::usage(format!("`{}` cannot be started: {error}", command.join(" ")))),
        };
        match event {
            WorkerEvent::StopRequested => return Ok(()),
            WorkerEvent::FilesChanged => {
                say(ctx, Ink::Faint, &format!("{} changed: restarting the worker", dir.display()));
                pause = FIRST_PAUSE;
            }
            WorkerEvent::Exited(how) => {
                pause = if began.elapsed() >= STARTED_WELL { FIRST_PAUSE } else { pause };
                say(ctx, Ink::Bad, &format!("the worker exited ({how}); restart in {pause:?}, or when a file changes"));
                tokio::select! {
                    _ = tokio::time::timeout(pause, changed(&mut changes)) => {}
                    () = stop_requested(&mut stopping) => return Ok(()),
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

enum WorkerEvent {
    Exited(String),
    FilesChanged,
    StopRequested,
}

/// A dropped sender counts as a request to stop.
async fn stop_requested(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// All files of `--watch` or `src`; of the current directory, to which a worker may write, only source files.
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

/// `PATH` with the directory of this `eddy` first, so that a worker script calls it and not another installed one.
fn path_with_eddy() -> Option<OsString> {
    let own = std::env::current_exe().ok()?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(own.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&path))).ok()
}

/// Sleeps before each look, so that files that change all the time do not cause a busy loop.
async fn changed(changes: &mut Changes<'_>) {
    loop {
        tokio::time::sleep(LOOK).await;
        if !changes.look().is_empty() {
            return;
        }
    }
}
