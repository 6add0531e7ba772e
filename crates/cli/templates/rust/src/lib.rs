//! The flows and handlers of this project.

use std::time::Duration;

use eddyline::{FlowError, RunCtx, StepCtx, StepError, Worker};
use serde::Deserialize;
use serde_json::{Value, json};

/// Everything that the worker runs; the tests use the same.
pub fn staff(worker: Worker) -> Worker {
    worker.flow("welcome", welcome).handler("look_up", look_up).handler("greet", greet)
}

#[derive(Debug, Deserialize)]
pub struct Guest {
    pub name: String,
}

/// A code flow: an ordinary function, whose steps and waits are remembered by name.
pub async fn welcome(ctx: RunCtx, guest: Guest) -> Result<String, FlowError> {
    let greeting = ctx.step("write", || write(&guest.name)).await?;
    // The worker is free meanwhile, and may be restarted.
    ctx.sleep("pause", Duration::from_secs(5)).await?;
    // A graph flow as part of this one.
    let answer: Value = ctx.child("greet", &json!({"name": guest.name})).await?;
    Ok(format!("{greeting} {}", answer["greeting"].as_str().unwrap_or_default()))
}

async fn write(name: &str) -> Result<String, StepError> {
    Ok(format!("Welcome, {name}."))
}

/// A handler of `flows/greet.yaml`. It fails the first time, so that you can see a retry.
async fn look_up(ctx: StepCtx, _input: Value) -> Result<Value, StepError> {
    ctx.log(format!("looking up a language, attempt {}", ctx.attempt()));
    if ctx.attempt() == 1 {
        return Err(StepError::new("the dictionary does not answer").kind("Busy"));
    }
    Ok(json!({"language": "en"}))
}

#[derive(Debug, Deserialize)]
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
