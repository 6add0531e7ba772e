use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::data::{RoughSize, ValueRef};

/// 2026-01-02T03:04:05.678Z
const NOW: Millis = 1_767_323_045_678;

/// The fields of `roots` are roots, except `steps`, `events`, `gates` and `run`.
#[derive(Default)]
struct Scope {
    roots: BTreeMap<String, Data>,
    tables: BTreeMap<String, Data>,
    stored: BTreeMap<ValueId, Data>,
}

impl Scope {
    fn new(scope: Value) -> Scope {
        let mut made = Scope::default();
        for (name, value) in scope.as_object().unwrap() {
            match (Table::named(name), value) {
                (Some(_), Value::Object(entries)) => {
                    for (key, entry) in entries {
                        made.tables.insert(format!("{name}/{key}"), Data::from(entry.clone()));
                    }
                }
                _ => {
                    made.roots.insert(name.clone(), Data::from(value.clone()));
                }
            }
        }
        made
    }

    fn root(mut self, name: &str, data: Data) -> Scope {
        self.roots.insert(name.to_string(), data);
        self
    }

    fn stored(mut self, id: u32, value: Value) -> Scope {
        self.stored.insert(ValueId(id), Data::from(value));
        self
    }
}

struct View<'a>(&'a Scope);

impl<'a> Names<'a> for View<'a> {
    fn root(&self, name: &str) -> Option<Val<'a>> {
        self.0.roots.get(name).map(Val::Data)
    }

    fn entry(&self, table: Table, key: &str) -> Option<Val<'a>> {
        self.0.tables.get(&format!("{}/{key}", table.name())).map(Val::Data)
    }

    fn value(&self, id: ValueId) -> Option<&'a Data> {
        self.0.stored.get(&id)
    }

    fn now(&self) -> Millis {
        NOW
    }
}

fn stored_as(id: u32) -> ValueRef {
    ValueRef { id: ValueId(id), bytes: 900, depth: 2, read_size: RoughSize::of(900) }
}

fn at(id: u32) -> Data {
    Data::Ref(stored_as(id))
}

fn list(items: Vec<Data>) -> Data {
    Data::List(Arc::new(items))
}

fn map(fields: Vec<(&str, Data)>) -> Data {
    Data::Map(Arc::new(fields.into_iter().map(|(key, field)| (Arc::from(key), field)).collect()))
}

fn data(text: &str, scope: &Scope) -> Result<Data, Stop> {
    let expr = Expr::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    expr.data(&View(scope), &mut Fuel::default())
}

fn message(stop: Stop) -> String {
    match stop {
        Stop::Failed(error) => error.message,
        stop => panic!("{stop:?}"),
    }
}

fn check(scope: Value, cases: &[(&str, Value)]) {
    let scope = Scope::new(scope);
    for (text, expected) in cases {
        match data(text, &scope) {
            Ok(Data::Json(found)) => assert_eq!(found.as_ref(), expected, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
}

fn check_fails(scope: Value, cases: &[(&str, &str)]) {
    let scope = Scope::new(scope);
    for (text, expected) in cases {
        match data(text, &scope) {
            Err(stop) => assert_eq!(message(stop), *expected, "{text}"),
            Ok(found) => panic!("{text}: {found:?}"),
        }
    }
}

fn check_refused(cases: &[(&str, usize, &str)]) {
    for (text, offset, expected) in cases {
        let error = Expr::parse(text).expect_err(text);
        assert_eq!((error.message.as_str(), error.offset), (*expected, *offset), "{text}");
    }
}

fn sample() -> Value {
    json!({
        "input": {"a": 1, "b": 2.5, "s": "text", "n": null, "list": [3, 1, 2], "m": {"x": 1, "y": 2}, "t": true,
                  "big": 18_446_744_073_709_551_615u64, "orders": [{"price": 2, "name": "b"}, {"price": 3, "name": "a"}]},
        "item": {"id": 7},
        "index": 3,
        "steps": {"load": {"output": {"total": 120}, "status": "completed"}, "skipped": {"output": null}},
        "events": {"step.a.done": {"x": 5}, "seen": 1},
        "gates": {"pay": {"url": "https://x"}},
        "run": {"id": "r1"},
    })
}

#[test]
fn literals_and_operators() {
    check(
        sample(),
        &[
            ("null", json!(null)),
            ("true", json!(true)),
            ("7u", json!(7)),
            ("0x10", json!(16)),
            ("-9223372036854775808", json!(i64::MIN)),
            ("1.5e3", json!(1500.0)),
        ],
    );
    check(
        sample(),
        &[
            (r#"'a' + "b" + r'\n' + '\n' + '''c'd''' + """e"f""""#, json!("ab\\n\nc'de\"f")),
            ("[1, 'a', [2], {'k': null}]", json!([1, "a", [2], {"k": null}])),
            ("{'b': 1, 'a': {'c': [2]}}", json!({"a": {"c": [2]}, "b": 1})),
            ("1 + 2 * 3 - 4", json!(3)),
            ("(1 + 2) * 3", json!(9)),
            ("7 / 2", json!(3)),
            ("-7 / 2", json!(-3)),
            ("7 % 4", json!(3)),
            ("1 + 1.5", json!(2.5)),
            ("7 / 2.0", json!(3.5)),
            ("2.5 * 2", json!(5.0)),
            ("-input.a", json!(-1)),
            ("- - 1", json!(1)),
            ("!true", json!(false)),
            ("!!true", json!(true)),
            ("1 == 1.0", json!(true)),
            ("9007199254740993 == 9007199254740992.0", json!(false)),
            ("9007199254740993 > 9007199254740992.0", json!(true)),
            ("1 != '1'", json!(true)),
            ("null == false", json!(false)),
            ("input.n == null", json!(true)),
            ("[1, {'a': 2}] == [1.0, {'a': 2}]", json!(true)),
            ("{'a': 1, 'b': 2} == {'b': 2, 'a': 1}", json!(true)),
            ("input.m == {'y': 2, 'x': 1}", json!(true)),
            ("input.list == [3, 1]", json!(false)),
            ("[input.big] == [input.big]", json!(true)),
            ("1 < 2.5 && 2.5 <= 2.5 && 'a' < 'b' && false < true && 3 >= 3 && 4 > 3", json!(true)),
            ("[1] + [2, 3]", json!([1, 2, 3])),
            ("1 in input.list", json!(true)),
            ("1.0 in input.list", json!(true)),
            ("'x' in input.m", json!(true)),
            ("'z' in input.m", json!(false)),
            ("'step.a.done' in events", json!(true)),
            ("'nope' in events || 'nope' in steps", json!(false)),
            ("input.a == 1 ? 'yes' : 'no'", json!("yes")),
            ("false ? 1 : true ? 2 : 3", json!(2)),
        ],
    );
}

#[test]
fn a_side_that_decides_does_so_though_the_other_fails() {
    check(
        sample(),
        &[
            ("true || input.nope", json!(true)),
            ("input.nope || true", json!(true)),
            ("false && input.nope", json!(false)),
            ("input.nope && false", json!(false)),
            ("[1, 'a', 3].exists(x, x > 2)", json!(true)),
            ("[1, 'a', 3].all(x, x > 2)", json!(false)),
        ],
    );
    check_fails(
        sample(),
        &[
            ("input.nope && true", "`input` has no field `nope`"),
            ("false || 1", "`||` needs true or false, found an int"),
            ("['a', 1].exists(x, x > 2)", "`>` does not work on a string and an int"),
        ],
    );
}

#[test]
fn names_fields_and_indexes() {
    check(
        sample(),
        &[
            ("input.a", json!(1)),
            ("input['a']", json!(1)),
            ("input.list[0]", json!(3)),
            ("input.orders[1].name", json!("a")),
            ("input.m[['x', 'y'][1]]", json!(2)),
            ("item.id + index", json!(10)),
            ("steps.load.output.total > 100", json!(true)),
            ("steps.skipped.output", json!(null)),
            ("events['step.a.done'].x", json!(5)),
            ("events.`step.a.done`.x", json!(5)),
            ("gates.pay.url + run.id", json!("https://xr1")),
            ("input.big", json!(18_446_744_073_709_551_615u64)),
            ("input.big > 1", json!(true)),
            ("has(input.a) && !has(input.z) && has(input.n)", json!(true)),
            ("has(events.seen) && !has(events.other) && !has(events.other.x)", json!(true)),
            ("has(events['step.a.done']) && !has(events['step.b.done'])", json!(true)),
            ("has(input.n.x) || has(input.list[3])", json!(false)),
            ("has(input.list[2])", json!(true)),
        ],
    );
    check_fails(
        sample(),
        &[
            ("nope", "unknown name `nope`"),
            ("steps.gone.output", "`steps.gone` is not decided yet or does not exist"),
            ("events.other", "event `other` was not emitted"),
            ("gates.other", "`gates.other` is not open yet or does not exist"),
            ("run.ide", "`run` has no field `ide`"),
            ("steps.skipped.output.total", "`steps.skipped.output` is null, so it has no field `total`"),
            ("steps.load.output.totl", "`steps.load.output` has no field `totl`; did you mean `total`?"),
            ("input.s.x", "`input.s` is a string, which has no field `x`"),
            ("input.list[3]", "index 3 is out of range: `input.list` has 3 elements"),
            ("input.list[-1]", "index -1 is out of range: `input.list` has 3 elements"),
            ("[1][1]", "index 1 is out of range: the list has 1 elements"),
            ("input.list['a']", "`input.list` is a list, which has no field `a`"),
            ("input.list[true]", "a list is indexed by an int, found a bool"),
            ("input.m[1]", "a map is indexed by a string, found an int"),
            ("input.a[0]", "`input.a` is an int, which has no index"),
        ],
    );
    for table in ["size(steps)", "steps == 1", "events.map(x, x)", "[gates]", "steps + 1", "type(steps)"] {
        let found = message(data(table, &Scope::new(sample())).unwrap_err());
        assert!(found.ends_with("can only be read by name"), "{table}: {found}");
    }
}

#[test]
fn macros() {
    check(
        sample(),
        &[
            ("input.list.all(x, x > 0)", json!(true)),
            ("input.list.exists(x, x > 2)", json!(true)),
            ("input.list.exists_one(x, x > 1)", json!(false)),
            ("input.list.existsOne(x, x > 2)", json!(true)),
            ("input.list.map(x, x * 2)", json!([6, 2, 4])),
            ("input.list.map(x, x > 1, x * 2)", json!([6, 4])),
            ("input.list.filter(x, x != 1)", json!([3, 2])),
            ("input.m.map(k, k)", json!(["x", "y"])),
            ("[1, 2].map(x, [10, 20].map(y, x * y + index))", json!([[13, 23], [23, 43]])),
            ("[1, 2].map(input, input + 1)", json!([2, 3])),
            ("[[1], [2]].map(x, x.map(x, x + 1))", json!([[2], [3]])),
            ("[1].map(x, default([2].map(y, input.nope)[0], x))", json!([1])),
            ("[].all(x, x) && ![].exists(x, x)", json!(true)),
        ],
    );
    check_fails(
        sample(),
        &[
            ("input.list.filter(x, x)", "the condition of `filter` must be true or false, found an int"),
            ("input.a.map(x, x)", "needs a list or a map, found an int"),
        ],
    );
}

#[test]
fn functions() {
    check(
        sample(),
        &[
            ("size('añb') + size([1]) + input.m.size()", json!(6)),
            ("'abc'.contains('b') && contains('abc', 'c') && !'abc'.contains('d')", json!(true)),
            ("'abc'.startsWith('ab') && 'abc'.endsWith('bc') && !'abc'.endsWith('ab')", json!(true)),
            ("'a1b22'.matches('^[a-z0-9]+$') && !matches('a', 'b')", json!(true)),
            ("'AbÄ'.lowerAscii() + 'abä'.upperAscii()", json!("abÄABä")),
            ("'  a b '.trim() + (' ' + 'c ').trim()", json!("a bc")),
            ("'a,b,,c'.split(',')", json!(["a", "b", "", "c"])),
            ("('a' + ',b').split(',')", json!(["a", "b"])),
            ("['a', 'b'].join('-') + join(['c', 'd'])", json!("a-bcd")),
            ("'aXbX'.replace('X', 'yy')", json!("ayybyy")),
            ("'añbc'.substring(1) + 'añbc'.substring(1, 3) + 'ab'.substring(1, 9)", json!("ñbcñbb")),
            ("int('42') + int(3.9) + int(-3.9) + int(1)", json!(43)),
            ("int(timestamp(5)) + int(duration('2s'))", json!(2005)),
            ("double('1.5') + double(1)", json!(2.5)),
            ("string(1) + string(1.5) + string(true) + string('x')", json!("11.5truex")),
            ("bool('true') && !bool('false') && bool(true)", json!(true)),
            (
                "[null, true, 1, 1.5, '', [], {}, now(), duration('1s')].map(x, type(x))",
                json!(["null", "bool", "int", "double", "string", "list", "map", "timestamp", "duration"]),
            ),
            ("sum([1, 2]) + sum([])", json!(3)),
            ("sum([1, 2.5])", json!(3.5)),
            ("sum([duration('1s'), duration('1s')])", json!("2s")),
            ("avg([1, 2])", json!(1.5)),
            (
                "[min([3, 1.5]), max([3, 1.5]), min(2, 1), max('a', 'b', 'c'), input.list.max()]",
                json!([1.5, 3, 1, "c", 3]),
            ),
            ("flatten([[1], [2, [3]], 4])", json!([1, 2, [3], 4])),
            ("keys(input.m) + values(input.m)", json!(["x", "y", 1, 2])),
            ("keys({'b': 1, 'a': 2})", json!(["b", "a"])),
            (
                "[default(input.z, 1), default(input.n, 2), default(input.a, 3), default(steps.gone.output, 4)]",
                json!([1, 2, 1, 4]),
            ),
            (
                "[default(events.x.y, 5), input.n.x.default(6), default(input.list[9], 7), default(max([]), 8)]",
                json!([5, 6, 7, 8]),
            ),
            (
                "[abs(-2), abs(-2.5), round(2.5), round(-0.4), floor(-1.5), ceil(1.2), round(3)]",
                json!([2, 2.5, 3, 0, -2, 2, 3]),
            ),
            ("json({'a': [1, 'x', null]}) + json(input.m)", json!(r#"{"a":[1,"x",null]}{"x":1,"y":2}"#)),
            ("parse_json('{\"a\": [1, 2.5, \"x\"]}').a", json!([1, 2.5, "x"])),
            (
                "distinct([1, 'a', 1.0, 'a', [1], [1.0], {'k': 1}, {'k': 1}, null])",
                json!([1, "a", [1], {"k": 1}, null]),
            ),
            ("sort([3, 1.5, 2]) + sort(['b', 'a']) + sort([])", json!([1.5, 2, 3, "a", "b"])),
            ("range(3) + range(0)", json!([0, 1, 2])),
            ("[first(input.list), last(input.list)]", json!([3, 2])),
            ("reverse(input.list)", json!([2, 1, 3])),
            ("slice(input.list, 1, 2) + input.list.slice(1) + slice(input.list, 5, 9)", json!([1, 1, 2])),
        ],
    );
}

#[test]
fn times_and_durations() {
    check(
        sample(),
        &[
            ("now()", json!("2026-01-02T03:04:05.678Z")),
            ("string(timestamp('2026-01-02T04:04:05+01:00'))", json!("2026-01-02T03:04:05.000Z")),
            ("timestamp(0)", json!("1970-01-01T00:00:00.000Z")),
            ("now() + duration('1h30m')", json!("2026-01-02T04:34:05.678Z")),
            ("duration('1d') + now() - duration('1d') == now()", json!(true)),
            ("now() - timestamp('2026-01-02T03:04:05Z')", json!("678ms")),
            ("duration('1m') + duration('30s')", json!("90s")),
            ("duration('1m') - duration('1.5s') * 2", json!("57s")),
            ("-duration('250ms')", json!("-250ms")),
            ("duration('-1s') < duration('0s') && now() > timestamp(0)", json!(true)),
            ("string(duration('1h')) + json(duration('2s'))", json!("3600s\"2s\"")),
        ],
    );
    check_fails(
        sample(),
        &[
            ("timestamp('today')", "`today` is not a time like 2026-01-02T03:04:05Z"),
            ("duration('1 hour')", "`1 hour` is not a duration like 1h30m or 250ms"),
            ("duration('')", "`` is not a duration like 1h30m or 250ms"),
            ("timestamp(9223372036854775807)", "9223372036854775807 ms since 1970 is out of the range of dates"),
            ("now() + 1", "`+` does not work on a timestamp and an int"),
        ],
    );
    let scope = Scope::new(json!({"input": {"at": "2026-01-02T03:04:05.678Z", "ms": 5, "no": true}}));
    let time = |text: &str| Expr::parse(text).unwrap().time(&View(&scope), &mut Fuel::default());
    assert_eq!(time("input.at"), Ok(NOW));
    assert_eq!(time("input.ms"), Ok(5));
    assert_eq!(time("now() + duration('1s')"), Ok(NOW + 1000));
    assert_eq!(
        message(time("input.no").unwrap_err()),
        "must be a time: a timestamp, an RFC 3339 text or milliseconds since 1970, found a bool"
    );
}

#[test]
fn what_goes_wrong_is_said() {
    check_fails(
        sample(),
        &[
            ("9223372036854775807 + 1", "the number does not fit in 64 bits"),
            ("-(-9223372036854775807 - 1)", "the number does not fit in 64 bits"),
            ("(-9223372036854775807 - 1) / -1", "the number does not fit in 64 bits"),
            ("1 / 0", "division by zero"),
            ("1 % 0", "division by zero"),
            ("1.0 / 0", "division by zero"),
            ("1e308 * 10", "the result is not a finite number: inf"),
            ("'n: ' + 1", "cannot add a string and an int; use string(x) to convert it"),
            ("1.5 + 'x'", "cannot add a string and a double; use string(x) to convert it"),
            ("[1] + 1", "`+` does not work on a list and an int"),
            ("1 < 'a'", "`<` does not work on an int and a string"),
            ("null < 1", "`<` does not work on null and an int"),
            ("'a' in 'abc'", "`in` is for lists and maps; for text use text.contains(part)"),
            ("{'a': 1, 'a': 2}", "duplicate key `a`"),
            ("{1: 1}", "a key of a map must be a string, found an int"),
            ("'a'.size() ? 1 : 2", "`?` needs true or false, found an int"),
            ("-'a'", "`-` needs a number, found a string"),
            ("int('x')", "`x` is not a whole number"),
            ("double('nan')", "`nan` is not a number"),
            ("int(1e30)", "the number does not fit in 64 bits"),
            ("string([1])", "`string` does not accept a list; use json(x) for its JSON"),
            ("contains([1], 1)", "`contains` does not accept a list, an int; write text.contains(part)"),
            ("sum([1, 'a'])", "`sum` needs numbers, found a string"),
            ("sum(1)", "`sum` does not accept an int; write sum(list of numbers)"),
            ("max([])", "`max` of an empty list"),
            ("min(1, 'a')", "`min` cannot compare a string with an int"),
            ("max([[1]])", "`max` cannot compare a list with a list"),
            ("sort([1, 'a'])", "`sort` cannot compare an int with a string"),
            ("[1].join(',')", "`join` needs strings, found an int; use list.map(x, string(x))"),
            ("range(-1)", "range(-1) is not between 0 and 100000"),
            ("slice([1], 2, 1)", "the range from 2 to 1 is invalid"),
            ("parse_json('{')", "is not JSON: EOF while parsing an object at line 1 column 1"),
            ("'a'.matches('(' + '')", "`(` is not a pattern: found open group without closing ')'"),
        ],
    );
    let scope = Scope::new(sample());
    let test = |text: &str| Expr::parse(text).unwrap().test(&View(&scope), &mut Fuel::default());
    assert_eq!(test("steps.load.output.total > 100"), Ok(true));
    assert_eq!(message(test("input.s").unwrap_err()), "a condition must be true or false, found a string");
    assert_eq!(
        test("steps.load.output.totl > 100").unwrap_err().to_string(),
        "`steps.load.output.totl > 100` failed at column 18: `steps.load.output` has no field `totl`; \
         did you mean `total`?"
    );
    assert_eq!(
        test("true &&\n 'ä' < 1").unwrap_err().to_string(),
        "`true &&\n 'ä' < 1` failed at line 2, column 6: `<` does not work on a string and an int"
    );
}

#[test]
fn what_can_be_known_to_be_wrong_is_refused_at_once() {
    check_refused(&[
        ("", 0, "the expression is empty"),
        ("1 +", 3, "the expression ends too early"),
        ("1 2", 2, "unexpected `2`"),
        ("a b", 2, "unexpected `b`"),
        ("(1", 0, "`(` is never closed"),
        ("(1]", 2, "found `]`, but `(` at column 1 is still open"),
        ("1)", 1, "unmatched `)`"),
        ("'abc", 0, "the string is never closed"),
        (r"'a\q'", 2, "unknown escape in the string"),
        ("a = 1", 2, "found `=`; did you mean `==`?"),
        ("a & b", 2, "found `&`; did you mean `&&`?"),
        ("a # b", 2, "unexpected character `#`"),
        ("'ä' +* 1", 6, "unexpected `*`"),
        ("99999999999999999999", 0, "the number does not fit in 64 bits"),
        ("9223372036854775808u", 0, "the number does not fit in 64 bits"),
        ("b'x'", 0, "bytes are not supported; remove the `b` prefix"),
        ("Point{x: 1}", 5, "typed objects are not supported; write a map: {\"key\": value}"),
        ("a.?b", 1, "optional values (`?`) are not supported; use default(x, fallback) or has(x.y)"),
        (".a", 1, "a name cannot start with a dot"),
        ("a.for + if", 8, "`if` is a reserved word"),
        ("1 + siz([1])", 4, "there is no function `siz`; did you mean `size`?"),
        ("[1].sise()", 4, "there is no function `sise`; did you mean `size`?"),
        ("size(1, 2)", 0, "`size` got 2 arguments; write size(text, list or map)"),
        ("now(1)", 0, "`now` got 1 arguments; write now()"),
        ("default(1)", 0, "`default` is written default(value, fallback)"),
        ("has(a)", 0, "`has` takes a field: has(input.x)"),
        ("map(a, b)", 0, "`map` is written list.map(x, …), with x standing for each element"),
        ("a.map(b.c, 1)", 2, "`map` is written list.map(x, …), with x standing for each element"),
        ("a.matches('[')", 10, "`[` is not a pattern: found unclosed character class"),
    ]);
    let unknown = Expr::parse("frobnicate(1)").unwrap_err();
    assert!(
        unknown.message.starts_with("there is no function `frobnicate`; known functions: abs, all, avg, bool"),
        "{unknown}"
    );
    assert_eq!(unknown.to_string(), format!("column 1: {}", unknown.message));
}

#[test]
fn reads_are_the_free_names() {
    let read = |text: &str| -> Vec<String> {
        let expr = Expr::parse(text).unwrap();
        let show = |read: &Read| {
            let part = |part: &Option<String>| part.clone().unwrap_or("-".into());
            format!("{}@{} {} {}", read.root, read.offset, part(&read.key), part(&read.field))
        };
        expr.reads().iter().map(show).collect()
    };
    assert_eq!(read("steps.load.output.total > input.a"), ["steps@0 load output", "input@26 a -"]);
    assert_eq!(read("events['step.a.done'].x"), ["events@0 step.a.done x"]);
    assert_eq!(read("events[\"a\"]['b']['c']"), ["events@0 a b"]);
    assert_eq!(read("size(steps) + steps[x].output"), ["steps@5 - -", "steps@14 - -", "x@20 - -"]);
    assert_eq!(read("a.list.map(x, x.b + a.c + y)"), ["a@0 list -", "a@20 c -", "y@26 - -"]);
    assert_eq!(read("x.map(x, x.y)"), ["x@0 - -"]);
    assert_eq!(read("has(steps.a.output)"), ["steps@4 a output"]);
    assert_eq!(read("[1].map(steps, steps.a) + [steps.b]"), ["steps@27 b -"]);
    assert_eq!(read("default(item.x.y, now())"), ["item@8 x y"]);
    assert_eq!(read("input.list[0].x"), ["input@0 list -"]);
}

#[test]
fn what_is_passed_on_is_not_loaded() {
    let each = list(vec![at(1), at(2), Data::from(json!({"price": 3}))]);
    let fields = map(vec![("a", at(3)), ("b", Data::from(json!(4)))]);
    let scope = Scope::default().root("each", each.clone()).root("fields", fields.clone()).root("one", at(9));
    assert_eq!(data("one", &scope), Ok(at(9)));
    assert_eq!(data("each", &scope), Ok(each.clone()));
    assert_eq!(data("each[1]", &scope), Ok(at(2)));
    assert_eq!(data("each[2].price", &scope), Ok(Data::from(json!(3))));
    assert_eq!(data("fields.a", &scope), Ok(at(3)));
    assert_eq!(data("fields.b + size(each) + size(fields)", &scope), Ok(Data::from(json!(9))));
    assert_eq!(data("true ? one : 1", &scope), Ok(at(9)));
    assert_eq!(data("[one, 1]", &scope), Ok(list(vec![at(9), Data::from(json!(1))])));
    assert_eq!(data("{'k': one}", &scope), Ok(map(vec![("k", at(9))])));
    assert_eq!(data("reverse(each).map(x, x)[1]", &scope), Ok(at(2)));
    assert_eq!(data("has(fields.a) && 'a' in fields && each != 1", &scope), Ok(Data::from(json!(true))));
    assert_eq!(data("each == [1]", &scope), Ok(Data::from(json!(false))));
    let spread = Expr::parse("each").unwrap().list(&View(&scope), &mut Fuel::default());
    assert_eq!(spread, Ok(each));

    let big = Data::from(json!({"text": "x".repeat(1000)}));
    let Data::Json(shared) = &big else { panic!() };
    let scope = Scope::default().root("big", big.clone());
    let Ok(Data::Json(same)) = data("big", &scope) else { panic!() };
    assert!(Arc::ptr_eq(shared, &same));
}

#[test]
fn all_that_is_missing_is_named_at_once() {
    let each = list(vec![at(1), at(2), at(3), at(2)]);
    let scope = || Scope::default().root("each", each.clone()).root("l", at(8)).root("r", at(9));
    let needs = |text: &str, ids: &[u32]| {
        let expected = Err(Stop::Need(ids.iter().map(|id| stored_as(*id)).collect()));
        assert_eq!(data(text, &scope()), expected, "{text}");
    };
    for text in [
        "sum(each.map(x, x.price))",
        "each.filter(x, x.price > 1)",
        "each.exists(x, x.price > 1)",
        "each.all(x, x.price > 1)",
        "sum(each)",
        "each == [1, 2, 3, 4]",
        "5 in each",
        "sort(each)",
        "distinct(each)",
        "json(each)",
        "flatten(each)",
        "[each[0], each[1]].map(x, x.y) + each.map(x, x.z)",
        "default(sum(each), 0)",
    ] {
        needs(text, &[1, 2, 3]);
    }
    needs("l + r", &[8, 9]);
    needs("max(l, r)", &[8, 9]);
    needs("{'a': l.x, 'b': r.x}", &[8, 9]);
    needs("l || true", &[8]);
    needs("false || l", &[8]);
    needs("default(l, 1)", &[8]);
    needs("(1 / 0 == 1) || l", &[8]);
    assert_eq!(data("true || l", &scope()), Ok(Data::from(json!(true))));

    let priced = |price: i64| json!({"price": price});
    let loaded = scope().stored(1, priced(1)).stored(2, priced(2)).stored(3, priced(4));
    assert_eq!(data("sum(each.map(x, x.price))", &loaded), Ok(Data::from(json!(9))));
    assert_eq!(data("each.filter(x, x.price > 3)", &loaded), Ok(list(vec![at(3)])));
    assert_eq!(data("distinct(each)", &loaded), Ok(list(vec![at(1), at(2), at(3)])));
    assert_eq!(data("each[0] == {'price': 1}", &loaded), Ok(Data::from(json!(true))));
    let spread = |text: &str, scope: &Scope| Expr::parse(text).unwrap().list(&View(scope), &mut Fuel::default());
    assert_eq!(spread("l", &scope()), Err(Stop::Need(vec![stored_as(8)])));
    let stored = scope().stored(8, json!([1, 2])).stored(9, json!({}));
    assert_eq!(spread("l", &stored), Ok(Data::from(json!([1, 2]))));
    assert_eq!(message(spread("r", &stored).unwrap_err()), "must be a list, found a map");
}

#[test]
fn stored_values_are_paid_for_before_they_are_asked_for() {
    let sized = |id: u32, bytes: u32| {
        Data::Ref(ValueRef { id: ValueId(id), bytes, depth: 0, read_size: RoughSize::of(bytes as usize) })
    };
    let each = |values: u32| list((0..values).map(|id| sized(id, 1 << 20)).collect());
    let scope = |values: u32| Scope::default().root("each", each(values));
    // Everything within the read limit is requested at once.
    let needed = data("each.map(x, size(x))", &scope(32)).unwrap_err();
    assert!(matches!(&needed, Stop::Need(missing) if missing.len() == 32), "{needed:?}");
    // Beyond the limit no more is requested, and once it is loaded, the evaluation fails.
    let mut scope = scope(2_000);
    let limit = "read more than 32 MiB of stored values, the limit of an evaluation";
    for text in ["each.map(x, size(x))", "each.exists(x, x == 'y')", "json(each)", "sum(each)", "distinct(each)"] {
        match data(text, &scope) {
            Err(Stop::Need(missing)) => {
                assert!(missing.len() <= 32, "{text}: {}", missing.len());
                for stored in missing {
                    scope = scope.stored(stored.id.0, json!("x"));
                }
                assert_eq!(message(data(text, &scope).unwrap_err()), limit, "{text}");
            }
            failed => assert_eq!(message(failed.unwrap_err()), limit, "{text}"),
        }
    }
    // A value is charged once; values only passed on are not charged.
    let one = Scope::default().root("one", sized(1, 20 << 20)).stored(1, json!([1]));
    assert_eq!(data("range(1000).map(x, one[0])", &one), Ok(Data::from(json!(vec![1; 1_000]))));
    let many = list((0..2_000).map(|id| sized(id, 1 << 20)).collect());
    assert_eq!(data("each.filter(x, true)", &scope), Ok(many));
}

#[test]
fn steps_and_memory_are_counted() {
    let items: Vec<Value> = (0..10_000).map(|n| json!({"price": n, "name": "some name"})).collect();
    let scope = Scope::new(json!({"items": items, "text": "x".repeat(10_000)}));
    assert_eq!(data("sum(items.map(x, x.price))", &scope), Ok(Data::from(json!(49_995_000))));
    let stopped = |text: &str| {
        let found = message(data(text, &scope).unwrap_err());
        let bounded = ["took more than 1000000 steps", "used more than 32 MiB of memory"];
        assert!(bounded.contains(&found.as_str()), "{text}: {found}");
    };
    stopped("items.map(x, items.map(y, y.price))");
    stopped("items.all(x, x in items)");
    stopped("range(100000).map(x, range(100000))");
    stopped("items.map(x, text + text)");
    stopped("items.map(x, text.replace('x', text))");
    stopped("items.map(x, text.replace('', 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'))");
    stopped("items.map(x, json(items))");
    stopped("items.map(x, text.matches('(x+x+)+y'))");
    stopped("items.map(x, default(items == items, 1) || true)");
    let large = message(data("range(3000).map(x, text.substring(0, 1000))", &scope).unwrap_err());
    assert_eq!(large, "the result is larger than 2 MiB");

    let expr = Expr::parse("[1, 2].map(x, x)").unwrap();
    let steps = |fuel: u64| expr.data(&View(&scope), &mut Fuel::new(Cost { steps: fuel, ..EVALUATION }));
    assert_eq!(message(steps(8).unwrap_err()), "took more than 8 steps");
    assert!(steps(20).is_ok());
}

#[test]
fn nesting_and_length_are_bounded() {
    let cases = [
        "(".repeat(100_000),
        format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000)),
        format!("{}1{}", "(".repeat(4000), ")".repeat(4000)),
        format!("{}1{}", "[".repeat(4000), "]".repeat(4000)),
        format!("{}1{}", "{'a':".repeat(2000), "}".repeat(2000)),
        format!("{}1{}", "f(".repeat(4000), ")".repeat(4000)),
        format!("{}true", "!".repeat(100_000)),
        format!("{}true", "!".repeat(10_000)),
        format!("{}1", "-".repeat(100_000)),
        format!("{}1", "- ".repeat(5000)),
        format!("{}1", "!-".repeat(5000)),
        format!("a{}", ".a".repeat(100_000)),
        format!("a{}", ".a".repeat(5000)),
        format!("a{}", "[0]".repeat(5000)),
        format!("a{}", ".f()".repeat(4000)),
        format!("1{}", "+1".repeat(100_000)),
        format!("1{}", "+1".repeat(5000)),
        format!("1{}", "<1".repeat(5000)),
        format!("a{}", "&&a".repeat(5000)),
        format!("{}1", "a?b:".repeat(100_000)),
        format!("{}1", "a?b:".repeat(4000)),
        format!("{}1{}", "a?".repeat(5000), ":1".repeat(5000)),
        // Strings that the parser and the scan could split differently.
        format!("'''\\q' + {}'''", "(".repeat(10_000)),
    ];
    for text in cases {
        let shown: String = text.chars().take(20).collect();
        assert!(Expr::parse(&text).is_err(), "{shown}");
    }
}

/// The largest accepted expressions must fit a thread's stack, with room to spare.
#[test]
fn the_deepest_that_is_accepted_is_evaluated() {
    let chain = |text: &str| text.repeat(127);
    let cases = [
        format!("{}1{}", "(".repeat(32), ")".repeat(32)),
        format!("{}1{}", "[".repeat(32), "]".repeat(32)),
        format!("{}1{}", "{'a':".repeat(32), "}".repeat(32)),
        format!("{}1{}", "abs(".repeat(32), ")".repeat(32)),
        format!("1{}", chain("+1")),
        format!("1{}", chain("==1")),
        format!("1{}", chain(" in a")),
        format!("input{}", chain(".a")),
        format!("input{}", chain("[0]")),
        format!("true{}", "&&true".repeat(499)),
        format!("'a'{}", ".trim()".repeat(63)),
        format!("{}1", "true?1:".repeat(32)),
        format!("[1]{}", ".map(x,x)".repeat(63)),
        format!("{}1{}", "[1].map(x,".repeat(32), ")".repeat(32)),
        format!("[{}]", "1,".repeat(498)),
        format!("{}1{}", "!!(--(".repeat(16), "))".repeat(16)),
        format!("{}1{}", "(".repeat(32), "==1+2*3)".repeat(32)),
        format!("{}1{}", "1+2==(".repeat(32), "==1)".repeat(31) + ")"),
        format!("{}{}1{}{}", "[".repeat(31), "(", chain("+1").split_at(192).0, ")".to_string() + &"]".repeat(31)),
        format!("{}1{}{}", "[".repeat(32), "+1".repeat(96), "]".repeat(32)),
    ];
    std::thread::Builder::new()
        .stack_size(1 << 20)
        .spawn(move || {
            let scope = Scope::new(json!({"input": {"a": {}}}));
            for text in cases {
                match Expr::parse(&text) {
                    Ok(expr) => drop(expr.data(&View(&scope), &mut Fuel::default())),
                    Err(error) => panic!("{text}: {error}"),
                }
            }
        })
        .unwrap()
        .join()
        .unwrap();
}

#[test]
fn deep_values_are_refused_not_followed_for_ever() {
    let mut scope = Scope::default().root("deep", at(5000));
    scope.stored.insert(ValueId(0), Data::from(json!(1)));
    for id in 1..=5000 {
        scope.stored.insert(ValueId(id), list(vec![at(id - 1)]));
    }
    assert_eq!(data("deep", &scope), Ok(at(5000)));
    assert_eq!(message(data("json(deep)", &scope).unwrap_err()), "a value is nested more than 256 deep");
    assert_eq!(message(data("deep == [1]", &scope).unwrap_err()), "a value is nested more than 256 deep");
    let nested = (0..99).fold(json!(1), |inner, _| Value::Array(vec![inner]));
    let scope = Scope::new(json!({"nested": nested}));
    assert!(data("[nested]", &scope).is_ok());
    assert_eq!(message(data("[[nested]]", &scope).unwrap_err()), "the result is nested more than 100 deep");
}

fn template(json: Value) -> Template {
    Template::parse(&json).unwrap()
}

fn fill(json: Value, scope: &Scope) -> Result<Data, Stop> {
    template(json).eval(&View(scope), &mut Fuel::default())
}

#[test]
fn templates() {
    let scope = Scope::new(sample());
    for (text, expected) in [
        (json!("plain"), json!("plain")),
        (json!(["a", 1, null, {"k": true}]), json!(["a", 1, null, {"k": true}])),
        (json!("${input.list}"), json!([3, 1, 2])),
        (json!("${input.a}"), json!(1)),
        (json!(" ${input.a}"), json!(" 1")),
        (
            json!("a=${input.a} b=${input.b} s=${input.s} n=${input.n} t=${input.t}."),
            json!("a=1 b=2.5 s=text n= t=true."),
        ),
        (json!("${input.list}${input.m}"), json!("[3,1,2]{\"x\":1,\"y\":2}")),
        (json!("at ${now()} in ${duration('90s')}"), json!("at 2026-01-02T03:04:05.678Z in 90s")),
        (json!("$${input.a} ${input.a} $$ $ {} $${"), json!("${input.a} 1 $$ $ {} ${")),
        (json!("$${only}"), json!("${only}")),
        (json!(["$${x}", "a"]), json!(["${x}", "a"])),
        (json!("${ {'a': {'b': '}'}}.a.b }!"), json!("}!")),
        (json!("${'a' + \"}${\" + r'\\}'}"), json!("a}${\\}")),
        (
            json!({"${input.a}": "${input.a}", "deep": [{"x": "${input.m.x}"}, 2]}),
            json!({"${input.a}": 1, "deep": [{"x": 1}, 2]}),
        ),
        (json!("${input.big}"), json!(18_446_744_073_709_551_615u64)),
        (json!("ä${input.a}ä"), json!("ä1ä")),
        (json!([]), json!([])),
    ] {
        assert_eq!(fill(text.clone(), &scope), Ok(Data::from(expected)), "{text}");
    }
    let literal = template(json!({"a": ["b"]}));
    let once = || literal.eval(&View(&scope), &mut Fuel::default());
    match (once(), once()) {
        (Ok(Data::Json(first)), Ok(Data::Json(second))) => assert!(Arc::ptr_eq(&first, &second)),
        other => panic!("{other:?}"),
    }
    let text = |json: Value| template(json).text(&View(&scope), &mut Fuel::default());
    assert_eq!(text(json!("no ${input.s}")), Ok("no text".to_string()));
    assert_eq!(text(json!("${input.m}")), Ok(r#"{"x":1,"y":2}"#.to_string()));
    assert_eq!(text(json!({"a": "${input.a}"})), Ok(r#"{"a":1}"#.to_string()));
    assert_eq!(
        fill(json!({"a": ["${input.a + 'x'}"]}), &scope).unwrap_err().to_string(),
        "`input.a + 'x'` failed at column 9: cannot add a string and an int; use string(x) to convert it"
    );
}

#[test]
fn templates_share_what_they_pass_on() {
    let each = list(vec![at(1), at(2)]);
    let large = Data::from(json!("x".repeat(300)));
    let scope = Scope::default().root("each", each.clone()).root("one", at(3)).root("large", large.clone());
    assert_eq!(fill(json!("${each}"), &scope), Ok(each.clone()));
    assert_eq!(
        fill(json!({"list": "${each}", "n": 1, "one": ["${one}"]}), &scope),
        Ok(map(vec![("list", each), ("n", Data::from(json!(1))), ("one", list(vec![at(3)]))]))
    );
    assert_eq!(
        fill(json!({"t": "${each} ${one}", "u": "${one.x}"}), &scope),
        Err(Stop::Need(vec![stored_as(1), stored_as(2), stored_as(3)]))
    );
    let text = template(json!("${one}")).text(&View(&scope), &mut Fuel::default());
    assert_eq!(text, Err(Stop::Need(vec![stored_as(3)])));

    let big = json!({"text": "x".repeat(1 << 20)});
    let scope = Scope::new(json!({"big": big}));
    assert!(fill(json!(["${big}"]), &scope).is_ok());
    let failed = fill(json!(["${big}", "${big}"]), &scope).unwrap_err();
    assert_eq!(failed.to_string(), "`big` failed at column 1: the result is larger than 2 MiB");
    let failed = fill(json!("${big} ${big}"), &scope).unwrap_err();
    assert_eq!(failed.to_string(), "the result is larger than 2 MiB");
}

#[test]
fn templates_report_all_errors_with_their_places() {
    let errors = Template::parse(&json!({
        "a": ["ok ${1}", "x ${1 +} y ${siz(1)}"],
        "b": {"c": "${'open"},
        "d": "ab${ {'x': 1}",
        "e": "${}",
    }))
    .unwrap_err();
    let shown: Vec<_> = errors.iter().map(|e| (e.path.join("/"), e.error.offset, e.error.message.as_str())).collect();
    assert_eq!(
        shown,
        [
            ("a/1".to_string(), 7, "the expression ends too early"),
            ("a/1".to_string(), 13, "there is no function `siz`; did you mean `size`?"),
            ("b/c".to_string(), 2, "the string is never closed"),
            ("d".to_string(), 2, "`${` is never closed"),
            ("e".to_string(), 2, "the expression is empty"),
        ]
    );
    assert_eq!(errors[0].to_string(), "a.1: column 8: the expression ends too early");

    let reads = template(json!({"a": ["x ${input.b} ${steps.s.output}"], "c": "${item}"})).reads();
    let shown: Vec<_> = reads.iter().map(|(path, read)| (path.join("/"), read.root.as_str(), read.offset)).collect();
    assert_eq!(
        shown,
        [("a/0".to_string(), "input", 4), ("a/0".to_string(), "steps", 15), ("c".to_string(), "item", 2)]
    );
    let deep = (0..10_000).fold(json!("${x}"), |inner, _| Value::Array(vec![inner]));
    assert!(Template::parse(&deep).unwrap_err()[0].error.message.contains("nested more than 64 deep"));
    // Dropping JSON this deep would overflow the stack.
    std::mem::forget(deep);
}

#[test]
fn expressions_are_equal_if_written_the_same() {
    assert_eq!(Expr::parse("a + 1"), Expr::parse("a + 1"));
    assert_ne!(Expr::parse("a + 1"), Expr::parse("a+1"));
    assert_eq!(format!("{:?}", Expr::parse("a").unwrap()), r#"Expr("a")"#);
}

/// State may outlive an expression, and the other way round.
#[test]
fn views_may_be_short_lived() {
    let scope = Scope::new(sample());
    let expr = Expr::parse("input.a == 1").unwrap();
    let held: &dyn Names<'_> = &View(&scope);
    {
        let brief = Expr::parse("input.s").unwrap();
        assert!(brief.data(held, &mut Fuel::default()).is_ok());
        assert!(
            matches!(brief.eval(&View(&scope), &mut Fuel::default()), Ok(Val::Str(text)) if text.as_str() == "text")
        );
    }
    assert_eq!(expr.test(held, &mut Fuel::default()), Ok(true));
}

fn any_text() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "a",
        "input",
        "steps",
        "x",
        "1",
        "0",
        "-1",
        "2.5",
        ".5",
        "1e9",
        "0x",
        "0x1f",
        "7u",
        "'s'",
        "\"t\"",
        "'",
        "\"",
        "'''",
        "\"\"\"",
        "r'",
        "b'",
        "br\"",
        "\\",
        "\\n",
        "\\q",
        "\n",
        "\r",
        "//",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        ".",
        ".",
        ",",
        "?",
        ":",
        "!",
        "-",
        "+",
        "*",
        "/",
        "%",
        "<",
        "<=",
        "==",
        "=",
        "!=",
        ">",
        ">=",
        "&&",
        "||",
        "&",
        "|",
        " in ",
        "in",
        "true",
        "false",
        "null",
        "size(",
        ".map(x,",
        ".filter(x,x)",
        "has(",
        "has(a.b)",
        "default(",
        "f(",
        ".f()",
        "`",
        "`a-b`",
        ".`a.b`",
        "@",
        "#",
        "$",
        "${",
        "$${",
        "ä",
        "🐱",
        "\u{0}",
        "\u{feff}",
        " ",
        " ",
        "if",
        "for",
        "{'a':1}",
        "[1,2]",
        "a{",
        "a.b{c:",
        ".?",
        "[?",
        "{?",
        "9223372036854775808",
    ]);
    prop::collection::vec(word, 0..24).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_panics(text in any_text()) {
        let scope = Scope::new(sample());
        if let Ok(expr) = Expr::parse(&text) {
            for read in expr.reads() {
                prop_assert!(text[read.offset..].starts_with(&read.root), "{read:?}");
            }
            match expr.data(&View(&scope), &mut Fuel::new(Cost { steps: 10_000, ..EVALUATION })) {
                Ok(_) | Err(Stop::Need(_)) => {}
                Err(Stop::Heavy) => prop_assert!(false, "no inline limit is set"),
                Err(Stop::Failed(error)) => prop_assert!(text.is_char_boundary(error.offset), "{error:?}"),
            }
        }
        for text in [text.clone(), format!("${{{text}}}"), format!("a${{ {text} }}b")] {
            match Template::parse(&Value::String(text.clone())) {
                Ok(template) => drop(template.eval(&View(&scope), &mut Fuel::new(Cost { steps: 10_000, ..EVALUATION }))),
                Err(errors) => prop_assert!(errors.iter().all(|e| text.is_char_boundary(e.error.offset)), "{errors:?}"),
            }
        }
    }

    #[test]
    fn no_random_text_panics(text in "\\PC{0,60}|[-!?:.,(){}\\[\\]'\"\\\\a-c0-9 \\n]{0,60}") {
        drop(Expr::parse(&text));
        drop(Template::parse(&Value::String(text)));
    }

    /// The outcome does not depend on which values were loaded first.
    #[test]
    fn loading_does_not_change_the_outcome(text in any_expression(), loaded in prop::collection::vec(any::<bool>(), 4)) {
        let scope = |keep: &dyn Fn(usize) -> bool| {
            let values = [json!({"n": 1}), json!([1, "b"]), json!("text"), json!(null)];
            let mut scope = Scope::default().root("l", list((0..4).map(at).collect())).root("m", map(vec![("a", at(0)), ("b", at(1))]));
            for (id, value) in values.into_iter().enumerate().filter(|(id, _)| keep(*id)) {
                scope = scope.stored(id as u32, value);
            }
            scope
        };
        let expr = Expr::parse(&text).unwrap();
        let full = expr.data(&View(&scope(&|_| true)), &mut Fuel::default());
        match expr.data(&View(&scope(&|id| loaded[id])), &mut Fuel::default()) {
            Err(Stop::Need(missing)) => {
                prop_assert!(!missing.is_empty() && missing.iter().all(|it| !loaded[it.id.0 as usize]), "{missing:?}");
            }
            partly => prop_assert_eq!(partly, full),
        }
    }

    /// The same with a read limit below the total: the evaluation requests no more than the limit, and succeeds or
    /// fails as if everything had been loaded from the start.
    #[test]
    fn what_may_be_read_does_not_depend_on_what_is_loaded(text in any_expression(), most in 0..5_u64) {
        let limit = Cost { read: most * 900, ..EVALUATION };
        let stored = [json!({"n": 1}), json!([1, "b"]), json!("text"), json!(null)];
        let root = || Scope::default().root("l", list((0..4).map(at).collect())).root("m", map(vec![("a", at(0)), ("b", at(1))]));
        let scope = |ids: &[usize]| ids.iter().fold(root(), |scope, id| scope.stored(*id as u32, stored[*id].clone()));
        let expr = Expr::parse(&text).unwrap();
        let full = expr.data(&View(&scope(&[0, 1, 2, 3])), &mut Fuel::new(limit));
        let mut loaded = Vec::new();
        let found = loop {
            match expr.data(&View(&scope(&loaded)), &mut Fuel::new(limit)) {
                Err(Stop::Need(missing)) => {
                    prop_assert!(!missing.is_empty() && missing.len() as u64 <= most, "{missing:?}");
                    loaded.extend(missing.iter().map(|it| it.id.0 as usize));
                }
                found => break found,
            }
        };
        prop_assert_eq!(found, full);
    }
}

fn any_expression() -> impl Strategy<Value = String> {
    let leaf =
        prop::sample::select(vec!["l", "m", "l[0]", "l[2]", "m.a", "m.b", "m.c", "1", "'b'", "null", "l[0].n", "true"]);
    leaf.prop_map(String::from).prop_recursive(4, 24, 3, |inner| {
        let pair = (inner.clone(), inner.clone());
        prop_oneof![
            (pair.clone(), prop::sample::select(vec!["+", "==", "<", "&&", "||", "in", "*"]))
                .prop_map(|((l, r), op)| format!("({l} {op} {r})")),
            pair.clone().prop_map(|(l, r)| format!("default({l}, {r})")),
            pair.clone().prop_map(|(l, r)| format!("({l}).map(x, [x, {r}])")),
            pair.clone().prop_map(|(l, r)| format!("({l}).exists(x, x == {r})")),
            pair.prop_map(|(l, r)| format!("[{l}, {{'k': {r}}}]")),
            (
                inner.clone(),
                prop::sample::select(vec!["size", "json", "sort", "distinct", "flatten", "sum", "max", "first"])
            )
                .prop_map(|(inner, f)| format!("{f}({inner})")),
            inner.prop_map(|inner| format!("({inner} == 1 ? {inner} : l[1])")),
        ]
    })
}
