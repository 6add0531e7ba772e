//! `eddy worker exec`: a worker that runs a command for each task.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use eddyline::{StepCtx, StepError, Worker};
use eddyline_language::definition::{wrong_name, wrong_word};
use eddyline_protocol::{Op, Outcome, Span, Task, Verdict as Answer};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::command::{Job, Verdict, carry_out};
use crate::connect::Remote;
use crate::processes::{asked_to_end, kill_all};
use crate::screen::{Ink, Line, Screen};
use crate::trouble::{Exit, Trouble};
use crate::{Context, warnings_only};

/// Lines of standard error that are on their way.
const LINES_UNDER_WAY: usize = 100;
/// Verdicts that nobody has read yet; more are left out, since leases are not kept while somebody waits to be read.
const VERDICTS_UNDER_WAY: usize = 1_000;
/// The kind of failure of a command that was called off.
const CALLED_OFF: &str = "Cancelled";
/// The kind of failure of a result that the server does not take.
const NOT_TAKEN: &str = "BadReport";
/// What is said of a command that is let finish.
const MAY_FINISH: &str = "the run was cancelled; the command may finish, so that what it did is undone";
/// How long a worker waits before it tries to reach its server again.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// What a killed command may take to be gone, before its task is given up where it stands.
const AFTER_GRACE: Duration = Duration::from_secs(5);

pub const CONTRACT: &str = "What a command is told:
  standard input        the step's input, as JSON
  EDDY_RUN_ID           the run
  EDDY_STEP             the step, as the flow names it
  EDDY_ACTIVATION       the step in this run, such as each[3].price
  EDDY_ATTEMPT          the attempt, from 1
  EDDY_TASK_KEY         the same for every attempt: make effects idempotent by it
  EDDY_RUN_INPUT        the run's input, as JSON; if it is over 100 KiB,
                        EDDY_RUN_INPUT_FILE names a file with it instead
  EDDY_EMITS            a file for events, one {\"event\":…,\"payload\":…} a line

What it says:
  standard output       the step's output: JSON, or else a text; nothing is null; at most 2 MiB
  standard error        logs of the run, line by line; the first 1,000
  exit code 0           completed
  exit code 65          failed, and not to be tried again
  any other, as 75      failed, to be tried again as the step's retry policy says

When the run is cancelled or the task is lost, the command and all that it started
get SIGTERM, and SIGKILL after --grace. In a flow with `undo` a cancelled command
is let finish and its result is reported, so that what it did is undone.";

#[derive(Debug, clap::Args)]
pub struct Exec {
    /// What to run for the tasks of a handler, in a shell
    #[arg(required = true, value_name = "HANDLER=COMMAND", value_parser = pair)]
    commands: Vec<(String, String)>,
    /// The queues to take tasks from; may be given several times
    #[arg(long = "queue", value_name = "QUEUE", default_value = "default", value_parser = queue)]
    queues: Vec<String>,
    /// How many commands run at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    max: u32,
    /// How long a command has to end when it is asked to
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

/// Which of two commands a handler would run is not guessed.
fn refuse_twice(commands: &[(String, String)]) -> Result<(), Trouble> {
    let mut seen = BTreeSet::new();
    match commands.iter().find(|(handler, _)| !seen.insert(handler)) {
        Some((handler, _)) => Err(Trouble::usage(format!("the handler {handler} is given twice"))),
        None => Ok(()),
    }
}

/// A queue of any other name never has a task.
fn queue(text: &str) -> Result<String, String> {
    wrong_name(text).map_or_else(|| Ok(text.to_owned()), Err)
}

pub async fn run(ctx: &Context, exec: Exec) -> Result<(), Trouble> {
    refuse_twice(&exec.commands)?;
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
    let (tell, told) = mpsc::channel::<Line>(VERDICTS_UNDER_WAY);
    for (handler, command) in exec.commands.iter().cloned() {
        ctx.screen.aside(format!("{handler}: {command}"));
        let (command, tell) = (Arc::new(command), tell.clone());
        worker = worker.handler(&handler, move |task: StepCtx, input: Value| {
            one(task, input, command.clone(), grace, tell.clone())
        });
    }
    worker = worker.on_answer(move |task, report, answer| {
        let _ = tell.try_send(verdict(task, report, answer));
    });
    let shown = tokio::spawn(show(ctx.screen.clone(), told));
    let (stop, stopped) = oneshot::channel();
    let twice = async {
        asked_to_end().await?;
        ctx.screen.aside("no more tasks are taken; commands may finish. Once more ends them at once");
        // Nobody listens if the worker has just ended by itself.
        let _ = stop.send(());
        asked_to_end().await
    };
    let ended = tokio::select! {
        result = worker.max_concurrent(exec.max).run_until(stopped) => {
            // The worker is gone, and with it whoever could add to what is to be shown.
            let _ = shown.await;
            remote.told(result)
        }
        asked = twice => asked.and(Err(Trouble::interrupted())),
    };
    kill_all();
    ended
}

/// Waits for a server that is not up yet. If the server answers with an error, that error is reported as by other commands.
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

async fn one(
    ctx: StepCtx,
    input: Value,
    command: Arc<String>,
    grace: Duration,
    tell: mpsc::Sender<Line>,
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
    let (lines, mut said) = mpsc::channel::<String>(LINES_UNDER_WAY);
    let log = async {
        while let Some(line) = said.recv().await {
            ctx.log(line);
        }
    };
    let work = async {
        let called_off = async {
            ctx.cancelled().await;
            if task.undo && !ctx.is_lost() {
                let _ = tell.try_send(about(task, Ink::Faint, "…", MAY_FINISH));
                ctx.lost().await;
            }
        };
        let verdict = carry_out(&command, &job, grace, &lines, called_off).await;
        drop(lines);
        verdict
    };
    let (verdict, ()) = tokio::join!(work, log);
    match verdict {
        None => Err(StepError::new("called off").kind(CALLED_OFF)),
        Some(Verdict::Failed { kind, message, again: true }) => Err(StepError::new(message).kind(kind)),
        Some(Verdict::Failed { kind, message, again: false }) => Err(StepError::permanent(message).kind(kind)),
        Some(Verdict::Done { output, emits }) => {
            for emit in emits {
                ctx.emit(&emit.event, emit.payload)?;
            }
            Ok(output)
        }
    }
}

/// Lines for whoever looks at the worker.
async fn show(screen: Screen, mut lines: mpsc::Receiver<Line>) {
    while let Some(line) = lines.recv().await {
        screen.aside(line.paint(screen.log_colors));
    }
}

/// What came of a task. What its command came to is one half of it, what the server answered to that the other.
fn verdict(task: &Task, report: &Op, answer: &Outcome) -> Line {
    let (ink, mark, text) = match (report, answer.outcome) {
        (Op::Fail { error, .. }, _) if error.kind == CALLED_OFF => (Ink::Faint, "–", error.message.clone()),
        (_, Answer::Stale) => (Ink::Faint, "–", "too late: another attempt has this step by now".to_owned()),
        (_, Answer::Closed) => (Ink::Faint, "–", "too late: the run has ended".to_owned()),
        (_, Answer::Invalid | Answer::NotTried) => {
            (Ink::Bad, "✗", refused(answer.message.as_deref().unwrap_or("it does not say why")))
        }
        (Op::Fail { error, .. }, Answer::Applied) if error.kind == NOT_TAKEN => {
            (Ink::Bad, "✗", refused(&error.message))
        }
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
    format!("the server does not take its result: {why}")
}
