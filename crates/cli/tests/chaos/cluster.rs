//! Three instances on one database, each with its own connection path and its own clock.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use eddyline::Client;

use crate::cutter::Cutter;
use crate::database::Database;
use crate::eddy::Eddy;

pub const LEASE: Duration = Duration::from_secs(2);
pub const INSTANCES: usize = 3;
/// The instance behind the proxy that cuts connections to the database.
pub const BEHIND_CUTTER: usize = 2;

/// The offsets of the instances' clocks, for faketime.
const CLOCKS: [&str; INSTANCES] = ["+3600s", "+0s", "-3600s"];

pub struct Cluster {
    pub database: Database,
    pub cutter: Cutter,
    pub eddies: Vec<Eddy>,
}

impl Cluster {
    pub async fn start(seed: u64) -> Cluster {
        let database = Database::start();
        let cutter = Cutter::start(database.socket(), seed).await;
        let faketime =
            faketime().expect("faketime is not installed: libfaketimeMT.so.1 was not found (apt-get install faketime)");
        let lease = format!("{}ms", LEASE.as_millis());
        let start = |at: usize| {
            let url = if at == BEHIND_CUTTER { cutter.url() } else { database.url() };
            let name = format!("chaos-{at}");
            let envs = [
                ("LD_PRELOAD", faketime.as_path()),
                ("FAKETIME", Path::new(CLOCKS[at])),
                ("FAKETIME_DONT_FAKE_MONOTONIC", Path::new("1")),
            ];
            tokio::task::block_in_place(|| Eddy::on_store_with(&url, &["--lease", &lease, "--instance", &name], &envs))
        };
        let eddies = (0..INSTANCES).map(start).collect();
        Cluster { database, cutter, eddies }
    }

    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.eddies.iter().map(|eddy| eddy.addr).collect()
    }

    pub fn clients(&self) -> Vec<Client> {
        self.eddies.iter().map(Eddy::client).collect()
    }

    /// An instance ends only if it is killed.
    pub fn check_alive(&mut self) {
        for (at, eddy) in self.eddies.iter_mut().enumerate() {
            if let Some(status) = eddy.has_ended() {
                panic!("instance {at} ended by itself with {status}: {}", eddy.log());
            }
        }
    }
}

fn faketime() -> Option<PathBuf> {
    let dirs = ["/usr/lib", "/usr/local/lib"].into_iter().filter_map(|dir| std::fs::read_dir(dir).ok());
    let dirs = dirs.flat_map(|dir| dir.flatten().map(|entry| entry.path()));
    let dirs = dirs.flat_map(|dir| [dir.join("faketime"), dir]);
    let mut libraries = dirs.map(|dir| dir.join("libfaketimeMT.so.1"));
    libraries.find(|library| library.exists())
}
