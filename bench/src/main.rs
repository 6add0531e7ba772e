//! The throughput of Eddyline, compared with the ceiling of the machine: `cargo run --release -p eddyline-bench`.
//!
//! Absolute figures mean little on a shared machine; compare the ratios to a ceiling measured in the same run.

mod beats;
mod big;
mod ceiling;
mod claims;
mod hot;
mod measure;
mod postgres;
mod read;
mod stores;
mod wire;
mod work;
mod workloads;

use std::process::ExitCode;

use ceiling::Ceiling;
use claims::Shape;
use measure::Row;
use stores::Opened;
use wire::Transport;

/// The allocator of `eddy`.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

const HELP: &str = "eddyline-bench [--json] [--quick] [hot] [w1] [w2] [w3] [claims] [open] [idle] [read] [wire] [beats]
               [postgres] [pg-w1] [pg-w2] [pg-instances] [pg-socket] [pg-idle] [pg-claims] [pg-snapshot] [pg-tables]

  hot    the hot transition, on memory and embedded, compared with raw SQLite writing the same rows
  w1     ten steps in a row, at 1, 50 and 200 runs in flight
  w2     one to n to one, for n = 100, 1,000 and 10,000
  w3     10,000 runs of one step, started in batches
  claims claims while 20,000 tasks with 10, 1,000 or 10,000 keys wait
  open   opening a store with a million records of ended runs
  idle   the cost of 100,000 waiting runs
  read   pages of a projection over 20,000 records, and the log of one step, through a server
  wire   W1 with server and worker in separate processes, and their cost when idle
  beats  the cost to a server of heartbeats of 1,000 tasks, and of a session that holds as many

On PostgreSQL, with a private server that keeps what it acknowledges (`postgres` measures all of these):

  pg-w1         W1 at 1, 50 and 200, compared with the store's commit function called directly
  pg-w2         W2 for n = 100 and 1,000, and W3
  pg-instances  W1 at 200 in one process and in three
  pg-socket     W1 with server and worker in separate processes
  pg-idle       the statements of an idle server
  pg-claims     claims with 100, 100,000 and 1,000,000 tasks queued, and beside 100,000 waiting runs
  pg-snapshot   claims while another transaction holds a snapshot
  pg-tables     the sizes of tables after 1,000,000 steps

EDDYLINE_BENCH_POSTGRES adds arguments to the server, such as \"-c plan_cache_mode=force_generic_plan\";
EDDYLINE_BENCH_DBOS is the path of bench/dbos, built, which pg-w1 then measures beside W1.

Without a name, all are measured, those on PostgreSQL if it is installed. --quick does a tenth of the work. --json prints the rows as JSON.";

#[tokio::main]
async fn main() -> ExitCode {
    if let Some(dir) = std::env::var_os(big::OPEN) {
        return match big::opened(dir.as_ref()).await {
            Ok(row) => {
                println!("{}", serde_json::to_string(&row).unwrap_or_default());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    if let Ok(role) = std::env::var(wire::ROLE) {
        return match wire::play(&role).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let (flags, names): (Vec<String>, Vec<String>) = std::env::args().skip(1).partition(|arg| arg.starts_with('-'));
    let known = ["hot", "w1", "w2", "w3", "claims", "open", "idle", "read", "wire", "beats", "postgres"];
    let unknown = flags.iter().any(|flag| flag != "--json" && flag != "--quick")
        || names.iter().any(|name| !known.contains(&name.as_str()) && !postgres::NAMES.contains(&name.as_str()));
    if unknown {
        eprintln!("{HELP}");
        return ExitCode::from(2);
    }
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    let bench = Bench { part: if has("--quick") { 10 } else { 1 }, quiet: has("--json") };
    let wants = |name: &str| names.is_empty() || names.iter().any(|wanted| wanted == name);
    match bench.run(wants).await {
        Ok(rows) if has("--json") => println!("{}", serde_json::to_string_pretty(&rows).unwrap_or_default()),
        Ok(rows) => measure::print(&rows),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

struct Bench {
    /// Only one part in `part` of the work is done.
    part: usize,
    quiet: bool,
}

type Failed = Box<dyn std::error::Error>;

/// A workload and its ceiling are measured in this many alternating turns, because the speed of a shared machine
/// changes from one second to the next.
pub const TURNS: usize = 5;

impl Bench {
    async fn run(&self, wants: impl Fn(&str) -> bool) -> Result<Vec<Row>, Failed> {
        let mut rows = Vec::new();
        if wants("hot") {
            rows.extend(self.hot().await?);
        }
        if wants("w1") {
            rows.extend(self.single().await?);
            for in_flight in [50, 200] {
                rows.extend(self.chain(in_flight).await?);
            }
        }
        if wants("w2") {
            for embedded in [false, true] {
                let mut at_hundred = None;
                for n in [100, 1_000, 10_000] {
                    self.say("W2");
                    let opened = if embedded { Opened::embedded()? } else { Opened::memory() };
                    let runs = (40_000 / self.part / n).max(1);
                    let mut row = workloads::spread(&opened, n, runs).await;
                    let base = *at_hundred.get_or_insert(row.per_second);
                    row.note = format!("an item costs {:.2}× that at 100", base / row.per_second);
                    rows.push(row);
                }
            }
        }
        if wants("w3") {
            for opened in [Opened::memory(), Opened::embedded()?] {
                self.say("W3");
                rows.push(workloads::many(&opened, 10_000 / self.part).await);
            }
        }
        if wants("claims") {
            for shape in [Shape::Turns, Shape::Limited] {
                rows.extend(self.claims(shape).await?);
            }
        }
        if wants("open") {
            self.say("a million records");
            rows.push(big::open(1_000_000 / self.part).await?);
        }
        if wants("idle") {
            self.say("100,000 waiting runs");
            rows.extend(big::idle(100_000 / self.part).await?);
        }
        if wants("read") {
            self.say("a long timeline");
            rows.extend(read::pages(20_000 / self.part).await?);
        }
        if wants("wire") {
            let in_process = rows.iter().filter(|row| row.store == "embedded" && row.what.starts_with("W1"));
            let in_process: Vec<Row> = in_process.cloned().collect();
            rows.extend(self.wire(&in_process).await?);
        }
        if wants("beats") {
            self.say("heartbeats");
            rows.push(beats::heartbeats(2_000 / self.part).await?);
            rows.push(beats::session(5_000 / self.part).await?);
        }
        let on_postgres: Vec<&str> =
            postgres::NAMES.into_iter().filter(|name| wants("postgres") || wants(name)).collect();
        if !on_postgres.is_empty() {
            match postgres::Measuring::start(self.part).await? {
                Some(measuring) => {
                    self.say(&format!("PostgreSQL, {}", postgres::SETTINGS));
                    for name in on_postgres {
                        self.say(name);
                        rows.extend(measuring.measure(name).await?);
                    }
                }
                None => self.say("PostgreSQL is not installed"),
            }
        }
        Ok(rows)
    }

    /// Claims with more and more keys, in turns, since the speed of the disk changes: the cost should stay the same.
    async fn claims(&self, shape: Shape) -> Result<Vec<Row>, Failed> {
        self.say("claims");
        let mut turns = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            for (keys, rows) in [10, 1_000, 10_000].into_iter().zip(&mut turns) {
                rows.push(claims::claims(&Opened::embedded()?, shape, keys, 20_000, 250 / self.part).await?);
            }
        }
        let mut rows: Vec<Row> = turns.into_iter().filter_map(measure::merge).collect();
        let base = rows[0].per_second;
        for row in &mut rows[1..] {
            row.note = format!("{:.2}× the time at 10 keys", base / row.per_second);
        }
        Ok(rows)
    }

    /// The hot transition, in turns with raw SQLite: in full groups, and for as many callers.
    async fn hot(&self) -> Result<Vec<Row>, Failed> {
        self.say("the hot transition");
        let (ceiling, opened) = (Ceiling::open().await?, Opened::embedded()?);
        let (count, steps) = (8_000 / self.part.min(4), 80 / self.part.min(4));
        let memory = hot::transitions(&Opened::memory(), 0, 5 * steps).await;
        let (mut grouped, mut called, mut hot) = (Vec::new(), Vec::new(), Vec::new());
        hot::transitions(&opened, TURNS, 10).await;
        for turn in 0..TURNS {
            grouped.push(ceiling.grouped(count, hot::CALLERS)?);
            called.push(ceiling.called(count, hot::CALLERS).await?);
            hot.push(hot::transitions(&opened, turn, steps).await);
        }
        let mut rows: Vec<Row> = [grouped, called, vec![memory], hot].into_iter().filter_map(measure::merge).collect();
        rows[0].note = format!("{} bytes of JSON per transition", ceiling.bytes());
        rows[3].ratio = Some(rows[3].per_second / rows[1].per_second);
        Ok(rows)
    }

    /// W1, in turns with raw SQLite for as many callers.
    async fn chain(&self, in_flight: usize) -> Result<Vec<Row>, Failed> {
        self.say("W1");
        let (ceiling, opened) = (Ceiling::open().await?, Opened::embedded()?);
        let runs = 6_000 / self.part;
        let memory = workloads::chain(&Opened::memory(), in_flight, runs).await;
        workloads::chain(&opened, in_flight, in_flight).await;
        let (mut raw, mut chains) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            raw.push(ceiling.called(8_000 / self.part, hot::CALLERS).await?);
            chains.push(workloads::chain(&opened, in_flight, runs / TURNS).await);
        }
        let mut rows: Vec<Row> = [raw, vec![memory], chains].into_iter().filter_map(measure::merge).collect();
        rows[2].ratio = Some(rows[2].per_second / rows[0].per_second);
        Ok(rows)
    }

    /// W1 with one run in flight, in turns with single commits: back to back, and spaced.
    async fn single(&self) -> Result<Vec<Row>, Failed> {
        self.say("W1");
        let opened = Opened::embedded()?;
        let runs = 1_000 / self.part;
        let memory = workloads::chain(&Opened::memory(), 1, runs).await;
        workloads::chain(&opened, 1, wire::WARM).await;
        let mut rows = self.compare_with_commits(async || Ok(workloads::chain(&opened, 1, runs / TURNS).await)).await?;
        rows.insert(2, memory);
        Ok(rows)
    }

    /// A workload with one step in flight, in turns with single commits.
    async fn compare_with_commits(&self, what: impl AsyncFn() -> Result<Row, Failed>) -> Result<Vec<Row>, Failed> {
        let ceiling = Ceiling::open().await?;
        let (mut raw, mut apart, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..TURNS {
            raw.push(ceiling.grouped(1_000 / self.part, 1)?);
            apart.push(ceiling.apart(500 / self.part)?);
            steps.push(what().await?);
        }
        let mut rows: Vec<Row> = [raw, apart, steps].into_iter().filter_map(measure::merge).collect();
        let commits = rows[2].commits as f64 / rows[2].steps as f64;
        let [in_a_row, apart] = [0, 1].map(|at: usize| rows[at].per_second / rows[2].per_second);
        // A server counts batches that its engine submits to the store, including the claim at the end of a run, which
        // writes nothing.
        let counted = if rows[2].store == "embedded" { "commits" } else { "batches" };
        let alone = rows[2].step_ms / 1e3 * rows[0].per_second;
        rows[2].note = format!(
            "{commits:.2} {counted} per step; takes as long as {in_a_row:.2} bare commits, {apart:.2} spaced ones; \
             without the start of the run {alone:.2}"
        );
        Ok(rows)
    }

    /// W1 over the wire, compared with the same in process if that was measured, or with raw SQLite.
    async fn wire(&self, in_process: &[Row]) -> Result<Vec<Row>, Failed> {
        self.say("message round trip");
        let mut rows = vec![wire::there_and_back(10_000 / self.part).await?];
        for transport in [Transport::Socket, Transport::Http] {
            self.say("W1 over the wire");
            let runs = 100 / self.part;
            rows.extend(self.compare_with_commits(async || wire::chain(transport, 1, runs).await).await?);
            for in_flight in [50, 200] {
                let mut row = wire::chain(transport, in_flight, 3_000 / self.part).await?;
                let same = in_process.iter().find(|other| other.what == row.what);
                row.ratio = same.map(|same| row.per_second / same.per_second);
                rows.push(row);
            }
        }
        self.say("a first run, and idle workers");
        rows.push(wire::first_run().await?);
        rows.push(wire::polling(2_000 / self.part).await?);
        Ok(rows)
    }

    fn say(&self, what: &str) {
        if !self.quiet {
            eprintln!("… {what}");
        }
    }
}
