//! A run: looked at, waited for, acted upon.

use std::time::Duration;

use eddyline_protocol::{
    Acted, CancelRun, CompleteStep, FailStep, Failure, NewRun, Page, Reference, RerunRun, RunInfo, RunResult, StepInfo,
};
use http::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::address::segment;
use super::http::Repeat;
use super::{Client, Follow, Record};
use crate::error::Error;

/// How long one request waits for the end of a run. Whoever waits longer asks again.
const LONG_POLL: Duration = Duration::from_secs(30);
/// A wait "for ever" is this long.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
/// A payload of this size is stored in one piece, and can be read in one.
const PAYLOAD_BYTES: u64 = 2 << 20;
/// Between two requests that came back at once although they asked to wait.
const PAUSE: Duration = Duration::from_millis(250);

/// A run on the server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Run {
    client: Client,
    id: String,
    existing: bool,
}

impl Client {
    /// The run of that id. Nothing is asked of the server yet.
    pub fn run(&self, id: impl Into<String>) -> Run {
        Run::new(self.clone(), id.into(), true)
    }
}

impl Run {
    pub(super) fn new(client: Client, id: String, existing: bool) -> Run {
        Run { client, id, existing }
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// It was there before it was asked for: its idempotency key was known, or it was named by its id.
    pub fn existing(&self) -> bool {
        self.existing
    }

    /// Its header.
    pub async fn info(&self) -> Result<RunInfo, Error> {
        self.client.get(&self.path(""), &[]).await
    }

    /// Its steps, in the order in which they came into being.
    pub async fn steps(&self) -> Result<Vec<StepInfo>, Error> {
        let (mut steps, mut cursor): (_, Option<String>) = (Vec::new(), None);
        loop {
            let query: Vec<_> = cursor.iter().map(|cursor| ("cursor", cursor.clone())).collect();
            let page: Page<StepInfo> = self.client.get(&self.path("/steps"), &query).await?;
            steps.extend(page.items);
            match page.next {
                Some(next) => cursor = Some(next),
                None => return Ok(steps),
            }
        }
    }

    /// Waits for its end and gives its output. A run that failed or was cancelled is an error:
    /// [`Error::RunFailed`], [`Error::RunCancelled`]. So is an output of more than 2 MiB: [`Error::LargeOutput`] has
    /// references to its parts, for [`Run::value`].
    pub async fn result<T: DeserializeOwned>(&self) -> Result<T, Error> {
        loop {
            let Some(ended) = self.wait(LONG_POLL).await? else { continue };
            let run_id = ended.run_id;
            return match (ended.status.as_str(), ended.error) {
                ("completed", _) => serde_json::from_value(self.in_one_piece(&run_id, ended.output).await?)
                    .map_err(|source| Error::Decode { what: format!("the output of run {run_id}"), source }),
                ("cancelled", _) => Err(Error::RunCancelled { run_id }),
                (_, failure) => {
                    let failure = failure.unwrap_or_else(|| Failure::new("Error", "it does not say why"));
                    Err(Error::RunFailed { run_id, failure: Box::new(failure) })
                }
            };
        }
    }

    /// A payload that is too large to be shown where it is used, by its reference. What is larger than 2 MiB is a list or
    /// an object with references for its elements.
    pub async fn value(&self, reference: &Reference) -> Result<Value, Error> {
        let (run, key) = reference.parts().unwrap_or((&self.id, &reference.value));
        self.client.get(&format!("/v1/runs/{}/values/{}", segment(run), segment(key)), &[]).await
    }

    /// An output that may be a reference, or have references for its elements. Those are to values of the run itself;
    /// whatever else looks like one is what the run was to give out.
    async fn in_one_piece(&self, run_id: &str, output: Value) -> Result<Value, Error> {
        let is_own = |reference: &Reference| reference.parts().is_some_and(|(run, _)| run == run_id);
        match Reference::read(&output).filter(is_own) {
            Some(reference) if reference.bytes <= PAYLOAD_BYTES => self.value(&reference).await,
            None if !has_reference(&output, &is_own) => Ok(output),
            _ => Err(Error::LargeOutput { run_id: run_id.to_owned(), output: Box::new(output) }),
        }
    }

    /// How it ended, if it does within that time.
    pub async fn wait(&self, wait: Duration) -> Result<Option<RunResult>, Error> {
        let mut asked = Instant::now();
        let until = asked + wait.min(LONGEST_WAIT);
        loop {
            let ms = until.saturating_duration_since(asked).min(LONG_POLL).as_millis();
            let query = [("wait", format!("{ms}ms"))];
            let result: RunResult = self.client.get(&self.path("/result"), &query).await?;
            if matches!(result.status.as_str(), "completed" | "failed" | "cancelled") {
                return Ok(Some(result));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            // A server that is stopping answers at once.
            tokio::time::sleep_until((asked + PAUSE).min(until)).await;
            asked = Instant::now();
        }
    }

    /// Records of its timeline with numbers above `after`; `next` of the page is the `after` of the next one.
    pub async fn records(&self, after: u64) -> Result<Page<Record>, Error> {
        self.client.records(&self.stream(), after, None).await
    }

    /// Its timeline from the beginning, live, to its end.
    pub fn follow(&self) -> Follow {
        self.follow_after(0)
    }

    /// The same, from after a position.
    pub fn follow_after(&self, after: u64) -> Follow {
        Follow::new(self.client.clone(), self.stream(), after)
    }

    /// Cancels it. Handlers that are at work for it are told.
    pub async fn cancel(&self, reason: Option<&str>) -> Result<Acted, Error> {
        self.act("/cancel", &CancelRun { reason: reason.map(str::to_owned) }).await
    }

    pub async fn pause(&self) -> Result<Acted, Error> {
        self.act("/pause", &Value::Object(serde_json::Map::new())).await
    }

    pub async fn resume(&self) -> Result<Acted, Error> {
        self.act("/resume", &Value::Object(serde_json::Map::new())).await
    }

    /// A new run that takes over what completed and goes on from what failed.
    pub async fn retry(&self) -> Result<Run, Error> {
        let new: NewRun = self.act("/retry", &Value::Object(serde_json::Map::new())).await?;
        Ok(Run::new(self.client.clone(), new.run_id, false))
    }

    /// A new run that runs again from a top-level step on (or as a whole), with another input where one is given.
    pub async fn rerun(&self, from: Option<&str>, input: Option<Value>) -> Result<Run, Error> {
        let new: NewRun = self.act("/rerun", &RerunRun { from: from.map(str::to_owned), input }).await?;
        Ok(Run::new(self.client.clone(), new.run_id, false))
    }

    /// Deletes it for good, once it has ended.
    pub async fn delete(&self) -> Result<(), Error> {
        let _: Value = self.client.call(Method::DELETE, &self.path(""), &[], None::<&()>).await?;
        Ok(())
    }

    /// Completes a step by hand.
    pub async fn complete_step(&self, activation: &str, output: &(impl Serialize + ?Sized)) -> Result<Acted, Error> {
        let output = serde_json::to_value(output)
            .map_err(|source| Error::Encode { what: format!("the output of {activation}"), source })?;
        self.act_on_step(activation, "complete", &CompleteStep { output }).await
    }

    /// Fails a step by hand, for good.
    pub async fn fail_step(&self, activation: &str, failure: Failure) -> Result<Acted, Error> {
        self.act_on_step(activation, "fail", &FailStep { error: Some(failure) }).await
    }

    pub async fn skip_step(&self, activation: &str) -> Result<Acted, Error> {
        self.act_on_step(activation, "skip", &json!({})).await
    }

    /// Tries a step again now, instead of at the end of its back-off.
    pub async fn retry_step(&self, activation: &str) -> Result<Acted, Error> {
        self.act_on_step(activation, "retry", &json!({})).await
    }

    async fn act_on_step(&self, activation: &str, act: &str, body: &(impl Serialize + Sync)) -> Result<Acted, Error> {
        self.act(&format!("/steps/{}/{act}", segment(activation)), body).await
    }

    async fn act<T: DeserializeOwned>(&self, act: &str, body: &(impl Serialize + Sync)) -> Result<T, Error> {
        self.client.post(Repeat::Never, &self.path(act), body).await
    }

    fn path(&self, rest: &str) -> String {
        format!("/v1/runs/{}{rest}", segment(&self.id))
    }

    fn stream(&self) -> String {
        format!("nq:flow:{}", self.id)
    }
}

fn has_reference(value: &Value, is_own: &impl Fn(&Reference) -> bool) -> bool {
    match value {
        Value::Array(items) => items.iter().any(|item| has_reference(item, is_own)),
        Value::Object(fields) => {
            Reference::read(value).is_some_and(|reference| is_own(&reference))
                || fields.values().any(|field| has_reference(field, is_own))
        }
        _ => false,
    }
}
