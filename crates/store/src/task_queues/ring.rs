//! The order of tasks: by the turn of their keys, then by rank.
//!
//! Every claim advances the turn of a key; re-sorting all tasks of that key would make a claim linear in their number.
//! So a ring sorts each entry by a possibly outdated turn. Turns only grow, so an entry is never sorted too late: the
//! first entry is checked again, and moved back if it is outdated.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::Millis;

use crate::ids::Map;

/// Lower is earlier: the queueing time minus what the priority is worth, then the order of queueing. Unique per task.
pub(super) type Rank = (Millis, u64);

pub(super) type Key = Option<Arc<str>>;

/// How often the keys of a queue were served.
#[derive(Debug, Default)]
pub(super) struct Turns {
    keys: Map<Key, Turn>,
    /// The turn of the key served last: a new key starts there.
    last: u64,
}

#[derive(Debug)]
struct Turn {
    taken: u64,
    waiting: usize,
}

impl Turns {
    /// A task of that key started waiting.
    pub fn join(&mut self, key: &Key) {
        let last = self.last;
        self.keys.entry(key.clone()).or_insert(Turn { taken: last, waiting: 0 }).waiting += 1;
    }

    /// A task of that key stopped waiting.
    pub fn leave(&mut self, key: &Key) {
        let Some(turn) = self.keys.get_mut(key) else { return };
        turn.waiting -= 1;
        if turn.waiting == 0 {
            self.last = self.last.max(turn.taken);
            self.keys.remove(key);
        }
    }

    /// A task of that key was claimed, so it is the turn of the other keys.
    pub fn served(&mut self, key: &Key) {
        let Some(turn) = self.keys.get_mut(key) else { return };
        self.last = self.last.max(turn.taken);
        turn.taken += 1;
    }

    fn of(&self, key: &Key) -> u64 {
        self.keys.get(key).map_or(self.last, |turn| turn.taken)
    }
}

/// The position of a member in a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Spot {
    /// All its tasks have this key; the rank is that of its first.
    Key(Key, Rank),
    /// Its tasks have several keys; the turn and rank are those of its first when last checked.
    Mixed(u64, Rank),
}

/// Members in the order of their turns. A member is a task, or a collection of tasks.
///
/// A single member is kept in `only`, without the maps: most queues are nearly empty.
#[derive(Debug)]
pub(super) struct Ring<M> {
    /// While this is set, the maps are empty.
    only: Option<(Spot, M)>,
    by_key: Map<Key, OfKey<M>>,
    /// The first of each key.
    heads: BTreeSet<(u64, Rank, Key)>,
    mixed: BTreeMap<(u64, Rank), M>,
}

#[derive(Debug)]
struct OfKey<M> {
    members: BTreeMap<Rank, M>,
    /// Its entry in `heads`.
    head: (u64, Rank),
}

impl<M> Default for Ring<M> {
    fn default() -> Ring<M> {
        Ring { only: None, by_key: Map::default(), heads: BTreeSet::new(), mixed: BTreeMap::new() }
    }
}

impl<M: Clone> Ring<M> {
    pub fn is_empty(&self) -> bool {
        self.only.is_none() && self.has_no_others()
    }

    fn has_no_others(&self) -> bool {
        self.by_key.is_empty() && self.mixed.is_empty()
    }

    pub fn insert(&mut self, turns: &Turns, spot: Spot, member: M) {
        match self.only.take() {
            None if self.has_no_others() => self.only = Some((spot, member)),
            None => self.insert_among(turns, spot, member),
            Some((before, only)) => {
                self.insert_among(turns, before, only);
                self.insert_among(turns, spot, member);
            }
        }
    }

    fn insert_among(&mut self, turns: &Turns, spot: Spot, member: M) {
        let (key, rank) = match spot {
            Spot::Mixed(turn, rank) => {
                self.mixed.insert((turn, rank), member);
                return;
            }
            Spot::Key(key, rank) => (key, rank),
        };
        match self.by_key.get_mut(&key) {
            None => {
                let head = (turns.of(&key), rank);
                self.heads.insert((head.0, rank, key.clone()));
                self.by_key.insert(key, OfKey { members: BTreeMap::from([(rank, member)]), head });
            }
            Some(of_key) => {
                of_key.members.insert(rank, member);
                if rank < of_key.head.1 {
                    self.heads.remove(&(of_key.head.0, of_key.head.1, key.clone()));
                    of_key.head.1 = rank;
                    self.heads.insert((of_key.head.0, rank, key));
                }
            }
        }
    }

    pub fn remove(&mut self, spot: &Spot) {
        if let Some((only, _)) = &self.only {
            if only == spot {
                self.only = None;
            }
            return;
        }
        let (key, rank) = match spot {
            Spot::Mixed(turn, rank) => {
                self.mixed.remove(&(*turn, *rank));
                return;
            }
            Spot::Key(key, rank) => (key, rank),
        };
        let Some(of_key) = self.by_key.get_mut(key) else { return };
        of_key.members.remove(rank);
        if of_key.head.1 != *rank {
            return;
        }
        self.heads.remove(&(of_key.head.0, *rank, key.clone()));
        match of_key.members.first_key_value() {
            Some((next, _)) => {
                of_key.head.1 = *next;
                self.heads.insert((of_key.head.0, *next, key.clone()));
            }
            None => {
                self.by_key.remove(key);
            }
        }
    }

    /// The next member, with its turn and rank. `look` recomputes and stores the spot of a member with several keys.
    pub fn first(&mut self, turns: &Turns, mut look: impl FnMut(&M) -> Option<(u64, Rank)>) -> Option<(u64, Rank, M)> {
        if let Some((spot, member)) = &mut self.only {
            let (turn, rank) = match spot {
                Spot::Key(key, rank) => (turns.of(key), *rank),
                Spot::Mixed(turn, rank) => match look(member) {
                    Some(now) => {
                        (*turn, *rank) = now;
                        now
                    }
                    None => {
                        self.only = None;
                        return None;
                    }
                },
            };
            return Some((turn, rank, member.clone()));
        }
        let mixed = loop {
            let Some((at, member)) = self.mixed.first_key_value() else { break None };
            let (at, member) = (*at, member.clone());
            let now = look(&member);
            if now == Some(at) {
                break Some((at, member));
            }
            self.mixed.remove(&at);
            if let Some(now) = now {
                self.mixed.insert(now, member);
            }
        };
        let head = self.first_head(turns);
        match (head, mixed) {
            (Some((turn, rank, _)), Some((at, member))) if at < (turn, rank) => Some((at.0, at.1, member)),
            (Some((turn, rank, key)), _) => {
                let member = self.by_key.get(&key)?.members.get(&rank)?.clone();
                Some((turn, rank, member))
            }
            (None, mixed) => mixed.map(|((turn, rank), member)| (turn, rank, member)),
        }
    }

    /// The spot of this ring as a member of another one.
    pub fn spot(&mut self, turns: &Turns, look: impl FnMut(&M) -> Option<(u64, Rank)>) -> Option<Spot> {
        if let Some((spot @ Spot::Key(..), _)) = &self.only {
            return Some(spot.clone());
        }
        if self.only.is_none() && self.mixed.is_empty() && self.by_key.len() == 1 {
            let (key, of_key) = self.by_key.iter().next()?;
            return Some(Spot::Key(key.clone(), of_key.head.1));
        }
        self.first(turns, look).map(|(turn, rank, _)| Spot::Mixed(turn, rank))
    }

    fn first_head(&mut self, turns: &Turns) -> Option<(u64, Rank, Key)> {
        loop {
            let (turn, rank, key) = self.heads.first()?.clone();
            let now = turns.of(&key);
            if now == turn {
                return Some((turn, rank, key));
            }
            self.heads.remove(&(turn, rank, key.clone()));
            if let Some(of_key) = self.by_key.get_mut(&key) {
                of_key.head.0 = now;
                self.heads.insert((now, rank, key));
            }
        }
    }
}
