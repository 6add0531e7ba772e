//! Claims that wait for tasks. A claim is tried with the next commit. If it gets nothing it is parked, and tried again
//! with a commit that adds a matching task, so that the commit that creates the task also claims it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use eddyline_machine::{Millis, Task};
use eddyline_store::{ClaimRequest, Claims, Map, Namespace, Offer, RequestId};
use tokio::sync::oneshot;

use crate::assignment::Handed;
use crate::error::Result;

pub(crate) type ParkId = u64;

/// The size of [`Dispatcher::newest`] from which on hints that every claim has seen are pruned while claims are being
/// tried.
const MAX_NEWEST: usize = 1_024;
/// How many parked claims that do not match are examined for the tasks of one commit. Beyond that, the queues of the
/// remaining tasks are hinted, and claims are tried with the next commit.
const MAX_MISSES: usize = 20_000;

/// A claim that waits for its answer.
#[derive(Debug)]
pub(crate) struct Parked {
    pub request: ClaimRequest,
    pub reply: oneshot::Sender<Result<Vec<Handed>>>,
    /// Answered after the first try, even without tasks.
    pub once: bool,
    /// A keyed hash of its offer: claims with equal offers match the same tasks. Computed by the caller, since offers
    /// may be large and the committer compares many of them.
    offer_hash: u64,
    /// The number of hints when it was last picked.
    seen: u64,
    /// The caller may repeat the claim at another instance, so its tasks are not released if it is gone.
    pub repeated_elsewhere: bool,
}

/// Hashes with random keys, so that a client cannot construct two offers with the same hash.
fn hash_of(Offer { handlers, flows, labels, build }: &Offer) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one((handlers, flows, labels, build))
}

impl Parked {
    pub fn new(request: ClaimRequest, reply: oneshot::Sender<Result<Vec<Handed>>>, once: bool) -> Parked {
        let offer_hash = hash_of(&request.offer);
        Parked { request, reply, once, offer_hash, seen: 0, repeated_elsewhere: false }
    }

    pub fn repeated_elsewhere(self, repeated_elsewhere: bool) -> Parked {
        Parked { repeated_elsewhere, ..self }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Dispatcher {
    parked: Map<ParkId, Parked>,
    by_queue: Map<(Namespace, String), BTreeSet<ParkId>>,
    by_request: Map<RequestId, ParkId>,
    /// To be tried with the next commit.
    fresh: BTreeSet<ParkId>,
    /// Queues that may have tasks: one parked claim of each offer is tried.
    hinted: BTreeSet<(Namespace, String)>,
    /// The number of hints so far.
    hints: u64,
    /// The number of the newest hint for each queue, kept while a claim is being tried that may not have seen it.
    newest: Map<(Namespace, String), u64>,
    /// How many claims are being tried, by the number of hints when they were picked.
    trying: BTreeMap<u64, usize>,
    /// Rate-limited queues, by when to try again.
    later: BTreeMap<Millis, BTreeSet<(Namespace, String)>>,
    next: ParkId,
}

/// A task that a commit adds.
#[derive(Debug)]
pub(crate) struct Added<'a> {
    pub ns: &'a Namespace,
    pub task: &'a Task,
}

impl Dispatcher {
    /// Parks a claim. Returns a parked claim with the same request id, if any: its caller has given it up by repeating
    /// it, and [`Dispatcher::unpark`] could not distinguish the two.
    pub fn park(&mut self, parked: Parked) -> Option<Parked> {
        let repeated = self.by_request.get(&parked.request.request).copied().and_then(|id| self.take(id));
        self.next += 1;
        let id = self.next;
        self.fresh.insert(id);
        self.put(id, parked);
        repeated
    }

    /// Stops a claim from waiting and returns it, unless it is being tried right now. A claim that was never tried is
    /// tried once first, if its caller still listens: it may repeat a claim that got tasks, and an empty answer would
    /// be wrong.
    pub fn unpark(&mut self, request: RequestId) -> Option<Parked> {
        let id = *self.by_request.get(&request)?;
        if self.fresh.contains(&id)
            && let Some(parked) = self.parked.get_mut(&id)
            && !parked.reply.is_closed()
        {
            parked.once = true;
            return None;
        }
        self.take(id)
    }

    /// Returns the parked claims of a worker that gets no more tasks. Claims that were never tried are tried once
    /// without queues: they get only tasks that an earlier claim with the same request id got.
    pub fn dismiss(&mut self, ns: &Namespace, worker: &str) -> Vec<Parked> {
        let its =
            self.parked.iter().filter(|(_, Parked { request, .. })| request.ns == *ns && request.worker == worker);
        let its: Vec<ParkId> = its.map(|(id, _)| *id).collect();
        let mut dismissed = Vec::new();
        for id in its {
            let fresh = self.fresh.contains(&id);
            let Some(mut parked) = self.take(id) else { continue };
            if !fresh || parked.reply.is_closed() {
                dismissed.push(parked);
                continue;
            }
            (parked.request.queues, parked.once) = (Vec::new(), true);
            self.fresh.insert(id);
            self.put(id, parked);
        }
        dismissed
    }

    /// The queue may have tasks. The hint is for claims that are parked there, and for those that are being tried right
    /// now, whose try may have been too early.
    pub fn hint(&mut self, ns: Namespace, queue: String) {
        let queue = (ns, queue);
        self.hints += 1;
        if !self.trying.is_empty() {
            self.newest.insert(queue.clone(), self.hints);
        }
        if self.by_queue.contains_key(&queue) {
            self.hinted.insert(queue);
        }
    }

    /// Every queue may have tasks. Also drops claims whose callers went away.
    pub fn hint_all(&mut self) {
        let gone = self.parked.iter().filter(|(_, parked)| parked.reply.is_closed()).map(|(id, _)| *id);
        for id in gone.collect::<Vec<_>>() {
            self.take(id);
        }
        self.hinted.extend(self.by_queue.keys().cloned());
    }

    /// Whether there are claims to try.
    pub fn wants(&self) -> bool {
        !self.fresh.is_empty() || !self.hinted.is_empty()
    }

    /// When the next rate-limited queue is to be tried.
    pub fn next_try(&self) -> Option<Millis> {
        self.later.first_key_value().map(|(at, _)| *at)
    }

    pub fn wake_due(&mut self, now: Millis) {
        while let Some(entry) = self.later.first_entry()
            && *entry.key() <= now
        {
            for (ns, queue) in entry.remove() {
                self.hint(ns, queue);
            }
        }
    }

    /// Takes the claims to try with a commit that adds these tasks.
    pub fn pick(&mut self, added: &[Added<'_>]) -> Vec<(ParkId, Parked)> {
        self.forget_seen();
        let mut room: BTreeMap<ParkId, usize> = BTreeMap::new();
        for id in std::mem::take(&mut self.fresh) {
            if let Some(parked) = self.parked.get(&id) {
                room.insert(id, parked.request.max);
            }
        }
        for queue in std::mem::take(&mut self.hinted) {
            for (id, max) in self.first_of_each_offer(&queue) {
                room.entry(id).or_insert(max);
            }
        }
        // For each queue, the first parked claim that may still have room.
        let mut begin: Map<(Namespace, String), ParkId> = Map::default();
        let (mut misses, mut skipped) = (0, BTreeSet::new());
        for Added { ns, task } in added {
            let queue = ((*ns).clone(), task.queue.clone());
            let Some(ids) = self.by_queue.get(&queue) else { continue };
            if misses >= MAX_MISSES {
                skipped.insert(queue);
                continue;
            }
            let from = begin.entry(queue).or_default();
            while let Some(first) = ids.range(*from..).next()
                && room.get(first) == Some(&0)
            {
                *from = first + 1;
            }
            let suits = |id: &ParkId| {
                let parked = &self.parked[id];
                room.get(id).is_none_or(|room| *room > 0)
                    && !parked.reply.is_closed()
                    && parked.request.offer.takes(task.kind, &task.handler, &task.requires, task.build.as_deref())
            };
            let mut found = None;
            for id in ids.range(*from..) {
                if suits(id) {
                    found = Some(*id);
                    break;
                }
                misses += 1;
                if misses >= MAX_MISSES {
                    skipped.insert(((*ns).clone(), task.queue.clone()));
                    break;
                }
            }
            if let Some(id) = found {
                let room = room.entry(id).or_insert_with(|| self.parked[&id].request.max);
                *room -= 1;
            }
        }
        let ids: Vec<ParkId> = room.into_keys().collect();
        let mut picked = Vec::with_capacity(ids.len());
        for id in ids {
            if let Some(parked) = self.take(id).filter(|parked| !parked.reply.is_closed()) {
                *self.trying.entry(self.hints).or_default() += 1;
                picked.push((id, Parked { seen: self.hints, ..parked }));
            }
        }
        skipped.retain(|queue| self.by_queue.contains_key(queue));
        self.hinted.extend(skipped);
        picked
    }

    /// A picked claim has been tried. Called once for each, before it is put back.
    pub fn tried(&mut self, parked: &Parked) {
        if let Some(count) = self.trying.get_mut(&parked.seen) {
            *count -= 1;
            if *count == 0 {
                self.trying.remove(&parked.seen);
            }
        }
    }

    /// Drops hints that every claim has seen.
    fn forget_seen(&mut self) {
        match self.trying.first_key_value() {
            None => self.newest.clear(),
            Some((oldest, _)) if self.newest.len() > MAX_NEWEST => self.newest.retain(|_, at| *at > *oldest),
            Some(_) => {}
        }
    }

    /// The claims to try when a queue may have tasks: the first of each offer, since a task may match only the last
    /// claim in line, and claims with equal offers match the same tasks.
    fn first_of_each_offer(&self, queue: &(Namespace, String)) -> Vec<(ParkId, usize)> {
        let (mut offers, mut found): (HashSet<u64>, _) = (HashSet::new(), Vec::new());
        let waiting = self.by_queue.get(queue).into_iter().flatten();
        for (id, parked) in waiting.filter_map(|id| Some((*id, self.parked.get(id)?))) {
            if !parked.reply.is_closed() && offers.insert(parked.offer_hash) {
                found.push((id, parked.request.max));
            }
        }
        found
    }

    /// Parks a claim again that was tried and got nothing, in its old place. Returns it if it was repeated meanwhile.
    pub fn put_back(&mut self, id: ParkId, parked: Parked, claims: &Claims) -> Option<Parked> {
        if self.by_request.contains_key(&parked.request.request) {
            return Some(parked);
        }
        if let Some(at) = claims.retry_at {
            let queues = parked.request.queues.iter().map(|queue| (parked.request.ns.clone(), queue.clone()));
            self.later.entry(at).or_default().extend(queues);
        }
        let Parked { request, seen, .. } = &parked;
        let missed = |queue: &String| self.newest.get(&(request.ns.clone(), queue.clone())).is_some_and(|at| at > seen);
        if request.queues.iter().any(missed) {
            self.fresh.insert(id);
        }
        self.put(id, parked);
        None
    }

    pub fn drain(&mut self) -> Vec<Parked> {
        let ids: Vec<ParkId> = self.parked.keys().copied().collect();
        ids.into_iter().filter_map(|id| self.take(id)).collect()
    }

    fn put(&mut self, id: ParkId, parked: Parked) {
        for queue in &parked.request.queues {
            self.by_queue.entry((parked.request.ns.clone(), queue.clone())).or_default().insert(id);
        }
        self.by_request.insert(parked.request.request, id);
        self.parked.insert(id, parked);
    }

    fn take(&mut self, id: ParkId) -> Option<Parked> {
        let parked = self.parked.remove(&id)?;
        self.fresh.remove(&id);
        self.by_request.remove(&parked.request.request);
        for queue in &parked.request.queues {
            let at = (parked.request.ns.clone(), queue.clone());
            if let Some(ids) = self.by_queue.get_mut(&at) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.by_queue.remove(&at);
                }
            }
        }
        Some(parked)
    }
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use eddyline_machine::{ActId, Data, Fence, TaskKind};
    use uuid::Uuid;

    use super::*;

    fn parked(id: u128) -> (Parked, oneshot::Receiver<Result<Vec<Handed>>>) {
        let (reply, answer) = oneshot::channel();
        let request = ClaimRequest {
            ns: Namespace::default(),
            request: RequestId(Uuid::from_u128(id)),
            worker: "w".to_owned(),
            queues: vec!["q".to_owned()],
            offer: Arc::new(Offer::default()),
            max: 1,
            most_held: None,
            lease_ms: 1,
        };
        (Parked::new(request, reply, false), answer)
    }

    /// Claims that were tried and are parked, each with its own offer: many handlers that differ only in the last.
    fn waiting_with_own_offers(
        count: usize,
        handlers: usize,
    ) -> (Dispatcher, Vec<oneshot::Receiver<Result<Vec<Handed>>>>) {
        let (mut dispatcher, mut answers) = (Dispatcher::default(), Vec::new());
        for at in 0..count {
            let (claim, answer) = parked(at as u128);
            let names = (1..handlers).map(|at| format!("common-{at}")).chain([format!("own-{at}")]).collect();
            let offer = Arc::new(Offer { handlers: names, ..Offer::default() });
            let Parked { request, reply, .. } = claim;
            dispatcher.park(Parked::new(ClaimRequest { offer, ..request }, reply, false));
            answers.push(answer);
        }
        for (id, parked) in dispatcher.pick(&[]) {
            return_empty(&mut dispatcher, id, parked);
        }
        (dispatcher, answers)
    }

    fn task(handler: &str) -> Task {
        Task {
            fence: Fence(1),
            activation: ActId(1),
            name: "a".to_owned(),
            step: "a".to_owned(),
            handler: handler.to_owned(),
            queue: "q".to_owned(),
            kind: TaskKind::Step,
            attempt: 1,
            input: Data::null(),
            gate: None,
            priority: 0,
            limits: Vec::new(),
            requires: Vec::new(),
            key: None,
            timeout_ms: None,
            start_timeout_ms: None,
            build: None,
            attempts: None,
        }
    }

    #[test]
    fn a_hint_does_not_compare_each_offer_with_each_other() {
        let time = |count: usize| {
            let (dispatcher, _answers) = waiting_with_own_offers(count, 50);
            let queue = (Namespace::default(), "q".to_owned());
            let tries = (0..3).map(|_| {
                let since = Instant::now();
                assert_eq!(dispatcher.first_of_each_offer(&queue).len(), count);
                since.elapsed()
            });
            tries.min().expect("three tries")
        };
        let (few, many) = (time(200), time(200 * 16));
        // Linear cost takes 16 times as long; quadratic cost 256 times.
        assert!(many < few * 64 + Duration::from_millis(1), "{few:?} for 200 claims, {many:?} for 16 times as many");
    }

    #[test]
    fn claims_with_equal_offers_count_as_one_in_a_hint() {
        let mut dispatcher = Dispatcher::default();
        let ((first, _first), (second, _second)) = (parked(1), parked(2));
        assert!(!Arc::ptr_eq(&first.request.offer, &second.request.offer));
        dispatcher.park(first);
        dispatcher.park(second);
        for (id, parked) in dispatcher.pick(&[]) {
            return_empty(&mut dispatcher, id, parked);
        }
        dispatcher.hint_all();
        assert_eq!(dispatcher.pick(&[]).len(), 1);
    }

    #[test]
    fn tasks_that_suit_few_of_many_claims_are_left_to_the_next_commit() {
        let claims = 400;
        let (mut dispatcher, _answers) = waiting_with_own_offers(claims, 1);
        let ns = Namespace::default();
        let (nobodys, last) = (task("nobody"), task(&format!("own-{}", claims - 1)));
        // No claim matches these; they use up the misses of the commit.
        let mut added: Vec<Added<'_>> = (0..MAX_MISSES / claims).map(|_| Added { ns: &ns, task: &nobodys }).collect();
        added.push(Added { ns: &ns, task: &last });
        assert_eq!(dispatcher.pick(&added).len(), 0);
        assert!(dispatcher.wants(), "the task would wait for the poll");
        assert_eq!(dispatcher.pick(&[]).len(), claims, "one of each offer is tried");
        // With one fewer, the last task is claimed by the commit that adds it.
        let (mut dispatcher, _answers) = waiting_with_own_offers(claims, 1);
        assert_eq!(dispatcher.pick(&added[1..]).len(), 1);
        assert!(!dispatcher.wants());
    }

    /// A claim was tried and got nothing.
    fn return_empty(dispatcher: &mut Dispatcher, id: ParkId, parked: Parked) {
        dispatcher.tried(&parked);
        assert!(dispatcher.put_back(id, parked, &Claims::default()).is_none());
    }

    #[test]
    fn a_claim_that_is_called_off_is_tried_once_unless_nobody_listens() {
        let mut dispatcher = Dispatcher::default();
        let (listened_to, _answer) = parked(1);
        let (alone, answer) = parked(2);
        drop(answer);
        dispatcher.park(listened_to);
        dispatcher.park(alone);
        assert!(dispatcher.unpark(RequestId(Uuid::from_u128(1))).is_none());
        assert!(dispatcher.unpark(RequestId(Uuid::from_u128(2))).is_some());
        let (id, parked) = dispatcher.pick(&[]).pop().expect("it goes with the next commit");
        assert!(parked.once, "and is answered by it");
        // A claim that was tried and is parked again is returned.
        return_empty(&mut dispatcher, id, parked);
        assert!(dispatcher.unpark(RequestId(Uuid::from_u128(1))).is_some());
    }

    #[test]
    fn the_claims_of_a_worker_that_gets_nothing_more_are_given_back() {
        let mut dispatcher = Dispatcher::default();
        let ((waits, _first), (fresh, _second), (mut others, _third)) = (parked(1), parked(2), parked(3));
        others.request.worker = "v".to_owned();
        dispatcher.park(waits);
        let (id, waits) = dispatcher.pick(&[]).pop().expect("it goes with the next commit");
        return_empty(&mut dispatcher, id, waits);
        dispatcher.park(fresh);
        dispatcher.park(others);
        assert!(dispatcher.dismiss(&Namespace::new("another"), "w").is_empty());
        let given_back = dispatcher.dismiss(&Namespace::default(), "w");
        let request = |parked: &Parked| parked.request.request.0.as_u128();
        assert_eq!(given_back.iter().map(request).collect::<Vec<_>>(), [1]);
        let picked = dispatcher.pick(&[]);
        let tried: Vec<_> = picked.iter().map(|(_, p)| (request(p), p.once, p.request.queues.len())).collect();
        assert_eq!(tried, [(2, true, 0), (3, false, 1)], "one that may be a repeat asks for nothing new");
    }

    #[test]
    fn a_hint_that_comes_while_the_only_claim_is_being_tried_is_not_missed() {
        let mut dispatcher = Dispatcher::default();
        let (parked, _answer) = parked(1);
        dispatcher.park(parked);
        let (id, parked) = dispatcher.pick(&[]).pop().expect("the claim goes with the next commit");
        assert!(!dispatcher.wants());
        // The hint arrives after the store tried the claim and before the dispatcher learns the result.
        dispatcher.hint(Namespace::default(), "q".to_owned());
        return_empty(&mut dispatcher, id, parked);
        assert!(dispatcher.wants(), "the task would never be claimed");
        assert_eq!(dispatcher.pick(&[]).len(), 1);
    }

    #[test]
    fn a_hint_that_comes_while_one_claim_is_being_tried_and_another_is_parked_is_not_missed() {
        let mut dispatcher = Dispatcher::default();
        let ((mut v, _first), (mut w, _second)) = (parked(1), parked(2));
        for (parked, handler) in [(&mut v, "a"), (&mut w, "b")] {
            let offer = Offer { handlers: [handler.to_owned()].into(), ..Offer::default() };
            parked.offer_hash = hash_of(&offer);
            parked.request.offer = Arc::new(offer);
        }
        dispatcher.park(v);
        dispatcher.park(w);
        let mut picked = dispatcher.pick(&[]);
        let ((w_id, w), (v_id, v)) = (picked.pop().expect("w"), picked.pop().expect("v"));
        return_empty(&mut dispatcher, v_id, v);
        // A task for handler b is added after w was tried. Only v is parked, and the task does not match v.
        dispatcher.hint(Namespace::default(), "q".to_owned());
        let (v_id, v) = dispatcher.pick(&[]).pop().expect("v is tried for the hint");
        return_empty(&mut dispatcher, w_id, w);
        assert!(dispatcher.wants(), "w would wait for the poll");
        assert_eq!(dispatcher.pick(&[]).iter().map(|(id, _)| *id).collect::<Vec<_>>(), [w_id]);
        return_empty(&mut dispatcher, v_id, v);
        assert!(!dispatcher.wants(), "v was picked after the hint");
    }

    #[test]
    fn hints_are_kept_only_while_a_claim_is_being_tried() {
        let mut dispatcher = Dispatcher::default();
        let (claim, _answer) = parked(1);
        dispatcher.park(claim);
        let (_, claim) = dispatcher.pick(&[]).pop().expect("the claim");
        for at in 0..3 {
            dispatcher.hint(Namespace::default(), format!("q{at}"));
        }
        assert_eq!(dispatcher.newest.len(), 3);
        dispatcher.tried(&claim);
        dispatcher.pick(&[]);
        assert!(dispatcher.newest.is_empty());
        dispatcher.hint(Namespace::default(), "q".to_owned());
        assert!(dispatcher.newest.is_empty());
    }
}
