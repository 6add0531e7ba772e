//! The flags of `eddy serve`. Each is also a variable of the environment and a key of the configuration file; flags beat
//! the environment, the environment beats the file.

use std::path::PathBuf;

use eddyline_protocol::Span;
use serde::Deserialize;

use super::size::Size;

/// What is not said anywhere has the value that suits most.
#[derive(Debug, Clone, Default, PartialEq, clap::Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServeArgs {
    /// Where runs are kept: `memory:`, a directory or `sqlite:DIR` [default: ./.eddyline]
    #[arg(long, env = "EDDY_STORE", value_name = "URL")]
    pub store: Option<String>,
    /// Sets the store's time back to the clock's, after a start with a clock that was ahead; once, not for good
    #[arg(long, env = "EDDY_RESET_CLOCK", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(skip)]
    pub reset_clock: Option<bool>,
    /// Where to listen; port 0 takes a free one [default: 127.0.0.1:7070]
    #[arg(long, env = "EDDY_LISTEN", value_name = "ADDR")]
    pub listen: Option<String>,
    /// How long a worker keeps a task without a sign of life [default: 30s]
    #[arg(long, env = "EDDY_LEASE", value_name = "DURATION", value_parser = Span::from_text)]
    pub lease: Option<Span>,
    /// A file in TOML whose keys are these flags
    #[arg(long, env = "EDDY_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Whether requests need a key [default: off on loopback, on elsewhere]
    #[arg(long, env = "EDDY_KEYS", value_name = "on|off")]
    pub keys: Option<KeysMode>,
    /// Serves without keys where other machines can reach it, such as in a container whose port is not published
    #[arg(long, env = "EDDY_INSECURE", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub insecure: Option<bool>,
    /// The first admin key of `default`, instead of one that is made and printed; with `--keys on`
    #[arg(long, env = "EDDY_ADMIN_KEY", value_name = "KEY", hide_env_values = true)]
    #[serde(alias = "admin_key")]
    pub admin_key: Option<String>,
    /// A proxy in front speaks TLS, so plain HTTP beyond loopback is meant
    #[arg(long, env = "EDDY_BEHIND_PROXY", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(alias = "behind_proxy")]
    pub behind_proxy: Option<bool>,
    /// The certificate chain, in PEM
    #[arg(long, env = "EDDY_TLS_CERT", value_name = "FILE")]
    #[serde(alias = "tls_cert")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of the certificate, in PEM
    #[arg(long, env = "EDDY_TLS_KEY", value_name = "FILE")]
    #[serde(alias = "tls_key")]
    pub tls_key: Option<PathBuf>,
    /// Where the server is reached from outside: what the URLs of webhooks begin with [default: where it listens]
    #[arg(long, env = "EDDY_PUBLIC_URL", value_name = "URL")]
    #[serde(alias = "public_url")]
    pub public_url: Option<String>,
    /// The name of this instance in logs [default: eddy-<process id>]
    #[arg(long, env = "EDDY_INSTANCE", value_name = "NAME")]
    pub instance: Option<String>,
    /// Logs as JSON, one object a line
    #[arg(long, env = "EDDY_LOG_JSON", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(alias = "log_json")]
    pub log_json: Option<bool>,
    /// The largest body of a request, in bytes [default: 16777216]
    #[arg(long, env = "EDDY_MAX_BODY", value_name = "BYTES")]
    #[serde(alias = "max_body")]
    pub max_body: Option<usize>,
    /// The memory that all bodies of requests may take together; a namespace may use a quarter [default: 256MiB]
    #[arg(long, env = "EDDY_BODY_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "body_memory")]
    pub body_memory: Option<Size>,
    /// The memory of all answers that wait for their readers; a namespace may use half [default: 128MiB]
    #[arg(long, env = "EDDY_RESPONSE_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "response_memory")]
    pub response_memory: Option<Size>,
    /// The memory of all tasks on their way to workers; a namespace may use a quarter [default: 128MiB]
    #[arg(long, env = "EDDY_TASK_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "task_memory")]
    pub task_memory: Option<Size>,
    /// The memory that cached runs may take [default: 256MiB]
    #[arg(long, env = "EDDY_CACHE_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "cache_memory")]
    pub cache_memory: Option<Size>,
    /// Connections at a time [default: 4096]
    #[arg(long, env = "EDDY_MAX_CONNECTIONS", value_name = "N")]
    #[serde(alias = "max_connections")]
    pub max_connections: Option<usize>,
    /// Requests that wait for something at a time; more get 429 [default: 4096]
    #[arg(long, env = "EDDY_MAX_LONG_POLLS", value_name = "N")]
    #[serde(alias = "max_long_polls")]
    pub max_long_polls: Option<usize>,
    /// How long the head of a request may take, and a connection be idle [default: 10s]
    #[arg(long, env = "EDDY_HEADER_TIMEOUT", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "header_timeout")]
    pub header_timeout: Option<Span>,
    /// Tasks of a namespace that wait for workers before starts get 429 [default: 1000000]
    #[arg(long, env = "EDDY_BACKLOG", value_name = "N")]
    pub backlog: Option<usize>,
    /// How long timelines, steps and values are kept after the end of their run [default: 7d]
    #[arg(long, env = "EDDY_RETENTION_TIMELINES", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "retention_timelines")]
    pub retention_timelines: Option<Span>,
    /// How long the headers of runs are kept after their end, and with them their place in lists [default: 30d]
    #[arg(long, env = "EDDY_RETENTION_RUNS", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "retention_runs")]
    pub retention_runs: Option<Span>,
    /// How long events are kept; longer where a flow looks back further [default: 7d]
    #[arg(long, env = "EDDY_RETENTION_EVENTS", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "retention_events")]
    pub retention_events: Option<Span>,
    /// The largest payload, as JSON: 1KiB to 8MiB [default: 2MiB]
    #[arg(long, env = "EDDY_MAX_PAYLOAD", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "max_payload")]
    pub max_payload: Option<Size>,
    /// From this size on a payload gets a warning [default: half of --max-payload]
    #[arg(long, env = "EDDY_WARN_PAYLOAD", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "warn_payload")]
    pub warn_payload: Option<Size>,
    /// How long a silent worker counts as online [default: one lease]
    #[arg(long, env = "EDDY_OFFLINE_AFTER", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "offline_after")]
    pub offline_after: Option<Span>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeysMode {
    On,
    Off,
}

impl ServeArgs {
    /// What is said here, and beyond that what the file says.
    pub(super) fn over(self, file: ServeArgs) -> ServeArgs {
        ServeArgs {
            store: self.store.or(file.store),
            reset_clock: self.reset_clock,
            listen: self.listen.or(file.listen),
            lease: self.lease.or(file.lease),
            config: self.config,
            keys: self.keys.or(file.keys),
            insecure: self.insecure.or(file.insecure),
            admin_key: self.admin_key.or(file.admin_key),
            behind_proxy: self.behind_proxy.or(file.behind_proxy),
            tls_cert: self.tls_cert.or(file.tls_cert),
            tls_key: self.tls_key.or(file.tls_key),
            public_url: self.public_url.or(file.public_url),
            instance: self.instance.or(file.instance),
            log_json: self.log_json.or(file.log_json),
            max_body: self.max_body.or(file.max_body),
            body_memory: self.body_memory.or(file.body_memory),
            response_memory: self.response_memory.or(file.response_memory),
            task_memory: self.task_memory.or(file.task_memory),
            cache_memory: self.cache_memory.or(file.cache_memory),
            max_connections: self.max_connections.or(file.max_connections),
            max_long_polls: self.max_long_polls.or(file.max_long_polls),
            header_timeout: self.header_timeout.or(file.header_timeout),
            backlog: self.backlog.or(file.backlog),
            retention_timelines: self.retention_timelines.or(file.retention_timelines),
            retention_runs: self.retention_runs.or(file.retention_runs),
            retention_events: self.retention_events.or(file.retention_events),
            max_payload: self.max_payload.or(file.max_payload),
            warn_payload: self.warn_payload.or(file.warn_payload),
            offline_after: self.offline_after.or(file.offline_after),
        }
    }
}
