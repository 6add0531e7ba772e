//! A run is loaded as it was written, and values belong to one run.

use eddyline_machine::run::Header;
use eddyline_machine::{Data, Input, OpenedBy, Run, Start, Status, ValueId, Version};
use serde_json::json;

use super::drive::completion;
use super::{CHAIN, ONE, Trial};
use crate::*;

/// A flow that uses everything a run can have.
const RICH: &str = "
name: rich
steps:
  load: {emits: [loaded]}
  hear: {subscribes: [loaded], retry: {attempts: 3, initial: 1s}}
  each: {after: [load], spread: 'input.items', run: item, max_parallel: 2}
  poll: {after: [load], repeat: {max: 3, until: 'round == 2', state: {n: 0}, next: {n: '${state.n + 1}'}}, steps: {check: {}}}
  paid: {after: [load], await: {event: paid, key: input.n, timeout: 1h}}
  hook: {await: {webhook: true}}
  kid:  {after: [load], flow: one, input: '${steps.load.output}'}
";

pub async fn a_run_is_loaded_as_it_was_written(t: &mut Trial<'_>) {
    t.flow(ONE);
    let flow = t.flow(RICH);
    let input = json!({"n": 1.5, "items": [{"n": 1}, "zwei", 3, null], "text": "\u{0}é😀\\\"", "big": "x".repeat(900)});
    let start = Start {
        input: Some(input.into()),
        external_id: Some("order-1".to_owned()),
        tags: vec!["a".to_owned(), "b".to_owned()],
        priority: -3,
        deadline_ms: Some(3_600_000),
        ..Start::default()
    };
    let commit = t.prepare_start(&flow, t.new_run(), start).await;
    let run = commit.transition.header.run;
    let (flow, mut model) = (t.parsed(&flow), Run::new(run));
    let mut next = commit;
    for step in 0..14 {
        model.apply(&next.transition, &flow);
        t.commit(next).await.unwrap();
        assert_loaded(t, &model, step).await;
        t.advance(500);
        let Some(input) = something(t, run, step).await else { break };
        next = t.prepare(run, &[input]).await;
        assert!(!next.transition.is_empty(), "step {step} changes something");
    }
    assert!(!model.emitted.is_empty() && !model.cursors.is_empty(), "the case covers emits and cursors");
    assert!(model.values.len() > 1, "and values");
    if t.reopen().await {
        assert_loaded(t, &model, 99).await;
    }
}

pub async fn what_a_retry_takes_over_is_loaded_as_it_was_written(t: &mut Trial<'_>) {
    let flow = t.flow("{name: long, steps: {a: {}, b: {after: [a]}, c: {after: [b]}, d: {after: [c]}}}");
    let first = t.start(&flow, json!({"n": 1})).await;
    for _ in 0..3 {
        let claimed = t.take_one().await;
        t.complete(&claimed, json!({"text": "y".repeat(400)})).await;
    }
    let claimed = t.take_one().await;
    t.fail(&claimed).await;
    assert_eq!(t.status(first).await, Status::Failed);
    let (parsed, failed) = t.loaded(first).await;
    let reuse = eddyline_machine::decide::retry(&parsed, &failed);
    assert!(reuse.len() >= 3);
    let mut ids = Vec::new();
    reuse.iter().flat_map(|reused| reused.payloads()).for_each(|data| data.each_ref(&mut |stored| ids.push(stored.id)));
    let values = t.store.values(first, &ids).await.unwrap();
    assert!(!ids.is_empty());
    let next_value = failed.header.next_value;
    let start = Start { retry_of: Some(first), reuse, values, next_value, ..Start::default() };
    let commit = t.prepare_start(&flow, t.new_run(), start).await;
    let mut model = Run::new(commit.transition.header.run);
    model.apply(&commit.transition, &parsed);
    t.commit(commit).await.unwrap();
    assert_loaded(t, &model, 0).await;
    if t.reopen().await {
        assert_loaded(t, &model, 1).await;
    }
}

pub async fn what_is_still_to_be_taken_over_is_kept(t: &mut Trial<'_>) {
    let flow = t.flow("{name: gated, steps: {a: {await: {manual: true}}, b: {after: [a]}}}");
    let reused = |name: &str| eddyline_machine::run::Reused {
        activation: name.to_owned(),
        how: eddyline_machine::run::TakenOver::Whole(eddyline_machine::run::End::Completed(json!({"n": 1}).into())),
        input: Some(json!([1]).into()),
        emits: vec![("e".to_owned(), json!("p").into())],
        memo: None,
        n: 7,
        undo: true,
    };
    let commit = t.prepare_start(&flow, t.new_run(), Start::default()).await;
    let mut transition = (*commit.transition).clone();
    transition.reuse = vec![reused("b"), reused("a[1].c")];
    transition.cursors = vec![("ping \"1\"".to_owned(), 41)];
    let run = transition.header.run;
    let parsed = t.parsed(&flow);
    let mut model = Run::new(run);
    model.apply(&transition, &parsed);
    t.commit(RunCommit { transition: transition.into(), ..commit }).await.unwrap();
    assert_loaded(t, &model, 0).await;

    let commit = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    let mut transition = (*commit.transition).clone();
    transition.reuse_done = vec!["b".to_owned(), "never there".to_owned()];
    transition.reuse = vec![reused("z")];
    transition.cursors = vec![("ping \"1\"".to_owned(), 42), ("pong".to_owned(), 7)];
    model.apply(&transition, &parsed);
    t.commit(RunCommit { transition: transition.into(), ..commit }).await.unwrap();
    assert_eq!(model.reuse.keys().collect::<Vec<_>>(), ["a[1].c", "z"]);
    assert_loaded(t, &model, 1).await;
}

pub async fn a_run_that_has_not_moved_is_not_read_again(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(ONE), json!(null)).await;
    assert!(matches!(t.store.load(run, Some(Version(1))).await.unwrap(), Found::Same));
    assert!(matches!(t.store.load(run, Some(Version(0))).await.unwrap(), Found::Run(_)));
    t.take_one().await;
    assert!(matches!(t.store.load(run, Some(Version(1))).await.unwrap(), Found::Same), "a claim is no new version");
    t.pause(run).await;
    let found = t.store.load(run, Some(Version(1))).await.unwrap();
    assert!(matches!(found, Found::Run(loaded) | Found::Changed(loaded) if loaded.summary.version == Version(2)));
    assert!(matches!(t.store.load(run, Some(Version(9))).await.unwrap(), Found::Run(_)), "the store has lost commits");
    assert!(matches!(t.store.load(t.new_run(), Some(Version(1))).await.unwrap(), Found::Nothing));
    assert!(matches!(t.store.load(t.new_run(), None).await.unwrap(), Found::Nothing));
    assert_eq!(t.pending(t.new_run()).await, PendingWork::default());
}

pub async fn a_summary_says_when_things_happened(t: &mut Trial<'_>) {
    t.flow(CHAIN);
    let began = t.now().await;
    let start = Start { delay_ms: Some(5_000), ..Start::default() };
    let run = t.start_with("chain", start).await;
    let summary = t.summary(run).await;
    assert_eq!((summary.created_at, summary.started_at, summary.ended_at), (began, None, None));
    assert_eq!((summary.run, &summary.ns, summary.trimmed), (run, &t.ns, false));
    t.advance(5_000);
    let timer = t.pending(run).await.timers[0];
    t.submit_taking(run, &[Input::Due(timer.key)], &[Consumed::Timer(timer.key, timer.due)]).await.unwrap();
    t.advance(1_000);
    t.work_off().await;
    t.advance(1_000);
    let summary = t.summary(run).await;
    assert_eq!((summary.started_at, summary.ended_at), (Some(began + 5_000), Some(began + 6_000)));
    assert_eq!(summary.created_at, began);
}

pub async fn a_value_is_written_once(t: &mut Trial<'_>) {
    let flow = t.flow(ONE);
    let commit = t.prepare_start(&flow, t.new_run(), Start::default()).await;
    let run = commit.transition.header.run;
    let with = |commit: &RunCommit, values: Vec<(ValueId, Data)>| {
        let mut transition = (*commit.transition).clone();
        transition.values = values;
        RunCommit { transition: transition.into(), ..commit.clone() }
    };
    let value = |text: &str| Data::from(json!({"text": text}));
    t.commit(with(&commit, vec![(ValueId(1), value("one")), (ValueId(2), value("two"))])).await.unwrap();
    let second = t.prepare(run, &[Input::Pause { by: "ann".to_owned() }]).await;
    t.commit(with(&second, vec![(ValueId(2), value("changed")), (ValueId(3), value("three"))])).await.unwrap();
    let other = t.start(&flow, json!(null)).await;

    let ids = [9, 3, 2, 1, 7].map(ValueId);
    let mut found = t.store.values(run, &ids).await.unwrap();
    found.sort_by_key(|(id, _)| *id);
    let expected = vec![(ValueId(1), value("one")), (ValueId(2), value("two")), (ValueId(3), value("three"))];
    assert_eq!(found, expected, "existing values, as first written");
    assert_eq!(t.store.values(run, &[ValueId(2)]).await.unwrap(), expected[1..2]);
    assert!(t.store.values(run, &[]).await.unwrap().is_empty());
    assert!(t.store.values(other, &ids).await.unwrap().is_empty(), "values belong to one run");
    assert!(t.store.values(t.new_run(), &ids).await.unwrap().is_empty());
}

pub async fn a_large_value_comes_back_as_it_was(t: &mut Trial<'_>) {
    let run = t.start(&t.flow(CHAIN), json!(null)).await;
    let claimed = t.take_one().await;
    let big = json!({"text": "ü".repeat(300_000), "numbers": (0..5_000).collect::<Vec<i64>>(), "float": 0.1, "min": i64::MIN, "max": u64::MAX});
    t.complete(&claimed, big.clone()).await;
    let ids: Vec<ValueId> = (0..10).map(ValueId).collect();
    let values = t.store.values(run, &ids).await.unwrap();
    assert!(values.iter().any(|(_, value)| *value == Data::from(big.clone())));
    let next = t.take_one().await;
    t.report(&next, completion(json!(null))).await;
}

async fn assert_loaded(t: &Trial<'_>, model: &Run, step: usize) {
    let run = model.header.run;
    let Found::Run(loaded) = t.store.load(run, None).await.unwrap() else { panic!("the run was not found") };
    let rows = loaded.rows;
    let text = |header: &Header| serde_json::to_string(header).unwrap();
    assert_eq!(text(&rows.header), text(&model.header), "the header after step {step}");
    let lines = |run: &Run| run.activations.iter().map(|it| serde_json::to_string(it).unwrap()).collect::<Vec<_>>();
    assert_eq!(lines(&rows), lines(model), "the activations after step {step}");
    assert_eq!(rows.emitted, model.emitted, "the emitted after step {step}");
    assert_eq!(rows.reuse, model.reuse, "the reuse after step {step}");
    assert_eq!(rows.cursors, model.cursors, "the cursors after step {step}");
    assert_eq!((loaded.summary.version, loaded.summary.run), (model.header.version, run));
    assert_eq!(text(&loaded.summary.header), text(&model.header));
    let ids: Vec<ValueId> = model.values.keys().copied().collect();
    let mut values = t.store.values(run, &ids).await.unwrap();
    values.sort_by_key(|(id, _)| *id);
    assert_eq!(values, model.values.clone().into_iter().collect::<Vec<_>>(), "the values after step {step}");
}

/// The next input of a run: a completed task, an event, a pause or a resume.
async fn something(t: &Trial<'_>, run: eddyline_machine::RunId, step: usize) -> Option<Input> {
    match step {
        3 => return Some(Input::Pause { by: "ann".to_owned() }),
        4 => return Some(Input::Resume { by: "ann".to_owned() }),
        5 => {
            let gates = t.pending(run).await.gates;
            let gate = gates.iter().find(|gate| gate.arrival.as_ref().is_some_and(|it| it.gate.event.is_some()))?;
            let (activation, payload) = (gate.id.activation, json!({"paid": true}).into());
            return Some(Input::OpenGate { activation, by: OpenedBy::Event { position: 12 }, payload });
        }
        _ => {}
    }
    let claimed = t.take(1).await.pop()?;
    let emits = match claimed.task.name.as_str() {
        "load" => vec![("loaded".to_owned(), json!({"rows": 3}).into())],
        _ => Vec::new(),
    };
    let output = json!({"of": claimed.task.name, "big": "z".repeat(600)}).into();
    Some(t.report_of(&claimed, eddyline_machine::Op::Complete { output, emits, logs: Vec::new() }))
}
