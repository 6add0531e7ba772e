//! The demo's engine: this same binary, serving in a process of its own, which can be killed.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::processes::Group;
use crate::trouble::Trouble;

/// How long it may take to listen.
const START: Duration = Duration::from_secs(15);
const STOP: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Engine {
    group: Group,
    pub url: String,
}

impl Engine {
    /// Starts one on the store; at `listen`, whose port may be 0.
    pub async fn start(store: &std::path::Path, listen: &str) -> Result<Engine, Trouble> {
        let mut command = Command::new(own_path()?);
        // The user's own settings are about the user's own server.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("EDDY_")) {
            command.env_remove(name);
        }
        command.arg("serve").arg("--store").arg(store).args(["--listen", listen, "--lease", "2s"]);
        command.env("EDDY_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::spawn(&mut command)
            .map_err(|error| Trouble::failed(format!("eddy cannot start itself: {error}")))?;
        let url = match tokio::time::timeout(START, listening(&mut group)).await {
            Ok(url) => url?,
            Err(_) => return Err(Trouble::failed("the engine did not listen in time")),
        };
        Ok(Engine { group, url })
    }

    pub fn id(&self) -> u32 {
        self.group.id().unwrap_or_default()
    }

    /// Without a warning, as a machine would lose its power.
    pub async fn kill(mut self) {
        self.group.kill_now().await;
    }

    pub async fn stop(mut self) {
        self.group.stop(STOP).await;
    }
}

fn own_path() -> Result<PathBuf, Trouble> {
    std::env::current_exe().map_err(|error| Trouble::failed(format!("eddy cannot find itself: {error}")))
}

/// The address that it says it listens on, or why it does not.
async fn listening(group: &mut Group) -> Result<String, Trouble> {
    let Some(stdout) = group.child.stdout.take() else { return Err(Trouble::failed("the engine is mute")) };
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if let Some((_, url)) = line.split_once("listens on ") {
            let url = url.trim().to_owned();
            drain(group);
            return Ok(url);
        }
    }
    let mut why = String::new();
    if let Some(stderr) = group.child.stderr.take() {
        let _ = tokio::io::AsyncReadExt::read_to_string(&mut BufReader::new(stderr), &mut why).await;
    }
    Err(Trouble::failed(format!("the engine did not start: {}", why.trim())))
}

/// What it says from now on is not shown; but a pipe that nobody reads would stop it.
fn drain(group: &mut Group) {
    if let Some(mut stderr) = group.child.stderr.take() {
        tokio::spawn(async move {
            let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        });
    }
}
