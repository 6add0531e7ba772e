//! Opens connections, for the pool and for hints.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use deadpool::managed::{Manager, Metrics, RecycleError, RecycleResult};
use deadpool_postgres::ClientWrapper;
use tokio::time::timeout;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Client, Config, Connection, Error, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::pg_error::describe;
use super::settings::Settings;
use super::tls;
use crate::error::Result;

/// Startup options of each connection. A proxy that pools transactions refuses them; then they have to be set on the
/// role.
const OPTIONS: &str = "-c jit=off -c idle_in_transaction_session_timeout=30s";
/// How long TLS, authentication and the rest of the startup may take once a connection is accepted.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a pooled connection may take to respond before it is reused.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is tested before it is used: a firewall may have dropped it.
const IDLE: Duration = Duration::from_secs(60);

/// The driver's side of a connection, which must be polled for it to work.
pub(super) type Session = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// A connection of the pool.
pub(super) type Object = deadpool::managed::Object<Connector>;

/// Why no connection could be opened, as a message for people.
#[derive(Debug)]
pub(super) struct NotConnected(pub String);

/// Cheap to clone: all clones share their state.
#[derive(Clone)]
pub(super) struct Connector(Arc<Inner>);

struct Inner {
    settings: Settings,
    tls: MakeRustlsConnect,
    /// A proxy has refused the startup options.
    without_options: AtomicBool,
    /// How many connections have stopped responding. Connections older than the last of these are not reused.
    silences: AtomicU64,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Connector").field(&self.0.settings.place()).finish()
    }
}

/// A connection, with its prepared statements.
#[derive(Debug)]
pub(super) struct Link {
    client: ClientWrapper,
    /// The value of `silences` when this connection was opened.
    silences: u64,
}

impl Deref for Link {
    type Target = ClientWrapper;

    fn deref(&self) -> &ClientWrapper {
        &self.client
    }
}

impl Connector {
    pub fn new(settings: Settings) -> Result<Connector> {
        let without_options = AtomicBool::new(settings.prepare == Some(false));
        let tls = tls::connector(&settings)?;
        Ok(Connector(Arc::new(Inner { settings, tls, without_options, silences: AtomicU64::new(0) })))
    }

    /// Whether a proxy has refused the startup options.
    pub fn were_options_refused(&self) -> bool {
        self.0.without_options.load(Ordering::Relaxed)
    }

    /// Records that a connection did not respond in time: others may be dead as well.
    pub fn fell_silent(&self) {
        self.0.silences.fetch_add(1, Ordering::Relaxed);
    }

    /// Asks the server to cancel the running statement of a connection. The request may arrive too late or not at all.
    pub fn cancel(&self, link: &Link) {
        let (token, tls) = (link.cancel_token(), self.0.tls.clone());
        tokio::spawn(async move { timeout(HANDSHAKE_TIMEOUT, token.cancel_query(tls)).await });
    }

    pub async fn connect(&self) -> std::result::Result<(Client, Session), NotConnected> {
        let settings = &self.0.settings;
        let mut config = settings.config.clone();
        if let Some(password) = settings.password.look_up(&config).await.map_err(NotConnected)? {
            config.password(password);
        }
        let each = config.get_connect_timeout().copied().unwrap_or(HANDSHAKE_TIMEOUT);
        let limit = each.saturating_mul(config.get_hosts().len() as u32) + HANDSHAKE_TIMEOUT;
        match timeout(limit, self.attempt(config)).await {
            Ok(connected) => connected.map_err(|error| NotConnected(explain(&error))),
            Err(_) => Err(NotConnected(format!("the server did not respond within {} s", limit.as_secs()))),
        }
    }

    async fn attempt(&self, mut config: Config) -> std::result::Result<(Client, Session), Error> {
        let plain = config.clone();
        let ours = config.get_options().is_none() && !self.were_options_refused();
        if ours {
            config.options(OPTIONS);
        }
        match self.encrypted_or_not(config).await {
            Err(error) if ours && refuses_options(&error) => {
                let connected = self.encrypted_or_not(plain).await?;
                self.0.without_options.store(true, Ordering::Relaxed);
                Ok(connected)
            }
            connected => connected,
        }
    }

    /// With `sslmode=prefer`, retries without encryption if the server fails to encrypt or admits only unencrypted
    /// connections.
    async fn encrypted_or_not(&self, mut config: Config) -> std::result::Result<(Client, Session), Error> {
        let connected = config.connect(self.0.tls.clone()).await;
        match connected {
            Err(error) if config.get_ssl_mode() == SslMode::Prefer && refuses_encryption(&error) => {
                config.ssl_mode(SslMode::Disable);
                config.connect(self.0.tls.clone()).await.map_err(|_| error)
            }
            connected => connected,
        }
    }
}

fn refuses_options(error: &Error) -> bool {
    error.as_db_error().is_some_and(|db| {
        *db.code() == SqlState::PROTOCOL_VIOLATION && db.message().contains("unsupported startup parameter")
    })
}

fn refuses_encryption(error: &Error) -> bool {
    match error.code() {
        Some(code) => *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION,
        None => is_handshake(error),
    }
}

/// The driver distinguishes kinds of errors only by their text.
fn is_handshake(error: &Error) -> bool {
    error.to_string().starts_with("error performing TLS handshake")
}

/// The error, with advice on what to do about it.
fn explain(error: &Error) -> String {
    let text = describe(error);
    let advice = match error.code() {
        Some(code) if *code == SqlState::INVALID_PASSWORD => {
            Some("check the password in the URL, PGPASSWORD or the password file")
        }
        None if text.contains("password missing") => Some(
            "the server asks for a password: set it in the URL, PGPASSWORD, ~/.pgpass or a file (password_file=PATH)",
        ),
        None if is_handshake(error) => tls::advice(error),
        _ => None,
    };
    match advice {
        Some(advice) => format!("{text}; {advice}"),
        None => text,
    }
}

impl Manager for Connector {
    type Type = Link;
    type Error = NotConnected;

    async fn create(&self) -> std::result::Result<Link, NotConnected> {
        let silences = self.0.silences.load(Ordering::Relaxed);
        let (client, session) = self.connect().await?;
        let polled = tokio::spawn(async move {
            if let Err(error) = session.await {
                tracing::debug!("a connection to PostgreSQL ended: {}", describe(&error));
            }
        });
        Ok(Link { client: ClientWrapper::new(client, polled), silences })
    }

    async fn recycle(&self, link: &mut Link, metrics: &Metrics) -> RecycleResult<NotConnected> {
        if link.is_closed() {
            return Err(RecycleError::message("closed"));
        }
        if link.silences != self.0.silences.load(Ordering::Relaxed) {
            return Err(RecycleError::message("opened before another connection stopped responding"));
        }
        if metrics.last_used() > IDLE && !matches!(timeout(PING_TIMEOUT, link.simple_query("")).await, Ok(Ok(_))) {
            return Err(RecycleError::message("it does not respond"));
        }
        Ok(())
    }
}
