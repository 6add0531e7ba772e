//! Newtypes for ids, so that an activation id cannot be passed as a fence.

use std::fmt;

use eddyline_language::number;
pub use eddyline_language::{Millis, ScopeId, StepId, ValueId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use uuid::Uuid;

number!(
    /// An activation of a run, numbered densely from 0 in creation order; 0 is the root (of a code run, its function).
    ActId(u32)
);
number!(
    /// A fencing token: grows with every task of a run. A report counts only if it carries the fence of the current
    /// task.
    Fence(u64)
);
number!(
    /// The version of a run: grows by one with each commit.
    Version(u64)
);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub Uuid);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl RunId {
    /// The id of the run that `cause` in this run starts. The same cause gives the same id, so repeating it is a no-op.
    pub fn derive(self, cause: &str) -> RunId {
        let hash = Sha256::new().chain_update(self.0.as_bytes()).chain_update(cause.as_bytes()).finalize();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash[..16]);
        // Keep the parent's leading time bits, so that derived ids sort near the parent's.
        bytes[..6].copy_from_slice(&self.0.as_bytes()[..6]);
        RunId(uuid::Builder::from_custom_bytes(bytes).into_uuid())
    }
}

/// A deterministic random generator: the seed comes with the inputs and is expanded with a counter.
#[derive(Debug, Clone)]
pub(crate) struct Chance {
    seed: [u8; 32],
    drawn: u32,
}

impl Chance {
    pub(crate) fn new(seed: [u8; 32]) -> Self {
        Chance { seed, drawn: 0 }
    }

    /// 256 random bits as 64 hex digits.
    pub(crate) fn token(&mut self) -> String {
        use std::fmt::Write;
        self.bytes().iter().fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    }

    /// A number in `0.0..1.0`.
    pub(crate) fn fraction(&mut self) -> f64 {
        let bytes = self.bytes();
        let mut head = [0; 8];
        head.copy_from_slice(&bytes[..8]);
        (u64::from_le_bytes(head) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn bytes(&mut self) -> [u8; 32] {
        self.drawn += 1;
        Sha256::new().chain_update(self.seed).chain_update(self.drawn.to_le_bytes()).finalize().into()
    }
}
