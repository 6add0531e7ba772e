//! The worker: one function for each handler that `flows/greet.yaml` names.

use eddyline::{Client, StepCtx, StepError, Worker};
use serde_json::{Value, json};

#[tokio::main]
async fn main() -> Result<(), eddyline::Error> {
    // Reads EDDY_URL, EDDY_KEY and EDDY_NAMESPACE; `eddy dev` sets EDDY_URL.
    let client = Client::from_env()?;
    Worker::with_client(client).handler("look_up", look_up).handler("greet", greet).run().await
}

/// Fails the first time, so that you can see a retry.
async fn look_up(ctx: StepCtx, _input: Value) -> Result<Value, StepError> {
    ctx.log(format!("looking up a language, attempt {}", ctx.attempt()));
    if ctx.attempt() == 1 {
        return Err(StepError::new("the dictionary does not answer").kind("Busy"));
    }
    Ok(json!({"language": "en"}))
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "lowercase")]
enum Language {
    En,
    Fr,
}

/// The input is parsed into your type. If it does not match, the step fails without a retry.
async fn greet(_ctx: StepCtx, language: Language) -> Result<&'static str, StepError> {
    match language {
        Language::En => Ok("Hello"),
        Language::Fr => Ok("Bonjour"),
    }
}
