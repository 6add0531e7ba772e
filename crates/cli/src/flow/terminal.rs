//! A flow as boxes, level by level from top to bottom. What a box waits for is written in it: lines drawn between many
//! boxes are read by nobody. A bar on the left holds a level together, however many rows of boxes it takes.

use super::picture::{Edge, Node, Picture};
use crate::screen::{Ink, Line};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Between boxes that stand side by side.
const BETWEEN: usize = 2;
/// What a box has around its text.
const FRAME: usize = 4;
/// Of a group in a group in a group: what is inside has to fit somewhere.
const NARROWEST: usize = 24;
/// A text that is broken into shorter lines for another box to fit beside it is hard to read, and so are longer lines.
const SHORT: usize = 36;
const WIDEST: usize = 72;

pub fn draw(picture: &Picture, width: usize) -> Vec<Line> {
    let mut lines = vec![Line::default().with(Ink::Strong, &picture.title), Line::default()];
    if picture.code {
        lines.push(Line::plain("a code flow: its steps are known only when it runs"));
        return lines;
    }
    lines.extend(levels(&picture.nodes, width));
    if !picture.finally.is_empty() {
        lines.push(Line::default());
        lines.push(Line::default().with(Ink::Faint, "finally, before any end"));
        lines.extend(levels(&picture.finally, width));
    }
    lines
}

fn levels(nodes: &[Node], width: usize) -> Vec<Line> {
    let levels: Vec<&[Node]> = nodes.chunk_by(|a, b| a.level == b.level).collect();
    let digits = levels.len().to_string().len();
    // The number, and a bar with a space on either side.
    let width = width.saturating_sub(digits + 3);
    let mut lines = Vec::new();
    for (at, level) in levels.into_iter().enumerate() {
        if at > 0 {
            lines.push(Line::default().with(Ink::Faint, format!("{:digits$} ▼", "")));
        }
        let room = width.saturating_sub(FRAME).max(NARROWEST);
        let text_width = match level.len() {
            1 => room.min(WIDEST),
            // So that two fit side by side, if they can.
            _ => (width.saturating_sub(BETWEEN) / 2).saturating_sub(FRAME).max(SHORT).min(room),
        };
        let boxes = level.iter().map(|node| boxed(node, text_width, width)).collect();
        for (row, line) in side_by_side(boxes, width).into_iter().enumerate() {
            let number = if row == 0 { (at + 1).to_string() } else { String::new() };
            lines.push(Line::default().with(Ink::Faint, format!("{number:>digits$} ┃ ")).followed_by(line));
        }
    }
    lines
}

/// `text_width` is for what is said in it; the steps of a group may take all there is.
fn boxed(node: &Node, text_width: usize, width: usize) -> Vec<Line> {
    let mut inside = Vec::new();
    if !node.edges.is_empty() {
        let arms: Vec<String> = node.edges.iter().map(Edge::text).collect();
        let join = node.join.as_ref().map(|join| format!(" ({join})")).unwrap_or_default();
        let arms = wrapped(&format!("← {}{join}", arms.join(" · ")), text_width);
        inside.extend(arms.into_iter().map(|line| Line::default().with(Ink::Note, line)));
    }
    inside.extend(node.says.iter().flat_map(|line| wrapped(line, text_width)).map(Line::plain));
    inside.extend(levels(&node.inner, width.saturating_sub(FRAME)));
    let mut title = Line::default().with(Ink::Strong, &node.name);
    if !node.marks.is_empty() {
        title = title.with(Ink::Busy, format!(" {}", node.marks));
    }
    let title = title.cut(width.saturating_sub(FRAME + 2).max(NARROWEST));
    let widest = inside.iter().map(Line::width).max().unwrap_or(0).max(title.width() + 2);
    let edge = |text: String| Line::default().with(Ink::Faint, text);
    let rule = "─".repeat(widest - title.width() - 2);
    let mut lines = vec![edge("╭─ ".into()).followed_by(title).followed_by(edge(format!(" {rule}─╮")))];
    for line in inside {
        lines.push(edge("│ ".into()).followed_by(line.padded(widest)).followed_by(edge(" │".into())));
    }
    lines.push(edge(format!("╰{}╯", "─".repeat(widest + 2))));
    lines
}

/// A text in lines of at most `width`, all but the first further in; a word longer than a line is broken where it ends.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let indent = " ".repeat(text.len() - text.trim_start().len() + 2);
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut broken = |line: &mut String| lines.push(std::mem::replace(line, indent.clone()));
    for word in text.split_inclusive(' ') {
        let has_words = line.contains(|letter| letter != ' ');
        if has_words && line.width() + word.trim_end().width() > width {
            broken(&mut line);
        }
        for letter in word.chars() {
            let wide = letter.width().unwrap_or(0);
            if line.width() + wide > width && letter != ' ' && line != indent {
                broken(&mut line);
            }
            line.push(letter);
        }
    }
    broken(&mut line);
    lines.into_iter().map(|line: String| line.trim_end().to_owned()).collect()
}

/// As many in a row as fit.
fn side_by_side(boxes: Vec<Vec<Line>>, width: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut row: Vec<Vec<Line>> = Vec::new();
    let mut used = 0;
    for boxed in boxes {
        let wide = boxed.first().map_or(0, Line::width);
        if !row.is_empty() && used + BETWEEN + wide > width {
            lines.extend(joined(std::mem::take(&mut row)));
            used = 0;
        }
        used += wide + if row.is_empty() { 0 } else { BETWEEN };
        row.push(boxed);
    }
    lines.extend(joined(row));
    lines
}

fn joined(row: Vec<Vec<Line>>) -> Vec<Line> {
    let height = row.iter().map(Vec::len).max().unwrap_or(0);
    let line = |at: usize| {
        let mut line = Line::default();
        for (place, boxed) in row.iter().enumerate() {
            let wide = boxed.first().map_or(0, Line::width);
            let piece = boxed.get(at).cloned().unwrap_or_default().padded(wide);
            line = if place == 0 { piece } else { line.with(Ink::Plain, " ".repeat(BETWEEN)).followed_by(piece) };
        }
        line
    };
    (0..height).map(line).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn drawn(definition: &str, width: usize) -> Vec<String> {
        let flow = eddyline_language::definition::parse(definition).unwrap().flow;
        draw(&super::super::picture::picture(&flow), width).iter().skip(2).map(|line| line.paint(false)).collect()
    }

    #[test]
    fn a_level_that_takes_several_rows_is_still_one() {
        let diamond = "name: f
steps:
  a: {}
  b: {after: [a], if: 'input.with_a_rather_long_name > 10'}
  c: {after: [a], queue: slow}
  d: {after: [a], steps: {inner: {}, last: {after: [inner]}}}
  e: {after: [b, c, 'ended:d'], join: some}
";
        insta::assert_snapshot!(drawn(diamond, 60).join("\n"));
    }

    #[test]
    fn conditions_of_a_worker_and_bounds_of_gates_and_spreads_are_shown() {
        let bounds = "name: f
steps:
  charge: {limits: [stripe, {tenant: '${input.t}'}], requires: [pci, eu], key: input.t, priority: 4, start_timeout: 5m}
  paid:   {await: {event: paid, key: input.id, since: 1h}}
  price:  {spread: input.items, max_parallel: 5, on_item_failure: collect, max_failures: 2}
";
        insta::assert_snapshot!(drawn(bounds, 100).join("\n"));
    }

    /// Thirty steps in levels of one to seven, each after all of the level before.
    #[test]
    fn a_large_flow_fits_every_screen_and_nothing_of_it_is_lost() {
        let (mut definition, mut last, mut at) = ("name: f\nsteps:\n".to_owned(), Vec::new(), 0);
        for size in [1, 7, 2, 5, 1, 6, 3, 4, 1] {
            let level: Vec<String> = (at..at + size).map(|step| format!("step_number_{step}")).collect();
            for step in &level {
                definition.push_str(&format!("  {step}: {{after: [{}]}}\n", last.join(", ")));
            }
            (last, at) = (level, at + size);
        }
        for width in [60, 80, 100, 120] {
            let lines = drawn(&definition, width);
            assert!(lines.iter().all(|line| line.chars().count() <= width), "{width}\n{}", lines.join("\n"));
            let bars = |line: &&String| line.starts_with(|c: char| c == ' ' || c.is_ascii_digit());
            assert_eq!(lines.iter().filter(bars).count(), lines.len(), "{}", lines.join("\n"));
            let numbers = lines.iter().filter_map(|line| line.split(' ').next()?.parse::<usize>().ok());
            assert_eq!(numbers.collect::<Vec<_>>(), (1..=9).collect::<Vec<_>>());
            let text = lines.join(" ");
            for step in 0..30 {
                assert_eq!(text.matches(&format!("╭─ step_number_{step} ")).count(), 1);
            }
        }
    }

    #[test]
    fn a_text_is_broken_between_words_and_a_word_only_if_it_must() {
        assert_eq!(wrapped("← a · b", 20), ["← a · b"]);
        assert_eq!(wrapped("if one and two", 8), ["if one", "  and", "  two"]);
        assert_eq!(wrapped("  for abcdefghijk", 10), ["  for", "    abcdef", "    ghijk"]);
    }
}
