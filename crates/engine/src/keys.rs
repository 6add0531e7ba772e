//! Storage of API keys. The server decides what a key allows.

use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::{Expect, Namespace};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// The kind of documents that hold keys, by id.
pub(crate) const KEY: &str = "key";

/// A stored key. It contains only the hash of the secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRecord {
    pub id: String,
    /// A label for people.
    pub name: String,
    pub ns: Namespace,
    pub scopes: Vec<String>,
    /// SHA-256 of the key, in hex.
    pub hash: String,
    pub created_at: Millis,
    pub expires_at: Option<Millis>,
}

impl Engine {
    /// The store's clock.
    pub async fn now(&self) -> Result<Millis> {
        Ok(self.instance.store.now().await?)
    }

    /// How long the store has finished no commit although one is in flight.
    pub fn silence_of_store(&self) -> Duration {
        self.bus.silence()
    }

    /// A number that changes with each change of a key, if the store has one. While it stays the same, cached keys are
    /// current, or were a second ago if other instances can change them.
    pub fn keys_changed(&self) -> Option<u64> {
        self.instance.store.documents_seen()
    }

    /// Changes when keys were changed, or namespaces disabled or enabled, by any instance. A hint: it may be late.
    pub fn access_changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.bus.access_changes()
    }

    /// Whether the store accepts commits.
    pub async fn store_health(&self) -> Result<()> {
        Ok(self.instance.store.health().await?)
    }

    /// Until when retention deletes nothing because the store's clock jumped.
    pub async fn deletion_waits(&self) -> Result<Option<Millis>> {
        Ok(self.instance.store.deletion_waits().await?)
    }

    /// A key by its id, in any namespace.
    pub async fn key(&self, id: &str) -> Result<Option<KeyRecord>> {
        let document = self.instance.document(None, KEY, id).await?;
        document.map(|document| serde_json::from_value(document.body).map_err(damaged)).transpose()
    }

    pub async fn keys(&self, ns: &Namespace) -> Result<Vec<KeyRecord>> {
        let documents = self.instance.all_documents(ns, KEY).await?;
        documents.into_iter().map(|document| serde_json::from_value(document.body).map_err(damaged)).collect()
    }

    /// Stores a new key; false if its id exists.
    pub async fn add_key(&self, key: &KeyRecord) -> Result<bool> {
        self.instance.put(&key.ns, KEY, &key.id, Expect::Absent, Some(json!(key))).await
    }

    pub async fn delete_key(&self, ns: &Namespace, id: &str) -> Result<()> {
        if self.instance.document(Some(ns), KEY, id).await?.is_none() {
            return Err(EngineError::NotFound { what: "key", id: id.to_owned() });
        }
        self.instance.put(ns, KEY, id, Expect::Any, None).await?;
        Ok(())
    }
}

fn damaged(error: serde_json::Error) -> EngineError {
    EngineError::Bug(format!("a key is damaged: {error}"))
}
