//! `eddy worker exec`: a worker that runs a command for each task.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use eddyline::{StepCtx, StepError, Worker};
use eddyline_language::definition::{wrong_name, wrong_word};
use eddyline_protocol::{Op, ReportOutcome, Span, Task, Verdict as Answer};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::command::{ExitVerdict, Job, carry_out};
use crate::connect::Remote;
use crate::processes::{asked_to_end, kill_all};
use crate::screen::{Ink, Line, Screen};
use crate::trouble::{Exit, Trouble};
use crate::{Context, warnings_only};

/// Lines of standard error that are buffered.
const LOG_BUFFER: usize = 100;
/// Status lines that are buffered. More are dropped: blocking here would stop the heartbeats.
const STATUS_BUFFER: usize = 1_000;
/// The error kind of a command that was cancelled.
const CANCELLED: &str = "Cancelled";
/// The error kind of a result that the server rejected.
const REJECTED: &str = "BadReport";
const MAY_FINISH: &str = "the run was cancelled; the command may finish, so that its effects can be undone";
/// How long the worker waits before it tries to reach the server again.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long a killed command may take to end before the worker drops its task.
const AFTER_GRACE: Duration = Duration::from_secs(5);

pub const CONTRACT: &str = "What a command gets:
  standard input        the step's input, as JSON
  EDDY_RUN_ID           the run
  EDDY_STEP             the step, as the flow names it
  EDDY_ACTIVATION       the step in this run, such as each[3].price
  EDDY_ATTEMPT          the attempt, from 1
  EDDY_TASK_KEY         the same for every attempt: use it as an idempotency key
  EDDY_RUN_INPUT        the run's input, as JSON; if it is over 100 KiB,
                        EDDY_RUN_INPUT_FILE names a file with it instead
  EDDY_EMITS            a file for events, one {\"event\":…,\"payload\":…} per line

What it returns:
  standard output       the step's output: JSON, otherwise text; empty is null; at most 2 MiB
  standard error        logs of the run, line by line; the first 1,000 lines
  exit code 0           completed
  exit code 65          failed, not retried
  any other, as 75      failed, retried by the step's retry policy

When the run is cancelled or the task is lost, the command and everything it started
get SIGTERM, and SIGKILL after --grace. In a flow with `undo` a cancelled command may
finish, and its result is reported so that its effects are undone.";

#[derive(Debug, clap::Args)]
pub struct Exec {
    /// The shell command to run for the tasks of a handler
    #[arg(required = true, value_name = "HANDLER=COMMAND", value_parser = pair)]
    commands: Vec<(String, String)>,
    /// A queue to claim tasks from; may be given several times
    #[arg(long = "queue", value_name = "QUEUE", default_value = "default", value_parser = queue)]
    queues: Vec<String>,
    /// How many commands may run at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    max: u32,
    /// How long a command may take to end after SIGTERM
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = Span::from_text)]
    grace: Span,
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((handler, command)) if !handler.is_empty() && !command.trim().is_empty() => match wrong_word(handler) {
            None => Ok((handler.to_owned(), command.to_owned())),
            Some(wrong) => Err(format!("no step has such a handler: {wrong}")),
        },
        _ => Err("expected HANDLER=COMMAND, such as pay=./pay.sh".to_owned()),
    }
}

fn refuse_duplicates(commands: &[(String, String)]) -> Result<(), Trouble> {
    let mut seen = BTreeSet::new();
    match commands.iter().find(|(handler, _)| !seen.insert(handler)) {
        Some((handler, _)) => Err(Trouble::usage(format!("the handler {handler} is given twice"))),
        None => Ok(()),
    }
}

/// Rejects names that no queue can have.
fn queue(text: &str) -> Result<String, String> {
    wrong_name(text).map_or_else(|| Ok(text.to_owned()), Err)
}

pub async fn run(ctx: &Context, exec: Exec) -> Result<(), Trouble> {
    refuse_duplicates(&exec.commands)?;
    let remote = ctx.remote()?;
    tokio::select! {
        reached = until_reached(ctx, &remote) => reached?,
        asked = asked_to_end() => return asked.and(Err(Trouble::interrupted())),
    }
    warnings_only(&ctx.screen);
    let grace = Duration::from(exec.grace);
    let mut worker = Worker::with_client(remote.client().clone()).cancel_grace(grace + AFTER_GRACE);
    for queue in &exec.queues {
        worker = worker.queue(queue);
    }
    let (status_tx, status_rx) = mpsc::channel::<Line>(STATUS_BUFFER);
    for (handler, command) in exec.commands.iter().cloned() {
        ctx.screen.aside(format!("{handler}: {command}"));
        let (command, status_tx) = (Arc::new(command), status_tx.clone());
        worker = worker.handler(&handler, move |task: StepCtx, input: Value| {
            run_task(task, input, command.clone(), grace, status_tx.clone())
        });
    }
    worker = worker.on_answer(move |task, report, answer| {
        let _ = status_tx.try_send(verdict(task, report, answer));
    });
    let shown = tokio::spawn(show(ctx.screen.clone(), status_rx));
    let (stop, stopped) = oneshot::channel();
    let twice = async {
        asked_to_end().await?;
        ctx.screen.aside("no more tasks are claimed; running commands may finish. Interrupt again to kill them");
        // Fails if the worker has just ended by itself.
        let _ = stop.send(());
        asked_to_end().await
    };
    let ended = tokio::select! {
        result = worker.max_concurrent(exec.max).run_until(stopped) => {
            // The worker dropped all senders, so `show` ends once everything is printed.
            let _ = shown.await;
            remote.map_error(result)
        }
        asked = twice => asked.and(Err(Trouble::interrupted())),
    };
    kill_all();
    ended
}

/// Waits for a server that is not up yet. If the server answers with an error, returns that error.
async fn until_reached(ctx: &Context, remote: &Remote) -> Result<(), Trouble> {
    let mut pause = FIRST_PAUSE;
    loop {
        match remote.get::<Value>("/v1/info", &[]).await {
            Ok(_) => return Ok(()),
            Err(trouble) if matches!(trouble.exit(), Exit::Unreachable | Exit::Unavailable) => {
                if pause == FIRST_PAUSE {
                    ctx.screen.aside(format!("waiting for the server: {}", trouble.message()));
                }
            }
            Err(trouble) => return Err(trouble),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

async fn run_task(
    ctx: StepCtx,
    input: Value,
    command: Arc<String>,
    grace: Duration,
    status_tx: mpsc::Sender<Line>,
) -> Result<Value, StepError> {
    let task = ctx.task();
    let job = Job {
        input,
        run_input: task.run_input.clone(),
        variables: vec![
            ("EDDY_RUN_ID", task.run_id.clone()),
            ("EDDY_STEP", task.step.clone()),
            ("EDDY_ACTIVATION", task.activation.clone()),
            ("EDDY_ATTEMPT", task.attempt.to_string()),
            ("EDDY_TASK_KEY", task.key.clone()),
        ],
    };
    let (logs_tx, mut logs_rx) = mpsc::channel::<String>(LOG_BUFFER);
    let log = async {
        while let Some(line) = logs_rx.recv().await {
            ctx.log(line);
        }
    };
    let work = async {
        let cancelled = async {
            ctx.cancelled().await;
            if task.undo && !ctx.is_lost() {
                let _ = status_tx.try_send(about(task, Ink::Faint, "…", MAY_FINISH));
                ctx.lost().await;
            }
        };
        let verdict = carry_out(&command, &job, grace, &logs_tx, cancelled).await;
        drop(logs_tx);
        verdict
    };
    let (verdict, ()) = tokio::join!(work, log);
    match verdict {
        None => Err(StepError::new("cancelled").kind(CANCELLED)),
        Some(ExitVerdict::Failed { kind, message, again: true }) => Err(StepError::new(message).kind(kind)),
        Some(ExitVerdict::Failed { kind, message, again: false }) => Err(StepError::permanent(message).kind(kind)),
        Some(ExitVerdict::Done { output, emits }) => {
            for emit in emits {
                ctx.emit(&emit.event, emit.payload)?;
            }
            Ok(output)
        }
    }
}

/// Prints status lines.
async fn show(screen: Screen, mut lines: mpsc::Receiver<Line>) {
    while let Some(line) = lines.recv().await {
        screen.aside(line.paint(screen.log_colors));
    }
}

/// The status line of a task: the result of its command, and how the server answered the report.
fn verdict(task: &Task, report: &Op, answer: &ReportOutcome) -> Line {
    let (ink, mark, text) = match (report, answer.outcome) {
        (Op::Fail { error, .. }, _) if error.kind == CANCELLED => (Ink::Faint, "–", error.message.clone()),
        (_, Answer::Stale) => (Ink::Faint, "–", "too late: another attempt of this step has started".to_owned()),
        (_, Answer::Closed) => (Ink::Faint, "–", "too late: the run has ended".to_owned()),
        (_, Answer::Invalid | Answer::NotTried) => {
            (Ink::Bad, "✗", refused(answer.message.as_deref().unwrap_or("no reason given")))
        }
        (Op::Fail { error, .. }, Answer::Applied) if error.kind == REJECTED => (Ink::Bad, "✗", refused(&error.message)),
        (Op::Fail { error, .. }, Answer::Applied) => (Ink::Bad, "✗", error.message.clone()),
        (_, Answer::Applied) => (Ink::Good, "✓", String::new()),
    };
    about(task, ink, mark, &text)
}

fn about(task: &Task, ink: Ink, mark: &'static str, text: &str) -> Line {
    let line = Line::default().with(ink, mark).with(Ink::Strong, format!(" {}", task.activation));
    line.with(Ink::Faint, format!("  {} attempt {}  ", task.run_id, task.attempt)).with(ink, text)
}

fn refused(why: &str) -> String {
    format!("the server rejected the result: {why}")
}
