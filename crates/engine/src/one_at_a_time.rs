//! Work that only one of several instances does at a time, such as retention.
//!
//! A document stores when the next round is due. The instance that advances it makes the round; the others check again
//! when the next one is due. If that instance dies, another makes the next round. A store of one process needs no
//! document.

use eddyline_machine::Millis;
use eddyline_store::{Expect, Namespace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::Result;
use crate::instance::Instance;

/// The kind of these documents; the id is the name of the loop.
const ROUND: &str = "round";

/// Whether this instance makes the next round.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Round {
    /// This instance makes it. Contains what the last round stored, if another instance may have made that one.
    Mine(Option<Value>),
    /// Another instance makes it; the next one is due in so many milliseconds.
    DueIn(Millis),
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct NextRound {
    due_at: Millis,
    left: Value,
}

impl Instance {
    /// Takes the next round of a loop if it is due. The one after it is due in `pause_ms`, unless
    /// [`Instance::finish_round`] says otherwise; a round that takes longer may be joined by another instance.
    pub(crate) async fn take_round(&self, name: &str, pause_ms: Millis) -> Result<Round> {
        if self.store.hears_others().is_none() {
            return Ok(Round::Mine(None));
        }
        let now = self.store.now().await?;
        let document = self.document(Some(&Namespace::default()), ROUND, name).await?;
        let expect = document.as_ref().map_or(Expect::Absent, |document| Expect::Revision(document.revision));
        let next: NextRound =
            document.and_then(|document| serde_json::from_value(document.body).ok()).unwrap_or_default();
        if next.due_at > now {
            return Ok(Round::DueIn(next.due_at - now));
        }
        let taken = json!(NextRound { due_at: now + pause_ms, left: next.left.clone() });
        match self.put(&Namespace::default(), ROUND, name, expect, Some(taken)).await? {
            true => Ok(Round::Mine(Some(next.left))),
            false => Ok(Round::DueIn(pause_ms)),
        }
    }

    /// Finishes a round that is not followed after its usual pause, or that leaves something to the next one, which is due
    /// after `pause_ms`.
    pub(crate) async fn finish_round(&self, name: &str, pause_ms: Millis, left: Value) -> Result<()> {
        if self.store.hears_others().is_some() {
            let next = json!(NextRound { due_at: self.store.now().await? + pause_ms, left });
            self.put(&Namespace::default(), ROUND, name, Expect::Any, Some(next)).await?;
        }
        Ok(())
    }
}
