//! The URL of a store: the parameters of PostgreSQL's own tools, and a few of Eddyline's.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::config::{Host, SslMode};

use super::passfile::Password;
use super::pg_error::describe;
use crate::error::{Result, StoreError};

const DEFAULT_SCHEMA: &str = "eddyline";
const DEFAULT_POOL: usize = 8;
const MOST_POOL: usize = 1_000;
/// How long one address may take to accept a connection, unless the URL says `connect_timeout`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// TCP keepalive: an idle connection is probed after this time, …
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// … and a connection with unacknowledged data is closed after this time.
const UNACKNOWLEDGED: Duration = Duration::from_secs(20);

/// Parameters that are passed on to the driver.
const OF_LIBPQ: [&str; 18] = [
    "user",
    "password",
    "dbname",
    "options",
    "application_name",
    "host",
    "hostaddr",
    "port",
    "connect_timeout",
    "tcp_user_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_retries",
    "target_session_attrs",
    "channel_binding",
    "load_balance_hosts",
    "sslnegotiation",
];

#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// Everything except the password, unless it is in the URL.
    pub config: tokio_postgres::Config,
    pub password: Password,
    pub tls: TlsMode,
    /// Trusted certificates, in place of the system's.
    pub root_cert: Option<PathBuf>,
    pub schema: String,
    pub pool_size: usize,
    /// Whether statements are prepared. False behind a proxy that pools transactions; `None`: detect it.
    pub prepare: Option<bool>,
}

/// As `sslmode` of libpq.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsMode {
    Off,
    /// Encrypted, without verifying the server.
    Unverified,
    /// The certificate must be issued by a trusted authority, for any host.
    Authority,
    Full,
}

impl Settings {
    pub fn parse(url: &str) -> Result<Settings> {
        Settings::parse_with(url, |name| std::env::var_os(name))
    }

    fn parse_with(url: &str, env: impl Fn(&str) -> Option<OsString>) -> Result<Settings> {
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        check_special(base)?;
        let mut settings = Settings {
            config: tokio_postgres::Config::new(),
            password: Password::OfUrl,
            tls: TlsMode::Unverified,
            root_cert: None,
            schema: DEFAULT_SCHEMA.to_owned(),
            pool_size: DEFAULT_POOL,
            prepare: None,
        };
        let (mut ssl_mode, mut pass_file, mut password_file) = (SslMode::Prefer, None, None);
        let mut rest = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, written) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(name, written)?;
            match name {
                "schema" => settings.schema = schema(value)?,
                "pool_size" => settings.pool_size = pool_size(&value)?,
                "prepare" => settings.prepare = Some(flag(name, &value)?),
                "passfile" => pass_file = Some(PathBuf::from(value)),
                "password_file" => password_file = Some(PathBuf::from(value)),
                "sslrootcert" => settings.root_cert = (value != "system").then(|| PathBuf::from(value)),
                "sslmode" => (ssl_mode, settings.tls) = tls_mode(&value)?,
                // An @ would be parsed as the end of the user's name.
                _ if OF_LIBPQ.contains(&name) => rest.push(pair.replace('@', "%40")),
                _ => return Err(unknown(name)),
            }
        }
        if ssl_mode == SslMode::Require && settings.tls == TlsMode::Unverified && settings.root_cert.is_some() {
            // As in libpq: if an authority is given, it is verified.
            settings.tls = TlsMode::Authority;
        }
        let plain = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
        settings.config = tokio_postgres::Config::from_str(&plain).map_err(|error| bad(&describe(&error)))?;
        settings.config.ssl_mode(ssl_mode);
        settings.complete();
        if password_file.is_some() && settings.config.get_password().is_some() {
            return Err(bad("it has both a password and password_file; use one of them"));
        }
        settings.password = Password::choose(&settings.config, password_file, pass_file, env);
        Ok(settings)
    }

    /// Sets what the URL does not.
    fn complete(&mut self) {
        let config = &mut self.config;
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(CONNECT_TIMEOUT);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(UNACKNOWLEDGED);
        }
        if config.get_keepalives_interval().is_none() && config.get_keepalives_retries().is_none() {
            config.keepalives_idle(KEEPALIVE_IDLE).keepalives_interval(KEEPALIVE_INTERVAL);
            config.keepalives_retries(KEEPALIVE_RETRIES);
        }
        if config.get_application_name().is_none() {
            config.application_name("eddyline");
        }
        if config.get_hosts().is_empty() {
            let addresses: Vec<String> = config.get_hostaddrs().iter().map(ToString::to_string).collect();
            for address in &addresses {
                config.host(address);
            }
            if addresses.is_empty() {
                config.host("127.0.0.1");
            }
        }
        if config.get_hosts().iter().all(is_socket) {
            // As in libpq, sslmode has no effect on sockets.
            config.ssl_mode(SslMode::Disable);
            self.tls = TlsMode::Off;
        }
    }

    /// The address of the database for messages, without a password.
    pub fn place(&self) -> String {
        let (hosts, ports) = (self.config.get_hosts(), self.config.get_ports());
        let place = |(at, host): (usize, &Host)| match (host, ports.get(at).or(ports.first())) {
            (Host::Tcp(name), None | Some(5432)) => name.clone(),
            (Host::Tcp(name), Some(port)) => format!("{name}:{port}"),
            #[cfg(unix)]
            (Host::Unix(path), _) => path.display().to_string(),
        };
        let places: Vec<String> = hosts.iter().enumerate().map(place).collect();
        format!("{}/{}", places.join(","), self.config.get_dbname().unwrap_or_default())
    }
}

fn is_socket(host: &Host) -> bool {
    !matches!(host, Host::Tcp(_))
}

fn bad(why: &str) -> StoreError {
    StoreError::Unavailable(format!("invalid URL of a PostgreSQL store: {why}"))
}

/// Refuses a URL whose password seems to contain characters that end it: the rest would be parsed, and shown, as a
/// host.
fn check_special(base: &str) -> Result<()> {
    let rest = base.split_once("://").map_or(base, |(_, rest)| rest);
    let encode =
        || Err(bad("write special characters in the user's name and the password as %XX (@ is %40, ? is %3F)"));
    match rest.split_once('@') {
        Some((_, place)) if place.contains('@') => encode(),
        Some(_) => Ok(()),
        None => {
            let hosts = rest.split('/').next().unwrap_or_default();
            let port =
                |host: &str| host.rsplit_once(':').is_none_or(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
            if hosts.ends_with(']') || hosts.split(',').all(port) { Ok(()) } else { encode() }
        }
    }
}

/// The name may be part of a password.
fn unknown(name: &str) -> StoreError {
    match name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') {
        true => bad(&format!("unknown parameter {name}")),
        false => bad("unknown parameter; write special characters in a password as %XX (@ is %40)"),
    }
}

/// The name is always quoted in statements; characters that need escaping inside quotes are not allowed.
fn schema(name: String) -> Result<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    match !name.is_empty() && name.len() <= 63 && name.chars().all(plain) && !name.starts_with("pg_") {
        true => Ok(name),
        false => {
            Err(bad(&format!("schema is {name:?}; use up to 63 letters, digits, _ and -, not beginning with pg_")))
        }
    }
}

fn pool_size(value: &str) -> Result<usize> {
    match value.parse() {
        Ok(size) if (2..=MOST_POOL).contains(&size) => Ok(size),
        _ => Err(bad(&format!("pool_size is {value:?}; use a number from 2 to {MOST_POOL}"))),
    }
}

fn flag(name: &str, value: &str) -> Result<bool> {
    match value {
        "true" | "1" | "on" => Ok(true),
        "false" | "0" | "off" => Ok(false),
        _ => Err(bad(&format!("{name} is {value:?}; use true or false"))),
    }
}

fn tls_mode(value: &str) -> Result<(SslMode, TlsMode)> {
    Ok(match value {
        "disable" => (SslMode::Disable, TlsMode::Off),
        "allow" | "prefer" => (SslMode::Prefer, TlsMode::Unverified),
        "require" => (SslMode::Require, TlsMode::Unverified),
        "verify-ca" => (SslMode::Require, TlsMode::Authority),
        "verify-full" => (SslMode::Require, TlsMode::Full),
        _ => {
            return Err(bad(&format!("sslmode is {value:?}; use disable, prefer, require, verify-ca or verify-full")));
        }
    })
}

/// The value may be a password, so it is not shown.
fn decoded(name: &str, value: &str) -> Result<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(value.len()), value.as_bytes());
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        let shown = if OF_LIBPQ.contains(&name) { name } else { "a parameter" };
        bytes.push(byte.ok_or_else(|| bad(&format!("{shown} has a % that is not followed by two hex digits")))?);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).map_err(|_| bad("a parameter is not UTF-8"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn own_parameters_are_read_and_the_rest_is_passed_on() {
        let settings = Settings::parse(
            "postgres://ann:s%40cret@db.test:5433/flows?schema=eddy_2&pool_size=3&prepare=false&sslmode=verify-full\
             &connect_timeout=3",
        )
        .unwrap();
        assert_eq!((settings.schema.as_str(), settings.pool_size, settings.prepare), ("eddy_2", 3, Some(false)));
        assert_eq!(settings.tls, TlsMode::Full);
        assert_eq!(settings.config.get_password(), Some(b"s@cret".as_slice()));
        assert_eq!(settings.config.get_ssl_mode(), SslMode::Require);
        assert_eq!(settings.config.get_connect_timeout(), Some(&Duration::from_secs(3)));
        assert_eq!(settings.place(), "db.test:5433/flows");
    }

    #[test]
    fn an_invalid_parameter_is_named() {
        for (query, word) in [
            ("schema=Eddy;", "schema"),
            ("schema=pg_eddy", "schema"),
            ("pool_size=1", "pool_size"),
            ("prepare=perhaps", "prepare"),
            ("sslmode=yes", "sslmode"),
            ("schema=%zz", "hex digits"),
            ("colour=red", "colour"),
            ("password=a&password_file=/pw", "both"),
        ] {
            let error = Settings::parse(&format!("postgres://ann@db.test/flows?{query}")).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_password_with_special_characters_is_never_shown() {
        for url in [
            "postgres://ann:s3cr@et@db.test/flows",
            "postgres://ann:s3cr?et@db.test/flows",
            "postgres://ann:s3cr?et@db.test/flows?schema=x",
            "postgres://ann:12?s3cret@db.test/flows",
            "postgres://db.test/flows?user=ann&password=s3cret%zz",
            "postgres://ann:s3cret@db.test:port/flows",
            "postgres://ann:s3cret@db.test/flows?schema=%22",
        ] {
            let error = Settings::parse(url).unwrap_err().to_string();
            assert!(!error.contains("s3cr") && !error.contains("et@"), "{url}: {error}");
        }
        let settings = Settings::parse("postgres://db.test/flows?user=ann@tenant&password=s3@cret").unwrap();
        assert_eq!(settings.config.get_user(), Some("ann@tenant"));
        assert_eq!(settings.config.get_password(), Some(b"s3@cret".as_slice()));
        assert!(!format!("{settings:?}").contains("s3"), "{settings:?}");
        for url in
            ["postgres://[::1]:5433/flows", "postgres://[::1]/flows", "postgres://a:1,b:2/flows", "postgres:///x"]
        {
            Settings::parse(url).unwrap();
        }
    }

    #[test]
    fn a_given_authority_is_verified_and_sockets_are_not_encrypted() {
        let tls = |url: &str| Settings::parse(url).unwrap().tls;
        assert_eq!(tls("postgres://db.test/flows?sslmode=require"), TlsMode::Unverified);
        assert_eq!(tls("postgres://db.test/flows?sslmode=require&sslrootcert=/ca"), TlsMode::Authority);
        assert_eq!(tls("postgres://db.test/flows?sslmode=verify-full&sslrootcert=system"), TlsMode::Full);
        assert_eq!(tls("postgres:///flows?host=/run/postgresql&sslmode=require"), TlsMode::Off);
        let by_address = Settings::parse("postgres:///flows?hostaddr=127.0.0.2").unwrap();
        assert_eq!(by_address.place(), "127.0.0.2/flows");
    }
}
