//! Delays, deadlines, back-offs and gates that open by time.

use eddyline_machine::{Input, Millis};
use eddyline_store::{Change, Due, DueItem, Taken};

use crate::chore::Chore;
use crate::error::Result;
use crate::instance::Instance;

pub(crate) struct Timers(pub Instance);

impl Chore for Timers {
    const NAME: &'static str = "timers";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let due = self.0.store.due(Due::Timers, self.0.config.due_batch).await?;
        let mut answers = Vec::with_capacity(due.items.len());
        for item in due.items {
            if let DueItem::Timer { run, timer, .. } = item {
                let taken = Some(Taken::Timer(timer.key, timer.due));
                answers.push(self.0.committing.hand_in(run, vec![Input::Due(timer.key)], taken, None).await?);
            }
        }
        self.0.wait_for(answers).await;
        Ok(due.next_in)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Timers)
    }

    fn at_latest_ms(&self) -> Millis {
        self.0.config.poll_ms
    }
}
