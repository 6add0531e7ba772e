//! Counts the due items of each namespace that a loop has in progress. A namespace that has reached its share is
//! skipped until half of its items are done, so that a busy namespace leaves room for the others. Large items count for
//! several.

use eddyline_store::{Map, Namespace};

/// The due items that a loop has in progress, counted by namespace.
#[derive(Debug)]
pub(crate) struct Shares {
    most: usize,
    under_way: Map<Namespace, usize>,
    /// Namespaces that had reached their share when the store was last asked, and still have more than half of it.
    skipped: Vec<Namespace>,
}

impl Shares {
    /// `most` is the weight from which on a namespace is skipped; its last batch may exceed that.
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
        // The rest of a batch is taken even when it exceeds the share.
        for _ in 0..3 {
            shares.begin(&busy, 1);
        }
        assert_eq!(shares.skip(), std::slice::from_ref(&busy));
        let room: Vec<bool> = (0..6).map(|_| shares.end(&busy, 1)).collect();
        assert_eq!(room, [false, false, false, true, false, false]);
        assert!(!shares.end(&quiet, 1) && shares.skip().is_empty());
        shares.begin(&busy, 4);
        assert_eq!(shares.skip(), std::slice::from_ref(&busy), "one large item fills the share");
        assert!(shares.end(&busy, 4) && shares.skip().is_empty());
    }
}
