//! Checks the documentation: its flows are accepted, its wrong flows are rejected with the messages it shows, its
//! expressions have the results it gives, and its records are those that runs write.
//!
//! The fence says what a block is. `yaml` is a flow; `yaml step` is steps of one, which may name the [`STAND_INS`];
//! `yaml fragment` is fields of one. `yaml wrong` is rejected and `yaml warns` is warned about, with the text of the
//! next block.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;
mod page;
mod stories;
#[allow(dead_code)]
#[path = "../examples/tour.rs"]
mod tour;

use std::collections::{BTreeMap, BTreeSet};

use eddyline_language::definition::{self, Parsed, Problems};
use eddyline_language::expr::{self, Expr, Fuel, Names, Table, Template, Val};
use eddyline_machine::{Data, Millis, ValueId};
use page::{EXPRESSIONS, FLOWS, PAGES, README, TIMELINE};
use serde_json::Value;

/// Steps that examples of other steps may name.
const STAND_INS: [&str; 3] = ["load", "pay", "review"];

/// The complete flow of a block.
fn whole(info: &str, text: &str) -> String {
    let has = |name: &str| text.lines().any(|line| line.split(':').next() == Some(name));
    let stand_ins = |indent: &str| {
        let missing = STAND_INS.iter().filter(|name| !has(name));
        missing.map(|name| format!("{indent}{name}: {{}}\n")).collect::<String>()
    };
    match info {
        "yaml step" => {
            let steps: String = text.lines().map(|line| format!("  {line}\n")).collect();
            format!("name: example\nsteps:\n{steps}{}", stand_ins("  "))
        }
        "yaml fragment" => {
            let name = if has("name") { "" } else { "name: example\n" };
            let steps =
                if has("steps") || has("code") { String::new() } else { format!("steps:\n{}", stand_ins("  ")) };
            format!("{name}{text}{steps}")
        }
        _ => text.to_owned(),
    }
}

fn parse(text: &str) -> Result<Parsed, Problems> {
    definition::parse(text)
}

#[test]
fn every_flow_is_accepted_without_a_warning() {
    let mut seen = 0;
    for block in PAGES.iter().flat_map(page::Page::blocks) {
        if !block.info.starts_with("yaml") || block.info.ends_with("wrong") || block.info.ends_with("warns") {
            continue;
        }
        assert!(["yaml", "yaml step", "yaml fragment"].contains(&block.info), "{}: {}", block.place, block.info);
        let text = whole(block.info, &block.text);
        let parsed = parse(&text).unwrap_or_else(|problems| panic!("{}\n{}", block.place, problems.render(&text)));
        assert_eq!(parsed.warnings, [], "{}", block.place);
        seen += 1;
    }
    assert!(seen >= 25, "only {seen} flows");
}

#[test]
fn what_is_wrong_is_refused_in_the_words_shown() {
    for page in PAGES {
        for (block, said) in page.followed("yaml wrong") {
            let problems = parse(&block.text).expect_err(&block.place);
            assert_eq!((said.info, said.text), ("text", problems.render(&block.text)), "{}", block.place);
        }
        for (block, said) in page.followed("yaml warns") {
            let parsed = parse(&block.text).unwrap_or_else(|problems| panic!("{}\n{problems}", block.place));
            let warnings: Vec<_> = parsed.warnings.iter().map(|warning| warning.render(&block.text)).collect();
            assert_eq!((said.info, said.text), ("text", warnings.join("\n")), "{}", block.place);
        }
    }
}

/// For a field that is unlike any known one, the parser lists all known fields.
#[test]
fn every_field_has_a_row_and_an_example() {
    let rows: BTreeSet<String> =
        FLOWS.tables().into_iter().filter(|table| table.header[0] == "field").flat_map(first_cells).collect();
    let mut known = BTreeSet::new();
    for text in [
        "{name: f, steps: {a: }, qqqqqqqq: 1}",
        "{name: f, steps: {a: }, finally: {steps: {b: }, qqqqqqqq: 1}}",
        "{name: f, steps: {a: {qqqqqqqq: 1}}}",
        "{name: f, steps: {a: {retry: {qqqqqqqq: 1}}}}",
        "{name: f, steps: {a: {undo: {run: u, qqqqqqqq: 1}}}}",
        "{name: f, steps: {a: {await: {manual: true, qqqqqqqq: 1}}}}",
        "{name: f, steps: {a: {steps: {b: }, repeat: {max: 1, until: 'true', qqqqqqqq: 1}}}}",
        "{name: f, steps: {a: , b: {after: [a], join: {at_least: 1, qqqqqqqq: 1}}}}",
    ] {
        let problems = parse(text).expect_err(text);
        let help = problems.0[0].help.as_deref().unwrap();
        known.extend(help.strip_prefix("known here: ").unwrap().split(", ").map(str::to_owned));
    }
    assert_eq!(rows, known);
    let examples: String = FLOWS.blocks().into_iter().map(|block| block.text).collect();
    let without: Vec<_> = known.iter().filter(|field| !examples.contains(&format!("{field}:"))).collect();
    assert!(without.is_empty(), "{without:?}");
}

fn first_cells(table: page::Table) -> Vec<String> {
    let names =
        |row: &Vec<String>| row[0].split(", ").map(|name| name.trim_matches('`').to_owned()).collect::<Vec<_>>();
    table.rows.iter().flat_map(names).collect()
}

#[test]
fn the_limits_are_those_of_the_code() {
    let limits: BTreeMap<String, String> = [&FLOWS, &EXPRESSIONS]
        .iter()
        .flat_map(|page| page.tables_of(["what", "limit"]))
        .flat_map(|table| table.rows)
        .map(|row| (row[0].clone(), row[1].replace(',', "")))
        .collect();
    for (what, limit) in [
        ("bytes of a definition", definition::MAX_TEXT_BYTES),
        ("nesting depth of lists and maps", definition::MAX_DEPTH),
        ("values in a definition", definition::MAX_NODES),
        ("expressions in `${…}` in a definition", definition::MAX_EXPRESSIONS),
        ("problems reported at once", definition::MAX_PROBLEMS),
        ("steps of a flow", definition::MAX_STEPS),
        ("nesting depth of groups", definition::MAX_GROUP_DEPTH),
        ("arms of a step", definition::MAX_ARMS),
        ("events of a scope", definition::MAX_EVENTS),
        ("connections between the steps of a scope", definition::MAX_EDGES),
        ("rounds of a `repeat`", definition::MAX_ROUNDS as usize),
        ("max_parallel", definition::MAX_PARALLEL as usize),
        ("characters of a name", definition::MAX_NAME_CHARS),
        ("days of a duration", (definition::MAX_DURATION_MS / 86_400_000) as usize),
        ("nesting depth of child runs", eddyline_machine::decide::MAX_DEPTH as usize),
        ("activations a transition touches", eddyline_machine::decide::MAX_TOUCHED),
        ("failures listed in `also`", eddyline_machine::failure::MAX_ALSO),
        ("steps of an evaluation", expr::EVALUATION.steps as usize),
        ("bytes of memory of an evaluation", expr::EVALUATION.bytes as usize),
        ("bytes of stored values that an evaluation reads", expr::EVALUATION.read as usize),
        ("items of a spread", eddyline_machine::decide::MAX_ITEMS),
        ("bytes a result writes", expr::MAX_PAYLOAD_BYTES),
    ] {
        assert_eq!(limits.get(what).map(String::as_str), Some(limit.to_string().as_str()), "{what}");
    }
}

/// What the example expressions read: the JSON on the page.
struct Shown<'a>(&'a BTreeMap<String, Data>, &'a BTreeMap<(String, String), Data>);

impl<'a> Names<'a> for Shown<'a> {
    fn root(&self, name: &str) -> Option<Val<'a>> {
        self.0.get(name).map(Val::Data)
    }

    fn entry(&self, table: Table, key: &str) -> Option<Val<'a>> {
        self.1.get(&(table.name().to_owned(), key.to_owned())).map(Val::Data)
    }

    fn value(&self, _: ValueId) -> Option<&'a Data> {
        None
    }

    fn now(&self) -> Millis {
        1_767_323_045_678
    }
}

fn evaluated(eval: impl Fn(&dyn Names<'_>) -> Result<Data, String>) -> String {
    let shown = EXPRESSIONS.blocks().into_iter().find(|block| block.info == "json").expect("what is read");
    let shown: BTreeMap<String, Value> = serde_json::from_str(&shown.text).expect("JSON");
    let roots = shown.iter().map(|(name, value)| (name.clone(), Data::from(value.clone()))).collect();
    let entries = shown.iter().filter_map(|(name, value)| Some((name, value.as_object()?)));
    let entries = entries.flat_map(|(name, fields)| {
        fields.iter().map(move |(key, value)| ((name.clone(), key.clone()), Data::from(value.clone())))
    });
    let entries = entries.collect();
    match eval(&Shown(&roots, &entries)) {
        Ok(data) => data.materialise(&|_| None).expect("nothing is stored").to_string(),
        Err(error) => error,
    }
}

fn expression(text: &str) -> String {
    evaluated(|names| {
        let expr = Expr::parse(text).map_err(|error| error.to_string())?;
        expr.data(names, &mut Fuel::default()).map_err(|stop| stop.to_string())
    })
}

fn template(json: &str) -> String {
    let json: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{json}: {error}"));
    evaluated(|names| {
        let template = Template::parse(&json).map_err(|errors| errors[0].to_string())?;
        template.eval(names, &mut Fuel::default()).map_err(|stop| stop.to_string())
    })
}

#[test]
fn every_expression_has_the_result_shown() {
    let mut wrong = Vec::new();
    for (columns, eval) in [
        (["expression", "result"], expression as fn(&str) -> String),
        (["expression", "message"], expression),
        (["template", "result"], template),
    ] {
        let tables = EXPRESSIONS.tables_of(columns);
        assert!(!tables.is_empty(), "{columns:?}");
        for row in tables.iter().flat_map(|table| &table.rows) {
            let [.., text, result] = &row[..] else { panic!("{row:?}") };
            let found = eval(text);
            if found != *result {
                wrong.push(format!("{text}\n  shown: {result}\n  found: {found}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_function_has_a_row_and_an_example_that_calls_it() {
    let tables = EXPRESSIONS.tables();
    let rows = || tables.iter().filter(|table| table.header[0] == "function").flat_map(|table| &table.rows);
    for row in rows() {
        assert!(row[2].contains(&format!("{}(", row[0])), "{row:?}");
    }
    let listed: Vec<&str> = rows().map(|row| row[0].as_str()).collect();
    let mut known: Vec<&str> = expr::functions().collect();
    known.sort_unstable();
    let mut sorted = listed.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, known);
}

/// A flow whose `field` contains an expression that reads `name`; everything it could refer to exists.
fn reading(field: &str, read: &str) -> String {
    let read = match read {
        "steps.x" => "steps.load.status",
        "events" => "events.loaded",
        "gates.x.url" => "gates.ask.url",
        "item, index" => "[item, index]",
        "state, round" => "[state, round]",
        "steps inside" => "steps.inner.status",
        "run.outcome" => "run.outcome",
        "run" => "run.id",
        other => other,
    };
    let (quoted, hole) = (format!("'{read}'"), format!("'${{{read}}}'"));
    let worker = |more: String| {
        format!("x: {{after: [load], subscribes: [loaded], await: {{manual: true}}, spread: input, run: h, {more}}}")
    };
    let group = |more: String| {
        let repeat = if more.contains("repeat") { "" } else { "repeat: {until: 'true', max: 1}, " };
        format!(
            "x: {{after: [load], subscribes: [loaded], await: {{manual: true}}, spread: input, {repeat}steps: {{inner: {{}}}}, {more}}}"
        )
    };
    let step = match field {
        "if" => worker(format!("if: {quoted}")),
        "await.until" => format!("x: {{after: [load], subscribes: [loaded], await: {{until: {quoted}}}}}"),
        "await.key" => format!("x: {{after: [load], subscribes: [loaded], await: {{event: e, key: {quoted}}}}}"),
        "spread" => worker(String::new()).replace("spread: input", &format!("spread: {quoted}")),
        "input" => worker(format!("input: {hole}")),
        "limits" => worker(format!("limits: [{{l: {hole}}}]")),
        "key" => worker(format!("key: {quoted}")),
        "set" | "fail" | "return" => {
            format!("x: {{after: [load], subscribes: [loaded], await: {{manual: true}}, {field}: {hole}}}")
        }
        "repeat.state" => group(format!("repeat: {{until: 'true', max: 1, state: {hole}}}")),
        "repeat.while" => group(format!("repeat: {{while: {quoted}, max: 1}}")),
        "repeat.until" => group(format!("repeat: {{until: {quoted}, max: 1}}")),
        "repeat.next" => group(format!("repeat: {{until: 'true', max: 1, next: {hole}}}")),
        "output of a group" => group(format!("output: {hole}")),
        "a step in the group" => {
            group(String::new()).replace("inner: {}", &format!("inner: {{}}, i: {{after: [inner], set: {hole}}}"))
        }
        _ => "x: {}".to_owned(),
    };
    let output = if field == "output of the flow" { hole.clone() } else { "1".to_owned() };
    let last = if field == "a step in `finally`" { hole } else { "1".to_owned() };
    format!(
        "name: f\noutput: {output}\nfinally: {{steps: {{last: {{set: {last}}}}}}}\nsteps:\n  load: {{emits: [loaded]}}\n  ask: {{await: {{webhook: true}}}}\n  {step}\n"
    )
}

#[test]
fn names_are_known_where_the_table_says() {
    let tables = EXPRESSIONS.tables();
    let table = tables.iter().find(|table| table.header[0] == "in").expect("the table of names");
    let names: Vec<&str> = table.header[1..].iter().map(|name| name.trim_matches('`')).collect();
    let names: Vec<String> = names.iter().map(|name| name.replace("`, `", ", ")).collect();
    let mut wrong = Vec::new();
    for row in &table.rows {
        for field in row[0].split(", ").map(|field| field.trim_matches('`')) {
            let field = if row[0].contains("finally") { row[0].as_str() } else { field };
            for (name, mark) in names.iter().zip(&row[1..]) {
                let text = reading(field, name);
                let parsed = parse(&text);
                if parsed.is_ok() != (mark == "yes") {
                    let why = parsed.err().map(|problems| problems.to_string());
                    wrong.push(format!("{field} reads {name}: shown {mark:?}, found {why:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const KINDS: usize = 23;
const PROJECTIONS: usize = 4;

#[test]
fn every_record_shown_was_written() {
    let told = stories::told();
    let mut shown = BTreeSet::new();
    let mut wrong = Vec::new();
    for block in TIMELINE.blocks().into_iter().filter(|block| block.info == "json") {
        let record: Value =
            serde_json::from_str(&block.text).unwrap_or_else(|error| panic!("{}: {error}", block.place));
        let kind = record["kind"].as_str().unwrap_or_default().to_owned();
        if !told.contains(&record) {
            let like: Vec<String> =
                told.iter().filter(|told| told["kind"] == kind.as_str()).map(ToString::to_string).collect();
            wrong.push(format!("{}: nothing wrote this. Of its kind:\n{}", block.place, like.join("\n")));
        }
        shown.insert(kind);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    let kinds: BTreeSet<String> = told.iter().map(|told| told["kind"].as_str().unwrap().to_owned()).collect();
    assert_eq!(kinds.len(), KINDS + PROJECTIONS, "the stories produce every kind");
    assert_eq!(shown, kinds);
}

#[test]
fn every_field_of_every_kind_is_listed() {
    let mut listed: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for table in TIMELINE.tables().into_iter().filter(|table| table.header[0] == "field") {
        listed.entry(table.heading).or_default().extend(first_cells(table));
    }
    let mut written: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for record in stories::told() {
        let mut add = |under: &str, value: &Value| {
            let fields = value.as_object().into_iter().flatten().map(|(field, _)| field.clone());
            written.entry(under.to_owned()).or_default().extend(fields);
        };
        add(record["kind"].as_str().unwrap(), &record["data"]);
        add("The envelope", &record);
        add("`meta`", &record["meta"]);
        for error in [&record["data"]["error"], &record["data"]["also"][0], &record["data"]["error"]["also"][0]] {
            add("Errors", error);
        }
    }
    for (heading, written) in written.into_iter().filter(|(_, fields)| !fields.is_empty()) {
        let heading = heading.trim_matches('`');
        assert_eq!(listed.remove(heading), Some(written), "{heading}");
    }
    assert_eq!(listed, BTreeMap::new(), "fields that nothing writes");
}

#[test]
fn the_flow_of_the_readme_is_the_one_of_the_tour() {
    let flow = README.blocks().into_iter().find(|block| block.info == "yaml").expect("the flow");
    assert_eq!(flow.text.trim(), tour::FLOW.trim());
    assert!(tour::timeline().unwrap().ends_with("completed after 7 commits\n"));
}

/// The readme does not show the wrong flow, but the messages quote every relevant line of it.
#[test]
fn the_mistakes_of_the_readme_are_told_so() {
    let block = README.blocks().into_iter().find(|block| block.text.contains("flow validate")).expect("mistakes");
    let said = block.text.split_once("6 problems\n\n").expect("a first line").1;
    let said = said.split_once("\nerror: 1 flow has errors").expect("a last line").0;
    let quoted = said.lines().filter_map(|line| line.split_once(" | ")?.0.parse::<u32>().ok().map(|n| (n, line)));
    let lines: BTreeMap<u32, &str> = quoted.map(|(n, line)| (n, line.split_once(" | ").unwrap().1)).collect();
    assert_eq!(lines.keys().copied().collect::<Vec<_>>(), [3, 4, 5, 6, 7]);
    let steps: Vec<&str> = lines.into_values().collect();
    let text = format!("name: order\nsteps:\n{}\n", steps.join("\n"));
    assert_eq!(parse(&text).expect_err("mistakes").render(&text), said);
}

#[test]
fn every_link_leads_somewhere() {
    let slug = |heading: &str| -> String {
        let kept =
            heading.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
        kept.trim().replace(' ', "-")
    };
    for page in PAGES {
        let folder = page.name.rsplit_once('/').map_or("", |(folder, _)| folder);
        for link in page.text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = format!("{folder}/{file}");
            let name = if file.is_empty() { page.name } else { path.trim_start_matches('/') };
            let Some(target) = PAGES.into_iter().find(|page| page.name == name) else {
                let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
                assert!(link.starts_with("https://") || file.exists(), "{}: {link}", page.name);
                continue;
            };
            let headings = target.text.lines().filter(|line| line.starts_with('#'));
            let found =
                anchor.is_empty() || headings.into_iter().any(|line| slug(line.trim_start_matches('#')) == anchor);
            assert!(found, "{}: {link}", page.name);
        }
    }
}
