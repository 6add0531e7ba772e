//! What Eddyline does in a second, beside what the machine could: `cargo run --release -p eddyline-bench`.
//!
//! Absolute figures mean little on a machine that does other things as well; ratios to a ceiling that was measured in the
//! same run do.

mod big;
mod ceiling;
mod hot;
mod measure;
mod stores;
mod wire;
mod work;
mod workloads;

use std::process::ExitCode;

use measure::Row;
use stores::Opened;
use wire::Transport;

const HELP: &str = "eddyline-bench [--json] [--quick] [hot] [w1] [w2] [w3] [open] [idle] [wire]

  hot    the hot transition, on memory and embedded, beside raw SQLite with the same rows
  w1     ten steps in a row, at 1, 50 and 200 runs in flight
  w2     one to n to one, for n = 100, 1,000 and 10,000
  w3     10,000 runs of one step, started in batches
  open   a store with a million records of ended runs is opened
  idle   100,000 runs wait for something; what that costs
  wire   W1 through a server and a worker, each a process of its own; what they cost when there is nothing to do

Without a name everything is measured. --quick does a tenth of the work. --json prints the rows as JSON.";

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
    let known = ["hot", "w1", "w2", "w3", "open", "idle", "wire"];
    let unknown = flags.iter().any(|flag| flag != "--json" && flag != "--quick")
        || names.iter().any(|name| !known.contains(&name.as_str()));
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
    /// So much less than all of it is done.
    part: usize,
    quiet: bool,
}

type Failed = Box<dyn std::error::Error>;

/// What the machine could do, had it nothing to decide.
#[derive(Clone, Copy)]
struct Ceiling {
    /// Transitions in a second, of callers that each wait for theirs to be durable.
    callers: f64,
    single_ms: f64,
}

impl Bench {
    async fn run(&self, wants: impl Fn(&str) -> bool) -> Result<Vec<Row>, Failed> {
        let mut rows = Vec::new();
        let mut ceiling = None;
        if wants("hot") || wants("w1") || wants("wire") {
            let (grouped, called, single) = self.ceiling().await?;
            ceiling = Some(Ceiling { callers: called.per_second, single_ms: 1e3 / single.per_second });
            rows.extend([grouped, called, single]);
        }
        if wants("hot") {
            for opened in [Opened::memory(), Opened::embedded()?] {
                self.say("the hot transition");
                let mut row = hot::transitions(&opened, 400 / self.part.min(4)).await;
                row.ratio = ceiling.filter(|_| opened.is_durable()).map(|ceiling| row.per_second / ceiling.callers);
                rows.push(row);
            }
        }
        if wants("w1") {
            for in_flight in [1, 50, 200] {
                for opened in [Opened::memory(), Opened::embedded()?] {
                    self.say("W1");
                    let runs = if in_flight == 1 { 1_000 } else { 6_000 } / self.part;
                    let mut row = workloads::chain(&opened, in_flight, runs).await;
                    if let Some(ceiling) = ceiling.filter(|_| opened.is_durable()) {
                        if in_flight == 1 {
                            let step_ms = 1e3 / row.per_second;
                            row.note = format!(
                                "{:.2} commits a step, {:.2} bare commits of time",
                                row.commits as f64 / row.steps as f64,
                                step_ms / ceiling.single_ms
                            );
                        } else {
                            row.ratio = Some(row.per_second / ceiling.callers);
                        }
                    }
                    rows.push(row);
                }
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
        if wants("open") {
            self.say("a million records");
            rows.push(big::open(1_000_000 / self.part).await?);
        }
        if wants("idle") {
            self.say("100,000 waiting runs");
            rows.extend(big::idle(100_000 / self.part).await?);
        }
        if wants("wire") {
            let in_process = rows.iter().filter(|row| row.store == "embedded" && row.what.starts_with("W1"));
            let in_process: Vec<Row> = in_process.cloned().collect();
            rows.extend(self.wire(ceiling, &in_process).await?);
        }
        Ok(rows)
    }

    /// W1 over the wire, beside the same in process where that was measured.
    async fn wire(&self, ceiling: Option<Ceiling>, in_process: &[Row]) -> Result<Vec<Row>, Failed> {
        let mut rows = Vec::new();
        for transport in [Transport::Socket, Transport::Http] {
            for in_flight in [1, 50, 200] {
                self.say("W1 over the wire");
                let runs = if in_flight == 1 { 300 } else { 3_000 } / self.part;
                let mut row = wire::chain(transport, in_flight, runs).await?;
                let same = in_process.iter().find(|other| other.what == row.what);
                match ceiling {
                    Some(ceiling) if in_flight == 1 => {
                        row.note = format!("{:.2} bare commits of time", 1e3 / row.per_second / ceiling.single_ms);
                    }
                    _ => row.ratio = same.map(|same| row.per_second / same.per_second),
                }
                rows.push(row);
            }
        }
        self.say("a first run, and idle workers");
        rows.push(wire::first_run().await?);
        rows.push(wire::polling(2_000 / self.part).await?);
        Ok(rows)
    }

    /// Raw SQLite with the rows of the store: in full groups, for as many callers as the store has, and one transition at
    /// a time.
    async fn ceiling(&self) -> Result<(Row, Row, Row), Failed> {
        self.say("the ceiling");
        let dir = tempfile::tempdir()?;
        stores::half_way(dir.path()).await?;
        let sample = ceiling::Sample::read(dir.path())?;
        let mut grouped = ceiling::grouped(dir.path(), &sample, 40_000 / self.part, hot::CALLERS)?;
        grouped.note = format!("{} bytes of JSON a transition", sample.bytes());
        let called = ceiling::called(dir.path(), &sample, 40_000 / self.part, hot::CALLERS).await?;
        let single = ceiling::grouped(dir.path(), &sample, 3_000 / self.part, 1)?;
        Ok((grouped, called, single))
    }

    fn say(&self, what: &str) {
        if !self.quiet {
            eprintln!("… {what}");
        }
    }
}
