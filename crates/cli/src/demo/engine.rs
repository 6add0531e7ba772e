//! The demo's engine: `eddy serve` of this binary, in a separate process that can be killed.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::processes::Group;
use crate::trouble::Trouble;

/// How long it may take until it listens.
const START: Duration = Duration::from_secs(15);
const STOP: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Engine {
    group: Group,
    pub url: String,
}

impl Engine {
    /// Starts an engine on the store. The port of `listen` may be 0.
    pub async fn start(store: &std::path::Path, listen: &str) -> Result<Engine, Trouble> {
        let mut command = Command::new(own_path()?);
        // The user's settings are for the user's server, not for this one.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("EDDY_")) {
            command.env_remove(name);
        }
        command.arg("serve").arg("--store").arg(store).args(["--listen", listen, "--lease", "2s"]);
        command.env("EDDY_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::spawn(&mut command)
            .map_err(|error| Trouble::failed(format!("cannot start the engine process: {error}")))?;
        let url = match tokio::time::timeout(START, listening(&mut group)).await {
            Ok(url) => url?,
            Err(_) => return Err(Trouble::failed(format!("the engine did not listen within {START:?}"))),
        };
        Ok(Engine { group, url })
    }

    pub fn id(&self) -> u32 {
        self.group.id().unwrap_or_default()
    }

    /// SIGKILL, without a warning, like a power cut.
    pub async fn kill(mut self) {
        self.group.kill_now().await;
    }

    pub async fn stop(mut self) {
        self.group.stop(STOP).await;
    }
}

fn own_path() -> Result<PathBuf, Trouble> {
    std::env::current_exe().map_err(|error| Trouble::failed(format!("cannot find the path of eddy: {error}")))
}

/// The address that the engine prints, or why it did not start.
async fn listening(group: &mut Group) -> Result<String, Trouble> {
    let Some(stdout) = group.child.stdout.take() else { return Err(Trouble::failed("the engine has no stdout")) };
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

/// Discards the log: the engine would block on a full pipe.
fn drain(group: &mut Group) {
    if let Some(mut stderr) = group.child.stderr.take() {
        tokio::spawn(async move {
            let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
        });
    }
}
