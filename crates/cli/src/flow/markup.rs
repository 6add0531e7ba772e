//! A flow as Mermaid or DOT.

use std::fmt::Write as _;

use eddyline_protocol::{Analysis, Edge};

use super::terminal::action;

pub fn mermaid(title: &str, analysis: &Analysis) -> String {
    let mut writer = Writer { out: format!("---\ntitle: {title}\n---\nflowchart TD\n"), next: 0 };
    writer.mermaid(analysis, 1);
    if let Some(finally) = &analysis.finally {
        writer.line(1, "subgraph finally");
        writer.mermaid(finally, 2);
        writer.line(1, "end");
    }
    writer.out
}

pub fn dot(title: &str, analysis: &Analysis) -> String {
    let out = format!("digraph {} {{\n  compound=true;\n  node [shape=box, style=rounded];\n", quoted(title));
    let mut writer = Writer { out, next: 0 };
    writer.dot(analysis, 1);
    if let Some(finally) = &analysis.finally {
        writer.line(1, "subgraph cluster_finally {");
        writer.line(2, "label=\"finally\";");
        writer.dot(finally, 2);
        writer.line(1, "}");
    }
    writer.line(0, "}");
    writer.out
}

/// The steps by level, each with what it does.
fn boxes(analysis: &Analysis) -> Vec<(&str, String)> {
    let names = analysis.levels.iter().flatten();
    let step = |name: &str| analysis.steps.iter().find(|step| step.name == name);
    names.map(|name| (name.as_str(), step(name).map(action).unwrap_or_default())).collect()
}

/// Edges by the places of their ends in `boxes`, with a label unless it is a plain `after`.
fn edges<'a>(analysis: &'a Analysis, boxes: &[(&str, String)]) -> Vec<(usize, usize, Option<&'a str>)> {
    let place = |name: &str| boxes.iter().position(|(other, _)| *other == name);
    let edge = |edge: &'a Edge| {
        let label = (edge.kind != "step").then_some(edge.arm.as_str());
        Some((place(&edge.from)?, place(&edge.to)?, label))
    };
    analysis.edges.iter().filter_map(edge).collect()
}

struct Writer {
    out: String,
    /// The id of the next step.
    next: usize,
}

impl Writer {
    fn line(&mut self, depth: usize, text: &str) {
        let _ = writeln!(self.out, "{}{text}", "  ".repeat(depth));
    }

    /// Names repeat from scope to scope and may contain anything; ids are numbers.
    fn mermaid(&mut self, analysis: &Analysis, depth: usize) {
        let (first, boxes) = (self.next, boxes(analysis));
        self.next += boxes.len();
        for (at, (name, action)) in boxes.iter().enumerate() {
            let (id, text) = (first + at, entities(name));
            match analysis.groups.get(*name) {
                None => self.line(depth, &format!("s{id}[\"{text}<br/>{}\"]", entities(action))),
                Some(group) => {
                    self.line(depth, &format!("subgraph s{id}[\"{text}\"]"));
                    self.mermaid(group, depth + 1);
                    self.line(depth, "end");
                }
            }
        }
        for (from, to, label) in edges(analysis, &boxes) {
            let arrow = match label {
                None => "-->".to_owned(),
                Some(label) => format!("-. \"{}\" .->", entities(label)),
            };
            self.line(depth, &format!("s{} {arrow} s{}", first + from, first + to));
        }
    }

    fn dot(&mut self, analysis: &Analysis, depth: usize) {
        let (first, boxes) = (self.next, boxes(analysis));
        self.next += boxes.len();
        for (at, (name, action)) in boxes.iter().enumerate() {
            let id = first + at;
            self.line(depth, &format!("s{id} [label={}];", quoted(&format!("{name}\n{action}"))));
            if let Some(group) = analysis.groups.get(*name) {
                self.line(depth, &format!("subgraph cluster_s{id} {{"));
                self.line(depth + 1, &format!("label={};", quoted(&format!("inside {name}"))));
                let inside = self.next;
                self.dot(group, depth + 1);
                self.line(depth, "}");
                self.line(depth, &format!("s{id} -> s{inside} [style=dotted, lhead=cluster_s{id}];"));
            }
        }
        for (from, to, label) in edges(analysis, &boxes) {
            let label = label.map(|label| format!(" [style=dashed, label={}]", quoted(label))).unwrap_or_default();
            self.line(depth, &format!("s{} -> s{}{label};", first + from, first + to));
        }
    }
}

fn entities(text: &str) -> String {
    text.trim().replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}
