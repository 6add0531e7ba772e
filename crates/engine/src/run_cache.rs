//! The cache of runs, bounded in bytes, which saves the reads before a decision. It may be outdated: each commit checks
//! the stored version.

use std::collections::BTreeMap;
use std::mem::size_of;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::run::{Activation, End, GateState, Inside, State, TaskLog, Token, What};
use eddyline_machine::{Data, Run, RunId, Transition, ValueId, ValueRef, Version};
use eddyline_store::{Map, Namespace};
use tokio::time::Instant;

use crate::flows::Registered;

/// The memory for payloads that one run keeps between decisions. Runs with more read them again when needed: a few
/// dozen queued runs with large inputs would fill the cache. The list of a spread over 10,000 small items fits, and so
/// is read once, though the run's input goes with each of its tasks.
const VALUES_BYTES: usize = 1 << 20;
/// The estimated memory of a map entry besides its key and value.
const MAP_ENTRY: usize = 48;
/// The estimated memory of a cached run besides what is counted: cache entry, allocations, flow name.
const RUN: usize = 1 << 10;
/// A large run is not evicted for this long after it was loaded. If more large runs are active than fit, each runs at
/// full speed for a while instead of being loaded again for each of its commits.
const KEEPS_ITS_PLACE: Duration = Duration::from_secs(2);
/// Larger values are freed on another thread: freeing this much takes about a millisecond.
const FREED_INLINE: usize = 1 << 20;

/// A run as of its load or last commit.
#[derive(Debug)]
pub(crate) struct CachedRun {
    pub ns: Namespace,
    pub flow: Arc<Registered>,
    pub run: Run,
    /// The estimated memory of its activations, emitted events and other rows.
    rows: usize,
    /// The estimated memory of its payloads.
    values: usize,
}

impl CachedRun {
    /// Counts the bytes of the whole run, so do not call it for a large run on the committer's thread.
    pub fn new(ns: Namespace, flow: Arc<Registered>, run: Run) -> CachedRun {
        let (rows, values) = (row_bytes(&run), memory_of(run.values.values()));
        CachedRun { ns, flow, run, rows, values }
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

    /// Brings the run from a version to a later one, with the rows that were written since. False if it is not at that
    /// version, or the rows don't fit.
    pub fn catch_up(&mut self, since: Version, rows: Run) -> bool {
        if self.run.header.version != since || !self.run.catch_up(rows, &self.flow.flow) {
            return false;
        }
        self.rows = row_bytes(&self.run);
        true
    }

    /// Adds payloads that were read from the store.
    pub fn add_values(&mut self, values: Vec<(ValueId, Data)>) {
        self.values += memory_of(values.iter().map(|(_, value)| value));
        self.run.values.extend(values);
    }

    /// The estimated memory of its payloads.
    pub fn value_bytes(&self) -> usize {
        self.values
    }

    /// Drops all payloads except `kept`, and returns the old map so that the caller can free it.
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

/// The memory of payloads, counted only until it exceeds [`VALUES_BYTES`], so that large ones cost no more time.
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

fn row_bytes(run: &Run) -> usize {
    run.activations.iter().map(activation_bytes).sum::<usize>()
        + run.emitted.values().map(|emitted| MAP_ENTRY + data_bytes(&emitted.payload)).sum::<usize>()
        + run.reuse.keys().map(|name| 4 * MAP_ENTRY + name.len()).sum::<usize>()
        + run.cursors.keys().map(|name| MAP_ENTRY + name.len()).sum::<usize>()
}

/// The estimated memory of a payload in a row. It is small, or it would be a stored value.
fn data_bytes(data: &Data) -> usize {
    data.memory_bytes(usize::MAX)
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

/// Cached runs up to a number of bytes. Small and large runs do not evict each other: otherwise a few new small runs
/// would evict a large one between commits, and loading it again for each commit would bring it to a standstill.
#[derive(Debug)]
pub(crate) struct RunCache {
    runs: Map<RunId, Entry>,
    small: Recent,
    large: Recent,
    uses: u64,
    /// The run that was loaded or started last.
    last_put: Option<RunId>,
    /// How many cached runs use each flow, by its address. A cached run keeps its flow in memory.
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
    cached: Arc<CachedRun>,
}

/// Runs of one kind in the order of their last use.
#[derive(Debug, Default)]
struct Recent {
    by_use: BTreeMap<u64, RunId>,
    bytes: usize,
}

impl RunCache {
    pub fn new(max_bytes: usize) -> RunCache {
        let (small, large) = (Recent::default(), Recent::default());
        let flows = Map::default();
        RunCache { runs: Map::default(), small, large, uses: 0, last_put: None, flows, flow_bytes: 0, max_bytes }
    }

    pub fn get(&self, run: RunId) -> Option<&CachedRun> {
        self.runs.get(&run).map(|entry| &*entry.cached)
    }

    /// Shares the run with another thread, which may read it while this one does not change it.
    pub fn share(&self, run: RunId) -> Option<Arc<CachedRun>> {
        self.runs.get(&run).map(|entry| entry.cached.clone())
    }

    /// The estimated memory of the cached runs and their flows.
    pub fn bytes(&self) -> usize {
        self.small.bytes + self.large.bytes + self.flow_bytes
    }

    pub fn remove(&mut self, run: RunId) {
        if let Some(cached) = self.take(run) {
            let bytes = cached.bytes();
            free(cached, bytes);
        }
    }

    pub fn put(&mut self, cached: CachedRun) {
        self.remove(cached.run.header.run);
        self.last_put = Some(cached.run.header.run);
        self.insert(Arc::new(cached), Instant::now());
    }

    /// Changes a cached run. A run that another thread still reads is evicted instead.
    pub fn change(&mut self, run: RunId, change: impl FnOnce(&mut CachedRun)) {
        let Some(since) = self.runs.get(&run).map(|entry| entry.since) else { return };
        let Some(mut cached) = self.take(run) else { return };
        if let Some(cached) = Arc::get_mut(&mut cached) {
            change(cached);
        } else {
            return;
        }
        self.insert(cached, since);
    }

    /// Drops the payloads of a run if they take more than it may keep between decisions.
    pub fn settle(&mut self, run: RunId) {
        if self.get(run).is_some_and(|cached| cached.values > VALUES_BYTES) {
            self.keep_values(run, &[]);
        }
    }

    /// Drops all payloads of a run except `kept`.
    pub fn keep_values(&mut self, run: RunId, kept: &[ValueRef]) {
        let Some(bytes) = self.get(run).map(CachedRun::value_bytes) else { return };
        let mut dropped = BTreeMap::new();
        self.change(run, |cached| dropped = cached.drop_values_but(kept));
        free(dropped, bytes);
    }

    fn take(&mut self, run: RunId) -> Option<Arc<CachedRun>> {
        let Entry { used, bytes, cached, .. } = self.runs.remove(&run)?;
        let recent = self.recent(bytes);
        recent.by_use.remove(&used);
        recent.bytes -= bytes;
        let flow = address(&cached.flow);
        if let Some(runs) = self.flows.get_mut(&flow) {
            *runs -= 1;
            if *runs == 0 {
                self.flows.remove(&flow);
                self.flow_bytes -= cached.flow.bytes();
            }
        }
        Some(cached)
    }

    fn insert(&mut self, cached: Arc<CachedRun>, since: Instant) {
        let (run, bytes) = (cached.run.header.run, cached.bytes());
        self.uses += 1;
        let used = self.uses;
        let recent = self.recent(bytes);
        recent.by_use.insert(used, run);
        recent.bytes += bytes;
        let runs = self.flows.entry(address(&cached.flow)).or_default();
        *runs += 1;
        if *runs == 1 {
            self.flow_bytes += cached.flow.bytes();
        }
        self.runs.insert(run, Entry { used, since, bytes, cached });
        self.evict();
    }

    fn recent(&mut self, bytes: usize) -> &mut Recent {
        if bytes > self.max_bytes / 16 { &mut self.large } else { &mut self.small }
    }

    /// Evicts the least recently used runs. Large runs get three quarters of the room; a single large run may exceed
    /// that, and the last one put may exceed it for its next decision. Small runs get the rest, at least a quarter.
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

    /// The least recently used large run that was cached for [`KEEPS_ITS_PLACE`]. If there is none, the newest one
    /// except the last put, on which nothing has been decided yet; none if the others fit without that one.
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

    fn evict_oldest(&mut self, of: impl Fn(&RunCache) -> &Recent) {
        if let Some((_, oldest)) = of(self).by_use.first_key_value() {
            let oldest = *oldest;
            self.remove(oldest);
        }
    }
}

/// Identifies a flow: all runs of it share one allocation.
fn address(flow: &Arc<Registered>) -> usize {
    Arc::as_ptr(flow) as usize
}

fn free(what: impl Send + 'static, bytes: usize) {
    if bytes > FREED_INLINE && tokio::runtime::Handle::try_current().is_ok() {
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
        let large = |n: u128| CachedRun {
            rows: 400_000,
            ..CachedRun::new(Namespace::default(), flow.clone(), Run::new(id(n)))
        };
        let mut cache = RunCache::new(1 << 20);
        let cached = |cache: &RunCache| (1..=4).filter(|n| cache.get(id(*n)).is_some()).collect::<Vec<_>>();
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
            CachedRun::new(Namespace::default(), flow.clone(), Run::new(RunId(Uuid::from_u128(n))))
        };
        let one = flow("one");
        let mut cache = RunCache::new(3 * one.bytes());
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
