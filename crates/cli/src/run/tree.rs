//! Draws a run as a tree of its activations. Pure: a view of the run goes in, lines come out.

use std::collections::{BTreeMap, HashMap};

use eddyline_protocol::{Reference, RunInfo, StepInfo};

use super::words;
use crate::moment;
use crate::screen::{Ink, Line};

/// How many items, rounds or steps of a group are shown. If there are more, failed and open ones are preferred.
const SHOWN: usize = 12;
/// The least width of the name column, however narrow the screen.
const MIN_NAME_WIDTH: usize = 24;

/// What is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Glance<'a> {
    pub run: &'a RunInfo,
    pub steps: &'a [StepInfo],
    /// The names of the top-level steps in display order; empty if the definition is not available.
    pub order: &'a [String],
    /// The current time, for the duration of what has not ended.
    pub now_ms: i64,
}

pub fn draw(glance: &Glance<'_>, width: usize) -> Vec<Line> {
    let tree = Tree::new(glance);
    let mut rows = Vec::new();
    tree.rows(None, 0, &mut rows);
    // Long names leave room for the other columns.
    let widest = (width / 2).max(MIN_NAME_WIDTH);
    let names = rows.iter().map(|row| row.name.width()).max().unwrap_or(0).min(widest);
    let times = rows.iter().map(|row| row.time.chars().count()).max().unwrap_or(0);
    let mut lines = header(glance, width);
    lines.push(Line::default());
    for row in rows {
        let line = row.name.cut(names).padded(names + 2).with(Ink::Faint, format!("{:>times$}", row.time));
        lines.push(line.with(Ink::Plain, "  ").followed_by(row.note));
    }
    lines.extend(outcome(glance.run));
    lines.into_iter().map(|line| line.cut(width)).collect()
}

/// The run and its status. The id goes on a second line if it does not fit on the first.
fn header(glance: &Glance<'_>, width: usize) -> Vec<Line> {
    let run = glance.run;
    let from = run.started_at.as_deref().or(Some(&run.created_at));
    let elapsed = moment::between(from, run.completed_at.as_deref(), glance.now_ms).unwrap_or_default();
    let (flow, id) = (Line::default().with(Ink::Strong, &run.flow), Line::default().with(Ink::Faint, &run.run_id));
    let status = Line::plain("  ").with(Ink::of_status(&run.status), &run.status);
    let status = status.with(Ink::Plain, format!("  {elapsed}"));
    let steps = match run.step_count {
        0 => Line::default(),
        all => Line::default().with(Ink::Faint, format!("  {} of {all} steps", run.completed_steps)),
    };
    let line = flow.clone().with(Ink::Plain, "  ").followed_by(id.clone());
    let line = line.followed_by(status.clone()).followed_by(steps.clone());
    if line.width() <= width {
        return vec![line];
    }
    // A long name is cut, so that the status fits.
    let line = flow.cut(width.saturating_sub(status.width())).followed_by(status);
    let room = line.width() + steps.width() <= width;
    vec![if room { line.followed_by(steps) } else { line }, id]
}

fn outcome(run: &RunInfo) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(error) = &run.error {
        let at = error.step.as_ref().map(|step| format!(" in {step}")).unwrap_or_default();
        lines.push(Line::default());
        lines.push(Line::default().with(Ink::Bad, format!("{}{at}: {}", error.kind, first_line(&error.message))));
        for also in &error.also {
            let at = also.step.as_ref().map(|step| format!(" in {step}")).unwrap_or_default();
            lines.push(
                Line::default().with(Ink::Bad, format!("  also {}{at}: {}", also.kind, first_line(&also.message))),
            );
        }
    } else if run.status == "completed" {
        lines.push(Line::default());
        let output = match Reference::read(&run.output) {
            Some(large) => format!("{} bytes: `eddy run value {}`", large.bytes, large.value),
            None => run.output.to_string(),
        };
        lines.push(Line::default().with(Ink::Good, "output ").with(Ink::Plain, output));
    }
    if let Some(next) = &run.continued_as {
        lines.push(Line::default().with(Ink::Faint, format!("continued as {next}")));
    }
    lines
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

struct Row {
    name: Line,
    time: String,
    note: Line,
}

struct Tree<'a> {
    steps: &'a [StepInfo],
    /// By the index of the parent; `None` for the top level.
    children: BTreeMap<Option<usize>, Vec<usize>>,
    now_ms: i64,
}

impl<'a> Tree<'a> {
    fn new(glance: &Glance<'a>) -> Tree<'a> {
        let steps = glance.steps;
        let places: HashMap<&str, usize> =
            steps.iter().enumerate().map(|(at, step)| (step.activation.as_str(), at)).collect();
        let rank = |step: &StepInfo| {
            let known = glance.order.iter().position(|name| *name == step.activation);
            (known.unwrap_or(usize::MAX), step.started_at.clone().unwrap_or_else(|| "~".to_owned()))
        };
        let mut children: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        for (at, step) in steps.iter().enumerate() {
            children.entry(parent(&step.activation, &places)).or_default().push(at);
        }
        for (owner, inside) in &mut children {
            // Items and rounds keep their own order.
            let numbered = inside.iter().all(|at| steps[*at].activation.ends_with(']'));
            if owner.is_none() || !numbered {
                inside.sort_by_key(|at| rank(&steps[*at]));
            }
        }
        Tree { steps, children, now_ms: glance.now_ms }
    }

    fn rows(&self, owner: Option<usize>, depth: usize, rows: &mut Vec<Row>) {
        let Some(inside) = self.children.get(&owner) else { return };
        let shown = self.worth_showing(owner, inside);
        for at in inside.iter().filter(|at| shown.contains(at)) {
            rows.push(self.row(owner, *at, depth));
            self.rows(Some(*at), depth + 1, rows);
        }
        let hidden: Vec<usize> = inside.iter().copied().filter(|at| !shown.contains(at)).collect();
        if !hidden.is_empty() {
            let to_come = owner.map_or(0, |owner| words::to_come(&self.steps[owner]));
            rows.push(self.counted(&hidden, to_come, depth));
        }
    }

    /// All steps of the top level and of small groups; of larger ones, up to `SHOWN` that failed or are open.
    fn worth_showing(&self, owner: Option<usize>, inside: &[usize]) -> Vec<usize> {
        if owner.is_none() || inside.len() <= SHOWN {
            return inside.to_vec();
        }
        let of = |status: &'static str| inside.iter().copied().filter(move |at| self.steps[*at].status == status);
        let ongoing: Vec<usize> = ["running", "waiting"].into_iter().flat_map(of).take(SHOWN).collect();
        // Even if many failed, a third of the room is for open ones.
        let failed: Vec<usize> = of("failed").take(SHOWN - ongoing.len().min(SHOWN / 3)).collect();
        let room = SHOWN - failed.len();
        failed.into_iter().chain(ongoing.into_iter().take(room)).collect()
    }

    fn row(&self, owner: Option<usize>, at: usize, depth: usize) -> Row {
        let step = &self.steps[at];
        let (ink, mark) = mark(step);
        let label = match owner {
            Some(owner) => step.activation[self.steps[owner].activation.len()..].trim_start_matches('.'),
            None => &step.activation,
        };
        let name = Line::plain("  ".repeat(depth)).with(ink, mark).with(Ink::Plain, format!(" {label}"));
        let time = moment::between(step.started_at.as_deref(), step.ended_at.as_deref(), self.now_ms);
        Row { name, time: time.unwrap_or_default(), note: words::note(step) }
    }

    /// Counts the steps that are not shown, and the items that do not exist yet.
    fn counted(&self, hidden: &[usize], to_come: u64, depth: usize) -> Row {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for at in hidden {
            let step = &self.steps[*at];
            // The server reports `running` for a task in a queue, too.
            let queued = step.status == "running" && words::running(step).is_none();
            *counts.entry(if queued { "queued" } else { step.status.as_str() }).or_default() += 1;
        }
        let mut counts: Vec<String> = counts.iter().map(|(status, count)| format!("{count} {status}")).collect();
        if to_come > 0 {
            counts.push(format!("{to_come} to come"));
        }
        let more = hidden.len() as u64 + to_come;
        let name = Line::plain("  ".repeat(depth)).with(Ink::Faint, format!("… {more} more"));
        Row { name, time: String::new(), note: Line::default().with(Ink::Faint, counts.join(", ")) }
    }
}

/// The enclosing activation: `each[3]` of `each[3].price`, `each` of `each[3]`.
fn parent(activation: &str, places: &HashMap<&str, usize>) -> Option<usize> {
    let cuts = activation.char_indices().filter(|(at, c)| *at > 0 && matches!(c, '.' | '[')).map(|(at, _)| at);
    let cuts: Vec<usize> = cuts.collect();
    cuts.into_iter().rev().find_map(|cut| places.get(&activation[..cut]).copied())
}

fn mark(step: &StepInfo) -> (Ink, &'static str) {
    let what = step.waits_for.as_ref().and_then(|waits| waits["what"].as_str());
    let ink = Ink::of_status(&step.status);
    match (step.status.as_str(), what) {
        ("completed", _) => (ink, "✓"),
        ("failed", _) => (ink, "✗"),
        ("skipped" | "cancelled", _) => (ink, "–"),
        (_, Some("gate")) => (Ink::Note, "⏸"),
        (_, Some("back_off")) => (Ink::Note, "↻"),
        (_, Some("worker")) if words::running(step).is_none() => (Ink::Faint, "○"),
        ("running", _) => (ink, "●"),
        _ => (ink, "○"),
    }
}
