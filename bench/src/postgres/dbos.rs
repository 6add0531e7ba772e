//! W1 on DBOS, by the program in `bench/dbos`, on the same PostgreSQL.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::server::Server;
use crate::measure::{Measure, Row};
use crate::postgres::Failed;
use crate::workloads::STEPS;

pub struct Dbos {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Dbos {
    /// None if `EDDYLINE_BENCH_DBOS` does not name the program.
    pub async fn start(server: &Server) -> Result<Option<Dbos>, Failed> {
        let Some(program) = std::env::var_os("EDDYLINE_BENCH_DBOS") else { return Ok(None) };
        server.connect().await?.batch_execute("CREATE DATABASE dbos TEMPLATE template0").await?;
        let mut dbos = Dbos::run(program, &server.plain_url("dbos"))?;
        if dbos.line()? != "ready" {
            return Err("DBOS did not start".into());
        }
        Ok(Some(dbos))
    }

    fn run(program: OsString, url: &str) -> Result<Dbos, Failed> {
        let mut child = Command::new(program).arg(url).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdin = child.stdin.take().ok_or("DBOS takes no input")?;
        let stdout = BufReader::new(child.stdout.take().ok_or("DBOS has no output")?);
        Ok(Dbos { child, stdin, stdout })
    }

    pub fn chain(&mut self, in_flight: usize, runs: usize) -> Result<Row, Failed> {
        let measure = Measure::start();
        writeln!(self.stdin, "{in_flight} {runs}")?;
        self.stdin.flush()?;
        let seconds: f64 = self.line()?.parse()?;
        let steps = (runs * STEPS) as u64;
        let mut row = measure.row(format!("W1 chain of 10, {in_flight} in flight"), "dbos", steps, Vec::new());
        (row.seconds, row.per_second, row.cpu_us_per_step) = (seconds, steps as f64 / seconds, 0.0);
        Ok(row)
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Dbos {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
