//! One queue: its rules, and the order of its tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::Millis;
use eddyline_machine::explain::Bound;

use super::bounds::Blocked;
use super::bucket::BucketKey;
use super::pool::{At, First, Pool};
use super::ring::{Key, Rank, Ring, Spot, Turns};
use super::suit::{Class, Kind, Suit};
use crate::claim::Offer;
use crate::document::QueueRules;
use crate::ids::{Map, Namespace};
use crate::query::QueueState;

/// A queue with up to this many pools keeps empty ones: in most queues tasks come and go one by one, and creating and
/// dropping a pool for each would cost more than the task.
const EMPTY_POOLS: usize = 8;

#[derive(Debug)]
pub(super) struct TaskQueue {
    pub ns: Namespace,
    pub name: Arc<str>,
    pub rules: QueueRules,
    pools: Map<Arc<Suit>, Pool>,
    /// The suits of the pools by kind and handler, so that a claim examines only the handlers it names.
    suits: Map<Kind, Map<String, BTreeSet<Arc<Suit>>>>,
    turns: Turns,
    /// The number of waiting tasks, by when they were queued.
    ages: BTreeMap<Millis, usize>,
    ready: usize,
    claimed: u32,
    claimed_of_flow: Map<Arc<str>, u32>,
    /// The number of lookups of the first task of a pool, as a measure of the cost of a claim.
    #[cfg(test)]
    pub looked: usize,
}

/// The pools of a queue that match a claim, in the order of their first tasks. Valid during the claim, in which no task
/// joins a pool and no bound opens.
#[derive(Debug)]
pub(super) struct Offered {
    pub suits: Vec<Arc<Suit>>,
    /// Indexes into `suits`.
    ring: Ring<usize>,
    spots: Vec<Option<Spot>>,
}

impl Offered {
    fn move_to(&mut self, turns: &Turns, pool: usize, spot: Option<Spot>) {
        if let Some(before) = std::mem::replace(&mut self.spots[pool], spot.clone()) {
            self.ring.remove(&before);
        }
        if let Some(spot) = spot {
            self.ring.insert(turns, spot, pool);
        }
    }
}

/// What a queue knows of a waiting task.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub class: Arc<Class>,
    pub key: Key,
    pub rank: Rank,
    pub queued_at: Millis,
}

/// A change found while looking for the first task.
#[derive(Debug)]
pub(super) enum Learned {
    /// Tasks of the suit wait for the bound.
    Parked(Arc<Suit>, Blocked),
    /// No task of the suit waits for the bound any more.
    Unparked(Arc<Suit>, Arc<BucketKey>),
}

impl TaskQueue {
    pub fn new(ns: &Namespace, name: Arc<str>) -> TaskQueue {
        TaskQueue {
            ns: ns.clone(),
            name,
            rules: QueueRules::default(),
            pools: Map::default(),
            suits: Map::default(),
            turns: Turns::default(),
            ages: BTreeMap::new(),
            ready: 0,
            claimed: 0,
            claimed_of_flow: Map::default(),
            #[cfg(test)]
            looked: 0,
        }
    }

    pub fn join(&mut self, place: &Place, at: At) {
        self.ready += 1;
        *self.ages.entry(place.queued_at).or_default() += 1;
        self.turns.join(&place.key);
        let suit = &place.class.suit;
        let pool = self.pools.entry(suit.clone()).or_insert_with(|| {
            let of_kind = self.suits.entry(suit.kind).or_default();
            of_kind.entry(suit.handler.clone()).or_default().insert(suit.clone());
            Pool::default()
        });
        pool.join(&self.turns, &place.class, &place.key, place.rank, at);
    }

    /// Returns the bound that no task of its suit waits for any more, if it was the last.
    pub fn leave(&mut self, place: &Place) -> Option<Arc<BucketKey>> {
        let suit = &place.class.suit;
        let pool = self.pools.get_mut(suit)?;
        let unparked = pool.leave(&self.turns, &place.class, &place.key, place.rank);
        if pool.is_empty() && self.pools.len() > EMPTY_POOLS {
            self.pools.remove(suit);
            if let Some(of_kind) = self.suits.get_mut(&suit.kind)
                && let Some(of_handler) = of_kind.get_mut(&suit.handler)
            {
                of_handler.remove(suit);
                if of_handler.is_empty() {
                    of_kind.remove(&suit.handler);
                }
            }
        }
        self.turns.leave(&place.key);
        self.ready -= 1;
        if let Some(count) = self.ages.get_mut(&place.queued_at) {
            *count -= 1;
            if *count == 0 {
                self.ages.remove(&place.queued_at);
            }
        }
        unparked
    }

    /// A task of that key was claimed, so it is the turn of the other keys.
    pub fn served(&mut self, key: &Key) {
        self.turns.served(key);
    }

    /// The pools whose tasks match an offer.
    pub fn offered(&mut self, offer: &Offer) -> Offered {
        let suits = self.suits(offer);
        let mut offered = Offered { ring: Ring::default(), spots: vec![None; suits.len()], suits };
        for at in 0..offered.suits.len() {
            if self.closed_to(&offered.suits[at].flow).is_none() {
                self.place(&mut offered, at);
            }
        }
        offered
    }

    fn suits(&self, offer: &Offer) -> Vec<Arc<Suit>> {
        if offer.handlers.is_empty() && offer.flows.is_empty() {
            let waiting = self.pools.iter().filter(|(_, pool)| !pool.is_empty()).map(|(suit, _)| suit);
            return waiting.filter(|suit| suit.suits(offer)).cloned().collect();
        }
        let of = |kind: Kind, name: &String| self.suits.get(&kind).and_then(|of_kind| of_kind.get(name));
        let handlers = offer.handlers.iter().filter_map(|handler| of(Kind::Step, handler));
        let flows = offer.flows.keys().filter_map(|flow| of(Kind::Run, flow));
        let waits = |suit: &Arc<Suit>| self.pools.get(suit).is_some_and(|pool| !pool.is_empty());
        handlers.chain(flows).flatten().filter(|suit| suit.suits(offer) && waits(suit)).cloned().collect()
    }

    /// The next offered task that no limit blocks, with its pool. Parks the blocked classes it meets, and stops after
    /// `parks` of them.
    pub fn first(
        &mut self,
        offered: &mut Offered,
        blocked: impl Fn(&Class) -> Option<Blocked>,
        learned: &mut Vec<Learned>,
        parks: &mut usize,
    ) -> Option<(Rank, At, usize)> {
        while let Some(pool) = self.next_pool(offered) {
            let suit = offered.suits[pool].clone();
            let open = self.closed_to(&suit.flow).is_none();
            let first = self.pools.get_mut(&suit).filter(|_| open).and_then(|pool| pool.first(&self.turns));
            let Some(First { rank, at, class }) = first else {
                offered.move_to(&self.turns, pool, None);
                continue;
            };
            let Some(blocked) = blocked(&class) else { return Some((rank, at, pool)) };
            if *parks == 0 {
                return None;
            }
            *parks -= 1;
            let unparked = self.pools.get_mut(&suit).and_then(|pool| pool.park(&self.turns, &class, &blocked));
            learned.push(Learned::Parked(suit.clone(), blocked));
            learned.extend(unparked.map(|bound| Learned::Unparked(suit, bound)));
            self.place(offered, pool);
        }
        None
    }

    /// Updates the spot of a pool after its tasks have changed.
    pub fn place(&mut self, offered: &mut Offered, pool: usize) {
        #[cfg(test)]
        {
            self.looked += 1;
        }
        let spot = self.pools.get_mut(&offered.suits[pool]).and_then(|pool| pool.spot(&self.turns));
        offered.move_to(&self.turns, pool, spot);
    }

    fn next_pool(&mut self, offered: &mut Offered) -> Option<usize> {
        #[cfg(test)]
        let looked = &mut self.looked;
        let (pools, turns) = (&mut self.pools, &self.turns);
        let Offered { suits, ring, spots } = offered;
        let next = ring.first(turns, |pool| {
            #[cfg(test)]
            {
                *looked += 1;
            }
            spots[*pool] = pools.get_mut(&suits[*pool]).and_then(|pool| pool.spot(turns));
            match spots[*pool] {
                Some(Spot::Mixed(turn, rank)) => Some((turn, rank)),
                _ => None,
            }
        });
        next.map(|(_, _, pool)| pool)
    }

    /// Opens the group of a bound: it may let a task of the suit pass.
    pub fn open(&mut self, suit: &Arc<Suit>, bound: &Arc<BucketKey>) {
        if let Some(pool) = self.pools.get_mut(suit) {
            pool.open(&self.turns, bound);
        }
    }

    /// When the first task of these suits becomes claimable among those that wait for a point in time.
    pub fn opens_at(&self, suits: &[Arc<Suit>]) -> Option<Millis> {
        let open = suits.iter().filter(|suit| self.closed_to(&suit.flow).is_none());
        open.filter_map(|suit| self.pools.get(suit)?.opens_at()).min()
    }

    /// The rule that closes the queue to all tasks.
    pub fn closed_by(&self) -> Option<Bound> {
        match self.rules.concurrency {
            _ if self.rules.paused => Some(Bound::Paused),
            Some(most) if self.claimed >= most => Some(Bound::Concurrency { most }),
            _ => None,
        }
    }

    /// No state of former tasks is left.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.pools.values().all(Pool::is_empty)
            && self.pools.len() <= EMPTY_POOLS
            && self.suits.values().map(Map::len).sum::<usize>() <= EMPTY_POOLS
            && self.ages.is_empty()
            && self.claimed_of_flow.is_empty()
            && self.claimed == 0
    }

    pub fn ready(&self) -> usize {
        self.ready
    }

    pub fn offers_anything(&self) -> bool {
        self.ready > 0
    }

    /// The rule that closes the queue to tasks of a flow.
    pub fn closed_to(&self, flow: &Arc<str>) -> Option<Bound> {
        let most = self.rules.flow_concurrency?;
        let claimed = self.claimed_of_flow.get(flow).copied().unwrap_or(0);
        (claimed >= most).then_some(Bound::FlowConcurrency { most })
    }

    pub fn count(&mut self, flow: &Arc<str>, by: i32) {
        self.claimed = self.claimed.saturating_add_signed(by);
        let of_flow = self.claimed_of_flow.entry(flow.clone()).or_default();
        *of_flow = of_flow.saturating_add_signed(by);
        if *of_flow == 0 {
            self.claimed_of_flow.remove(flow);
        }
    }

    pub fn state(&self) -> QueueState {
        QueueState {
            name: self.name.to_string(),
            ready: self.ready,
            claimed: self.claimed as usize,
            oldest: self.ages.first_key_value().map(|(at, _)| *at),
        }
    }
}
