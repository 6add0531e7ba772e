//! Spread: one activation per item, at most `max_parallel` at a time; the output is in item order.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Decider, Done, Halt, MAX_ITEMS, Work};
use crate::failure::{Failure, kind};
use crate::ids::ActId;
use crate::record::Scheduled;
use crate::run::{Activations, End, Inside, Place, State, What};
use eddyline_language::data::Data;
use eddyline_language::expr::Cost;
use eddyline_language::flow::{Action, Spread};

impl Decider<'_> {
    pub(super) fn begin_spread(&mut self, id: ActId, spread: &Spread) -> Done {
        let list = match self.list(id, &spread.list)? {
            Ok(list) => list,
            Err(failure) => return self.fail(id, failure),
        };
        let items = match &list {
            Data::Json(json) => json.as_array().map_or(0, Vec::len),
            Data::List(items) => items.len(),
            Data::Ref(_) | Data::Map(_) => {
                return Err(Halt::Bug("a spread over something that is not a list".to_owned()));
            }
        };
        if items > MAX_ITEMS {
            let message = format!("the list has {items} items, a spread takes at most {MAX_ITEMS}");
            return self.fail(id, Failure::new(kind::TOO_MANY_ITEMS, message));
        }
        let items = items as u32;
        self.scheduled(id, Scheduled::Spread { items });
        let list = self.keep(list);
        let what = What::Spread { list, items, next: 0, failed: 0 };
        self.edit(id).state = State::Open(Inside { open: 0, closing: None, what });
        self.agenda.push_back(Work::Close(id));
        Ok(())
    }

    /// Creates activations of items, up to `max_parallel` and within the limits of the transition.
    pub(super) fn fill(&mut self, id: ActId) -> Done {
        let step = self.step(id)?;
        let Some(spread) = &step.spread else { return Ok(()) };
        loop {
            let Some(Inside { open, closing: None, what: What::Spread { items, next, .. } }) = self.at(id).inside()
            else {
                return Ok(());
            };
            if next == items || *open >= spread.max_parallel {
                return Ok(());
            }
            if !self.room(2) {
                self.agenda.push_back(Work::Fill(id));
                return Ok(());
            }
            let index = *next;
            self.meter.next();
            let item = self.item(id, index)?;
            let inside = self.inside_mut(id)?;
            inside.open += 1;
            if let What::Spread { next, .. } = &mut inside.what {
                *next += 1;
            }
            let activation = self.create(Place::Item { of: id, index });
            let item = self.keep(item);
            self.edit(activation).item = Some(item);
            if !self.take_over(activation)? {
                self.enter(activation)?;
            }
            if matches!(step.action, Action::Group(_)) {
                // The item's contents come first, so that they count towards the limits.
                self.agenda.push_back(Work::Fill(id));
                return Ok(());
            }
        }
    }

    fn item(&mut self, id: ActId, index: u32) -> Done<Data> {
        let Some(Inside { what: What::Spread { list, .. }, .. }) = self.at(id).inside() else {
            return Err(Halt::Bug(format!("activation {id} is not a spread")));
        };
        let list = list.clone();
        let list = match &list {
            Data::Ref(stored) => self.value(*stored)?,
            other => other,
        };
        Ok(match list {
            Data::Json(json) => json.get(index as usize).cloned().unwrap_or(Value::Null).into(),
            Data::List(items) => items.get(index as usize).cloned().unwrap_or_else(Data::null),
            Data::Ref(_) | Data::Map(_) => Data::null(),
        })
    }

    pub(super) fn item_ended(&mut self, id: ActId, of: ActId) -> Done {
        let Some(spread) = &self.step(of)?.spread else { return Ok(()) };
        if let Some(End::Failed(failure)) = self.at(id).end() {
            let failure = failure.clone().within(&self.name_of(id));
            let inside = self.inside_mut(of)?;
            let What::Spread { failed, .. } = &mut inside.what else { return Ok(()) };
            *failed += 1;
            let failed = *failed;
            if !spread.collect {
                self.close_early(of, End::Failed(failure))?;
            } else if spread.max_failures.is_some_and(|max| failed > max) {
                let message =
                    format!("{failed} items failed, more than max_failures allows; the last: {}", failure.message);
                let mut too_many = Failure::new(kind::TOO_MANY_FAILURES, message);
                too_many.add(failure);
                self.close_early(of, End::Failed(too_many))?;
            }
        }
        self.count_end(of)?;
        self.agenda.push_back(Work::Fill(of));
        Ok(())
    }

    pub(super) fn end_spread(&mut self, id: ActId) -> Done {
        let collect = self.step(id)?.spread.as_ref().is_some_and(|spread| spread.collect);
        let Some(Inside { what: What::Spread { items, .. }, .. }) = self.at(id).inside() else { return Ok(()) };
        let items = *items;
        self.meter.add(Cost { steps: 4 * u64::from(items), bytes: 64 * u64::from(items), read: 0 });
        if self.meter.is_heavy() {
            // The decision is repeated elsewhere; only then the outputs are assembled.
            return Err(Halt::Heavy);
        }
        let mut outputs = Vec::with_capacity(items as usize);
        for index in 0..items {
            let end = self.part(id, index).and_then(|item| self.at(item).end());
            let (key, output) = match end {
                Some(End::Completed(output)) => ("output", output.clone()),
                Some(End::Failed(failure)) => ("error", json!(failure).into()),
                // Skipped by hand.
                _ => ("output", Data::null()),
            };
            outputs.push(if collect { Data::Map(Arc::new(vec![(Arc::from(key), output)])) } else { output });
        }
        self.end(id, End::Completed(Data::List(Arc::new(outputs))))
    }
}
