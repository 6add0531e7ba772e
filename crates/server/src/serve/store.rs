//! The URL of a store: what it names, and opening it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use eddyline_store::{
    Clock, Embedded, ManualClock, Memory, Options, Postgres, PostgresOptions, Store, StoreFailure, SystemClock,
};

use super::FAILED;
use super::settings::StartError;

/// What the URL of a store names. Shown without a password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreUrl {
    Memory,
    Directory(PathBuf),
    Postgres(String),
}

impl StoreUrl {
    pub fn parse(url: &str) -> Result<StoreUrl, StartError> {
        if url == "memory:" || url == "memory" {
            return Ok(StoreUrl::Memory);
        }
        if let Some((scheme, _)) = url.split_once("://") {
            let message = match scheme {
                "postgres" | "postgresql" => return Ok(StoreUrl::Postgres(url.to_owned())),
                "redis" | "rediss" => {
                    format!("this version does not support {scheme} stores; use a directory, postgres:// or memory:")
                }
                _ => format!(
                    "{} is not a store: expected memory:, a directory, sqlite:DIR or postgres://…",
                    without_password(url)
                ),
            };
            return Err(StartError::Usage(message));
        }
        let dir = PathBuf::from(url.strip_prefix("sqlite:").unwrap_or(url));
        match dir.as_os_str().is_empty() {
            true => Err(StartError::Usage("the store has no directory: expected sqlite:DIR".to_owned())),
            false => Ok(StoreUrl::Directory(dir)),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreUrl::Memory => f.write_str("memory:"),
            StoreUrl::Directory(dir) => dir.display().fmt(f),
            StoreUrl::Postgres(url) => f.write_str(&without_password(url)),
        }
    }
}

/// A store in memory whose clock a test moves. Other stores are refused: they may have a past, and their clock is not
/// this process's to move.
pub(super) fn open_for_test(url: &str) -> Result<(Arc<Memory>, Arc<ManualClock>), StartError> {
    if StoreUrl::parse(url)? != StoreUrl::Memory {
        let message = format!("--test-clock needs --store memory:, not {}", without_password(url));
        return Err(StartError::Usage(message));
    }
    let clock = ManualClock::at(SystemClock::default().wall());
    Ok((Arc::new(Memory::with_clock(clock.clone())), clock))
}

/// The store, and the name of its kind.
pub(super) async fn open(
    url: &str,
    reset_clock: bool,
    migrate: bool,
) -> Result<(Arc<dyn Store>, &'static str), StartError> {
    let place = StoreUrl::parse(url)?;
    match &place {
        StoreUrl::Memory => Ok((Arc::new(Memory::new()), "memory")),
        StoreUrl::Directory(dir) => open_directory(url, dir.clone(), reset_clock).await,
        StoreUrl::Postgres(_) if reset_clock => Err(StartError::Usage(
            "--reset-clock does not go with PostgreSQL, whose own clock is used: set the database server's".to_owned(),
        )),
        StoreUrl::Postgres(url) => {
            let options = PostgresOptions { migrate, ..PostgresOptions::default() };
            match Postgres::open(url, options).await {
                Ok(store) => Ok((Arc::new(store), "postgres")),
                Err(source) => Err(StartError::Store { url: place.to_string(), source }),
            }
        }
    }
}

async fn open_directory(
    url: &str,
    dir: PathBuf,
    reset_clock: bool,
) -> Result<(Arc<dyn Store>, &'static str), StartError> {
    let on_failure = Arc::new(|failure: &StoreFailure| {
        eprintln!("eddyline: exiting with code {FAILED}: {failure}");
        std::process::exit(FAILED);
    });
    let options = Options { reset_clock, on_failure, ..Options::default() };
    let opened = tokio::task::spawn_blocking(move || Embedded::open(&dir, options)).await;
    let failed = |source| StartError::Store { url: url.to_owned(), source };
    match opened {
        Ok(opened) => Ok((Arc::new(opened.map_err(failed)?), "embedded")),
        Err(error) => Err(failed(eddyline_store::StoreError::Closed(error.to_string()))),
    }
}

/// A URL that may be shown: without its password, wherever it is, also if characters of it were not encoded.
pub(super) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let shown = match (rest.split_once(':'), rest.rsplit_once('@')) {
        (Some((name, _)), Some((user, place))) if name.len() < user.len() && !name.contains(['/', '?', '@']) => {
            format!("{name}@{place}")
        }
        _ => rest.to_owned(),
    };
    let (place, query) =
        shown.split_once(['?', '&']).map_or((shown.as_str(), None), |(place, query)| (place, Some(query)));
    let open =
        |pair: &&str| !pair.starts_with("password=") && !pair.split('=').next().unwrap_or_default().contains('%');
    let query: Vec<&str> = query.into_iter().flat_map(|query| query.split('&')).filter(open).collect();
    match query.is_empty() {
        true => format!("{scheme}://{place}"),
        false => format!("{scheme}://{place}?{}", query.join("&")),
    }
}

#[cfg(test)]
mod tests {
    use super::without_password;

    #[test]
    fn a_shown_url_has_no_password() {
        for (url, shown) in [
            ("postgres://ann:s3cret@db/flows", "postgres://ann@db/flows"),
            ("postgres://ann:p@ss:w@db:5432/flows?sslmode=require", "postgres://ann@db:5432/flows?sslmode=require"),
            ("postgres://db/flows?user=ann&password=s3cret&pool_size=4", "postgres://db/flows?user=ann&pool_size=4"),
            ("postgres://ann:p?ss/w@db/flows?schema=x", "postgres://ann@db/flows?schema=x"),
            ("postgres://ann:p@db/flows?password_file=/pw", "postgres://ann@db/flows?password_file=/pw"),
            ("postgres://db/flows?user=ann@x&password=s3cret", "postgres://db/flows?user=ann@x"),
            ("postgres://db:1/flows?user=ann@x&password=s3cret", "postgres://db@x"),
            ("postgres://db/flows?p%61ssword=s3cret", "postgres://db/flows"),
            ("postgres://ann@/flows?host=/run", "postgres://ann@/flows?host=/run"),
            ("./.eddyline", "./.eddyline"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }
}
