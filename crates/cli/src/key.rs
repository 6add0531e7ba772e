//! `eddy key`: API keys.

use eddyline_protocol::{CreateKey, KeyCreated, KeyInfo, Scope, Span};

use super::Context;
use super::connect::{segment, understood};
use super::moment;
use super::screen::{Line, table};
use super::trouble::Trouble;

#[derive(Debug, clap::Subcommand)]
pub enum KeyCommand {
    /// Create a key; it is shown only once
    Create {
        /// What it is for
        name: String,
        /// What it allows: read, start, signal, worker, admin; may be given several times
        #[arg(long = "scope", value_name = "SCOPE", value_parser = scope, required = true, value_delimiter = ',')]
        scopes: Vec<Scope>,
        /// The namespace it is bound to [default: your own]
        #[arg(long = "for-namespace", value_name = "NAME")]
        bound_to: Option<String>,
        /// How long it is valid, from now
        #[arg(long, value_name = "SPAN", value_parser = Span::from_text)]
        expires_in: Option<Span>,
    },
    /// List the keys
    List {
        /// List the keys of another namespace; needs an admin key of `default`
        #[arg(long = "for-namespace", value_name = "NAME")]
        bound_to: Option<String>,
    },
    /// Revoke a key
    Revoke {
        #[arg(value_name = "KEY-ID")]
        id: String,
        /// The namespace of the key, if it is another; needs an admin key of `default`
        #[arg(long = "for-namespace", value_name = "NAME")]
        bound_to: Option<String>,
    },
}

pub async fn run(ctx: &Context, command: KeyCommand) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    match command {
        KeyCommand::Create { name, scopes, bound_to, expires_in } => {
            let body = CreateKey { name, scopes, namespace: bound_to, expires_in };
            let created: KeyCreated = remote.post("/v1/keys", &body).await?;
            if ctx.screen.json {
                return ctx.screen.document(&created);
            }
            ctx.screen.aside(format!("key {} ({}); it is not shown again:", created.info.key_id, created.info.name));
            ctx.screen.say(created.key)
        }
        KeyCommand::List { bound_to } => list(ctx, bound_to).await,
        KeyCommand::Revoke { id, bound_to } => {
            let answer = remote.delete(&format!("/v1/keys/{}", segment(&id)), &of_namespace(bound_to)).await?;
            ctx.screen.answer(&answer, format!("{id} revoked"))
        }
    }
}

fn scope(text: &str) -> Result<Scope, String> {
    Scope::named(text).ok_or_else(|| "expected read, start, signal, worker or admin".to_owned())
}

fn of_namespace(name: Option<String>) -> Vec<(&'static str, String)> {
    name.into_iter().map(|name| ("namespace", name)).collect()
}

async fn list(ctx: &Context, bound_to: Option<String>) -> Result<(), Trouble> {
    let keys = ctx.remote()?.list("/v1/keys", &of_namespace(bound_to), None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&keys);
    }
    let now = moment::now_ms();
    let mut rows = Vec::new();
    for key in keys {
        let key: KeyInfo = understood(key)?;
        let scopes: Vec<&str> = key.scopes.iter().map(|scope| scope.as_str()).collect();
        rows.push(vec![
            Line::plain(&key.key_id),
            Line::plain(&key.name),
            Line::plain(&key.namespace),
            Line::plain(scopes.join(", ")),
            Line::plain(moment::ago(&key.created_at, now)),
            Line::plain(key.expires_at.unwrap_or_else(|| "never".to_owned())),
        ]);
    }
    match rows.is_empty() {
        true => ctx.screen.say("no keys"),
        false => ctx.screen.lines(&table(&["KEY", "NAME", "NAMESPACE", "SCOPES", "CREATED", "EXPIRES"], &rows)),
    }
}
