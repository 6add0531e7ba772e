//! The store on PostgreSQL, compared with its own commit function called directly.

mod dbos;
mod idle;
mod instances;
mod raw;
mod server;
mod tables;
mod waiting;

use std::time::Duration;

use crate::TURNS;
use crate::measure::{self, Row};
use crate::stores::Opened;
use crate::wire::{self, Transport};
use crate::workloads;
use dbos::Dbos;
pub use instances::play as instance;
use raw::{Claims, Raw};
pub use server::SETTINGS;
use server::{Server, Watch};

pub type Failed = Box<dyn std::error::Error>;

pub const NAMES: [&str; 8] =
    ["pg-w1", "pg-w2", "pg-instances", "pg-socket", "pg-idle", "pg-claims", "pg-snapshot", "pg-tables"];

/// A private server and what is measured on it.
pub struct Measuring {
    server: Server,
    watch: Watch,
    /// Only one part in `part` of the work is done.
    part: usize,
}

impl Measuring {
    /// None if PostgreSQL is not installed.
    pub async fn start(part: usize) -> Result<Option<Measuring>, Failed> {
        let Some(server) = Server::start()? else { return Ok(None) };
        let watch = server.watch().await?;
        Ok(Some(Measuring { server, watch, part }))
    }

    pub async fn measure(&self, name: &str) -> Result<Vec<Row>, Failed> {
        let many = if self.part > 1 { 10_000 } else { 100_000 };
        match name {
            "pg-w1" => self.chains().await,
            "pg-w2" => self.wide().await,
            "pg-instances" => self.instances().await,
            "pg-socket" => self.socket().await,
            "pg-idle" => {
                let time = Duration::from_secs(if self.part > 1 { 20 } else { 60 });
                Ok(vec![idle::queries(&self.server, &self.watch, time).await?])
            }
            "pg-claims" => {
                let mut rows = waiting::depths(&self.server, &self.watch, &[100, many, 10 * many], 40).await?;
                rows.extend(waiting::beside(&self.server, &self.watch, many, 40).await?);
                Ok(rows)
            }
            "pg-snapshot" => {
                let time = Duration::from_secs(if self.part > 1 { 20 } else { 90 });
                waiting::snapshot(&self.server, &self.watch, time).await
            }
            _ => tables::sizes(&self.server, if self.part > 1 { 20_000 } else { 1_000_000 }).await,
        }
    }

    /// W1 in one process, in turns with the commit function.
    async fn chains(&self) -> Result<Vec<Row>, Failed> {
        let raw = Raw::open(&self.server, 2).await?;
        let opened = Opened::postgres(&self.server.url("chains")).await?;
        let mut dbos = Dbos::start(&self.server).await?;
        let mut turns: [Vec<Row>; 10] = Default::default();
        for turn in 0..=TURNS {
            let mut rows = vec![
                self.counted(raw.calls(1, 1, 400 / self.part, Claims::No)).await?,
                self.counted(raw.calls(1, 100, 40 / self.part, Claims::No)).await?,
                self.counted(raw.calls(2, 100, 40 / self.part, Claims::No)).await?,
                self.counted(raw.calls(2, 100, 40 / self.part, Claims::Together)).await?,
                self.counted(raw.calls(2, 100, 40 / self.part, Claims::Apart)).await?,
                self.counted(self.chain(&opened, 1, 40 / self.part)).await?,
                self.counted(self.chain(&opened, 50, 300 / self.part)).await?,
                self.counted(self.chain(&opened, 200, 600 / self.part.min(3))).await?,
            ];
            if let Some(dbos) = &mut dbos {
                rows.push(self.counted(async { dbos.chain(1, 40 / self.part) }).await?);
                rows.push(self.counted(async { dbos.chain(200, 600 / self.part.min(3)) }).await?);
            }
            // The first turn only fills caches and lets the log grow.
            if turn > 0 {
                turns.iter_mut().zip(rows).for_each(|(turns, row)| turns.push(row));
            } else {
                self.watch.client.batch_execute("CHECKPOINT").await?;
            }
        }
        let mut rows: Vec<Row> = turns.into_iter().filter_map(measure::merge).collect();
        let (single, two) = (1e3 / rows[0].per_second, rows[2].per_second);
        for row in &mut rows {
            row.ratio = Some(row.per_second / two);
            row.note = database(row);
        }
        let (with_start, step) = (1e3 / rows[5].per_second, rows[5].step_ms);
        rows[5].ratio = None;
        rows[5].note = format!(
            "takes as long as {:.2} single commits, {:.2} with the start of the run; {}",
            step / single,
            with_start / single,
            database(&rows[5])
        );
        Ok(rows)
    }

    async fn chain(&self, opened: &Opened, in_flight: usize, runs: usize) -> Result<Row, Failed> {
        Ok(workloads::chain(opened, in_flight, runs.max(in_flight)).await)
    }

    /// W2 and W3 in one process.
    async fn wide(&self) -> Result<Vec<Row>, Failed> {
        let opened = Opened::postgres(&self.server.url("wide")).await?;
        let mut rows = Vec::new();
        for n in [100, 1_000] {
            let runs = (20_000 / self.part / n).max(1);
            rows.push(self.counted(async { Ok(workloads::spread(&opened, n, runs).await) }).await?);
        }
        rows.push(self.counted(async { Ok(workloads::many(&opened, 10_000 / self.part).await) }).await?);
        rows.iter_mut().for_each(|row| row.note = database(row));
        Ok(rows)
    }

    /// W1 at 200 in one process and in three, in turns with the commit function.
    async fn instances(&self) -> Result<Vec<Row>, Failed> {
        let raw = Raw::open(&self.server, 2).await?;
        let url = self.server.url("instances");
        Opened::postgres(&url).await?;
        let runs = 600 / self.part.min(3);
        let mut turns: [Vec<Row>; 3] = Default::default();
        for turn in 0..=TURNS {
            let rows = [
                self.counted(raw.calls(2, 100, 40 / self.part, Claims::No)).await?,
                self.counted(instances::chain(&url, 1, 200, runs)).await?,
                self.counted(instances::chain(&url, 3, 200, runs)).await?,
            ];
            if turn > 0 {
                turns.iter_mut().zip(rows).for_each(|(turns, row)| turns.push(row));
            }
        }
        let mut rows: Vec<Row> = turns.into_iter().filter_map(measure::merge).collect();
        let (raw, one) = (rows[0].per_second, rows[1].per_second);
        for row in &mut rows {
            row.ratio = Some(row.per_second / raw);
            row.note = database(row);
        }
        rows[2].note = format!("{:.2} of one process; {}", rows[2].per_second / one, rows[2].note);
        Ok(rows)
    }

    /// W1 through one server, with a worker in another process.
    async fn socket(&self) -> Result<Vec<Row>, Failed> {
        let url = self.server.url("socket");
        let mut turns: [Vec<Row>; 2] = Default::default();
        for _ in 0..3 {
            turns[0].push(self.counted(wire::chain_on(&url, Transport::Socket, 1, 100 / self.part)).await?);
            turns[1].push(self.counted(wire::chain_on(&url, Transport::Socket, 200, 1_200 / self.part.min(3))).await?);
        }
        let mut rows: Vec<Row> = turns.into_iter().filter_map(measure::merge).collect();
        rows.iter_mut().for_each(|row| row.note = format!("over PostgreSQL; {}", database(row)));
        Ok(rows)
    }

    /// Adds what the database did meanwhile.
    async fn counted(&self, what: impl Future<Output = Result<Row, Failed>>) -> Result<Row, Failed> {
        let before = self.watch.counts().await?;
        let mut row = what.await?;
        let (after, steps) = (self.watch.counts().await?, row.steps.max(1) as f64);
        row.commits = after.commits - before.commits;
        row.bytes_per_step = (after.wal - before.wal) as f64 / steps;
        row.database_cpu_us_per_step = (after.cpu.saturating_sub(before.cpu)).as_secs_f64() * 1e6 / steps;
        Ok(row)
    }
}

fn database(row: &Row) -> String {
    let a_commit = row.steps as f64 / row.commits.max(1) as f64;
    format!("{:.0} µs of PostgreSQL's CPU a step; {a_commit:.1} steps a commit", row.database_cpu_us_per_step)
}
