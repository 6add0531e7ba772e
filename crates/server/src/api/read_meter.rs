//! What a socket has read of a message that is not complete yet. It counts as a body does, in the same budget: sockets that
//! send the first part of large messages and never the rest would fill the memory otherwise. A complete message takes its
//! reservation along, until it is handled.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::memory_budget::Reservation;

/// A socket reads this much between two looks at the budget.
const STEP_BYTES: usize = 64 << 10;
/// A message that finds the budget used up waits this long before its socket is closed.
pub(super) const BUDGET_WAIT: Duration = Duration::from_secs(2);
/// What a control frame has beside its payload.
const CONTROL_BYTES: usize = 6;
/// A message is complete this long after its first byte, or its socket is closed.
const MESSAGE_TIME: Duration = Duration::from_secs(60);

/// Shared by a connection and the session that it was upgraded to. It counts nothing until then.
#[derive(Debug, Default)]
pub(crate) struct ReadMeter(Mutex<Option<Metered>>);

#[derive(Debug)]
struct Metered {
    reserved: Reservation,
    /// Of the message that is being read.
    bytes: usize,
    begun: Instant,
    full_since: Option<Instant>,
}

/// Whether more may be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MayRead {
    Now,
    Later,
    Never,
}

impl ReadMeter {
    /// Counts from now on.
    pub fn begin(&self, reserved: Reservation) {
        let metered = Metered { reserved, bytes: 0, begun: Instant::now(), full_since: None };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(metered);
    }

    pub fn may_read(&self) -> MayRead {
        let mut metered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(metered) = metered.as_mut() else { return MayRead::Now };
        if metered.bytes > 0 && metered.begun.elapsed() > MESSAGE_TIME {
            return MayRead::Never;
        }
        // In whole steps: a message of a few KiB takes nothing of the budget.
        match metered.reserved.try_grow_to(metered.bytes / STEP_BYTES * 2 * STEP_BYTES) {
            Ok(()) => {
                metered.full_since = None;
                MayRead::Now
            }
            Err(_) if metered.full_since.get_or_insert_with(Instant::now).elapsed() > BUDGET_WAIT => MayRead::Never,
            Err(_) => MayRead::Later,
        }
    }

    pub fn came(&self, bytes: usize) {
        if let Some(metered) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            if metered.bytes == 0 {
                metered.begun = Instant::now();
            }
            metered.bytes += bytes;
        }
    }

    /// A control frame with so many bytes of payload came: it is no part of a message.
    pub fn control(&self, payload: usize) {
        if let Some(metered) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            metered.bytes = metered.bytes.saturating_sub(payload + CONTROL_BYTES);
        }
    }

    /// A message is complete: what comes now is of the next. Returns what the message has of the budget.
    pub fn complete(&self) -> Option<Reservation> {
        let mut metered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let metered = metered.as_mut()?;
        metered.bytes = 0;
        Some(metered.reserved.hand_over())
    }
}

#[cfg(test)]
mod tests {
    use eddyline_store::Namespace;

    use super::super::memory_budget::MemoryBudget;
    use super::*;

    #[test]
    fn a_message_is_counted_until_it_is_handled() {
        let (budget, ns) = (MemoryBudget::new(4 << 20, 4), Namespace::default());
        let meters = [ReadMeter::default(), ReadMeter::default()];
        assert_eq!(meters[0].may_read(), MayRead::Now, "no socket yet");
        meters.iter().for_each(|meter| meter.begin(budget.reservation(&ns)));
        // A namespace may use a quarter: a megabyte.
        while meters[0].may_read() == MayRead::Now {
            meters[0].came(8 << 10);
            assert!(meters[1].may_read() == MayRead::Now, "it has read nothing");
            if meters[0].0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|it| it.bytes > 1 << 20)
            {
                break;
            }
        }
        meters[1].came(STEP_BYTES);
        assert_eq!(meters[1].may_read(), MayRead::Later);
        let complete = meters[0].complete();
        assert_eq!(meters[1].may_read(), MayRead::Later, "the message is not handled yet");
        drop(complete);
        assert_eq!(meters[1].may_read(), MayRead::Now);
    }
}
