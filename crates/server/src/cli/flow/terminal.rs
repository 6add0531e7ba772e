//! A flow as boxes, level by level from top to bottom. What a box waits for is written in it: lines drawn between many
//! boxes are read by nobody.

use super::picture::{Node, Picture};
use crate::cli::screen::{Ink, Line};

const BETWEEN: usize = 2;
/// Of a group in a group in a group: what is inside has to fit somewhere.
const NARROWEST: usize = 30;

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
    let mut lines = Vec::new();
    for level in nodes.chunk_by(|a, b| a.level == b.level) {
        if !lines.is_empty() {
            lines.push(Line::default().with(Ink::Faint, "      │"));
        }
        let boxes: Vec<Vec<Line>> = level.iter().map(|node| boxed(node, width)).collect();
        lines.extend(side_by_side(boxes, width));
    }
    lines
}

fn boxed(node: &Node, width: usize) -> Vec<Line> {
    let most = width.saturating_sub(4).max(NARROWEST);
    let mut inside = Vec::new();
    if !node.edges.is_empty() {
        let arms: Vec<String> = node.edges.iter().map(super::picture::Edge::text).collect();
        let (mut arms, join) = (arms.join(" · "), node.join.as_deref());
        if let Some(join) = join {
            arms.push_str(&format!(" ({join})"));
        }
        inside.push(Line::default().with(Ink::Note, "← ").with(Ink::Note, arms).cut(most));
    }
    inside.extend(node.says.iter().map(|line| Line::plain(line).cut(most)));
    inside.extend(levels(&node.inner, most));
    let mut title = Line::default().with(Ink::Strong, &node.name);
    if !node.marks.is_empty() {
        title = title.with(Ink::Busy, format!(" {}", node.marks));
    }
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
