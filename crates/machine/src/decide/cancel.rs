//! Cancel: open activations end cancelled, then the run ends.

use std::collections::BTreeSet;

use super::report::applied;
use super::{Decider, Done};
use crate::ids::{ActId, Fence};
use crate::record::{ActName, Entry};
use crate::run::{Activations, End, Phase, State};
use crate::transition::{Answer, Input, MessageBody};

impl Decider<'_> {
    pub(super) fn cancel_run(&mut self, by: &str, reason: Option<&str>) -> Done<Answer> {
        let root = ActId(0);
        if let Some(next) = self.header.continued_as {
            // Another run continues it: forward the cancel.
            let input = Input::Cancel { by: by.to_owned(), reason: reason.map(str::to_owned) };
            self.send(next, format!("cancel:{}", self.header.run), MessageBody::Input(Box::new(input)));
            return applied();
        }
        match self.header.phase {
            Phase::Ended => {
                return Ok(Answer::Conflict(format!("the run has ended: {}", self.header.status().as_str())));
            }
            Phase::Undoing | Phase::Finally => return Ok(Answer::Conflict("the run is already ending".to_owned())),
            Phase::New | Phase::Delayed | Phase::Going => {}
        }
        let waits = matches!(self.at(root).state, State::Ready);
        if !waits && self.is_closing(root) {
            return Ok(Answer::Conflict("the run is already ending".to_owned()));
        }
        if self.leaving().is_some() {
            let message = "the run is already ending: its function may still undo its steps";
            return Ok(Answer::Conflict(message.to_owned()));
        }
        if let Some(grace) = self.cancel_grace() {
            return self.cancel_with_grace(by, reason, grace);
        }
        let reason = reason.map(str::to_owned);
        let (act, by, step_key, from) = (ActName::Cancel, by.to_owned(), None, None);
        self.record(Entry::Act { act, by, step_key, from, reason: reason.clone() });
        self.header.cancel_reason = reason;
        self.header.cancelling = true;
        match waits {
            true => self.end(root, End::Cancelled)?,
            false => self.close_early(root, End::Cancelled)?,
        }
        applied()
    }

    /// Ends the closed tasks that no worker has.
    pub(super) fn drained(&mut self, unclaimed: &[Fence]) -> Done<Answer> {
        let unclaimed: BTreeSet<Fence> = unclaimed.iter().copied().collect();
        let mut any = false;
        for id in (0..self.next_activation).map(ActId) {
            let State::Draining(fence) = self.at(id).state else { continue };
            if !unclaimed.contains(&fence) {
                continue;
            }
            if !self.room(1) {
                self.drain = true;
                break;
            }
            any = true;
            self.end(id, End::Cancelled)?;
        }
        if any { applied() } else { Ok(Answer::Nothing) }
    }
}
