//! Measurements and their table.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// One line of the table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    pub what: String,
    pub store: String,
    /// The number of steps or transitions.
    pub steps: u64,
    pub seconds: f64,
    pub per_second: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// The mean time from one step of a run to the next, without starting and awaiting the run. Zero if not measured.
    pub step_ms: f64,
    /// Durable commits, as counted by the store.
    pub commits: u64,
    pub bytes_per_step: f64,
    pub cpu_us_per_step: f64,
    /// Of a database server beside the process that is measured.
    #[serde(default)]
    pub database_cpu_us_per_step: f64,
    pub peak_mb: f64,
    /// Relative to a ceiling measured in the same run.
    pub ratio: Option<f64>,
    pub note: String,
}

/// A measurement in progress.
#[derive(Debug)]
pub struct Measure {
    started: Instant,
    cpu: Duration,
}

impl Measure {
    pub fn start() -> Measure {
        Measure { started: Instant::now(), cpu: cpu_time() }
    }

    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    pub fn cpu(&self) -> Duration {
        cpu_time().saturating_sub(self.cpu)
    }

    pub fn row(self, what: impl Into<String>, store: &'static str, steps: u64, mut latencies: Vec<Duration>) -> Row {
        let seconds = self.seconds();
        latencies.sort_unstable();
        let at = |part: f64| {
            let place = ((latencies.len() as f64 * part) as usize).min(latencies.len().saturating_sub(1));
            latencies.get(place).map_or(0.0, |latency| latency.as_secs_f64() * 1e3)
        };
        Row {
            what: what.into(),
            store: store.to_owned(),
            steps,
            seconds,
            per_second: steps as f64 / seconds,
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            step_ms: 0.0,
            commits: 0,
            bytes_per_step: 0.0,
            cpu_us_per_step: self.cpu().as_secs_f64() * 1e6 / steps.max(1) as f64,
            database_cpu_us_per_step: 0.0,
            peak_mb: peak_mb(),
            ratio: None,
            note: String::new(),
        }
    }
}

pub fn mean_ms(latencies: &[Duration]) -> f64 {
    latencies.iter().sum::<Duration>().as_secs_f64() * 1e3 / latencies.len().max(1) as f64
}

/// Merges several turns of a workload: times and counts are summed, the rest is the median.
pub fn merge(turns: Vec<Row>) -> Option<Row> {
    let mut all = turns.first()?.clone();
    let sum = |of: fn(&Row) -> f64| turns.iter().map(of).sum::<f64>();
    let middle = |of: fn(&Row) -> f64| {
        let mut values: Vec<f64> = turns.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    all.steps = turns.iter().map(|row| row.steps).sum();
    all.commits = turns.iter().map(|row| row.commits).sum();
    let steps = all.steps.max(1) as f64;
    all.seconds = sum(|row| row.seconds);
    all.per_second = steps / all.seconds;
    (all.p50_ms, all.p99_ms) = (middle(|row| row.p50_ms), middle(|row| row.p99_ms));
    all.step_ms = sum(|row| row.step_ms * row.steps as f64) / steps;
    all.bytes_per_step = sum(|row| row.bytes_per_step * row.steps as f64) / steps;
    all.cpu_us_per_step = sum(|row| row.cpu_us_per_step * row.steps as f64) / steps;
    all.database_cpu_us_per_step = sum(|row| row.database_cpu_us_per_step * row.steps as f64) / steps;
    all.peak_mb = turns.iter().map(|row| row.peak_mb).fold(0.0, f64::max);
    Some(all)
}

/// CPU time of this process so far, all threads.
pub fn cpu_time() -> Duration {
    Process(std::process::id()).cpu()
}

/// Bytes that this process has written to disk, log and database.
pub fn written_bytes() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find(|line| line.starts_with("write_bytes:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// The peak memory of this process.
pub fn peak_mb() -> f64 {
    Process(std::process::id()).peak_mb()
}

pub fn resident_mb() -> f64 {
    Process(std::process::id()).resident_mb()
}

/// A process, by its id.
#[derive(Debug, Clone, Copy)]
pub struct Process(pub u32);

impl Process {
    /// CPU time so far, all threads.
    pub fn cpu(self) -> Duration {
        let stat = self.read("stat");
        let after_name = stat.rsplit(") ").next().unwrap_or_default();
        let ticks: u64 = after_name.split(' ').skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 10)
    }

    pub fn peak_mb(self) -> f64 {
        self.status("VmHWM:")
    }

    pub fn resident_mb(self) -> f64 {
        self.status("VmRSS:")
    }

    fn status(self, field: &str) -> f64 {
        let status = self.read("status");
        let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_default();
        line.split_whitespace().nth(1).and_then(|kb| kb.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
    }

    fn read(self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.0)).unwrap_or_default()
    }
}

/// Resets the peak memory, so that the next row has its own.
pub fn reset_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

pub fn print(rows: &[Row]) {
    println!(
        "{:<34} {:<9} {:>9} {:>10} {:>8} {:>8} {:>9} {:>8} {:>8} {:>7} {:>7}  note",
        "what", "store", "steps", "steps/s", "p50 ms", "p99 ms", "commits", "B/step", "CPU µs", "MB", "ratio"
    );
    for row in rows {
        println!(
            "{:<34} {:<9} {:>9} {:>10.0} {:>8.2} {:>8.2} {:>9} {:>8.0} {:>8.1} {:>7.0} {:>7}  {}",
            row.what,
            row.store,
            row.steps,
            row.per_second,
            row.p50_ms,
            row.p99_ms,
            row.commits,
            row.bytes_per_step,
            row.cpu_us_per_step,
            row.peak_mb,
            row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
            row.note
        );
    }
}
