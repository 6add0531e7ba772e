//! The worker.

use eddyline::{Client, Error, Worker};

#[tokio::main]
async fn main() -> Result<(), Error> {
    // Reads EDDY_URL, EDDY_KEY and EDDY_NAMESPACE; `eddy dev` sets EDDY_URL.
    greet::staff(Worker::with_client(Client::from_env()?)).run().await
}
