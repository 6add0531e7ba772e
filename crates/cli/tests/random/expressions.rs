//! Random valid expressions and templates, with a bias towards those that grow.

use serde_json::{Value, json};

use crate::chance::Chance;

/// What an expression may read.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Whole expressions: `input`, `steps.a.output`, `item`.
    pub values: Vec<String>,
    /// Integers: `index`, `round`.
    pub numbers: Vec<String>,
}

const PATTERNS: [&str; 5] = ["^(a+)+$", "a.*b.*c", "(ab|a|b)*c", "[a-z]{1,50}", "(x+x+)+y"];
const COUNTS: [usize; 6] = [2, 3, 10, 100, 3_000, 100_000];

pub fn int(chance: &mut Chance, scope: &Scope, depth: usize) -> String {
    if depth == 0 {
        return match scope.numbers.last() {
            Some(number) if chance.one_in(2) => number.clone(),
            _ => chance.below(20).to_string(),
        };
    }
    match chance.below(7) {
        0 => format!("size({})", list(chance, scope, depth - 1)),
        1 => format!("size({})", string(chance, scope, depth - 1)),
        2 => format!("({} + {})", int(chance, scope, depth - 1), int(chance, scope, depth - 1)),
        3 => in_loop(chance, scope, depth, |chance, scope, depth, list, x| {
            format!("sum({list}.map({x}, {}))", int(chance, scope, depth))
        }),
        4 => {
            let (condition, one) = (bool(chance, scope, depth - 1), int(chance, scope, depth - 1));
            format!("({condition} ? {one} : {})", int(chance, scope, depth - 1))
        }
        5 => format!("size(json({}))", any(chance, scope, depth - 1)),
        _ => format!("max([{}, {}])", int(chance, scope, depth - 1), int(chance, scope, depth - 1)),
    }
}

pub fn bool(chance: &mut Chance, scope: &Scope, depth: usize) -> String {
    if depth == 0 {
        return chance.pick(&["true", "false"]).to_string();
    }
    match chance.below(8) {
        0 => format!("{} < {}", int(chance, scope, depth - 1), int(chance, scope, depth - 1)),
        1 => format!("has({}.missing)", value(chance, scope)),
        2 => format!("default({}.missing, {}) == 1", value(chance, scope), int(chance, scope, depth - 1)),
        3 => in_loop(chance, scope, depth, |chance, scope, depth, list, x| {
            format!("{list}.exists({x}, {})", bool(chance, scope, depth))
        }),
        4 => format!("{}.matches('{}')", string(chance, scope, depth - 1), chance.pick(&PATTERNS)),
        5 => format!("{} == {}", any(chance, scope, depth - 1), any(chance, scope, depth - 1)),
        6 => format!("{} in {}", int(chance, scope, depth - 1), list(chance, scope, depth - 1)),
        _ => format!("({} || {})", bool(chance, scope, depth - 1), bool(chance, scope, depth - 1)),
    }
}

pub fn string(chance: &mut Chance, scope: &Scope, depth: usize) -> String {
    if depth == 0 {
        return chance.pick(&["'ab'", "'a,b'", "string(run.input.n)", "run.input.s"]).to_string();
    }
    match chance.below(7) {
        0 => format!("({} + {})", string(chance, scope, depth - 1), string(chance, scope, depth - 1)),
        1 => format!("json({})", any(chance, scope, depth - 1)),
        2 => in_loop(chance, scope, depth, |chance, scope, depth, list, x| {
            format!("{list}.map({x}, {}).join('-')", string(chance, scope, depth))
        }),
        3 => format!("{}.replace('a', 'aaaaaaaa')", string(chance, scope, depth - 1)),
        4 => format!("{}.upperAscii()", string(chance, scope, depth - 1)),
        5 => format!("{}.substring(0, {})", string(chance, scope, depth - 1), chance.pick(&COUNTS)),
        _ => format!("[{0}, {0}, {0}].join()", string(chance, scope, depth - 1)),
    }
}

pub fn list(chance: &mut Chance, scope: &Scope, depth: usize) -> String {
    if depth == 0 {
        let count = chance.pick(&COUNTS).to_string();
        return chance
            .pick(&[format!("range({count})"), String::from("run.input.l"), String::from("[1, 2, 3]")])
            .clone();
    }
    match chance.below(10) {
        0 | 1 => in_loop(chance, scope, depth, |chance, scope, depth, list, x| {
            format!("{list}.map({x}, {})", any(chance, scope, depth))
        }),
        2 => in_loop(chance, scope, depth, |chance, scope, depth, list, x| {
            format!("{list}.filter({x}, {})", bool(chance, scope, depth))
        }),
        3 => format!("({} + {})", list(chance, scope, depth - 1), list(chance, scope, depth - 1)),
        4 => format!("flatten([{0}, {0}])", list(chance, scope, depth - 1)),
        5 => format!("{}.reverse()", list(chance, scope, depth - 1)),
        6 => format!("{}.split(',')", string(chance, scope, depth - 1)),
        7 => format!("distinct({})", list(chance, scope, depth - 1)),
        8 => format!("values({})", map(chance, scope, depth - 1)),
        _ => format!("slice({}, 0, {})", list(chance, scope, depth - 1), chance.pick(&COUNTS)),
    }
}

fn map(chance: &mut Chance, scope: &Scope, depth: usize) -> String {
    match chance.below(3) {
        0 => String::from("run.input.m"),
        1 => format!("{{'a': {0}, 'b': {0}}}", any(chance, scope, depth.saturating_sub(1))),
        _ => format!("{{'k': {}}}", any(chance, scope, depth.saturating_sub(1))),
    }
}

pub fn any(chance: &mut Chance, scope: &Scope, depth: usize) -> String {
    match chance.below(if depth == 0 { 2 } else { 7 }) {
        0 => value(chance, scope),
        1 => int(chance, scope, depth.min(1)),
        2 => string(chance, scope, depth - 1),
        3 => list(chance, scope, depth - 1),
        4 => map(chance, scope, depth - 1),
        5 => format!("[{0}, {0}]", any(chance, scope, depth - 1)),
        _ => bool(chance, scope, depth - 1),
    }
}

fn value(chance: &mut Chance, scope: &Scope) -> String {
    if scope.values.is_empty() || chance.one_in(4) {
        return String::from("run.input");
    }
    chance.pick(&scope.values).clone()
}

/// A list, and an expression over each of its elements.
fn in_loop(
    chance: &mut Chance,
    scope: &Scope,
    depth: usize,
    body: impl FnOnce(&mut Chance, &Scope, usize, &str, &str) -> String,
) -> String {
    let over = list(chance, scope, depth - 1);
    let name = format!("x{}", scope.values.len());
    let mut inner = scope.clone();
    inner.values.push(name.clone());
    body(chance, &inner, depth - 1, &over, &name)
}

/// A template: JSON with expressions in it.
pub fn template(chance: &mut Chance, scope: &Scope, depth: usize) -> Value {
    let expression = |chance: &mut Chance| any(chance, scope, depth);
    match chance.below(6) {
        0 | 1 => json!(format!("${{{}}}", expression(chance))),
        2 => {
            let twice = format!("${{{}}}", expression(chance));
            json!([twice, twice])
        }
        3 => json!(format!("a ${{{}}} b ${{{}}}", expression(chance), expression(chance))),
        4 => json!({"a": format!("${{{}}}", expression(chance)), "b": [1, {"c": "${run.input}"}]}),
        _ => chance.value(2),
    }
}
