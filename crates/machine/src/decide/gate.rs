//! Gates: arrival, opening (possibly early, only once), time, timeout, cancelling.

use serde_json::Value;

use super::{Decider, Done};
use crate::failure::{Failure, kind};
use crate::ids::{ActId, Millis};
use crate::record::{ActName, Entry, GateReason, Skipped, TriggeredBy};
use crate::run::{Activations, End, GateState, Place, State};
use crate::transition::{Answer, Due, EventWait, GateArrival, GateChange, OpenedBy, ReportResult, TimerKind};
use eddyline_language::data::Data;
use eddyline_language::flow::{Gate, OnTimeout, Since, Waits};
use eddyline_language::time::span;

/// What an activation waits for at its gate, fully evaluated.
pub(super) struct Arrival {
    pub reason: GateReason,
    pub event: Option<(String, Option<String>, Since)>,
    pub due: Option<Due>,
}

impl Decider<'_> {
    /// An activation arrives at its gate.
    pub(super) fn arrive(&mut self, id: ActId, gate: &Gate) -> Done {
        let timeout = gate.timeout_ms.map(Due::After);
        let arrival = match &gate.waits {
            Waits::Time { ms } => Arrival { reason: GateReason::Time, event: None, due: Some(Due::After(*ms)) },
            Waits::Until(moment) => match self.moment(id, moment)? {
                Ok(moment) => Arrival { reason: GateReason::Time, event: None, due: Some(Due::At(moment)) },
                Err(failure) => return self.fail(id, failure),
            },
            Waits::Webhook => Arrival { reason: GateReason::Webhook, event: None, due: timeout },
            Waits::Manual => Arrival { reason: GateReason::Manual, event: None, due: timeout },
            Waits::Event { name, key, since } => {
                let key = match key {
                    None => None,
                    Some(key) => match self.canonical(id, key)? {
                        Ok(key) => Some(key),
                        Err(failure) => return self.fail(id, failure),
                    },
                };
                Arrival { reason: GateReason::Event, event: Some((name.clone(), key, *since)), due: timeout }
            }
        };
        self.wait_at_gate(id, arrival);
        match &self.at(id).gate {
            GateState::Ahead { early: Some((payload, by)) } => self.pass_gate(id, payload.clone(), *by),
            _ => Ok(()),
        }
    }

    /// Records the arrival; the activation waits unless the gate was opened early.
    pub(super) fn wait_at_gate(&mut self, id: ActId, arrival: Arrival) {
        let Arrival { reason, event, due } = arrival;
        let gate_id = self.gate_id(id);
        let name = self.name_of(id);
        let (for_ms, until_ms) = match due {
            Some(Due::After(ms)) => (Some(ms), None),
            Some(Due::At(ms)) => (None, Some(ms)),
            None => (None, None),
        };
        self.record(Entry::AwaitScheduled {
            step_key: name.clone(),
            reason,
            token: gate_id,
            for_ms,
            until_ms,
            channel: event.as_ref().map(|(name, ..)| name.clone()),
            key: event.as_ref().and_then(|(_, key, _)| key.clone()),
        });
        if matches!(self.at(id).gate, GateState::Ahead { early: Some(_) }) {
            return;
        }
        let token = self.at(id).gate_token.clone();
        let taken = event.as_ref().map(|(name, key, _)| taken_key(name, key.as_deref()));
        let timed = due.is_some();
        let after = taken.as_ref().and_then(|taken| self.cursor(taken));
        let activation = self.edit(id);
        activation.state = State::Gated;
        activation.gate = GateState::Waiting { event: taken, after, timed, manual: reason == GateReason::Manual };
        if let Some(due) = due {
            self.set_timer(id, TimerKind::Gate, due);
        }
        let timeout_ms = for_ms.or(until_ms.map(|until| until.saturating_sub(self.env.now).max(0)));
        let event = event.map(|(name, key, since)| {
            let since = match since {
                Since::Run => Due::At(self.header.events_since),
                Since::Ago { ms } => Due::After(-ms),
            };
            EventWait { name, key, since, after }
        });
        self.gates.push(GateChange::Arrive(Box::new(GateArrival {
            id: gate_id,
            name,
            token,
            reason,
            event,
            timeout_ms,
        })));
    }

    pub(super) fn open_gate(&mut self, id: ActId, by: &OpenedBy, payload: &Data) -> Done<Answer> {
        if !self.exists(id) {
            return Ok(Answer::Invalid("there is no such gate".to_owned()));
        }
        let activation = self.at(id);
        let name = self.name_of(id);
        match &activation.gate {
            GateState::Ahead { early: None } => {
                let payload = self.keep(payload.clone());
                self.edit(id).gate = GateState::Ahead { early: Some((payload, by.recorded())) };
                Ok(Answer::Applied(ReportResult::default()))
            }
            GateState::Waiting { after: Some(after), .. } if matches!(by, OpenedBy::Event { position } if position <= after) =>
            {
                // An earlier gate of the run consumed this event or a later one.
                Ok(Answer::Nothing)
            }
            GateState::Waiting { event, .. } => {
                if let (Some(event), OpenedBy::Event { position }) = (event.clone(), by) {
                    let last = self.cursor(&event).unwrap_or(0).max(*position);
                    self.cursors.insert(event, last);
                    self.events_taken.push(*position);
                }
                let payload = self.keep(payload.clone());
                self.pass_gate(id, payload, by.recorded())?;
                Ok(Answer::Applied(ReportResult::default()))
            }
            GateState::Ahead { .. } | GateState::Opened(_) => {
                Ok(Answer::Conflict(format!("the gate of {name} is already open; a gate opens only once")))
            }
            GateState::TimedOut => Ok(Answer::Conflict(format!("the gate of {name} has timed out"))),
            GateState::Cancelled => {
                Ok(Answer::Conflict(format!("the gate of {name} {}", closed_because(activation.end()))))
            }
            GateState::None => Ok(Answer::Invalid(format!("{name} has no gate"))),
        }
    }

    /// The gate's timer fired: a time gate opens, any other times out.
    pub(super) fn gate_due(&mut self, id: ActId) -> Done<Answer> {
        let GateState::Waiting { timed: true, .. } = self.at(id).gate else { return Ok(Answer::Nothing) };
        let gate = match &self.at(id).place {
            Place::Step { .. } => self.step(id)?.gate.as_ref(),
            _ => None,
        };
        let by_time = match gate {
            Some(gate) => matches!(gate.waits, Waits::Time { .. } | Waits::Until(_)),
            None => self.is_sleep(id),
        };
        if by_time {
            self.pass_gate(id, Data::null(), TriggeredBy::Timeout)?;
            return Ok(Answer::Applied(ReportResult::default()));
        }
        let on_timeout = gate.map_or(OnTimeout::Fail, |gate| gate.on_timeout);
        let after = gate.and_then(|gate| gate.timeout_ms);
        self.leave_gate(id, GateState::TimedOut);
        let (token, step_key) = (self.gate_id(id), self.name_of(id));
        self.record(Entry::AwaitTimeout { step_key, token });
        match on_timeout {
            OnTimeout::Skip => self.skip(id, Skipped::Timeout)?,
            OnTimeout::Continue => self.begin(id)?,
            OnTimeout::Fail => self.fail(id, timed_out(after))?,
        }
        Ok(Answer::Applied(ReportResult::default()))
    }

    /// Cancels a gate by hand: its activation fails.
    pub(super) fn cancel_gate(&mut self, id: ActId, by: &str) -> Done<Answer> {
        if !self.exists(id) || self.at(id).gate == GateState::None {
            return Ok(Answer::Invalid("there is no such gate".to_owned()));
        }
        let name = self.name_of(id);
        match self.at(id).gate {
            GateState::Waiting { .. } => {}
            GateState::Ahead { .. } => {
                return Ok(Answer::Conflict(format!("the run has not reached the gate of {name} yet")));
            }
            _ => return Ok(Answer::Conflict(format!("nothing waits at the gate of {name} any more"))),
        }
        let (act, step_key) = (ActName::CancelGate, Some(name.clone()));
        self.record(Entry::Act { act, by: by.to_owned(), step_key, from: None, reason: None });
        self.leave_gate(id, GateState::Cancelled);
        let token = self.gate_id(id);
        self.record(Entry::AwaitCancelled { step_key: name, token });
        self.fail(id, Failure::new(kind::GATE_CANCELLED, format!("its gate was cancelled by {by}")))?;
        Ok(Answer::Applied(ReportResult::default()))
    }

    /// The position of the last event consumed under that name and key.
    fn cursor(&self, taken: &str) -> Option<u64> {
        self.cursors.get(taken).or_else(|| self.run.cursors.get(taken)).copied()
    }

    fn pass_gate(&mut self, id: ActId, payload: Data, by: TriggeredBy) -> Done {
        self.leave_gate(id, GateState::Opened(payload.clone()));
        let (token, step_key) = (self.gate_id(id), self.name_of(id));
        self.record(Entry::AwaitTriggered { step_key, by, token });
        match &self.at(id).place {
            Place::Memo(_) => self.end(id, End::Completed(payload)),
            _ => self.begin(id),
        }
    }

    pub(super) fn leave_gate(&mut self, id: ActId, gate: GateState) {
        if matches!(self.at(id).gate, GateState::Waiting { timed: true, .. }) {
            self.clear_timer(id, TimerKind::Gate);
        }
        let closed = GateChange::Close { id: self.gate_id(id) };
        self.gates.push(closed);
        let activation = self.edit(id);
        activation.gate = gate;
        activation.state = State::Ready;
    }
}

/// The key in [`crate::Run::cursors`] for an event's name and key.
fn taken_key(name: &str, key: Option<&str>) -> String {
    format!("{name} {}", key.unwrap_or(""))
}

/// The inverse of [`taken_key`]: the event's name and key.
pub(crate) fn name_and_key(taken: &str) -> (Option<String>, Option<Value>) {
    match taken.split_once(' ') {
        Some((name, key)) => (Some(name.to_owned()), serde_json::from_str(key).ok()),
        None => (Some(taken.to_owned()), None),
    }
}

fn timed_out(after: Option<Millis>) -> Failure {
    let message = match after {
        Some(ms) => format!("nothing opened its gate within {}", span(ms)),
        None => "nothing opened its gate in time".to_owned(),
    };
    Failure::new(kind::GATE_TIMEOUT, message)
}

fn closed_because(end: Option<&End>) -> &'static str {
    match end {
        Some(End::Completed(_)) => "is closed: the step was completed by hand",
        Some(End::Failed(failure)) if failure.kind == kind::GATE_CANCELLED => "was cancelled",
        Some(End::Failed(_)) => "is closed: the step failed before it was opened",
        Some(End::Skipped(_)) => "is closed: the step was skipped",
        Some(End::Cancelled) | None => "is closed: the step was cancelled",
    }
}
