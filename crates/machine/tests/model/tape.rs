//! Random cases as a tape of bytes: every choice reads one byte, and an empty tape means the simplest choice. Shrinking
//! the tape shrinks the flow and its inputs.

pub struct Tape<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Tape<'a> {
    pub fn new(bytes: &'a [u8]) -> Tape<'a> {
        Tape { bytes, at: 0 }
    }

    pub fn is_over(&self) -> bool {
        self.at >= self.bytes.len()
    }

    pub fn byte(&mut self) -> u8 {
        let byte = self.bytes.get(self.at).copied().unwrap_or(0);
        self.at += 1;
        byte
    }

    /// A number below `n`; 0 when the tape is over.
    pub fn below(&mut self, n: usize) -> usize {
        if n < 2 { 0 } else { self.byte() as usize % n }
    }

    /// True about once in `n`; false when the tape is over.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == n - 1 && n > 1
    }

    pub fn pick<'b, T>(&mut self, from: &'b [T]) -> &'b T {
        &from[self.below(from.len())]
    }
}
