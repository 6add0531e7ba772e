//! Opens the store that a URL names.

use std::path::PathBuf;
use std::sync::Arc;

use eddyline_store::{Embedded, Memory, Options, Store, StoreFailure};

use super::FAILED;
use super::settings::StartError;

/// The store, and the name of its kind.
pub(super) async fn open(url: &str, reset_clock: bool) -> Result<(Arc<dyn Store>, &'static str), StartError> {
    if url == "memory:" || url == "memory" {
        return Ok((Arc::new(Memory::new()), "memory"));
    }
    if let Some((scheme, _)) = url.split_once("://") {
        let message = match scheme {
            "postgres" | "postgresql" | "redis" | "rediss" => {
                format!("this version does not support {scheme} stores; use a directory or memory:")
            }
            _ => format!("{url} is not a store: expected memory:, a directory or sqlite:DIR"),
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
