//! Registers a flow, starts a run of it, follows its timeline and waits for its output.
//!
//! `cargo run --example worker` executes its steps; `EDDY_URL` names the server.

use eddyline::{Client, Error};
use serde::{Deserialize, Serialize};

const FLOW: &str = "
name: greeting
steps:
  greet: {retry: {attempts: 3, initial: 100ms}}
  shout: {after: [greet], input: '${steps.greet.output}'}
output: '${steps.shout.output}'
";

#[derive(Serialize)]
struct Guest<'a> {
    name: &'a str,
}

#[derive(Deserialize)]
struct Greeting {
    text: String,
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let client = Client::from_env()?;
    let flow = client.register_flow("greeting", FLOW).await?;
    println!("{} is at version {}", flow.name, flow.version);
    let run = client.start("greeting", &Guest { name: "Ada" }).tags(["example"]).await?;
    let mut timeline = run.follow();
    while let Some(record) = timeline.next().await {
        let record = record?;
        println!("{:>3}  {:<24} {}", record.id, record.kind, record.activation().unwrap_or_default());
    }
    match run.result::<Greeting>().await {
        Ok(greeting) => println!("{}", greeting.text),
        Err(Error::RunFailed { failure, .. }) => println!("it failed: {}: {}", failure.kind, failure.message),
        Err(other) => return Err(other),
    }
    Ok(())
}
