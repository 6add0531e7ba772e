//! A worker with two handlers, `greet` and `shout`. It works until Ctrl-C, then finishes its tasks.
//!
//! Start a server with `eddy serve`, then this, then a run: `cargo run --example start_and_wait`.

use eddyline::{Client, StepCtx, StepError, Worker};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Guest {
    name: String,
}

#[derive(Serialize, Deserialize)]
struct Greeting {
    text: String,
}

/// The first step: its input is the run's.
async fn greet(ctx: StepCtx, guest: Guest) -> Result<Greeting, StepError> {
    if guest.name.is_empty() {
        return Err(StepError::permanent("the name is missing").kind("NoName"));
    }
    ctx.log(format!("greeting {}, attempt {}", guest.name, ctx.attempt()));
    Ok(Greeting { text: format!("Hello, {}", guest.name) })
}

/// The second step: the flow defines its input.
async fn shout(ctx: StepCtx, greeting: Greeting) -> Result<Greeting, StepError> {
    ctx.progress(1.0, Some(1.0), Some("shouted"));
    Ok(Greeting { text: format!("{}!", greeting.text.to_uppercase()) })
}

#[tokio::main]
async fn main() -> Result<(), eddyline::Error> {
    let client = Client::from_env()?;
    println!("working for {}", client.url());
    Worker::with_client(client).handler("greet", greet).handler("shout", shout).max_concurrent(20).run().await
}
