//! Compares what a function asks for in its executions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;

use eddyline_protocol::EntryKind;

use crate::code::memo::kind_name;

/// What each function asked for after each delivery, by run.
#[derive(Debug, Default)]
pub(super) struct Shaken {
    runs: HashMap<String, Run>,
    difference: Option<String>,
}

#[derive(Debug, Default)]
struct Run {
    attempt: u32,
    /// What earlier executions asked for.
    known: BTreeMap<u64, Point>,
    /// The execution in progress.
    now: Option<(u64, Point)>,
}

/// A delivery, and what the function asked for before the next one. A set, since some combinators poll in random order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Point {
    delivered: String,
    asked: BTreeSet<String>,
}

impl Shaken {
    pub fn begun(&mut self, run: &str, attempt: u32) {
        let of = self.runs.entry(run.to_owned()).or_default();
        if of.attempt != attempt {
            // A new attempt forgets what had failed, so it may ask for other things.
            *of = Run { attempt, ..Run::default() };
        }
        of.now = Some((0, Point { delivered: "the start".to_owned(), ..Point::default() }));
    }

    /// What an unwinding run asks for is not compared.
    pub fn unwinds(&mut self, run: &str) {
        if let Some(of) = self.runs.get_mut(run) {
            of.now = None;
        }
    }

    pub fn asked(&mut self, run: &str, name: &str, kind: EntryKind) {
        if let Some((_, point)) = self.runs.get_mut(run).and_then(|of| of.now.as_mut()) {
            point.asked.insert(format!("{} {name}", kind_name(kind)));
        }
    }

    pub fn delivered(&mut self, run: &str, n: u64, name: &str) {
        self.note(run);
        if let Some(of) = self.runs.get_mut(run)
            && of.now.is_some()
        {
            of.now = Some((n, Point { delivered: format!("`{name}` (n {n})"), ..Point::default() }));
        }
    }

    pub fn ended(&mut self, run: &str) {
        self.note(run);
        if let Some(of) = self.runs.get_mut(run) {
            of.now = None;
        }
    }

    /// The first difference between two executions.
    pub fn difference(&mut self) -> Option<String> {
        self.difference.take()
    }

    /// Compares the point in progress with that of an earlier execution.
    fn note(&mut self, run: &str) {
        let Some(of) = self.runs.get_mut(run) else { return };
        let Some((n, point)) = of.now.clone() else { return };
        match of.known.get(&n) {
            Some(known) if *known != point => {
                let mut text = format!(
                    "the function of run {run} asked for something else when it was replayed. Whatever differs between \
                     two executions, such as time, random numbers or what is read from elsewhere, belongs into a \
                     step.\n"
                );
                let _ = writeln!(text, "after the delivery of {}", known.delivered);
                let _ = writeln!(text, "  first:    {}", shown(&known.asked));
                let _ = writeln!(text, "  replayed: {}", shown(&point.asked));
                self.difference.get_or_insert(text);
            }
            Some(_) => {}
            None => {
                of.known.insert(n, point);
            }
        }
    }
}

fn shown(asked: &BTreeSet<String>) -> String {
    if asked.is_empty() {
        return "nothing".to_owned();
    }
    asked.iter().cloned().collect::<Vec<_>>().join(", ")
}
