//! Task tokens: a worker sends one with every report, and it proves that the worker claimed the task.
//!
//! A token ends with a MAC under a secret of the store. Only the worker that claimed a task receives its token, so no
//! claim has to be looked up to verify a report, even after a restart or on another instance. A fence is claimed at
//! most once: whatever ends a claim (its lease, its timeout, a release) creates a new fence.

use std::fmt;
use std::str::FromStr;

use eddyline_machine::{ActId, Fence, RunId, Task};
use eddyline_store::{Document, Expect, Namespace};
use serde_json::json;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::error::{EngineError, Result};
use crate::instance::Instance;

/// The kind and id of the document with the secret, which all namespaces share.
const SECRET: &str = "secret";
const TASK_TOKENS: &str = "task-tokens";
/// The length of the truncated HMAC-SHA256 in a token: 128 bits.
const MAC_BYTES: usize = 16;
/// The block size of SHA-256, to which the key of an HMAC is padded.
const BLOCK_BYTES: usize = 64;

/// Binds a report to its run, activation, attempt and fence, and proves the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskToken {
    pub run: RunId,
    pub activation: ActId,
    pub attempt: u32,
    pub fence: Fence,
    mac: [u8; MAC_BYTES],
}

impl TaskToken {
    /// The id of the task, which is new for each attempt; timelines show it as `jobId`.
    pub fn task_id(&self) -> String {
        format!("{}.{}", self.run, self.fence)
    }
}

impl fmt::Display for TaskToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mac = u128::from_be_bytes(self.mac);
        write!(f, "{}.{}.{}.{}.{mac:032x}", self.run, self.activation, self.attempt, self.fence)
    }
}

/// The text is not a task token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a task token")]
pub struct NotAToken(String);

impl FromStr for TaskToken {
    type Err = NotAToken;

    fn from_str(text: &str) -> std::result::Result<TaskToken, NotAToken> {
        let parse = || {
            let mut parts = text.split('.');
            let token = TaskToken {
                run: RunId(Uuid::try_parse(parts.next()?).ok()?),
                activation: ActId(parts.next()?.parse().ok()?),
                attempt: parts.next()?.parse().ok()?,
                fence: Fence(parts.next()?.parse().ok()?),
                mac: parts
                    .next()
                    .filter(|mac| mac.len() == 2 * MAC_BYTES)
                    .and_then(|mac| Some(u128::from_str_radix(mac, 16).ok()?.to_be_bytes()))?,
            };
            parts.next().is_none().then_some(token)
        };
        parse().ok_or_else(|| NotAToken(text.chars().take(120).collect()))
    }
}

/// The secret of the store, read or created when it is first needed, then cached.
#[derive(Debug, Default)]
pub(crate) struct Tokens(OnceCell<TokenKey>);

impl Tokens {
    pub async fn key(&self, instance: &Instance) -> Result<&TokenKey> {
        self.0.get_or_try_init(|| TokenKey::of_store(instance)).await
    }
}

/// Issues and verifies tokens with HMAC-SHA256 (RFC 2104). Holds the hash states after both padded keys, from which
/// each MAC is computed.
pub(crate) struct TokenKey {
    inner: Sha256,
    outer: Sha256,
}

impl fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenKey")
    }
}

impl TokenKey {
    /// Instances that race to create the secret agree on one: the store accepts the first document, and all read that.
    async fn of_store(instance: &Instance) -> Result<TokenKey> {
        let ns = Namespace::default();
        if let Some(document) = instance.document(Some(&ns), SECRET, TASK_TOKENS).await? {
            return TokenKey::read(&document);
        }
        let bytes = (instance.config.chance)();
        let body = json!({ "key": bytes });
        instance.put(&ns, SECRET, TASK_TOKENS, Expect::Absent, Some(body)).await?;
        let document = instance.document(Some(&ns), SECRET, TASK_TOKENS).await?;
        document.as_ref().map_or_else(|| Err(damaged("it was deleted")), TokenKey::read)
    }

    fn read(document: &Document) -> Result<TokenKey> {
        let bytes: [u8; 32] = serde_json::from_value(document.body["key"].clone()).map_err(damaged)?;
        Ok(TokenKey::new(bytes))
    }

    fn new(key: [u8; 32]) -> TokenKey {
        let padded = |with: u8| {
            let mut block = [with; BLOCK_BYTES];
            block.iter_mut().zip(key).for_each(|(byte, of_key)| *byte ^= of_key);
            Sha256::new_with_prefix(block)
        };
        TokenKey { inner: padded(0x36), outer: padded(0x5c) }
    }

    /// The token of a task for the worker that claims it.
    pub fn token(&self, ns: &Namespace, run: RunId, task: &Task) -> TaskToken {
        let Task { activation, attempt, fence, .. } = *task;
        let mac = self.mac(ns, run, activation, attempt, fence);
        TaskToken { run, activation, attempt, fence, mac }
    }

    /// Whether the token was issued for a claim.
    pub fn verifies(&self, ns: &Namespace, token: &TaskToken) -> bool {
        let TaskToken { run, activation, attempt, fence, mac } = token;
        self.mac(ns, *run, *activation, *attempt, *fence).ct_eq(mac).into()
    }

    fn mac(&self, ns: &Namespace, run: RunId, activation: ActId, attempt: u32, fence: Fence) -> [u8; MAC_BYTES] {
        let mut inner = self.inner.clone();
        inner.update(run.0.as_bytes());
        inner.update(activation.0.to_be_bytes());
        inner.update(attempt.to_be_bytes());
        inner.update(fence.0.to_be_bytes());
        // Last, because it is the only part of variable length.
        inner.update(ns.as_str());
        self.finish(inner)
    }

    fn finish(&self, inner: Sha256) -> [u8; MAC_BYTES] {
        let hash = self.outer.clone().chain_update(inner.finalize()).finalize();
        let mut mac = [0; MAC_BYTES];
        mac.copy_from_slice(&hash[..MAC_BYTES]);
        mac
    }
}

fn damaged(why: impl fmt::Display) -> EngineError {
    EngineError::Bug(format!("could not read the secret for task tokens: {why}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn signed(key: &TokenKey, ns: &str, attempt: u32) -> TaskToken {
        let (run, activation, fence) = (RunId(Uuid::from_u128(7)), ActId(3), Fence(9));
        let mac = key.mac(&Namespace::new(ns), run, activation, attempt, fence);
        TaskToken { run, activation, attempt, fence, mac }
    }

    #[test]
    fn a_token_is_read_as_it_was_written_and_nothing_else_is() {
        let token = signed(&TokenKey::new([1; 32]), "default", 2);
        assert_eq!(token.to_string().parse(), Ok(token));
        let without_mac = "00000000-0000-0000-0000-000000000007.3.2.9";
        for text in ["", "x", without_mac, &format!("{token}.1"), &format!("{token}f"), "a.b.c.d.e"] {
            assert!(text.parse::<TaskToken>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_token_verifies_only_under_its_secret_in_its_namespace_and_unchanged() {
        let (key, ns) = (TokenKey::new([1; 32]), Namespace::default());
        let token = signed(&key, ns.as_str(), 2);
        assert!(key.verifies(&ns, &token));
        assert!(!TokenKey::new([2; 32]).verifies(&ns, &token));
        assert!(!key.verifies(&Namespace::new("other"), &token));
        let changed = [
            TaskToken { run: RunId(Uuid::from_u128(8)), ..token },
            TaskToken { activation: ActId(4), ..token },
            TaskToken { attempt: 77, ..token },
            TaskToken { fence: Fence(10), ..token },
            TaskToken { mac: [0; MAC_BYTES], ..token },
        ];
        assert!(changed.iter().all(|token| !key.verifies(&ns, token)));
    }

    /// RFC 4231, test case 2, with its key padded with zeros to the length of ours, which does not change an HMAC.
    #[test]
    fn the_mac_is_hmac_sha256() {
        let mut secret = [0; 32];
        secret[..4].copy_from_slice(b"Jefe");
        let key = TokenKey::new(secret);
        let mac = key.finish(key.inner.clone().chain_update("what do ya want for nothing?"));
        assert_eq!(u128::from_be_bytes(mac), 0x5bdc_c146_bf60_754e_6a04_2426_0895_75c7);
    }
}
