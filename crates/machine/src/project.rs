//! The projections of a timeline: what each record changes in the state of its run and step, as patches. A patch is the
//! difference between two states, so folding the patches gives exactly the state.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use serde::{Deserialize, Deserializer, Serialize};

use crate::ids::RunId;
use crate::record::{Entry, GateId, GateReason, Numbered};
use crate::view::{DRIVER, Gate, RunView, StepView};
use eddyline_language::time::Time;

/// Turns a run's records, in order, into the records of its projection streams.
#[derive(Debug, Clone)]
pub struct Projector {
    run: RunId,
    view: RunView,
    /// The run's state after the patches so far, without its steps.
    last_head: Snapshot,
    /// Steps that have finally ended, as hashes of their keys. They are not in the view: a run can have 100,000 steps,
    /// and a record after a step's end (a log line) changes nothing that depends on its earlier state.
    ended: BTreeSet<u64>,
}

/// The patches of one record; absent where nothing changes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Projections {
    pub snapshot: Option<SnapshotPatch>,
    pub step: Option<StepPatch>,
    pub log: Option<LogRef>,
    pub indexed: Option<RunIndexed>,
}

/// One of [`Projections`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Projection<'a> {
    Snapshot(&'a SnapshotPatch),
    Step(&'a StepPatch),
    Log(&'a LogRef),
    Indexed(&'a RunIndexed),
}

/// A pointer to a log record, by step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogRef {
    pub r#ref: Pointer,
    pub step_key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    pub ts: Time,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pointer {
    pub stream: String,
    pub id: String,
}

/// A run's entry in the index of its flow.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunIndexed {
    pub id: RunId,
    pub flow_name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    pub created_at: Time,
    pub source_id: String,
}

/// A fixed word when written, any text when read.
pub type Word = Cow<'static, str>;

/// Defines a state and its patch, with diff and apply, from one list of fields: a `value` is always present, a `maybe`
/// can be absent (a patch clears it with null), a `count` only grows.
macro_rules! state_and_patch {
    (
        $(#[$doc:meta])* $state:ident / $patch:ident { $($key:ident: $key_type:ty)? }
        value { $($value:ident: $value_type:ty),* }
        maybe { $($maybe:ident: $maybe_type:ty),* }
        count { $($count:ident / $delta:ident),* }
        parts { $($parts:ident: $part:ident / $part_patch:ident)? }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $state {
            $(pub $key: $key_type,)?
            $(pub $value: $value_type,)*
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $maybe: Option<$maybe_type>,)*
            $(pub $count: u64,)*
            $(pub $parts: BTreeMap<String, $part>,)?
        }

        #[doc = concat!("What changed in a [`", stringify!($state), "`].")]
        #[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $patch {
            $(pub $key: $key_type,)?
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $value: Option<$value_type>,)*
            $(
                #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "null_or_value")]
                pub $maybe: Option<Option<$maybe_type>>,
            )*
            $(#[serde(skip_serializing_if = "Option::is_none")] pub $delta: Option<u64>,)*
            $(#[serde(skip_serializing_if = "BTreeMap::is_empty")] pub $parts: BTreeMap<String, $part_patch>,)?
        }

        impl $state {
            pub fn apply(&mut self, patch: &$patch) {
                $(self.$key.clone_from(&patch.$key);)?
                $(if let Some(value) = &patch.$value { self.$value.clone_from(value); })*
                $(if let Some(value) = &patch.$maybe { self.$maybe.clone_from(value); })*
                $(self.$count = self.$count.saturating_add(patch.$delta.unwrap_or(0));)*
                $(for (key, part) in &patch.$parts {
                    self.$parts.entry(key.clone()).or_default().apply(part);
                })?
            }

            /// The patch from this state to `next`, if they differ. The caller adds the parts, because it knows which
            /// one changed.
            fn diff(&self, next: &$state) -> Option<$patch> {
                (self != next).then(|| $patch {
                    $($key: next.$key.clone(),)?
                    $($value: (self.$value != next.$value).then(|| next.$value.clone()),)*
                    $($maybe: (self.$maybe != next.$maybe).then(|| next.$maybe.clone()),)*
                    $($delta: (self.$count != next.$count).then(|| next.$count.saturating_sub(self.$count)),)*
                    $($parts: BTreeMap::new(),)?
                })
            }
        }
    };
}

state_and_patch! {
    /// The state of a run.
    Snapshot / SnapshotPatch {}
    value { status: Word, flow_name: String, flow_id: String }
    maybe {
        queue: String, started_at: Time, completed_at: Time, last_event_at: Time, last_log_level: String,
        waiting_for: Word, wait_until: Time, wait_token: String, wait_step: String
    }
    count { logs_count / logs_count_delta }
    parts { steps: StepSummary / StepSummaryPatch }
}

state_and_patch! {
    /// A step in the state of its run.
    StepSummary / StepSummaryPatch {}
    value { status: Word, tries_count: u64 }
    maybe { last_attempt: u32 }
    count {}
    parts {}
}

state_and_patch! {
    /// The state of a step, across its attempts.
    StepSnapshot / StepPatch { step_key: String }
    value { status: Word, waiting: bool }
    maybe {
        started_at: Time, completed_at: Time, last_event_at: Time, last_log_level: String, attempt: u32,
        last_attempt_status: Word, waiting_for: Word, wait_until: Time, wait_token: String
    }
    count { logs_count / logs_count_delta, tries_count / tries_count_delta }
    parts {}
}

impl Projector {
    pub fn new(run: RunId) -> Projector {
        Projector { run, view: RunView::default(), last_head: Snapshot::default(), ended: BTreeSet::new() }
    }

    /// Approximate memory use.
    pub fn bytes(&self) -> usize {
        const FIXED: usize = 4 << 10;
        const STEP: usize = 512;
        const ENDED: usize = 16;
        FIXED + self.open_steps() * STEP + self.ended.len() * ENDED
    }

    /// The number of steps that can still change.
    pub fn open_steps(&self) -> usize {
        self.view.steps().len()
    }

    pub fn apply(&mut self, numbered: &Numbered) -> Projections {
        let entry = &numbered.record.entry;
        let key = entry.step_key().filter(|key| *key != DRIVER);
        let ended = key.map(hash).filter(|hash| self.ended.contains(hash));
        if let (Some(key), Some(_)) = (key, ended) {
            self.view.add_step(key);
        }
        let before = key.and_then(|key| self.states(key));
        self.view.apply(numbered);
        let after = key.and_then(|key| self.states(key));
        if let Some(key) = key
            && (ended.is_some() || self.view.steps().get(key).is_some_and(StepView::has_ended_for_good))
        {
            self.view.remove_step(key);
            self.ended.insert(hash(key));
        }

        let head = self.view.head(self.run);
        let mut snapshot = self.last_head.diff(&head);
        self.last_head = head;
        let mut step = None;
        if let (Some(key), Some((summary, state))) = (key, after) {
            let (old_summary, old_state) = before.unwrap_or_default();
            step = old_state.diff(&state);
            if let Some(patch) = old_summary.diff(&summary) {
                snapshot.get_or_insert_default().steps.insert(key.to_owned(), patch);
            }
        }
        Projections { snapshot, step, log: self.log(numbered), indexed: self.indexed(numbered) }
    }

    fn states(&self, key: &str) -> Option<(StepSummary, StepSnapshot)> {
        self.view.steps().get(key).map(|step| (step.summary(), step.snapshot(key)))
    }

    fn log(&self, numbered: &Numbered) -> Option<LogRef> {
        match &numbered.record.entry {
            Entry::Log { step_key, level, .. } => Some(LogRef {
                r#ref: Pointer { stream: timeline_stream(self.run), id: numbered.n.to_string() },
                step_key: step_key.clone(),
                attempt: numbered.record.attempt.as_ref().map(|attempt| attempt.number),
                level: Some(level.clone()),
                ts: Time::at(numbered.ts),
            }),
            _ => None,
        }
    }

    fn indexed(&self, numbered: &Numbered) -> Option<RunIndexed> {
        match &numbered.record.entry {
            Entry::FlowStart { flow_name, queue, .. } => Some(RunIndexed {
                id: self.run,
                flow_name: flow_name.clone(),
                queue: queue.clone(),
                created_at: Time::at(numbered.ts),
                source_id: numbered.n.to_string(),
            }),
            _ => None,
        }
    }
}

impl Projections {
    pub fn iter(&self) -> impl Iterator<Item = Projection<'_>> {
        let snapshot = self.snapshot.as_ref().map(Projection::Snapshot);
        let step = self.step.as_ref().map(Projection::Step);
        let log = self.log.as_ref().map(Projection::Log);
        let indexed = self.indexed.as_ref().map(Projection::Indexed);
        [snapshot, step, log, indexed].into_iter().flatten()
    }
}

impl Projection<'_> {
    pub fn kind(&self) -> &'static str {
        match self {
            Projection::Snapshot(_) => "flow.snapshot.patch",
            Projection::Step(_) => "flow.step.patch",
            Projection::Log(_) => "flow.step.log.ref",
            Projection::Indexed(_) => "flow.run.indexed",
        }
    }

    /// The stream it belongs to.
    pub fn stream(&self, flow: &str, run: RunId) -> String {
        match self {
            Projection::Snapshot(_) => format!("nq:proj:flow:{flow}:{run}"),
            Projection::Step(_) => format!("nq:proj:flow-steps:{run}"),
            Projection::Log(_) => format!("nq:proj:flow-step-index:{run}"),
            Projection::Indexed(_) => format!("nq:proj:flow-runs:{flow}"),
        }
    }
}

/// Deterministic across processes. Two of a run's 120,000 keys collide once in billions of runs.
fn hash(key: &str) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(key)
}

/// The stream of a run's records.
pub fn timeline_stream(run: RunId) -> String {
    format!("nq:flow:{run}")
}

impl RunView {
    /// The sum of its patches. The run's id is not in its records.
    pub fn snapshot(&self, run: RunId) -> Snapshot {
        let steps = self.steps().iter().map(|(key, step)| (key.clone(), step.summary())).collect();
        Snapshot { steps, ..self.head(run) }
    }

    pub fn step_snapshots(&self) -> BTreeMap<String, StepSnapshot> {
        self.steps().iter().map(|(key, step)| (key.clone(), step.snapshot(key))).collect()
    }

    fn head(&self, run: RunId) -> Snapshot {
        let (wait_step, gate) = self.open_gates().next().unzip();
        Snapshot {
            status: self.status().into(),
            flow_name: self.flow.clone(),
            flow_id: run.to_string(),
            queue: self.queue.clone(),
            started_at: self.started_at.map(Time::at),
            completed_at: self.completed_at.map(Time::at),
            last_event_at: self.last_event_at.map(Time::at),
            last_log_level: self.logs.last_level.clone(),
            logs_count: self.logs.count,
            waiting_for: gate.map(|gate| reason_word(gate.reason)),
            wait_until: gate.and_then(|gate| gate.until).map(Time::at),
            wait_token: gate.map(|gate| gate_name(gate.id)),
            wait_step: wait_step.map(str::to_owned),
            steps: BTreeMap::new(),
        }
    }
}

impl StepView {
    fn summary(&self) -> StepSummary {
        StepSummary {
            status: self.status().into(),
            tries_count: self.attempts.len() as u64,
            last_attempt: self.attempts.last().map(|attempt| attempt.number),
        }
    }

    fn snapshot(&self, key: &str) -> StepSnapshot {
        let last = self.attempts.last();
        let gate: Option<&Gate> = self.gate();
        StepSnapshot {
            step_key: key.to_owned(),
            status: self.status().into(),
            started_at: self.started_at.map(Time::at),
            completed_at: self.ended_at().map(Time::at),
            last_event_at: self.last_event_at.map(Time::at),
            last_log_level: self.logs.last_level.clone(),
            logs_count: self.logs.count,
            tries_count: self.attempts.len() as u64,
            attempt: last.map(|attempt| attempt.number),
            last_attempt_status: last.map(|attempt| attempt.status().into()),
            waiting: gate.is_some(),
            waiting_for: gate.map(|gate| reason_word(gate.reason)),
            wait_until: gate.and_then(|gate| gate.until).map(Time::at),
            wait_token: gate.map(|gate| gate_name(gate.id)),
        }
    }
}

/// A gate's public id: `<run>.<activation>`.
pub fn gate_name(gate: GateId) -> String {
    format!("{}.{}", gate.run, gate.activation)
}

fn reason_word(reason: GateReason) -> Word {
    Cow::Borrowed(match reason {
        GateReason::Time => "time",
        GateReason::Webhook => "webhook",
        GateReason::Event => "event",
        GateReason::Manual => "manual",
    })
}

/// Distinguishes null, which clears a field, from an absent field, which keeps it.
fn null_or_value<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use proptest::prelude::*;

    use super::*;
    use crate::view::tests::{anything, plausible, timeline, view};

    fn json(value: &impl Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }

    /// After every record, the folded patches, read back from JSON, equal the view of the records.
    fn check_folds(lines: &[String]) {
        let run = RunId::default();
        let (mut projector, records) = (Projector::new(run), timeline(lines));
        let (mut snapshot, mut steps) = (Snapshot::default(), BTreeMap::<String, StepSnapshot>::new());
        for (i, record) in records.iter().enumerate() {
            let projections = projector.apply(record);
            if let Some(patch) = &projections.snapshot {
                let patch: SnapshotPatch = serde_json::from_str(&json(patch)).unwrap();
                assert!(patch.steps.len() <= 1 && !patch.steps.contains_key(DRIVER));
                snapshot.apply(&patch);
            }
            if let Some(patch) = &projections.step {
                let patch: StepPatch = serde_json::from_str(&json(patch)).unwrap();
                assert_ne!(patch.step_key, DRIVER);
                steps.entry(patch.step_key.clone()).or_default().apply(&patch);
            }
            let view = view(&records[..=i]);
            assert_eq!(snapshot, view.snapshot(run), "after {}", lines[i]);
            assert_eq!(steps, view.step_snapshots(), "after {}", lines[i]);
        }
    }

    /// Drops records that continue an ended step.
    fn without_a_life_after_the_end(lines: Vec<String>) -> Vec<String> {
        let mut ended = BTreeSet::new();
        let goes_on = |line: &String| {
            let mut words = line.split(' ');
            let (what, key) = (words.next().unwrap_or_default(), words.next().unwrap_or_default().to_owned());
            let may_come =
                ["start", "log", "emit", "act", "pause", "resume"].contains(&what) || what.starts_with("end-");
            let drop = !may_come && ended.contains(&key);
            if ["completed", "skipped", "cancelled"].contains(&what) {
                ended.insert(key);
            }
            !drop
        };
        lines.into_iter().filter(goes_on).collect()
    }

    #[test]
    fn a_projector_remembers_no_more_of_ended_steps_than_that_they_ended() {
        let lines = |steps: u32| {
            let kinds = ["task", "started", "log", "succeeded", "completed"];
            let ended = (0..steps).flat_map(|n| kinds.map(|what| format!("{what} each[{n}] 1")));
            let rest = ["task last".to_owned(), "log each[1] 1".to_owned()];
            ["start 1".to_owned()].into_iter().chain(ended).chain(rest).collect::<Vec<_>>()
        };
        let mut projector = Projector::new(RunId::default());
        timeline(&lines(1_000)).iter().for_each(|record| drop(projector.apply(record)));
        assert_eq!(projector.open_steps(), 1);
        assert!(projector.bytes() < 64 << 10, "{}", projector.bytes());
        check_folds(&lines(5));
    }

    proptest! {
        #[test]
        fn folding_the_patches_gives_the_snapshot(lines in plausible()) {
            check_folds(&lines);
        }

        #[test]
        fn so_it_does_for_records_that_make_no_sense(lines in anything()) {
            check_folds(&without_a_life_after_the_end(lines));
        }
    }

    #[test]
    fn patches_say_what_changed_and_no_more() {
        let mut projector = Projector::new(RunId::default());
        let lines = ["start 2", "webhook pay", "sleep each", "opened pay", "task pay", "started pay 1", "log pay 1"];
        let mut told = String::new();
        for record in timeline(&lines) {
            for projection in projector.apply(&record).iter() {
                told += &format!("{} {} {}\n", record.n, projection.kind(), json(&projection));
            }
        }
        assert_snapshot!(told.replace("00000000-0000-0000-0000-000000000000", "RUN").replace("2026-01-02T03:04:", ""), @r#"
        1 flow.snapshot.patch {"status":"pending","flowName":"order","flowId":"RUN","startedAt":"05.000Z","lastEventAt":"05.000Z"}
        1 flow.run.indexed {"id":"RUN","flowName":"order","createdAt":"05.000Z","sourceId":"1"}
        2 flow.snapshot.patch {"status":"waiting","lastEventAt":"05.010Z","waitingFor":"webhook","waitToken":"RUN.330","waitStep":"pay","steps":{"pay":{"status":"waiting"}}}
        2 flow.step.patch {"stepKey":"pay","status":"waiting","waiting":true,"startedAt":"05.010Z","lastEventAt":"05.010Z","waitingFor":"webhook","waitToken":"RUN.330"}
        3 flow.snapshot.patch {"lastEventAt":"05.020Z","steps":{"each":{"status":"waiting"}}}
        3 flow.step.patch {"stepKey":"each","status":"waiting","waiting":true,"startedAt":"05.020Z","lastEventAt":"05.020Z","waitingFor":"time","waitUntil":"06.020Z","waitToken":"RUN.401"}
        4 flow.snapshot.patch {"lastEventAt":"05.030Z","waitingFor":"time","waitUntil":"06.020Z","waitToken":"RUN.401","waitStep":"each","steps":{"pay":{"status":"running"}}}
        4 flow.step.patch {"stepKey":"pay","status":"running","waiting":false,"lastEventAt":"05.030Z","waitingFor":null,"waitToken":null}
        5 flow.snapshot.patch {"status":"running","lastEventAt":"05.040Z"}
        5 flow.step.patch {"stepKey":"pay","lastEventAt":"05.040Z"}
        6 flow.snapshot.patch {"lastEventAt":"05.050Z","steps":{"pay":{"triesCount":1,"lastAttempt":1}}}
        6 flow.step.patch {"stepKey":"pay","lastEventAt":"05.050Z","attempt":1,"lastAttemptStatus":"running","triesCountDelta":1}
        7 flow.snapshot.patch {"lastEventAt":"05.060Z","lastLogLevel":"info","logsCountDelta":1}
        7 flow.step.patch {"stepKey":"pay","lastEventAt":"05.060Z","lastLogLevel":"info","logsCountDelta":1}
        7 flow.step.log.ref {"ref":{"stream":"nq:flow:RUN","id":"7"},"stepKey":"pay","attempt":1,"level":"info","ts":"05.060Z"}
        "#);
    }
}
