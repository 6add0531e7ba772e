//! The flags of `eddy serve`. Each is also an environment variable and a key of the configuration file; flags override
//! the environment, the environment overrides the file.

use std::path::PathBuf;

use eddyline_protocol::Span;
use serde::Deserialize;

use super::size::Size;

#[derive(Debug, Clone, Default, PartialEq, clap::Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ServeArgs {
    /// Where to store runs: `memory:`, a directory, `sqlite:DIR` or `postgres://…` [default: ./.eddyline]
    #[arg(long, env = "EDDY_STORE", value_name = "URL", hide_env_values = true)]
    pub store: Option<String>,
    /// Reset the store's time to the system clock, after a start with a clock that was ahead; pass it once, not
    /// permanently
    #[arg(long, env = "EDDY_RESET_CLOCK", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(skip)]
    pub reset_clock: Option<bool>,
    /// Do not create or update the tables of a PostgreSQL store; refuse to start if they are not up to date
    #[arg(long, env = "EDDY_NO_MIGRATE", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub no_migrate: Option<bool>,
    /// Address to listen on; port 0 picks a free port [default: 127.0.0.1:7070]
    #[arg(long, env = "EDDY_LISTEN", value_name = "ADDR")]
    pub listen: Option<String>,
    /// How long a worker keeps a task without a heartbeat [default: 30s]
    #[arg(long, env = "EDDY_LEASE", value_name = "DURATION", value_parser = Span::from_text)]
    pub lease: Option<Span>,
    /// A TOML file whose keys are these flags
    #[arg(long, env = "EDDY_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Whether requests need a key [default: off on loopback, on elsewhere]
    #[arg(long, env = "EDDY_KEYS", value_name = "on|off")]
    pub keys: Option<KeysMode>,
    /// Serve without keys on an address that other machines can reach, such as in a container whose port is not
    /// published
    #[arg(long, env = "EDDY_INSECURE", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub insecure: Option<bool>,
    /// The first admin key of `default`, instead of a generated one that is printed; with `--keys on`
    #[arg(long, env = "EDDY_ADMIN_KEY", value_name = "KEY", hide_env_values = true)]
    #[serde(alias = "admin_key")]
    pub admin_key: Option<String>,
    /// A proxy in front terminates TLS, so plain HTTP beyond loopback is intended
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
    /// The URL of the server from outside, used in webhook URLs [default: the address it listens on]
    #[arg(long, env = "EDDY_PUBLIC_URL", value_name = "URL")]
    #[serde(alias = "public_url")]
    pub public_url: Option<String>,
    /// The name of this instance in logs [default: eddy-<process id>]
    #[arg(long, env = "EDDY_INSTANCE", value_name = "NAME")]
    pub instance: Option<String>,
    /// Log as JSON, one object per line
    #[arg(long, env = "EDDY_LOG_JSON", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(alias = "log_json")]
    pub log_json: Option<bool>,
    /// The largest request body, in bytes [default: 16777216]
    #[arg(long, env = "EDDY_MAX_BODY", value_name = "BYTES")]
    #[serde(alias = "max_body")]
    pub max_body: Option<usize>,
    /// Memory for all request bodies together; a namespace can use a quarter [default: 256MiB]
    #[arg(long, env = "EDDY_BODY_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "body_memory")]
    pub body_memory: Option<Size>,
    /// Memory for all responses not yet sent; a namespace can use half [default: 128MiB]
    #[arg(long, env = "EDDY_RESPONSE_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "response_memory")]
    pub response_memory: Option<Size>,
    /// Memory for all tasks on their way to workers; a namespace can use a quarter [default: 128MiB]
    #[arg(long, env = "EDDY_TASK_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "task_memory")]
    pub task_memory: Option<Size>,
    /// Memory for cached runs [default: 256MiB]
    #[arg(long, env = "EDDY_CACHE_MEMORY", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "cache_memory")]
    pub cache_memory: Option<Size>,
    /// Maximum number of connections [default: 4096]
    #[arg(long, env = "EDDY_MAX_CONNECTIONS", value_name = "N")]
    #[serde(alias = "max_connections")]
    pub max_connections: Option<usize>,
    /// Maximum number of waiting requests (long polls); more get 429 [default: 4096]
    #[arg(long, env = "EDDY_MAX_LONG_POLLS", value_name = "N")]
    #[serde(alias = "max_long_polls")]
    pub max_long_polls: Option<usize>,
    /// How long the head of a request may take and a connection may be idle [default: 10s]
    #[arg(long, env = "EDDY_HEADER_TIMEOUT", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "header_timeout")]
    pub header_timeout: Option<Span>,
    /// How many tasks of a namespace can wait for workers before starts get 429 [default: 1000000]
    #[arg(long, env = "EDDY_BACKLOG", value_name = "N")]
    pub backlog: Option<usize>,
    /// How long to keep timelines, steps and values after their run has ended [default: 7d]
    #[arg(long, env = "EDDY_RETENTION_TIMELINES", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "retention_timelines")]
    pub retention_timelines: Option<Span>,
    /// How long to keep the headers of runs, and so their entries in lists, after they have ended [default: 30d]
    #[arg(long, env = "EDDY_RETENTION_RUNS", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "retention_runs")]
    pub retention_runs: Option<Span>,
    /// How long to keep events; longer if a flow looks back further [default: 7d]
    #[arg(long, env = "EDDY_RETENTION_EVENTS", value_name = "DURATION", value_parser = Span::from_text)]
    #[serde(alias = "retention_events")]
    pub retention_events: Option<Span>,
    /// The largest payload, as JSON: 1KiB to 8MiB [default: 2MiB]
    #[arg(long, env = "EDDY_MAX_PAYLOAD", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "max_payload")]
    pub max_payload: Option<Size>,
    /// Payloads from this size get a warning [default: half of --max-payload]
    #[arg(long, env = "EDDY_WARN_PAYLOAD", value_name = "SIZE", value_parser = Size::from_text)]
    #[serde(alias = "warn_payload")]
    pub warn_payload: Option<Size>,
    /// For tests: a clock that stands still until `POST /v1/test/clock` moves it; only with `--store memory:`, on
    /// loopback
    #[arg(long, env = "EDDY_TEST_CLOCK", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(skip)]
    pub test_clock: Option<bool>,
    /// Stop when standard input ends, which it does when the process that started the server ends
    #[arg(long, env = "EDDY_EXIT_WITH_STDIN", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    #[serde(skip)]
    pub exit_with_stdin: Option<bool>,
    /// How long a worker without heartbeats counts as online [default: one lease]
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
    /// Fills unset values from the file.
    pub(super) fn over(self, file: ServeArgs) -> ServeArgs {
        ServeArgs {
            store: self.store.or(file.store),
            reset_clock: self.reset_clock,
            no_migrate: self.no_migrate.or(file.no_migrate),
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
            test_clock: self.test_clock,
            exit_with_stdin: self.exit_with_stdin,
            offline_after: self.offline_after.or(file.offline_after),
        }
    }
}
