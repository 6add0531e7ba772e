//! A run that waits for a person: finds its gate and opens it by its token.
//!
//! Needs a server (`EDDY_URL`) but no worker: the server itself evaluates the steps of this flow.

use std::time::Duration;

use eddyline::protocol::GateInfo;
use eddyline::{Client, Error, Run};
use serde_json::{Value, json};

const FLOW: &str = "
name: expense
steps:
  approve: {await: {manual: true, timeout: 24h}}
  book:    {after: [approve], set: {amount: '${input.amount}', approved_by: '${steps.approve.output.by}'}}
output: '${steps.book.output}'
";

#[tokio::main]
async fn main() -> Result<(), Error> {
    let client = Client::from_env()?;
    client.register_flow("expense", FLOW).await?;
    let run = client.start("expense", &json!({"amount": 120})).await?;
    let gate = first_gate(&client, &run).await?;
    println!("{} waits for approval at {}", gate.run_id, gate.activation);

    // What a person with the token does, here or at the gate's URL.
    let token = gate.token.ok_or_else(|| Error::Config("this key may not see tokens: it lacks `signal`".to_owned()))?;
    client.open_gate(&token, &json!({"by": "Grace"})).await?;
    println!("{}", run.result::<Value>().await?);

    // A gate opens only once.
    match client.open_gate(&token, &json!({"by": "Mallory"})).await {
        Err(error) if error.is_conflict() => println!("the second time: {error}"),
        other => println!("the second time: {other:?}"),
    }
    Ok(())
}

/// The run reaches its gate a moment after it was started.
async fn first_gate(client: &Client, run: &Run) -> Result<GateInfo, Error> {
    loop {
        if let Some(gate) = client.gates().run(run.id()).await?.into_iter().next() {
            return Ok(gate);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
