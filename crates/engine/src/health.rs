//! Whether the engine still works. A part of it that ended against all expectation is not brought back behind the user's
//! back: the engine says that it has failed, and whoever runs it ends the process.

use std::sync::Arc;

use tokio::sync::watch;

use crate::engine::Engine;

/// What [`Engine::health`] says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Working,
    /// Commits fail for now, for the reason given; the engine goes on trying.
    NotCommitting(Arc<str>),
    /// A part of the engine has ended. It does not recover: end the process and start it again.
    Failed(Arc<str>),
}

/// Where the parts of an engine say how they are. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Reports(watch::Sender<Health>);

impl Default for Reports {
    fn default() -> Reports {
        Reports(watch::Sender::new(Health::Working))
    }
}

impl Reports {
    /// A part of the engine has ended. The first failure is kept: the others may follow from it.
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

    /// What became of the last commit.
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
    /// How the engine is, as far as it knows without asking the store.
    pub fn health(&self) -> Health {
        self.health.now()
    }

    /// Says that the engine is of no use any more, because something around it has ended: what accepts requests, for one.
    pub fn report_failure(&self, why: &str) {
        self.health.failed(why);
    }

    /// Returns when the engine has failed, with the reason. The engine never ends the process by itself: whoever runs it
    /// does so then, with an exit code that says so.
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
