//! The server that a command talks to.

use clap::ArgMatches;
use clap::parser::ValueSource;
pub use eddyline::segment;
use eddyline::{Client, Error};
use eddyline_language::nearest::nearest;
use eddyline_protocol::{ApiError, Code, FlowInfo, Page};
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::trouble::Trouble;
use super::unreached::unreached;

pub const DEFAULT_URL: &str = "http://127.0.0.1:7070";
/// Page size when a list is read to its end.
const PAGE: usize = 1_000;
/// How many items of a list are read without an explicit limit.
const MOST_ITEMS: usize = 100_000;

#[derive(Debug, Clone, clap::Args)]
pub struct Where {
    /// The server.
    #[arg(long, env = "EDDY_URL", default_value = DEFAULT_URL, global = true, value_name = "URL", help_heading = "Server")]
    pub url: String,
    /// The key, if the server requires one.
    #[arg(long, env = "EDDY_KEY", hide_env_values = true, global = true, value_name = "KEY", help_heading = "Server")]
    pub api_key: Option<String>,
    /// The namespace, if the server has no keys.
    #[arg(long, env = "EDDY_NAMESPACE", global = true, value_name = "NAME", help_heading = "Server")]
    pub namespace: Option<String>,
    /// Where the key came from: the flag or the environment variable.
    #[arg(skip)]
    pub key_from: Option<&'static str>,
}

impl Where {
    /// A server without keys.
    pub fn at(url: String) -> Where {
        Where { url, api_key: None, namespace: None, key_from: None }
    }

    /// Remembers where the key came from, so that an error can name it.
    pub fn remember_sources(&mut self, matches: &ArgMatches) {
        self.key_from = match matches.value_source("api_key") {
            Some(ValueSource::CommandLine) => Some("--api-key"),
            Some(ValueSource::EnvVariable) => Some("EDDY_KEY"),
            _ => None,
        };
    }
}

pub type Query<'a> = &'a [(&'a str, String)];

#[derive(Debug, Clone)]
pub struct Remote {
    pub at: Where,
    client: Client,
}

impl Remote {
    pub fn new(at: &Where) -> Result<Remote, Trouble> {
        let mut client = Client::new(&at.url).map_err(|error| Trouble::usage(error.to_string()))?;
        if let Some(key) = &at.api_key {
            reject_malformed(key, at.key_from)?;
            client = client.with_key(key);
        }
        if let Some(namespace) = &at.namespace {
            client = client.with_namespace(namespace);
        }
        Ok(Remote { at: at.clone(), client })
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str, query: Query<'_>) -> Result<T, Trouble> {
        self.map_error(self.client.call(Method::GET, path, query, None::<&()>).await)
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &(impl Serialize + Sync)) -> Result<T, Trouble> {
        self.map_error(self.client.call(Method::POST, path, &[], Some(body)).await)
    }

    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &(impl Serialize + Sync)) -> Result<T, Trouble> {
        self.map_error(self.client.call(Method::PUT, path, &[], Some(body)).await)
    }

    pub async fn patch<T: DeserializeOwned>(&self, path: &str, body: &(impl Serialize + Sync)) -> Result<T, Trouble> {
        self.map_error(self.client.call(Method::PATCH, path, &[], Some(body)).await)
    }

    pub async fn delete(&self, path: &str, query: Query<'_>) -> Result<Value, Trouble> {
        self.map_error(self.client.call(Method::DELETE, path, query, None::<&()>).await)
    }

    pub async fn put_text<T: DeserializeOwned>(&self, path: &str, kind: &str, text: &str) -> Result<T, Trouble> {
        self.map_error(self.client.send_text(Method::PUT, path, kind, text).await)
    }

    /// Reads a list to its end, or up to `limit` items.
    pub async fn list(&self, path: &str, query: Query<'_>, limit: Option<usize>) -> Result<Vec<Value>, Trouble> {
        let limit = limit.unwrap_or(MOST_ITEMS);
        let (mut items, mut cursor) = (Vec::new(), None::<String>);
        loop {
            let mut query = query.to_vec();
            query.push(("limit", PAGE.min(limit - items.len()).to_string()));
            query.extend(cursor.map(|cursor| ("cursor", cursor)));
            let page: Page<Value> = self.get(path, &query).await?;
            items.extend(page.items);
            match page.next {
                Some(next) if items.len() < limit => cursor = Some(next),
                _ => break,
            }
        }
        items.truncate(limit);
        Ok(items)
    }

    /// Reads a list and parses its items.
    pub async fn list_of<T: DeserializeOwned>(&self, path: &str, query: Query<'_>) -> Result<Vec<T>, Trouble> {
        self.list(path, query, None).await?.into_iter().map(understood).collect()
    }

    /// A registered flow. If it does not exist, the error suggests similar names.
    pub async fn flow(&self, name: &str, version: Option<&str>) -> Result<FlowInfo, Trouble> {
        let query: Vec<_> = version.iter().map(|version| ("version", (*version).to_owned())).collect();
        match self.get(&format!("/v1/flows/{}", segment(name)), &query).await {
            Err(trouble) => Err(self.name_near(name, trouble).await),
            found => found,
        }
    }

    /// If the error is "not found", suggests the flow whose name is most similar.
    pub async fn name_near(&self, name: &str, trouble: Trouble) -> Trouble {
        if trouble.exit() != super::trouble::Exit::NotFound {
            return trouble;
        }
        let Ok(flows) = self.list("/v1/flows", &[], None).await else { return trouble };
        let names: Vec<&str> = flows.iter().filter_map(|flow| flow["name"].as_str()).collect();
        match nearest(name, names.iter().copied()) {
            None if names.is_empty() => trouble.help("no flow is registered yet: `eddy flow apply FILE`"),
            None => trouble.help("`eddy flow list` lists the registered flows"),
            // The flow exists: something else was not found, such as its version.
            Some(near) if near == name => trouble,
            Some(near) => trouble.help(format!("did you mean {near}?")),
        }
    }

    /// Turns an error of the client into one with advice.
    pub fn map_error<T>(&self, answer: Result<T, Error>) -> Result<T, Trouble> {
        answer.map_err(|error| match error {
            Error::Api { status, error } => self.refused(status, error),
            Error::Config(problem) => Trouble::usage(problem),
            other => unreached(&self.at.url, &other),
        })
    }

    fn refused(&self, status: u16, error: ApiError) -> Trouble {
        let at = &self.at;
        let help = match (error.code, at.key_from) {
            (Code::Unauthorized, None) => "pass a key with --api-key or EDDY_KEY".to_owned(),
            (Code::Unauthorized, Some(from)) => format!("the key came from {from}: use a valid key"),
            // A key is refused for its namespace or for its scopes.
            (Code::Forbidden, Some(_)) if error.message.contains("namespace") => format!(
                "omit --namespace and EDDY_NAMESPACE, or use a key of {}",
                at.namespace.as_deref().unwrap_or("that namespace")
            ),
            (Code::Forbidden, Some(_)) => {
                "create a key with more scopes: `eddy key create --scope …` with a key that has `admin`".to_owned()
            }
            _ => return Trouble::from_api(status, error),
        };
        Trouble::from_api(status, error).help(help)
    }
}

/// Rejects text that cannot be a key, such as a key that was copied with surrounding text.
fn reject_malformed(key: &str, from: Option<&str>) -> Result<(), Trouble> {
    if key.chars().all(|c| c.is_ascii() && !c.is_ascii_control()) {
        return Ok(());
    }
    let from = from.map(|from| format!(" from {from}")).unwrap_or_default();
    let wrong = "it contains a control character or a character outside of ASCII";
    Err(Trouble::usage(format!("the key{from} is not a valid key: {wrong}")))
}

pub fn understood<T: DeserializeOwned>(value: Value) -> Result<T, Trouble> {
    serde_json::from_value(value)
        .map_err(|error| Trouble::unavailable(format!("cannot parse the server's response: {error}")))
}
