//! A PostgreSQL server that one test starts, stops and hurts, on a TCP port and on a socket; and processes like it, which
//! run as another user than root and end with the test.

#![allow(dead_code)]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::server::{binaries, is_root};

/// Everybody may connect, by a socket without a password.
pub const TRUST: &str = "local all all trust\nhost all all 127.0.0.1/32 trust\n";

pub struct Private {
    pub dir: PathBuf,
    pub port: u16,
    bin: PathBuf,
    /// Stops the server and deletes the directory when its input ends, also if this process is killed.
    guard: Child,
}

impl Private {
    /// `settings` are lines of postgresql.conf; `certificate` is in PEM, with its key.
    pub fn start(hba: &str, settings: &str, certificate: Option<(String, String)>) -> Private {
        let bin = binaries().expect("PostgreSQL is not installed: initdb and postgres were not found");
        let dir = directory("eddy-private-pg-");
        let data = dir.join("data");
        let init = as_user(bin.join("initdb").to_str().unwrap())
            .args(["-A", "trust", "-U", "eddy", "--no-sync", "-E", "UTF8", "--locale=C", "-D"])
            .arg(&data)
            .output()
            .unwrap();
        assert!(init.status.success(), "{}", String::from_utf8_lossy(&init.stderr));
        write(&data.join("pg_hba.conf"), hba);
        let port = free_port();
        let mut lines = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{}'\nfsync = off\n\
             full_page_writes = off\nmax_connections = 100\ndeadlock_timeout = 200ms\nlogging_collector = off\n{settings}\n",
            dir.display()
        );
        if let Some((chain, key)) = certificate {
            write(&data.join("server.crt"), &chain);
            write(&data.join("server.key"), &key);
            lines.push_str("ssl = on\n");
        }
        write(&data.join("eddy.conf"), &lines);
        let conf = data.join("postgresql.conf");
        let text = std::fs::read_to_string(&conf).unwrap();
        write(&conf, &format!("{text}\ninclude = 'eddy.conf'\n"));
        let guard = guard(&format!(
            "cat >/dev/null; '{}' stop -D '{}' -m immediate -s; rm -rf '{}'",
            bin.join("pg_ctl").display(),
            data.display(),
            dir.display()
        ));
        let server = Private { dir, port, bin, guard };
        server.begin();
        server
    }

    fn ctl(&self, args: &[&str]) {
        let mut command = as_user(self.bin.join("pg_ctl").to_str().unwrap());
        command.arg("-D").arg(self.dir.join("data")).arg("-l").arg(self.dir.join("log")).args(args).arg("-s");
        // A server keeps what it inherits.
        let done = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        let log = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
        assert!(done.success(), "pg_ctl {args:?}: {log}");
    }

    pub fn begin(&self) {
        self.ctl(&["start", "-w"]);
    }

    /// `fast` or `immediate`.
    pub fn end(&self, mode: &str) {
        self.ctl(&["stop", "-w", "-m", mode]);
    }

    pub fn restart(&self, mode: &str) {
        self.ctl(&["restart", "-w", "-m", mode]);
    }

    /// A file of the server, by its path in the directory.
    pub fn put_file(&self, name: &str, text: &str) {
        write(&self.dir.join(name), text);
    }

    /// The server and the processes of its connections.
    fn processes(&self) -> Vec<String> {
        let file = std::fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let server = file.lines().next().unwrap().to_owned();
        let listed = Command::new("ps").args(["-o", "pid=", "--ppid", &server]).output().unwrap();
        let children = String::from_utf8(listed.stdout).unwrap();
        children.split_whitespace().map(str::to_owned).chain([server]).collect()
    }

    /// `STOP` or `CONT`.
    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill").arg(format!("-{signal}")).args(self.processes()).status().unwrap();
        assert!(sent.success());
    }

    /// For a user, over TCP by that name, with parameters.
    pub fn url(&self, user: &str, host: &str, parameters: &str) -> String {
        format!("postgres://{user}@{host}:{}/postgres?{parameters}", self.port)
    }

    /// A connection of the superuser, by the socket.
    pub async fn client(&self) -> tokio_postgres::Client {
        let url = format!("postgres://eddy@/postgres?host={}&port={}", self.dir.display(), self.port);
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        _ = self.guard.wait();
    }
}

/// PgBouncer before a private server, pooling transactions.
pub struct Bouncer {
    pub port: u16,
    pub server: Private,
    guard: Child,
}

impl Bouncer {
    /// None if it is not installed and `EDDY_SKIP_UNTESTABLE=1` allows that.
    pub fn start() -> Option<Bouncer> {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut dirs = path.split(':').chain(["/usr/sbin", "/usr/local/sbin"]).map(Path::new);
        let Some(bin) = dirs.find_map(|dir| Some(dir.join("pgbouncer")).filter(|file| file.exists())) else {
            let skip = std::env::var("EDDY_SKIP_UNTESTABLE").is_ok_and(|value| value == "1");
            assert!(skip, "PgBouncer is not installed (apt-get install pgbouncer)");
            return None;
        };
        let server = Private::start(TRUST, "", None);
        let (dir, port) = (directory("eddy-bouncer-"), free_port());
        // Fewer sessions than clients, so that they are shared.
        let config = format!(
            "[databases]\npostgres = host={} port={} dbname=postgres user=eddy\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 4\n\
             max_client_conn = 500\nlogfile = {}\n",
            server.dir.display(),
            server.port,
            dir.join("log").display()
        );
        write(&dir.join("bouncer.ini"), &config);
        let script = "'{bin}' -q '{dir}/bouncer.ini' >/dev/null 2>&1 & bouncer=$!; cat >/dev/null; kill -KILL $bouncer; \
                      wait $bouncer; rm -rf '{dir}'";
        let script = script.replace("{bin}", bin.to_str().unwrap()).replace("{dir}", dir.to_str().unwrap());
        let guard = guard(&script);
        let bouncer = Bouncer { port, server, guard };
        for _ in 0..500 {
            if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return Some(bouncer);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("{}", std::fs::read_to_string(dir.join("log")).unwrap_or_default());
    }

    pub fn url(&self, parameters: &str) -> String {
        format!("postgres://eddy@127.0.0.1:{}/postgres?{parameters}", self.port)
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        _ = self.guard.wait();
    }
}

/// A shell that has begun, and goes on at the end of its input.
fn guard(script: &str) -> Child {
    let mut command = as_user("sh");
    let script = format!("echo begun; {script}");
    let mut child = command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "begun\n");
    child
}

/// Neither of them runs as root.
fn as_user(program: &str) -> Command {
    let mut command = match is_root() {
        true => {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups", program]);
            command
        }
        false => Command::new(program),
    };
    command.current_dir("/");
    command
}

fn directory(prefix: &str) -> PathBuf {
    let dir = tempfile::Builder::new().prefix(prefix).tempdir().unwrap().keep();
    give(&dir);
    dir
}

fn give(path: &Path) {
    if is_root() {
        let owned = Command::new("chown").arg("postgres:postgres").arg(path).status().unwrap();
        assert!(owned.success(), "there is no user postgres to run the server as");
    }
}

/// Readable for nobody else.
fn write(file: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(file, text).unwrap();
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600)).unwrap();
    give(file);
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
