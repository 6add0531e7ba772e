//! The server's settings, resolved from flags, environment and file.

use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use eddyline_engine::{EngineError, MAX_PAYLOAD_BYTES, PAYLOAD_BYTES_RANGE, Retention};
use eddyline_language::nearest::nearest;
use eddyline_protocol::Span;
use eddyline_store::StoreError;

use super::args::{KeysMode, ServeArgs};

const DEFAULT_STORE: &str = "./.eddyline";
const DEFAULT_LISTEN: &str = "127.0.0.1:7070";
const DEFAULT_LEASE: Duration = Duration::from_secs(30);
/// With a shorter lease a worker could not keep it over an ordinary network.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);
const DEFAULT_BODY_BYTES: usize = 16 << 20;
const DEFAULT_BODY_MEMORY: usize = 256 << 20;
const DEFAULT_RESPONSE_MEMORY: usize = 128 << 20;
const DEFAULT_TASK_MEMORY: usize = 128 << 20;
const DEFAULT_CONNECTIONS: usize = 4_096;
const DEFAULT_LONG_POLLS: usize = 4_096;
const DEFAULT_HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a server did not start, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    #[error("the configuration file {path}: {message}")]
    Config { path: String, message: String },
    #[error("{0}")]
    Usage(String),
    #[error("cannot open the store {url}: {}", source.reason())]
    Store { url: String, source: StoreError },
    #[error("cannot listen on {addr}: {source}{}", listen_elsewhere(source))]
    Bind { addr: String, source: std::io::Error },
    #[error("TLS: {0}")]
    Tls(String),
    #[error("the store does not respond: {0}")]
    FirstLook(EngineError),
    #[error("cannot create the first key: {0}")]
    FirstKey(EngineError),
    #[error("cannot listen for signals: {0}")]
    Signals(std::io::Error),
}

impl StartError {
    /// Whether a flag, or a file that a flag names, is wrong.
    pub fn is_usage(&self) -> bool {
        matches!(self, StartError::Config { .. } | StartError::Usage(_) | StartError::Tls(_))
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub store: String,
    pub reset_clock: bool,
    pub test_clock: bool,
    /// Create or update the tables of a PostgreSQL store.
    pub migrate: bool,
    pub listen: String,
    pub lease: Duration,
    pub keys: Option<KeysMode>,
    /// No keys although other machines can reach the server.
    pub insecure: bool,
    pub admin_key: Option<String>,
    pub behind_proxy: bool,
    pub tls: Option<TlsFiles>,
    pub public_url: Option<String>,
    pub instance: String,
    pub max_body: usize,
    pub body_memory: usize,
    pub response_memory: usize,
    pub task_memory: usize,
    /// Defaults to the engine's default.
    pub cache_memory: Option<usize>,
    pub max_connections: usize,
    pub max_long_polls: usize,
    pub header_timeout: Duration,
    pub backlog: Option<usize>,
    pub retention: Retention,
    pub max_payload: usize,
    pub warn_payload: Option<usize>,
    pub offline_after: Option<Duration>,
}

#[derive(Debug, Clone)]
pub(crate) struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Settings {
    pub async fn resolve(args: &ServeArgs) -> Result<Settings, StartError> {
        let args = with_file(args.clone()).await?;
        let lease = args.lease.map_or(DEFAULT_LEASE, Duration::from);
        if lease < SHORTEST_LEASE {
            return Err(StartError::Usage(format!("a lease of {lease:?} is too short: at least {SHORTEST_LEASE:?}")));
        }
        let offline_after = args.offline_after.map(Duration::from);
        if let Some(short) = offline_after.filter(|after| *after < SHORTEST_LEASE) {
            let message = format!("--offline-after of {short:?} is too short: at least {SHORTEST_LEASE:?}");
            return Err(StartError::Usage(message));
        }
        let max_payload = args.max_payload.map_or(MAX_PAYLOAD_BYTES, |size| size.bytes);
        if !PAYLOAD_BYTES_RANGE.contains(&max_payload) {
            return Err(StartError::Usage(format!("--max-payload of {max_payload} bytes: expected 1KiB to 8MiB")));
        }
        let retention = retention(&args)?;
        let tls = match (args.tls_cert, args.tls_key) {
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
            (None, None) => None,
            _ => return Err(StartError::Usage("--tls-cert and --tls-key must be used together".to_owned())),
        };
        if let Some(url) = &args.public_url
            && !url.starts_with("http://")
            && !url.starts_with("https://")
        {
            return Err(StartError::Usage(format!("--public-url {url}: expected http://… or https://…")));
        }
        Ok(Settings {
            store: args.store.unwrap_or_else(|| DEFAULT_STORE.to_owned()),
            reset_clock: args.reset_clock.unwrap_or(false),
            migrate: !args.no_migrate.unwrap_or(false),
            test_clock: args.test_clock.unwrap_or(false),
            listen: args.listen.map_or_else(|| Ok(DEFAULT_LISTEN.to_owned()), listen)?,
            lease,
            keys: args.keys,
            insecure: args.insecure.unwrap_or(false),
            admin_key: args.admin_key,
            behind_proxy: args.behind_proxy.unwrap_or(false),
            tls,
            public_url: args.public_url,
            instance: args.instance.unwrap_or_else(|| format!("eddy-{}", std::process::id())),
            max_body: args.max_body.unwrap_or(DEFAULT_BODY_BYTES),
            body_memory: args.body_memory.map_or(DEFAULT_BODY_MEMORY, |size| size.bytes),
            response_memory: args.response_memory.map_or(DEFAULT_RESPONSE_MEMORY, |size| size.bytes),
            task_memory: args.task_memory.map_or(DEFAULT_TASK_MEMORY, |size| size.bytes),
            cache_memory: args.cache_memory.map(|size| size.bytes),
            max_connections: args.max_connections.unwrap_or(DEFAULT_CONNECTIONS).max(1),
            max_long_polls: args.max_long_polls.unwrap_or(DEFAULT_LONG_POLLS),
            header_timeout: args.header_timeout.map_or(DEFAULT_HEADER_TIMEOUT, Duration::from),
            backlog: args.backlog,
            retention,
            max_payload,
            warn_payload: args.warn_payload.map(|size| size.bytes),
            offline_after,
        })
    }

    pub fn keys_on(&self, addr: SocketAddr) -> bool {
        match self.keys {
            Some(mode) => mode == KeysMode::On,
            None => !addr.ip().is_loopback() && !self.insecure,
        }
    }

    /// Refuses settings under which anyone who can reach the port has full access, or can read keys in transit.
    pub fn refuse_unsafe(&self, addr: SocketAddr) -> Result<(), StartError> {
        if addr.ip().is_loopback() {
            return Ok(());
        }
        if !self.keys_on(addr) {
            if self.insecure {
                return Ok(());
            }
            return Err(StartError::Usage(format!(
                "{addr} can be reached from other machines, but keys are off: remove `--keys off`, listen on \
                 127.0.0.1, or pass --insecure if its port is not published, as in a container"
            )));
        }
        if self.tls.is_none() && !self.behind_proxy {
            return Err(StartError::Usage(format!(
                "{addr} can be reached from other machines, and keys would be sent in plain text: pass --tls-cert and \
                 --tls-key, or --behind-proxy if a proxy in front terminates TLS, or listen on 127.0.0.1"
            )));
        }
        Ok(())
    }
}

fn retention(args: &ServeArgs) -> Result<Retention, StartError> {
    let usual = Retention::default();
    let ms = |set: Option<Span>, usual| set.map_or(usual, |span| i64::try_from(span.ms).unwrap_or(i64::MAX));
    let retention = Retention {
        timelines_ms: ms(args.retention_timelines, usual.timelines_ms),
        runs_ms: ms(args.retention_runs, usual.runs_ms),
        events_ms: ms(args.retention_events, usual.events_ms),
        ..usual
    };
    match retention.problem() {
        Some(problem) => Err(StartError::Usage(format!("--retention-timelines, --retention-runs: {problem}"))),
        None => Ok(retention),
    }
}

/// Checks the form `HOST:PORT`; whether the host exists turns out when the server binds to it.
fn listen(written: String) -> Result<String, StartError> {
    let (host, port) = written.rsplit_once(':').unwrap_or(("", &written));
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = bare.map_or(!host.is_empty() && !host.contains(':'), |ip| ip.parse::<Ipv6Addr>().is_ok());
    // `parse` would accept a sign as well.
    let port = Some(port).filter(|port| port.bytes().all(|digit| digit.is_ascii_digit()));
    match port.and_then(|port| port.parse::<u16>().ok()) {
        Some(_) if is_host => Ok(written),
        // Only a port: suggest it with the default host.
        Some(port) if host.is_empty() => {
            Err(StartError::Usage(format!("--listen \"{written}\": expected HOST:PORT, such as 127.0.0.1:{port}")))
        }
        _ => Err(StartError::Usage(format!("--listen \"{written}\": expected HOST:PORT, such as {DEFAULT_LISTEN}"))),
    }
}

/// Fills unset values from the file that `--config` names.
pub(super) async fn with_file(mut args: ServeArgs) -> Result<ServeArgs, StartError> {
    match args.config.take() {
        Some(path) => Ok(args.over(read_config(&path).await?)),
        None => Ok(args),
    }
}

async fn read_config(path: &std::path::Path) -> Result<ServeArgs, StartError> {
    let shown = path.display().to_string();
    let failed = |message: String| StartError::Config { path: shown.clone(), message };
    let text = tokio::fs::read_to_string(path).await.map_err(|error| failed(error.to_string()))?;
    toml::from_str(&text).map_err(|error| failed(nearest_key(error.to_string())))
}

/// For an unknown key, names the nearest known one instead of all of them, which are many.
fn nearest_key(message: String) -> String {
    let Some((before, known)) = message.split_once(", expected one of ") else { return message };
    let found = before.rsplit_once("unknown field `").map_or("", |(_, found)| found.trim_end_matches('`'));
    match nearest(found, known.split('`').skip(1).step_by(2)) {
        Some(near) => format!("{before}; did you mean `{near}`?"),
        None => format!("{before}; the keys are the flags of `eddy serve` without `--`"),
    }
}

/// What to do if another process listens there.
fn listen_elsewhere(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => "; another server may be running: use another address with --listen",
        _ => "",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::size::Size;
    use super::*;

    #[tokio::test]
    async fn flags_beat_the_file_and_unknown_keys_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("eddyline.toml");
        std::fs::write(
            &path,
            "lease = \"7s\"\nlisten = \"127.0.0.1:1\"\nmax-body = 5\nbehind-proxy = true\nbody-memory = \"64MiB\"\ncache-memory = 1024\n",
        )
        .unwrap();
        let args =
            ServeArgs { config: Some(path.clone()), listen: Some("127.0.0.1:2".to_owned()), ..ServeArgs::default() };
        let settings = Settings::resolve(&args).await.unwrap();
        assert_eq!(settings.listen, "127.0.0.1:2");
        assert_eq!((settings.lease, settings.max_body, settings.behind_proxy), (Duration::from_secs(7), 5, true));
        assert_eq!((settings.body_memory, settings.cache_memory), (64 << 20, Some(1_024)));

        std::fs::write(&path, "lease = 5000\nbacklog = 3\n").unwrap();
        let settings = Settings::resolve(&args).await.unwrap();
        assert_eq!((settings.lease, settings.backlog), (Duration::from_secs(5), Some(3)));

        std::fs::write(&path, "leas = \"7s\"\n").unwrap();
        let error = Settings::resolve(&args).await.unwrap_err().to_string();
        assert!(error.ends_with("unknown field `leas`; did you mean `lease`?"), "{error}");
        std::fs::write(&path, "colour = 1\n").unwrap();
        let error = Settings::resolve(&args).await.unwrap_err().to_string();
        assert!(
            error.ends_with("unknown field `colour`; the keys are the flags of `eddy serve` without `--`"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn how_long_things_are_kept_is_said_by_flags_and_by_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("eddyline.toml");
        let file = "retention-timelines = \"2d\"\nretention-runs = \"3d\"\nretention-events = 5000\n\
                    max-payload = \"1MiB\"\noffline-after = \"9s\"\n";
        std::fs::write(&path, file).unwrap();
        let span = |text: &str| Some(text.parse().unwrap());
        let args = ServeArgs { config: Some(path), retention_timelines: span("1d"), ..ServeArgs::default() };
        let settings = Settings::resolve(&args).await.unwrap();
        let Retention { timelines_ms, runs_ms, events_ms, .. } = settings.retention;
        assert_eq!((timelines_ms, runs_ms, events_ms), (86_400_000, 3 * 86_400_000, 5_000));
        assert_eq!((settings.max_payload, settings.offline_after), (1 << 20, Some(Duration::from_secs(9))));
        let error = async |args: ServeArgs| Settings::resolve(&args).await.unwrap_err().to_string();
        let longer = error(ServeArgs { retention_timelines: span("4d"), ..args }).await;
        assert!(longer.contains("timelines would be kept for 4d and their runs for 3d"), "{longer}");
        let short = error(ServeArgs { retention_events: span("1ms"), ..ServeArgs::default() }).await;
        assert!(short.contains("events cannot be kept for 1ms"), "{short}");
        let large = error(ServeArgs { max_payload: Some(Size { bytes: 9 << 20 }), ..ServeArgs::default() }).await;
        assert!(large.contains("1KiB to 8MiB"), "{large}");
    }

    #[test]
    fn where_to_listen_is_a_host_and_a_port() {
        for good in ["127.0.0.1:7070", "localhost:0", "[::1]:7070", "0.0.0.0:65535"] {
            assert_eq!(listen(good.to_owned()).ok().as_deref(), Some(good));
        }
        let error = |written: &str| listen(written.to_owned()).unwrap_err().to_string();
        assert!(error("17270").ends_with("such as 127.0.0.1:17270"), "{}", error("17270"));
        assert!(error(":8080").ends_with("such as 127.0.0.1:8080"), "{}", error(":8080"));
        for bad in [
            "",
            ":",
            "foo:bar",
            ":99999",
            "localhost",
            "::1",
            "::1:7070",
            "[::1]",
            "[x]:1",
            "http://x:1",
            ":+80",
            "127.0.0.1:+80",
        ] {
            assert!(error(bad).ends_with("such as 127.0.0.1:7070"), "{}", error(bad));
        }
    }

    #[tokio::test]
    async fn what_others_can_reach_needs_keys_and_tls() {
        let open: SocketAddr = "192.0.2.1:7070".parse().unwrap();
        let of = async |keys, behind_proxy, insecure| {
            let args = ServeArgs { keys, behind_proxy, insecure, ..ServeArgs::default() };
            Settings::resolve(&args).await.unwrap()
        };
        let check = async |keys, behind_proxy| {
            of(keys, behind_proxy, None).await.refuse_unsafe(open).map_err(|error| error.to_string())
        };
        assert!(check(None, None).await.unwrap_err().contains("--tls-cert"));
        assert!(check(Some(KeysMode::Off), Some(true)).await.unwrap_err().contains("--keys off"));
        assert!(check(None, Some(true)).await.is_ok());
        assert!(check(Some(KeysMode::Off), None).await.unwrap_err().contains("--insecure"));
        for keys in [None, Some(KeysMode::Off)] {
            let insecure = of(keys, None, Some(true)).await;
            assert!(insecure.refuse_unsafe(open).is_ok() && !insecure.keys_on(open));
        }
        let keyed = of(Some(KeysMode::On), None, Some(true)).await;
        assert!(keyed.keys_on(open) && keyed.refuse_unsafe(open).is_err(), "keys would be sent in plain text");
    }
}
