//! `eddy store`: commands for stores that no server has open.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use eddyline_server::StoreUrl;
use eddyline_store::copy::{CopyReport, CopySource, CopyTarget, Phase, Progress, Sum, Table, copy};
use eddyline_store::{EmbeddedSource, EmbeddedTarget, PostgresOptions, PostgresSource, PostgresTarget, StoreError};
use serde_json::{Value, json};

use super::Context;
use super::moment;
use super::screen::{Ink, Line, counted, table};
use super::trouble::Trouble;

/// How often progress is redrawn on a terminal.
const SHOWN_EVERY: Duration = Duration::from_millis(500);
/// How often progress is printed elsewhere.
const WRITTEN_EVERY: Duration = Duration::from_secs(10);
/// Clocks that differ by more than this are reported.
const SKEW_MS: i64 = 2_000;

#[derive(Debug, clap::Subcommand)]
pub enum StoreCommand {
    /// Copy everything to another, empty store, while no server uses either of them
    Copy(CopyArgs),
}

#[derive(Debug, clap::Args)]
pub struct CopyArgs {
    /// The store to copy: a directory, `sqlite:DIR` or `postgres://…`
    #[arg(long, value_name = "URL")]
    from: String,
    /// An empty store: a new directory, or a schema without runs (`postgres://…?schema=NAME`)
    #[arg(long, value_name = "URL")]
    to: String,
    /// Delete what an interrupted copy wrote to the target, and start over
    #[arg(long)]
    restart: bool,
}

pub async fn run(ctx: &Context, command: StoreCommand) -> Result<(), Trouble> {
    match command {
        StoreCommand::Copy(args) => run_copy(ctx, args).await,
    }
}

async fn run_copy(ctx: &Context, args: CopyArgs) -> Result<(), Trouble> {
    let (from, to) = (parsed("--from", &args.from)?, parsed("--to", &args.to)?);
    if from == to {
        return Err(Trouble::usage(format!("--from and --to are both {from}")));
    }
    let source = open_source(&from).await.map_err(|error| trouble(&format!("cannot copy {from}"), error))?;
    let failed = |error| trouble(&format!("cannot copy to {to}"), error);
    let mut target = open_target(&to).await.map_err(failed)?;
    if let (StoreUrl::Directory(_), Some(time)) = (&from, target.time().await.map_err(failed)?) {
        report_skew(ctx, time);
    }
    let began = Instant::now();
    let mut shown = Shown::new(ctx);
    let copied = copy(&*source, &mut *target, args.restart, &mut |progress| shown.show(progress)).await;
    shown.clear();
    let report = copied.map_err(|error| trouble(&format!("cannot copy {from} to {to}"), error))?;
    say(ctx, &from, &to, &report, began.elapsed())?;
    match report.is_equal() {
        true => Ok(()),
        false => {
            Err(Trouble::failed("the copy differs from the source and can't be used").help("copy again with --restart"))
        }
    }
}

fn parsed(flag: &str, url: &str) -> Result<StoreUrl, Trouble> {
    match StoreUrl::parse(url)? {
        StoreUrl::Memory => {
            Err(Trouble::usage(format!("{flag} cannot be a memory store: its data is lost when its process ends")))
        }
        place => Ok(place),
    }
}

async fn open_source(from: &StoreUrl) -> Result<Box<dyn CopySource>, StoreError> {
    Ok(match from {
        StoreUrl::Postgres(url) => Box::new(PostgresSource::open(url, PostgresOptions::default()).await?),
        StoreUrl::Directory(dir) => Box::new(tokio::task::block_in_place(|| EmbeddedSource::open(dir))?),
        StoreUrl::Memory => return Err(StoreError::Unavailable("it is in memory".to_owned())),
    })
}

async fn open_target(to: &StoreUrl) -> Result<Box<dyn CopyTarget>, StoreError> {
    Ok(match to {
        StoreUrl::Postgres(url) => Box::new(PostgresTarget::open(url, PostgresOptions::default()).await?),
        StoreUrl::Directory(dir) => Box::new(tokio::task::block_in_place(|| EmbeddedTarget::open(dir))?),
        StoreUrl::Memory => return Err(StoreError::Unavailable("it is in memory".to_owned())),
    })
}

fn trouble(what: &str, error: StoreError) -> Trouble {
    let message = format!("{what}: {}", error.reason());
    match error {
        StoreError::Corrupt(_) => Trouble::failed(message),
        _ => Trouble::refused(message),
    }
}

/// An embedded store uses this machine's clock, and waits continue by the target's.
fn report_skew(ctx: &Context, target_time: i64) {
    let ahead = target_time - moment::now_ms();
    if ahead.abs() > SKEW_MS && !ctx.screen.json {
        let (side, when) = if ahead > 0 { ("ahead of", "earlier") } else { ("behind", "later") };
        let by = moment::span(ahead.abs());
        ctx.screen.aside(format!(
            "warning: the database's clock is {by} {side} this machine's: waits of copied runs end that much {when}"
        ));
    }
}

/// Shows progress on standard error.
struct Shown {
    quiet: bool,
    redrawn: bool,
    began: Instant,
    last: Instant,
    /// The current phase, and when it began.
    phase: (Phase, Instant),
}

impl Shown {
    fn new(ctx: &Context) -> Shown {
        let now = Instant::now();
        let redrawn = std::io::stderr().is_terminal();
        Shown { quiet: ctx.screen.json, redrawn, began: now, last: now, phase: (Phase::Copying, now) }
    }

    fn show(&mut self, progress: Progress) {
        if progress.phase != self.phase.0 {
            self.phase = (progress.phase, Instant::now());
        }
        let every = if self.redrawn { SHOWN_EVERY } else { WRITTEN_EVERY };
        if self.quiet || self.last.elapsed() < every {
            return;
        }
        self.last = Instant::now();
        let verb = match progress.phase {
            Phase::Copying => "copied",
            Phase::Checking => "checked",
        };
        let rate = progress.rows as f64 / self.phase.1.elapsed().as_secs_f64().max(0.001);
        let line = format!(
            "{verb} {} rows, {} of {} runs, {rate:.0} rows/s, {}",
            progress.rows,
            progress.runs,
            progress.run_count,
            moment::span(self.began.elapsed().as_millis() as i64)
        );
        let mut err = std::io::stderr().lock();
        let _ = if self.redrawn { write!(err, "\r\x1b[K{line}") } else { writeln!(err, "{line}") };
        let _ = err.flush();
    }

    fn clear(&self) {
        if self.redrawn && !self.quiet {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
        }
    }
}

fn say(ctx: &Context, from: &StoreUrl, to: &StoreUrl, report: &CopyReport, took: Duration) -> Result<(), Trouble> {
    if ctx.screen.json {
        let side = |sum: Sum| json!({"rows": sum.rows, "checksum": format!("{:032x}", sum.checksum)});
        let row = |table: &Table| -> Value {
            let (source, target) = (report.source.of(*table), report.target.of(*table));
            json!({
                "table": table.name(), "source": side(source), "target": side(target), "equal": source == target,
            })
        };
        return ctx.screen.document(&json!({
            "from": from.to_string(),
            "to": to.to_string(),
            "rows": report.source.rows(),
            "seconds": took.as_secs_f64(),
            "equal": report.is_equal(),
            "tables": Table::ALL.iter().map(row).collect::<Vec<_>>(),
        }));
    }
    let row = |table: &Table| {
        let (source, target) = (report.source.of(*table), report.target.of(*table));
        let verdict = match source == target {
            true => Line::default().with(Ink::Good, format!("{:016x}", (source.checksum >> 64) as u64)),
            false => Line::default().with(Ink::Bad, "differs"),
        };
        vec![
            Line::plain(table.name()),
            Line::plain(source.rows.to_string()),
            Line::plain(target.rows.to_string()),
            verdict,
        ]
    };
    let rows: Vec<_> = Table::ALL.iter().map(row).collect();
    ctx.screen.lines(&table(&["TABLE", "SOURCE", "COPY", "CHECKSUM OF BOTH"], &rows))?;
    if report.is_equal() {
        let span = moment::span(took.as_millis() as i64);
        let runs = counted(report.source.of(Table::Runs).rows, "run");
        let rows = counted(report.source.rows(), "row");
        ctx.screen.say(format!("{from} copied to {to}: {runs}, {rows}, in {span}"))?;
    }
    Ok(())
}
