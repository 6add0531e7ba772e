//! The tasks of a queue that suit the same workers, and which of them is next.
//!
//! Tasks with the same limits form a class. A class blocked by a limit is parked under it, together with all others
//! that the limit blocks, and not examined again until the limit may let one pass: the cost of a claim does not depend
//! on the number of waiting classes.

use std::collections::BTreeSet;
use std::sync::Arc;

use eddyline_machine::{Fence, Millis, RunId};

use super::bounds::Blocked;
use super::bucket::BucketKey;
use super::ring::{Key, Rank, Ring, Spot, Turns};
use super::suit::Class;
use crate::ids::Map;

pub(super) type At = (RunId, Fence);

#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Classes not known to be blocked, and open groups.
    root: Ring<Member>,
    classes: Map<Arc<Class>, ClassTasks>,
    groups: Map<Arc<BucketKey>, LimitGroup>,
    /// Closed groups that open by time alone, by when.
    timed: BTreeSet<(Millis, Arc<BucketKey>)>,
}

#[derive(Debug, Clone)]
enum Member {
    Class(Arc<Class>),
    Group(Arc<BucketKey>),
}

/// The tasks of a class.
#[derive(Debug, Default)]
struct ClassTasks {
    ring: Ring<At>,
    /// The group it is parked in.
    within: Option<Arc<BucketKey>>,
    /// Its spot in its group, or in `root`.
    spot: Option<Spot>,
}

/// Classes found to be blocked by the same bound.
#[derive(Debug, Default)]
struct LimitGroup {
    ring: Ring<Member>,
    /// Its spot in `root` while it is open, that is, while its bound may let a task pass.
    spot: Option<Spot>,
    closed: bool,
    until: Option<Millis>,
}

/// The first task of a pool.
#[derive(Debug)]
pub(super) struct First {
    pub rank: Rank,
    pub at: At,
    pub class: Arc<Class>,
}

impl Pool {
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    pub fn join(&mut self, turns: &Turns, class: &Arc<Class>, key: &Key, rank: Rank, at: At) {
        let tasks = self.classes.entry(class.clone()).or_default();
        tasks.ring.insert(turns, Spot::Key(key.clone(), rank), at);
        self.place_class(turns, class);
    }

    /// Returns the bound whose group was dropped, if this was its last task.
    pub fn leave(&mut self, turns: &Turns, class: &Arc<Class>, key: &Key, rank: Rank) -> Option<Arc<BucketKey>> {
        let tasks = self.classes.get_mut(class)?;
        tasks.ring.remove(&Spot::Key(key.clone(), rank));
        let emptied = tasks.ring.is_empty();
        let within = tasks.within.clone();
        self.place_class(turns, class);
        if emptied {
            self.classes.remove(class);
        }
        self.drop_group_if_empty(within?)
    }

    /// The next task, as far as known blocks go.
    pub fn first(&mut self, turns: &Turns) -> Option<First> {
        let Pool { root, classes, groups, .. } = self;
        let (_, _, member) = root.first(turns, |member| look(member, turns, classes, groups))?;
        let class = match member {
            Member::Class(class) => class,
            Member::Group(bound) => {
                let ring = &mut groups.get_mut(&bound)?.ring;
                match ring.first(turns, |member| look_at_class(member, turns, classes))?.2 {
                    Member::Class(class) => class,
                    Member::Group(_) => return None,
                }
            }
        };
        let (_, rank, at) = classes.get_mut(&class)?.ring.first(turns, |_| None)?;
        Some(First { rank, at, class })
    }

    /// The spot of its first task among other pools.
    pub fn spot(&mut self, turns: &Turns) -> Option<Spot> {
        let Pool { root, classes, groups, .. } = self;
        root.spot(turns, |member| look(member, turns, classes, groups))
    }

    /// Parks a blocked class with all others blocked by the same bound; none is examined again until [`Pool::open`].
    /// Returns the bound of the group that the class left, if that group is now empty.
    pub fn park(&mut self, turns: &Turns, class: &Arc<Class>, blocked: &Blocked) -> Option<Arc<BucketKey>> {
        let tasks = self.classes.get_mut(class)?;
        let from = tasks.within.clone();
        if from.as_ref() != Some(&blocked.by) {
            if let Some(spot) = tasks.spot.take() {
                match &from {
                    None => self.root.remove(&spot),
                    Some(bound) => self.groups.get_mut(bound)?.ring.remove(&spot),
                }
            }
            tasks.within = Some(blocked.by.clone());
            self.groups.entry(blocked.by.clone()).or_default();
            self.place_class(turns, class);
        }
        self.close(&blocked.by, blocked.until);
        let from = from.filter(|from| *from != blocked.by)?;
        self.place_group(turns, &from);
        self.drop_group_if_empty(from)
    }

    /// Opens a group: its bound may let a task pass.
    pub fn open(&mut self, turns: &Turns, bound: &Arc<BucketKey>) {
        let Some(group) = self.groups.get_mut(bound) else { return };
        group.closed = false;
        if let Some(until) = group.until.take() {
            self.timed.remove(&(until, bound.clone()));
        }
        self.place_group(turns, bound);
    }

    /// When the first closed group opens by time alone.
    pub fn opens_at(&self) -> Option<Millis> {
        self.timed.first().map(|(at, _)| *at)
    }

    fn close(&mut self, bound: &Arc<BucketKey>, until: Option<Millis>) {
        let Some(group) = self.groups.get_mut(bound) else { return };
        if let Some(spot) = group.spot.take() {
            self.root.remove(&spot);
        }
        if let Some(before) = std::mem::replace(&mut group.until, until) {
            self.timed.remove(&(before, bound.clone()));
        }
        if let Some(until) = until {
            self.timed.insert((until, bound.clone()));
        }
        group.closed = true;
    }

    fn drop_group_if_empty(&mut self, bound: Arc<BucketKey>) -> Option<Arc<BucketKey>> {
        if !self.groups.get(&bound)?.ring.is_empty() {
            return None;
        }
        let group = self.groups.remove(&bound)?;
        if let Some(until) = group.until {
            self.timed.remove(&(until, bound.clone()));
        }
        Some(bound)
    }

    /// Updates the spot of a class after its tasks have changed.
    fn place_class(&mut self, turns: &Turns, class: &Arc<Class>) {
        let Some(tasks) = self.classes.get_mut(class) else { return };
        let spot = tasks.ring.spot(turns, |_| None);
        if spot == tasks.spot {
            return;
        }
        let ring = match &tasks.within {
            None => &mut self.root,
            Some(bound) => match self.groups.get_mut(bound) {
                Some(group) => &mut group.ring,
                None => return,
            },
        };
        if let Some(spot) = tasks.spot.take() {
            ring.remove(&spot);
        }
        if let Some(spot) = &spot {
            ring.insert(turns, spot.clone(), Member::Class(class.clone()));
        }
        tasks.spot = spot;
        if let Some(bound) = tasks.within.clone() {
            self.place_group(turns, &bound);
        }
    }

    /// Updates the spot of an open group after its classes have changed.
    fn place_group(&mut self, turns: &Turns, bound: &Arc<BucketKey>) {
        let Pool { root, classes, groups, .. } = self;
        let Some(group) = groups.get_mut(bound).filter(|group| !group.closed) else { return };
        let spot = group.ring.spot(turns, |member| look_at_class(member, turns, classes));
        if spot == group.spot {
            return;
        }
        if let Some(spot) = group.spot.take() {
            root.remove(&spot);
        }
        if let Some(spot) = &spot {
            root.insert(turns, spot.clone(), Member::Group(bound.clone()));
        }
        group.spot = spot;
    }
}

/// Recomputes and stores the spot of a member with several keys.
fn look(
    member: &Member,
    turns: &Turns,
    classes: &mut Map<Arc<Class>, ClassTasks>,
    groups: &mut Map<Arc<BucketKey>, LimitGroup>,
) -> Option<(u64, Rank)> {
    let Member::Group(bound) = member else { return look_at_class(member, turns, classes) };
    let group = groups.get_mut(bound)?;
    group.spot = group.ring.spot(turns, |member| look_at_class(member, turns, classes));
    mixed(&group.spot)
}

fn look_at_class(member: &Member, turns: &Turns, classes: &mut Map<Arc<Class>, ClassTasks>) -> Option<(u64, Rank)> {
    let Member::Class(class) = member else { return None };
    let tasks = classes.get_mut(class)?;
    tasks.spot = tasks.ring.spot(turns, |_| None);
    mixed(&tasks.spot)
}

fn mixed(spot: &Option<Spot>) -> Option<(u64, Rank)> {
    match spot {
        Some(Spot::Mixed(turn, rank)) => Some((*turn, *rank)),
        _ => None,
    }
}
