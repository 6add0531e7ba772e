//! A flow as text for other programs to draw: Mermaid, Graphviz.

use std::fmt::Write as _;

use super::picture::{Node, Picture};

pub fn mermaid(picture: &Picture) -> String {
    let mut out = format!("---\ntitle: {}\n---\nflowchart TD\n", picture.title);
    let mut writer = Mermaid { out: &mut out, next: 0 };
    writer.scope(&picture.nodes, 1);
    if !picture.finally.is_empty() {
        writer.line(1, "subgraph finally");
        writer.scope(&picture.finally, 2);
        writer.line(1, "end");
    }
    out
}

pub fn dot(picture: &Picture) -> String {
    let mut out =
        format!("digraph {} {{\n  compound=true;\n  node [shape=box, style=rounded];\n", quoted(&picture.title));
    let mut writer = Dot { out: &mut out, next: 0 };
    writer.scope(&picture.nodes, 1);
    if !picture.finally.is_empty() {
        writer.line(1, "subgraph cluster_finally {");
        writer.line(2, "label=\"finally\";");
        writer.scope(&picture.finally, 2);
        writer.line(1, "}");
    }
    out.push_str("}\n");
    out
}

fn title(node: &Node) -> String {
    if node.marks.is_empty() { node.name.clone() } else { format!("{} {}", node.name, node.marks) }
}

/// What stands in its box.
fn lines(node: &Node) -> Vec<String> {
    let join = node.join.as_ref().map(|join| format!("join: {join}"));
    std::iter::once(title(node)).chain(join).chain(node.says.iter().cloned()).collect()
}

fn labels(node: &Node) -> impl Iterator<Item = (&str, Option<&str>)> {
    node.edges.iter().flat_map(|edge| edge.from.iter().map(|from| (from.as_str(), edge.label.as_deref())))
}

struct Mermaid<'a> {
    out: &'a mut String,
    next: usize,
}

impl Mermaid<'_> {
    fn line(&mut self, depth: usize, text: &str) {
        let _ = writeln!(self.out, "{}{text}", "  ".repeat(depth));
    }

    /// Names repeat from scope to scope and may hold anything; ids are numbers.
    fn scope(&mut self, nodes: &[Node], depth: usize) {
        let first = self.next;
        self.next += nodes.len();
        for (at, node) in nodes.iter().enumerate() {
            let id = format!("s{}", first + at);
            if node.inner.is_empty() {
                let lines: Vec<String> = lines(node).iter().map(|line| entities(line)).collect();
                self.line(depth, &format!("{id}[\"{}\"]", lines.join("<br/>")));
                continue;
            }
            let heading: Vec<String> = lines(node).iter().map(|line| entities(line)).collect();
            self.line(depth, &format!("subgraph {id}[\"{}\"]", heading.join(": ")));
            self.scope(&node.inner, depth + 1);
            self.line(depth, "end");
        }
        for (at, node) in nodes.iter().enumerate() {
            for (from, label) in labels(node) {
                let Some(place) = nodes.iter().position(|other| other.name == from) else { continue };
                let arrow = match label {
                    None => "-->".to_owned(),
                    Some(label) => format!("-. \"{}\" .->", entities(label)),
                };
                self.line(depth, &format!("s{} {arrow} s{}", first + place, first + at));
            }
        }
    }
}

fn entities(text: &str) -> String {
    text.trim().replace('&', "&amp;").replace('"', "&quot;").replace('<', "&lt;").replace('>', "&gt;")
}

struct Dot<'a> {
    out: &'a mut String,
    next: usize,
}

impl Dot<'_> {
    fn line(&mut self, depth: usize, text: &str) {
        let _ = writeln!(self.out, "{}{text}", "  ".repeat(depth));
    }

    fn scope(&mut self, nodes: &[Node], depth: usize) {
        let first = self.next;
        self.next += nodes.len();
        for (at, node) in nodes.iter().enumerate() {
            let label = quoted(&lines(node).join("\n"));
            self.line(depth, &format!("s{} [label={label}];", first + at));
            if !node.inner.is_empty() {
                self.line(depth, &format!("subgraph cluster_s{} {{", first + at));
                self.line(depth + 1, &format!("label={};", quoted(&format!("inside {}", node.name))));
                let inside = self.next;
                self.scope(&node.inner, depth + 1);
                self.line(depth, "}");
                let edge = format!("s{at} -> s{inside} [style=dotted, lhead=cluster_s{at}];", at = first + at);
                self.line(depth, &edge);
            }
        }
        for (at, node) in nodes.iter().enumerate() {
            for (from, label) in labels(node) {
                let Some(place) = nodes.iter().position(|other| other.name == from) else { continue };
                let label = label.map(|label| format!(" [style=dashed, label={}]", quoted(label))).unwrap_or_default();
                self.line(depth, &format!("s{} -> s{}{label};", first + place, first + at));
            }
        }
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}
