//! A PostgreSQL server for the tests of one process: the distribution's, in a directory of its own, on a socket in it.
//!
//! `EDDY_TEST_POSTGRES` names another server, by a URL without parameters of ours.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The URL of a fresh schema.
pub fn fresh_url() -> String {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let base = base_url();
    let between = if base.contains('?') { '&' } else { '?' };
    let (process, number) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
    // The time keeps apart processes that had the same number, on a server that stays.
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis();
    format!("{base}{between}schema=test_{since}_{process}_{number}&pool_size=8")
}

/// Deletes schemas that are not used any more: each takes about 2 MB.
pub async fn drop_schemas(urls: Vec<String>) {
    let (client, connection) = match tokio_postgres::connect(base_url(), tokio_postgres::NoTls).await {
        Ok(connected) => connected,
        Err(_) => return,
    };
    let connection = tokio::spawn(connection);
    for url in urls {
        let schema = url.split("schema=").nth(1).and_then(|rest| rest.split('&').next()).unwrap_or_default();
        let sql = format!(
            "SET client_min_messages = error; SET lock_timeout = '10s'; DROP SCHEMA IF EXISTS {schema} CASCADE"
        );
        client.batch_execute(&sql).await.unwrap();
    }
    drop(client);
    connection.await.unwrap().unwrap();
}

/// Executes a statement in a schema, which is written SCHEMA in it. False if it fails.
#[allow(dead_code, reason = "most tests use the store alone")]
pub async fn execute(url: &str, sql: &str) -> bool {
    let schema = url.split("schema=").nth(1).and_then(|rest| rest.split('&').next()).unwrap_or_default();
    let (client, connection) = tokio_postgres::connect(base_url(), tokio_postgres::NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    let done = client.batch_execute(&sql.replace("SCHEMA", schema)).await.is_ok();
    drop(client);
    connection.await.unwrap().unwrap();
    done
}

/// Deletes schemas at the end of a test, where nothing can be awaited.
pub fn drop_schemas_now(urls: Vec<String>) {
    let deleting = std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(drop_schemas(urls));
    });
    _ = deleting.join();
}

fn base_url() -> &'static str {
    static URL: OnceLock<String> = OnceLock::new();
    URL.get_or_init(|| match std::env::var("EDDY_TEST_POSTGRES") {
        Ok(url) if !url.is_empty() => url,
        _ => start(),
    })
}

/// Starts a server that ends with this process: a shell waits for the end of its input, which only this process writes to.
#[allow(clippy::zombie_processes, reason = "it ends after this process")]
fn start() -> String {
    let bin = binaries().expect("PostgreSQL is not installed: initdb and postgres were not found");
    let dir = tempfile::Builder::new().prefix("eddy-pg-").tempdir().unwrap().keep();
    let root = is_root();
    if root {
        let owned = Command::new("chown").arg("postgres").arg(&dir).status().unwrap();
        assert!(owned.success(), "the server can't run as root, and there is no user postgres to run it as");
    }
    let script = r#"
        set -e
        bin=$1 dir=$2
        "$bin/initdb" -D "$dir/data" -A trust -U eddy --no-sync -E UTF8 --locale=C >"$dir/initdb.log" 2>&1
        "$bin/postgres" -D "$dir/data" -k "$dir" -c listen_addresses= -c fsync=off -c full_page_writes=off \
            -c wal_level=minimal -c max_wal_senders=0 -c max_wal_size=128MB -c max_connections=200 \
            -c deadlock_timeout=200ms >"$dir/server.log" 2>&1 &
        server=$!
        set +e
        until "$bin/pg_isready" -q -h "$dir"; do kill -0 $server || exit 1; sleep 0.05; done
        echo ready
        cat >/dev/null
        kill -QUIT $server
        wait $server
        rm -rf "$dir"
    "#;
    let mut command = if root { Command::new("setpriv") } else { Command::new("sh") };
    if root {
        command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups", "sh"]);
    }
    let started = command.arg("-c").arg(script).arg("sh").arg(&bin).arg(&dir).current_dir("/").stdin(Stdio::piped());
    let mut child = started.stdout(Stdio::piped()).spawn().unwrap();
    // Never closed by hand: the end of this process closes it.
    std::mem::forget(child.stdin.take());
    let mut said = [0; 5];
    let read = child.stdout.take().unwrap().read_exact(&mut said);
    assert!(read.is_ok() && said == *b"ready", "the server did not start; see its logs in {}", dir.display());
    format!("postgres://eddy@/postgres?host={}", dir.display())
}

pub fn binaries() -> Option<PathBuf> {
    let has_all = |dir: &Path| ["initdb", "postgres", "pg_isready"].iter().all(|name| dir.join(name).exists());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut versions: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    versions.sort();
    dirs.extend(versions.into_iter().rev());
    dirs.into_iter().find(|dir| has_all(dir))
}

pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output();
    id.is_ok_and(|id| id.stdout.starts_with(b"0\n"))
}
