//! Runs as people name them: by their id, by either end of it, or `latest`.

use eddyline_protocol::RunSummary;

use super::connect::{Remote, understood};
use super::trouble::Trouble;

/// The newest run.
const LATEST: &str = "latest";
/// Runs among which a short id is looked for, newest first.
const LOOKED_AT: usize = 10_000;
/// A shorter one would be found by accident.
const SHORTEST: usize = 4;
/// How many matching runs the error for an ambiguous short id lists.
const TOLD: usize = 5;

/// The id of the run that is meant. What is no part of an id is left to the server to refuse.
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
            "\"{written}\" is too short for a run: give at least {SHORTEST} characters"
        )));
    }
    let mut found = Vec::new();
    for run in remote.list("/v1/runs", &[], Some(LOOKED_AT)).await? {
        let run: RunSummary = understood(run)?;
        if run.run_id.ends_with(&part) || run.run_id.starts_with(&part) {
            found.push(run);
        }
    }
    match found.as_slice() {
        [one] => Ok(one.run_id.clone()),
        [] => Err(Trouble::not_found(format!("no run of the latest {LOOKED_AT} begins or ends with {written}"))),
        many => {
            let told = many.iter().take(TOLD).map(|run| format!("{} ({}, {})", run.run_id, run.flow, run.status));
            let told = told.collect::<Vec<_>>().join("; ");
            let message = format!("{} runs begin or end with {written}", many.len());
            Err(Trouble::usage(message).help(format!("give more of one of them, its end best: {told}")))
        }
    }
}

/// Characters of a whole id.
const FULL: usize = 36;
