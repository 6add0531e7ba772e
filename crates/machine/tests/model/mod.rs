//! A miniature store for tests: it commits transitions, numbers records, keeps tasks, timers, gates and messages, and
//! checks the invariants with every commit.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod check;
pub mod random;
pub mod tape;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use eddyline_language::definition;
use eddyline_language::expr::Cost;
use eddyline_machine::run::{End, Header, Run, State};
use eddyline_machine::*;
use serde_json::{Value, json};
use uuid::Uuid;

pub use check::Checks;

/// A namespace with its flows and runs, in memory. The test controls the clock.
#[derive(Clone)]
pub struct Model {
    pub flows: BTreeMap<String, Arc<Flow>>,
    pub runs: BTreeMap<RunId, Kept>,
    /// Messages to runs, oldest first.
    pub inbox: VecDeque<Message>,
    pub now: Millis,
    pub published: Vec<Publish>,
    pub max_touched: usize,
    pub budget: Cost,
    pub max_activations: u32,
    next_run: u128,
    drawn: u64,
}

/// A run as a store keeps it.
#[derive(Clone)]
pub struct Kept {
    pub flow: Arc<Flow>,
    pub run: Run,
    pub records: Vec<Numbered>,
    pub values: BTreeMap<ValueId, Data>,
    pub tasks: BTreeMap<Fence, TaskRow>,
    pub timers: BTreeMap<TimerKey, Millis>,
    pub gates: BTreeMap<ActId, GateRow>,
    pub checks: Checks,
}

impl Kept {
    pub fn is_ended(&self) -> bool {
        self.run.header.phase == run::Phase::Ended
    }
}

#[derive(Clone)]
pub struct TaskRow {
    pub task: Task,
    pub claimed: bool,
    pub closed: bool,
    pub claim: Claim,
}

#[derive(Clone)]
pub struct GateRow {
    pub token: Option<String>,
    pub arrival: Option<GateArrival>,
}

impl Model {
    pub fn new() -> Model {
        Model {
            flows: BTreeMap::new(),
            runs: BTreeMap::new(),
            inbox: VecDeque::new(),
            now: 1_767_323_045_678,
            published: Vec::new(),
            max_touched: decide::MAX_TOUCHED,
            budget: decide::BUDGET,
            max_activations: decide::MAX_ACTIVATIONS,
            next_run: 1,
            drawn: 0,
        }
    }

    pub fn register(&mut self, text: &str) -> String {
        let parsed = definition::parse(text).unwrap_or_else(|problems| panic!("{}\n{text}", problems.render(text)));
        let name = parsed.flow.name.clone();
        self.flows.insert(name.clone(), Arc::new(parsed.flow));
        name
    }

    pub fn start(&mut self, flow: &str, start: Start) -> RunId {
        let run = RunId(Uuid::from_u128(self.next_run));
        self.next_run += 1;
        self.start_as(run, flow, start);
        run
    }

    fn start_as(&mut self, run: RunId, flow: &str, start: Start) -> Vec<Answer> {
        let flow = self.flows[flow].clone();
        self.runs.entry(run).or_insert_with(|| Kept {
            flow,
            run: Run::new(run),
            records: Vec::new(),
            values: BTreeMap::new(),
            tasks: BTreeMap::new(),
            timers: BTreeMap::new(),
            gates: BTreeMap::new(),
            checks: Checks::default(),
        });
        self.submit(run, vec![Input::Start(Box::new(start))])
    }

    /// The start of a retry or a rerun.
    pub fn again(&self, run: RunId, reuse: Vec<run::Reused>) -> Start {
        let old = self.header(run);
        let values = self.runs[&run].values.iter().map(|(id, value)| (*id, value.clone())).collect();
        let (input, next_value) = (old.input.clone(), old.next_value);
        Start { input, retry_of: Some(run), reuse, values, next_value, ..Start::default() }
    }

    /// Decides and commits until all inputs are consumed.
    pub fn submit(&mut self, run: RunId, inputs: Vec<Input>) -> Vec<Answer> {
        let mut answers = Vec::new();
        while answers.len() < inputs.len() {
            let transition = self.decide(run, &inputs[answers.len()..]);
            assert!(transition.taken() > 0, "no input was taken");
            answers.extend(transition.answers.iter().cloned());
            self.commit(run, transition);
        }
        answers
    }

    /// Decides twice: with only the payloads that the decision requests, and from the state as a store loads it.
    pub fn decide(&mut self, run: RunId, inputs: &[Input]) -> Transition {
        self.drawn += 1;
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.drawn.to_le_bytes());
        let env = Env {
            max_touched: self.max_touched,
            budget: self.budget,
            max_activations: self.max_activations,
            ..Env::new(self.now, seed, "https://eddy.test/hooks/")
        };
        let kept = self.runs.get_mut(&run).expect("the run");
        let mut partial = kept.run.clone();
        partial.values.clear();
        let transition = loop {
            match decide(&kept.flow, &partial, &env, inputs) {
                Ok(transition) => break transition,
                Err(Halt::Need(needed)) => {
                    // Nothing else needs to be loaded.
                    partial.values.retain(|id, _| needed.iter().any(|stored| stored.id == *id));
                    let missing: Vec<ValueId> =
                        needed.iter().map(|stored| stored.id).filter(|id| !partial.values.contains_key(id)).collect();
                    assert!(!missing.is_empty(), "requests only what is loaded");
                    for id in missing {
                        let value = kept.values.get(&id).unwrap_or_else(|| panic!("no value {id}")).clone();
                        partial.values.insert(id, value);
                    }
                }
                Err(halt) => panic!("{halt}\n{}", self.dump(run)),
            }
        };
        // From the stored state, with every payload loaded: the same bytes.
        let mut loaded = reload(kept);
        loaded.values = kept.values.clone();
        let again = decide(&kept.flow, &loaded, &env, inputs).expect("the same decision again");
        let bytes = |transition: &Transition| serde_json::to_string(transition).unwrap();
        assert_eq!(bytes(&transition), bytes(&again), "the same inputs gave different bytes");
        // With an inline limit: the same decision, or `Heavy`.
        match decide(&kept.flow, &loaded, &Env { inline_steps: Some(200), ..env }, inputs) {
            Ok(inline) => assert_eq!(bytes(&transition), bytes(&inline), "inline, it was decided differently"),
            Err(halt) => assert_eq!(halt, Halt::Heavy),
        }
        transition
    }

    pub fn commit(&mut self, run: RunId, transition: Transition) {
        let kept = self.runs.get_mut(&run).expect("the run");
        assert_eq!(transition.base, kept.run.header.version, "compare and set");
        if transition.is_empty() {
            assert!(transition.records.is_empty() && transition.tasks.is_empty() && transition.timers.is_empty());
            return;
        }
        let stored: Transition = serde_json::from_str(&serde_json::to_string(&transition).unwrap()).unwrap();
        assert_eq!(stored, transition, "what is stored is what was decided");
        let before = kept.run.clone();
        kept.run.apply(&transition, &kept.flow);
        for (id, value) in &transition.values {
            assert!(kept.values.insert(*id, value.clone()).is_none(), "value {id} written twice");
        }
        for change in &transition.tasks {
            match change {
                TaskChange::Add(task) => {
                    let row =
                        TaskRow { task: (**task).clone(), claimed: false, closed: false, claim: Claim::default() };
                    assert!(kept.tasks.insert(task.fence, row).is_none(), "fence {} used twice", task.fence);
                }
                TaskChange::Close(fence) => kept.tasks.get_mut(fence).expect("a task to close").closed = true,
                TaskChange::Remove(fence) => assert!(kept.tasks.remove(fence).is_some(), "no task {fence} to remove"),
            }
        }
        for change in &transition.timers {
            match change {
                TimerChange::Set { key, due } => {
                    let due = match due {
                        Due::After(ms) => self.now + ms,
                        Due::At(ms) => *ms,
                    };
                    kept.timers.insert(*key, due);
                }
                TimerChange::Clear(key) => {
                    kept.timers.remove(key);
                }
            }
        }
        for change in &transition.gates {
            match change {
                GateChange::Add { id, token } => {
                    kept.gates.insert(id.activation, GateRow { token: Some(token.clone()), arrival: None });
                }
                GateChange::Arrive(arrival) => {
                    let row = GateRow { token: arrival.token.clone(), arrival: Some((**arrival).clone()) };
                    kept.gates.insert(arrival.id.activation, row);
                }
                GateChange::Close { id } => {
                    kept.gates.remove(&id.activation);
                }
            }
        }
        for record in &transition.records {
            let n = kept.records.len() as u64 + 1;
            kept.records.push(Numbered { n, ts: self.now, record: record.clone() });
        }
        kept.checks.after_commit(&before, kept_parts(&kept.flow, &kept.run, &kept.records, &kept.tasks), &transition);
        if kept.run.header.phase == run::Phase::Ended {
            assert!(kept.tasks.is_empty(), "tasks outlive the run\n{}", self.dump(run));
            assert!(self.runs[&run].timers.is_empty(), "timers outlive the run: {:?}", self.runs[&run].timers);
            assert!(self.runs[&run].gates.is_empty(), "gates outlive the run");
        }
        self.published.extend(transition.publishes.iter().cloned());
        for mut message in transition.messages {
            let values = &self.runs[&run].values;
            message.body = carry(message.body, values);
            self.inbox.push_back(message);
        }
    }

    /// Delivers the oldest message, if there is one.
    pub fn deliver(&mut self) -> bool {
        let Some(message) = self.inbox.pop_front() else { return false };
        match message.body {
            MessageBody::Start { flow, start } => {
                let parent = start.asked_by().and_then(|parent| self.runs.get(&parent.run));
                if parent.is_some_and(|parent| !parent.run.header.wants(&start)) {
                    return true;
                }
                if self.flows.contains_key(&flow) {
                    self.start_as(message.to, &flow, *start);
                } else {
                    let failure = Failure::new("FlowNotFound", format!("there is no flow {flow}"));
                    self.inbox.extend(start.refused(message.to, failure));
                }
            }
            MessageBody::Input(mut input) => {
                if !self.runs.contains_key(&message.to) {
                    return true;
                }
                if let Input::Drain { unclaimed } = &mut *input {
                    let closed = self.runs[&message.to].tasks.values().filter(|row| row.closed && !row.claimed);
                    *unclaimed = closed.map(|row| row.task.fence).collect();
                }
                self.submit(message.to, vec![*input]);
            }
        }
        true
    }

    pub fn deliver_all(&mut self) {
        let mut budget = 100_000;
        while self.deliver() {
            budget -= 1;
            assert!(budget > 0, "endless messages");
        }
    }

    /// Claims a task like a store: only if its run does not hold tasks back, and it is not closed.
    pub fn claim(&mut self, run: RunId, fence: Fence) -> Option<Task> {
        let now = self.now;
        let kept = self.runs.get_mut(&run)?;
        let header = kept.run.header.clone();
        let n = kept.records.len() as u64 + 1;
        let row = kept.tasks.get_mut(&fence)?;
        if row.claimed || row.closed || header.holds_tasks() {
            return None;
        }
        row.claimed = true;
        row.claim.memo = header.code.as_ref().map_or(0, |code| code.n);
        row.claim.build = Some("build-1".to_owned());
        kept.records.push(Numbered { n, ts: now, record: row.task.started(Some("worker-1".to_owned())) });
        Some(row.task.clone())
    }

    pub fn report(&mut self, run: RunId, task: &Task, seq: Option<u32>, op: Op) -> Answer {
        let claim = self.runs[&run].tasks.get(&task.fence).map_or_else(Claim::default, |row| row.claim.clone());
        let task = TaskRef { activation: task.activation, fence: task.fence };
        self.submit(run, vec![Input::Report(Report { task, seq, op, claim })]).remove(0)
    }

    /// Moves the clock to the next timer of any run and fires it.
    pub fn fire_next(&mut self) -> bool {
        let next =
            self.runs.iter().flat_map(|(run, kept)| kept.timers.iter().map(move |(key, due)| (*due, *run, *key))).min();
        let Some((due, run, key)) = next else { return false };
        self.now = self.now.max(due);
        self.runs.get_mut(&run).unwrap().timers.remove(&key);
        self.submit(run, vec![Input::Due(key)]);
        true
    }

    pub fn header(&self, run: RunId) -> &Header {
        &self.runs[&run].run.header
    }

    pub fn json(&self, run: RunId, data: &Data) -> Value {
        let values = &self.runs[&run].values;
        data.materialise(&|id| values.get(&id)).expect("every value is there")
    }

    /// The timeline as text, for failure messages.
    pub fn dump(&self, run: RunId) -> String {
        let kept = &self.runs[&run];
        let lines: Vec<String> = kept.records.iter().map(|record| json!(record).to_string()).collect();
        let open: Vec<String> =
            explain::explain(&kept.flow, &kept.run).iter().map(|open| json!(open).to_string()).collect();
        format!(
            "flow: {}\nstatus: {}\nagenda: {:?}\n{}\nopen:\n{}",
            kept.flow.canonical,
            kept.run.header.status().as_str(),
            kept.run.header.agenda,
            lines.join("\n"),
            open.join("\n")
        )
    }
}

fn kept_parts<'a>(
    flow: &'a Flow,
    run: &'a Run,
    records: &'a [Numbered],
    tasks: &'a BTreeMap<Fence, TaskRow>,
) -> check::Parts<'a> {
    check::Parts { flow, run, records, tasks }
}

/// The run as loaded from a store: rows, without derived tables.
fn reload(kept: &Kept) -> Run {
    let run = &kept.run;
    let rows: Vec<_> = run.activations.iter().map(|row| serde_json::from_value(json!(row)).unwrap()).collect();
    let header = serde_json::from_value(json!(run.header)).unwrap();
    let mut loaded = Run::new(run.header.run);
    loaded.header = header;
    loaded.activations = rows;
    loaded.emitted = run.emitted.clone();
    loaded.reuse = run.reuse.clone();
    loaded.cursors = run.cursors.clone();
    Run::load(loaded, &kept.flow)
}

/// A message body with payloads instead of references to values of the sender.
fn carry(body: MessageBody, values: &BTreeMap<ValueId, Data>) -> MessageBody {
    let plain = |data: &Data| Data::from(data.materialise(&|id| values.get(&id)).expect("the value"));
    match body {
        MessageBody::Start { flow, mut start } => {
            start.input = start.input.as_ref().map(plain);
            MessageBody::Start { flow, start }
        }
        MessageBody::Input(input) => MessageBody::Input(Box::new(match *input {
            Input::ChildEnded { activation, child, end: ChildEnd::Completed(output) } => {
                Input::ChildEnded { activation, child, end: ChildEnd::Completed(plain(&output)) }
            }
            other => other,
        })),
    }
}

/// One run of one flow, driven by activation names: the tests use this.
pub struct Trial {
    pub model: Model,
    pub run: RunId,
}

impl Trial {
    pub fn new(flow: &str, input: Value) -> Trial {
        Trial::with(&[flow], input)
    }

    /// The first flow is started; the others are for its children.
    pub fn with(flows: &[&str], input: Value) -> Trial {
        Trial::starting(flows, Start { input: Some(input.into()), ..Start::default() })
    }

    pub fn starting(flows: &[&str], start: Start) -> Trial {
        let mut model = Model::new();
        let names: Vec<String> = flows.iter().map(|flow| model.register(flow)).collect();
        let run = model.start(&names[0], start);
        model.deliver_all();
        Trial { model, run }
    }

    pub fn kept(&self) -> &Kept {
        &self.model.runs[&self.run]
    }

    pub fn send(&mut self, input: Input) -> Answer {
        let answer = self.model.submit(self.run, vec![input]).remove(0);
        self.model.deliver_all();
        answer
    }

    /// Claims the task of an activation, in any run.
    pub fn claim(&mut self, activation: &str) -> (RunId, Task) {
        let found = self.model.runs.iter().find_map(|(run, kept)| {
            let row = kept.tasks.values().find(|row| row.task.name == activation && !row.claimed);
            row.map(|row| (*run, row.task.fence))
        });
        let Some((run, fence)) = found else { panic!("no task for {activation}\n{}", self.model.dump(self.run)) };
        let task = self.model.claim(run, fence).expect("a claim");
        (run, task)
    }

    pub fn say(&mut self, run: RunId, task: &Task, op: Op) -> Answer {
        let answer = self.model.report(run, task, None, op);
        self.model.deliver_all();
        answer
    }

    pub fn complete(&mut self, activation: &str, output: Value) -> Answer {
        self.complete_emitting(activation, output, &[])
    }

    pub fn complete_emitting(&mut self, activation: &str, output: Value, emits: &[(&str, Value)]) -> Answer {
        let (run, task) = self.claim(activation);
        let emits = emits.iter().map(|(event, payload)| ((*event).to_owned(), payload.clone().into())).collect();
        self.say(run, &task, Op::Complete { output: output.into(), emits, logs: Vec::new() })
    }

    /// Fails it without retry.
    pub fn fail(&mut self, activation: &str, message: &str) -> Answer {
        let (run, task) = self.claim(activation);
        let error = Failure::new("Boom", message);
        self.say(run, &task, Op::Fail { error, retryable: false, retry_after_ms: None })
    }

    /// Fails one attempt.
    pub fn fail_attempt(&mut self, activation: &str, message: &str) -> Answer {
        let (run, task) = self.claim(activation);
        let error = Failure::new("Boom", message);
        self.say(run, &task, Op::Fail { error, retryable: true, retry_after_ms: None })
    }

    /// Fails an attempt that was claimed before.
    pub fn fail_attempt_of(&mut self, run: RunId, task: &Task) -> Answer {
        let error = Failure::new("Boom", "an attempt failed");
        self.say(run, task, Op::Fail { error, retryable: true, retry_after_ms: None })
    }

    /// Completes a task that was claimed before.
    pub fn complete_claimed(&mut self, run: RunId, task: &Task, output: Value) -> Answer {
        self.say(run, task, Op::Complete { output: output.into(), emits: Vec::new(), logs: Vec::new() })
    }

    /// Lets time pass until the next timer fires.
    pub fn tick(&mut self) -> bool {
        let fired = self.model.fire_next();
        self.model.deliver_all();
        fired
    }

    pub fn status(&self) -> &'static str {
        self.model.header(self.run).status().as_str()
    }

    /// `a completed, b running, …` in the order of creation, without the root.
    pub fn steps(&self) -> String {
        let kept = self.kept();
        let name = |id| kept.run.activation_name(&kept.flow, id);
        let steps = kept.run.activations.iter().filter(|activation| activation.id != ActId(0));
        let steps: Vec<String> = steps.map(|step| format!("{} {}", name(step.id), state_word(&step.state))).collect();
        steps.join(", ")
    }

    pub fn step(&self, activation: &str) -> &'static str {
        let kept = self.kept();
        let found =
            kept.run.activations.iter().find(|step| kept.run.activation_name(&kept.flow, step.id) == activation);
        found.map_or("absent", |step| state_word(&step.state))
    }

    pub fn output_of(&self, activation: &str) -> Value {
        let kept = self.kept();
        let found =
            kept.run.activations.iter().find(|step| kept.run.activation_name(&kept.flow, step.id) == activation);
        match found.and_then(|step| step.end()) {
            Some(End::Completed(output)) => self.model.json(self.run, output),
            other => panic!("{activation} has no output: {other:?}\n{}", self.model.dump(self.run)),
        }
    }

    pub fn error_of(&self, activation: &str) -> Failure {
        let kept = self.kept();
        let found =
            kept.run.activations.iter().find(|step| kept.run.activation_name(&kept.flow, step.id) == activation);
        match found.and_then(|step| step.end()) {
            Some(End::Failed(failure)) => failure.clone(),
            other => panic!("{activation} has no error: {other:?}\n{}", self.model.dump(self.run)),
        }
    }

    /// The input that the open task of an activation carries.
    pub fn input_of(&self, activation: &str) -> Value {
        let (run, row) = self
            .model
            .runs
            .iter()
            .find_map(|(run, kept)| kept.tasks.values().find(|row| row.task.name == activation).map(|row| (*run, row)))
            .unwrap_or_else(|| panic!("no task for {activation}\n{}", self.model.dump(self.run)));
        self.model.json(run, &row.task.input)
    }

    pub fn output(&self) -> Value {
        match &self.model.header(self.run).outcome {
            Some(run::RunOutcome::Completed(output)) => self.model.json(self.run, output),
            other => panic!("the run has no output: {other:?}\n{}", self.model.dump(self.run)),
        }
    }

    pub fn error(&self) -> Failure {
        match &self.model.header(self.run).outcome {
            Some(run::RunOutcome::Failed(failure)) => failure.clone(),
            other => panic!("the run has no error: {other:?}\n{}", self.model.dump(self.run)),
        }
    }

    /// The kinds of the records, with the activation.
    pub fn kinds(&self) -> Vec<String> {
        let line = |record: &Numbered| {
            let kind = json!(record.record.entry)["kind"].as_str().unwrap().to_owned();
            match record.record.entry.step_key() {
                Some(step) => format!("{kind} {step}"),
                None => kind,
            }
        };
        self.kept().records.iter().map(line).collect()
    }

    /// Names of the activations with an open task, in any run.
    pub fn offered(&self) -> Vec<String> {
        let tasks = self.model.runs.values().flat_map(|kept| kept.tasks.values());
        tasks.filter(|row| !row.claimed).map(|row| row.task.name.clone()).collect()
    }

    pub fn cancel(&mut self) -> Answer {
        self.send(Input::Cancel { by: "test".to_owned(), reason: Some("enough".to_owned()) })
    }

    pub fn act(&mut self, activation: &str, act: StepAct) -> Answer {
        self.send(Input::Act { activation: activation.to_owned(), by: "test".to_owned(), act })
    }

    pub fn open_gate(&mut self, activation: &str, payload: Value) -> Answer {
        let kept = self.kept();
        let found =
            kept.run.activations.iter().find(|step| kept.run.activation_name(&kept.flow, step.id) == activation);
        let activation = found.expect("the activation").id;
        self.send(Input::OpenGate { activation, by: OpenedBy::Webhook, payload: payload.into() })
    }
}

pub fn state_word(state: &State) -> &'static str {
    match state {
        State::Waiting | State::Certain { .. } => "waiting",
        State::Gated => "gated",
        State::Ready => "ready",
        State::Queued(_) => "queued",
        State::Draining(_) => "draining",
        State::BackOff { .. } => "backing-off",
        State::Open(_) => "open",
        State::Child(_) | State::Starting(_) => "child",
        State::Retrying { .. } => "retrying",
        State::Ended(end) => end.status(),
    }
}
