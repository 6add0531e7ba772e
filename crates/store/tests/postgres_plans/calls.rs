//! Every call that instances make all the time, on runs of its own.

use std::sync::Arc;

use eddyline_language::definition;
use eddyline_machine::{Data, Input, Log, Message, MessageBody, Op, RunId, Start, Status, ValueId};
use eddyline_store::*;
use serde_json::json;

use crate::story::{Decider, claim, command_id, documents, ns, put, run_id};

const KEYED: &str = "{name: fair, steps: {work: {key: input.k, queue: fair}}}";
const LIMITED: &str = "{name: capped, steps: {work: {limits: [api], queue: capped}}}";
/// Due items of a call.
const DUE: usize = 20;

/// Told the name of each call after it was made.
type Said<'a> = &'a mut dyn FnMut(&str);

pub struct Calls {
    pub store: Postgres,
    decider: Decider,
    made: u128,
}

impl Calls {
    pub fn new(store: Postgres) -> Calls {
        let mut decider = Decider::new();
        for text in [KEYED, LIMITED] {
            let flow = definition::parse(text).unwrap().flow;
            decider.flows.insert(flow.name.clone(), Arc::new(flow));
        }
        Calls { store, decider, made: 0 }
    }

    /// Rules of queues and limits.
    pub async fn prepare(&self) {
        let rules = [
            put(kind::LIMIT, "api", json!({"concurrency": 100_000}), None),
            put(kind::QUEUE, "capped", json!({"concurrency": 100_000}), None),
        ];
        self.commit(documents(1 << 40, rules.to_vec())).await;
    }

    fn number(&mut self) -> u128 {
        self.made += 1;
        self.made
    }

    async fn commit(&self, command: Command) {
        self.store.commit(vec![command], Vec::new()).await.unwrap().commands.remove(0).unwrap();
    }

    fn ask(&mut self, worker: &str, queue: &str, max: usize) -> ClaimRequest {
        let number = self.number();
        ClaimRequest { queues: vec![queue.to_owned()], most_held: Some(900), ..claim(number, worker, max) }
    }

    async fn start(&mut self, flow: &str, start: Start) -> RunCommit {
        let run = run_id(self.number());
        self.decider.decide(&self.store, run, Some(flow), &[Input::Start(Box::new(start))]).await
    }

    pub async fn all(&mut self, said: Said<'_>) {
        self.hot(said).await;
        self.lists(said).await;
    }

    /// What every step, every heartbeat and every poll calls.
    pub async fn hot(&mut self, said: Said<'_>) {
        let tasks = self.commits(said).await;
        self.leases(&tasks, said).await;
        self.due(said).await;
        self.reads(tasks[0].run, said).await;
        self.items(tasks[0].run, said).await;
        self.feeds(said).await;
        self.presence(said).await;
    }

    /// What people, the reconciler and retention call.
    pub async fn lists(&mut self, said: Said<'_>) {
        let start = Start {
            input: Some(json!({}).into()),
            external_id: Some(format!("external-of-{}", self.made)),
            tags: vec![format!("tag-of-{}", self.made)],
            ..Start::default()
        };
        let commit = self.start("line", start).await;
        let run = commit.transition.header.run;
        self.commit(Command::Run(commit)).await;
        said("commit a start");
        self.runs(run, said).await;
        self.trims(run, said).await;
    }

    async fn commits(&mut self, said: Said<'_>) -> Vec<Claimed> {
        let mut commands = Vec::new();
        for n in 0..DUE {
            let tags = vec![format!("tag-of-{}", self.made), "real".to_owned()];
            let start = Start {
                input: Some(json!({"n": n, "k": format!("k{}", self.made)}).into()),
                external_id: Some(format!("external-of-{}", self.made)),
                tags,
                ..Start::default()
            };
            let flow = ["line", "gated", "fair", "capped", "shaky", "line", "parent", "line"][n % 8];
            let mut commit = self.start(flow, start).await;
            let key = format!("key-of-{}", self.made);
            commit.key = Some(StartKey { flow: flow.to_owned(), key, fingerprint: [0; 32] });
            commands.push(Command::Run(commit));
        }
        said("decide");
        let request = self.ask("ann", "default", 4);
        let written = self.store.commit(commands, vec![request.clone()]).await.unwrap();
        said("commit starts and claim");
        assert!(written.commands.iter().all(|answer| answer.is_ok()));
        let mut tasks = written.claims.into_iter().next().unwrap().tasks;
        assert_eq!(tasks.len(), 4);
        self.store.commit(Vec::new(), vec![request]).await.unwrap();
        said("claim again");
        for (queue, max) in [("default", 1), ("default", 2), ("fair", 2), ("capped", 2)] {
            let request = self.ask("bob", queue, max);
            let claims = self.store.commit(Vec::new(), vec![request]).await.unwrap().claims.remove(0);
            said(&format!("claim {max} of {queue}"));
            assert!(!claims.tasks.is_empty(), "{queue}");
        }
        // A worker that is offered nothing that is there.
        let mut request = self.ask("cid", "default", 8);
        request.offer = Arc::new(Offer { handlers: ["unknown".to_owned()].into(), ..Offer::default() });
        self.store.commit(Vec::new(), vec![request]).await.unwrap();
        said("claim of an unknown handler");
        let done = tasks.pop().unwrap();
        let commit = self.decider.complete(&self.store, &done, json!({"ok": true})).await;
        said("decide");
        let request = self.ask("ann", "default", 1);
        let written = self.store.commit(vec![Command::Run(commit)], vec![request]).await.unwrap();
        said("commit a report and claim");
        assert!(written.commands[0].is_ok());
        let log = Op::Log(Log { level: "info".to_owned(), msg: "hello".to_owned(), meta: None });
        let commit = self.decider.report(&self.store, &tasks[0], log).await;
        said("decide");
        self.commit(Command::Run(commit)).await;
        said("commit a log");
        for input in [Input::Pause { by: "ann".to_owned() }, Input::Resume { by: "ann".to_owned() }] {
            let commit = self.decider.decide(&self.store, tasks[0].run, None, &[input]).await;
            said("decide");
            self.commit(Command::Run(commit)).await;
            said("commit a pause or resume");
        }
        tasks
    }

    async fn leases(&mut self, tasks: &[Claimed], said: Said<'_>) {
        let leases: Vec<Lease> =
            tasks.iter().map(|claimed| Lease { run: claimed.run, fence: claimed.task.fence }).collect();
        for worker in [Some("ann"), None] {
            self.store.extend(&ns(), worker, &leases).await.unwrap();
            said("extend");
            self.store.leases(&ns(), worker, &leases).await.unwrap();
            said("leases");
        }
        self.store.held_by(&ns(), "ann").await.unwrap();
        said("held_by");
        self.store.limits(&ns()).await.unwrap();
        said("limits");
    }

    /// Items that are due before all others.
    async fn due(&mut self, said: Said<'_>) {
        let slots = (0..DUE).map(|_| put("slot", &format!("real-{}", self.number()), json!({}), Some(1))).collect();
        let first = self.number();
        let Command::Documents(mut commit) = documents(first, slots) else { unreachable!() };
        commit.command = command_id((1 << 41) + first);
        let message = |n: u128| Message {
            to: run_id((1 << 42) + (first << 8) + n),
            id: "m".to_owned(),
            body: MessageBody::Input(Box::new(Input::Continue)),
        };
        commit.messages = (0..2 * DUE as u128).map(message).collect();
        self.commit(Command::Documents(commit)).await;
        said("commit documents and messages");
        for what in [Due::Timers, Due::Messages, Due::Leases, Due::Documents] {
            for skip in [Vec::new(), vec![Namespace::new("other")]] {
                let limit = if what == Due::Documents { DUE / 2 } else { DUE };
                self.store.due(what, &skip, limit).await.unwrap();
                said(&format!("due {what:?}"));
            }
        }
    }

    async fn reads(&mut self, run: RunId, said: Said<'_>) {
        let version = self.store.summary(run).await.unwrap().unwrap().version;
        said("summary");
        for since in [None, Some(version), Some(eddyline_machine::Version(1))] {
            self.store.load(run, since).await.unwrap();
            said("load");
        }
        self.store.values(run, &[ValueId(0), ValueId(1)]).await.unwrap();
        said("values");
        self.store.pending(run).await.unwrap();
        said("pending");
        for after in [0, 2] {
            self.store.records(run, after, 100).await.unwrap();
            said("records");
        }
        self.store.logs(run, "a", 0, 100).await.unwrap();
        said("logs");
    }

    async fn runs(&mut self, run: RunId, said: Said<'_>) {
        let now = self.store.now().await.unwrap();
        said("now");
        let summary = self.store.summary(run).await.unwrap().unwrap();
        said("summary");
        let any = RunFilter::default;
        let ended = vec![Status::Completed, Status::Failed];
        let filters = [
            ("all", any()),
            ("of a flow", RunFilter { flow: Some("line".to_owned()), ..any() }),
            ("of a status", RunFilter { status: vec![Status::Running], ..any() }),
            ("of an external id", RunFilter { external_id: summary.header.external_id.clone(), ..any() }),
            ("of a root", RunFilter { root: Some(run), ..any() }),
            ("retries", RunFilter { retry_of: Some(run), ..any() }),
            ("of a tag", RunFilter { tags: vec![summary.header.tags[0].clone()], ..any() }),
            ("to trim", RunFilter { ended_before: Some(1), trimmed: Some(false), ..any() }),
            ("to delete", RunFilter { ended_before: Some(now), trimmed: Some(true), ..any() }),
            ("of today", RunFilter { since: Some(now + 1_000_000), ..any() }),
            ("until then", RunFilter { until: Some(1), ..any() }),
            ("ended of a flow", RunFilter { flow: Some("none".to_owned()), status: ended, ..any() }),
        ];
        let page = Page { after: None, limit: 5 };
        for (name, filter) in &filters {
            self.store.runs(Some(&ns()), filter, page).await.unwrap();
            said(&format!("runs {name}"));
        }
        let going = RunFilter { status: vec![Status::Pending], ..any() };
        self.store.runs(None, &going, page).await.unwrap();
        said("runs that go on, of all namespaces");
    }

    async fn items(&mut self, run: RunId, said: Said<'_>) {
        let page = Page { after: None, limit: 5 };
        let event = Some(("paid".to_owned(), Some("\"of nobody\"".to_owned())));
        for filter in [
            GateFilter { run: Some(run), ..GateFilter::default() },
            GateFilter { token: Some("of nobody".to_owned()), ..GateFilter::default() },
            GateFilter { event, ..GateFilter::default() },
        ] {
            self.store.gates(Some(&ns()), &filter, page).await.unwrap();
            said("gates");
        }
        let of = |kind: &str| DocumentFilter { kind: kind.to_owned(), ..DocumentFilter::default() };
        let other = Namespace::new("few");
        for (of_ns, filter) in [
            (Some(&ns()), DocumentFilter { id: Some("real-x".to_owned()), ..of("worker") }),
            (Some(&ns()), DocumentFilter { prefix: Some("real-".to_owned()), ..of("worker") }),
            (Some(&other), of("worker")),
            (
                None,
                DocumentFilter { after: Some("99999999".to_owned()), after_ns: Some(other.clone()), ..of("worker") },
            ),
            (None, of("queue")),
        ] {
            self.store.documents(of_ns, &filter, 5).await.unwrap();
            said(&format!("documents {filter:?} of {of_ns:?}"));
        }
    }

    async fn feeds(&mut self, said: Said<'_>) {
        let now = self.store.now().await.unwrap();
        let (number, payload) = (self.number(), Data::from(json!(1)));
        let event = |n: u128| NewEvent {
            id: format!("event-{number}-{n}"),
            name: "paid".to_owned(),
            key: Some(format!("\"key of {number}\"")),
            payload: payload.clone(),
        };
        let Command::Documents(mut commit) = documents((1 << 43) + number, Vec::new()) else { unreachable!() };
        commit.events = (0..5).map(event).collect();
        self.commit(Command::Documents(commit)).await;
        said("commit events");
        let event = self.store.event(&ns(), &format!("event-{number}-0")).await.unwrap().unwrap();
        said("event");
        let (name, key) = (Some("paid".to_owned()), Some(format!("\"key of {number}\"")));
        let (last, first) = (Some(event.position - 1), None);
        let events = |name: &Option<String>, key: &Option<String>, since| Feed::Events {
            name: name.clone(),
            key: key.clone(),
            since,
        };
        for (after, feed) in [
            (last, Feed::Runs { flow: None }),
            (last, Feed::Runs { flow: Some("line".to_owned()) }),
            (last, events(&None, &None, None)),
            (last, events(&name, &None, None)),
            (first, events(&name, &key, None)),
            (first, events(&name, &key, Some(now))),
            (first, events(&name, &None, Some(now))),
            (first, events(&None, &None, Some(now))),
        ] {
            self.store.feed(&ns(), &feed, Page { after, limit: 20 }).await.unwrap();
            said(&format!("feed {feed:?} after {after:?}"));
        }
    }

    async fn presence(&mut self, said: Said<'_>) {
        let info = InstanceInfo { name: "one".to_owned(), ..InstanceInfo::default() };
        self.store.check_in(InstanceId::default(), &info, 1).await.unwrap();
        said("check_in");
        self.store.health().await.unwrap();
        said("health");
        self.store.deletion_waits().await.unwrap();
        said("deletion_waits");
        drop(self.store.turn(run_id(1)).await.unwrap());
        said("turn");
    }

    async fn trims(&mut self, run: RunId, said: Said<'_>) {
        let cancel = Input::Cancel { by: "ann".to_owned(), reason: None };
        let commit = self.decider.decide(&self.store, run, None, &[cancel]).await;
        said("decide");
        self.commit(Command::Run(commit)).await;
        said("commit a cancel");
        for what in [Trim::Timeline(run), Trim::Run(run), Trim::Traces { before: 1 }] {
            self.store.trim(&what).await.unwrap();
            said(&format!("trim {what:?}"));
        }
        let events = [Trim::Events { ns: ns(), before: 1 }, Trim::Event { ns: ns(), id: "of nobody".to_owned() }];
        for what in events {
            self.store.trim(&what).await.unwrap();
            said(&format!("trim {what:?}"));
        }
    }
}
