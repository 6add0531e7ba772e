//! Rows and checksums by table, independent of the order of the rows.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use sha2::{Digest, Sha256};

use super::row::{Row, Table};

/// The rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    pub rows: u64,
    /// The sum of the hashes of all rows.
    pub checksum: u128,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sums(BTreeMap<Table, Sum>);

impl Sums {
    pub fn of(&self, table: Table) -> Sum {
        self.0.get(&table).copied().unwrap_or_default()
    }

    pub fn rows(&self) -> u64 {
        self.0.values().map(|sum| sum.rows).sum()
    }

    pub fn add(&mut self, rows: &[Row]) {
        for row in rows {
            let sum = self.0.entry(row.table()).or_default();
            sum.rows += 1;
            sum.checksum = sum.checksum.wrapping_add(hash(row));
        }
    }
}

fn hash(row: &Row) -> u128 {
    let mut hasher = Sha(Sha256::new());
    row.hash(&mut hasher);
    let digest = hasher.0.finalize();
    u128::from_le_bytes(std::array::from_fn(|at| digest[at]))
}

struct Sha(Sha256);

impl Hasher for Sha {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Required by the trait; only the whole digest is used.
    fn finish(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn sums_do_not_depend_on_the_order_and_notice_any_change() {
        let row = |n: u128, at| Row::Command { id: Uuid::from_u128(n), at };
        let sums = |rows: &[Row]| {
            let mut sums = Sums::default();
            sums.add(rows);
            sums
        };
        let both = sums(&[row(1, 5), row(2, 5)]);
        assert_eq!(both, sums(&[row(2, 5), row(1, 5)]));
        assert_eq!((both.rows(), both.of(Table::Commands).rows, both.of(Table::Runs)), (2, 2, Sum::default()));
        assert_ne!(both, sums(&[row(1, 5), row(2, 6)]));
        assert_ne!(both, sums(&[row(1, 5), row(2, 5), row(2, 5)]));
        assert_ne!(sums(&[row(1, 5), row(1, 5)]), sums(&[row(2, 5), row(2, 5)]));
    }
}
