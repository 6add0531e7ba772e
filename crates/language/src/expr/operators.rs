//! Binary operators.

use super::ast::{Node, Op};
use super::eval::Eval;
use super::halt::{Halt, Res, by_name_only, gather, overflow};
use super::value::{Shape, Val, moment};

impl<'a> Eval<'a, '_> {
    pub fn binary(&mut self, op: Op, pair: &'a [Node; 2]) -> Res<Val<'a>> {
        let [left, right] = pair;
        let (l, r) = self.pair(left, right)?;
        match op {
            Op::Equal => Ok(Val::Bool(self.equal(&l, &r)?)),
            Op::NotEqual => Ok(Val::Bool(!self.equal(&l, &r)?)),
            Op::In => self.contains(l, &r),
            Op::Less | Op::LessOrEqual | Op::Greater | Op::GreaterOrEqual => self.compare(op, &l, &r),
            _ => self.arithmetic(op, l, r),
        }
    }

    pub fn equal(&mut self, left: &Val<'a>, right: &Val<'a>) -> Res<bool> {
        if let (Val::Table(table), _) | (_, Val::Table(table)) = (left, right) {
            return Err(by_name_only(*table));
        }
        let same_size = match (left.shape(), right.shape()) {
            (Shape::Items(l), Shape::Items(r)) => l.len() == r.len(),
            (Shape::Fields(l), Shape::Fields(r)) => l.len() == r.len(),
            (Shape::Scalar, Shape::Scalar) => {
                self.weigh_texts(left, right)?;
                return Ok(left.order(right).is_eq());
            }
            _ => false,
        };
        if !same_size {
            return Ok(false);
        }
        let both = gather([left, right].map(|side| self.solid(side.clone())))?;
        for side in &both {
            self.weigh(side)?;
        }
        Ok(matches!(&both[..], [l, r] if l.order(r).is_eq()))
    }

    /// Charges for comparing two scalars: two texts are compared up to the length of the shorter.
    fn weigh_texts(&mut self, left: &Val<'a>, right: &Val<'a>) -> Res<()> {
        match (left, right) {
            (Val::Str(left), Val::Str(right)) => self.spend_bytes(left.len().min(right.len())),
            _ => Ok(()),
        }
    }

    fn contains(&mut self, item: Val<'a>, whole: &Val<'a>) -> Res<Val<'a>> {
        match (&item, whole, whole.shape()) {
            (Val::Str(key), Val::Table(table), _) => {
                self.spend(8)?;
                Ok(Val::Bool(self.names.entry(*table, key).is_some()))
            }
            (Val::Str(key), _, Shape::Fields(fields)) => {
                self.spend(fields.search_cost())?;
                Ok(Val::Bool(fields.get(key).is_some()))
            }
            (_, _, Shape::Items(items)) => {
                self.spend(items.len())?;
                let items = self.force_all(items)?;
                let found = gather(items.iter().map(|other| self.equal(&item, other)))?;
                Ok(Val::Bool(found.contains(&true)))
            }
            (Val::Str(_), Val::Str(_), _) => {
                Err(Halt::fault("`in` is for lists and maps; for text use text.contains(part)"))
            }
            _ => Err(Halt::fault(format!("`in` cannot look for {} in {}", item.kind(), whole.kind()))),
        }
    }

    fn compare(&mut self, op: Op, left: &Val<'a>, right: &Val<'a>) -> Res<Val<'a>> {
        self.weigh_texts(left, right)?;
        let order = left.compare(right).ok_or_else(|| mismatch(op.sign(), left, right))?;
        Ok(Val::Bool(match op {
            Op::Less => order.is_lt(),
            Op::LessOrEqual => order.is_le(),
            Op::Greater => order.is_gt(),
            _ => order.is_ge(),
        }))
    }

    fn arithmetic(&mut self, op: Op, left: Val<'a>, right: Val<'a>) -> Res<Val<'a>> {
        match (op, &left, &right) {
            (_, Val::Int(l), Val::Int(r)) => ints(op, *l, *r),
            (_, Val::Double(l), Val::Double(r)) => doubles(op, *l, *r),
            (_, Val::Int(l), Val::Double(r)) => doubles(op, *l as f64, *r),
            (_, Val::Double(l), Val::Int(r)) => doubles(op, *l, *r as f64),
            (Op::Add, Val::Str(l), Val::Str(r)) => self.made(l.len() + r.len(), || [l.as_str(), r.as_str()].concat()),
            (Op::Add, Val::Str(_), Val::Int(_) | Val::Double(_) | Val::Bool(_))
            | (Op::Add, Val::Int(_) | Val::Double(_) | Val::Bool(_), Val::Str(_)) => {
                let other = if matches!(left, Val::Str(_)) { &right } else { &left };
                Err(Halt::fault(format!("cannot add a string and {}; use string(x) to convert it", other.kind())))
            }
            (Op::Add | Op::Subtract, Val::Time(l), Val::Span(r)) => moment(whole(op, *l, *r)?).map(Val::Time),
            (Op::Add, Val::Span(l), Val::Time(r)) => moment(whole(op, *l, *r)?).map(Val::Time),
            (Op::Subtract, Val::Time(l), Val::Time(r)) => whole(op, *l, *r).map(Val::Span),
            (Op::Add | Op::Subtract, Val::Span(l), Val::Span(r)) => whole(op, *l, *r).map(Val::Span),
            (Op::Multiply | Op::Divide, Val::Span(l), Val::Int(r)) => whole(op, *l, *r).map(Val::Span),
            _ => self.concat(op, &left, &right),
        }
    }

    fn concat(&mut self, op: Op, left: &Val<'a>, right: &Val<'a>) -> Res<Val<'a>> {
        match (op, left.shape(), right.shape()) {
            (Op::Add, Shape::Items(l), Shape::Items(r)) => {
                self.spend(l.len() + r.len())?;
                self.hold_elements(l.len() + r.len())?;
                Ok(Val::list(l.iter().chain(r.iter()).collect()))
            }
            _ => Err(mismatch(op.sign(), left, right)),
        }
    }
}

fn mismatch(sign: &str, left: &Val<'_>, right: &Val<'_>) -> Halt {
    if let (Val::Table(table), _) | (_, Val::Table(table)) = (left, right) {
        return by_name_only(*table);
    }
    Halt::fault(format!("`{sign}` does not work on {} and {}", left.kind(), right.kind()))
}

fn whole(op: Op, left: i64, right: i64) -> Res<i64> {
    let result = match op {
        Op::Add => left.checked_add(right),
        Op::Subtract => left.checked_sub(right),
        Op::Multiply => left.checked_mul(right),
        Op::Divide | Op::Modulo if right == 0 => return Err(Halt::fault("division by zero")),
        Op::Divide => left.checked_div(right),
        _ => left.checked_rem(right),
    };
    result.ok_or_else(overflow)
}

fn ints<'a>(op: Op, left: i64, right: i64) -> Res<Val<'a>> {
    whole(op, left, right).map(Val::Int)
}

fn doubles<'a>(op: Op, left: f64, right: f64) -> Res<Val<'a>> {
    Ok(Val::Double(match op {
        Op::Add => left + right,
        Op::Subtract => left - right,
        Op::Multiply => left * right,
        Op::Divide | Op::Modulo if right == 0.0 => return Err(Halt::fault("division by zero")),
        Op::Divide => left / right,
        _ => left % right,
    }))
}
