//! Reproducible random choices: the same seed gives the same ones.

use serde_json::{Value, json};

/// The most bytes of a list, as JSON.
const LARGEST: usize = 4 << 20;

#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// SplitMix64.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 up to `bound`, exclusive.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Any JSON, sometimes a large one.
    pub fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 8 }) {
            0 => json!(null),
            1 => json!(self.one_in(2)),
            2 => json!(self.below(1_000_000)),
            3 => json!(self.below(1_000) as f64 / 7.0),
            4 => json!(self.text()),
            5 | 6 => {
                let count = if self.one_in(20) { 500 } else { self.below(5) };
                let item = self.value(depth - 1);
                // Lists of lists of long texts would take gigabytes here, and are refused above 2 MiB anyway.
                let count = count.min(LARGEST / item.to_string().len());
                Value::Array((0..count).map(|_| item.clone()).collect())
            }
            _ => (0..self.below(5)).map(|at| (format!("k{at}"), self.value(depth - 1))).collect(),
        }
    }

    fn text(&mut self) -> String {
        let length = if self.one_in(30) { 100_000 } else { self.below(40) };
        self.pick(&["a", "ab,", "é", "0"]).repeat(length)
    }

    /// The input of a run, with the fields that the expressions read.
    pub fn input(&mut self) -> Value {
        let large = self.one_in(8);
        let s = "ab,".repeat(if large { 200_000 } else { self.below(50) });
        let l: Vec<Value> = (0..if large { 2_000 } else { self.below(20) }).map(|n| json!(n)).collect();
        let keys = if large { 200 } else { self.below(10) };
        let m: Value = (0..keys).map(|at| (format!("a-name-of-a-key-{at}"), json!(at))).collect();
        json!({"s": s, "l": l, "m": m, "n": self.below(100), "x": self.value(3)})
    }
}
