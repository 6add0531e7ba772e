//! Whether the engine works. A part that ended unexpectedly is not restarted silently: the engine reports that it has
//! failed, and its owner ends the process.

use std::sync::Arc;

use tokio::sync::watch;

use crate::engine::Engine;

/// The result of [`Engine::health`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Working,
    /// Commits fail for the given reason; the engine keeps trying.
    NotCommitting(Arc<str>),
    /// A part of the engine has ended. It does not recover: end the process and start it again.
    Failed(Arc<str>),
}

/// Where the parts of an engine report their health. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Reports(watch::Sender<Health>);

impl Default for Reports {
    fn default() -> Reports {
        Reports(watch::Sender::new(Health::Working))
    }
}

impl Reports {
    /// A part of the engine has ended. The first failure is kept: later ones may follow from it.
    pub fn failed(&self, why: &str) {
        tracing::error!("the engine has failed: {why}");
        self.0.send_if_modified(|health| {
            let first = !matches!(health, Health::Failed(_));
            if first {
                *health = Health::Failed(why.into());
            }
            first
        });
    }

    /// Reports whether the last commit succeeded.
    pub fn committed(&self, error: Option<&dyn std::fmt::Display>) {
        let now = error.map_or(Health::Working, |error| Health::NotCommitting(error.to_string().into()));
        if *self.0.borrow() == now {
            return;
        }
        self.0.send_if_modified(|health| match health {
            Health::Failed(_) => false,
            _ => std::mem::replace(health, now.clone()) != now,
        });
    }

    pub fn now(&self) -> Health {
        self.0.borrow().clone()
    }
}

impl Engine {
    /// The health of the engine, without asking the store.
    pub fn health(&self) -> Health {
        self.health.now()
    }

    /// Marks the engine as failed because something around it has ended, such as the listener for requests.
    pub fn report_failure(&self, why: &str) {
        self.health.failed(why);
    }

    /// Returns when the engine has failed, with the reason. The engine never ends the process itself; its owner should
    /// then do so, with an exit code that says so.
    pub async fn failed(&self) -> Arc<str> {
        let mut health = self.health.0.subscribe();
        loop {
            if let Health::Failed(why) = &*health.borrow_and_update() {
                return why.clone();
            }
            if health.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}
