//! Child processes in process groups, so that their descendants are stopped with them.

use std::process::ExitStatus;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::trouble::Trouble;

/// How long to wait for a killed process. It dies at once, unless it is stuck in a system call.
const DEATH: Duration = Duration::from_secs(2);
/// How long a worker has after the second SIGTERM.
const AGAIN: Duration = Duration::from_secs(2);
/// How often a group is polled for its end.
const LOOK: Duration = Duration::from_millis(10);

/// The leaders of all live groups.
static ALL: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<Pid>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills all live groups, before this process exits without dropping them.
pub fn kill_all() {
    for leader in std::mem::take(&mut *all()) {
        let _ = kill_process_group(leader, Signal::KILL);
    }
}

/// A process in a group of its own. Dropping it kills what is left of the group.
#[derive(Debug)]
pub struct Group {
    pub child: Child,
    leader: Option<Pid>,
}

impl Group {
    pub fn spawn(command: &mut Command) -> std::io::Result<Group> {
        let child = command.process_group(0).kill_on_drop(true).spawn()?;
        let leader = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        all().extend(leader);
        Ok(Group { child, leader })
    }

    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for the process, then kills what it left running in its group.
    pub async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        let status = self.child.wait().await;
        self.kill();
        status
    }

    /// Sends SIGTERM to the group, and SIGKILL after `grace`. Waits for the whole group: a shell exits at once, while
    /// the processes it started may still be cleaning up.
    pub async fn stop(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        let ended = async {
            let _ = self.child.wait().await;
            // There is no signal for the end of the last process of a group.
            while self.leader.is_some_and(|leader| test_kill_process_group(leader).is_ok()) {
                tokio::time::sleep(LOOK).await;
            }
        };
        if tokio::time::timeout(grace, ended).await.is_err() {
            self.signal(Signal::KILL);
            let _ = self.child.wait().await;
        }
        self.kill();
    }

    /// Stops a worker: the first SIGTERM lets it finish its tasks, the second one makes it end its commands.
    pub async fn stop_worker(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        if tokio::time::timeout(grace, self.child.wait()).await.is_err() {
            self.stop(AGAIN).await;
        }
        self.kill();
    }

    /// SIGKILL, without a chance to clean up.
    pub async fn kill_now(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait().await;
        self.kill();
    }

    fn signal(&self, signal: Signal) {
        if let Some(leader) = self.leader {
            // Fails if the group has already ended.
            let _ = kill_process_group(leader, signal);
        }
    }

    fn kill(&mut self) {
        self.signal(Signal::KILL);
        // From now on the system may reuse the process id.
        if let Some(leader) = self.leader.take() {
            all().retain(|other| *other != leader);
        }
    }
}

impl Drop for Group {
    /// Waits for the killed process, so that files it had open can be removed afterwards.
    fn drop(&mut self) {
        self.kill();
        let until = Instant::now() + DEATH;
        while self.child.id().is_some() && matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(DEATH / 1_000);
        }
    }
}

/// Waits for SIGINT, SIGTERM or SIGHUP; the next call waits for the next signal. Only one caller may wait at a time.
pub async fn asked_to_end() -> Result<(), Trouble> {
    let mut signals = SIGNALS.lock().await;
    let [interrupt, terminate, hangup] = match &mut *signals {
        Some(signals) => signals,
        none => {
            let listen =
                |kind| signal(kind).map_err(|error| Trouble::failed(format!("cannot listen for signals: {error}")));
            let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
            let [interrupt, terminate, hangup] = kinds.map(listen);
            none.insert([interrupt?, terminate?, hangup?])
        }
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// Kept from the first call on, so that a second signal is not missed between two calls.
static SIGNALS: tokio::sync::Mutex<Option<[tokio::signal::unix::Signal; 3]>> = tokio::sync::Mutex::const_new(None);
