//! Keys: creates, checks, caches and watches them.
//!
//! A key is `eddy_<id>_<secret>`; the id finds its document, which has the SHA-256 of the whole key. The secret has 256
//! bits. A socket or a long poll outlives the check of its key, so it watches the key: one loop checks all watched keys
//! twice a second, however many connections use them, and as soon as it is told that a key was changed. The same loop
//! reads which namespaces are disabled.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use eddyline_engine::{Engine, KeyRecord};
use eddyline_machine::Millis;
use eddyline_protocol::Scope;
use eddyline_store::Namespace;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::sync::{Notify, watch};

use super::failure::Failure;
use super::{Api, stopped};

const PREFIX: &str = "eddy_";
/// How long a key is cached; bounds how long a revoked key still works on other instances.
const REMEMBERED: Duration = Duration::from_millis(500);
/// How often watched keys are checked: a key that was revoked elsewhere or has expired is noticed within a second.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The maximum number of cached keys.
const MAX_CACHED: usize = 10_000;
const ID_BYTES: usize = 8;
/// The minimum length of a key that the user chose.
const SHORTEST_GIVEN: usize = 32;

/// A stored key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub id: String,
    pub ns: Namespace,
    pub name: String,
    pub scopes: Vec<Scope>,
    expires_at: Option<Millis>,
    hash: String,
}

pub(crate) struct Keyring {
    engine: Engine,
    remembered: Mutex<HashMap<String, (Instant, Key)>>,
    watched: Mutex<HashMap<String, Watched>>,
    /// Wakes the loop that checks keys.
    look: Notify,
    disabled: watch::Sender<Disabled>,
}

/// The disabled namespaces.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disabled {
    names: Arc<BTreeSet<Namespace>>,
    /// [`Engine::keys_changed`] when they were read.
    read_at: Option<u64>,
}

impl Disabled {
    pub fn contains(&self, ns: &Namespace) -> bool {
        self.names.contains(ns)
    }
}

/// A watched key in its current state; `None` once it is no longer valid.
struct Watched {
    key: watch::Sender<Option<Key>>,
    /// [`Engine::keys_changed`] when it was read.
    read_at: Option<u64>,
}

impl Keyring {
    pub fn new(engine: Engine) -> Keyring {
        let disabled = watch::Sender::new(Disabled::default());
        Keyring { engine, remembered: Mutex::default(), watched: Mutex::default(), look: Notify::new(), disabled }
    }

    /// The disabled namespaces, as of at most a second ago.
    pub fn disabled(&self) -> watch::Receiver<Disabled> {
        self.disabled.subscribe()
    }

    pub fn is_disabled(&self, ns: &Namespace) -> bool {
        self.disabled.borrow().contains(ns)
    }

    /// Reads which namespaces are disabled, unless nothing has changed since the last read.
    pub async fn look_at_disabled(&self) -> eddyline_engine::Result<()> {
        let read_at = self.engine.keys_changed();
        if read_at.is_some() && self.disabled.borrow().read_at == read_at {
            return Ok(());
        }
        let names = Arc::new(self.engine.disabled_namespaces().await?);
        self.disabled.send_if_modified(|disabled| {
            let changed = disabled.names != names;
            *disabled = Disabled { names, read_at };
            changed
        });
        Ok(())
    }

    /// The key, if it is valid.
    pub async fn find(&self, written: &str) -> Result<Option<Key>, Failure> {
        let id = id_of(written);
        let key = match self.recall(&id) {
            Some(key) => key,
            None => {
                let Some(key) = self.engine.key(&id).await?.map(Key::from) else { return Ok(None) };
                self.remember(id, key.clone());
                key
            }
        };
        if !bool::from(hash(written).as_bytes().ct_eq(key.hash.as_bytes())) {
            return Ok(None);
        }
        let expired = key.expires_at.is_some() && key.has_expired(self.engine.now().await?);
        Ok((!expired).then_some(key))
    }

    /// Evicts a changed key from the cache and notifies its watchers.
    pub fn forget(&self, id: &str) {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        if let Some(watched) = self.watched().get_mut(id) {
            watched.read_at = None;
        }
        self.look.notify_one();
    }

    /// Evicts all keys from the cache: some were changed, perhaps by another instance.
    fn forget_all(&self) {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.watched().values_mut().for_each(|watched| watched.read_at = None);
    }

    /// Watches a key as long as the receiver exists.
    pub fn watch(&self, key: &Key) -> watch::Receiver<Option<Key>> {
        let mut watched = self.watched();
        if watched.is_empty() {
            self.look.notify_one();
        }
        // The key may come from the cache, so the next check reads it again.
        let unread = || Watched { key: watch::Sender::new(Some(key.clone())), read_at: None };
        watched.entry(key.id.clone()).or_insert_with(unread).key.subscribe()
    }

    /// Checks all watched keys.
    async fn look_at_watched(&self) -> Result<(), Failure> {
        let changed = self.engine.keys_changed();
        let ids: Vec<(String, bool)> = {
            let mut watched = self.watched();
            watched.retain(|_, watched| watched.key.receiver_count() > 0);
            let is_read = |watched: &Watched| changed.is_some() && watched.read_at == changed;
            watched.iter().map(|(id, watched)| (id.clone(), is_read(watched))).collect()
        };
        if ids.is_empty() {
            return Ok(());
        }
        let now = self.engine.now().await?;
        for (id, is_read) in ids {
            let read = if is_read { None } else { Some(self.engine.key(&id).await?.map(Key::from)) };
            let mut watched = self.watched();
            let Some(watched) = watched.get_mut(&id) else { continue };
            if read.is_some() {
                watched.read_at = changed;
            }
            let changed = watched.key.send_if_modified(|key| {
                let before = key.take();
                *key = read.unwrap_or_else(|| before.clone()).filter(|key| !key.has_expired(now));
                *key != before
            });
            if changed {
                self.remembered.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
            }
        }
        Ok(())
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<String, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recall(&self, id: &str) -> Option<Key> {
        let remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.get(id).filter(|(since, _)| since.elapsed() < REMEMBERED).map(|(_, key)| key.clone())
    }

    fn remember(&self, id: String, key: Key) {
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() >= MAX_CACHED {
            remembered.clear();
        }
        remembered.insert(id, (Instant::now(), key));
    }
}

impl From<KeyRecord> for Key {
    fn from(record: KeyRecord) -> Key {
        let scopes = record.scopes.iter().filter_map(|name| Scope::named(name)).collect();
        let KeyRecord { id, ns, name, expires_at, hash, .. } = record;
        Key { id, ns, name, scopes, expires_at, hash }
    }
}

impl Key {
    /// Whether this is still the same key; its scopes may have changed.
    pub fn is_same(&self, before: &Key) -> bool {
        self.ns == before.ns && self.hash == before.hash
    }

    fn has_expired(&self, now: Millis) -> bool {
        self.expires_at.is_some_and(|at| now >= at)
    }
}

/// Checks watched keys and disabled namespaces until the server stops.
pub(crate) async fn keep_watch(api: Api, mut stopping: watch::Receiver<bool>) {
    let keyring = api.keyring();
    let mut changes = api.engine().access_changes();
    let looking = async {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = keyring.look.notified() => {}
                // The sender lives as long as the engine, which this holds.
                _ = changes.changed() => keyring.forget_all(),
            }
            // While the store cannot be read, no request gets through either; the next round tries again.
            let _ = keyring.look_at_watched().await;
            let _ = keyring.look_at_disabled().await;
        }
    };
    tokio::select! {
        () = looking => {}
        () = stopped(&mut stopping) => {}
    }
}

/// A new key, and its record for the store.
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

/// The record of a key that the user chose, or why the key is not accepted.
pub(crate) fn given(key: &str, now: Millis) -> Result<KeyRecord, String> {
    if key.len() < SHORTEST_GIVEN {
        return Err(format!("the admin key has {} characters: expected at least {SHORTEST_GIVEN}", key.len()));
    }
    if !key.chars().all(|c| c.is_ascii() && !c.is_ascii_control()) {
        return Err("the admin key has a control or non-ASCII character, which no request header can contain".into());
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
    let scopes = scopes.iter().map(|scope| scope.as_str().to_owned()).collect();
    KeyRecord { id: id_of(key), name, ns, scopes, hash: hash(key), created_at, expires_at }
}

/// Generated keys contain their id; the id of other keys is derived.
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
