//! `eddy key`: who may use the server.

use eddyline_protocol::{CreateKey, KeyCreated, KeyInfo, Scope, Span};

use super::Context;
use super::connect::{segment, understood};
use super::moment;
use super::screen::{Line, table};
use super::trouble::Trouble;

#[derive(Debug, clap::Subcommand)]
pub enum KeyCommand {
    /// Make a key; it is shown this once
    Create {
        /// What it is for
        name: String,
        /// What it may be used for: read, start, signal, worker, admin; may be given several times
        #[arg(long = "scope", value_name = "SCOPE", value_parser = scope, required = true, value_delimiter = ',')]
        scopes: Vec<Scope>,
        /// The namespace it is bound to; your own if it is left out
        #[arg(long = "for-namespace", value_name = "NAME")]
        bound_to: Option<String>,
        /// Until when it can be used, from now on
        #[arg(long, value_name = "SPAN", value_parser = Span::from_text)]
        expires_in: Option<Span>,
    },
    /// List the keys
    List {
        /// Those of another namespace, with an admin key of `default`
        #[arg(long = "for-namespace", value_name = "NAME")]
        bound_to: Option<String>,
    },
    /// Revoke a key
    Revoke {
        #[arg(value_name = "KEY-ID")]
        id: String,
        /// The namespace that it is bound to, if it is another, with an admin key of `default`
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
            if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say(format!("{id} revoked")) }
        }
    }
}

fn scope(text: &str) -> Result<Scope, String> {
    let known = Scope::ALL.into_iter().find(|scope| scope_name(*scope) == text);
    known.ok_or_else(|| "expected read, start, signal, worker or admin".to_owned())
}

fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Read => "read",
        Scope::Start => "start",
        Scope::Signal => "signal",
        Scope::Worker => "worker",
        Scope::Admin => "admin",
    }
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
        let scopes: Vec<&str> = key.scopes.iter().map(|scope| scope_name(*scope)).collect();
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
