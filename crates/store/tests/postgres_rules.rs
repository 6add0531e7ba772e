//! What statements on PostgreSQL must keep to when several processes use one database: each of these rules was broken by a
//! statement that looked right. ARCHITECTURE.md lists the rules and their tests, here and elsewhere.
//!
//! Where two calls must meet at one moment, the test itself locks a row that the first of them needs, and waits until the
//! database says that it is waited for.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "postgres_rules/answers.rs"]
mod answers;
#[path = "postgres_rules/claims.rs"]
mod claims;
#[path = "postgres_rules/commits.rs"]
mod commits;
#[path = "postgres_rules/leases.rs"]
mod leases;
#[path = "postgres/private.rs"]
mod private;
#[path = "postgres/server.rs"]
#[allow(dead_code)]
mod server;
mod story;

use std::sync::Arc;
use std::time::Duration;

use eddyline_language::definition;
use eddyline_machine::{Expiry, Input, RunId, Start, TaskRef};
use eddyline_store::*;
use serde_json::{Value, json};
use story::{Decider, START, claim, documents, ns, put, run_id};
use tokio_postgres::Client;

/// Two processes on one database, and a connection that looks and interferes.
#[derive(Debug)]
pub struct Two {
    pub a: Arc<Postgres>,
    pub b: Arc<Postgres>,
    pub clock: Arc<ManualClock>,
    pub beside: Client,
    pub schema: String,
    decider: Decider,
    url: String,
    made: u128,
}

impl Two {
    /// Time is the test's.
    pub async fn new() -> Two {
        Two::open(server::fresh_url(), true).await
    }

    /// Time is the database's.
    pub async fn in_real_time() -> Two {
        Two::open(server::fresh_url(), false).await
    }

    /// On another server.
    pub async fn on(url: String) -> Two {
        Two::open(url, true).await
    }

    async fn open(url: String, manual: bool) -> Two {
        let clock = ManualClock::at(START);
        let options =
            PostgresOptions { clock: manual.then(|| clock.clone() as Arc<dyn Clock>), ..PostgresOptions::default() };
        let schema = url.split("schema=").nth(1).unwrap().split('&').next().unwrap().to_owned();
        Two {
            a: Arc::new(Postgres::open(&url, options.clone()).await.unwrap()),
            b: Arc::new(Postgres::open(&url, options).await.unwrap()),
            clock,
            beside: connect(&url).await,
            schema,
            decider: Decider::new(),
            url,
            made: 0,
        }
    }

    pub fn flow(&mut self, text: &str) {
        let flow = definition::parse(text).unwrap().flow;
        self.decider.flows.insert(flow.name.clone(), Arc::new(flow));
    }

    pub fn number(&mut self) -> u128 {
        self.made += 1;
        self.made
    }

    /// `SCHEMA` in a statement stands for the schema.
    pub fn sql(&self, text: &str) -> String {
        text.replace("SCHEMA", &self.schema)
    }

    pub async fn execute(&self, text: &str) {
        self.beside.batch_execute(&self.sql(text)).await.unwrap();
    }

    pub async fn number_of(&self, text: &str) -> i64 {
        self.beside.query_one(&self.sql(text), &[]).await.unwrap().get(0)
    }

    pub async fn prepare_start(&mut self, flow: &str, input: Value) -> RunCommit {
        let number = self.number();
        self.decider.start(&*self.a, number, flow, input).await
    }

    pub async fn start(&mut self, flow: &str, input: Value) -> RunId {
        let commit = self.prepare_start(flow, input).await;
        let run = commit.transition.header.run;
        one(&self.a, Command::Run(commit)).await.unwrap();
        run
    }

    pub async fn start_with(&mut self, flow: &str, start: Start) -> RunId {
        let run = run_id(self.number());
        let commit = self.decider.decide(&*self.a, run, Some(flow), &[Input::Start(Box::new(start))]).await;
        one(&self.a, Command::Run(commit)).await.unwrap();
        run
    }

    pub async fn decide(&mut self, run: RunId, input: Input) -> RunCommit {
        self.decider.decide(&*self.a, run, None, &[input]).await
    }

    pub async fn complete(&mut self, claimed: &Claimed) -> RunCommit {
        self.decider.complete(&*self.a, claimed, json!("done")).await
    }

    /// A claim of anything on the default queue.
    pub fn ask(&mut self, worker: &str, max: usize) -> ClaimRequest {
        let number = self.number();
        claim(number, worker, max)
    }

    /// The commit by which a lease ends.
    pub async fn expiry(&mut self, claimed: &Claimed) -> RunCommit {
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let why = Expiry::LeaseLost;
        let mut commit =
            self.decide(claimed.run, Input::Expired { task, why, claim: claimed.held.claim.clone() }).await;
        commit.takes = vec![Consumed::Expiry(claimed.task.fence, why)];
        commit
    }

    /// A commit of documents, messages and events; fill in what is needed.
    pub fn documents(&mut self, changes: Vec<DocumentChange>) -> DocumentCommit {
        let number = (1 << 64) + self.number();
        match documents(number, changes) {
            Command::Documents(commit) => commit,
            Command::Run(_) => unreachable!(),
        }
    }

    pub async fn rule(&mut self, kind: &str, id: &str, rules: Value) {
        let commit = self.documents(vec![put(kind, id, rules, None)]);
        one(&self.a, Command::Documents(commit)).await.unwrap();
    }

    /// Waits until so many calls on this schema wait for a lock.
    pub async fn until_blocked(&self, count: i64) {
        let waiting = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{}%'",
            self.schema
        );
        let begun = std::time::Instant::now();
        while self.number_of(&waiting).await != count {
            assert!(begun.elapsed() < Duration::from_secs(20), "there are never {count} calls that wait");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

impl Drop for Two {
    fn drop(&mut self) {
        server::drop_schemas_now(vec![std::mem::take(&mut self.url)]);
    }
}

async fn connect(url: &str) -> Client {
    let plain = url.split("&schema=").next().unwrap().split("?schema=").next().unwrap();
    let (client, connection) = tokio_postgres::connect(plain, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub async fn one(store: &Postgres, command: Command) -> std::result::Result<Committed, Refused> {
    store.commit(vec![command], Vec::new()).await.unwrap().commands.remove(0)
}

pub async fn claims(store: &Postgres, request: ClaimRequest) -> Claims {
    store.commit(Vec::new(), vec![request]).await.unwrap().claims.remove(0)
}

pub fn leases_of(tasks: &[Claimed]) -> Vec<Lease> {
    tasks.iter().map(|claimed| Lease { run: claimed.run, fence: claimed.task.fence }).collect()
}

/// A call on a task of its own.
pub fn at_once<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> tokio::task::JoinHandle<T> {
    tokio::spawn(call)
}

pub async fn feed(store: &Postgres, feed: Feed, after: Option<u64>) -> Vec<FeedItem> {
    store.feed(&ns(), &feed, Page { after, limit: 100 }).await.unwrap()
}
