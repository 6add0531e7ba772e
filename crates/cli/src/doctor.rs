//! `eddy doctor`: checks a server or a store for problems.

use std::path::Path;

use eddyline_engine::quarantined_in;
use eddyline_protocol::{Flows, QueueInfo, RunSummary, ServerInfo, StepInfo, WorkerInfo};
use eddyline_server::StoreUrl;
use eddyline_store::{Embedded, Namespace, Options, Store};
use serde::Serialize;
use serde_json::{Value, json};

use super::Context;
use super::connect::{Remote, segment};
use super::moment;
use super::run::words::running;
use super::screen::{Ink, Line, counted};
use super::trouble::{Exit, Trouble};

/// Clocks that differ by more than this are reported: times from both would be misleading.
const SKEW_MS: i64 = 2_000;
/// Less free space than this is reported.
const LITTLE_SPACE: u64 = 1 << 30;
/// A store is not opened after a jump of the clock by more than this: opening it would set the store's time.
const JUMP_MS: i64 = 24 * 60 * 60 * 1_000;
const RESET: &str = "if the clock is or was wrong: stop the server, set the clock, `eddy serve --reset-clock` once";
const QUARANTINE: &str = "quarantine";
/// How many quarantined runs are listed one by one.
const NAMED_RUNS: usize = 10;
/// How many running runs are searched for tasks whose handler no worker has.
const ASKED_RUNS: usize = 50;

#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// Check a store's directory instead of a server
    #[arg(long, value_name = "DIR")]
    store: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckResult {
    Good,
    Worth,
    Bad,
}

#[derive(Debug, Serialize)]
struct Finding {
    verdict: CheckResult,
    what: &'static str,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    help: Option<String>,
}

impl Finding {
    fn new(verdict: CheckResult, what: &'static str, found: impl Into<String>) -> Finding {
        Finding { verdict, what, found: found.into(), help: None }
    }

    fn help(self, help: impl Into<String>) -> Finding {
        Finding { help: Some(help.into()), ..self }
    }
}

pub async fn run(ctx: &Context, doctor: Doctor) -> Result<(), Trouble> {
    let findings = match &doctor.store {
        Some(store) => {
            let StoreUrl::Directory(dir) = StoreUrl::parse(store)? else {
                return Err(Trouble::usage("--store checks the directory of an embedded store")
                    .help("for a PostgreSQL store, check a server that uses it: `eddy doctor --url URL`"));
            };
            directory(&dir).await
        }
        None => server(&ctx.remote()?).await?,
    };
    if ctx.screen.json {
        ctx.screen.document(&json!({ "findings": findings }))?;
    } else {
        for finding in &findings {
            let (ink, mark) = match finding.verdict {
                CheckResult::Good => (Ink::Good, "✓"),
                CheckResult::Worth => (Ink::Note, "!"),
                CheckResult::Bad => (Ink::Bad, "✗"),
            };
            let line = Line::default().with(ink, mark).with(Ink::Strong, format!(" {:<10}", finding.what));
            ctx.screen.line(&line.with(Ink::Plain, format!("  {}", finding.found)))?;
            if let Some(help) = &finding.help {
                ctx.screen.line(&Line::default().with(Ink::Faint, format!("              {help}")))?;
            }
        }
    }
    match findings.iter().filter(|finding| finding.verdict == CheckResult::Bad).count() {
        0 => Ok(()),
        1 => Err(Trouble::failed("1 check failed")),
        n => Err(Trouble::failed(format!("{n} checks failed"))),
    }
}

async fn server(remote: &Remote) -> Result<Vec<Finding>, Trouble> {
    let asked = moment::now_ms();
    let info: ServerInfo = remote.get("/v1/info", &[]).await?;
    let answered = moment::now_ms();
    let mut findings =
        vec![reached(remote, &info, answered - asked), version(&info), skew(&info, (asked + answered) / 2)];
    findings.insert(2, ready(remote).await);
    findings.extend(store_ahead(info.clock_ahead_ms));
    findings.extend(info.deletion_waits_until.as_ref().map(|until| {
        let found = format!("nothing is deleted by age before {until}: the clock jumped by more than a day");
        Finding::new(CheckResult::Worth, "deletion", found).help(RESET)
    }));
    findings.extend(quarantined(remote).await?);
    let workers: Vec<WorkerInfo> = remote.list_of("/v1/workers", &[]).await?;
    let online: Vec<&WorkerInfo> = workers.iter().filter(|worker| worker.status == "online").collect();
    let queues: Vec<QueueInfo> = remote.list_of("/v1/queues", &[]).await?;
    let waiting: u64 = queues.iter().map(|queue| queue.ready).sum();
    findings.push(match (online.len(), waiting) {
        (0, 0) => Finding::new(CheckResult::Good, "workers", "none online, and no tasks waiting"),
        (0, n) => Finding::new(CheckResult::Bad, "workers", format!("none online, and {} waiting", counted(n, "task")))
            .help("start one: `eddy worker exec HANDLER=COMMAND`, or a worker of your own"),
        (n, _) => Finding::new(CheckResult::Good, "workers", format!("{n} online")),
    });
    for queue in queues.iter().filter(|queue| queue.ready > 0) {
        findings.extend(stuck(queue, &online));
    }
    if !online.is_empty() {
        findings.extend(missing_handlers(remote, &online).await?);
    }
    Ok(findings)
}

fn reached(remote: &Remote, info: &ServerInfo, took_ms: i64) -> Finding {
    let keys = if info.keys { "keys are on" } else { "keys are off" };
    let up = moment::ms(&info.started_at).map(|at| moment::span(moment::now_ms() - at)).unwrap_or_default();
    let found = format!(
        "{} answers in {took_ms} ms: {} store, namespace {}, {keys}, up {up}",
        remote.at.url, info.store, info.namespace
    );
    Finding::new(CheckResult::Good, "server", found)
}

fn version(info: &ServerInfo) -> Finding {
    let (own, theirs) = (env!("CARGO_PKG_VERSION"), &info.version);
    match (info.protocol == eddyline_protocol::VERSION, own == theirs) {
        (false, _) => {
            Finding::new(CheckResult::Bad, "version", format!("the server speaks protocol {}", info.protocol))
                .help(format!("this eddy speaks {}: use the same version on both sides", eddyline_protocol::VERSION))
        }
        (true, true) => Finding::new(CheckResult::Good, "version", format!("{theirs}, on both sides")),
        (true, false) => {
            Finding::new(CheckResult::Worth, "version", format!("the server is {theirs}, this eddy is {own}"))
        }
    }
}

/// The server's clock against the middle of the request.
fn skew(info: &ServerInfo, middle: i64) -> Finding {
    match moment::ms(&info.now) {
        None => Finding::new(CheckResult::Worth, "clock", format!("cannot parse the server's time: {}", info.now)),
        Some(at) if (at - middle).abs() > SKEW_MS => {
            let side = if at > middle { "ahead of" } else { "behind" };
            let by = moment::span((at - middle).abs());
            Finding::new(CheckResult::Worth, "clock", format!("the server's clock is {by} {side} this machine's"))
                .help("runs use the server's clock: delays are correct, but times in lists look wrong")
        }
        Some(_) => Finding::new(CheckResult::Good, "clock", "in sync with the server"),
    }
}

/// Reports a store whose time is ahead, because it was once opened with a wrong clock.
fn store_ahead(ahead_ms: i64) -> Option<Finding> {
    (ahead_ms > SKEW_MS).then(|| {
        let found = format!("the store's time is {} ahead of the machine's clock", moment::span(ahead_ms));
        Finding::new(CheckResult::Worth, "store time", found).help(RESET)
    })
}

async fn ready(remote: &Remote) -> Finding {
    match remote.get::<Value>("/readyz", &[]).await {
        Ok(_) => Finding::new(CheckResult::Good, "ready", "it accepts requests, and its store is available"),
        Err(trouble) => Finding::new(CheckResult::Bad, "ready", trouble.message().to_owned())
            .help("the server is starting or stopping, or its store is unavailable: check its log"),
    }
}

/// Quarantined runs: processes crashed while they handled them, so nothing is decided on them.
async fn quarantined(remote: &Remote) -> Result<Vec<Finding>, Trouble> {
    let runs: Vec<RunSummary> = match remote.list_of("/v1/quarantine", &[]).await {
        Ok(runs) => runs,
        // An older server without this route.
        Err(trouble) if trouble.exit() == Exit::NotFound => return Ok(Vec::new()),
        Err(trouble) => return Err(trouble),
    };
    let named = runs.iter().take(NAMED_RUNS).map(|run| {
        let (id, flow) = (&run.run_id, &run.flow);
        let why = run.error.as_ref().map(|error| error.message.as_str()).unwrap_or_default();
        let why = why.split_once("; ").map_or(why, |(why, _)| why);
        quarantine(id, flow, why).help(format!("`eddy run resume {id}` resumes it, `eddy run cancel {id}` ends it"))
    });
    let mut findings: Vec<Finding> = named.collect();
    if let Some(more) = runs.len().checked_sub(NAMED_RUNS).filter(|more| *more > 0) {
        let found = format!("{more} more runs: `GET /v1/quarantine` lists them all");
        findings.push(Finding::new(CheckResult::Bad, QUARANTINE, found));
    }
    Ok(findings)
}

fn quarantine(run: &str, flow: &str, why: &str) -> Finding {
    Finding::new(CheckResult::Bad, QUARANTINE, format!("run {run} of {flow} is quarantined: {why}"))
}

fn stuck(queue: &QueueInfo, online: &[&WorkerInfo]) -> Option<Finding> {
    let (name, ready) = (&queue.name, queue.ready);
    if queue.paused {
        let found = format!("{name} is paused, with {} waiting", counted(ready, "task"));
        return Some(Finding::new(CheckResult::Bad, "queue", found).help(format!("`eddy queue resume {name}`")));
    }
    let served = online.iter().any(|worker| worker.queues.contains(name));
    (!served && !online.is_empty()).then(|| {
        Finding::new(
            CheckResult::Bad,
            "queue",
            format!("{name} has {} waiting, and no online worker serves it", counted(ready, "task")),
        )
        .help(format!("start a worker for the queue {name}"))
    })
}

/// Tasks whose handler no worker of their queue has.
async fn missing_handlers(remote: &Remote, online: &[&WorkerInfo]) -> Result<Vec<Finding>, Trouble> {
    let runs = remote.list("/v1/runs", &[("status", "running".into())], Some(ASKED_RUNS)).await?;
    let mut missing: Vec<(String, String)> = Vec::new();
    for run in runs.iter().filter_map(|run| run["run_id"].as_str()) {
        // The run may have been deleted meanwhile.
        let Ok(steps) = remote.list_of::<StepInfo>(&format!("/v1/runs/{}/steps", segment(run)), &[]).await else {
            continue;
        };
        for waits in steps.iter().filter(|step| running(step).is_none()).filter_map(|step| step.waits_for.as_ref()) {
            let text = |field: &str| waits[field].as_str().unwrap_or_default().to_owned();
            let (handler, queue) = (text("handler"), text("queue"));
            let takes = |worker: &&&WorkerInfo| worker.queues.contains(&queue) && has(worker, &handler);
            let served = online.iter().any(|worker| worker.queues.contains(&queue));
            if text("what") == "worker" && served && online.iter().find(takes).is_none() {
                missing.push((handler, queue));
            }
        }
    }
    missing.sort();
    missing.dedup();
    let finding = |(handler, queue): (String, String)| {
        Finding::new(
            CheckResult::Bad,
            "handler",
            format!("tasks of {handler} wait on {queue}, and no online worker has this handler"),
        )
        .help(format!("start a worker with the handler {handler}, or check the spelling"))
    };
    Ok(missing.into_iter().map(finding).collect())
}

fn has(worker: &WorkerInfo, handler: &str) -> bool {
    let flow = match &worker.flows {
        Flows::Names(names) => names.iter().any(|name| name == handler),
        Flows::Builds(builds) => builds.contains_key(handler),
    };
    let everything = worker.handlers.is_empty()
        && match &worker.flows {
            Flows::Names(names) => names.is_empty(),
            Flows::Builds(builds) => builds.is_empty(),
        };
    everything || flow || worker.handlers.iter().any(|known| known == handler)
}

async fn directory(dir: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !dir.join("eddyline.db").is_file() {
        findings.push(Finding::new(CheckResult::Bad, "store", format!("there is no store in {}", dir.display())));
        return findings;
    }
    match Embedded::time_ahead(dir) {
        Ok(ahead) if ahead < -JUMP_MS => {
            let ago = moment::span(-ahead);
            let found = format!(
                "last open {ago} ago, or the clock is ahead: not opened, since that would set the store's time"
            );
            findings.push(Finding::new(CheckResult::Worth, "store time", found).help(RESET));
            return findings;
        }
        Ok(ahead) => findings.extend(store_ahead(ahead)),
        // Opening the store reports what is wrong.
        Err(_) => {}
    }
    match Embedded::open(dir, Options::default()) {
        Ok(store) => {
            let suspects = suspects_in(&store).await;
            findings.push(match store.close() {
                Ok(()) => {
                    Finding::new(CheckResult::Good, "store", format!("{} opens, and is not in use", dir.display()))
                }
                Err(error) => Finding::new(CheckResult::Bad, "store", error.to_string()),
            });
            findings.extend(suspects);
        }
        // The message names the process that has it open.
        Err(error) => findings.push(Finding::new(CheckResult::Bad, "store", error.reason())),
    }
    if let Ok(space) = rustix::fs::statvfs(dir) {
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let verdict = if free < LITTLE_SPACE { CheckResult::Worth } else { CheckResult::Good };
        findings.push(Finding::new(verdict, "space", format!("{} MiB free", free >> 20)));
    }
    findings
}

/// Quarantined runs of a store, and runs that the last process was handling when it died.
async fn suspects_in(store: &Embedded) -> Vec<Finding> {
    let quarantined = match quarantined_in(store, None).await {
        Ok(quarantined) => quarantined,
        Err(error) => return vec![Finding::new(CheckResult::Bad, QUARANTINE, error.to_string())],
    };
    let mut findings = Vec::new();
    for (summary, suspicion) in quarantined.iter().take(NAMED_RUNS) {
        let (run, ns) = (summary.run, &summary.ns);
        let why = format!("{} processes died while handling this run", suspicion.deaths);
        let of = if *ns == Namespace::default() { String::new() } else { format!(" (namespace {ns})") };
        let help =
            format!("start the server, then `eddy run resume {run}` resumes it, `eddy run cancel {run}` ends it{of}");
        findings.push(quarantine(&run.to_string(), &summary.header.flow, &why).help(help));
    }
    if let Some(more) = quarantined.len().checked_sub(NAMED_RUNS).filter(|more| *more > 0) {
        findings.push(Finding::new(CheckResult::Bad, QUARANTINE, format!("{more} more runs")));
    }
    for run in store.handled_before().runs().take(NAMED_RUNS) {
        let found = format!("the last process ended while it handled run {run}");
        findings.push(Finding::new(CheckResult::Worth, "suspect", found).help("the next process handles it alone"));
    }
    findings
}
