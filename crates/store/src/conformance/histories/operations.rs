//! The random operations.

use std::sync::Arc;

use eddyline_machine::{Expiry, Input, MessageBody, Millis, OnConflict, OpenedBy, RunId, Start, Status, Unique};
use serde_json::json;

use super::super::drive::{event, note};
use super::Same;
use super::both::Order;
use super::world::{NAMES, World};
use crate::*;

/// A few random bytes: every choice consumes one; without any left it is the simplest choice.
#[derive(Debug)]
pub struct Happening<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Happening<'a> {
    pub fn new(bytes: &'a [u8]) -> Happening<'a> {
        Happening { bytes, at: 0 }
    }

    pub fn below(&mut self, n: usize) -> usize {
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        if n < 2 { 0 } else { usize::from(byte) % n }
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1
    }

    pub fn pick<'b, T>(&mut self, from: &'b [T]) -> Option<&'b T> {
        if from.is_empty() { None } else { Some(&from[self.below(from.len())]) }
    }
}

impl World<'_> {
    pub async fn happen(&mut self, mut h: Happening<'_>) -> Same {
        let what = h.below(64);
        self.tell(format!("{} at {}", what, self.drive.now().await));
        match what {
            0..=9 => self.start(&mut h).await?,
            10..=19 => self.claim(&mut h).await?,
            20..=31 => self.report(&mut h).await?,
            32 | 33 => self.submit_again(&mut h).await?,
            34 | 35 => self.keep_back(&mut h).await?,
            36..=38 => self.extend_some(&mut h).await?,
            39..=42 => self.time_passes(&mut h).await?,
            43 => self.wall_jumps(&mut h),
            44 | 45 => self.timers(&mut h).await?,
            46 | 47 => self.messages(&mut h).await?,
            48 | 49 => self.leases(&mut h).await?,
            50 => self.documents_are_due(&mut h).await?,
            51 | 52 => self.documents_change(&mut h).await?,
            53 => self.events_come(&mut h).await?,
            54..=56 => self.act(&mut h).await?,
            57 | 58 => self.gate(&mut h).await?,
            59 => self.delete(&mut h).await?,
            60 => self.take_what_is_gone(&mut h).await?,
            61 => self.read(&mut h).await?,
            62 if self.reopens => self.reopen().await?,
            _ => self.compare().await?,
        }
        self.after_each().await
    }

    async fn start(&mut self, h: &mut Happening<'_>) -> Same {
        let name = NAMES[h.below(NAMES.len())];
        let k = if self.reopens && name == "fair" { 0 } else { h.below(3) };
        let at = Clock::wall(&*self.drive.clock) + (h.below(4) as Millis - 1) * 4_000;
        let big = if h.one_in(4) { "x".repeat(700) } else { String::new() };
        let items: Vec<usize> = (0..h.below(5)).collect();
        let start = Start {
            input: Some(json!({"k": k, "items": items, "at": at, "big": big}).into()),
            external_id: (k == 1).then(|| "ext".to_owned()),
            tags: ["red", "green"][..k].iter().map(|tag| tag.to_string()).collect(),
            priority: h.below(3) as i32 - 1,
            delay_ms: h.one_in(6).then_some(2_000),
            deadline_ms: h.one_in(6).then_some(20_000),
            ..Start::default()
        };
        let mut commits = Vec::new();
        // Several at once where tasks wait for a bound.
        for _ in 0..if name == "bounded" || h.one_in(4) { 4 } else { 1 } {
            let run = self.drive.new_run();
            let mut start = start.clone();
            if self.sent % 3 == 2 {
                start.unique = Some(Unique { key: "only one".to_owned(), on_conflict: OnConflict::Queue });
                // Some are decided to begin at once and refused if the key is taken, the others join the line.
                start.in_line = self.sent.is_multiple_of(2);
            }
            let mut commit = self.drive.prepare_start(name, run, start).await;
            if self.sent % 4 == 1 {
                let key = format!("key {k}");
                commit.key = Some(StartKey { flow: name.to_owned(), key, fingerprint: [self.sent as u8; 32] });
            }
            self.sent += 1;
            if self.sent % 9 == 8 {
                commit.ns = self.namespaces[1].clone();
            }
            self.runs.push(run);
            commits.push(commit);
        }
        let claims = self.requests_beside(h);
        let written = self.write(commits, claims).await?;
        self.remember(written);
        Ok(())
    }

    /// Claims in the call of a commit; some get its new tasks.
    pub fn requests_beside(&mut self, h: &mut Happening<'_>) -> Vec<(ClaimRequest, Order)> {
        let count = if h.one_in(3) { 1 + h.below(4) } else { 0 };
        if count > 1 {
            self.reach("several claims beside a commit");
        }
        (0..count).map(|_| self.request(h)).collect()
    }

    /// A random claim, and whether the order of its tasks is specified.
    fn request(&mut self, h: &mut Happening<'_>) -> (ClaimRequest, Order) {
        let handlers = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
        let offers = [
            Offer::default(),
            Offer { build: Some("b1".to_owned()), labels: handlers(&["gpu", "eu"]), ..Offer::default() },
            Offer { build: Some("b2".to_owned()), labels: handlers(&["gpu"]), ..Offer::default() },
            Offer { handlers: handlers(&["a", "pay", "item", "u"]), ..Offer::default() },
            Offer { flows: [("job".to_owned(), Some("b1".to_owned()))].into(), ..Offer::default() },
        ];
        let offer = Arc::new(offers[h.below(offers.len())].clone());
        let (queues, max, order): (&[&str], usize, Order) = match h.below(6) {
            0..=2 => (&["default"], 1 + h.below(4), Order::Said),
            3 => (&["bounded"], 1 + h.below(8), Order::Said),
            4 => (&["fair"], 1 + h.below(5), Order::Said),
            _ => {
                self.reach("claim of several queues");
                (&["fair", "default", "nowhere"], 1 + h.below(9), Order::Said)
            }
        };
        let request = ClaimRequest {
            queues: queues.iter().map(|name| name.to_string()).collect(),
            worker: format!("w{}", h.below(2)),
            lease_ms: [3_000, 9_000, 30_000][h.below(3)],
            ns: self.namespaces[usize::from(h.one_in(8))].clone(),
            offer,
            max,
            most_held: h.one_in(3).then(|| 1 + h.below(6)),
            ..self.drive.ask()
        };
        self.requests.push(request.clone());
        (request, order)
    }

    pub fn remember(&mut self, written: Written) {
        for claims in written.claims {
            if !claims.tasks.is_empty() {
                self.reach("claimed");
            }
            self.claimed.extend(claims.tasks);
        }
    }

    async fn claim(&mut self, h: &mut Happening<'_>) -> Same {
        if h.one_in(5) {
            return self.claim_again(h).await;
        }
        let mut requests = vec![self.request(h)];
        if h.one_in(6) {
            requests.push(self.request(h));
        }
        let written = self.write(Vec::new(), requests).await?;
        self.remember(written);
        Ok(())
    }

    /// Repeats a request of which a task is still claimed; without one, it is unspecified whether the request is new.
    async fn claim_again(&mut self, h: &mut Happening<'_>) -> Same {
        let Some(mut request) = h.pick(&self.requests).cloned() else { return Ok(()) };
        let mut held = false;
        for claimed in self.claimed.clone() {
            let rows = self.drive.pending(claimed.run).await.tasks;
            held |= rows.iter().any(|row| row.held.as_ref().is_some_and(|held| held.request == request.request));
        }
        if !held {
            return Ok(());
        }
        self.reach("claim repeated");
        if h.one_in(3) {
            request.worker = "stranger".to_owned();
        }
        self.write(Vec::new(), vec![(request, Order::Unsaid)]).await?;
        Ok(())
    }

    async fn submit_again(&mut self, h: &mut Happening<'_>) -> Same {
        let Some(mut commit) = h.pick(&self.done).cloned() else { return Ok(()) };
        if h.one_in(3) {
            commit.command = self.drive.new_command();
        }
        // A deleted run is forgotten: its start would be a new one.
        if self.is_there(commit.transition.header.run).await {
            self.write(vec![commit], Vec::new()).await?;
            self.done.pop();
        }
        Ok(())
    }

    /// Decides without committing, or commits an earlier decision.
    async fn keep_back(&mut self, h: &mut Happening<'_>) -> Same {
        if h.one_in(2)
            && let Some(commit) = self.kept_back.pop()
        {
            if self.is_there(commit.transition.header.run).await {
                self.commit(commit).await?.ok();
            }
            return Ok(());
        }
        let Some(run) = h.pick(&self.runs).copied() else { return Ok(()) };
        if self.is_there(run).await {
            let ns = self.drive.summary(run).await.ns;
            let commit = self.drive.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
            self.kept_back.push(RunCommit { ns, ..commit });
        }
        Ok(())
    }

    async fn extend_some(&mut self, h: &mut Happening<'_>) -> Same {
        let mut leases = Vec::new();
        for _ in 0..1 + h.below(3) {
            let recent = self.claimed.len().saturating_sub(8);
            if let Some(claimed) = h.pick(&self.claimed[recent..]) {
                leases.push(super::super::drive::lease(claimed));
            }
        }
        // As a heartbeat, or as a report, which extends leases of any worker.
        let worker = [Some("w0"), Some("w1"), None][h.below(3)];
        self.extend(worker, &leases).await
    }

    async fn time_passes(&mut self, h: &mut Happening<'_>) -> Same {
        let ms = [1, 333, 500, 1_000, 3_000, 5_000, 5_001, HOLD_MS, 60_000][h.below(9)];
        self.tell(format!("  {ms} ms pass"));
        self.pass(ms).await
    }

    fn wall_jumps(&mut self, h: &mut Happening<'_>) {
        let ms = [-10_000, 3_000, 10_000, -3_000][h.below(4)];
        self.tell(format!("  the wall clock jumps by {ms} ms"));
        self.promised.clear();
        self.drive.clock.jump(ms);
    }

    async fn timers(&mut self, h: &mut Happening<'_>) -> Same {
        let items = self.due(Due::Timers, 500).await?;
        for item in items {
            let DueItem::Timer { ns, run, timer } = item else { return Err("no timer".to_owned()) };
            self.reach("due timer");
            if h.one_in(4) {
                continue;
            }
            let mut commit = self.drive.prepare(run, &[Input::Due(timer.key)]).await;
            (commit.ns, commit.takes) = (ns, vec![Consumed::Timer(timer.key, timer.due)]);
            self.commit(commit).await?.ok();
        }
        Ok(())
    }

    async fn messages(&mut self, h: &mut Happening<'_>) -> Same {
        if h.one_in(5)
            && let Some(to) = h.pick(&self.runs).copied()
        {
            self.sent += 1;
            let messages = vec![note(to, &format!("note {}", self.sent))];
            self.write_documents(DocumentCommit { messages, ..self.drive.nothing() }).await?;
        }
        let items = self.due(Due::Messages, 500).await?;
        for item in items {
            let DueItem::Messages { ns, to, messages, .. } = item else { return Err("no messages".to_owned()) };
            self.reach("due message");
            for message in messages {
                if h.one_in(6) {
                    break;
                }
                self.deliver(&ns, to, message).await?;
            }
        }
        Ok(())
    }

    async fn deliver(&mut self, ns: &Namespace, to: RunId, message: eddyline_machine::Message) -> Same {
        let commit = match message.body {
            MessageBody::Start { flow, start } => {
                self.runs.push(to);
                Some(self.drive.prepare_start(&flow, to, *start).await)
            }
            MessageBody::Input(mut input) if self.is_there(to).await => {
                if let Input::Drain { unclaimed } = &mut *input {
                    *unclaimed = self.drive.unclaimed_fences(to).await;
                }
                Some(self.drive.prepare(to, &[*input]).await)
            }
            MessageBody::Input(_) => None,
        };
        if let Some(mut commit) = commit {
            (commit.ns, commit.takes) = (ns.clone(), vec![Consumed::Message(message.id.clone())]);
            if self.commit(commit).await?.is_ok() {
                if message.id == "turn" {
                    self.reach("turn");
                }
                return Ok(());
            }
        }
        let drops = vec![(to, message.id)];
        self.write_documents(DocumentCommit { ns: ns.clone(), drops, ..self.drive.nothing() }).await
    }

    async fn leases(&mut self, h: &mut Happening<'_>) -> Same {
        let items = self.due(Due::Leases, 500).await?;
        for item in items {
            let DueItem::Lease { ns, run, task, why, claim } = item else { return Err("no lease".to_owned()) };
            self.reach("due lease");
            if h.one_in(4) {
                continue;
            }
            let mut commit = self.drive.prepare(run, &[Input::Expired { task, why, claim }]).await;
            (commit.ns, commit.takes) = (ns, vec![Consumed::Expiry(task.fence, why)]);
            self.commit(commit).await?.ok();
        }
        Ok(())
    }

    async fn documents_are_due(&mut self, h: &mut Happening<'_>) -> Same {
        for item in self.due(Due::Documents, 500).await? {
            let DueItem::Document(document) = item else { return Err("no document".to_owned()) };
            self.reach("due document");
            let due = h.one_in(2).then(|| document.due.unwrap_or_default() + 3_000);
            let expect = Expect::Revision(0);
            let change = DocumentChange { key: document.key, expect, body: Some(json!("fired")), due };
            self.change_documents(vec![change]).await?;
        }
        Ok(())
    }

    async fn documents_change(&mut self, h: &mut Happening<'_>) -> Same {
        let mut changes = Vec::new();
        for _ in 0..1 + h.below(2) {
            let expect = [Expect::Any, Expect::Absent, Expect::Revision(0), Expect::Revision(100)][h.below(4)];
            let wall = Clock::wall(&*self.drive.clock);
            let n = h.below(3);
            let (key, body, due) = match h.below(4) {
                0 => (DocumentKey::new("thing", format!("t{n}")), (n > 0).then(|| json!({"n": self.sent})), None),
                1 => (DocumentKey::new("slot", format!("s{n}")), Some(json!(n)), Some(wall + n as Millis * 2_000)),
                2 => {
                    let rules = json!({"paused": n == 2, "flow_concurrency": (n == 1).then_some(3)});
                    (DocumentKey::new(kind::QUEUE, "default"), Some(rules), None)
                }
                _ => {
                    (DocumentKey::new(kind::LIMIT, "tenant"), Some(json!({"concurrency": (n > 0).then_some(n)})), None)
                }
            };
            // Two changes of one document in a commit: the expected revision of the second is unspecified.
            if changes.iter().all(|change: &DocumentChange| change.key != key) {
                changes.push(DocumentChange { key, expect, body, due });
            }
        }
        self.sent += 1;
        self.change_documents(changes).await
    }

    async fn events_come(&mut self, h: &mut Happening<'_>) -> Same {
        let key = [None, Some("0"), Some("1")][h.below(3)];
        let id = format!("e{}", h.below(12));
        let events = vec![event(&id, ["ping", "pong"][h.below(2)], key, json!({"n": self.sent}))];
        let ns = self.namespaces[usize::from(h.one_in(4))].clone();
        self.sent += 1;
        self.write_documents(DocumentCommit { events, ns, ..self.drive.nothing() }).await
    }

    async fn act(&mut self, h: &mut Happening<'_>) -> Same {
        // Prefer runs with claimed tasks.
        let busy: Vec<RunId> = self.claimed.iter().rev().take(6).map(|claimed| claimed.run).collect();
        let among = if h.one_in(2) { &self.runs } else { &busy };
        let Some(run) = h.pick(among).copied() else { return Ok(()) };
        if !self.is_there(run).await {
            return Ok(());
        }
        let by = "ann".to_owned();
        match h.below(6) {
            0 | 1 => self.decide_and_commit(run, Input::Pause { by }).await,
            2 | 3 => self.decide_and_commit(run, Input::Resume { by }).await,
            _ => {
                self.decide_and_commit(run, Input::Cancel { by, reason: Some("enough".to_owned()) }).await?;
                // The workers learn of it with their next heartbeat.
                let of_run = |claimed: &&Claimed| claimed.run == run;
                for claimed in self.claimed.iter().filter(of_run).cloned().collect::<Vec<_>>() {
                    self.extend(Some(&claimed.held.worker), &[super::super::drive::lease(&claimed)]).await?;
                }
                Ok(())
            }
        }
    }

    /// The same, with claims in the call.
    pub async fn decide_and_write(&mut self, run: RunId, input: Input, claims: Vec<(ClaimRequest, Order)>) -> Same {
        let ns = self.drive.summary(run).await.ns;
        let commit = RunCommit { ns, ..self.drive.prepare(run, &[input]).await };
        let written = self.write(vec![commit], claims).await?;
        self.remember(written);
        Ok(())
    }

    pub async fn decide_and_commit(&mut self, run: RunId, input: Input) -> Same {
        let ns = self.drive.summary(run).await.ns;
        let commit = RunCommit { ns, ..self.drive.prepare(run, &[input]).await };
        self.commit(commit).await?.ok();
        Ok(())
    }

    async fn gate(&mut self, h: &mut Happening<'_>) -> Same {
        let mut gates = Vec::new();
        for run in self.runs.clone() {
            if self.is_there(run).await {
                gates.extend(self.drive.pending(run).await.gates);
            }
        }
        let Some(gate) = h.pick(&gates).cloned() else { return Ok(()) };
        self.reach("gate");
        let activation = gate.id.activation;
        self.sent += 1;
        let input = match h.below(5) {
            0 => Input::CancelGate { activation, by: "ann".to_owned() },
            n => {
                let position = self.sent as u64;
                let by = [OpenedBy::Webhook, OpenedBy::Manual, OpenedBy::Event { position }][n % 3].clone();
                Input::OpenGate { activation, by, payload: json!({"n": n}).into() }
            }
        };
        self.decide_and_commit(gate.id.run, input).await
    }

    async fn delete(&mut self, h: &mut Happening<'_>) -> Same {
        let ended = RunFilter { ended_before: Some(Millis::MAX), ..RunFilter::default() };
        let ended = self.drive.store.runs(None, &ended, Page::default()).await.unwrap();
        let run = match h.pick(&ended) {
            Some(summary) if !h.one_in(4) => summary.run,
            _ => match h.pick(&self.runs) {
                Some(run) => *run,
                None => return Ok(()),
            },
        };
        let what = match h.below(3) {
            0 => Trim::Run(run),
            1 => Trim::Timeline(run),
            _ => Trim::Events { ns: self.drive.ns.clone(), before: self.drive.now().await - 5_000 },
        };
        self.trim(&what).await
    }

    /// Consumes items that never existed or are not due yet.
    async fn take_what_is_gone(&mut self, h: &mut Happening<'_>) -> Same {
        let Some(claimed) = h.pick(&self.claimed).cloned() else { return Ok(()) };
        if !self.is_there(claimed.run).await {
            return Ok(());
        }
        let why = [Expiry::LeaseLost, Expiry::Timeout, Expiry::StartTimeout][h.below(3)];
        let (input, taken) = super::super::takes::expiry(&claimed, why);
        let mut commit = self.drive.prepare(claimed.run, &[input]).await;
        (commit.ns, commit.takes) = (claimed.ns, vec![taken]);
        if h.one_in(2) {
            commit.takes.push(Consumed::Message("never sent".to_owned()));
        }
        self.commit(commit).await?.ok();
        Ok(())
    }

    async fn read(&mut self, h: &mut Happening<'_>) -> Same {
        let now = self.drive.now().await;
        let statuses = [Status::Running, Status::Waiting, Status::Paused, Status::Completed, Status::Failed];
        let filter = RunFilter {
            flow: h.one_in(3).then(|| NAMES[h.below(NAMES.len())].to_owned()),
            status: h.one_in(2).then(|| statuses[h.below(statuses.len())]).into_iter().collect(),
            tags: if h.one_in(3) { vec!["red".to_owned()] } else { Vec::new() },
            since: h.one_in(4).then_some(now - 20_000),
            until: h.one_in(4).then_some(now - 5_000),
            ..RunFilter::default()
        };
        self.read_runs(&filter, h.below(3), 1 + h.below(5)).await
    }
}
