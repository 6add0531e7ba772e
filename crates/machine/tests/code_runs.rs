//! Random functions of code runs, driven as an SDK drives them, with a crash possible at every message: before it is
//! sent, after it was applied, or with a lost reply that is sent again.
//!
//! A function is a list of statements: steps, calls, sleeps, waits, alone, all at once, or as a race whose losers are
//! let go. What it asks for next depends only on the results that it saw and on their order, so two lives of one attempt
//! must see the same results in the same order.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod model;

use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::memo::MemoState;
use eddyline_machine::run::{End, RunOutcome};
use eddyline_machine::*;
use model::Model;
use model::tape::Tape;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use serde_json::json;

/// How many tasks of the function a case may take before it counts as stuck.
const MAX_LIVES: usize = 400;
/// How often a life may be killed; then the function is left alone, so that every case ends.
const MAX_KILLS: usize = 12;
const ATTEMPTS: u32 = 3;

proptest! {
    #![proptest_config(config())]

    #[test]
    fn lives_of_one_attempt_see_the_same(tape in prop::collection::vec(any::<u8>(), 0..600)) {
        Case::new(&mut Tape::new(&tape)).play(&mut Tape::new(&tape));
    }
}

#[test]
fn the_cases_reach_everything() {
    let mut state = 11u64;
    let mut byte = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut seen = BTreeSet::new();
    for _ in 0..1_500 {
        let tape: Vec<u8> = (0..500).map(|_| byte()).collect();
        let mut case = Case::new(&mut Tape::new(&tape));
        case.play(&mut Tape::new(&tape));
        seen.append(&mut case.seen);
    }
    for what in [
        "completed",
        "failed",
        "cancelled",
        "undone",
        "not undone",
        "killed",
        "reply lost",
        "let go",
        "released",
        "suspended",
        "retried",
        "unwound",
        "cancelled with grace",
        "resent",
        "a known outcome",
        "grace over",
    ] {
        assert!(seen.contains(what), "no case had: {what}; there were {seen:?}");
    }
}

/// What a function asks for.
#[derive(Debug, Clone)]
struct Ask {
    name: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Fails so often before it succeeds; can be undone.
    Step {
        fails: u32,
        undo: bool,
    },
    Call,
    Sleep,
    Wait,
}

#[derive(Debug, Clone)]
enum Statement {
    All(Vec<Ask>),
    Race(Vec<Ask>),
}

/// What the function does next.
enum Next {
    Waits { asks: Vec<Ask>, dropped: Vec<String> },
    Returned,
    Failed,
}

type Seen = Vec<(String, Result<String, String>)>;

/// The function: what it does after it saw these results.
fn function(program: &[Statement], seen: &Seen) -> Next {
    let mut results = seen.iter();
    let mut dropped = Vec::new();
    for statement in program {
        match statement {
            Statement::All(asks) => {
                let mut left = asks.clone();
                while !left.is_empty() {
                    let Some((name, result)) = results.next() else { return Next::Waits { asks: left, dropped } };
                    left.retain(|ask| ask.name != *name);
                    if result.is_err() {
                        return Next::Failed;
                    }
                }
            }
            Statement::Race(asks) => {
                let Some((name, result)) = results.next() else { return Next::Waits { asks: asks.clone(), dropped } };
                dropped.extend(asks.iter().filter(|ask| ask.name != *name).map(|ask| ask.name.clone()));
                if result.is_err() {
                    return Next::Failed;
                }
            }
        }
    }
    Next::Returned
}

struct Case {
    model: Model,
    run: RunId,
    program: Vec<Statement>,
    /// What each attempt of the function saw, as far as any of its lives came.
    saw: BTreeMap<u32, Seen>,
    /// The recorded output of each completed entry: it never changes.
    outputs: BTreeMap<String, String>,
    /// How often each step's body ran.
    bodies: BTreeMap<String, u32>,
    /// The undo steps in the order in which they completed.
    undone: Vec<String>,
    kills: usize,
    cancelled: bool,
    seen: BTreeSet<&'static str>,
}

/// How sending a message ended.
enum Sent {
    Answer(Answer),
    Died,
}

impl Case {
    fn new(tape: &mut Tape<'_>) -> Case {
        let mut model = Model::new();
        let mut job = json!({"name": "job", "code": true, "retry": {"attempts": ATTEMPTS, "initial": "1s"},
            "step_retry": {"attempts": 2, "initial": "50ms"}});
        match tape.below(3) {
            0 => {}
            1 => job["cancel_grace"] = json!("1h"),
            _ => job["cancel_grace"] = json!("2s"),
        }
        model.register(&job.to_string());
        if tape.one_in(4) {
            model.max_touched = 16;
        }
        let program = program(tape);
        let run = model.start("job", Start::default());
        let (saw, outputs, bodies) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (undone, seen) = (Vec::new(), BTreeSet::new());
        Case { model, run, program, saw, outputs, bodies, undone, kills: 0, cancelled: false, seen }
    }

    fn play(&mut self, tape: &mut Tape<'_>) {
        for _ in 0..MAX_LIVES {
            self.model.deliver_all();
            if self.model.runs[&self.run].is_ended() {
                return self.check_end();
            }
            let driver = self.model.runs[&self.run].tasks.values().find(|row| row.task.kind == TaskKind::Run).cloned();
            match driver.and_then(|row| self.model.claim(self.run, row.task.fence)) {
                Some(task) => Life::new(self, &task).live(tape),
                None => self.something_happens(tape),
            }
        }
        panic!("the run does not end\n{:#?}\n{}", self.program, self.model.dump(self.run));
    }

    /// The world moves: a call is executed, a gate opens, or the clock reaches the next timer.
    fn something_happens(&mut self, tape: &mut Tape<'_>) {
        self.model.deliver_all();
        let kept = &self.model.runs[&self.run];
        let calls: Vec<Fence> =
            kept.tasks.values().filter(|row| row.task.kind == TaskKind::Step).map(|row| row.task.fence).collect();
        let gates: Vec<ActId> = kept
            .gates
            .iter()
            .filter(|(_, gate)| gate.arrival.as_ref().is_some_and(|arrival| arrival.reason != record::GateReason::Time))
            .map(|(id, _)| *id)
            .collect();
        match tape.below(3) {
            0 if !calls.is_empty() => {
                let fence = *tape.pick(&calls);
                let Some(task) = self.model.claim(self.run, fence) else { return };
                assert_eq!(task.step, task.name.split("~").next().unwrap());
                let op = if tape.one_in(4) {
                    Op::Fail { error: Failure::new("Boom", "a call"), retryable: !tape.one_in(3), retry_after_ms: None }
                } else {
                    Op::Complete { output: json!("called").into(), emits: Vec::new(), logs: Vec::new() }
                };
                self.model.report(self.run, &task, None, op);
            }
            1 if !gates.is_empty() => {
                let activation = *tape.pick(&gates);
                let payload = json!("opened").into();
                self.model.submit(self.run, vec![Input::OpenGate { activation, by: OpenedBy::Manual, payload }]);
            }
            _ if self.model.fire_next() => {}
            _ if !gates.is_empty() => {
                let payload = json!("opened").into();
                let by = OpenedBy::Manual;
                self.model.submit(self.run, vec![Input::OpenGate { activation: gates[0], by, payload }]);
            }
            _ if !calls.is_empty() => {
                let Some(task) = self.model.claim(self.run, calls[0]) else { return };
                let op = Op::Complete { output: json!("called").into(), emits: Vec::new(), logs: Vec::new() };
                self.model.report(self.run, &task, None, op);
            }
            _ => {}
        }
    }

    fn cancel(&mut self) {
        let answer = self.model.submit(self.run, vec![Input::Cancel { by: "ann".into(), reason: None }]).remove(0);
        match answer {
            Answer::Applied(_) => self.cancelled = true,
            other => assert!(matches!(other, Answer::Conflict(_)), "{other:?}"),
        }
        if !self.model.runs[&self.run].is_ended() && self.cancelled {
            self.seen.insert("cancelled with grace");
            let again = self.model.submit(self.run, vec![Input::Cancel { by: "ann".into(), reason: None }]).remove(0);
            assert!(matches!(again, Answer::Conflict(_)), "cancelled twice: {again:?}");
        }
    }

    fn check_end(&mut self) {
        let kept = &self.model.runs[&self.run];
        let header = &kept.run.header;
        let outcome = header.outcome.as_ref().unwrap();
        let also = match outcome {
            RunOutcome::Completed(_) => {
                self.seen.insert("completed");
                assert!(self.undone.is_empty(), "completed after undoing {:?}", self.undone);
                return;
            }
            RunOutcome::Failed(failure) => {
                self.seen.insert("failed");
                &failure.also
            }
            RunOutcome::Cancelled(also) => {
                self.seen.insert("cancelled");
                assert!(self.cancelled, "cancelled by nobody");
                also
            }
        };
        // Every step that can be undone was undone, or is reported.
        for entry in kept.run.activations.iter().filter(|activation| activation.id != ActId(0)) {
            let run::Place::Memo(memo) = &entry.place else { continue };
            if !memo.undo || !matches!(entry.end(), Some(End::Completed(_))) {
                continue;
            }
            let name = memo.name.to_string();
            let undos = [kept.run.activation_name(&kept.flow, entry.id), format!("undo:{name}")];
            let reported = also.iter().any(|other| other.step.as_ref().is_some_and(|step| undos.contains(step)));
            assert!(entry.undone || reported || also.len() >= 10, "{name} is neither undone nor reported: {also:?}");
            assert!(!(entry.undone && reported), "{name} is undone and reported");
            self.seen.insert(if entry.undone { "undone" } else { "not undone" });
        }
        // Undo steps ran in the reverse order of what they undo.
        let n = |name: &str| {
            let entry = kept.run.activations.iter().rev().find_map(|activation| match &activation.place {
                run::Place::Memo(memo) if &*memo.name == name => Some(memo.n),
                _ => None,
            });
            entry.unwrap()
        };
        let order: Vec<u64> = self.undone.iter().map(|undo| n(undo.strip_prefix("undo:").unwrap())).collect();
        assert!(order.windows(2).all(|pair| pair[0] > pair[1]), "undone in the wrong order: {:?}", self.undone);
    }
}

/// One task of the function, in one worker.
struct Life<'a> {
    case: &'a mut Case,
    task: Task,
    /// Ended entries that were not delivered, by number.
    known: BTreeMap<u64, (String, Result<String, String>)>,
    /// Names in the memo, with the number of the latest change that the worker has.
    memo: BTreeMap<String, u64>,
    /// Steps in their back-off here: how they stand.
    retrying: BTreeMap<String, bool>,
    read: u64,
    handed_over: u64,
    saw: Seen,
    let_go: BTreeSet<String>,
    seq: u32,
}

impl Life<'_> {
    fn new<'a>(case: &'a mut Case, task: &Task) -> Life<'a> {
        let handed_over = case.model.header(case.run).code.as_ref().unwrap().n;
        let (known, memo, retrying) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (saw, let_go) = (Seen::new(), BTreeSet::new());
        let mut life =
            Life { case, task: task.clone(), known, memo, retrying, read: 0, handed_over, saw, let_go, seq: 0 };
        life.learn(|_, _| true);
        life
    }

    /// Reads entries after the last number that was read.
    fn learn(&mut self, wanted: impl Fn(&str, bool) -> bool) {
        let run = self.case.model.runs[&self.case.run].run.clone();
        let mut entries: Vec<_> = run.memo(self.read).collect();
        entries.sort_by_key(|entry| entry.n);
        let mut at = 0;
        for entry in &entries {
            assert!(entry.at >= at, "times run backwards");
            at = entry.at;
            if !wanted(entry.name, entry.news || entry.n <= self.handed_over) {
                continue;
            }
            self.read = self.read.max(entry.n);
            self.memo.insert(entry.name.to_owned(), entry.n);
            let result = match &entry.state {
                MemoState::Ended(End::Completed(output)) => Ok(self.case.model.json(self.case.run, output).to_string()),
                MemoState::Ended(End::Failed(failure)) => Err(failure.message.clone()),
                MemoState::Ended(_) => continue,
                MemoState::Retry { due } => {
                    self.retrying.insert(entry.name.to_owned(), *due);
                    continue;
                }
                MemoState::Pending => continue,
            };
            self.retrying.remove(entry.name);
            if let Ok(output) = &result {
                let first = self.case.outputs.entry(entry.name.to_owned()).or_insert_with(|| output.clone());
                assert_eq!(first, output, "the output of {} changed", entry.name);
            }
            if !self.saw.iter().any(|(name, _)| name == entry.name) {
                self.known.insert(entry.n, (entry.name.to_owned(), result));
            }
        }
    }

    fn header(&self) -> &run::Header {
        self.case.model.header(self.case.run)
    }

    /// Sends one report, unless the worker dies before.
    fn send(&mut self, tape: &mut Tape<'_>, op: Op) -> Sent {
        let may_die = self.case.kills < MAX_KILLS;
        let fate = if may_die { tape.below(16) } else { 0 };
        if fate == 15 {
            self.case.seen.insert("killed");
            self.die();
            return Sent::Died;
        }
        if fate == 12 && !self.case.cancelled {
            self.case.cancel();
        }
        self.seq += 1;
        let name = match &op {
            Op::Code { name, .. } => Some(name.clone()),
            _ => None,
        };
        let answer = self.case.model.report(self.case.run, &self.task, Some(self.seq), op.clone());
        if fate == 14 {
            self.case.seen.insert("reply lost");
            self.die();
            return Sent::Died;
        }
        let answer = match answer {
            Answer::Applied(_) if fate == 13 => {
                self.case.seen.insert("resent");
                let again = self.case.model.report(self.case.run, &self.task, Some(self.seq), op);
                assert!(matches!(again, Answer::Duplicate(_)), "a repeat got {again:?}");
                again
            }
            answer => answer,
        };
        if let (Answer::Applied(result) | Answer::Duplicate(result), Some(name)) = (&answer, &name) {
            let n = result.n.expect("every outcome of an entry has its number");
            if result.known {
                self.case.seen.insert("a known outcome");
            }
            // The reply has all news below the highest number, and the entry itself.
            self.learn(|entry, is_news| is_news || entry == name);
            assert!(self.read >= n || self.memo.get(name).is_some_and(|read| *read >= n));
        } else if let Answer::Applied(_) | Answer::Duplicate(_) = &answer {
            self.learn(|_, is_news| is_news);
        }
        Sent::Answer(answer)
    }

    fn die(&mut self) {
        self.case.kills += 1;
        let row = self.case.model.runs[&self.case.run].tasks.get(&self.task.fence).cloned();
        if let Some(row) = row {
            let task = TaskRef { activation: row.task.activation, fence: row.task.fence };
            let input = Input::Expired { task, why: Expiry::LeaseLost, claim: row.claim };
            self.case.model.submit(self.case.run, vec![input]);
        }
    }

    /// True while the task goes on. Whatever is refused ends this life.
    fn goes_on(&mut self, sent: Sent) -> bool {
        match sent {
            Sent::Died => false,
            Sent::Answer(Answer::Applied(_) | Answer::Duplicate(_)) => true,
            Sent::Answer(Answer::Closed | Answer::Stale) => {
                assert!(!self.case.model.runs[&self.case.run].tasks.contains_key(&self.task.fence));
                false
            }
            Sent::Answer(other) => panic!("{other:?}\n{}", self.case.model.dump(self.case.run)),
        }
    }

    fn live(&mut self, tape: &mut Tape<'_>) {
        loop {
            if self.header().code.as_ref().unwrap().leaving.is_some() {
                return self.unwind(tape, None);
            }
            match function(&self.case.program.clone(), &self.saw) {
                Next::Returned => {
                    let op = Op::Complete { output: json!(null).into(), emits: Vec::new(), logs: Vec::new() };
                    let sent = self.send(tape, op);
                    if self.was_cancelled_meanwhile(&sent) {
                        continue;
                    }
                    self.goes_on(sent);
                    return self.remember();
                }
                Next::Failed => {
                    self.remember();
                    let error = Failure::new("Boom", "the function failed");
                    if self.task.attempt >= ATTEMPTS || tape.one_in(3) {
                        return self.unwind(tape, Some(error));
                    }
                    self.case.seen.insert("retried");
                    let op = Op::Fail { error, retryable: true, retry_after_ms: None };
                    let sent = self.send(tape, op);
                    self.goes_on(sent);
                    return;
                }
                Next::Waits { asks, dropped } => {
                    if self.deliver(&asks) {
                        continue;
                    }
                    if !self.ask(tape, &asks, &dropped) {
                        return self.remember();
                    }
                }
            }
        }
    }

    fn was_cancelled_meanwhile(&self, sent: &Sent) -> bool {
        matches!(sent, Sent::Answer(Answer::Invalid(_))) && self.header().code.as_ref().unwrap().leaving.is_some()
    }

    /// Delivers the known result with the lowest number, alone.
    fn deliver(&mut self, asks: &[Ask]) -> bool {
        let next = self.known.iter().find(|(_, (name, _))| asks.iter().any(|ask| ask.name == *name));
        let Some(n) = next.map(|(n, _)| *n) else { return false };
        let result = self.known.remove(&n).unwrap();
        self.saw.push(result);
        true
    }

    /// Starts what is not known, lets go what was dropped, or gives the task back if all hangs on others. False at the
    /// end of this life.
    fn ask(&mut self, tape: &mut Tape<'_>, asks: &[Ask], dropped: &[String]) -> bool {
        for name in dropped {
            if !self.let_go.insert(name.clone()) || !self.memo.contains_key(name) {
                continue;
            }
            self.case.seen.insert("let go");
            let sent = self.send(tape, Op::LetGo { name: name.clone() });
            if !self.goes_on(sent) {
                return false;
            }
            return true;
        }
        let leaving = |life: &Self| life.header().code.as_ref().unwrap().leaving.is_some();
        for ask in asks {
            let due = self.retrying.get(&ask.name).copied();
            if self.memo.contains_key(&ask.name) && due != Some(true) {
                continue;
            }
            let op = self.op(tape, ask);
            let sent = self.send(tape, Op::Code { name: ask.name.clone(), op });
            if self.was_cancelled_meanwhile(&sent) {
                return true;
            }
            return self.goes_on(sent);
        }
        if leaving(self) {
            return true;
        }
        // All that is left hangs on others.
        let before = self.read;
        for _ in 0..tape.below(3) {
            self.case.something_happens(tape);
            if !self.case.model.runs[&self.case.run].tasks.contains_key(&self.task.fence) {
                return false;
            }
            self.learn(|_, is_news| is_news);
            if self.read > before {
                return true;
            }
        }
        let op = if tape.one_in(4) && self.case.kills < MAX_KILLS {
            self.case.kills += 1;
            self.case.seen.insert("released");
            Op::Release
        } else {
            self.case.seen.insert("suspended");
            Op::Suspend { seen: Some(self.read) }
        };
        let sent = self.send(tape, op);
        self.goes_on(sent);
        false
    }

    fn op(&mut self, tape: &mut Tape<'_>, ask: &Ask) -> CodeOp {
        match ask.kind {
            Kind::Step { fails, undo } => {
                let ran = self.case.bodies.entry(ask.name.clone()).or_default();
                *ran += 1;
                if *ran <= fails {
                    let (error, retry) = (Failure::new("Boom", format!("{} broke", ask.name)), None);
                    return CodeOp::Failed { error, retryable: !tape.one_in(4), retry_after_ms: None, retry };
                }
                // Another value each time: a replay that executed it again would be noticed.
                CodeOp::Done { output: json!(format!("{} {ran}", ask.name)).into(), undo }
            }
            Kind::Call => {
                let options = CallOptions { priority: 1, ..CallOptions::default() };
                let options = tape.one_in(2).then(|| Box::new(options));
                CodeOp::Call { handler: "h".into(), input: json!(1).into(), queue: None, options }
            }
            Kind::Sleep => CodeOp::Sleep { due: Due::After(300) },
            Kind::Wait => CodeOp::Wait { wait: CodeWait::Manual, timeout_ms: tape.one_in(3).then_some(5_000) },
        }
    }

    /// The last phase: undo steps by falling number, then `fail`.
    fn unwind(&mut self, tape: &mut Tape<'_>, error: Option<Failure>) {
        self.remember();
        let unwinding =
            |life: &Self| life.header().code.as_ref().unwrap().leaving.as_ref().is_some_and(|it| it.unwinding);
        if !unwinding(self) {
            self.case.seen.insert("unwound");
            let sent = self.send(tape, Op::Unwind { error: error.unwrap_or_else(|| Failure::new("Cancelled", "")) });
            if !self.goes_on(sent) {
                return;
            }
        }
        for (op, name) in [
            (CodeOp::Done { output: json!(1).into(), undo: false }, "late"),
            (CodeOp::Sleep { due: Due::After(1) }, "undo:s0"),
            (CodeOp::Done { output: json!(1).into(), undo: false }, "undo:nothing"),
        ] {
            let refused = self.case.model.report(self.case.run, &self.task, None, Op::Code { name: name.into(), op });
            assert!(matches!(refused, Answer::Invalid(_) | Answer::Closed), "{name} while unwinding: {refused:?}");
        }
        loop {
            let run = self.case.model.runs[&self.case.run].run.clone();
            let entries: Vec<_> = run.memo(0).collect();
            let undo_of = |name: &str| entries.iter().find(|entry| entry.name == format!("undo:{name}"));
            let can_be =
                |entry: &&memo::MemoEntry<'_>| entry.undo && matches!(entry.state, MemoState::Ended(End::Completed(_)));
            let left = |entry: &&memo::MemoEntry<'_>| {
                !undo_of(entry.name).is_some_and(|undo| matches!(undo.state, MemoState::Ended(_)))
            };
            let next = entries.iter().filter(can_be).filter(left).max_by_key(|entry| entry.n);
            let Some(next) = next.map(|entry| format!("undo:{}", entry.name)) else { break };
            if self.case.kills < MAX_KILLS && tape.one_in(12) {
                // The grace may end first.
                self.case.kills += 1;
                self.case.seen.insert("grace over");
                self.case.model.fire_next();
                if self.case.model.runs[&self.case.run].is_ended() {
                    return;
                }
            }
            let op = if tape.one_in(6) {
                let (error, retry) = (Failure::new("Boom", "an undo"), None);
                CodeOp::Failed { error, retryable: true, retry_after_ms: Some(0), retry }
            } else {
                CodeOp::Done { output: json!(null).into(), undo: false }
            };
            let done = matches!(op, CodeOp::Done { .. });
            let known = undo_of(next.strip_prefix("undo:").unwrap()).is_some();
            let sent = self.send(tape, Op::Code { name: next.clone(), op });
            let recorded = self.case.model.runs[&self.case.run]
                .run
                .memo(0)
                .any(|entry| entry.name == next && matches!(entry.state, MemoState::Ended(End::Completed(_))));
            assert!(known || recorded || !done || !matches!(sent, Sent::Answer(Answer::Applied(_))));
            if recorded && !self.case.undone.contains(&next) {
                self.case.undone.push(next);
            }
            if !self.goes_on(sent) {
                return;
            }
        }
        let complete = Op::Complete { output: json!(null).into(), emits: Vec::new(), logs: Vec::new() };
        let refused = self.case.model.report(self.case.run, &self.task, None, complete);
        assert!(matches!(refused, Answer::Invalid(_)), "completed while unwinding: {refused:?}");
        let op = Op::Fail { error: Failure::new("Boom", "the end"), retryable: true, retry_after_ms: None };
        let sent = self.send(tape, op);
        self.goes_on(sent);
    }

    /// Compares what this life saw with other lives of the same attempt.
    fn remember(&mut self) {
        let saw = self.case.saw.entry(self.task.attempt).or_default();
        for (at, (other, own)) in saw.iter().zip(&self.saw).enumerate() {
            assert_eq!(other, own, "result {at} of attempt {} differs between two lives", self.task.attempt);
        }
        if self.saw.len() > saw.len() {
            *saw = self.saw.clone();
        }
    }
}

fn program(tape: &mut Tape<'_>) -> Vec<Statement> {
    let mut names = 0;
    let mut ask = |tape: &mut Tape<'_>| {
        let kind = match tape.below(8) {
            0..=3 => Kind::Step { fails: tape.below(8).saturating_sub(5) as u32, undo: !tape.one_in(3) },
            4 => Kind::Call,
            5 => Kind::Sleep,
            _ => Kind::Wait,
        };
        let name = format!("s{names}");
        names += 1;
        Ask { name, kind }
    };
    let count = 1 + tape.below(5);
    (0..count)
        .map(|_| {
            let asks: Vec<Ask> = (0..1 + tape.below(3)).map(|_| ask(tape)).collect();
            if tape.one_in(3) { Statement::Race(asks) } else { Statement::All(asks) }
        })
        .collect()
}

/// 3,000 cases; set `PROPTEST_CASES` for more.
#[allow(clippy::disallowed_methods)]
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(3_000);
    let kept = FileFailurePersistence::WithSource("regressions");
    ProptestConfig {
        cases,
        max_shrink_iters: 5_000,
        failure_persistence: Some(Box::new(kept)),
        ..ProptestConfig::default()
    }
}
