//! Reports, kept until they are acknowledged. They are sent in batches: while one is in flight, the next one fills.

use std::collections::VecDeque;
use std::sync::Arc;

use eddyline_protocol::{Op, Report, ReportOutcome, Verdict};
use serde_json::Value;
use tokio::sync::oneshot;

use super::task::TaskId;
use crate::client::{is_deeper, weigh, weigh_text};

/// The maximum number and approximate size of the reports in a batch: well below the server's message limit.
const MAX_BATCH: usize = 512;
const MAX_BATCH_BYTES: usize = 4 << 20;
/// The largest single report, which is then sent alone.
pub(crate) const MAX_REPORT_BYTES: usize = 12 << 20;
/// The maximum nesting depth of payloads that the server accepts.
const MAX_DEPTH: usize = 64;

#[derive(Debug)]
pub(crate) struct Pending {
    pub task: TaskId,
    pub report: Arc<Report>,
    /// The final report of its task.
    pub last: bool,
    /// Receives the outcome.
    pub answer: Option<oneshot::Sender<ReportOutcome>>,
    /// It is a report of the driver of a code run, which receives the outcome.
    pub of_driver: bool,
    bytes: usize,
}

impl Pending {
    pub fn new(task: TaskId, report: Report, last: bool, answer: Option<oneshot::Sender<ReportOutcome>>) -> Pending {
        let bytes = report.task_id.len() + report.token.len() + 64 + weigh_op(&report.op);
        Pending { task, report: Arc::new(report), last, answer, of_driver: false, bytes }
    }

    pub fn of_driver(self) -> Pending {
        Pending { of_driver: true, ..self }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    waiting: VecDeque<Pending>,
    in_flight: Option<Batch>,
    /// This many of the next reports are sent alone: the server refused them as a batch, because of one of them.
    alone: usize,
    /// The id of the last batch, so that a reply to a batch of an earlier connection is not mistaken for a reply to
    /// this one.
    id: u64,
}

#[derive(Debug)]
struct Batch {
    id: u64,
    reports: Vec<Pending>,
}

impl Outbox {
    pub fn push(&mut self, pending: Pending) {
        self.waiting.push_back(pending);
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.in_flight.is_none()
    }

    /// Whether reports are waiting for the next batch.
    pub fn is_gathering(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The number of unacknowledged reports.
    pub fn len(&self) -> usize {
        self.waiting.len() + self.in_flight.as_ref().map_or(0, |batch| batch.reports.len())
    }

    /// The next batch, unless one is in flight.
    pub fn next_batch(&mut self) -> Option<(u64, Vec<Arc<Report>>)> {
        if self.in_flight.is_some() || self.waiting.is_empty() {
            return None;
        }
        let most = if self.alone > 0 { 1 } else { MAX_BATCH };
        self.alone = self.alone.saturating_sub(1);
        let (mut reports, mut bytes) = (Vec::with_capacity(self.waiting.len().min(most)), 0);
        while let Some(next) = self.waiting.front()
            && reports.len() < most
            && (reports.is_empty() || bytes + next.bytes <= MAX_BATCH_BYTES)
        {
            bytes += next.bytes;
            reports.extend(self.waiting.pop_front());
        }
        self.id += 1;
        let sent = reports.iter().map(|pending: &Pending| pending.report.clone()).collect();
        self.in_flight = Some(Batch { id: self.id, reports });
        Some((self.id, sent))
    }

    /// Handles the reply to a batch. Reports that were not tried are sent again, before any later ones.
    pub fn answered(&mut self, id: u64, outcomes: Vec<ReportOutcome>) -> Vec<(Pending, ReportOutcome)> {
        let Some(batch) = self.in_flight.take_if(|batch| batch.id == id) else { return Vec::new() };
        let (mut settled, mut again) = (Vec::with_capacity(outcomes.len()), Vec::new());
        let mut outcomes = outcomes.into_iter();
        for pending in batch.reports {
            match outcomes.next() {
                Some(outcome) if outcome.outcome != Verdict::NotTried => settled.push((pending, outcome)),
                _ => again.push(pending),
            }
        }
        again.into_iter().rev().for_each(|pending| self.waiting.push_front(pending));
        settled
    }

    /// Call it when the server rejects the batch in flight permanently. Returns the report if it was a single one;
    /// otherwise its reports are sent again one by one.
    pub fn refused(&mut self) -> Option<Pending> {
        let mut batch = self.in_flight.take()?;
        if batch.reports.len() == 1 {
            return batch.reports.pop();
        }
        self.alone = batch.reports.len();
        self.in_flight = Some(batch);
        self.take_back();
        None
    }

    /// Call it when the connection has ended: the batch in flight is sent again, with the same sequence numbers.
    pub fn take_back(&mut self) {
        if let Some(batch) = self.in_flight.take() {
            batch.reports.into_iter().rev().for_each(|pending| self.waiting.push_front(pending));
        }
    }
}

/// Why no server accepts a payload, if it is nested too deep.
pub(crate) fn too_deep(payload: &Value) -> Option<String> {
    is_deeper(payload, MAX_DEPTH).then(|| format!("is nested more than {MAX_DEPTH} deep"))
}

/// The approximate size of a report, in bytes.
pub(crate) fn weigh_op(op: &Op) -> usize {
    match op {
        Op::Complete { output, emits, logs } => {
            let emits = emits.iter().map(|emit| emit.event.len() + weigh(&emit.payload) + 32).sum::<usize>();
            let logs =
                logs.iter().map(|log| weigh_text(&log.msg) + log.meta.as_ref().map_or(0, weigh) + 40).sum::<usize>();
            weigh(output) + emits + logs
        }
        Op::Fail { error, .. } => {
            weigh_text(&error.message) + weigh_text(&error.kind) + error.stack.as_deref().map_or(0, weigh_text)
        }
        Op::Emit(emit) => emit.event.len() + weigh(&emit.payload),
        Op::Publish { name, key, payload, .. } => name.len() + key.as_ref().map_or(0, weigh) + weigh(payload),
        Op::Log(log) => weigh_text(&log.msg) + log.meta.as_ref().map_or(0, weigh),
        Op::Progress { msg, .. } => msg.as_deref().map_or(0, weigh_text),
        Op::Step { name, output, error, .. } => {
            let error = error.as_ref().map_or(0, |error| weigh_text(&error.message) + weigh_text(&error.kind));
            weigh_text(name) + weigh(output) + error
        }
        Op::Call { name, input, .. } | Op::Child { name, input, .. } => weigh_text(name) + weigh(input),
        other => serde_json::to_value(other).as_ref().map_or(0, |op: &Value| weigh(op)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use eddyline_protocol::Log;

    fn report(task: &str, seq: u32) -> Pending {
        let op = Op::Log(Log { level: "info".to_owned(), msg: "x".to_owned(), meta: None });
        let report = Report { task_id: task.to_owned(), token: "t".to_owned(), seq: Some(seq), seen: None, op };
        Pending::new(Arc::from(task), report, false, None)
    }

    fn outcome(task: &str, outcome: Verdict) -> ReportOutcome {
        serde_json::from_value(serde_json::json!({"task_id": task, "outcome": outcome})).unwrap()
    }

    fn names(batch: &[Arc<Report>]) -> Vec<(String, u32)> {
        batch.iter().map(|report| (report.task_id.clone(), report.seq.unwrap())).collect()
    }

    #[test]
    fn one_batch_is_on_its_way_while_the_next_gathers_and_a_cut_sends_the_same_again_in_order() {
        let mut outbox = Outbox::default();
        outbox.push(report("a", 1));
        outbox.push(report("b", 1));
        let (first, batch) = outbox.next_batch().unwrap();
        assert_eq!(names(&batch), [("a".to_owned(), 1), ("b".to_owned(), 1)]);
        outbox.push(report("a", 2));
        assert!(outbox.next_batch().is_none());
        outbox.take_back();
        let (second, batch) = outbox.next_batch().unwrap();
        assert_eq!(names(&batch), [("a".to_owned(), 1), ("b".to_owned(), 1), ("a".to_owned(), 2)]);
        assert!(outbox.answered(first, vec![outcome("a", Verdict::Applied)]).is_empty(), "a reply from before the cut");
        let all = vec![outcome("a", Verdict::Invalid), outcome("b", Verdict::Applied), outcome("a", Verdict::NotTried)];
        assert_eq!(outbox.answered(second, all).len(), 2);
        let (_, batch) = outbox.next_batch().unwrap();
        assert_eq!(names(&batch), [("a".to_owned(), 2)]);
    }

    #[test]
    fn of_reports_that_are_refused_together_the_one_that_is_why_is_found() {
        let mut outbox = Outbox::default();
        ["a", "b", "c"].into_iter().for_each(|task| outbox.push(report(task, 1)));
        outbox.next_batch().unwrap();
        assert!(outbox.refused().is_none(), "any of three");
        outbox.push(report("d", 1));
        for (task, taken) in [("a", true), ("b", false), ("c", true)] {
            let (id, batch) = outbox.next_batch().unwrap();
            assert_eq!(names(&batch), [(task.to_owned(), 1)]);
            match taken {
                true => assert_eq!(outbox.answered(id, vec![outcome(task, Verdict::Applied)]).len(), 1),
                false => assert_eq!(&*outbox.refused().unwrap().task, task),
            }
        }
        outbox.push(report("e", 1));
        assert_eq!(outbox.next_batch().unwrap().1.len(), 2, "the others are sent together");
        assert!(Outbox::default().refused().is_none());
    }

    #[test]
    fn batches_are_bounded_by_number_and_by_bytes() {
        let mut outbox = Outbox::default();
        (0..MAX_BATCH as u32 + 1).for_each(|seq| outbox.push(report("a", seq)));
        assert_eq!(outbox.next_batch().unwrap().1.len(), MAX_BATCH);
        let mut outbox = Outbox::default();
        for task in ["a", "b", "c"] {
            let mut large = report(task, 1);
            large.bytes = MAX_BATCH_BYTES / 2 + 1;
            outbox.push(large);
        }
        assert_eq!(outbox.next_batch().unwrap().1.len(), 1);
    }
}
