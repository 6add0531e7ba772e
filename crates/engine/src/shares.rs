//! How many due items of each namespace one loop has under way. A namespace that has its share is skipped until half of
//! its items are done, so that one namespace with much to do leaves room for the others.

use eddyline_store::{Map, Namespace};

/// The due items that a loop has under way, counted by namespace.
#[derive(Debug)]
pub(crate) struct Shares {
    most: usize,
    under_way: Map<Namespace, usize>,
    /// Those that had their share when the store was last asked, and still have more than half of it.
    skipped: Vec<Namespace>,
}

impl Shares {
    /// At most `most` items of one namespace, and the batch with which it got there.
    pub fn of(most: usize) -> Shares {
        Shares { most: most.max(1), under_way: Map::default(), skipped: Vec::new() }
    }

    pub fn begin(&mut self, ns: &Namespace) {
        match self.under_way.get_mut(ns) {
            Some(items) => *items += 1,
            None => drop(self.under_way.insert(ns.clone(), 1)),
        }
    }

    /// True if the namespace was skipped and no longer is: the store may have more of its items.
    pub fn end(&mut self, ns: &Namespace) -> bool {
        let Some(items) = self.under_way.get_mut(ns) else { return false };
        *items -= 1;
        let left = *items;
        if left == 0 {
            self.under_way.remove(ns);
        }
        match self.skipped.iter().position(|skipped| skipped == ns) {
            Some(at) if left <= self.most / 2 => {
                self.skipped.swap_remove(at);
                true
            }
            _ => false,
        }
    }

    /// The namespaces to skip when the store is asked for more.
    pub fn skip(&mut self) -> &[Namespace] {
        for (ns, items) in &self.under_way {
            if *items >= self.most && !self.skipped.contains(ns) {
                self.skipped.push(ns.clone());
            }
        }
        &self.skipped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_skipped_from_its_share_on_until_half_of_it_is_done() {
        let (busy, quiet) = (Namespace::new("busy"), Namespace::new("quiet"));
        let mut shares = Shares::of(4);
        shares.begin(&quiet);
        for _ in 0..3 {
            shares.begin(&busy);
        }
        assert!(shares.skip().is_empty());
        // The rest of a batch is taken, though the share is reached on the way.
        for _ in 0..3 {
            shares.begin(&busy);
        }
        assert_eq!(shares.skip(), std::slice::from_ref(&busy));
        let room: Vec<bool> = (0..6).map(|_| shares.end(&busy)).collect();
        assert_eq!(room, [false, false, false, true, false, false]);
        assert!(!shares.end(&quiet) && shares.skip().is_empty());
    }
}
