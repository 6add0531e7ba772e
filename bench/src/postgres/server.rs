//! A private PostgreSQL server: the distribution's, in a directory of its own, which keeps what it acknowledges. Stores
//! use it over TCP; what watches it uses a socket in its directory.

use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use tokio_postgres::{Client, NoTls};

type Failed = Box<dyn std::error::Error>;

/// How often to try another port: a free port may be taken by another process before the server binds it.
const TRIES: usize = 5;

/// What is not PostgreSQL's default: memory, and checkpoints so rare that none falls into a measurement. `fsync` and
/// `synchronous_commit` are on.
pub const SETTINGS: &str =
    "shared_buffers 1GB, wal_compression lz4, max_wal_size 16GB, checkpoint_timeout 30min, checksums";

/// Starts the server, with the arguments that `EDDYLINE_BENCH_POSTGRES` adds, says so, and stops it when its own input is closed, as it is at the latest when this process ends.
const SCRIPT: &str = r#"
    set -e
    bin=$1 dir=$2 port=$3
    if [ ! -d "$dir/data" ]; then
        "$bin/initdb" -D "$dir/data" -k -A trust -U eddy --no-sync -E UTF8 --locale=C >"$dir/initdb.log" 2>&1
    fi
    "$bin/postgres" -D "$dir/data" -k "$dir" -c port="$port" -c listen_addresses=127.0.0.1 -c max_connections=300 \
        -c shared_buffers=1GB -c wal_compression=lz4 -c max_wal_size=16GB -c checkpoint_timeout=30min \
        -c log_line_prefix='%a|' $EDDYLINE_BENCH_POSTGRES >"$dir/server.log" 2>&1 &
    server=$!
    set +e
    until "$bin/pg_isready" -q -h "$dir" -p "$port"; do kill -0 $server || exit 1; sleep 0.05; done
    echo ready
    cat >/dev/null
    kill -INT $server
    wait $server
"#;

pub struct Server {
    child: Child,
    stdin: Option<ChildStdin>,
    dir: PathBuf,
    port: u16,
}

impl Server {
    /// None if PostgreSQL is not installed.
    pub fn start() -> Result<Option<Server>, Failed> {
        let Some(bin) = binaries() else { return Ok(None) };
        let dir = tempfile::Builder::new().prefix("eddyline-bench-pg-").tempdir()?.keep();
        let as_root = is_root();
        if as_root && !Command::new("chown").arg("postgres").arg(&dir).status()?.success() {
            return Err("PostgreSQL does not run as root, and there is no user postgres to run it as".into());
        }
        for _ in 0..TRIES {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let mut command = if as_root { Command::new("setpriv") } else { Command::new("sh") };
            if as_root {
                command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups", "sh"]);
            }
            command.arg("-c").arg(SCRIPT).arg("sh").arg(&bin).arg(&dir).arg(port.to_string()).current_dir("/");
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            let stdin = child.stdin.take();
            let mut said = [0; 5];
            let read = child.stdout.take().ok_or("the server has no output")?.read_exact(&mut said);
            let server = Server { child, stdin, dir: dir.clone(), port };
            if read.is_ok() && said == *b"ready" {
                return Ok(Some(server));
            }
        }
        Err(format!("PostgreSQL did not start; see its logs in {}", dir.display()).into())
    }

    /// The URL of a store in a schema.
    pub fn url(&self, schema: &str) -> String {
        format!("postgres://eddy@127.0.0.1:{}/postgres?sslmode=disable&schema={schema}", self.port)
    }

    /// The URL of a database, as others understand it.
    pub fn plain_url(&self, database: &str) -> String {
        format!("postgres://eddy@127.0.0.1:{}/{database}?sslmode=disable", self.port)
    }

    /// A connection over TCP, as a store has it.
    pub async fn connect(&self) -> Result<Client, Failed> {
        connected(&format!("host=127.0.0.1 port={} user=eddy dbname=postgres options='-c jit=off'", self.port)).await
    }

    /// A connection to watch the server by, to another database than the stores'.
    pub async fn watch(&self) -> Result<Watch, Failed> {
        let socket = self.dir.display();
        let client = connected(&format!("host={socket} port={} user=eddy dbname=template1", self.port)).await?;
        Ok(Watch { client, postmaster: self.postmaster()? })
    }

    /// The lines that the server has logged so far.
    pub fn log(&self) -> Result<Vec<String>, Failed> {
        let log = std::fs::read(self.dir.join("server.log"))?;
        Ok(String::from_utf8_lossy(&log).lines().map(str::to_owned).collect())
    }

    fn postmaster(&self) -> Result<u32, Failed> {
        let file = std::fs::read_to_string(self.dir.join("data/postmaster.pid"))?;
        Ok(file.lines().next().unwrap_or_default().trim().parse()?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

async fn connected(settings: &str) -> Result<Client, Failed> {
    let (client, connection) = tokio_postgres::connect(settings, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// What the server did so far.
#[derive(Debug, Clone, Copy)]
pub struct Counts {
    /// Transactions that wrote something.
    pub commits: u64,
    pub wal: u64,
    pub cpu: Duration,
}

pub struct Watch {
    pub client: Client,
    postmaster: u32,
}

impl Watch {
    pub async fn counts(&self) -> Result<Counts, Failed> {
        let sql = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, \
                   pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint";
        let row = self.client.query_one(sql, &[]).await?;
        Ok(Counts { commits: row.get::<_, i64>(0) as u64, wal: row.get::<_, i64>(1) as u64, cpu: self.cpu() })
    }

    /// Of all its processes, also those that have ended.
    fn cpu(&self) -> Duration {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let ids = processes.filter_map(|process| process.file_name().to_str()?.parse::<u32>().ok());
        let ticks = |id: u32| -> u64 {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
            let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
            match id == self.postmaster {
                true => (11..15).map(field).sum(),
                false if field(1) == u64::from(self.postmaster) => field(11) + field(12),
                false => 0,
            }
        };
        Duration::from_millis(ids.map(ticks).sum::<u64>() * 10)
    }
}

fn binaries() -> Option<PathBuf> {
    let has_all = |dir: &Path| ["initdb", "postgres", "pg_isready"].iter().all(|name| dir.join(name).exists());
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
