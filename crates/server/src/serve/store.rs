//! Opens the store that a URL names.

use std::path::PathBuf;
use std::sync::Arc;

use eddyline_store::{Embedded, Memory, Options, Postgres, PostgresOptions, Store, StoreFailure};

use super::FAILED;
use super::settings::StartError;

/// The store, and the name of its kind.
pub(super) async fn open(
    url: &str,
    reset_clock: bool,
    migrate: bool,
) -> Result<(Arc<dyn Store>, &'static str), StartError> {
    if url == "memory:" || url == "memory" {
        return Ok((Arc::new(Memory::new()), "memory"));
    }
    if let Some((scheme, _)) = url.split_once("://") {
        let message = match scheme {
            "postgres" | "postgresql" => return open_postgres(url, reset_clock, migrate).await,
            "redis" | "rediss" => {
                format!("this version does not support {scheme} stores; use a directory, postgres:// or memory:")
            }
            _ => format!("{url} is not a store: expected memory:, a directory, sqlite:DIR or postgres://…"),
        };
        return Err(StartError::Usage(message));
    }
    let dir = PathBuf::from(url.strip_prefix("sqlite:").unwrap_or(url));
    if dir.as_os_str().is_empty() {
        return Err(StartError::Usage("the store has no directory: expected sqlite:DIR".to_owned()));
    }
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

async fn open_postgres(
    url: &str,
    reset_clock: bool,
    migrate: bool,
) -> Result<(Arc<dyn Store>, &'static str), StartError> {
    if reset_clock {
        let message = "--reset-clock does not go with PostgreSQL, whose own clock is used: set the database server's";
        return Err(StartError::Usage(message.to_owned()));
    }
    let options = PostgresOptions { migrate, ..PostgresOptions::default() };
    match Postgres::open(url, options).await {
        Ok(store) => Ok((Arc::new(store), "postgres")),
        Err(source) => Err(StartError::Store { url: without_password(url), source }),
    }
}

/// A URL that may be shown: its password is replaced, wherever it is.
pub(super) fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (before_query, query) = rest.split_once('?').map_or((rest, None), |(before, query)| (before, Some(query)));
    let shown = match before_query.rsplit_once('@') {
        Some((user, place)) => format!("{}@{place}", user.split_once(':').map_or(user, |(name, _)| name)),
        None => before_query.to_owned(),
    };
    let open = |pair: &&str| !pair.starts_with("password=");
    let query: Vec<&str> = query.into_iter().flat_map(|query| query.split('&')).filter(open).collect();
    match query.is_empty() {
        true => format!("{scheme}://{shown}"),
        false => format!("{scheme}://{shown}?{}", query.join("&")),
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
            ("postgres://ann@/flows?host=/run", "postgres://ann@/flows?host=/run"),
            ("./.eddyline", "./.eddyline"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }
}
