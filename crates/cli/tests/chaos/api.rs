//! Calls that go to any instance, and to the next one if there is no answer.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use eddyline::{Client, Error, Method};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::proxy::Chance;

/// How long a call waits for an instance before it asks another one.
const PATIENCE: Duration = Duration::from_secs(4);
const PAUSE: Duration = Duration::from_millis(50);
/// How long the whole cluster may be unable to answer a call.
const GIVE_UP: Duration = Duration::from_secs(60);

/// A response, and whether an earlier attempt of the same call may have taken effect without a response.
#[derive(Debug)]
pub struct Answered<T> {
    pub result: Result<T, Error>,
    pub uncertain: bool,
}

pub struct Api {
    clients: Vec<Client>,
    chance: Mutex<Chance>,
}

impl Api {
    pub fn new(clients: Vec<Client>, seed: u64) -> Api {
        Api { clients, chance: Mutex::new(Chance(seed)) }
    }

    pub fn chance(&self) -> u64 {
        self.chance.lock().unwrap().next()
    }

    /// Repeats a call until the response is not an error of the server's condition.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<&(impl Serialize + Sync)>,
    ) -> Answered<T> {
        let (first, begun, mut uncertain) = (self.chance() as usize, Instant::now(), false);
        for at in 0.. {
            let client = &self.clients[(first % self.clients.len() + at) % self.clients.len()];
            let error = match tokio::time::timeout(PATIENCE, client.call(method.clone(), path, query, body)).await {
                Ok(Err(error)) if error.is_retryable() => error,
                Ok(result) => return Answered { result, uncertain },
                Err(_) => Error::Timeout,
            };
            uncertain |= !matches!(error, Error::Connect { .. });
            assert!(begun.elapsed() < GIVE_UP, "{method} {path} got no answer from any instance: {error}");
            tokio::time::sleep(PAUSE).await;
        }
        unreachable!()
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, String)]) -> T {
        let answered = self.ask(Method::GET, path, query, None::<&()>).await;
        answered.result.unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &(impl Serialize + Sync)) -> T {
        let answered = self.ask(Method::POST, path, &[], Some(body)).await;
        answered.result.unwrap_or_else(|error| panic!("POST {path}: {error}"))
    }

    pub async fn put<T: DeserializeOwned>(&self, path: &str, body: &(impl Serialize + Sync)) -> T {
        let answered = self.ask(Method::PUT, path, &[], Some(body)).await;
        answered.result.unwrap_or_else(|error| panic!("PUT {path}: {error}"))
    }
}
