//! Drives runs through a store the way an engine does: load, decide, commit. Keeps the cases short.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use eddyline_language::definition;
use eddyline_machine::*;
use serde_json::Value;
use uuid::Uuid;

use crate::*;

/// A store and the flows of its runs.
#[derive(Debug, Clone)]
pub struct Drive {
    pub store: Arc<dyn Store>,
    pub clock: Arc<ManualClock>,
    pub ns: Namespace,
    flows: Arc<Mutex<BTreeMap<String, Arc<Flow>>>>,
    /// Runs as they were loaded last.
    seen: Arc<Mutex<BTreeMap<RunId, Run>>>,
    made: Arc<AtomicU64>,
}

impl Drive {
    pub fn new(store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Drive {
        let (flows, seen, made) = (Arc::default(), Arc::default(), Arc::default());
        Drive { store, clock, ns: Namespace::default(), flows, seen, made }
    }

    /// The same store and flows, in another namespace.
    pub fn within(&self, ns: &str) -> Drive {
        Drive { ns: Namespace::new(ns), ..self.clone() }
    }

    /// Adds a flow from its text; returns its name.
    pub fn flow(&self, text: &str) -> String {
        let flow = definition::parse(text).unwrap_or_else(|problems| panic!("{}\n{text}", problems.render(text))).flow;
        let name = flow.name.clone();
        self.flows.lock().unwrap().insert(name.clone(), Arc::new(flow));
        name
    }

    /// A flow that was added before.
    pub fn parsed(&self, name: &str) -> Arc<Flow> {
        self.flow_named(name).expect("a flow of that name")
    }

    fn flow_named(&self, name: &str) -> Option<Arc<Flow>> {
        self.flows.lock().unwrap().get(name).cloned()
    }

    fn number(&self) -> u64 {
        self.made.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn new_run(&self) -> RunId {
        RunId(Uuid::from_u64_pair(1, self.number()))
    }

    pub fn new_command(&self) -> CommandId {
        CommandId(Uuid::from_u64_pair(2, self.number()))
    }

    pub fn new_request(&self) -> RequestId {
        RequestId(Uuid::from_u64_pair(3, self.number()))
    }

    pub async fn now(&self) -> Millis {
        self.store.now().await.unwrap()
    }

    pub fn advance(&self, ms: Millis) {
        self.clock.advance(ms);
    }

    /// A stored run, ready to be decided on.
    pub async fn loaded(&self, run: RunId) -> (Arc<Flow>, Run) {
        match self.store.load(run, None).await.unwrap() {
            Found::Run(loaded) => {
                let flow = self.flow_named(&loaded.rows.header.flow).expect("the flow of the run");
                let run = Run::load(loaded.rows, &flow);
                self.catch_up(&flow, &run).await;
                (flow, run)
            }
            other => panic!("run {run} not found: {other:?}"),
        }
    }

    /// Checks that what has changed since the run was loaded last brings that copy to where the run is now.
    async fn catch_up(&self, flow: &Flow, now: &Run) {
        let run = now.header.run;
        let Some(mut seen) = self.seen.lock().unwrap().insert(run, now.clone()) else { return };
        match self.store.load(run, Some(seen.header.version)).await.unwrap() {
            Found::Changed(changed) => assert!(seen.catch_up(changed.rows, flow), "the rows of {run} don't fit"),
            // Not every store can tell what has changed.
            _ => return,
        }
        if seen.header.version == now.header.version {
            let parts = |run: &Run| {
                let Run { header, activations, emitted, reuse, cursors, .. } = run.clone();
                (header, activations, emitted, reuse, cursors)
            };
            assert_eq!(parts(&seen), parts(now));
        }
    }

    pub async fn summary(&self, run: RunId) -> Summary {
        match self.store.load(run, None).await.unwrap() {
            Found::Run(loaded) => loaded.summary,
            Found::Trimmed(summary) => *summary,
            other => panic!("run {run} not found: {other:?}"),
        }
    }

    /// Decides on a run, without committing.
    pub async fn decide(&self, flow: &Flow, run: &Run, inputs: &[Input]) -> Transition {
        let mut seed = [7; 32];
        seed[..8].copy_from_slice(&self.number().to_le_bytes());
        let env = Env::new(self.now().await, seed, "https://eddy.test/hooks/");
        let mut run = run.clone();
        loop {
            match decide(flow, &run, &env, inputs) {
                Ok(transition) => return transition,
                Err(Halt::Need(needed)) => {
                    let ids: Vec<ValueId> = needed.iter().map(|stored| stored.id).collect();
                    let values = self.store.values(run.header.run, &ids).await.unwrap();
                    assert_eq!(values.len(), ids.len(), "values that the run refers to are missing");
                    run.values.extend(values);
                }
                Err(halt) => panic!("{halt}"),
            }
        }
    }

    /// A commit of a transition, with the payloads of its messages and events inlined.
    pub async fn commit_of(&self, transition: Transition) -> RunCommit {
        let run = transition.header.run;
        let mut messages = Vec::new();
        for message in &transition.messages {
            messages.push(Message { body: self.carry(run, &transition, &message.body).await, ..message.clone() });
        }
        let mut events = Vec::new();
        for publish in &transition.publishes {
            let key = match &publish.key {
                Some(key) => Some(self.whole(run, &transition, key).await.to_string()),
                None => None,
            };
            let payload = self.whole(run, &transition, &publish.payload).await.into();
            events.push(NewEvent { id: publish.id.clone(), name: publish.name.clone(), key, payload });
        }
        RunCommit {
            ns: self.ns.clone(),
            command: self.new_command(),
            transition: Arc::new(transition),
            messages,
            events,
            takes: Vec::new(),
            key: None,
            tells_line: None,
        }
    }

    async fn carry(&self, run: RunId, transition: &Transition, body: &MessageBody) -> MessageBody {
        match body.clone() {
            MessageBody::Start { flow, mut start } => {
                if let Some(input) = &start.input {
                    start.input = Some(self.whole(run, transition, input).await.into());
                }
                MessageBody::Start { flow, start }
            }
            MessageBody::Input(mut input) => {
                if let Input::ChildEnded { end: ChildEnd::Completed(output), .. } = &mut *input {
                    *output = self.whole(run, transition, output).await.into();
                }
                MessageBody::Input(input)
            }
        }
    }

    /// The JSON of a payload, with values stored by the run or added by the transition.
    async fn whole(&self, run: RunId, transition: &Transition, data: &Data) -> Value {
        let mut values: BTreeMap<ValueId, Data> = transition.values.iter().cloned().collect();
        loop {
            match data.materialise(&|id| values.get(&id)) {
                Ok(value) => return value,
                Err(unbuilt) => {
                    let Unbuilt::Missing(missing) = unbuilt else { panic!("{unbuilt}") };
                    let missing: Vec<ValueId> = missing.iter().map(|stored| stored.id).collect();
                    let found = self.store.values(run, &missing).await.unwrap();
                    assert_eq!(found.len(), missing.len(), "values that the run refers to are missing");
                    values.extend(found);
                }
            }
        }
    }

    /// A commit of the decision on these inputs, on the current state of the run.
    pub async fn prepare(&self, run: RunId, inputs: &[Input]) -> RunCommit {
        let (flow, run) = self.loaded(run).await;
        self.commit_of(self.decide(&flow, &run, inputs).await).await
    }

    pub async fn prepare_start(&self, flow: &str, run: RunId, start: Start) -> RunCommit {
        let flow = self.flow_named(flow).expect("the flow to start");
        let input = Input::Start(Box::new(start));
        self.commit_of(self.decide(&flow, &Run::new(run), &[input]).await).await
    }

    pub async fn commit(&self, commit: RunCommit) -> std::result::Result<Committed, Refused> {
        self.command(Command::Run(commit)).await
    }

    pub async fn command(&self, command: Command) -> std::result::Result<Committed, Refused> {
        let mut written = self.store.commit(vec![command], Vec::new()).await.unwrap();
        assert_eq!((written.commands.len(), written.claims.len()), (1, 0), "one result per command");
        written.commands.remove(0)
    }

    pub async fn start(&self, flow: &str, input: Value) -> RunId {
        self.start_with(flow, Start { input: Some(input.into()), ..Start::default() }).await
    }

    pub async fn start_with(&self, flow: &str, start: Start) -> RunId {
        let run = self.new_run();
        self.commit(self.prepare_start(flow, run, start).await).await.unwrap();
        run
    }

    /// Starts a run for each input, all in one commit.
    pub async fn start_all(&self, flow: &str, inputs: impl IntoIterator<Item = Value>) -> Vec<RunId> {
        let (mut runs, mut commands) = (Vec::new(), Vec::new());
        for input in inputs {
            let run = self.new_run();
            let start = Start { input: Some(input.into()), ..Start::default() };
            commands.push(Command::Run(self.prepare_start(flow, run, start).await));
            runs.push(run);
        }
        let written = self.store.commit(commands, Vec::new()).await.unwrap();
        for answer in written.commands {
            answer.unwrap();
        }
        runs
    }

    /// Decides on the inputs and commits.
    pub async fn submit(&self, run: RunId, inputs: &[Input]) -> Vec<Answer> {
        self.submit_taking(run, inputs, &[]).await.unwrap()
    }

    /// The same, consuming due items.
    pub async fn submit_taking(
        &self,
        run: RunId,
        inputs: &[Input],
        takes: &[Consumed],
    ) -> std::result::Result<Vec<Answer>, Refused> {
        let (mut answers, mut takes) = (Vec::new(), takes.to_vec());
        while answers.len() < inputs.len() {
            let mut commit = self.prepare(run, &inputs[answers.len()..]).await;
            commit.takes = std::mem::take(&mut takes);
            answers.extend(commit.transition.answers.iter().cloned());
            self.commit(commit).await?;
        }
        Ok(answers)
    }

    /// The default claim of the cases: anything on the default queue.
    pub fn ask(&self) -> ClaimRequest {
        ClaimRequest {
            ns: self.ns.clone(),
            request: self.new_request(),
            worker: "w".to_owned(),
            queues: vec!["default".to_owned()],
            offer: Arc::default(),
            max: 1_000,
            most_held: None,
            lease_ms: 30_000,
        }
    }

    pub async fn claim(&self, request: ClaimRequest) -> Claims {
        let mut written = self.store.commit(Vec::new(), vec![request]).await.unwrap();
        assert_eq!((written.commands.len(), written.claims.len()), (0, 1), "one result per claim");
        written.claims.remove(0)
    }

    /// Claims from the default queue.
    pub async fn take(&self, max: usize) -> Vec<Claimed> {
        self.claim(ClaimRequest { max, ..self.ask() }).await.tasks
    }

    pub async fn take_one(&self) -> Claimed {
        self.take(1).await.pop().expect("a task to claim")
    }

    pub fn report_of(&self, claimed: &Claimed, op: Op) -> Input {
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        Input::Report(Report { task, seq: None, op, claim: claimed.held.claim.clone() })
    }

    pub async fn report(&self, claimed: &Claimed, op: Op) -> Answer {
        self.submit(claimed.run, &[self.report_of(claimed, op)]).await.remove(0)
    }

    pub async fn complete(&self, claimed: &Claimed, output: Value) {
        let answer = self.report(claimed, completion(output)).await;
        assert!(matches!(answer, Answer::Applied(_)), "the completion was {answer:?}");
    }

    pub async fn fail(&self, claimed: &Claimed) {
        let error = Failure::new("Boom", "it broke");
        self.report(claimed, Op::Fail { error, retryable: false, retry_after_ms: None }).await;
    }

    /// Completes all tasks on the default queue, until there are none.
    pub async fn work_off(&self) {
        loop {
            let tasks = self.take(100).await;
            if tasks.is_empty() {
                return;
            }
            for task in tasks {
                self.complete(&task, Value::Null).await;
            }
        }
    }

    pub async fn pause(&self, run: RunId) {
        self.submit(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    }

    pub async fn resume(&self, run: RunId) {
        self.submit(run, &[Input::Resume { by: "ann".to_owned() }]).await;
    }

    pub async fn cancel(&self, run: RunId) {
        self.submit(run, &[Input::Cancel { by: "ann".to_owned(), reason: None }]).await;
    }

    pub async fn due(&self, what: crate::Due, limit: usize) -> DueBatch {
        self.store.due(what, &[], limit).await.unwrap()
    }

    /// Delivers due messages until there are none.
    pub async fn deliver(&self) {
        loop {
            let batch = self.due(crate::Due::Messages, 100).await;
            if batch.items.is_empty() {
                return;
            }
            for item in batch.items {
                let DueItem::Messages { to, messages, .. } = item else { panic!("a message was due, not {item:?}") };
                for message in messages {
                    self.consume(to, message).await;
                }
            }
        }
    }

    /// Decides on a message, commits and consumes it; drops a message to a run that does not exist.
    pub async fn consume(&self, to: RunId, message: Message) {
        let takes = vec![Consumed::Message(message.id.clone())];
        let commit = match message.body {
            MessageBody::Start { flow, start } => self.prepare_start(&flow, to, *start).await,
            MessageBody::Input(_) if matches!(self.store.load(to, None).await.unwrap(), Found::Nothing) => {
                let drops = vec![(to, message.id)];
                self.command(Command::Documents(DocumentCommit { drops, ..self.nothing() })).await.unwrap();
                return;
            }
            MessageBody::Input(mut input) => {
                if let Input::Drain { unclaimed } = &mut *input {
                    *unclaimed = self.unclaimed_fences(to).await;
                }
                self.prepare(to, &[*input]).await
            }
        };
        self.commit(RunCommit { takes, ..commit }).await.unwrap();
    }

    /// The closed tasks that no worker holds.
    pub async fn unclaimed_fences(&self, run: RunId) -> Vec<Fence> {
        let tasks = self.pending(run).await.tasks;
        tasks.into_iter().filter(|row| row.closed && row.held.is_none()).map(|row| row.task.fence).collect()
    }

    pub async fn pending(&self, run: RunId) -> PendingWork {
        self.store.pending(run).await.unwrap()
    }

    pub async fn records(&self, run: RunId) -> Vec<Numbered> {
        self.store.records(run, 0, MAX_PAGE).await.unwrap()
    }

    pub async fn status(&self, run: RunId) -> Status {
        self.summary(run).await.header.status()
    }

    /// Writes a document unconditionally.
    pub async fn put(&self, kind: &str, id: &str, body: Value) {
        let change =
            DocumentChange { key: DocumentKey::new(kind, id), expect: Expect::Any, body: Some(body), due: None };
        self.command(self.documents(vec![change])).await.unwrap();
    }

    pub fn documents(&self, documents: Vec<DocumentChange>) -> Command {
        Command::Documents(DocumentCommit { documents, ..self.nothing() })
    }

    /// An empty commit of documents.
    pub fn nothing(&self) -> DocumentCommit {
        DocumentCommit {
            ns: self.ns.clone(),
            command: self.new_command(),
            documents: Vec::new(),
            messages: Vec::new(),
            events: Vec::new(),
            drops: Vec::new(),
        }
    }

    pub async fn publish(&self, event: NewEvent) {
        self.publish_all(vec![event]).await;
    }

    /// Returns how many of the events were already stored.
    pub async fn publish_all(&self, events: Vec<NewEvent>) -> u32 {
        let commit = DocumentCommit { events, ..self.nothing() };
        self.command(Command::Documents(commit)).await.unwrap().repeats
    }

    pub async fn send(&self, messages: Vec<Message>) {
        self.command(Command::Documents(DocumentCommit { messages, ..self.nothing() })).await.unwrap();
    }
}

pub fn completion(output: Value) -> Op {
    Op::Complete { output: output.into(), emits: Vec::new(), logs: Vec::new() }
}

pub fn event(id: &str, name: &str, key: Option<&str>, payload: Value) -> NewEvent {
    NewEvent { id: id.to_owned(), name: name.to_owned(), key: key.map(str::to_owned), payload: payload.into() }
}

/// A message without effect on its target.
pub fn note(to: RunId, id: &str) -> Message {
    Message { to, id: id.to_owned(), body: MessageBody::Input(Box::new(Input::Continue)) }
}

pub fn lease(claimed: &Claimed) -> Lease {
    Lease { run: claimed.run, fence: claimed.task.fence }
}

pub fn runs_of(claimed: &[Claimed]) -> Vec<RunId> {
    claimed.iter().map(|claimed| claimed.run).collect()
}

pub fn names_of(claimed: &[Claimed]) -> Vec<&str> {
    claimed.iter().map(|claimed| claimed.task.name.as_str()).collect()
}
