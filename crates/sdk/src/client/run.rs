//! A run: reads it, waits for it, acts on it.

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

/// How long one request waits for the end of a run; longer waits take several requests.
const LONG_POLL: Duration = Duration::from_secs(30);
/// The duration of an unlimited wait.
const LONGEST_WAIT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
/// A payload up to this size is stored, and can be read, as one value.
const PAYLOAD_BYTES: u64 = 2 << 20;
/// The minimum time between two requests that return before their wait is over.
const PAUSE: Duration = Duration::from_millis(250);

/// A run on the server. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Run {
    client: Client,
    id: String,
    existing: bool,
}

impl Client {
    /// A handle to the run with this id. Does not contact the server.
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

    /// Whether the run existed before the call: its idempotency key was known, or the handle was created by id.
    pub fn existing(&self) -> bool {
        self.existing
    }

    /// The run's header.
    pub async fn info(&self) -> Result<RunInfo, Error> {
        self.client.get(&self.path(""), &[]).await
    }

    /// The run's steps, in the order of their creation.
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

    /// Waits for the end of the run and returns its output. A failed or cancelled run is an error:
    /// [`Error::RunFailed`], [`Error::RunCancelled`]. So is an output of more than 2 MiB: [`Error::LargeOutput`]
    /// contains references to its parts, for [`Run::value`].
    pub async fn result<T: DeserializeOwned>(&self) -> Result<T, Error> {
        loop {
            let Some(ended) = self.wait(LONG_POLL).await? else { continue };
            let run_id = ended.run_id;
            return match (ended.status.as_str(), ended.error) {
                ("completed", _) => serde_json::from_value(self.in_one_piece(&run_id, ended.output).await?)
                    .map_err(|source| Error::Decode { what: format!("the output of run {run_id}"), source }),
                ("cancelled", _) => Err(Error::RunCancelled { run_id }),
                (_, failure) => {
                    let failure = failure.unwrap_or_else(|| Failure::new("Error", "no error message"));
                    Err(Error::RunFailed { run_id, failure: Box::new(failure) })
                }
            };
        }
    }

    /// Reads a payload that is too large to be shown inline, by its reference. A payload larger than 2 MiB is a list or
    /// an object with references for its elements.
    pub async fn value(&self, reference: &Reference) -> Result<Value, Error> {
        let (run, key) = reference.parts().unwrap_or((&self.id, &reference.value));
        self.client.get(&format!("/v1/runs/{}/values/{}", segment(run), segment(key)), &[]).await
    }

    /// Resolves an output that is a reference. Only references to values of this run count; anything else that looks
    /// like one is data.
    async fn in_one_piece(&self, run_id: &str, output: Value) -> Result<Value, Error> {
        let is_own = |reference: &Reference| reference.parts().is_some_and(|(run, _)| run == run_id);
        match Reference::read(&output).filter(is_own) {
            Some(reference) if reference.bytes <= PAYLOAD_BYTES => self.value(&reference).await,
            None if !has_reference(&output, &is_own) => Ok(output),
            _ => Err(Error::LargeOutput { run_id: run_id.to_owned(), output: Box::new(output) }),
        }
    }

    /// Waits up to `wait` for the end of the run.
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
            // A stopping server responds immediately.
            tokio::time::sleep_until((asked + PAUSE).min(until)).await;
            asked = Instant::now();
        }
    }

    /// Records of the timeline with numbers above `after`; pass `next` as the next `after`.
    pub async fn records(&self, after: u64) -> Result<Page<Record>, Error> {
        self.client.records(&self.stream(), after, None).await
    }

    /// The timeline from the beginning, live, until the run has ended.
    pub fn follow(&self) -> Follow {
        self.follow_after(0)
    }

    /// The timeline after a position.
    pub fn follow_after(&self, after: u64) -> Follow {
        Follow::new(self.client.clone(), self.stream(), after)
    }

    /// Cancels the run, and its running handlers.
    pub async fn cancel(&self, reason: Option<&str>) -> Result<Acted, Error> {
        self.act("/cancel", &CancelRun { reason: reason.map(str::to_owned) }).await
    }

    pub async fn pause(&self) -> Result<Acted, Error> {
        self.act("/pause", &Value::Object(serde_json::Map::new())).await
    }

    pub async fn resume(&self) -> Result<Acted, Error> {
        self.act("/resume", &Value::Object(serde_json::Map::new())).await
    }

    /// Starts a new run that reuses the completed steps and continues from the failed ones.
    pub async fn retry(&self) -> Result<Run, Error> {
        let new: NewRun = self.act("/retry", &Value::Object(serde_json::Map::new())).await?;
        Ok(Run::new(self.client.clone(), new.run_id, false))
    }

    /// Starts a new run that repeats the run from a top-level step (or from the start), optionally with another input.
    pub async fn rerun(&self, from: Option<&str>, input: Option<Value>) -> Result<Run, Error> {
        let new: NewRun = self.act("/rerun", &RerunRun { from: from.map(str::to_owned), input }).await?;
        Ok(Run::new(self.client.clone(), new.run_id, false))
    }

    /// Deletes the run permanently, after it has ended.
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

    /// Fails a step by hand, without retries.
    pub async fn fail_step(&self, activation: &str, failure: Failure) -> Result<Acted, Error> {
        self.act_on_step(activation, "fail", &FailStep { error: Some(failure) }).await
    }

    pub async fn skip_step(&self, activation: &str) -> Result<Acted, Error> {
        self.act_on_step(activation, "skip", &json!({})).await
    }

    /// Retries a step now instead of after its backoff.
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
