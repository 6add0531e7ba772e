//! Disturbs the instances and their database, and measures how long it takes until runs progress again.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use eddyline::protocol::RunResult;
use eddyline::{Client, Error, Method};
use serde_json::{Value, json};
use tokio::task::block_in_place;

use crate::cluster::{Cluster, INSTANCES, LEASE};
use crate::health::{Health, State, look};
use crate::ledger::Ledger;
use crate::proxy::Chance;

/// How soon everything must work again after a disturbance.
pub const RECOVERY: Duration = LEASE.saturating_add(Duration::from_secs(2));
/// How long a disturbance lasts.
const A_WHILE: Duration = Duration::from_secs(2);
const A_MOMENT: Duration = Duration::from_millis(300);
const POLL: Duration = Duration::from_millis(20);
const PROBE_GIVES_UP: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disturbance {
    /// SIGKILL to an instance, and a new process a moment later.
    Killed,
    /// SIGSTOP for longer than a lease, then SIGCONT.
    Stopped,
    /// Some of the connections to the database are ended, a few times.
    Terminated,
    /// The database crashes and recovers.
    Restarted,
    /// The database is stopped for some seconds.
    Away,
    /// The connections of one instance are cut at its commits.
    Cut,
}

const ALL: [Disturbance; 6] = [
    Disturbance::Killed,
    Disturbance::Stopped,
    Disturbance::Terminated,
    Disturbance::Restarted,
    Disturbance::Away,
    Disturbance::Cut,
];

/// Each disturbance once, in random order.
pub fn shuffled(chance: &mut Chance) -> Vec<Disturbance> {
    let mut rest = ALL.to_vec();
    let take = |_| rest.swap_remove(chance.next() as usize % rest.len());
    (0..ALL.len()).map(take).collect()
}

/// A disturbance, when it began and ended by the machine's clock, and how long it took until a new run completed
/// through each instance.
#[derive(Debug)]
pub struct Disturbed {
    pub what: Disturbance,
    pub began_at: i64,
    pub over_at: i64,
    pub recovered_in: Duration,
    /// The allowed recovery time: [`RECOVERY`], plus the time of a run on this machine without disturbance.
    pub allowed: Duration,
}

pub struct Harm<'a> {
    pub cluster: &'a mut Cluster,
    pub health: &'a Health,
    pub ledger: Arc<Ledger>,
    pub chance: &'a mut Chance,
    /// The longest time of a run through one instance without disturbance.
    pub usual: Duration,
}

impl Harm<'_> {
    pub async fn disturb(&mut self, what: Disturbance) -> Disturbed {
        self.cluster.check_alive();
        self.usual = self.usual.max(self.probed().await);
        let began_at = now_ms();
        match what {
            Disturbance::Killed => self.kill().await,
            Disturbance::Stopped => self.stop().await,
            Disturbance::Terminated => {
                for _ in 0..4 {
                    self.cluster.database.terminate_backends(2).await;
                    tokio::time::sleep(A_MOMENT).await;
                }
            }
            Disturbance::Restarted => block_in_place(|| self.cluster.database.restart()),
            Disturbance::Away => self.away().await,
            Disturbance::Cut => {
                self.cluster.cutter.cut(true);
                tokio::time::sleep(A_WHILE).await;
                self.cluster.cutter.cut(false);
            }
        }
        let (over_at, over) = (now_ms(), Instant::now());
        self.recover(over, what).await;
        let (recovered_in, allowed) = (over.elapsed(), self.allowed());
        if recovered_in > allowed {
            self.ledger.problem(format!("after {what:?} it took {recovered_in:?} until every instance worked again"));
        }
        Disturbed { what, began_at, over_at, recovered_in, allowed }
    }

    fn allowed(&self) -> Duration {
        RECOVERY + 2 * self.usual
    }

    fn victim(&mut self) -> usize {
        self.chance.next() as usize % INSTANCES
    }

    async fn kill(&mut self) {
        let victim = self.victim();
        block_in_place(|| self.cluster.eddies[victim].kill());
        self.others_work(victim).await;
        block_in_place(|| self.cluster.eddies[victim].restart());
    }

    async fn stop(&mut self) {
        let victim = self.victim();
        self.cluster.eddies[victim].signal("STOP");
        let stopped = Instant::now();
        self.others_work(victim).await;
        tokio::time::sleep((LEASE + Duration::from_secs(1)).saturating_sub(stopped.elapsed())).await;
        self.cluster.eddies[victim].signal("CONT");
    }

    /// While one instance is down, runs complete through the others.
    async fn others_work(&self, victim: usize) {
        let begun = Instant::now();
        for at in (0..INSTANCES).filter(|at| *at != victim) {
            self.probe(at).await;
        }
        if begun.elapsed() > self.allowed() {
            let took = begun.elapsed();
            self.ledger.problem(format!("while instance {victim} was down it took {took:?} until the others worked"));
        }
    }

    /// Every instance reports that it is not ready, and none accepts a start.
    async fn away(&mut self) {
        block_in_place(|| self.cluster.database.stop());
        let stopped = Instant::now();
        for (at, (_, state)) in self.health.states.iter().enumerate() {
            let mut state = state.subscribe();
            let unready = state.wait_for(|state| *state == State::Unready);
            if tokio::time::timeout(A_WHILE, unready).await.is_err() {
                self.ledger.problem(format!("instance {at} reports ready without a database"));
            }
        }
        let client = self.cluster.eddies[0].client();
        let begun = tokio::time::timeout(A_WHILE, start(&client)).await;
        if let Ok(Ok(run)) = begun {
            self.ledger.problem(format!("{run} was acknowledged without a database"));
        }
        tokio::time::sleep(A_WHILE.saturating_sub(stopped.elapsed())).await;
        block_in_place(|| self.cluster.database.start_again());
    }

    /// Waits until every instance is ready and completes a run.
    async fn recover(&mut self, over: Instant, what: Disturbance) {
        for (at, eddy) in self.cluster.eddies.iter().enumerate() {
            while look(eddy.addr).await != State::Ready {
                assert!(
                    over.elapsed() < PROBE_GIVES_UP,
                    "instance {at} did not become ready after {what:?}: {}",
                    eddy.log()
                );
                tokio::time::sleep(POLL).await;
            }
        }
        self.probed().await;
        self.cluster.check_alive();
    }

    /// How long it takes to complete a run through each instance.
    pub async fn probed(&self) -> Duration {
        let begun = Instant::now();
        futures_util::future::join_all((0..INSTANCES).map(|at| self.probe(at))).await;
        begun.elapsed()
    }

    /// Completes a run through one instance.
    async fn probe(&self, at: usize) {
        let client = self.cluster.eddies[at].client();
        let begun = Instant::now();
        let mut run: Option<String> = None;
        while begun.elapsed() < PROBE_GIVES_UP {
            let asked = async {
                if run.is_none() {
                    run = Some(start(&client).await?);
                }
                let path = format!("/v1/runs/{}/result", run.as_deref().unwrap_or_default());
                client.call::<RunResult>(Method::GET, &path, &[("wait", "1s".to_owned())], None::<&()>).await
            };
            match asked.await {
                Ok(result) if result.status == "completed" => {
                    self.ledger.book().runs.insert(run.unwrap(), "diamond");
                    return;
                }
                Ok(_) => {}
                Err(error) => {
                    assert!(error.is_retryable(), "{error}");
                    tokio::time::sleep(POLL).await;
                }
            }
        }
        panic!("no run completes through instance {at}: {}", self.cluster.eddies[at].log());
    }
}

/// The tag of runs that measure recovery and are not in the ledger.
pub const PROBE: &str = "probe";

async fn start(client: &Client) -> Result<String, Error> {
    let body = json!({"input": {"n": 1}, "tags": [PROBE]});
    let started: Value = client.call(Method::POST, "/v1/flows/diamond/runs", &[], Some(&body)).await?;
    Ok(started["run_id"].as_str().unwrap().to_owned())
}

pub fn now_ms() -> i64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as i64
}
