//! The one rule of readiness: one token per arm, one decision per activation, as soon as the answer is certain.

use super::{Decider, Done, Halt, Work};
use crate::ids::ActId;
use crate::record::Skipped;
use crate::run::{Activations, GateState, Place, State, Token};
use eddyline_language::flow::{Join, Source};

impl Decider<'_> {
    /// Sets the token of an arm.
    pub(super) fn set_token(&mut self, target: ActId, arm: usize, live: bool) -> Done {
        let join = self.step(target)?.join;
        let scope_open = self.at(target).parent().is_some_and(|scope| !self.is_closing(scope));
        let activation = self.edit(target);
        let undecided = matches!(activation.state, State::Waiting) && scope_open;
        match activation.arms.get_mut(arm) {
            Some(token @ Token::Open) => {
                *token = match (undecided, live) {
                    (true, true) => Token::Live,
                    (true, false) => Token::Dead,
                    (false, true) => Token::LateLive,
                    (false, false) => Token::LateDead,
                }
            }
            other => {
                let other = other.copied();
                return Err(Halt::Bug(format!("arm {arm} of {} got a second token: {other:?}", self.name_of(target))));
            }
        }
        if undecided && let Some(ready) = verdict(join, &activation.arms) {
            activation.state = State::Certain { ready };
            self.agenda.push_back(Work::Decide(target));
        }
        Ok(())
    }

    /// Sets the tokens of the arms that subscribe to an event of a scope.
    pub(super) fn notify_subscribers(&mut self, scope: ActId, event: usize, live: bool) -> Done {
        let Some(definition) = self.scope_of(scope) else { return Ok(()) };
        for watcher in &self.graph()?.scope(definition).events[event].subscribers {
            let target = self.in_scope(scope, watcher.step)?;
            self.set_token(target, watcher.arm, live)?;
        }
        Ok(())
    }

    /// The arms are decided: evaluate `if`, then the gate, then the action; or skip.
    pub(super) fn decided(&mut self, id: ActId) -> Done {
        let State::Certain { ready } = self.at(id).state else { return Ok(()) };
        if self.at(id).parent().is_some_and(|scope| self.is_closing(scope)) {
            // The sweep in progress cancels it.
            return Ok(());
        }
        self.header.begun = true;
        if !ready {
            return self.skip(id, Skipped::Arms);
        }
        let step = self.step(id)?;
        if let Join::AtLeast { cancel_rest: true, .. } = step.join {
            self.cancel_rest(id)?;
        }
        if self.take_over(id)? {
            return Ok(());
        }
        if let Some(condition) = &step.condition {
            match self.test(id, condition)? {
                Ok(true) => {}
                Ok(false) => return self.skip(id, Skipped::If),
                Err(failure) => return self.fail(id, failure),
            }
        }
        let Some(gate) = &step.gate else { return self.begin(id) };
        match self.take_over_gate(id) {
            Some(payload) => {
                self.leave_gate(id, GateState::Opened(payload));
                self.begin(id)
            }
            None => self.arrive(id, gate),
        }
    }

    /// Cancels the steps behind the arms that were not needed.
    fn cancel_rest(&mut self, id: ActId) -> Done {
        let Place::Step { scope, .. } = self.at(id).place else { return Ok(()) };
        for (arm, token) in self.step(id)?.arms.iter().zip(self.at(id).arms.clone()) {
            if let (Source::Step(step, _), Token::Open | Token::LateLive | Token::LateDead) = (arm.source, token) {
                let source = self.in_scope(scope, step)?;
                self.agenda.push_back(Work::Cancel(source));
            }
        }
        Ok(())
    }
}

/// Whether the tokens determine that an activation is ready, or never will be.
fn verdict(join: Join, arms: &[Token]) -> Option<bool> {
    let count = |wanted| arms.iter().filter(|token| **token == wanted).count();
    let (live, dead, open) = (count(Token::Live), count(Token::Dead), count(Token::Open));
    match join {
        Join::All if dead > 0 => Some(false),
        Join::All => (open == 0).then_some(true),
        Join::Any if live > 0 => Some(true),
        Join::Any => (open == 0).then_some(false),
        Join::Some => (open == 0).then_some(live > 0),
        Join::AtLeast { n, .. } if live >= n as usize => Some(true),
        Join::AtLeast { n, .. } => (live + open < n as usize).then_some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_is_made_as_soon_as_it_is_certain_and_no_sooner() {
        let at_least = |n| Join::AtLeast { n, cancel_rest: false };
        for (join, arms, expected) in [
            (Join::All, "LL", Some(true)),
            (Join::All, "LO", None),
            (Join::All, "DO", Some(false)),
            (Join::Any, "OO", None),
            (Join::Any, "DO", None),
            (Join::Any, "DL", Some(true)),
            (Join::Any, "DD", Some(false)),
            (Join::Some, "LO", None),
            (Join::Some, "LD", Some(true)),
            (Join::Some, "DD", Some(false)),
            (at_least(2), "LOO", None),
            (at_least(2), "LLO", Some(true)),
            (at_least(2), "LDD", Some(false)),
            (at_least(2), "DOO", None),
        ] {
            let tokens: Vec<_> = arms
                .chars()
                .map(|arm| match arm {
                    'L' => Token::Live,
                    'D' => Token::Dead,
                    _ => Token::Open,
                })
                .collect();
            assert_eq!(verdict(join, &tokens), expected, "{join:?} {arms}");
        }
    }
}
