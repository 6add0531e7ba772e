//! Fires due timers: delays, deadlines, back-offs and timed gates.

use eddyline_machine::{Input, Millis, TimerKey};
use eddyline_store::{Change, Consumed, Due, DueItem};

use crate::chore::Chore;
use crate::error::Result;
use crate::in_flight::InFlight;
use crate::instance::Instance;

pub(crate) struct Timers {
    instance: Instance,
    in_flight: InFlight<(TimerKey, Millis)>,
}

impl Timers {
    pub fn new(instance: Instance) -> Timers {
        let in_flight = InFlight::new(&instance);
        Timers { instance, in_flight }
    }
}

impl Chore for Timers {
    const NAME: &'static str = "timers";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let due = self.in_flight.due(&self.instance, Due::Timers).await?;
        for item in due.items {
            if let DueItem::Timer { ns, run, timer } = item {
                let (key, input) = ((timer.key, timer.due), Input::Due(timer.key));
                let taken = Consumed::Timer(timer.key, timer.due);
                self.in_flight.hand_in(&self.instance, ns, (run, key), input, taken).await?;
            }
        }
        Ok(due.next_in)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Timers)
    }

    async fn work_between_rounds(&mut self) {
        self.in_flight.until_more(&self.instance).await;
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.poll_ms()
    }
}
