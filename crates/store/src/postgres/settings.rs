//! The URL of a store: what PostgreSQL's own tools understand, and a few parameters of ours.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio_postgres::config::{Host, SslMode};

use super::passfile;
use super::pg_error::describe;
use crate::error::{Result, StoreError};

const DEFAULT_SCHEMA: &str = "eddyline";
const DEFAULT_POOL: usize = 8;
const MOST_POOL: usize = 1_000;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub config: tokio_postgres::Config,
    pub tls: TlsMode,
    /// Certificates to trust in place of the system's.
    pub root_cert: Option<PathBuf>,
    pub schema: String,
    pub pool_size: usize,
    /// Statements are prepared and kept. Not behind a proxy that pools transactions.
    pub prepare: bool,
}

/// As `sslmode` of libpq. `verify-ca` also checks the host's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsMode {
    Off,
    /// Encrypted, with whoever answers.
    Unverified,
    Verified,
}

impl Settings {
    pub fn parse(url: &str) -> Result<Settings> {
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let mut settings = Settings {
            config: tokio_postgres::Config::new(),
            tls: TlsMode::Unverified,
            root_cert: None,
            schema: DEFAULT_SCHEMA.to_owned(),
            pool_size: DEFAULT_POOL,
            prepare: true,
        };
        let (mut ssl_mode, mut pass_file, mut rest) = (SslMode::Prefer, None, Vec::new());
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = decoded(value)?;
            match name {
                "schema" => settings.schema = schema(value)?,
                "pool_size" => settings.pool_size = pool_size(&value)?,
                "prepare" => settings.prepare = flag(name, &value)?,
                "passfile" => pass_file = Some(PathBuf::from(value)),
                "sslrootcert" => settings.root_cert = Some(PathBuf::from(value)),
                "sslmode" => (ssl_mode, settings.tls) = tls_mode(&value)?,
                _ => rest.push(pair),
            }
        }
        let plain = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
        settings.config = tokio_postgres::Config::from_str(&plain).map_err(|error| bad(&describe(&error)))?;
        let config = &mut settings.config;
        config.ssl_mode(ssl_mode);
        config.connect_timeout(CONNECT_TIMEOUT);
        if config.get_application_name().is_none() {
            config.application_name("eddyline");
        }
        if config.get_hosts().is_empty() {
            config.host("127.0.0.1");
        }
        if config.get_password().is_none()
            && let Some(password) = std::env::var("PGPASSWORD").ok().or_else(|| passfile::find(config, pass_file))
        {
            config.password(password);
        }
        if settings.prepare && settings.config.get_options().is_none() {
            // A proxy would refuse these.
            settings.config.options("-c jit=off -c idle_in_transaction_session_timeout=30s");
        }
        Ok(settings)
    }

    /// Where the database is, for messages: without a password.
    pub fn place(&self) -> String {
        let host = self.config.get_hosts().first().map_or_else(String::new, |host| match host {
            Host::Tcp(name) => name.clone(),
            #[cfg(unix)]
            Host::Unix(path) => path.display().to_string(),
        });
        format!("{}/{}", host, self.config.get_dbname().unwrap_or_default())
    }
}

fn bad(why: &str) -> StoreError {
    StoreError::Unavailable(format!("the URL of the PostgreSQL store can't be used: {why}"))
}

fn schema(name: String) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    match !name.is_empty() && name.len() <= 63 && name.chars().all(plain) {
        true => Ok(name),
        false => Err(bad(&format!("schema is {name:?}; use up to 63 of a-z, 0-9 and _"))),
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
        "verify-ca" | "verify-full" => (SslMode::Require, TlsMode::Verified),
        _ => return Err(bad(&format!("sslmode is {value:?}; use disable, prefer, require or verify-full"))),
    })
}

fn decoded(value: &str) -> Result<String> {
    let (mut bytes, mut rest) = (Vec::with_capacity(value.len()), value.as_bytes());
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = tail.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.ok_or_else(|| bad(&format!("{value:?} has a % without two hex digits")))?);
        rest = &tail[2..];
    }
    String::from_utf8(bytes).map_err(|_| bad(&format!("{value:?} is not UTF-8")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn our_parameters_are_taken_and_the_rest_is_passed_on() {
        let settings = Settings::parse(
            "postgres://ann:s%40cret@db.test:5433/flows?schema=eddy_2&pool_size=3&prepare=false&sslmode=verify-full\
             &connect_timeout=3",
        )
        .unwrap();
        assert_eq!((settings.schema.as_str(), settings.pool_size, settings.prepare), ("eddy_2", 3, false));
        assert_eq!(settings.tls, TlsMode::Verified);
        assert_eq!(settings.config.get_password(), Some(b"s@cret".as_slice()));
        assert_eq!(settings.config.get_ssl_mode(), SslMode::Require);
        assert_eq!(settings.place(), "db.test/flows");
        assert_eq!(settings.config.get_options(), None, "a proxy would refuse them");
    }

    #[test]
    fn a_bad_parameter_is_named() {
        for (query, word) in [
            ("schema=Eddy;", "schema"),
            ("pool_size=1", "pool_size"),
            ("prepare=perhaps", "prepare"),
            ("sslmode=yes", "sslmode"),
            ("schema=%zz", "hex digits"),
            ("colour=red", "colour"),
        ] {
            let error = Settings::parse(&format!("postgres://ann@db.test/flows?{query}")).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
