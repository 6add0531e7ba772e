//! From commits to answers.

use std::collections::VecDeque;
use std::task::Context;
use std::time::Instant;

use eddyline_machine::{Expiry, Input, Millis, RunId, TaskChange, TaskRef, Version};
use eddyline_store::{Claimed, Claims, Command, Committed, Refused, StoreError, Taken, Written};

use super::prepare::{Decided, Prepared};
use super::{Committer, Order, Outcome, Pending, Submission, Trying};
use crate::assignment::Handed;
use crate::dispatcher::{Added, ParkId, Parked};
use crate::error::EngineError;
use crate::labels::namespace_label;

/// How often the same commands are submitted while their outcome is unknown.
const UNKNOWN_TRIES: usize = 100;

/// A batch that came back from the store.
pub(super) struct Sent {
    prepared: Vec<Prepared>,
    claims: Vec<(ParkId, Parked)>,
    result: Result<Written, StoreError>,
    since: Instant,
}

impl Committer {
    /// Sends batches for as long as there is something to send and room on the way.
    pub(super) fn send_batches(&mut self, cx: &mut Context<'_>) {
        while self.sent.len() < self.config.in_flight
            && (!self.ready.is_empty() || self.claims_wait())
            && self.look_at_time(cx)
        {
            let mut prepared = Vec::new();
            while prepared.len() < self.config.batch
                && let Some(run) = self.ready.pop_front()
            {
                prepared.extend(self.prepare(run));
            }
            let claims = self.claims_for(&prepared);
            if prepared.is_empty() && claims.is_empty() {
                continue;
            }
            metrics::histogram!("eddyline_batch_size").record(prepared.len() as f64);
            self.bus.sent();
            let (store, since) = (self.store.clone(), Instant::now());
            self.sent.push(Box::pin(async move {
                let mut result = Err(StoreError::Unknown);
                for _ in 0..UNKNOWN_TRIES {
                    let commands = prepared.iter().map(|prepared| Command::Run(prepared.commit.clone()));
                    let requests = claims.iter().map(|(_, parked)| parked.request.clone());
                    result = store.commit(commands.collect(), requests.collect()).await;
                    if !matches!(result, Err(StoreError::Unknown)) {
                        break;
                    }
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
                Sent { prepared, claims, result, since }
            }));
        }
    }

    fn claims_wait(&self) -> bool {
        !self.stopping && self.dispatcher.wants()
    }

    fn claims_for(&mut self, prepared: &[Prepared]) -> Vec<(ParkId, Parked)> {
        if self.stopping {
            return Vec::new();
        }
        let mut added = Vec::new();
        for prepared in prepared {
            let ns = &prepared.commit.ns;
            for change in &prepared.commit.transition.tasks {
                if let TaskChange::Add(task) = change {
                    added.push(Added { ns, task });
                }
            }
        }
        let mut picked = self.dispatcher.pick(&added);
        picked.retain(|(_, parked)| !parked.reply.is_closed());
        self.trying.extend(picked.iter().map(|(_, Parked { request, .. })| {
            let (ns, worker) = (request.ns.clone(), request.worker.clone());
            (request.request, Trying { ns, worker, called_off: false })
        }));
        picked
    }

    pub(super) fn finished(&mut self, sent: Sent) {
        self.bus.came_back(!self.sent.is_empty());
        metrics::histogram!("eddyline_commit_seconds").record(sent.since.elapsed().as_secs_f64());
        let written = match sent.result {
            Ok(written) => written,
            Err(error) => {
                tracing::error!(
                    instance = self.config.instance,
                    "{} transitions not committed: {error}",
                    sent.prepared.len()
                );
                for prepared in sent.prepared {
                    self.failed(prepared, &error);
                }
                for (_, parked) in sent.claims {
                    self.trying.remove(&parked.request.request);
                    let _ = parked.reply.send(Err(EngineError::Store(error.clone())));
                }
                return;
            }
        };
        for (prepared, result) in sent.prepared.into_iter().zip(written.commands) {
            match result {
                Ok(committed) => self.committed(prepared, committed),
                Err(refused) => self.refused(prepared, refused),
            }
        }
        for ((id, parked), claims) in sent.claims.into_iter().zip(written.claims) {
            self.claimed(id, parked, claims);
        }
    }

    fn committed(&mut self, prepared: Prepared, committed: Committed) {
        let Prepared { run, commit, decided } = prepared;
        let (version, records) = (commit.transition.header.version, commit.transition.records.len());
        tracing::debug!(instance = self.config.instance, %run, version = version.0, records, "decided");
        if commit.transition.base == Version(0) && !committed.before {
            metrics::counter!("eddyline_runs_started_total", "namespace" => namespace_label(&commit.ns)).increment(1);
            if !commit.transition.header.status().is_end() {
                self.bus.begun(&commit.ns, run);
            }
        }
        if let Some(mut hot) = self.hot.take(run) {
            let was_over = hot.run.header.status().is_end();
            hot.apply(&commit.transition);
            if !commit.transition.header.status().is_end() {
                self.hot.put(hot);
            } else if !was_over {
                let status = commit.transition.header.status().as_str();
                let labels = [("namespace", namespace_label(&hot.ns)), ("status", status.to_owned())];
                metrics::counter!("eddyline_runs_ended_total", &labels).increment(1);
                self.bus.ended(&hot.ns, &commit.transition.header);
            }
        }
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.conflicts = 0;
        }
        self.give_back(run, decided, committed.at);
        self.release(run);
    }

    fn refused(&mut self, prepared: Prepared, refused: Refused) {
        let Prepared { run, decided, .. } = prepared;
        metrics::counter!("eddyline_conflicts_total").increment(1);
        tracing::debug!(instance = self.config.instance, %run, "refused: {refused}");
        self.hot.take(run);
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.conflicts += 1;
        }
        match refused {
            Refused::KeyTaken { run: other, fingerprint } => self.undo(run, decided, |pending_key, _| {
                pending_key.then_some(Outcome::KeyTaken { run: other, fingerprint })
            }),
            Refused::Gone(gone) => {
                self.undo(run, decided, |_, taken| taken.filter(|taken| gone.contains(taken)).map(|_| Outcome::Gone))
            }
            Refused::Conflict { .. } | Refused::Revision { .. } => self.undo(run, decided, |_, _| None),
        }
        self.release(run);
    }

    /// Puts inputs back as they were, but for those that are answered now.
    fn undo(&mut self, run: RunId, decided: Vec<Decided>, answer: impl Fn(bool, Option<&Taken>) -> Option<Outcome>) {
        for mut decided in decided.into_iter().rev() {
            for input in decided.taken.drain(..).rev() {
                decided.pending.inputs.push_front(input);
            }
            let has_key = decided.pending.start.as_ref().is_some_and(|start| start.key.is_some());
            match answer(has_key, decided.pending.taken.as_ref()) {
                Some(outcome) => {
                    let mut pending = decided.pending;
                    pending.outcomes.push(outcome);
                    pending.answer();
                }
                None => {
                    if let Some(lane) = self.lanes.get_mut(&run) {
                        lane.waiting.push_front(decided.pending);
                    }
                }
            }
        }
    }

    /// Answers what is decided; what is left of a submission goes back to the head of its run's line.
    pub(super) fn give_back(&mut self, run: RunId, decided: Vec<Decided>, at: Millis) {
        for decided in decided.into_iter().rev() {
            if let Some(rest) = self.settle(decided, at)
                && let Some(lane) = self.lanes.get_mut(&run)
            {
                lane.waiting.push_front(rest);
            }
        }
    }

    /// The store did not take the batch: nothing of it was written, and everybody is told.
    fn failed(&mut self, prepared: Prepared, error: &StoreError) {
        let Prepared { run, decided, .. } = prepared;
        self.hot.take(run);
        let in_order = decided.iter().any(|decided| decided.pending.is_message());
        for decided in decided {
            decided.pending.fail(EngineError::Store(error.clone()));
        }
        if in_order && let Some(lane) = self.lanes.get_mut(&run) {
            // Messages never overtake each other: those that come after are delivered again with these.
            let (after, others): (VecDeque<Pending>, _) = lane.waiting.drain(..).partition(Pending::is_message);
            lane.waiting = others;
            after.into_iter().for_each(|pending| pending.fail(EngineError::Store(error.clone())));
        }
        self.release(run);
    }

    fn claimed(&mut self, id: ParkId, parked: Parked, claims: Claims) {
        let called_off = self.trying.remove(&parked.request.request).is_some_and(|trying| trying.called_off);
        if claims.tasks.is_empty() && !parked.once && !called_off && !self.stopping {
            if let Some(repeated) = self.dispatcher.put_back(id, parked, &claims) {
                let _ = repeated.reply.send(Ok(Vec::new()));
            }
            return;
        }
        let ns = namespace_label(&parked.request.ns);
        metrics::counter!("eddyline_tasks_claimed_total", "namespace" => ns).increment(claims.tasks.len() as u64);
        // There may be more of what it just got.
        if claims.tasks.len() == parked.request.max {
            for queue in &parked.request.queues {
                self.dispatcher.hint(parked.request.ns.clone(), queue.clone());
            }
        }
        let handed = claims.tasks.into_iter().map(|claimed| Handed::new(self.hot.get(claimed.run), claimed)).collect();
        if let Err(Ok(undelivered)) = parked.reply.send(Ok(handed)) {
            for handed in undelivered {
                self.release_task(handed.claimed);
            }
        }
    }

    /// A task that was claimed and could not be delivered comes back without costing an attempt.
    pub(super) fn release_task(&mut self, claimed: Claimed) {
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let input = Input::Expired { task, why: Expiry::Released, claim: claimed.held.claim };
        let (reply, _) = tokio::sync::oneshot::channel();
        let taken = Some(Taken::Expiry(task.fence, Expiry::Released));
        self.take(Order::Submit(Submission {
            run: claimed.run,
            ns: None,
            inputs: vec![input],
            taken,
            start: None,
            reply,
        }));
    }
}
