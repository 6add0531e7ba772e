//! The same work through a server: one process serves, another is the worker, this one starts runs and waits for them.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use eddyline::protocol::{ClaimTasks, ClaimedTasks};
use eddyline::{Client, StepCtx, StepError, Worker};
use eddyline_server::ServeArgs;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::measure::{Measure, Process, Row, mean_ms};
use crate::postgres;
use crate::workloads::{STEPS, chain_text};

type Failed = Box<dyn std::error::Error>;

/// The environment variable with the role of a child process.
pub const ROLE: &str = "EDDYLINE_BENCH_ROLE";
const IDLE: Duration = Duration::from_secs(10);
/// About the size of a report or a task.
const MESSAGE_BYTES: usize = 600;
const WAIT_MS: u64 = 30_000;
/// The number of runs after which the log of a store has about its full length.
pub const WARM: usize = 150;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Socket,
    Http,
}

impl Transport {
    fn name(self) -> &'static str {
        match self {
            Transport::Socket => "socket",
            Transport::Http => "http",
        }
    }
}

/// Runs of ten steps in a row, `in_flight` at once, on an embedded store.
pub async fn chain(transport: Transport, in_flight: usize, runs: usize) -> Result<Row, Failed> {
    let dir = tempfile::tempdir()?;
    chain_on(&dir.path().display().to_string(), transport, in_flight, runs).await
}

/// The same on the store that a URL or path names.
pub async fn chain_on(store: &str, transport: Transport, in_flight: usize, runs: usize) -> Result<Row, Failed> {
    let server = Server::serve(store)?;
    let client = Client::new(&server.url)?;
    client.register_flow("chain", &chain_text()).await?;
    // With one run at a time the log grows for long, and appending takes longer than overwriting.
    let warm = if in_flight == 1 { WARM } else { 1 };
    let worker = Role::start(&format!("work {} {} {in_flight} {warm}", server.url, transport.name()))?;
    for at in 0..warm {
        one(&client, at).await?;
    }
    let (measure, cpu, before) = (Measure::start(), server.process().cpu(), batches(&client).await?);
    let lane = |share: usize| {
        let client = client.clone();
        async move {
            let mut latencies = Vec::with_capacity(share);
            for at in 0..share {
                let since = Instant::now();
                one(&client, at).await.map_err(|error| error.to_string())?;
                latencies.push(since.elapsed() / STEPS as u32);
            }
            Ok::<_, String>(latencies)
        }
    };
    let share = |at: usize| runs / in_flight + usize::from(at < runs % in_flight);
    let mut latencies = Vec::new();
    for lane in join_all((0..in_flight).map(|at| tokio::spawn(lane(share(at))))).await {
        latencies.extend(lane??);
    }
    let steps = (runs * STEPS) as u64;
    let served = server.process().cpu() - cpu;
    let mut row = measure.row(format!("W1 chain of 10, {in_flight} in flight"), transport.name(), steps, latencies);
    row.cpu_us_per_step = served.as_secs_f64() * 1e6 / steps as f64;
    row.peak_mb = server.process().peak_mb();
    row.commits = batches(&client).await?.saturating_sub(before);
    let pace = worker.stop()?;
    if in_flight == 1 {
        row.step_ms = pace.trim().parse()?;
    }
    server.role.stop()?;
    Ok(row)
}

/// The round trip of a message between two processes: the least that a step over a socket adds to its commit.
pub async fn there_and_back(count: usize) -> Result<Row, Failed> {
    let server = Server::run("echo")?;
    let mut stream = TcpStream::connect(&server.url).await?;
    stream.set_nodelay(true)?;
    let echoed = tokio::spawn(async move {
        let (mut message, mut latencies) = ([0; MESSAGE_BYTES], Vec::with_capacity(count));
        let measure = Measure::start();
        for _ in 0..count {
            let since = Instant::now();
            stream.write_all(&message).await?;
            stream.read_exact(&mut message).await?;
            latencies.push(since.elapsed());
        }
        Ok::<_, std::io::Error>(measure.row("message round trip", "tcp", count as u64, latencies))
    });
    let row = echoed.await??;
    server.role.stop()?;
    Ok(row)
}

async fn echo() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let (mut stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let mut message = [0; MESSAGE_BYTES];
    while stream.read_exact(&mut message).await.is_ok() {
        stream.write_all(&message).await?;
    }
    Ok(())
}

/// The time from starting the processes to the end of a first run, and the cost of an idle server.
pub async fn first_run() -> Result<Row, Failed> {
    let dir = tempfile::tempdir()?;
    let (measure, since) = (Measure::start(), Instant::now());
    let server = Server::start(dir.path())?;
    let client = Client::new(&server.url)?;
    let worker = Role::start(&format!("work {} socket 1 0", server.url))?;
    client.register_flow("chain", &chain_text()).await?;
    one(&client, 0).await?;
    let took = since.elapsed();
    worker.stop()?;
    let cpu = server.process().cpu();
    tokio::time::sleep(IDLE).await;
    let share = (server.process().cpu() - cpu).as_secs_f64() / IDLE.as_secs_f64();
    let mut row = measure.row("from start to a first run", "socket", STEPS as u64, vec![took]);
    row.per_second = 0.0;
    row.peak_mb = server.process().peak_mb();
    row.note = format!(
        "{:.0} ms with two processes started; then idle: {:.0} MB, {:.2} % of a core",
        took.as_secs_f64() * 1e3,
        server.process().resident_mb(),
        share * 100.0
    );
    server.role.stop()?;
    Ok(row)
}

/// The cost of `workers` workers that wait for a task that never comes.
pub async fn polling(workers: usize) -> Result<Row, Failed> {
    let dir = tempfile::tempdir()?;
    let server = Server::start(dir.path())?;
    let client = Client::new(&server.url)?;
    let polls: Vec<_> = (0..workers)
        .map(|at| {
            let client = client.clone();
            tokio::spawn(async move {
                let claim =
                    ClaimTasks { worker_id: format!("idle-{at}"), wait_ms: Some(WAIT_MS), ..ClaimTasks::default() };
                loop {
                    let path = "/v1/tasks/claim";
                    if client.call::<ClaimedTasks>(http::Method::POST, path, &[], Some(&claim)).await.is_err() {
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            })
        })
        .collect();
    // Time for all of them to connect.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (measure, cpu) = (Measure::start(), server.process().cpu());
    tokio::time::sleep(IDLE).await;
    let share = (server.process().cpu() - cpu).as_secs_f64() / IDLE.as_secs_f64();
    let mut row = measure.row(format!("{workers} waiting workers"), "http", workers as u64, Vec::new());
    row.per_second = 0.0;
    row.cpu_us_per_step = 0.0;
    row.peak_mb = server.process().peak_mb();
    row.note = format!("{:.0} MB, {:.2} % of a core", server.process().resident_mb(), share * 100.0);
    polls.into_iter().for_each(|poll| poll.abort());
    server.role.stop()?;
    Ok(row)
}

async fn one(client: &Client, at: usize) -> Result<(), eddyline::Error> {
    let input = json!({"order": at, "note": "a payload like those of every day"});
    client.start("chain", &input).await?.result::<Value>().await?;
    Ok(())
}

/// The number of batches that the server's engine submitted to its store, from its metrics.
async fn batches(client: &Client) -> Result<u64, Failed> {
    let url = client.url().trim_start_matches("http://").to_owned();
    let text = tokio::task::spawn_blocking(move || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(&url)?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {url}\r\nConnection: close\r\n\r\n")?;
        std::io::read_to_string(stream)
    })
    .await??;
    let counted = text.lines().find_map(|line| line.strip_prefix("eddyline_commit_seconds_count "));
    Ok(counted.and_then(|count| count.trim().parse::<f64>().ok()).unwrap_or(0.0) as u64)
}

/// Plays the role of a child process.
pub async fn play(role: &str) -> Result<(), Failed> {
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["echo"] => tokio::spawn(echo()).await??,
        ["serve", store] => {
            let args = ServeArgs {
                store: Some(store.to_owned()),
                listen: Some("127.0.0.1:0".to_owned()),
                ..ServeArgs::default()
            };
            let server = eddyline_server::start(&args).await?;
            println!("{}", server.url());
            until_alone().await;
            server.stop().await;
        }
        ["work", url, transport, slots, warm] => {
            let pace = Arc::new(Pace::default());
            let worker = Worker::connect(url).max_concurrent(slots.parse()?);
            let worker = if transport == "http" { worker.http_only() } else { worker };
            let worker = (0..STEPS).fold(worker, |worker, at| {
                let pace = pace.clone();
                worker.handler(format!("s{at}"), move |ctx: StepCtx, _: Value| {
                    pace.step(at == 0);
                    async move { Ok::<_, StepError>(json!({"ok": true, "step": ctx.activation()})) }
                })
            });
            worker.run_until(until_alone()).await?;
            println!("{}", pace.mean_ms(warm.parse()?));
        }
        ["hold", url, slots] => {
            let worker = Worker::connect(url).max_concurrent(slots.parse()?).drain_timeout(Duration::ZERO);
            let never = |_: StepCtx, _: Value| std::future::pending::<Result<Value, StepError>>();
            worker.handler("hold", never).run_until(until_alone()).await?;
        }
        ["instance", url, in_flight, runs] => {
            postgres::instance(url, in_flight.parse()?, runs.parse()?).await?;
        }
        _ => return Err(format!("unknown role {role}").into()),
    }
    Ok(())
}

/// Records when handlers begin, with one run at a time.
#[derive(Default)]
struct Pace(Mutex<(Option<Instant>, Vec<Duration>)>);

impl Pace {
    fn step(&self, first: bool) {
        let (last, steps) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(last) = last.replace(now).filter(|_| !first) {
            steps.push(now - last);
        }
    }

    /// The mean time from one step of a run to the next, without the first `warm` runs.
    fn mean_ms(&self, warm: usize) -> f64 {
        let (_, steps) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner);
        mean_ms(steps.get(warm * (STEPS - 1)..).unwrap_or_default())
    }
}

/// Waits until the parent process closes stdin or ends.
pub async fn until_alone() {
    let _ = tokio::task::spawn_blocking(|| std::io::stdin().lines().count()).await;
}

/// A child process that runs until its stdin is closed.
pub struct Role {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<BufReader<ChildStdout>>,
}

impl Role {
    pub fn start(role: &str) -> Result<Role, Failed> {
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().map(BufReader::new));
        Ok(Role { child, stdin, stdout })
    }

    /// The next line that it prints; empty if it has ended.
    pub fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.stdout.as_mut().ok_or("the process has no output")?.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    pub fn tell(&mut self, line: &str) -> Result<(), Failed> {
        let stdin = self.stdin.as_mut().ok_or("the process takes no input")?;
        writeln!(stdin, "{line}")?;
        Ok(stdin.flush()?)
    }

    /// Stops it; returns its output.
    pub fn stop(mut self) -> Result<String, Failed> {
        self.stdin = None;
        let said = self.stdout.take().map(std::io::read_to_string).transpose()?;
        self.child.wait()?;
        Ok(said.unwrap_or_default())
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Server {
    pub role: Role,
    pub url: String,
}

impl Server {
    pub fn start(dir: &Path) -> Result<Server, Failed> {
        Server::serve(&dir.display().to_string())
    }

    /// Serves from the store that a URL or path names.
    pub fn serve(store: &str) -> Result<Server, Failed> {
        Server::run(&format!("serve {store}"))
    }

    /// Starts a process that prints its address.
    fn run(role: &str) -> Result<Server, Failed> {
        let mut role = Role::start(role)?;
        match role.line()?.as_str() {
            "" => Err("the server printed no address".into()),
            url => Ok(Server { url: url.to_owned(), role }),
        }
    }

    pub fn process(&self) -> Process {
        Process(self.role.child.id())
    }
}
