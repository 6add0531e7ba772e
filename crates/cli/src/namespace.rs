//! `eddy namespace`: tenants of a server.

use eddyline_protocol::{CreateNamespace, Span};
use serde_json::{Map, Value, json};

use super::Context;
use super::connect::segment;
use super::moment;
use super::screen::{Ink, Line, table};
use super::trouble::Trouble;

#[derive(Debug, clap::Subcommand)]
pub enum NamespaceCommand {
    /// List the namespaces
    List,
    /// Create a namespace
    Create { name: String },
    /// Change the settings of a namespace; settings that are not given stay unchanged
    Set(Set),
}

#[derive(Debug, clap::Args)]
pub struct Set {
    #[arg(value_name = "NAMESPACE")]
    name: String,
    /// How long timelines, steps and payloads are kept after the end of a run
    #[arg(long, value_name = "SPAN", value_parser = Span::from_text)]
    retention_timelines: Option<Span>,
    /// How long runs are kept after their end
    #[arg(long, value_name = "SPAN", value_parser = Span::from_text)]
    retention_runs: Option<Span>,
    /// How long published events are kept
    #[arg(long, value_name = "SPAN", value_parser = Span::from_text)]
    retention_events: Option<Span>,
    /// Whether all requests of the namespace are refused
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    disabled: Option<bool>,
    /// How many tasks may wait for workers before starts get 429
    #[arg(long, value_name = "N")]
    backlog: Option<u64>,
}

pub async fn run(ctx: &Context, command: NamespaceCommand) -> Result<(), Trouble> {
    match command {
        NamespaceCommand::List => list(ctx).await,
        NamespaceCommand::Create { name } => {
            let created: Value = ctx.remote()?.post("/v1/namespaces", &CreateNamespace { name: name.clone() }).await?;
            ctx.screen.answer(&created, format!("{name} created"))
        }
        NamespaceCommand::Set(set) => {
            let (name, body) = (set.name.clone(), set.body()?);
            let changed: Value = ctx.remote()?.patch(&format!("/v1/namespaces/{}", segment(&name)), &body).await?;
            ctx.screen.answer(&changed, format!("{name} changed"))
        }
    }
}

impl Set {
    fn body(self) -> Result<Value, Trouble> {
        let kept =
            [("timelines", self.retention_timelines), ("runs", self.retention_runs), ("events", self.retention_events)];
        let retention: Map<String, Value> =
            kept.into_iter().filter_map(|(what, span)| Some((what.to_owned(), json!(span?)))).collect();
        let retention = (!retention.is_empty()).then_some(Value::Object(retention));
        let fields = [
            ("retention", retention),
            ("disabled", self.disabled.map(Value::Bool)),
            ("backlog", self.backlog.map(Value::from)),
        ];
        let body: Map<String, Value> =
            fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
        match body.is_empty() {
            true => Err(Trouble::usage("there is nothing to change: see `eddy namespace set --help`")),
            false => Ok(Value::Object(body)),
        }
    }
}

async fn list(ctx: &Context) -> Result<(), Trouble> {
    let namespaces = ctx.remote()?.list("/v1/namespaces", &[], None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&namespaces);
    }
    let now = moment::now_ms();
    let row = |namespace: &Value| {
        let created = namespace["created_at"].as_str().map(|at| moment::ago(at, now)).unwrap_or_default();
        let disabled = if namespace["disabled"] == true { "disabled" } else { "" };
        vec![
            Line::plain(namespace["name"].as_str().unwrap_or_default()),
            Line::default().with(Ink::Faint, created),
            Line::default().with(Ink::Bad, disabled),
        ]
    };
    let rows: Vec<_> = namespaces.iter().map(row).collect();
    ctx.screen.lines(&table(&["NAMESPACE", "CREATED", ""], &rows))
}
