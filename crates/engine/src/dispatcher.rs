//! Workers that wait for tasks. A claim goes with the next commit; if there is nothing for it, it is parked, and goes
//! again with the commit that adds a task it suits: the task is handed over by the very commit that made it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

use eddyline_machine::{Millis, Task};
use eddyline_store::{ClaimRequest, Claims, Map, Namespace, Offer, RequestId};
use tokio::sync::oneshot;

use crate::assignment::Handed;
use crate::error::Result;

pub(crate) type ParkId = u64;

/// Above so many queues, hints that no claim can have missed are looked for and forgotten while claims are being tried.
const MAX_NEWEST: usize = 1_024;
/// Parked claims that are looked at for the tasks of one commit and cannot take them. Beyond it the tasks' queues are hinted
/// instead, and the claims are tried with the next commit.
const MAX_MISSES: usize = 20_000;

/// A claim that waits for its answer.
#[derive(Debug)]
pub(crate) struct Parked {
    pub request: ClaimRequest,
    pub reply: oneshot::Sender<Result<Vec<Handed>>>,
    /// It is answered at the first try, whatever comes of it.
    pub once: bool,
    /// A keyed hash of its offer: claims with the same one get the same tasks. Computed by the caller, since offers may be
    /// large and the committer compares many of them.
    offer_hash: u64,
    /// How many hints there were when it was last picked.
    seen: u64,
}

/// With random keys, so that nobody can make two offers that have the same hash.
fn hash_of(Offer { handlers, flows, labels, build }: &Offer) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one((handlers, flows, labels, build))
}

impl Parked {
    pub fn new(request: ClaimRequest, reply: oneshot::Sender<Result<Vec<Handed>>>, once: bool) -> Parked {
        let offer_hash = hash_of(&request.offer);
        Parked { request, reply, once, offer_hash, seen: 0 }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Dispatcher {
    parked: Map<ParkId, Parked>,
    by_queue: Map<(Namespace, String), BTreeSet<ParkId>>,
    by_request: Map<RequestId, ParkId>,
    /// To be tried with the next commit.
    fresh: BTreeSet<ParkId>,
    /// Queues that may have something: one of those parked there is tried.
    hinted: BTreeSet<(Namespace, String)>,
    /// How many hints there were.
    hints: u64,
    /// The number of the newest hint for each queue, for as long as a claim is being tried that may have come before it.
    newest: Map<(Namespace, String), u64>,
    /// How many claims are being tried, by the number of hints there were when they were picked.
    trying: BTreeMap<u64, usize>,
    /// Queues that a rate holds back, by when to try again.
    later: BTreeMap<Millis, BTreeSet<(Namespace, String)>>,
    next: ParkId,
}

/// A task that was added, as far as it matters here.
#[derive(Debug)]
pub(crate) struct Added<'a> {
    pub ns: &'a Namespace,
    pub task: &'a Task,
}

impl Dispatcher {
    /// Lets a claim wait. One that waits under the same request is given back: whoever repeats a claim has given up the
    /// first, and the two could not be told apart when one is called off.
    pub fn park(&mut self, parked: Parked) -> Option<Parked> {
        let repeated = self.by_request.get(&parked.request.request).copied().and_then(|id| self.take(id));
        self.next += 1;
        let id = self.next;
        self.fresh.insert(id);
        self.put(id, parked);
        repeated
    }

    /// The claim does not wait any longer; it is given back unless it is being tried right now. One that was not tried at
    /// all is tried first, if somebody still listens: it may repeat one that got tasks, and "nothing" would be a lie.
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

    /// The claims of a worker that gets nothing more are given back. Those that were not tried at all are tried first, for
    /// what they may have got before and repeat alone.
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

    /// The queue may have something: for those parked there, and for those that are being tried right now, whose try may
    /// have come too early to see it.
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

    /// Every queue may have something. Claims whose callers went away without a word are let go of.
    pub fn hint_all(&mut self) {
        let gone = self.parked.iter().filter(|(_, parked)| parked.reply.is_closed()).map(|(id, _)| *id);
        for id in gone.collect::<Vec<_>>() {
            self.take(id);
        }
        self.hinted.extend(self.by_queue.keys().cloned());
    }

    /// There is something to try.
    pub fn wants(&self) -> bool {
        !self.fresh.is_empty() || !self.hinted.is_empty()
    }

    /// When a queue that a rate holds back is to be tried.
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

    /// The claims that go with a commit that adds these tasks.
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
        // Where to begin among those of a queue: everybody before has all the tasks it asked for.
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

    /// A claim that was picked has been tried, whatever came of it. Called once for each, before it is put back.
    pub fn tried(&mut self, parked: &Parked) {
        if let Some(count) = self.trying.get_mut(&parked.seen) {
            *count -= 1;
            if *count == 0 {
                self.trying.remove(&parked.seen);
            }
        }
    }

    /// Forgets hints that every claim has seen by now.
    fn forget_seen(&mut self) {
        match self.trying.first_key_value() {
            None => self.newest.clear(),
            Some((oldest, _)) if self.newest.len() > MAX_NEWEST => self.newest.retain(|_, at| *at > *oldest),
            Some(_) => {}
        }
    }

    /// Who is tried when a queue may have something. What is there may suit the last in line alone, so one of each kind
    /// of worker is tried: all of a kind would get the same.
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

    /// A claim was tried and got nothing: it waits on, in its old place. It is given back if it was repeated meanwhile.
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

    /// Claims that have been tried and wait, each with an offer of its own: many handlers, of which the last differs.
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
            come_back(&mut dispatcher, id, parked);
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
        // In proportion it is 16 times as long; with each compared to each, 256 times.
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
            come_back(&mut dispatcher, id, parked);
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
        // These are looked for in vain, as often as the commit may.
        let mut added: Vec<Added<'_>> = (0..MAX_MISSES / claims).map(|_| Added { ns: &ns, task: &nobodys }).collect();
        added.push(Added { ns: &ns, task: &last });
        assert_eq!(dispatcher.pick(&added).len(), 0);
        assert!(dispatcher.wants(), "the task would wait for the poll");
        assert_eq!(dispatcher.pick(&[]).len(), claims, "one of each offer is tried");
        // Fewer are handed over with the commit that adds them.
        let (mut dispatcher, _answers) = waiting_with_own_offers(claims, 1);
        assert_eq!(dispatcher.pick(&added[1..]).len(), 1);
        assert!(!dispatcher.wants());
    }

    /// A claim comes back from its try with nothing.
    fn come_back(dispatcher: &mut Dispatcher, id: ParkId, parked: Parked) {
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
        // One that was tried, and waits again, is given back.
        come_back(&mut dispatcher, id, parked);
        assert!(dispatcher.unpark(RequestId(Uuid::from_u128(1))).is_some());
    }

    #[test]
    fn the_claims_of_a_worker_that_gets_nothing_more_are_given_back() {
        let mut dispatcher = Dispatcher::default();
        let ((waits, _first), (fresh, _second), (mut others, _third)) = (parked(1), parked(2), parked(3));
        others.request.worker = "v".to_owned();
        dispatcher.park(waits);
        let (id, waits) = dispatcher.pick(&[]).pop().expect("it goes with the next commit");
        come_back(&mut dispatcher, id, waits);
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
        // Between the moment at which it was tried and the moment at which that is known.
        dispatcher.hint(Namespace::default(), "q".to_owned());
        come_back(&mut dispatcher, id, parked);
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
        come_back(&mut dispatcher, v_id, v);
        // A task for handler b, added after w was tried: v is there to be tried, and it does not suit v.
        dispatcher.hint(Namespace::default(), "q".to_owned());
        let (v_id, v) = dispatcher.pick(&[]).pop().expect("v is tried for the hint");
        come_back(&mut dispatcher, w_id, w);
        assert!(dispatcher.wants(), "w would wait for the poll");
        assert_eq!(dispatcher.pick(&[]).iter().map(|(id, _)| *id).collect::<Vec<_>>(), [w_id]);
        come_back(&mut dispatcher, v_id, v);
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
