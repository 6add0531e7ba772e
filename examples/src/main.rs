//! A worker with all examples, for the server at EDDY_URL.

use eddyline::{Client, Error, Worker};

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    eddyline_examples::staff(Worker::with_client(Client::from_env()?)).run().await
}
