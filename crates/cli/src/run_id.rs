//! Resolves a run as users name it: its id, the beginning or the end of it, or `latest`.

use eddyline_protocol::RunSummary;

use super::connect::{Remote, understood};
use super::trouble::Trouble;

/// The newest run.
const LATEST: &str = "latest";
/// How many runs, newest first, are searched for a short id.
const SEARCHED: usize = 10_000;
/// A shorter id would match by accident.
const SHORTEST: usize = 4;
/// How many matching runs the error for an ambiguous short id lists.
const LISTED: usize = 5;

/// The full id of a run. Text that cannot be part of an id is left for the server to reject.
pub async fn resolve(remote: &Remote, written: &str) -> Result<String, Trouble> {
    if written == LATEST {
        let newest = remote.list("/v1/runs", &[], Some(1)).await?.pop();
        let newest = newest.map(understood::<RunSummary>).transpose()?;
        return newest.map(|run| run.run_id).ok_or_else(|| Trouble::not_found("there are no runs"));
    }
    let part = written.to_ascii_lowercase();
    if part.len() >= FULL || !part.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
        return Ok(written.to_owned());
    }
    if part.len() < SHORTEST {
        return Err(Trouble::usage(format!(
            "\"{written}\" is too short for a run id: use at least {SHORTEST} characters"
        )));
    }
    let mut found = Vec::new();
    for run in remote.list("/v1/runs", &[], Some(SEARCHED)).await? {
        let run: RunSummary = understood(run)?;
        if run.run_id.ends_with(&part) || run.run_id.starts_with(&part) {
            found.push(run);
        }
    }
    match found.as_slice() {
        [one] => Ok(one.run_id.clone()),
        [] => Err(Trouble::not_found(format!("none of the latest {SEARCHED} runs begins or ends with {written}"))),
        many => {
            let listed = many.iter().take(LISTED).map(|run| format!("{} ({}, {})", run.run_id, run.flow, run.status));
            let listed = listed.collect::<Vec<_>>().join("; ");
            let message = format!("{} runs begin or end with {written}", many.len());
            Err(Trouble::usage(message).help(format!("use more characters from the end: {listed}")))
        }
    }
}

/// Characters of a full id.
const FULL: usize = 36;
