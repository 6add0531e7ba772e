//! A checkout: stock is reserved, a large order needs an approval (with a reminder every day), the card is charged, and if
//! anything fails for good, what was done is undone.

use std::time::Duration;

use eddyline::{FlowError, Retry, RunCtx, StepError, Worker};
use serde::{Deserialize, Serialize};

const DAY: Duration = Duration::from_secs(24 * 3_600);
/// Orders of at least this much need an approval.
const LARGE_CENTS: u64 = 100_000;
/// After this many reminders the order is given up.
const MAX_REMINDERS: u32 = 7;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    pub id: String,
    pub sku: String,
    pub cents: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    pub charge: String,
    pub approved_by: Option<String>,
    pub label: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Reservation {
    pub id: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Approval {
    pub ok: bool,
    pub by: String,
}

pub async fn checkout(ctx: RunCtx, order: Order) -> Result<Receipt, FlowError> {
    ctx.step("reserve", || reserve(&order)).undo(release).await?;
    let approved_by = if order.cents >= LARGE_CENTS { Some(approval(&ctx, &order).await?) } else { None };

    // The key is the same for every attempt, so that the card is charged once.
    let key = ctx.key("charge");
    let charge = ctx
        .step("charge", || charge(&order, &key))
        .retry(Retry::attempts(5).initial(Duration::from_secs(2)))
        .timeout(Duration::from_secs(30))
        .undo(refund)
        .await?;

    // Both at the same time: the label is printed by another worker.
    let (label, ()) = tokio::try_join!(
        ctx.call::<String>("print_label", &order),
        ctx.step("mail", || mail(format!("{} is on its way", order.id))),
    )?;
    Ok(Receipt { charge, approved_by, label })
}

/// Waits for a person, and reminds them every day.
async fn approval(ctx: &RunCtx, order: &Order) -> Result<String, FlowError> {
    let gate = ctx.webhook::<Approval>("approve").await?;
    ctx.step("ask", || mail(format!("please approve {}: {}", order.id, gate.url()))).await?;
    tokio::pin!(gate);
    for reminder in 1..=MAX_REMINDERS {
        tokio::select! {
            approval = &mut gate => {
                let Approval { ok, by } = approval?;
                return if ok { Ok(by) } else { Err(FlowError::permanent(format!("{by} said no")).kind("Refused")) };
            }
            day = ctx.sleep("patience", DAY) => day?,
        }
        ctx.step(("remind", reminder), || mail(format!("{} still waits for you", order.id))).await?;
    }
    Err(FlowError::permanent("nobody answered").kind("NoAnswer"))
}

// What stands for the services of a shop.

async fn reserve(order: &Order) -> Result<Reservation, StepError> {
    Ok(Reservation { id: format!("{} for {}", order.sku, order.id) })
}

async fn release(reservation: Reservation) -> Result<(), StepError> {
    drop(reservation.id);
    Ok(())
}

async fn charge(order: &Order, key: &str) -> Result<String, StepError> {
    match order.cents {
        0 => Err(StepError::permanent("there is nothing to charge").kind("BadAmount")),
        cents => Ok(format!("{cents} cents with key {key}")),
    }
}

async fn refund(charge: String) -> Result<(), StepError> {
    drop(charge);
    Ok(())
}

async fn mail(text: String) -> Result<(), StepError> {
    drop(text);
    Ok(())
}

pub fn staff(worker: Worker) -> Worker {
    worker
        .flow("checkout", checkout)
        .handler("print_label", |_, order: Order| async move { Ok::<_, StepError>(format!("label for {}", order.id)) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use eddyline::Error;
    use eddyline::testing::TestEngine;

    fn order(cents: u64) -> Order {
        Order { id: "o-7".to_owned(), sku: "lamp".to_owned(), cents }
    }

    #[tokio::test]
    async fn a_small_order_goes_through_at_once() {
        let t = TestEngine::shaking(staff).await;
        let receipt: Receipt = t.run("checkout", order(500)).await.result().await.unwrap();
        assert_eq!((receipt.approved_by, receipt.label.as_str()), (None, "label for o-7"));
        t.stop().await;
    }

    #[tokio::test]
    async fn a_large_order_waits_for_an_approval_and_reminds_every_day() {
        let t = TestEngine::start(staff).await;
        let run = t.run("checkout", order(500_000)).await;
        run.waits_at("approve").await;
        t.advance(3 * DAY).await;
        let names = run.names().await;
        assert!(names.contains(&"remind[3]".to_owned()) && !names.contains(&"remind[4]".to_owned()), "{names:?}");
        run.open("approve", Approval { ok: true, by: "Grace".to_owned() }).await;
        assert_eq!(run.result::<Receipt>().await.unwrap().approved_by.as_deref(), Some("Grace"));
        t.stop().await;
    }

    #[tokio::test]
    async fn what_was_done_is_undone_when_nobody_answers_or_a_label_cannot_be_printed() {
        let t = TestEngine::start(staff).await;
        let run = t.run("checkout", order(500_000)).await;
        let Err(Error::RunFailed { failure, .. }) = run.result::<Receipt>().await else { panic!("it fails") };
        assert_eq!(failure.kind, "NoAnswer");
        assert!(run.names().await.contains(&"undo:reserve".to_owned()));

        t.stub("print_label", |_| async { Err::<(), _>(StepError::permanent("out of paper").kind("NoPaper")) });
        let run = t.run("checkout", order(500)).await;
        let Err(Error::RunFailed { failure, .. }) = run.result::<Receipt>().await else { panic!("it fails") };
        assert_eq!(failure.kind, "NoPaper");
        let names = run.names().await;
        let undone: Vec<&String> = names.iter().filter(|name| name.starts_with("undo:")).collect();
        assert_eq!(undone, ["undo:charge", "undo:reserve"], "the latest first");
        t.stop().await;
    }

    #[tokio::test]
    async fn the_card_is_charged_once_though_the_worker_dies_after_the_charge() {
        let t = TestEngine::start(staff).await;
        t.lose_worker_after("charge");
        let receipt: Receipt = t.run("checkout", order(500)).await.result().await.unwrap();
        assert!(receipt.charge.ends_with("/charge"), "the key is that of the first attempt: {}", receipt.charge);
        t.stop().await;
    }
}
