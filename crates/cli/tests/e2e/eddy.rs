//! `eddy serve` as a process on its own directory. It is killed when it is dropped, even by a panic.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use eddyline::Client;
use tempfile::TempDir;

/// A timeout that is reached only if something hangs.
pub const LONG: Duration = Duration::from_secs(60);
/// How often a start is retried if the port is taken.
const MAX_STARTS: usize = 50;
/// The limit of the address space, so that a server that allocates without end dies before the machine is out of
/// memory.
const MAX_SPACE_KB: u64 = 8 << 20;

pub struct Eddy {
    child: Child,
    pub addr: SocketAddr,
    dir: TempDir,
    /// The URL of a store elsewhere; the embedded store in `dir` if not set.
    url_of_store: Option<String>,
    flags: Vec<String>,
    envs: Vec<(String, PathBuf)>,
}

impl Eddy {
    /// A server on a new directory.
    pub fn start(flags: &[&str]) -> Eddy {
        Eddy::start_with(flags, &[])
    }

    /// A server on a new directory, with environment variables.
    pub fn start_with(flags: &[&str], envs: &[(&str, &Path)]) -> Eddy {
        // A PostgreSQL URL without parameters of ours: then each server has a new schema of that database. Tests about the files of the embedded store then fail.
        let store = std::env::var("EDDYLINE_TEST_STORE").ok();
        let schema = format!("schema=e2e_{}", uuid::Uuid::new_v4().simple());
        let between = |url: &str| if url.contains('?') { '&' } else { '?' };
        Eddy::start_at(store.map(|url| format!("{url}{}{schema}", between(&url))), flags, envs)
    }

    /// A server on a store that others may use too.
    pub fn on_store(url: &str, flags: &[&str]) -> Eddy {
        Eddy::on_store_with(url, flags, &[])
    }

    /// The same, with environment variables.
    pub fn on_store_with(url: &str, flags: &[&str], envs: &[(&str, &Path)]) -> Eddy {
        Eddy::start_at(Some(url.to_owned()), flags, envs)
    }

    fn start_at(url_of_store: Option<String>, flags: &[&str], envs: &[(&str, &Path)]) -> Eddy {
        let envs: Vec<(String, PathBuf)> = envs.iter().map(|(name, to)| ((*name).to_owned(), to.into())).collect();
        let dir = tempfile::tempdir().unwrap();
        let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        for _ in 0..MAX_STARTS {
            if let Some((child, addr)) = spawn(dir.path(), url_of_store.as_deref(), free_port(), &flags, &envs) {
                return Eddy { child, addr, dir, url_of_store, flags, envs };
            }
        }
        panic!("the server does not start: {}", log(dir.path()));
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn client(&self) -> Client {
        Client::new(&self.url()).unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn store(&self) -> PathBuf {
        store(self.dir.path())
    }

    /// SIGKILL, and waits for the end of the process.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts the server again with the same directory, address and flags.
    pub fn restart(&mut self) {
        for _ in 0..MAX_STARTS {
            let url_of_store = self.url_of_store.as_deref();
            if let Some((child, addr)) = spawn(self.dir.path(), url_of_store, self.addr, &self.flags, &self.envs) {
                (self.child, self.addr) = (child, addr);
                return;
            }
        }
        panic!("the server does not start again: {}", log(self.dir.path()));
    }

    /// SIGTERM, and returns the exit status.
    pub async fn terminate(&mut self) -> ExitStatus {
        self.signal("TERM");
        self.ended().await
    }

    pub fn signal(&self, name: &str) {
        let id = self.pid().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().unwrap().success());
    }

    /// The exit status, if the process has ended.
    #[allow(dead_code, reason = "for tests in other directories")]
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// The log of this process and the ones before it.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Waits until the process exits by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        let deadline = std::time::Instant::now() + LONG;
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status,
                None if std::time::Instant::now() > deadline => panic!("it does not stop: {}", log(self.dir.path())),
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }
}

impl Drop for Eddy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("log of the server: {}", log(self.dir.path()));
        }
    }
}

/// The process and its address; `None` if it exited before it listened.
fn spawn(
    dir: &Path,
    url_of_store: Option<&str>,
    addr: SocketAddr,
    flags: &[String],
    envs: &[(String, PathBuf)],
) -> Option<(Child, SocketAddr)> {
    let log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -v {MAX_SPACE_KB} && exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_eddy")]);
    let at = url_of_store.map_or_else(|| store(dir), PathBuf::from);
    command.arg("serve").arg("--store").arg(at).args(["--listen", &addr.to_string()]).args(flags);
    command.envs(envs.iter().map(|(name, to)| (name, to)));
    command.env("EDDY_LOG", "warn").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    match line.trim().split_once("http://") {
        Some((_, addr)) => Some((child, addr.parse().unwrap())),
        None => {
            child.wait().unwrap();
            None
        }
    }
}

fn store(dir: &Path) -> PathBuf {
    dir.join("store")
}

fn log(dir: &Path) -> String {
    let whole = std::fs::read_to_string(dir.join("log")).unwrap_or_default();
    let lines: Vec<&str> = whole.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}

/// A free port outside of the ephemeral range. Otherwise, while the server is down, a client that tries to reach it
/// could get the same port as its source port, and connect to itself.
fn free_port() -> SocketAddr {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let first = range.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(32_768u16);
    let (lowest, room) = (10_000u16, u32::from(first.saturating_sub(10_000)));
    if room < 1_000 {
        return SocketAddr::from(([127, 0, 0, 1], 0));
    }
    let from = uuid::Uuid::new_v4().as_u128() as u32;
    let ports = (0..room).map(|at| lowest + (from.wrapping_add(at) % room) as u16);
    let mut free = ports.filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok());
    free.next().unwrap().local_addr().unwrap()
}

/// The value of a metric; 0 if it is not exported.
pub async fn metric(eddy: &Eddy, name: &str) -> f64 {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(eddy.addr).await.unwrap();
    let request = format!("GET /metrics HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", eddy.addr);
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0.0)
}
