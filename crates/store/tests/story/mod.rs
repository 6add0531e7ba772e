//! Small flows with real decisions, so that tests only list the inputs of a run.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;

use eddyline_language::definition;
use eddyline_machine::*;
use eddyline_store::*;
use serde_json::json;
use uuid::Uuid;

pub const START: Millis = 1_767_323_045_678;

pub const FLOWS: [&str; 6] = [
    "{name: line, steps: {a: {}, b: {after: [a]}, c: {after: [b]}}}",
    "{name: wide, steps: {each: {spread: input.items, run: h, max_parallel: 3, queue: bulk}, last: {after: [each]}}}",
    "{name: gated, steps: {hook: {await: {webhook: true, timeout: 1h}}, paid: {await: {event: paid, key: '7'}},
      ask: {await: {manual: true}}, nap: {await: {time: 2s}}, go: {after: [hook], run: go}}}",
    "{name: shaky, steps: {a: {retry: {attempts: 3, initial: 1s}, timeout: 30s, start_timeout: 50s, limits: [api]},
      b: {after: [a], emits: [done]}, c: {subscribes: [done]}}, finally: {steps: {z: {}}}}",
    "{name: parent, steps: {kid: {flow: line, input: {big: '${input.big}'}}, off: {flow: line, detached: true}}}",
    "{name: job, code: true, retry: {attempts: 2}}",
];

pub fn ns() -> Namespace {
    Namespace::default()
}

pub fn flows() -> BTreeMap<String, Arc<Flow>> {
    let parse = |text: &str| {
        let parsed = definition::parse(text).unwrap_or_else(|problems| panic!("{}", problems.render(text)));
        (parsed.flow.name.clone(), Arc::new(parsed.flow))
    };
    FLOWS.into_iter().map(parse).collect()
}

pub fn run_id(n: u128) -> RunId {
    RunId(Uuid::from_u128(n))
}

pub fn command_id(n: u128) -> CommandId {
    CommandId(Uuid::from_u128(n))
}

/// Decides like an engine, on the runs of a store.
#[derive(Debug)]
pub struct Decider {
    pub flows: BTreeMap<String, Arc<Flow>>,
    drawn: u64,
}

impl Decider {
    pub fn new() -> Decider {
        Decider { flows: flows(), drawn: 0 }
    }

    /// Leaves out the id of a command.
    pub fn skip(&mut self) {
        self.drawn += 1;
    }

    /// Decides on the inputs; returns the commit.
    pub async fn decide(&mut self, store: &dyn Store, run: RunId, flow: Option<&str>, inputs: &[Input]) -> RunCommit {
        self.drawn += 1;
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.drawn.to_le_bytes());
        let now = store.now().await.unwrap();
        let env = Env::new(now, seed, "https://eddy.test/");
        let (mut current, flow) = match store.load(run, None).await.unwrap() {
            Found::Run(loaded) => {
                let flow = self.flows[&loaded.rows.header.flow].clone();
                (Run::load(loaded.rows, &flow), flow)
            }
            _ => (Run::new(run), self.flows[flow.expect("a flow")].clone()),
        };
        let transition = loop {
            match decide(&flow, &current, &env, inputs) {
                Ok(transition) => break transition,
                Err(Halt::Need(needed)) => {
                    let ids: Vec<ValueId> = needed.iter().map(|stored| stored.id).collect();
                    current.values.extend(store.values(run, &ids).await.unwrap());
                }
                Err(halt) => panic!("{halt}"),
            }
        };
        let mut values = BTreeMap::new();
        let all: Vec<ValueId> = (0..transition.header.next_value).map(ValueId).collect();
        values.extend(store.values(run, &all).await.unwrap());
        values.extend(transition.values.iter().cloned());
        let plain = |data: &Data| Data::from(data.materialise(&|id| values.get(&id)).expect("the value"));
        let messages = transition.messages.iter().map(|message| carry(message.clone(), &plain)).collect();
        let event = |publish: &Publish| NewEvent {
            id: publish.id.clone(),
            name: publish.name.clone(),
            key: publish.key.as_ref().map(|key| key.materialise(&|id| values.get(&id)).unwrap().to_string()),
            payload: plain(&publish.payload),
        };
        RunCommit {
            ns: ns(),
            command: command_id(self.drawn.into()),
            events: transition.publishes.iter().map(event).collect(),
            messages,
            transition: Arc::new(transition),
            takes: Vec::new(),
            key: None,
            tells_line: None,
        }
    }

    pub async fn start(&mut self, store: &dyn Store, n: u128, flow: &str, input: serde_json::Value) -> RunCommit {
        let start = Start { input: Some(input.into()), ..Start::default() };
        self.decide(store, run_id(n), Some(flow), &[Input::Start(Box::new(start))]).await
    }

    pub async fn report(&mut self, store: &dyn Store, claimed: &Claimed, op: Op) -> RunCommit {
        let task = TaskRef { activation: claimed.task.activation, fence: claimed.task.fence };
        let report = Report { task, seq: None, op, claim: claimed.held.claim.clone() };
        self.decide(store, claimed.run, None, &[Input::Report(report)]).await
    }

    pub async fn complete(&mut self, store: &dyn Store, claimed: &Claimed, output: serde_json::Value) -> RunCommit {
        self.report(store, claimed, Op::Complete { output: output.into(), emits: vec![], logs: vec![] }).await
    }
}

fn carry(mut message: Message, plain: &impl Fn(&Data) -> Data) -> Message {
    match &mut message.body {
        MessageBody::Start { start, .. } => start.input = start.input.as_ref().map(plain),
        MessageBody::Input(input) => {
            if let Input::ChildEnded { end: ChildEnd::Completed(output), .. } = &mut **input {
                *output = plain(output);
            }
        }
    }
    message
}

pub fn claim(n: u128, worker: &str, max: usize) -> ClaimRequest {
    ClaimRequest {
        ns: ns(),
        request: RequestId(Uuid::from_u128(n)),
        worker: worker.to_owned(),
        queues: vec!["default".to_owned(), "bulk".to_owned()],
        offer: Arc::default(),
        max,
        most_held: None,
        lease_ms: 30_000,
    }
}

pub fn documents(n: u128, documents: Vec<DocumentChange>) -> Command {
    let (messages, events, drops) = Default::default();
    Command::Documents(DocumentCommit { ns: ns(), command: command_id(n), documents, messages, events, drops })
}

pub fn put(kind: &str, id: &str, body: serde_json::Value, due: Option<Millis>) -> DocumentChange {
    DocumentChange { key: DocumentKey::new(kind, id), expect: Expect::Any, body: Some(body), due }
}

/// Everything that can be read, as text.
pub async fn everything(store: &dyn Store, runs: &[RunId]) -> String {
    let mut text = Vec::new();
    let mut say = |what: &str, found: String| text.push(format!("{what}: {found}"));
    let page = Page::default();
    for run in runs {
        say("load", format!("{:?}", store.load(*run, None).await.unwrap()));
        say("pending", format!("{:?}", store.pending(*run).await.unwrap()));
        say("records", format!("{:?}", store.records(*run, 0, 1_000).await.unwrap()));
        say("later records", format!("{:?}", store.records(*run, 3, 2).await.unwrap()));
        let ids: Vec<ValueId> = (0..20).map(ValueId).collect();
        say("values", format!("{:?}", store.values(*run, &ids).await.unwrap()));
    }
    let filters = [
        RunFilter::default(),
        RunFilter { flow: Some("line".to_owned()), ..RunFilter::default() },
        RunFilter { status: vec![Status::Running], ..RunFilter::default() },
        RunFilter { status: vec![Status::Completed], trimmed: Some(false), ..RunFilter::default() },
        RunFilter { ended_before: Some(START + 40_000), trimmed: Some(false), ..RunFilter::default() },
        RunFilter { tags: vec!["red".to_owned()], ..RunFilter::default() },
        RunFilter { external_id: Some("x-1".to_owned()), ..RunFilter::default() },
        RunFilter { since: Some(START + 5_000), until: Some(START + 60_000), ..RunFilter::default() },
    ];
    for filter in &filters {
        say("runs", format!("{:?}", store.runs(None, filter, page).await.unwrap()));
        let some = Page { after: Some(5), limit: 2 };
        say("page of runs", format!("{:?}", store.runs(Some(&ns()), filter, some).await.unwrap()));
        say("count", format!("{:?}", store.count_runs(&ns(), filter).await.unwrap()));
    }
    let event = Some(("paid".to_owned(), Some("7".to_owned())));
    for filter in [
        GateFilter::default(),
        GateFilter { run: runs.first().copied(), ..GateFilter::default() },
        GateFilter { reason: Some(record::GateReason::Manual), ..GateFilter::default() },
        GateFilter { event, ..GateFilter::default() },
    ] {
        say("gates", format!("{:?}", store.gates(Some(&ns()), &filter, page).await.unwrap()));
        let some = Page { after: Some(2), limit: 2 };
        say("page of gates", format!("{:?}", store.gates(Some(&ns()), &filter, some).await.unwrap()));
    }
    for kind in ["queue", "limit", "schedule"] {
        let filter = DocumentFilter { kind: kind.to_owned(), ..DocumentFilter::default() };
        say("documents", format!("{:?}", store.documents(None, &filter, 100).await.unwrap()));
        let (prefix, after) = (Some("b".to_owned()), Some("b".to_owned()));
        let filter = DocumentFilter { kind: kind.to_owned(), id: None, prefix, after, after_ns: None };
        say("some documents", format!("{:?}", store.documents(Some(&ns()), &filter, 100).await.unwrap()));
    }
    let (name, key) = (Some("paid".to_owned()), Some("7".to_owned()));
    for feed in [
        Feed::Runs { flow: None },
        Feed::Runs { flow: Some("line".to_owned()) },
        Feed::Events { name: None, key: None, since: None },
        Feed::Events { name: name.clone(), key: None, since: None },
        Feed::Events { name, key, since: None },
    ] {
        say("feed", format!("{:?}", store.feed(&ns(), &feed, page).await.unwrap()));
        let some = Page { after: Some(2), limit: 2 };
        say("page of feed", format!("{:?}", store.feed(&ns(), &feed, some).await.unwrap()));
    }
    let queues = store.queues(&ns()).await.unwrap();
    let queues: Vec<_> = queues.iter().filter(|queue| queue.ready + queue.claimed > 0).collect();
    say("queues", format!("{queues:?}"));
    text.join("\n")
}

pub fn assert_same(expected: &str, found: &str, when: &str) {
    for (expected, found) in expected.lines().zip(found.lines()) {
        assert_eq!(expected, found, "{when}");
    }
    assert_eq!(expected.lines().count(), found.lines().count(), "{when}");
}

/// A pseudo-random generator with a fixed seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        if of.is_empty() { None } else { of.get(self.below(of.len())) }
    }
}

pub fn big() -> serde_json::Value {
    json!({"text": "x".repeat(600), "float": 0.1 + 0.2, "deep": [[[{"a": null}]]]})
}
