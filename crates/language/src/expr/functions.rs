//! The closed list of functions. Each can be called as a function or as a method: `size(x)`, `x.size()`.

use std::collections::BTreeSet;

use serde_json::Value;

use super::eval::Eval;
use super::halt::{Halt, Res, by_name_only, overflow, shorten};
use super::pattern::matches;
use super::text::Text;
use super::value::{Items, Shape, Val, moment, parse_span, parse_time, span_text, time_text};

const MAX_RANGE: i64 = 100_000;
/// Memory of a value parsed from JSON: as JSON, as a value, and a field's key.
const JSON_VALUE_BYTES: usize = 192;
/// The longest text of a number or a time.
const FORMATTED: usize = 64;
/// Steps to format or parse a time.
const FORMAT: usize = 8;

macro_rules! functions {
    ($($func:ident $name:literal $least:literal..=$most:literal $usage:literal;)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Func { $($func,)* }

        const TABLE: &[Entry] = &[$(Entry {
            func: Func::$func, name: $name, least: $least, most: $most, usage: $usage,
        },)*];
    };
}

struct Entry {
    func: Func,
    name: &'static str,
    least: usize,
    most: usize,
    usage: &'static str,
}

functions! {
    Abs "abs" 1..=1 "abs(number)";
    Avg "avg" 1..=1 "avg(list of numbers)";
    Bool "bool" 1..=1 "bool(text)";
    Ceil "ceil" 1..=1 "ceil(number)";
    Contains "contains" 2..=2 "text.contains(part)";
    Distinct "distinct" 1..=1 "distinct(list)";
    Double "double" 1..=1 "double(number or text)";
    Duration "duration" 1..=1 "duration(\"1h30m\")";
    EndsWith "endsWith" 2..=2 "text.endsWith(part)";
    First "first" 1..=1 "first(list)";
    Flatten "flatten" 1..=1 "flatten(list of lists)";
    Floor "floor" 1..=1 "floor(number)";
    Int "int" 1..=1 "int(number, text, timestamp or duration)";
    Join "join" 1..=2 "list.join(separator)";
    Json "json" 1..=1 "json(value)";
    Keys "keys" 1..=1 "keys(map)";
    Last "last" 1..=1 "last(list)";
    LowerAscii "lowerAscii" 1..=1 "text.lowerAscii()";
    Matches "matches" 2..=2 "text.matches(pattern)";
    Max "max" 1..=64 "max(list) or max(a, b, …)";
    Min "min" 1..=64 "min(list) or min(a, b, …)";
    Now "now" 0..=0 "now()";
    ParseJson "parse_json" 1..=1 "parse_json(text)";
    Range "range" 1..=1 "range(count)";
    Replace "replace" 3..=3 "text.replace(from, to)";
    Reverse "reverse" 1..=1 "reverse(list)";
    Round "round" 1..=1 "round(number)";
    Size "size" 1..=1 "size(text, list or map)";
    Slice "slice" 2..=3 "slice(list, from, to)";
    Sort "sort" 1..=1 "sort(list)";
    Split "split" 2..=2 "text.split(separator)";
    StartsWith "startsWith" 2..=2 "text.startsWith(part)";
    String "string" 1..=1 "string(number, bool, timestamp or duration)";
    Substring "substring" 2..=3 "text.substring(from, to)";
    Sum "sum" 1..=1 "sum(list of numbers)";
    Timestamp "timestamp" 1..=1 "timestamp(\"2026-01-02T03:04:05Z\") or timestamp(milliseconds)";
    Trim "trim" 1..=1 "text.trim()";
    Type "type" 1..=1 "type(value)";
    UpperAscii "upperAscii" 1..=1 "text.upperAscii()";
    Values "values" 1..=1 "values(map)";
}

/// Written like functions, but they do not evaluate all their arguments first.
pub(super) const SPECIAL: &[&str] = &["all", "default", "exists", "exists_one", "filter", "has", "map"];

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().map(|entry| entry.name).chain(SPECIAL.iter().copied())
}

impl Func {
    pub fn named(name: &str) -> Option<Func> {
        TABLE.iter().find(|entry| entry.name == name).map(|entry| entry.func)
    }

    /// The number of arguments, and how to call it.
    pub fn signature(self) -> (std::ops::RangeInclusive<usize>, &'static str) {
        let entry = self.entry();
        (entry.least..=entry.most, entry.usage)
    }

    fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// The arguments are forced; their contents may still be references.
    pub fn apply<'a>(self, eval: &mut Eval<'a, '_>, args: Vec<Val<'a>>) -> Res<Val<'a>> {
        if let Some(Val::Table(table)) = args.iter().find(|arg| matches!(arg, Val::Table(_))) {
            return Err(by_name_only(*table));
        }
        match &args[..] {
            [Val::Str(text), rest @ ..] => {
                eval.spend_bytes(text.len())?;
                self.on_text(eval, text, rest)
            }
            [whole, rest @ ..] => match whole.shape() {
                Shape::Items(items) => {
                    let peeks = matches!(self, Func::Size | Func::First | Func::Last);
                    eval.spend(if peeks { 0 } else { items.len() })?;
                    self.on_list(eval, whole, items, rest)
                }
                _ => self.on_other(eval, whole, rest),
            },
            [] => Ok(Some(Val::Time(eval.names.now()))),
        }?
        .ok_or_else(|| self.refused(&args))
    }

    fn refused(self, args: &[Val<'_>]) -> Halt {
        let found: Vec<_> = args.iter().map(Val::kind).collect();
        Halt::fault(format!(
            "`{}` does not accept {}; write {}",
            self.entry().name,
            found.join(", "),
            self.entry().usage
        ))
    }

    fn on_text<'a>(self, eval: &mut Eval<'a, '_>, text: &Text<'a>, rest: &[Val<'a>]) -> Res<Option<Val<'a>>> {
        Ok(Some(match (self, rest) {
            (Func::Contains, [Val::Str(part)]) => {
                eval.spend_bytes(text.len() + part.len())?;
                Val::Bool(text.contains(part.as_str()))
            }
            (Func::StartsWith, [Val::Str(part)]) => Val::Bool(text.starts_with(part.as_str())),
            (Func::EndsWith, [Val::Str(part)]) => Val::Bool(text.ends_with(part.as_str())),
            (Func::Matches, [Val::Str(pattern)]) => Val::Bool(matches(eval, text, pattern)?),
            (Func::LowerAscii, []) => eval.made(text.len(), || text.to_ascii_lowercase())?,
            (Func::UpperAscii, []) => eval.made(text.len(), || text.to_ascii_uppercase())?,
            (Func::Trim, []) => trim(eval, text)?,
            (Func::Split, [Val::Str(separator)]) => split(eval, text, separator)?,
            (Func::Replace, [Val::Str(from), Val::Str(to)]) => replace(eval, text, from, to)?,
            (Func::Substring, [Val::Int(from)]) => substring(eval, text, *from, i64::MAX)?,
            (Func::Substring, [Val::Int(from), Val::Int(to)]) => substring(eval, text, *from, *to)?,
            (Func::Size, []) => Val::Int(text.chars().count() as i64),
            (Func::Int, []) => Val::Int(text.parse().map_err(|_| not_a(text, "whole number"))?),
            (Func::Double, []) => match text.parse::<f64>() {
                Ok(number) if number.is_finite() => Val::Double(number),
                _ => return Err(not_a(text, "number")),
            },
            (Func::Bool, []) => Val::Bool(text.parse().map_err(|_| not_a(text, "bool (`true` or `false`)"))?),
            (Func::String, []) => Val::Str(text.clone()),
            (Func::Timestamp, []) => {
                eval.spend(FORMAT)?;
                Val::Time(parse_time(text)?)
            }
            (Func::Duration, []) => {
                Val::Span(parse_span(text).ok_or_else(|| not_a(text, "duration like 1h30m or 250ms"))?)
            }
            (Func::ParseJson, []) => parse_json(eval, text)?,
            _ => return self.on_other(eval, &Val::Str(text.clone()), rest),
        }))
    }

    fn on_list<'a>(
        self,
        eval: &mut Eval<'a, '_>,
        whole: &Val<'a>,
        items: Items<'_, 'a>,
        rest: &[Val<'a>],
    ) -> Res<Option<Val<'a>>> {
        let absent = || Halt::absent(format!("`{}` of an empty list", self.entry().name));
        Ok(Some(match (self, rest) {
            (Func::Size, []) => Val::Int(items.len() as i64),
            (Func::First, []) => items.get(0).ok_or_else(absent)?,
            (Func::Last, []) => items.len().checked_sub(1).and_then(|at| items.get(at)).ok_or_else(absent)?,
            (Func::Sum, []) => self.sum(eval.force_all(items)?)?,
            (Func::Avg, []) if items.len() == 0 => return Err(absent()),
            (Func::Avg, []) => match self.sum(eval.force_all(items)?)? {
                Val::Int(sum) => Val::Double(sum as f64 / items.len() as f64),
                Val::Double(sum) => Val::Double(sum / items.len() as f64),
                Val::Span(sum) => Val::Span(sum / items.len() as i64),
                other => other,
            },
            (Func::Min | Func::Max, []) => {
                let items = eval.force_all(items)?;
                self.extreme(eval, items)?.ok_or_else(absent)?
            }
            (Func::Flatten, []) => flatten(eval, items)?,
            (Func::Join, []) => join(eval, items, "")?,
            (Func::Join, [Val::Str(separator)]) => join(eval, items, separator)?,
            (Func::Distinct, []) => distinct(eval, whole, items)?,
            (Func::Sort, []) => self.sort(eval, items)?,
            (Func::Reverse, []) => {
                eval.hold_elements(items.len())?;
                let mut items: Vec<_> = items.iter().collect();
                items.reverse();
                Val::list(items)
            }
            (Func::Slice, [Val::Int(from)]) => slice(eval, items, *from, i64::MAX)?,
            (Func::Slice, [Val::Int(from), Val::Int(to)]) => slice(eval, items, *from, *to)?,
            _ => return self.on_other(eval, whole, rest),
        }))
    }

    fn on_other<'a>(self, eval: &mut Eval<'a, '_>, first: &Val<'a>, rest: &[Val<'a>]) -> Res<Option<Val<'a>>> {
        if let Shape::Fields(fields) = first.shape() {
            eval.spend(if self == Func::Size { 0 } else { fields.len() })?;
            match (self, rest) {
                (Func::Size, []) => return Ok(Some(Val::Int(fields.len() as i64))),
                (Func::Keys, []) => {
                    eval.hold_elements(fields.len().saturating_mul(2))?;
                    return Ok(Some(Val::list(fields.keys(usize::MAX).into_iter().map(Val::Str).collect())));
                }
                (Func::Values, []) => {
                    eval.hold_elements(fields.len())?;
                    return Ok(Some(Val::list(fields.values())));
                }
                _ => {}
            }
        }
        Ok(Some(match (self, first, rest) {
            (Func::Type, _, []) => Val::Str(Text::Borrowed(first.type_name())),
            (Func::Json, _, []) => {
                let text = eval.json_text(first.clone())?;
                eval.made(text.len(), || text)?
            }
            (Func::Min | Func::Max, _, [_, ..]) => {
                let all = std::iter::once(first.clone()).chain(rest.iter().cloned()).collect();
                return self.extreme(eval, all);
            }
            (Func::Bool, Val::Bool(truth), []) => Val::Bool(*truth),
            (Func::Int | Func::Abs | Func::Round | Func::Floor | Func::Ceil, Val::Int(int), []) => match self {
                Func::Abs => Val::Int(int.checked_abs().ok_or_else(overflow)?),
                _ => Val::Int(*int),
            },
            (Func::Abs, Val::Double(number), []) => Val::Double(number.abs()),
            (Func::Int, Val::Double(number), []) => to_int(number.trunc())?,
            (Func::Round, Val::Double(number), []) => to_int(number.round())?,
            (Func::Floor, Val::Double(number), []) => to_int(number.floor())?,
            (Func::Ceil, Val::Double(number), []) => to_int(number.ceil())?,
            (Func::Int, Val::Time(ms) | Val::Span(ms), []) => Val::Int(*ms),
            (Func::Abs, Val::Span(ms), []) => Val::Span(ms.checked_abs().ok_or_else(overflow)?),
            (Func::Double, Val::Int(int), []) => Val::Double(*int as f64),
            (Func::Double, Val::Double(number), []) => Val::Double(*number),
            (Func::String, Val::Int(int), []) => eval.made(FORMATTED, || int.to_string())?,
            (Func::String, Val::Double(number), []) => eval.made(FORMATTED, || Value::from(*number).to_string())?,
            (Func::String, Val::Bool(truth), []) => eval.made(FORMATTED, || truth.to_string())?,
            (Func::String, Val::Time(ms), []) => {
                eval.spend(FORMAT)?;
                let text = time_text(*ms)?;
                eval.made(FORMATTED, || text)?
            }
            (Func::String, Val::Span(ms), []) => eval.made(FORMATTED, || span_text(*ms))?,
            (Func::String, Val::Null, []) => {
                return Err(Halt::absent("`string` does not accept null; use default(x, \"\") if it may be null"));
            }
            (Func::String, _, []) => {
                return Err(Halt::fault(format!(
                    "`string` does not accept {}; use json(x) for its JSON",
                    first.kind()
                )));
            }
            (Func::Timestamp, Val::Int(ms), []) => Val::Time(moment(*ms)?),
            (Func::Timestamp, Val::Time(ms), []) => Val::Time(*ms),
            (Func::Duration, Val::Span(ms), []) => Val::Span(*ms),
            (Func::Range, Val::Int(count), []) => range(eval, *count)?,
            _ => return Ok(None),
        }))
    }

    fn sum<'a>(self, items: Vec<Val<'a>>) -> Res<Val<'a>> {
        let (mut ints, mut doubles, mut spans) = (0i64, 0.0, 0i64);
        let (mut all_ints, mut all_spans) = (true, !items.is_empty());
        for item in &items {
            all_spans &= matches!(item, Val::Span(_));
            match item {
                Val::Int(int) => {
                    doubles += *int as f64;
                    // An overflow matters only if all elements are ints.
                    ints = if all_ints { ints.checked_add(*int).ok_or_else(overflow)? } else { 0 };
                }
                Val::Double(number) => {
                    doubles += number;
                    all_ints = false;
                }
                Val::Span(ms) if all_spans => spans = spans.checked_add(*ms).ok_or_else(overflow)?,
                other => {
                    return Err(Halt::fault(format!("`{}` needs numbers, found {}", self.entry().name, other.kind())));
                }
            }
        }
        Ok(match (all_spans, all_ints) {
            (true, _) => Val::Span(spans),
            (_, true) => Val::Int(ints),
            _ => Val::Double(doubles),
        })
    }

    fn extreme<'a>(self, eval: &mut Eval<'a, '_>, items: Vec<Val<'a>>) -> Res<Option<Val<'a>>> {
        let mut best: Option<Val<'a>> = None;
        for item in items {
            eval.weigh(&item)?;
            let better = match &best {
                Some(best) => {
                    let order = item.compare(best).ok_or_else(|| self.unordered(&item, best))?;
                    if self == Func::Min { order.is_lt() } else { order.is_gt() }
                }
                None => item.compare(&item).map(|_| true).ok_or_else(|| self.unordered(&item, &item))?,
            };
            if better {
                best = Some(item);
            }
        }
        Ok(best)
    }

    fn sort<'a>(self, eval: &mut Eval<'a, '_>, items: Items<'_, 'a>) -> Res<Val<'a>> {
        let mut items = eval.force_all(items)?;
        let before = eval.steps();
        for item in &items {
            eval.spend(1)?;
            eval.weigh(item)?;
        }
        eval.hold_elements(items.len())?;
        charge_sort(eval, before, items.len())?;
        // Check that all are comparable: sorting by a partial order may panic.
        if let Some(first) = items.first() {
            let odd = items.iter().find(|item| item.compare(first).is_none());
            if let Some(odd) = odd {
                return Err(self.unordered(first, odd));
            }
        }
        items.sort_by(|l, r| l.order(r));
        Ok(Val::list(items))
    }

    fn unordered(self, left: &Val<'_>, right: &Val<'_>) -> Halt {
        Halt::fault(format!("`{}` cannot compare {} with {}", self.entry().name, left.kind(), right.kind()))
    }
}

/// Charges for the comparisons of a sort: the cost of one pass (the steps since `before`), times log2 of the number of
/// elements.
fn charge_sort(eval: &mut Eval<'_, '_>, before: u64, elements: usize) -> Res<()> {
    let once = usize::try_from(eval.steps() - before).unwrap_or(usize::MAX);
    eval.spend(once.saturating_mul(elements.checked_ilog2().unwrap_or(0) as usize))
}

fn trim<'a>(eval: &mut Eval<'a, '_>, text: &Text<'a>) -> Res<Val<'a>> {
    let from = text.len() - text.trim_start().len();
    eval.piece(text, from, from + text.trim().len())
}

fn split<'a>(eval: &mut Eval<'a, '_>, text: &Text<'a>, separator: &str) -> Res<Val<'a>> {
    let (mut parts, mut from) = (Vec::new(), 0);
    for part in text.split(separator) {
        eval.spend(1)?;
        eval.hold_element()?;
        parts.push(eval.piece(text, from, from + part.len())?);
        from += part.len() + separator.len();
    }
    Ok(Val::list(parts))
}

fn replace<'a>(eval: &mut Eval<'a, '_>, text: &str, from: &str, to: &str) -> Res<Val<'a>> {
    let count = text.matches(from).count();
    eval.spend(count)?;
    eval.made(text.len().saturating_add(count.saturating_mul(to.len())), || text.replace(from, to))
}

/// By characters; an index beyond the end means the end.
fn substring<'a>(eval: &mut Eval<'a, '_>, text: &Text<'a>, from: i64, to: i64) -> Res<Val<'a>> {
    let (from, to) = bounds(from, to)?;
    let place = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    eval.piece(text, place(from), place(to))
}

/// An index beyond the end means the end.
fn slice<'a>(eval: &mut Eval<'a, '_>, items: Items<'_, 'a>, from: i64, to: i64) -> Res<Val<'a>> {
    let (from, to) = bounds(from, to)?;
    let (from, to) = (from.min(items.len()), to.min(items.len()));
    eval.hold_elements(to - from)?;
    Ok(Val::list((from..to).filter_map(|at| items.get(at)).collect()))
}

fn bounds(from: i64, to: i64) -> Res<(usize, usize)> {
    match (usize::try_from(from), usize::try_from(to)) {
        (Ok(from), Ok(to)) if from <= to => Ok((from, to)),
        _ => Err(Halt::fault(format!("the range from {from} to {to} is invalid"))),
    }
}

fn join<'a>(eval: &mut Eval<'a, '_>, items: Items<'_, 'a>, separator: &str) -> Res<Val<'a>> {
    let items = eval.force_all(items)?;
    eval.hold_elements(items.len())?;
    let mut texts = Vec::with_capacity(items.len());
    for item in &items {
        let Val::Str(text) = item else {
            let message = format!("`join` needs strings, found {}; use list.map(x, string(x))", item.kind());
            return Err(Halt::fault(message));
        };
        texts.push(text.as_str());
    }
    let separators = separator.len().saturating_mul(texts.len().saturating_sub(1));
    let bytes = texts.iter().fold(separators, |bytes, text| bytes.saturating_add(text.len()));
    eval.made(bytes, || texts.join(separator))
}

fn flatten<'a>(eval: &mut Eval<'a, '_>, items: Items<'_, 'a>) -> Res<Val<'a>> {
    let mut flat = Vec::new();
    for item in eval.force_all(items)? {
        match item.shape() {
            Shape::Items(inner) => {
                eval.spend(inner.len())?;
                eval.hold_elements(inner.len())?;
                flat.extend(inner.iter());
            }
            _ => {
                eval.hold_element()?;
                flat.push(item.clone());
            }
        }
    }
    Ok(Val::list(flat))
}

/// Keeps the first of equal elements.
fn distinct<'a>(eval: &mut Eval<'a, '_>, whole: &Val<'a>, items: Items<'_, 'a>) -> Res<Val<'a>> {
    struct Ordered<'a>(Val<'a>);
    impl PartialEq for Ordered<'_> {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other).is_eq()
        }
    }
    impl Eq for Ordered<'_> {}
    impl PartialOrd for Ordered<'_> {
        fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
            Some(self.cmp(other))
        }
    }
    impl Ord for Ordered<'_> {
        fn cmp(&self, other: &Self) -> std::cmp::Ordering {
            self.0.order(&other.0)
        }
    }

    let solid = eval.solid(whole.clone())?;
    let before = eval.steps();
    eval.spend(items.len())?;
    eval.weigh(&solid)?;
    charge_sort(eval, before, items.len())?;
    eval.hold_elements(items.len().saturating_mul(3))?;
    let Shape::Items(solid) = solid.shape() else { return Ok(whole.clone()) };
    let mut seen = BTreeSet::new();
    let fresh = solid.iter().zip(items.iter()).filter(|(item, _)| seen.insert(Ordered(item.clone().settle())));
    Ok(Val::list(fresh.map(|(_, item)| item).collect()))
}

fn range<'a>(eval: &mut Eval<'a, '_>, count: i64) -> Res<Val<'a>> {
    if !(0..=MAX_RANGE).contains(&count) {
        return Err(Halt::fault(format!("range({count}) is not between 0 and {MAX_RANGE}")));
    }
    eval.spend(count as usize)?;
    eval.hold_elements(count as usize)?;
    Ok(Val::list((0..count).map(Val::Int).collect()))
}

fn parse_json<'a>(eval: &mut Eval<'a, '_>, text: &str) -> Res<Val<'a>> {
    // Each of these characters may start another value.
    let values = text.bytes().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count() + 1;
    eval.spend(text.len() / 8 + values)?;
    eval.hold(text.len().saturating_mul(3).saturating_add(values.saturating_mul(JSON_VALUE_BYTES)))?;
    let json = serde_json::from_str(text).map_err(|error| Halt::fault(format!("is not JSON: {error}")))?;
    Ok(Val::owned(json))
}

fn to_int<'a>(number: f64) -> Res<Val<'a>> {
    let fits = (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&number);
    if fits { Ok(Val::Int(number as i64)) } else { Err(overflow()) }
}

fn not_a(text: &str, what: &str) -> Halt {
    Halt::fault(format!("`{}` is not a {what}", shorten(text)))
}
