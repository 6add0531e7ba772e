//! A server with two tenants: one attacks, the other works and measures its requests.

use std::time::Duration;

use serde_json::json;

use crate::eddy::Eddy;
use crate::tenant::Tenant;
use crate::watch::{self, BOUND, MAX_SLOWDOWN, Seen};

const ADMIN_KEY: &str = "an-admin-key-that-only-these-tests-know";
/// The most memory that the server may use, whatever a tenant does.
const MAX_MEMORY_MB: u64 = 1 << 10;
/// How long the server is measured without an attack, and after it was killed in the middle of one.
const QUIET: Duration = Duration::from_secs(2);
const AFTERWARDS: Duration = Duration::from_secs(3);
/// How long an attack runs before the server is killed.
const HEAD_START: Duration = Duration::from_millis(1_500);

/// Serialises the tests of one process, because they measure time.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub struct Rig {
    pub eddy: Eddy,
    pub attacker: Tenant,
    pub other: Tenant,
    max_memory_mb: u64,
}

/// Runs an attack during another tenant's work, then again with a kill in the middle of it. Both times the other
/// tenant's requests must stay quick, and the server alive and within its memory.
pub async fn withstands(flags: &[&str], attack: impl AsyncFn(&Rig)) {
    withstands_within(MAX_MEMORY_MB, flags, attack).await;
}

pub async fn withstands_within(max_memory_mb: u64, flags: &[&str], attack: impl AsyncFn(&Rig)) {
    let _alone = ALONE.lock().await;
    let mut rig = Rig { max_memory_mb, ..Rig::start(flags).await };
    let quiet = rig.watch_for(QUIET).await;
    println!("quiet: {quiet}");
    let bound = BOUND.max(quiet.p99() * MAX_SLOWDOWN);
    // Another process may have disturbed the measurement: repeat it once.
    let mut during = rig.watch_during(attack(&rig)).await;
    if let Err(why) = during.judge(bound) {
        println!("once more, since {why}");
        during = rig.watch_during(attack(&rig)).await;
    }
    println!("during the attack: {during}");
    during.judge(bound).unwrap();
    rig.check_memory();

    // Run the attack until the kill.
    let _ = tokio::time::timeout(HEAD_START, attack(&rig)).await;
    rig.eddy.kill();
    rig.eddy.restart();
    let mut after = rig.watch_for(AFTERWARDS).await;
    if let Err(why) = after.judge(bound) {
        println!("once more, since {why}");
        after = rig.watch_for(AFTERWARDS).await;
    }
    println!("after a kill: {after}");
    after.judge(bound).unwrap();
    rig.check_memory();
}

impl Rig {
    pub async fn start(flags: &[&str]) -> Rig {
        let keys = ["--keys", "on", "--admin-key", ADMIN_KEY];
        let eddy = Eddy::start(&[&keys, flags].concat());
        let admin = Tenant { addr: eddy.addr, key: ADMIN_KEY.to_owned() };
        let (attacker, other) = (tenant(&admin, "attacker").await, tenant(&admin, "other").await);
        watch::prepare(&other).await;
        Rig { eddy, attacker, other, max_memory_mb: MAX_MEMORY_MB }
    }

    pub async fn watch_during(&self, attack: impl Future<Output = ()>) -> Seen {
        let (over, is_over) = tokio::sync::watch::channel(false);
        let other = self.other.clone();
        // On its own thread, so that work of the attacker in this process does not count as the server's time.
        let watching = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(watch::watch(other, is_over))
        });
        attack.await;
        over.send_replace(true);
        tokio::task::spawn_blocking(move || watching.join().unwrap()).await.unwrap()
    }

    pub async fn watch_for(&self, time: Duration) -> Seen {
        self.watch_during(tokio::time::sleep(time)).await
    }

    /// Panics if the server has died, or its peak memory exceeds the limit.
    pub fn check_memory(&self) {
        let peak = self.memory_kb("VmHWM") >> 10;
        println!("at most {peak} MB");
        assert!(peak < self.max_memory_mb, "the server needed {peak} MB of {} MB", self.max_memory_mb);
    }

    /// The value of a metric; 0 if it is not exported.
    pub async fn metric(&self, name: &str) -> f64 {
        let admin = Tenant { addr: self.eddy.addr, key: ADMIN_KEY.to_owned() };
        let metrics = admin.get("/metrics").await.unwrap().body;
        let mut lines = metrics.as_str().unwrap_or_default().lines();
        let number = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        number.and_then(|number| number.trim().parse().ok()).unwrap_or(0.0)
    }

    /// A line of `/proc/<pid>/status`.
    pub fn memory_kb(&self, what: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.eddy.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        number.unwrap_or_else(|| panic!("the server has died: no {what} in\n{status}"))
    }
}

async fn tenant(admin: &Tenant, name: &str) -> Tenant {
    let made = admin.post("/v1/namespaces", &json!({ "name": name })).await.unwrap();
    assert!(matches!(made.status, 200 | 201), "{made:?}");
    let key = json!({"name": name, "namespace": name, "scopes": ["admin"]});
    let made = admin.post("/v1/keys", &key).await.unwrap();
    assert_eq!(made.status, 201, "{made:?}");
    Tenant { addr: admin.addr, key: made.text("key").to_owned() }
}
