//! Templates: JSON in which `${expr}` stands for a value.

use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use super::eval::Eval;
use super::halt::{Halt, Needs, Res};
use super::result::Part;
use super::scan::{closing_brace, error};
use super::{Expr, ExprError, Fuel, Names, Read, Stop, Text, Val, Within};
use crate::data::Data;

/// How deep the JSON of a template may be nested.
const MAX_DEPTH: usize = 64;

/// A parsed template. A string that consists of one `${…}` keeps the value's type, any other is text; `$${` is an
/// escaped `${`.
#[derive(Clone)]
pub struct Template(Arc<Form>);

#[derive(Debug)]
enum Form {
    Literal(Data),
    Value(Hole),
    Text(Vec<Chunk>),
    List(Vec<Form>),
    Map(Vec<(Arc<str>, Form)>),
}

#[derive(Debug)]
enum Chunk {
    Literal(String),
    Value(Hole),
}

#[derive(Debug)]
struct Hole {
    expr: Expr,
    /// Byte offset of the expression in its string.
    offset: usize,
}

/// A syntax error in a template: `path` leads to the string, the error's offset is a position in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{error}", at_path(.path))]
pub struct TemplateError {
    pub path: Vec<String>,
    pub error: ExprError,
}

impl Template {
    /// Reports all errors at once.
    pub fn parse(json: &Value) -> Result<Template, Vec<TemplateError>> {
        let mut errors = Vec::new();
        let form = parse(json, &mut Vec::new(), &mut errors);
        if errors.is_empty() { Ok(Template(Arc::new(form))) } else { Err(errors) }
    }

    /// The reads of its expressions, each with the path to its string; offsets are positions in that string.
    pub fn reads(&self) -> Vec<(Vec<String>, Read)> {
        let mut reads = Vec::new();
        collect_reads(&self.0, &mut Vec::new(), &mut reads);
        reads
    }

    /// The resulting payload. Payloads that are only passed through are shared, and not loaded.
    pub fn eval(&self, names: &dyn Names<'_>, fuel: &mut Fuel) -> Result<Data, Stop> {
        match self.0.as_ref() {
            Form::Literal(data) => Ok(data.clone()),
            Form::Value(hole) => hole.expr.data(names, fuel),
            form => {
                let names = Within(names);
                let mut build = TemplateBuilder { eval: Eval::new(&names, fuel), failed: None };
                let part = build.part(form, 0);
                part.map(Part::data).map_err(|halt| build.stop(halt))
            }
        }
    }

    /// The payload as text: a string unchanged, anything else as JSON.
    pub fn text(&self, names: &dyn Names<'_>, fuel: &mut Fuel) -> Result<String, Stop> {
        let data = self.eval(names, fuel)?;
        let names = Within(names);
        let mut eval = Eval::new(&names, fuel);
        let text = eval.force(Val::from(&data)).and_then(|value| match value {
            Val::Str(text) => {
                eval.hold(text.len())?;
                Ok(text.to_string())
            }
            value => eval.json_text(value),
        });
        text.map_err(|halt| eval.stop(halt, ""))
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

struct TemplateBuilder<'a, 'n> {
    eval: Eval<'a, 'n>,
    /// The expression that failed last.
    failed: Option<&'a str>,
}

impl<'a> TemplateBuilder<'a, '_> {
    fn stop(&self, halt: Halt) -> Stop {
        self.eval.stop(halt, self.failed.unwrap_or_default())
    }

    fn part(&mut self, form: &'a Form, depth: usize) -> Res<Part> {
        match form {
            Form::Literal(data) => self.eval.share(data, depth),
            Form::Value(hole) => self.hole(hole, |eval, value| eval.part(value, depth)),
            Form::Text(chunks) => self.text(chunks).map(|text| Part::Own(Value::String(text))),
            Form::List(items) => {
                let mut needs = Needs::default();
                let mut parts = Vec::with_capacity(items.len());
                for item in items {
                    needs.take(self.eval.hold(128))?;
                    parts.extend(needs.take(self.part(item, depth + 1))?);
                }
                needs.done()?;
                Ok(Part::list(parts))
            }
            Form::Map(fields) => {
                let mut needs = Needs::default();
                let mut parts = Vec::with_capacity(fields.len());
                for (key, field) in fields {
                    needs.take(self.eval.take_room(key.len() + 4))?;
                    needs.take(self.eval.hold(key.len() + 128))?;
                    let part = needs.take(self.part(field, depth + 1))?;
                    parts.extend(part.map(|part| (Arc::clone(key), part)));
                }
                needs.done()?;
                Ok(Part::map(parts))
            }
        }
    }

    fn text(&mut self, chunks: &'a [Chunk]) -> Res<String> {
        let mut needs = Needs::default();
        let mut text = String::new();
        for chunk in chunks {
            let piece = match chunk {
                Chunk::Literal(literal) => Ok(Text::Borrowed(literal)),
                Chunk::Value(hole) => self.hole(hole, |eval, value| eval.render(value)),
            };
            if let Some(piece) = needs.take(piece)? {
                needs.take(self.eval.take_room(piece.len()))?;
                // The string grows by doubling.
                needs.take(self.eval.hold(64 + 2 * piece.len()))?;
                text.push_str(&piece);
            }
        }
        needs.done()?;
        Ok(text)
    }

    fn hole<T>(&mut self, hole: &'a Hole, finish: impl FnOnce(&mut Eval<'a, '_>, Val<'a>) -> Res<T>) -> Res<T> {
        let value = self.eval.node(hole.expr.ast());
        let result = value.and_then(|value| finish(&mut self.eval, value));
        if let Err(Halt::Fault(_)) = &result {
            self.failed = Some(hole.expr.source());
        }
        result
    }
}

fn parse(json: &Value, path: &mut Vec<String>, errors: &mut Vec<TemplateError>) -> Form {
    if path.len() > MAX_DEPTH {
        let error = error(0, format!("the template is nested more than {MAX_DEPTH} deep"));
        errors.push(TemplateError { path: path.clone(), error });
        return Form::List(Vec::new());
    }
    let mut step = |key: String, json: &Value| {
        path.push(key);
        let form = parse(json, path, errors);
        path.pop();
        form
    };
    let form = match json {
        Value::Array(items) => {
            Form::List(items.iter().enumerate().map(|(at, item)| step(at.to_string(), item)).collect())
        }
        Value::Object(fields) => {
            Form::Map(fields.iter().map(|(key, field)| (Arc::from(key.as_str()), step(key.clone(), field))).collect())
        }
        Value::String(text) => return parse_text(text, path, errors),
        scalar => return Form::Literal(Data::from(scalar.clone())),
    };
    let literal = match &form {
        Form::List(items) => items.iter().all(|item| matches!(item, Form::Literal(_))),
        Form::Map(fields) => fields.iter().all(|(_, field)| matches!(field, Form::Literal(_))),
        _ => false,
    };
    // Shared from here on. Built from the parts, in which `$${` is already unescaped.
    if literal { Form::Literal(literal_of(&form)) } else { form }
}

fn literal_of(form: &Form) -> Data {
    let json = |form: &Form| match form {
        Form::Literal(Data::Json(json)) => Value::clone(json),
        _ => Value::Null,
    };
    Data::from(match form {
        Form::List(items) => Value::Array(items.iter().map(json).collect()),
        Form::Map(fields) => Value::Object(fields.iter().map(|(key, field)| (key.to_string(), json(field))).collect()),
        other => json(other),
    })
}

fn parse_text(text: &str, path: &[String], errors: &mut Vec<TemplateError>) -> Form {
    let mut chunks = Vec::new();
    let mut literal = String::new();
    let mut at = 0;
    while let Some(found) = text.get(at..).and_then(|rest| rest.find("${")) {
        let dollar = at + found;
        let before = text.get(at..dollar).unwrap_or_default();
        if let Some(escaped) = before.strip_suffix('$') {
            literal.push_str(escaped);
            literal.push_str("${");
            at = dollar + 2;
            continue;
        }
        literal.push_str(before);
        match parse_hole(text, dollar) {
            Ok((hole, end)) => {
                if !literal.is_empty() {
                    chunks.push(Chunk::Literal(std::mem::take(&mut literal)));
                }
                chunks.push(Chunk::Value(hole));
                at = end;
            }
            Err((error, end)) => {
                errors.push(TemplateError { path: path.to_vec(), error });
                at = end;
            }
        }
    }
    literal.push_str(text.get(at..).unwrap_or_default());
    if chunks.is_empty() {
        return Form::Literal(Data::from(Value::String(literal)));
    }
    if !literal.is_empty() {
        chunks.push(Chunk::Literal(literal));
    }
    match <[Chunk; 1]>::try_from(chunks) {
        Ok([Chunk::Value(hole)]) => Form::Value(hole),
        Ok(one) => Form::Text(one.into()),
        Err(chunks) => Form::Text(chunks),
    }
}

/// Parses the expression whose `${` is at `dollar`. The second value is the position after it, also on error.
fn parse_hole(text: &str, dollar: usize) -> Result<(Hole, usize), (ExprError, usize)> {
    let offset = dollar + 2;
    let close = closing_brace(text, offset).map_err(|error| (error, text.len()))?;
    let close = close.ok_or_else(|| (error(dollar, "`${` is never closed".to_string()), text.len()))?;
    let source = text.get(offset..close).unwrap_or_default();
    match Expr::parse(source) {
        Ok(expr) => Ok((Hole { expr, offset }, close + 1)),
        Err(error) => Err((ExprError { offset: offset + error.offset, ..error }, close + 1)),
    }
}

fn collect_reads(form: &Form, path: &mut Vec<String>, reads: &mut Vec<(Vec<String>, Read)>) {
    let mut of = |hole: &Hole, path: &[String]| {
        let placed = hole.expr.reads().iter().cloned();
        reads.extend(placed.map(|read| (path.to_vec(), Read { offset: hole.offset + read.offset, ..read })));
    };
    match form {
        Form::Literal(_) => {}
        Form::Value(hole) => of(hole, path),
        Form::Text(chunks) => {
            for chunk in chunks {
                if let Chunk::Value(hole) = chunk {
                    of(hole, path);
                }
            }
        }
        Form::List(items) => {
            for (at, item) in items.iter().enumerate() {
                path.push(at.to_string());
                collect_reads(item, path, reads);
                path.pop();
            }
        }
        Form::Map(fields) => {
            for (key, field) in fields {
                path.push(key.to_string());
                collect_reads(field, path, reads);
                path.pop();
            }
        }
    }
}

fn at_path(path: &[String]) -> String {
    if path.is_empty() { String::new() } else { format!("{}: ", path.join(".")) }
}
