//! Repeat: rounds of a group, each with its own activations, so nothing is ever reset.

use super::{Decider, Done, Halt, Work};
use crate::failure::{Failure, kind};
use crate::ids::ActId;
use crate::record::Scheduled;
use crate::run::{Activations, End, Inside, Place, State, What};
use eddyline_language::data::Data;
use eddyline_language::flow::{Action, Repeat, Test};

impl Decider<'_> {
    pub(super) fn begin_repeat(&mut self, id: ActId, repeat: &Repeat) -> Done {
        let state = match &repeat.state {
            None => Data::null(),
            Some(template) => match self.fill_in(id, template)? {
                Ok(state) => self.keep(state),
                Err(failure) => return self.fail(id, failure),
            },
        };
        self.scheduled(id, Scheduled::Repeat {});
        let what = What::Repeat { round: 0, state };
        self.edit(id).state = State::Open(Inside { open: 0, closing: None, what });
        self.next_round(id, repeat, 0, Data::null())
    }

    /// Starts the round `index`, or ends the step with the last round's output.
    fn next_round(&mut self, id: ActId, repeat: &Repeat, index: u32, last: Data) -> Done {
        if let Inside { closing: Some(_), .. } = self.inside_mut(id)? {
            self.agenda.push_back(Work::Close(id));
            return Ok(());
        }
        if let What::Repeat { round, .. } = &mut self.inside_mut(id)?.what {
            *round = index;
        }
        if let Test::While(condition) = &repeat.test {
            match self.test_inside(id, condition)? {
                Ok(true) => {}
                Ok(false) => return self.end(id, End::Completed(last)),
                Err(failure) => return self.fail(id, failure),
            }
        }
        if index >= repeat.max {
            let wanted = match &repeat.test {
                Test::While(condition) => format!("`while: {}` is still true", condition.source()),
                Test::Until(condition) => format!("`until: {}` is still false", condition.source()),
            };
            let message = format!("{wanted} after {index} rounds, the most that `max` allows");
            return self.fail(id, Failure::new(kind::MAX_ROUNDS, message));
        }
        let Action::Group(scope) = self.step(id)?.action else {
            return Err(Halt::Bug(format!("{} repeats but is not a group", self.name_of(id))));
        };
        self.inside_mut(id)?.open += 1;
        let round = self.create(Place::Round { of: id, index });
        self.scheduled(round, Scheduled::Round {});
        self.agenda.push_back(Work::Open { of: round, scope });
        Ok(())
    }

    pub(super) fn round_ended(&mut self, round: ActId, of: ActId, index: u32) -> Done {
        let inside = self.inside_mut(of)?;
        inside.open -= 1;
        if inside.closing.is_some() {
            self.agenda.push_back(Work::Close(of));
            return Ok(());
        }
        let Some(repeat) = &self.step(of)?.repeat else { return Ok(()) };
        let output = match self.at(round).end() {
            Some(End::Completed(output)) => output.clone(),
            Some(End::Failed(failure)) => {
                let failure = failure.clone().within(&self.name_of(round));
                return self.fail(of, failure);
            }
            // Skipped or cancelled by hand: no output.
            _ => Data::null(),
        };
        if let Test::Until(condition) = &repeat.test {
            match self.test_inside(round, condition)? {
                Ok(true) => return self.end(of, End::Completed(output)),
                Ok(false) => {}
                Err(failure) => return self.fail(of, failure),
            }
        }
        if let Some(next) = &repeat.next {
            let next = match self.fill_in_inside(round, next)? {
                Ok(next) => self.keep(next),
                Err(failure) => return self.fail(of, failure),
            };
            if let What::Repeat { state, .. } = &mut self.inside_mut(of)?.what {
                *state = next;
            }
        }
        self.next_round(of, repeat, index + 1, output)
    }
}
