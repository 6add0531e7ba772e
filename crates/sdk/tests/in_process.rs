//! A worker and an engine in one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eddyline::{Error, StepCtx, StepError, Worker};
use eddyline_engine::{Config, Engine, RunResult, StartRequest};
use eddyline_machine::{RunId, Status};
use eddyline_store::{Memory, Namespace};
use serde_json::{Value, json};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;

/// Longer than anything here takes; only reached if something hangs.
const LONG: Duration = Duration::from_secs(30);

struct Rig {
    engine: Engine,
    stop: oneshot::Sender<()>,
    worker: JoinHandle<Result<(), Error>>,
}

impl Rig {
    async fn new(flow: &str, config: Config, staff: impl FnOnce(Worker) -> Worker) -> Rig {
        let engine = Engine::start(Arc::new(Memory::new()), config);
        engine.register(&Namespace::default(), None, flow).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let worker = tokio::spawn(staff(Worker::in_process(engine.clone())).run_until(stopped));
        Rig { engine, stop, worker }
    }

    async fn start(&self, flow: &str, input: Value) -> RunId {
        let request = StartRequest { flow: flow.to_owned(), input, ..StartRequest::default() };
        self.engine.start_run(&Namespace::default(), request).await.unwrap().run
    }

    async fn result(&self, run: RunId) -> RunResult {
        self.engine.result(&Namespace::default(), run, LONG).await.unwrap().expect("the run ends")
    }

    async fn kinds(&self, run: RunId) -> Vec<String> {
        let records = self.engine.records(&Namespace::default(), run, 0, 1_000).await.unwrap();
        records.iter().map(|record| json!(record.record.entry)["kind"].as_str().unwrap().to_owned()).collect()
    }

    async fn end(self) {
        self.stop.send(()).unwrap();
        tokio::time::timeout(LONG, self.worker).await.expect("the worker drains").unwrap().unwrap();
        self.engine.shutdown().await;
    }
}

#[tokio::test]
async fn a_diamond_runs_with_typed_inputs_and_events() {
    #[derive(serde::Deserialize)]
    struct Order {
        id: u64,
    }

    let flow = "
name: diamond
steps:
  load:  {emits: [loaded]}
  left:  {subscribes: [loaded]}
  right: {after: [load]}
  join:  {after: [left, right]}
output: '${steps.join.output}'
";
    let rig = Rig::new(flow, Config::default(), |worker| {
        worker
            .handler("load", |ctx: StepCtx, order: Order| async move {
                ctx.log(format!("loading {}", order.id));
                ctx.emit("loaded", json!({"n": order.id}))?;
                Ok::<_, StepError>(json!({"total": 12}))
            })
            .handler("left", |ctx: StepCtx, input: Value| async move {
                assert_eq!(ctx.run_input::<Order>()?.id, 7);
                Ok::<_, StepError>(input["loaded"]["n"].clone())
            })
            .handler(
                "right",
                |_: StepCtx, input: Value| async move { Ok::<_, StepError>(input["load"]["total"].clone()) },
            )
            .handler("join", |ctx: StepCtx, input: Value| async move {
                ctx.progress(1.0, Some(1.0), Some("joined"));
                assert_eq!((ctx.step(), ctx.attempt(), ctx.flow()), ("join", 1, "diamond"));
                Ok::<_, StepError>(input)
            })
    })
    .await;
    let run = rig.start("diamond", json!({"id": 7})).await;
    let result = rig.result(run).await;
    assert_eq!(result.output, Some(json!({"left": 7, "right": 12})), "{:?}", result.error);
    let kinds = rig.kinds(run).await;
    for kind in ["runner.log", "step.progress", "emit"] {
        assert_eq!(kinds.iter().filter(|seen| *seen == kind).count(), 1, "{kind} in {kinds:?}");
    }
    rig.end().await;
}

#[tokio::test]
async fn what_a_handler_gets_wrong_ends_the_attempt_and_not_the_worker() {
    let flow = "
name: trouble
steps:
  panics:  {retry: {attempts: 2, initial: 1ms}}
  fails:   {after: ['failed:panics'], retry: {attempts: 3, initial: 1ms}}
  misfits: {after: ['failed:fails'], run: misfits}
  leaks:   {after: ['failed:misfits'], run: leaks}
";
    let tries = Arc::new(AtomicUsize::new(0));
    let counted = tries.clone();
    let answers = Arc::new(Mutex::new(Vec::new()));
    let answered = answers.clone();
    let rig = Rig::new(flow, Config::default(), |worker| {
        worker
            .on_answer(move |task, report, answer| {
                let failed = json!(report)["error"]["kind"].clone();
                answered.lock().unwrap().push(json!([task.step, task.attempt, failed, answer.outcome]));
            })
            .handler("panics", |_: StepCtx, _: Value| async move {
                if true {
                    panic!("out of {}", "cheese");
                }
                Ok::<_, StepError>(())
            })
            .handler("fails", move |ctx: StepCtx, input: Value| {
                let counted = counted.clone();
                async move {
                    counted.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(input["failed:panics"]["kind"], "Panic");
                    assert_eq!(input["failed:panics"]["message"], "out of cheese");
                    ctx.log("about to fail");
                    Err::<(), _>(StepError::permanent("no use").kind("Hopeless"))
                }
            })
            .handler("misfits", |_: StepCtx, _: u64| async move { Ok::<_, StepError>(()) })
            .handler("leaks", |ctx: StepCtx, input: Value| async move {
                assert_eq!(input["failed:misfits"]["kind"], "BadInput");
                ctx.emit("never declared", 1)?;
                Ok::<_, StepError>(())
            })
    })
    .await;
    let run = rig.start("trouble", json!({})).await;
    let result = rig.result(run).await;
    let error = result.error.unwrap();
    let kinds: Vec<&str> = error.also.iter().map(|failure| failure.kind.as_str()).collect();
    assert_eq!((error.kind.as_str(), kinds), ("Panic", vec!["Hopeless", "BadInput", "BadReport"]));
    assert!(error.also[2].message.contains("never declared"), "{:?}", error.also[2]);
    assert_eq!(tries.load(Ordering::SeqCst), 1, "a permanent failure is not retried");
    rig.end().await;
    let told = [("panics", 1, "Panic"), ("panics", 2, "Panic"), ("fails", 1, "Hopeless"), ("misfits", 1, "BadInput")];
    let told = told.into_iter().chain([("leaks", 1, "BadReport")]);
    let told: Vec<Value> = told.map(|(step, attempt, kind)| json!([step, attempt, kind, "applied"])).collect();
    assert_eq!(*answers.lock().unwrap(), told, "each task once, when it is done");
}

#[tokio::test]
async fn heartbeats_keep_a_task_that_takes_longer_than_its_lease() {
    let config = Config { lease_ms: 300, ..Config::default() };
    let rig = Rig::new("{name: slow, steps: {nap: {}}, output: '${steps.nap.output}'}", config, |worker| {
        worker.handler("nap", |ctx: StepCtx, (): ()| async move {
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            Ok::<_, StepError>(ctx.attempt())
        })
    })
    .await;
    let run = rig.start("slow", json!(null)).await;
    assert_eq!(rig.result(run).await.output, Some(json!(1)));
    rig.end().await;
}

#[tokio::test]
async fn a_cancelled_run_cancels_its_handler() {
    let (begun, cancelled) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, cancel) = (begun.clone(), cancelled.clone());
    let config = Config { lease_ms: 300, ..Config::default() };
    let rig = Rig::new("{name: long, steps: {wait: {}}}", config, |worker| {
        worker.handler("wait", move |ctx: StepCtx, (): ()| {
            let (begin, cancel) = (begin.clone(), cancel.clone());
            async move {
                begin.notify_one();
                ctx.cancelled().await;
                assert!(ctx.is_cancelled());
                cancel.notify_one();
                Ok::<_, StepError>(())
            }
        })
    })
    .await;
    let run = rig.start("long", json!(null)).await;
    begun.notified().await;
    rig.engine.cancel(&Namespace::default(), run, "test", None).await.unwrap();
    tokio::time::timeout(LONG, cancelled.notified()).await.expect("the handler is cancelled");
    assert_eq!(rig.result(run).await.status, Status::Cancelled);
    rig.end().await;
}

#[tokio::test]
async fn what_is_emitted_at_once_stays_and_what_is_deferred_costs_no_attempt() {
    let flow = "
name: now
steps:
  first: {emits: [seen], retry: {attempts: 2, initial: 1ms}}
  after: {subscribes: [seen]}
output: [\"${steps.first.output}\", \"${steps.after.output}\"]
";
    let deferred = Arc::new(AtomicUsize::new(0));
    let rig = Rig::new(flow, Config::default(), |worker| {
        worker
            .handler("first", |ctx: StepCtx, (): ()| async move {
                ctx.emit_now("seen", json!({"attempt": ctx.attempt()})).await?;
                if ctx.attempt() == 1 { Err(StepError::new("once more")) } else { Ok(ctx.attempt()) }
            })
            .handler("after", move |ctx: StepCtx, input: Value| {
                let deferred = deferred.clone();
                async move {
                    if deferred.fetch_add(1, Ordering::SeqCst) == 0 {
                        return Err(StepError::defer(Duration::from_millis(5), None));
                    }
                    Ok(json!([input["seen"]["attempt"], ctx.attempt()]))
                }
            })
    })
    .await;
    let run = rig.start("now", json!(null)).await;
    let result = rig.result(run).await;
    assert_eq!(result.output, Some(json!([2, [1, 1]])), "{:?}", result.error);
    rig.end().await;
}

#[tokio::test]
async fn an_engine_that_stops_ends_its_worker() {
    let engine = Engine::start(Arc::new(Memory::new()), Config::default());
    let worker = Worker::in_process(engine.clone()).handler("x", |_: StepCtx, (): ()| async { Ok::<_, StepError>(()) });
    let worker = tokio::spawn(worker.run_until(std::future::pending::<()>()));
    engine.shutdown().await;
    tokio::time::timeout(LONG, worker).await.expect("it ends").unwrap().unwrap();
}
