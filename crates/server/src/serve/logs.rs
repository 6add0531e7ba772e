//! Where logs go: to stderr, for people or as JSON.

use tracing_subscriber::EnvFilter;

/// What is logged unless EDDY_LOG says otherwise.
const DEFAULT_FILTER: &str = "info";

/// Begins to log: for people, or one JSON object a line. `EDDY_LOG` filters, in the form `info,eddyline_engine=debug`.
/// Called again it changes nothing.
pub fn logs(json: bool, colors: bool) {
    let filter = EnvFilter::try_from_env("EDDY_LOG").unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let begun = if json {
        logs.json().flatten_event(true).try_init()
    } else {
        logs.with_ansi(colors).with_target(false).try_init()
    };
    if begun.is_err() {
        tracing::debug!("logs were set up before");
    }
}
