//! The evaluator: walks the tree, keeps payloads lazy and charges for each step.

use std::rc::Rc;

use super::ast::{Each, Macro, Node, NodeKind};
use super::halt::{Halt, Needs, Res, by_name_only, gather, gather_some, overflow, shorten};
use super::pattern::Pattern;
use super::text::Text;
use super::value::{Items, Shape, Table, Val};
use super::{Fuel, MAX_PAYLOAD_BYTES, Names, Stop};
use crate::data::Data;
use crate::nearest::did_you_mean;

/// Nesting depth to which values are walked, including references.
const MAX_WALK_DEPTH: usize = 256;
/// How many keys of a map are searched for a hint.
const MAX_HINTS: usize = 200;
/// Steps to look up a name in the run, and to report that something is absent.
const LOOKUP: usize = 8;
const MISS: usize = 8;

pub(super) struct Eval<'a, 'n> {
    pub names: &'n dyn Names<'a>,
    pub fuel: &'n mut Fuel,
    /// Variables of the enclosing macros, outermost first.
    locals: Vec<Val<'a>>,
    /// The last pattern of `matches`; a macro uses the same one for each element.
    pub pattern: Option<Pattern>,
    /// The last failed field lookup.
    missed: Option<Missed<'a>>,
    misses: u32,
    /// Bytes left for the result.
    pub room: usize,
}

struct Missed<'a> {
    number: u32,
    map: Val<'a>,
    key: Text<'a>,
}

impl<'a, 'n> Eval<'a, 'n> {
    pub fn new(names: &'n dyn Names<'a>, fuel: &'n mut Fuel) -> Eval<'a, 'n> {
        Eval { names, fuel, locals: Vec::new(), pattern: None, missed: None, misses: 0, room: MAX_PAYLOAD_BYTES }
    }

    /// Converts a halt. The hint is computed only now, when the error is shown.
    pub fn stop(&self, halt: Halt, source: &str) -> Stop {
        let missed = self.missed.as_ref().filter(|missed| halt.missed() == Some(missed.number));
        let hint = missed.and_then(|missed| match missed.map.shape() {
            Shape::Fields(fields) => {
                let keys = fields.keys(MAX_HINTS);
                did_you_mean(&missed.key, keys.iter().map(Text::as_str))
            }
            _ => None,
        });
        halt.stop(source, hint)
    }

    /// The value of a node; it may be an unloaded payload.
    pub fn node(&mut self, node: &'a Node) -> Res<Val<'a>> {
        self.spend(1).and_then(|()| self.kind(&node.kind)).map_err(|halt| halt.at(node.at))
    }

    fn kind(&mut self, kind: &'a NodeKind) -> Res<Val<'a>> {
        match kind {
            NodeKind::Null => Ok(Val::Null),
            NodeKind::Bool(truth) => Ok(Val::Bool(*truth)),
            NodeKind::Int(int) => Ok(Val::Int(*int)),
            NodeKind::Double(double) => Ok(Val::Double(*double)),
            NodeKind::Str(text) => Ok(Val::Str(Text::Borrowed(text))),
            NodeKind::Local(slot) => self.local(*slot),
            NodeKind::Root(name) => {
                self.spend(LOOKUP)?;
                let found = self.names.root(name);
                found.map(normal).ok_or_else(|| Halt::fault(format!("unknown name `{name}`")))
            }
            NodeKind::Table(table) => Ok(Val::Table(*table)),
            NodeKind::Select(operand, field) => self.select(operand, field),
            NodeKind::Index(pair) => self.index(pair),
            NodeKind::Has(node) => self.has(node),
            NodeKind::Not(operand) => Ok(Val::Bool(!self.truth(operand, "!")?)),
            NodeKind::Negate(operand) => self.negate(operand),
            NodeKind::And(pair) => self.logic(pair, false),
            NodeKind::Or(pair) => self.logic(pair, true),
            NodeKind::If(three) => self.conditional(three),
            NodeKind::Binary(op, pair) => self.binary(*op, pair),
            NodeKind::List(nodes) => {
                self.hold_elements(nodes.len())?;
                Ok(Val::list(gather(nodes.iter().map(|node| self.node(node)))?))
            }
            NodeKind::Map(fields) => self.map_literal(fields),
            NodeKind::Call(func, nodes) => {
                let args = gather(nodes.iter().map(|node| self.forced(node)))?;
                func.apply(self, args)
            }
            NodeKind::Default(pair) => self.default(pair),
            NodeKind::Each(each) => self.each(each),
        }
    }

    fn local(&self, slot: usize) -> Res<Val<'a>> {
        self.locals.get(slot).cloned().ok_or_else(|| Halt::fault("unbound variable"))
    }

    pub fn forced(&mut self, node: &'a Node) -> Res<Val<'a>> {
        let value = self.node(node)?;
        self.force(value)
    }

    /// Resolves the value if it is a reference; its contents may still be references.
    pub fn force(&mut self, value: Val<'a>) -> Res<Val<'a>> {
        let mut value = value.settle();
        while let Val::Data(Data::Ref(stored)) = value {
            self.spend(1)?;
            // Charged before the lookup, so that the cost is the same whether it is loaded or not.
            self.fuel.read(*stored)?;
            let data = self.names.value(stored.id).ok_or_else(|| Halt::Need(vec![*stored]))?;
            value = Val::from(data).settle();
        }
        Ok(value)
    }

    pub fn force_all(&mut self, items: Items<'_, 'a>) -> Res<Vec<Val<'a>>> {
        self.hold_elements(items.len())?;
        gather(items.iter().map(|value| self.force(value)))
    }

    /// Resolves all references in the value, at any depth.
    pub fn solid(&mut self, value: Val<'a>) -> Res<Val<'a>> {
        self.solid_at(value, 0)
    }

    fn solid_at(&mut self, value: Val<'a>, depth: usize) -> Res<Val<'a>> {
        if depth > MAX_WALK_DEPTH {
            return Err(Halt::fault(format!("a value is nested more than {MAX_WALK_DEPTH} deep")));
        }
        self.spend(1)?;
        let value = self.force(value)?;
        match value.shape() {
            Shape::Items(items) if !matches!(value, Val::Json(_) | Val::Data(Data::Json(_))) => {
                self.hold_elements(items.len())?;
                Ok(Val::list(gather(items.iter().map(|item| self.solid_at(item, depth + 1)))?))
            }
            Shape::Fields(fields) if !matches!(value, Val::Json(_) | Val::Data(Data::Json(_))) => {
                self.hold_fields(fields.len().saturating_mul(2))?;
                let values = gather(fields.values().into_iter().map(|field| self.solid_at(field, depth + 1)))?;
                Ok(Val::Map(Rc::new(fields.keys(usize::MAX).into_iter().zip(values).collect())))
            }
            _ => Ok(value),
        }
    }

    fn truth(&mut self, node: &'a Node, sign: &str) -> Res<bool> {
        match self.forced(node)? {
            Val::Bool(truth) => Ok(truth),
            other => Err(Halt::fault(format!("`{sign}` needs true or false, found {}", other.kind())).at(node.at)),
        }
    }

    fn negate(&mut self, operand: &'a Node) -> Res<Val<'a>> {
        match self.forced(operand)? {
            Val::Int(int) => int.checked_neg().map(Val::Int).ok_or_else(overflow),
            Val::Double(double) => Ok(Val::Double(-double)),
            Val::Span(ms) => ms.checked_neg().map(Val::Span).ok_or_else(overflow),
            other => Err(Halt::fault(format!("`-` needs a number, found {}", other.kind()))),
        }
    }

    /// A side equal to `decides` determines the result, even if the other one fails.
    fn logic(&mut self, pair: &'a [Node; 2], decides: bool) -> Res<Val<'a>> {
        let [left, right] = pair;
        let sign = if decides { "||" } else { "&&" };
        let first = match self.truth(left, sign) {
            Ok(truth) if truth == decides => return Ok(Val::Bool(decides)),
            Err(halt) if halt.is_final() => return Err(halt),
            other => other,
        };
        if first.is_err() {
            self.spend(MISS)?;
        }
        match (first, self.truth(right, sign)) {
            (_, Err(halt)) if halt.is_final() => Err(halt),
            (_, Ok(truth)) if truth == decides => Ok(Val::Bool(decides)),
            (first, second) => first.and(second).map(Val::Bool),
        }
    }

    fn conditional(&mut self, three: &'a [Node; 3]) -> Res<Val<'a>> {
        let [condition, yes, no] = three;
        let taken = if self.truth(condition, "?")? { yes } else { no };
        self.node(taken)
    }

    fn map_literal(&mut self, fields: &'a [(Node, Node)]) -> Res<Val<'a>> {
        self.hold_fields(fields.len().saturating_mul(2))?;
        let mut seen = std::collections::BTreeSet::new();
        let pairs = gather(fields.iter().map(|(key, value)| {
            let key_text = match self.forced(key)? {
                Val::Str(text) => text,
                other => {
                    let message = format!("a key of a map must be a string, found {}", other.kind());
                    return Err(Halt::fault(message).at(key.at));
                }
            };
            self.spend_bytes(key_text.len().saturating_mul(4))?;
            if !seen.insert(key_text.clone()) {
                return Err(Halt::fault(format!("duplicate key `{}`", shorten(&key_text))).at(key.at));
            }
            Ok((key_text, self.node(value)?))
        }))?;
        Ok(Val::Map(Rc::new(pairs)))
    }

    fn default(&mut self, pair: &'a [Node; 2]) -> Res<Val<'a>> {
        let [wanted, fallback] = pair;
        match self.node(wanted) {
            Ok(value) => match self.force(value.clone())? {
                Val::Null => self.node(fallback),
                // The unforced value, so that a reference stays a reference.
                _ => Ok(value),
            },
            Err(halt) if halt.is_absent() => self.node(fallback),
            Err(halt) => Err(halt),
        }
    }

    fn has(&mut self, node: &'a Node) -> Res<Val<'a>> {
        match self.node(node) {
            Ok(_) => Ok(Val::Bool(true)),
            Err(halt) if halt.is_absent() => Ok(Val::Bool(false)),
            Err(halt) => Err(halt),
        }
    }

    fn select(&mut self, operand: &'a Node, field: &'a str) -> Res<Val<'a>> {
        let value = self.forced(operand)?;
        self.field(operand, &value, &Text::Borrowed(field))
    }

    fn index(&mut self, pair: &'a [Node; 2]) -> Res<Val<'a>> {
        let [operand, index] = pair;
        let (value, index) = self.pair(operand, index)?;
        match (&index, value.shape()) {
            (Val::Str(key), _) => self.field(operand, &value, key),
            (Val::Int(at), Shape::Items(items)) => {
                let found = usize::try_from(*at).ok().and_then(|at| items.get(at));
                let missing = || {
                    Halt::absent(format!(
                        "index {at} is out of range: {} has {} elements",
                        name(operand, "the list"),
                        items.len()
                    ))
                };
                found.ok_or_else(missing)
            }
            (_, Shape::Items(_)) => Err(Halt::fault(format!("a list is indexed by an int, found {}", index.kind()))),
            (_, Shape::Fields(_)) => Err(Halt::fault(format!("a map is indexed by a string, found {}", index.kind()))),
            _ => Err(Halt::fault(format!("{} is {}, which has no index", name(operand, "the value"), value.kind()))),
        }
    }

    fn field(&mut self, operand: &Node, value: &Val<'a>, key: &Text<'a>) -> Res<Val<'a>> {
        match (value, value.shape()) {
            (Val::Table(table), _) => {
                self.spend(LOOKUP)?;
                match self.names.entry(*table, key) {
                    Some(found) => Ok(normal(found)),
                    None => self.miss(|| no_entry(*table, key)),
                }
            }
            (Val::Null, _) => self.miss(|| {
                let name = name(operand, "the value");
                Halt::absent(format!("{name} is null, so it has no field `{}`", shorten(key)))
            }),
            (_, Shape::Fields(fields)) => {
                self.spend(fields.search_cost())?;
                self.spend_bytes(key.len())?;
                match fields.get(key) {
                    Some(found) => Ok(found),
                    None => self.no_field(operand, value, key),
                }
            }
            _ => {
                let name = name(operand, "the value");
                Err(Halt::fault(format!("{name} is {}, which has no field `{}`", value.kind(), shorten(key))))
            }
        }
    }

    fn miss(&mut self, halt: impl FnOnce() -> Halt) -> Res<Val<'a>> {
        self.spend(MISS)?;
        Err(halt())
    }

    fn no_field(&mut self, operand: &Node, map: &Val<'a>, key: &Text<'a>) -> Res<Val<'a>> {
        self.misses = self.misses.wrapping_add(1);
        let number = self.misses;
        self.missed = Some(Missed { number, map: map.clone(), key: key.clone() });
        self.miss(|| {
            let message = format!("{} has no field `{}`", name(operand, "the map"), shorten(key));
            Halt::no_field(message, number)
        })
    }

    pub fn pair(&mut self, left: &'a Node, right: &'a Node) -> Res<(Val<'a>, Val<'a>)> {
        let mut needs = Needs::default();
        let left = needs.take(self.forced(left))?;
        let right = needs.take(self.forced(right))?;
        needs.done()?;
        left.zip(right).ok_or_else(|| Halt::Need(Vec::new()))
    }

    fn elements(&mut self, value: &Val<'a>) -> Res<Vec<Val<'a>>> {
        match value.shape() {
            Shape::Items(items) => {
                self.spend(items.len())?;
                self.hold_elements(items.len())?;
                Ok(items.iter().collect())
            }
            Shape::Fields(fields) => {
                self.spend(fields.len())?;
                self.hold_elements(fields.len().saturating_mul(2))?;
                Ok(fields.keys(usize::MAX).into_iter().map(Val::Str).collect())
            }
            Shape::Scalar => match value {
                Val::Table(table) => Err(by_name_only(*table)),
                _ => Err(Halt::fault(format!("needs a list or a map, found {}", value.kind()))),
            },
        }
    }

    fn each(&mut self, each: &'a Each) -> Res<Val<'a>> {
        let over = self.forced(&each.over)?;
        let elements = self.elements(&over)?;
        match each.what {
            Macro::All => self.any(each, elements, false),
            Macro::Exists => self.any(each, elements, true),
            Macro::ExistsOne => {
                let kept =
                    gather(elements.into_iter().map(|item| self.with(item, |eval| eval.passes(each, &each.body))))?;
                Ok(Val::Bool(kept.into_iter().filter(|kept| *kept).count() == 1))
            }
            Macro::Filter => {
                let kept = gather_some(elements.into_iter().map(|item| {
                    let kept = self.with(item.clone(), |eval| eval.passes(each, &each.body))?;
                    self.hold_element()?;
                    Ok(kept.then_some(item))
                }))?;
                Ok(Val::list(kept))
            }
            Macro::Map => {
                let made = gather_some(elements.into_iter().map(|item| {
                    self.with(item, |eval| match &each.filter {
                        Some(filter) if !eval.passes(each, filter)? => Ok(None),
                        _ => {
                            eval.hold_element()?;
                            eval.node(&each.body).map(Some)
                        }
                    })
                }))?;
                Ok(Val::list(made))
            }
        }
    }

    /// Whether some element equals `decides`; such an element determines the result, even if others fail.
    fn any(&mut self, each: &'a Each, elements: Vec<Val<'a>>, decides: bool) -> Res<Val<'a>> {
        let mut needs = Needs::default();
        let mut failed = None;
        for item in elements {
            match self.with(item, |eval| eval.passes(each, &each.body)) {
                Err(Halt::Need(missing)) => needs.add(missing),
                Err(halt) if halt.is_final() => return needs.done().and(Err(halt)),
                Err(fault) => {
                    failed = failed.or(Some(fault));
                    // A missing value takes precedence over this failure.
                    needs.take(self.spend(MISS))?;
                }
                Ok(truth) if truth == decides && !needs.any() => return Ok(Val::Bool(decides)),
                Ok(_) => {}
            }
        }
        needs.done()?;
        failed.map_or(Ok(Val::Bool(!decides)), Err)
    }

    fn with<T>(&mut self, item: Val<'a>, body: impl FnOnce(&mut Self) -> Res<T>) -> Res<T> {
        self.locals.push(item);
        let result = self.spend(1).and_then(|()| body(self));
        self.locals.pop();
        result
    }

    fn passes(&mut self, each: &Each, node: &'a Node) -> Res<bool> {
        match self.forced(node)? {
            Val::Bool(truth) => Ok(truth),
            other => {
                let message =
                    format!("the condition of `{}` must be true or false, found {}", each.what.name(), other.kind());
                Err(Halt::fault(message).at(node.at))
            }
        }
    }
}

fn normal(value: Val<'_>) -> Val<'_> {
    match value {
        Val::Json(json) => Val::from(json),
        Val::Data(data) => Val::from(data),
        other => other,
    }
}

fn name(node: &Node, otherwise: &str) -> String {
    node.path().map_or_else(|| otherwise.to_string(), |path| format!("`{path}`"))
}

fn no_entry(table: Table, key: &str) -> Halt {
    let key = shorten(key);
    Halt::absent(match table {
        Table::Steps => format!("`steps.{key}` is not decided yet or does not exist"),
        Table::Events => format!("event `{key}` was not emitted"),
        Table::Gates => format!("`gates.{key}` is not open yet or does not exist"),
        Table::Run => format!("`run` has no field `{key}`"),
    })
}
