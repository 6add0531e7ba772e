//! New connections, for the pool and for hints.

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

/// Sent with each new connection. A proxy that pools transactions refuses them; then they belong to the role.
const OPTIONS: &str = "-c jit=off -c idle_in_transaction_session_timeout=30s";
/// How long a server may take for TLS, the password and the rest, once it has accepted a connection.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may take to show that it still works.
const PING_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is asked before it is used: a firewall may have forgotten it.
const IDLE: Duration = Duration::from_secs(60);

/// What must be polled for a connection to work.
pub(super) type Session = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

/// A connection of the pool.
pub(super) type Object = deadpool::managed::Object<Connector>;

/// Why there is no connection, for people.
#[derive(Debug)]
pub(super) struct NotConnected(pub String);

/// Cheap to clone: all clones are one.
#[derive(Clone)]
pub(super) struct Connector(Arc<Inner>);

struct Inner {
    settings: Settings,
    tls: MakeRustlsConnect,
    /// A proxy refused them once.
    without_options: AtomicBool,
    /// How often a connection fell silent. Those that were made before are not used again.
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
    /// The silences before it was made.
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

    /// Whether a proxy refused the options of a connection.
    pub fn were_options_refused(&self) -> bool {
        self.0.without_options.load(Ordering::Relaxed)
    }

    /// A connection did not answer in time; others may be dead as well.
    pub fn fell_silent(&self) {
        self.0.silences.fetch_add(1, Ordering::Relaxed);
    }

    /// Asks the server to stop what a connection is doing. It may be too late, or not arrive.
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
            Err(_) => Err(NotConnected(format!("the server did not answer within {} s", limit.as_secs()))),
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

    /// With `sslmode=prefer`, a server that fails to encrypt or admits only unencrypted connections is tried without.
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

/// The driver does not tell kinds of errors apart but by their texts.
fn is_handshake(error: &Error) -> bool {
    error.to_string().starts_with("error performing TLS handshake")
}

/// What failed, and what to do about it.
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
            return Err(RecycleError::message("it may be dead as well"));
        }
        if metrics.last_used() > IDLE && !matches!(timeout(PING_TIMEOUT, link.simple_query("")).await, Ok(Ok(_))) {
            return Err(RecycleError::message("it does not answer"));
        }
        Ok(())
    }
}
