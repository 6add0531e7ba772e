//! Due items are read, then held: an item consumed between the two must leave no hold behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use eddyline_machine::*;
use eddyline_store::Due;
use eddyline_store::*;
use serde_json::json;
use story::*;

/// A store that can be stopped between reading due items and handing them out.
struct Halting {
    store: Arc<Embedded>,
    clock: Arc<ManualClock>,
    armed: Arc<AtomicBool>,
    has_read: Mutex<mpsc::Receiver<()>>,
    resume: mpsc::Sender<()>,
    _dir: tempfile::TempDir,
}

impl Halting {
    fn open() -> Halting {
        let dir = tempfile::tempdir().unwrap();
        let (clock, armed) = (ManualClock::at(START), Arc::new(AtomicBool::new(false)));
        let (say, has_read) = mpsc::channel();
        let (resume, wait) = mpsc::channel();
        let (wait, asked) = (Mutex::new(wait), armed.clone());
        let hook: Hook = Arc::new(move || {
            if asked.swap(false, Ordering::SeqCst) {
                say.send(()).unwrap();
                wait.lock().unwrap().recv().unwrap();
            }
        });
        let options = Options { clock: clock.clone(), after_due_read: Some(hook), ..Options::default() };
        let store = Arc::new(Embedded::open(dir.path(), options).unwrap());
        Halting { store, clock, armed, has_read: Mutex::new(has_read), resume, _dir: dir }
    }

    /// Asks for due items; `commands` are committed after they were read and before they are handed out.
    async fn due_while(&self, what: Due, commands: Vec<Command>) -> DueBatch {
        self.armed.store(true, Ordering::SeqCst);
        let store = self.store.clone();
        let asking = tokio::spawn(async move { store.due(what, &[], 100).await.unwrap() });
        tokio::task::block_in_place(|| self.has_read.lock().unwrap().recv().unwrap());
        for outcome in self.store.commit(commands, Vec::new()).await.unwrap().commands {
            outcome.unwrap();
        }
        self.resume.send(()).unwrap();
        asking.await.unwrap()
    }

    async fn commit(&self, command: Command) {
        self.store.commit(vec![command], Vec::new()).await.unwrap().commands.remove(0).unwrap();
    }
}

/// A command that sends messages to the first run and consumes others.
fn messages(n: u128, sent: &[&str], consumed: &[&str]) -> Command {
    let message = |id: &&str| Message {
        to: run_id(1),
        id: (*id).to_owned(),
        body: MessageBody::Input(Box::new(Input::Continue)),
    };
    Command::Documents(DocumentCommit {
        ns: ns(),
        command: command_id(n),
        documents: Vec::new(),
        messages: sent.iter().map(message).collect(),
        events: Vec::new(),
        drops: consumed.iter().map(|id| (run_id(1), (*id).to_owned())).collect(),
    })
}

fn ids(batch: &DueBatch) -> Vec<String> {
    let ids = batch.items.iter().flat_map(|item| match item {
        DueItem::Messages { messages, .. } => messages.iter().map(|message| message.id.clone()).collect(),
        DueItem::Timer { run, .. } => vec![run.to_string()],
        DueItem::Document(document) => vec![document.key.id.clone()],
        DueItem::Lease { .. } => Vec::new(),
    });
    ids.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_consumed_while_it_is_being_handed_out_keeps_no_later_one_waiting() {
    let t = Halting::open();
    t.commit(messages(100, &["a"], &[])).await;
    let batch = t.due_while(Due::Messages, vec![messages(101, &["b"], &["a"])]).await;
    assert_eq!(ids(&batch), Vec::<String>::new(), "it was consumed");
    assert_eq!(batch.next_in, Some(0), "there may be more messages to the same run");
    assert_eq!(ids(&t.store.due(Due::Messages, &[], 100).await.unwrap()), ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_which_some_are_consumed_meanwhile_are_released_by_the_last_of_the_others() {
    let t = Halting::open();
    t.commit(messages(100, &["a", "b", "c"], &[])).await;
    let batch = t.due_while(Due::Messages, vec![messages(101, &[], &["a", "c"])]).await;
    assert_eq!(ids(&batch), ["b"]);
    t.commit(messages(102, &["d"], &["b"])).await;
    assert_eq!(ids(&t.store.due(Due::Messages, &[], 100).await.unwrap()), ["d"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timer_and_a_document_used_up_while_they_are_handed_out_are_not_handed_out_and_not_held() {
    let t = Halting::open();
    let mut decider = Decider::new();
    let start = decider.start(&*t.store, 1, "gated", json!(null)).await;
    t.commit(Command::Run(start)).await;
    t.clock.advance(2_000);
    let timer = t.store.pending(run_id(1)).await.unwrap().timers.iter().map(|timer| timer.key).min();
    let fire = decider.decide(&*t.store, run_id(1), None, &[Input::Cancel { by: "x".into(), reason: None }]).await;
    let batch = t.due_while(Due::Timers, vec![Command::Run(fire)]).await;
    assert!(timer.is_some());
    assert_eq!(ids(&batch), Vec::<String>::new(), "the run was cancelled, and its timers with it");
    assert!(batch.next_in.is_none_or(|next| next > HOLD_MS), "{:?}: nothing is held", batch.next_in);

    let wall = t.clock.wall();
    t.commit(documents(200, vec![put("slot", "a", json!(1), Some(wall))])).await;
    let moved = documents(201, vec![put("slot", "a", json!(2), Some(wall))]);
    let batch = t.due_while(Due::Documents, vec![moved]).await;
    assert_eq!(ids(&batch), Vec::<String>::new(), "that revision no longer exists");
    assert_eq!(ids(&t.store.due(Due::Documents, &[], 100).await.unwrap()), ["a"], "the next one is due");
}
