//! A worker against a server that breaks connections and delays or changes responses.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fake;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use eddyline::protocol::{Op, Report};
use eddyline::{Error, StepCtx, StepError, Worker};
use fake::{Fake, LONG, State};
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinHandle;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Socket,
    Http,
}

const WAYS: [Way; 2] = [Way::Socket, Way::Http];

struct AtWork {
    stop: oneshot::Sender<()>,
    worker: JoinHandle<Result<(), Error>>,
}

fn put_to_work(way: Way, fake: &Fake, staff: impl FnOnce(Worker) -> Worker) -> AtWork {
    let worker = Worker::connect(&fake.url);
    let worker = staff(if way == Way::Http { worker.http_only() } else { worker });
    let (stop, stopped) = oneshot::channel();
    AtWork { stop, worker: tokio::spawn(worker.run_until(stopped)) }
}

impl AtWork {
    async fn stop(self, fake: &Fake) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(LONG, self.worker).await.expect("the worker drains").unwrap().unwrap();
        assert!(fake.set(|state| state.left), "it unregisters");
    }
}

fn double(worker: Worker) -> Worker {
    worker.handler("double", |_: StepCtx, n: u64| async move { Ok::<_, StepError>(n * 2) })
}

fn outputs(state: &State) -> Vec<Value> {
    let output = |report: &Report| match &report.op {
        Op::Complete { output, .. } => Some(output.clone()),
        _ => None,
    };
    state.effects.iter().filter_map(output).collect()
}

fn completed(count: usize) -> impl FnMut(&State) -> Option<()> {
    move |state| (outputs(state).len() == count).then_some(())
}

#[tokio::test]
async fn no_more_tasks_are_asked_for_than_there_is_room() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.offer("double", (0..40).map(|n| json!(n)));
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (at_once, peak) = (now.clone(), most.clone());
        let worker = put_to_work(way, &fake, |worker| {
            worker.max_concurrent(4).handler("double", move |_: StepCtx, n: u64| {
                let (at_once, peak) = (at_once.clone(), peak.clone());
                async move {
                    peak.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    at_once.fetch_sub(1, Ordering::SeqCst);
                    Ok::<_, StepError>(n * 2)
                }
            })
        });
        fake.until("40 results", completed(40)).await;
        let mut seen: Vec<u64> = fake.set(|state| outputs(state)).iter().map(|n| n.as_u64().unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..40).map(|n| n * 2).collect::<Vec<_>>(), "{way:?}");
        assert_eq!(fake.set(|state| state.most_promised), 4, "{way:?}");
        assert!(most.load(Ordering::SeqCst) <= 4);
        worker.stop(&fake).await;
    }
}

#[tokio::test]
async fn a_report_whose_answer_was_lost_is_sent_again_under_its_number_and_counts_once() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.set(|state| state.cuts.extend(["report", "report"]));
        fake.offer("talk", [json!(null)]);
        let worker = put_to_work(way, &fake, |worker| {
            worker.handler("talk", |ctx: StepCtx, (): ()| async move {
                ctx.log("hello");
                ctx.emit_now("seen", 1).await?;
                ctx.warn("done");
                Ok::<_, StepError>("said")
            })
        });
        fake.until("the result", completed(1)).await;
        fake.until("the repeat", |state| (state.reports.len() > state.effects.len()).then_some(())).await;
        worker.stop(&fake).await;
        let (effects, reports) = fake.set(|state| (state.effects.clone(), state.reports.clone()));
        let numbers: Vec<u32> = effects.iter().map(|report| report.seq.unwrap()).collect();
        assert_eq!(numbers, [1, 2, 3], "{way:?}: a log, an event, the result: {effects:?}");
        assert!(matches!(&effects[1].op, Op::Emit(emit) if emit.event == "seen"));
        assert!(matches!(&effects[2].op, Op::Complete { logs, .. } if logs[0].msg == "done"));
        for report in &reports {
            assert!(effects.contains(report), "{way:?}: a repeated report is the same: {report:?}");
        }
        if way == Way::Socket {
            let named = fake.set(|state| state.hellos.iter().map(|(_, tasks)| tasks.clone()).collect::<Vec<_>>());
            assert_eq!(named[..2], [vec![], vec!["talk-0".to_owned()]], "a new connection names what it has");
        }
    }
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_is_repeated_under_its_id() {
    let fake = Fake::new().await;
    fake.set(|state| state.cuts.push_back("claim"));
    fake.offer("double", [json!(4)]);
    let worker = put_to_work(Way::Http, &fake, double);
    fake.until("the result", completed(1)).await;
    let claims = fake.set(|state| state.claims.clone());
    assert_eq!(claims[0], claims[1], "{claims:?}");
    assert_eq!(fake.set(|state| outputs(state)), [json!(8)]);
    worker.stop(&fake).await;
}

#[tokio::test]
async fn where_there_is_no_socket_plain_http_does() {
    let fake = Fake::new().await;
    fake.set(|state| state.no_socket = true);
    fake.offer("double", [json!(1), json!(2)]);
    let worker = put_to_work(Way::Socket, &fake, double);
    fake.until("the results", completed(2)).await;
    assert_eq!(fake.set(|state| state.registered), 1);
    worker.stop(&fake).await;
}

#[tokio::test]
async fn a_handler_does_not_notice_that_the_connection_broke() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.set(|state| {
            state.lease_ms = 300;
            state.cuts.push_back("beat");
        });
        fake.offer("wait", [json!(null)]);
        let go_on = Arc::new(Notify::new());
        let gone_on = go_on.clone();
        let worker = put_to_work(way, &fake, |worker| {
            worker.handler("wait", move |_: StepCtx, (): ()| {
                let gone_on = gone_on.clone();
                async move {
                    gone_on.notified().await;
                    Ok::<_, StepError>("still here")
                }
            })
        });
        fake.until("a second connection", |state| (state.hellos.len() >= 2).then_some(())).await;
        let listed = |state: &State| state.beats.iter().any(|beat| beat.tasks == ["wait-0"]).then_some(());
        fake.until("a heartbeat that lists the task", listed).await;
        go_on.notify_one();
        fake.until("the result", completed(1)).await;
        worker.stop(&fake).await;
    }
}

#[tokio::test]
async fn a_server_that_is_silent_is_given_up_before_leases_end() {
    let fake = Fake::new().await;
    fake.set(|state| {
        state.lease_ms = 3_000;
        state.silent = true;
    });
    let since = tokio::time::Instant::now();
    let worker = put_to_work(Way::Socket, &fake, double);
    fake.until("a second connection", |state| (state.hellos.len() >= 2).then_some(())).await;
    assert!(since.elapsed() < Duration::from_millis(3_000), "{:?}", since.elapsed());
    fake.set(|state| state.silent = false);
    worker.stop(&fake).await;
}

#[tokio::test]
async fn a_heartbeat_that_hangs_is_given_up_while_others_on_the_line_are_answered() {
    let fake = Fake::new().await;
    fake.set(|state| {
        state.lease_ms = 3_000;
        state.hold_beats = true;
    });
    let worker = put_to_work(Way::Http, &fake, double);
    let (since, mut done) = (tokio::time::Instant::now(), 0);
    while fake.set(|state| state.registered) < 2 {
        done += 1;
        fake.offer("double", [json!(done)]);
        fake.until("a result", completed(done)).await;
        assert!(since.elapsed() < Duration::from_millis(3_000), "a lease has expired");
    }
    fake.set(|state| state.hold_beats = false);
    worker.stop(&fake).await;
}

/// Nested lists.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!(1), |inner, _| json!([inner]))
}

#[tokio::test]
async fn what_no_server_takes_is_not_sent_and_fails_the_step() {
    let fake = Fake::new().await;
    fake.offer("nest", [json!(64), json!(65), json!(100)]);
    fake.offer("emit", [json!(65)]);
    let worker = put_to_work(Way::Socket, &fake, |worker| {
        let nest = |_: StepCtx, depth: usize| async move { Ok::<_, StepError>(nested(depth)) };
        let emit = |ctx: StepCtx, depth: usize| async move {
            ctx.log_as("info", "deep", Some(nested(depth)));
            ctx.emit("deep", nested(depth))
        };
        worker.handler("nest", nest).handler("emit", emit)
    });
    let all = |state: &State| {
        let ended = |report: &&Report| matches!(report.op, Op::Complete { .. } | Op::Fail { .. });
        (state.effects.iter().filter(ended).count() == 4).then_some(())
    };
    fake.until("every end", all).await;
    assert_eq!(fake.set(|state| outputs(state)), [nested(64)]);
    let kind = |report: &Report| match &report.op {
        Op::Fail { error, retryable: false, .. } => Some(error.kind.clone()),
        _ => None,
    };
    let kinds: Vec<String> = fake.set(|state| state.effects.iter().filter_map(kind).collect());
    assert_eq!(kinds, ["BadReport"; 3]);
    worker.stop(&fake).await;
}

#[tokio::test]
async fn for_ever_is_long_enough() {
    let fake = Fake::new().await;
    fake.offer("double", [json!(1)]);
    let for_ever = |worker: Worker| worker.drain_timeout(Duration::MAX).cancel_grace(Duration::MAX);
    let worker = put_to_work(Way::Socket, &fake, |worker| double(for_ever(worker)));
    fake.until("the result", completed(1)).await;
    worker.stop(&fake).await;
}

#[tokio::test]
async fn while_a_batch_is_on_its_way_the_next_one_gathers() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.set(|state| state.hold_reports = true);
        fake.offer("wait", (0..31).map(|_| json!(null)));
        let slots = Arc::new(Semaphore::new(0));
        let (waiting, at_work) = (slots.clone(), Arc::new(Semaphore::new(0)));
        let begun = at_work.clone();
        let worker = put_to_work(way, &fake, |worker| {
            worker.max_concurrent(31).handler("wait", move |_: StepCtx, (): ()| {
                let (waiting, begun) = (waiting.clone(), begun.clone());
                async move {
                    begun.add_permits(1);
                    waiting.acquire().await.unwrap().forget();
                    begun.add_permits(1);
                    Ok::<_, StepError>(())
                }
            })
        });
        at_work.acquire_many(31).await.unwrap().forget();
        slots.add_permits(1);
        at_work.acquire().await.unwrap().forget();
        fake.until("the first batch", |state| (state.frames == [1]).then_some(())).await;
        slots.add_permits(30);
        at_work.acquire_many(30).await.unwrap().forget();
        fake.set(|state| state.hold_reports = false);
        fake.until("the results", completed(31)).await;
        assert_eq!(fake.set(|state| state.frames.clone()), [1, 30], "{way:?}");
        worker.stop(&fake).await;
    }
}

#[tokio::test]
async fn a_panic_fails_the_attempt_and_the_worker_goes_on() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.offer("divide", [json!(0), json!(5)]);
        fake.offer("unknown", [json!(null)]);
        let worker = put_to_work(way, &fake, |worker| {
            worker.max_concurrent(1).handler("divide", |_: StepCtx, n: u64| async move {
                assert!(n != 0, "nothing is divided by {n}");
                Ok::<_, StepError>(100 / n)
            })
        });
        let failures = |state: &State| {
            let failure = |report: &Report| match &report.op {
                Op::Fail { error, retryable, .. } => Some((error.kind.clone(), error.message.clone(), *retryable)),
                _ => None,
            };
            state.effects.iter().filter_map(failure).collect::<Vec<_>>()
        };
        fake.until("all three", |state| (state.effects.len() == 3).then_some(())).await;
        let failed = fake.set(|state| failures(state));
        assert_eq!(failed[0], ("Panic".to_owned(), "nothing is divided by 0".to_owned(), true), "{way:?}");
        assert_eq!(failed[1].0, "NoHandler");
        assert_eq!(fake.set(|state| outputs(state)), [json!(20)]);
        worker.stop(&fake).await;
    }
}

#[tokio::test]
async fn a_cancelled_task_tells_its_handler_and_one_that_does_not_heed_it_is_stopped() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.set(|state| state.lease_ms = 300);
        fake.offer("heeds", [json!(null)]);
        fake.offer("deaf", [json!("cancelled"), json!("lost")]);
        let (dropped, begun) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let (drops, begins, more) = (dropped.clone(), begun.clone(), begun.clone());
        let worker = put_to_work(way, &fake, |worker| {
            worker
                .cancel_grace(Duration::from_millis(50))
                .handler("heeds", move |ctx: StepCtx, (): ()| {
                    let begins = begins.clone();
                    async move {
                        begins.add_permits(1);
                        ctx.cancelled().await;
                        Err::<(), _>(StepError::new("stopped by itself").kind("Heeded"))
                    }
                })
                .handler("deaf", move |_: StepCtx, _: String| {
                    let (drops, more) = (drops.clone(), more.clone());
                    async move {
                        let _dropped = OnDrop(drops);
                        more.add_permits(1);
                        std::future::pending::<()>().await;
                        Ok::<_, StepError>(())
                    }
                })
        });
        begun.acquire_many(3).await.unwrap().forget();
        fake.set(|state| {
            state.cancel = vec!["heeds-0".to_owned(), "deaf-1".to_owned()];
            state.lost = vec!["deaf-2".to_owned()];
        });
        let kinds = |state: &State| {
            let mut kinds: Vec<String> = state
                .effects
                .iter()
                .map(|report| match &report.op {
                    Op::Fail { error, .. } => format!("{} {}", report.task_id, error.kind),
                    other => panic!("{other:?}"),
                })
                .collect();
            kinds.sort_unstable();
            kinds
        };
        fake.until("both failures", |state| (state.effects.len() == 2).then_some(())).await;
        assert_eq!(fake.set(|state| kinds(state)), ["deaf-1 Cancelled", "heeds-0 Heeded"], "{way:?}");
        worker.stop(&fake).await;
        assert_eq!(dropped.load(Ordering::SeqCst), 2, "both handlers that ignore cancellation were aborted");
        assert_eq!(fake.set(|state| state.effects.len()), 2, "a lost task that was aborted is not reported");
    }
}

struct OnDrop(Arc<AtomicUsize>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_worker_that_is_to_stop_finishes_what_it_has_and_takes_nothing_new() {
    for way in WAYS {
        for told_by_server in [false, true] {
            let fake = Fake::new().await;
            fake.set(|state| state.lease_ms = 300);
            fake.offer("wait", [json!(null)]);
            let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
            let (begin, gone_on) = (begun.clone(), go_on.clone());
            let worker = put_to_work(way, &fake, |worker| {
                worker.max_concurrent(2).handler("wait", move |_: StepCtx, (): ()| {
                    let (begin, gone_on) = (begin.clone(), gone_on.clone());
                    async move {
                        begin.notify_one();
                        gone_on.notified().await;
                        Ok::<_, StepError>("finished")
                    }
                })
            });
            begun.notified().await;
            let AtWork { stop, worker } = worker;
            if told_by_server {
                fake.set(|state| state.drain = true);
            } else {
                stop.send(()).unwrap();
            }
            fake.until("the drain", |state| state.drained.then_some(())).await;
            fake.offer("wait", [json!(null)]);
            go_on.notify_one();
            tokio::time::timeout(LONG, worker).await.expect("it ends").unwrap().unwrap();
            assert_eq!(fake.set(|state| outputs(state)), [json!("finished")], "{way:?}");
            assert_eq!(fake.set(|state| state.queue.len()), 1, "another worker gets the new task");
            assert!(fake.set(|state| state.left));
        }
    }
}

/// With a handler that signals when it begins and when it is dropped, and never ends.
fn stuck(worker: Worker, begun: &Arc<Notify>, dropped: &Arc<AtomicUsize>) -> Worker {
    let (begun, dropped) = (begun.clone(), dropped.clone());
    worker.handler("stuck", move |_: StepCtx, (): ()| {
        let (begun, dropped) = (begun.clone(), OnDrop(dropped.clone()));
        async move {
            let _dropped = dropped;
            begun.notify_one();
            std::future::pending::<()>().await;
            Ok::<_, StepError>(())
        }
    })
}

#[tokio::test]
async fn what_does_not_finish_in_time_is_let_go() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.offer("stuck", [json!(null)]);
        let (begun, dropped) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let worker =
            put_to_work(way, &fake, |worker| stuck(worker.drain_timeout(Duration::from_millis(100)), &begun, &dropped));
        begun.notified().await;
        worker.stop(&fake).await;
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
        assert!(fake.set(|state| state.effects.is_empty()));
    }
}

#[tokio::test]
async fn a_worker_that_is_not_wanted_is_told_so_at_once() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.set(|state| state.refuse = Some(401));
        let worker = put_to_work(way, &fake, double);
        let error = tokio::time::timeout(LONG, worker.worker).await.expect("it ends").unwrap().unwrap_err();
        assert!(matches!(&error, Error::Api { status: 401, error } if error.message == "no such key"), "{error:?}");
    }
    let none = Worker::connect("http://127.0.0.1:1").run_until(std::future::pending::<()>()).await;
    assert!(matches!(none, Err(Error::Config(problem)) if problem.contains("handler")));
}

#[tokio::test]
async fn a_worker_whose_key_is_revoked_ends_and_says_so() {
    for way in WAYS {
        let fake = Fake::new().await;
        let worker = put_to_work(way, &fake, double);
        fake.offer("double", [json!(3)]);
        fake.until("its report", |state| (!state.effects.is_empty()).then_some(())).await;
        fake.set(|state| {
            state.refuse = Some(401);
            state.cuts.extend(["report", "beat", "claim"]);
        });
        fake.offer("double", [json!(4)]);
        let error = tokio::time::timeout(LONG, worker.worker).await.expect("it ends").unwrap().unwrap_err();
        assert!(matches!(&error, Error::Api { status: 401, .. }), "{error:?}");
    }
}

#[tokio::test]
async fn a_server_that_comes_up_later_is_found() {
    let fake = Fake::new().await;
    let (free, addr) = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        (listener, addr)
    };
    drop(free);
    let worker = Worker::connect(format!("http://{addr}"));
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = tokio::spawn(double(worker).run_until(stopped));
    fake.offer("double", [json!(3)]);
    let late = tokio::net::TcpListener::bind(addr).await.unwrap();
    let to = fake.addr;
    let passing_on = tokio::spawn(async move {
        loop {
            let (mut from, _) = late.accept().await.unwrap();
            let mut to = tokio::net::TcpStream::connect(to).await.unwrap();
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut from, &mut to).await });
        }
    });
    fake.until("the result", completed(1)).await;
    AtWork { stop, worker }.stop(&fake).await;
    passing_on.abort();
}

/// As in a program: with its own runtime.
fn put_to_work_elsewhere(
    way: Way,
    fake: &Fake,
    threads: Option<usize>,
    staff: impl FnOnce(Worker) -> Worker,
) -> std::thread::JoinHandle<()> {
    let worker = Worker::connect(&fake.url);
    let worker = staff(if way == Way::Http { worker.http_only() } else { worker });
    std::thread::spawn(move || match threads {
        Some(threads) => {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
            let runtime = runtime.unwrap();
            let worker = runtime.spawn(worker.run_until(std::future::pending::<()>()));
            runtime.block_on(worker).unwrap().unwrap();
        }
        None => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(worker.run_until(std::future::pending::<()>())).unwrap();
        }
    })
}

#[tokio::test]
async fn handlers_that_block_every_thread_keep_no_heartbeat_back() {
    for (way, threads) in WAYS.into_iter().flat_map(|way| [(way, None), (way, Some(1)), (way, Some(2))]) {
        let fake = Fake::new().await;
        fake.set(|state| state.lease_ms = 300);
        let blocking = threads.unwrap_or(1);
        // Each waits for its own signal, since the one that gets the first keeps the others from getting it.
        let (go_on, blocked): (Vec<_>, Vec<_>) = (0..blocking).map(|_| std::sync::mpsc::channel::<()>()).unzip();
        let blocked: Arc<Vec<_>> = Arc::new(blocked.into_iter().map(std::sync::Mutex::new).collect());
        let worker = put_to_work_elsewhere(way, &fake, threads, |worker| {
            worker.max_concurrent(blocking as u32).handler("block", move |_: StepCtx, me: usize| {
                let blocked = blocked.clone();
                async move {
                    blocked[me].lock().unwrap().recv().unwrap();
                    Ok::<_, StepError>(())
                }
            })
        });
        for round in 1..=3 {
            fake.offer("block", (0..blocking).map(|me| json!(me)));
            let before = fake.set(|state| state.beats.len());
            let beating = |state: &State| {
                let with_all = state.beats[before..].iter().filter(|beat| beat.tasks.len() == blocking);
                (with_all.count() >= 3).then_some(())
            };
            fake.until(&format!("heartbeats over {way:?} from {threads:?} threads in round {round}"), beating).await;
            go_on.iter().for_each(|go_on| go_on.send(()).unwrap());
            fake.until("the tasks to be done", completed(round * blocking)).await;
        }
        fake.set(|state| state.drain = true);
        fake.until("the worker to go", |state| state.left.then_some(())).await;
        worker.join().unwrap();
    }
}

#[tokio::test]
async fn a_worker_whose_runtime_is_blocked_from_the_start_takes_tasks_and_keeps_them() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.set(|state| state.lease_ms = 300);
        fake.offer("double", [json!(1), json!(2)]);
        let (go_on, blocked) = std::sync::mpsc::channel::<()>();
        let worker = double(Worker::connect(&fake.url));
        let worker = if way == Way::Http { worker.http_only() } else { worker };
        let process = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let working = tokio::spawn(worker.run_until(std::future::pending::<()>()));
                tokio::spawn(async move { blocked.recv().unwrap() });
                working.await.unwrap().unwrap();
            });
        });
        let holding =
            |state: &State| (state.beats.iter().filter(|beat| beat.tasks.len() == 2).count() >= 5).then_some(());
        fake.until(&format!("heartbeats over {way:?}"), holding).await;
        assert!(fake.set(|state| state.effects.is_empty()), "no handler could run");
        go_on.send(()).unwrap();
        fake.until("the results", completed(2)).await;
        fake.set(|state| state.drain = true);
        fake.until("the worker to go", |state| state.left.then_some(())).await;
        process.join().unwrap();
    }
}

#[tokio::test]
async fn a_handler_that_blocks_is_not_waited_for_beyond_the_drain() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.offer("block", [json!(null)]);
        let (go_on, blocked) = std::sync::mpsc::channel::<()>();
        let (blocked, begun) = (Arc::new(std::sync::Mutex::new(blocked)), Arc::new(Notify::new()));
        let begin = begun.clone();
        let worker = Worker::connect(&fake.url).drain_timeout(Duration::from_millis(100));
        let worker = if way == Way::Http { worker.http_only() } else { worker };
        let worker = worker.handler("block", move |_: StepCtx, (): ()| {
            let (blocked, begin) = (blocked.clone(), begin.clone());
            async move {
                begin.notify_one();
                let _ = blocked.lock().unwrap().recv();
                Ok::<_, StepError>(())
            }
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let worker = runtime.spawn(worker.run_until(stopped));
        tokio::time::timeout(LONG, begun.notified()).await.unwrap();
        stop.send(()).unwrap();
        tokio::time::timeout(LONG, worker).await.expect("it ends").unwrap().unwrap();
        go_on.send(()).expect("the handler still waits");
        runtime.shutdown_background();
    }
}

#[tokio::test]
async fn a_worker_that_is_dropped_lets_go_of_everything() {
    for way in WAYS {
        let fake = Fake::new().await;
        fake.offer("stuck", [json!(null)]);
        let (begun, dropped) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
        let AtWork { worker, stop: _stop } =
            put_to_work(way, &fake, |worker| stuck(worker.max_concurrent(2), &begun, &dropped));
        begun.notified().await;
        worker.abort();
        fake.until("the connections to end", |state| (state.open == 0).then_some(())).await;
        // Handlers are aborted by their runtime, which is this one.
        let stopped = async {
            while dropped.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LONG, stopped).await.expect("the handler is dropped");
        fake.offer("stuck", [json!(null)]);
        assert_eq!(fake.set(|state| (state.queue.len(), state.effects.len())), (1, 0), "{way:?}");
    }
}
