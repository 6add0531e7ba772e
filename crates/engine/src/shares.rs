//! How many due items of each namespace one loop has under way. A namespace that has its share is skipped until half of
//! its items are done, so that one namespace with much to do leaves room for the others. Large items count for several.

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
    /// Items of one namespace that weigh at most `most`, and the batch with which it got there.
    pub fn of(most: usize) -> Shares {
        Shares { most: most.max(1), under_way: Map::default(), skipped: Vec::new() }
    }

    pub fn begin(&mut self, ns: &Namespace, weight: usize) {
        match self.under_way.get_mut(ns) {
            Some(items) => *items += weight,
            None => drop(self.under_way.insert(ns.clone(), weight)),
        }
    }

    /// True if the namespace was skipped and no longer is: the store may have more of its items.
    pub fn end(&mut self, ns: &Namespace, weight: usize) -> bool {
        let Some(items) = self.under_way.get_mut(ns) else { return false };
        *items = items.saturating_sub(weight);
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
        shares.begin(&quiet, 1);
        for _ in 0..3 {
            shares.begin(&busy, 1);
        }
        assert!(shares.skip().is_empty());
        // The rest of a batch is taken, though the share is reached on the way.
        for _ in 0..3 {
            shares.begin(&busy, 1);
        }
        assert_eq!(shares.skip(), std::slice::from_ref(&busy));
        let room: Vec<bool> = (0..6).map(|_| shares.end(&busy, 1)).collect();
        assert_eq!(room, [false, false, false, true, false, false]);
        assert!(!shares.end(&quiet, 1) && shares.skip().is_empty());
        shares.begin(&busy, 4);
        assert_eq!(shares.skip(), std::slice::from_ref(&busy), "one that is large is enough");
        assert!(shares.end(&busy, 4) && shares.skip().is_empty());
    }
}
