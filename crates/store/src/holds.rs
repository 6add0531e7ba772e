//! Due items that were handed out and not yet consumed: no other caller gets them until the hold expires.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::{Fence, Message, Millis, RunId, TimerKey};

use crate::document::DocumentKey;
use crate::ids::{Map, Namespace};

/// How long a due item is reserved for the caller who got it.
pub const HOLD_MS: Millis = 10_000;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Item {
    Timer(RunId, TimerKey, Millis),
    Lease(RunId, Fence),
    Document(Namespace, DocumentKey, u64),
}

#[derive(Debug, Default)]
pub(crate) struct Holds {
    until: Map<Item, Millis>,
    by_end: BTreeSet<(Millis, Item)>,
    messages: BTreeMap<RunId, (Millis, BTreeSet<String>)>,
}

impl Holds {
    /// Holds the item; false if it is already held.
    pub fn take(&mut self, item: Item, now: Millis) -> bool {
        if self.is_held(&item, now) {
            return false;
        }
        self.until.insert(item.clone(), now + HOLD_MS);
        self.by_end.insert((now + HOLD_MS, item));
        true
    }

    pub fn is_held(&self, item: &Item, now: Millis) -> bool {
        self.until.get(item).is_some_and(|until| *until > now)
    }

    /// Holds the messages to a run together, so that they are delivered in order; false if they are already held.
    pub fn take_messages(&mut self, to: RunId, messages: &[Message], now: Millis) -> bool {
        if self.messages_held(to, now) {
            return false;
        }
        let ids = messages.iter().map(|message| message.id.clone()).collect();
        self.messages.insert(to, (now + HOLD_MS, ids));
        true
    }

    pub fn messages_held(&self, to: RunId, now: Millis) -> bool {
        self.messages.get(&to).is_some_and(|(until, _)| *until > now)
    }

    /// The number of held items, without messages.
    pub fn len(&self) -> usize {
        self.until.len()
    }

    /// Releases a consumed item.
    pub fn drop_item(&mut self, item: &Item) {
        if let Some(until) = self.until.remove(item) {
            self.by_end.remove(&(until, item.clone()));
        }
    }

    pub fn drop_message(&mut self, to: RunId, id: &str) {
        if let Some((_, ids)) = self.messages.get_mut(&to) {
            ids.remove(id);
            if ids.is_empty() {
                self.messages.remove(&to);
            }
        }
    }

    /// When the first hold expires and its item is due again.
    pub fn next_end(&self) -> Option<Millis> {
        let items = self.by_end.first().map(|(until, _)| *until);
        let messages = self.messages.values().map(|(until, _)| *until).min();
        items.into_iter().chain(messages).min()
    }

    pub fn expire(&mut self, now: Millis) {
        while let Some((until, _)) = self.by_end.first()
            && *until <= now
            && let Some((_, item)) = self.by_end.pop_first()
        {
            self.until.remove(&item);
        }
        self.messages.retain(|_, (until, _)| *until > now);
    }
}

/// How long until an item is due or a hold expires.
pub(crate) fn next_in(next: Option<Millis>, now: Millis, holds: &Holds) -> Option<Millis> {
    next.into_iter().chain(holds.next_end()).min().map(|at| (at - now).max(0))
}
