//! Logs to stderr, as text or JSON.

use tracing_subscriber::EnvFilter;

/// The filter unless EDDY_LOG is set.
const DEFAULT_FILTER: &str = "info";

/// Initialises logging, as text or as one JSON object per line. `EDDY_LOG` filters, in the form
/// `info,eddyline_engine=debug`. Calling it again has no effect.
pub fn logs(json: bool, colors: bool) {
    let filter = EnvFilter::try_from_env("EDDY_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let begun = if json {
        logs.json().flatten_event(true).try_init()
    } else {
        logs.with_ansi(colors).with_target(false).try_init()
    };
    if begun.is_err() {
        tracing::debug!("logging is already initialised");
    }
}
