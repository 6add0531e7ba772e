//! Many runs in one call. Each has an idempotency key, so that the whole batch can be sent again after a failure
//! without starting anything twice.
//!
//! Needs a server (`EDDY_URL`) but no worker: the server itself evaluates the steps of this flow.

use eddyline::{Client, Error};

const FLOW: &str = "
name: square
steps:
  multiply: {set: '${input * input}'}
output: '${steps.multiply.output}'
";
const RUNS: u64 = 250;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let client = Client::from_env()?;
    client.register_flow("square", FLOW).await?;
    let batch = |client: &Client| {
        let item = |n: u64| client.start("square", &n).idempotency_key(format!("square-{n}")).into_item();
        (0..RUNS).map(item).collect::<Result<Vec<_>, Error>>()
    };
    let runs = client.start_batch(batch(&client)?).await?;
    let again = client.start_batch(batch(&client)?).await?;
    let known = again.iter().flatten().filter(|run| run.existing()).count();
    println!("started {}, {known} of them already existed the second time", runs.len());

    let mut sum = 0;
    for run in runs {
        match run {
            Ok(run) => sum += run.result::<u64>().await?,
            Err(refused) => println!("not started: {}", refused.message),
        }
    }
    println!("the sum of their outputs is {sum}");
    Ok(())
}
