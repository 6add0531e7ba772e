//! Evaluation of expressions: which names they see, depending on their place in the run.

use std::collections::BTreeSet;
use std::rc::Rc;

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::{Decider, Done, Halt};
use crate::failure::{Failure, kind};
use crate::ids::{ActId, Millis, ScopeId, ValueId};
use crate::record::Skipped;
use crate::run::{Activation, Activations, End, GateState, Inside, Phase, Place, RunOutcome, What};
use eddyline_language::data::{Data, Unbuilt, ValueRef};
use eddyline_language::expr::{Expr, Fuel, Names, Stop, Table, Template, Text, Val};
use eddyline_language::flow::{Action, Graph};

/// The largest key of an event, a limit or a queue.
pub const MAX_KEY_BYTES: usize = 1024;

/// The end of a step that was never created.
static UNOPENED: End = End::Skipped(Skipped::Act);

/// A result, or the failure of the evaluating activation.
type Evaluated<T> = Done<Result<T, Failure>>;

impl Decider<'_> {
    /// Evaluates a condition in the activation's scope.
    pub(super) fn test(&mut self, at: ActId, expr: &Expr) -> Evaluated<bool> {
        self.evaluate(at, false, |names, fuel| expr.test(names, fuel))
    }

    /// Evaluates a condition in the scope inside the activation.
    pub(super) fn test_inside(&mut self, at: ActId, expr: &Expr) -> Evaluated<bool> {
        self.evaluate(at, true, |names, fuel| expr.test(names, fuel))
    }

    pub(super) fn list(&mut self, at: ActId, expr: &Expr) -> Evaluated<Data> {
        self.evaluate(at, false, |names, fuel| expr.list(names, fuel))
    }

    pub(super) fn moment(&mut self, at: ActId, expr: &Expr) -> Evaluated<Millis> {
        self.evaluate(at, false, |names, fuel| expr.time(names, fuel))
    }

    pub(super) fn fill_in(&mut self, at: ActId, template: &Template) -> Evaluated<Data> {
        self.evaluate(at, false, |names, fuel| template.eval(names, fuel))
    }

    pub(super) fn fill_in_inside(&mut self, at: ActId, template: &Template) -> Evaluated<Data> {
        self.evaluate(at, true, |names, fuel| template.eval(names, fuel))
    }

    pub(super) fn text(&mut self, at: ActId, template: &Template) -> Evaluated<String> {
        self.evaluate(at, false, |names, fuel| template.text(names, fuel))
    }

    /// Evaluates a key to canonical JSON.
    pub(super) fn canonical(&mut self, at: ActId, expr: &Expr) -> Evaluated<String> {
        match self.evaluate(at, false, |names, fuel| expr.data(names, fuel))? {
            Ok(data) => Ok(self.canonical_data(&data)?.map_err(|failure| Failure {
                message: format!("`{}`: {}", expr.source(), failure.message),
                ..failure
            })),
            Err(failure) => Ok(Err(failure)),
        }
    }

    pub(super) fn canonical_data(&self, data: &Data) -> Evaluated<String> {
        if data.bytes(MAX_KEY_BYTES) > MAX_KEY_BYTES {
            let message = format!("a key has at most {MAX_KEY_BYTES} bytes as JSON");
            return Ok(Err(Failure::new(kind::EXPRESSION, message)));
        }
        match data.materialise(&|id| self.loaded(id)) {
            Ok(value) => Ok(Ok(canonical_json(value))),
            Err(Unbuilt::Missing(missing)) => Err(self.need(missing)),
            Err(too_large @ Unbuilt::TooLarge) => Ok(Err(Failure::new(kind::EXPRESSION, too_large.to_string()))),
        }
    }

    /// Reads a stored value outside an expression. It counts towards the transition's budget.
    pub(super) fn value(&mut self, stored: ValueRef) -> Done<&Data> {
        self.meter.read(stored);
        self.loaded(stored.id).ok_or_else(|| self.need(vec![stored]))
    }

    /// Reports missing values together with all others read so far, so that the caller knows which ones to keep.
    fn need(&self, missing: Vec<ValueRef>) -> Halt {
        let mut needed: BTreeSet<ValueRef> = missing.into_iter().collect();
        needed.extend(self.meter.values_read().filter(|stored| !self.values.contains_key(&stored.id)));
        Halt::Need(needed.into_iter().collect())
    }

    fn loaded(&self, id: ValueId) -> Option<&Data> {
        self.values.get(&id).or_else(|| self.run.values.get(&id))
    }

    /// Evaluates in the scope of an activation or inside it, and counts the cost.
    fn evaluate<T>(
        &mut self,
        at: ActId,
        inside: bool,
        evaluate: impl FnOnce(&dyn Names<'_>, &mut Fuel) -> Result<T, Stop>,
    ) -> Evaluated<T> {
        let mut fuel = self.meter.take_fuel();
        let result = evaluate(&View { run: self, at, inside }, &mut fuel);
        self.meter.refuel(fuel);
        match result {
            Ok(value) => Ok(Ok(value)),
            Err(Stop::Need(missing)) => Err(self.need(missing)),
            Err(Stop::Heavy) => Err(Halt::Heavy),
            Err(Stop::Failed(error)) => Ok(Err(Failure::new(kind::EXPRESSION, error.to_string()))),
        }
    }
}

/// Keys compare as canonical JSON: sorted fields, and equal numbers have equal text.
pub fn canonical_json(value: Value) -> String {
    // Writing JSON with string keys into memory does not fail.
    serde_json::to_string(&Canonical(&value)).unwrap_or_default()
}

/// Serialises a value as canonical JSON, without copying it.
#[derive(Debug, Clone, Copy)]
pub struct Canonical<'a>(pub &'a Value);

impl Serialize for Canonical<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() < 9e15 => {
                    serializer.serialize_i64(float as i64)
                }
                _ => number.serialize(serializer),
            },
            Value::Array(items) => serializer.collect_seq(items.iter().map(Canonical)),
            Value::Object(fields) => serializer.collect_map(fields.iter().map(|(key, item)| (key, Canonical(item)))),
            other => other.serialize(serializer),
        }
    }
}

/// The names visible from an activation: those of its scope, or of the scope inside it.
struct View<'a> {
    run: &'a Decider<'a>,
    at: ActId,
    inside: bool,
}

impl<'a> Names<'a> for View<'a> {
    fn root(&self, name: &str) -> Option<Val<'a>> {
        match name {
            "input" => self.input().map(Val::Data),
            "run" => {
                let fields =
                    Table::OF_RUN.iter().filter_map(|field| Some((Text::Borrowed(field), self.of_run(field)?)));
                Some(Val::Map(Rc::new(fields.collect())))
            }
            "index" => self.find(|activation| match activation.place {
                Place::Item { index, .. } => Some(Val::Int(index.into())),
                _ => None,
            }),
            "round" => self.find_loop(|round, _| Val::Int(round.into())),
            "state" => self.find_loop(|_, state| Val::Data(state)),
            "gate" => self.find(|activation| match &activation.gate {
                GateState::Opened(payload) => Some(Val::Data(payload)),
                GateState::TimedOut => Some(Val::Null),
                _ => None,
            }),
            _ => self.find(|activation| {
                let Place::Item { of, .. } = activation.place else { return None };
                let spread = self.run.step(of).ok()?.spread.as_ref()?;
                activation.item.as_ref().filter(|_| spread.item == name).map(Val::Data)
            }),
        }
    }

    fn entry(&self, table: Table, key: &str) -> Option<Val<'a>> {
        match table {
            Table::Steps if self.is_in_unopened_scope(key) => Some(entry_of(&UNOPENED)),
            Table::Steps => self.step_named(key).and_then(step_entry),
            Table::Events => {
                // The innermost scope that declares the event wins, even if only an outer one has emitted it.
                let emitted = self.in_scopes(|at, graph, scope| {
                    let event = graph.scope(scope).events.iter().position(|event| event.name == key)?;
                    Some(self.run.emitted_at(at, event as u32))
                });
                emitted.flatten().map(|emitted| Val::Data(&emitted.payload))
            }
            Table::Gates => {
                let token = self.step_named(key)?.gate_token.as_ref()?;
                let url = format!("{}{token}", self.run.env.hooks);
                Some(map([("url", Val::from(url))]))
            }
            Table::Run => self.of_run(key),
        }
    }

    fn value(&self, id: ValueId) -> Option<&'a Data> {
        self.run.loaded(id)
    }

    fn now(&self) -> Millis {
        self.run.env.now
    }
}

impl<'a> View<'a> {
    /// The activation and those that contain it, innermost first.
    fn outwards(&self) -> impl Iterator<Item = &'a Activation> + use<'a> {
        let run = self.run;
        std::iter::successors(Some(run.at(self.at)), move |activation| activation.parent().map(|id| run.at(id)))
    }

    fn find(&self, found: impl FnMut(&'a Activation) -> Option<Val<'a>>) -> Option<Val<'a>> {
        self.outwards().find_map(found)
    }

    /// Reads from the innermost enclosing loop.
    fn find_loop(&self, found: impl Fn(u32, &'a Data) -> Val<'a>) -> Option<Val<'a>> {
        // A loop's own fields are evaluated outside it, except `while`, which is evaluated inside.
        let skip = usize::from(!self.inside);
        self.outwards().skip(skip).find_map(|activation| match activation.inside() {
            Some(Inside { what: What::Repeat { round, state }, .. }) => Some(found(*round, state)),
            _ => None,
        })
    }

    /// The input of the scope it is in, or is.
    fn input(&self) -> Option<&'a Data> {
        let mut scopes = self.outwards().skip(usize::from(!self.inside));
        let scope = scopes.find(|activation| {
            activation.body.is_some() || activation.input.is_some() || activation.parent().is_none()
        })?;
        match scope.place {
            Place::Root | Place::Finally | Place::Undo { .. } => self.run.header.input.as_ref(),
            Place::Round { of, .. } => self.run.at(of).input.as_ref(),
            _ => scope.input.as_ref(),
        }
    }

    /// Searches the visible scopes, innermost first: the activation that contains the scope, and which scope.
    fn in_scopes<T>(&self, mut found: impl FnMut(ActId, &'a Graph, ScopeId) -> Option<T>) -> Option<T> {
        let graph = self.run.graph?;
        let own = self.outwards().skip(usize::from(!self.inside));
        // `finally` sees the steps of the flow.
        let root = std::iter::once(self.run.at(ActId(0)));
        own.chain(root).find_map(|activation| activation.body.and_then(|body| found(activation.id, graph, body.scope)))
    }

    fn step_named(&self, name: &str) -> Option<&'a Activation> {
        self.in_scopes(|at, graph, scope| {
            let step = graph.find(scope, name)?;
            self.run.in_scope(at, step).ok().map(|id| self.run.at(id))
        })
    }

    /// Whether it is a step of a round that ended before its steps were created, because it was skipped by hand while
    /// part of a transition was deferred. All its steps count as skipped.
    fn is_in_unopened_scope(&self, name: &str) -> bool {
        let activation = self.run.at(self.at);
        if !self.inside || activation.body.is_some() || activation.end().is_none() {
            return false;
        }
        let (Some(graph), Ok(step)) = (self.run.graph, self.run.step(self.at)) else { return false };
        matches!(step.action, Action::Group(scope) if graph.find(scope, name).is_some())
    }

    fn of_run(&self, key: &str) -> Option<Val<'a>> {
        let header = &self.run.header;
        let text = |text: &'a str| Val::Str(Text::Borrowed(text));
        Some(match key {
            "id" => Val::from(header.run.to_string()),
            "flow" => text(&header.flow),
            "version" => text(&header.flow_version),
            "input" => header.input.as_ref().map_or(Val::Null, Val::Data),
            "tags" => Val::List(Rc::new(header.tags.iter().map(|tag| text(tag)).collect())),
            "external_id" => header.external_id.as_deref().map_or(Val::Null, text),
            "outcome" if header.phase != Phase::Going => text(header.outcome.as_ref()?.status().as_str()),
            "error" if header.phase != Phase::Going => match header.outcome.as_ref()? {
                RunOutcome::Failed(failure) => failure_entry(failure),
                RunOutcome::Completed(_) | RunOutcome::Cancelled(_) => Val::Null,
            },
            _ => return None,
        })
    }
}

/// The entry of an ended step; an open step cannot be read.
fn step_entry(activation: &Activation) -> Option<Val<'_>> {
    activation.end().map(entry_of)
}

fn entry_of(end: &End) -> Val<'_> {
    let (output, error) = match end {
        End::Completed(output) => (Val::Data(output), Val::Null),
        End::Failed(failure) => (Val::Null, failure_entry(failure)),
        End::Skipped(_) | End::Cancelled => (Val::Null, Val::Null),
    };
    map([("output", output), ("status", Val::Str(Text::Borrowed(end.status()))), ("error", error)])
}

fn failure_entry(failure: &Failure) -> Val<'_> {
    let step = failure.step.as_deref().map_or(Val::Null, |step| Val::Str(Text::Borrowed(step)));
    map([
        ("kind", Val::Str(Text::Borrowed(&failure.kind))),
        ("message", Val::Str(Text::Borrowed(&failure.message))),
        ("step", step),
    ])
}

fn map<'a, const N: usize>(fields: [(&'static str, Val<'a>); N]) -> Val<'a> {
    Val::Map(Rc::new(fields.into_iter().map(|(key, value)| (Text::Borrowed(key), value)).collect()))
}
