//! The rule of idle points, against a server in a few lines. Time is tokio's, and paused.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eddyline_protocol::Failure;
use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use serde_json::{Value, json};

use super::ToDriver;
use super::fake_server::{Behaviour, Ending, FakeServer};
use crate::code::{CtxError, FlowError, Retry, RunCtx};
use crate::worker::StepError;

type Flow<T> = Result<T, FlowError>;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn patient() -> Behaviour {
    Behaviour { hold: Duration::from_secs(60), ..Behaviour::default() }
}

fn done(value: Value) -> Ending {
    Ending::Completed(value)
}

/// A step that takes a while and counts its bodies.
fn after<T: Clone>(
    wait: u64,
    value: T,
    bodies: &Arc<AtomicUsize>,
) -> impl Future<Output = Result<T, StepError>> + use<T> {
    let bodies = bodies.clone();
    async move {
        bodies.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(ms(wait)).await;
        Ok(value)
    }
}

/// Ends these entries at these times, from now on.
fn later(server: &FakeServer, ends: impl IntoIterator<Item = (u64, &'static str, Value)>) {
    for (at, name, output) in ends {
        let server = server.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ms(at)).await;
            server.end(name, Ok(output));
        });
    }
}

#[tokio::test(start_paused = true)]
async fn a_race_has_the_same_winner_live_and_replayed_and_a_losers_body_never_starts_in_replay() {
    for (body, nap, winner) in [(2, 30, "work"), (40, 3, "nap")] {
        let (server, bodies) = (FakeServer::default(), Arc::<AtomicUsize>::default());
        let counted = bodies.clone();
        let race = move |ctx: RunCtx, (): ()| {
            let bodies = counted.clone();
            async move {
                Flow::Ok(tokio::select! {
                    result = ctx.step("work", || after(body, 1, &bodies)) => { result?; "work" }
                    result = ctx.sleep("nap", ms(nap)) => { result?; "nap" }
                })
            }
        };
        later(&server, [(nap, "nap", Value::Null)]);
        assert_eq!(server.run(race.clone(), Value::Null, patient()).await, done(json!(winner)));
        tokio::time::sleep(ms(100)).await;
        assert_eq!(bodies.swap(0, Ordering::SeqCst), 1);
        for _ in 0..20 {
            assert_eq!(server.run(race.clone(), Value::Null, patient()).await, done(json!(winner)));
        }
        assert_eq!(bodies.load(Ordering::SeqCst), 0, "bodies in replay");
    }
}

#[tokio::test(start_paused = true)]
async fn a_hundred_calls_are_one_frame_and_their_results_arrive_in_the_order_of_their_numbers() {
    let server = FakeServer::default();
    let fan_out = |ctx: RunCtx, (): ()| async move {
        let mut calls: FuturesUnordered<_> =
            (0..100).map(|i| ctx.call::<u32>("score", &i).name(("score", i))).collect();
        let mut order = Vec::new();
        while let Some(score) = calls.next().await {
            order.push(score?);
        }
        Flow::Ok(order)
    };
    let ending = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(5)).await;
        for i in (0..100).rev() {
            ending.end(&format!("score[{i}]"), Ok(json!(i)));
        }
    });
    let order: Vec<u32> = (0..100).rev().collect();
    assert_eq!(server.run(fan_out, Value::Null, patient()).await, done(json!(order)));
    assert_eq!(server.frames()[0].len(), 100, "one frame");
    for page in [usize::MAX, 7] {
        let replayed = server.run(fan_out, Value::Null, Behaviour { page, ..patient() }).await;
        assert_eq!(replayed, done(json!(order)), "with pages of {page}");
    }
}

#[tokio::test(start_paused = true)]
async fn nested_joins_and_races_of_every_kind_replay_as_they_went() {
    let server = FakeServer::default();
    let bodies = Arc::<AtomicUsize>::default();
    let counted = bodies.clone();
    let nested = move |ctx: RunCtx, (): ()| {
        let bodies = counted.clone();
        async move {
            let seen = Mutex::new(Vec::new());
            let note = |what: &str| seen.lock().unwrap().push(what.to_owned());
            let left = async {
                let (a, b) = tokio::join!(
                    async { ctx.step("a", || after(20, 1, &bodies)).await.inspect(|_| note("a")) },
                    async {
                        tokio::select! {
                            slow = ctx.call::<u32>("slow", &()) => { note("slow"); slow }
                            child = ctx.child::<u32>("kid", &()) => { note("kid"); child }
                        }
                    },
                );
                Flow::Ok(a? + b?)
            };
            let right = async {
                let mut sum = 0;
                for round in 0..3 {
                    tokio::select! {
                        biased;
                        _ = ctx.wait_event::<Value>("ping", ()) => { note("ping"); sum += 100; }
                        tick = ctx.step("tick", || after(7, 1, &bodies)) => { note("tick"); sum += tick?; }
                    }
                    note(&format!("round {round}"));
                }
                Flow::Ok(sum)
            };
            let boxed: Vec<std::pin::Pin<Box<dyn Future<Output = Flow<u32>> + Send + '_>>> =
                vec![Box::pin(left), Box::pin(right)];
            let sums = join_all(boxed).await.into_iter().collect::<Flow<Vec<u32>>>()?;
            Flow::Ok(json!([sums, *seen.lock().unwrap()]))
        }
    };
    later(&server, [(9, "ping", json!(1)), (15, "kid", json!(7)), (16, "slow", json!(8)), (30, "ping#2", json!(2))]);
    let live = server.run(nested.clone(), Value::Null, patient()).await;
    let Ending::Completed(value) = &live else { panic!("{live:?}") };
    assert_eq!(value[1].as_array().unwrap().len(), 8, "{value}");
    bodies.store(0, Ordering::SeqCst);
    for _ in 0..20 {
        assert_eq!(server.run(nested.clone(), Value::Null, patient()).await, live);
    }
    assert_eq!(bodies.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_thousand_races_with_both_sides_known_are_won_by_the_lower_number_whatever_uses_up_tokios_budget() {
    let server = FakeServer::default();
    for i in 1..=1_000 {
        let name = |side: &str| if i == 1 { side.to_owned() } else { format!("{side}#{i}") };
        let (first, second) = if i % 3 == 0 { ("b", "a") } else { ("a", "b") };
        server.end(&name(first), Ok(json!(first)));
        server.end(&name(second), Ok(json!(second)));
    }
    let races = |ctx: RunCtx, (): ()| async move {
        let (mut won_by_b, lock) = (0, tokio::sync::Mutex::new(0));
        for _ in 0..1_000 {
            let race = async {
                tokio::select! {
                    a = ctx.call::<String>("a", &()) => a,
                    b = ctx.call::<String>("b", &()) => b,
                }
            };
            let busy = async {
                for _ in 0..130 {
                    *lock.lock().await += 1;
                }
            };
            won_by_b += usize::from(tokio::join!(race, busy).0? == "b");
        }
        Flow::Ok(won_by_b)
    };
    assert_eq!(server.run(races, Value::Null, patient()).await, done(json!(333)));
}

#[tokio::test(start_paused = true)]
async fn pushed_news_does_not_overtake_an_unanswered_report() {
    let server = FakeServer::default();
    let bodies = Arc::<AtomicUsize>::default();
    let race = move |ctx: RunCtx, (): ()| {
        let bodies = bodies.clone();
        async move {
            Flow::Ok(tokio::select! {
                work = ctx.step("work", || after(30, 1, &bodies)) => { work?; "work" }
                nap = ctx.sleep("nap", ms(5_000)) => { nap?; "nap" }
            })
        }
    };
    // The step is recorded at 30 as number 2, its answer is there at 50; the nap ends at 40 as number 3.
    later(&server, [(40, "nap", Value::Null)]);
    let late = Behaviour { late: ms(20), ..patient() };
    assert_eq!(server.run(race.clone(), Value::Null, late).await, done(json!("work")));
    assert_eq!(server.run(race, Value::Null, patient()).await, done(json!("work")));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_wakes_itself_all_the_time_delays_no_delivery() {
    let server = FakeServer::default();
    later(&server, [(10, "nap", Value::Null)]);
    let busy = |ctx: RunCtx, (): ()| async move {
        let spin = || async {
            loop {
                tokio::time::sleep(ms(1)).await;
                for _ in 0..10 {
                    tokio::task::yield_now().await;
                }
            }
            #[allow(unreachable_code)]
            Ok::<(), StepError>(())
        };
        Flow::Ok(tokio::select! {
            _ = ctx.step("busy", spin) => "busy",
            _ = ctx.sleep("nap", ms(10)) => "nap",
        })
    };
    assert_eq!(server.run(busy, Value::Null, patient()).await, done(json!("nap")));
}

#[tokio::test(start_paused = true)]
async fn what_is_dropped_while_the_function_goes_on_is_let_go_and_a_suspend_lets_nothing_go() {
    let server = FakeServer::default();
    let waits = |ctx: RunCtx, (): ()| async move {
        drop(ctx.sleep("never polled", ms(1)));
        tokio::select! {
            biased;
            first = ctx.call::<u32>("fast", &()) => { first?; }
            second = ctx.call::<u32>("slow", &()) => { second?; }
        }
        let done: Value = ctx.wait_event("done", 7).await?;
        Flow::Ok(done)
    };
    later(&server, [(2, "fast", json!(1))]);
    assert_eq!(server.run(waits, Value::Null, Behaviour::default()).await, Ending::Suspended);
    assert_eq!(server.reports(), ["call fast", "call slow", "wait done", "let_go slow", "suspend"]);
    server.end("done", Ok(json!("yes")));
    assert_eq!(server.run(waits, Value::Null, Behaviour::default()).await, done(json!("yes")));
    assert_eq!(server.reports()[5..], ["complete".to_owned()], "nothing is asked for again");
}

#[tokio::test(start_paused = true)]
async fn a_name_is_numbered_when_used_again_and_refused_while_in_flight() {
    let server = FakeServer::default();
    let names = |ctx: RunCtx, (): ()| async move {
        let one = || async { Ok::<_, StepError>(1) };
        assert_eq!((ctx.key("pay"), ctx.scope("eu").key("pay")), ("intent/pay".to_owned(), "intent/eu/pay".to_owned()));
        ctx.step("pay", one).await?;
        assert_eq!(ctx.key("pay"), "intent/pay#2");
        let key = ctx.step_with("pay", |s| async move { Ok::<_, StepError>(s.key().to_owned()) }).await?;
        assert_eq!(key, "intent/pay#2");
        ctx.scope("eu").step(("price", "a/b"), one).await?;
        let (first, second) = tokio::join!(ctx.step("twice", one), ctx.step("twice", one));
        assert_eq!(first?, 1);
        assert_eq!(second, Err(CtxError::NameInFlight { name: "twice".to_owned() }));
        assert!(matches!(ctx.step("undo:pay", one).await, Err(CtxError::BadName { .. })));
        assert_eq!(ctx.uuid("x"), ctx.uuid("x"));
        assert_ne!(ctx.uuid("x"), ctx.scope("eu").uuid("x"));
        Flow::Ok(())
    };
    for _ in 0..2 {
        assert_eq!(server.run(names, Value::Null, patient()).await, done(Value::Null));
    }
    assert_eq!(server.reports()[..4], ["step pay", "step pay#2", "step eu/price[a\\/b]", "step twice"]);
}

#[tokio::test(start_paused = true)]
async fn a_name_recorded_for_something_else_fails_the_run_clearly() {
    let server = FakeServer::default();
    server.end("pay", Ok(Value::Null));
    let changed = |ctx: RunCtx, (): ()| async move { Flow::Ok(ctx.sleep("pay", ms(1)).await?) };
    let Ending::Failed { error, retryable: false } = server.run(changed, Value::Null, patient()).await else {
        panic!("it fails for good")
    };
    assert_eq!(error.kind, "KindChanged");
}

#[tokio::test(start_paused = true)]
async fn a_result_that_the_server_refuses_is_recorded_as_a_failure_before_the_function_sees_it() {
    let server = FakeServer::default();
    let large = |ctx: RunCtx, (): ()| async move {
        let failed = ctx.step("large", || async { Ok::<_, StepError>("x".to_owned()) }).await;
        let refused = ctx.call::<u32>("large", &()).name("call").await;
        Flow::Ok(json!([
            failed.err().and_then(|error| error.failure().map(|failure| failure.kind.clone())),
            matches!(refused, Err(CtxError::Refused { .. })),
        ]))
    };
    let how = Behaviour { invalid: Some("large"), ..patient() };
    let server_for_call = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(50)).await;
        server_for_call.end("call", Err(Failure::new("Late", "x")));
    });
    let live = server.run(large, Value::Null, how).await;
    assert_eq!(live, done(json!(["BadReport", false])));
    assert_eq!(server.run(large, Value::Null, patient()).await, live);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_fails_is_tried_again_in_place_and_after_a_suspend() {
    let server = FakeServer::default();
    let flaky = |ctx: RunCtx, (): ()| async move {
        let value = ctx
            .step_with("flaky", |s| async move {
                match s.attempt() {
                    3 => Ok(s.attempt()),
                    attempt => Err(StepError::new(format!("attempt {attempt}"))),
                }
            })
            .retry(Retry::attempts(3))
            .await?;
        Flow::Ok(value)
    };
    let due = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(5)).await;
        due.due("flaky");
    });
    assert_eq!(server.run(flaky, Value::Null, Behaviour::default()).await, Ending::Suspended);
    assert_eq!(server.entry("flaky").unwrap()["attempt"], 2, "one attempt in place");
    server.due("flaky");
    assert_eq!(server.run(flaky, Value::Null, Behaviour::default()).await, done(json!(3)));
}

#[tokio::test(start_paused = true)]
async fn errors_decide_whether_the_attempt_or_the_run_has_failed() {
    async fn fails(ctx: RunCtx, how: String) -> Flow<()> {
        match how.as_str() {
            "step" => ctx.step("bad", || async { Err::<(), _>(StepError::permanent("no").kind("Bad")) }).await?,
            "panic" => panic!("oh"),
            "body" => {
                ctx.step("bad", || async { if true { panic!("oh in a body") } else { Ok::<(), StepError>(()) } })
                    .await?
            }
            "never" => return Err(FlowError::permanent("never")),
            _ => drop("x".parse::<u8>()?),
        }
        Ok(())
    }
    for (how, attempt, kind, retryable) in [
        ("step", 1, "Bad", false),
        ("panic", 1, "Panic", true),
        ("panic", 3, "Panic", false),
        ("body", 1, "Panic", false),
        ("never", 1, "Error", false),
        ("parse", 2, "ParseIntError", true),
        ("parse", 3, "ParseIntError", false),
    ] {
        let how_it_runs = Behaviour { attempt, ..patient() };
        let ending = FakeServer::default().run(fails, json!(how), how_it_runs).await;
        let Ending::Failed { error, retryable: again } = ending else { panic!("{how}: {ending:?}") };
        assert_eq!((error.kind.as_str(), again), (kind, retryable), "{how}, attempt {attempt}");
    }
}

/// Completes `a` and `b`, loses a race against `late`, and fails.
async fn undoes(ctx: RunCtx, log: Arc<Mutex<Vec<String>>>, fails: bool) -> Flow<u32> {
    let step = |name: &'static str, wait: u64| {
        let log = log.clone();
        ctx.step(name, move || async move {
            tokio::time::sleep(ms(wait)).await;
            Ok::<_, StepError>(name.to_owned())
        })
        .undo(move |output: String| {
            let log = log.clone();
            async move {
                log.lock().unwrap().push(output.clone());
                if output == "bad" { Err(StepError::permanent("cannot undo")) } else { Ok(()) }
            }
        })
    };
    step("a", 1).await?;
    step("bad", 1).await?;
    tokio::select! {
        biased;
        first = step("first", 5) => { first?; }
        late = step("late", 5) => { late?; }
    }
    if fails { Err(FlowError::permanent("boom")) } else { Ok(ctx.wait_event("go", ()).await?) }
}

#[tokio::test(start_paused = true)]
async fn completed_steps_are_undone_the_latest_first_and_a_failed_undo_does_not_stop_the_rest() {
    let (server, log) = (FakeServer::default(), Arc::<Mutex<Vec<String>>>::default());
    let kept = log.clone();
    let flow = move |ctx: RunCtx, (): ()| undoes(ctx, kept.clone(), true);
    let Ending::Failed { error, retryable: false } = server.run(flow, Value::Null, patient()).await else {
        panic!("it fails for good")
    };
    assert_eq!(*log.lock().unwrap(), ["late", "first", "bad", "a"], "the loser of the race too");
    assert_eq!((error.message.as_str(), error.also.len()), ("boom", 1));
    assert!(server.is_unwinding());
}

#[tokio::test(start_paused = true)]
async fn what_the_function_undid_itself_is_not_undone_again() {
    let (server, log) = (FakeServer::default(), Arc::<Mutex<Vec<String>>>::default());
    let kept = log.clone();
    let flow = move |ctx: RunCtx, (): ()| {
        let log = kept.clone();
        async move {
            let step = |name: &'static str| {
                let log = log.clone();
                ctx.step(name, move || async move { Ok::<_, StepError>(name.to_owned()) }).undo(
                    move |output: String| {
                        let log = log.clone();
                        async move {
                            log.lock().unwrap().push(output);
                            Ok::<_, StepError>(())
                        }
                    },
                )
            };
            step("a").await?;
            step("b").await?;
            ctx.undo().await?;
            step("c").await?;
            Flow::<()>::Err(FlowError::permanent("boom"))
        }
    };
    for _ in 0..2 {
        let ending = server.run(flow.clone(), Value::Null, patient()).await;
        assert!(matches!(&ending, Ending::Failed { error, .. } if error.also.is_empty()), "{ending:?}");
        assert_eq!(*log.lock().unwrap(), ["b", "a", "c"]);
    }
    let undone: Vec<String> = server.reports().into_iter().filter(|report| report.starts_with("step undo:")).collect();
    assert_eq!(undone, ["step undo:c", "step undo:b", "step undo:a"], "the server knows of each");
}

#[tokio::test(start_paused = true)]
async fn undoing_survives_a_crash_before_and_after_every_frame() {
    for (at, before) in (1..40).flat_map(|at| [(at, true), (at, false)]) {
        let (server, log) = (FakeServer::default(), Arc::<Mutex<Vec<String>>>::default());
        let kept = log.clone();
        let flow = move |ctx: RunCtx, (): ()| undoes(ctx, kept.clone(), true);
        let dies = if before {
            Behaviour { dies_at: Some(at), ..patient() }
        } else {
            Behaviour { dies_after: Some(at), ..patient() }
        };
        let mut ending = server.run(flow.clone(), Value::Null, dies).await;
        let died = ending == Ending::Died;
        if died {
            ending = server.run(flow, Value::Null, patient()).await;
        }
        assert!(matches!(&ending, Ending::Failed { error, .. } if error.message == "boom"), "{at}: {ending:?}");
        let mut undone = log.lock().unwrap().clone();
        undone.dedup();
        assert_eq!(undone, ["late", "first", "bad", "a"], "crash at frame {at}, before: {before}");
        if !died {
            return;
        }
    }
    panic!("it never ends without a crash");
}

#[tokio::test(start_paused = true)]
async fn a_cancel_undoes_at_once_and_after_a_suspend() {
    let (server, log) = (FakeServer::default(), Arc::<Mutex<Vec<String>>>::default());
    let kept = log.clone();
    let flow = move |ctx: RunCtx, (): ()| undoes(ctx, kept.clone(), false);
    let cancels = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(100)).await;
        cancels.say(ToDriver::Cancelled { unwind: true });
    });
    let ending = server.run(flow.clone(), Value::Null, patient()).await;
    assert!(matches!(&ending, Ending::Failed { error, .. } if error.kind == "Cancelled"), "{ending:?}");
    assert_eq!(*log.lock().unwrap(), ["late", "first", "bad", "a"]);

    let (server, log) = (FakeServer::default(), Arc::<Mutex<Vec<String>>>::default());
    let kept = log.clone();
    let flow = move |ctx: RunCtx, (): ()| undoes(ctx, kept.clone(), false);
    assert_eq!(server.run(flow.clone(), Value::Null, Behaviour::default()).await, Ending::Suspended);
    server.unwind(None);
    let ending = server.run(flow, Value::Null, patient()).await;
    assert!(matches!(&ending, Ending::Failed { error, .. } if error.kind == "Cancelled"), "{ending:?}");
    assert_eq!(*log.lock().unwrap(), ["late", "first", "bad", "a"]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_lets_the_step_in_hand_finish_and_hands_over() {
    let bodies = Arc::<AtomicUsize>::default();
    let counted = bodies.clone();
    let steps = move |ctx: RunCtx, (): ()| {
        let bodies = counted.clone();
        async move {
            for _ in 0..100 {
                ctx.step("work", || after(50, (), &bodies)).await?;
            }
            Flow::Ok("done")
        }
    };
    let server = FakeServer::default();
    let drains = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(75)).await;
        drains.say(ToDriver::Drain);
    });
    let began = tokio::time::Instant::now();
    assert_eq!(server.run(steps.clone(), Value::Null, patient()).await, Ending::Released);
    assert!(began.elapsed() < ms(110), "{:?}", began.elapsed());
    assert_eq!(server.run(steps, Value::Null, patient()).await, done(json!("done")));
    assert_eq!(bodies.load(Ordering::SeqCst), 100, "no step twice");

    let server = FakeServer::default();
    let drains = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(5)).await;
        drains.say(ToDriver::Drain);
    });
    let waits = |ctx: RunCtx, (): ()| async move { Flow::Ok(ctx.wait_event::<Value>("go", ()).await?) };
    assert_eq!(server.run(waits, Value::Null, patient()).await, Ending::Suspended);
}

#[tokio::test(start_paused = true)]
async fn a_drain_does_not_let_what_was_not_started_wait_for_the_rest() {
    let (server, bodies) = (FakeServer::default(), Arc::<AtomicUsize>::default());
    let counted = bodies.clone();
    let flow = move |ctx: RunCtx, (): ()| {
        let bodies = counted.clone();
        async move {
            let work = async {
                ctx.step("first", || after(50, (), &bodies)).await?;
                ctx.step("second", || after(50, (), &bodies)).await
            };
            let (slept, worked) = tokio::join!(ctx.sleep("nap", ms(1_000_000)), work);
            slept?;
            worked?;
            Flow::Ok("done")
        }
    };
    let drains = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(25)).await;
        drains.say(ToDriver::Drain);
    });
    assert_eq!(server.run(flow.clone(), Value::Null, patient()).await, Ending::Released);
    assert_eq!(bodies.load(Ordering::SeqCst), 1);
    later(&server, [(100, "nap", Value::Null)]);
    assert_eq!(server.run(flow, Value::Null, patient()).await, done(json!("done")));
    assert_eq!(bodies.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn lines_are_written_once_and_time_is_that_of_the_last_result() {
    let server = FakeServer::default();
    let flow = |ctx: RunCtx, (): ()| async move {
        ctx.log("begin");
        let started = ctx.now();
        ctx.step("a", || async { Ok::<_, StepError>(()) }).await?;
        ctx.log("after a");
        let passed = ctx.now().duration_since(started).map_err(|_| FlowError::new("time went back"))?;
        let gate = ctx.webhook::<Value>("hook").await?;
        ctx.log("asked");
        ctx.step("mail", || async { Ok::<_, StepError>(()) }).await?;
        ctx.publish("asked", 7, json!({})).await?;
        let answer = gate.await?;
        ctx.log("answered");
        Flow::Ok(json!([passed.as_secs(), answer]))
    };
    assert_eq!(server.run(flow, Value::Null, Behaviour::default()).await, Ending::Suspended);
    assert_eq!(server.run(flow, Value::Null, Behaviour::default()).await, Ending::Suspended);
    server.end("hook", Ok(json!("yes")));
    assert_eq!(server.run(flow, Value::Null, Behaviour::default()).await, done(json!([1, "yes"])));
    assert_eq!(server.lines(), ["begin", "after a", "asked", "answered"]);
    assert_eq!(server.reports().iter().filter(|report| report.starts_with("publish")).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_inbox_keeps_its_wait_between_receives() {
    let server = FakeServer::default();
    let flow = |ctx: RunCtx, (): ()| async move {
        let (mut inbox, mut got) = (ctx.inbox::<u32>("item", "k"), Vec::new());
        while got.len() < 3 {
            tokio::select! {
                item = inbox.receive() => got.push(item?),
                tick = ctx.sleep("tick", ms(10)) => tick?,
            }
        }
        drop(inbox);
        ctx.step("end", || async { Ok::<_, StepError>(()) }).await?;
        Flow::Ok(got)
    };
    later(&server, [(10, "tick", Value::Null), (12, "item", json!(1)), (14, "item#2", json!(2))]);
    later(&server, [(16, "item#3", json!(3))]);
    assert_eq!(server.run(flow, Value::Null, patient()).await, done(json!([1, 2, 3])));
    assert!(!server.reports().contains(&"let_go item".to_owned()), "{:?}", server.reports());
    assert_eq!(server.run(flow, Value::Null, patient()).await, done(json!([1, 2, 3])));
}

#[tokio::test(start_paused = true)]
async fn a_map_runs_a_bounded_number_of_items_and_keeps_their_order() {
    let server = FakeServer::default();
    let most = Arc::<Mutex<(usize, usize)>>::default();
    let counted = most.clone();
    let flow = move |ctx: RunCtx, (): ()| {
        let most = counted.clone();
        async move {
            let body = |i: u64| {
                let most = most.clone();
                async move {
                    {
                        let mut most = most.lock().unwrap();
                        most.0 += 1;
                        most.1 = most.1.max(most.0);
                    }
                    tokio::time::sleep(ms(20 - i)).await;
                    most.lock().unwrap().0 -= 1;
                    if i == 7 { Err(StepError::permanent("seven")) } else { Ok(i * i) }
                }
            };
            let all = ctx.map("sq", 0..7u64, body).limit(3).key(|i| format!("n{i}")).await?;
            let settled = ctx.map("mixed", 5..9u64, body).settled().await?;
            let failed = ctx.map("failing", 5..9u64, body).limit(2).await;
            Flow::Ok(json!([all, settled.iter().map(Result::is_ok).collect::<Vec<_>>(), failed.is_err()]))
        }
    };
    let expected = done(json!([[0, 1, 4, 9, 16, 25, 36], [true, true, false, true], true]));
    assert_eq!(server.run(flow.clone(), Value::Null, patient()).await, expected);
    assert_eq!(server.run(flow, Value::Null, patient()).await, expected);
    assert!(server.entry("sq[n6]").is_some());
    assert_eq!(most.lock().unwrap().1, 4, "the second map has four items");
}

#[tokio::test(start_paused = true)]
async fn a_flow_with_everything_survives_the_death_of_its_worker_at_every_frame() {
    let everything = |ctx: RunCtx, (): ()| async move {
        let value = |n: u32| move || async move { Ok::<_, StepError>(n) };
        let (a, b, called) =
            tokio::join!(ctx.step("a", value(1)), ctx.step("b", value(2)), ctx.call::<u32>("remote", &()));
        ctx.sleep("nap", ms(10)).await?;
        let child = ctx.child::<u32>("kid", &json!({"x": 1})).await?;
        let event = ctx.wait_event::<u32>("go", 7).await?;
        let each = ctx.map("each", 0..5u32, |i| async move { Ok::<_, StepError>(i) }).await?;
        Flow::Ok(a? + b? + called? + child + event + each.into_iter().sum::<u32>())
    };
    let mut deaths = 0;
    for (at, before) in (1..60_usize).flat_map(|at| [(at, true), (at, false)]) {
        let server = FakeServer::default();
        let mut died = false;
        let ending = loop {
            // Counted over all executions.
            let left = at.checked_sub(server.frames().len()).filter(|_| !died);
            let how = if before {
                Behaviour { dies_at: left, ..Behaviour::default() }
            } else {
                Behaviour { dies_after: left, ..Behaviour::default() }
            };
            match server.run(everything, Value::Null, how).await {
                Ending::Died => died = true,
                Ending::Suspended => {}
                ending => break ending,
            }
            // Others do their part.
            for (name, output) in [("remote", json!(10)), ("nap", Value::Null), ("kid", json!(20)), ("go", json!(30))] {
                if server.entry(name).is_some_and(|entry| entry["status"] == "pending") {
                    server.end(name, Ok(output));
                }
            }
        };
        assert_eq!(ending, done(json!(73)), "death at frame {at}, before: {before}");
        deaths += usize::from(died);
    }
    assert!(deaths >= 16, "{deaths}");
}

#[tokio::test(start_paused = true)]
async fn continuing_as_a_new_run_passes_the_state_on() {
    let flow = |ctx: RunCtx, n: u32| async move { ctx.continue_as_new::<()>(&(n + 1)) };
    assert_eq!(FakeServer::default().run(flow, json!(1), patient()).await, Ending::Continued(json!(2)));
}

#[tokio::test(start_paused = true)]
async fn a_suspend_that_can_never_be_ended_fails_the_attempt_instead_of_hanging() {
    let server = FakeServer::default();
    let flow = |ctx: RunCtx, (): ()| async move { Flow::Ok(ctx.call::<u32>("gone", &()).await?) };
    let forgets = server.clone();
    tokio::spawn(async move {
        tokio::time::sleep(ms(5)).await;
        forgets.forget("gone");
    });
    let ending = server.run(flow, Value::Null, Behaviour::default()).await;
    assert!(matches!(&ending, Ending::Failed { error, retryable: true } if error.kind == "Stuck"), "{ending:?}");
}
