//! A flow as a list: steps by level, each with what it waits for and what it does. The steps of a group are indented.

use eddyline_protocol::{AnalysedStep, Analysis};
use unicode_width::UnicodeWidthStr;

use crate::screen::{Ink, Line};

/// The column of a step's name, after the number of its level.
const NAME: usize = 4;
/// Actions are aligned behind names of up to this width.
const WIDEST_NAME: usize = 24;

pub fn draw(title: &str, analysis: &Analysis, width: usize) -> Vec<Line> {
    let mut lines = vec![Line::default().with(Ink::Strong, title), Line::default()];
    if analysis.levels.is_empty() {
        lines.push(Line::plain("a code flow: its steps are known only when it runs"));
    }
    list(analysis, 0, &mut lines);
    if let Some(finally) = &analysis.finally {
        lines.extend([Line::default(), Line::default().with(Ink::Faint, "finally, before any end")]);
        list(finally, 0, &mut lines);
    }
    lines.into_iter().map(|line| line.cut(width)).collect()
}

fn list(analysis: &Analysis, indent: usize, lines: &mut Vec<Line>) {
    let widest = analysis.levels.iter().flatten().map(|name| name.width()).max().unwrap_or(0).min(WIDEST_NAME);
    for (at, level) in analysis.levels.iter().enumerate() {
        for (place, name) in level.iter().enumerate() {
            let number = if place == 0 { (at + 1).to_string() } else { String::new() };
            let mut line = Line::plain(" ".repeat(indent)).with(Ink::Faint, format!("{number:<NAME$}"));
            line = line.with(Ink::Strong, name).with(Ink::Plain, " ".repeat(widest.saturating_sub(name.width())));
            if let Some(step) = analysis.steps.iter().find(|step| step.name == *name) {
                line = line.with(Ink::Plain, format!("  {}", action(step)));
            }
            let mut arms: Vec<&str> =
                analysis.edges.iter().filter(|edge| edge.to == *name).map(|edge| edge.arm.as_str()).collect();
            arms.dedup();
            if !arms.is_empty() {
                line = line.with(Ink::Note, format!("  ← {}", arms.join(", ")));
            }
            lines.push(line);
            if let Some(group) = analysis.groups.get(name) {
                list(group, indent + NAME, lines);
            }
        }
    }
}

/// What a step does: `run pay on slow`, `spread: run price`, `gate`.
pub fn action(step: &AnalysedStep) -> String {
    let action = match (&step.handler, step.queue.as_deref()) {
        (Some(handler), None | Some("default")) => format!("run {handler}"),
        (Some(handler), Some(queue)) => format!("run {handler} on {queue}"),
        (None, _) => step.kind.clone(),
    };
    step.iterates.iter().rev().fold(action, |action, iterates| format!("{iterates}: {action}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn drawn(definition: &str, width: usize) -> String {
        let flow = eddyline_language::definition::parse(definition).unwrap().flow;
        let lines = draw("f", &eddyline_server::analysis(&flow), width);
        lines.iter().skip(2).map(|line| line.paint(false)).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn steps_are_listed_by_level_with_what_they_wait_for() {
        let flow = "name: f
steps:
  a: {}
  b: {after: [a], if: 'input.n > 10'}
  c: {after: [a], queue: slow}
  d: {after: [a], steps: {inner: {}, last: {after: [inner]}}}
  e: {after: [b, c, 'ended:d'], join: some}
  paid:  {await: {event: paid, key: input.id, since: 1h}}
  price: {spread: input.items, max_parallel: 5}
finally: {steps: {tidy: {}}}
";
        insta::assert_snapshot!(drawn(flow, 100));
        assert!(drawn(flow, 20).lines().all(|line| line.chars().count() <= 20));
        assert!(drawn("{name: f, code: true}", 100).contains("a code flow"));
    }
}
