//! A PostgreSQL server of its own for this test, which stops, starts and restarts it. What it acknowledges is synced to
//! disk.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Runs the commands from its standard input, and stops the server when the input is closed, even after a panic.
const SCRIPT: &str = r#"
    bin=$1 dir=$2
    start() {
        "$bin/pg_ctl" -D "$dir/data" -l "$dir/server.log" -w -t 60 -o "-k $dir -c listen_addresses= -c fsync=on \
            -c max_connections=200 -c deadlock_timeout=200ms -c log_min_messages=fatal" start >/dev/null 2>&1
    }
    stop() { "$bin/pg_ctl" -D "$dir/data" -m immediate -w stop >/dev/null 2>&1; }
    "$bin/initdb" -D "$dir/data" -A trust -U eddy --no-sync -E UTF8 --locale=C >"$dir/initdb.log" 2>&1
    start && echo done || echo failed
    while read -r order; do
        case $order in
            start) start ;;
            stop) stop ;;
            restart) stop && start ;;
        esac && echo done || echo failed
    done
    stop
    rm -rf "$dir"
"#;

pub struct Database {
    dir: PathBuf,
    shell: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Database {
    pub fn start() -> Database {
        let bin = binaries().expect("PostgreSQL is not installed: initdb and pg_ctl were not found");
        let dir = tempfile::Builder::new().prefix("eddy-chaos-pg-").tempdir().unwrap().keep();
        let mut command = Command::new("setsid");
        if is_root() {
            let owned = Command::new("chown").arg("postgres").arg(&dir).status().unwrap();
            assert!(owned.success(), "the server can't run as root, and there is no user postgres to run it as");
            command.args(["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]);
        }
        // A session of its own: it must outlive signals to the test, so that it can stop the server.
        let command = command.args(["sh", "-c", SCRIPT, "sh"]).arg(&bin).arg(&dir).current_dir("/");
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (shell.stdin.take(), BufReader::new(shell.stdout.take().unwrap()));
        let mut database = Database { dir, shell, orders, answers };
        database.answered("start");
        database
    }

    /// Kills every process of the server, so that only synced data survives.
    pub fn restart(&mut self) {
        self.order("restart");
    }

    pub fn stop(&mut self) {
        self.order("stop");
    }

    pub fn start_again(&mut self) {
        self.order("start");
    }

    /// The URL for the instances, and for the proxy between one of them and the server.
    pub fn url(&self) -> String {
        format!("postgres://eddy@/postgres?host={}&pool_size=8", self.dir.display())
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join(".s.PGSQL.5432")
    }

    /// Terminates one in `of` connections of the instances. Returns how many were terminated.
    pub async fn terminate_backends(&self, of: u32) -> usize {
        let Ok((client, connection)) = tokio_postgres::connect(&self.plain_url(), tokio_postgres::NoTls).await else {
            return 0;
        };
        let connection = tokio::spawn(connection);
        let some = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE pid <> pg_backend_pid() AND usename = 'eddy' AND random() < 1.0 / {of}"
        );
        let ended = client.query(&some, &[]).await.map_or(0, |rows| rows.len());
        drop(client);
        let _ = connection.await;
        ended
    }

    fn plain_url(&self) -> String {
        format!("postgres://eddy@/postgres?host={}", self.dir.display())
    }

    fn order(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
        self.answered(order);
    }

    fn answered(&mut self, order: &str) {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let logs = self.dir.display();
        assert_eq!(line.trim(), "done", "PostgreSQL could not {order}; see {logs}/server.log and {logs}/initdb.log");
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.shell.wait();
    }
}

fn binaries() -> Option<PathBuf> {
    let has_all = |dir: &Path| ["initdb", "postgres", "pg_ctl"].iter().all(|name| dir.join(name).exists());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut versions: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    versions.sort();
    dirs.extend(versions.into_iter().rev());
    dirs.into_iter().find(|dir| has_all(dir))
}

fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.starts_with(b"0\n"))
}
