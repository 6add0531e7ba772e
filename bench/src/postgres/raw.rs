//! The ceiling: the store's own commit function, called with the rows of the hot transition. No run is decided, but the
//! database does the same work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Statement};
use uuid::Uuid;

use super::server::Server;
use crate::measure::{Measure, Row};
use crate::stores::{self, Opened};

type Failed = Box<dyn std::error::Error>;
type Failure = Box<dyn std::error::Error + Send + Sync>;
type Value = Box<dyn ToSql + Sync + Send>;

const SCHEMA: &str = "raw";

/// How the tasks that a call adds are claimed in the same transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claims {
    No,
    /// By one request.
    Together,
    /// By a request for each.
    Apart,
}

/// The rows of one transition, as the store wrote them.
#[derive(Debug, Clone)]
struct Sample {
    flow: String,
    status: String,
    header: String,
    /// The root scope, which counts its open steps; the step that ended; the step that was queued.
    activations: [String; 3],
    count: i32,
    records: String,
    queue: String,
    class: i64,
    handler: String,
    task: String,
    started: String,
}

pub struct Raw {
    sample: Sample,
    connections: Vec<Connection>,
    /// Runs so far: each call gets new ones.
    runs: AtomicU64,
}

struct Connection {
    client: Client,
    commit: Function,
    claim: Function,
    queue: String,
}

/// A function of the store. Of its parameters those are given that a hot transition needs; the others are empty.
struct Function {
    statement: Statement,
    given: Vec<String>,
}

impl Raw {
    pub async fn open(server: &Server, connections: usize) -> Result<Raw, Failed> {
        stores::leave_half_way(&Opened::postgres(&server.url(SCHEMA)).await?).await?;
        let client = server.connect().await?;
        let sample = Sample::read(&client).await?;
        let mut raw = Raw { sample, connections: Vec::new(), runs: AtomicU64::new(0) };
        for at in 0..connections {
            let client = server.connect().await?;
            // Each has its own queue, so that none claims the other's tasks.
            let queue = format!("raw{at}");
            let sql = "INSERT INTO raw.classes SELECT (jsonb_populate_record(c, jsonb_build_object('queue', $1::text))).* \
                       FROM raw.classes c WHERE c.queue = $2 ON CONFLICT DO NOTHING";
            client.execute(sql, &[&queue, &raw.sample.queue]).await?;
            let commit =
                Function::find(&client, "commit_v1", |name| commit_value(&raw.sample, name, &[], 0, "").is_some());
            let commit = commit.await?;
            let claim = Function::find(&client, "claim_v1", |name| claim_value(name, 1, 1, "").is_some()).await?;
            raw.connections.push(Connection { client, commit, claim, queue });
        }
        Ok(raw)
    }

    /// On each of so many connections `calls` calls of `at_once` transitions, one call after the other.
    pub async fn calls(&self, connections: usize, at_once: usize, calls: usize, claims: Claims) -> Result<Row, Failed> {
        let mut begun = Vec::new();
        for connection in self.connections.iter().take(connections) {
            let first = self.runs.fetch_add(at_once as u64, Ordering::Relaxed);
            let runs: Vec<Uuid> =
                (first..first + at_once as u64).map(|at| Uuid::from_u128(0x0198 << 112 | u128::from(at))).collect();
            connection.call(&self.sample, &runs, 0, claims).await.map_err(|error| error.to_string())?;
            begun.push((connection, runs));
        }
        let measure = Measure::start();
        let calling = begun.iter().map(async |(connection, runs)| {
            let mut latencies: Vec<Duration> = Vec::with_capacity(calls);
            for round in 1..=calls as i64 {
                let since = Instant::now();
                connection.call(&self.sample, runs, round, claims).await?;
                latencies.push(since.elapsed());
            }
            Ok::<_, Failure>(latencies)
        });
        let latencies = try_join_all(calling).await.map_err(|error| error.to_string())?.concat();
        let with = match claims {
            Claims::No => "",
            Claims::Together => ", one claim",
            Claims::Apart => ", a claim each",
        };
        let what = format!("raw commit, {at_once} a call, {connections} at once{with}");
        Ok(measure.row(what, "raw", (connections * calls * at_once) as u64, latencies))
    }
}

impl Connection {
    async fn call(&self, sample: &Sample, runs: &[Uuid], round: i64, claims: Claims) -> Result<(), Failure> {
        let given = self.commit.given.iter();
        let values: Vec<Value> =
            given.filter_map(|name| commit_value(sample, name, runs, round, &self.queue)).collect();
        let commit = self.commit.call(&self.client, &values);
        let codes = if claims == Claims::No {
            commit.await?
        } else {
            let requests = if claims == Claims::Together { 1 } else { runs.len() };
            let given = self.claim.given.iter();
            let asked: Vec<Value> =
                given.filter_map(|name| claim_value(name, requests, runs.len() / requests, &self.queue)).collect();
            let (begun, codes, claimed, ended) = tokio::join!(
                biased;
                self.client.batch_execute("BEGIN"),
                commit,
                self.claim.call(&self.client, &asked),
                self.client.batch_execute("COMMIT")
            );
            begun?;
            let (codes, claimed) = (codes?, claimed?);
            ended?;
            let got = claimed.iter().filter(|row| row.get::<_, Option<Uuid>>("out_run").is_some()).count();
            if got != runs.len() {
                return Err(format!("{got} of {} tasks were claimed", runs.len()).into());
            }
            codes
        };
        let refused = codes.iter().filter(|row| row.get::<_, i32>("out_code") > 0).count();
        if refused > 0 {
            return Err(format!("{refused} of {} transitions were refused", runs.len()).into());
        }
        Ok(())
    }
}

impl Function {
    async fn find(client: &Client, name: &str, is_given: impl Fn(&str) -> bool) -> Result<Function, Failed> {
        let sql = "SELECT a.name, a.of::oid::regtype::text FROM pg_proc p, \
                   unnest(p.proargnames[1:p.pronargs], p.proargtypes::oid[]) WITH ORDINALITY a(name, of, i) \
                   WHERE p.proname = $1 AND p.pronamespace = 'raw'::regnamespace ORDER BY a.i";
        let (mut places, mut given) = (Vec::new(), Vec::new());
        for row in client.query(sql, &[&name]).await? {
            let (name, of): (String, String) = (row.get(0), row.get(1));
            places.push(if is_given(&name) {
                given.push(name);
                format!("${}", given.len())
            } else if of.ends_with("[]") {
                "'{}'".to_owned()
            } else {
                "NULL".to_owned()
            });
        }
        let statement = client.prepare(&format!("SELECT * FROM raw.{name}({})", places.join(", "))).await?;
        Ok(Function { statement, given })
    }

    async fn call(&self, client: &Client, values: &[Value]) -> Result<Vec<tokio_postgres::Row>, tokio_postgres::Error> {
        let values: Vec<&(dyn ToSql + Sync)> = values.iter().map(|value| &**value as _).collect();
        client.query(&self.statement, &values).await
    }
}

impl Sample {
    async fn read(client: &Client) -> Result<Sample, Failed> {
        let run = client.query_one("SELECT flow, status, header FROM raw.runs", &[]).await?;
        let activation = async |state: &str| {
            let sql = "SELECT body FROM raw.activations WHERE body LIKE '%' || $1 || '%' LIMIT 1";
            let statement = client.prepare_typed(sql, &[Type::TEXT]).await?;
            Ok::<_, Failed>(client.query_one(&statement, &[&state]).await?.get::<_, String>(0))
        };
        let activations =
            [activation("\"Open\"").await?, activation("\"Ended\"").await?, activation("\"Queued\"").await?];
        let sql = "SELECT count, body FROM raw.records WHERE count > 1 ORDER BY first DESC LIMIT 1";
        let records = client.query_one(sql, &[]).await?;
        let task = client.query_one("SELECT queue, class, handler, body, started FROM raw.tasks", &[]).await?;
        Ok(Sample {
            flow: run.get(0),
            status: run.get(1),
            header: run.get(2),
            activations,
            count: records.get(0),
            records: records.get(1),
            queue: task.get(0),
            class: task.get(1),
            handler: task.get(2),
            task: task.get(3),
            started: task.get(4),
        })
    }
}

/// What a parameter of `commit_v1` is in the `round`-th transition of `runs`; none if it is empty. The first round starts
/// them.
fn commit_value(sample: &Sample, name: &str, runs: &[Uuid], round: i64, queue: &str) -> Option<Value> {
    let n = runs.len();
    let places = || 1..=n as i32;
    let three = [0, round + 1, round + 2];
    fn all<T: ToSql + Sync + Send + Clone + 'static>(value: T, n: usize) -> Value {
        Box::new(vec![value; n])
    }
    fn of<T: ToSql + Sync + Send + 'static>(values: impl Iterator<Item = T>) -> Value {
        Box::new(values.collect::<Vec<T>>())
    }
    let texts = |text: &str| all(text.to_owned(), n);
    let removed = if round > 0 { n } else { 0 };
    Some(match name {
        "p_lock" | "c_run" => of(runs.iter().copied()),
        "c_ns" => texts("default"),
        "c_base" => all(round, n),
        "c_version" => all(round + 1, n),
        "c_command" => of((0..n).map(|_| Uuid::new_v4())),
        "c_flow" => texts(&sample.flow),
        "c_status" => texts(&sample.status),
        "c_external" => all(None::<String>, n),
        "c_root" | "c_retry_of" => all(None::<Uuid>, n),
        "c_begun" => all(true, n),
        "c_paused" | "c_ended" | "t_is_run" | "t_closed" => all(false, n),
        "c_memo" | "t_age_ms" => all(0_i64, n),
        "c_crc" | "c_records_crc" | "t_crc" | "t_started_crc" => all(round as i32, n),
        "c_header" => texts(&sample.header),
        "c_count" => all(sample.count, n),
        "c_records" => texts(&sample.records),
        "a_c" => of(places().flat_map(|c| [c; 3])),
        "a_id" => of(places().flat_map(|_| three)),
        "a_crc" => all(round as i32, 3 * n),
        "a_body" => of(places().flat_map(|_| sample.activations.clone())),
        "t_c" => of(places()),
        "t_fence" => all(round + 1, n),
        "t_activation" => all(round + 2, n),
        "t_queue" => texts(queue),
        "t_class" => all(sample.class, n),
        "t_key" | "t_limits" => texts(""),
        "t_handler" => texts(&sample.handler),
        "t_start_ms" | "t_timeout_ms" => all(None::<i64>, n),
        "t_body" => texts(&sample.task),
        "t_started" => texts(&sample.started),
        "td_c" => of(places().take(removed)),
        "td_fence" => all(round, removed),
        "td_remove" => all(true, removed),
        _ => return None,
    })
}

/// The same of `claim_v1`, for requests of `max` tasks each.
fn claim_value(name: &str, requests: usize, max: usize, queue: &str) -> Option<Value> {
    fn all<T: ToSql + Sync + Send + Clone + 'static>(value: T, n: usize) -> Value {
        Box::new(vec![value; n])
    }
    Some(match name {
        "r_group" => all(1, requests),
        "g_ns" => Box::new(vec!["default".to_owned()]),
        "g_queues" => Box::new(vec![queue.to_owned()]),
        "g_offer" => Box::new(vec![r#"{"handlers":[],"flows":{},"labels":[],"build":null}"#.to_owned()]),
        "r_request" => Box::new((0..requests).map(|_| Uuid::new_v4()).collect::<Vec<_>>()),
        "r_worker" => Box::new((0..requests).map(|at| format!("{queue}-{at}")).collect::<Vec<_>>()),
        "r_max" => all(max as i32, requests),
        "r_most" => all(None::<i32>, requests),
        "r_lease_ms" => all(30_000_i64, requests),
        _ => return None,
    })
}
