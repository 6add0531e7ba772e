//! `eddy serve`: starts a server from its flags, and stops it.

mod accept;
mod args;
mod first_key;
mod host;
mod logs;
mod loops;
mod open_files;
mod settings;
mod size;
mod store;
mod tls;
mod write_timeout;

use std::fmt;
use std::io::Write;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{Config, Engine, TestClock};
use eddyline_store::{InstanceInfo, Store};
use futures_util::FutureExt;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

pub use args::{KeysMode, ServeArgs};
pub use logs::logs;
pub(crate) use settings::Settings;
pub use settings::StartError;
pub use size::Size;
pub use store::StoreUrl;

use crate::api::{About, Api, counts, keyring};

/// The exit code when the engine, the store or the server has failed: a part of it panicked or ended, or the disk
/// cannot be trusted, and only a new process can recover.
const FAILED: i32 = 70;
/// The exit code when a decision hangs. The next process decides on that run alone, and quarantines it if it hangs
/// again.
const HUNG: i32 = 71;
/// How long a failed engine has for its last commits before the process exits.
const LAST_COMMITS: Duration = Duration::from_secs(2);
/// How long requests in progress have to finish once the server stops.
const GRACE: Duration = Duration::from_secs(10);

/// A running server.
pub struct Server {
    addr: SocketAddr,
    url: String,
    api: Api,
    stop: watch::Sender<bool>,
    accepting: JoinHandle<()>,
    /// Watches the keys of waiting requests.
    watching: JoinHandle<()>,
    /// Closed when the last connection has ended.
    connections: mpsc::Receiver<()>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("url", &self.url).finish_non_exhaustive()
    }
}

/// Opens the store, starts the engine, binds and serves. Must be called inside a tokio runtime.
pub async fn start(args: &ServeArgs) -> Result<Server, StartError> {
    let mut settings = Settings::resolve(args).await?;
    settings.max_connections = open_files::room_for(settings.max_connections);
    let tls = settings.tls.as_ref().map(tls::acceptor).transpose()?;
    let listener = accept::bind(&settings.listen).await?;
    let addr = listener.local_addr().map_err(|source| StartError::Bind { addr: settings.listen.clone(), source })?;
    settings.refuse_unsafe(addr)?;
    let mut test_store = None;
    let (store, kind) = if settings.test_clock {
        if !addr.ip().is_loopback() {
            return Err(StartError::Usage(format!("--test-clock is for loopback addresses only, not {addr}")));
        }
        let (memory, clock) = store::open_for_test(&settings.store)?;
        let store: Arc<dyn Store> = memory.clone();
        test_store = Some((memory, clock));
        (store, "memory")
    } else {
        store::open(&settings.store, settings.reset_clock, settings.migrate).await?
    };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{addr}");
    let public_url = settings.public_url.clone().unwrap_or_else(|| url.clone());
    let usual = Config::default();
    let config = Config {
        instance: settings.instance.clone(),
        info: InstanceInfo {
            name: settings.instance.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: host::name(),
            pid: Some(std::process::id()),
            url: Some(public_url.clone()),
        },
        hooks: format!("{}/hooks/", public_url.trim_end_matches('/')),
        lease_ms: i64::try_from(settings.lease.as_millis()).unwrap_or(i64::MAX),
        backlog: settings.backlog.unwrap_or(usual.backlog),
        cache_bytes: settings.cache_memory.unwrap_or(usual.cache_bytes),
        retention: settings.retention,
        offline_after_ms: settings.offline_after.map(|after| i64::try_from(after.as_millis()).unwrap_or(i64::MAX)),
        max_payload_bytes: settings.max_payload,
        large_payload_bytes: settings.warn_payload,
        on_hang: Some(Arc::new(|hang| {
            eprintln!("eddyline: exiting with code {HUNG}: {hang}");
            std::process::exit(HUNG);
        })),
        ..usual
    };
    counts::begin();
    counts::introduce(&settings.instance, kind);
    let engine = Engine::start(store, config);
    let (stop, stopping) = watch::channel(false);
    let keys = settings.keys_on(addr);
    let started_at = match engine.now().await {
        Ok(now) => now,
        Err(error) => {
            engine.shutdown().await;
            return Err(StartError::FirstLook(error));
        }
    };
    let test_clock = test_store.map(|(memory, clock)| TestClock::new(engine.clone(), memory, clock));
    let about = About { store: kind, addr, public_url, started_at, keys, test_clock, settings };
    let (connection, connections) = mpsc::channel(1);
    let api = Api::new(engine, about, stopping.clone(), connection.clone());
    if !keys && api.about().settings.admin_key.is_some() {
        tracing::warn!("an admin key is set but keys are off, so requests need no key; use --keys on");
    }
    if !keys && !addr.ip().is_loopback() {
        tracing::warn!("--insecure: anyone who can reach {addr} has full access without a key");
    }
    if keys && let Err(error) = first_key::ensure(&api).await {
        api.engine().shutdown().await;
        return Err(error);
    }
    if let Err(error) = api.keyring().look_at_disabled().await {
        api.engine().shutdown().await;
        return Err(StartError::FirstLook(error));
    }
    let spawn = |name, run| loops::spawn(name, api.engine(), &stopping, run);
    spawn("metrics", counts::keep(stopping.clone()).boxed());
    if let Some(clock) = api.about().test_clock.clone() {
        let mut stopping = stopping.clone();
        let run = async move {
            tokio::select! {
                () = clock.run() => {}
                _ = stopping.wait_for(|stopping| *stopping) => {}
            }
        };
        spawn("test clock", run.boxed());
    }
    let watching = spawn("keys", keyring::keep_watch(api.clone(), stopping.clone()).boxed());
    let accepting = spawn("accept", accept::run(listener, tls, api.clone(), stopping.clone(), connection).boxed());
    tracing::info!(instance = api.about().settings.instance, url, store = kind, keys, "listening");
    Ok(Server { addr, url, api, stop, accepting, watching, connections })
}

/// Serves until SIGTERM or SIGINT, then stops cleanly; a second signal exits immediately. If the engine fails, the
/// process exits with code 70.
pub async fn serve(args: ServeArgs, log_colors: bool) -> Result<(), StartError> {
    let args = settings::with_file(args).await?;
    logs(args.log_json.unwrap_or(false), log_colors);
    let mut signals = Signals::new()?;
    let stdin_ended = args.exit_with_stdin.unwrap_or(false).then(stdin_end);
    let server = start(&args).await?;
    say(&format!("eddyline listens on {}", server.url()));
    let engine = server.engine().clone();
    tokio::select! {
        () = signals.next() => {}
        () = ended(stdin_ended) => tracing::info!("standard input has ended"),
        why = engine.failed() => {
            tracing::error!("exiting with code {FAILED}: the engine has failed: {why}");
            // Stopping may fail for the same reason as the engine; the exit code is the same.
            let stopped = AssertUnwindSafe(server.stop()).catch_unwind();
            let _ = tokio::time::timeout(LAST_COMMITS, stopped).await;
            std::process::exit(FAILED);
        }
    }
    tracing::info!("stopping");
    tokio::select! {
        () = server.stop() => Ok(()),
        () = signals.next() => std::process::exit(1),
    }
}

impl Server {
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Where runs are stored, without a password.
    pub fn store(&self) -> String {
        store::without_password(&self.api.about().settings.store)
    }

    pub fn asks_for_keys(&self) -> bool {
        self.api.about().keys
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn engine(&self) -> &Engine {
        self.api.engine()
    }

    /// The number of waiting requests: claims, results.
    pub fn long_polls(&self) -> usize {
        self.api.long_polls()
    }

    /// Stops accepting connections and claims; accepted work is committed and answered.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        let engine = self.api.engine().clone();
        engine.shutdown().await;
        let ended = async {
            let _ = (&mut self.accepting).await;
            let _ = (&mut self.watching).await;
            // Nobody sends: the channel closes when all senders are dropped.
            while self.connections.recv().await.is_some() {}
        };
        if tokio::time::timeout(GRACE, ended).await.is_err() {
            tracing::warn!("dropped connections that did not end within {GRACE:?}");
        }
        let Server { api, .. } = self;
        // The last owner of an embedded store waits for its threads.
        let _ = tokio::task::spawn_blocking(move || drop((api, engine))).await;
    }
}

/// Told when standard input ends. Its thread cannot be cancelled, so it is not one of the runtime's, which would wait
/// for it.
fn stdin_end() -> oneshot::Receiver<()> {
    let (tell, ended) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = tell.send(());
    });
    ended
}

/// Completes when standard input has ended; without one to watch, never.
async fn ended(stdin: Option<oneshot::Receiver<()>>) {
    match stdin {
        Some(ended) => {
            let _ = ended.await;
        }
        None => std::future::pending().await,
    }
}

/// Prints one line for whoever started the server, which may be a program reading from a pipe.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Signals, StartError> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).map_err(StartError::Signals);
        Ok(Signals { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
