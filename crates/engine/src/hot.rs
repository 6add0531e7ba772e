//! The cache of runs, so that a decision needs no reads. It counts bytes. Never the truth: a commit checks the version.

use std::collections::BTreeMap;
use std::mem::size_of;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::run::{Activation, End, GateState, Inside, State, TaskLog, Token, What};
use eddyline_machine::{Data, Run, RunId, Transition, ValueId, ValueRef};
use eddyline_store::{Map, Namespace};
use serde_json::Value;
use tokio::time::Instant;

use crate::flows::Registered;

/// Payloads of one run that are kept between decisions, by the memory that they take. Larger ones are read again when they
/// are needed: a few dozen queued runs with large inputs would fill the cache. The list that a spread of 10,000 items goes
/// over is kept, if they are small: the run's input goes with each of its tasks.
const VALUES_BYTES: usize = 1 << 20;
/// What a list or an object takes that is small enough to be kept in a row, about.
const SMALL_JSON: usize = 256;
/// What an entry of a map takes beside its key and value, about.
const MAP_ENTRY: usize = 48;
/// A cached run takes so much beside what is counted: its place in the cache, allocations, its flow's name.
const RUN: usize = 1 << 10;
/// A large run that had to be loaded keeps its place for so long. If more of them are active than there is room for, each
/// goes on at full speed for a while, instead of being loaded again for each of its commits.
const KEEPS_ITS_PLACE: Duration = Duration::from_secs(2);
/// To free what is of this size takes about a millisecond: another thread does it.
const FREED_ELSEWHERE: usize = 1 << 20;

/// A run at the version that it had when it was loaded or last committed.
#[derive(Debug)]
pub(crate) struct Hot {
    pub ns: Namespace,
    pub flow: Arc<Registered>,
    pub run: Run,
    /// What its activations, emitted events and the like take, about.
    rows: usize,
    /// What its payloads take, about.
    values: usize,
}

impl Hot {
    /// Counts all of the run: large ones are to be counted where nobody waits.
    pub fn new(ns: Namespace, flow: Arc<Registered>, run: Run) -> Hot {
        let rows = run.activations.iter().map(activation_bytes).sum::<usize>()
            + run.emitted.values().map(|emitted| MAP_ENTRY + data_bytes(&emitted.payload)).sum::<usize>()
            + run.reuse.keys().map(|name| 4 * MAP_ENTRY + name.len()).sum::<usize>()
            + run.cursors.keys().map(|name| MAP_ENTRY + name.len()).sum::<usize>();
        let values = memory_of(run.values.values());
        Hot { ns, flow, run, rows, values }
    }

    pub fn apply(&mut self, transition: &Transition) {
        for activation in &transition.activations {
            let before = self.run.activations.get(activation.id.0 as usize).map_or(0, activation_bytes);
            self.rows = self.rows.saturating_sub(before) + activation_bytes(activation);
        }
        self.rows += transition.emitted.iter().map(|(_, it)| MAP_ENTRY + data_bytes(&it.payload)).sum::<usize>();
        self.rows += transition.cursors.iter().map(|(name, _)| MAP_ENTRY + name.len()).sum::<usize>();
        self.values += memory_of(transition.values.iter().map(|(_, value)| value));
        self.run.apply(transition, &self.flow.flow);
    }

    /// Payloads that were read.
    pub fn add_values(&mut self, values: Vec<(ValueId, Data)>) {
        self.values += memory_of(values.iter().map(|(_, value)| value));
        self.run.values.extend(values);
    }

    /// What its payloads take in memory, about.
    pub fn value_bytes(&self) -> usize {
        self.values
    }

    /// Takes out all payloads but some.
    fn drop_values_but(&mut self, kept: &[ValueRef]) -> BTreeMap<ValueId, Data> {
        let all = std::mem::take(&mut self.run.values);
        let kept = kept.iter().filter_map(|stored| Some((stored, all.get(&stored.id)?.clone())));
        self.values = 0;
        for (stored, value) in kept {
            self.add_values(vec![(stored.id, value)]);
        }
        all
    }

    fn bytes(&self) -> usize {
        RUN + self.rows + self.values + self.run.header.agenda.len() * 32
    }
}

/// What payloads take in memory. They are counted no further than to where none is kept: large ones take no longer.
fn memory_of<'a>(values: impl Iterator<Item = &'a Data>) -> usize {
    let mut bytes = 0;
    for value in values {
        if bytes > VALUES_BYTES {
            break;
        }
        bytes += MAP_ENTRY + value.memory_bytes(VALUES_BYTES + 1 - bytes);
    }
    bytes
}

/// A payload in a row. It is small, or it would be a stored value, so it is not walked through.
fn data_bytes(data: &Data) -> usize {
    let inside = match data {
        Data::Json(json) => match &**json {
            Value::String(text) => text.len(),
            Value::Array(_) | Value::Object(_) => SMALL_JSON,
            _ => 0,
        },
        Data::Ref(_) => 0,
        Data::List(items) => items.len() * size_of::<Data>(),
        Data::Map(fields) => fields.len() * (size_of::<Data>() + MAP_ENTRY),
    };
    size_of::<Value>() + inside
}

fn activation_bytes(activation: &Activation) -> usize {
    let mut bytes = size_of::<Activation>() + MAP_ENTRY;
    bytes += activation.arms.len() * size_of::<Token>() + activation.tasks.len() * size_of::<TaskLog>();
    bytes += [&activation.input, &activation.item].into_iter().flatten().map(data_bytes).sum::<usize>();
    if let GateState::Opened(payload) = &activation.gate {
        bytes += data_bytes(payload);
    }
    bytes += match &activation.state {
        State::Ended(End::Completed(output)) => data_bytes(output),
        State::Ended(End::Failed(failure)) => size_of_val(failure) + failure.message.len(),
        State::Open(Inside { what: What::Spread { list: data, .. } | What::Repeat { state: data, .. }, .. }) => {
            data_bytes(data)
        }
        _ => 0,
    };
    bytes
}

/// Cached runs up to a number of bytes. Small and large runs do not push each other out: a large one that is loaded whole
/// for each of its commits would come to a standstill as soon as small ones come and go beside it.
#[derive(Debug)]
pub(crate) struct HotRuns {
    runs: Map<RunId, Entry>,
    small: Recent,
    large: Recent,
    uses: u64,
    /// The run that was loaded or started last.
    last_put: Option<RunId>,
    /// The flows of these runs, by address: how many runs have each. A cached run keeps its flow in memory.
    flows: Map<usize, usize>,
    flow_bytes: usize,
    max_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    used: u64,
    /// When it was loaded or started.
    since: Instant,
    bytes: usize,
    hot: Arc<Hot>,
}

/// Runs of one kind in the order of their last use.
#[derive(Debug, Default)]
struct Recent {
    by_use: BTreeMap<u64, RunId>,
    bytes: usize,
}

impl HotRuns {
    pub fn new(max_bytes: usize) -> HotRuns {
        let (small, large) = (Recent::default(), Recent::default());
        let flows = Map::default();
        HotRuns { runs: Map::default(), small, large, uses: 0, last_put: None, flows, flow_bytes: 0, max_bytes }
    }

    pub fn get(&self, run: RunId) -> Option<&Hot> {
        self.runs.get(&run).map(|entry| &*entry.hot)
    }

    /// The run for another thread, which reads it while nobody changes it.
    pub fn share(&self, run: RunId) -> Option<Arc<Hot>> {
        self.runs.get(&run).map(|entry| entry.hot.clone())
    }

    /// How many bytes the cached runs take with their flows, about.
    pub fn bytes(&self) -> usize {
        self.small.bytes + self.large.bytes + self.flow_bytes
    }

    pub fn remove(&mut self, run: RunId) {
        if let Some(hot) = self.take(run) {
            let bytes = hot.bytes();
            free(hot, bytes);
        }
    }

    pub fn put(&mut self, hot: Hot) {
        self.remove(hot.run.header.run);
        self.last_put = Some(hot.run.header.run);
        self.insert(Arc::new(hot), Instant::now());
    }

    /// Changes a cached run. One that another thread still reads is no longer cached instead.
    pub fn change(&mut self, run: RunId, change: impl FnOnce(&mut Hot)) {
        let Some(since) = self.runs.get(&run).map(|entry| entry.since) else { return };
        let Some(mut hot) = self.take(run) else { return };
        if let Some(hot) = Arc::get_mut(&mut hot) {
            change(hot);
        } else {
            return;
        }
        self.insert(hot, since);
    }

    /// Lets go of what is not kept of a run between decisions.
    pub fn settle(&mut self, run: RunId) {
        if self.get(run).is_some_and(|hot| hot.values > VALUES_BYTES) {
            self.keep_values(run, &[]);
        }
    }

    /// Lets go of all payloads of a run but some.
    pub fn keep_values(&mut self, run: RunId, kept: &[ValueRef]) {
        let Some(bytes) = self.get(run).map(Hot::value_bytes) else { return };
        let mut dropped = BTreeMap::new();
        self.change(run, |hot| dropped = hot.drop_values_but(kept));
        free(dropped, bytes);
    }

    fn take(&mut self, run: RunId) -> Option<Arc<Hot>> {
        let Entry { used, bytes, hot, .. } = self.runs.remove(&run)?;
        let recent = self.recent(bytes);
        recent.by_use.remove(&used);
        recent.bytes -= bytes;
        let flow = address(&hot.flow);
        if let Some(runs) = self.flows.get_mut(&flow) {
            *runs -= 1;
            if *runs == 0 {
                self.flows.remove(&flow);
                self.flow_bytes -= hot.flow.bytes();
            }
        }
        Some(hot)
    }

    fn insert(&mut self, hot: Arc<Hot>, since: Instant) {
        let (run, bytes) = (hot.run.header.run, hot.bytes());
        self.uses += 1;
        let used = self.uses;
        let recent = self.recent(bytes);
        recent.by_use.insert(used, run);
        recent.bytes += bytes;
        let runs = self.flows.entry(address(&hot.flow)).or_default();
        *runs += 1;
        if *runs == 1 {
            self.flow_bytes += hot.flow.bytes();
        }
        self.runs.insert(run, Entry { used, since, bytes, hot });
        self.evict();
    }

    fn recent(&mut self, bytes: usize) -> &mut Recent {
        if bytes > self.max_bytes / 16 { &mut self.large } else { &mut self.small }
    }

    /// Runs that were not used for longest go first. Large ones have three quarters of the room, or one of them all that
    /// it takes, and one more of them for its next decision; small ones have what is left, and a quarter in any case.
    fn evict(&mut self) {
        let quarter = self.max_bytes / 4;
        while self.large.bytes > 3 * quarter
            && self.large.by_use.len() > 1
            && let Some(run) = self.large_to_evict(3 * quarter)
        {
            self.remove(run);
        }
        let room = quarter.max(self.max_bytes.saturating_sub(self.large.bytes));
        while self.small.bytes + self.flow_bytes > room && self.small.by_use.len() > 1 {
            self.evict_oldest(|cache| &cache.small);
        }
    }

    /// Of the large runs that have had their time, the one that was not used for longest; else one that came after the
    /// others, but not the last that came, since nothing has been decided on it yet. Nothing, if there is room for the rest.
    fn large_to_evict(&self, room: usize) -> Option<RunId> {
        let since = |run: &RunId| self.runs.get(run).map(|entry| entry.since);
        let had_its_time = |run: &&RunId| since(run).is_none_or(|since| since.elapsed() >= KEEPS_ITS_PLACE);
        if let Some(run) = self.large.by_use.values().find(had_its_time) {
            return Some(*run);
        }
        let last = self.large.by_use.values().copied().find(|run| Some(*run) == self.last_put);
        let last_bytes = last.and_then(|run| self.runs.get(&run)).map_or(0, |entry| entry.bytes);
        let others = self.large.by_use.values().filter(|run| Some(**run) != last);
        let newest = others.max_by_key(|run| since(run)).copied();
        newest.filter(|_| self.large.bytes - last_bytes > room)
    }

    fn evict_oldest(&mut self, of: impl Fn(&HotRuns) -> &Recent) {
        if let Some((_, oldest)) = of(self).by_use.first_key_value() {
            let oldest = *oldest;
            self.remove(oldest);
        }
    }
}

/// A flow is in memory once, however many runs have it.
fn address(flow: &Arc<Registered>) -> usize {
    Arc::as_ptr(flow) as usize
}

fn free(what: impl Send + 'static, bytes: usize) {
    if bytes > FREED_ELSEWHERE && tokio::runtime::Handle::try_current().is_ok() {
        tokio::task::spawn_blocking(move || drop(what));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::parse_definition;

    #[tokio::test(start_paused = true)]
    async fn large_runs_do_not_push_each_other_out_with_each_commit() {
        let flow = Arc::new(Registered::new(parse_definition(None, "{name: f, steps: {a: {}}}").unwrap().flow));
        let id = |n: u128| RunId(Uuid::from_u128(n));
        let large = |n: u128| Hot { rows: 400_000, ..Hot::new(Namespace::default(), flow.clone(), Run::new(id(n))) };
        let mut cache = HotRuns::new(1 << 20);
        let cached = |cache: &HotRuns| (1..=4).filter(|n| cache.get(id(*n)).is_some()).collect::<Vec<_>>();
        cache.put(large(1));
        // The others take turns, each for one decision.
        for n in [2, 3, 2, 3] {
            cache.put(large(n));
            cache.change(id(1), |_| {});
            cache.change(id(n), |_| {});
            assert_eq!(cached(&cache), [1, n]);
        }
        tokio::time::advance(KEEPS_ITS_PLACE).await;
        for n in [2, 3, 1] {
            cache.put(large(n));
        }
        assert_eq!(cached(&cache), [1, 2], "the next one keeps its place");
    }

    #[test]
    fn a_flow_that_cached_runs_keep_in_memory_counts_once() {
        let flow = |name: &str| {
            let text = format!("{{name: {name}, steps: {{a: {{}}, b: {{set: {}}}}}}}", "x".repeat(10_000));
            Arc::new(Registered::new(parse_definition(None, &text).unwrap().flow))
        };
        let run = |n: u128, flow: &Arc<Registered>| {
            Hot::new(Namespace::default(), flow.clone(), Run::new(RunId(Uuid::from_u128(n))))
        };
        let one = flow("one");
        let mut cache = HotRuns::new(3 * one.bytes());
        (0..10).for_each(|n| cache.put(run(n, &one)));
        assert!(cache.bytes() > one.bytes() && cache.bytes() < 2 * one.bytes(), "{}", cache.bytes());
        (0..10).for_each(|n| cache.put(run(100 + n, &flow(&format!("flow-{n}")))));
        assert!(cache.bytes() <= cache.max_bytes, "{}", cache.bytes());
        assert!(cache.get(RunId(Uuid::from_u128(109))).is_some());
        (100..110).for_each(|n| cache.remove(RunId(Uuid::from_u128(n))));
        (0..10).for_each(|n| cache.remove(RunId(Uuid::from_u128(n))));
        assert_eq!((cache.bytes(), cache.flows.len()), (0, 0));
    }
}
