//! Counts the bytes of a message that a socket has only partly read, in the same budget as request bodies. Otherwise
//! sockets that send the first part of large messages and never the rest would fill the memory. A complete message
//! keeps its reservation until it is handled.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::memory_budget::Reservation;

/// How much a socket reads between two checks of the budget.
const STEP_BYTES: usize = 64 << 10;
/// How long a message waits for the budget before its socket is closed.
pub(super) const BUDGET_WAIT: Duration = Duration::from_secs(2);
/// The size of a control frame without its payload.
const CONTROL_BYTES: usize = 6;
/// A message must be complete this long after its first byte, or its socket is closed.
const MESSAGE_TIME: Duration = Duration::from_secs(60);

/// Shared by a connection and the session it was upgraded to. It counts nothing before the upgrade.
#[derive(Debug, Default)]
pub(crate) struct ReadMeter(Mutex<Option<Metered>>);

#[derive(Debug)]
struct Metered {
    reserved: Reservation,
    /// Bytes of the current message.
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
    /// Starts counting.
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
        // In whole steps: a message of a few KiB reserves nothing.
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

    /// A control frame with this payload size arrived; it is not part of a message.
    pub fn control(&self, payload: usize) {
        if let Some(metered) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            metered.bytes = metered.bytes.saturating_sub(payload + CONTROL_BYTES);
        }
    }

    /// Call it when a message is complete. Returns the message's reservation; the next bytes belong to the next
    /// message.
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
        // A namespace can use a quarter: 1 MiB.
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
