//! A subscription: an invoice every month, for years. Each year is a run of its own, so that no run grows for ever.

use std::time::Duration;

use eddyline::{FlowError, RunCtx, StepError, Worker};
use serde::{Deserialize, Serialize};

const MONTH: Duration = Duration::from_secs(30 * 24 * 3_600);
const MONTHS_A_RUN: u32 = 12;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Subscription {
    pub customer: String,
    pub plan: String,
    #[serde(default)]
    pub invoices: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Plan(String),
    Cancel,
}

/// Returns the number of invoices once the customer has cancelled.
pub async fn subscription(ctx: RunCtx, mut state: Subscription) -> Result<u32, FlowError> {
    let mut changes = ctx.inbox::<Change>("subscription.changed", &state.customer);
    for _ in 0..MONTHS_A_RUN {
        ctx.step("invoice", || invoice(&state)).await?;
        state.invoices += 1;
        let month = ctx.sleep("month", MONTH);
        tokio::pin!(month);
        loop {
            tokio::select! {
                slept = &mut month => {
                    slept?;
                    break;
                }
                change = changes.receive() => match change? {
                    Change::Plan(plan) => state.plan = plan,
                    Change::Cancel => return Ok(state.invoices),
                },
            }
        }
    }
    // Events that were not received go to the next run.
    ctx.continue_as_new(&state)
}

async fn invoice(state: &Subscription) -> Result<String, StepError> {
    Ok(format!("invoice {} for {}", state.invoices + 1, state.plan))
}

pub fn staff(worker: Worker) -> Worker {
    worker.flow("subscription", subscription)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use eddyline::testing::TestEngine;

    #[tokio::test]
    async fn thirty_months_pass_in_a_moment() {
        let t = TestEngine::start(staff).await;
        let state = Subscription { customer: "ada".to_owned(), plan: "basic".to_owned(), invoices: 0 };
        let run = t.run("subscription", state).await;
        run.waits_at("month").await;
        t.publish("subscription.changed", "ada", Change::Plan("pro".to_owned())).await;
        t.advance(30 * MONTH).await;
        t.publish("subscription.changed", "ada", Change::Cancel).await;
        assert_eq!(run.result::<u32>().await.unwrap(), 31, "one at once, and one after each month");
        let steps = run.steps().await;
        let second = steps.iter().find(|step| step.name == "invoice#2").unwrap();
        assert_eq!(second.output, Some("invoice 2 for pro".into()));
        t.stop().await;
    }
}
