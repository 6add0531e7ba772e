//! Keys: made, recognised, remembered for a moment.
//!
//! A key is `eddy_<id>_<secret>`; the id finds its document, which has the SHA-256 of the whole. The secret has 256 bits.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use eddyline_engine::{Engine, KeyRecord};
use eddyline_machine::Millis;
use eddyline_protocol::Scope;
use eddyline_store::Namespace;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::failure::Failure;

const PREFIX: &str = "eddy_";
/// What is known of a key is asked again after this long, so that revoking it takes effect everywhere.
const REMEMBERED: Duration = Duration::from_millis(500);
/// Keys that are remembered at a time.
const AT_HAND: usize = 10_000;
const ID_BYTES: usize = 8;
/// A key of the user's own making has at least this many characters.
const SHORTEST_GIVEN: usize = 32;

/// What a key opens.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    pub ns: Namespace,
    pub name: String,
    pub scopes: Vec<Scope>,
    expires_at: Option<Millis>,
    hash: String,
}

pub(crate) struct Keyring {
    engine: Engine,
    remembered: Mutex<HashMap<String, (Instant, Key)>>,
}

impl Keyring {
    pub fn new(engine: Engine) -> Keyring {
        Keyring { engine, remembered: Mutex::default() }
    }

    /// The key, if it is one that is good.
    pub async fn find(&self, written: &str) -> Result<Option<Key>, Failure> {
        let id = id_of(written);
        let key = match self.recall(&id) {
            Some(key) => key,
            None => {
                let Some(record) = self.engine.key(&id).await? else { return Ok(None) };
                let key = Key {
                    ns: record.ns,
                    name: record.name,
                    scopes: record.scopes.iter().filter_map(|word| scope(word)).collect(),
                    expires_at: record.expires_at,
                    hash: record.hash,
                };
                self.remember(id, key.clone());
                key
            }
        };
        if !bool::from(hash(written).as_bytes().ct_eq(key.hash.as_bytes())) {
            return Ok(None);
        }
        let good = match key.expires_at {
            Some(at) => self.engine.now().await? < at,
            None => true,
        };
        Ok(good.then_some(key))
    }

    /// The key is no longer what it was.
    pub fn forget(&self, id: &str) {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    fn recall(&self, id: &str) -> Option<Key> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.get(id).filter(|(since, _)| since.elapsed() < REMEMBERED).map(|(_, key)| key.clone())
    }

    fn remember(&self, id: String, key: Key) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() >= AT_HAND {
            remembered.clear();
        }
        remembered.insert(id, (Instant::now(), key));
    }
}

/// A new key, and what is kept of it.
pub(crate) fn make(
    engine: &Engine,
    ns: Namespace,
    name: String,
    scopes: &[Scope],
    now: Millis,
    expires_at: Option<Millis>,
) -> (String, KeyRecord) {
    let chance = &engine.config().chance;
    let key = format!("{PREFIX}{}_{}", hex(&chance()[..ID_BYTES]), hex(&chance()));
    let record = record(&key, ns, name, scopes, now, expires_at);
    (key, record)
}

/// What is kept of a key that was given; what is wrong with it.
pub(crate) fn given(key: &str, now: Millis) -> Result<KeyRecord, String> {
    if key.len() < SHORTEST_GIVEN {
        return Err(format!("the admin key has {} characters; at least {SHORTEST_GIVEN} are needed", key.len()));
    }
    if !key.chars().all(|c| c.is_ascii() && !c.is_ascii_control()) {
        return Err(
            "the admin key has a letter outside of ASCII, or a control character: no request could show it".into()
        );
    }
    Ok(record(key, Namespace::default(), "admin".to_owned(), &[Scope::Admin], now, None))
}

fn record(
    key: &str,
    ns: Namespace,
    name: String,
    scopes: &[Scope],
    created_at: Millis,
    expires_at: Option<Millis>,
) -> KeyRecord {
    let scopes = scopes.iter().map(|scope| word(*scope).to_owned()).collect();
    KeyRecord { id: id_of(key), name, ns, scopes, hash: hash(key), created_at, expires_at }
}

/// The id is part of a key that was made here; of one that was given it is derived.
fn id_of(key: &str) -> String {
    let made = key.strip_prefix(PREFIX).and_then(|rest| rest.split_once('_')).map(|(id, _)| id);
    match made {
        Some(id) if id.len() == 2 * ID_BYTES && id.bytes().all(|byte| byte.is_ascii_hexdigit()) => id.to_owned(),
        _ => hex(&Sha256::digest(format!("id:{key}"))[..ID_BYTES]),
    }
}

fn hash(key: &str) -> String {
    hex(&Sha256::digest(key))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

pub(super) fn scope(word: &str) -> Option<Scope> {
    Scope::ALL.into_iter().find(|scope| self::word(*scope) == word)
}

pub(super) fn word(scope: Scope) -> &'static str {
    match scope {
        Scope::Read => "read",
        Scope::Start => "start",
        Scope::Signal => "signal",
        Scope::Worker => "worker",
        Scope::Admin => "admin",
    }
}
