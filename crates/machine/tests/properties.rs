//! Random flows with random, reordered, repeated and late inputs. The model checks the invariants after every commit;
//! these tests check that every run ends.
//!
//! A failure prints the shrunk tape and keeps its seed next to this file as a permanent case.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use eddyline_language::expr::Cost;
use eddyline_machine::run::{Phase, Place};
use eddyline_machine::*;
use model::tape::Tape;
use model::{Model, random};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use serde_json::json;

/// How many random inputs a run gets before it is driven to its end.
const INPUTS: usize = 60;

proptest! {
    #![proptest_config(config())]

    #[test]
    fn graphs_hold_and_end_1(tape in prop::collection::vec(any::<u8>(), 0..400)) {
        graph(&tape);
    }

    #[test]
    fn graphs_hold_and_end_2(tape in prop::collection::vec(any::<u8>(), 0..400)) {
        graph(&tape);
    }

    #[test]
    fn graphs_hold_and_end_3(tape in prop::collection::vec(any::<u8>(), 0..800)) {
        graph(&tape);
    }

    /// The model checks that no step is read before it has ended.
    #[test]
    fn what_may_be_read_has_ended(tape in prop::collection::vec(any::<u8>(), 0..400)) {
        let mut tape = Tape::new(&tape);
        let flow = random::curious(random::flow(&mut tape));
        let kid = random::curious(random::kid(&mut tape));
        let job = random::job(&mut tape);
        happen(&mut tape, &[flow, kid, job]);
    }

    #[test]
    fn code_runs_hold_and_end(tape in prop::collection::vec(any::<u8>(), 0..400)) {
        code(&tape);
    }
}

/// The random cases cover every kind of record, failure and end.
#[test]
fn the_cases_reach_everything() {
    let mut seen = std::collections::BTreeSet::new();
    let mut state = 7u64;
    let mut byte = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    for case in 0..2_000 {
        let tape: Vec<u8> = (0..600).map(|_| byte()).collect();
        let mut tape = Tape::new(&tape);
        let flows = match case % 4 {
            0 => vec![random::job(&mut tape), random::kid(&mut tape)],
            _ => vec![random::flow(&mut tape), random::kid(&mut tape), random::job(&mut tape)],
        };
        for kept in happen(&mut tape, &flows).model.runs.values() {
            for record in &kept.records {
                let record = json!(record.record);
                let kind = record["kind"].as_str().unwrap().to_owned();
                for field in ["as", "reason", "by", "act", "suspended", "reusedFrom"] {
                    match &record["data"][field] {
                        serde_json::Value::Null => {}
                        serde_json::Value::String(word) if word.len() < 12 => {
                            seen.insert(format!("{kind} {field} {word}"));
                        }
                        _ => {
                            seen.insert(format!("{kind} {field}"));
                        }
                    }
                }
                if let Some(error) = record["data"]["error"]["kind"].as_str() {
                    seen.insert(error.to_owned());
                }
                seen.insert(kind);
            }
            if kept.run.header.code.as_ref().is_some_and(|code| code.leaving.is_some()) {
                seen.insert("leaving".to_owned());
            }
            let undone = kept.run.activations.iter().any(|activation| activation.undone);
            let handled = kept.run.activations.iter().any(|activation| activation.handled);
            seen.extend(
                [(undone, "undone"), (handled, "handled")].iter().filter(|(is, _)| *is).map(|(_, what)| (*what).into()),
            );
        }
    }
    let expected = "
        flow.start flow.completed flow.failed flow.cancelled flow.paused flow.resumed emit runner.log act
        step.scheduled step.completed step.failed step.skipped step.cancelled step.progress step.retry.scheduled
        step.attempt.started step.attempt.completed step.attempt.failed
        step.await.scheduled step.await.triggered step.await.timeout step.await.cancelled
        step.scheduled+as+task step.scheduled+as+group step.scheduled+as+spread step.scheduled+as+repeat
        step.scheduled+as+round step.scheduled+as+child step.scheduled+reason+retry step.scheduled+reason+deferred
        step.scheduled+reason+released step.scheduled+reason+resumed step.scheduled+reason+act
        step.skipped+reason+arms step.skipped+reason+if step.skipped+reason+timeout step.skipped+reason+act
        step.await.triggered+by+webhook step.await.triggered+by+event step.await.triggered+by+manual
        step.await.triggered+by+timeout step.attempt.completed+suspended step.completed+reusedFrom
        act+act+unpin act+act+cancel act+act+complete act+act+fail act+act+skip act+act+retry act+act+cancel_gate
        LeaseLost Timeout StartTimeout GateTimeout GateCancelled ExpressionError Fail MaxRounds TooManyFailures
        ChildFailed DeadlineExceeded KindChanged FailedByHand undone handled leaving";
    let missing: Vec<String> =
        expected.split_whitespace().map(|word| word.replace('+', " ")).filter(|word| !seen.contains(word)).collect();
    assert!(missing.is_empty(), "never reached: {missing:?}");
}

/// Five times 5,000 cases; set `PROPTEST_CASES` for more. Failing seeds are kept in `properties.regressions`.
#[allow(clippy::disallowed_methods)]
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(5_000);
    let kept = FileFailurePersistence::WithSource("regressions");
    ProptestConfig {
        cases,
        max_shrink_iters: 5_000,
        failure_persistence: Some(Box::new(kept)),
        ..ProptestConfig::default()
    }
}

fn graph(bytes: &[u8]) {
    let mut tape = Tape::new(bytes);
    let flows = [random::flow(&mut tape), random::kid(&mut tape), random::job(&mut tape)];
    happen(&mut tape, &flows);
}

fn code(bytes: &[u8]) {
    let mut tape = Tape::new(bytes);
    let flows = [random::job(&mut tape), random::kid(&mut tape)];
    happen(&mut tape, &flows);
}

fn happen(tape: &mut Tape<'_>, flows: &[serde_json::Value]) -> World {
    let mut world = World::new(tape, flows);
    for _ in 0..INPUTS {
        if tape.is_over() {
            break;
        }
        world.random_input(tape);
    }
    world.drive_to_the_end();
    world.begin_again(tape);
    for _ in 0..INPUTS / 2 {
        if tape.is_over() {
            break;
        }
        world.random_input(tape);
    }
    world.drive_to_the_end();
    world
}

struct World {
    model: Model,
    /// Tasks that a worker has or had; reports on them come early, late and twice.
    claimed: Vec<(RunId, Task)>,
    seqs: u32,
    events: u64,
    messages: Vec<Message>,
    continued: u32,
}

impl World {
    fn new(tape: &mut Tape<'_>, flows: &[serde_json::Value]) -> World {
        let mut model = Model::new();
        let names: Vec<String> = flows.iter().map(|flow| model.register(&flow.to_string())).collect();
        if tape.one_in(4) {
            // Low limits, so that left-over work follows by messages, with other inputs in between.
            model.max_touched = 16 + tape.below(32);
            model.budget = Cost {
                steps: tape.below(1_000) as u64,
                bytes: tape.below(1 << 16) as u64,
                read: tape.below(1 << 16) as u64,
            };
        }
        let mut start = Start { input: Some(input(tape)), ..Start::default() };
        if tape.one_in(6) {
            start.delay_ms = Some(500);
        }
        if tape.one_in(6) {
            start.deadline_ms = Some(2_000);
        }
        model.start(&names[0], start);
        World { model, claimed: Vec::new(), seqs: 0, events: 0, messages: Vec::new(), continued: 0 }
    }

    fn random_input(&mut self, tape: &mut Tape<'_>) {
        match tape.below(24) {
            0..=4 => self.claim(tape),
            5..=11 => self.report(tape),
            12 | 13 => self.deliver(tape),
            14 => self.expire(tape),
            15 | 16 => self.fire(tape),
            17 | 18 => self.gate(tape),
            19 => self.pause_or_resume(tape),
            20 | 21 => self.act(tape),
            22 if tape.one_in(4) => {
                let run = self.any_run(tape);
                self.model.submit(run, vec![Input::Cancel { by: "ann".into(), reason: None }]);
            }
            23 if tape.one_in(4) => {
                let run = self.any_run(tape);
                let unclaimed = self.model.runs[&run].tasks.values().find(|row| !row.claimed).map(|row| row.task.fence);
                self.model.submit(run, vec![Input::Unpin { by: "ann".into(), unclaimed }]);
            }
            _ => self.rubbish(tape),
        }
    }

    /// Retries the first run, or reruns it from a step.
    fn begin_again(&mut self, tape: &mut Tape<'_>) {
        let run = *self.model.runs.keys().next().expect("a run");
        let kept = &self.model.runs[&run];
        let flow = kept.flow.clone();
        let reuse = match tape.below(3) {
            0 => decide::retry(&flow, &kept.run),
            _ => {
                let from = *tape.pick(&["a", "b", "c", "pay", "mail"]);
                decide::rerun(&flow, &kept.run, from).unwrap_or_default()
            }
        };
        let start = self.model.again(run, reuse);
        self.model.start(&flow.name, start);
    }

    fn any_run(&self, tape: &mut Tape<'_>) -> RunId {
        let runs: Vec<RunId> = self.model.runs.keys().copied().collect();
        *tape.pick(&runs)
    }

    fn claim(&mut self, tape: &mut Tape<'_>) {
        let run = self.any_run(tape);
        let fences: Vec<Fence> = self.model.runs[&run].tasks.keys().copied().collect();
        if fences.is_empty() {
            return;
        }
        if let Some(task) = self.model.claim(run, *tape.pick(&fences)) {
            self.claimed.push((run, task));
        }
    }

    fn report(&mut self, tape: &mut Tape<'_>) {
        if self.claimed.is_empty() {
            return self.claim(tape);
        }
        let back = tape.below(4).min(self.claimed.len() - 1);
        let (run, task) = self.claimed[self.claimed.len() - 1 - back].clone();
        let op = if task.kind == TaskKind::Run { self.code_op(tape) } else { step_op(tape) };
        let seq = tape.one_in(3).then(|| {
            self.seqs += u32::from(!tape.one_in(3));
            self.seqs
        });
        let answer = self.model.report(run, &task, seq, op.clone());
        if let (Some(seq), Answer::Applied(_)) = (seq, answer) {
            let again = self.model.report(run, &task, Some(seq), op);
            assert!(matches!(again, Answer::Duplicate(_)), "a repeat got {again:?}");
        }
    }

    fn code_op(&mut self, tape: &mut Tape<'_>) -> Op {
        let names = ["pay", "pay#2", "mail", "ship", "", "undo:pay", "undo:mail", "undo:ship"];
        let name = (*tape.pick(&names)).to_owned();
        let op = match tape.below(20) {
            0..=3 => CodeOp::Done { output: payload(tape), undo: tape.one_in(2) },
            4 | 5 => CodeOp::Failed {
                error: Failure::new("Boom", "x"),
                retryable: !tape.one_in(3),
                retry_after_ms: None,
                retry: None,
            },
            6 => CodeOp::Call { handler: "h".into(), input: payload(tape), queue: None, options: None },
            7 => CodeOp::Sleep { due: Due::After(300) },
            8 => CodeOp::Wait { wait: CodeWait::Manual, timeout_ms: tape.one_in(2).then_some(900) },
            9 => {
                let wait = CodeWait::Event { name: "ping".into(), key: Some(json!(1).into()), since: Since::Run };
                CodeOp::Wait { wait, timeout_ms: None }
            }
            10 => {
                let flow = (*tape.pick(&["kid", "nowhere"])).to_owned();
                CodeOp::Child { flow, input: payload(tape), detached: tape.one_in(3), options: None }
            }
            11 | 12 => return Op::Suspend { seen: tape.one_in(2).then(|| tape.below(6) as u64) },
            14 | 15 => return Op::LetGo { name },
            16 if tape.one_in(2) => return Op::Unwind { error: Failure::new("Boom", "for good") },
            17 => {
                let (as_name, payload) = (Some(name), payload(tape));
                return Op::Publish { name: "paid".into(), as_name, key: None, payload };
            }
            13 if self.continued < 2 => {
                self.continued += 1;
                return Op::ContinueAs { input: payload(tape) };
            }
            _ => return step_op(tape),
        };
        Op::Code { name, op }
    }

    fn deliver(&mut self, tape: &mut Tape<'_>) {
        if self.model.inbox.is_empty() {
            return;
        }
        // Deliver messages in any order, and some of them twice.
        let at = tape.below(self.model.inbox.len());
        let message = self.model.inbox.remove(at).unwrap();
        if tape.one_in(3) {
            self.messages.push(message.clone());
        }
        self.model.inbox.push_front(message);
        self.model.deliver();
        if tape.one_in(4)
            && let Some(again) = self.messages.pop()
        {
            self.model.inbox.push_front(again);
            self.model.deliver();
        }
    }

    fn expire(&mut self, tape: &mut Tape<'_>) {
        let run = self.any_run(tape);
        let rows: Vec<_> = self.model.runs[&run].tasks.values().cloned().collect();
        if rows.is_empty() {
            return;
        }
        let row = tape.pick(&rows);
        let why = match (row.claimed, tape.below(3)) {
            (true, 0) => Expiry::LeaseLost,
            (true, 1) => Expiry::Timeout,
            (true, _) => Expiry::Released,
            (false, _) if row.task.start_timeout_ms.is_some() && !row.closed => Expiry::StartTimeout,
            (false, _) => return,
        };
        let task = TaskRef { activation: row.task.activation, fence: row.task.fence };
        let input = Input::Expired { task, why, claim: row.claim.clone() };
        // Two instances may find the same expiry.
        let inputs = if tape.one_in(3) { vec![input.clone(), input] } else { vec![input] };
        self.model.submit(run, inputs);
    }

    fn fire(&mut self, tape: &mut Tape<'_>) {
        if tape.one_in(3) {
            let run = self.any_run(tape);
            let keys: Vec<TimerKey> = self.model.runs[&run].timers.keys().copied().collect();
            if !keys.is_empty() {
                let key = *tape.pick(&keys);
                self.model.runs.get_mut(&run).unwrap().timers.remove(&key);
                self.model.submit(run, vec![Input::Due(key), Input::Due(key)]);
            }
        } else {
            self.model.fire_next();
        }
    }

    fn gate(&mut self, tape: &mut Tape<'_>) {
        let run = self.any_run(tape);
        let gates: Vec<ActId> = self.model.runs[&run].gates.keys().copied().collect();
        if gates.is_empty() {
            return;
        }
        let activation = *tape.pick(&gates);
        if tape.one_in(6) {
            self.model.submit(run, vec![Input::CancelGate { activation, by: "ann".into() }]);
            return;
        }
        self.events += 1;
        let by = match tape.below(3) {
            0 => OpenedBy::Webhook,
            1 => OpenedBy::Manual,
            _ => OpenedBy::Event { position: self.events },
        };
        let open = Input::OpenGate { activation, by, payload: payload(tape) };
        let answers = self.model.submit(run, vec![open.clone(), open]);
        assert!(!matches!(answers[1], Answer::Applied(_)), "a gate opened twice");
    }

    fn pause_or_resume(&mut self, tape: &mut Tape<'_>) {
        let run = self.any_run(tape);
        let by = "ann".to_owned();
        let input = if tape.one_in(2) { Input::Pause { by } } else { Input::Resume { by } };
        self.model.submit(run, vec![input]);
    }

    fn act(&mut self, tape: &mut Tape<'_>) {
        let run = self.any_run(tape);
        let kept = &self.model.runs[&run];
        if kept.run.activations.is_empty() {
            return;
        }
        let activation = &kept.run.activations[tape.below(kept.run.activations.len())];
        if matches!(activation.place, Place::Root) {
            return;
        }
        let name = kept.run.activation_name(&kept.flow, activation.id);
        let act = match tape.below(4) {
            0 => StepAct::Retry,
            1 => StepAct::Complete { output: payload(tape) },
            2 => StepAct::Fail { error: Failure::new("", "by hand") },
            _ => StepAct::Skip,
        };
        let open = activation.is_open() && kept.run.header.phase != Phase::Ended;
        let answer =
            self.model.submit(run, vec![Input::Act { activation: name.clone(), by: "ann".into(), act }]).remove(0);
        assert!(!matches!(answer, Answer::Invalid(_)), "{name} was not found");
        assert!(open || !matches!(answer, Answer::Applied(_)), "an act on {name}, which had ended");
    }

    /// Inputs that nobody should send.
    fn rubbish(&mut self, tape: &mut Tape<'_>) {
        let run = self.any_run(tape);
        let activation = ActId(u32::from(tape.byte()));
        let task = TaskRef { activation, fence: Fence(u64::from(tape.byte())) };
        let known = self.model.runs[&run].tasks.contains_key(&task.fence);
        let input = match tape.below(8) {
            _ if known => Input::Continue,
            0 => Input::Report(Report { task, seq: Some(0), op: step_op(tape), claim: Claim::default() }),
            1 => Input::Expired { task, why: Expiry::LeaseLost, claim: Claim::default() },
            2 => Input::Due(TimerKey { activation, kind: TimerKind::Gate }).clone(),
            3 => Input::ChildEnded { activation, child: run, end: ChildEnd::Cancelled },
            4 => Input::Drain { unclaimed: self.unclaimed_of(run) },
            5 => Input::Act { activation: "no[1].such..step".into(), by: "ann".into(), act: StepAct::Skip },
            6 => Input::Start(Box::default()),
            _ => Input::Continue,
        };
        if matches!(input, Input::Due(_)) {
            return;
        }
        self.model.submit(run, vec![input]);
    }

    fn unclaimed_of(&self, run: RunId) -> Vec<Fence> {
        let tasks = self.model.runs[&run].tasks.values();
        tasks.filter(|row| row.closed && !row.claimed).map(|row| row.task.fence).collect()
    }

    /// Provides everything that open runs wait for.
    fn drive_to_the_end(&mut self) {
        let mut budget = 5_000;
        loop {
            self.model.deliver_all();
            let open: Vec<RunId> =
                self.model.runs.iter().filter(|(_, kept)| !kept.is_ended()).map(|(run, _)| *run).collect();
            if open.is_empty() {
                return;
            }
            let mut moved = false;
            for run in open {
                moved |= self.drive(run);
            }
            moved |= self.model.fire_next();
            budget -= 1;
            if !moved && self.model.inbox.is_empty() || budget == 0 {
                let stuck = self.model.runs.iter().find(|(_, kept)| !kept.is_ended()).unwrap().0;
                panic!("the run does not end\n{}", self.model.dump(*stuck));
            }
        }
    }

    fn drive(&mut self, run: RunId) -> bool {
        let mut moved = false;
        if self.model.header(run).paused {
            self.model.submit(run, vec![Input::Resume { by: "ann".into() }]);
            moved = true;
        }
        for fence in self.model.runs[&run].tasks.keys().copied().collect::<Vec<_>>() {
            let Some(row) = self.model.runs[&run].tasks.get(&fence).cloned() else { continue };
            if !row.claimed && self.model.claim(run, fence).is_none() {
                continue;
            }
            let leaving = self.model.header(run).code.as_ref().is_some_and(|code| code.leaving.is_some());
            let op = if leaving && row.task.kind == TaskKind::Run {
                Op::Fail { error: Failure::new("Boom", "the end"), retryable: true, retry_after_ms: None }
            } else {
                Op::Complete { output: json!({"n": 1}).into(), emits: Vec::new(), logs: Vec::new() }
            };
            let answer = self.model.report(run, &row.task, None, op);
            // Left-over work comes first, and may have ended the task.
            let ended = !self.model.runs[&run].tasks.contains_key(&fence);
            assert!(matches!(answer, Answer::Applied(_)) || ended, "a report on the current task got {answer:?}");
            moved = true;
        }
        for activation in self.model.runs[&run].gates.keys().copied().collect::<Vec<_>>() {
            let arrived = self.model.runs[&run].gates.get(&activation).is_some_and(|gate| gate.arrival.is_some());
            if arrived {
                // Each event gets a later position, or a gate that has seen a later one would ignore it.
                self.events += 1;
                let by = OpenedBy::Event { position: self.events };
                self.model.submit(run, vec![Input::OpenGate { activation, by, payload: json!({"n": 1}).into() }]);
                moved = true;
            }
        }
        moved
    }
}

fn step_op(tape: &mut Tape<'_>) -> Op {
    match tape.below(13) {
        0..=5 => {
            let emits = if tape.one_in(3) {
                vec![((*tape.pick(&["x", "x.y", "z", "undeclared"])).to_owned(), payload(tape))]
            } else {
                Vec::new()
            };
            Op::Complete { output: payload(tape), emits, logs: Vec::new() }
        }
        6 | 7 => {
            let retry_after_ms = tape.one_in(3).then(|| tape.below(2) as i64 * 700);
            Op::Fail { error: Failure::new("Boom", "x"), retryable: !tape.one_in(3), retry_after_ms }
        }
        8 => Op::Defer { after_ms: tape.below(2) as i64 * 200, limit: None },
        9 => Op::Emit { event: (*tape.pick(&["x", "x.y", "z"])).to_owned(), payload: payload(tape) },
        11 => Op::Release,
        10 => Op::Log(Log { level: "info".into(), msg: "hello".into(), meta: Some(payload(tape)) }),
        _ => Op::Progress { done: Some(1.into()), total: Some(2.into()), msg: None },
    }
}

fn payload(tape: &mut Tape<'_>) -> Data {
    match tape.below(5) {
        0 => json!({"n": 1}),
        1 => json!(null),
        2 => json!({"n": 2, "text": "x".repeat(600)}),
        3 => json!([1, {"n": 3}]),
        _ => json!("text"),
    }
    .into()
}

fn input(tape: &mut Tape<'_>) -> Data {
    let big = if tape.one_in(3) { "y".repeat(500) } else { String::new() };
    json!({"flag": tape.one_in(2), "n": tape.below(3), "items": [{"n": 1}, {"n": 2}, 3], "big": big}).into()
}
