//! The lines of runs with the same unique key: see [`LINE_LIMIT`](crate::LINE_LIMIT).

use eddyline_machine::run::{Header, Phase};
use eddyline_machine::{Input, Message, RunId};

use super::rows::Rows;
use crate::LINE_LIMIT;
use crate::commit::RunCommit;
use crate::error::Refused;
use crate::ids::Namespace;

/// Namespace, flow and key.
pub(super) type LineKey = (Namespace, String, String);

impl Rows {
    pub fn first_in_line(&self, run: RunId) -> bool {
        let line = self.line_of.get(&run).and_then(|key| self.lines.get(key));
        line.and_then(|line| line.first()) == Some(&run)
    }

    /// Why a start cannot join the line of its key.
    pub fn refused_by_line(&self, commit: &RunCommit) -> Option<Refused> {
        let header = &commit.transition.header;
        let line = self.lines.get(&line_key(&commit.ns, header)?)?;
        match line.first() {
            _ if line.contains(&header.run) => None,
            Some(first) if !header.in_line => Some(Refused::UniqueTaken { run: *first }),
            _ => (line.len() >= LINE_LIMIT).then_some(Refused::LineFull),
        }
    }

    pub fn join_line(&mut self, ns: &Namespace, header: &Header, tells: Option<&Input>) {
        let Some(key) = line_key(ns, header) else { return };
        let line = self.lines.entry(key.clone()).or_default();
        if line.contains(&header.run) {
            return;
        }
        let before = line.clone();
        line.push(header.run);
        self.line_of.insert(header.run, key);
        if let Some(input) = tells {
            for other in &before {
                self.send(ns, Message::replaced(*other, header.run, input.clone()));
            }
        }
        if before.is_empty() && header.in_line {
            self.send(ns, Message::turn(header.run));
        }
    }

    /// An ended run leaves its line, or hands its place to the run that continues it.
    pub fn end_in_line(&mut self, ns: &Namespace, header: &Header) {
        if header.phase != Phase::Ended || header.unique.is_none() {
            return;
        }
        let Some(next) = header.continued_as else { return self.leave_line(ns, header.run) };
        if let Some(key) = self.line_of.remove(&header.run) {
            if let Some(line) = self.lines.get_mut(&key) {
                line.iter_mut().filter(|run| **run == header.run).for_each(|run| *run = next);
            }
            self.line_of.insert(next, key);
        }
    }

    pub fn leave_line(&mut self, ns: &Namespace, run: RunId) {
        let Some(key) = self.line_of.remove(&run) else { return };
        let Some(line) = self.lines.get_mut(&key) else { return };
        let was_first = line.first() == Some(&run);
        line.retain(|other| *other != run);
        match line.first().copied() {
            Some(first) if was_first => self.send(ns, Message::turn(first)),
            Some(_) => {}
            None => _ = self.lines.remove(&key),
        }
    }
}

fn line_key(ns: &Namespace, header: &Header) -> Option<LineKey> {
    header.unique.as_ref().map(|unique| (ns.clone(), header.flow.clone(), unique.key.clone()))
}
