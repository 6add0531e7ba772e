//! Processes that a command starts, and ends with everything that they started in turn.

use std::process::ExitStatus;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::trouble::Trouble;

/// A killed process is dead at once, unless the system is stuck in a call for it.
const DEATH: Duration = Duration::from_secs(2);
/// How long a worker has when it is asked for the second time.
const AGAIN: Duration = Duration::from_secs(2);
/// How often it is looked whether a group has ended.
const LOOK: Duration = Duration::from_millis(10);

/// The groups that are there.
static ALL: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<Pid>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills whatever this process has started and not ended: before it ends without dropping everything.
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

    /// Until the process itself has ended; what it left running is killed.
    pub async fn wait(&mut self) -> std::io::Result<ExitStatus> {
        let status = self.child.wait().await;
        self.kill();
        status
    }

    /// Asks the group to end, and kills it after `grace`. A shell ends at once when it is asked to; what it has started may
    /// still be cleaning up.
    pub async fn stop(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        let ended = async {
            let _ = self.child.wait().await;
            // Nobody is told when the last of a group ends.
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

    /// The same for a worker, which finishes what it has when it is asked once, and ends what it has started when it is asked
    /// again.
    pub async fn stop_worker(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        if tokio::time::timeout(grace, self.child.wait()).await.is_err() {
            self.stop(AGAIN).await;
        }
        self.kill();
    }

    /// At once, and without a chance to clean up.
    pub async fn kill_now(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait().await;
        self.kill();
    }

    fn signal(&self, signal: Signal) {
        if let Some(leader) = self.leader {
            // It fails when nobody is left, which is what was wanted.
            let _ = kill_process_group(leader, signal);
        }
    }

    fn kill(&mut self) {
        self.signal(Signal::KILL);
        // Its number may be given to others from now on.
        if let Some(leader) = self.leader.take() {
            all().retain(|other| *other != leader);
        }
    }
}

impl Drop for Group {
    /// What was killed is gone when this returns: files that it had open can be removed.
    fn drop(&mut self) {
        self.kill();
        let until = Instant::now() + DEATH;
        while self.child.id().is_some() && matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            std::thread::sleep(DEATH / 1_000);
        }
    }
}

/// Comes when the user, or the system, asks this process to end; the next time, when it is asked again. One may wait for it
/// at a time.
pub async fn asked_to_end() -> Result<(), Trouble> {
    let mut signals = SIGNALS.lock().await;
    let [interrupt, terminate, hangup] = match &mut *signals {
        Some(signals) => signals,
        none => {
            let listen =
                |kind| signal(kind).map_err(|error| Trouble::failed(format!("signals cannot be received: {error}")));
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

/// Listened for from the first time on: a second signal may come before it is waited for.
static SIGNALS: tokio::sync::Mutex<Option<[tokio::signal::unix::Signal; 3]>> = tokio::sync::Mutex::const_new(None);
