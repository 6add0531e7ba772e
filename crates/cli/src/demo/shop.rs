//! The workers of the demo's shop, and the expected output of the order.

use std::sync::Mutex;
use std::time::Duration;

use eddyline::{Client, StepCtx, StepError, Worker};
use serde_json::{Value, json};

pub const FLOW: &str = include_str!("order.yaml");

/// How long each step takes, so that there is something to watch.
const WORK: Duration = Duration::from_millis(1_300);

pub fn input() -> Value {
    json!({"customer": "ada", "items": [
        {"sku": "kayak", "cents": 64_900}, {"sku": "paddle", "cents": 8_900},
        {"sku": "spray deck", "cents": 12_500}, {"sku": "helmet", "cents": 5_400},
        {"sku": "throw bag", "cents": 3_300}]})
}

pub fn expected() -> Value {
    json!({"paid": 95_000, "tracking": "EDDY-7341", "invoice": "2026-0001"})
}

/// Counts the charges: there must be exactly one, whatever is killed.
#[derive(Debug, Default)]
pub struct Bank {
    charges: Mutex<Vec<String>>,
}

impl Bank {
    /// Charges once per key.
    fn charge(&self, key: &str) {
        let mut charges = self.charges.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !charges.iter().any(|charged| charged == key) {
            charges.push(key.to_owned());
        }
    }

    pub fn charges(&self) -> usize {
        self.charges.lock().unwrap_or_else(std::sync::PoisonError::into_inner).len()
    }
}

pub fn worker(client: Client, bank: std::sync::Arc<Bank>) -> Worker {
    let pay = move |ctx: StepCtx, input: Value| {
        let bank = bank.clone();
        async move {
            tokio::time::sleep(WORK).await;
            bank.charge(ctx.key());
            Ok::<_, StepError>(json!({"cents": input["cents"], "card": "…4242"}))
        }
    };
    Worker::with_client(client)
        .max_concurrent(4)
        .handler("reserve", reserve)
        .handler("fraud", fraud)
        .handler("review", |ctx: StepCtx, _: Value| takes(ctx, json!("looks fine")))
        .handler("price", |ctx: StepCtx, item: Value| takes(ctx, item["cents"].clone()))
        .handler("pay", pay)
        .handler("refund", |ctx: StepCtx, _: Value| takes(ctx, Value::Null))
        .handler("invoice", |ctx: StepCtx, _: Value| takes(ctx, json!("2026-0001")))
        .handler("ship", |ctx: StepCtx, _: Value| takes(ctx, json!("EDDY-7341")))
}

/// Succeeds at the third attempt.
async fn reserve(ctx: StepCtx, _: Value) -> Result<Value, StepError> {
    tokio::time::sleep(WORK / 2).await;
    match ctx.attempt() {
        1 | 2 => Err(StepError::new("the warehouse does not answer").kind("Busy")),
        _ => Ok(json!({"shelf": "B7"})),
    }
}

async fn fraud(ctx: StepCtx, _: Value) -> Result<Value, StepError> {
    takes(ctx, json!({"score": 12})).await
}

async fn takes(ctx: StepCtx, output: Value) -> Result<Value, StepError> {
    tokio::time::sleep(WORK).await;
    ctx.log(format!("{} done", ctx.activation()));
    Ok(output)
}
