//! Several processes on one database, each with an engine and its share of the runs and workers. Any of them may get the
//! task of any run.

use crate::measure::{Measure, Row};
use crate::postgres::Failed;
use crate::stores::Opened;
use crate::wire::{Role, until_alone};
use crate::work;
use crate::workloads::{self, STEPS, chain_text};

/// W1 with `in_flight` runs and as many workers, spread over `count` processes.
pub async fn chain(url: &str, count: usize, in_flight: usize, runs: usize) -> Result<Row, Failed> {
    let mut instances = Vec::new();
    for at in 0..count {
        let share = |all: usize| all / count + usize::from(at < all % count);
        let mut role = Role::start(&format!("instance {url} {} {}", share(in_flight), share(runs)))?;
        if role.line()? != "ready" {
            return Err("an instance did not start".into());
        }
        instances.push(role);
    }
    let measure = Measure::start();
    for instance in &mut instances {
        instance.tell("go")?;
    }
    for instance in &mut instances {
        if instance.line()? != "done" {
            return Err("an instance did not finish".into());
        }
    }
    let what = format!("W1 chain of 10, {in_flight} in flight, {count} processes");
    let mut row = measure.row(what, "postgres", (runs * STEPS) as u64, Vec::new());
    let (mut cpu, mut reports) = (0.0, Vec::new());
    // All of them go on until every run has ended: a task may be anywhere.
    for instance in instances {
        let said = instance.stop()?;
        let numbers: Vec<f64> = said.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [own, p50, p99] = numbers[..] else { return Err(format!("an instance said {said:?}").into()) };
        cpu += own;
        reports.push((p50, p99));
    }
    row.cpu_us_per_step = cpu * 1e6 / row.steps as f64;
    row.p50_ms = reports.iter().map(|(p50, _)| p50).sum::<f64>() / count as f64;
    row.p99_ms = reports.iter().map(|(_, p99)| *p99).fold(0.0, f64::max);
    Ok(row)
}

/// One of the processes. Prints its CPU time in seconds, and the 50th and 99th percentile of its reports in milliseconds.
pub async fn play(url: &str, in_flight: usize, runs: usize) -> Result<(), Failed> {
    let opened = Opened::postgres(url).await?;
    let engine = workloads::engine(&opened, &chain_text()).await;
    let slots = work::spawn(&engine, in_flight, 1);
    println!("ready");
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
    let measure = Measure::start();
    workloads::chains(&engine, in_flight, runs).await;
    println!("done");
    until_alone().await;
    let cpu = measure.cpu();
    engine.shutdown().await;
    let reports = work::seen(slots).await.reports;
    let row = Measure::start().row("reports", opened.name, runs as u64, reports);
    println!("{} {} {}", cpu.as_secs_f64(), row.p50_ms, row.p99_ms);
    Ok(())
}
