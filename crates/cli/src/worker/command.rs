//! Runs a shell command for one task.

use std::io::Write;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use eddyline_protocol::Emit;
use futures_util::FutureExt;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::sync::mpsc;

use crate::processes::Group;

/// The limit of a payload: a longer output could not be reported.
pub const MAX_OUTPUT_BYTES: u64 = 2 << 20;
/// The system limits the length of an environment variable.
const MAX_VARIABLE_BYTES: usize = 100 << 10;
/// Lines of standard error that are kept as logs, and how long each may be.
const MAX_LOG_LINES: usize = 1_000;
const MAX_LOG_BYTES: u64 = 4 << 10;
const MAX_EMITS_BYTES: u64 = 16 << 20;
/// `EX_DATAERR` of sysexits.h: the input is wrong, so a retry would fail too.
const DO_NOT_RETRY: i32 = 65;
/// A shell exits with this plus the number of the signal that ended its command.
const SHELL_SIGNAL: i32 = 128;
const SIGNALS: std::ops::RangeInclusive<i32> = SHELL_SIGNAL + 1..=SHELL_SIGNAL + 64;

/// What a command gets.
#[derive(Debug)]
pub struct Job {
    pub input: Value,
    pub run_input: Value,
    pub variables: Vec<(&'static str, String)>,
}

/// The result of a command.
#[derive(Debug, PartialEq)]
pub enum ExitVerdict {
    Done { output: Value, emits: Vec<Emit> },
    Failed { kind: &'static str, message: String, again: bool },
}

fn failed(kind: &'static str, message: impl Into<String>) -> ExitVerdict {
    ExitVerdict::Failed { kind, message: message.into(), again: true }
}

fn permanent(kind: &'static str, message: impl Into<String>) -> ExitVerdict {
    ExitVerdict::Failed { kind, message: message.into(), again: false }
}

/// Runs `command` in a shell. If `cancelled` completes first, stops the command and everything it started, and returns
/// `None`. Sends each line of standard error to `logs`.
pub async fn carry_out(
    command: &str,
    job: &Job,
    grace: Duration,
    logs: &mpsc::Sender<String>,
    cancelled: impl Future<Output = ()>,
) -> Option<ExitVerdict> {
    let (mut group, place) = match prepare(command, job) {
        Ok(started) => started,
        Err(error) => return Some(failed("ExecError", format!("`{command}` cannot be started: {error}"))),
    };
    let (stdin, stdout, stderr) = (group.child.stdin.take(), group.child.stdout.take(), group.child.stderr.take());
    let input = job.input.to_string();
    let feed = async {
        if let Some(mut stdin) = stdin {
            // A command need not read its input.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        Ok(())
    };
    // When the command ends, what it left running is killed, which closes the pipes. Too much output ends it early:
    // it might write for ever.
    let pipes = async {
        let last_line = async { Ok(forward_lines(stderr, logs).await) };
        tokio::try_join!(feed, read_bounded(stdout), last_line)
    };
    let mut pipes = Box::pin(pipes.fuse());
    let finished = {
        let ended = async { Ok(group.wait().await) };
        let whole = async { tokio::try_join!(&mut pipes, ended) };
        tokio::select! {
            finished = whole => Some(finished),
            () = cancelled => None,
        }
    };
    match finished {
        None => {
            // Keep reading while it cleans up: writing to a closed pipe would kill it.
            let keep_reading = async {
                let _ = pipes.await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = group.stop(grace) => {}
                () = keep_reading => {}
            }
            None
        }
        Some(Err(TooMuch)) => {
            group.stop(grace).await;
            let message = format!("the output of `{command}` is over the limit of {MAX_OUTPUT_BYTES} bytes");
            Some(permanent("OutputTooLarge", message))
        }
        Some(Ok((_, Err(error)))) => Some(failed("ExecError", format!("cannot wait for `{command}`: {error}"))),
        Some(Ok((((), output, last), Ok(status)))) => Some(judge(command, status, &output, last, place.path())),
    }
}

fn prepare(command: &str, job: &Job) -> std::io::Result<(Group, TempDir)> {
    let place = tempfile::Builder::new().prefix("eddy-task-").tempdir()?;
    let emits = place.path().join("emits");
    std::fs::File::create(&emits)?;
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(command).envs(job.variables.iter().map(|(name, value)| (*name, value)));
    shell.env("EDDY_EMITS", &emits);
    let run_input = job.run_input.to_string();
    if run_input.len() <= MAX_VARIABLE_BYTES {
        shell.env("EDDY_RUN_INPUT", run_input);
    } else {
        let file = place.path().join("run-input.json");
        std::fs::File::create(&file)?.write_all(run_input.as_bytes())?;
        shell.env("EDDY_RUN_INPUT_FILE", file);
    }
    shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok((Group::spawn(&mut shell)?, place))
}

struct TooMuch;

async fn read_bounded(from: Option<impl AsyncRead + Unpin>) -> Result<Vec<u8>, TooMuch> {
    let mut output = Vec::new();
    let Some(from) = from else { return Ok(output) };
    let read = from.take(MAX_OUTPUT_BYTES + 1).read_to_end(&mut output).await;
    match read {
        Ok(bytes) if bytes as u64 > MAX_OUTPUT_BYTES => Err(TooMuch),
        _ => Ok(output),
    }
}

/// Returns the last line, which may be the reason of a failure.
async fn forward_lines(from: Option<impl AsyncRead + Unpin>, logs: &mpsc::Sender<String>) -> Option<String> {
    let mut reader = BufReader::new(from?);
    let (mut count, mut last, mut line) = (0, None, Vec::new());
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_LOG_BYTES).read_until(b'\n', &mut line).await;
        if !matches!(read, Ok(1..)) {
            return last;
        }
        let text = String::from_utf8_lossy(&line).trim_end().to_owned();
        if text.is_empty() {
            continue;
        }
        count += 1;
        let kept = match count {
            ..=MAX_LOG_LINES => Some(text.clone()),
            n if n == MAX_LOG_LINES + 1 => Some(format!("… more than {MAX_LOG_LINES} lines: the rest is dropped")),
            _ => None,
        };
        if let Some(kept) = kept {
            let _ = logs.send(kept).await;
        }
        last = Some(text);
    }
}

/// Derives the result from the exit code.
fn judge(command: &str, status: ExitStatus, output: &[u8], last_line: Option<String>, place: &Path) -> ExitVerdict {
    let because = last_line.map(|line| format!(": {line}")).unwrap_or_default();
    match status.code() {
        Some(0) => {}
        Some(DO_NOT_RETRY) => return permanent("BadInput", format!("`{command}` exited with {DO_NOT_RETRY}{because}")),
        // The shell ran a command that a signal ended.
        Some(code) if SIGNALS.contains(&code) => {
            return failed("Killed", format!("`{command}` was ended by signal {}{because}", code - SHELL_SIGNAL));
        }
        Some(code) => return failed("ExitCode", format!("`{command}` exited with {code}{because}")),
        None => return failed("Killed", format!("`{command}` was ended by a signal ({status}){because}")),
    }
    match read_emits(&place.join("emits")) {
        Ok(emits) => ExitVerdict::Done { output: parse_output(output), emits },
        Err(why) => permanent("BadEmits", format!("$EDDY_EMITS of `{command}`: {why}")),
    }
}

/// JSON if it parses, otherwise text without the last line break.
fn parse_output(output: &[u8]) -> Value {
    let text = String::from_utf8_lossy(output);
    if text.trim().is_empty() {
        return Value::Null;
    }
    serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.trim_end_matches(['\n', '\r']).to_owned()))
}

fn read_emits(path: &Path) -> Result<Vec<Emit>, String> {
    let size = std::fs::metadata(path).map(|file| file.len()).unwrap_or(0);
    if size > MAX_EMITS_BYTES {
        return Err(format!("{size} bytes are over the limit of {MAX_EMITS_BYTES}"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(at, line): (usize, &str)| {
        serde_json::from_str::<Emit>(line)
            .map_err(|error| format!("line {} is not {{\"event\":…,\"payload\":…}}: {error}", at + 1))
    };
    lines.map(read).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use serde_json::json;

    use super::*;

    async fn run(command: &str, input: Value) -> (ExitVerdict, Vec<String>) {
        let job = Job { input, run_input: json!({"of": "run"}), variables: vec![("EDDY_STEP", "pay".to_owned())] };
        let (logs, mut kept) = mpsc::channel(2_000);
        let verdict = carry_out(command, &job, Duration::from_secs(5), &logs, std::future::pending()).await.unwrap();
        drop(logs);
        let mut lines = Vec::new();
        while let Some(line) = kept.recv().await {
            lines.push(line);
        }
        (verdict, lines)
    }

    fn done(output: Value) -> ExitVerdict {
        ExitVerdict::Done { output, emits: Vec::new() }
    }

    #[tokio::test]
    async fn standard_output_is_the_output() {
        assert_eq!(run("cat", json!({"a": 1})).await.0, done(json!({"a": 1})));
        assert_eq!(run("echo just text", json!(null)).await.0, done(json!("just text")));
        assert_eq!(run("true", json!(null)).await.0, done(json!(null)));
        assert_eq!(run("echo \"\\\"$EDDY_STEP\\\"\"", json!(null)).await.0, done(json!("pay")));
        assert_eq!(run("printf %s \"$EDDY_RUN_INPUT\"", json!(null)).await.0, done(json!({"of": "run"})));
    }

    #[tokio::test]
    async fn a_command_need_not_read_its_input() {
        let large = Value::String("x".repeat(1 << 20));
        assert_eq!(run("echo 1", large).await.0, done(json!(1)));
    }

    #[tokio::test]
    async fn what_a_command_leaves_running_is_not_waited_for() {
        assert_eq!(run("sleep 1000 & echo 1", json!(null)).await.0, done(json!(1)));
    }

    #[tokio::test]
    async fn the_exit_code_is_the_verdict() {
        let (verdict, lines) = run("echo no paper >&2; exit 75", json!(null)).await;
        assert_eq!(lines, ["no paper"]);
        let message = "`echo no paper >&2; exit 75` exited with 75: no paper".to_owned();
        assert_eq!(verdict, ExitVerdict::Failed { kind: "ExitCode", message, again: true });
        assert!(matches!(run("exit 65", json!(null)).await.0, ExitVerdict::Failed { again: false, .. }));
        for command in ["kill -9 $$", "sh -c 'kill -9 $$'; exit $?"] {
            let (verdict, _) = run(command, json!(null)).await;
            assert!(matches!(verdict, ExitVerdict::Failed { kind: "Killed", again: true, .. }), "{verdict:?}");
        }
    }

    #[tokio::test]
    async fn what_a_shell_has_started_has_its_grace_too() {
        let place = tempfile::tempdir().unwrap();
        let (fifo, cleaned) = (place.path().join("ready"), place.path().join("cleaned"));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let script = place.path().join("script.sh");
        let text = format!(
            "#!/bin/sh\ntrap 'sleep 0.3; echo yes > {}; exit 0' TERM\necho > {}\nwhile :; do sleep 0.05; done\n",
            cleaned.display(),
            fifo.display()
        );
        std::fs::write(&script, text).unwrap();
        let command = format!("sh {}; true", script.display());
        let (logs, _kept) = mpsc::channel(10);
        let ready = async {
            tokio::task::spawn_blocking(move || std::fs::read(fifo)).await.unwrap().unwrap();
        };
        let job = Job { input: json!(null), run_input: json!(null), variables: Vec::new() };
        assert_eq!(carry_out(&command, &job, Duration::from_secs(20), &logs, ready).await, None);
        assert_eq!(std::fs::read_to_string(cleaned).unwrap(), "yes\n");
    }

    #[tokio::test]
    async fn emits_are_lines_in_a_file() {
        let command =
            "echo '{\"event\":\"paid\",\"payload\":1}' >> $EDDY_EMITS; echo '{\"event\":\"seen\"}' >> $EDDY_EMITS";
        let emits = vec![
            Emit { event: "paid".to_owned(), payload: json!(1) },
            Emit { event: "seen".to_owned(), payload: json!(null) },
        ];
        assert_eq!(run(command, json!(null)).await.0, ExitVerdict::Done { output: json!(null), emits });
        let (bad, _) = run("echo paid > $EDDY_EMITS", json!(null)).await;
        assert!(matches!(bad, ExitVerdict::Failed { kind: "BadEmits", again: false, .. }), "{bad:?}");
    }

    #[tokio::test]
    async fn too_much_output_ends_the_command() {
        let (verdict, _) = run("yes", json!(null)).await;
        assert!(matches!(verdict, ExitVerdict::Failed { kind: "OutputTooLarge", again: false, .. }), "{verdict:?}");
    }

    #[tokio::test]
    async fn logs_are_bounded() {
        let (_, lines) = run("seq 3000 >&2", json!(null)).await;
        assert_eq!(lines.len(), MAX_LOG_LINES + 1);
        assert!(lines.last().unwrap().contains("dropped"), "{:?}", lines.last());
    }

    #[tokio::test]
    async fn what_is_called_off_ends_with_all_that_it_started() {
        let place = tempfile::tempdir().unwrap();
        let pid_file = place.path().join("pid");
        let fifo = place.path().join("ready");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        // The shell and its child both ignore SIGTERM.
        let command = format!(
            "trap '' TERM; sh -c 'trap \"\" TERM; echo $$ > {}; echo > {}; while :; do sleep 1; done' & wait",
            pid_file.display(),
            fifo.display()
        );
        let (logs, _kept) = mpsc::channel(10);
        let ready = async {
            tokio::task::spawn_blocking(move || std::fs::read(fifo)).await.unwrap().unwrap();
        };
        let job = Job { input: json!(null), run_input: json!(null), variables: Vec::new() };
        let verdict = carry_out(&command, &job, Duration::from_millis(100), &logs, ready).await;
        assert_eq!(verdict, None);
        let pid: i32 = std::fs::read_to_string(pid_file).unwrap().trim().parse().unwrap();
        let gone = || rustix::process::test_kill_process(rustix::process::Pid::from_raw(pid).unwrap()).is_err();
        let gone_or_dead =
            || gone() || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
        // The system may take a moment to report its death.
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while !gone_or_dead() && std::time::Instant::now() < until {
            tokio::task::yield_now().await;
        }
        assert!(gone_or_dead());
    }
}
