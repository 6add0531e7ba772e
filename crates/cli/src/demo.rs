//! `eddy demo`: an order that survives a SIGKILL of its engine.

mod engine;
mod shop;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use eddyline_protocol::{FlowRegistered, RunStarted, StartRun};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Context;
use super::connect::{Remote, Where};
use super::moment;
use super::processes::asked_to_end;
use super::run::timeline::Timeline;
use super::run::watch::watch_with;
use super::screen::{Ink, Line};
use super::trouble::Trouble;
use engine::Engine;
use shop::{Bank, expected, input};

/// The demo fails after this long. It normally takes a quarter of it.
const LONGEST: Duration = Duration::from_secs(60);
/// How long the engine stays dead, so that the user can see it.
const DEAD: Duration = Duration::from_millis(1_500);
/// The engine is killed while this step runs.
const KILLED_DURING: &str = "price[2]";

pub async fn run(ctx: &Context) -> Result<(), Trouble> {
    let place = tempfile::Builder::new().prefix("eddy-demo-").tempdir();
    let place = place.map_err(|error| Trouble::failed(format!("cannot create a temporary directory: {error}")))?;
    // Dropping `play` kills the engine if it is still running. The directory is deleted after that.
    let ended = tokio::select! {
        played = tokio::time::timeout(LONGEST, play(ctx, place.path())) => {
            played.unwrap_or_else(|_| Err(Trouble::failed(format!("the demo did not end within {LONGEST:?}"))))
        }
        asked = asked_to_end() => asked.and(Err(Trouble::interrupted())),
    };
    let _ = place.close();
    ended
}

async fn play(ctx: &Context, place: &Path) -> Result<(), Trouble> {
    let store = place.join("store");
    let engine = Engine::start(&store, "127.0.0.1:0").await?;
    let at = Where::at(engine.url.clone());
    let remote = Remote::new(&at)?;
    let _: FlowRegistered = remote.put_text("/v1/flows/order", "application/yaml", shop::FLOW).await?;
    let began = Instant::now();
    let started: RunStarted =
        remote.post("/v1/flows/order/runs", &StartRun { input: input(), ..StartRun::default() }).await?;
    let first =
        format!("engine: process {}, at {}, its store on disk; workers: in this process", engine.id(), engine.url);
    let (notes, seen) = watch::channel(vec![Line::default().with(Ink::Faint, first)]);
    let bank = Arc::new(Bank::default());
    let work = shop::worker(remote.client().clone(), bank.clone()).run_until(std::future::pending::<()>());
    let fate = die_and_return(engine, &store, &remote, &started.run_id, notes);
    let seeing = watch_with(ctx, &remote, &started.run_id, Some(seen));
    let show = async { tokio::try_join!(fate, seeing) };
    let (engine, (moment, records)) = tokio::select! {
        shown = show => shown?,
        ended = work => {
            return Err(Trouble::failed(format!("the demo's workers stopped: {ended:?}")));
        }
    };
    engine.stop().await;
    let result = DemoOutcome { run: moment.run, records, took: began.elapsed(), charges: bank.charges() };
    result.print(ctx)
}

/// Kills the engine half way, and starts a new one on the same store and port.
async fn die_and_return(
    engine: Engine,
    store: &Path,
    remote: &Remote,
    run: &str,
    notes: watch::Sender<Vec<Line>>,
) -> Result<Engine, Trouble> {
    let mut timeline = Timeline::new(remote.clone(), run, 0);
    'half: loop {
        for record in timeline.next().await? {
            if record["kind"] == "step.attempt.started" && record["meta"]["stepKey"] == KILLED_DURING {
                break 'half;
            }
        }
        if timeline.ended {
            return Err(Trouble::failed("the run ended before its engine could be killed"));
        }
    }
    let (dead, url) = (engine.id(), engine.url.clone());
    engine.kill().await;
    notes.send_modify(|notes| {
        notes.push(
            Line::default()
                .with(Ink::Bad, format!("✗ the engine, process {dead}, was killed (SIGKILL) during {KILLED_DURING}")),
        );
    });
    tokio::time::sleep(DEAD).await;
    let listen = url.rsplit('/').next().unwrap_or_default().to_owned();
    let engine = Engine::start(store, &listen).await?;
    notes.send_modify(|notes| {
        let text = format!("✓ a new engine, process {}, opened the same store: the run continues", engine.id());
        notes.push(Line::default().with(Ink::Good, text));
    });
    Ok(engine)
}

struct DemoOutcome {
    run: eddyline_protocol::RunInfo,
    records: u64,
    took: Duration,
    charges: usize,
}

impl DemoOutcome {
    fn print(&self, ctx: &Context) -> Result<(), Trouble> {
        let good = self.run.status == "completed" && self.run.output == expected() && self.charges == 1;
        let took = moment::span(i64::try_from(self.took.as_millis()).unwrap_or(i64::MAX));
        if ctx.screen.json {
            ctx.screen.ndjson(&json!({"completed": good, "run": self.run, "records": self.records,
                "took_ms": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX), "charges": self.charges}))?;
        } else if good {
            ctx.screen.say(format!(
                "\nThe order completed in {took}: {} records in its timeline, the card charged {} time.\n\n{}",
                self.records,
                self.charges,
                next()
            ))?;
        }
        match good {
            true => Ok(()),
            false => Err(Trouble::failed(format!(
                "expected the output {} and 1 charge, but the run is {} with the output {} and {} charges",
                expected(),
                self.run.status,
                self.run.output,
                self.charges
            ))),
        }
    }
}

/// What to type next. Run from a clone, `eddy` may not be on the path yet.
fn next() -> String {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has_it = std::env::split_paths(&path).any(|dir| dir.join("eddy").is_file());
    let install = if has_it { String::new() } else { format!("{INSTALL}\n") };
    format!("Next steps:\n{install}{NEXT}")
}

const INSTALL: &str = "  cargo install --path crates/cli           put `eddy` on your path";
const NEXT: &str = "  eddy init my-flows                        a folder with a flow, a worker and a README
  cd my-flows && eddy dev -- ./worker.sh    run it, and pick up changes as you save
  eddy --help                               everything else";
