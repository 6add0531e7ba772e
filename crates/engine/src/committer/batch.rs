//! Fills batches, sends them to the store and answers callers when they are committed or refused.

use std::collections::VecDeque;
use std::task::Context;
use std::time::{Duration, Instant};

use eddyline_machine::run::{Header, RunOutcome};
use eddyline_machine::{Expiry, Fence, Input, Millis, RunId, TaskChange, TaskRef, Transition, Version};
use eddyline_store::{Claimed, Claims, Command, Committed, Consumed, Refused, StoreError, Written};
use futures_util::future::{BoxFuture, FutureExt};

use super::prepare::{Decided, Prepared};
use super::{Committer, INPUTS_A_TRANSITION, InputOutcome, Order, Pending, Submission, Trying};
use crate::assignment::Handed;
use crate::certain;
use crate::dispatcher::{Added, ParkId, Parked};
use crate::error::EngineError;
use crate::labels::namespace_label;

/// A batch is closed when it has this many rows to write, or after this much time spent on deciding: other namespaces
/// have their turn in the next one.
const BATCH_ROWS: usize = 4_000;
const BATCH_TIME: Duration = Duration::from_millis(10);
/// How many runs are noted together as being decided ([`Handled`](crate::handled::Handled)). A note takes 2 µs.
const NOTED_TOGETHER: usize = 32;
/// A batch with more rows is encoded on another thread: a row takes a few microseconds.
const ENCODED_INLINE: usize = 200;
/// A payload counts as one row for each `ROW_BYTES`, up to `MAX_COUNTED` bytes.
const ROW_BYTES: usize = 256;
const MAX_COUNTED: usize = 64 << 10;
/// The first task of a run.
const FIRST_FENCE: Fence = Fence(1);
/// The most characters of a reason in a log line.
const REASON_CHARS: usize = 300;

/// A batch that the store has finished, with its result.
pub(super) struct Sent {
    prepared: Vec<Prepared>,
    claims: Vec<(ParkId, Parked)>,
    result: Result<Written, StoreError>,
    since: Instant,
}

/// The name of an input in log lines.
fn event_of(input: &Input) -> &'static str {
    match input {
        Input::Start(_) => "start",
        Input::TakeOver { .. } => "take_over",
        Input::Report(_) => "report",
        Input::Expired { .. } => "expired",
        Input::Undelivered { .. } => "undelivered",
        Input::Due(_) => "timer",
        Input::Rearm { .. } => "rearm",
        Input::OpenGate { .. } => "open_gate",
        Input::CancelGate { .. } => "cancel_gate",
        Input::ChildStarted { .. } => "child_started",
        Input::ChildEnded { .. } => "child_ended",
        Input::Cancel { .. } => "cancel",
        Input::Pause { .. } => "pause",
        Input::Resume { .. } => "resume",
        Input::Unpin { .. } => "unpin",
        Input::Act { .. } => "act",
        Input::Continue => "continue",
        Input::Drain { .. } => "drain",
        Input::Turn => "turn",
    }
}

fn short(reason: &str) -> String {
    reason.chars().take(REASON_CHARS).collect()
}

/// Roughly how many rows of the usual size the transitions write.
fn weight(prepared: &[Prepared]) -> usize {
    let of = |transition: &Transition| {
        let values = transition.values.iter().map(|(_, value)| 1 + value.own_bytes(MAX_COUNTED) / ROW_BYTES);
        transition.activations.len() + transition.records.len() + transition.tasks.len() + values.sum::<usize>()
    };
    let messages = |prepared: &Prepared| prepared.commit.messages.len() + prepared.commit.events.len();
    prepared.iter().map(|prepared| of(&prepared.commit.transition) + messages(prepared)).sum()
}

/// Encodes and sends a large batch on another thread of the runtime, so that the committer is not blocked.
fn elsewhere(sending: impl Future<Output = Sent> + Send + 'static) -> BoxFuture<'static, Sent> {
    let sending = tokio::spawn(sending);
    let sent = async move {
        match sending.await {
            Ok(sent) => sent,
            Err(failed) => match failed.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down, so the answer is dropped.
                Err(_) => std::future::pending().await,
            },
        }
    };
    sent.boxed()
}

impl Committer {
    /// Sends batches while there is something to send and fewer than `in_flight` are being written.
    pub(super) fn send_batches(&mut self, cx: &mut Context<'_>) {
        while self.sent.len() < self.config.in_flight
            && (!self.ready.is_empty() || self.suspect_is_next() || self.claims_wait())
            && self.has_gathered_enough()
            && self.look_at_time(cx)
        {
            let prepared = self.prepare_batch();
            let claims = self.claims_for(&prepared);
            if prepared.is_empty() && claims.is_empty() {
                continue;
            }
            metrics::histogram!("eddyline_batch_size").record(prepared.len() as f64);
            self.bus.commit_sent();
            self.sending += prepared.len();
            let (store, since) = (self.store.clone(), Instant::now());
            let large = weight(&prepared) > ENCODED_INLINE;
            let sending = async move {
                let commands = || prepared.iter().map(|prepared| Command::Run(prepared.commit.clone())).collect();
                let requests = || claims.iter().map(|(_, parked)| parked.request.clone()).collect();
                let result = certain::commit(&*store, commands, requests).await;
                Sent { prepared, claims, result, since }
            };
            self.sent.push(if large { elsewhere(sending) } else { sending.boxed() });
        }
    }

    /// On a shared store a small batch costs nearly as much as a large one. So while another is being written, the next
    /// gathers until it has at least half as many runs; otherwise a large and a tiny batch would take turns.
    fn has_gathered_enough(&self) -> bool {
        self.sent.is_empty() || self.store.hears_others().is_none() || self.ready.len() >= self.sending / 2
    }

    /// Decides runs until the batch is full: by transitions, rows or time.
    fn prepare_batch(&mut self) -> Vec<Prepared> {
        let (mut prepared, mut written, since) = (Vec::new(), 0, Instant::now());
        if let Some(suspect) = self.next_suspect() {
            prepared.extend(self.prepare_noted(&[suspect]));
            return prepared;
        }
        while prepared.len() < self.config.batch && written < BATCH_ROWS && since.elapsed() < BATCH_TIME {
            let some: Vec<RunId> = std::iter::from_fn(|| self.ready.pop()).take(NOTED_TOGETHER).collect();
            if some.is_empty() {
                break;
            }
            let next = self.prepare_noted(&some);
            written += weight(&next);
            prepared.extend(next);
        }
        prepared
    }

    /// Decides runs while the store has a note that they are being decided.
    fn prepare_noted(&mut self, runs: &[RunId]) -> Vec<Prepared> {
        self.handled.begin(runs);
        let prepared = runs.iter().filter_map(|run| self.prepare(*run)).collect();
        self.handled.end();
        prepared
    }

    /// The next run that is suspected of having killed a process, if nothing else is being decided.
    fn next_suspect(&mut self) -> Option<RunId> {
        if self.suspect_is_next() { self.ready_suspects.pop_front() } else { None }
    }

    fn suspect_is_next(&self) -> bool {
        !self.ready_suspects.is_empty() && self.heavy_deciding.is_empty()
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
        let picked = self.dispatcher.pick(&added);
        self.trying.extend(picked.iter().map(|(_, Parked { request, .. })| {
            let (ns, worker) = (request.ns.clone(), request.worker.clone());
            (request.request, Trying { ns, worker, called_off: false })
        }));
        picked
    }

    pub(super) fn finished(&mut self, sent: Sent) {
        self.sending -= sent.prepared.len();
        self.bus.commit_returned(!self.sent.is_empty());
        metrics::histogram!("eddyline_commit_seconds").record(sent.since.elapsed().as_secs_f64());
        self.health.committed(sent.result.as_ref().err().map(|error| error as &dyn std::fmt::Display));
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
                    self.dispatcher.tried(&parked);
                    self.trying.remove(&parked.request.request);
                    let _ = parked.reply.send(Err(EngineError::Store(error.clone())));
                }
                return;
            }
        };
        let runs: Vec<RunId> = sent.prepared.iter().map(|prepared| prepared.run).collect();
        for (prepared, result) in sent.prepared.into_iter().zip(written.commands) {
            match result {
                Ok(committed) => self.committed(prepared, committed),
                Err(refused) => self.refused(prepared, refused),
            }
        }
        for ((id, parked), claims) in sent.claims.into_iter().zip(written.claims) {
            self.claimed(id, parked, claims);
        }
        // The claims have copied the payloads that they need, so large ones can be evicted.
        runs.into_iter().for_each(|run| self.cache.settle(run));
        metrics::gauge!("eddyline_cached_runs_bytes").set(self.cache.bytes() as f64);
    }

    fn committed(&mut self, prepared: Prepared, committed: Committed) {
        let Prepared { run, commit, decided } = prepared;
        self.log_decision(&commit.transition, &decided);
        if commit.transition.base == Version(0) && !committed.before {
            metrics::counter!("eddyline_runs_started_total", "namespace" => namespace_label(&commit.ns)).increment(1);
            if !commit.transition.header.status().is_end() {
                self.bus.started(&commit.ns, run);
            }
        }
        let status = commit.transition.header.status();
        if !status.is_end() {
            self.cache.change(run, |cached| cached.apply(&commit.transition));
        } else {
            if self.cache.get(run).is_some_and(|cached| !cached.run.header.status().is_end()) {
                let labels = [("namespace", namespace_label(&commit.ns)), ("status", status.as_str().to_owned())];
                metrics::counter!("eddyline_runs_ended_total", &labels).increment(1);
                self.log_end(&commit.transition.header, committed.at);
                self.bus.ended(&commit.ns, &commit.transition.header);
            }
            self.cache.remove(run);
        }
        if let Some(lane) = self.lanes.get_mut(&run) {
            (lane.conflicts, lane.turn) = (0, None);
            lane.at_most = INPUTS_A_TRANSITION.min(lane.at_most * 2);
        }
        self.answer_decided(run, decided, committed.at);
        self.release(run);
    }

    fn log_decision(&self, transition: &Transition, decided: &[Decided]) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let inputs = decided.iter().flat_map(|decided| &decided.taken).map(event_of);
        let event = inputs.collect::<Vec<_>>().join(",");
        let (header, records) = (&transition.header, transition.records.len());
        let (instance, run, flow, version) = (&self.config.instance, header.run, &header.flow, header.version.0);
        tracing::debug!(instance, %run, flow, event, version, records, "decided");
    }

    /// Logs the end of a run, with the reason if it failed.
    fn log_end(&self, header: &Header, at: Millis) {
        let (instance, run, flow) = (&self.config.instance, header.run, &header.flow);
        // For a continued run, this is the time since the first run of the chain began.
        let ms = (at - header.events_since).max(0);
        match &header.outcome {
            Some(RunOutcome::Failed(error)) => {
                let reason = short(&format!("{}: {}", error.kind, error.message));
                tracing::warn!(instance, %run, flow, ms, reason, "run failed");
            }
            Some(RunOutcome::Cancelled(_)) => {
                let reason = short(header.cancel_reason.as_deref().unwrap_or_default());
                tracing::info!(instance, %run, flow, ms, reason, "run cancelled");
            }
            Some(RunOutcome::Completed(_)) | None => {
                tracing::info!(instance, %run, flow, ms, "run completed");
            }
        }
    }

    /// Measures how long a run waited for its first task to be claimed, from its start or the end of its delay.
    fn measure_first_claim(&self, claimed: &Claimed) {
        if claimed.task.fence != FIRST_FENCE {
            return;
        }
        let begun = self.cache.get(claimed.run).map(|cached| cached.run.header.events_since);
        // The id of a run that a client started contains the start time (UUIDv7).
        let started_at = begun.or_else(|| {
            let (seconds, nanos) = claimed.run.0.get_timestamp()?.to_unix();
            Millis::try_from(seconds.saturating_mul(1_000) + u64::from(nanos / 1_000_000)).ok()
        });
        if let Some(started_at) = started_at {
            let seconds = (claimed.held.since - started_at).max(0) as f64 / 1_000.0;
            metrics::histogram!("eddyline_start_to_claim_seconds").record(seconds);
        }
    }

    fn refused(&mut self, prepared: Prepared, refused: Refused) {
        let Prepared { run, commit, decided } = prepared;
        if !matches!(refused, Refused::Unstorable(_)) {
            metrics::counter!("eddyline_conflicts_total").increment(1);
        }
        tracing::debug!(instance = self.config.instance, %run, "refused: {refused}");
        if !matches!(refused, Refused::Conflict { .. }) {
            self.cache.remove(run);
        }
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.conflicts += 1;
        }
        match refused {
            Refused::KeyTaken { run: other, fingerprint } => self.undo(run, decided, |pending| {
                let has_key = pending.start.as_ref().is_some_and(|start| start.key.is_some());
                has_key.then_some(InputOutcome::KeyTaken { run: other, fingerprint })
            }),
            Refused::UniqueTaken { run: other } => {
                let taken = InputOutcome::UniqueTaken { run: other };
                self.undo(run, decided, |pending| pending.start.as_ref().map(|_| taken.clone()));
            }
            Refused::LineFull => {
                self.undo(run, decided, |pending| pending.start.as_ref().map(|_| InputOutcome::LineFull));
            }
            Refused::Gone(gone) => self.undo(run, decided, |pending| {
                pending.taken.as_ref().filter(|taken| gone.contains(taken)).map(|_| InputOutcome::Gone)
            }),
            Refused::Unstorable(why) => {
                tracing::error!(instance = self.config.instance, %run, "not committed: {why}");
                let error = StoreError::Unavailable(why);
                return self.failed(Prepared { run, commit, decided }, &error);
            }
            Refused::Conflict { .. } | Refused::Revision { .. } => {
                self.undo(run, decided, |_| None);
                return self.load_after_conflict(run);
            }
        }
        self.release(run);
    }

    /// Puts inputs back into their lane, except for submissions that `answer` answers.
    fn undo(&mut self, run: RunId, decided: Vec<Decided>, answer: impl Fn(&Pending) -> Option<InputOutcome>) {
        for mut decided in decided.into_iter().rev() {
            for input in decided.taken.drain(..).rev() {
                decided.pending.inputs.push_front(input);
            }
            match answer(&decided.pending) {
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

    /// Answers decided submissions; undecided rest goes back to the front of the lane.
    pub(super) fn answer_decided(&mut self, run: RunId, decided: Vec<Decided>, at: Millis) {
        for decided in decided.into_iter().rev() {
            if let Some(rest) = self.settle(decided, at)
                && let Some(lane) = self.lanes.get_mut(&run)
            {
                lane.waiting.push_front(rest);
            }
        }
    }

    /// The store failed to write the batch: all of its submissions get the error.
    fn failed(&mut self, prepared: Prepared, error: &StoreError) {
        let Prepared { run, decided, .. } = prepared;
        self.cache.remove(run);
        let in_order = decided.iter().any(|decided| decided.pending.is_message());
        for decided in decided {
            decided.pending.fail(EngineError::Store(error.clone()));
        }
        if in_order && let Some(lane) = self.lanes.get_mut(&run) {
            // Messages never overtake each other: later ones fail too and are delivered again together.
            let (after, others): (VecDeque<Pending>, _) = lane.waiting.drain(..).partition(Pending::is_message);
            lane.waiting = others;
            after.into_iter().for_each(|pending| pending.fail(EngineError::Store(error.clone())));
        }
        self.release(run);
    }

    fn claimed(&mut self, id: ParkId, parked: Parked, claims: Claims) {
        self.dispatcher.tried(&parked);
        let called_off = self.trying.remove(&parked.request.request).is_some_and(|trying| trying.called_off);
        if claims.tasks.is_empty() && !claims.full && !parked.once && !called_off && !self.stopping {
            if let Some(repeated) = self.dispatcher.put_back(id, parked, &claims) {
                let _ = repeated.reply.send(Ok(Vec::new()));
            }
            return;
        }
        let ns = namespace_label(&parked.request.ns);
        metrics::counter!("eddyline_tasks_claimed_total", "namespace" => ns).increment(claims.tasks.len() as u64);
        // The queues may have more tasks than the worker asked for or had room for.
        if (claims.full || claims.tasks.len() == parked.request.max) && !claims.exhausted {
            for queue in &parked.request.queues {
                self.dispatcher.hint(parked.request.ns.clone(), queue.clone());
            }
        }
        claims.tasks.iter().for_each(|claimed| self.measure_first_claim(claimed));
        let handed =
            claims.tasks.into_iter().map(|claimed| Handed::new(self.cache.get(claimed.run), claimed)).collect();
        if let Err(Ok(undelivered)) = parked.reply.send(Ok(handed))
            && !parked.repeated_elsewhere
        {
            for handed in undelivered {
                self.release_task(handed.claimed);
            }
        }
    }

    /// Returns a claimed task that could not be delivered to its queue, without using up an attempt.
    pub(super) fn release_task(&mut self, claimed: Claimed) {
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let input = Input::Expired { task, why: Expiry::Released, claim: claimed.held.claim };
        let (reply, _) = tokio::sync::oneshot::channel();
        let taken = Some(Consumed::Expiry(task.fence, Expiry::Released));
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
